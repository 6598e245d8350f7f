"""The best of a text's values within so many characters, put under their labels.

    error line; id=A1,A2,A3 title="two words" src/main.c buildDir

Values of one label stand side by side, each verbatim, in the order of the text; what has no label stands
alone. Where a value holds a space or a comma it is put between quotation marks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

from proxy.textscan.atoms import occurs
from proxy.textscan.candidates import Candidate, candidates_of
from proxy.textscan.readable import CUT, ends_of, readable

_NEAR: Final = 100
"""After so many characters of values their label is said again, so that it stands near each of them."""
_LEAST: Final = 4
"""With fewer characters left, nothing more is looked for, nor an error line."""
_ERROR_SHARE: Final = 2
"""An error line takes up at most this part (a half) of the characters."""
_ERROR_BEGINS: Final = 60
"""Characters of its line before the word that tells an error."""

_ERROR: Final = re.compile(
    r"(?<![\w-])(?:\w{0,60}(?:Error|Exception)|error|ERROR|fatal|FATAL|panic|FAILED|FAIL|Traceback)(?![\w-])"
    r"(?=[^\n:]{0,40}:)(?!\()"
)
_ALARMS: Final = ("rror", "xception", "ERROR", "fatal", "FATAL", "panic", "FAIL", "Traceback")
"""Of these every error line holds one: a text without them need not be looked at more closely."""
_FEW: Final = 20
"""So many places of a text are looked at one by one."""
_WORD_LONGEST: Final = 80
"""Characters of a word before an alarm that are looked at: no word that tells an error has so many."""
_PROGRAM: Final = re.compile(
    r"[{}=;\"'`]|\b(?:new|throw|catch|raise|except|return|import|class|def|function)\b"
)
_TO_QUOTE: Final = re.compile(r"[\s,]")
_RUNS: Final = re.compile(r"[^\s\"'`<>()\[\]{},;|\\]+")
_JOINTS: Final = re.compile(r"[./:@?=&#-]+")
_EDGES: Final = ".:!?"


def digest_of(text: str, budget: int, known: Collection[str] = frozenset()) -> str:
    """Return the values of a text that a later step is most likely to need, in at most `budget` characters.

    Args:
        text: Any text: JSON, a page, a log, a program, prose.
        budget: Characters that may be returned; with 0 nothing is.
        known: Words that stand elsewhere anyway (`words_of`), and need not be said again.
    """
    if budget <= 0:
        return ""
    error = _error_line(text, budget // _ERROR_SHARE)
    start = f"{error}; " if error else ""
    chosen = _chosen(text, known, error, budget - len(start))
    values = _rendered(chosen)
    while len(start) + len(values) > budget:
        chosen.pop()
        values = _rendered(chosen)
    return start + values if values else error


def words_of(text: str) -> set[str]:
    """Return the words of a text and their parts (of a path its names), as `digest_of` looks them up."""
    words: set[str] = set()
    for run in set(_RUNS.findall(readable(text))):
        if run.isalnum():
            words.add(run)
            continue
        word = run.strip(_EDGES)
        words.add(word)
        if _JOINTS.search(word):
            words.update(_JOINTS.split(word))
    return words


def _error_line(text: str, most: int) -> str:
    """Return the first line that tells an error, cut where it is longer than `most`; else nothing."""
    if most < _LEAST:
        return ""
    text = ends_of(text)
    for start in _errors(text):
        line_start = text.rfind("\n", 0, start) + 1
        if start - line_start <= _ERROR_BEGINS and not _PROGRAM.search(text, line_start, start):
            line = text[line_start:].partition("\n")[0].strip()
            return line if len(line) <= most else _cut(line, most)
    return ""


def _errors(text: str) -> Iterable[int]:
    """Return where the words begin that tell an error."""
    alarms = [alarm for alarm in _ALARMS if alarm in text]
    if sum(map(text.count, alarms)) > _FEW:
        return (found.start() for found in _ERROR.finditer(text))
    # To look at the few places is a tenth of the time. A word begins where its letters do.
    places = {_word_start(text, found.start()) for alarm in alarms for found in re.finditer(alarm, text)}
    return (place for place in sorted(places) if _ERROR.match(text, place))


def _word_start(text: str, place: int) -> int:
    """Return where the word begins that has a letter at `place`; of a very long one, any place inside."""
    first = max(0, place - _WORD_LONGEST)
    while place > first and (text[place - 1].isalnum() or text[place - 1] == "_"):
        place -= 1
    return place


def _cut(line: str, most: int) -> str:
    """Return the beginning of a line that is too long, cut where a word ends if there is such a place."""
    beginning, space, _ = line[:most].rpartition(" ")
    return f"{beginning.rstrip(CUT) if space else line[: most - 1]}{CUT}"


def _chosen(text: str, known: Collection[str], error: str, budget: int) -> list[Candidate]:
    """Return the values worth most for their length that fit into the budget, the best first."""
    chosen: list[Candidate] = []
    labels: set[str] = set()
    said = error
    for candidate in candidates_of(text):
        value, label = candidate.text, candidate.label
        if len(value) > budget or _is_known(value, known):
            continue
        cost = len(_shown(value)) + 1 + (len(label) + 1 if label and label not in labels else 0)
        if cost > budget + 1 or (value in said and occurs(value, said)):
            continue
        chosen.append(candidate)
        labels.add(label)
        said = f"{said} {value}"
        budget -= cost
        if budget < _LEAST:
            break
    return chosen


def _is_known(value: str, known: Collection[str]) -> bool:
    """Tell whether a value, or each word of it, stands elsewhere."""
    return value in known or (" " in value and all(word in known for word in value.split()))


def _rendered(chosen: Iterable[Candidate]) -> str:
    """Return the values under their labels, in the order of the text."""
    groups: dict[str, list[str]] = {}
    for candidate in sorted(chosen, key=lambda candidate: candidate.place):
        groups.setdefault(candidate.label, []).append(_shown(candidate.text))
    return " ".join(_group(label, values) for label, values in groups.items())


def _group(label: str, values: Iterable[str]) -> str:
    """Return values under their label, which is said again before it is too far away."""
    rows: list[str] = []
    for value in values:
        if rows and len(rows[-1]) + len(value) <= _NEAR:
            rows[-1] += f",{value}"
        else:
            rows.append(f"{label}={value}" if label else value)
    return " ".join(rows)


def _shown(value: str) -> str:
    return value if value.isalnum() or not _TO_QUOTE.search(value) else f'"{value}"'

"""The best of a text's values within so many characters, put under their labels.

    error line; id=A1,A2,A3 title="two words" src/main.c buildDir

Values of one label stand side by side, each verbatim, in the order of the text; what has no label stands
alone. Where a value holds a space or a comma it is put between quotation marks.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final

from proxy.trimming.atoms import occurs
from proxy.trimming.digest.candidates import Candidate, candidates_of
from proxy.trimming.digest.readable import CUT, ends_of, readable

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
    text = ends_of(text)
    if most < _LEAST or not any(alarm in text for alarm in _ALARMS):
        return ""
    for found in _ERROR.finditer(text):
        start = text.rfind("\n", 0, found.start()) + 1
        if found.start() - start <= _ERROR_BEGINS and not _PROGRAM.search(text, start, found.start()):
            line = text[start:].partition("\n")[0].strip()
            return line if len(line) <= most else _cut(line, most)
    return ""


def _cut(line: str, most: int) -> str:
    """Return the beginning of a line that is too long, cut where a word ends if there is such a place."""
    beginning, space, _ = line[:most].rpartition(" ")
    return f"{beginning.rstrip(CUT) if space else line[: most - 1]}{CUT}"


def _chosen(text: str, known: Collection[str], error: str, budget: int) -> list[Candidate]:
    """Return the values worth most for their length that fit into the budget, the best first."""
    chosen: list[Candidate] = []
    labels: set[str] = set()
    said = error
    for candidate in sorted(candidates_of(text), key=Candidate.rank):
        value, label = candidate.text, candidate.label
        if len(value) > budget:
            continue
        cost = len(_shown(value)) + 1 + (len(label) + 1 if label and label not in labels else 0)
        if cost > budget + 1 or _is_known(value, known) or (value in said and occurs(value, said)):
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
    return f'"{value}"' if _TO_QUOTE.search(value) else value

r"""The values of a text that a later step is most likely to need, within so many characters.

    error line; id=A1,A2,A3 title="two words" src/main.c buildDir

Values of one label stand side by side, each verbatim, in the order of the text; what has no label stands
alone. A value that holds a space or a comma is put between quotation marks.

Ids, codes and names are used again, descriptions are not; what stands alone under a key is used more than a word
of prose; what a program defines is used more than what it calls. The numbers below say how much more. They were
set by hand on real sessions; a little more or less changes little.

The text is read without its wrapping: JSON inside of strings (`\"id\": \"A1\"`, `\\n`), markup, colours. What
looks like an escape may be a step of a Windows path (`C:\temp\run-42.log`): where that is not clear, the word
behind it is left out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import lru_cache
from math import exp, log, log1p
from operator import attrgetter, itemgetter, mul
from typing import Final

from msgspec import Struct

from proxy.textscan.document import OPENING, is_dust, read_ends, walk
from proxy.textscan.scan import (
    IDENTIFYING,
    Kind,
    Value,
    beginning_of,
    end_of,
    is_text,
    kind_of,
    occurs,
    values_of,
    values_of_document,
    values_of_text,
)

HEAD: Final = 24_000  # characters of the beginning that are read
TAIL: Final = 8_000  # characters of the end that are read
ARGUMENT: Final = 100_000  # characters of an argument that are read
_REMEMBERED: Final = 20_000  # characters of the longest text of which it is remembered what was read
CUT: Final = "…"  # stands where something is left out: what holds it is no value
_TAGS: Final = 5  # so many closing tags make a page

_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_BACKSLASHES: Final = re.compile(
    r"""\\(?<!\\\\)(?:(?<=\b[A-Za-z]:\\)(?P<drive>\\*+)(?=[^\\/:*?"'<>|\s])(?![nrt](?![\w.%~$()-]))"""
    r"""(?:[^\\/:*?"'<>|,;\n]{1,255}+\\(?P=drive)(?!\\))*+[^\\\s/:*?"'<>|,;]{0,255}+"""
    r"""|\\*+(?:(?P<mark>["'/])|(?P<letter>[nrt])|(?P<code>u)[0-9a-fA-F]{4}))"""
)
"""Backslashes and what they stand before; or those of a path on a drive, as many as are alike.

It begins with a backslash, so that a search looks for that alone.
"""
_PATH_CHARACTER: Final = re.compile(r"[\w.%~$()-]")
_NO_PATH: Final = re.compile(r"[^\w.%~$()-]")
_STEP: Final = re.compile(r"\\[^\\nrtu]")
_ESCAPED_LINE: Final = re.compile(r"\\[nrt][A-Z]")
_SPACE: Final = re.compile(r"\s")
_CERTAIN: Final = re.compile(r"\\(?<!\\\\)(\\*+)[nr](?:(?![\w.%~$()-])|(?<=[{}\[\],;!?]\\[nr]))")
"""The end of a line where no path has a step: the text is escaped so many times."""
_PLAIN: Final = re.compile(r"\\(?<!\\\\)(?:\\\\)*+(?!\\)[A-Zac-eg-mo-qsvwyz_.]")
"""What says that it is not: a backslash before what no escape has."""
_OPENING: Final = re.compile(r"""(?:^|[=:,(\[{>])\s{0,2}[bru]?["']""", re.MULTILINE)
"""How a string begins in JSON and in what programs print."""
_HALF: Final = re.compile("[\ud800-\udfff]")
_TAG: Final = re.compile(r"<[/A-Za-z!][^<>]{0,400}>")
_ATTRIBUTE: Final = re.compile(r"""\b(?:href|src|title|alt|content)=["' ]{0,4}([^"'>]{1,200})""")
_ENTITY: Final = re.compile(r"&(?:[a-z]{2,6}|#\d{1,6});")
_ARROW: Final = re.compile(r"^([ \t]{0,8}+\d{1,6}+)→", re.MULTILINE)
_CONTEXT: Final = re.compile(r"^([^\s:/]{0,80}/[^\s:]{1,300}\.\w{1,10})-(\d{1,7})-", re.MULTILINE)
"""What stands before a line that `grep` shows beside a match: file and number."""
_CONTEXT_NUMBER: Final = re.compile(r"\.\w{1,10}-\d{1,7}-")  # a part of it that is looked for in a fifth of the time
_UNSEEN: Final = (("<style", "</style>"), ("<script", "</script>"))


def ends_of(text: str) -> str:
    """Return the text, or of a long one its beginning and its end, on two lines.

    No value is cut in two. A line that is cut has a mark where it is.
    """
    if len(text) <= HEAD + TAIL:
        return text
    head, tail = beginning_of(text, HEAD), end_of(text, TAIL)
    after = "" if text[len(head)] == "\n" else CUT
    before = "" if text[len(text) - len(tail) - 1] == "\n" else CUT
    return f"{head}{after}\n{before}{tail}"


def readable(text: str) -> str:
    """Return the text without colours, escapes and tags; of a tag its link or title stays, on a line.

    After the number of a line stands a space, not an arrow; between file and number a colon.
    """
    if "\r" in text:
        text = text.replace("\r\n", "\n")
    if "\x1b" in text:
        text = _COLOURS.sub("", text)
    if "\\" in text:
        text = _unescaped(text)
    if "→" in text:
        text = _ARROW.sub(r"\1 ", text)
    if "/" in text and "-" in text:
        text = _with_numbered_lines(text)
    if text.count("</") >= _TAGS:
        for opening, closing in _UNSEEN:
            text = _without(text, opening, closing)
        text = _TAG.sub(lambda tag: f"\n{' '.join(_ATTRIBUTE.findall(tag[0]))}\n", text)
        text = _ENTITY.sub(" ", text)
    return text


def _with_numbered_lines(text: str) -> str:
    """Return what `grep` found with a colon between file and number, also where it has hyphens: beside a match."""
    if not _CONTEXT_NUMBER.search(text):
        return text
    files = Counter([found[1] for found in _CONTEXT.finditer(text)])
    return _CONTEXT.sub(lambda found: f"{found[1]}:{found[2]}:" if files[found[1]] > 1 else found[0], text)


def _unescaped(text: str) -> str:
    """Return the text with escapes undone, those of JSON inside of JSON too, where they are any for sure."""
    # How many times the text is surely escaped, in parts of it: the backslashes of a line's end.
    depths = set[int]() if _PLAIN.search(text) else {len(found[1]) + 1 for found in _CERTAIN.finditer(text)}
    kept: list[str] = []
    end = line_end = opened = deepest = 0
    for found in _BACKSLASHES.finditer(text):
        start, stop = found.span()
        if start >= line_end:
            line_start = text.rfind("\n", 0, start) + 1
            line_end = text.find("\n", start) + 1 or len(text)
            opening = _OPENING.search(text, line_start, line_end)
            opened, deepest = opening.end() if opening is not None else line_end, 0
        which = found.lastgroup
        if which == "mark":
            depth = stop - start - 1
            if depth > deepest and text[stop - 1] == '"':
                deepest = depth
            kept.append(text[end:start])
            end = stop - 1
            continue
        kept.append(text[end:start])
        end = stop
        if which == "code":
            meant = chr(int(text[stop - 4 : stop], 16))
            kept.append(meant if meant.isprintable() or _HALF.match(meant) else " ")
            continue
        # It stands inside of a string, whose quotation mark has as many backslashes less one.
        depth = stop - start - 1 if which == "letter" else len(found["drive"]) + 1
        is_shown = depth in depths and (deepest >= max(1, depth - 1) or (depth == 1 and start >= opened))
        if which == "letter" and (is_shown or _PATH_CHARACTER.match(text, stop) is None):
            kept.append(" " if text[stop - 1] == "t" else "\n")
        elif which == "drive" and not is_shown and _is_path(found[0]):
            kept.append(found[0])
        else:
            kept.append(CUT)
            after = _NO_PATH.search(text, stop)
            end = len(text) if after is None else after.start()
    whole = "".join([*kept, text[end:]])
    if whole.isascii() or not _HALF.search(whole):
        return whole
    # Two halves that stand side by side are one character; what is left alone is none.
    return whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\ufffd", " ")


def _is_path(steps: str) -> bool:
    """Tell whether steps after a drive are those of a path, not lines of text after a colon."""
    return _STEP.search(steps) is not None or not (_SPACE.search(steps) or _ESCAPED_LINE.search(steps))


def _without(text: str, opening: str, closing: str) -> str:
    """Return the text without what stands between two tags; one that is never closed stays."""
    kept: list[str] = []
    start = 0
    while (found := text.find(opening, start)) >= 0 and (stop := text.find(closing, found)) >= 0:
        kept.append(text[start:found])
        start = stop
    return "".join([*kept, text[start:]])


_WORTH: Final[Mapping[Kind, float]] = {
    "email": 9,
    "path": 7,
    "date": 6,
    "id": 5,
    "url": 4,
    "quoted": 3.5,
    "text": 4,
    "number": 1.5,
    "cjk": 1,
}
"""What a value is worth by its shape, where nothing else is known of it."""
_DEFINED: Final = 11  # what a name is worth that a program defines
_NUMBER_UNDER_KEY: Final = 3.5
_TERM: Final = 6  # what a CJK term is worth that stands alone, or is short
_TERM_LETTERS: Final = 4
_ONE_WORD: Final = 3  # what a leaf of one ordinary word is worth
_TIME_OF_DAY: Final = 1.5  # what a time is worth, with its date or without
_MEASURE: Final = 0.1  # what a number is worth that was measured: it has more decimals than these
_PLACES: Final = 2
_WHOLE: Final = 1.3  # by how much more a value is worth that is all that stands under its key
_NAMES: Final = 1.5  # by how much more one under a key that says it names something
_TELLS: Final = 0.35  # by how much less one under a key that says it describes something
_AGAIN: Final = 0.4  # by how much more one that stands there again and again, for each factor e

_LONGEST: Final = 120
_LONGEST_WORDS: Final = 60  # characters of a string of several words: a longer one is prose
_MOST_WORDS: Final = 4
_DENSE: Final = 12  # of a long document so many values are read as if each had so many characters
_DOCUMENT_ENDS: Final = (2 * HEAD, 2 * TAIL)  # bytes of a document in which they are looked for
_ALIKE: Final = 3  # with so many lines of one value, their keys are what differs
_SHORTEST: Final = 2  # characters of a value, digits of a number

_NAMING: Final = re.compile(
    r"(?:^|[_\b-])(?:ids?|keys?|codes?|number|no|num|names?|title|url|uri|link|path|file|sha|hash|ref|token"
    r"|email|phone|address|ip|port|host|date|dob|day|prices?|amount|total|cost|balance|version|tool|server"
    r"|symbol|user|account|order)$|[a-z](?:Id|Ids|Key|Name|Code|Number|Path|Url)$|name$|_id|errors?$|message$",
    re.IGNORECASE,
)
_TELLING: Final = re.compile(
    r"created|updated|modified|timestamp|description|snippet|icon|logo|image|avatar|class|style|meta|annotation"
    r"|color|width|height|size|font|background|padding|margin",
    re.IGNORECASE,
)
_OF_WORDS: Final = frozenset({"text", "quoted"})
_IDLE: Final = frozenset(
    {"string", "number", "integer", "object", "boolean", "array", "content", "text", "type"}
    | {"true", "false", "null", "none", "None", "True", "False"}
)
"""Leaves that say what something is, in every tool's output."""
_DEFINES: Final = re.compile(
    r"(?:class|interface|function|def|fn|func|struct|enum|trait|impl)[ ]([A-Za-z_$][\w$]{1,80}+)"
)
_DEFINES_SO: Final = re.compile(r"(?<![\w$])(?:(?:export|default|public|private|static|abstract|async|pub)[ ]){0,3}\Z")
"""What may stand before it. To look for both in one takes twice as long: that tries each place of a text."""
_DEFINES_SO_LONG: Final = 30  # characters of three such words
_LINE: Final = re.compile(
    r"""^[ \t{\[(,>-]*+["'`]?([^\W\d][\w-]{0,40}+)[ ]{0,9}["'`]?[ ]{0,9}[:=](?![:=/\\])"""
    r"[ ]{0,9}([^\s{\[(][^\n]{0,80}+)$",
    re.MULTILINE,
)
"""A line that gives a key and its value."""
_INLINE: Final = re.compile(
    r"""["']([^\W\d][\w -]{0,40}+)["']\s{0,4}:\s{0,4}"""
    r"""(?:"([^"\n]{1,60}+)"|'([^'\n]{1,60}+)'|([\w.+-]{1,40}+))(?=\s{0,4}[,}\]\n])"""
)
"""A key and its value inside of braces, where the whole is no JSON document."""
_ENDING: Final = " ,;)}]"
_QUOTES: Final = "\"'`"
_QUOTE: Final = re.compile("[\"'`]")
_PROGRAM: Final = re.compile(r"[=(){}<>;\"'`]|  ")
_WORDS: Final = re.compile(r"[\w-]+")
_DIGIT: Final = re.compile(r"\d")


class Candidate(Struct, gc=False, kw_only=True):
    """A value that may be kept."""

    text: str  # the value, verbatim
    label: str  # the key that it stands under; empty where it stands under none
    worth: float
    place: int  # its place among the candidates of the text
    kind: Kind | None = None  # how it looks; None for words that say what a program defines
    times: int = 1  # how often it stands there
    odds: float = 0  # what it says by itself of its chance to be used again
    shown: str = ""  # as a digest shows it


class Reading(Struct, frozen=True, kw_only=True):
    """What a digest of a text may hold, whatever else is known."""

    candidates: Sequence[Candidate]
    """Each value once, first what is worth most for what it costs. Threads share them: nobody changes them any more."""
    error: str  # the first line that tells an error; empty where none does


def reading_of(text: str, *, is_argument: bool = False) -> Reading:
    """Return what a digest of a text may hold; `is_argument`: the agent wrote the text."""
    return (read_once if len(text) <= _REMEMBERED else _read)(text, is_argument=is_argument)


def _read(text: str, *, is_argument: bool) -> Reading:
    found = _in_document(text)
    if not found:
        # What an agent writes it wrote for a use: it is read as it is, and more of it.
        shown = text[:ARGUMENT] if is_argument else readable(ends_of(text))
        # What is not wrapped was no document before either.
        values = values_of_text(shown, "numbers") if shown is text else values_of(shown, "numbers")
        _add_text(found, shown, values)
    for candidate in found.values():
        candidate.odds = _sum_of(_OWN_WEIGHTS, _own_features(candidate, is_argument=is_argument))
        candidate.shown = _shown(candidate.text)
    return Reading(candidates=tuple(sorted(found.values(), key=_cost)), error=_error_line(text))


read_once: Final = lru_cache(maxsize=256)(_read)
"""The same texts come again at each request that a trim is tried out at."""


def _cost(candidate: Candidate) -> float:
    """Return what is smaller the more a candidate is worth for its length."""
    worth, times = candidate.worth, candidate.times
    return -(worth * (1 + _AGAIN * log(times)) if times > 1 else worth) / (len(candidate.text) + 2)


def _add(found: dict[str, Candidate], value: str, kind: Kind | None, label: str, worth: float, times: int) -> None:
    held = found.get(value)
    if held is None:
        found[value] = Candidate(text=value, kind=kind, label=label, worth=worth, place=len(found), times=times)
        return
    held.kind = kind
    held.label = held.label or label
    held.worth = max(held.worth, worth)
    held.times += times


def _in_document(text: str) -> dict[str, Candidate]:
    found: dict[str, Candidate] = {}
    if not text.lstrip().startswith(OPENING):
        return found
    values, texts = values_of_document(text, "numbers", _DOCUMENT_ENDS)
    if len(text) > HEAD + TAIL:
        first = HEAD // _DENSE
        values = [*values[:first], *values[first:][-(TAIL // _DENSE) :]]
    for value, times in Counter(values).items():
        worth = _worth(value.text, value.kind, value.label if value.is_leaf else None)
        if worth:
            label = value.label if value.is_leaf or value.kind == "number" else ""
            _add(found, value.text, value.kind, label, worth, times)
    for each in texts:
        shown = readable(ends_of(each))
        _add_text(found, shown, values_of(shown, "numbers"))
    return found


def _add_text(found: dict[str, Candidate], text: str, values: Iterable[Value]) -> None:
    lines = list(_LINE.finditer(text))
    keys, defined, is_cut = _keys(text, lines), _defined(text), CUT in text
    for declared in _declared(text, lines):
        _add(found, declared, "id", "", _WORTH["id"], 1)
    for value, times in Counter(values).items():
        piece = value.text
        if is_cut and CUT in piece:
            continue
        if piece in defined:
            _add(found, defined[piece], None, "", _DEFINED, times)
            continue
        key = keys.get(piece)
        worth = _worth(piece, value.kind, key)
        if worth:
            _add(found, piece, value.kind, key or (value.label if value.kind == "number" else ""), worth, times)
    for word, key in keys.items():
        if kind_of(word) is None and len(word.split()) <= _MOST_WORDS and not _PROGRAM.search(word):
            worth = _worth(word, "text", key)
            if worth:
                _add(found, word, "text", key, worth, 1)


def _defined(text: str) -> dict[str, str]:
    """Return for each name that a program defines the words that say so, the name among them."""
    names: dict[str, str] = {}
    at = end = 0  # of the search, and of the last one that was found
    while (found := _DEFINES.search(text, at)) is not None:
        at = found.start()
        before = _DEFINES_SO.search(text, max(end, at - _DEFINES_SO_LONG), at)
        at += 1
        if before is not None:
            at = end = found.end()
            names[found[1]] = text[before.start() : end]
    return names


def _declared(text: str, lines: Iterable[re.Match[str]]) -> list[str]:
    """Return keys, each with its colon, where several lines give the same value: the keys are what they tell.

    So it is with the fields of a type, or with settings that are switched on.
    """
    keys: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for found in lines:
        if text[found.end(1)] == ":":
            keys[found[2].rstrip(_ENDING)][f"{found[1]}:"] = None
    return [key for alike in keys.values() if len(alike) >= _ALIKE for key in alike]


def _keys(text: str, lines: Iterable[re.Match[str]]) -> dict[str, str]:
    """Return for each value that is all that stands under a key, on a line or in braces, that key."""
    keys: dict[str, str] = {}
    for line in lines:
        key, rest = line.groups()
        value = rest.rstrip(_ENDING).strip(_QUOTES).strip()
        if _SHORTEST <= len(value) <= _LONGEST_WORDS and not _QUOTE.search(value) and CUT not in value:
            keys.setdefault(value, key)
    for key, double, single, bare in _INLINE.findall(text):
        value = (double or single or bare).strip()
        if len(value) >= _SHORTEST and CUT not in value:
            keys.setdefault(value, key)
    return keys


@lru_cache(maxsize=4096)
def _factor(key: str) -> float:
    """Return by how much more a value is worth for what its key says of it."""
    if _TELLING.search(key):
        return _TELLS
    return _NAMES if _NAMING.search(key) else 1


def _worth(text: str, kind: Kind, key: str | None) -> float:
    """Return what a value is worth; 0 where it need not be kept. `key` is what it is all of, if anything."""
    if len(text) > _LONGEST or text in _IDLE:
        return 0
    if key is None and kind in IDENTIFYING:
        return _WORTH[kind]
    whole = key is not None
    if kind in _OF_WORDS:
        if len(text) > _LONGEST_WORDS or text[0] == "(":
            return 0  # prose, or a remark
        worth: float = _ONE_WORD if _WORDS.fullmatch(text) else _WORTH["text" if whole else kind]
    elif kind == "number":
        digits = len(text) if text.isdecimal() else len(_DIGIT.findall(text))
        worth = 0 if digits < _SHORTEST else _NUMBER_UNDER_KEY if whole else _WORTH[kind]
        worth = _MEASURE if len(text.partition(".")[2]) > _PLACES else worth
    elif kind == "cjk":
        worth = _TERM if whole or len(text) <= _TERM_LETTERS else _WORTH[kind]
    else:
        worth = (_TIME_OF_DAY if kind == "date" and ":" in text else _WORTH[kind]) * (_WHOLE if whole else 1)
    return worth * _factor(key) if key is not None else worth


_KINDS: Final[Sequence[Kind | None]] = ("email", "path", "date", "id", "url", "quoted", "text", "number", "cjk", None)
_KIND_FEATURES: Final = {kind: tuple([float(kind == each) for each in _KINDS]) for kind in _KINDS}
WEIGHTS: Final[Sequence[float]] = (
    # Of what `features_of` returns.
    *(-3.7, 0.27, 0.8, 0.17, 0.1, -0.07, 0.5, -0.3, 0.23, 0.69, 0.11),
    *(-0.27, 0.25, -0.47, 0.3, -0.61, -0.12, -0.75, -0.28, -1.47, -0.3),
)
_MENTIONED: Final = slice(1, 6)  # those of them that tell where else a value stands
_MENTION_WEIGHTS: Final = WEIGHTS[_MENTIONED]
_OWN_WEIGHTS: Final = (*WEIGHTS[: _MENTIONED.start], *WEIGHTS[_MENTIONED.stop :])
_by_share: Final = itemgetter(0)
_by_place: Final = attrgetter("place")

_NEAR: Final = 80  # after so many characters of values their label is said again, so that it stands near each of them
_LEAST: Final = 4  # with fewer characters left, nothing more is looked for, nor an error line
_ERROR_LONGEST: Final = 300  # characters of an error line
_ERROR_SHARE: Final = 2  # an error line takes up at most this part (a half) of the characters
_ERROR_BEGINS: Final = 60  # characters of its line before the word that tells an error

_ERROR: Final = re.compile(
    r"(?<![\w-])(?:\w{0,60}(?:Error|Exception)|error|ERROR|fatal|FATAL|panic|FAILED|FAIL|Traceback)(?![\w-])"
    r"(?=[^\n:]{0,40}:)(?!\()"
)
_ALARM: Final = re.compile("rror|xception|ERROR|fatal|FATAL|panic|FAIL|Traceback")
"""Of these every error line holds one: other lines need not be looked at more closely."""
_CODE_LINE: Final = re.compile(r"[{}=;\"'`]|\b(?:new|throw|catch|raise|except|return|import|class|def|function)\b")
_CODE_ENDS: Final = ",;{"  # what a line of a program ends with, and no sentence does
_TO_QUOTE: Final = re.compile(r"[\s,]")
_WINDOW: Final = 65_536  # characters that are looked at in one step
_RUNS: Final = re.compile(r"[^\s\"'`<>()\[\]{},;|\\]+")
_SPACED: Final = str.maketrans(dict.fromkeys("\"'`<>()[]{},;|\\", " "))
_JOINTS: Final = re.compile(r"[./:@?=&#-]+")
_PARTS: Final = re.compile(r"[./:@?=&#\s-]+")
_EDGES: Final = ".:!?"


class Mentions:
    """What a conversation says of its words: in how many messages each stands, and whose these are."""

    def __init__(self) -> None:
        self.messages: Final = Counter[str]()  # by word the number of messages that hold it
        self.agent: Final = Counter[str]()  # how many of them are the agent's own: its texts and its calls
        self.user: Final = set[str]()  # words of the user's

    def add(self, role: str, text: str, arguments: Iterable[str]) -> None:
        """Count the words of a message: of its text, and of its calls' arguments in JSON."""
        words = set(_runs_in("\n".join([text, *(each.replace("\\n", " ") for each in arguments)])))
        self.messages.update(words)
        if role == "assistant":
            self.agent.update(words)
        elif role == "user":
            self.user.update(words)


NO_MENTIONS: Final = Mentions()


def digest_of(
    text: str,
    budget: int,
    known: Collection[str] = frozenset(),
    mentions: Mentions = NO_MENTIONS,
    *,
    least: float = 0,
    is_argument: bool = False,
) -> str:
    """Return the values of a text that a later step is most likely to need, in at most `budget` characters.

    `known` are words that stand elsewhere anyway (`words_of`), and need not be said again. A value whose chance to be
    used again is below `least` for each of its characters is left out. `is_argument`: the agent wrote the text.
    """
    if budget <= 0:
        return ""
    reading = reading_of(text, is_argument=is_argument)
    error = _cut(reading.error, min(budget // _ERROR_SHARE, _ERROR_LONGEST))
    start = f"{error}; " if error else ""
    ranked = _ranked(reading.candidates, known, mentions, least)
    chosen = _chosen(ranked, error, budget - len(start))
    values = _rendered(chosen)
    while len(start) + len(values) > budget:
        chosen.pop()
        values = _rendered(chosen)
    return start + values if values else error


def _ranked(
    candidates: Iterable[Candidate], known: Collection[str], mentions: Mentions, least: float
) -> list[Candidate]:
    """Return those candidates that are worth their characters, first what is most likely to be used again.

    What is said elsewhere is left out.
    """
    found: list[tuple[float, Candidate]] = []
    held, said, users = mentions.messages.get, mentions.agent.get, mentions.user
    for candidate in candidates:
        value = candidate.text
        if value in known or (" " in value and all(word in known for word in value.split())):
            continue
        odds = candidate.odds + _odds_of_mentions(held(value, 0), said(value, 0), value in users)
        share = 1 / ((1 + exp(-odds)) * (len(value) + 2))
        if share >= least:
            found.append((-share, candidate))
    found.sort(key=_by_share)
    return [candidate for _, candidate in found]


def features_of(candidate: Candidate, mentions: Mentions, *, is_argument: bool) -> list[float]:
    """Return what the chance of a value to be used again depends on, in the order of `WEIGHTS`."""
    text = candidate.text
    features = _own_features(candidate, is_argument=is_argument)
    place = _MENTIONED.start
    features[place:place] = _mention_features(mentions.messages[text], mentions.agent[text], text in mentions.user)
    return features


def _own_features(candidate: Candidate, *, is_argument: bool) -> list[float]:
    return [
        1,
        log(candidate.worth),
        log(len(candidate.text) + 2),
        log(candidate.times),
        is_argument,
        bool(candidate.label),
        *_KIND_FEATURES[candidate.kind],
    ]


def _mention_features(held: int, said: int, is_users: bool) -> list[float]:
    return [log1p(held), held > 1, log1p(said), said > 0, is_users]


@lru_cache(maxsize=4096)
def _odds_of_mentions(held: int, said: int, is_users: bool) -> float:
    return _sum_of(_MENTION_WEIGHTS, _mention_features(held, said, is_users))


def chance_of(features: Iterable[float], weights: Iterable[float] = WEIGHTS) -> float:
    """Return how likely a value is to be used again by a later call."""
    return 1 / (1 + exp(-_sum_of(weights, features)))


def _sum_of(weights: Iterable[float], features: Iterable[float]) -> float:
    summed: float = sum(map(mul, weights, features))
    return summed


def _runs_in(text: str) -> list[str]:
    """Return the runs of a text as `_RUNS` finds them; of ASCII in a third of the time."""
    return text.translate(_SPACED).split() if text.isascii() else _RUNS.findall(text)


def _runs_of(text: str) -> set[str]:
    """Return the runs of a text. It is looked at in windows of whole lines: other threads wait for a search to end."""
    runs: set[str] = set()
    start = 0
    while start < len(text):
        end = text.find("\n", start + _WINDOW) + 1 or len(text)
        runs.update(_runs_in(text[start:end]))
        start = end
    return runs


def words_of(text: str) -> set[str]:
    """Return the words of a text and their parts (of a path its names), as `digest_of` looks them up.

    A word with a colon after it is one of its own, too.
    """
    words: set[str] = set()
    for run in _runs_of(readable(text)):
        if run.isalnum():
            words.add(run)
            continue
        word = run.strip(_EDGES)
        words.add(word)
        if run[-1] == ":":
            words.add(run)
        if _JOINTS.search(word):
            words.update(_JOINTS.split(word))
    return words


def _error_line(text: str) -> str:
    """Return the first line that tells an error; else nothing."""
    if ":" not in text or not _ALARM.search(text):
        return ""
    text = ends_of(_printed(text))
    line_end = 0
    while (alarm := _ALARM.search(text, line_end)) is not None:
        line_start = text.rfind("\n", 0, alarm.start()) + 1
        line_end = text.find("\n", alarm.start()) + 1 or len(text)
        found = _ERROR.search(text, line_start, line_end)  # what stands before it stands before any later one, too
        if found is None or found.start() - line_start > _ERROR_BEGINS:
            continue
        line = text[line_start:line_end].strip()
        if line[-1] not in _CODE_ENDS and not _CODE_LINE.search(text, line_start, found.start()):
            return line
    return ""


def _cut(line: str, most: int) -> str:
    """Return a line that tells an error, cut where it is longer than `most`; nothing where that is next to none."""
    if most < _LEAST:
        return ""
    if len(line) <= most:
        return line
    beginning, space, _ = line[:most].rpartition(" ")  # it ends with a word, if there is such a place
    return f"{beginning.rstrip(CUT) if space else line[: most - 1]}{CUT}"


def _printed(text: str) -> str:
    """Return the texts in a JSON document, one after the other; any other text as it is."""
    may_be_one = text.lstrip().startswith(OPENING) and not is_dust(text)
    document = read_ends(text, *_DOCUMENT_ENDS) if may_be_one else None
    return text if document is None else "\n".join(leaf.text for leaf in walk(document) if is_text(leaf.text)) or text


def _chosen(ranked: Iterable[Candidate], error: str, budget: int) -> list[Candidate]:
    """Return the first of these that fit into the budget, without what the error's line says."""
    chosen: list[Candidate] = []
    labels: set[str] = set()
    said = error
    for candidate in ranked:
        value, label = candidate.text, candidate.label
        if len(value) > budget:
            continue
        cost = len(candidate.shown) + 1 + (len(label) + 1 if label and label not in labels else 0)
        if cost > budget + 1 or (value in said and occurs(value, said)):
            continue
        chosen.append(candidate)
        labels.add(label)
        said = f"{said} {value}"
        budget -= cost
        if budget < _LEAST:
            break
    parts = {part for each in chosen for part in _PARTS.split(each.text) if part != each.text}
    return [each for each in chosen if each.text not in parts]


def _rendered(chosen: Iterable[Candidate]) -> str:
    """Return the values under their labels, said again before they are too far away, in the order of the text."""
    groups: dict[str, list[str]] = {}
    for candidate in sorted(chosen, key=_by_place):
        label, value = candidate.label, candidate.shown
        rows = groups.setdefault(label, [])
        if rows and len(rows[-1]) + len(value) <= _NEAR:
            rows[-1] += f",{value}"
        else:
            rows.append(f"{label}={value}" if label else value)
    return " ".join(row for rows in groups.values() for row in rows)


def _shown(value: str) -> str:
    return value if value.isalnum() or not _TO_QUOTE.search(value) else f'"{value}"'

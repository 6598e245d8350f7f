r"""Digests: the values of a text that a later step is most likely to need, up to a number of characters.

    error line; id=A1,A2,A3 title="two words" src/main.c buildDir

Values are verbatim and in the order of the text. Values with the same label share it. A value with a space or a
comma stands between quotation marks.

Agents use ids, codes and names again, rarely descriptions. They use a value that stands alone under a key more often
than a word of prose, and a name that a program defines more often than one it calls. The numbers below say how much
more often. They were set by hand on real sessions; small changes of them matter little.

Escapes (JSON inside of strings: `\"id\": \"A1\"`, `\\n`), markup and colours are removed first. What looks like an
escape may be a step of a Windows path (`C:\temp\run-42.log`). If that is not clear, the word behind it is left out.
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

from proxy.textscan.document import OPENING, is_mostly_brackets, read_json_ends, walk
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
_REMEMBERED: Final = 20_000  # readings of texts up to so many characters are cached
CUT: Final = "…"  # marks an omission; a piece that holds it is not a value
_TAGS: Final = 5  # a text with so many closing tags is a page

_COLOURS: Final = re.compile(r"\x1b\[[0-9;?]{0,20}[A-Za-z]")
_BACKSLASHES: Final = re.compile(
    r"""\\(?<!\\\\)(?:(?<=\b[A-Za-z]:\\)(?P<drive>\\*+)(?=[^\\/:*?"'<>|\s])(?![nrt](?![\w.%~$()-]))"""
    r"""(?:[^\\/:*?"'<>|,;\n]{1,255}+\\(?P=drive)(?!\\))*+[^\\\s/:*?"'<>|,;]{0,255}+"""
    r"""|\\*+(?:(?P<mark>["'/])|(?P<letter>[nrt])|(?P<code>u)[0-9a-fA-F]{4}))"""
)
"""Backslashes with the escaped character behind them, or a path on a drive with equally many in each place.

The pattern begins with a literal backslash, which makes the search fast.
"""
_PATH_CHARACTER: Final = re.compile(r"[\w.%~$()-]")
_NO_PATH: Final = re.compile(r"[^\w.%~$()-]")
_STEP: Final = re.compile(r"\\[^\\nrtu]")
_ESCAPED_LINE: Final = re.compile(r"\\[nrt][A-Z]")
_SPACE: Final = re.compile(r"\s")
_CERTAIN: Final = re.compile(r"\\(?<!\\\\)(\\*+)[nr](?:(?![\w.%~$()-])|(?<=[{}\[\],;!?]\\[nr]))")
"""An escaped line end that cannot be a step of a path: its backslashes tell how often the text was escaped."""
_PLAIN: Final = re.compile(r"\\(?<!\\\\)(?:\\\\)*+(?!\\)[A-Zac-eg-mo-qsvwyz_.]")
"""A backslash that begins no escape: the text was not escaped."""
_OPENING: Final = re.compile(r"""(?:^|[=:,(\[{>])\s{0,2}[bru]?["']""", re.MULTILINE)
"""The beginning of a string in JSON and in the output of programs."""
_HALF: Final = re.compile("[\ud800-\udfff]")
_TAG: Final = re.compile(r"<[/A-Za-z!][^<>]{0,400}>")
_ATTRIBUTE: Final = re.compile(r"""\b(?:href|src|title|alt|content)=["' ]{0,4}([^"'>]{1,200})""")
_ENTITY: Final = re.compile(r"&(?:[a-z]{2,6}|#\d{1,6});")
_ARROW: Final = re.compile(r"^([ \t]{0,8}+\d{1,6}+)→", re.MULTILINE)
_CONTEXT: Final = re.compile(r"^([^\s:/]{0,80}/[^\s:]{1,300}\.\w{1,10})-(\d{1,7})-", re.MULTILINE)
"""File and line number in front of a context line of `grep`."""
_CONTEXT_NUMBER: Final = re.compile(r"\.\w{1,10}-\d{1,7}-")  # a quick test: a part of it
_UNSEEN: Final = (("<style", "</style>"), ("<script", "</script>"))


def ends_of(text: str) -> str:
    """Return the text; of a long one its beginning and its end.

    No value is cut in two. A line that is cut is marked with `CUT`.
    """
    if len(text) <= HEAD + TAIL:
        return text
    head, tail = beginning_of(text, HEAD), end_of(text, TAIL)
    after = "" if text[len(head)] == "\n" else CUT
    before = "" if text[len(text) - len(tail) - 1] == "\n" else CUT
    return f"{head}{after}\n{before}{tail}"


def readable(text: str) -> str:
    """Return the text without colours, escapes and tags. A tag leaves its link or title, on a line of its own.

    An arrow after a line number becomes a space; a hyphen between file and line number becomes a colon.
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
    """Return the output of `grep` with `file:number:` in front of context lines too, where it prints `file-number-`."""
    if not _CONTEXT_NUMBER.search(text):
        return text
    files = Counter([found[1] for found in _CONTEXT.finditer(text)])
    return _CONTEXT.sub(lambda found: f"{found[1]}:{found[2]}:" if files[found[1]] > 1 else found[0], text)


def _unescaped(text: str) -> str:
    """Return the text with its escapes undone, also those of JSON inside of JSON; doubtful ones become `CUT`."""
    # How often parts of the text were certainly escaped, by the backslashes of escaped line ends.
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
        # Inside of a string, whose own quotation mark has one backslash less.
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
    # Two adjacent surrogates are one character; a lone one becomes a space.
    return whole.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace").replace("\ufffd", " ")


def _is_path(steps: str) -> bool:
    """Tell whether the steps after a drive letter are a path, not escaped lines of text after a colon."""
    return _STEP.search(steps) is not None or not (_SPACE.search(steps) or _ESCAPED_LINE.search(steps))


def _without(text: str, opening: str, closing: str) -> str:
    """Return the text without the content of an element; an element that is never closed stays."""
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
"""What a value is worth by its kind alone."""
_DEFINED: Final = 11  # a name that a program defines
_NUMBER_UNDER_KEY: Final = 3.5
_TERM: Final = 6  # a CJK term that is all of a key's value, or short
_TERM_LETTERS: Final = 4
_ONE_WORD: Final = 3  # a leaf of one ordinary word
_TIME_OF_DAY: Final = 1.5  # a time of day, with or without its date
_MEASURE: Final = 0.1  # a measurement: a number with more decimals than `_PLACES`
_PLACES: Final = 2
_WHOLE: Final = 1.3  # factor for a value that is all of its key's value
_NAMES: Final = 1.5  # factor for a value under a naming key (`id`, `path`)
_TELLS: Final = 0.35  # factor for a value under a describing key (`description`, `style`)
_AGAIN: Final = 0.4  # factor for repetition: added for each e-fold number of occurrences

_LONGEST: Final = 120
_LONGEST_WORDS: Final = 60  # a string of several words that is longer is prose
_MOST_WORDS: Final = 4
_DENSE: Final = 12  # of a long document one value for each so many characters of HEAD and TAIL is read
_DOCUMENT_ENDS: Final = (2 * HEAD, 2 * TAIL)  # bytes at both ends of a long document that are parsed
_ALIKE: Final = 3  # if so many lines have the same value, their keys are what matters
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
"""Leaves that every tool's output holds: they describe a format."""
_DEFINES: Final = re.compile(
    r"(?:class|interface|function|def|fn|func|struct|enum|trait|impl)[ ]([A-Za-z_$][\w$]{1,80}+)"
)
_DEFINES_SO: Final = re.compile(r"(?<![\w$])(?:(?:export|default|public|private|static|abstract|async|pub)[ ]){0,3}\Z")
"""Modifiers in front of it. One pattern for both would take twice as long, since it is tried at each character."""
_DEFINES_SO_LONG: Final = 30  # characters of three modifiers
_LINE: Final = re.compile(
    r"""^[ \t{\[(,>-]*+["'`]?([^\W\d][\w-]{0,40}+)[ ]{0,9}["'`]?[ ]{0,9}[:=](?![:=/\\])"""
    r"[ ]{0,9}([^\s{\[(][^\n]{0,80}+)$",
    re.MULTILINE,
)
"""A line of the form `key: value` or `key = value`."""
_INLINE: Final = re.compile(
    r"""["']([^\W\d][\w -]{0,40}+)["']\s{0,4}:\s{0,4}"""
    r"""(?:"([^"\n]{1,60}+)"|'([^'\n]{1,60}+)'|([\w.+-]{1,40}+))(?=\s{0,4}[,}\]\n])"""
)
"""A key and its value inside of braces in a text that is not JSON."""
_ENDING: Final = " ,;)}]"
_QUOTES: Final = "\"'`"
_QUOTE: Final = re.compile("[\"'`]")
_PROGRAM: Final = re.compile(r"[=(){}<>;\"'`]|  ")
_WORDS: Final = re.compile(r"[\w-]+")
_DIGIT: Final = re.compile(r"\d")


class Candidate(Struct, gc=False, kw_only=True):
    """A value that a digest may hold."""

    text: str  # the value, verbatim
    label: str  # its key; empty if it has none
    worth: float
    place: int  # its index among the candidates of the text
    kind: Kind | None = None  # None for a definition in a program (`def name`)
    times: int = 1  # occurrences in the text
    odds: float = 0  # log-odds of its reuse from its own features alone
    shown: str = ""  # its form in a digest


class Reading(Struct, frozen=True, kw_only=True):
    """What a digest of a text may hold, independent of the conversation."""

    candidates: Sequence[Candidate]
    """Each value once, the best worth per character first. Shared between threads, so never changed."""
    error: str  # the first line that reports an error; empty if none does


def reading_of(text: str, *, is_argument: bool = False) -> Reading:
    """Return what a digest of a text may hold. `is_argument` says that the agent wrote the text."""
    return (read_once if len(text) <= _REMEMBERED else _read)(text, is_argument=is_argument)


def _read(text: str, *, is_argument: bool) -> Reading:
    found = _in_document(text)
    if not found:
        # An agent's own argument is read verbatim, and more of it.
        shown = text[:ARGUMENT] if is_argument else readable(ends_of(text))
        # `_in_document` found no document; only unwrapping may have revealed one.
        values = values_of_text(shown, "numbers") if shown is text else values_of(shown, "numbers")
        _add_text(found, shown, values)
    for candidate in found.values():
        candidate.odds = _own_odds(candidate, is_argument=is_argument)
        candidate.shown = _shown(candidate.text)
    return Reading(candidates=tuple(sorted(found.values(), key=_cost)), error=_error_line(text))


read_once: Final = lru_cache(maxsize=256)(_read)
"""Cached, because each request that considers a trim reads the same texts."""


def _cost(candidate: Candidate) -> float:
    """Return the sort key of a candidate: the negative worth per character."""
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
    """Return the definition (`def name`) of each name that a program defines, by name."""
    names: dict[str, str] = {}
    at = end = 0  # start of the search; end of the last definition
    while (found := _DEFINES.search(text, at)) is not None:
        at = found.start()
        before = _DEFINES_SO.search(text, max(end, at - _DEFINES_SO_LONG), at)
        at += 1
        if before is not None:
            at = end = found.end()
            names[found[1]] = text[before.start() : end]
    return names


def _declared(text: str, lines: Iterable[re.Match[str]]) -> list[str]:
    """Return the keys, each with its colon, of lines that share one value.

    Examples are the fields of a type, and settings that are switched on: there the keys matter.
    """
    keys: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for found in lines:
        if text[found.end(1)] == ":":
            keys[found[2].rstrip(_ENDING)][f"{found[1]}:"] = None
    return [key for alike in keys.values() if len(alike) >= _ALIKE for key in alike]


def _keys(text: str, lines: Iterable[re.Match[str]]) -> dict[str, str]:
    """Return the key of each value that is all of a key's value, on a line or in braces, by value."""
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
    """Return the factor of a value's worth that its key gives."""
    if _TELLING.search(key):
        return _TELLS
    return _NAMES if _NAMING.search(key) else 1


def _worth(text: str, kind: Kind, key: str | None) -> float:
    """Return what a value is worth; 0 if it need not be kept. `key` is set if the value is all of that key's value."""
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
    # In the order of `features_of`.
    *(-3.7, 0.27, 0.8, 0.17, 0.1, -0.07, 0.5, -0.3, 0.23, 0.69, 0.11),
    *(-0.27, 0.25, -0.47, 0.3, -0.61, -0.12, -0.75, -0.28, -1.47, -0.3),
)
_MENTIONED: Final = slice(1, 6)  # the features that depend on the conversation
_MENTION_WEIGHTS: Final = WEIGHTS[_MENTIONED]
_BASE: Final = WEIGHTS[0]
_PER_WORTH, _PER_LENGTH, _PER_TIMES, _OF_ARGUMENT, _OF_LABEL, *_OF_KINDS = WEIGHTS[_MENTIONED.stop :]
_OF_KIND: Final = dict(zip(_KINDS, _OF_KINDS, strict=True))
_by_share: Final = itemgetter(0)
_by_place: Final = attrgetter("place")

_NEAR: Final = 80  # the label is repeated after so many characters of values
_LEAST: Final = 4  # with fewer characters left, nothing is added
_ERROR_LONGEST: Final = 300  # characters of an error line
_ERROR_SHARE: Final = 2  # an error line takes at most this part (one half) of the budget
_ERROR_BEGINS: Final = 60  # an error word stands within so many characters of its line's start

_ERROR: Final = re.compile(
    r"(?<![\w-])(?:\w{0,60}(?:Error|Exception)|error|ERROR|fatal|FATAL|panic|FAILED|FAIL|Traceback)(?![\w-])"
    r"(?=[^\n:]{0,40}:)(?!\()"
)
_ALARMS: Final = ("rror", "xception", "ERROR", "fatal", "FATAL", "panic", "FAIL", "Traceback")
"""A quick test: every line that `_ERROR` finds holds one of these."""
_ALARM: Final = re.compile("|".join(_ALARMS))
_CODE_LINE: Final = re.compile(r"[{}=;\"'`]|\b(?:new|throw|catch|raise|except|return|import|class|def|function)\b")
_CODE_ENDS: Final = ",;{"  # a line that ends so is code, not a sentence
_TO_QUOTE: Final = re.compile(r"[\s,]")
_WINDOW: Final = 65_536  # characters scanned in one step
_RUNS: Final = re.compile(r"[^\s\"'`<>()\[\]{},;|\\]+")
_SPACED: Final = str.maketrans(dict.fromkeys("\"'`<>()[]{},;|\\", " "))
_JOINTS: Final = re.compile(r"[./:@?=&#-]+")
_PARTS: Final = re.compile(r"[./:@?=&#\s-]+")
_EDGES: Final = ".:!?"


class Mentions:
    """The words of a conversation: how many messages hold each of them, and whose messages these are."""

    def __init__(self) -> None:
        self.messages: Final = Counter[str]()  # number of messages that hold a word
        self.agent: Final = Counter[str]()  # number of the agent's messages among them (texts and calls)
        self.user: Final = set[str]()  # words of the user's messages

    def add(self, role: str, text: str, arguments: Iterable[str]) -> None:
        """Count the words of a message, in its text and in its calls' arguments (JSON)."""
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

    `known` are words that the view holds elsewhere (`words_of`); they are not repeated. `least` is the lowest chance of
    reuse per character of a value that is kept. `is_argument` says that the agent wrote the text.
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
    """Return the candidates with at least `least` chance of reuse per character, the highest first.

    Values that are known from elsewhere are left out.
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
    """Return the features that predict whether a value is used again, in the order of `WEIGHTS`."""
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


def _own_odds(candidate: Candidate, *, is_argument: bool) -> float:
    """Return the part of the log-odds that `_own_features` give: their weighted sum, written out to be fast."""
    odds = _BASE + _PER_WORTH * log(candidate.worth) + _PER_LENGTH * log(len(candidate.text) + 2)
    if candidate.times > 1:
        odds += _PER_TIMES * log(candidate.times)
    if is_argument:
        odds += _OF_ARGUMENT
    if candidate.label:
        odds += _OF_LABEL
    return odds + _OF_KIND[candidate.kind]


def _mention_features(held: int, said: int, is_users: bool) -> list[float]:
    return [log1p(held), held > 1, log1p(said), said > 0, is_users]


@lru_cache(maxsize=4096)
def _odds_of_mentions(held: int, said: int, is_users: bool) -> float:
    return _sum_of(_MENTION_WEIGHTS, _mention_features(held, said, is_users))


def chance_of(features: Iterable[float], weights: Iterable[float] = WEIGHTS) -> float:
    """Return the probability that a later call uses a value."""
    return 1 / (1 + exp(-_sum_of(weights, features)))


def _sum_of(weights: Iterable[float], features: Iterable[float]) -> float:
    summed: float = sum(map(mul, weights, features))
    return summed


def _runs_in(text: str) -> list[str]:
    """Return the runs of a text, like `_RUNS` but faster for ASCII."""
    return text.translate(_SPACED).split() if text.isascii() else _RUNS.findall(text)


def _runs_of(text: str) -> set[str]:
    """Return the runs of a text. It is scanned in windows of whole lines, so that other threads get their turn."""
    runs: set[str] = set()
    start = 0
    while start < len(text):
        end = text.find("\n", start + _WINDOW) + 1 or len(text)
        runs.update(_runs_in(text[start:end]))
        start = end
    return runs


def words_of(text: str) -> set[str]:
    """Return the words of a text and their parts (the names in a path), for the `known` of `digest_of`.

    A word before a colon is included with and without the colon.
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
    """Return the first line that reports an error; empty if none does."""
    if ":" not in text or not any(alarm in text for alarm in _ALARMS):
        return ""
    text = ends_of(_printed(text))
    line_end = 0
    while (alarm := _ALARM.search(text, line_end)) is not None:
        line_start = text.rfind("\n", 0, alarm.start()) + 1
        line_end = text.find("\n", alarm.start()) + 1 or len(text)
        found = _ERROR.search(text, line_start, line_end)  # an earlier match rules out a later one
        if found is None or found.start() - line_start > _ERROR_BEGINS:
            continue
        line = text[line_start:line_end].strip()
        if line[-1] not in _CODE_ENDS and not _CODE_LINE.search(text, line_start, found.start()):
            return line
    return ""


def _cut(line: str, most: int) -> str:
    """Return an error line cut to `most` characters; nothing if `most` is tiny."""
    if most < _LEAST:
        return ""
    if len(line) <= most:
        return line
    beginning, space, _ = line[:most].rpartition(" ")  # cut between words if possible
    return f"{beginning.rstrip(CUT) if space else line[: most - 1]}{CUT}"


def _printed(text: str) -> str:
    """Return the texts of a JSON document, joined; any other text unchanged."""
    may_be_one = text.lstrip().startswith(OPENING) and not is_mostly_brackets(text)
    document = read_json_ends(text, *_DOCUMENT_ENDS) if may_be_one else None
    return text if document is None else "\n".join(leaf.text for leaf in walk(document) if is_text(leaf.text)) or text


def _chosen(ranked: Iterable[Candidate], error: str, budget: int) -> list[Candidate]:
    """Return the first candidates that fit into the budget, without those that the error line holds."""
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
    """Return the digest's text: values in their order, grouped by label. Long groups repeat the label."""
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

"""Shortens plain text: terminal noise, encoded bytes, repeated log lines, HTML pages."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from html import unescape
from itertools import groupby, islice, repeat
from operator import eq
from string import ascii_letters
from typing import Any, Final

import re2  # type: ignore[import-untyped]  # the package ships no types

from proxy.textscan.document import quoted

_RE2: Final[Any] = re2
FULL_OUTPUT: Final = "full_output"  # field of a compacted document that names the ref


def omission_mark(what: str, kinds: str = "") -> str:
    """Return the mark of an omission: `what` is its amount, `kinds` describes it."""
    return f"… ({what} omitted{f': {kinds}' if kinds else ''})"


def ending_mark(ref: str) -> str:
    """Return the last line of a text with omissions."""
    return f"[... compacted; full output: {ref} ...]"


def names_ref(text: str, ref: str) -> bool:
    """Tell whether a text holds a mark, of a compaction or a truncation, that names `ref` as its original."""
    return f"; full output: {ref} ...]" in text or f"{quoted(FULL_OUTPUT)}:{quoted(ref)}" in text


_WORDS: Final = (
    r"abort|cannot|can't|could not|couldn't|crash|critical|denied|deprecat|error|exception|fail|fatal"
    r"|forbidden|invalid|killed|missing|not found|out of memory|panic|refused|rejected|segfault"
    r"|segmentation fault|severe|stack trace|time[d]? ?out|traceback|unable|unauthori[sz]ed|unreachable|warn"
    r"|错误|失败|异常|警告|告警|报错|出错|超时|拒绝|致命|崩溃|无法|中断|终止|无效|缺失|未找到|不存在|未授权"
    r"|錯誤|失敗|異常|逾時|拒絕|無法"
)
"""Literals or nearly so, which makes a search one pass."""
_WORD: Final = re.compile(_WORDS)
_REST_OF_LINE: Final = _RE2.compile(f"(?:{_WORDS})[^\n]*".encode())
"""The same for long texts, to the end of the line. RE2 takes a tenth of the time there; for short ones it is slower."""


def has_alarm(text: str) -> bool:
    """Tell whether a short text holds an alarm word."""
    return _WORD.search(text.lower()) is not None


def alarming_lines(text: str) -> Iterator[int]:
    """Yield the number of each line with an alarm word, counted from 0."""
    told = text.lower().encode("utf-8", "surrogatepass")
    number = last = 0
    for found in _REST_OF_LINE.finditer(told):
        start = found.start()
        number += told.count(b"\n", last, start)
        last = start
        yield number


_TOLD_LINES: Final = 3  # lines with an alarm word that are kept of an omission
_TOLD_LINE: Final = 160  # characters of the longest line that is kept
_WORD_ENDS: Final = 24  # a cut moves by up to so many characters to fall between words


def head_and_tail(text: str, size: int) -> str:
    """Return a text; of one longer than `size` characters its head and tail.

    Between them are a mark with the size of the omission, and the omitted lines that hold alarm words.
    """
    if len(text) <= size:
        return text
    head, tail = text[: size - size // 2], text[len(text) - size // 2 :]
    middle = text[len(head) : len(text) - len(tail)]
    lines = middle.split("\n")
    whole = (lines[number] for number in alarming_lines(middle) if 0 < number < len(lines) - 1)
    told = list(islice(dict.fromkeys(line.strip() for line in whole if len(line) <= _TOLD_LINE), _TOLD_LINES))
    for line in told:
        head, tail = head[: len(head) - len(line) // 2], tail[len(line) // 2 :]
    stop, start = head.rfind(" ", len(head) - _WORD_ENDS) + 1, tail.find(" ", 0, _WORD_ENDS) + 1
    head, tail = head[: stop or None].rstrip(), tail[start:].lstrip()
    left = len(text) - len(head) - len(tail) - sum(map(len, told))
    return "\n".join(filter(None, [head, omission_mark(f"{left} characters"), *told, tail]))


_PIECE: Final = re.compile(r"[A-Za-z]{1,8}|[0-9]{1,3}|[^\sA-Za-z0-9]{1,3}|\n+")


def weight(text: str) -> int:
    """Return the number of short pieces of words, numbers and signs: an estimate that follows the number of tokens."""
    return len(_PIECE.findall(text))


_WIDE: Final = 80  # a longer run of blanks is not layout

# Colours, cursor movements and window titles. A link (8) stays, since it holds an address. Each repetition ends
# where another class of characters begins, so a search is one pass.
_ESCAPE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\](?!8;)[^\x07\x1b\n]*(?:\x07|\x1b\\)|[()][0-9A-B])")
_BLANKS: Final = re.compile(rf"(?<! ) {{{_WIDE},}}")
_BLANK_ENDS: Final = (" \n", "\t\n")
_EMPTY_LINES: Final = re.compile(r"(?<!\n)\n{3,}")
_STATE: Final = re.compile(r"[\d.,:/%|#=<>~*+\-\s\\━─╸╺█▉▊▋▌▍▎▏░▒▓•●○⠀-⣿]+")
"""The characters that differ between two states of a progress bar."""
_PROGRESS: Final = re.compile(
    r"%|/s\b|(?<![\d./])\d[\d.]*+[A-Za-z ]{0,4}/ ?\d[\d.]*+(?!/)|[━─╸╺█▉▊▋▌▍▎▏░▒▓•●○⠀-⣿]|[|=#]{2}"
)
"""Signs of a progress bar. In other text a carriage return ends a line, as in some tables."""
_UNIT: Final = re.compile(r"(?<=#)[A-Za-z?]{1,5}(?=#|$)")  # a unit of measure between two numbers (kB, MiB, eta, s)


def strip_noise(text: str) -> str:
    """Return the text without terminal escapes, overwritten progress bars, trailing blanks and runs of empty lines."""
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    if "\r" in text or any(end in text for end in _BLANK_ENDS) or text.endswith((" ", "\t")):
        lines = [line.rstrip(" \t\r") for line in text.split("\n")]
        text = "\n".join([_last_state(line) if "\r" in line else line for line in lines])
    if "\n\n\n" in text:
        text = _EMPTY_LINES.sub("\n\n", text)
    return _BLANKS.sub(" ", text) if " " * _WIDE in text else text


def _last_state(line: str) -> str:
    """Return a line without progress states that a later state of the same kind overwrote."""
    states = line.split("\r")
    if _PROGRESS.search(line) is None:
        return "\r".join(filter(None, states))
    kinds = [_UNIT.sub("", _STATE.sub("#", state)).replace("#", "") for state in states]
    kept = [
        state
        for place, state in enumerate(states)
        if state and (place + 1 == len(states) or kinds[place] != kinds[place + 1])
    ]
    return "\r".join(kept)


SMALLEST: Final = 200  # characters of the shortest blob

_SAMPLE: Final = 2000
# Tried once for each run, at its beginning.
_RUN: Final = re.compile(rf"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{{{SMALLEST},}}={{0,2}}")
_SHORTEST_WRAPPED: Final = 60
# The last line may be short, so that a match always ends; otherwise each line would be tried in vain.
_WRAPPED: Final = re.compile(r"\n((?:[A-Za-z0-9+/]{60,80}\r?\n){3,}[A-Za-z0-9+/]{1,80}={0,2})(?=\r?$)", re.MULTILINE)


def without_blobs(text: str) -> str:
    """Return the text with a mark in place of each run of encoded bytes."""
    # Usually no word is long enough.
    lines = [line for line in text.split("\n") if len(line) >= _SHORTEST_WRAPPED]
    longest = max(map(len, "\n".join(lines).split()), default=0)
    if longest >= SMALLEST:
        text = _RUN.sub(lambda found: _marked(found[0]), text)
    if longest >= _SHORTEST_WRAPPED and "\n" in text:
        text = _WRAPPED.sub(lambda found: f"\n{_marked(found[1])}", f"\n{text}")[1:]
    return text


def _marked(run: str) -> str:
    kind = _kind_of_bytes("".join(run[:_SAMPLE].split()))
    return run if kind is None else omission_mark(f"{len(run)} characters of {kind}")


def _kind_of_bytes(sample: str) -> str | None:
    """Return `base64` or `hexadecimal` for encoded bytes; None for a run that may be words."""
    digits = sum(map(sample.count, "0123456789"))
    if digits * 4 > len(sample) and all(character in "0123456789abcdefABCDEF" for character in sample):
        return "hexadecimal" if len(set(sample)) > 8 else None
    upper = sum(character.isupper() for character in sample)
    lower = sum(character.islower() for character in sample)
    mixed = min(upper, lower) * 6 > len(sample) and digits * 25 > len(sample)
    return "base64" if mixed and len(set(sample)) > 24 else None


FEWEST: Final = 3  # the shortest run of lines that a mark replaces

# Tried only at the beginning of a word. Letters and digits are disjoint classes, so a search is one pass.
_NUMBERED: Final = re.compile(r"\b[^\W\d]*+\d\w*+")
_REST_OF_NUMBER: Final = re.compile(r"\d\w*+", re.ASCII)
_LETTERS: Final = f"{ascii_letters}_"
_DIGIT: Final = re.compile(r"\d")
_STEP: Final = re.compile(
    r"\n([ \t]{0,8}(?:Collecting|Downloading|Using cached|Requirement already satisfied|Installing collected|Obtaining"
    r"|Preparing|Unpacking|Setting up|Selecting previously|Building wheel|Created wheel|Stored in|Uninstalling"
    r"|npm (?:http|timing|sill|verb|info)|Compiling|Downloaded|Fetching|Resolving|Get:#)\b)[^\n]*"
)
"""A step of an installer. Such lines differ only in the name of a package, so they are of one kind.

The pattern begins with a literal line end, which makes the search fast.
"""
_SHORTEST_KIND: Final = 3
_KINDS_TOLD: Final = 3
_KIND_SHOWN: Final = 60
_TRACE: Final = (" ", "\t")
_THRICE: Final = b"\1\1"


def condense_log(text: str, keep: int) -> str:
    """Return the text with only the first and last `keep` lines of each kind; unchanged if nothing is omitted."""
    lines = text.split("\n")
    if len(lines) < 2 * keep + FEWEST:
        return text
    kinds = _kinds(text) if _DIGIT.search(text) else lines
    repeated = _repeated(lines, kinds, keep)
    told = frozenset(alarming_lines(text))
    for place in told:
        repeated[place] = 0
        inside = place + 1  # a stack trace
        while inside < len(lines) and inside not in told and lines[inside].startswith(_TRACE):
            repeated[inside] = 0
            inside += 1
    return _replaced(lines, repeated, partial(_told, kinds))


def _kinds(text: str) -> list[str]:
    """Return the kind of each line: the line with `#` for each word that holds a digit."""
    if text.isascii():  # the same in half the time
        *befores, last = _REST_OF_NUMBER.split(text)
        text = "#".join([*map(str.rstrip, befores, repeat(_LETTERS)), last])
    else:
        text = _NUMBERED.sub("#", text)
    return _STEP.sub(r"\n\1 #", f"\n{text}").split("\n")[1:]


def _repeated(lines: list[str], kinds: list[str], keep: int) -> bytearray:
    """Return a flag for each line: 1 if it is one of many of its kind, and not among the first or last of them.

    Lines without a number are of one kind only if they are equal and adjacent.
    """
    repeated = bytearray(len(lines))
    total = Counter(kinds)
    places = {kind: list[int]() for kind, count in total.items() if count > 2 * keep and _is_numbered(kind)}
    if places:
        for place, kind in enumerate(kinds):
            if kind in places:
                places[kind].append(place)
        for found in places.values():
            for place in found[keep:-keep]:
                repeated[place] = 1
    follows = bytes(map(eq, lines, islice(lines, 1, None)))
    start = follows.find(_THRICE)
    while start >= 0:
        stop = _end(follows, start)
        if lines[start].strip() and not _is_numbered(kinds[start]):
            repeated[start + 1 : stop] = b"\1" * (stop - start - 1)
        start = follows.find(_THRICE, stop)
    return repeated


def _replaced(lines: list[str], flags: bytearray, mark: Callable[[int, int], str]) -> str:
    """Return the text with a mark in place of each long run of flagged lines, made from its start and its end."""
    kept: list[str] = []
    place = 0
    while (start := flags.find(1, place)) >= 0:
        stop = _end(flags, start)
        kept += lines[place:start]
        kept += [mark(start, stop)] if stop - start >= FEWEST else lines[start:stop]
        place = stop
    return "\n".join([*kept, *lines[place:]])


def _end(flags: bytes | bytearray, start: int) -> int:
    stop = flags.find(0, start)
    return stop if stop >= 0 else len(flags)


def _is_numbered(kind: str) -> bool:
    """Tell whether the lines of a kind differ in numbers, and hold more than numbers."""
    return "#" in kind and len(kind.strip()) >= _SHORTEST_KIND


def _told(kinds: list[str], start: int, stop: int) -> str:
    """Return the mark that replaces a run of lines."""
    counts = Counter(kinds[start:stop]).most_common(_KINDS_TOLD)
    told = ", ".join(f"{count} x {_short(kind)}" for kind, count in counts)
    return omission_mark(f"{stop - start} lines", told)


def _short(kind: str) -> str:
    stripped = kind.strip()
    return stripped if len(stripped) <= _KIND_SHOWN else f"{stripped[:_KIND_SHOWN]}…"


# ----------------------------------------------------------------------------- lists, diffs, traces of calls

UNDER: Final = "== "
"""The prefix of a heading. Each line below it began with the rest of the heading, up to the next heading."""

_SHARED: Final = re.compile(
    r"\n(?:([^\s:=][^:\n]{0,400}+:)(?=\d+[:-])"  # grep: the file of a match
    r"|([-bcdlps](?:[-r][-w][-xsStT]){3}[.+@]? +\d+ +\S+ +\S+)(?= ))"  # ls -l: everything before the size
)
_FEWEST_GROUPED: Final = 4  # lines of the shortest list that is grouped


def group_lines(text: str) -> str:
    """Return the text with the shared beginnings of `grep -n` or `ls -l` lines as headings. Lossless."""
    lines = f"\n{text}"  # each line begins with its line end
    if f"\n{UNDER}" in lines:
        return text
    first, *parts = _SHARED.split(lines)
    files, listings, rests = parts[::3], parts[1::3], parts[2::3]
    if len(rests) < _FEWEST_GROUPED:
        return text
    kept = [first[1:]] if first else []
    under = ""
    for file, listing, rest in zip(files, listings, rests, strict=True):
        shared = file or listing
        if shared != under:
            under = shared
            kept.append(UNDER + under)
        own, follows, others = rest.partition("\n")
        kept.append(own)
        if follows:  # lines without a shared beginning
            kept += [UNDER, others]
            under = ""
    whole = "\n".join(kept)
    return whole if len(whole) < len(text) else text


_UNCHANGED: Final = frozenset({" ", ""})  # the beginnings of a context line
_OF_HUNK: Final = _UNCHANGED | {"+", "-", "\\"}
_HUNK: Final = re.compile(r"^@@ -\d+(?:,\d+)? \+\d+(?:,\d+)? @@", re.MULTILINE)
_LIBRARY: Final = re.compile(
    r"[/\\](?:site-packages|dist-packages|node_modules|lib[/\\]python3?[\d.]*)[/\\]|\(?node:internal/|<frozen "
    r"|^[ \t]+at (?:java|javax|jdk|sun|com\.sun|org\.(?:springframework|apache|junit|hibernate|eclipse)|kotlin)\.",
    re.MULTILINE,
)
_LIBRARY_SIGNS: Final = ("-packages", "node_modules", "python", "node:internal/", "<frozen ", " at ", "\tat ")
"""A quick test: each text with a match of `_LIBRARY` holds one of these."""
_FRAME: Final = re.compile(r"^\s+(?:at \S|File \"[^\"]*\", line \d)")


def fold_lines(text: str) -> str:
    """Return the text without the middle of a diff's context, and without library frames of stack traces."""
    if "@@ -" in text and _HUNK.search(text):
        lines = text.split("\n")
        text = _replaced(lines, _contexts(lines), partial(_counted, "lines of context"))
    if any(sign in text for sign in _LIBRARY_SIGNS) and _LIBRARY.search(text):
        lines = text.split("\n")
        text = _replaced(lines, _library_frames(lines), partial(_counted, "lines of libraries"))
    return text


def _counted(what: str, start: int, stop: int) -> str:
    return omission_mark(f"{stop - start} {what}")


def _contexts(lines: Sequence[str]) -> bytearray:
    """Return a flag for each line: 1 in the middle of a diff's context. One line beside each change stays."""
    inside, of_context = False, bytearray()
    for line in lines:
        first = line[:1]
        inside = (inside and first in _OF_HUNK) or line.startswith("@@ ")
        of_context.append(inside and first in _UNCHANGED)
    before, after = b"\1" + of_context[:-1], of_context[1:] + b"\1"
    return bytearray(map(min, before, of_context, after))


def _library_frames(lines: Sequence[str]) -> bytearray:
    """Return a flag for each line: 1 for a library frame or the code line of one."""
    frames = bytearray()
    inside = False
    for line in lines:
        is_frame = _FRAME.match(line) is not None
        inside = _LIBRARY.search(line) is not None if is_frame else inside and line.startswith("    ")
        frames.append(inside)
    return frames


# ----------------------------------------------------------------------------------------------- pages
#
# Pages are read tag by tag, without a tree: common parsers take quadratic time on deep nesting.

_TAG: Final = re.compile(r"<(/?)([A-Za-z][A-Za-z0-9-]*+)([^<>]*+)>")
_ATTRIBUTE: Final = re.compile(r"(?<![^\s\"'])([A-Za-z-]+)=(?:\"([^\"]*)\"|'([^']*)'|([^\s\"'<>]+))")
_SPACE: Final = re.compile(r"\s+")
_HIDDEN: Final = re.compile(r"<(?:(script|style|svg|noscript|template|head)\b|!--)", re.IGNORECASE)
_TITLE: Final = re.compile(r"<title[^<>]*>([^<]*)<", re.IGNORECASE)
_PAGE: Final = ("<!doctype html", "<html", "<head", "<body")
_CLOSING: Final = re.compile(r"</(?:a|button|div|form|h[1-6]|label|li|p|section|span|table|td|tr|ul)>", re.IGNORECASE)
_FEWEST_CLOSINGS: Final = 8
_DENSITY: Final = 200

_BLOCKS: Final = frozenset(
    "address article aside blockquote body br dd details div dl dt fieldset figcaption figure "  # noqa: SIM905 - readable
    "footer form h1 h2 h3 h4 h5 h6 header hr html li main nav ol option p pre section select "
    "summary table tbody tfoot thead title tr ul".split()
)
"""Elements that begin a line."""
_CELLS: Final = frozenset({"td", "th"})
_SHOWN: Final = {
    "a": ("href", "id", "name", "aria-label", "title"),
    "button": ("id", "name", "value", "type", "aria-label", "title", "disabled"),
    "form": ("id", "name", "action", "method"),
    "iframe": ("src", "id", "name", "title"),
    "img": ("alt",),
    "input": ("id", "name", "type", "value", "placeholder", "aria-label", "checked", "disabled"),
    "label": ("for",),
    "option": ("value", "selected"),
    "select": ("id", "name", "aria-label"),
    "textarea": ("id", "name", "placeholder", "aria-label"),
}
"""Tags that are kept, with their kept attributes."""
_FLAGS: Final = frozenset({"checked", "disabled", "selected"})
_FLAGGED: Final = frozenset(name for name, shown in _SHOWN.items() if not _FLAGS.isdisjoint(shown))
_LONGEST_VALUE: Final = 300


def is_markup(text: str) -> bool:
    """Tell whether a text is an HTML page or a part of one: it begins with a tag and has many."""
    start = text[:2000].lstrip().lower()
    if start.startswith(_PAGE):
        return True
    if not start.startswith("<") or start.startswith("<?xml"):
        return False
    closings = len(_CLOSING.findall(text))
    return closings >= _FEWEST_CLOSINGS and closings * _DENSITY >= len(text)


def page_text(text: str) -> str:
    """Return the visible text of a page, a line for each block."""
    title = _TITLE.search(text)
    lines: list[str] = [_SPACE.sub(" ", _entities(title[1])).strip()] if title is not None else []
    first, *parts = _TAG.split(_visible(text))
    line = [_entities(first)]
    for closes, tag, rest, after in zip(parts[::4], parts[1::4], parts[2::4], parts[3::4], strict=True):
        name = tag.lower()
        if name in _BLOCKS:
            if line:
                _end_line(line, lines)
        elif name in _CELLS:
            line.append("" if closes else " | ")
        if name in _SHOWN:
            line.append(_kept_tag(bool(closes), name, rest))
        if line or after.strip():
            line.append(_entities(after))
    _end_line(line, lines)
    return "\n".join(_once(lines))


def _once(lines: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a page, with a mark in place of repeated runs, such as a second menu."""
    seen: set[str] = set()

    def is_again(line: str) -> bool:
        before = len(seen)
        seen.add(line)
        return len(seen) == before

    for again, group in groupby(lines, key=is_again):
        run = list(group)
        yield from [omission_mark(f"{len(run)} lines", "as above")] if again and len(run) >= FEWEST else run


def _end_line(line: list[str], lines: list[str]) -> None:
    joined = " ".join("".join(line).split())
    if joined and joined != "|":
        lines.append(joined)
    line.clear()


def _kept_tag(closes: bool, name: str, rest: str) -> str:
    shown_attributes = _SHOWN[name]
    if closes:
        return f"</{name}>" if name in {"a", "button"} else ""
    values: dict[str, str] = {}
    for attribute, double, single, bare in _ATTRIBUTE.findall(rest):
        key = attribute.lower()
        if key in shown_attributes and key not in values:
            values[key] = double or single or bare
    told = [f"{key}={_quoted_value(value)}" for key, value in values.items() if value and key not in _FLAGS]
    if name in _FLAGGED:
        flags = [word for word in rest.lower().split() if word in _FLAGS and word in shown_attributes]
        told += list(dict.fromkeys([*flags, *(key for key in values if key in _FLAGS)]))
    if name in {"img", "label", "option"} and not told:
        return ""
    return f"<{' '.join([name, *told])}>"


def _quoted_value(value: str) -> str:
    if value.isalnum() and len(value) <= _LONGEST_VALUE:
        return value
    value = _entities(_SPACE.sub(" ", value))
    if len(value) > _LONGEST_VALUE:
        value = value[:_LONGEST_VALUE] + omission_mark(f"{len(value) - _LONGEST_VALUE} characters")
    return value if value.isalnum() else f'"{value}"'


def _entities(text: str) -> str:
    if "&" not in text:
        return text
    try:
        return unescape(text)
    except ValueError:  # a numeric entity with more digits than Python parses
        return text


def _visible(text: str) -> str:
    """Return the page without scripts, styles, drawings and comments; an unclosed one stays."""
    kept: list[str] = []
    last = position = 0
    endless: set[str] = set()
    while (found := _HIDDEN.search(text, position)) is not None:
        name = (found[1] or "--").lower()
        position = found.end()
        if name in endless:
            continue
        end = _HIDDEN_ENDS[name].search(text, position)
        if end is None:
            endless.add(name)
            continue
        kept.append(text[last : found.start()])
        last = position = end.end()
    kept.append(text[last:])
    return " ".join(kept)


_HIDDEN_ENDS: Final = {
    "--": re.compile("-->"),
    **{
        name: re.compile(f"</{name}[^<>]*>", re.IGNORECASE)
        for name in ("script", "style", "svg", "noscript", "template", "head")
    },
}

"""Where JSON documents stand in a text: the whole of it, line by line, or between other lines.

A document inside a text begins on a line of its own or after a colon and ends where its line ends, or it is
what a string in quotes holds, as Python writes its objects (`text='{"a": 1}'`); and it is worth the trouble.
Where the whole text is one line, as Python writes an object, a long text in quotes is found as well, with its
escapes undone: in several lines it may be a program, which must stay as it is. What cannot be delimited for
sure is text. It does not know what becomes of a document.
"""

from __future__ import annotations

import re
from itertools import chain
from typing import Final

from msgspec import Struct

from proxy.textscan.document import JsonValue, UnreadableError, read, read_at

SMALLEST: Final = 60
"""Characters of the smallest document that is looked for between other lines."""

_AHEAD: Final = r"(?=\[\s{0,80}[\[{\"]|\{\s{0,80}\")(?=[^\n]{60}|[^\n]*[{[,]\s*$)"
_BEGINNING: Final = re.compile(rf"\n[ \t]*+{_AHEAD}|: {{1,4}}{_AHEAD}|=(?=['\"])", re.MULTILINE)
"""Where a document may begin: its line is long enough for one from here on, or ends where one is open.

Each alternative begins with a character of its own, so that a search passes over all others quickly.
"""
_AT_FIRST: Final = re.compile(rf"[ \t]*+{_AHEAD}", re.MULTILINE)
"""The same where the text begins."""
_LITERAL: Final = re.compile(r"'((?:[^'\\\n]++|\\.)*+)'|\"((?:[^\"\\\n]++|\\.)*+)\"")
_ESCAPE: Final = re.compile(r"\\(?:([nrt'\"\\])|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|)")
_LETTERS: Final = {"n": "\n", "r": "\r", "t": "\t"}
_LONG_TEXT: Final = 200
"""Characters of the shortest text in quotes that is looked for."""
_END_OF_LINE: Final = "\\n"
_TRIES: Final = 4
"""Places in one line where a document is looked for."""
_DUST: Final = 100_000
"""Of longer texts, those that are little but brackets and commas are not read."""
_OPEN: Final = ("{", "[", ",")
_CONTAINERS: Final = ("{", "[")


class Embedded(Struct, frozen=True, kw_only=True):
    """A document, or a text that was in quotes, and the text that it was."""

    source: str
    value: JsonValue
    """The document; where there is one on each line, the list of them; the text."""
    is_lines: bool = False
    """Whether it is a document on each line (JSON Lines)."""


def pieces(text: str) -> list[str | Embedded]:
    """Return the text in pieces: documents, and what stands between them. Joined, they are the text."""
    if len(text) > _DUST and sum(map(text.count, ",:[{")) * 3 > len(text):
        return [text]
    whole = read(text)
    if whole is not None:
        return [Embedded(source=text, value=whole)]
    lines = _json_lines(text)
    if lines is not None:
        return [Embedded(source=text, value=lines, is_lines=True)]
    return _between(text)


def _json_lines(text: str) -> list[JsonValue] | None:
    """Return the documents of a text that has one on each line, two at least; None for any other text."""
    stripped = text.strip()
    if not stripped.startswith(_CONTAINERS) or "\n" not in stripped:
        return None
    values: list[JsonValue] = []
    for line in text.split("\n"):
        if not line.strip():
            continue
        value = read(line)
        if value is None:
            return None
        values.append(value)
    return values


def _between(text: str) -> list[str | Embedded]:
    found: list[str | Embedded] = []
    last = 0
    # Documents over several lines may fail late; what is spent on failures is bounded.
    budget = len(text) // 2 + 4096
    end = tries = 0
    first, after = len(text) - len(text.lstrip()), len(text.rstrip())
    is_line = "\n" not in text[first:after]
    at_first = _AT_FIRST.match(text)
    for beginning in chain((at_first,) if at_first else (), _BEGINNING.finditer(text)):
        start = beginning.end()
        if start >= end:
            end, tries = _line_end(text, start), 0
        if start < last or tries == _TRIES:
            continue
        if text[start] not in "'\"":
            tries += 1
            # The whole text is no document: `pieces` has looked.
            is_whole = start <= first and end >= after
            document, spent = _bare(text, start, end, budget, is_whole=is_whole)
            budget -= spent
        elif is_line or text.startswith(_CONTAINERS, start + 1):
            literal = _LITERAL.match(text, start)
            document = _quoted(literal, is_line=is_line) if literal else None
            # What ends soon has cost nothing.
            tries += literal is None or text.startswith(_CONTAINERS, start + 1)
        else:
            continue
        if document is None:
            continue
        if start > last:
            found.append(text[last:start])
        found.append(document)
        last = start + len(document.source)
    if last < len(text):
        found.append(text[last:])
    return found


def _bare(text: str, start: int, end: int, budget: int, *, is_whole: bool) -> tuple[Embedded | None, int]:
    """Return the document that begins at `start`, None where there is none, and what was spent in vain.

    `end` is where its line ends; `is_whole` tells that there is no other one, and that it is no document.
    """
    line = text[start:end].rstrip()
    if len(line) >= SMALLEST and not is_whole and (value := read(line)) is not None:
        return Embedded(source=line, value=value), 0
    if not line.endswith(_OPEN) or budget <= 0:
        return None, 0
    try:
        value, stop = read_at(text, start)
    except UnreadableError as error:
        # Besides, an error counts the lines before it.
        return None, error.reached - start + start // 64 + 64
    if text[stop : _line_end(text, stop)].strip() or stop - start < SMALLEST:
        return None, stop - start
    return Embedded(source=text[start:stop], value=value), 0


def _quoted(literal: re.Match[str], *, is_line: bool) -> Embedded | None:
    """Return the document that a string in quotes is, or its text where all is one line; else None."""
    source: str = literal[0]
    if len(source) < SMALLEST:
        return None
    inner: str = literal[1] or literal[2]
    is_text = is_line and len(source) >= _LONG_TEXT and _END_OF_LINE in inner
    is_document = inner.startswith(_CONTAINERS)
    if not (is_text or is_document):
        return None
    try:
        held = _ESCAPE.sub(_character, inner)
    except (ValueError, OverflowError):
        return None  # an escape that Python does not write
    value = read(held) if is_document else None
    if value is not None:
        return Embedded(source=source, value=value)
    return Embedded(source=source, value=held) if is_text else None


def _character(escape: re.Match[str]) -> str:
    """Return what an escape stands for; `ValueError` where Python would not have written it."""
    letter = escape[1]
    if letter is not None:
        return _LETTERS.get(letter, letter)
    return chr(int(escape[2] or escape[3] or escape[4] or "", 16))


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return end if end >= 0 else len(text)

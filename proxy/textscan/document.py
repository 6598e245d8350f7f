"""JSON: read and written so that no value changes, found inside of texts, and its leaves.

Numbers keep their digits (1.10, 1e5, twenty digits), objects their order and their duplicate keys, strings
their characters; only white space and needless escapes go.

A document inside a text begins on a line of its own or after a colon and ends where its line ends, or it is
what a string in quotes holds, as Python writes its objects (`text='{"a": 1}'`). Where the whole text is one
line, a long text in quotes is found as well, with its escapes undone. What cannot be delimited for sure is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain, repeat
from json.encoder import encode_basestring
from operator import add
from typing import Any, Final, TypeAlias, TypeGuard

from msgspec import DecodeError, Raw, Struct
from msgspec.json import Decoder

DEEPEST: Final = 64  # levels of nesting that are looked into; a deeper text is no document here

OBJECTS: Final = frozenset({tuple})
_ARRAYS: Final = frozenset({list})
CONTAINERS: Final = OBJECTS | _ARRAYS  # what objects and arrays are made of
_READ_ITEMS: Final = Decoder(list[Raw])
_READ_MEMBERS: Final = Decoder(dict[str, Raw])  # each as it is written, so that most of them need not be read
_BLANK: Final = 1024  # bytes in which the first that is not blank is looked for
_CONSTANTS: Final = {None: "null", True: "true", False: "false"}
OPENING: Final = ("{", "[")  # what a document begins with
_SURROGATES: Final = re.compile("[\ud800-\udfff]")


class Number(str):
    """A number (or NaN, Infinity) as it was written."""

    __slots__ = ()


JsonValue: TypeAlias = Any
"""A value of a document: an object is a tuple of (name, value), an array a list, a number a `Number`.

A string is a `str`; true, false and null are `True`, `False` and `None`.
"""

Members: TypeAlias = tuple[tuple[str, JsonValue], ...]  # the members of an object in their order, duplicates included


def _members(pairs: list[tuple[str, JsonValue]]) -> Members:
    """Return what an object of a document is; between two such calls other threads get their turn."""
    return tuple(pairs)


def _number(text: str) -> Number:
    """Return what a number of a document is; likewise."""
    return Number(text)


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_members, parse_float=_number, parse_int=_number, parse_constant=_number
)


def is_members(value: JsonValue) -> TypeGuard[Members]:
    """Tell whether a value is an object."""
    return isinstance(value, tuple)


def is_items(value: JsonValue) -> TypeGuard[list[JsonValue]]:
    """Tell whether a value is an array."""
    return isinstance(value, list)


def read(text: str) -> list[JsonValue] | Members | None:
    """Return the object or array that `text` is, white space around it aside; None where it is none."""
    stripped = text.strip(" \t\r\n")
    value, stop = read_at(stripped, 0)
    return value if stop == len(stripped) else None


def read_at(text: str, start: int) -> tuple[list[JsonValue] | Members | None, int]:
    """Return the object or array that begins at `start` and where it stops, or None and how far reading came."""
    if not text.startswith(OPENING, start):
        return None, start
    try:
        value, stop = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return None, error.pos
    except RecursionError:
        return None, len(text)
    # A document with few brackets is not deep: most lines of a log are such ones.
    brackets = text.count("{", start, stop) + text.count("[", start, stop)
    return (None, len(text)) if brackets > DEEPEST and _is_deeper(value) else (value, stop)


def read_ends(text: str, head: int, tail: int) -> list[JsonValue] | Members | None:
    """Return what `read` does; of a longer document what stands within so many bytes of its beginning and its end.

    Nobody looks whether what is left out is deeper than `DEEPEST`, nor for names that stand in one object twice.
    """
    if len(text) <= head + tail or not text.lstrip(" \t\r\n").startswith(OPENING):
        return read(text)
    try:
        value = _ends(text.encode(), head, tail)
    except (DecodeError, UnicodeEncodeError, json.JSONDecodeError, RecursionError):
        return read(text)  # what only Python takes for JSON, or nobody
    return None if _is_deeper(value) else value


def _ends(raw: Raw | bytes, head: int, tail: int, depth: int = 0) -> JsonValue:
    """Return both ends of a value; a string or a number is whole."""
    if depth > DEEPEST:
        raise RecursionError  # each level is read anew
    opening = bytes(memoryview(raw)[:_BLANK]).lstrip()[:1]
    if opening == b"{":
        members = _READ_MEMBERS.decode(raw)
        names = list(members)
        return tuple([(names[at], held) for at, held in _kept(list(members.values()), head, tail, depth + 1)])
    if opening == b"[":
        return [item for _, item in _kept(_READ_ITEMS.decode(raw), head, tail, depth + 1)]
    return _whole(raw)


def _kept(parts: Sequence[Raw], head: int, tail: int, depth: int) -> Iterator[tuple[int, JsonValue]]:
    """Yield the parts of a value at both ends, with their places; of those that are too long their ends."""
    first, last = 0, len(parts)
    while first < last and len(parts[first]) <= head:
        head -= len(parts[first])
        yield first, _whole(parts[first])
        first += 1
    while last > first and len(parts[last - 1]) <= tail:
        last -= 1
        tail -= len(parts[last])
    if last - first == 1:
        yield first, _ends(parts[first], head, tail, depth)
    elif last > first:
        yield first, _ends(parts[first], head, 0, depth)
        yield last - 1, _ends(parts[last - 1], 0, tail, depth)
    yield from ((at, _whole(parts[at])) for at in range(last, len(parts)))


def _whole(raw: Raw | bytes) -> JsonValue:
    return _DECODER.decode(bytes(raw).decode())


def quoted(text: str) -> str:
    """Return a string as JSON: characters as they are, but those that must be escaped."""
    encoded = encode_basestring(text)
    if encoded.isascii() or _SURROGATES.search(encoded) is None:
        return encoded
    # UTF-8 cannot hold a lone surrogate; what was written as an escape stays one.
    return _SURROGATES.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded)


class _Names(dict[str, str]):
    """How names of members are written, each made once."""

    def __missing__(self, name: str) -> str:
        self[name] = written = f"{quoted(name)}:"
        return written


def write(value: JsonValue, text: Callable[[str], str] = quoted) -> str:
    """Return the compact text of a value of a document; `text` is how its strings are written."""
    return _written([value], text, _Names())[0]


def write_lines(values: Iterable[JsonValue]) -> str:
    """Return the compact text of documents that stand on a line each."""
    return "\n".join(_written(values, quoted, _Names()))


def _written(values: Iterable[JsonValue], text: Callable[[str], str], names: _Names) -> list[str]:
    return [
        value
        if type(value) is Number
        else text(value)
        if type(value) is str
        else _written_array(value, text, names)
        if type(value) in _ARRAYS
        else _written_object(value, text, names)
        if type(value) in OBJECTS
        else _CONSTANTS[value]
        for value in values
    ]


def _written_array(items: list[JsonValue], text: Callable[[str], str], names: _Names) -> str:
    width = len(items[0]) if items and type(items[0]) in _ARRAYS else 0
    if width and _ARRAYS.issuperset(map(type, items)) and set(map(len, items)) == {width}:
        # The rows of a table: their cells are written all at once.
        cells = iter(_written(chain.from_iterable(items), text, names))
        return f"[[{'],['.join(map(','.join, zip(*[cells] * width, strict=True)))}]]"
    return f"[{','.join(_written(items, text, names))}]"


def _written_object(members: Members, text: Callable[[str], str], names: _Names) -> str:
    if not members:
        return "{}"
    keys, held = zip(*members, strict=True)
    return f"{{{','.join(map(add, map(names.__getitem__, keys), _written(held, text, names)))}}}"


def _is_deeper(value: JsonValue) -> bool:
    """Tell whether a document has more levels than `DEEPEST`, without descending by recursion."""
    level = [value]
    for _ in range(DEEPEST):
        objects: list[Members] = [item for item in level if type(item) in OBJECTS]
        arrays: list[list[JsonValue]] = [item for item in level if type(item) in _ARRAYS]
        level = [held for item in objects for _, held in item if type(held) in CONTAINERS and held]
        level += [held for item in arrays for held in item if type(held) in CONTAINERS and held]
        if not level:
            return False
    return True


FEWEST: Final = 4  # escapes from which on it pays: the quotation marks cost as much

_TRIPLE: Final = '"""'
_UNSAFE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\u0085\u2028\u2029]")
"""What a reader would not see as it is: a carriage return, escapes of a terminal, half of an emoji."""


def spelled(text: str) -> str:
    """Return a string as it is between triple quotes, or as JSON where that costs no more."""
    escaped = encode_basestring(text)
    if len(escaped) - len(text) - 2 < FEWEST:
        return escaped if escaped.isascii() else quoted(text)
    if _TRIPLE in text or text.startswith('"') or text.endswith(('"', "\\")) or _UNSAFE.search(text):
        return quoted(text)
    prefix = "r" if "\\" in text else ""
    return f"{prefix}{_TRIPLE}{text}{_TRIPLE}"


SMALLEST: Final = 60  # characters of the smallest document that is looked for between other lines

_AHEAD: Final = r"(?=\[\s{0,80}[\[{\"]|\{\s{0,80}\")(?=[^\n]{60}|[^\n]*[{[,]\s*$)"
_NOT_BRIEF: Final = (
    r"(?!'(?:[^'\\\n]{0,57}+|(?:[^'\\\n]|\\.){0,28}+)'|\"(?:[^\"\\\n]{0,57}+|(?:[^\"\\\n]|\\.){0,28}+)\")"
)
"""What begins here is no string in quotes that is too short for a document."""
_BEGINNING: Final = re.compile(rf"\n[ \t]*+{_AHEAD}|: {{1,4}}{_AHEAD}|=(?=['\"]){_NOT_BRIEF}", re.MULTILINE)
"""Where a document may begin: its line is long enough for one from here on, or ends where one is open.

Each alternative begins with a character of its own, so that a search passes over all others quickly.
"""
_AT_FIRST: Final = re.compile(rf"[ \t]*+{_AHEAD}", re.MULTILINE)  # the same where the text begins
_LITERAL: Final = re.compile(r"'((?:[^'\\\n]++|\\.)*+)'|\"((?:[^\"\\\n]++|\\.)*+)\"")
_ESCAPE: Final = re.compile(r"\\(?:([nrt'\"\\])|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|)")
_LETTERS: Final = {"n": "\n", "r": "\r", "t": "\t"}
_LONG_TEXT: Final = 200  # characters of the shortest text in quotes that is looked for
_END_OF_LINE: Final = "\\n"
_TRIES: Final = 4  # places in one line where a document is looked for
_DUST: Final = 100_000  # of longer texts, those that are little but brackets and commas are not read
_MARKS_OF_LINES: Final = ",:[{\n"  # of documents on a line each, the end of a line is what a comma is in a list
_OPEN: Final = ("{", "[", ",")


class Embedded(Struct, frozen=True, kw_only=True):
    """A document, or a text that was in quotes, and the text that it was."""

    source: str
    value: JsonValue  # the document; where there is one on each line, the list of them; the text
    is_lines: bool = False  # whether it is a document on each line (JSON Lines)


def is_dust(text: str, marks: str = ",:[{") -> bool:
    """Tell whether a long text is little but brackets and commas: it is not read as a document."""
    return len(text) > _DUST and sum(map(text.count, marks)) * 3 > len(text)


def pieces(text: str) -> list[str | Embedded]:
    """Return the text in pieces: documents, and what stands between them. Joined, they are the text."""
    if is_dust(text):
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
    if not stripped.startswith(OPENING) or "\n" not in stripped or is_dust(text, _MARKS_OF_LINES):
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
        elif is_line or text.startswith(OPENING, start + 1):
            literal = _LITERAL.match(text, start)
            document = _quoted(literal, is_line=is_line) if literal else None
            # What ends soon has cost nothing.
            tries += literal is None or text.startswith(OPENING, start + 1)
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

    `end` is where its line ends; `is_whole` tells that there is no other line, and that it is no document.
    """
    line = text[start:end].rstrip()
    if len(line) >= SMALLEST and not is_whole and (value := read(line)) is not None:
        return Embedded(source=line, value=value), 0
    if not line.endswith(_OPEN) or budget <= 0:
        return None, 0
    value, stop = read_at(text, start)
    if value is None:  # an error counts the lines before it, too
        return None, stop - start + start // 64 + 64
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
    is_document = inner.startswith(OPENING)
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


class Leaf(Struct, frozen=True, kw_only=True):
    """A string or a number of a JSON document."""

    key: str  # the last name on the way to it; empty where there is none
    text: str  # the string as it reads, or the number as it is written
    is_number: bool


def leaves_of(text: str) -> list[Leaf] | None:
    """Return strings and numbers of a JSON object or array in its order; None where the text is none."""
    document = read(text)
    return None if document is None else list(walk(document))


def walk(document: JsonValue, name: str = "") -> Iterator[Leaf]:
    """Yield the leaves of a document in its order; those of an array have the name that it stands under."""
    named: Iterable[tuple[str, JsonValue]] = document if is_members(document) else zip(repeat(name), document)
    for key, item in named:
        if isinstance(item, Number):
            if item[-1].isdigit():  # not NaN or Infinity, which nobody looks for
                yield Leaf(key=key, text=item, is_number=True)
        elif isinstance(item, str):
            yield Leaf(key=key, text=item, is_number=False)
        elif type(item) in CONTAINERS:
            yield from walk(item, key)

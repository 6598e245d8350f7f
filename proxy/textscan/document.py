"""Reads and writes JSON without changing a value, and finds JSON documents inside of texts.

Numbers keep their digits (1.10, 1e5, twenty digits), objects keep their order and duplicate keys, strings keep their
characters. Only white space and needless escapes are removed.

A document inside of a text begins on a line of its own or after a colon, and ends at the end of a line. Or it is the
content of a quoted string, as in the repr of a Python object (`text='{"a": 1}'`). If the whole text is one line, a
long quoted text is found too, and its escapes are undone. Whatever has no certain end stays text.
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

DEEPEST: Final = 64  # levels of nesting; deeper JSON is treated as text

OBJECTS: Final = frozenset({tuple})
_ARRAYS: Final = frozenset({list})
CONTAINERS: Final = OBJECTS | _ARRAYS  # the Python types of objects and arrays
_READ_ITEMS: Final = Decoder(list[Raw])
_READ_MEMBERS: Final = Decoder(dict[str, Raw])  # raw members, so that most of them need not be parsed
_BLANK: Final = 1024  # the first byte that is not white space is looked for in so many
_CONSTANTS: Final = {None: "null", True: "true", False: "false"}
OPENING: Final = ("{", "[")  # the first character of a document
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
    """Make an object of the document. A Python hook lets other threads take their turn while a document is parsed."""
    return tuple(pairs)


def _number(text: str) -> Number:
    """Make a number of the document, by a Python hook for the same reason."""
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


def read_json(text: str) -> list[JsonValue] | Members | None:
    """Parse a text that is a JSON object or array, with white space around it; None for any other text."""
    stripped = text.strip(" \t\r\n")
    value, stop = read_json_at(stripped, 0)
    return value if stop == len(stripped) else None


def read_json_at(text: str, start: int) -> tuple[list[JsonValue] | Members | None, int]:
    """Parse the object or array that begins at `start`; return it and its end, or None and how far parsing came."""
    if not text.startswith(OPENING, start):
        return None, start
    try:
        value, stop = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        return None, error.pos
    except RecursionError:
        return None, len(text)
    # With few brackets a document cannot be deep. This is the usual case for lines of a log.
    brackets = text.count("{", start, stop) + text.count("[", start, stop)
    return (None, len(text)) if brackets > DEEPEST and _is_deeper(value) else (value, stop)


def read_json_ends(text: str, head: int, tail: int) -> list[JsonValue] | Members | None:
    """Parse like `read_json`, but of a long document only `head` bytes of its beginning and `tail` bytes of its end.

    The part left out is not checked for depth. Of duplicate keys in one object only the last is kept.
    """
    if len(text) <= head + tail or not text.lstrip(" \t\r\n").startswith(OPENING):
        return read_json(text)
    try:
        value = _ends(text.encode(), head, tail)
    except (DecodeError, UnicodeEncodeError, json.JSONDecodeError, RecursionError):
        return read_json(text)  # JSON that only Python's parser accepts, or no JSON at all
    return None if _is_deeper(value) else value


def _ends(raw: Raw | bytes, head: int, tail: int, depth: int = 0) -> JsonValue:
    """Return both ends of a value; strings and numbers stay whole."""
    if depth > DEEPEST:
        raise RecursionError  # each level is parsed again, so the depth must be bounded
    opening = bytes(memoryview(raw)[:_BLANK]).lstrip()[:1]
    if opening == b"{":
        members = _READ_MEMBERS.decode(raw)
        names = list(members)
        return tuple([(names[at], held) for at, held in _kept(list(members.values()), head, tail, depth + 1)])
    if opening == b"[":
        return [item for _, item in _kept(_READ_ITEMS.decode(raw), head, tail, depth + 1)]
    return _whole(raw)


def _kept(parts: Sequence[Raw], head: int, tail: int, depth: int) -> Iterator[tuple[int, JsonValue]]:
    """Yield the parts at both ends of a value with their indexes; of parts that are too long, their own ends."""
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
    """Return a string as JSON; only characters that must be escaped are."""
    encoded = encode_basestring(text)
    if encoded.isascii() or _SURROGATES.search(encoded) is None:
        return encoded
    # UTF-8 cannot encode a lone surrogate, so it stays an escape.
    return _SURROGATES.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded)


class _Names(dict[str, str]):
    """The JSON of member names, each made once."""

    def __missing__(self, name: str) -> str:
        self[name] = written = f"{quoted(name)}:"
        return written


def write_json(value: JsonValue, text: Callable[[str], str] = quoted) -> str:
    """Return the compact JSON of a value; `text` writes its strings."""
    return _written([value], text, _Names())[0]


def write_json_lines(values: Iterable[JsonValue]) -> str:
    """Return the compact JSON of documents, one on each line."""
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
        # Rows of equal width: write all their cells at once.
        cells = iter(_written(chain.from_iterable(items), text, names))
        return f"[[{'],['.join(map(','.join, zip(*[cells] * width, strict=True)))}]]"
    return f"[{','.join(_written(items, text, names))}]"


def _written_object(members: Members, text: Callable[[str], str], names: _Names) -> str:
    if not members:
        return "{}"
    keys, held = zip(*members, strict=True)
    return f"{{{','.join(map(add, map(names.__getitem__, keys), _written(held, text, names)))}}}"


def _is_deeper(value: JsonValue) -> bool:
    """Tell whether a document has more levels than `DEEPEST`, without recursion."""
    level = [value]
    for _ in range(DEEPEST):
        objects: list[Members] = [item for item in level if type(item) in OBJECTS]
        arrays: list[list[JsonValue]] = [item for item in level if type(item) in _ARRAYS]
        level = [held for item in objects for _, held in item if type(held) in CONTAINERS and held]
        level += [held for item in arrays for held in item if type(held) in CONTAINERS and held]
        if not level:
            return False
    return True


FEWEST: Final = 4  # triple quotes cost as much as so many escapes

_TRIPLE: Final = '"""'
_UNSAFE: Final = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\u0085\u2028\u2029]")
"""Characters that would not be visible: carriage returns, terminal escapes, lone surrogates."""


def string_literal(text: str) -> str:
    """Return a string verbatim between triple quotes, or as JSON if that is no longer."""
    escaped = encode_basestring(text)
    if len(escaped) - len(text) - 2 < FEWEST:
        return escaped if escaped.isascii() else quoted(text)
    if _TRIPLE in text or text.startswith('"') or text.endswith(('"', "\\")) or _UNSAFE.search(text):
        return quoted(text)
    prefix = "r" if "\\" in text else ""
    return f"{prefix}{_TRIPLE}{text}{_TRIPLE}"


SMALLEST: Final = 60  # characters of the smallest document that is found inside of a text

_AHEAD: Final = r"(?=\[\s{0,80}[\[{\"]|\{\s{0,80}\")(?=[^\n]{60}|[^\n]*[{[,]\s*$)"
_NOT_BRIEF: Final = (
    r"(?!'(?:[^'\\\n]{0,57}+|(?:[^'\\\n]|\\.){0,28}+)'|\"(?:[^\"\\\n]{0,57}+|(?:[^\"\\\n]|\\.){0,28}+)\")"
)
"""A lookahead: no quoted string begins here that is too short to hold a document."""
_BEGINNING: Final = re.compile(rf"\n[ \t]*+{_AHEAD}|: {{1,4}}{_AHEAD}|=(?=['\"]){_NOT_BRIEF}", re.MULTILINE)
"""A place where a document may begin: the rest of its line is long enough, or ends with an open bracket.

Each alternative begins with a literal character, which makes the search fast.
"""
_AT_FIRST: Final = re.compile(rf"[ \t]*+{_AHEAD}", re.MULTILINE)  # the same at the beginning of the text
_LITERAL: Final = re.compile(r"'((?:[^'\\\n]++|\\.)*+)'|\"((?:[^\"\\\n]++|\\.)*+)\"")
_ESCAPE: Final = re.compile(r"\\(?:([nrt'\"\\])|x([0-9a-f]{2})|u([0-9a-f]{4})|U([0-9a-f]{8})|)")
_LETTERS: Final = {"n": "\n", "r": "\r", "t": "\t"}
_LONG_TEXT: Final = 200  # characters of the shortest quoted text that is found
_END_OF_LINE: Final = "\\n"
_TRIES: Final = 4  # places in one line that are tried
_DUST: Final = 100_000  # a longer text that is mostly brackets is not parsed
_MARKS_OF_LINES: Final = ",:[{\n"  # in JSON Lines a line end separates, as a comma does in a list
_OPEN: Final = ("{", "[", ",")


class Embedded(Struct, frozen=True, kw_only=True):
    """A document or a quoted text, parsed, with its source."""

    source: str
    value: JsonValue  # the document, the list of documents (JSON Lines), or the text
    is_lines: bool = False  # whether it is JSON Lines


def is_mostly_brackets(text: str, marks: str = ",:[{") -> bool:
    """Tell whether a long text consists mostly of brackets and commas; it is not parsed as JSON."""
    return len(text) > _DUST and sum(map(text.count, marks)) * 3 > len(text)


def split_documents(text: str) -> list[str | Embedded]:
    """Split a text into documents and the text between them. Joined, the sources are the text."""
    if is_mostly_brackets(text):
        return [text]
    whole = read_json(text)
    if whole is not None:
        return [Embedded(source=text, value=whole)]
    lines = _json_lines(text)
    if lines is not None:
        return [Embedded(source=text, value=lines, is_lines=True)]
    return _between(text)


def _json_lines(text: str) -> list[JsonValue] | None:
    """Return the documents of a JSON Lines text of two lines or more; None for any other text."""
    stripped = text.strip()
    if not stripped.startswith(OPENING) or "\n" not in stripped or is_mostly_brackets(text, _MARKS_OF_LINES):
        return None
    values: list[JsonValue] = []
    for line in text.split("\n"):
        if not line.strip():
            continue
        value = read_json(line)
        if value is None:
            return None
        values.append(value)
    return values


def _between(text: str) -> list[str | Embedded]:
    found: list[str | Embedded] = []
    last = 0
    # A document of several lines may turn out invalid late. The total cost of such attempts is bounded.
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
            # The whole text is not a document: `split_documents` has tried.
            is_whole = start <= first and end >= after
            document, spent = _bare(text, start, end, budget, is_whole=is_whole)
            budget -= spent
        elif is_line or text.startswith(OPENING, start + 1):
            literal = _LITERAL.match(text, start)
            document = _quoted(literal, is_line=is_line) if literal else None
            # An attempt that ends soon costs nothing.
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
    """Return the document that begins at `start` (or None), and the characters that were parsed in vain.

    `end` is the end of its line. `is_whole` says that this line is the whole text, which is known not to be a document.
    """
    line = text[start:end].rstrip()
    if len(line) >= SMALLEST and not is_whole and (value := read_json(line)) is not None:
        return Embedded(source=line, value=value), 0
    if not line.endswith(_OPEN) or budget <= 0:
        return None, 0
    value, stop = read_json_at(text, start)
    if value is None:  # the error's line number was counted too
        return None, stop - start + start // 64 + 64
    if text[stop : _line_end(text, stop)].strip() or stop - start < SMALLEST:
        return None, stop - start
    return Embedded(source=text[start:stop], value=value), 0


def _quoted(literal: re.Match[str], *, is_line: bool) -> Embedded | None:
    """Return the document in a quoted string, or its text if the whole text is one line; else None."""
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
        return None  # not an escape that Python writes
    value = read_json(held) if is_document else None
    if value is not None:
        return Embedded(source=source, value=value)
    return Embedded(source=source, value=held) if is_text else None


def _character(escape: re.Match[str]) -> str:
    """Return the character of an escape. Raises `ValueError` for escapes that Python does not write."""
    letter = escape[1]
    if letter is not None:
        return _LETTERS.get(letter, letter)
    return chr(int(escape[2] or escape[3] or escape[4] or "", 16))


def _line_end(text: str, start: int) -> int:
    end = text.find("\n", start)
    return end if end >= 0 else len(text)


class Leaf(Struct, frozen=True, kw_only=True):
    """A string or a number of a JSON document."""

    key: str  # the nearest member name above it; empty if there is none
    text: str  # the string unescaped, or the number as written
    is_number: bool


def leaves_of(text: str) -> list[Leaf] | None:
    """Return the strings and numbers of a JSON object or array in order; None if the text is not one."""
    document = read_json(text)
    return None if document is None else list(walk(document))


def walk(document: JsonValue, name: str = "") -> Iterator[Leaf]:
    """Yield the leaves of a document in order. The items of an array have the array's key."""
    named: Iterable[tuple[str, JsonValue]] = document if is_members(document) else zip(repeat(name), document)
    for key, item in named:
        if isinstance(item, Number):
            if item[-1].isdigit():  # skip NaN and Infinity
                yield Leaf(key=key, text=item, is_number=True)
        elif isinstance(item, str):
            yield Leaf(key=key, text=item, is_number=False)
        elif type(item) in CONTAINERS:
            yield from walk(item, key)

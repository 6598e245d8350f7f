"""JSON documents read and written so that no value changes.

Numbers keep their digits (1.10, 1e5, twenty digits), objects their order and their duplicate keys, strings
their characters; only white space and needless escapes go. It does not know what is done with a document.
"""

from __future__ import annotations

import json
import re
from json.encoder import encode_basestring
from typing import Any, Final, TypeAlias, TypeGuard

DEEPEST: Final = 64
"""Levels of nesting that are looked into; a deeper text is no document here.

Far below what the interpreter's stack holds, so that the answer never depends on who asks.
"""

_OBJECTS: Final = frozenset({tuple})
_ARRAYS: Final = frozenset({list})
_CONTAINERS: Final = _OBJECTS | _ARRAYS
"""What objects and arrays are made of: types, to look one up being the fastest way to tell."""
_SURROGATES: Final = re.compile("[\ud800-\udfff]")


class Number(str):
    """A number (or NaN, Infinity) as it was written."""

    __slots__ = ()


Value: TypeAlias = Any
"""A value of a document: an object is a tuple of (name, value), an array a list, a number a `Number`.

A string is a `str`; true, false and null are `True`, `False` and `None`.
"""

Members: TypeAlias = tuple[tuple[str, Value], ...]
"""The members of an object in their order, duplicates included."""

_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=tuple, parse_float=Number, parse_int=Number, parse_constant=Number
)


class UnreadableError(Exception):
    """No document stands at a place.

    `reached` is how far reading came: what was spent on finding out.
    """

    def __init__(self, reached: int) -> None:
        super().__init__("no JSON document")
        self.reached = reached


def is_members(value: Value) -> TypeGuard[Members]:
    """Tell whether a value is an object."""
    return isinstance(value, tuple)


def is_items(value: Value) -> TypeGuard[list[Value]]:
    """Tell whether a value is an array."""
    return isinstance(value, list)


def read(text: str) -> list[Value] | Members | None:
    """Return the object or array that `text` is, white space around it aside; None where it is none."""
    stripped = text.strip(" \t\r\n")
    try:
        value, stop = read_at(stripped, 0)
    except UnreadableError:
        return None
    return value if stop == len(stripped) else None


def read_at(text: str, start: int) -> tuple[list[Value] | Members, int]:
    """Return the object or array that begins at `start`, and where it stops.

    Raises:
        UnreadableError: there is none, or it is deeper than `DEEPEST`.
    """
    if text[start : start + 1] not in {"{", "["}:
        raise UnreadableError(start)
    try:
        value, stop = _DECODER.raw_decode(text, start)
    except json.JSONDecodeError as error:
        raise UnreadableError(error.pos) from None
    except RecursionError:
        raise UnreadableError(len(text)) from None
    if _is_deeper(value):
        raise UnreadableError(len(text))
    return value, stop


def write(value: list[Value] | Members) -> str:
    """Return the compact text of a document, an object or an array."""
    written: list[str] = []
    _write(value, written, {})
    return "".join(written)


def quoted(text: str) -> str:
    """Return a string as JSON: characters as they are, but those that must be escaped."""
    encoded = encode_basestring(text)
    if encoded.isascii() or _SURROGATES.search(encoded) is None:
        return encoded
    # UTF-8 cannot hold a lone surrogate; what was written as an escape stays one.
    return _SURROGATES.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded)


def _write(value: Value, written: list[str], names: dict[str, str]) -> None:
    """Add the pieces of the text of an object or an array; `names` are those that were written before."""
    if is_members(value):
        before = "{"
        for name, member in value:
            named = names.get(name)
            if named is None:
                named = names[name] = f"{quoted(name)}:"
            if type(member) in _CONTAINERS:
                written.append(before + named)
                _write(member, written, names)
            else:
                written.append(before + named + _scalar(member))
            before = ","
        written.append("}" if value else "{}")
        return
    before = "["
    for item in value:
        if type(item) in _CONTAINERS:
            written.append(before)
            _write(item, written, names)
        else:
            written.append(before + _scalar(item))
        before = ","
    written.append("]" if value else "[]")


def _scalar(value: Value) -> str:
    """Return the text of a value that holds no others."""
    if isinstance(value, Number):
        return value
    if isinstance(value, str):
        return quoted(value)
    return "null" if value is None else "true" if value else "false"


def _is_deeper(value: Value) -> bool:
    """Tell whether a document has more levels than `DEEPEST`, without descending by recursion."""
    level = [value]
    for _ in range(DEEPEST):
        objects: list[Members] = [item for item in level if type(item) in _OBJECTS]
        arrays: list[list[Value]] = [item for item in level if type(item) in _ARRAYS]
        level = [held for item in objects for _, held in item if type(held) in _CONTAINERS and held]
        level += [held for item in arrays for held in item if type(held) in _CONTAINERS and held]
        if not level:
            return False
    return True

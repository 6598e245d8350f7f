"""JSON documents read and written so that no value changes.

Numbers keep their digits (1.10, 1e5, twenty digits), objects their order and their duplicate keys, strings
their characters; only white space and needless escapes go. It does not know what is done with a document.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from itertools import repeat
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
_CONSTANTS: Final = {None: "null", True: "true", False: "false"}
_SURROGATES: Final = re.compile("[\ud800-\udfff]")


class Number(str):
    """A number (or NaN, Infinity) as it was written."""

    __slots__ = ()


JsonValue: TypeAlias = Any
"""A value of a document: an object is a tuple of (name, value), an array a list, a number a `Number`.

A string is a `str`; true, false and null are `True`, `False` and `None`.
"""

Members: TypeAlias = tuple[tuple[str, JsonValue], ...]
"""The members of an object in their order, duplicates included."""


def _members(pairs: list[tuple[str, JsonValue]]) -> Members:
    """Return what an object of a document is; between two such calls other threads get their turn."""
    return tuple(pairs)


def _number(text: str) -> Number:
    """Return what a number of a document is; likewise."""
    return Number(text)


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_members, parse_float=_number, parse_int=_number, parse_constant=_number
)


class UnreadableError(Exception):
    """No document stands at a place.

    `reached` is how far reading came: what was spent on finding out.
    """

    def __init__(self, reached: int) -> None:
        super().__init__("no JSON document")
        self.reached = reached


def is_members(value: JsonValue) -> TypeGuard[Members]:
    """Tell whether a value is an object."""
    return isinstance(value, tuple)


def is_items(value: JsonValue) -> TypeGuard[list[JsonValue]]:
    """Tell whether a value is an array."""
    return isinstance(value, list)


def read(text: str) -> list[JsonValue] | Members | None:
    """Return the object or array that `text` is, white space around it aside; None where it is none."""
    stripped = text.strip(" \t\r\n")
    try:
        value, stop = read_at(stripped, 0)
    except UnreadableError:
        return None
    return value if stop == len(stripped) else None


def read_at(text: str, start: int) -> tuple[list[JsonValue] | Members, int]:
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


def quoted(text: str) -> str:
    """Return a string as JSON: characters as they are, but those that must be escaped."""
    encoded = encode_basestring(text)
    if encoded.isascii() or _SURROGATES.search(encoded) is None:
        return encoded
    # UTF-8 cannot hold a lone surrogate; what was written as an escape stays one.
    return _SURROGATES.sub(lambda found: f"\\u{ord(found[0]):04x}", encoded)


def write(value: list[JsonValue] | Members, text: Callable[[str], str] = quoted) -> str:
    """Return the compact text of a document, an object or an array; `text` is how its strings are written."""
    written: list[str] = []
    _Writer(written, text).add(value)
    return "".join(written)


class _Writer:
    """One writing of one document."""

    __slots__ = ("_names", "_text", "_written")

    def __init__(self, written: list[str], text: Callable[[str], str]) -> None:
        """Write into `written`, strings by `text`."""
        self._written = written
        self._text = text
        self._names: dict[str, str] = {}
        """Names that were written before."""

    def add(self, value: JsonValue) -> None:
        """Add the pieces of the text of an object or an array."""
        written, names, text = self._written, self._names, self._text
        before = "{" if is_members(value) else "["
        for name, member in _held(value):
            if name is not None:
                named = names.get(name)
                if named is None:
                    named = names[name] = f"{quoted(name)}:"
                before += named
            if type(member) is str:
                written.append(before + text(member))
            elif type(member) is Number:
                written.append(before + member)
            elif type(member) in _CONTAINERS:
                written.append(before)
                self.add(member)
            else:
                written.append(before + _CONSTANTS[member])
            before = ","
        written.append(("}" if value else "{}") if is_members(value) else ("]" if value else "[]"))


def _held(value: JsonValue) -> Iterable[tuple[Any, Any]]:
    """Return what an object or an array holds, an object's by name."""
    return value if is_members(value) else zip(repeat(None), value)


def _is_deeper(value: JsonValue) -> bool:
    """Tell whether a document has more levels than `DEEPEST`, without descending by recursion."""
    level = [value]
    for _ in range(DEEPEST):
        objects: list[Members] = [item for item in level if type(item) in _OBJECTS]
        arrays: list[list[JsonValue]] = [item for item in level if type(item) in _ARRAYS]
        level = [held for item in objects for _, held in item if type(held) in _CONTAINERS and held]
        level += [held for item in arrays for held in item if type(held) in _CONTAINERS and held]
        if not level:
            return False
    return True

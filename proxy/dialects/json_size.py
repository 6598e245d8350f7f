"""The number of values in a JSON text, counted in its bytes before any object is made of them.

    {"messages": [{"role": "user"}, {"role": "user"}]}      6 values; the longest field has 2 items

A parsed value takes up to a hundred times as much memory as its text, so a limit in bytes says little.
"""

from __future__ import annotations

import re
from typing import Final, Literal, TypeAlias

Excess: TypeAlias = Literal["values", "items"]

_WINDOW: Final = 262_144  # bytes that are looked at in one step
_NOT_BACKSLASH: Final = re.compile(rb"[^\\]")
_BACKSLASH: Final = 0x5C
_COMMA: Final = 0x2C
_STRUCTURE: Final = b'",[]{}'
_OTHER: Final = bytes(set(range(256)) - set(_STRUCTURE))
_FIELD_DEPTH: Final = 2  # where the items of a field of the body stand, such as its messages


def count_of(text: bytes, sign: bytes) -> int:
    """Return how often a sign, one byte, stands in a text. Other threads wait for a window, and not for all of it."""
    return sum([text.count(sign, start, start + _WINDOW) for start in range(0, len(text), _WINDOW)])


def excess_of(text: bytes, max_values: int, max_items: int) -> Excess | None:
    """Return what a JSON text has too many of: values in all, or items in one field; None where neither.

    It stops at the first that is too many. An empty array or object counts as two values. Of a text that is
    no JSON, the number says nothing.
    """
    commas = count_of(text, b",")
    few = len(text) <= max_values  # a value has at least one byte of its own
    if commas < max_items and (few or 1 + commas + count_of(text, b"[") + count_of(text, b"{") <= max_values):
        return None  # strings hold some of these signs too: an upper bound
    values, depth, items = 1, 0, 0
    inside = 0  # whether the next byte stands in a string
    start = 0
    while start < len(text):
        end = min(start + _WINDOW, len(text))
        if text[end - 1] == _BACKSLASH and (escaped := _NOT_BACKSLASH.search(text, end)) is not None:
            end = escaped.end()  # no escape is cut in two
        window = text[start:end].replace(b"\\\\", b"").replace(b'\\"', b"").translate(None, _OTHER)
        pieces = window.split(b'"')
        structure = b"".join(pieces[inside::2])
        inside ^= (len(pieces) - 1) & 1
        start = end
        values += structure.count(b",") + structure.count(b"[") + structure.count(b"{")
        if values > max_values:
            return "values"
        if commas >= max_items:
            for sign in structure:
                if sign == _COMMA:
                    items += depth == _FIELD_DEPTH
                elif sign in b"[{":
                    depth += 1
                    items = 1 if depth == _FIELD_DEPTH else items
                else:
                    depth -= 1
                if items > max_items:
                    return "items"
    return None

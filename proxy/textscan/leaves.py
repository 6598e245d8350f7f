"""Leaves: the strings and numbers of a JSON document, each with the name that it stands under.

A document is an object or an array; numbers stay as they are written. It knows no value and no shape.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import repeat
from typing import Any, Final, NamedTuple

from proxy.dialects.jsontext import is_object

OPENING: Final = frozenset("{[")
"""What a document begins with."""


class Leaf(NamedTuple):
    """A string or a number of a JSON document."""

    key: str
    """The last name on the way to it; empty where there is none."""
    text: str
    """The string as it reads, or the number as it is written."""
    is_number: bool


def leaves_of(text: str) -> list[Leaf] | None:
    """Return strings and numbers of a JSON object or array in its order; None where the text is none."""
    document = document_in(text)
    return None if document is None else list(map(Leaf._make, walk(document)))


class _Number(str):
    """A number of a JSON document, as it is written there."""

    __slots__ = ()


def document_in(text: str) -> Any:
    """Return the JSON object or array that the text is, its numbers verbatim; None where it is none."""
    if text.lstrip()[:1] not in OPENING:
        return None
    try:
        return json.loads(text, parse_int=_Number, parse_float=_Number, parse_constant=_nothing)
    except (ValueError, RecursionError):
        return None


def _nothing(_: str) -> None:
    """Stand for NaN and the infinities, which are no numbers to look for."""


def walk(document: Any) -> Iterator[tuple[str, str, bool]]:
    """Yield the leaves of a document: the last name on the way to each, its text, whether it is a number."""
    stack: list[tuple[str, Iterator[tuple[Any, Any]]]] = [("", _items(document))]
    while stack:
        name, items = stack[-1]
        for key, item in items:
            if isinstance(item, str):
                yield name if key is None else key, item, type(item) is _Number
            elif isinstance(item, (dict, list)):
                stack.append((name if key is None else key, _items(item)))
                break
        else:
            stack.pop()


def _items(container: Any) -> Iterator[tuple[Any, Any]]:
    """Return what an object or an array holds, an object's by name."""
    if is_object(container):
        return iter(container.items())
    items: list[Any] = container
    return zip(repeat(None), items)

"""Values of JSON text that a stranger wrote, where the fast parser is stricter than clients are.

It takes halves of surrogate pairs (an emoji that was cut between two events) and numbers that JSON
does not have (`-Infinity` beside a token's probability). It does not know what the values mean.
"""

from __future__ import annotations

import json
from typing import Any, Final

import orjson

_SAFE_DIGITS: Final = 19
"""Whole numbers of fewer characters fit into 64 bits."""


def read(text: bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is none, by the widest reading there is.
    """
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(text)
    except RecursionError as why:
        raise ValueError("nested too deeply") from why


def mended(value: Any) -> Any:
    """Return the value as every JSON parser takes it.

    Halves of a surrogate pair that met are one character, one without its other half is U+FFFD,
    a number that JSON does not have is null, and a whole one beyond 64 bits is a float.
    """
    text = json.dumps(value, ensure_ascii=False)
    whole = text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return json.loads(whole, parse_constant=lambda _: None, parse_int=_number)


def sound(value: Any) -> Any:
    """Return the value itself if every parser takes it, else as `mended` makes it."""
    try:
        orjson.dumps(value)
    except TypeError:  # as every refusal of orjson's
        return mended(value)
    return value


def _number(digits: str) -> int | float:
    """Return a whole number; as a float where it is beyond 64 bits."""
    return int(digits) if len(digits) < _SAFE_DIGITS else float(digits)

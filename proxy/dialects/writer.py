"""JSON text of any JSON value, however deep it is.

The fast serialiser refuses what it cannot be handed safely: more than 254 levels, integers over
64 bits, lone surrogates. Whoever must not fail on a stranger's data writes with this module. It
does not know what the values mean.
"""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any, Final

import orjson

from proxy.dialects.shapes import is_array, is_object

_LARGEST_PLAIN: Final = 10**300
"""Above some thousand digits Python refuses to write an integer in the plain way."""


class _Token(str):
    """A piece of JSON text that waits among values."""

    __slots__ = ()


def write(value: Any, *, sort_keys: bool = False) -> bytes:
    """Return compact JSON text (UTF-8) of `value`: dict, list, str, int, float, bool, None.

    Equal values have equal texts, and with `sort_keys` the order of keys does not count; different
    values have different texts (a NaN is no JSON value, and is written as null or NaN).
    Lone surrogates, which UTF-8 cannot hold, are written as escapes.
    """
    try:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if sort_keys else 0)
    except TypeError:  # as every refusal of orjson's
        return _write_anything(value, sort_keys=sort_keys)


def _write_anything(value: Any, *, sort_keys: bool) -> bytes:
    """Do the same without recursion and without limits, a good deal slower."""
    written: list[str] = []
    waiting: list[Any] = [value]  # the next one is the last
    while waiting:
        item = waiting.pop()
        if isinstance(item, _Token):
            written.append(item)
        elif is_object(item):
            waiting.append(_Token("}"))
            members = sorted(item.items(), key=_key) if sort_keys else list(item.items())
            for position in range(len(members) - 1, -1, -1):
                name, member = members[position]
                waiting.append(member)
                waiting.append(_Token(f"{',' if position else ''}{json.dumps(name)}:"))
            written.append("{")
        elif is_array(item):
            waiting.append(_Token("]"))
            for position in range(len(item) - 1, -1, -1):
                waiting.append(item[position])
                if position:
                    waiting.append(_Token(","))
            written.append("[")
        elif isinstance(item, int) and abs(item) > _LARGEST_PLAIN:
            written.append(str(Decimal(item)))
        else:
            written.append(json.dumps(item))
    return "".join(written).encode()


def _key(member: tuple[str, Any]) -> str:
    return member[0]

"""The usage of several completions taken together.

It does not know what any figure means: what is a number adds up.
"""

from __future__ import annotations

from typing import Any

from proxy.dialects import JsonObject
from proxy.dialects.shapes import is_object


def added(one: JsonObject | None, other: JsonObject | None) -> JsonObject | None:
    """Return both together: numbers added, objects member by member, of all else the last word.

    Neither is written to. None stands for a usage that was not reported.
    """
    if one is None or other is None:
        return other if one is None else one
    total = dict(one)
    for name, value in other.items():
        known = total.get(name)
        if is_object(known) and is_object(value):
            total[name] = added(known, value)
        elif _is_number(known) and _is_number(value):
            total[name] = known + value
        elif value is not None or known is None:
            total[name] = value
    return total


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)

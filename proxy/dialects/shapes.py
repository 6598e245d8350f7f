"""The two shapes of JSON that are looked into, told apart in the eyes of the type checkers.

`isinstance(value, dict)` leaves a `dict[Unknown, Unknown]`; JSON that was parsed has text for keys.
"""

from __future__ import annotations

from typing import Any, TypeGuard


def is_object(value: Any) -> TypeGuard[dict[str, Any]]:
    """Tell whether a parsed JSON value is an object."""
    return isinstance(value, dict)


def is_array(value: Any) -> TypeGuard[list[Any]]:
    """Tell whether a parsed JSON value is an array."""
    return isinstance(value, list)

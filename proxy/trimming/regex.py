"""The operator's patterns: compiled once, by an engine that takes linear time on any text (RE2).

They come from the policy file and meet texts from anywhere. What is searched for, and why, is not known here.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Final

import re2  # type: ignore[import-untyped]  # the package ships no types

_RE2: Final[Any] = re2


def checked(regex: str) -> str:
    """Return a pattern that RE2 takes.

    Raises:
        ValueError: it takes it not, with RE2's own reason.
    """
    try:
        _compiled(regex)
    except _RE2.error as error:
        raise ValueError(f"not a pattern that RE2 takes: {error.args[0].decode()}") from error
    return regex


def is_found(regex: str, text: str) -> bool:
    """Tell whether the pattern is found anywhere in a text."""
    return _compiled(regex).search(text) is not None


def group_names(regex: str) -> frozenset[str]:
    """Return the names of a pattern's groups."""
    return frozenset(_compiled(regex).groupindex)


def named_groups(regex: str, text: str) -> Mapping[str, str] | None:
    """Return what the named groups hold where the pattern is first found; None where it is not found."""
    match = _compiled(regex).search(text)
    if match is None:
        return None
    return {name: held for name, held in match.groupdict().items() if held is not None}


@lru_cache(maxsize=256)
def _compiled(regex: str) -> Any:
    """Return the compiled pattern. RE2 is told not to write to stderr on its own."""
    options = _RE2.Options()
    options.log_errors = False
    return _RE2.compile(regex, options)

"""Some lines of a text: those from a to b, and those in which a regular expression is found.

The expression is RE2's: whatever it is, looking for it takes time in proportion to the text. Where the text
comes from, and who reads it, is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any, Final

import re2  # type: ignore[import-untyped]  # the package ships no types

from proxy.errors import InvalidRequest

_RE2: Final[Any] = re2
_LINES: Final = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")


def span_of(lines: str) -> slice:
    """Return which lines `a-b` means, the first being 1, as a slice of all of them.

    Raises:
        InvalidRequest: it is no range of lines.
    """
    match = _LINES.fullmatch(lines)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InvalidRequest(
            f"lines is {lines!r}. Send the first and the last line, counted from 1, such as lines=10-20.",
            param="lines",
        )
    return slice(int(match[1]) - 1, int(match[2]))


def pattern_of(grep: str) -> Any:
    """Return a compiled pattern (`search`, `finditer`). RE2 is told not to write to stderr on its own.

    Raises:
        InvalidRequest: it is none.
    """
    options = _RE2.Options()
    options.log_errors = False
    try:
        return _RE2.compile(grep, options)
    except _RE2.error as why:
        raise InvalidRequest(
            f"grep is no regular expression that RE2 knows: {why.args[0].decode()}.", param="grep"
        ) from why


def chosen(text: str, span: slice, pattern: Any | None) -> Sequence[tuple[int, str]]:
    """Return (number, line) for the lines of `span` in which `pattern` is found; without one, for all."""
    lines = list(enumerate(text.split("\n"), start=1))[span]
    return lines if pattern is None else [line for line in lines if pattern.search(line[1])]

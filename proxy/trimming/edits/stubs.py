"""What `clear_tool_results` puts in the place of a result: the stub, and behind it what is folded into its call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

CLEAR_TOOL_RESULTS: Final = "clear_tool_results"

REF_PREFIX: Final = "ref_"
REF_DIGITS: Final = 8
"""Hexadecimal digits of a ref in a stub, if no other text of the session begins with them."""

_FOLDED: Final = "[then, shortened:]"


def stub_of(tokens: int, ref: str, digest: str) -> str:
    """Return the stub of a result that cost so many tokens."""
    return f"[cleared {tokens} tokens; ref={ref}{f'; {digest}' if digest else ''}]"


def folded_behind(text: str, lines: Iterable[str]) -> str:
    """Return what stands in the place of a result with these lines of other calls behind it."""
    return "\n".join([text, _FOLDED, *lines])


def is_stub(text: str, ref: str) -> bool:
    """Tell whether a text is the stub of the result with this ref, or begins with it."""
    name = ref.removeprefix(REF_PREFIX)[:REF_DIGITS]
    return text.startswith("[cleared ") and f" tokens; ref={name}" in text


def holds_folded(text: str) -> bool:
    """Tell whether lines of other calls stand behind a result; a tool can write the like itself."""
    return f"\n{_FOLDED}\n" in text

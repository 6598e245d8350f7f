"""How it is said that something is not shown, and where the whole of it can be read.

It does not know what was left out. Marks inside a text are short, and one at its end names the ref.
"""

from __future__ import annotations

from typing import Final

from proxy.textscan.document import quoted

FULL_OUTPUT: Final = "full_output"
"""The field of a compacted document that holds the ref."""


def omitted(what: str, kinds: str = "") -> str:
    """Return the mark that stands where something was: `what` is how much, `kinds` are its kinds."""
    return f"… ({what} omitted{f': {kinds}' if kinds else ''})"


def ending(ref: str) -> str:
    """Return the line that ends a text of which something was left out."""
    return f"[... compacted; full output: {ref} ...]"


def names_ref(text: str, ref: str) -> bool:
    """Tell whether a text says that its original is `ref`, by a mark of this package or of a truncation."""
    return f"; full output: {ref} ...]" in text or f"{quoted(FULL_OUTPUT)}:{quoted(ref)}" in text

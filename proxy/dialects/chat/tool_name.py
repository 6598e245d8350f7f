"""The name of the tool that a streamed call is of, while it comes.

    at once          "search"               as nearly everybody sends it
    in pieces        "se", "arch"           each is added
    repeated         "search", "search"     changes nothing
    cumulative       "se", "search"         what begins with all that is known takes its place
    whole            with the first arguments that come with it or after it: nothing is added any more

A piece that is equal to all that came before it cannot be told from a repetition, and is taken for one:
providers that repeat names are many, names that begin with the same piece twice ("a", "a", "rdvark") are not.
It does not know whose tool it is.
"""

from __future__ import annotations

from typing import Any

from proxy.dialects import JsonObject


class ToolName:
    """A name as far as it has come."""

    __slots__ = ("value", "whole")

    value: Any
    """A text; what came first, where that is none; None where nothing came."""
    whole: bool
    """Whether nothing is added any more."""

    def __init__(self) -> None:
        self.value = None
        self.whole = False

    def learn(self, said: JsonObject) -> None:
        """Take the next delta of the call's `function` or `custom`, a parsed JSON object."""
        name = said.get("name")
        if name and not self.whole:
            self.value = _grown(self.value, name)
        if self.value and (said.get("arguments") or said.get("input")):
            self.whole = True


def _grown(known: Any, said: Any) -> Any:
    if not known:
        return said
    if not (isinstance(known, str) and isinstance(said, str)):
        return known
    return said if said.startswith(known) else known + said

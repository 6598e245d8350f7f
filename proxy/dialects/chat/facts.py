"""What is known of a message's text, so that a history that is sent again is not read again.

A client that resends its history sends the same texts at every turn. What was found out about a text once
(that it is a message that can be served, its role, its names) holds for the same text for ever, so it may
be remembered for the whole process: nothing here can be out of date, and forgetting costs time alone.

It finds nothing out itself: `request` does, and `history.nodes`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, NamedTuple

from proxy.dialects.generations import Generations

FACTS_BYTES: Final = 64 * 1024 * 1024
"""What all that is remembered may take in one process, about."""
_ENTRY_BYTES: Final = 1000
"""What facts take beside their text, about: the names in them, and their place in the table."""
MOST_IDS: Final = 16
"""Ids of calls that are remembered of one text: of more, the text is read again."""


class Ties(NamedTuple):
    """What ties a message to those beside it, and what it would be without them."""

    role: str
    """The message's role."""
    ids: tuple[str, ...] = ()
    """The ids of the calls of an assistant message, in order; "" for one that has none."""
    answers: str | None = None
    """The id of the call that a tool result answers."""
    calls_function: bool = False
    """Whether an assistant message holds a call of the older form."""
    names_calls: bool = False
    """Whether an assistant message has a `tool_calls` that is not null, whatever it is."""
    has_content: bool = False
    """Whether an assistant message has anything under `content`, `refusal` or `audio`."""


class Facts:
    """What is known of one text, the text of a message that can be served. Shared by all who know the text.

    What is None was not needed yet. Whoever fills it in computes it from the text alone.
    """

    __slots__ = ("body", "content", "has_calls", "has_own_fields", "raw", "role", "step", "ties")

    raw: Final[bytes]
    """The text."""
    role: Final[str]
    """The message's role."""
    has_own_fields: Final[bool]
    """Whether it has fields that are ours, and never go upstream."""
    has_calls: Final[bool]
    """Whether there is anything under `tool_calls`."""
    content: bytes | None
    """The hash of what it says."""
    body: str | None
    """The name of the text."""
    step: tuple[str, str] | None
    """Where it stood last: the name of its parent, and its own name there."""
    ties: Ties | None
    """What ties it to other messages."""

    def __init__(self, raw: bytes, role: str, *, has_own_fields: bool, has_calls: bool) -> None:
        self.raw = raw
        self.role = role
        self.has_own_fields = has_own_fields
        self.has_calls = has_calls
        self.content = None
        self.body = None
        self.step = None
        self.ties = None


class FactsByText(Generations[bytes, Facts]):
    """Facts by their texts, bounded in size; any thread may use it."""

    def __init__(self, max_bytes: int = FACTS_BYTES) -> None:
        """Begin empty, to hold at most `max_bytes`, about."""
        super().__init__(max_bytes, _size_of)

    def keep(self, new: Iterable[Facts]) -> None:
        """Remember what was found out about new texts. The first facts of a text stay: others share them."""
        for facts in new:
            if facts.raw not in self._young:
                self.put(facts.raw, facts)


def _size_of(facts: Facts) -> int:
    return len(facts.raw) + _ENTRY_BYTES

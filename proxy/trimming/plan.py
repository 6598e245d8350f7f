"""What trimming reads and what it decides, as plain data.

`history + policy + what is known -> plan -> view`: the types of that sentence. No rule is here.
Positions are those of the log of one branch: 0 is its oldest message, instructions not counted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from proxy.wire.messages import Message

Count = Callable[[Message], int]
"""Counts the tokens of one message as the upstream's model would."""


@dataclass(frozen=True, slots=True)
class Change:
    """One decision of one edit about one message."""

    position: int
    """Place of the message in the log of the branch."""
    edit: str
    """The `type` of the edit that decided it."""
    reason: str
    """Why, in words for the receipt."""
    message: Message | None
    """What is sent in its place; None where nothing is."""
    tokens_before: int
    """Tokens of what stood there before this change."""
    tokens_after: int
    """Tokens of what stands there now; 0 where nothing does."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of the branch, as trimming sees it."""

    message: Message
    """The message as it is sent when nothing is trimmed, without our own fields."""
    tokens: int
    """Its tokens."""
    ref: str
    """The name under which its original can be read again (`GET /sessions/{id}/refs/{ref}`)."""
    arrival: tuple[Change, ...] | None = None
    """What `on_arrival` decided when it was first sent; None where it is sent for the first time now."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the view is trimmed up to, and how: `trim(A[:position]) + A[position:]`."""

    position: int
    """Number of messages of the log that lie before the cut."""
    policy: str
    """Name of the policy."""
    version: str
    """Version of the policy that made it."""
    changes: tuple[Change, ...]
    """What was decided there, one change or several for a message (in order), by position."""
    tokens: int
    """Tokens of the whole view, fixed ones included, right after the move."""
    messages: int
    """Messages of the view right after the move."""
    tool_calls: int
    """Tool results of the view right after the move."""


@dataclass(frozen=True, slots=True)
class Known:
    """What trimming must be told, since it asks nobody."""

    count: Count
    """Counts a message that an edit made."""
    fixed_tokens: int = 0
    """Tokens of what is sent beside the log: instructions and tools."""
    context_window: int | None = None
    """Tokens that the model takes, where known; a `ratio` needs it."""
    agent: str | None = None
    """Name of the agent that asks."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What was decided for one request."""

    policy: str
    """Name of the policy, `off` where trimming is bypassed."""
    version: str
    """Version of the policy; empty for `off`."""
    cut: Cut | None
    """The cut in force for this request: the standing one, or the new one where it moved."""
    moved: bool
    """Whether the cut was moved by this request."""
    fired: str
    """What moved the cut, in words ("tokens 51234 > 50000"); empty where nothing did."""
    arrivals: tuple[Change, ...]
    """What `on_arrival` changes in this view (already recorded or decided now), by position."""
    tokens_before: int
    """Tokens of the request if nothing were trimmed."""
    tokens_sent: int
    """Tokens of the view, repairs included."""
    view: tuple[Message, ...]
    """The messages of the log that are sent, in order; instructions not among them."""
    warnings: tuple[str, ...] = field(default=())
    """What was repaired or could not be done, in words."""
    decided: tuple[tuple[Change, ...], ...] = field(default=())
    """For each entry of the log what `on_arrival` decided, recorded or now: what is to be recorded."""

    @property
    def changes(self) -> tuple[Change, ...]:
        """Every change that this view holds, those of arrival first."""
        return self.arrivals + (self.cut.changes if self.cut is not None else ())

    @property
    def edits(self) -> tuple[str, ...]:
        """The types of the edits that changed something, each once, in the order of what they changed."""
        return tuple(dict.fromkeys(change.edit for change in self.changes))

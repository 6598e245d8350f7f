"""What trimming reads and what it decides, as plain data.

`history + policy + what is known -> plan -> view`: the types of that sentence. No rule is here.
Positions are those of the log of one branch: 0 is its oldest message, instructions not counted.
(Inside a draft they are places in the log that still stands; the engine translates.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

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
    position: int = field(kw_only=True)
    """Place of the message in the log of the branch, wherever the entries that are given begin."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Messages that lie side by side and are not sent any more, summed up."""

    start: int
    """Position of the first of them."""
    stop: int
    """Position after the last one."""
    edit: str
    """The `type` of the edit that dropped them; where many edits took turns, of the one that dropped most."""
    reason: str
    """Why, in that edit's words."""
    tokens: int
    """Their tokens, as they would be sent if nothing were trimmed."""
    tool_calls: int
    """Tool results among them."""

    @property
    def messages(self) -> int:
        """How many they are."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class Cut:
    """Where the view is trimmed up to, and how: `trim(A[:position]) + A[position:]`.

    Spans that are not sent at all are `gaps`; they stay so as long as the policy's version does. A span of
    which anything is sent is in `changes`, and the next move decides about it anew, from the originals.
    """

    position: int
    """Number of messages of the log that lie before the cut."""
    policy: str
    """Name of the policy."""
    version: str
    """Version of the policy that made it."""
    changes: tuple[Change, ...]
    """What is done to messages outside the gaps, one change or several for each (in order), by position."""
    tokens: int
    """Tokens of the whole view, fixed ones included, right after the move."""
    messages: int
    """Messages of the view right after the move."""
    tool_calls: int
    """Tool results of the view right after the move."""
    gaps: tuple[Gap, ...] = ()
    """What is not sent at all, by position: whole spans, by this move or by an earlier one."""


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
    """What `on_arrival` changes outside `earlier` (already recorded or decided now), by position."""
    tokens_before: int
    """Tokens of the request if nothing were trimmed."""
    tokens_sent: int
    """Tokens of the view, repairs included."""
    view: tuple[Message, ...]
    """The messages of the log that are sent, in order; instructions not among them."""
    warnings: tuple[str, ...] = field(default=())
    """What was repaired or could not be done, in words."""
    decided: tuple[tuple[Change, ...], ...] = field(default=())
    """For each entry that was given what `on_arrival` decided, recorded or now: what is to be recorded."""
    made: tuple[Change, ...] = field(default=())
    """What the edits decided at this request's move, message by message, by position."""
    earlier: tuple[Gap, ...] = field(default=())
    """What earlier moves dropped of the messages that the request speaks of, and this one left so."""
    messages_before: int = 0
    """Messages of the log that the request speaks of, those in gaps included."""
    needs_whole: bool = False
    """Whether the cut must move and could not: decide again, with every entry of the log given."""

    @property
    def changes(self) -> tuple[Change, ...]:
        """Every change of a single message that led to this view: those of arrival first, then by position.

        What `earlier` sums up is not among them.
        """
        if self.moved:
            return self.arrivals + self.made
        return self.arrivals + (self.cut.changes if self.cut is not None else ())

    @property
    def edits(self) -> tuple[str, ...]:
        """The types of the edits that changed something, each once, in the order of what they changed."""
        arrived = len(self.arrivals)
        placed = [(gap.start, gap.edit) for gap in self.earlier]
        placed += [(change.position, change.edit) for change in self.changes[arrived:]]
        placed.sort(key=itemgetter(0))
        names = [change.edit for change in self.arrivals] + [edit for _, edit in placed]
        return tuple(dict.fromkeys(names))

"""What is asked and told of a conversation when a request comes in. Plain data: no SQL."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from proxy.conversation import Arrival, Incoming
from proxy.dialects import Message
from proxy.store.records import Mark, NodeRow, StandingCut, SummaryRow
from proxy.trimming import Hidden

DELETED: Final = "The session was deleted while this request was on its way. Send it again."


class HistoryQuery(Struct, frozen=True, kw_only=True):
    """A request, as far as what is read depends on it."""

    tenant: str
    session: str
    incoming: Incoming
    messages: Sequence[Message]
    """Its messages, instructions not among them."""
    policy: str | None
    """Name of the policy whose cut is wanted; None where there can be none."""
    agent: str | None
    idempotency: str | None = None
    """Hash of the client's key for this request; None where it gave none."""
    whole: bool = False
    """Whether the messages that a cut dropped are wanted too."""
    instructed: bool = False
    """Whether it brings instructions of its own."""
    recipe: str | None = None
    """Recipe of the summaries that are wanted; None where there can be none."""


class HistorySnapshot(Struct, frozen=True, kw_only=True):
    """What is known of the conversation."""

    arrival: Arrival
    start: int = 0
    """Position in its branch of the first message that the request speaks of."""
    depth: int = 0
    """Number of messages of the branch that its new messages follow."""
    marks: Sequence[Mark] = ()
    """What was noted about the messages that the client sends again, oldest first."""
    rows: Sequence[NodeRow] = ()
    """The stored messages that an append goes on from, oldest first."""
    carried: tuple[str, ...] = ()
    """The nodes of the last of these rows, where they are shown with the depth that they are going to have:
    what was said since the calls that the request answers, and behind that the block of the calls."""
    cut: StandingCut | None = None
    """The newest cut of the branch."""
    instructions: tuple[Message, ...] = ()
    """The newest stored instructions, for an append that brings none."""
    updated_at: int | None = None
    """When the session's last exchange ended; None where there is no session yet."""
    scale: float | None = None
    """How many tokens the upstream counts for one that is counted here, by the model last asked."""
    model: str | None = None
    """The model that was last asked."""
    prepared: SummaryRow | None = None
    """The ready summary that covers most of the branch."""
    attempt: SummaryRow | None = None
    """The summary of the branch that was tried last, whatever became of it."""
    hidden: Mapping[str, Hidden] = {}
    """By node, what the client was not shown of the replies among `marks` and `rows`."""


class TooLong(Exception):
    """More messages are to be read than were allowed."""


def allow(messages: int, most: int | None) -> None:
    """Raise `TooLong` where more messages are to be read than `most`; None: as many as there are."""
    if most is not None and messages > most:
        raise TooLong

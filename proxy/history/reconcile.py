"""What did the client send? The one question whose answer decides where a request belongs.

Clients either resend the whole history at every request (all SDKs do) or send only what is new.
The kinds, in the order in which they are recognised:

    first     the log is empty
    append    no assistant message in it, and the session is used by appending
    resend    a prefix of it is stored, and that prefix ends at the head
    rewind    a prefix of it is stored that ends elsewhere (edit, undo, regenerate): a branch
    side      nothing of it is stored, it holds no assistant message, and the session resends:
              a new root, and the head stays where it is
    foreign   nothing of it is stored: a history from elsewhere, and a new root

Equal text is no sign of a retry, since "continue" may come eight times. A request is the retry
of another one if it says the same and either announces itself as a retry, or the other one is the
last and has no complete reply. It then goes where the other one went; the head follows it only if
nothing came after that.

This module compares names. It reads no message and asks no store.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from proxy.history.nodes import ROOT


class Kind(StrEnum):
    """How a request relates to the log of its session."""

    FIRST = "first"
    APPEND = "append"
    RESEND = "resend"
    REWIND = "rewind"
    SIDE = "side"
    FOREIGN = "foreign"


class Mode(StrEnum):
    """What the client says of itself in `X-Session-Mode`."""

    AUTO = "auto"
    APPEND = "append"
    FULL = "full"


APPENDING: Final = frozenset({Kind.FIRST, Kind.APPEND})
"""A session whose last arrival is one of these is used by appending, until it resends."""


@dataclass(frozen=True, slots=True)
class Incoming:
    """A request, as far as its place in the log depends on it."""

    names: Sequence[str]
    """The nodes its messages would be in a row under the root, oldest first; instructions not counted."""
    speaks: bool
    """Whether an assistant message is among them."""
    retried: bool = False
    """Whether the client announces that it sends this request again."""
    mode: Mode = Mode.AUTO

    @property
    def digest(self) -> str:
        """One name for all that the request says: that of its last message under all the others."""
        return self.names[-1] if self.names else ROOT


@dataclass(frozen=True, slots=True)
class Last:
    """The request that this one may repeat: the newest, or the one that a retry announces."""

    digest: str
    """Its `Incoming.digest`."""
    kind: str
    base: str
    """The node under which its messages were put."""
    complete: bool
    """Whether it has a complete reply."""
    pending: bool = False
    """Whether it is still being answered."""
    replies: Collection[str] = ()
    """The nodes of its replies."""


@dataclass(frozen=True, slots=True)
class Log:
    """What is known of the session."""

    head: str = ROOT
    """Where the session stands; the root while it holds nothing."""
    arrival: str | None = None
    """The kind of the last request that was answered."""
    known: Collection[str] = ()
    """Those of `Incoming.names` that are stored."""
    last: Last | None = None

    @property
    def appends(self) -> bool:
        """Whether the session is used by appending."""
        return self.arrival in APPENDING


@dataclass(frozen=True, slots=True)
class Arrival:
    """Where a request belongs."""

    kind: Kind
    base: str
    """The node under which its new messages go."""
    fresh: int
    """Number of its messages that the branch of `base` holds already: those from here on are new."""
    at_head: bool = False
    """Whether the new messages follow the head of the moment at which they are stored."""
    beside: bool = False
    """Whether the session has gone on from elsewhere: what comes of this request is kept, the head stays."""

    @property
    def moves_head(self) -> bool:
        """Whether the session goes on from the reply."""
        return self.kind is not Kind.SIDE and not self.beside

    @property
    def composed(self) -> bool:
        """Whether the history comes from the store: the client sent only what is new."""
        return self.kind is Kind.APPEND


def reconcile(incoming: Incoming, log: Log) -> Arrival:
    """Decide how the request relates to the log and where its new messages belong."""
    if log.head == ROOT and not log.known:
        return Arrival(Kind.FIRST, ROOT, 0, at_head=_may_follow(incoming, log.last))
    appends = (
        log.appends and not incoming.speaks if incoming.mode is Mode.AUTO else incoming.mode is Mode.APPEND
    )
    if appends:
        return _append(incoming, log)
    stored = known_prefix(incoming.names, log.known)
    if stored:
        base = incoming.names[stored - 1]
        return Arrival(Kind.RESEND if base == log.head else Kind.REWIND, base, stored)
    return Arrival(Kind.FOREIGN if incoming.speaks else Kind.SIDE, ROOT, 0)


def _may_follow(incoming: Incoming, last: Last | None) -> bool:
    """Tell whether a first request may come to stand behind another first one, where two are sent at once."""
    twice = last is not None and last.pending and last.digest == incoming.digest
    return not incoming.speaks and incoming.mode is not Mode.FULL and not twice


def known_prefix(names: Sequence[str], known: Collection[str]) -> int:
    """Return how many of `names`, from the first on, are stored.

    Every ancestor of a stored node is stored, so the boundary is found by halving.
    """
    low, high = 0, len(names)
    while low < high:
        middle = (low + high) // 2
        if names[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low


def _append(incoming: Incoming, log: Log) -> Arrival:
    """Place an append: under the head, or where the request went that it repeats."""
    last = log.last
    if (
        last is not None
        and last.digest == incoming.digest
        and last.kind in APPENDING
        and (incoming.retried or not last.complete)
    ):
        if last.replies:
            return Arrival(Kind.APPEND, last.base, 0, beside=log.head not in last.replies)
        if last.pending:  # the same request twice at once: one place for both
            return Arrival(Kind.APPEND, last.base, 0)
    return Arrival(Kind.APPEND, log.head, 0, at_head=True)

"""Decides what the client sent, and with that where a request belongs.

Clients either resend the whole history with every request (all SDKs do) or send only what is new. The kinds, in the
order in which they are recognised:

    first     the log is empty
    append    it holds no assistant message, the session is used by appending, and it does not stand aside;
              in any session, results without their calls
    resend    a prefix of it is stored and ends at the head
    rewind    a prefix of it is stored and ends elsewhere (edit, undo, regenerate): a branch
    windowed  the client left out its oldest messages: it begins with a run of a branch, and that run holds an
              assistant message
    foreign   nothing of it is stored, and it holds assistant messages: a history from elsewhere, so a new root
    side      nothing of it is stored, it holds no assistant message, and the session resends: a question
              beside the conversation. It gets a new root, and the head stays where it is

A request that names a state kept by the provider (`provider_state`) goes where that state is stored.

A request stands aside if it holds no assistant message and its instructions differ from the conversation's. It is then
`side`, even if some of it is stored. For example, clients ask for a title in this way, often with the first question
word for word, and while that question is still being answered. In a session that appends, instructions may change.
There, a request stands aside only if its tools differ too (or its model, if neither has tools).

Equal text alone does not mean a retry: a user may send "continue" eight times. A request is a retry of another one if
it says the same, and either announces itself as a retry, or the other one is the last and has no complete reply. In the
latter case more messages may follow. (An empty reply, which no client sends back, counts as no reply, unless the
request says that it appends.) More may also follow a whole first request: the client threw its reply away, as a voice
agent does that is interrupted before it speaks. A retry goes where the other one went. The head follows it only if
nothing came after that.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from enum import StrEnum
from typing import Final, Protocol

from msgspec import Struct
from msgspec.structs import replace

from proxy.conversation.ids import ROOT, names_under


class Kind(StrEnum):
    """How a request relates to the log of its session."""

    FIRST = "first"
    APPEND = "append"
    RESEND = "resend"
    REWIND = "rewind"
    WINDOWED = "windowed"
    FOREIGN = "foreign"
    SIDE = "side"
    PROVIDER_STATE = "provider_state"


class Mode(StrEnum):
    """The client's value of `X-Session-Mode`."""

    AUTO = "auto"
    APPEND = "append"
    FULL = "full"


APPENDING: Final = frozenset({Kind.FIRST, Kind.APPEND})  # after one of these a session appends, until it resends

_AT_ONCE: Final = 16  # names per query in the search for a prefix; a thousand names then take three queries


class Manner(Struct, frozen=True, kw_only=True):
    """How a request asks, apart from its messages. Identifies a question beside the conversation."""

    instructions: str | None  # version of its instructions; None if it has none
    tools: str | None  # name (`body_id`) of its tools' text; None if it has none
    model: str


class Incoming(Struct, frozen=True, kw_only=True):
    """The parts of a request that decide its place in the log."""

    names: Sequence[str]  # the nodes of its messages as a chain under the root, oldest first
    contents: Sequence[bytes] = ()  # their `content_hash`es
    replies: Sequence[int] = ()  # positions of the assistant messages among them
    retried: bool = False  # whether the client announces a retry
    mode: Mode = Mode.AUTO
    answers: bool = False  # whether it begins with the result of a call
    manner: Manner | None = None  # how it asks; None if it certainly belongs to the conversation

    @property
    def digest(self) -> str:
        """Identifies all messages of the request: the node of the last one."""
        return self.names[-1] if self.names else ROOT


class Last(Struct, frozen=True, kw_only=True):
    """The request that this one may repeat: the newest one, or the one that an announced retry refers to."""

    digest: str  # its `Incoming.digest`
    kind: str
    base: str  # the node under which its messages were stored
    complete: bool  # whether it has a complete, non-empty reply
    pending: bool = False  # whether it is still being answered
    replies: Collection[str] = ()  # the nodes of its replies
    manner: Manner | None = None  # how it asked; None if unknown


class Stored(Protocol):
    """Looks up the stored nodes of the session's tree. Every ancestor of a stored node is stored."""

    def depths(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the depths of the stored ones among these few nodes; the depth under the root is 1."""
        ...

    def parents(self, content: bytes, depth: int) -> Sequence[str]:
        """Return parents of stored messages with this content, those near `depth` first. Their number is limited."""
        ...


class Log(Struct, frozen=True, kw_only=True):
    """What is known of the session."""

    stored: Stored
    head: str = ROOT  # where the session stands; the root if it is empty
    depth: int = 0  # number of messages on the branch of the head
    arrival: str | None = None  # the kind of the last request that was answered
    last: Last | None = None
    manner: Manner | None = None  # how the conversation's last request asked; None if unknown
    prefix: int | None = None  # number of the request's names that are stored; None if unknown


class Arrival(Struct, frozen=True, kw_only=True):
    """Where a request belongs."""

    kind: Kind
    base: str  # the node under which its new messages go
    known: int  # number of its messages that the branch of `base` holds already; the rest are new
    at_head: bool = False  # whether the new messages go under the head at the time they are stored
    beside: bool = False  # whether the session has continued elsewhere, so that the head stays
    expanded: bool = False  # whether the history comes from the store instead of from the provider's state
    resends: bool = False  # whether the session is still used by resending; this request brings only results of calls
    yields: bool = False  # whether it stands aside if a request with other instructions begins the session first

    @property
    def moves_head(self) -> bool:
        """Whether the reply becomes the head."""
        return self.kind is not Kind.SIDE and not self.beside

    @property
    def composed(self) -> bool:
        """Whether the history comes from the store: the client sent only what is new."""
        return self.kind is Kind.APPEND or self.expanded


def reconcile(incoming: Incoming, log: Log) -> Arrival:
    """Decide how the request relates to the log and where its new messages belong."""
    if incoming.mode is Mode.AUTO and _stands_aside(incoming, log):
        return Arrival(kind=Kind.SIDE, base=ROOT, known=0)
    if log.head == ROOT and not (log.stored.depths(incoming.names[:1]) if log.prefix is None else log.prefix):
        # It may end up behind another first request, unless the client sent the same request twice at once.
        last = log.last
        twice = last is not None and last.pending and last.digest == incoming.digest
        at_head = not incoming.replies and incoming.mode is not Mode.FULL and not twice
        yields = at_head and incoming.mode is Mode.AUTO and incoming.manner is not None
        return Arrival(kind=Kind.FIRST, base=ROOT, known=0, at_head=at_head, yields=yields)
    appends = incoming.mode is Mode.APPEND
    if incoming.mode is Mode.AUTO:  # depends on how the session is used
        appends = log.arrival in APPENDING and not incoming.replies
    if appends:
        return _append(incoming, log)
    stored = log.prefix
    if stored is None:
        stored = known_prefix(incoming.names, log.stored.depths, log.head)
    if stored:
        base = incoming.names[stored - 1]
        return Arrival(kind=Kind.RESEND if base == log.head else Kind.REWIND, base=base, known=stored)
    if not incoming.replies:
        # Results without their calls always continue something, however the session is used.
        if not incoming.answers:
            return Arrival(kind=Kind.SIDE, base=ROOT, known=0)
        return replace(_append(incoming, log), resends=True)
    return _windowed(incoming, log) or Arrival(kind=Kind.FOREIGN, base=ROOT, known=0)


def known_prefix(names: Sequence[str], stored: Callable[[Sequence[str]], Collection[str]], head: str = ROOT) -> int:
    """Return the length of the stored prefix of `names`.

    Every ancestor of a stored node is stored, so a search that asks for a few names at a time finds the boundary. If
    `head` is among the names, the search starts behind it, because it is stored.
    """
    low, high = (names.index(head) + 1 if head in names else 0), len(names)
    while low < high:
        asked = range(low, high, -(-(high - low) // _AT_ONCE))  # evenly spaced positions, always with the first
        found = stored([names[position] for position in asked])
        for position in asked:
            if names[position] not in found:
                high = position
                break
            low = position + 1
    return low


def _stands_aside(incoming: Incoming, log: Log) -> bool:
    """Tell whether the request is a question beside the conversation (for a title, say), not a part of it."""
    asked, usual = incoming.manner, log.manner
    if usual is None and log.last is not None and log.last.pending:
        usual = log.last.manner  # the conversation has just begun, and nothing is answered yet
    if asked is None or usual is None or incoming.replies:
        return False
    if asked.instructions is None or asked.instructions == usual.instructions:
        return False
    if log.arrival is None or log.arrival == Kind.FIRST:  # whether the session appends is not known yet
        return True
    tools_count = asked.tools is not None or usual.tools is not None
    return asked.tools != usual.tools if tools_count else asked.model != usual.model


def _append(incoming: Incoming, log: Log) -> Arrival:
    """Place an append: under the head, or where the last request went if this one repeats it or begins with it."""
    last = log.last
    if last is not None and last.kind in APPENDING and _repeats(incoming, last):
        if last.replies:
            return Arrival(kind=Kind.APPEND, base=last.base, known=0, beside=log.head not in last.replies)
        if last.pending:  # the same request was sent twice at once: both get the same place
            return Arrival(kind=Kind.APPEND, base=last.base, known=0)
    return Arrival(kind=Kind.APPEND, base=log.head, known=0, at_head=True)


def _repeats(incoming: Incoming, last: Last) -> bool:
    """Tell whether a request repeats `last`. If the client threw the answer away, more messages may follow."""
    if last.digest == incoming.digest:
        return incoming.retried or not last.complete
    # Not of a request that says that it appends, or of an agent by name: both send only what is new.
    resends = last.base == ROOT and incoming.mode is Mode.AUTO and incoming.manner is not None
    return (resends or not last.complete) and not last.pending and last.digest in incoming.names


def _windowed(incoming: Incoming, log: Log) -> Arrival | None:
    """Place a history whose oldest messages the client left out, or return None if no branch holds its beginning.

    The longest run wins, but a run that ends at the head is taken at once.
    """
    best: Arrival | None = None
    # A client with a sliding window over the head's branch sends the branch's newest reply last.
    depth = log.depth - incoming.replies[-1]
    for parent in log.stored.parents(incoming.contents[0], depth):
        names = names_under(parent, incoming.contents)
        run = known_prefix(names, log.stored.depths, log.head)
        if run > max(incoming.replies[0], best.known if best is not None else 0):
            best = Arrival(kind=Kind.WINDOWED, base=names[run - 1], known=run)
            if best.base == log.head:
                break
    return best

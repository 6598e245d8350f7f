"""What did the client send? The one question whose answer decides where a request belongs.

Clients either resend the whole history at every request (all SDKs do) or send only what is new. The kinds, in the order
in which they are recognised:

    first     the log is empty
    append    no assistant message in it, the session is used by appending, and it does not stand aside;
              in any session, results without their calls
    resend    a prefix of it is stored, and that prefix ends at the head
    rewind    a prefix of it is stored that ends elsewhere (edit, undo, regenerate): a branch
    windowed  the client left its oldest messages out: it begins with a run of a branch, and an assistant
              message is in that run
    foreign   nothing of it is stored, and it holds assistant messages: a history from elsewhere, a new root
    side      nothing of it is stored, it holds no assistant message, and the session resends: a question
              beside the conversation, a new root, and the head stays where it is

A request that names a state which the provider keeps (`provider_state`) goes where that state is stored.

A request stands aside, and is `side` whatever of it is stored, if it holds no assistant message, and its instructions
are other than the conversation's. A title is asked for in this manner, often with the first question word for word, and
while that is answered. In a session that appends, instructions may change: there its tools must be others too (the
model, where neither has tools).

Equal text is no sign of a retry, since "continue" may come eight times. A request is the retry of another one if it
says the same and either announces itself as a retry, or the other one is the last and has no complete reply; then more
may follow. (An empty reply, which no client sends back, counts as none, unless the request says that it appends.) It
goes where the other one went; the head follows it only if nothing came after that.
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
    """What the client says of itself in `X-Session-Mode`."""

    AUTO = "auto"
    APPEND = "append"
    FULL = "full"


APPENDING: Final = frozenset({Kind.FIRST, Kind.APPEND})  # after one of these a session appends, until it resends

_AT_ONCE: Final = 16  # names in one question while a prefix is searched for: a thousand names then take three questions


class Manner(Struct, frozen=True, kw_only=True):
    """How a request asks, beside what it says: by this a question beside the conversation is known."""

    instructions: str | None  # version of its instructions; None where it has none
    tools: str | None  # name of the text of its tools; None where it has none
    model: str


class Incoming(Struct, frozen=True, kw_only=True):
    """A request, as far as its place in the log depends on it."""

    names: Sequence[str]  # the nodes of its messages in a row under the root, oldest first
    contents: Sequence[bytes] = ()  # their `content_hash`es
    replies: Sequence[int] = ()  # positions of the assistant messages among them
    retried: bool = False  # whether the client announces that it sends this request again
    mode: Mode = Mode.AUTO
    answers: bool = False  # whether it begins with the result of a call
    manner: Manner | None = None  # how it asks; None where it surely belongs to the conversation

    @property
    def digest(self) -> str:
        """One name for all that the request says: that of its last message under all the others."""
        return self.names[-1] if self.names else ROOT


class Last(Struct, frozen=True, kw_only=True):
    """The request that this one may repeat: the newest, or the one that a retry announces."""

    digest: str  # its `Incoming.digest`
    kind: str
    base: str  # the node under which its messages were put
    complete: bool  # whether it has a complete reply that says something
    pending: bool = False  # whether it is still being answered
    replies: Collection[str] = ()  # the nodes of its replies
    manner: Manner | None = None  # how it asked; None where that is not known


class Stored(Protocol):
    """What of the session's tree is stored. Every ancestor of a stored node is stored."""

    def depths(self, names: Sequence[str]) -> Mapping[str, int]:
        """Return the depth (1 under the root) of each of these few nodes that is stored."""
        ...

    def parents(self, content: bytes, depth: int) -> Sequence[str]:
        """Return the parents of stored messages with this content, those at about `depth` first; not all."""
        ...


class Log(Struct, frozen=True, kw_only=True):
    """What is known of the session."""

    stored: Stored
    head: str = ROOT  # where the session stands; the root while it holds nothing
    depth: int = 0  # number of messages on the branch of the head
    arrival: str | None = None  # the kind of the last request that was answered
    last: Last | None = None
    manner: Manner | None = None  # how the conversation was last asked for; None where that is not known
    prefix: int | None = None  # how many of the request's names are stored, where that is known


class Arrival(Struct, frozen=True, kw_only=True):
    """Where a request belongs."""

    kind: Kind
    base: str  # the node under which its new messages go
    known: int  # number of its messages that the branch of `base` holds already: those from here on are new
    at_head: bool = False  # whether the new messages follow the head of the moment at which they are stored
    beside: bool = False  # whether the session has gone on from elsewhere: the head stays
    expanded: bool = False  # whether the history comes from the store in the place of a provider's state
    resends: bool = False  # whether the session is used by resending all the same: this brings results of calls alone
    yields: bool = False  # whether it stands aside if other instructions have begun the session meanwhile

    @property
    def moves_head(self) -> bool:
        """Whether the session goes on from the reply."""
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
        # It may come to stand behind another first one, unless the same request is sent twice at once.
        last = log.last
        twice = last is not None and last.pending and last.digest == incoming.digest
        at_head = not incoming.replies and incoming.mode is not Mode.FULL and not twice
        yields = at_head and incoming.mode is Mode.AUTO and incoming.manner is not None
        return Arrival(kind=Kind.FIRST, base=ROOT, known=0, at_head=at_head, yields=yields)
    appends = incoming.mode is Mode.APPEND
    if incoming.mode is Mode.AUTO:  # as the session is used
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
        # Results without their calls go on with something, however the session is used.
        if not incoming.answers:
            return Arrival(kind=Kind.SIDE, base=ROOT, known=0)
        return replace(_append(incoming, log), resends=True)
    return _windowed(incoming, log) or Arrival(kind=Kind.FOREIGN, base=ROOT, known=0)


def known_prefix(names: Sequence[str], stored: Callable[[Sequence[str]], Collection[str]], head: str = ROOT) -> int:
    """Return how many of `names`, from the first on, are stored.

    Every ancestor of a stored node is stored, so the boundary is found by dividing, a few names at a time; where
    `head`, which is stored, is among them, it is looked for behind it.
    """
    low, high = (names.index(head) + 1 if head in names else 0), len(names)
    while low < high:
        asked = range(low, high, -(-(high - low) // _AT_ONCE))  # a few positions, evenly, the first always
        found = stored([names[position] for position in asked])
        for position in asked:
            if names[position] not in found:
                high = position
                break
            low = position + 1
    return low


def _stands_aside(incoming: Incoming, log: Log) -> bool:
    """Tell a question beside the conversation (a title for it, say) from one that goes on with it."""
    asked, usual = incoming.manner, log.manner
    if usual is None and log.last is not None and log.last.pending:
        usual = log.last.manner  # the conversation has just begun: nothing is answered yet
    if asked is None or usual is None or incoming.replies:
        return False
    if asked.instructions is None or asked.instructions == usual.instructions:
        return False
    if log.arrival is None or log.arrival == Kind.FIRST:  # nobody knows yet whether the session appends
        return True
    tools_count = asked.tools is not None or usual.tools is not None
    return asked.tools != usual.tools if tools_count else asked.model != usual.model


def _append(incoming: Incoming, log: Log) -> Arrival:
    """Place an append: under the head, or where the request went that it repeats or begins with."""
    last = log.last
    if last is not None and last.kind in APPENDING and _repeats(incoming, last):
        if last.replies:
            return Arrival(kind=Kind.APPEND, base=last.base, known=0, beside=log.head not in last.replies)
        if last.pending:  # the same request twice at once: one place for both
            return Arrival(kind=Kind.APPEND, base=last.base, known=0)
    return Arrival(kind=Kind.APPEND, base=log.head, known=0, at_head=True)


def _repeats(incoming: Incoming, last: Last) -> bool:
    """Tell whether a request says again what `last` said; more may follow if the answer to that broke off."""
    if last.digest == incoming.digest:
        return incoming.retried or not last.complete
    return not (last.complete or last.pending) and last.digest in incoming.names


def _windowed(incoming: Incoming, log: Log) -> Arrival | None:
    """Place a history whose oldest messages were left out; None where it begins with no run of a branch.

    The longest run counts; one that ends at the head is taken at once.
    """
    best: Arrival | None = None
    # A client that slides a window over the branch of the head sends its newest reply last.
    depth = log.depth - incoming.replies[-1]
    for parent in log.stored.parents(incoming.contents[0], depth):
        names = names_under(parent, incoming.contents)
        run = known_prefix(names, log.stored.depths, log.head)
        if run > max(incoming.replies[0], best.known if best is not None else 0):
            best = Arrival(kind=Kind.WINDOWED, base=names[run - 1], known=run)
            if best.base == log.head:
                break
    return best

"""The store's inputs and outputs as plain data, and the limits of what can be stored. No SQL."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from functools import lru_cache
from hashlib import blake2b
from typing import Annotated, Any, Final, TypeAlias

import orjson
from msgspec import Meta, Struct

from proxy.conversation import Arrival, Incoming, StoredMessage, body_of
from proxy.dialects import Dialect, Message, dialect_named
from proxy.dialects.jsontext import sound
from proxy.errors import InvalidRequest
from proxy.trimming import Change, Cut, Hidden

CHAT: Final = "chat"  # the default dialect of a session
_RECENT: Final = 1024  # sessions whose names are cached


@lru_cache(maxsize=_RECENT)  # called several times per request
def session_key(tenant: str, session: str, dialect: str = CHAT) -> str:
    """Return the internal name of a session from its owner, its id and its dialect.

    It has 32 hexadecimal digits. For dialects other than `CHAT`, the dialect's name and a hyphen come first.

    The name is computed, never looked up. Every table's primary key starts with it. Any worker knows it without a
    query, and one tenant's names never reach another tenant's rows.
    """
    owner = tenant.encode()
    text = b"%d:%b:%b" % (len(owner), owner, session.encode())
    name = blake2b(text, digest_size=16, person=b"palimpsest-sess").hexdigest()
    return name if dialect == CHAT else f"{dialect}-{name}"


@lru_cache(maxsize=_RECENT)
def dialect_of(key: str) -> Dialect:
    """Return the dialect of the session with this internal name."""
    return dialect_named(key.rpartition("-")[0] or CHAT)


class Status(StrEnum):
    """The status of an exchange."""

    PENDING = "pending"  # begun, not settled yet
    COMPLETE = "complete"  # the whole reply arrived and is stored
    PARTIAL = "partial"  # a part of the reply arrived and is stored, marked as partial
    FAILED = "failed"  # no reply: the upstream refused, broke off, or its answer could not be read
    CANCELLED = "cancelled"  # the client left before there was anything to store
    INTERRUPTED = "interrupted"  # the process ended before it settled; detected at a later start


FAILURES: Final = (Status.FAILED.value, Status.PARTIAL.value, Status.INTERRUPTED.value)
"""The statuses of requests that failed or broke off."""


class Source(StrEnum):
    """Where a node came from."""

    CLIENT = "client"
    UPSTREAM = "upstream"
    IMPORT = "import"


FORKED: Final = "fork"
"""`SessionRow.arrival` of a forked session until its first request is settled."""


class Body(Struct, frozen=True, kw_only=True):
    """A message to store. Its text is kept once per session and content."""

    message: Message  # as it arrived, our own fields included
    tokens: int  # its tokens as counted when it was stored


class SessionRow(Struct, frozen=True, kw_only=True):
    """A stored session in its current state."""

    key: str
    tenant: str
    id: str
    created_at: int  # milliseconds since 1970, like all times here
    updated_at: int
    head: str  # the session's current node; `ROOT` ("") while it has none
    instructions: str | None  # version of the newest instructions; None if there were none
    arrival: str | None
    """Kind of the last settled arrival (`first`, `append`, …), or `FORKED`; None before the first one."""
    messages: int  # messages on the branch of the head
    rounds: int  # user messages on the branch of the head
    tokens: int  # tokens of the branch of the head
    requests: int  # exchanges that were settled with a reply
    tokens_sent: int  # tokens of all requests, as sent
    tokens_saved: int  # tokens that trimming saved in these requests
    model: str | None = None  # the model that the conversation last used; None if not recorded
    tools: str | None = None  # name of the text of the tools that it last offered; None if it offered none
    scale: float | None = None
    """Ratio of the tokens that the upstream counts to those counted here; None until it is learnt."""
    hidden: int = 0  # number of replies that have something hidden from the client
    summaries: int = 0  # number of summaries by a model that were tried, whatever the result
    cost: float | None = None  # dollars that the session has cost; None while no price is known
    calls: tuple[str, ...] = ()
    """Names of the tools that the newest reply on the head's branch calls, each once. Empty if any message other than a
    result came after it."""
    dialect: str = CHAT


class NodeRow(StoredMessage, frozen=True, kw_only=True):
    """One stored message at its place in the tree."""

    round: int  # user messages from the root to this one, itself included
    tokens_total: int  # tokens of all messages from the root to this one
    body: str  # name of its text (`body_id` of `message.raw`)
    tokens: int
    source: Source
    partial: bool  # whether it is a reply that broke off
    exchange: str | None  # the exchange that brought it; None if it was imported
    policy: str | None  # version of the policy under which it was first sent; None for replies
    arrival: tuple[Change, ...] | None
    """What `on_arrival` decided when it was first sent; None if it has not been sent yet."""
    created_at: int


class Mark(Struct, frozen=True, kw_only=True):
    """A stored message without its text, for callers that have the text already."""

    node: str
    depth: int
    body: str
    tokens: int
    arrival: tuple[Change, ...] | None


class StandingCut(Struct, frozen=True, kw_only=True):
    """A stored cut, with the messages that it keeps."""

    cut: Cut
    node: str  # the node at which it was made: the last message before it
    kept: tuple[str, ...] | None
    """The nodes before the cut that lie in none of its gaps, by position. If None, they were not stored, and the whole
    branch must be read."""


class Opening(Struct, frozen=True, kw_only=True):
    """The beginning of an exchange: a request, stored before or while the upstream is asked."""

    tenant: str
    session: str
    exchange: str
    created_at: int
    kind: str  # kind of arrival
    base: str  # the node under which the new messages go
    messages: tuple[Body, ...]  # the new messages, oldest first
    instructions: tuple[Message, ...] | None  # the instructions that came with the request; None if none came
    instructions_tokens: int
    digest: str  # hash over the canonical forms of the request's content; identifies repeated requests
    model: str
    agent: str | None
    policy: str
    policy_version: str
    stream: bool
    parameters: Mapping[str, Any]  # the other fields of the request, except `messages` and `tools`
    tools: bytes | None  # the JSON text of `tools`; None if there are none
    idempotency: str | None = None  # hash of the client's idempotency key for this request; None if it gave none
    forms: tuple[tuple[str, Message], ...] = ()
    """(node, form) of stored messages that the client sent in another form than the stored one."""
    dialect: str = CHAT


class Reply(Struct, frozen=True, kw_only=True):
    """One choice of the upstream's answer."""

    body: Body
    partial: bool = False
    hidden: Hidden | None = None
    """What was hidden from the client. It is stored only if this exchange creates the reply's node; an existing node
    stays as it is."""


class Kept(Struct, frozen=True, kw_only=True):
    """The messages before a cut that lie in none of its gaps."""

    nodes: tuple[str, ...]  # the stored ones, by position
    messages: tuple[int, ...]  # the new ones, as indexes into `Settlement.messages`


class ExchangeFigures(Struct, frozen=True, kw_only=True):
    """What an exchange adds to the statistics. All fields except the first three are summed."""

    model: str
    policy: str
    miss: str = ""  # why the provider's cache missed; empty if it did not, or if the reason is unknown
    requests: int = 1
    tokens_before: int = 0  # tokens that the request would have without trimming
    tokens_sent: int = 0
    tokens_input: int = 0  # tokens of the prompt, as the upstream reported them
    tokens_cached: int = 0  # prompt tokens that the provider read from its cache
    tokens_written: int = 0  # prompt tokens that the provider wrote to its cache
    tokens_output: int = 0
    tokens_missed: int = 0  # prompt tokens that were sent before and yet not read from the cache
    tokens_unique: int = 0  # tokens of this request's new messages that were trimmed before they were ever sent
    trims: int = 0
    edits: int = 0  # types of edits that changed something
    warnings: int = 0
    recalls: int = 0  # calls of the proxy's own tools
    summaries: int = 0  # attempts at a summary
    priced: int = 0  # requests whose cost is known
    cost: float = 0.0  # dollars
    cost_saved: float = 0.0  # dollars that the session would have cost more without trimming, less the cost of recalls
    cost_cache_saved: float = 0.0  # dollars that the provider's own cache saved
    cost_missed: float = 0.0  # dollars that `tokens_missed` cost more than if they had been read from the cache
    cost_recalls: float = 0.0  # the part of `cost` that the proxy's own tools caused
    cost_summaries: float = 0.0  # dollars for summaries by a model, which are not part of `cost`
    added_ms: float = 0.0  # milliseconds until the upstream was asked
    upstream_ms: float = 0.0  # milliseconds from then to the end of its answer


class Settlement(Struct, frozen=True, kw_only=True):
    """How an exchange ended. It is stored in one transaction, all of it or nothing."""

    tenant: str
    session: str
    exchange: str
    settled_at: int
    status: Status
    kind: str
    base: str  # the node under which the new messages go, unless `at_head`
    at_head: bool  # whether they go under the head at the time of settling instead (an append)
    moves_head: bool  # whether the head moves to the first reply (not for a `side` request)
    messages: tuple[Body, ...]
    arrivals: tuple[tuple[Change, ...], ...]  # for each of `messages`, what `on_arrival` decided
    policy_version: str
    agent: str | None
    replies: tuple[Reply, ...]
    """If empty and not `finished`, nothing becomes a node and the head stays; only the exchange itself is settled."""
    cut: Cut | None  # the cut that this exchange moved, stored at its last message; None if none moved
    tokens_before: int
    tokens_sent: int
    receipt: Mapping[str, Any]  # what is shown of the exchange: plan, usage, timings, warnings, error; JSON data
    kept: Kept | None = None  # what the cut keeps; None if not known
    follows: str | None = None
    """The node of the branch's previous cut, of the same policy and agent. The new cut is stored as the difference from
    it, or as a whole if this is None."""
    heard: tuple[int, Hidden] | None = None
    """What other agents said, with the index of the one of `messages` before which it was sent."""
    relayed: tuple[int, ...] = ()
    """Indexes of `messages` that are known to be replies of the upstream, although the client sent them."""
    scale: float | None = None
    """Ratio of the tokens that the upstream counts to those counted here; None if nothing was learnt."""
    finished: bool = False
    """Whether the request was answered by a reply that is stored already, or will be by one that is not stored.
    `messages` become nodes; `replies` is empty. If `moves_head`, the head moves to the last message (to `base` if there
    is none). For an append, results that are there already are not stored again, and the head stays if the session has
    moved on."""
    cost: float | None = None  # cost in dollars, whatever the outcome; None if no price is known
    resends: bool = False  # whether the session is used by resending, although this request appends
    yields: bool = False  # whether it may leave the head alone if another question began the session; see `Arrival`
    carried: tuple[str, ...] = ()
    """The nodes that the plan repeats at a new place, in their new order: first what was said after the calls that
    `messages` answer, then the block of those calls with the results that it had."""
    dialect: str = CHAT
    figures: ExchangeFigures | None = None  # what is added to the statistics
    late: bool = False
    """Whether the exchange was settled before, without a reply or with a part of one. Now it gets the reply in
    `replies`, under `base`, the last of its messages. The head moves there unless the session has moved on. `messages`
    is empty."""


NOTHING_CAME: Final[dict[str, Any]] = {
    "nodes": "[]",
    "replies": "[]",
    "cut_node": None,
    "tokens_before": 0,
    "tokens_sent": 0,
    "receipt": "{}",
}
"""Initial values of the columns that are filled when the exchange ends."""


_MODEL: Final = "\x01"
"""Placeholder for the model in stored parameters; the model has its own column. JSON never holds this character."""


def without_model(parameters: str, model: str) -> str:
    """Return the JSON of a request's parameters with the model replaced by `_MODEL`, as it is stored."""
    return parameters.replace(orjson.dumps(model).decode(), _MODEL)


def with_model(stored: str, model: str) -> str:
    """Undo `without_model`."""
    return stored.replace(_MODEL, orjson.dumps(model).decode())


_OF_OPENING: Final = ("created_at", "kind", "base", "digest", "model", "agent", "policy", "policy_version", "stream")
"""Fields of an opening that are columns of its exchange, too."""


def opened_columns(opening: Opening) -> dict[str, Any]:
    """Return the row of a new exchange, without `session`, `tools` and `instructions`, which name other rows."""
    return {
        **{name: getattr(opening, name) for name in _OF_OPENING},
        "id": opening.exchange,
        "idempotency": opening.idempotency,
        "settled_at": None,
        "status": Status.PENDING.value,
        "parameters": without_model(orjson.dumps(dict(opening.parameters)).decode(), opening.model),
        "messages": orjson.dumps([body_of(body.message) for body in opening.messages]).decode(),
        **NOTHING_CAME,
    }


def settled_columns(settlement: Settlement) -> dict[str, Any]:
    """Return the columns that depend on the settlement alone. The others depend on where its messages were stored."""
    return {
        "status": settlement.status.value,
        "settled_at": settlement.settled_at,
        "tokens_before": settlement.tokens_before,
        "tokens_sent": settlement.tokens_sent,
        "receipt": receipt_text(settlement.receipt),
    }


def receipt_text(receipt: Mapping[str, Any]) -> str:
    """Serialize a receipt for its column, as JSON that every parser accepts."""
    data = dict(receipt)
    try:
        return orjson.dumps(data).decode()
    except TypeError:  # orjson raises it for everything that it refuses
        return orjson.dumps(sound(data)).decode()


Exchange: TypeAlias = Opening | Settlement
"""The beginning or the end of an exchange."""


class Settled(Struct, frozen=True, kw_only=True):
    """The result of settling."""

    head: str  # the head of the session afterwards
    nodes: tuple[str, ...]  # the nodes of the request's new messages, whether or not they existed before
    replies: tuple[str, ...]  # the nodes of the replies
    are_new: bool = False  # whether all of these nodes were created just now, at the planned place


class SummaryStatus(StrEnum):
    """The status of a summary that a model was asked for."""

    READY = "ready"  # it may be sent
    REFUSED = "refused"  # the model answered, but the summary did not pass the checks
    FAILED = "failed"  # the model did not answer


class SummaryRow(Struct, frozen=True, kw_only=True):
    """A summary by a model of the beginning of a branch, or the attempt at one. Never changed once stored."""

    id: str  # chosen by the worker that makes the summary
    node: str  # the last message that it covers
    tip: str  # the end of the branch when it was made; identifies the branch if `node` is not among the messages read
    recipe: str  # hash over what summaries must have in common to replace one another
    until: int  # depth of `node`: the number of messages that it covers
    generation: int  # how many summaries it is made from, itself included
    status: SummaryStatus
    reason: str  # why it is not ready; empty if it is
    model: str
    text: str  # with its heading, as it is sent; empty unless it is ready
    state: Mapping[str, Any]  # JSON: what the next summary needs from this one
    tokens: int  # tokens of its text as sent
    covered_messages: int
    covered_tokens: int
    predecessor: str | None  # the `id` of the summary that it was made from; None if it was made from messages alone
    asked: bool  # whether it was requested explicitly
    usage: Mapping[str, Any] | None
    """JSON: the usage that its model reported, summed over all tries; None if nothing was reported."""
    cost: float | None  # dollars, summed over all tries; None if no price is known
    exchange: str | None  # the exchange that started it; None if none did, or if it came from another session
    created_at: int


class ExchangeRow(Struct, frozen=True, kw_only=True):
    """A stored exchange: a request, how it ended, and its receipt."""

    id: str
    session_key: str
    tenant: str
    session: str
    created_at: int
    settled_at: int | None
    status: Status
    kind: str
    base: str
    digest: str
    model: str
    agent: str | None
    policy: str
    policy_version: str
    stream: bool
    parameters: Mapping[str, Any]
    tools: str | None  # name of the text of `tools`
    instructions: str | None  # version of the instructions that it came with
    messages: tuple[str, ...]  # names of the texts of its new messages
    nodes: tuple[str, ...]  # the nodes that they became; empty while there are none
    replies: tuple[str, ...]  # the nodes of the replies
    cut_node: str | None  # the node of the cut that this exchange moved; None if it moved none
    tokens_before: int
    tokens_sent: int
    receipt: Mapping[str, Any] = {}


class InstructionsRow(Struct, frozen=True, kw_only=True):
    """One version of a session's instructions."""

    version: str
    messages: tuple[Message, ...]
    tokens: int
    created_at: int


class BranchRow(Struct, frozen=True, kw_only=True):
    """A leaf of the tree: the session's head, or a former one."""

    head: str
    depth: int
    updated_at: int


# ---------------------------------------------------------------------------------- a request and its history

DELETED: Final = "The session was deleted while this request was on its way. Send it again."


class ProviderState(Struct, frozen=True, kw_only=True):
    """State at the provider that a request continues from: an earlier reply, named by an id of the provider."""

    node: str | None  # the reply if it is stored; None stands for the session's head
    expands: bool = False  # whether the proxy sends the earlier messages itself, from its own store
    begun: bool = False  # whether the provider holds only the first round of the reply under that id


class HistoryQuery(Struct, frozen=True, kw_only=True):
    """The parts of a request that decide what is read."""

    tenant: str
    session: str
    incoming: Incoming
    messages: Sequence[Message]  # its messages, without instructions
    policy: str | None  # name of the policy whose cut is wanted; None if there can be none
    agent: str | None
    idempotency: str | None = None  # hash of the client's idempotency key for this request; None if it gave none
    whole: bool = False  # whether the messages that a cut dropped are wanted too
    merging: bool = False  # whether a resending agent gets what other agents said since its last turn
    instructed: bool = False  # whether it brings its own instructions
    recipe: str | None = None  # recipe of the summaries that are wanted; None if there can be none
    dialect: str = CHAT
    state: ProviderState | None = None  # the provider state that the request names; None if it names none


class HistorySnapshot(Struct, frozen=True, kw_only=True):
    """What is known about the conversation when a request comes in."""

    arrival: Arrival
    names: Sequence[str] = ()
    """The nodes of the request's messages, if some of them are stored under names of an older version; otherwise
    empty."""
    start: int = 0  # position in its branch of the first message that the request holds
    depth: int = 0  # number of messages of the branch before the new messages
    marks: Sequence[Mark] = ()  # stored data about the messages that the client sends again, oldest first
    rows: Sequence[NodeRow] = ()  # the stored messages that an append continues from, oldest first
    carried: tuple[str, ...] = ()
    """Nodes to repeat at a new place: first what was said after the calls, then the block of calls and results."""
    cut: StandingCut | None = None  # the newest cut of the branch
    instructions: tuple[Message, ...] = ()  # the newest stored instructions, for an append that brings none
    updated_at: int | None = None  # when the session's last exchange ended; None if there is no session yet
    scale: float | None = None
    """Ratio of the tokens that the upstream counts to those counted here, for the model last used."""
    model: str | None = None  # the model that was last used
    ready_summary: SummaryRow | None = None  # the ready summary that covers most of the branch
    attempt: SummaryRow | None = None  # the newest attempt at a summary of the branch, whatever its result
    others: Sequence[NodeRow] = ()  # what other agents said since this one's last turn, oldest first
    hidden: Mapping[str, Hidden] = {}  # what was hidden from the client, by node, of replies in `marks` and `rows`
    owed: tuple[Message, ...] = ()
    """Messages that complete a reply at the provider. They must be sent before the conversation can continue."""


class TooLong(Exception):
    """More messages would have to be read than allowed."""


# -------------------------------------------------------------------------------------------- places in lists

_CURSOR: Final = re.compile(r"(-?[0-9]{1,19})\.([^\x00\ud800-\udfff]*)")
_LARGEST: Final = 2**63


class Cursor(Struct, frozen=True, kw_only=True):
    """The last row of a page: its sort value (mostly a time), and its name, which breaks ties."""

    time: int
    name: str

    def __str__(self) -> str:
        """Return the cursor as clients receive it and send it back."""
        return f"{self.time}.{self.name}"

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Parse a cursor; raises `InvalidRequest` if `text` is not one."""
        found = _CURSOR.fullmatch(text)
        if found is None or abs(int(found[1])) >= _LARGEST:
            raise InvalidRequest("after must be the `next` of the page before, unchanged.", param="after")
        return cls(time=int(found[1]), name=found[2])


# --------------------------------------------------------------------------------- numbers that can be stored

LIMIT: Final = 2**31
Amount: TypeAlias = Annotated[int, Meta(ge=0, lt=LIMIT)]  # of messages or tokens
Time: TypeAlias = Annotated[int, Meta(ge=0, lt=253_402_300_800_000)]
"""Milliseconds since 1970, up to the end of the year 9999; later times cannot be displayed."""

"""What goes into the store and what comes out of it, as plain data, and what of it can be stored. No SQL."""

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

CHAT: Final = "chat"  # the dialect of every session that does not say which one it speaks
_RECENT: Final = 1024  # sessions whose names are remembered


@lru_cache(maxsize=_RECENT)  # it is asked for several times in each request
def session_key(tenant: str, session: str, dialect: str = CHAT) -> str:
    """Return the internal name of a session from its owner, its id and its dialect.

    It has 32 hexadecimal digits, and before them, of another dialect than `CHAT`, the dialect's name.

    Computed, never looked up: every table's primary key starts with it, any worker knows it without asking, and no
    row of one tenant can be reached with another's name.
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
    """How an exchange stands."""

    PENDING = "pending"  # asked, not settled yet
    COMPLETE = "complete"  # the whole reply came and is stored
    PARTIAL = "partial"  # a part of the reply came and is stored, marked as such
    FAILED = "failed"  # there is no reply: the upstream refused, broke or was not understood
    CANCELLED = "cancelled"  # the client left before there was anything to keep
    INTERRUPTED = "interrupted"  # the process ended before it settled; found at a later start


FAILURES: Final = (Status.FAILED.value, Status.PARTIAL.value, Status.INTERRUPTED.value)
"""Those of requests that failed or broke off."""


class Source(StrEnum):
    """Where a node came from."""

    CLIENT = "client"
    UPSTREAM = "upstream"
    IMPORT = "import"


FORKED: Final = "fork"
"""`SessionRow.arrival` of a session that was forked from another one, until its first request is settled."""


class Body(Struct, frozen=True, kw_only=True):
    """A message to be stored, its text kept once per session and content."""

    message: Message  # as it arrived, our own fields included
    tokens: int  # its tokens as counted when it was stored


class SessionRow(Struct, frozen=True, kw_only=True):
    """A session as it stands."""

    key: str
    tenant: str
    id: str
    created_at: int  # milliseconds since 1970, as all times here
    updated_at: int
    head: str  # the node where the session stands; `ROOT` ("") while it has none
    instructions: str | None  # version of the newest instructions; None where none ever came
    arrival: str | None
    """Kind of the last settled arrival (`first`, `append`, …), or `FORKED`; None before there is one."""
    messages: int  # messages on the branch of the head
    rounds: int  # user messages on the branch of the head
    tokens: int  # tokens of the branch of the head
    requests: int  # exchanges that were settled with a reply
    tokens_sent: int  # tokens of all requests, as sent
    tokens_saved: int  # tokens that these requests would have had more without trimming
    model: str | None = None  # the model that the conversation last asked; None where that was not noted
    tools: str | None = None  # name of the text of the tools that it last offered; None where it offered none
    scale: float | None = None
    """How many tokens the upstream counts for one that is counted here; None where that was not learnt."""
    hidden: int = 0  # replies of the session that have something the client was not shown
    summaries: int = 0  # summaries by a model that were tried for the session, however that ended
    cost: float | None = None  # dollars that the session has cost; None where no price was known yet
    calls: tuple[str, ...] = ()
    """Names of the tools that the newest reply on the branch of the head calls, as long as no message but results came
    after it; each once."""
    dialect: str = CHAT


class NodeRow(StoredMessage, frozen=True, kw_only=True):
    """One stored message at its place in the tree."""

    round: int  # user messages from the root to this one, itself included
    tokens_total: int  # tokens of all messages from the root to this one
    body: str  # name of its text (`body_id` of `message.raw`)
    tokens: int
    source: Source
    partial: bool  # a reply that broke off
    exchange: str | None  # the exchange that brought it; None where it was imported
    policy: str | None  # version of the policy under which it was first sent; None for replies
    arrival: tuple[Change, ...] | None
    """What `on_arrival` decided when it was first sent; None where it has not been sent yet."""
    created_at: int


class Mark(Struct, frozen=True, kw_only=True):
    """A stored message without its text: enough for who has the text."""

    node: str
    depth: int
    body: str
    tokens: int
    arrival: tuple[Change, ...] | None


class StandingCut(Struct, frozen=True, kw_only=True):
    """A cut as it is stored, with what it left."""

    cut: Cut
    node: str  # the node at which it was made: the last message before it
    kept: tuple[str, ...] | None
    """The nodes before the cut that lie in none of its gaps, by position. None where that was not stored:
    then the branch must be read whole."""


class Opening(Struct, frozen=True, kw_only=True):
    """A request, to be stored before or while the upstream is asked."""

    tenant: str
    session: str
    exchange: str
    created_at: int
    kind: str  # kind of arrival
    base: str  # the node under which the new messages belong
    messages: tuple[Body, ...]  # the messages that are new, oldest first
    instructions: tuple[Message, ...] | None  # the instructions that came with the request; None where none came
    instructions_tokens: int
    digest: str  # hash over the canonical forms of what the request said, by which its repetition is known
    model: str
    agent: str | None
    policy: str
    policy_version: str
    stream: bool
    parameters: Mapping[str, Any]  # the other fields of the request, `messages` and `tools` excepted
    tools: bytes | None  # the JSON text of `tools`; None where there are none
    idempotency: str | None = None  # hash of the client's key for this request; None where it gave none
    forms: tuple[tuple[str, Message], ...] = ()
    """(node, form) for stored messages that the client sent in another form than the stored one."""
    dialect: str = CHAT


class Reply(Struct, frozen=True, kw_only=True):
    """One choice of the upstream's answer."""

    body: Body
    partial: bool = False
    hidden: Hidden | None = None
    """What the client was not shown of it. It is kept where this exchange makes the reply's node: one that is there
    already is what it was."""


class Kept(Struct, frozen=True, kw_only=True):
    """The messages before a cut that lie in none of its gaps."""

    nodes: tuple[str, ...]  # those that are stored already, by position
    messages: tuple[int, ...]  # those among the new ones, by their number in `Settlement.messages`


class ExchangeFigures(Struct, frozen=True, kw_only=True):
    """What an exchange adds to the sums that statistics are made of. All but the first three can be added up."""

    model: str
    policy: str
    miss: str = ""  # why the provider's cache missed; empty where it did not, or nobody knows
    requests: int = 1
    tokens_before: int = 0  # tokens of the request if nothing were trimmed
    tokens_sent: int = 0
    tokens_input: int = 0  # of the prompt, as the upstream reported it
    tokens_cached: int = 0  # those of them that it read from its cache
    tokens_written: int = 0  # those of them that it wrote to its cache
    tokens_output: int = 0
    tokens_missed: int = 0  # those of the prompt that were sent before, and were not read from the cache
    tokens_unique: int = 0  # tokens that this request brought and that were never sent, counted once
    trims: int = 0
    edits: int = 0  # types of edits that changed something
    warnings: int = 0
    recalls: int = 0  # calls of the proxy's own tools
    summaries: int = 0  # attempts at a summary
    priced: int = 0  # requests whose cost is known
    cost: float = 0.0  # dollars
    cost_saved: float = 0.0  # dollars that the same session would have cost more untrimmed; recalls are subtracted
    cost_cache_saved: float = 0.0  # dollars that the provider's own cache saved
    cost_missed: float = 0.0  # dollars that `tokens_missed` cost more than if they had been read from the cache
    cost_recalls: float = 0.0  # the part of `cost` that the proxy's own tools caused
    cost_summaries: float = 0.0  # dollars for summaries by a model, which are not part of `cost`
    added_ms: float = 0.0  # milliseconds until the upstream was asked
    upstream_ms: float = 0.0  # milliseconds from then to the end of its answer


class Settlement(Struct, frozen=True, kw_only=True):
    """How an exchange ended. One transaction makes all of it true, or none."""

    tenant: str
    session: str
    exchange: str
    settled_at: int
    status: Status
    kind: str
    base: str  # the node under which the new messages go, except where `at_head`
    at_head: bool  # put them under the head of the moment of settling (an append) instead
    moves_head: bool  # whether the head goes to the first reply (a `side` request's does not)
    messages: tuple[Body, ...]
    arrivals: tuple[tuple[Change, ...], ...]  # for each of `messages`, what `on_arrival` decided
    policy_version: str
    agent: str | None
    replies: tuple[Reply, ...]
    """Empty, and not `finished`: nothing becomes a node and the head stays; the exchange alone is settled."""
    cut: Cut | None  # a cut that was moved by this exchange, kept at its last message; None where none moved
    tokens_before: int
    tokens_sent: int
    receipt: Mapping[str, Any]  # what is shown of the exchange: plan, usage, timings, warnings, error; JSON data
    kept: Kept | None = None  # what the cut left; None where that is not known
    follows: str | None = None
    """The node of the cut that the branch had before, of the same policy and agent. The new one is stored as what
    differs from it; None: as a whole."""
    heard: tuple[int, Hidden] | None = None
    """What other agents said, as it was sent before one of `messages`: its number, and the text."""
    relayed: tuple[int, ...] = ()
    """Which of `messages` are known as replies of upstream, though the client brought them."""
    scale: float | None = None
    """How many tokens the upstream counts for one that is counted here; None where nothing was learnt."""
    finished: bool = False
    """Whether a stored reply answered the request, or one that is not stored will. `messages` become nodes, there are
    no `replies`. If `moves_head`, the head goes to the last message (to `base` if there is none). For
    an append: results already there are not stored again; the head stays if the session went on."""
    cost: float | None = None  # dollars that it cost, whatever came of it; None where no price is known
    resends: bool = False  # whether the session is used by resending, though this request appends
    yields: bool = False  # whether it stands aside if another question has begun the session; see `Arrival`
    carried: tuple[str, ...] = ()
    """The nodes that it was planned to carry along: what was said since the calls that its `messages` answer, and
    behind that the block of the calls and the results that it had, in their new order."""
    dialect: str = CHAT
    figures: ExchangeFigures | None = None  # what is added to the statistics
    late: bool = False
    """Whether the exchange was settled before, without a reply or with a part of one. It gets that of `replies`, under
    `base`, the last of its messages. The head goes there if the session has not gone on; `messages` are empty."""


NOTHING_CAME: Final[dict[str, Any]] = {
    "nodes": "[]",
    "replies": "[]",
    "cut_node": None,
    "tokens_before": 0,
    "tokens_sent": 0,
    "receipt": "{}",
}
"""What the columns of an exchange say that its end fills, until it does."""


_MODEL: Final = "\x01"
"""Stands in stored parameters for the model, which has a column of its own. JSON never holds this character."""


def without_model(parameters: str, model: str) -> str:
    """Return the JSON of a request's parameters as their column has it."""
    return parameters.replace(orjson.dumps(model).decode(), _MODEL)


def with_model(stored: str, model: str) -> str:
    """Return what `without_model` was given."""
    return stored.replace(_MODEL, orjson.dumps(model).decode())


_OF_OPENING: Final = ("created_at", "kind", "base", "digest", "model", "agent", "policy", "policy_version", "stream")
"""What an opening and the row of its exchange have in common."""


def opened_columns(opening: Opening) -> dict[str, Any]:
    """Return the row of an exchange that begins; `session`, `tools` and `instructions` have names of other rows."""
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
    """Return what a settlement itself says of the exchange's row; the rest says what became of its messages."""
    return {
        "status": settlement.status.value,
        "settled_at": settlement.settled_at,
        "tokens_before": settlement.tokens_before,
        "tokens_sent": settlement.tokens_sent,
        "receipt": receipt_text(settlement.receipt),
    }


def receipt_text(receipt: Mapping[str, Any]) -> str:
    """Return a receipt as its column has it: as JSON that every parser takes."""
    data = dict(receipt)
    try:
        return orjson.dumps(data).decode()
    except TypeError:  # as every refusal of orjson's
        return orjson.dumps(sound(data)).decode()


Exchange: TypeAlias = Opening | Settlement
"""One that begins, or one that ends."""


class Settled(Struct, frozen=True, kw_only=True):
    """What settling made."""

    head: str  # the head of the session afterwards
    nodes: tuple[str, ...]  # the nodes of the new messages, whether they were there before or not
    replies: tuple[str, ...]  # the nodes of the replies
    are_new: bool = False  # whether all of these were made just now, where they were planned


class SummaryStatus(StrEnum):
    """What became of a summary that a model was asked for."""

    READY = "ready"  # it may be sent
    REFUSED = "refused"  # the model answered, and what it wrote did not pass
    FAILED = "failed"  # the model did not answer


class SummaryRow(Struct, frozen=True, kw_only=True):
    """A summary by a model of the beginning of a branch, or the attempt at one. Never changed once kept."""

    id: str  # made by who makes the summary
    node: str  # the last message that it covers
    tip: str  # the end of the branch on which it was made: by it the branch is recognised where `node` is not read
    recipe: str  # hash over what summaries must have in common to replace one another
    until: int  # depth of `node`: the number of messages that it covers
    generation: int  # how many summaries it is made from, itself included
    status: SummaryStatus
    reason: str  # why it is not ready; empty where it is
    model: str
    text: str  # with its heading, as it is sent; empty unless it is ready
    state: Mapping[str, Any]  # JSON: what the next one needs of this one
    tokens: int  # tokens of what is sent of it
    covered_messages: int
    covered_tokens: int
    predecessor: str | None  # the `id` of the summary that it was made from; None where it was made from messages alone
    asked: bool  # whether somebody asked for it
    usage: Mapping[str, Any] | None
    """JSON: the usage that its model reported, of all tries together; None where nothing was reported."""
    cost: float | None  # dollars, of all tries together; None where no price is known
    exchange: str | None  # the exchange that began it; None where none did, or it came from another session
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
    instructions: str | None  # version of the instructions it came with
    messages: tuple[str, ...]  # names of the texts of its new messages
    nodes: tuple[str, ...]  # the nodes they became; empty while there are none
    replies: tuple[str, ...]  # the nodes of the replies
    cut_node: str | None  # the node at which the cut was moved by this exchange
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
    """A leaf of the tree: a head that the session has or had."""

    head: str
    depth: int
    updated_at: int


# ---------------------------------------------------------------------------------- a request and its history

DELETED: Final = "The session was deleted while this request was on its way. Send it again."


class ProviderState(Struct, frozen=True, kw_only=True):
    """What a request goes on from that does not say it: an earlier reply, by an id of the provider's."""

    node: str | None  # the reply, where it is stored; None: where the session stands
    expands: bool = False  # whether the proxy sends what came before, in the provider's place
    begun: bool = False  # whether the provider holds but the first round of the reply under that id


class HistoryQuery(Struct, frozen=True, kw_only=True):
    """A request, as far as what is read depends on it."""

    tenant: str
    session: str
    incoming: Incoming
    messages: Sequence[Message]  # its messages, instructions not among them
    policy: str | None  # name of the policy whose cut is wanted; None where there can be none
    agent: str | None
    idempotency: str | None = None  # hash of the client's key for this request; None where it gave none
    whole: bool = False  # whether the messages that a cut dropped are wanted too
    merging: bool = False  # whether an agent that resends is to hear what the others said since
    instructed: bool = False  # whether it brings instructions of its own
    recipe: str | None = None  # recipe of the summaries that are wanted; None where there can be none
    dialect: str = CHAT
    state: ProviderState | None = None  # what the request goes on from; None where it says or leaves that itself


class HistorySnapshot(Struct, frozen=True, kw_only=True):
    """What is known of the conversation."""

    arrival: Arrival
    names: Sequence[str] = ()
    """The nodes of the request's messages, where older versions named some of them; empty where none did."""
    start: int = 0  # position in its branch of the first message that the request speaks of
    depth: int = 0  # number of messages of the branch that its new messages follow
    marks: Sequence[Mark] = ()  # what was noted about the messages that the client sends again, oldest first
    rows: Sequence[NodeRow] = ()  # the stored messages that an append goes on from, oldest first
    carried: tuple[str, ...] = ()
    """Nodes to repeat at a new place: first what was said after the calls, then the block of calls and results."""
    cut: StandingCut | None = None  # the newest cut of the branch
    instructions: tuple[Message, ...] = ()  # the newest stored instructions, for an append that brings none
    updated_at: int | None = None  # when the session's last exchange ended; None where there is no session yet
    scale: float | None = None
    """How many tokens the upstream counts for one that is counted here, by the model last asked."""
    model: str | None = None  # the model that was last asked
    ready_summary: SummaryRow | None = None  # the ready summary that covers most of the branch
    attempt: SummaryRow | None = None  # the summary of the branch that was tried last, whatever became of it
    others: Sequence[NodeRow] = ()  # what other agents said since this one's last turn, oldest first
    hidden: Mapping[str, Hidden] = {}  # by node, what the client was not shown of the replies among `marks` and `rows`
    owed: tuple[Message, ...] = ()
    """What the provider must be sent of a reply that it holds, before anything goes on from that."""


class TooLong(Exception):
    """More messages are to be read than were allowed."""


# -------------------------------------------------------------------------------------------- places in lists

_CURSOR: Final = re.compile(r"(-?[0-9]{1,19})\.([^\x00\ud800-\udfff]*)")
_LARGEST: Final = 2**63


class Cursor(Struct, frozen=True, kw_only=True):
    """The last row that was shown: what rows are ordered by, mostly a time, and the name that tells equals apart."""

    time: int
    name: str

    def __str__(self) -> str:
        """Return it as clients get it and send it back."""
        return f"{self.time}.{self.name}"

    @classmethod
    def read(cls, text: str) -> Cursor:
        """Read what `str` made."""
        found = _CURSOR.fullmatch(text)
        if found is None or abs(int(found[1])) >= _LARGEST:
            raise InvalidRequest("after must be the `next` of the page before, unchanged.", param="after")
        return cls(time=int(found[1]), name=found[2])


# --------------------------------------------------------------------------------- numbers that can be stored

LIMIT: Final = 2**31
Amount: TypeAlias = Annotated[int, Meta(ge=0, lt=LIMIT)]  # of messages or tokens
Time: TypeAlias = Annotated[int, Meta(ge=0, lt=253_402_300_800_000)]
"""Milliseconds since 1970, up to the end of the year 9999: later ones cannot be shown."""

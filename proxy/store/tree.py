"""The messages of a session: nodes, their texts, versions of instructions, and what clients were not shown.

Nodes form a tree like git's commits. Texts are stored once per session, to the byte. All of it is append- only.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import accumulate, chain
from typing import Any, Final

import msgspec
import orjson
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import FromClause, ScalarSelect, Select, bindparam, except_, func, literal_column, select, true

from proxy.conversation import ROOT, array_of, body_id, body_of, child, content_hash, content_key, names_under
from proxy.dialects import Message
from proxy.store.database import Connection, Row
from proxy.store.encoding import decode_changes, encode_changes, stored_message
from proxy.store.records import Amount, Body, BranchRow, InstructionsRow, Mark, NodeRow, Source, Time, sanitize
from proxy.store.schema import BODIES, HIDDEN, INSTRUCTIONS, NODES, SESSIONS, insert_new
from proxy.trimming import Change, Hidden

# ------------------------------------------------------------------------------------------------------ texts

_RAW_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_PREFIX: Final = re.compile(r"[0-9a-f]{12,40}", re.ASCII)
_BEYOND_HEX: Final = "g"

_TEXT: Final = select(BODIES.c.text).where(BODIES.c.session == bindparam("key"), BODIES.c.body == bindparam("body"))
_BY_PREFIX: Final = (
    select(BODIES.c.body, BODIES.c.text)
    .where(BODIES.c.session == bindparam("key"), BODIES.c.body >= bindparam("from"), BODIES.c.body < bindparam("to"))
    .limit(2)
)
_NEWEST: Final = (
    select(INSTRUCTIONS)
    .join(SESSIONS, SESSIONS.c.session == INSTRUCTIONS.c.session)
    .where(INSTRUCTIONS.c.session == bindparam("key"), INSTRUCTIONS.c.version == SESSIONS.c.instructions)
)
_VERSION: Final = select(INSTRUCTIONS).where(
    INSTRUCTIONS.c.session == bindparam("key"), INSTRUCTIONS.c.version == bindparam("version")
)


def add_bodies(connection: Connection, key: str, bodies: Mapping[str, Body]) -> None:
    """Store messages by the names of their texts; those that are there stay as they are."""
    insert_new(
        connection, BODIES, [_text_row(key, name, body.message.raw, body.tokens) for name, body in bodies.items()]
    )


def named_bodies(bodies: Iterable[Body]) -> dict[str, Body]:
    """Return messages by the names of their texts, each once."""
    return {body_of(body.message): body for body in bodies}


def add_tools(connection: Connection, key: str, tools: bytes) -> str:
    """Store the text of `tools`; return its name."""
    name = body_id(tools)
    insert_new(connection, BODIES, [_text_row(key, name, tools, 0)])
    return name


def tools_of(connection: Connection, key: str, body: str) -> bytes | None:
    """Return the text of tools with this name."""
    text: str | None = connection.execute(_TEXT, {"key": key, "body": body}).scalar_one_or_none()
    return text.encode() if text is not None and not is_message(text.encode()) else None


def message_of(connection: Connection, key: str, prefix: str) -> tuple[str, Message] | None:
    """Return name and message of the text whose name begins so; None where there is none, or several."""
    if not _PREFIX.fullmatch(prefix):
        return None
    rows = connection.execute(_BY_PREFIX, {"key": key, "from": prefix, "to": prefix + _BEYOND_HEX}).all()
    if len(rows) != 1 or not is_message(rows[0].text.encode()):
        return None
    return rows[0].body, stored_message(rows[0].text.encode())


def add_instructions(
    connection: Connection, key: str, messages: Sequence[Message], tokens: int, at: int, *, there: str | None = None
) -> str:
    """Store a version of the instructions; return its name, the same for the same messages.

    `there` is one that is known to be stored.
    """
    text = array_of(messages)
    version = body_id(text)
    if version == there:
        return version
    row = {"session": key, "version": version, "messages": text.decode(), "tokens": tokens, "created_at": at}
    insert_new(connection, INSTRUCTIONS, [row])
    return version


def instructions_of(connection: Connection, key: str, version: str | None) -> InstructionsRow | None:
    """Return a version of the instructions, or the newest where `version` is None."""
    if version is None:
        row = connection.execute(_NEWEST, {"key": key}).one_or_none()
    else:
        row = connection.execute(_VERSION, {"key": key, "version": version}).one_or_none()
    if row is None:
        return None
    return InstructionsRow(
        version=row.version, messages=messages_in(row.messages), tokens=row.tokens, created_at=row.created_at
    )


def messages_in(text: str) -> tuple[Message, ...]:
    """Return the messages of a JSON array, each with its own text."""
    return tuple(stored_message(bytes(raw)) for raw in _RAW_LIST.decode(text))


def is_message(raw: bytes) -> bool:
    """Tell the text of a message, an object, from that of tools, an array."""
    return raw.lstrip(b" \t\r\n").startswith(b"{")


def _text_row(key: str, name: str, raw: bytes, tokens: int) -> dict[str, Any]:
    return {"session": key, "body": name, "tokens": tokens, "text": raw.decode()}


# ------------------------------------------------------------------------------------------------------ nodes

_AT_ONCE: Final = 500
"""Names in one question: databases limit them."""

_NODES_OF: Final = NODES.c.session == bindparam("key")
_AMONG: Final = NODES.c.node.in_(bindparam("nodes", expanding=True))
_NAMED: Final = select(NODES.c.node, NODES.c.depth, NODES.c.round, NODES.c.tokens_total, NODES.c.recorded).where(
    _NODES_OF, _AMONG
)
_DEPTHS: Final = select(NODES.c.node, NODES.c.depth).where(_NODES_OF, _AMONG)
_PARENTS: Final = (
    select(NODES.c.parent)
    .where(_NODES_OF, NODES.c.content == bindparam("content"))
    .order_by(func.abs(NODES.c.depth - bindparam("depth", type_=NODES.c.depth.type)), NODES.c.node)
    .limit(bindparam("most", type_=NODES.c.depth.type))
)

_NODE_COLUMNS: Final = (
    *("node", "parent", "depth", "round", "tokens_total", "body", "tokens", "source", "partial", "exchange"),
    *("agent", "policy", "arrival", "created_at"),
)
"""In the order in which `_node` takes them."""
_MARKED: Final = ("node", "depth", "body", "tokens", "arrival")
"""In the order in which `_mark` takes them."""


_RECORDED: Final = (
    select(SESSIONS.c.id)
    .join(NODES, NODES.c.session == SESSIONS.c.session)
    .where(
        # In the words of the index, which has no other rows.
        literal_column("nodes.source = 'upstream' AND nodes.recorded IS NOT NULL"),
        NODES.c.recorded == bindparam("tenant"),
        NODES.c.node == bindparam("node"),
        # What a fork was made with came in no exchange of its own: it is the other session's.
        NODES.c.exchange.is_not(None),
    )
    .limit(2)
)


def _text_of(table: FromClause) -> ScalarSelect[str]:
    """Return what looks up the text of a row's message."""
    found = select(BODIES.c.text).where(BODIES.c.session == bindparam("key"), BODIES.c.body == table.c.body)
    return found.correlate(table).scalar_subquery()


_ROWS: Final = select(*(NODES.c[name] for name in _NODE_COLUMNS), _text_of(NODES)).where(_NODES_OF, _AMONG)


@cache
def _path(dialect: str, *, texts: bool) -> Select[*tuple[Any, ...]]:
    """Climb from a node to its root, a row at a time; `texts` are looked up on the way."""
    up = select(NODES).where(_NODES_OF, NODES.c.node == bindparam("node")).cte("up", recursive=True)
    step = select(NODES).where(_NODES_OF, NODES.c.node == up.c.parent, NODES.c.depth > bindparam("below"))
    if dialect == "postgresql":
        # Left to itself it reads the whole session at each step, since it takes a branch to be ten messages long. So it
        # is told to look each parent up by its primary key.
        above = step.limit(1).lateral("above")
        step = select(*above.c).select_from(up.join(above, true()))
    up = up.union_all(step)
    if not texts:
        return select(*(up.c[name] for name in _MARKED)).order_by(up.c.depth)
    return select(*(up.c[name] for name in _NODE_COLUMNS), _text_of(up)).order_by(up.c.depth)


_CHILDLESS: Final = except_(select(NODES.c.node).where(_NODES_OF), select(NODES.c.parent).where(_NODES_OF))
_LEAVES: Final = (
    select(NODES.c.node, NODES.c.depth, NODES.c.created_at)
    .where(_NODES_OF, NODES.c.node.in_(_CHILDLESS))
    .order_by(NODES.c.created_at.desc(), NODES.c.node)
)


class Place(Struct, frozen=True, kw_only=True):
    """A node with the sums that its children go on from."""

    node: str
    depth: int
    round: int
    tokens_total: int
    recorded: str | None = None
    """The tenant, where every assistant message up to here came from upstream (or is vouched for)."""


class NewNode(Struct, frozen=True, kw_only=True):
    """A message that is to be a node, with what its row says beside it."""

    body: Body
    source: Source
    created_at: int
    partial: bool = False
    exchange: str | None = None
    agent: str | None = None
    """Who wrote it, where the message itself does not say."""
    vouched: bool = False
    """Whether it is known to have come from upstream, though the client brought it."""
    policy: str | None = None
    arrival: tuple[Change, ...] | None = None


class UnknownBase(LookupError):
    """The node under which others should be put is not stored."""


def depths_of(connection: Connection, key: str, nodes: Sequence[str]) -> dict[str, int]:
    """Return the depth, 1 under the root, of those of `nodes` that are stored."""
    return {
        row.node: row.depth
        for some in in_parts(nodes)
        for row in connection.execute(_DEPTHS, {"key": key, "nodes": some})
    }


def parents_of(connection: Connection, key: str, content: str, depth: int, most: int) -> list[str]:
    """Return the parents of up to `most` nodes with this `content_key`, those nearest to `depth` first."""
    asked = {"key": key, "content": content, "depth": depth, "most": most}
    return [row.parent for row in connection.execute(_PARENTS, asked)]


def recorded_in(connection: Connection, tenant: str, node: str) -> list[str]:
    """Return the ids of up to two sessions of a tenant that have this reply, recorded from upstream."""
    return list(connection.execute(_RECORDED, {"tenant": tenant, "node": node}).scalars())


def rows_of(connection: Connection, key: str, nodes: Sequence[str]) -> list[NodeRow]:
    """Return these nodes by depth; those that are not stored are left out."""
    rows = [_node(row) for some in in_parts(nodes) for row in connection.execute(_ROWS, {"key": key, "nodes": some})]
    return sorted(rows, key=lambda row: row.depth)


def path_to(connection: Connection, key: str, node: str, *, below: int = 0) -> list[NodeRow]:
    """Return the branch that ends at `node`, oldest first; nothing where there is none.

    With `below`, only what lies deeper than that, and `node` itself.
    """
    asked = {"key": key, "node": node, "below": below}
    return [_node(row) for row in connection.execute(_path(connection.dialect.name, texts=True), asked)]


def marks_to(connection: Connection, key: str, node: str, *, below: int = 0) -> list[Mark]:
    """Return what `path_to` does, without the texts: who resends a history has them."""
    asked = {"key": key, "node": node, "below": below}
    return [_mark(row) for row in connection.execute(_path(connection.dialect.name, texts=False), asked)]


def leaves(connection: Connection, key: str) -> list[BranchRow]:
    """Return the nodes that nothing follows, newest first."""
    return [
        BranchRow(head=row.node, depth=row.depth, updated_at=row.created_at)
        for row in connection.execute(_LEAVES, {"key": key})
    ]


def insert_nodes(
    connection: Connection,
    key: str,
    base: str,
    messages: Sequence[NewNode],
    replies: Sequence[NewNode],
    *,
    tenant: str | None = None,
    under: Place | None = None,
) -> tuple[list[Place], list[Place]]:
    """Put `messages` in a row under `base`, and `replies` side by side under the last of them.

    Their texts must be stored in the same transaction. A node that is there stays as it is. `tenant` is whose
    conversation it is, where a request without an id may be found by it. `under` is where `base` stands; who gives it
    knows that the first of `messages` does not stand there yet, so none of these do.

    Returns:
        Where the messages stand, and where the replies do.
    """
    contents = [content_hash(new_node.body.message) for new_node in (*messages, *replies)]
    names = names_under(base, contents[: len(messages)])
    end = names[-1] if names else base
    siblings = [child(end, content) for content in contents[len(messages) :]]
    stored = {ROOT: Place(node=ROOT, depth=0, round=0, tokens_total=0, recorded=tenant)}
    stored |= places_of(connection, key, [base, *names, *siblings]) if under is None else {base: under}
    if base not in stored:
        raise UnknownBase(f"node {base} is not stored")
    places = insert_node_rows(
        connection,
        key,
        [
            *zip([base, *names], names, messages, strict=False),
            *((end, name, new_node) for name, new_node in zip(siblings, replies, strict=True)),
        ],
        stored,
        contents,
    )
    return places[: len(names)], places[len(names) :]


def insert_node_rows(
    connection: Connection,
    key: str,
    new_nodes: Sequence[tuple[str, str, NewNode]],
    stored: dict[str, Place] | None = None,
    contents: Sequence[bytes] | None = None,
) -> list[Place]:
    """Make nodes of (parent, node, new_node), parents before children; those in `stored` are there already.

    `stored` gets to know the new ones. `contents` has the hash of what each says, where that is known.
    """
    places = stored if stored is not None else {ROOT: Place(node=ROOT, depth=0, round=0, tokens_total=0)}
    rows: list[dict[str, Any]] = []
    for number, (parent, node, new_node) in enumerate(new_nodes):
        if node not in places:
            under = places[parent]
            place = places[node] = _below(under, node, new_node)
            content = contents[number] if contents else content_hash(new_node.body.message)
            rows.append(_node_row(key, under, place, new_node, content))
    insert_new(connection, NODES, rows)
    return [places[node] for _, node, _ in new_nodes]


def in_parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Give names in parts, none too long for one question."""
    for start in range(0, len(names), _AT_ONCE):
        yield names[start : start + _AT_ONCE]


def places_of(connection: Connection, key: str, nodes: Sequence[str]) -> dict[str, Place]:
    """Return where those of `nodes` stand that are stored."""
    return {
        row.node: Place(
            node=row.node, depth=row.depth, round=row.round, tokens_total=row.tokens_total, recorded=row.recorded
        )
        for some in in_parts([node for node in nodes if node != ROOT])
        for row in connection.execute(_NAMED, {"key": key, "nodes": some})
    }


def _below(under: Place, name: str, new_node: NewNode) -> Place:
    role = new_node.body.message.role
    known = role != "assistant" or new_node.source is Source.UPSTREAM or new_node.vouched
    return Place(
        node=name,
        depth=under.depth + 1,
        round=under.round + (role == "user"),
        tokens_total=under.tokens_total + new_node.body.tokens,
        recorded=under.recorded if known else None,
    )


def _node_row(key: str, under: Place, place: Place, new_node: NewNode, content: bytes) -> dict[str, Any]:
    arrival = new_node.arrival
    return {
        "session": key,
        "node": place.node,
        "parent": under.node,
        "depth": place.depth,
        "round": place.round,
        "tokens_total": place.tokens_total,
        "body": body_of(new_node.body.message),
        "tokens": new_node.body.tokens,
        "source": new_node.source.value,
        "partial": new_node.partial,
        "exchange": new_node.exchange,
        "agent": _agent_in(new_node.body.message) or new_node.agent,
        "policy": new_node.policy,
        # The position is the node's own, which its depth tells, wherever the branch was thought to begin.
        "arrival": None if arrival is None else encode_changes([replace(change, position=0) for change in arrival]),
        "created_at": new_node.created_at,
        "content": content_key(content),
        "recorded": place.recorded,
    }


def _agent_in(message: Message) -> str | None:
    agent = message.agent
    return None if agent is None else sanitize(agent)


def _node(row: Row) -> NodeRow:
    # By place: a branch has thousands of rows, and looking columns up by name costs more than all the rest.
    (node, parent, depth, rounds, total, body, tokens, source, partial, exchange, agent, policy, arrival, at, text) = (
        row
    )
    return NodeRow(
        node=node,
        parent=parent,
        depth=depth,
        round=rounds,
        tokens_total=total,
        body=body,
        message=stored_message(text.encode()),
        tokens=tokens,
        source=Source(source),
        partial=partial,
        exchange=exchange,
        agent=agent,
        policy=policy,
        arrival=None if arrival is None else _arrival_at(depth - 1, arrival),
        created_at=at,
    )


def _mark(row: Row) -> Mark:
    node, depth, body, tokens, arrival = row
    return Mark(
        node=node,
        depth=depth,
        body=body,
        tokens=tokens,
        arrival=None if arrival is None else _arrival_at(depth - 1, arrival),
    )


def _arrival_at(position: int, text: str) -> tuple[Change, ...]:
    return tuple(replace(change, position=position) for change in decode_changes(text))


# ---------------------------------------------------------------------- the tools that the newest reply calls

_NEAR: Final = 64
"""Messages among which the reply is looked for, from the end upwards."""


def calls_of(reply: Message, *, partial: bool) -> tuple[str, ...]:
    """Return the names of the tools that a reply calls, each once; of a `partial` one, whole calls count."""
    whole = reply.without_unfinished_calls() if partial else reply
    return tuple(dict.fromkeys([sanitize(call.name) for call in whole.calls]))


def calls_at(connection: Connection, key: str, end: str, depth: int) -> tuple[str, ...]:
    """Return the names of the tools that the last message of a branch calls, results after it not counted.

    The branch ends at the node `end`, which has this `depth`.
    """
    for row in reversed(path_to(connection, key, end, below=depth - _NEAR)):
        if row.message.role != "tool":
            return calls_of(row.message, partial=row.partial)
    return ()


def encode_calls(names: tuple[str, ...]) -> str | None:
    """Return names as their column has them."""
    return orjson.dumps(names).decode() if names else None


def decode_calls(text: str | None) -> tuple[str, ...]:
    """Return the names that a column has."""
    return () if text is None else tuple(orjson.loads(text))


# ------------------------------------------------------------------------------ what the client was not shown

_HIDDEN_OF: Final = HIDDEN.c.session == bindparam("key")
_HIDDEN_NODES: Final = select(HIDDEN.c.node).where(_HIDDEN_OF)
_HIDDEN_ROWS: Final = select(HIDDEN.c.node, HIDDEN.c.before, HIDDEN.c.reply, HIDDEN.c.after, HIDDEN.c.tokens).where(
    _HIDDEN_OF, HIDDEN.c.node.in_(bindparam("nodes", expanding=True))
)
_MADE: Final = select(NODES.c.node).where(
    NODES.c.session == bindparam("key"),
    NODES.c.node.in_(bindparam("nodes", expanding=True)),
    NODES.c.exchange == bindparam("exchange"),
)


class HiddenRecord(msgspec.Struct, frozen=True, tag_field="record", tag="hidden", kw_only=True):
    """A row as an export has it."""

    node: str
    before: tuple[str, ...]
    reply: str | None
    after: tuple[str, ...]
    tokens: Amount
    created_at: Time

    def read(self) -> Hidden:
        """Return what it says."""
        reply = None if self.reply is None else _checked_text(self.reply)
        return Hidden(
            before=tuple(map(_checked_text, self.before)),
            reply=reply,
            after=tuple(map(_checked_text, self.after)),
            tokens=self.tokens,
        )


def keep_hidden(connection: Connection, key: str, replies: Mapping[str, Hidden], *, exchange: str, at: int) -> int:
    """Keep what the client was not shown of some replies, by node; return of how many.

    A node that another exchange made stays what it was: views that hold it already must not change.
    """
    if not replies:
        return 0
    made = connection.execute(_MADE, {"key": key, "nodes": list(replies), "exchange": exchange}).scalars()
    return add_hidden(connection, key, [(node, replies[node], at) for node in made], exchange=exchange)


def add_hidden(
    connection: Connection, key: str, rows: Iterable[tuple[str, Hidden, int]], *, exchange: str | None
) -> int:
    """Store (node, what was hidden, when) of nodes that have nothing yet; return how many they are."""
    new = [_hidden_row(key, node, hidden, exchange, at) for node, hidden, at in rows]
    insert_new(connection, HIDDEN, new)
    return len(new)


def hidden_at(connection: Connection, key: str, nodes: Collection[str], total: int) -> dict[str, Hidden]:
    """Return what the client was not shown of those of `nodes` where there is something.

    `total` is how many such nodes the session has: if they are fewer than `nodes`, theirs are the names that are looked
    through.
    """
    wanted: Sequence[str] = list(nodes)
    if total < len(wanted):
        among = frozenset(nodes)
        wanted = [node for node in connection.execute(_HIDDEN_NODES, {"key": key}).scalars() if node in among]
    return {
        row.node: _hidden(row)
        for some in in_parts(wanted)
        for row in connection.execute(_HIDDEN_ROWS, {"key": key, "nodes": some})
    }


def _hidden_row(key: str, node: str, hidden: Hidden, exchange: str | None, at: int) -> dict[str, Any]:
    return {
        "session": key,
        "node": node,
        "exchange": exchange,
        "before": _texts(hidden.before),
        "reply": None if hidden.reply is None else hidden.reply.raw.decode(),
        "after": _texts(hidden.after),
        "tokens": hidden.tokens,
        "created_at": at,
    }


def _hidden(row: Row) -> Hidden:
    reply = None if row.reply is None else stored_message(row.reply.encode())
    return Hidden(before=_messages(row.before), reply=reply, after=_messages(row.after), tokens=row.tokens)


def _texts(messages: Iterable[Message]) -> str:
    return orjson.dumps([message.raw.decode() for message in messages]).decode()


def _messages(texts: str) -> tuple[Message, ...]:
    return tuple([stored_message(text.encode()) for text in orjson.loads(texts)])


def _checked_text(text: str) -> Message:
    orjson.loads(text)
    raw = text.encode()
    if not is_message(raw):
        raise ValueError("what was hidden of the reply is no message")
    return stored_message(raw)


# ------------------------------------------------------------------------ where nodes stand on their branches

_STEP: Final = 64
"""Messages that are read of a branch until a known one is looked for among them; then four times as many."""


class _Run(Struct, frozen=True, kw_only=True):
    """Messages of one branch that follow one another, and what lies below them."""

    start: int
    """Position of the first of them."""
    nodes: list[str]
    totals: list[int]
    """For each, the tokens of the branch up to it, its own included."""
    below: _Run | None
    """Where the message before the first one stands; None where that is the root."""


class Lineage:
    """The branches that end at some nodes."""

    def __init__(self) -> None:
        """Begin with none."""
        self._runs: dict[str, _Run] = {}
        self._depths: dict[str, int] = {}

    def __contains__(self, node: object) -> bool:
        """Tell whether a node is on one of the branches."""
        return node in self._runs

    def depth(self, end: str) -> int:
        """Return the number of messages of the branch that ends at `end`; 0 where there is none."""
        return self._depths.get(end, 0)

    def node_at(self, end: str, position: int) -> str | None:
        """Return the node at a position of the branch that ends at `end`; None where it has no such one."""
        if not 0 <= position < self.depth(end):
            return None
        run = self._run_at(end, position)
        return run.nodes[position - run.start]

    def tokens(self, end: str, start: int, stop: int) -> int:
        """Return the tokens of the messages from `start` to before `stop`, on the branch to `end`."""
        return self._total(end, stop) - self._total(end, start)

    def add(self, end: str, depth: int, marks: list[Mark], below: str | None) -> None:
        """Take in the branch that ends at `end`: `marks` follow `below`, which is known (None: the root)."""
        self._depths[end] = depth
        if not marks:
            return
        start = marks[0].depth - 1
        run = self._runs[below] if below is not None else None
        before = run.totals[start - 1 - run.start] if run is not None else 0
        totals = accumulate((mark.tokens for mark in marks), initial=before)
        next(totals)
        new = _Run(start=start, nodes=[mark.node for mark in marks], totals=list(totals), below=run)
        self._runs.update(dict.fromkeys(new.nodes, new))

    def _total(self, end: str, stop: int) -> int:
        """Return the tokens of the first `stop` messages, of as many as there are."""
        last = min(stop, self.depth(end)) - 1
        if last < 0:
            return 0
        run = self._run_at(end, last)
        return run.totals[last - run.start]

    def _run_at(self, end: str, position: int) -> _Run:
        run = self._runs[end]
        while position < run.start and run.below is not None:
            run = run.below
        return run


def lineage_of(connection: Connection, key: str, ends: Collection[str]) -> Lineage:
    """Return the branches that end at these nodes; those that are not stored are left out."""
    found = Lineage()
    depths = depths_of(connection, key, list(ends))
    # The longest first: it holds most of the others.
    for end, depth in sorted(depths.items(), key=lambda item: -item[1]):
        found.add(end, depth, *_unknown(connection, key, end, depth, found))
    return found


def _unknown(connection: Connection, key: str, end: str, depth: int, known: Lineage) -> tuple[list[Mark], str | None]:
    """Return what of a branch is not known, oldest first, and the node before it that is (None: the root)."""
    parts: list[list[Mark]] = []
    below: str | None = end if end in known else None
    step = _STEP
    while below is None and depth > 0:
        read = marks_to(connection, key, end, below=max(depth - step, 0))
        # What comes before a known one is known too.
        first = bisect_left(read, True, key=lambda mark: mark.node not in known)
        below = read[first - 1].node if first else None
        parts.append(read[first:] if not parts else read[first:-1])
        end, depth, step = read[0].node, max(depth - step, 0), step * 4
    return list(chain.from_iterable(reversed(parts))), below

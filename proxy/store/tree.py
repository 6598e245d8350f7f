"""The tree of messages: which nodes there are, the way to one of them, its leaves, and new ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import (
    FromClause,
    ScalarSelect,
    Select,
    bindparam,
    except_,
    func,
    literal_column,
    select,
    true,
)

from proxy.conversation import ROOT, body_of, child, content_hash, content_key, names_under
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.store.database import Connection, Row
from proxy.store.encoding import decode_changes, encode_changes
from proxy.store.plain import sanitize
from proxy.store.records import Body, Branch, Mark, NodeRow, Source
from proxy.store.schema import BODIES, NODES, SESSIONS, insert_new
from proxy.trimming import Change

_AT_ONCE: Final = 500
"""Names in one question: databases limit them."""

_OF_SESSION: Final = NODES.c.session == bindparam("key")
_AMONG: Final = NODES.c.node.in_(bindparam("nodes", expanding=True))
_NAMED: Final = select(
    NODES.c.node, NODES.c.depth, NODES.c.round, NODES.c.tokens_total, NODES.c.recorded
).where(_OF_SESSION, _AMONG)
_DEPTHS: Final = select(NODES.c.node, NODES.c.depth).where(_OF_SESSION, _AMONG)
_PARENTS: Final = (
    select(NODES.c.parent)
    .where(_OF_SESSION, NODES.c.content == bindparam("content"))
    .order_by(func.abs(NODES.c.depth - bindparam("depth", type_=NODES.c.depth.type)), NODES.c.node)
    .limit(bindparam("most", type_=NODES.c.depth.type))
)

_COLUMNS: Final = (
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


_ROWS: Final = select(*(NODES.c[name] for name in _COLUMNS), _text_of(NODES)).where(_OF_SESSION, _AMONG)


@cache
def _path(dialect: str, *, texts: bool) -> Select[*tuple[Any, ...]]:
    """Climb from a node to its root, a row at a time; `texts` are looked up on the way."""
    up = select(NODES).where(_OF_SESSION, NODES.c.node == bindparam("node")).cte("up", recursive=True)
    step = select(NODES).where(_OF_SESSION, NODES.c.node == up.c.parent, NODES.c.depth > bindparam("below"))
    if dialect == "postgresql":
        # Left to itself it reads the whole session at each step, since it takes a branch to be ten messages
        # long. So it is told to look each parent up by its primary key.
        above = step.limit(1).lateral("above")
        step = select(*above.c).select_from(up.join(above, true()))
    up = up.union_all(step)
    if not texts:
        return select(*(up.c[name] for name in _MARKED)).order_by(up.c.depth)
    return select(*(up.c[name] for name in _COLUMNS), _text_of(up)).order_by(up.c.depth)


_CHILDLESS: Final = except_(
    select(NODES.c.node).where(_OF_SESSION), select(NODES.c.parent).where(_OF_SESSION)
)
_LEAVES: Final = (
    select(NODES.c.node, NODES.c.depth, NODES.c.created_at)
    .where(_OF_SESSION, NODES.c.node.in_(_CHILDLESS))
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
    rows = [
        _node(row)
        for some in in_parts(nodes)
        for row in connection.execute(_ROWS, {"key": key, "nodes": some})
    ]
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


def own_of(rows: Sequence[NodeRow], agent: str | None) -> frozenset[int]:
    """Return the places of the messages of an agent among rows; none where it has no name."""
    if agent is None:
        return frozenset()
    return frozenset([place for place, row in enumerate(rows) if row.agent == agent])


def leaves(connection: Connection, key: str) -> list[Branch]:
    """Return the nodes that nothing follows, newest first."""
    return [
        Branch(head=row.node, depth=row.depth, updated_at=row.created_at)
        for row in connection.execute(_LEAVES, {"key": key})
    ]


def grow(
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

    Their texts must be stored in the same transaction. A node that is there stays as it is. `tenant` is
    whose conversation it is, where a request without an id may be found by it. `under` is where `base`
    stands; who gives it knows that the first of `messages` does not stand there yet, so none of these do.

    Returns:
        Where the messages stand, and where the replies do.

    Raises:
        UnknownBase: `base` is not stored; nothing was written.
    """
    contents = [content_hash(sprout.body.message) for sprout in (*messages, *replies)]
    names = names_under(base, contents[: len(messages)])
    end = names[-1] if names else base
    siblings = [child(end, content) for content in contents[len(messages) :]]
    stored = {ROOT: Place(node=ROOT, depth=0, round=0, tokens_total=0, recorded=tenant)}
    stored |= places_of(connection, key, [base, *names, *siblings]) if under is None else {base: under}
    if base not in stored:
        raise UnknownBase(f"node {base} is not stored")
    places = plant(
        connection,
        key,
        [
            *zip([base, *names], names, messages, strict=False),
            *((end, name, sprout) for name, sprout in zip(siblings, replies, strict=True)),
        ],
        stored,
        contents,
    )
    return places[: len(names)], places[len(names) :]


def plant(
    connection: Connection,
    key: str,
    sprouts: Sequence[tuple[str, str, NewNode]],
    stored: dict[str, Place] | None = None,
    contents: Sequence[bytes] | None = None,
) -> list[Place]:
    """Make nodes of (parent, node, sprout), parents before children; those in `stored` are there already.

    `stored` gets to know the new ones. `contents` has the hash of what each says, where that is known.
    """
    places = stored if stored is not None else {ROOT: Place(node=ROOT, depth=0, round=0, tokens_total=0)}
    rows: list[dict[str, Any]] = []
    for number, (parent, node, sprout) in enumerate(sprouts):
        if node not in places:
            under = places[parent]
            place = places[node] = _below(under, node, sprout)
            content = contents[number] if contents else content_hash(sprout.body.message)
            rows.append(_row(key, under, place, sprout, content))
    insert_new(connection, NODES, rows)
    return [places[node] for _, node, _ in sprouts]


def in_parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    """Give names in parts, none too long for one question."""
    for start in range(0, len(names), _AT_ONCE):
        yield names[start : start + _AT_ONCE]


def places_of(connection: Connection, key: str, nodes: Sequence[str]) -> dict[str, Place]:
    """Return where those of `nodes` stand that are stored."""
    return {
        row.node: Place(
            node=row.node,
            depth=row.depth,
            round=row.round,
            tokens_total=row.tokens_total,
            recorded=row.recorded,
        )
        for some in in_parts([node for node in nodes if node != ROOT])
        for row in connection.execute(_NAMED, {"key": key, "nodes": some})
    }


def _below(under: Place, name: str, sprout: NewNode) -> Place:
    role = sprout.body.message.role
    known = role != "assistant" or sprout.source is Source.UPSTREAM or sprout.vouched
    return Place(
        node=name,
        depth=under.depth + 1,
        round=under.round + (role == "user"),
        tokens_total=under.tokens_total + sprout.body.tokens,
        recorded=under.recorded if known else None,
    )


def _row(key: str, under: Place, place: Place, sprout: NewNode, content: bytes) -> dict[str, Any]:
    arrival = sprout.arrival
    return {
        "session": key,
        "node": place.node,
        "parent": under.node,
        "depth": place.depth,
        "round": place.round,
        "tokens_total": place.tokens_total,
        "body": body_of(sprout.body.message),
        "tokens": sprout.body.tokens,
        "source": sprout.source.value,
        "partial": sprout.partial,
        "exchange": sprout.exchange,
        "agent": _agent_in(sprout.body.message) or sprout.agent,
        "policy": sprout.policy,
        # The position is the node's own, which its depth tells, wherever the branch was thought to begin.
        "arrival": None
        if arrival is None
        else encode_changes([replace(change, position=0) for change in arrival]),
        "created_at": sprout.created_at,
        "content": content_key(content),
        "recorded": place.recorded,
    }


def _agent_in(message: Message) -> str | None:
    agent = message.agent
    return None if agent is None else sanitize(agent)


def _node(row: Row) -> NodeRow:
    # By place: a branch has thousands of rows, and looking columns up by name costs more than all the rest.
    (
        node,
        parent,
        depth,
        rounds,
        total,
        body,
        tokens,
        source,
        partial,
        exchange,
        agent,
        policy,
        arrival,
        at,
        text,
    ) = row
    return NodeRow(
        node=node,
        parent=parent,
        depth=depth,
        round=rounds,
        tokens_total=total,
        body=body,
        message=ChatMessage(text.encode()),
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

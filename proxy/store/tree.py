"""The tree of messages: which nodes there are, the way to one of them, its leaves, and new ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

from sqlalchemy import Connection, Row, Select, bindparam, exists, select, true

from proxy.history.nodes import ROOT, body_id, node_id
from proxy.store.encoding import decode_changes, encode_changes
from proxy.store.plain import made_plain
from proxy.store.records import Body, Branch, NodeRow, Source
from proxy.store.schema import BODIES, NODES, insert_new
from proxy.trimming.plan import Change
from proxy.wire.messages import Message

_AT_ONCE: Final = 500
"""Names in one question: databases limit them."""

_OF_SESSION: Final = NODES.c.session == bindparam("key")
_NAMED: Final = select(NODES.c.node, NODES.c.depth, NODES.c.round, NODES.c.tokens_total).where(
    _OF_SESSION, NODES.c.node.in_(bindparam("nodes", expanding=True))
)
_KNOWN: Final = _NAMED.with_only_columns(NODES.c.node)

_COLUMNS: Final = (
    *("node", "parent", "depth", "round", "tokens_total", "body", "tokens", "source", "partial", "exchange"),
    *("agent", "policy", "arrival", "created_at"),
)
"""In the order in which `_node` takes them."""


@cache
def _path(dialect: str) -> Select[*tuple[Any, ...]]:
    """Climb from a node to its root, a row at a time, and look up the texts on the way."""
    up = select(NODES).where(_OF_SESSION, NODES.c.node == bindparam("node")).cte("up", recursive=True)
    step = select(NODES).where(_OF_SESSION, NODES.c.node == up.c.parent, NODES.c.depth > bindparam("below"))
    if dialect == "postgresql":
        # Left to itself it reads the whole session at each step, since it takes a branch to be ten messages
        # long. So it is told to look each parent up by its primary key.
        above = step.limit(1).lateral("above")
        step = select(*above.c).select_from(up.join(above, true()))
    up = up.union_all(step)
    text = select(BODIES.c.text).where(BODIES.c.session == bindparam("key"), BODIES.c.body == up.c.body)
    return select(*(up.c[name] for name in _COLUMNS), text.scalar_subquery()).order_by(up.c.depth)


_CHILD: Final = NODES.alias("child")
_LEAVES: Final = (
    select(NODES.c.node, NODES.c.depth, NODES.c.created_at)
    .where(
        _OF_SESSION,
        ~exists().where(_CHILD.c.session == NODES.c.session, _CHILD.c.parent == NODES.c.node),
    )
    .order_by(NODES.c.created_at.desc(), NODES.c.node)
)


@dataclass(frozen=True, slots=True)
class Place:
    """A node with the sums that its children go on from."""

    node: str
    depth: int
    round: int
    tokens_total: int


_START: Final = Place(ROOT, 0, 0, 0)


@dataclass(frozen=True, slots=True)
class Sprout:
    """A message that is to be a node, with what its row says beside it."""

    body: Body
    source: Source
    created_at: int
    partial: bool = False
    exchange: str | None = None
    agent: str | None = None
    """Who wrote it, where the message itself does not say."""
    policy: str | None = None
    arrival: tuple[Change, ...] | None = None


class UnknownBase(LookupError):
    """The node under which others should be put is not stored."""


def known_nodes(connection: Connection, key: str, nodes: Sequence[str]) -> set[str]:
    """Return those of `nodes` that are stored."""
    return {
        name
        for some in _in_parts(nodes)
        for name in connection.execute(_KNOWN, {"key": key, "nodes": some}).scalars()
    }


def path_to(connection: Connection, key: str, node: str, *, below: int = 0) -> list[NodeRow]:
    """Return the branch that ends at `node`, oldest first; nothing where there is none.

    With `below`, only what lies deeper than that, and `node` itself.
    """
    asked = {"key": key, "node": node, "below": below}
    return [_node(row) for row in connection.execute(_path(connection.dialect.name), asked)]


def leaves(connection: Connection, key: str) -> list[Branch]:
    """Return the nodes that nothing follows, newest first."""
    return [Branch(row.node, row.depth, row.created_at) for row in connection.execute(_LEAVES, {"key": key})]


def grow(
    connection: Connection, key: str, base: str, messages: Sequence[Sprout], replies: Sequence[Sprout]
) -> tuple[list[Place], list[Place]]:
    """Put `messages` in a row under `base`, and `replies` side by side under the last of them.

    Their texts must be stored in the same transaction. A node that is there stays as it is.

    Returns:
        Where the messages stand, and where the replies do.

    Raises:
        UnknownBase: `base` is not stored; nothing was written.
    """
    names: list[str] = []
    parent = base
    for sprout in messages:
        parent = node_id(parent, sprout.body.message)
        names.append(parent)
    siblings = [node_id(parent, sprout.body.message) for sprout in replies]
    stored = _places(connection, key, [base, *names, *siblings])
    if base not in stored:
        raise UnknownBase(f"node {base} is not stored")
    places = plant(
        connection,
        key,
        [
            *zip([base, *names], names, messages, strict=False),
            *((parent, name, sprout) for name, sprout in zip(siblings, replies, strict=True)),
        ],
        stored,
    )
    return places[: len(names)], places[len(names) :]


def plant(
    connection: Connection,
    key: str,
    sprouts: Sequence[tuple[str, str, Sprout]],
    stored: dict[str, Place] | None = None,
) -> list[Place]:
    """Make nodes of (parent, node, sprout), parents before children; those in `stored` are there already.

    `stored` gets to know the new ones.
    """
    places = stored if stored is not None else {ROOT: _START}
    rows: list[dict[str, Any]] = []
    for parent, node, sprout in sprouts:
        if node not in places:
            under = places[parent]
            places[node] = _below(under, node, sprout.body)
            rows.append(_row(key, under, places[node], sprout))
    insert_new(connection, NODES, rows)
    return [places[node] for _, node, _ in sprouts]


def _places(connection: Connection, key: str, nodes: Sequence[str]) -> dict[str, Place]:
    found = {ROOT: _START}
    for some in _in_parts([node for node in nodes if node != ROOT]):
        for row in connection.execute(_NAMED, {"key": key, "nodes": some}):
            found[row.node] = Place(row.node, row.depth, row.round, row.tokens_total)
    return found


def _below(under: Place, name: str, body: Body) -> Place:
    asks = body.message.role == "user"
    return Place(name, under.depth + 1, under.round + asks, under.tokens_total + body.tokens)


def _row(key: str, under: Place, place: Place, sprout: Sprout) -> dict[str, Any]:
    arrival = sprout.arrival
    return {
        "session": key,
        "node": place.node,
        "parent": under.node,
        "depth": place.depth,
        "round": place.round,
        "tokens_total": place.tokens_total,
        "body": body_id(sprout.body.message.raw),
        "tokens": sprout.body.tokens,
        "source": sprout.source.value,
        "partial": sprout.partial,
        "exchange": sprout.exchange,
        "agent": _agent_in(sprout.body.message) or sprout.agent,
        "policy": sprout.policy,
        # The position is the node's own, which its depth tells, wherever the branch was thought to begin.
        "arrival": None
        if arrival is None
        else encode_changes(replace(change, position=0) for change in arrival),
        "created_at": sprout.created_at,
    }


def _agent_in(message: Message) -> str | None:
    agent = message.data.get("agent")
    return made_plain(agent) if isinstance(agent, str) and agent else None


def _node(row: Row[*tuple[Any, ...]]) -> NodeRow:
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
        message=Message(text.encode()),
        tokens=tokens,
        source=Source(source),
        partial=partial,
        exchange=exchange,
        agent=agent,
        policy=policy,
        arrival=None if arrival is None else _arrival_at(depth - 1, arrival),
        created_at=at,
    )


def _arrival_at(position: int, text: str) -> tuple[Change, ...]:
    return tuple(replace(change, position=position) for change in decode_changes(text))


def _in_parts(names: Sequence[str]) -> Iterator[Sequence[str]]:
    for start in range(0, len(names), _AT_ONCE):
        yield names[start : start + _AT_ONCE]

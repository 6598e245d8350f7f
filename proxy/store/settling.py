"""How an exchange ends: nodes, reply, head, cut and receipt, all in one transaction.

Only an exchange that is pending (or was taken for interrupted, by a process that started meanwhile) can
be settled: a second settling changes nothing and returns what the first one made. One that is not
there any more, because its session was deleted, stays away: deleting wins. So does one whose session
was deleted and is there again, without the node that its messages belong under: it ends as failed.

Appends under way at once wait for nothing: each goes under the head of the moment at which it settles.
Nothing comes between calls and their results, though, and nothing that was said is lost from the branch of
the head: where others spoke since the calls that a request answers, the log goes on without the block of the
calls with what they said, then comes the block with all its results, and then the reply. What stands there
anew says what it said, by whom and when; the old nodes stay as a branch.

The same results sent again have one place too, and the head does not leave what came after them.

A request that was answered with a reply that is stored already has no reply of its own: its messages become
nodes, and the head goes to the last of them. Results that stand there already are not put there again.

The same request twice at once has one place, that of the one that is answered first: neither may have known
of the other when it was planned, and nobody wants the question twice in the log. The replies are siblings.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import orjson
from msgspec.structs import replace
from sqlalchemy import bindparam, or_, select, update

from proxy.history.nodes import ROOT, content_hash, node_id
from proxy.history.results import place_of_results
from proxy.store.calls import calls_at, calls_of, encode_calls
from proxy.store.connection import Connection, Row
from proxy.store.cuts import keep_cut
from proxy.store.hidden import add_hidden, hidden_at, keep_hidden
from proxy.store.records import (
    Body,
    Kept,
    NodeRow,
    SessionRow,
    Settled,
    Settlement,
    Source,
    Status,
    session_key,
)
from proxy.store.schema import EXCHANGES, SESSIONS
from proxy.store.sessions import locked_session, session_in
from proxy.store.texts import add_bodies, named_bodies
from proxy.store.tree import Place, Sprout, UnknownBase, depths_of, grow, own_of, path_to, places_of
from proxy.trimming.plan import Hidden

_NEAR: Final = 64
"""Messages among which the call of a tool result is looked for, from the head upwards."""
_GONE: Final = "the session was deleted meanwhile: the messages before this request are not there any more"

_SIDE: Final = "side"
_APPENDING: Final = frozenset({"first", "append"})
_LATELY: Final = 60_000
"""Milliseconds before a request came within which its twin was answered, if without its knowledge: hosts'
clocks differ, and a reply has its time before it is stored."""
_OPEN: Final = frozenset({Status.PENDING, Status.INTERRUPTED})


class _State(NamedTuple):
    """An exchange as far as its settling depends on it: the columns of `_STATE`."""

    status: str
    created_at: int
    digest: str
    nodes: str
    replies: str
    messages: str
    instructions: str | None
    model: str
    tools: str | None


_STATE: Final = select(
    EXCHANGES.c.status,
    EXCHANGES.c.created_at,
    EXCHANGES.c.digest,
    EXCHANGES.c.nodes,
    EXCHANGES.c.replies,
    EXCHANGES.c.messages,
    EXCHANGES.c.instructions,
    EXCHANGES.c.model,
    EXCHANGES.c.tools,
).where(EXCHANGES.c.session == bindparam("key"), EXCHANGES.c.id == bindparam("exchange"))

_BOTH: Final = (
    select(SESSIONS, *_STATE.selected_columns)
    .join_from(SESSIONS, EXCHANGES, EXCHANGES.c.session == SESSIONS.c.session)
    .where(SESSIONS.c.session == bindparam("key"), EXCHANGES.c.id == bindparam("exchange"))
)
"""Both at once, where the one writer holds all. PostgreSQL would not read a row anew that is joined to one
whose lock it had to wait for."""

_TWINS: Final = (
    select(
        EXCHANGES.c.base, EXCHANGES.c.replies, EXCHANGES.c.status, EXCHANGES.c.created_at, EXCHANGES.c.id
    ).where(
        EXCHANGES.c.session == bindparam("key"),
        EXCHANGES.c.digest == bindparam("digest"),
        or_(
            EXCHANGES.c.settled_at > bindparam("since", type_=EXCHANGES.c.settled_at.type),
            EXCHANGES.c.base == bindparam("there", type_=EXCHANGES.c.base.type),
        ),
        EXCHANGES.c.agent.is_not_distinct_from(bindparam("agent", type_=EXCHANGES.c.agent.type)),
        EXCHANGES.c.kind.in_(sorted(_APPENDING)),
        EXCHANGES.c.replies != "[]",
    )
    # In no order: for the sake of one, SQLite would rather read every exchange of the session.
)


class _Spot(NamedTuple):
    """Where the messages of a request go."""

    base: str
    """The node under which they go, or what is carried along before them."""
    carried: Sequence[NodeRow] = ()
    """What comes to stand before them once more, in its new order."""
    beside: bool = False
    """Whether the head stays where it is."""


_MOVE: Final = update(SESSIONS).where(SESSIONS.c.session == bindparam("the_session"))
_CLOSE: Final = update(EXCHANGES).where(
    EXCHANGES.c.session == bindparam("the_session"), EXCHANGES.c.id == bindparam("the_exchange")
)


def settle(connection: Connection, settlement: Settlement) -> Settled:
    """Make it true that the exchange ended so.

    Where the node under which its messages belong is not stored any more, it ends as failed, and nothing
    becomes a node.
    """
    key = session_key(settlement.tenant, settlement.session)
    session, state = _standing(connection, key, settlement.exchange)
    if session is None or state is None:
        return Settled(ROOT, (), ())
    if Status(state.status) not in _OPEN:
        return Settled(session.head, tuple(orjson.loads(state.nodes)), tuple(orjson.loads(state.replies)))
    if not settlement.replies and not settlement.finished:
        return _settle_without_reply(connection, session, settlement)
    try:
        if not settlement.replies:
            return _settle_finished(connection, session, state, settlement)
        return _settle_with_reply(connection, session, state, settlement)
    except UnknownBase:
        receipt = {**settlement.receipt, "error": _GONE}
        failed = replace(settlement, status=Status.FAILED, receipt=receipt)
        return _settle_without_reply(connection, session, failed)


def _standing(connection: Connection, key: str, exchange: str) -> tuple[SessionRow | None, _State | None]:
    """Return the session, which is locked from now on, and how the exchange stands."""
    asked = {"key": key, "exchange": exchange}
    if connection.dialect.name == "sqlite":
        row = connection.execute(_BOTH, asked).one_or_none()
        return (None, None) if row is None else (session_in(row), _State(*row[-len(_State._fields) :]))
    session = locked_session(connection, key)
    row = connection.execute(_STATE, asked).one_or_none()
    return session, None if row is None else _State(*row)


def _settle_without_reply(connection: Connection, session: SessionRow, settlement: Settlement) -> Settled:
    _close(connection, session.key, settlement, {})
    _move(connection, session, settlement, {})
    return Settled(session.head, (), ())


def _settle_with_reply(
    connection: Connection, session: SessionRow, state: _State, settlement: Settlement
) -> Settled:
    spot, moves_head = _Spot(settlement.base), settlement.moves_head
    # Where the head has not moved since it was planned, nothing that was answered meanwhile can be a twin.
    twins = _twins(connection, session, state, settlement) if session.head != spot.base else []
    if twins:
        spot = _Spot(twins[0].base)
        moves_head = moves_head and _takes_over(session.head, twins, state, settlement)
    elif settlement.at_head or _is_judged_again(connection, session, settlement):
        spot = _place(connection, session, settlement)
        moves_head = moves_head and not spot.beside
    asked = [*map(_again, spot.carried), *_asked(settlement)]
    line, replies = grow(
        connection, session.key, spot.base, asked, _answered(settlement), tenant=settlement.tenant
    )
    moved, line = line[: len(spot.carried)], line[len(spot.carried) :]
    base = moved[-1].node if moved else spot.base
    renamed = {row.node: place.node for row, place in zip(spot.carried, moved, strict=True)}
    bodies = named_bodies((*settlement.messages, *(reply.body for reply in settlement.replies)))
    stored = frozenset(orjson.loads(state.messages))  # they came with the opening
    add_bodies(connection, session.key, {name: body for name, body in bodies.items() if name not in stored})
    end = line[-1].node if line else base
    if settlement.cut is not None and line and settlement.cut.position < line[0].depth:
        end = base  # it is kept for all that go on from there
    # An append that went elsewhere stands on other messages than those the cut was made for.
    as_planned = tuple(renamed) == settlement.carried and (bool(moved) or base == settlement.base)
    cut = settlement.cut if as_planned and end != ROOT else None
    if cut is not None:
        keep_cut(
            connection,
            session.key,
            end,
            settlement.agent,
            cut,
            exchange=settlement.exchange,
            at=settlement.settled_at,
            kept=_kept(settlement.kept, line, renamed),
        )
    nodes, heads = [place.node for place in line], [place.node for place in replies]
    _close(
        connection,
        session.key,
        settlement,
        {
            "base": base,  # a retry must go where the request went
            "nodes": orjson.dumps(nodes).decode(),
            "replies": orjson.dumps(heads).decode(),
            "cut_node": None if cut is None else end,
        },
    )
    progress = _progress(session, settlement, replies[0] if moves_head else None, state)
    if moves_head:
        reply = settlement.replies[0]
        progress["calls"] = encode_calls(calls_of(reply.body.message, partial=reply.partial))
    hidden = _hidden(settlement, heads)
    exchange, at = settlement.exchange, settlement.settled_at
    count = keep_hidden(connection, session.key, hidden, exchange=exchange, at=at)
    if session.hidden and spot.carried:
        count += _hide_again(connection, session, spot.carried, renamed)
    if count:
        progress["hidden"] = session.hidden + count
    _move(connection, session, settlement, progress)
    return Settled(heads[0] if moves_head else session.head, tuple(nodes), tuple(heads))


def _hidden(settlement: Settlement, nodes: Sequence[str]) -> dict[str, Hidden]:
    """Return what the client was not shown of the replies, by node; of equal replies the first one counts."""
    found: dict[str, Hidden] = {}
    for node, reply in zip(nodes, settlement.replies, strict=True):
        if reply.hidden is not None:
            found.setdefault(node, reply.hidden)
    return found


def _hide_again(
    connection: Connection, session: SessionRow, carried: Sequence[NodeRow], renamed: Mapping[str, str]
) -> int:
    """Keep with new nodes what the client was not shown of the old ones; return of how many it is new."""
    found = hidden_at(connection, session.key, list(renamed), session.hidden)
    there = hidden_at(connection, session.key, [renamed[node] for node in found], session.hidden)
    count = 0
    for row in carried:
        node = renamed[row.node]
        if row.node in found and node not in there:
            said = (node, found[row.node], row.created_at)
            count += add_hidden(connection, session.key, [said], exchange=row.exchange)
    return count


def _settle_finished(
    connection: Connection, session: SessionRow, state: Row, settlement: Settlement
) -> Settled:
    """Put the messages where they belong; the reply that answered them is stored already."""
    base, moves_head = settlement.base, settlement.moves_head
    there: dict[bytes, str] = {}
    if settlement.kind == "append":
        base, there = _place_of_results(connection, session, settlement)
        # Nothing was asked: what came after the reply meanwhile stays where the session stands.
        moves_head = moves_head and base == session.head
    new = [sprout for sprout in _asked(settlement) if content_hash(sprout.body.message) not in there]
    line, _ = grow(connection, session.key, base, new, (), tenant=settlement.tenant)
    add_bodies(connection, session.key, named_bodies(sprout.body for sprout in new))
    end = line[-1] if line else places_of(connection, session.key, [base]).get(base)
    places = iter(line)
    nodes = [
        there.get(content_hash(body.message)) or next(places).node  # in the order in which they came
        for body in settlement.messages
    ]
    _close(connection, session.key, settlement, {"base": base, "nodes": orjson.dumps(nodes).decode()})
    progress = _progress(session, settlement, end if moves_head else None, state)
    if end is not None and moves_head:
        progress["calls"] = encode_calls(calls_at(connection, session.key, end.node, end.depth))
    _move(connection, session, settlement, progress)
    return Settled(progress.get("head", session.head), tuple(nodes), ())


def _place_of_results(
    connection: Connection, session: SessionRow, settlement: Settlement
) -> tuple[str, dict[bytes, str]]:
    """Return the node under which what came to a finished task goes, and results that stand there already.

    These are nodes by the hash of what they say.
    """
    messages = [body.message for body in settlement.messages]
    near = _last(connection, session, _NEAR)
    place = place_of_results([row.message for row in near], messages, own_of(near, settlement.agent))
    if place is None:
        return (session.head if settlement.at_head else settlement.base), {}
    results = near[place.block + 1 : place.stop]
    return near[place.stop - 1].node, {content_hash(row.message): row.node for row in results}


def _kept(kept: Kept | None, line: Sequence[Place], renamed: Mapping[str, str]) -> list[str] | None:
    """Return the nodes that a cut kept, by position.

    `line` is where the new messages stand, `renamed` has the new names of nodes that were carried along.
    """
    if kept is None:
        return None
    stored = [renamed.get(node, node) for node in kept.nodes]
    return [*stored, *(line[number].node for number in kept.messages)]


def _twins(connection: Connection, session: SessionRow, state: _State, settlement: Settlement) -> list[Row]:
    """Return the appends that said the same and were answered before this one knew of them, of one place.

    It knew of those whose replies come before the place for which it was planned: "continue" may come eight
    times. Of several places, the one nearest to that counts.
    """
    if settlement.kind not in _APPENDING:
        return []
    asked = {
        "key": session.key,
        "digest": state.digest,
        "since": state.created_at - _LATELY,
        # One that was told where to go repeats what was answered there, however long ago.
        "there": None if settlement.at_head else settlement.base,
        "agent": settlement.agent,
    }
    found = connection.execute(_TWINS, asked).all()
    bases = {row.base for row in found}
    if settlement.base in bases or not bases:
        nearest = settlement.base
    else:
        depths = depths_of(connection, session.key, [settlement.base, *bases])
        planned = depths.get(settlement.base, 0)
        unknown = [base for base in bases if depths.get(base, 0) > planned]
        nearest = min(unknown, key=lambda base: depths[base], default=settlement.base)
    return [row for row in found if row.base == nearest]


def _is_judged_again(connection: Connection, session: SessionRow, settlement: Settlement) -> bool:
    """Tell whether the place of an append that was told where to go is judged by the head of this moment.

    Results always are. Anything else was to go where another one is: if it finds nothing of that there, it is
    no repetition of what was answered, and goes alone, for its twin is still pending or failed.
    """
    if settlement.kind != "append" or not settlement.messages or session.head == settlement.base:
        return False
    mine = node_id(settlement.base, settlement.messages[0].message)
    there = depths_of(connection, session.key, [settlement.base, mine])
    is_new = mine not in there or bool(settlement.messages[0].message.answers)
    return is_new and (settlement.base == ROOT or settlement.base in there)


def _takes_over(head: str, twins: Sequence[Row], state: _State, settlement: Settlement) -> bool:
    """Tell whether the head goes from a twin's reply to this one's.

    It stays where anything came after. Else a whole reply goes before one that broke off, and the answer to
    what was sent last before the others: whoever sends again waits for that.
    """
    mine = (settlement.status is Status.COMPLETE, state.created_at, settlement.exchange)
    return any(
        mine > (row.status == Status.COMPLETE.value, row.created_at, row.id)
        for row in twins
        if head in orjson.loads(row.replies)
    )


def _place(connection: Connection, session: SessionRow, settlement: Settlement) -> _Spot:
    """Return where an append goes by the head of this moment."""
    messages = [body.message for body in settlement.messages]
    if not messages or not messages[0].answers:
        return _Spot(session.head)
    for near in _nearer_first(connection, session, settlement):
        place = place_of_results([row.message for row in near], messages, own_of(near, settlement.agent))
        if place is None:
            continue
        if place.repeated is not None:
            came_after = len(near) - place.repeated - len(messages) > 1  # more than the reply to them
            return _Spot(near[place.repeated - 1].node, beside=came_after)
        if place.since == len(near):
            return _Spot(near[place.stop - 1].node)
        carried = [*near[place.since :], *near[place.block : place.stop]]
        return _Spot(near[place.block].parent, carried)
    if settlement.at_head:
        return _Spot(session.head)
    return _Spot(settlement.base, beside=True)  # the session went back to where the calls are not


def _nearer_first(
    connection: Connection, session: SessionRow, settlement: Settlement
) -> Iterator[list[NodeRow]]:
    """Give the ends of the branch of the head in which the calls of results are looked for."""
    head = _last(connection, session, 1)  # nearly always they are its calls
    if settlement.agent in {None, *(row.agent for row in head)}:
        yield head
    most = _NEAR
    if not settlement.at_head:  # their place was known when they were planned, however far up it was
        depth = depths_of(connection, session.key, [settlement.base]).get(settlement.base, session.messages)
        most += max(session.messages - depth, 0)
    yield _last(connection, session, most)


def _last(connection: Connection, session: SessionRow, most: int) -> list[NodeRow]:
    """Return the last messages on the branch of the head, oldest first."""
    return path_to(connection, session.key, session.head, below=session.messages - most)


def _again(row: NodeRow) -> Sprout:
    """Return what makes a node that says what another one says, by whom and when, at another place."""
    return Sprout(
        body=Body(row.message, row.tokens),
        source=row.source,
        created_at=row.created_at,
        partial=row.partial,
        exchange=row.exchange,
        agent=row.agent,
        policy=row.policy,
        arrival=row.arrival,
    )


def _asked(settlement: Settlement) -> list[Sprout]:
    """Return the client's messages, with what `on_arrival` decided; None for those it was not asked about."""
    arrivals = settlement.arrivals[: len(settlement.messages)]
    return [
        Sprout(
            body=body,
            source=Source.CLIENT,
            created_at=settlement.settled_at,
            exchange=settlement.exchange,
            agent=settlement.agent,
            vouched=number < settlement.vouched,
            policy=settlement.policy_version or None,
            arrival=arrival,
        )
        for number, (body, arrival) in enumerate(zip_longest(settlement.messages, arrivals))
    ]


def _answered(settlement: Settlement) -> list[Sprout]:
    return [
        Sprout(
            body=reply.body,
            source=Source.UPSTREAM,
            created_at=settlement.settled_at,
            partial=reply.partial,
            exchange=settlement.exchange,
            agent=settlement.agent,
        )
        for reply in settlement.replies
    ]


def _progress(
    session: SessionRow, settlement: Settlement, head: Place | None, state: _State
) -> dict[str, Any]:
    """Return what a reply changes in the session's row; None for `head`: the head stays where it is."""
    changed: dict[str, Any] = {
        "requests": session.requests + 1,
        "tokens_sent": session.tokens_sent + settlement.tokens_sent,
        "tokens_saved": session.tokens_saved + settlement.tokens_before - settlement.tokens_sent,
    }
    if head is not None:
        changed |= {
            "head": head.node,
            "messages": head.depth,
            "rounds": head.round,
            "tokens": head.tokens_total,
            # A request beside the conversation has instructions of its own, which are not the session's.
            "instructions": state.instructions or session.instructions,
            "model": state.model,
            "tools": state.tools,
            "scale": session.scale if settlement.scale is None else settlement.scale,
        }
    if settlement.kind != _SIDE:
        changed["arrival"] = settlement.kind
    return changed


def _move(
    connection: Connection, session: SessionRow, settlement: Settlement, changed: dict[str, Any]
) -> None:
    values = changed | {"updated_at": max(session.updated_at, settlement.settled_at)}
    if settlement.cost is not None:
        values["cost"] = (session.cost or 0.0) + settlement.cost
    connection.execute(_MOVE, values | {"the_session": session.key})


def _close(connection: Connection, key: str, settlement: Settlement, made: dict[str, Any]) -> None:
    values = made | {
        "status": settlement.status.value,
        "settled_at": settlement.settled_at,
        "tokens_before": settlement.tokens_before,
        "tokens_sent": settlement.tokens_sent,
        "receipt": orjson.dumps(dict(settlement.receipt)).decode(),
    }
    connection.execute(_CLOSE, values | {"the_session": key, "the_exchange": settlement.exchange})

"""How an exchange ends: nodes, reply, head, cut and receipt, all in one transaction.

Only an exchange that is pending (or was taken for interrupted, by a process that started meanwhile) can
be settled: a second settling changes nothing and returns what the first one made. One that is not
there any more, because its session was deleted, stays away: deleting wins. So does one whose session
was deleted and is there again, without the node that its messages belong under: it ends as failed.

Appends under way at once wait for nothing: each goes under the head of the moment at which it settles, or
where else `spot` says. What is carried along to another place says what it said, by whom and when; the old
nodes stay as a branch.

A request that was answered with a reply that is stored already has no reply of its own: its messages become
nodes, and the head goes to the last of them. Results that stand there already are not put there again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, Final, NamedTuple

import orjson
from msgspec.structs import replace
from sqlalchemy import bindparam, update

from proxy.conversation import ROOT, content_hash
from proxy.store.calls import calls_at, calls_of, encode_calls
from proxy.store.cuts import keep_cut
from proxy.store.database import Connection
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
)
from proxy.store.schema import EXCHANGES, SESSIONS
from proxy.store.spot import placement_of, spot_of_results
from proxy.store.standing import State, standing
from proxy.store.texts import add_bodies, named_bodies
from proxy.store.tree import NewNode, Place, UnknownBase, grow, places_of
from proxy.trimming import Hidden

_GONE: Final = "the session was deleted meanwhile: the messages before this request are not there any more"

_SIDE: Final = "side"
_OPEN: Final = frozenset({Status.PENDING, Status.INTERRUPTED})

_MOVE: Final = update(SESSIONS).where(SESSIONS.c.session == bindparam("the_session"))
_CLOSE: Final = update(EXCHANGES).where(
    EXCHANGES.c.session == bindparam("the_session"), EXCHANGES.c.id == bindparam("the_exchange")
)


class _Ended(NamedTuple):
    """What an exchange came to."""

    settled: Settled
    exchange: dict[str, Any]
    """What is to stand in its row."""
    session: dict[str, Any]
    """What changes in the session's."""


def settle(connection: Connection, settlement: Settlement) -> Settled:
    """Make it true that the exchange ended so.

    Where the node under which its messages belong is not stored any more, it ends as failed, and nothing
    becomes a node.
    """
    now = standing(connection, settlement)
    session, state = now.session, now.state
    if session is None or state is None:
        return Settled(head=ROOT, nodes=(), replies=())
    if Status(state.status) not in _OPEN:
        return Settled(
            head=session.head,
            nodes=tuple(orjson.loads(state.nodes)),
            replies=tuple(orjson.loads(state.replies)),
        )
    ended = _end(connection, session, state, settlement, now.under)
    connection.execute(
        _CLOSE, ended.exchange | {"the_session": session.key, "the_exchange": settlement.exchange}
    )
    _move(connection, session, ended)
    return ended.settled


def _end(
    connection: Connection, session: SessionRow, state: State, settlement: Settlement, under: Place | None
) -> _Ended:
    """Write all that an exchange came to, but for its own row and the session's.

    `under` is where the base stands, if it is known that the first of the messages does not stand there yet.
    """
    if not settlement.replies and not settlement.finished:
        return _without_reply(session, settlement)
    try:
        if not settlement.replies:
            return _finished(connection, session, state, settlement)
        return _with_reply(connection, session, state, settlement, under)
    except UnknownBase:
        receipt = {**settlement.receipt, "error": _GONE}
        return _without_reply(session, replace(settlement, status=Status.FAILED, receipt=receipt))


def _without_reply(session: SessionRow, settlement: Settlement) -> _Ended:
    return _Ended(
        settled=Settled(head=session.head, nodes=(), replies=()),
        exchange=_closed(settlement),
        session=_moved(session, settlement),
    )


def _with_reply(
    connection: Connection, session: SessionRow, state: State, settlement: Settlement, under: Place | None
) -> _Ended:
    spot, moves_head = placement_of(connection, session, state, settlement)
    if spot.carried or spot.base != settlement.base:
        under = None  # that was asked of another place, or of other messages
    line, replies = grow(
        connection,
        session.key,
        spot.base,
        [*map(_again, spot.carried), *_asked(settlement)],
        _answered(settlement),
        tenant=settlement.tenant,
        under=under,
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
    closed = _closed(settlement) | {
        "base": base,  # a retry must go where the request went
        "nodes": orjson.dumps(nodes).decode(),
        "replies": orjson.dumps(heads).decode(),
        "cut_node": None if cut is None else end,
    }
    moved_to = _moved(session, settlement) | _progress(
        session, settlement, replies[0] if moves_head else None, state
    )
    if moves_head:
        reply = settlement.replies[0]
        moved_to["calls"] = encode_calls(calls_of(reply.body.message, partial=reply.partial))
    hidden = _hidden(settlement, heads)
    exchange, at = settlement.exchange, settlement.settled_at
    count = keep_hidden(connection, session.key, hidden, exchange=exchange, at=at)
    if session.hidden and spot.carried:
        count += _hide_again(connection, session, spot.carried, renamed)
    if count:
        moved_to["hidden"] = session.hidden + count
    head = heads[0] if moves_head else session.head
    return _Ended(
        settled=Settled(head=head, nodes=tuple(nodes), replies=tuple(heads)),
        exchange=closed,
        session=moved_to,
    )


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


def _finished(connection: Connection, session: SessionRow, state: State, settlement: Settlement) -> _Ended:
    """Put the messages where they belong; the reply that answered them is stored already."""
    base, moves_head = settlement.base, settlement.moves_head
    there: dict[bytes, str] = {}
    if settlement.kind == "append":
        base, there = spot_of_results(connection, session, settlement)
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
    closed = _closed(settlement) | {"base": base, "nodes": orjson.dumps(nodes).decode()}
    moved_to = _moved(session, settlement) | _progress(
        session, settlement, end if moves_head else None, state
    )
    if end is not None and moves_head:
        moved_to["calls"] = encode_calls(calls_at(connection, session.key, end.node, end.depth))
    return _Ended(
        settled=Settled(head=moved_to.get("head", session.head), nodes=tuple(nodes), replies=()),
        exchange=closed,
        session=moved_to,
    )


def _kept(kept: Kept | None, line: Sequence[Place], renamed: Mapping[str, str]) -> list[str] | None:
    """Return the nodes that a cut kept, by position.

    `line` is where the new messages stand, `renamed` has the new names of nodes that were carried along.
    """
    if kept is None:
        return None
    stored = [renamed.get(node, node) for node in kept.nodes]
    return [*stored, *(line[number].node for number in kept.messages)]


def _again(row: NodeRow) -> NewNode:
    """Return what makes a node that says what another one says, by whom and when, at another place."""
    return NewNode(
        body=Body(message=row.message, tokens=row.tokens),
        source=row.source,
        created_at=row.created_at,
        partial=row.partial,
        exchange=row.exchange,
        agent=row.agent,
        policy=row.policy,
        arrival=row.arrival,
    )


def _asked(settlement: Settlement) -> list[NewNode]:
    """Return the client's messages, with what `on_arrival` decided; None for those it was not asked about."""
    arrivals = settlement.arrivals[: len(settlement.messages)]
    return [
        NewNode(
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


def _answered(settlement: Settlement) -> list[NewNode]:
    return [
        NewNode(
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
    session: SessionRow, settlement: Settlement, head: Place | None, state: State
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


def _moved(session: SessionRow, settlement: Settlement) -> dict[str, Any]:
    """Return what changes in the session's row whatever became of the request."""
    changed: dict[str, Any] = {"updated_at": max(session.updated_at, settlement.settled_at)}
    if settlement.cost is not None:
        changed["cost"] = (session.cost or 0.0) + settlement.cost
    return changed


def _closed(settlement: Settlement) -> dict[str, Any]:
    """Return what is to stand in the exchange's row whatever became of the request."""
    return {
        "status": settlement.status.value,
        "settled_at": settlement.settled_at,
        "tokens_before": settlement.tokens_before,
        "tokens_sent": settlement.tokens_sent,
        "receipt": orjson.dumps(dict(settlement.receipt)).decode(),
    }


def _move(connection: Connection, session: SessionRow, ended: _Ended) -> None:
    connection.execute(_MOVE, ended.session | {"the_session": session.key})

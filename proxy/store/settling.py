"""How an exchange ends: nodes, reply, head, cut and receipt, all in one transaction.

Only an exchange that is pending (or was taken for interrupted, by a process that started meanwhile) can
be settled: a second settling changes nothing and returns what the first one made. One that is not
there any more, because its session was deleted, stays away: deleting wins.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import zip_longest
from typing import Any, Final

import orjson
from sqlalchemy import Connection, Row, bindparam, select, update

from proxy.history.nodes import ROOT
from proxy.store.cuts import keep_cut
from proxy.store.records import SessionRow, Settled, Settlement, Source, Status, session_key
from proxy.store.schema import EXCHANGES, SESSIONS
from proxy.store.sessions import locked_session
from proxy.store.texts import add_bodies, named_bodies
from proxy.store.tree import Place, Sprout, grow

_SIDE: Final = "side"
_OPEN: Final = frozenset({Status.PENDING, Status.INTERRUPTED})

_STATE: Final = select(
    EXCHANGES.c.status, EXCHANGES.c.nodes, EXCHANGES.c.replies, EXCHANGES.c.messages, EXCHANGES.c.instructions
).where(EXCHANGES.c.session == bindparam("key"), EXCHANGES.c.id == bindparam("exchange"))

_MOVE: Final = update(SESSIONS).where(SESSIONS.c.session == bindparam("the_session"))
_CLOSE: Final = update(EXCHANGES).where(
    EXCHANGES.c.session == bindparam("the_session"), EXCHANGES.c.id == bindparam("the_exchange")
)


def settle(connection: Connection, settlement: Settlement) -> Settled:
    """Make it true that the exchange ended so.

    Raises:
        LookupError: the node under which its messages belong is not stored.
    """
    key = session_key(settlement.tenant, settlement.session)
    session = locked_session(connection, key)
    state = connection.execute(_STATE, {"key": key, "exchange": settlement.exchange}).one_or_none()
    if session is None or state is None:
        return Settled(ROOT, (), ())
    if Status(state.status) not in _OPEN:
        return Settled(session.head, tuple(orjson.loads(state.nodes)), tuple(orjson.loads(state.replies)))
    if not settlement.replies:
        _close(connection, key, settlement, {})
        _move(connection, session, settlement, {})
        return Settled(session.head, (), ())
    return _settle_with_reply(connection, session, state, settlement)


def _settle_with_reply(
    connection: Connection, session: SessionRow, state: Row[*tuple[Any, ...]], settlement: Settlement
) -> Settled:
    base = session.head if settlement.at_head else settlement.base
    bodies = named_bodies((*settlement.messages, *(reply.body for reply in settlement.replies)))
    stored = frozenset(orjson.loads(state.messages))  # they came with the opening
    add_bodies(connection, session.key, {name: body for name, body in bodies.items() if name not in stored})
    line, replies = grow(connection, session.key, base, _asked(settlement), _answered(settlement))
    end = line[-1].node if line else base
    # An append whose head moved meanwhile stands on other messages than those the cut was made for.
    cut = settlement.cut if base == settlement.base and end != ROOT else None
    if cut is not None:
        keep_cut(
            connection,
            session.key,
            end,
            settlement.agent,
            cut,
            exchange=settlement.exchange,
            at=settlement.settled_at,
        )
    nodes, heads = [place.node for place in line], [place.node for place in replies]
    _close(
        connection,
        session.key,
        settlement,
        {
            "nodes": orjson.dumps(nodes).decode(),
            "replies": orjson.dumps(heads).decode(),
            "cut_node": None if cut is None else end,
        },
    )
    _move(connection, session, settlement, _progress(session, settlement, replies[0], state.instructions))
    return Settled(heads[0] if settlement.moves_head else session.head, tuple(nodes), tuple(heads))


def _asked(settlement: Settlement) -> list[Sprout]:
    """Return the client's messages, with what `on_arrival` decided; None for those it was not asked about."""
    arrivals = settlement.arrivals[: len(settlement.messages)]
    common = Sprout(
        body=settlement.replies[0].body,
        source=Source.CLIENT,
        created_at=settlement.settled_at,
        exchange=settlement.exchange,
        agent=settlement.agent,
        policy=settlement.policy_version or None,
    )
    return [
        replace(common, body=body, arrival=arrival)
        for body, arrival in zip_longest(settlement.messages, arrivals)
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
    session: SessionRow, settlement: Settlement, reply: Place, instructions: str | None
) -> dict[str, Any]:
    """Return what a reply changes in the session's row."""
    changed: dict[str, Any] = {
        "requests": session.requests + 1,
        "tokens_sent": session.tokens_sent + settlement.tokens_sent,
        "tokens_saved": session.tokens_saved + settlement.tokens_before - settlement.tokens_sent,
    }
    if settlement.moves_head:
        changed |= {
            "head": reply.node,
            "messages": reply.depth,
            "rounds": reply.round,
            "tokens": reply.tokens_total,
            # A request beside the conversation has instructions of its own, which are not the session's.
            "instructions": instructions or session.instructions,
        }
    if settlement.kind != _SIDE:
        changed["arrival"] = settlement.kind
    return changed


def _move(
    connection: Connection, session: SessionRow, settlement: Settlement, changed: dict[str, Any]
) -> None:
    values = changed | {"updated_at": max(session.updated_at, settlement.settled_at)}
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

"""How an exchange ends: nodes, reply, head, cut and receipt, all in one transaction.

Only an exchange that is pending (or was taken for interrupted, by a process that started meanwhile) can
be settled: a second settling changes nothing and returns what the first one made. One that is not
there any more, because its session was deleted, stays away: deleting wins. So does one whose session
was deleted and is there again, without the node that its messages belong under: it ends as failed.

Appends under way at once wait for nothing: each goes under the head of the moment at which it settles.
Nothing comes between open calls and their results, though:

- tool results go under the block whose call they answer, where that is found near the head;
- anything else, planned before the head went to a reply with calls, becomes a branch where it was
  planned, and the head stays with the calls.

The same request twice at once has one place, that of the one that is answered first: neither may have known
of the other when it was planned, and nobody wants the question twice in the log. The replies are siblings.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, Final

import orjson
from msgspec.structs import replace
from sqlalchemy import bindparam, or_, select, update

from proxy.history.nodes import ROOT, node_id
from proxy.history.results import place_of_results
from proxy.store.connection import Connection, Row
from proxy.store.cuts import keep_cut
from proxy.store.records import Kept, NodeRow, SessionRow, Settled, Settlement, Source, Status, session_key
from proxy.store.schema import EXCHANGES, SESSIONS
from proxy.store.sessions import locked_session
from proxy.store.texts import add_bodies, named_bodies
from proxy.store.tree import Place, Sprout, UnknownBase, depths_of, grow, path_to
from proxy.wire.completion import without_unfinished_calls
from proxy.wire.messages import Message

_NEAR: Final = 64
"""Messages among which the call of a tool result is looked for, from the head upwards."""
_GONE: Final = "the session was deleted meanwhile: the messages before this request are not there any more"

_SIDE: Final = "side"
_APPENDING: Final = frozenset({"first", "append"})
_LATELY: Final = 60_000
"""Milliseconds before a request came within which its twin was answered, if without its knowledge: hosts'
clocks differ, and a reply has its time before it is stored."""
_OPEN: Final = frozenset({Status.PENDING, Status.INTERRUPTED})

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
    session = locked_session(connection, key)
    state = connection.execute(_STATE, {"key": key, "exchange": settlement.exchange}).one_or_none()
    if session is None or state is None:
        return Settled(ROOT, (), ())
    if Status(state.status) not in _OPEN:
        return Settled(session.head, tuple(orjson.loads(state.nodes)), tuple(orjson.loads(state.replies)))
    if not settlement.replies:
        return _settle_without_reply(connection, session, settlement)
    try:
        return _settle_with_reply(connection, session, state, settlement)
    except UnknownBase:
        receipt = {**settlement.receipt, "error": _GONE}
        failed = replace(settlement, status=Status.FAILED, receipt=receipt)
        return _settle_without_reply(connection, session, failed)


def _settle_without_reply(connection: Connection, session: SessionRow, settlement: Settlement) -> Settled:
    _close(connection, session.key, settlement, {})
    _move(connection, session, settlement, {})
    return Settled(session.head, (), ())


def _settle_with_reply(
    connection: Connection, session: SessionRow, state: Row, settlement: Settlement
) -> Settled:
    base, moves_head = settlement.base, settlement.moves_head
    # Where the head has not moved since it was planned, nothing that was answered meanwhile can be a twin.
    twins = _twins(connection, session, state, settlement) if session.head != base else []
    if twins:
        base = twins[0].base
        moves_head = moves_head and _takes_over(session.head, twins, state, settlement)
    elif settlement.at_head or _is_alone(connection, session, settlement):
        base, beside = _place(connection, session, settlement)
        moves_head = moves_head and not beside
    line, replies = grow(
        connection, session.key, base, _asked(settlement), _answered(settlement), tenant=settlement.tenant
    )
    bodies = named_bodies((*settlement.messages, *(reply.body for reply in settlement.replies)))
    stored = frozenset(orjson.loads(state.messages))  # they came with the opening
    add_bodies(connection, session.key, {name: body for name, body in bodies.items() if name not in stored})
    end = line[-1].node if line else base
    # An append that went elsewhere stands on other messages than those the cut was made for.
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
            kept=_kept(settlement.kept, line),
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
    progress = _progress(session, settlement, replies[0], state, moves_head=moves_head)
    _move(connection, session, settlement, progress)
    return Settled(heads[0] if moves_head else session.head, tuple(nodes), tuple(heads))


def _kept(kept: Kept | None, line: Sequence[Place]) -> list[str] | None:
    """Return the nodes that a cut kept, by position; `line` is where the new messages stand."""
    return None if kept is None else [*kept.nodes, *(line[number].node for number in kept.messages)]


def _twins(connection: Connection, session: SessionRow, state: Row, settlement: Settlement) -> list[Row]:
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


def _is_alone(connection: Connection, session: SessionRow, settlement: Settlement) -> bool:
    """Tell whether an append that was to go where another one is finds nothing of that there, and goes alone.

    Then it is no repetition of what was answered: its twin is still pending or failed, or other results of
    the same calls came before these.
    """
    if settlement.kind != "append" or not settlement.messages or session.head == settlement.base:
        return False
    mine = node_id(settlement.base, settlement.messages[0].message)
    there = depths_of(connection, session.key, [settlement.base, mine])
    return mine not in there and (settlement.base == ROOT or settlement.base in there)


def _takes_over(head: str, twins: Sequence[Row], state: Row, settlement: Settlement) -> bool:
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


def _place(connection: Connection, session: SessionRow, settlement: Settlement) -> tuple[str, bool]:
    """Return the node under which an append goes, and whether it is a branch beside the head."""
    messages = [body.message for body in settlement.messages]
    if messages and messages[0].answers:
        for most in (1, _NEAR):  # nearly always they are the head's own calls
            near = _last(connection, session, most)
            place = place_of_results([row.message for row in near], messages)
            if place is not None:
                return near[place - 1].node, False
    if session.head != settlement.base and any(map(_is_open, _last(connection, session, 1))):
        return settlement.base, True
    return session.head, False


def _last(connection: Connection, session: SessionRow, most: int) -> list[NodeRow]:
    """Return the last messages on the branch of the head, oldest first."""
    return path_to(connection, session.key, session.head, below=session.messages - most)


def _is_open(row: NodeRow) -> bool:
    """Tell whether a reply has calls to which results can come: not those with which it broke off."""
    message = Message.of(without_unfinished_calls(row.message.data)) if row.partial else row.message
    return bool(message.calls)


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
    session: SessionRow, settlement: Settlement, reply: Place, state: Row, *, moves_head: bool
) -> dict[str, Any]:
    """Return what a reply changes in the session's row; the head goes to it if it `moves_head`."""
    changed: dict[str, Any] = {
        "requests": session.requests + 1,
        "tokens_sent": session.tokens_sent + settlement.tokens_sent,
        "tokens_saved": session.tokens_saved + settlement.tokens_before - settlement.tokens_sent,
    }
    if moves_head:
        changed |= {
            "head": reply.node,
            "messages": reply.depth,
            "rounds": reply.round,
            "tokens": reply.tokens_total,
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

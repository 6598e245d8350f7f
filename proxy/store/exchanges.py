"""Exchanges: begun, settled, listed. Beginning and settling are one transaction each.

Only an exchange that is pending (or was taken for interrupted, by a process that started meanwhile) can be settled: a
second settling changes nothing and returns what the first one made. One whose session was deleted stays away: deleting
wins. Where the session is there again without the node that the messages belong under, the exchange ends as failed.

Appends under way at once do not wait for each other: each goes under the head of the moment at which it settles, or
where `placement_of` says. A request that was answered with a reply that is stored already has no reply of its own: its
messages become nodes, and the head goes to the last of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, Final

import orjson
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import and_, bindparam, literal_column, or_, select, tuple_, update

from proxy.conversation import (
    APPENDING,
    ROOT,
    TWIN_MS,
    Answered,
    Placement,
    body_of,
    content_hash,
    is_placed_anew,
    nearest_place,
    node_id,
    place_append,
    place_finished,
    takes_head,
)
from proxy.store.cuts import keep_cut
from proxy.store.database import Connection, Row
from proxy.store.records import (
    Body,
    Cursor,
    ExchangeRow,
    Kept,
    NodeRow,
    Opening,
    SessionRow,
    Settled,
    Settlement,
    Source,
    Status,
    require_plain,
    session_key,
)
from proxy.store.schema import EXCHANGES, FORMS, NODES, SESSIONS, insert_new
from proxy.store.sessions import locked_session, open_session, session_in
from proxy.store.tree import (
    NewNode,
    Place,
    UnknownBase,
    add_bodies,
    add_hidden,
    add_instructions,
    add_tools,
    calls_at,
    calls_of,
    depths_of,
    encode_calls,
    hidden_at,
    insert_nodes,
    keep_hidden,
    named_bodies,
    path_to,
    places_of,
)
from proxy.trimming import Hidden

# ------------------------------------------------------------------------------------------------------- rows

_EXCHANGES: Final = select(EXCHANGES, SESSIONS.c.tenant, SESSIONS.c.id.label("session_id")).join(
    SESSIONS, SESSIONS.c.session == EXCHANGES.c.session
)
_BY_ID: Final = _EXCHANGES.where(EXCHANGES.c.id == bindparam("exchange")).limit(1)
_EXCHANGES_OF: Final = _EXCHANGES.where(EXCHANGES.c.session == bindparam("key")).order_by(
    EXCHANGES.c.created_at.desc(), EXCHANGES.c.id.desc()
)

_PENDING: Final = (
    select(EXCHANGES.c.session, EXCHANGES.c.id)
    # Word for word as the index of those that are pending has it.
    .where(EXCHANGES.c.status == literal_column(f"'{Status.PENDING.value}'"))
    # Those that someone is settling or deleting just now are theirs: waiting for them could block both.
    .with_for_update(skip_locked=True)
)
_PENDING_OF: Final = _PENDING.where(EXCHANGES.c.id.endswith(bindparam("mark")))
_INTERRUPT: Final = (
    update(EXCHANGES)
    .where(EXCHANGES.c.session == bindparam("key"), EXCHANGES.c.id == bindparam("exchange"))
    .values(status=Status.INTERRUPTED.value, settled_at=bindparam("at"))
)


def exchange_of(connection: Connection, exchange: str) -> ExchangeRow | None:
    """Return an exchange by its id."""
    row = connection.execute(_BY_ID, {"exchange": exchange}).one_or_none()
    return None if row is None else _exchange(row)


def exchanges_page(
    connection: Connection, key: str, limit: int, after: Cursor | None
) -> tuple[list[ExchangeRow], str | None]:
    """Return up to `limit` exchanges of a session, newest first, and the cursor of the next ones."""
    found = _EXCHANGES_OF.limit(limit + 1)
    if after is not None:
        found = found.where(tuple_(EXCHANGES.c.created_at, EXCHANGES.c.id) < (after.time, after.name))
    rows = [_exchange(row) for row in connection.execute(found, {"key": key})]
    if len(rows) <= limit:
        return rows, None
    last = rows[limit - 1]
    return rows[:limit], str(Cursor(time=last.created_at, name=last.id))


def interrupt_pending(connection: Connection, at: int, marks: Collection[str] | None = None) -> int:
    """Settle every pending exchange as interrupted; return how many there were.

    With `marks`, only those whose id ends with one of them: a process ends its ids with a mark of its own, so that
    those of a dead one can be told from those of its siblings. One whose worker lives after all is settled by it later,
    and that counts.
    """
    left = (
        connection.execute(_PENDING)
        if marks is None
        else chain.from_iterable(connection.execute(_PENDING_OF, {"mark": mark}) for mark in marks)
    )
    found = [{"key": row.session, "exchange": row.id, "at": at} for row in left]
    if found:
        connection.execute(_INTERRUPT, found)
    return len(found)


def _exchange(row: Row) -> ExchangeRow:
    values = row._asdict()
    values["session_key"], values["session"] = row.session, row.session_id
    del values["session_id"], values["idempotency"]
    values["status"] = Status(row.status)
    for name in ("parameters", "receipt"):
        values[name] = orjson.loads(values[name])
    for name in ("messages", "nodes", "replies"):
        values[name] = tuple(orjson.loads(values[name]))
    return ExchangeRow(**values)


# ------------------------------------------------------------------------------------------------------ begin


def begin(connection: Connection, opening: Opening) -> None:
    """Store a pending exchange with its new texts; a second time changes nothing."""
    require_plain(
        session=opening.session,
        tenant=opening.tenant,
        exchange=opening.exchange,
        model=opening.model,
        agent=opening.agent,
        policy=opening.policy,
    )
    key = session_key(opening.tenant, opening.session)
    newest = open_session(connection, key, opening.tenant, opening.session, opening.created_at)
    forms = [(node, body_of(form), form) for node, form in opening.forms]
    # A form has no count of its own: it is what the stored message says, in other words.
    texts = {name: Body(message=form, tokens=0) for _, name, form in forms} | named_bodies(opening.messages)
    add_bodies(connection, key, texts)
    tools = None if opening.tools is None else add_tools(connection, key, opening.tools)
    instructions = None
    if opening.instructions is not None:
        tokens, at = opening.instructions_tokens, opening.created_at
        instructions = add_instructions(connection, key, opening.instructions, tokens, at, there=newest)
    insert_new(
        connection,
        FORMS,
        [{"session": key, "node": node, "body": name, "exchange": opening.exchange} for node, name, _ in forms],
    )
    names = [body_of(body.message) for body in opening.messages]
    row = {
        "session": key,
        "id": opening.exchange,
        "created_at": opening.created_at,
        "settled_at": None,
        "status": Status.PENDING.value,
        "kind": opening.kind,
        "base": opening.base,
        "digest": opening.digest,
        "model": opening.model,
        "agent": opening.agent,
        "policy": opening.policy,
        "policy_version": opening.policy_version,
        "stream": opening.stream,
        "parameters": orjson.dumps(dict(opening.parameters)).decode(),
        "tools": tools,
        "instructions": instructions,
        "messages": orjson.dumps(names).decode(),
        "nodes": "[]",
        "replies": "[]",
        "cut_node": None,
        "tokens_before": 0,
        "tokens_sent": 0,
        "receipt": "{}",
        "idempotency": opening.idempotency,
    }
    insert_new(connection, EXCHANGES, [row])


# ------------------------------------------------------------------------------------------- how things stand


class ExchangeState(Struct, frozen=True, kw_only=True):
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

_BASE: Final = NODES.alias("base")
_FIRST: Final = NODES.alias("first")
_BASE_COLUMNS: Final = tuple(_BASE.c[name] for name in ("depth", "round", "tokens_total", "recorded"))
_ALL: Final = (
    select(SESSIONS, *_STATE.selected_columns, *_BASE_COLUMNS, _FIRST.c.node)
    .outerjoin_from(
        SESSIONS, EXCHANGES, and_(EXCHANGES.c.session == SESSIONS.c.session, EXCHANGES.c.id == bindparam("exchange"))
    )
    .outerjoin(_BASE, and_(_BASE.c.session == SESSIONS.c.session, _BASE.c.node == bindparam("base")))
    .outerjoin(_FIRST, and_(_FIRST.c.session == SESSIONS.c.session, _FIRST.c.node == bindparam("first")))
    .where(SESSIONS.c.session == bindparam("key"))
)
"""All at once, where the one writer holds all. PostgreSQL would not read a row anew that is joined to one whose lock it
had to wait for."""
_STATE_FIELDS: Final = ExchangeState.__struct_fields__
_STATE_FROM: Final = len(SESSIONS.columns)
_BASE_FROM: Final = _STATE_FROM + len(_STATE_FIELDS)


class SettleSnapshot(Struct, frozen=True, kw_only=True):
    """How things stand."""

    session: SessionRow | None
    """The session, which is locked from now on; None where there is none."""
    state: ExchangeState | None
    """The exchange; None where it is not stored."""
    under: Place | None = None
    """Where the node stands under which its messages belong, if it is known that the first of them does not stand there
    yet."""


def settle_snapshot(connection: Connection, settlement: Settlement) -> SettleSnapshot:
    """Return how a session and an exchange that is to be settled stand."""
    key, base = session_key(settlement.tenant, settlement.session), settlement.base
    asked: dict[str, Any] = {"key": key, "exchange": settlement.exchange}
    if connection.dialect.name != "sqlite":
        session = locked_session(connection, key)
        row = connection.execute(_STATE, asked).one_or_none()
        return SettleSnapshot(session=session, state=None if row is None else ExchangeState(**row._asdict()))
    messages = settlement.messages
    asked["base"] = base
    asked["first"] = node_id(base, messages[0].message) if messages else None
    row = connection.execute(_ALL, asked).one_or_none()
    if row is None:
        return SettleSnapshot(session=None, state=None)
    state = row[_STATE_FROM:_BASE_FROM]
    depth, rounds, tokens, recorded, first = row[_BASE_FROM:]
    under = None
    if messages and depth is not None and first is None:
        under = Place(node=base, depth=depth, round=rounds, tokens_total=tokens, recorded=recorded)
    exchange = None
    if state[0] is not None:
        exchange = ExchangeState(**dict(zip(_STATE_FIELDS, state, strict=True)))
    return SettleSnapshot(session=session_in(row), state=exchange, under=under)


# ----------------------------------------------------------------------------- where messages go

_NEAR: Final = 64
"""Messages among which the call of a tool result is looked for, from the head upwards."""

_TWINS: Final = (
    select(EXCHANGES.c.base, EXCHANGES.c.replies, EXCHANGES.c.status, EXCHANGES.c.created_at, EXCHANGES.c.id).where(
        EXCHANGES.c.session == bindparam("key"),
        EXCHANGES.c.digest == bindparam("digest"),
        or_(
            EXCHANGES.c.settled_at > bindparam("since", type_=EXCHANGES.c.settled_at.type),
            EXCHANGES.c.base == bindparam("there", type_=EXCHANGES.c.base.type),
        ),
        EXCHANGES.c.agent.is_not_distinct_from(bindparam("agent", type_=EXCHANGES.c.agent.type)),
        EXCHANGES.c.kind.in_(sorted(APPENDING)),
        EXCHANGES.c.replies != "[]",
    )
    # In no order: for the sake of one, SQLite would rather read every exchange of the session.
)


def placement_of(
    connection: Connection, session: SessionRow, state: ExchangeState, settlement: Settlement
) -> tuple[Placement[NodeRow], bool]:
    """Return where the messages of an answered request go, and whether the head goes to its reply."""
    planned, moves_head = settlement.base, settlement.moves_head
    # Where the head has not moved since it was planned, nothing that was answered meanwhile can be a twin.
    twins = _twins(connection, session, state, settlement) if session.head != planned else []
    if twins:
        mine = Answered(
            base=planned,
            replies=(),
            complete=settlement.status is Status.COMPLETE,
            created_at=state.created_at,
            exchange=settlement.exchange,
        )
        moves_head = moves_head and takes_head(session.head, mine, twins)
        return Placement(base=twins[0].base), moves_head
    if not settlement.at_head and not _is_placed_anew(connection, session, settlement):
        return Placement(base=planned), moves_head
    placement = _place_append(connection, session, settlement)
    return placement, moves_head and not placement.beside


def _twins(connection: Connection, session: SessionRow, state: ExchangeState, settlement: Settlement) -> list[Answered]:
    """Return the appends that said the same and were answered before this one knew of them, of one place."""
    if settlement.kind not in APPENDING:
        return []
    asked = {
        "key": session.key,
        "digest": state.digest,
        "since": state.created_at - TWIN_MS,
        # One that was told where to go repeats what was answered there, however long ago.
        "there": None if settlement.at_head else settlement.base,
        "agent": settlement.agent,
    }
    found = [
        Answered(
            base=row.base,
            replies=orjson.loads(row.replies),
            complete=row.status == Status.COMPLETE.value,
            created_at=row.created_at,
            exchange=row.id,
        )
        for row in connection.execute(_TWINS, asked)
    ]
    bases = {twin.base for twin in found}
    elsewhere = bool(bases) and settlement.base not in bases
    depths = depths_of(connection, session.key, [settlement.base, *bases]) if elsewhere else {}
    nearest = nearest_place(settlement.base, bases, depths)
    return [twin for twin in found if twin.base == nearest]


def _is_placed_anew(connection: Connection, session: SessionRow, settlement: Settlement) -> bool:
    """Tell whether the place of an append that was told where to go is judged by the head of this moment."""
    planned = settlement.base
    if settlement.kind != "append" or not settlement.messages or session.head == planned:
        return False
    first = settlement.messages[0].message
    node = node_id(planned, first)
    return is_placed_anew(planned, first, node, depths_of(connection, session.key, [planned, node]))


def _place_append(connection: Connection, session: SessionRow, settlement: Settlement) -> Placement[NodeRow]:
    """Return where an append goes by the head of this moment."""
    messages = [body.message for body in settlement.messages]
    if not messages or not messages[0].answers:
        return Placement(base=session.head)
    near = _end_of_head(connection, session, 1)  # nearly always the calls are the head's
    found = None
    if settlement.agent in {None, *(row.agent for row in near)}:
        found = place_append(near, messages, settlement.agent)
    if found is None:
        most = _NEAR
        if not settlement.at_head:  # their place was known when they were planned, however far up it was
            depths = depths_of(connection, session.key, [settlement.base])
            most += max(session.messages - depths.get(settlement.base, session.messages), 0)
        found = place_append(_end_of_head(connection, session, most), messages, settlement.agent)
    if found is not None:
        return found
    if settlement.at_head:
        return Placement(base=session.head)
    return Placement(base=settlement.base, beside=True)  # the session went back to where the calls are not


def _end_of_head(connection: Connection, session: SessionRow, most: int) -> list[NodeRow]:
    """Return the last messages on the branch of the head, oldest first."""
    return path_to(connection, session.key, session.head, below=session.messages - most)


# ----------------------------------------------------------------------------------------------------- settle

_GONE: Final = "the session was deleted meanwhile: the messages before this request are not there any more"

_SIDE: Final = "side"
_OPEN: Final = frozenset({Status.PENDING, Status.INTERRUPTED})

_MOVE: Final = update(SESSIONS).where(SESSIONS.c.session == bindparam("the_session"))
_CLOSE: Final = update(EXCHANGES).where(
    EXCHANGES.c.session == bindparam("the_session"), EXCHANGES.c.id == bindparam("the_exchange")
)


class _Ended(Struct, frozen=True, kw_only=True):
    """What an exchange came to."""

    settled: Settled
    exchange: dict[str, Any]
    """What is to stand in its row."""
    session: dict[str, Any]
    """What changes in the session's."""


def settle(connection: Connection, settlement: Settlement) -> Settled:
    """Make it true that the exchange ended so.

    Where the node under which its messages belong is not stored any more, it ends as failed, and nothing becomes a
    node.
    """
    now = settle_snapshot(connection, settlement)
    session, state = now.session, now.state
    if session is None or state is None:
        return Settled(head=ROOT, nodes=(), replies=())
    if Status(state.status) not in _OPEN:
        return Settled(
            head=session.head, nodes=tuple(orjson.loads(state.nodes)), replies=tuple(orjson.loads(state.replies))
        )
    ended = _end(connection, session, state, settlement, now.under)
    connection.execute(_CLOSE, ended.exchange | {"the_session": session.key, "the_exchange": settlement.exchange})
    connection.execute(_MOVE, ended.session | {"the_session": session.key})
    return ended.settled


def _end(
    connection: Connection, session: SessionRow, state: ExchangeState, settlement: Settlement, under: Place | None
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
    connection: Connection, session: SessionRow, state: ExchangeState, settlement: Settlement, under: Place | None
) -> _Ended:
    placement, moves_head = placement_of(connection, session, state, settlement)
    if placement.carried or placement.base != settlement.base:
        under = None  # that was asked of another place, or of other messages
    line, replies = insert_nodes(
        connection,
        session.key,
        placement.base,
        [*map(_again, placement.carried), *_asked(settlement)],
        _answered(settlement),
        tenant=settlement.tenant,
        under=under,
    )
    moved, line = line[: len(placement.carried)], line[len(placement.carried) :]
    base = moved[-1].node if moved else placement.base
    renamed = {row.node: place.node for row, place in zip(placement.carried, moved, strict=True)}
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
    moved_to = _moved(session, settlement) | _progress(session, settlement, replies[0] if moves_head else None, state)
    if moves_head:
        reply = settlement.replies[0]
        moved_to["calls"] = encode_calls(calls_of(reply.body.message, partial=reply.partial))
    hidden = _hidden(settlement, heads)
    exchange, at = settlement.exchange, settlement.settled_at
    count = keep_hidden(connection, session.key, hidden, exchange=exchange, at=at)
    if session.hidden and placement.carried:
        count += _hide_again(connection, session, placement.carried, renamed)
    if count:
        moved_to["hidden"] = session.hidden + count
    head = heads[0] if moves_head else session.head
    return _Ended(
        settled=Settled(head=head, nodes=tuple(nodes), replies=tuple(heads)), exchange=closed, session=moved_to
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


def _finished(connection: Connection, session: SessionRow, state: ExchangeState, settlement: Settlement) -> _Ended:
    """Put the messages where they belong; the reply that answered them is stored already."""
    base, moves_head = settlement.base, settlement.moves_head
    there: Mapping[bytes, str] = {}
    if settlement.kind == "append":
        messages = [body.message for body in settlement.messages]
        found = place_finished(_end_of_head(connection, session, _NEAR), messages, settlement.agent)
        base = session.head if settlement.at_head else base
        if found is not None:
            base, there = found.base, found.nodes
        # Nothing was asked: what came after the reply meanwhile stays where the session stands.
        moves_head = moves_head and base == session.head
    new = [new_node for new_node in _asked(settlement) if content_hash(new_node.body.message) not in there]
    line, _ = insert_nodes(connection, session.key, base, new, (), tenant=settlement.tenant)
    add_bodies(connection, session.key, named_bodies(new_node.body for new_node in new))
    end = line[-1] if line else places_of(connection, session.key, [base]).get(base)
    places = iter(line)
    nodes = [
        there.get(content_hash(body.message)) or next(places).node  # in the order in which they came
        for body in settlement.messages
    ]
    closed = _closed(settlement) | {"base": base, "nodes": orjson.dumps(nodes).decode()}
    moved_to = _moved(session, settlement) | _progress(session, settlement, end if moves_head else None, state)
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


def _progress(session: SessionRow, settlement: Settlement, head: Place | None, state: ExchangeState) -> dict[str, Any]:
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

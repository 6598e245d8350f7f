"""Begins, settles and lists exchanges. Beginning and settling are one transaction each.

Settling is idempotent. Only an exchange that is pending can be settled, or one that a process that started meanwhile
marked as interrupted. A second settlement changes nothing and returns the result of the first. A reply that was made in
the background is added later, once. If the session was deleted meanwhile, the exchange is not stored: deletion wins. If
the session was created again without the node that the messages go under, the exchange ends as failed.

Concurrent appends do not wait for each other. Each goes under the head at the time it settles, or where
`ExchangeEnd._placement` puts it. A request that was answered by a reply that is stored already has no reply of its own:
its messages become nodes, and the head moves to the last of them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import cache
from itertools import zip_longest
from typing import Any, Final

import orjson
from msgspec import Struct
from sqlalchemy import (
    ColumnElement,
    Select,
    Table,
    and_,
    bindparam,
    column,
    delete,
    func,
    or_,
    select,
    text,
    update,
    values,
)
from sqlalchemy.dialects import postgresql, sqlite

from proxy.conversation import (
    APPENDING,
    ROOT,
    TELLING,
    TWIN_MS,
    AnsweredEarlier,
    Placement,
    Witness,
    content_hash,
    is_placed_anew,
    nearest_place,
    node_id,
    place_append,
    place_finished,
    squeezed,
    takes_head,
)
from proxy.dialects import Message
from proxy.store import sessions, tree
from proxy.store.cuts import keep_cut
from proxy.store.database import GatheringConnection, Row, StoreConnection
from proxy.store.evidence import evidence_rows, insert_evidence
from proxy.store.packing import encode_exchange, encode_session
from proxy.store.records import (
    NOTHING_CAME,
    Body,
    Cursor,
    Exchange,
    ExchangeRow,
    NodeRow,
    Opening,
    SessionRow,
    Settled,
    Settlement,
    Source,
    StandingCut,
    Status,
    opened_columns,
    receipt_text,
    session_key,
    settled_columns,
    with_model,
)
from proxy.store.rollups import Sums, add_figures, counted
from proxy.store.schema import EXCHANGES, NODES, PENDING, SESSIONS, insert_into, matching
from proxy.store.sessions import encode_calls
from proxy.trimming import Hidden

# ------------------------------------------------------------------------------------------------------- rows


_BOTH: Final = (PENDING, EXCHANGES)
"""The tables of exchanges, in the order of reading: an exchange that is settled between the two reads is found."""


def _exchanges(table: Table) -> Select[Any]:
    return select(table, SESSIONS.c.tenant, SESSIONS.c.id.label("session_id")).join(
        SESSIONS, SESSIONS.c.session == table.c.session
    )


_BY_ID: Final = tuple(_exchanges(table).where(table.c.id == bindparam("exchange")).limit(1) for table in _BOTH)

_FIRST_TOOLS: Final = (
    select(EXCHANGES.c.tools, EXCHANGES.c.receipt)
    .where(*matching(EXCHANGES), EXCHANGES.c.tools.is_not(None))
    .order_by(EXCHANGES.c.id)
    .limit(1)
)

_PENDING_IDS: Final = select(PENDING.c.session, PENDING.c.id)
_PENDING: Final = _PENDING_IDS.where(PENDING.c.id.in_(bindparam("ids", expanding=True)))
_THE_EXCHANGE: Final = tuple(
    and_(table.c.session == bindparam("the_session"), table.c.id == bindparam("the_exchange")) for table in _BOTH
)
_NOT_PENDING: Final = delete(PENDING).where(_THE_EXCHANGE[0])


def exchange_of(connection: StoreConnection, exchange: str) -> ExchangeRow | None:
    """Return an exchange by its id; None if there is none."""
    pending, settled = [connection.execute(found, {"exchange": exchange}).one_or_none() for found in _BY_ID]
    row = settled or pending
    return None if row is None else _exchange(row)


def exchanges_page(
    connection: StoreConnection, key: str, limit: int, after: Cursor | None
) -> tuple[list[ExchangeRow], str | None]:
    """Return up to `limit` exchanges of a session, newest first, and the cursor of the next page."""
    found: dict[str, ExchangeRow] = {}
    for table in _BOTH:
        newest = _exchanges(table).where(table.c.session == key).limit(limit + 1)
        if after is not None:
            newest = newest.where(table.c.id < after.name)
        newest = newest.order_by(table.c.id.desc())
        found |= {row.id: _exchange(row) for row in connection.execute(newest)}
    # Sort by the bytes of the ids, which begin with the time.
    rows = sorted(found.values(), key=lambda row: encode_exchange(row.id), reverse=True)
    if len(rows) <= limit:
        return rows, None
    last = rows[limit - 1]
    return rows[:limit], str(Cursor(time=last.created_at, name=last.id))


_WITHOUT_REPLY: Final = (
    _exchanges(EXCHANGES)
    .where(*matching(EXCHANGES), EXCHANGES.c.status == Status.COMPLETE.value, EXCHANGES.c.replies == "[]")
    .order_by(EXCHANGES.c.id.desc())
)


def exchange_with(connection: StoreConnection, tenant: str, dialect: str, response: str) -> ExchangeRow | None:
    """Return the tenant's exchange with this response id of the provider."""
    place = tree.provider_place(connection, tenant, dialect, response)
    if place is None:
        return None
    key = session_key(tenant, place.session, dialect)
    if place.node:
        ids = [row.exchange for row in tree.rows_of(connection, key, [place.node])]
        return exchange_of(connection, ids[0]) if ids and ids[0] is not None else None
    found = [_exchange(row) for row in connection.execute(_WITHOUT_REPLY, {"key": key})]
    return next((row for row in found if row.receipt.get("response_id") == response), None)


def unfinished(connection: StoreConnection, tenant: str, dialect: str, response: str) -> ExchangeRow | None:
    """Return the tenant's exchange that waits for this response of the provider: it has no reply yet, or a part."""
    found = exchange_with(connection, tenant, dialect, response)
    if found is None or found.receipt.get("response_id") != response:
        return None
    return found if not found.replies or found.status is Status.PARTIAL else None


class FirstTools(Struct, frozen=True, kw_only=True):
    """The tools of a session's first request that had any."""

    tools: bytes  # JSON text of the tools that the client sent
    removed: tuple[str, ...]  # names of the tools that were left out


def first_tools(connection: StoreConnection, key: str) -> FirstTools | None:
    """Return the tools of the session's first request that had any; None if no such request was settled."""
    row = connection.execute(_FIRST_TOOLS, {"key": key}).one_or_none()
    text = None if row is None else tree.tools_of(connection, key, row.tools)
    if row is None or text is None:
        return None
    return FirstTools(tools=text, removed=tuple(orjson.loads(row.receipt).get("removed_tools", ())))


def interrupt_pending(connection: StoreConnection, at: int, marks: Collection[str] | None = None) -> int:
    """Settle every pending exchange as interrupted; return how many there were.

    With `marks`, only exchanges whose id ends with one of them: the ids of a process all end with its mark.
    """
    rows = connection.execute(_PENDING_IDS).all()
    if marks is not None:
        rows = [row for row in rows if row.id.endswith(tuple(marks))]
    for key in sorted({row.session for row in rows}, key=encode_session):  # the database's order avoids deadlocks
        sessions.locked_session(connection, key)
    # Read again: some may have been settled while this waited for the locks.
    some = tree.in_parts([row.id for row in rows])
    left = [row for ids in some for row in connection.execute(_PENDING, {"ids": ids})]
    found = [{"the_session": row.session, "the_exchange": row.id} for row in left]
    if found:
        end = {f"the_{name}": value for name, value in NOTHING_CAME.items()}
        end |= {"the_status": Status.INTERRUPTED.value, "the_settled_at": at, "the_base": None}
        connection.execute(_close(connection.dialect.name), [end | each for each in found])
        connection.execute(_NOT_PENDING, found)
    return len(found)


def _exchange(row: Row) -> ExchangeRow:
    values = row._asdict()
    values["session_key"], values["session"] = row.session, row.session_id
    del values["session_id"], values["idempotency"], values["forms"]
    values["status"] = Status(row.status)
    values["parameters"] = with_model(row.parameters, row.model)
    for name in ("parameters", "receipt"):
        values[name] = orjson.loads(values[name])
    for name in ("messages", "nodes", "replies"):
        values[name] = tuple(orjson.loads(values[name]))
    return ExchangeRow(**values)


# ---------------------------------------------------------------------------------------------------- closing

_SETTLED: Final = {"status", "settled_at", "base", *NOTHING_CAME}
"""The columns that the end of an exchange fills. The others are copied from its row in `pending`."""


@cache
def _close(dialect: str) -> postgresql.Insert | sqlite.Insert:
    """Return the statement that inserts the row of an exchange that ends. If `base` is None, the planned one stays."""
    row: list[ColumnElement[Any]] = []
    for each in PENDING.columns:
        told: ColumnElement[Any] = each
        if each.name in _SETTLED:
            told = bindparam(f"the_{each.name}", type_=each.type)
            if each.name == "base":
                told = func.coalesce(told, each, type_=each.type)
        row.append(told.label(each.name))
    names = [each.name for each in PENDING.columns]
    made = insert_into(dialect, EXCHANGES).from_select(names, select(*row).where(_THE_EXCHANGE[0]))
    return made.on_conflict_do_nothing()


@cache
def _open(dialect: str) -> postgresql.Insert | sqlite.Insert:
    """Return the statement that inserts a row into `pending`, unless the exchange is settled.

    An exchange may be begun a second time.
    """
    told = [bindparam(f"new_{each.name}", type_=each.type).label(each.name) for each in PENDING.columns]
    there = and_(
        EXCHANGES.c.session == bindparam("new_session", type_=EXCHANGES.c.session.type),
        EXCHANGES.c.id == bindparam("new_id", type_=EXCHANGES.c.id.type),
    )
    row = select(*told).where(~select(EXCHANGES.c.id).where(there).exists())
    return (
        insert_into(dialect, PENDING).from_select([each.name for each in PENDING.columns], row).on_conflict_do_nothing()
    )


# ------------------------------------------------------------------------------------------------------ begin


_NONE: Final[Mapping[str, str | None]] = {}
_NOTHING_SAID: Final[Mapping[tuple[str, str], str]] = {}


def begin(
    connection: StoreConnection,
    openings: Sequence[Opening],
    instructions: Mapping[str, str | None],
    tools: Mapping[str, str | None] = _NONE,
    said: Mapping[tuple[str, str], str] = _NOTHING_SAID,
    *,
    bodies: bool = True,
) -> None:
    """Store pending exchanges with their new texts. Idempotent.

    Their sessions must exist. `instructions` and `tools` hold names that are known to be stored, by session. `said`
    holds the texts of stored messages, by session and node; other forms of these messages are packed against them.
    `bodies` is False if the texts of the messages are stored already.
    """
    for opening in openings:
        key = session_key(opening.tenant, opening.session, opening.dialect)
        if bodies:
            tree.add_bodies(connection, key, tree.named_bodies(opening.messages))
        offered, version = None, None
        if opening.tools is not None:
            offered = tree.add_tools(connection, key, opening.tools, there=tools.get(key))
        if opening.instructions is not None:
            tokens, at, there = opening.instructions_tokens, opening.created_at, instructions.get(key)
            version = tree.add_instructions(connection, key, opening.instructions, tokens, at, there=there)
        texts = {node: said[key, node] for node, _ in opening.forms if (key, node) in said}
        row = opened_columns(opening) | {"session": key, "tools": offered, "instructions": version}
        row["forms"] = tree.encode_forms(opening.forms, texts)
        connection.execute(_open(connection.dialect.name), {f"new_{name}": value for name, value in row.items()})


# ------------------------------------------------------------------------------------- the state before settling


class ExchangeState(Struct, frozen=True, kw_only=True):
    """The parts of an exchange that its settling depends on. JSON is text, as in the row."""

    status: str
    created_at: int
    digest: str
    nodes: str
    replies: str
    messages: str
    instructions: str | None
    model: str
    tools: str | None


_STATE_FIELDS: Final = ExchangeState.__struct_fields__
_STATE: Final = tuple(
    select(*(table.c[name] for name in _STATE_FIELDS)).where(
        table.c.session == bindparam("key"), table.c.id == bindparam("exchange")
    )
    for table in _BOTH
)

_BASE: Final = NODES.alias("base")
_FIRST: Final = NODES.alias("first")
_BASE_COLUMNS: Final = tuple(_BASE.c[name] for name in ("depth", "round", "tokens_total", "recorded"))
_ASKED: Final = {
    "asked_session": SESSIONS.c.session.type,
    "asked_exchange": PENDING.c.id.type,
    "asked_base": NODES.c.node.type,
    "asked_first": NODES.c.node.type,
}
"""What each settlement looks up: its session, its exchange, its base, and the node of its first message."""


@cache
def _standings(count: int) -> Select[Any]:
    """Return the query for the snapshots of `count` settlements at once, for SQLite, whose one writer needs no locks.

    PostgreSQL cannot use it: after waiting for the lock on one row, it would not read the rows joined to it again.
    """
    rows = [tuple([bindparam(f"{name}_{at}", type_=kind) for name, kind in _ASKED.items()]) for at in range(count)]
    asked = values(*(column(name, kind) for name, kind in _ASKED.items()), name="asked").data(rows).cte().c
    key = SESSIONS.c.session
    return (
        select(SESSIONS, *_STATE[0].selected_columns, *_BASE_COLUMNS, _FIRST.c.node)
        .join_from(asked.asked_session.table, SESSIONS, key == asked.asked_session)
        .outerjoin(PENDING, and_(PENDING.c.session == key, PENDING.c.id == asked.asked_exchange))
        .outerjoin(_BASE, and_(_BASE.c.session == key, _BASE.c.node == asked.asked_base))
        .outerjoin(_FIRST, and_(_FIRST.c.session == key, _FIRST.c.node == asked.asked_first))
    )


_STATE_FROM: Final = len(SESSIONS.columns)
_BASE_FROM: Final = _STATE_FROM + len(_STATE_FIELDS)


class SettleSnapshot(Struct, frozen=True, kw_only=True):
    """The state of a session and an exchange before settling."""

    session: SessionRow | None = None  # the session, which is locked from now on; None if there is none
    state: ExchangeState | None = None  # the exchange; None if it is not stored
    under: tree.NodePlace | None = None
    """The place of the node that the messages go under. Set only if the first message is known not to be stored there
    yet."""


def settle_snapshots(connection: StoreConnection, settlements: Mapping[str, Settlement]) -> dict[str, SettleSnapshot]:
    """Return a snapshot by session, each with the state of the exchange to settle in it."""
    if connection.dialect.name == "sqlite":
        return _snapshots_at_once(connection, settlements)
    found: dict[str, SettleSnapshot] = {}
    for key in sorted(settlements, key=encode_session):  # the database's order avoids deadlocks
        session = sessions.locked_session(connection, key)
        found[key] = SettleSnapshot(session=session, state=_state(connection, key, settlements[key].exchange))
    return found


def _state(connection: StoreConnection, key: str, exchange: str) -> ExchangeState | None:
    """Return the state of an exchange, pending or settled; None if it is not stored."""
    for found in _STATE:
        row = connection.execute(found, {"key": key, "exchange": exchange}).one_or_none()
        if row is not None:
            return ExchangeState(**row._asdict())
    return None


def _snapshots_at_once(connection: StoreConnection, settlements: Mapping[str, Settlement]) -> dict[str, SettleSnapshot]:
    count = 1 << (len(settlements) - 1).bit_length()  # a power of two, so that few distinct statements are needed
    asked: dict[str, str | None] = {f"{name}_{at}": None for name in _ASKED for at in range(len(settlements), count)}
    for at, (key, settlement) in enumerate(settlements.items()):
        first = node_id(settlement.base, settlement.messages[0].message) if settlement.messages else None
        asked[f"asked_session_{at}"], asked[f"asked_exchange_{at}"] = key, settlement.exchange
        asked[f"asked_base_{at}"], asked[f"asked_first_{at}"] = settlement.base, first
    found = dict.fromkeys(settlements, SettleSnapshot())
    for row in connection.execute(_standings(count), asked):
        session, state = sessions.there(sessions.session_in(row)), row[_STATE_FROM:_BASE_FROM]
        if session is None:
            continue
        depth, rounds, tokens, recorded, first = row[_BASE_FROM:]
        settlement, under = settlements[session.key], None
        if settlement.messages and first is None:
            if settlement.base == ROOT:
                under = tree.root_of(settlement.tenant)
            elif depth is not None:
                under = tree.NodePlace(
                    node=settlement.base, depth=depth, round=rounds, tokens_total=tokens, recorded=recorded
                )
        if state[0] is not None:
            exchange: ExchangeState | None = ExchangeState(**dict(zip(_STATE_FIELDS, state, strict=True)))
        else:
            exchange = _state(connection, session.key, settlement.exchange)
        found[session.key] = SettleSnapshot(session=session, state=exchange, under=under)
    return found


# ----------------------------------------------------------------------------- where messages go

_NEAR: Final = 64  # the call of a tool result is searched for among so many messages, from the head upwards

_TWINS: Final = (
    select(EXCHANGES.c.base, EXCHANGES.c.replies, EXCHANGES.c.status, EXCHANGES.c.created_at, EXCHANGES.c.id).where(
        *matching(EXCHANGES, "digest"),
        or_(
            EXCHANGES.c.settled_at > bindparam("since", type_=EXCHANGES.c.settled_at.type),
            EXCHANGES.c.base == bindparam("there", type_=EXCHANGES.c.base.type),
        ),
        EXCHANGES.c.agent.is_not_distinct_from(bindparam("agent", type_=EXCHANGES.c.agent.type)),
        text("exchanges.kind IN ('append', 'first')"),  # literal, as in the index
        EXCHANGES.c.replies != "[]",
    )
    # No ORDER BY: with one, SQLite would read every exchange of the session.
)

# ----------------------------------------------------------------------------------------------------- settle

_GONE: Final = "the session was deleted meanwhile: the messages before this request are not there any more"

_OPEN: Final = frozenset({Status.PENDING, Status.INTERRUPTED})

_MOVE: Final = update(SESSIONS).where(SESSIONS.c.session == bindparam("the_session"))
_CHANGE: Final = update(EXCHANGES).where(_THE_EXCHANGE[1])


def write_exchanges(connection: StoreConnection, items: Sequence[Exchange]) -> list[Any]:
    """Begin and settle exchanges of several callers; return a `Settled` for each settlement, None for each opening.

    Openings go first, so that an exchange may begin and end in one call. Settlements of the same session are done one
    after the other; each sees the one before.
    """
    gathered = GatheringConnection(connection)
    openings = [item for item in items if isinstance(item, Opening)]
    newest = sessions.open_sessions(gathered, openings)
    begin(gathered, openings, newest, said=tree.said_before(gathered, openings))
    waiting = [(number, item) for number, item in enumerate(items) if isinstance(item, Settlement)]
    results: list[Any] = [None] * len(items)
    ended: list[Sums] = []
    while waiting:
        now: dict[str, tuple[int, Settlement]] = {}
        later: list[tuple[int, Settlement]] = []
        for number, item in waiting:
            key = session_key(item.tenant, item.session, item.dialect)
            if key in now:
                later.append((number, item))
            else:
                now[key] = number, item
        snapshots = settle_snapshots(gathered, {key: item for key, (_, item) in now.items()})
        for key, (number, item) in now.items():
            results[number] = _settle(gathered, item, snapshots[key], ended)
        waiting = later
    add_figures(gathered, ended)
    gathered.flush()
    return results


def settle_placed(connection: StoreConnection, settlement: Settlement, line: Sequence[tree.NodePlace]) -> Settled:
    """Settle an exchange whose messages are stored already at their planned places, `line`; see `portions`."""
    gathered = GatheringConnection(connection)
    key = session_key(settlement.tenant, settlement.session, settlement.dialect)
    now = settle_snapshots(gathered, {key: settlement})[key]
    ended: list[Sums] = []
    settled = _settle(gathered, settlement, now, ended, line)
    add_figures(gathered, ended)
    gathered.flush()
    return settled


def _settle(
    connection: StoreConnection,
    settlement: Settlement,
    now: SettleSnapshot,
    ended: list[Sums],
    line: Sequence[tree.NodePlace] = (),
) -> Settled:
    """Settle the exchange, and add its figures to `ended`.

    If the node that its messages go under is no longer stored, it ends as failed, and nothing becomes a node. If its
    session was deleted meanwhile, only its figures are counted.
    """
    session, state = now.session, now.state
    if session is None or state is None:
        if (figures := counted(settlement, "", settlement.status.value)) is not None:
            ended.append(figures)
        return Settled(head=ROOT, nodes=(), replies=())
    if not _is_open(settlement, state):
        nodes, replies = orjson.loads(state.nodes), orjson.loads(state.replies)
        return Settled(head=session.head, nodes=tuple(nodes), replies=tuple(replies))
    of_end = LateEnd if settlement.late else ExchangeEnd
    end = of_end(connection, settlement, session, state, now.under, line)
    settled = end.write()
    exchange = {"the_session": session.key, "the_exchange": settlement.exchange}
    if Status(state.status) is Status.PENDING:
        told = {f"the_{name}": value for name, value in (NOTHING_CAME | end.exchange_row).items()}
        connection.execute(_close(connection.dialect.name), {"the_base": None} | told | exchange)
        connection.execute(_NOT_PENDING, exchange)
    else:  # it was marked as interrupted, or its reply comes late
        connection.execute(_CHANGE, end.exchange_row | exchange)
    connection.execute(_MOVE, end.session_row | {"the_session": session.key})
    if (figures := counted(settlement, session.key, end.exchange_row["status"])) is not None:
        ended.append(figures)
    return settled


def _is_open(settlement: Settlement, state: ExchangeState) -> bool:
    """Tell whether the exchange can still be settled in this way."""
    status = Status(state.status)
    if settlement.late:
        return status is Status.PARTIAL or (status is Status.COMPLETE and state.replies == "[]")
    return status in _OPEN


class ExchangeEnd:
    """Writes the results of an exchange. Prepares the changes of its own row and the session's; callers write those."""

    def __init__(
        self,
        connection: StoreConnection,
        settlement: Settlement,
        session: SessionRow,
        state: ExchangeState,
        under: tree.NodePlace | None,
        line: Sequence[tree.NodePlace] = (),
    ) -> None:
        """`under` is the place of the base, if the first message is known not to be stored there yet.

        `line` holds the places of the messages if all of them are stored already, with their texts, under the base.
        """
        self._connection = connection
        self._settlement = settlement
        self._session = session
        self._state = state
        self._under = under
        self._line = line
        self.exchange_row = settled_columns(settlement)
        """Changes of the exchange's row."""
        self.session_row: dict[str, Any] = {"updated_at": max(session.updated_at, settlement.settled_at)}
        """Changes of the session's row."""
        if settlement.cost is not None:
            self.session_row["cost"] = (session.cost or 0.0) + settlement.cost

    def write(self) -> Settled:
        """Store the messages and the replies; return their nodes."""
        settlement = self._settlement
        try:
            if settlement.replies:
                return self._with_replies()
            if settlement.finished:
                return self._finished()
        except tree.UnknownBase:
            receipt = {**settlement.receipt, "error": _GONE}
            self.exchange_row |= {"status": Status.FAILED.value, "receipt": receipt_text(receipt)}
        return Settled(head=self._session.head, nodes=(), replies=())

    def _with_replies(self) -> Settled:
        connection, key, settlement = self._connection, self._session.key, self._settlement
        placement, moves_head = self._placement()
        carried = placement.carried
        # `_line` and `_under` hold only for the planned place, with nothing carried along.
        as_asked = not carried and placement.base == settlement.base
        moved: list[tree.NodePlace] = []
        if as_asked and self._line:
            line, bodies = self._line, {}
            _, replies = tree.insert_nodes(
                connection, key, line[-1].node, (), self._answered(), tenant=settlement.tenant
            )
        else:
            line, replies = tree.insert_nodes(
                connection,
                key,
                placement.base,
                [*map(_again, carried), *asked_nodes(settlement)],
                self._answered(),
                tenant=settlement.tenant,
                under=self._under if as_asked else None,
            )
            moved, line = line[: len(carried)], line[len(carried) :]
            bodies = tree.named_bodies(settlement.messages)
        renamed = {row.node: place.node for row, place in zip(carried, moved, strict=True)}
        for stored in orjson.loads(self._state.messages):  # these came with the opening
            bodies.pop(stored, None)
        tree.add_bodies(connection, key, bodies)
        base = moved[-1].node if moved else placement.base
        nodes, heads = [place.node for place in line], [place.node for place in replies]
        self.exchange_row |= {
            "base": base,  # a retry must go to the same place
            "nodes": orjson.dumps(nodes).decode(),
            "replies": orjson.dumps(heads).decode(),
            "cut_node": self._keep_cut(base, line, renamed),
        }
        self._progress(replies[0] if moves_head else None)
        if moves_head:
            reply = settlement.replies[0]
            self.session_row["calls"] = encode_calls(tree.calls_of(reply.body.message, partial=reply.partial))
        self._keep_hidden(heads, nodes, carried, renamed)
        self._keep_evidence(base, line, heads)
        head = heads[0] if moves_head else self._session.head
        are_new = as_asked and all([place.is_new for place in (*line, *replies)])
        return Settled(head=head, nodes=tuple(nodes), replies=tuple(heads), are_new=are_new)

    def _finished(self) -> Settled:
        """Store the messages of a request that has no reply of its own (`Settlement.finished`)."""
        connection, session, settlement = self._connection, self._session, self._settlement
        base, moves_head = settlement.base, settlement.moves_head
        there: Mapping[bytes, str] = {}
        if settlement.kind == "append":
            messages = [body.message for body in settlement.messages]
            found = place_finished(self._end_of_head(_NEAR), messages, settlement.agent)
            base = session.head if settlement.at_head else base
            if found is not None:
                base, there = found.base, found.nodes
            # The upstream was not asked. If the session has moved on meanwhile, its head stays.
            moves_head = moves_head and base == session.head
        new = [new_node for new_node in asked_nodes(settlement) if content_hash(new_node.body.message) not in there]
        line, _ = tree.insert_nodes(connection, session.key, base, new, (), tenant=settlement.tenant)
        tree.add_bodies(connection, session.key, tree.named_bodies(new_node.body for new_node in new))
        end = line[-1] if line else tree.places_of(connection, session.key, [base]).get(base)
        places = iter(line)
        nodes = [
            there.get(content_hash(body.message)) or next(places).node  # in the order of the request
            for body in settlement.messages
        ]
        self.exchange_row |= {"base": base, "nodes": orjson.dumps(nodes).decode()}
        if not there:
            self.exchange_row["cut_node"] = self._keep_cut(base, line, {})
        self._progress(end if moves_head else None)
        if end is not None and moves_head:
            self.session_row["calls"] = encode_calls(tree.calls_at(connection, session.key, end.node, end.depth))
        return Settled(head=self.session_row.get("head", session.head), nodes=tuple(nodes), replies=())

    def _placement(self) -> tuple[Placement[NodeRow], bool]:
        """Return where the messages of an answered request go, and whether the head moves to its reply."""
        settlement, head = self._settlement, self._session.head
        planned, moves_head = settlement.base, settlement.moves_head
        if settlement.yields and head != ROOT and self._state.instructions not in {None, self._session.instructions}:
            # A title request and the first question were sent at the same moment; this is one of the two. A title
            # request offers no tools.
            has_tools = self._state.tools is not None and self._session.tools is None
            return Placement(base=planned), moves_head and has_tools
        # If the head has not moved since the plan, no request answered meanwhile can be a twin (a repetition).
        twins = self._twins() if head != planned and settlement.kind in APPENDING else []
        if twins:
            mine = AnsweredEarlier(
                base=planned,
                replies=(),
                complete=settlement.status is Status.COMPLETE,
                created_at=self._state.created_at,
                exchange=settlement.exchange,
            )
            return Placement(base=twins[0].base), moves_head and takes_head(head, mine, twins)
        anew = settlement.at_head
        if not anew and settlement.kind == "append" and settlement.messages and head != planned:
            first = settlement.messages[0].message
            node = node_id(planned, first)
            stored = tree.depths_of(self._connection, self._session.key, [planned, node])
            anew = is_placed_anew(planned, first, node, stored)
        if not anew:
            return Placement(base=planned), moves_head
        placement = self._place_append()
        return placement, moves_head and not placement.beside

    def _twins(self) -> list[AnsweredEarlier]:
        """Return the twins of this append at one place: equal appends that were answered, unknown to this one."""
        settlement, key = self._settlement, self._session.key
        asked = {
            "key": key,
            "digest": self._state.digest,
            "since": self._state.created_at - TWIN_MS,
            # An append with a given place also repeats what was answered there, however long ago.
            "there": None if settlement.at_head else settlement.base,
            "agent": settlement.agent,
        }
        found = [
            AnsweredEarlier(
                base=row.base,
                replies=orjson.loads(row.replies),
                complete=row.status == Status.COMPLETE.value,
                created_at=row.created_at,
                exchange=row.id,
            )
            for row in self._connection.execute(_TWINS, asked)
        ]
        bases = {twin.base for twin in found}
        elsewhere = bool(bases) and settlement.base not in bases
        depths = tree.depths_of(self._connection, key, [settlement.base, *bases]) if elsewhere else {}
        nearest = nearest_place(settlement.base, bases, depths)
        return [twin for twin in found if twin.base == nearest]

    def _place_append(self) -> Placement[NodeRow]:
        """Return where an append goes, given the current head."""
        settlement, session = self._settlement, self._session
        messages = [body.message for body in settlement.messages]
        if not messages or not messages[0].answers:
            return Placement(base=session.head)
        near = self._end_of_head(1)  # nearly always the head makes the calls
        found = None
        if settlement.agent in {None, *(row.agent for row in near)}:
            found = place_append(near, messages, settlement.agent)
        if found is None:
            most = _NEAR
            if not settlement.at_head:  # the planned place must be in reach, however far up it is
                depths = tree.depths_of(self._connection, session.key, [settlement.base])
                most += max(session.messages - depths.get(settlement.base, session.messages), 0)
            found = place_append(self._end_of_head(most), messages, settlement.agent)
        if found is not None:
            return found
        if settlement.at_head:
            return Placement(base=session.head)
        return Placement(base=settlement.base, beside=True)  # the session was rewound to before the calls

    def _end_of_head(self, most: int) -> list[NodeRow]:
        """Return the last messages on the branch of the head, oldest first."""
        session = self._session
        return tree.path_to(self._connection, session.key, session.head, below=session.messages - most)

    def _keep_cut(self, base: str, line: Sequence[tree.NodePlace], renamed: Mapping[str, str]) -> str | None:
        """Store the cut that this exchange moved; return its node, or None if none is stored.

        `line` holds the places of the new messages, `renamed` the new names of nodes that were carried along.
        """
        settlement, cut = self._settlement, self._settlement.cut
        # An append that went elsewhere follows other messages than those that the cut was made for.
        as_planned = tuple(renamed) == settlement.carried and (bool(renamed) or base == settlement.base)
        end = line[-1].node if line else base
        if cut is not None and line and self._lies_before(cut.position, line):
            end = base  # so that every branch from there can use the cut
        if cut is None or not as_planned or end == ROOT:
            return None
        kept = None
        if settlement.kept is not None:
            stored = [renamed.get(node, node) for node in settlement.kept.nodes]
            kept = (*stored, *(line[number].node for number in settlement.kept.messages))
        keep_cut(
            self._connection,
            self._session.key,
            StandingCut(cut=cut, node=end, kept=kept),
            settlement.agent,
            exchange=settlement.exchange,
            at=settlement.settled_at,
            # If messages were carried along, the previous cut may be on another branch.
            follows=None if renamed else settlement.follows,
        )
        return end

    @staticmethod
    def _lies_before(position: int, line: Sequence[tree.NodePlace]) -> bool:
        return position < line[0].depth

    def _keep_hidden(
        self, heads: Sequence[str], nodes: Sequence[str], carried: Sequence[NodeRow], renamed: Mapping[str, str]
    ) -> None:
        """Store what was hidden from the client of the replies, and copy what was hidden of the carried nodes.

        What other agents said, and was sent before one of the messages, is stored with that message.
        """
        connection, session, settlement = self._connection, self._session, self._settlement
        hidden: dict[str, Hidden] = {}
        if settlement.heard is not None:
            number, heard = settlement.heard
            hidden[nodes[number]] = heard
        for node, reply in zip(heads, settlement.replies, strict=True):
            if reply.hidden is not None:
                hidden.setdefault(node, reply.hidden)  # the first of equal replies counts
        exchange, at = settlement.exchange, settlement.settled_at
        count = tree.keep_hidden(connection, session.key, hidden, exchange=exchange, at=at)
        if session.hidden and carried:
            found = tree.hidden_at(connection, session.key, list(renamed), session.hidden)
            there = tree.hidden_at(connection, session.key, [renamed[node] for node in found], session.hidden)
            for row in carried:
                node = renamed[row.node]
                if row.node in found and node not in there:
                    said = (node, found[row.node], row.created_at)
                    count += tree.add_hidden(connection, session.key, [said], exchange=row.exchange)
        if count:
            self.session_row["hidden"] = session.hidden + count

    def _keep_evidence(self, base: str, line: Sequence[tree.NodePlace], heads: Sequence[str]) -> None:
        """Store the evidence that identifies the replies when the client sends them back.

        This includes upstream's replies that the client itself brought (`Settlement.relayed`).
        """
        settlement = self._settlement
        brought = [(line[at].node, settlement.messages[at].message) for at in settlement.relayed if at < len(line)]
        said = [
            *(() if self._line else brought),
            *((node, reply.body.message) for node, reply in zip(heads, settlement.replies, strict=True)),
        ]
        witness = Witness(tenant=settlement.tenant, dialect=settlement.dialect)
        begins = settlement.base == ROOT and settlement.kind != "side"
        places = [line[0].node] if line and begins else []  # the first message; finds sessions with this beginning
        for node, whole, reply in self._prefilled(base, line):
            if len(squeezed(reply.text)) >= TELLING:
                said.append((node, whole))
            else:  # a short reply tells too little: a program prefills the same words for all its users
                places.append(node)
        insert_evidence(self._connection, evidence_rows(self._session.key, witness, said, places))

    def _prefilled(self, base: str, line: Sequence[tree.NodePlace]) -> list[tuple[str, Message, Message]]:
        """Return, for a request that ends with the beginning of a reply, each whole reply: (node, whole, reply).

        Most clients send the beginning and the reply back as one message, `whole`, which would be at `node`.
        """
        settlement = self._settlement
        begun = settlement.messages[-1].message if settlement.messages else None
        if begun is None or begun.role != "assistant" or len(line) != len(settlement.messages):
            return []
        before = line[-2].node if len(line) > 1 else base
        replies = [reply.body.message for reply in settlement.replies]
        wholes = [(begun.continued(reply), reply) for reply in replies]
        return [(node_id(before, whole), whole, reply) for whole, reply in wholes if whole is not None]

    def _answered(self) -> list[tree.NewNode]:
        settlement = self._settlement
        return [
            tree.NewNode(
                body=reply.body,
                source=Source.UPSTREAM,
                created_at=settlement.settled_at,
                partial=reply.partial,
                exchange=settlement.exchange,
                agent=settlement.agent,
                has_text=True,
            )
            for reply in settlement.replies
        ]

    def _progress(self, head: tree.NodePlace | None) -> None:
        """Record what an answer changes in the session's row. If `head` is None, the head stays."""
        session, settlement, state = self._session, self._settlement, self._state
        self.session_row |= {
            "requests": session.requests + 1,
            "tokens_sent": session.tokens_sent + settlement.tokens_sent,
            "tokens_saved": session.tokens_saved + settlement.tokens_before - settlement.tokens_sent,
        }
        if head is not None:
            self.session_row |= _standing_at(head) | {
                # Only requests that move the head set these: a side request has its own instructions.
                "instructions": state.instructions or session.instructions,
                "model": state.model,
                "tools": state.tools,
                "scale": session.scale if settlement.scale is None else settlement.scale,
            }
        if settlement.kind != "side" and not settlement.resends:
            self.session_row["arrival"] = settlement.kind


class LateEnd(ExchangeEnd):
    """Writes a reply that arrived after its exchange was settled."""

    def write(self) -> Settled:
        """Store the reply; return its node."""
        settled = super().write()
        for name in ("base", "nodes", "cut_node"):  # the exchange has them already
            self.exchange_row.pop(name, None)
        return settled

    def _placement(self) -> tuple[Placement[NodeRow], bool]:
        base = self._settlement.base
        return Placement(base=base), self._session.head in {base, *orjson.loads(self._state.replies)}

    def _progress(self, head: tree.NodePlace | None) -> None:
        if head is not None:
            self.session_row |= _standing_at(head)


def _standing_at(head: tree.NodePlace) -> dict[str, Any]:
    """Return the columns of a session that follow from its head."""
    return {"head": head.node, "messages": head.depth, "rounds": head.round, "tokens": head.tokens_total}


def asked_nodes(settlement: Settlement) -> list[tree.NewNode]:
    """Return the client's messages as new nodes, with what `on_arrival` decided (None if it was not asked)."""
    arrivals = settlement.arrivals[: len(settlement.messages)]
    relayed = frozenset(settlement.relayed)
    return [
        tree.NewNode(
            body=body,
            source=Source.CLIENT,
            created_at=settlement.settled_at,
            exchange=settlement.exchange,
            agent=settlement.agent,
            vouched=number in relayed,
            policy=settlement.policy_version or None,
            arrival=arrival,
        )
        for number, (body, arrival) in enumerate(zip_longest(settlement.messages, arrivals))
    ]


def _again(row: NodeRow) -> tree.NewNode:
    """Return a copy of a node for another place, with the same content, author and time."""
    return tree.NewNode(
        body=Body(message=row.message, tokens=row.tokens),
        source=row.source,
        created_at=row.created_at,
        partial=row.partial,
        exchange=row.exchange,
        agent=row.agent,
        has_text=True,
        policy=row.policy,
        arrival=row.arrival,
    )

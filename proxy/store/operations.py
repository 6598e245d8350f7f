"""What operators ask of the store and have it do: sessions by size and cost, retention, budgets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct
from sqlalchemy import BigInteger, ColumnElement, and_, cast, delete, func, or_, select

from proxy.dialects import Message
from proxy.store.database import StoreConnection
from proxy.store.packing import encode_exchange
from proxy.store.records import Cursor, SessionRow, dialect_of
from proxy.store.rollups import HOUR, hold_sums
from proxy.store.schema import HAS_FAILED, KEY_COSTS, NODES, PENDING, PERIOD_MS, ROLLUPS, SESSION_ROLLUPS, SESSIONS, put
from proxy.store.tree import IS_THERE, REMOVED, form_text, forms_in, session_in

Sort: TypeAlias = Literal["newest", "largest", "dearest", "saved"]

_NANO: Final = 1_000_000_000  # dollars are compared in billionths
_AT_ONCE: Final = 100  # sessions of a tenant, or to be deleted, that are named at once
_FEW: Final = 2_000  # sessions with errors that are looked up by their names


class SessionListQuery(Struct, frozen=True, kw_only=True):
    """Which sessions are listed, and in what order."""

    tenant: str | None = None  # None: everybody's
    sort: Sort = "newest"
    since: int | None = None  # used since, in milliseconds since 1970
    until: int | None = None  # used before that
    min_tokens: int = 0
    model: str | None = None
    key: str | None = None  # the internal name of the one that is asked for
    name: str | None = None  # a part of its id
    agent: str | None = None  # an agent that spoke in it
    failed: bool = False  # whether it must have requests that failed or broke off
    limit: int = 50
    after: str | None = None  # the cursor of the page before


class ListedSession(Struct, frozen=True, kw_only=True):
    """A session, and what trimming saved in it."""

    row: SessionRow
    cost_saved: float | None  # dollars; None where no price was known


def list_sessions(connection: StoreConnection, query: SessionListQuery) -> tuple[list[ListedSession], str | None]:
    """Return a page of sessions with what each saved, and the cursor of the next one."""
    page, following = page_of_sessions(connection, query)
    sums = _saved().where(SESSION_ROLLUPS.c.session.in_([row.key for row in page]))
    saved = {row.session: float(row.saved) for row in (connection.execute(sums) if page else ()) if row.priced}
    return [ListedSession(row=row, cost_saved=saved.get(row.key)) for row in page], following


def page_of_sessions(connection: StoreConnection, query: SessionListQuery) -> tuple[list[SessionRow], str | None]:
    """Return a page of sessions, and the cursor of the next one."""
    found = _ordered(query)
    if query.failed:
        found = found.where(_has_failed(connection))
    rows = connection.execute(found.limit(query.limit + 1)).all()
    page = rows[: query.limit]
    following = str(Cursor(time=int(page[-1].place), name=page[-1].session)) if len(rows) > query.limit else None
    return list(map(session_in, page)), following


def _ordered(query: SessionListQuery) -> Any:
    """Return what reads the sessions in order, each with its `place` there."""
    place: ColumnElement[Any] = SESSIONS.c.updated_at
    source: Any = SESSIONS
    if query.sort == "largest":
        place = SESSIONS.c.tokens
    elif query.sort == "dearest":
        place = cast(func.coalesce(SESSIONS.c.cost, 0) * _NANO, BigInteger)
    elif query.sort == "saved":
        sums = _saved().subquery()
        place = cast(func.coalesce(sums.c.saved, 0) * _NANO, BigInteger)
        source = SESSIONS.outerjoin(sums, sums.c.session == SESSIONS.c.session)
    found: Any = select(SESSIONS, place.label("place")).select_from(source)
    order = [place] if place is not SESSIONS.c.updated_at else [SESSIONS.c.period, place]
    found = found.order_by(*(column.desc() for column in (*order, SESSIONS.c.session)))
    found = found.where(SESSIONS.c.tokens >= query.min_tokens)
    found = found.where(IS_THERE, *_like(query))
    exact = ((SESSIONS.c.tenant, query.tenant), (SESSIONS.c.model, query.model), (SESSIONS.c.session, query.key))
    for column, value in exact:
        if value is not None:
            found = found.where(column == value)
    if query.since is not None:
        found = found.where(SESSIONS.c.period >= query.since // PERIOD_MS, SESSIONS.c.updated_at >= query.since)
    if query.until is not None:
        found = found.where(SESSIONS.c.period <= query.until // PERIOD_MS, SESSIONS.c.updated_at < query.until)
    if query.after is not None:
        last = Cursor.read(query.after)
        found = found.where(or_(place < last.time, and_(place == last.time, SESSIONS.c.session < last.name)))
        if place is SESSIONS.c.updated_at:  # the index begins there
            found = found.where(SESSIONS.c.period <= last.time // PERIOD_MS)
    return found


def _like(query: SessionListQuery) -> Iterator[ColumnElement[bool]]:
    """Yield what a session must be like."""
    if query.name is not None:
        yield SESSIONS.c.id.icontains(query.name, autoescape=True)
    if query.agent is not None:
        spoke = select(NODES.c.node).where(NODES.c.session == SESSIONS.c.session, NODES.c.agent == query.agent)
        yield spoke.exists()


def _has_failed(connection: StoreConnection) -> ColumnElement[bool]:
    """Return what makes a session have requests that failed: where few have, they are named instead of looked for."""
    failed = select(SESSION_ROLLUPS.c.session).where(HAS_FAILED)
    few = list(connection.execute(failed.distinct().limit(_FEW)).scalars())
    if len(few) < _FEW:
        return SESSIONS.c.session.in_(few)
    return failed.where(SESSION_ROLLUPS.c.session == SESSIONS.c.session).exists()


def _saved() -> Any:
    saved, priced = func.sum(SESSION_ROLLUPS.c.cost_saved), func.sum(SESSION_ROLLUPS.c.priced)
    columns = (SESSION_ROLLUPS.c.session, saved.label("saved"), priced.label("priced"))
    return select(*columns).group_by(SESSION_ROLLUPS.c.session)


def forms_of(connection: StoreConnection, key: str, exchange: str) -> dict[str, Message]:
    """Return by node the text in which clients sent a message back, up to an exchange, if it was not the stored one."""
    last = encode_exchange(exchange)
    found = {form.node: form for form in forms_in(connection, key) if encode_exchange(form.exchange) <= last}
    api = dialect_of(key)  # of a node's forms the last one counts
    return {node: api.message(form_text(connection, key, form).encode()) for node, form in found.items()}


# --------------------------------------------------------------------------------------------------- retention


def sessions_to_delete(connection: StoreConnection, *, before: int | None, most: int | None) -> Sequence[str]:
    """Return the internal names of sessions that were last used before a time, or are more than `most`.

    One with an exchange under way is in use; for the time it is one that began later.
    """
    oldest = select(SESSIONS.c.session).order_by(SESSIONS.c.period, SESSIONS.c.updated_at, SESSIONS.c.session)
    pending = select(PENDING.c.session)
    keys: list[str] = []
    if before is not None:
        old = oldest.where(SESSIONS.c.period <= before // PERIOD_MS, SESSIONS.c.updated_at < before)
        old = old.where(SESSIONS.c.session.not_in(pending.where(PENDING.c.created_at >= before)))
        keys = list(connection.execute(old.limit(_AT_ONCE)).scalars())
    if most is not None and len(keys) < _AT_ONCE:
        count = int(connection.execute(select(func.count()).select_from(SESSIONS)).scalar_one_or_none() or 0)
        beyond = min(count - most, _AT_ONCE)
        if beyond > len(keys):
            idle = oldest.where(SESSIONS.c.session.not_in(pending))
            keys = list(dict.fromkeys([*keys, *connection.execute(idle.limit(beyond)).scalars()]))[:beyond]
    return keys


def sessions_of(connection: StoreConnection, tenant: str, after: str | None) -> Sequence[str]:
    """Return the internal names of some sessions of a tenant, in order: those after `after`."""
    found = select(SESSIONS.c.session).where(SESSIONS.c.tenant == tenant)
    if after is not None:
        found = found.where(SESSIONS.c.session > after)
    return list(connection.execute(found.order_by(SESSIONS.c.session).limit(_AT_ONCE)).scalars())


_MAKING_MS: Final = 600_000  # an import that has not gone on for so long was cut off


def removed_sessions(connection: StoreConnection, at: int) -> Sequence[str]:
    """Return the internal names of sessions that are removed in part, those excepted that are being made."""
    columns = (SESSIONS.c.session, SESSIONS.c.model, SESSIONS.c.updated_at)
    rows = connection.execute(select(*columns).where(SESSIONS.c.arrival == REMOVED)).all()
    return [row.session for row in rows if row.model is None or row.updated_at < at - _MAKING_MS]


def forget_tenant(connection: StoreConnection, tenant: str) -> None:
    """Delete the sums of a tenant."""
    hold_sums(connection)
    for table in (ROLLUPS, KEY_COSTS):
        connection.execute(delete(table).where(table.c.tenant == tenant))


# ----------------------------------------------------------------------------------------------------- budgets


def spent(connection: StoreConnection, tenant: str, since: int) -> float:
    """Return how many dollars a tenant spent since a time (milliseconds since 1970), by whole hours."""
    of_tenant = (ROLLUPS.c.tenant == tenant, ROLLUPS.c.hour >= since // HOUR)
    found = select(func.sum(ROLLUPS.c.cost + ROLLUPS.c.cost_summaries)).where(*of_tenant)
    return float(connection.execute(found).scalar_one_or_none() or 0)


def spend(connection: StoreConnection, tenant: str, key: str, at: int, dollars: float) -> None:
    """Add what was spent with a named key of a tenant at a time (milliseconds since 1970)."""
    row = {"tenant": tenant, "name": key, "day": at // (24 * HOUR), "dollars": dollars}
    put(connection, KEY_COSTS, [row], adds=True)


def spent_with(connection: StoreConnection, key: str, since: int) -> float:
    """Return how many dollars were spent with keys of this name since a time, by whole days."""
    days = KEY_COSTS.c.day >= since // (24 * HOUR)
    found = select(func.sum(KEY_COSTS.c.dollars)).where(KEY_COSTS.c.name == key, days)
    return float(connection.execute(found).scalar_one_or_none() or 0)

"""Sums over exchanges, by hour. They are written in the transaction that settles, and read for statistics.

The table `rollups` has no session and stays when sessions are deleted. Rows of `session_rollups` are deleted with their
session; they provide the sums by session and the numbers of sessions.

During an hour, each process adds to rows of its own. Later the rows of an hour are folded into one, and after a month
those of a day. So statistics read an amount that grows with time and with the number of groups, not with the number of
exchanges.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from operator import add, itemgetter
from typing import Any, Final, Literal, TypeAlias, cast

from msgspec import Struct
from msgspec.structs import asdict, replace
from sqlalchemy import ColumnElement, Float, Table, delete, func, literal, literal_column, select, union_all

from proxy.store.database import StoreConnection
from proxy.store.packing import sanitize
from proxy.store.records import ExchangeFigures, Settlement
from proxy.store.schema import KEY_COSTS, ROLLUPS, SESSION_ROLLUPS, SESSIONS, SUMS, put

HOUR: Final = 3_600_000  # milliseconds
_AMOUNTS: Final = frozenset(column.name for column in ROLLUPS.columns if isinstance(column.type, Float))
_NOTHING: Final = {name: 0.0 if name in _AMOUNTS else 0 for name in SUMS}
_DIGITS: Final = "0123456789abcdef"
_KEYS: Final = {table: tuple(column.name for column in table.primary_key) for table in (ROLLUPS, SESSION_ROLLUPS)}
_PLACES: Final[Mapping[Table, Any]] = {table: itemgetter(*keys) for table, keys in _KEYS.items()}
_FIGURES: Final = cast("Any", itemgetter(*SUMS))

Group: TypeAlias = Literal["day", "hour", "model", "policy", "tenant", "session", "kind", "status", "dialect", "miss"]


Sums: TypeAlias = dict[str, Any]
"""The figures to add for an exchange (or a summary), with the keys of both tables.

The session is empty if it was deleted meanwhile."""


def sums_of(
    figures: ExchangeFigures, *, session: str, tenant: str, dialect: str, kind: str, status: str, exchange: str, at: int
) -> Sums:
    """Return the figures with their keys. `session` is an internal name, `at` is in milliseconds since 1970."""
    keys = {"hour": at // HOUR, "slot": slot_of(exchange), "session": session, "tenant": tenant, "dialect": dialect}
    return asdict(figures) | keys | {"model": sanitize(figures.model), "kind": kind, "status": status}


def counted(settlement: Settlement, session: str, status: str) -> Sums | None:
    """Return the sums to add for an exchange, if it has any figures. `status` is how it ended."""
    if settlement.figures is None:
        return None
    return sums_of(
        settlement.figures,
        session=session,
        tenant=settlement.tenant,
        dialect=settlement.dialect,
        kind=settlement.kind,
        status=status,
        exchange=settlement.exchange,
        at=settlement.settled_at,
    )


def slot_of(exchange: str) -> int:
    """Return the number of the row that the exchange's process adds to: the last hexadecimal digit of the id.

    The ids of a process all end with its mark.
    """
    return max(_DIGITS.find(exchange[-1:]), 0)


def add_figures(connection: StoreConnection, rows: Sequence[Sums]) -> None:
    """Add the figures of exchanges. Call this last in a transaction: it locks rows that other transactions wait for."""
    for table, some in ((ROLLUPS, rows), (SESSION_ROLLUPS, [row for row in rows if row["session"]])):
        if some:
            _add_rows(connection, table, some)


def _add_rows(connection: StoreConnection, table: Table, rows: Sequence[Mapping[str, Any]]) -> None:
    place_of: Callable[[Mapping[str, Any]], tuple[Any, ...]] = _PLACES[table]
    sums: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    for row in rows:
        place, figures = place_of(row), _FIGURES(row)
        sums[place] = tuple(map(add, sums[place], figures)) if place in sums else figures
    names = (*_KEYS[table], *SUMS)
    # Sorted: two transactions that add to the same rows must not deadlock.
    put(connection, table, [dict(zip(names, place + sums[place], strict=True)) for place in sorted(sums)], adds=True)


# ------------------------------------------------------------------------------------------------------ fold

_OVER: Final = 2  # hours after which an hour gets no more additions, except delayed ones
HOURLY: Final = 30 * 24  # hours that are kept apart; older ones are folded into days


def fold(connection: StoreConnection, now: int) -> bool:
    """Fold what one process added in an hour that is over; return False if nothing is left. `now` is hours since 1970.

    Exchanges wait meanwhile; it takes no longer than writing a few exchanges. Several processes may fold at once: only
    one of them deletes a row, and adds its sums to another row.
    """
    hour, slot = ROLLUPS.c.hour, ROLLUPS.c.slot
    old = (hour < now - HOURLY) & ((hour % 24 != 0) | (slot != 0))
    over = (hour < now - _OVER) & (slot != 0)
    due = connection.execute(select(hour, slot).where(old | over).limit(1)).one_or_none()
    if due is None:
        return False
    hold_sums(connection)
    found = delete(ROLLUPS).where(hour == due.hour, slot == due.slot).returning(*ROLLUPS.columns)
    gone = connection.execute(found).all()
    rows = [row._asdict() for row in gone]
    for row in rows:
        row["slot"] = 0
        if row["hour"] < now - HOURLY:
            row["hour"] -= row["hour"] % 24
    if rows:
        _add_rows(connection, ROLLUPS, rows)
    return True


_HOLD: Final = select(func.pg_advisory_xact_lock(0x70616C_73756D73))
"""The number identifies this lock; migrations use another one."""


def hold_sums(connection: StoreConnection) -> None:
    """Block other folding until the transaction ends. Otherwise a deletion could miss sums that are being moved."""
    if connection.dialect.name == "postgresql":  # SQLite has one writer
        connection.execute(_HOLD).all()


# ------------------------------------------------------------------------------------------------------ read


class StatsQuery(Struct, frozen=True, kw_only=True):
    """Which exchanges to sum up, and how."""

    since: int  # first hour, in hours since 1970
    until: int  # the hour after the last one
    group: Group
    tenant: str | None = None  # None: all tenants
    policy: str | None = None
    model: str | None = None
    session: str | None = None  # internal name of a session
    limit: int = 1000  # most groups: those with the most requests, or the newest days or hours


class StatsRow(Struct, frozen=True, kw_only=True):
    """The sums of one group."""

    group: str
    tenant: str | None  # the tenant, if the group is a session
    sessions: int  # number of sessions that are still stored and had requests in that time
    sums: dict[str, Any]  # by the names of `SUMS`


def stats(connection: StoreConnection, query: StatsQuery) -> list[StatsRow]:
    """Return the sums of each group, those with the most requests first. Days and hours are ordered by time."""
    by_session = query.group == "session" or query.session is not None
    table = SESSION_ROLLUPS if by_session else ROLLUPS
    group = _group(table, query.group)
    columns: list[Any] = [group.label("at"), *(func.sum(table.c[name]).label(name) for name in SUMS)]
    found = _within(select(*columns).group_by(group), table, query)
    timed = query.group in {"day", "hour"}
    order = [group.desc()] if timed else [func.sum(table.c.requests).desc(), group]
    if query.group == "session":  # there may be very many, so only those that are shown get all sums
        first = _within(select(group.label("at")).group_by(group), table, query).order_by(*order).limit(query.limit)
        found = found.where(group.in_(first.subquery().select()))
    rows = connection.execute(found.order_by(*order).limit(query.limit)).all()
    if query.group == "session":
        named = _sessions_named(connection, [row.at for row in rows])
        return [
            StatsRow(group=named[row.at][0], tenant=named[row.at][1], sessions=1, sums=_sums_of(row))
            for row in rows
            if row.at in named
        ]
    counts = _sessions_by(connection, query)
    made = [
        StatsRow(group=_shown(query.group, row.at), tenant=None, sessions=counts.get(row.at, 0), sums=_sums_of(row))
        for row in rows
    ]
    return made[::-1] if timed else made


def stats_and_total(connection: StoreConnection, query: StatsQuery) -> tuple[list[StatsRow], StatsRow]:
    """Return the sums of each group, and the total. If possible, the total is computed from the groups."""
    rows = stats(connection, query)
    if query.group == "session" or len(rows) >= query.limit:
        return rows, totals(connection, query)
    sums = {name: sum([row.sums[name] for row in rows], _NOTHING[name]) for name in SUMS}
    return rows, StatsRow(group="total", tenant=query.tenant, sessions=_sessions_in(connection, query), sums=sums)


def stats_by(connection: StoreConnection, query: StatsQuery, groups: Sequence[Group]) -> dict[Group, list[StatsRow]]:
    """Return the sums by each of several groupings, those with the most requests first. The rows are read only once.

    `groups` are names of columns of `rollups`, except `hour`.
    """
    columns = ROLLUPS.c
    sums = [func.sum(columns[name]).label(name) for name in SUMS]
    names = [columns[name] for name in groups]
    cells = _within(select(*names, *sums).group_by(*names), ROLLUPS, query).cte("cells")
    parts: list[Any] = []
    for name in groups:
        told = [literal(name).label("name"), cells.c[name].label("at")]
        parts.append(select(*told, *[func.sum(cells.c[each]).label(each) for each in SUMS]).group_by(cells.c[name]))
    found: dict[Group, list[StatsRow]] = {name: [] for name in groups}
    counts = {name: _sessions_by(connection, replace(query, group=name)) for name in groups}
    for row in connection.execute(union_all(*parts)):
        number = counts[row.name].get(row.at, 0)
        found[row.name].append(StatsRow(group=row.at, tenant=None, sessions=number, sums=_sums_of(row)))
    for rows in found.values():
        rows.sort(key=lambda row: (-row.sums["requests"], row.group))
    return {name: rows[: query.limit] for name, rows in found.items()}


def totals(connection: StoreConnection, query: StatsQuery) -> StatsRow:
    """Return the total over all groups."""
    table = SESSION_ROLLUPS if query.session is not None else ROLLUPS
    found = _within(select(*(func.sum(table.c[name]).label(name) for name in SUMS)), table, query)
    row = connection.execute(found).all()[0]
    return StatsRow(group="total", tenant=query.tenant, sessions=_sessions_in(connection, query), sums=_sums_of(row))


def _sessions_in(connection: StoreConnection, query: StatsQuery) -> int:
    return int(connection.execute(_asked_in(select(func.count()), query)).scalar_one_or_none() or 0)


def _asked_in(found: Any, query: StatsQuery) -> Any:
    """Limit a SELECT to the sessions that had requests in that time. A tenant's sessions are looked up one by one."""
    sums = replace(query, tenant=None, group="day")  # the session's own row has the tenant
    asked, key = _within(select(SESSION_ROLLUPS.c.session), SESSION_ROLLUPS, sums), SESSIONS.c.session
    if query.tenant is None:
        return found.select_from(SESSIONS).where(key.in_(asked))
    found = found.select_from(SESSIONS).where(asked.where(SESSION_ROLLUPS.c.session == key).exists())
    return found.where(SESSIONS.c.tenant == query.tenant)


def _sessions_by(connection: StoreConnection, query: StatsQuery) -> dict[Any, int]:
    """Return the number of sessions in each group."""
    if query.group == "miss":  # not stored by session
        return {}
    if query.group in {"tenant", "dialect"}:
        name = SESSIONS.c[query.group]
        found = _asked_in(select(name.label("at"), func.count().label("number")), query).group_by(name)
        return {row.at: int(row.number) for row in connection.execute(found)}
    group = _group(SESSION_ROLLUPS, query.group)
    inner = _within(select(group.label("at"), SESSION_ROLLUPS.c.session).distinct(), SESSION_ROLLUPS, query)
    pairs = inner.subquery()
    found = select(pairs.c.at, func.count().label("number")).group_by(pairs.c.at)
    return {row.at: int(row.number) for row in connection.execute(found)}


def _group(table: Table, group: Group) -> ColumnElement[Any]:
    if group == "day":  # literal, not a parameter: PostgreSQL must see the same expression in SELECT and GROUP BY
        return table.c.hour - table.c.hour % literal_column("24")
    if table is SESSION_ROLLUPS and group in {"tenant", "dialect"}:
        return SESSIONS.c[group]
    return table.c[group]


def _within(found: Any, table: Table, query: StatsQuery) -> Any:
    """Limit a SELECT to the query's exchanges. It is typed Any: the type of a SELECT depends on its columns."""
    found = found.where(table.c.hour >= query.since, table.c.hour < query.until)
    for name in ("policy", "model"):
        if (value := getattr(query, name)) is not None:
            found = found.where(table.c[name] == value)
    if table is SESSION_ROLLUPS:
        if query.session is not None:
            found = found.where(table.c.session == query.session)
        if query.tenant is not None or query.group in {"tenant", "dialect"}:
            found = found.join(SESSIONS, SESSIONS.c.session == table.c.session)
        if query.tenant is not None:
            found = found.where(SESSIONS.c.tenant == query.tenant)
    elif query.tenant is not None:
        found = found.where(table.c.tenant == query.tenant)
    return found


def _sessions_named(connection: StoreConnection, keys: Sequence[str]) -> dict[str, tuple[str, str]]:
    found = select(SESSIONS.c.session, SESSIONS.c.id, SESSIONS.c.tenant).where(SESSIONS.c.session.in_(keys))
    return {row.session: (row.id, row.tenant) for row in connection.execute(found)} if keys else {}


def _sums_of(row: Any) -> dict[str, Any]:
    values = row._asdict()
    # PostgreSQL returns sums as decimals.
    return {name: (float if name in _AMOUNTS else int)(values[name] or 0) for name in SUMS}


def _shown(group: Group, value: Any) -> str:
    if group not in {"day", "hour"}:
        return str(value)
    moment = datetime.fromtimestamp(int(value) * HOUR // 1000, UTC)
    return f"{moment:%Y-%m-%d}" if group == "day" else f"{moment:%Y-%m-%dT%H:00Z}"


# ----------------------------------------------------------------------------------------------------- budgets


def spent(connection: StoreConnection, tenant: str, since: int) -> float:
    """Return the dollars that a tenant spent since a time (milliseconds since 1970), rounded down to the hour."""
    of_tenant = (ROLLUPS.c.tenant == tenant, ROLLUPS.c.hour >= since // HOUR)
    found = select(func.sum(ROLLUPS.c.cost + ROLLUPS.c.cost_summaries)).where(*of_tenant)
    return float(connection.execute(found).scalar_one_or_none() or 0)


def spend(connection: StoreConnection, tenant: str, key: str, at: int, dollars: float) -> None:
    """Add dollars that were spent with a named key of a tenant at a time (milliseconds since 1970)."""
    row = {"tenant": tenant, "name": key, "day": at // (24 * HOUR), "dollars": dollars}
    put(connection, KEY_COSTS, [row], adds=True)


def spent_with(connection: StoreConnection, key: str, since: int) -> float:
    """Return the dollars that were spent with keys of this name since a time, rounded down to the day."""
    days = KEY_COSTS.c.day >= since // (24 * HOUR)
    found = select(func.sum(KEY_COSTS.c.dollars)).where(KEY_COSTS.c.name == key, days)
    return float(connection.execute(found).scalar_one_or_none() or 0)


def forget_tenant(connection: StoreConnection, tenant: str) -> None:
    """Delete the sums of a tenant."""
    hold_sums(connection)
    for table in (ROLLUPS, KEY_COSTS):
        connection.execute(delete(table).where(table.c.tenant == tenant))

"""Creates and lists sessions, and deletes them with all their data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, Final, Literal, TypeAlias

import orjson
from msgspec import Struct
from sqlalchemy import (
    BigInteger,
    ColumnElement,
    Executable,
    Integer,
    Table,
    and_,
    bindparam,
    cast,
    delete,
    func,
    or_,
    select,
    tuple_,
    update,
)

from proxy.conversation import ROOT
from proxy.store.database import Row, StoreConnection
from proxy.store.packing import encode_session
from proxy.store.records import Cursor, Opening, SessionRow, dialect_of, session_key
from proxy.store.schema import (
    HAS_FAILED,
    NODES,
    OF_A_SESSION,
    PENDING,
    PERIOD_MS,
    SESSION_ROLLUPS,
    SESSIONS,
    insert_into,
    insert_new,
    matching,
)

_SESSION: Final = select(SESSIONS).where(*matching(SESSIONS))
_NEWEST_VERSIONS: Final = select(SESSIONS.c.session, SESSIONS.c.instructions, SESSIONS.c.arrival).where(
    SESSIONS.c.session.in_(bindparam("keys", expanding=True))
)
# SQLite needs no locks: it has one writer.
_LOCKED: Final = _SESSION.with_for_update(key_share=True)
_LOCKED_TO_DELETE: Final = _SESSION.with_for_update()
_SEVERAL_TO_DELETE: Final = (
    select(SESSIONS.c.session)
    .where(SESSIONS.c.session.in_(bindparam("keys", expanding=True)))
    .order_by(SESSIONS.c.session)  # a common lock order avoids deadlocks
    .with_for_update()
)
_KEPT: Final = select(SESSIONS.c.instructions).where(*matching(SESSIONS)).with_for_update(read=True, key_share=True)
"""Locks a session against deletion, but not against settling."""

_EMPTY: Final[dict[str, Any]] = {
    column.name: None if column.nullable else 0 for column in SESSIONS.columns if column.computed is None
} | {"head": ROOT}
"""The columns of an empty session."""


REMOVED: Final = "removed"
"""The `arrival` of a session that is partly deleted or partly imported: it counts as absent, though some of its rows
exist. These are deleted before the session is created again. Only SQLite deletes and imports sessions in portions."""
IS_THERE: Final = SESSIONS.c.arrival.is_distinct_from(REMOVED)


class BeingRemoved(LookupError):
    """The session is partly deleted; its remaining rows must be deleted first."""


def session_of(connection: StoreConnection, key: str) -> SessionRow | None:
    """Return the session with this internal name."""
    row = connection.execute(_SESSION, {"key": key}).one_or_none()
    return None if row is None else there(session_in(row))


def standing_session(connection: StoreConnection, key: str) -> SessionRow | None:
    """Return the session with this internal name; raises `BeingRemoved` if it is partly deleted."""
    row = connection.execute(_SESSION, {"key": key}).one_or_none()
    if row is None:
        return None
    session = session_in(row)
    if there(session) is None:
        raise BeingRemoved
    return session


def there(session: SessionRow) -> SessionRow | None:
    """Return the session, or None if it is removed."""
    return None if session.arrival == REMOVED else session


def session_in(row: Row) -> SessionRow:
    """Return the session in a row that begins with the columns of `SESSIONS`."""
    values = dict(zip(SessionRow.__struct_fields__, row, strict=False))
    values["calls"] = decode_calls(values["calls"])
    return SessionRow(**values)


def locked_session(connection: StoreConnection, key: str) -> SessionRow | None:
    """Return the session, and lock it against settling and deletion until the transaction ends."""
    row = connection.execute(_LOCKED, {"key": key}).one_or_none()
    return None if row is None else there(session_in(row))


def sessions_named(connection: StoreConnection, session: str) -> list[SessionRow]:
    """Return the sessions with this id, of all tenants, ordered by tenant and dialect."""
    found = select(SESSIONS).where(SESSIONS.c.id == session, IS_THERE).order_by(SESSIONS.c.tenant, SESSIONS.c.dialect)
    return [session_in(row) for row in connection.execute(found)]


def open_sessions(connection: StoreConnection, openings: Sequence[Opening]) -> dict[str, str | None]:
    """Create the sessions of these requests if they do not exist, and lock them against deletion.

    Returns the version of each session's newest instructions, by its internal name.
    """
    new = new_sessions(openings)
    newest: dict[str, str | None] = {}
    if connection.dialect.name != "sqlite":
        for key in sorted(new, key=encode_session):  # a common lock order avoids deadlocks
            while (row := connection.execute(_KEPT, {"key": key}).one_or_none()) is None:
                insert_new(connection, SESSIONS, [new[key]])
            newest[key] = row.instructions
    elif new:  # the one writer needs no locks; nearly always the sessions exist
        for row in connection.execute(_NEWEST_VERSIONS, {"keys": list(new)}).all():
            if row.arrival == REMOVED:
                delete_session(connection, row.session)
            else:
                newest[row.session] = row.instructions
        insert_new(connection, SESSIONS, [row for key, row in new.items() if key not in newest])
    return newest


def new_sessions(openings: Iterable[Opening]) -> dict[str, dict[str, Any]]:
    """Return the initial rows of these requests' sessions, by their internal names."""
    new: dict[str, dict[str, Any]] = {}
    for opening in openings:
        key = session_key(opening.tenant, opening.session, opening.dialect)
        if key not in new:
            new[key] = _new(key, opening.tenant, opening.session, opening.created_at)
    return new


def create_session(connection: StoreConnection, key: str, tenant: str, session: str, at: int) -> bool:
    """Create an empty session; return False if it exists already."""
    try:
        standing_session(connection, key)
    except BeingRemoved:
        delete_session(connection, key)
    made = insert_into(connection.dialect.name, SESSIONS).on_conflict_do_nothing().returning(SESSIONS.c.session)
    return connection.execute(made, _new(key, tenant, session, at)).one_or_none() is not None


def delete_session(connection: StoreConnection, key: str) -> bool:
    """Delete the session with all its data; return whether it existed."""
    return delete_several(connection, [key]) > 0


def remove_some(connection: StoreConnection, key: str, most: int, *, begins: bool) -> bool | None:
    """Delete up to `most` rows of a session. From the first call on, the session counts as absent.

    Returns whether all rows are deleted, or None if there was no session. Unless the deletion `begins` with this call,
    a session that was created again meanwhile stays.
    """
    row = connection.execute(_LOCKED_TO_DELETE, {"key": key}).one_or_none()
    if row is None:
        return None if begins else True
    if not begins and there(session_in(row)) is not None:
        return True
    for table in OF_A_SESSION:
        gone = connection.execute(_deleting(table), {"key": key, "most": most}).all()
        most -= len(gone)
        if most <= 0:
            connection.execute(_REMOVE, {"the_session": key})
            return False
    return True


def remove_several(
    connection: StoreConnection, keys: Sequence[str], most: int, *, begins: bool = True
) -> list[bool | None]:
    """Delete sessions like `remove_some`. Stops after the first session that has more than `most` rows."""
    done: list[bool | None] = []
    for key in keys:
        done.append(remove_some(connection, key, most, begins=begins))
        if done[-1] is False:
            break
    return done


def delete_several(connection: StoreConnection, keys: Sequence[str]) -> int:
    """Delete sessions with all their data; return how many there were."""
    found = list(connection.execute(_SEVERAL_TO_DELETE, {"keys": keys}).scalars())
    if found:
        for table in OF_A_SESSION:
            connection.execute(delete(table).where(table.c.session.in_(found)))
    return len(found)


_REMOVE: Final = (
    update(SESSIONS).where(SESSIONS.c.session == bindparam("the_session")).values(arrival=REMOVED, model=None)
)


@cache
def _deleting(table: Table) -> Executable:
    name = list(table.primary_key.columns)
    some = select(*name).where(*matching(table)).limit(bindparam("most", type_=Integer))
    return delete(table).where(tuple_(*name).in_(some)).returning(table.c.session)


def _new(key: str, tenant: str, session: str, at: int) -> dict[str, Any]:
    """Return the row of an empty session."""
    named = {"session": key, "tenant": tenant, "id": session, "dialect": dialect_of(key).name}
    return _EMPTY | named | {"created_at": at, "updated_at": at}


def encode_calls(names: tuple[str, ...]) -> str | None:
    """Encode names for their column."""
    return orjson.dumps(names).decode() if names else None


def decode_calls(text: str | None) -> tuple[str, ...]:
    """Decode the names in a column."""
    return () if text is None else tuple(orjson.loads(text))


# ---------------------------------------------------------------------------------------------------- lists

Sort: TypeAlias = Literal["newest", "largest", "dearest", "saved"]

_NANO: Final = 1_000_000_000  # dollars are compared in billionths
_AT_ONCE: Final = 100  # sessions of a tenant, or sessions to delete, per batch
_FEW: Final = 2_000  # fewer sessions with errors than this are listed by name in the query


class SessionListQuery(Struct, frozen=True, kw_only=True):
    """Which sessions to list, and in what order."""

    tenant: str | None = None  # None: all tenants
    sort: Sort = "newest"
    since: int | None = None  # last used at this time or later, in milliseconds since 1970
    until: int | None = None  # last used before this time
    min_tokens: int = 0
    model: str | None = None
    key: str | None = None  # the internal name of one session
    name: str | None = None  # a part of the session's id
    agent: str | None = None  # an agent that spoke in the session
    failed: bool = False  # whether the session must have requests that failed or broke off
    limit: int = 50
    after: str | None = None  # the cursor of the previous page


class ListedSession(Struct, frozen=True, kw_only=True):
    """A session, and what trimming saved in it."""

    row: SessionRow
    cost_saved: float | None  # dollars; None if no price was known


def list_sessions(connection: StoreConnection, query: SessionListQuery) -> tuple[list[ListedSession], str | None]:
    """Return a page of sessions with their savings, and the cursor of the next page."""
    page, following = page_of_sessions(connection, query)
    sums = _saved().where(SESSION_ROLLUPS.c.session.in_([row.key for row in page]))
    saved = {row.session: float(row.saved) for row in (connection.execute(sums) if page else ()) if row.priced}
    return [ListedSession(row=row, cost_saved=saved.get(row.key)) for row in page], following


def page_of_sessions(connection: StoreConnection, query: SessionListQuery) -> tuple[list[SessionRow], str | None]:
    """Return a page of sessions, and the cursor of the next page."""
    found = _ordered(query)
    if query.failed:
        found = found.where(_has_failed(connection))
    rows = connection.execute(found.limit(query.limit + 1)).all()
    page = rows[: query.limit]
    following = str(Cursor(time=int(page[-1].place), name=page[-1].session)) if len(rows) > query.limit else None
    return list(map(session_in, page)), following


def _ordered(query: SessionListQuery) -> Any:
    """Return the query for the sessions in order, with the sort value of each as `place`."""
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
        if place is SESSIONS.c.updated_at:  # `period` is the first column of the index
            found = found.where(SESSIONS.c.period <= last.time // PERIOD_MS)
    return found


def _like(query: SessionListQuery) -> Iterator[ColumnElement[bool]]:
    """Yield the conditions for a session's name and agents."""
    if query.name is not None:
        yield SESSIONS.c.id.icontains(query.name, autoescape=True)
    if query.agent is not None:
        spoke = select(NODES.c.node).where(NODES.c.session == SESSIONS.c.session, NODES.c.agent == query.agent)
        yield spoke.exists()


def _has_failed(connection: StoreConnection) -> ColumnElement[bool]:
    """Return the condition for sessions with failed requests. If these are few, they are listed by name."""
    failed = select(SESSION_ROLLUPS.c.session).where(HAS_FAILED)
    few = list(connection.execute(failed.distinct().limit(_FEW)).scalars())
    if len(few) < _FEW:
        return SESSIONS.c.session.in_(few)
    return failed.where(SESSION_ROLLUPS.c.session == SESSIONS.c.session).exists()


def _saved() -> Any:
    saved, priced = func.sum(SESSION_ROLLUPS.c.cost_saved), func.sum(SESSION_ROLLUPS.c.priced)
    columns = (SESSION_ROLLUPS.c.session, saved.label("saved"), priced.label("priced"))
    return select(*columns).group_by(SESSION_ROLLUPS.c.session)


# --------------------------------------------------------------------------------------------------- retention


def sessions_to_delete(connection: StoreConnection, *, before: int | None, most: int | None) -> Sequence[str]:
    """Return the internal names of some sessions that were last used before `before`, or in excess of `most`.

    Sessions with a pending exchange are in use. For `before`, only exchanges that began at that time or later count.
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
    """Return the next internal names, in order, of a tenant's sessions: those after `after`."""
    found = select(SESSIONS.c.session).where(SESSIONS.c.tenant == tenant)
    if after is not None:
        found = found.where(SESSIONS.c.session > after)
    return list(connection.execute(found.order_by(SESSIONS.c.session).limit(_AT_ONCE)).scalars())


_MAKING_MS: Final = 600_000  # an import without progress for so many milliseconds was interrupted


def removed_sessions(connection: StoreConnection, at: int) -> Sequence[str]:
    """Return the internal names of sessions that are partly deleted, except those that are being imported."""
    columns = (SESSIONS.c.session, SESSIONS.c.model, SESSIONS.c.updated_at)
    rows = connection.execute(select(*columns).where(SESSIONS.c.arrival == REMOVED)).all()
    return [row.session for row in rows if row.model is None or row.updated_at < at - _MAKING_MS]

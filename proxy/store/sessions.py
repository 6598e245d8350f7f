"""The rows of sessions: found, listed, locked, deleted; and the secrets of the installation.

Each function is a unit of work.
"""

from __future__ import annotations

import secrets
from functools import cache
from typing import Any, Final, cast

from sqlalchemy import Executable, bindparam, delete, select, tuple_
from sqlalchemy.dialects import postgresql

from proxy.conversation import ROOT
from proxy.store.database import Connection, Row
from proxy.store.records import Cursor, SessionRow
from proxy.store.schema import OF_A_SESSION, SECRETS, SESSIONS, insert_into, insert_new
from proxy.store.tree import decode_calls

_ONE: Final = select(SESSIONS).where(SESSIONS.c.session == bindparam("key"))
_NEWEST: Final = select(SESSIONS.c.instructions).where(SESSIONS.c.session == bindparam("key"))
_LOCKED: Final = _ONE.with_for_update()  # SQLite leaves it out: its one writer holds all


_COLUMNS: Final = len(SESSIONS.columns)
_EMPTY: Final[dict[str, Any]] = {column.name: None if column.nullable else 0 for column in SESSIONS.columns} | {
    "head": ROOT
}
"""What a session that holds nothing has in its columns."""


def session_of(connection: Connection, key: str) -> SessionRow | None:
    """Return the session with this internal name."""
    row = connection.execute(_ONE, {"key": key}).one_or_none()
    return None if row is None else _session(row)


def session_in(row: Row) -> SessionRow:
    """Return the session in a row that begins with the columns of `SESSIONS`."""
    return _session(row[:_COLUMNS])


def locked_session(connection: Connection, key: str) -> SessionRow | None:
    """Return the session as it is now, and keep other writers from it until the transaction ends."""
    row = connection.execute(_LOCKED, {"key": key}).one_or_none()
    return None if row is None else _session(row)


def sessions_named(connection: Connection, session: str) -> list[SessionRow]:
    """Return the sessions with this id, whoever owns them, by owner."""
    found = select(SESSIONS).where(SESSIONS.c.id == session).order_by(SESSIONS.c.tenant)
    return [_session(row) for row in connection.execute(found)]


def sessions_page(
    connection: Connection, tenant: str | None, limit: int, after: Cursor | None
) -> tuple[list[SessionRow], str | None]:
    """Return up to `limit` sessions, the last changed first, and the cursor of the next ones."""
    found = select(SESSIONS).order_by(SESSIONS.c.updated_at.desc(), SESSIONS.c.session.desc()).limit(limit + 1)
    if tenant is not None:
        found = found.where(SESSIONS.c.tenant == tenant)
    if after is not None:
        found = found.where(tuple_(SESSIONS.c.updated_at, SESSIONS.c.session) < (after.time, after.name))
    rows = [_session(row) for row in connection.execute(found)]
    if len(rows) <= limit:
        return rows, None
    last = rows[limit - 1]
    return rows[:limit], str(Cursor(time=last.updated_at, name=last.key))


def open_session(connection: Connection, key: str, tenant: str, session: str, at: int) -> str | None:
    """Make the session where there is none, and lock it as `locked_session` does.

    Returns:
        The version of its newest instructions.
    """
    if connection.dialect.name == "sqlite":  # the one writer holds all, and nearly always it is there
        found = connection.execute(_NEWEST, {"key": key}).one_or_none()
        if found is not None:
            return cast("str | None", found.instructions)
    made = connection.execute(_open(connection.dialect.name), _new(key, tenant, session, at))
    return cast("str | None", made.scalar_one_or_none())


def create_session(connection: Connection, key: str, tenant: str, session: str, at: int) -> bool:
    """Make a session that holds nothing yet; return whether there was none."""
    made = insert_into(connection.dialect.name, SESSIONS).on_conflict_do_nothing().returning(SESSIONS.c.session)
    return connection.execute(made, _new(key, tenant, session, at)).one_or_none() is not None


def delete_session(connection: Connection, key: str) -> bool:
    """Delete the session with everything it has; return whether there was one."""
    if locked_session(connection, key) is None:
        return False
    for table in OF_A_SESSION:
        connection.execute(delete(table).where(table.c.session == key))
    return True


@cache
def _open(dialect: str) -> Executable:
    insert = insert_into(dialect, SESSIONS)
    if isinstance(insert, postgresql.Insert):
        # A row is locked by what writes to it, even if that is what was there. No index sees a change.
        return insert.on_conflict_do_update(
            index_elements=[SESSIONS.c.session], set_={"arrival": SESSIONS.c.arrival}
        ).returning(SESSIONS.c.instructions)
    return insert.returning(SESSIONS.c.instructions)


def _new(key: str, tenant: str, session: str, at: int) -> dict[str, Any]:
    """Return the row of a session that holds nothing yet."""
    return _EMPTY | {"session": key, "tenant": tenant, "id": session, "created_at": at, "updated_at": at}


def _session(row: Row) -> SessionRow:
    values = dict(zip(SessionRow.__struct_fields__, row, strict=True))
    values["calls"] = decode_calls(values["calls"])
    return SessionRow(**values)


# ---------------------------------------------------------------------------------------------------- secrets

_BYTES: Final = 32


def secret_of(connection: Connection, name: str) -> bytes | None:
    """Return the secret with this name, 32 bytes."""
    found: str | None = connection.execute(select(SECRETS.c.value).where(SECRETS.c.name == name)).scalar_one_or_none()
    return None if found is None else bytes.fromhex(found)


def make_secret(connection: Connection, name: str) -> bytes:
    """Return the secret with this name, a new one where there is none."""
    fresh = secrets.token_bytes(_BYTES)
    insert_new(connection, SECRETS, [{"name": name, "value": fresh.hex()}])
    return secret_of(connection, name) or fresh

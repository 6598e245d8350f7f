"""Which errors of a database mean that it cannot be used now, and what to do about each.

Everything else (a wrong statement, a broken rule of the schema) is an error of this program and stays one.
The driver's own words may hold addresses and paths: they go to the log, never to a client.
"""

from __future__ import annotations

import logging
import sqlite3
from collections.abc import Generator
from contextlib import contextmanager
from typing import Final

from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from proxy.errors import StoreUnavailable

_LOG: Final = logging.getLogger("palimpsest.store")

_MIGRATE: Final = "Its tables are missing or old: run `palimpsest upgrade`, or set store.migrate to true."

_SQLITE: Final = {
    sqlite3.SQLITE_BUSY: "Another process holds its lock: look for one that stands still in a write.",
    sqlite3.SQLITE_LOCKED: "Another connection holds a lock: look for one that stands still in a write.",
    sqlite3.SQLITE_FULL: "The disk is full: make room.",
    sqlite3.SQLITE_IOERR: "The disk cannot be read or written: look at the system's log.",
    sqlite3.SQLITE_CANTOPEN: "The file cannot be opened: look at its folder and at who may write there.",
    sqlite3.SQLITE_READONLY: "The file or its folder cannot be written: look at who may write there.",
    sqlite3.SQLITE_PERM: "The file cannot be used by this user: look at who may write there.",
    sqlite3.SQLITE_CORRUPT: "The file is damaged: put back a copy.",
    sqlite3.SQLITE_NOTADB: "The file is no SQLite database: name another one in store.url.",
    sqlite3.SQLITE_NOMEM: "There is no memory left.",
    sqlite3.SQLITE_PROTOCOL: "Its lock could not be had: the file must be on a disk of this machine.",
}
"""By SQLite's primary result code."""

_POSTGRES: Final = {
    "08": "The connection failed: look at whether the server runs and can be reached.",
    "25006": "The server is read-only (a standby?): name the primary in store.url.",
    "28": "The server refused the user: look at user and password in store.url.",
    "3D": "There is no such database: create it, or name another one in store.url.",
    "40": "The transaction met another one again and again.",
    "42501": "The user may not do this: grant it the tables.",
    "42P01": _MIGRATE,
    "42703": _MIGRATE,
    "53": "The server has no connections, memory or disk left.",
    "55P03": "A lock could not be had in time: look for a transaction that stands still.",
    "57": "The server stops, or stopped the statement.",
    "58": "The server has trouble with its disk or system: look at its log.",
}
"""By the beginning of PostgreSQL's SQLSTATE."""

_TRY_AGAIN: Final = frozenset({"40001", "40P01"})


@contextmanager
def translated() -> Generator[None]:
    """Raise `StoreUnavailable` in place of what means just that; let every other error through."""
    try:
        yield
    except Exception as why:
        failure = unavailable(why)
        if failure is None:
            raise
        raise failure from why


def unavailable(error: BaseException) -> StoreUnavailable | None:
    """Return what to raise in place of `error`; None where it is an error of this program."""
    if isinstance(error, PoolTimeout):
        return _with(
            "Every connection to it is in use: look for slow queries, or for one that stands still.", error
        )
    if isinstance(error, DBAPIError):
        cause: BaseException | None = error.orig
        if error.connection_invalidated:
            return _with(_POSTGRES["08"], cause or error)
        return None if cause is None else unavailable(cause)
    if isinstance(error, sqlite3.Error):
        return _sqlite(error)
    if isinstance(error, OSError):  # TimeoutError and the failures of sockets among them
        return _with(_POSTGRES["08"], error)
    state = sqlstate(error)
    if state is not None:
        advice = _POSTGRES.get(state) or _POSTGRES.get(state[:2])
        return None if advice is None else _with(advice, error)
    if _is_failed_connection(error):
        return _with(_POSTGRES["08"], error)
    return None


def is_worth_another_try(error: BaseException) -> bool:
    """Tell whether the server ended the transaction only because of another one."""
    return isinstance(error, DBAPIError) and error.orig is not None and sqlstate(error.orig) in _TRY_AGAIN


def sqlstate(error: BaseException) -> str | None:
    """Return PostgreSQL's code of a driver's error (or SQLAlchemy's form of it); None where it has none."""
    state = getattr(error, "sqlstate", None)
    return state if isinstance(state, str) else None


def _sqlite(error: sqlite3.Error) -> StoreUnavailable | None:
    code = getattr(error, "sqlite_errorcode", None)
    if not isinstance(code, int):
        return None
    if code == sqlite3.SQLITE_ERROR and str(error).startswith(("no such table", "no such column")):
        return _with(_MIGRATE, error)
    advice = _SQLITE.get(code & 0xFF)
    return None if advice is None else _with(advice, error)


def _is_failed_connection(error: BaseException) -> bool:
    """Tell whether a driver gave up a connection without a code of the server's.

    psycopg cannot connect: `OperationalError`; asyncpg loses a connection: `InterfaceError`, which
    it raises for wrong use too. The drivers are optional, so they are known by name.
    """
    kind = type(error)
    return (
        kind.__module__.partition(".")[0] in {"psycopg", "asyncpg"} and kind.__name__ == "OperationalError"
    ) or (kind.__name__ == "InterfaceError" and "clos" in str(error))


def _with(advice: str, cause: BaseException) -> StoreUnavailable:
    """Return what the client hears, and log what the driver said."""
    said = str(cause).strip().partition("\n")[0]
    _LOG.warning("the store cannot be used: %s: %s", type(cause).__name__, said or "no more is known")
    return StoreUnavailable(f"The store cannot be used. {advice}")

"""What a store's URL says: which database, where, and how to reach it. It connects to nothing."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeAlias
from uuid import uuid4

from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from proxy.errors import ConfigurationError

_CONNECT_SECONDS: Final = 10
_ALLOWED: Final = (
    "It can be: sqlite+aiosqlite:///FILE, postgresql+asyncpg://USER:PASSWORD@HOST/DATABASE, "
    "postgresql+psycopg://USER:PASSWORD@HOST/DATABASE."
)
_POSTGRES_DRIVERS: Final = {
    "postgres": "asyncpg",
    "postgresql": "asyncpg",
    "postgresql+asyncpg": "asyncpg",
    "postgresql+psycopg": "psycopg",
    "postgresql+psycopg_async": "psycopg",
}
_POOLED: Final = "statement_cache_size"


@dataclass(frozen=True, slots=True)
class SqliteFile:
    """A database in one file of this machine."""

    path: Path


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A database on a PostgreSQL server."""

    url: URL
    """With the driver that is used."""
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Arguments of the driver's `connect`."""


Address: TypeAlias = SqliteFile | PostgresServer


def address_of(url: str) -> Address:
    """Read a store's URL. The password in it never gets into a message.

    Behind PgBouncer or another pool that shares connections between transactions, add
    `?statement_cache_size=0`: prepared statements do not survive there.

    Raises:
        ConfigurationError: it is no URL, or of a database that is not supported.
    """
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError) as why:
        raise ConfigurationError(f"store.url is no database URL. {_ALLOWED}") from why
    if parsed.get_backend_name() == "sqlite":
        return _sqlite(parsed)
    driver = _POSTGRES_DRIVERS.get(parsed.drivername)
    if driver is None:
        raise ConfigurationError(f"store.url names {parsed.drivername!r}, which is not supported. {_ALLOWED}")
    return _asyncpg(parsed) if driver == "asyncpg" else _psycopg(parsed)


def _sqlite(parsed: URL) -> SqliteFile:
    """Any driver may be named: the writer thread is ours, and speaks to SQLite itself."""
    if parsed.query:
        raise ConfigurationError(
            f"store.url has options ({', '.join(parsed.query)}); a SQLite file takes none. {_ALLOWED}"
        )
    if parsed.host or not parsed.database or parsed.database.startswith((":memory:", "file:")):
        raise ConfigurationError(
            "store.url must name a SQLite file after three slashes (four for an absolute path): "
            "sqlite+aiosqlite:///palimpsest.db. A database in memory cannot be shared by reader and writer."
        )
    return SqliteFile(Path(parsed.database))


def _asyncpg(parsed: URL) -> PostgresServer:
    query = dict(parsed.query)
    options: dict[str, Any] = {"timeout": _CONNECT_SECONDS}
    if "sslmode" in query:
        options["ssl"] = query.pop("sslmode")  # libpq's word, in every hosted database's URL
    if _POOLED in query:
        options[_POOLED] = options["prepared_statement_cache_size"] = _number(query.pop(_POOLED))
        # The server connection may have been another client's a moment ago: no name may be taken twice.
        options["prepared_statement_name_func"] = _unique_statement_name
    return PostgresServer(parsed.set(drivername="postgresql+asyncpg", query=query), options)


def _psycopg(parsed: URL) -> PostgresServer:
    query = dict(parsed.query)
    options: dict[str, Any] = {"connect_timeout": _CONNECT_SECONDS}
    if _POOLED in query and _number(query.pop(_POOLED)) == 0:
        options["prepare_threshold"] = None
    return PostgresServer(parsed.set(drivername="postgresql+psycopg", query=query), options)


def _unique_statement_name() -> str:
    return f"palimpsest_{uuid4().hex}"


def _number(value: str | tuple[str, ...]) -> int:
    if isinstance(value, str) and value.isdecimal():
        return int(value)
    raise ConfigurationError(f"store.url: {_POOLED} must be a number; 0 switches prepared statements off.")

"""What a store's URL says: which database, where, and how to reach it. It connects to nothing."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, Final, TypeAlias
from uuid import uuid4

from msgspec import Struct
from sqlalchemy import URL, make_url

from proxy.config import POSTGRES_DRIVERS, STATEMENT_CACHE, store_url
from proxy.errors import ConfigurationError

_CONNECT_SECONDS: Final = 10


class SqliteFile(Struct, frozen=True, kw_only=True):
    """A database in one file of this machine."""

    path: Path


class PostgresServer(Struct, frozen=True, kw_only=True):
    """A database on a PostgreSQL server."""

    url: URL
    """With the driver that is used."""
    options: dict[str, Any] = {}
    """Arguments of the driver's `connect`."""


Address: TypeAlias = SqliteFile | PostgresServer


def address_of(url: str) -> Address:
    """Read a store's URL. The password in it never gets into a message.

    Behind PgBouncer or another pool that shares connections between transactions, add
    `?statement_cache_size=0`: prepared statements do not survive there.

    Raises:
        ConfigurationError: it is no URL of a supported database, or its driver is not installed.
    """
    try:
        parsed = make_url(store_url(url))
    except ValueError as why:
        raise ConfigurationError(f"store.url: {why}.") from why
    driver = POSTGRES_DRIVERS.get(parsed.drivername)
    if driver is None:
        # Any driver may be named: the writer thread is ours, and speaks to SQLite itself.
        return SqliteFile(path=Path(parsed.database or ""))
    return _asyncpg(parsed) if driver == "asyncpg" else _psycopg(parsed)


def _asyncpg(parsed: URL) -> PostgresServer:
    query = dict(parsed.query)
    options: dict[str, Any] = {"timeout": _CONNECT_SECONDS}
    if "sslmode" in query:
        options["ssl"] = query.pop("sslmode")  # libpq's word, in every hosted database's URL
    size = _statement_cache(query)
    if size is not None:
        options["statement_cache_size"] = options["prepared_statement_cache_size"] = size
        # The server connection may have been another client's a moment ago: no name may be taken twice.
        options["prepared_statement_name_func"] = _unique_statement_name
    return PostgresServer(url=parsed.set(drivername="postgresql+asyncpg", query=query), options=options)


def _psycopg(parsed: URL) -> PostgresServer:
    try:
        import_module("psycopg")
    except ImportError as why:
        raise ConfigurationError(
            "store.url names psycopg, which is not installed (or cannot be loaded): "
            "pip install 'palimpsest[psycopg]', or name no driver (postgresql://…) to use asyncpg."
        ) from why
    query = dict(parsed.query)
    options: dict[str, Any] = {"connect_timeout": _CONNECT_SECONDS}
    if _statement_cache(query) == 0:
        options["prepare_threshold"] = None
    return PostgresServer(url=parsed.set(drivername="postgresql+psycopg", query=query), options=options)


def _statement_cache(query: dict[str, Any]) -> int | None:
    """Take our own option out of a query; `store_url` has seen that it is a number."""
    size = query.pop(STATEMENT_CACHE, None)
    return None if size is None else int(size)


def _unique_statement_name() -> str:
    return f"palimpsest_{uuid4().hex}"

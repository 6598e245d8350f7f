"""Creates and migrates the tables with Alembic. Any number of processes may do so at the same time.

Alembic is synchronous and keeps its state in module globals, so it runs in a thread, one run at a time. A database lock
keeps runs of several processes apart. Each run is one transaction. Alembic is imported only if there is something to
migrate, because a serving process would keep it in memory.

Sessions of the old layout are moved between two migrations, in many transactions (see `convert`).
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import sqlite3
import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Final, Literal, TypeAlias, cast

from sqlalchemy import Connection as Engaged
from sqlalchemy import NullPool, text
from sqlalchemy.exc import DBAPIError

from proxy.errors import StoreUnavailable
from proxy.store import convert
from proxy.store.database import (
    PostgresServer,
    Result,
    SqliteFile,
    StoreConnection,
    address_of,
    log_seldom,
    outage_of,
    said,
    translated,
)
from proxy.store.schema import METADATA, SECRETS, put
from proxy.store.search import drop_index, make_index
from proxy.store.sqlite import connect, create_file, sqlite_engine

if TYPE_CHECKING:
    from alembic.config import Config

_COMPACT: Final = "0013"
"""The migration that renames the tables of the old layout."""

_LOG: Final = logging.getLogger("palimpsest.store")
_PACKAGE: Final = Path(__file__).resolve().parent.parent
_INSTALLED: Final = _PACKAGE / "_migrations"
_CHECKOUT: Final = _PACKAGE.parent / "migrations"
_FOLDER: Final = _INSTALLED if _INSTALLED.is_dir() else _CHECKOUT

REVISION: Final = max([path.name[:4] for path in (_FOLDER / "versions").glob("[0-9]*.py")], default="")
"""The newest migration, which this version of the program needs."""

_LOCK_KEY: Final = 0x70616C696D707365  # key of the PostgreSQL advisory lock ("palimpse" in ASCII)
_TURN: Final = "300s"  # timeout for another process's migration
_TABLE_LOCK: Final = "10s"  # timeout of a migration for a table lock: all other statements queue behind it

_HAS_TABLES: Final = {
    "sqlite": text("SELECT name FROM sqlite_master WHERE name = 'alembic_version'"),
    "postgresql": text("SELECT to_regclass('alembic_version')::text"),
}
"""By dialect; the result is empty or NULL if no migration ever ran."""
_ENCODING: Final = text("SHOW server_encoding")
_REVISION: Final = text("SELECT version_num FROM alembic_version")
_ANY_SESSION: Final = text("SELECT 1 FROM sessions LIMIT 1")
_SIZE: Final = {
    "sqlite": text("SELECT page_count * page_size FROM pragma_page_count(), pragma_page_size()"),
    "postgresql": text(
        "SELECT coalesce(sum(pg_total_relation_size(oid)), 0) FROM pg_class "
        "WHERE relkind = 'r' AND relnamespace = current_schema()::regnamespace"
    ),
}

_SHORT_WAIT: Final = text("SET LOCAL lock_timeout = '500ms'")
_LOCK_ALL: Final = text(f"LOCK TABLE {', '.join(METADATA.tables)} IN ROW EXCLUSIVE MODE")
"""Takes the lock that every write takes on its table. It is granted at once unless somebody has locked the table."""
_READ_ALL: Final = text(" UNION ALL ".join(f"SELECT 1 FROM {table} WHERE false" for table in METADATA.tables))  # noqa: S608 - our own names
"""Reads no rows, but fails without the right to read each table."""

_ONE_AT_A_TIME: Final = threading.Lock()


MOST_BYTES: Final = 1_000_000_000
"""Largest store of the old layout that is converted at a start. A larger one would delay the start for too long."""
_PART_NEEDED: Final = 0.6  # extra disk space during the conversion, as a part of the store's size
_STEP_SECONDS: Final = 2.0
"""Approximate time of one transaction of the conversion, and so the most work that a kill loses."""

Progress: TypeAlias = Callable[[int, int], None]
"""Called with the number of converted sessions and the total."""


async def upgrade(
    url: str, revision: str = "head", *, most: int | None = None, progress: Progress | None = None
) -> None:
    """Migrate the tables to `revision`. Does nothing if they have that revision.

    Raises `StoreUnavailable`, without any change, for a store of the old layout of more than `most` bytes.
    """
    if revision == "head" and await asyncio.to_thread(_run, url, _is_old):
        await _convert(url, most, progress or partial(_LOG.info, "converted: %d of %d sessions"))
    await asyncio.to_thread(_run, url, partial(_upgrade, revision))


async def _convert(url: str, most: int | None, progress: Progress) -> None:
    """Move every session out of the tables of the old layout."""
    size = await asyncio.to_thread(_run, url, _size)
    needed = f"It is {size / 1e6:,.0f} MB large and needs {size * _PART_NEEDED / 1e6:,.0f} MB of disk besides"
    if most is not None and size > most:
        raise StoreUnavailable(
            f"The store has the layout of an older version, and is too large to be converted at a start. {needed}: "
            "make a copy, stop every process that uses it, and run `palimpsest upgrade`."
        )
    address = address_of(url)
    if isinstance(address, SqliteFile) and shutil.disk_usage(address.path.parent).free < size * _PART_NEEDED:
        raise StoreUnavailable(f"The store cannot be converted. {needed}, which is not free: make room.")
    _LOG.warning("the store is converted to a more compact layout; stopped, it goes on at the next start. %s.", needed)
    total = await asyncio.to_thread(_run, url, _put_aside)
    remaining = total
    while remaining:
        progress(total - remaining, total)
        remaining = await asyncio.to_thread(_run, url, _convert_step)
    progress(total, total)
    await asyncio.to_thread(_run, url, partial(_upgrade, "head"))
    if isinstance(address, SqliteFile):
        await asyncio.to_thread(_give_room_back, address.path)


async def downgrade(url: str, revision: str) -> None:
    """Migrate the tables back to `revision`. `base` drops them with all their rows."""
    await asyncio.to_thread(_run, url, drop_index)  # it can be rebuilt
    await asyncio.to_thread(_run, url, partial(_alembic, "downgrade", revision))


async def make_search_index(url: str) -> None:
    """Create the tables of the full-text index, if they do not exist."""
    await asyncio.to_thread(_run, url, make_index)


def current(connection: StoreConnection) -> str | None:
    """Return the revision of the tables in the database, or None if there are none."""
    found: str | None = None
    if connection.execute(_HAS_TABLES[connection.dialect.name]).scalar_one_or_none() is not None:
        found = connection.execute(_REVISION).scalar_one_or_none()
    return found


def require_current(found: str | None) -> None:
    """Raise `StoreUnavailable` if the tables' revision, `found`, is not the one that this version needs."""
    if found is not None and found > REVISION:
        raise StoreUnavailable(
            f"The store cannot be used. A newer version made its tables: they are at revision {found}, not {REVISION}. "
            f"Start that version, or run its `palimpsest downgrade {REVISION}`."
        )
    if found != REVISION:
        raise StoreUnavailable(
            f"The store cannot be used. Its tables are at revision {found or 'none'}, not {REVISION}: "
            "run `palimpsest upgrade` with this version, or start the version that they belong to."
        )


def probe(connection: StoreConnection) -> None:
    """Read the revision and write a row; raises `StoreUnavailable` if the tables have another revision.

    The row is in `secrets`, so no session is touched.
    """
    if connection.dialect.name == "postgresql":
        connection.execute(_SHORT_WAIT)
    require_current(current(connection))
    if connection.dialect.name == "postgresql":
        connection.execute(_LOCK_ALL)
        connection.execute(_READ_ALL)
    put(connection, SECRETS, [{"name": "probe", "value": token_hex(8)}])


def config() -> Config:
    """Return Alembic's configuration, with the folder of the migrations in the checkout or the installed package."""
    from alembic.config import Config  # noqa: PLC0415

    found = Config()
    found.set_main_option("script_location", str(_FOLDER).replace("%", "%%"))
    return found


def _is_old(connection: Engaged) -> bool:
    """Tell whether the store has the old layout, and sessions to convert or a conversion to finish."""
    reading = cast("StoreConnection", connection)
    found = current(reading)
    if found is None or found > _COMPACT:
        return False
    if found == _COMPACT:
        return True
    return connection.execute(_ANY_SESSION).one_or_none() is not None


def _size(connection: Engaged) -> int:
    """Return the size of the store in bytes."""
    return int(connection.execute(_SIZE[connection.dialect.name]).scalar_one())


def _put_aside(connection: Engaged) -> int:
    """Rename the tables of the old layout, if that is not done; return how many sessions they have."""
    found = current(cast("StoreConnection", connection))
    if found is not None and found < _COMPACT:
        _alembic("upgrade", _COMPACT, connection)
    return _left(connection)


def _left(connection: Engaged) -> int:
    """Return how many sessions remain to be moved; 0 if another process has dropped the old tables."""
    is_compact = current(cast("StoreConnection", connection)) == _COMPACT
    return convert.left(cast("StoreConnection", connection)) if is_compact else 0


def _convert_step(connection: Engaged) -> int:
    """Move some sessions; return how many remain."""
    if _left(connection):
        with _explained():
            convert.convert_some(cast("StoreConnection", connection), _STEP_SECONDS)
    return _left(connection)


def _give_room_back(path: Path) -> None:
    """Shrink the file to the size of its content, unless another connection uses it."""
    with suppress(sqlite3.Error), closing(connect(path)) as connection:
        connection.execute("VACUUM")
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")


def _upgrade(revision: str, connection: Engaged) -> None:
    # SQLAlchemy's connection satisfies `StoreConnection`; its overloads hide that from one of the type checkers.
    found = current(cast("StoreConnection", connection))
    if found is None and connection.dialect.name == "postgresql":
        _require_unicode(connection)
    if revision != "head" or found != REVISION:
        _alembic("upgrade", revision, connection)


def _require_unicode(connection: Engaged) -> None:
    """Raise `StoreUnavailable` if the database's encoding cannot represent all names of sessions and models."""
    encoding = connection.execute(_ENCODING).scalar_one()
    if encoding not in {"UTF8", "SQL_ASCII"}:
        raise StoreUnavailable(
            f"The store cannot be made. The encoding of its database is {encoding}, which lacks most characters: name "
            "another database in store.url, made by CREATE DATABASE … TEMPLATE template0 ENCODING 'UTF8'."
        )


def _alembic(action: Literal["upgrade", "downgrade"], revision: str, connection: Engaged) -> None:
    from alembic import command  # noqa: PLC0415
    from alembic.util import CommandError  # noqa: PLC0415

    settings = config()
    settings.attributes["connection"] = connection
    try:
        with _explained():
            {"upgrade": command.upgrade, "downgrade": command.downgrade}[action](settings, revision)
    except CommandError as why:
        raise StoreUnavailable(
            f"The store cannot be migrated: {why}. If a newer version of this program made its tables, start that one, "
            f"or run its `palimpsest downgrade {REVISION}`."
        ) from why


@contextmanager
def _explained() -> Generator[None]:
    """Raise `StoreUnavailable` for errors of the database, and log its message."""
    try:
        yield
    except DBAPIError as why:
        advice, cause = outage_of(why) or ("The log says what the database refused.", why.orig or why)
        if "already exists" in str(cause):
            advice = "It has a table of another program: name a database of its own in store.url."
        log_seldom(logging.ERROR, f"the store cannot be migrated: {said(cause)}")
        raise StoreUnavailable(
            f"The store cannot be migrated. {advice} Nothing is lost: the step was undone, and is tried again at the "
            "next start."
        ) from why


def _run(url: str, migration: Callable[[Engaged], Result]) -> Result:
    address = address_of(url)
    with _ONE_AT_A_TIME, translated():
        if isinstance(address, SqliteFile):
            create_file(address.path)
            # The transaction is the lock, because SQLite allows one writer.
            with sqlite_engine(address.path).begin() as connection:
                return migration(connection)
        return asyncio.run(_on_postgres(address, migration))


async def _on_postgres(server: PostgresServer, migration: Callable[[Engaged], Result]) -> Result:
    from sqlalchemy.ext.asyncio import create_async_engine  # noqa: PLC0415 - it imports SQLAlchemy's ORM

    engine = create_async_engine(server.url, connect_args=server.options, poolclass=NullPool, hide_parameters=True)
    try:
        async with engine.begin() as connection:
            await connection.execute(text(f"SET LOCAL lock_timeout = '{_TURN}'"))
            await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK_KEY})
            await connection.execute(text(f"SET LOCAL lock_timeout = '{_TABLE_LOCK}'"))
            return await connection.run_sync(migration)
    finally:
        await engine.dispose()

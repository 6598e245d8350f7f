"""PostgreSQL: a pool of connections, by asyncpg or psycopg. It knows no table.

Its units get SQLAlchemy's own connection, which keeps what it compiles.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import ClassVar, Final, cast

import sqlalchemy
from sqlalchemy import event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, PoolProxiedConnection

from proxy.store.database import Batch, Item, PostgresServer, Result, Tasks, Unit, is_worth_another_try, translated

_CONNECTIONS: Final = 10
_MORE_CONNECTIONS: Final = 10
_POOL_SECONDS: Final = 30
_STATEMENT_SECONDS: Final = 60
_OLDEST_SECONDS: Final = 1800  # connections are made anew after this time, so that those of a moved server do not stay
_TRIES: Final = 4
_TRUSTED_SECONDS: Final = 1.0
"""A connection that was in use this short a while ago is used again without being tried out: that costs as much as a
statement of work."""
_RETURNED: Final = "palimpsest_returned"


class PostgresDatabase:
    """An open PostgreSQL database."""

    blocks: ClassVar[bool] = False
    in_order: ClassVar[bool] = False

    def __init__(self, server: PostgresServer) -> None:
        """Prepare to connect; nothing is sent yet."""
        options = dict(server.options)
        if server.url.get_driver_name() == "asyncpg":
            # By the client, since a pooler between may not pass a setting of the server on.
            options["command_timeout"] = _STATEMENT_SECONDS
        self._engine: AsyncEngine = create_async_engine(
            server.url,
            connect_args=options,
            pool_size=_CONNECTIONS,
            max_overflow=_MORE_CONNECTIONS,
            pool_timeout=_POOL_SECONDS,
            pool_recycle=_OLDEST_SECONDS,
        )
        _try_out_idle_connections(self._engine.sync_engine)
        # One statement needs no transaction around it, and two round trips less.
        self._reading = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._tasks = Tasks()

    async def read(self, unit: Unit[Result], *, short: bool = False) -> Result:  # noqa: ARG002 - none blocks
        """Run `unit`, each statement on the state that it finds."""
        return await asyncio.shield(self._tasks.start(self._read(unit)))

    async def write(
        self,
        unit: Unit[Result],
        *,
        durable: bool = True,  # noqa: ARG002 - the server decides
        again: bool = True,
    ) -> Result:
        """Run `unit` in a transaction; again, if the server ended it for another one's sake."""
        # In a task of its own: a connection that is cut off in a statement is lost.
        return await asyncio.shield(self._tasks.start(self._write(unit, again=again)))

    def start(
        self,
        batch: Batch[Item, Result],
        item: Item,
        *,
        durable: bool = True,  # noqa: ARG002 - the server decides
    ) -> asyncio.Future[Result]:
        """Have `batch` run with `item` as `write` runs a unit."""
        return asyncio.shield(
            self._tasks.start(self._write(lambda connection: batch(connection, [item])[0], again=True))
        )

    def hurry(self) -> None:
        """Do nothing: nothing waits."""

    async def close(self) -> None:
        """Finish what is under way, then close every connection."""
        await self._tasks.close()
        await self._engine.dispose()

    async def _read(self, unit: Unit[Result]) -> Result:
        with translated():
            try:
                return await self._look(unit)
            except DBAPIError as why:
                if not why.connection_invalidated:
                    raise
            return await self._look(unit)  # the server had ended the connection: all of them are made anew

    async def _look(self, unit: Unit[Result]) -> Result:
        async with self._reading.connect() as connection:
            return await connection.run_sync(_taking(unit))

    async def _write(self, unit: Unit[Result], *, again: bool) -> Result:
        with translated():
            for _ in range(_TRIES - 1):
                try:
                    return await self._transact(unit)
                except DBAPIError as why:
                    # A connection that was lost may have taken the COMMIT along: nearly all that is stored is stored
                    # once, however often it is asked for.
                    if not (is_worth_another_try(why) or (again and why.connection_invalidated)):
                        raise
            return await self._transact(unit)

    async def _transact(self, unit: Unit[Result]) -> Result:
        async with self._engine.begin() as connection:
            return await connection.run_sync(_taking(unit))


def _try_out_idle_connections(engine: sqlalchemy.Engine) -> None:
    """See to it that a connection that the server, or something between, ended in silence is made anew."""

    @event.listens_for(engine, "checkin")
    def _note(  # pyright: ignore[reportUnusedFunction]  # the event calls it
        _: DBAPIConnection | None, record: ConnectionPoolEntry
    ) -> None:
        record.info[_RETURNED] = time.monotonic()

    @event.listens_for(engine, "checkout")
    def _try_out(  # pyright: ignore[reportUnusedFunction]  # the event calls it
        connection: DBAPIConnection, record: ConnectionPoolEntry, _: PoolProxiedConnection
    ) -> None:
        returned: float | None = record.info.get(_RETURNED)
        if returned is None or time.monotonic() - returned < _TRUSTED_SECONDS:
            return
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as why:
            raise DisconnectionError from why


def _taking(unit: Unit[Result]) -> Callable[[sqlalchemy.Connection], Result]:
    # It has all that `connection.Connection` asks for; its overloads hide that from one of the type checkers.
    return cast("Callable[[sqlalchemy.Connection], Result]", unit)

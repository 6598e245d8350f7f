"""PostgreSQL: a pool of connections, by asyncpg or psycopg. It knows no table."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, Final

from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from proxy.errors import StoreUnavailable
from proxy.store.address import PostgresServer
from proxy.store.database import Result, Unit
from proxy.store.failures import is_worth_another_try, translated

_CONNECTIONS: Final = 10
_MORE_CONNECTIONS: Final = 10
_POOL_SECONDS: Final = 30
_STATEMENT_SECONDS: Final = 60
_OLDEST_SECONDS: Final = 1800
"""Connections are made anew after this time, so that those of a moved server do not stay."""
_TRIES: Final = 4


class PostgresDatabase:
    """An open PostgreSQL database."""

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
            pool_pre_ping=True,
        )
        # One statement needs no transaction around it, and two round trips less.
        self._reading = self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._under_way: set[asyncio.Task[Any]] = set()
        self._closed = False

    async def read(self, unit: Unit[Result]) -> Result:
        """Run `unit`, each statement on the state that it finds."""
        return await self._finish(self._read(unit))

    async def write(self, unit: Unit[Result]) -> Result:
        """Run `unit` in a transaction; again, if the server ended it for another one's sake."""
        return await self._finish(self._write(unit))

    async def close(self) -> None:
        """Finish what is under way, then close every connection."""
        self._closed = True
        while self._under_way:
            await asyncio.wait(set(self._under_way))
        await self._engine.dispose()

    async def _finish(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Run `work` in a task of its own: a connection that is cut off in a statement is lost."""
        if self._closed:
            work.close()
            raise StoreUnavailable("The store cannot be used. It is closed: the process is stopping.")
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._under_way.discard(task)
        if not task.cancelled():
            task.exception()  # it is the caller's, who may have been cancelled: then nobody asks for it

    async def _read(self, unit: Unit[Result]) -> Result:
        with translated():
            async with self._reading.connect() as connection:
                return await connection.run_sync(unit)

    async def _write(self, unit: Unit[Result]) -> Result:
        with translated():
            for _ in range(_TRIES - 1):
                try:
                    return await self._transact(unit)
                except DBAPIError as why:
                    if not is_worth_another_try(why):
                        raise
            return await self._transact(unit)

    async def _transact(self, unit: Unit[Result]) -> Result:
        async with self._engine.begin() as connection:
            return await connection.run_sync(unit)

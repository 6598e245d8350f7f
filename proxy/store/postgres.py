"""PostgreSQL, through asyncpg or psycopg.

One connection of the process writes exchanges: everything that waits is committed together, by one call of a server
function (see `functions`). Exchanges that such a call does not write, and all other writes, are transactions of their
own on a connection of SQLAlchemy's pool. There, exchanges of the same session wait for each other, but not for those of
other sessions.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from functools import lru_cache, partial
from os import dup
from socket import SHUT_RDWR, socket
from typing import Any, ClassVar, Final, TypeAlias, cast

import sqlalchemy
from msgspec import Struct
from msgspec.structs import replace
from sqlalchemy import BigInteger, Executable, event
from sqlalchemy.dialects.postgresql.asyncpg import PGDialect_asyncpg
from sqlalchemy.engine.interfaces import DBAPIConnection, Dialect
from sqlalchemy.exc import DBAPIError, DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, PoolProxiedConnection, QueuePool
from sqlalchemy.util import await_only, greenlet_spawn

from proxy.errors import StoreUnavailable
from proxy.store import functions
from proxy.store.database import (
    NO_ROWS,
    CompiledStatement,
    FetchedRows,
    Parameters,
    PostgresServer,
    Result,
    Tasks,
    Unit,
    Values,
    is_worth_another_try,
    log_seldom,
    outage_of,
    said,
    tell,
    translated,
)
from proxy.store.exchanges import write_exchanges
from proxy.store.packing import StoredAsBytes
from proxy.store.records import Exchange, Opening, Settlement, session_key

_LOG: Final = logging.getLogger("palimpsest.store")

_CONNECTIONS: Final = 10
_MORE_CONNECTIONS: Final = 5
_READERS: Final = 4
_WANTED: Final = _CONNECTIONS + _MORE_CONNECTIONS + _READERS + 1  # connections, including the writer's
_POOL_SECONDS: Final = 30
_STATEMENT_SECONDS: Final = 60
_OLDEST_SECONDS: Final = 1800  # connections are replaced after this time, in case the server has moved
_TRIES: Final = 4
_SILENT_SECONDS: Final = 5.0
"""Timeout of a statement on an existing connection. After that the connection counts as dead (after a failover, or
dropped by a firewall or proxy without notice), and the statement is retried on a new one. A retried read has no such
timeout, because then the server is slow."""
_TRUSTED_SECONDS: Final = 1.0
"""A connection that was used this recently is reused without a ping, which would cost as much as a real statement."""
_CLOSE_SECONDS: Final = 2
_NO_MORE: Final = "53300"
"""PostgreSQL's SQLSTATE for "too many connections"."""
_NO_MORE_WORDS: Final = ("too many ", " slots are reserved ")
"""Parts of psycopg's messages for the same error, which have no SQLSTATE."""
_FEW_SECONDS: Final = 5.0  # after the server refused a connection, wait this long before asking for one more
_FREED_SECONDS: Final = 0.05  # how long a server takes to notice that a connection was closed
_REFUSALS: Final = 5  # if a process has no connection and gets this many refusals in a row, the store is unavailable
_RETURNED: Final = "palimpsest_returned"
_BATCH: Final = 256  # most exchanges of one call, which bounds how long the first of them waits
_ASIDE_BYTES: Final = 200_000  # fewer bytes of messages are compressed on the event loop: a millisecond or two
_BATCH_BYTES: Final = 4_000_000
"""A call takes no further exchange once its messages have more bytes than this. A single exchange may be larger."""


def is_pooled(server: PostgresServer) -> bool:
    """Tell whether each transaction may run on another server connection, as behind PgBouncer."""
    return server.options.get("statement_cache_size") == 0 or "prepare_threshold" in server.options


class PostgresDatabase:
    """An open PostgreSQL database."""

    blocks: ClassVar[bool] = False
    in_order: ClassVar[bool] = False
    is_busy: bool = False  # no write blocks probes

    def __init__(self, server: PostgresServer) -> None:
        """Create the engines; this does not connect yet."""
        options = dict(server.options)
        self._seconds: float | None = None  # timeout of a unit that writes
        if server.url.get_driver_name() == "asyncpg":
            # A timeout of the client, because a pooler may not pass a server setting on.
            options["command_timeout"] = _STATEMENT_SECONDS
        else:  # psycopg has no timeout
            self._seconds = _STATEMENT_SECONDS
        self._engine: AsyncEngine = create_async_engine(
            server.url,
            connect_args=options,
            hide_parameters=True,
            pool_size=_CONNECTIONS,
            max_overflow=_MORE_CONNECTIONS,
            pool_timeout=_POOL_SECONDS,
            pool_recycle=_OLDEST_SECONDS,
        )
        _try_out_idle_connections(self._engine.sync_engine)
        _pass_over_dead_connections(self._engine.sync_engine)
        # A single statement needs no transaction, which would cost two more round trips.
        pooled = is_pooled(server)
        self._reading = self._engine if pooled else self._engine.execution_options(isolation_level="AUTOCOMMIT")
        self._tasks = Tasks()
        # Without a pool: after a lost connection, the pooled ones may be dead too.
        connecting = create_async_engine(server.url, connect_args=options, poolclass=NullPool, hide_parameters=True)
        self._connecting = connecting
        self._probing: asyncio.Task[None] | None = None
        self._singles = 0  # connections in use outside of the pool, the readers and the writer
        self._turns = turns = _Turns(self._held, self._make_room)
        self._readers = _Readers(connecting, self._tasks, turns, pooled=pooled)
        writing = DriverConnection(connecting, pooled=pooled)
        self._writer = _ExchangeWriter(writing, self._tasks, turns, self._write_exchanges)

    async def read(self, unit: Unit[Result], *, short: bool = False) -> Result:
        """Run `unit` without a common snapshot for its statements; a short one on one of the reader connections."""
        if short:
            # In a separate task: a driver that is cancelled in a statement waits for the server's answer.
            return await asyncio.shield(self._tasks.start(self._read_short(unit)))
        return await asyncio.shield(self._tasks.start(self._read(unit)))

    async def write(
        self,
        unit: Unit[Result],
        *,
        durable: bool = True,  # noqa: ARG002 - the server's settings decide
        again: bool = True,
    ) -> Result:
        """Run `unit` in a transaction; retry if the server aborted it because of a concurrent one."""
        # In a separate task: a connection whose statement is cancelled is lost.
        return await asyncio.shield(self._tasks.start(self._write(unit, again=again)))

    def start(self, exchange: Exchange) -> asyncio.Future[Any]:
        """Begin or settle an exchange, together with all others in the queue."""
        return self._writer.start(exchange)

    async def close(self) -> None:
        """Finish the running work, then close every connection."""
        await self._tasks.close()
        await self._readers.close()
        await self._writer.close()
        with suppress(TimeoutError):  # do not wait for a connection that does not answer
            async with asyncio.timeout(_CLOSE_SECONDS):
                await self._engine.dispose()

    async def probe(self, unit: Unit[None], *, same: bool) -> None:  # noqa: ARG002 - always the same server
        """Run `unit` in a transaction on a new connection."""
        if self._probing is not None and not self._probing.done():
            self._probing.cancel()
        self._probing = self._tasks.start(self._probe(unit))
        await asyncio.shield(self._probing)

    async def _probe(self, unit: Unit[None]) -> None:
        with translated():
            await self._turns.use(lambda: self._transact_alone(unit), first=True)

    def _held(self) -> int:
        """Return how many connections the process has open or is opening."""
        pool = cast("QueuePool", self._engine.pool)
        pooled = pool.checkedin() + pool.checkedout()
        return pooled + self._readers.held + self._writer.held + self._singles

    async def _make_room(self) -> None:
        """Close the unused connections, so that the server has room for another one."""
        await self._readers.let_go()
        await self._writer.let_go()
        if not cast("QueuePool", self._engine.pool).checkedout():
            await self._engine.dispose()

    async def _read_short(self, unit: Unit[Result]) -> Result:
        with translated():
            return await self._readers.read(unit)

    async def _write_exchanges(self, items: Sequence[Exchange]) -> list[Any]:
        return await self._write(lambda connection: write_exchanges(connection, items), again=True)

    async def _read(self, unit: Unit[Result]) -> Result:
        with translated():
            try:
                return await self._look(unit)
            except DBAPIError as why:
                if not why.connection_invalidated:
                    raise
            return await self._look(unit)  # the server had closed the connection: SQLAlchemy has emptied the pool

    async def _look(self, unit: Unit[Result]) -> Result:
        return await self._in_turn(unit, self._reading.connect, None)

    async def _write(self, unit: Unit[Result], *, again: bool) -> Result:
        with translated():
            for _ in range(_TRIES - 1):
                try:
                    return await self._transact(unit)
                except DBAPIError as why:
                    # After a lost connection, the COMMIT may have succeeded. A retry is safe, because nearly all writes
                    # are idempotent; the others set `again` to false.
                    if not (is_worth_another_try(why) or (again and why.connection_invalidated)):
                        raise
            return await self._transact(unit)

    async def _transact(self, unit: Unit[Result]) -> Result:
        return await self._in_turn(unit, self._engine.begin, self._seconds)

    async def _in_turn(
        self,
        unit: Unit[Result],
        connected: Callable[[], AbstractAsyncContextManager[AsyncConnection]],
        seconds: float | None,
    ) -> Result:
        """Run `unit` on a pooled connection, or on a temporary one if connections are scarce."""

        async def work() -> Result:
            if self._turns.are_few:
                return await self._transact_alone(unit)
            async with asyncio.timeout(seconds), connected() as connection:
                return await connection.run_sync(_taking(unit))

        return await self._turns.use(work)

    async def _transact_alone(self, unit: Unit[Result]) -> Result:
        """Run `unit` in a transaction on a temporary connection."""
        self._singles += 1
        try:
            async with asyncio.timeout(self._seconds), self._connecting.begin() as connection:
                return await connection.run_sync(_taking(unit))
        finally:
            self._singles -= 1


class _Turns:
    """Limits the connections in use: no limit until the server refuses one, then as many as it allows."""

    def __init__(self, held: Callable[[], int], make_room: Callable[[], Coroutine[Any, Any, None]]) -> None:
        self._held = held
        self._make_room = make_room
        self._few: int | None = None  # the limit; None while the server refuses none
        self._learnt_at = 0.0
        self._told = False
        self._using = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def are_few(self) -> bool:
        """Whether the server refused a connection. Then none is kept open for rare operations."""
        return self._few is not None

    async def use(self, work: Callable[[], Coroutine[Any, Any, Result]], *, first: bool = False) -> Result:
        """Run `work`, which takes one connection; retry if the server refuses it. `first` skips the queue."""
        refusals = 0
        until = time.monotonic() + _POOL_SECONDS
        while True:
            await self._enter(first=first or bool(refusals))
            try:
                if refusals:
                    await self._make_room()
                    await asyncio.sleep(_FREED_SECONDS)
                return await work()
            except Exception as why:
                held = self._held()
                refusals = 1 if held else refusals + 1
                if not _gives_no_more(why) or refusals > _REFUSALS or time.monotonic() > until:
                    raise
                if held:
                    self._learn(held)
            finally:
                self._leave()

    def _learn(self, held: int) -> None:
        self._few, self._learnt_at = held, time.monotonic()
        if not self._told:
            self._told = True
            _LOG.warning("the server gives fewer connections than are wanted: what is asked of the store takes turns")

    async def _enter(self, *, first: bool) -> None:
        if self._few is not None and time.monotonic() - self._learnt_at > _FEW_SECONDS:
            more = self._few + 1  # the server may allow more by now
            self._few, self._learnt_at = None if more > _WANTED else more, time.monotonic()
        if self._few is None or self._using < self._few:
            self._using += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        (self._waiting.appendleft if first else self._waiting.append)(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._leave()
            raise

    def _leave(self) -> None:
        self._using -= 1
        while self._waiting and (self._few is None or self._using < self._few):
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                self._using += 1


def _gives_no_more(error: Exception) -> bool:
    """Tell whether the server refused a connection because it has too many."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    state = getattr(cause, "sqlstate", "")  # "": not an error of the driver, so its text means nothing
    return state == _NO_MORE or (state is None and any([words in str(cause) for words in _NO_MORE_WORDS]))


# --------------------------------------------------------------------------------- connections of the driver itself


class Fetched(Struct, frozen=True, kw_only=True):
    """The result of a statement."""

    names: Sequence[str]  # of the columns; may be empty if there are no rows
    rows: Sequence[Sequence[Any]]


class LostConnection(Exception):
    """The connection was lost during a statement, which may or may not have been executed."""


class DriverConnection:
    """A connection that SQLAlchemy opens, but that is used without it. It reconnects if it was lost or is old.

    Only one task at a time may use it. Each statement is its own transaction.
    """

    def __init__(self, engine: AsyncEngine, *, pooled: bool = False) -> None:
        """Connect later, through `engine` and with its options. `pooled` is the result of `is_pooled`."""
        self._engine = engine
        self._uses_asyncpg = engine.dialect.driver == "asyncpg"
        self._pooled = pooled
        self.is_patient = False  # whether statements run without the timeout `_SILENT_SECONDS`
        self.is_held = False  # whether a connection is open or being opened
        self._raw: Any = None
        self._made: PoolProxiedConnection | None = None
        """SQLAlchemy's wrapper of the connection, which must live as long as the connection."""
        self._made_at = 0.0

    async def fetch(self, text: str, values: Sequence[Any]) -> Fetched:
        """Execute a statement with the parameters $1, $2, ….

        Raises `LostConnection` from the driver's error if the connection was lost. The next statement reconnects.
        """
        if self._raw is not None and time.monotonic() - self._made_at > _OLDEST_SECONDS:
            await self.close()
        timer = None if self.is_patient or self._raw is None else _cut_off_later(self._raw)
        raw = self._raw or await self._connect()
        whole = False
        try:
            if self._uses_asyncpg:
                # Behind a pooler, a transaction: asyncpg prepares and executes in separate round trips.
                async with raw.transaction() if self._pooled else nullcontext():
                    rows = await raw.fetch(text, *values)
                found = Fetched(names=tuple(rows[0].keys()) if rows else (), rows=rows)
            else:
                from psycopg import AsyncRawCursor  # noqa: PLC0415 - it may not be installed

                cursor: Any = AsyncRawCursor(raw)
                await cursor.execute(text, values)
                found = Fetched(names=[column.name for column in cursor.description], rows=await cursor.fetchall())
            whole = True
        except Exception as why:
            # An error with a SQLSTATE comes from the server and leaves the connection usable, unless it was closed.
            # After any other error (a TimeoutError, a driver that was interrupted and lost the protocol's state), the
            # state of the server is unknown.
            lost: bool = raw.is_closed() if self._uses_asyncpg else raw.closed
            if lost or getattr(why, "sqlstate", None) is None:
                raise LostConnection from why
            whole = True
            raise
        finally:
            if timer is not None:
                timer.cancel()
            if not whole:
                await self.close()
        return found

    async def close(self) -> None:
        """Close the connection, which may be lost."""
        raw, self._raw, self.is_held = self._raw, None, False
        if raw is not None:
            with suppress(Exception):  # it is not used again in any case
                await (raw.close(timeout=_CLOSE_SECONDS) if self._uses_asyncpg else raw.close())

    async def _connect(self) -> Any:
        self.is_held = True
        try:
            made = await self._engine.raw_connection()
        except BaseException:
            self.is_held = False
            raise
        raw: Any = made.driver_connection
        made.detach()
        self._raw, self._made, self._made_at = raw, made, time.monotonic()
        if not self._uses_asyncpg:
            await raw.set_autocommit(True)
        return raw


# ------------------------------------------------------------------------------------------------------ short reads

_DIALECT: Final[Dialect] = PGDialect_asyncpg()  # type: ignore[no-untyped-call]
_LIST: Final = re.compile(r"(NOT )?IN \(__\[POSTCOMPILE_(\w+)\]\)")
"""SQLAlchemy's placeholder for the values of an expanding IN."""


class _PostgresStatement(CompiledStatement):
    """A statement compiled for PostgreSQL. A list is one array parameter, so that one SQL text serves all lengths."""

    def __init__(self, statement: Executable) -> None:
        super().__init__(statement, (), _DIALECT)
        order = [name for name in self.order if name not in self.lists]
        order += [name for name in self.order if name in self.lists]
        numbers = {name: number for number, name in enumerate(order, 1)}

        def any_of(found: re.Match[str]) -> str:
            of = self.binds[found[2]].type
            kind = "BYTEA" if isinstance(of, StoredAsBytes) else "BIGINT" if isinstance(of, BigInteger) else "VARCHAR"
            return f"{'<> ALL' if found[1] else '= ANY'} (${numbers[found[2]]}::{kind}[])"

        self.text = _LIST.sub(any_of, self.text)
        self.pick = self.picker(order)
        """Picks the values from the parameters, in the order of their numbers."""


@lru_cache(maxsize=512)
def _statement(statement: Executable) -> _PostgresStatement:
    return _PostgresStatement(statement)


class PostgresConnection:
    """Executes SQLAlchemy statements that only read on a connection of the driver. For use in a greenlet."""

    __slots__ = ("_connection",)

    dialect = _DIALECT

    def __init__(self, connection: DriverConnection) -> None:
        """Execute on `connection`."""
        self._connection = connection

    def execute(self, statement: Executable, parameters: Parameters | None = None, /) -> FetchedRows:
        """Execute a statement, once."""
        compiled = _statement(statement)
        values = compiled.pick(cast("Values", parameters or {}))
        found = await_only(self._connection.fetch(compiled.text, values))
        if not found.rows:
            return NO_ROWS
        return FetchedRows(found.rows, compiled.make or compiled.maker(found.names))


class _Readers:
    """A few connections for the short reads of each request."""

    def __init__(self, engine: AsyncEngine, tasks: Tasks, turns: _Turns, *, pooled: bool) -> None:
        self._tasks = tasks
        self._turns = turns
        self._places = asyncio.Semaphore(_READERS)
        self._readers = [DriverConnection(engine, pooled=pooled) for _ in range(_READERS)]
        self._free = [*self._readers]
        """The most recently used one is last."""

    @property
    def held(self) -> int:
        """The number of connections that are open or being opened."""
        return sum([reader.is_held for reader in self._readers])

    async def read(self, unit: Unit[Result]) -> Result:
        """Run a unit on one of the connections; retry once on a new one if the connection was lost."""
        self._tasks.require_open()
        async with self._places:
            return await self._turns.use(lambda: self._read(unit))

    async def _read(self, unit: Unit[Result]) -> Result:
        reader = self._free.pop()
        try:
            try:
                return await greenlet_spawn(unit, PostgresConnection(reader))
            except LostConnection:
                reader.is_patient = True
                return await greenlet_spawn(unit, PostgresConnection(reader))
        except LostConnection as why:
            raise (why.__cause__ or why) from None
        finally:
            reader.is_patient = False
            self._free.append(reader)

    async def let_go(self) -> None:
        """Close the unused connections."""
        for reader in [*self._free]:
            if reader in self._free:
                await reader.close()

    async def close(self) -> None:
        """Close all connections. No read may follow."""
        for reader in self._readers:
            await reader.close()


# --------------------------------------------------------------------------------------- exchanges, written together


class _WaitingExchange(Struct, frozen=True, kw_only=True):
    """An exchange in the queue, to be begun or settled."""

    item: Exchange
    future: asyncio.Future[Any]

    @property
    def key(self) -> str:
        """The key of its session."""
        return session_key(self.item.tenant, self.item.session, self.item.dialect)

    @property
    def size(self) -> int:
        """Bytes of its messages, forms and tools."""
        item = self.item
        size = sum([len(body.message.raw) for body in item.messages])
        if isinstance(item, Settlement):
            return size + sum([len(reply.body.message.raw) for reply in item.replies])
        return size + sum([len(form.raw) for _, form in item.forms]) + len(item.tools or b"")


_Transact: TypeAlias = Callable[[Sequence[Exchange]], Coroutine[Any, Any, list[Any]]]


class _ExchangeWriter:
    """Begins and settles exchanges: all that wait by the server's functions; the rest session by session.

    The functions skip a session that another transaction has locked. While such a transaction of ours runs, further
    settlements of the session wait for it, and are then given to the functions again.
    """

    def __init__(self, connection: DriverConnection, tasks: Tasks, turns: _Turns, transact: _Transact) -> None:
        self._connection = connection
        self._tasks = tasks
        self._turns = turns
        self._transact = transact
        self._waiting: list[_WaitingExchange] = []
        self._is_writing = False
        self._is_fetching = False  # whether the connection is in use
        self._left: dict[str, list[_WaitingExchange]] = {}
        """By session, the exchanges that the functions did not write. A task writes those of each session."""
        self._behind: dict[str, list[_WaitingExchange]] = {}
        """By session, the settlements that wait for that task."""
        self._stored = functions.StoredTexts()

    def start(self, item: Exchange) -> asyncio.Future[Any]:
        """Submit an exchange to be begun or settled."""
        self._tasks.require_open()
        write = _WaitingExchange(item=item, future=asyncio.get_running_loop().create_future())
        self._waiting.append(write)
        self._go_on()
        return write.future

    @property
    def held(self) -> int:
        """The number of connections that are open or being opened: 0 or 1."""
        return int(self._connection.is_held)

    async def let_go(self) -> None:
        """Close the connection, unless it is in use."""
        if not self._is_fetching:
            await self._connection.close()

    async def _fetch(self, text: str, values: Sequence[Any]) -> Fetched:
        async def fetch() -> Fetched:
            self._is_fetching = True
            try:
                return await self._connection.fetch(text, values)
            finally:
                self._is_fetching = False

        return await self._turns.use(fetch)

    async def close(self) -> None:
        """Close the connection. No write may be running."""
        await self._connection.close()

    def _go_on(self) -> None:
        if self._waiting and not self._is_writing:
            self._is_writing = True
            self._tasks.follow(self._write_waiting())

    async def _write_waiting(self) -> None:
        try:
            while writes := self._take():
                await self._begin([write for write in writes if isinstance(write.item, Opening)])
                await self._settle([write for write in writes if isinstance(write.item, Settlement)])
        finally:
            self._is_writing = False

    def _take(self) -> list[_WaitingExchange]:
        """Take the next batch out of the queue."""
        taken: list[_WaitingExchange] = []
        size = number = 0
        for number, write in enumerate(self._waiting, 1):  # noqa: B007 - it is used after the loop
            if isinstance(write.item, Settlement) and write.key in self._left:
                self._behind.setdefault(write.key, []).append(write)
                continue
            taken.append(write)
            size += write.size
            if len(taken) == _BATCH or size > _BATCH_BYTES:
                break
        del self._waiting[:number]
        return taken

    async def _begin(self, writes: Sequence[_WaitingExchange]) -> None:
        if not writes:
            return
        begun: set[str] = set()
        try:
            openings = [cast("Opening", write.item) for write in writes]
            arguments, rows = await _aside(writes, partial(functions.beginnings, openings, self._stored))
            found = await self._fetch(functions.BEGIN, arguments)
            begun = functions.begun(found.rows)
            for exchange in begun:
                self._stored.keep(rows[exchange])
        except Exception as why:  # noqa: BLE001 - each is written alone below, and may fail alone
            log_seldom(logging.INFO, f"exchanges are begun one by one: {said(why.__cause__ or why)}")
        for write in writes:
            if write.item.exchange in begun:
                tell(write.future, None)
            else:
                self._write_alone(write)

    async def _settle(self, writes: Sequence[_WaitingExchange]) -> None:
        if not writes:
            return
        ends: dict[str, functions.PlainEnd] = {}
        stands_at: dict[str, str] = {}
        try:
            settlements = [cast("Settlement", write.item) for write in writes]
            ends, arguments = await _aside(writes, partial(_settling, settlements, self._stored))
            if ends:
                found = await self._fetch(functions.SETTLE, arguments)
                stands_at = functions.settled_at(found.rows)
        except Exception as why:  # noqa: BLE001 - each is written alone below, and may fail alone
            log_seldom(logging.INFO, f"exchanges are settled one by one: {said(why.__cause__ or why)}")
        for write in writes:
            head = stands_at.pop(write.item.exchange, None)
            if head is None:
                self._write_alone(write)
            else:
                settled = replace(ends[write.item.exchange].settled, head=head)
                self._stored.keep_replies(cast("Settlement", write.item), settled)
                self._stored.keep_cut(ends[write.item.exchange])
                tell(write.future, settled)

    def _write_alone(self, write: _WaitingExchange) -> None:
        """Write an exchange in a transaction of its session."""
        if write.key in self._left:
            self._left[write.key].append(write)
        else:
            self._left[write.key] = [write]
            self._tasks.follow(self._write_left(write.key))

    async def _write_left(self, key: str) -> None:
        while writes := self._left[key]:
            self._left[key] = []
            await self._write_session(writes)
        del self._left[key]
        self._waiting += self._behind.pop(key, [])
        self._go_on()

    async def _write_session(self, writes: Sequence[_WaitingExchange]) -> None:
        try:
            results = await self._transact([write.item for write in writes])
        except Exception as why:  # noqa: BLE001 - passed to the callers
            if len(writes) == 1 or isinstance(why, StoreUnavailable):
                for write in writes:
                    tell(write.future, None, why)
            else:
                for write in writes:
                    await self._write_session([write])
        else:
            for write, result in zip(writes, results, strict=True):
                if isinstance(write.item, Settlement):
                    self._stored.keep_replies(write.item, result)
                tell(write.future, result)


async def _aside(writes: Sequence[_WaitingExchange], work: Callable[[], Result]) -> Result:
    """Run `work`, which compresses the texts of these exchanges; in a thread if it would block the event loop."""
    if sum(write.size for write in writes) < _ASIDE_BYTES:
        return work()
    return await asyncio.to_thread(work)


def _settling(
    settlements: Sequence[Settlement], stored: functions.StoredTexts
) -> tuple[dict[str, functions.PlainEnd], tuple[Any, ...]]:
    """Return the ends of those exchanges that can be settled without reading, and the arguments of `SETTLE`."""
    ends = {each.exchange: end for each in settlements if (end := functions.plain_end(each, stored)) is not None}
    return ends, functions.settle_arguments(functions.waves_of(list(ends.values())))


# ------------------------------------------------------------------------------------------- connections of the pool


def _try_out_idle_connections(engine: sqlalchemy.Engine) -> None:
    """Ping pooled connections that were idle, and replace those that were dropped without notice."""

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
        timer = _cut_off_later(record.driver_connection)
        try:
            engine.dialect.do_ping(connection)
        except engine.dialect.loaded_dbapi.Error as why:
            raise DisconnectionError from why
        finally:
            timer.cancel()


def _cut_off_later(raw: Any) -> asyncio.TimerHandle:
    """Close a driver's connection after `_SILENT_SECONDS`. The caller cancels the timer when the server answers."""
    return asyncio.get_running_loop().call_later(_SILENT_SECONDS, _cut_off, raw)


def _cut_off(raw: Any) -> None:
    log_seldom(logging.WARNING, f"a connection to the store was silent for {_SILENT_SECONDS:g} s: a new one is made")
    if hasattr(raw, "terminate"):  # asyncpg's
        raw.terminate()
        return
    with suppress(Exception), socket(fileno=dup(raw.fileno())) as end:  # it may be closed
        end.shutdown(SHUT_RDWR)  # the driver, which waits on this socket, sees the end of the stream


def _pass_over_dead_connections(engine: sqlalchemy.Engine) -> None:
    """Keep SQLAlchemy from logging a traceback for connections that cannot be closed because the server is away."""
    cast("logging.Logger", engine.pool.logger).addFilter(_is_no_outage)


def _is_no_outage(record: logging.LogRecord) -> bool:
    why = record.exc_info[1] if record.exc_info else None
    return why is None or outage_of(why) is None


def _taking(unit: Unit[Result]) -> Callable[[sqlalchemy.Connection], Result]:
    # SQLAlchemy's connection satisfies `StoreConnection`; its overloads hide that from one of the type checkers.
    return cast("Callable[[sqlalchemy.Connection], Result]", unit)

"""SQLite: one writer thread with group commit, and several readers.

SQLite allows one writer at a time. All writes of a process therefore go through one thread, which commits everything in
its queue as one transaction. A write returns after the COMMIT. Writes run in the order of submission; adjacent writes
with the same batch function run in one call. If one write of a transaction fails, all of them run again, each in a
savepoint, so that only the failing one is rolled back. Transactions begin with BEGIN IMMEDIATE, which waits for another
process's lock. A transaction that begins as a read and then writes would fail at once ("database is locked"), whatever
the timeout.

The writer thread waits for locks and for the disk. Short work runs on the event loop: the statements of several
exchanges, and short reads. That is faster than a thread switch. Long work runs in threads. After something slow on the
event loop (a cold disk), everything runs in threads for a second.

SQLAlchemy Core compiles each statement once, and `sqlite3` executes it. Executing through SQLAlchemy takes five times
as long as SQLite itself does.
"""

from __future__ import annotations

import asyncio
import errno
import os
import re
import sqlite3
import threading
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import closing, contextmanager, suppress
from functools import lru_cache, partial
from itertools import chain, groupby
from math import inf
from operator import attrgetter
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, ClassVar, Final, TypeAlias, TypeVar, cast

from msgspec import Struct
from sqlalchemy import (
    Boolean,
    Connection,
    Engine,
    Executable,
    Float,
    Insert,
    NullPool,
    UpdateBase,
    create_engine,
    event,
)
from sqlalchemy.dialects.sqlite.base import SQLiteDialect
from sqlalchemy.engine import Dialect

from proxy.errors import StoreUnavailable
from proxy.store.database import (
    NO_ROWS,
    CompiledStatement,
    FetchedRows,
    Parameters,
    Result,
    StoreConnection,
    Unit,
    Values,
    closed,
    tell,
    translated,
    unavailable,
)
from proxy.store.exchanges import write_exchanges
from proxy.store.packing import StoredAsBytes
from proxy.store.portions import size_of
from proxy.store.records import Exchange, Settlement

BUSY_SECONDS: Final = 15  # timeout for another process's lock
_TRY_SECONDS: Final = 0.001
"""How long the writer sleeps between two tries to get the lock. SQLite's own busy handler soon sleeps 100 ms at a time.
With four workers and 16 connections, p99 fell from 265 to 70 ms (p50 rose from 15 to 25, at the same throughput)."""
_READERS: Final = 4
BATCH: Final = 32  # most writes of one transaction; 64 give .87 of the throughput, 16 the same (case small-64-json)
_TURN_BYTES: Final = 300_000  # most bytes of the writes that run on the event loop together; they block it for ~10 ms
_TURN_SECONDS: Final = 1.0  # how long the writer waits for the event loop, which may be busy or may have ended
_SLOW_SECONDS: Final = 0.05  # a read that blocked the event loop this long is slow
_SLOW_TURN_SECONDS: Final = 0.2  # a transaction that blocked the event loop this long is slow
_SPARED_SECONDS: Final = 1.0  # after something slow, nothing runs on the event loop for this long
_LONG_SECONDS: Final = 0.2  # a transaction that takes longer is a long one, such as an import
_LONGEST_SECONDS: Final = 60.0  # a transaction that takes longer than this hangs
_PROBE_MS: Final = 500  # timeout of a probe for another process's lock
_WAL_SECONDS: Final = 0.01  # between two tries to switch a new file to WAL mode
_EMPTYING_MS: Final = 50  # how long truncating the write-ahead log may wait for readers; writers wait too
_LEAST_ROOM: Final = 1_048_576  # a disk with fewer free bytes counts as full
_STATEMENTS: Final = 256  # prepared statements cached per connection; there are about a hundred
_CACHE_KB: Final = 16_384
"""Page cache of the writer. SQLite's default of 2,048 KB is less than the pages that the transactions of some dozen
sessions change, so it would read pages again and write them twice."""
_CHECKPOINT_PAGES: Final = 4_000
"""Pages of the write-ahead log, 16 MB. A COMMIT that finds the log larger also runs a checkpoint."""

_DURABLE: Final = f"PRAGMA synchronous=FULL; PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}"
"""COMMIT waits for the disk, so the transaction survives a loss of power."""
_PASSING: Final = "PRAGMA synchronous=NORMAL; PRAGMA wal_autocheckpoint=0"
"""COMMIT does not wait for the disk. The next durable COMMIT makes this transaction durable too."""


# `sqlite3` looks up an adapter for each value that is not an int, float or str. If none is registered, it tries
# attributes that do not exist either, which takes longer. So bytes and None get adapters that return the value itself.
sqlite3.register_adapter(bytes, bytes.__bytes__)
_NOTHING: Final[dict[None, None]] = {}
sqlite3.register_adapter(type(None), _NOTHING.get)  # `{}.get(None)` is None

# ---------------------------------------------------------------------------------------- the file


def create_file(path: Path) -> None:
    """Create the file with permissions for its owner alone, and switch it to WAL mode.

    SQLite gives its `-wal` and `-shm` files the same permissions. An existing file is left unchanged, and only SQLite
    opens it: closing a file releases all locks that this process holds on it. Another process could then believe that
    it is the last one, and delete the `-wal` file while it is in use.
    """
    if not path.parent.is_dir():
        raise StoreUnavailable(
            f"The store cannot be used. The folder {str(path.parent)!r} of its file does not exist: "
            "make it, or name another one in store.url."
        )
    try:
        with suppress(FileExistsError):
            os.close(os.open(path.resolve(), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600))
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        if not os.access(path, os.R_OK | os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as why:
        raise StoreUnavailable(
            f"The store cannot be used. Its file {str(path)!r} cannot be opened: {why.strerror}."
        ) from why
    with translated(), closing(connect(path)) as connection:
        until = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                connection.execute("PRAGMA journal_mode=WAL")
            except sqlite3.OperationalError as why:  # no busy timeout if another process does the same
                if not _is_busy(why) or time.monotonic() > until:
                    raise
                time.sleep(_WAL_SECONDS)
            else:
                return


def connect(path: Path) -> sqlite3.Connection:
    """Connect, without the implicit transactions of `sqlite3`, which begin too late."""
    # Never create the file: a deleted one must cause an error, and not be replaced by an empty one.
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENTS,
    )
    try:
        connection.execute("PRAGMA secure_delete=ON")  # so that a deleted session is overwritten in the file
        connection.executescript(_DURABLE)
    except sqlite3.Error:  # the file may not be a database
        connection.close()
        raise
    return connection


def empty_log(path: Path) -> bool:
    """Truncate the write-ahead log, which keeps deleted data until it is overwritten; return whether that succeeded.

    It fails while another connection reads the log or writes.
    """
    with translated(), closing(connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")  # copies most of the log without blocking anybody
        connection.execute(f"PRAGMA busy_timeout={_EMPTYING_MS}")
        busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def sqlite_engine(path: Path) -> Engine:
    """Return a SQLAlchemy engine for the file. Its transactions take SQLite's write lock when they begin."""
    engine = create_engine("sqlite://", creator=partial(connect, path), poolclass=NullPool, hide_parameters=True)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]  # the event calls it
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _roll_back(raw: sqlite3.Connection) -> None:
    """Roll back the transaction, if there is one."""
    if raw.in_transaction:  # SQLite itself rolls back if the disk is full or fails
        with suppress(sqlite3.Error):  # do not hide the error that came before
            raw.execute("ROLLBACK")


# ------------------------------------------------------------------------------------ the database


Item = TypeVar("Item")
Batch: TypeAlias = Callable[[StoreConnection, Sequence[Item]], Sequence[Result]]
"""Writes the items of several callers in one call, and returns a result for each, in the same order. Never commits."""


class _Write(Struct, frozen=True, kw_only=True):
    """An item in the writer's queue."""

    batch: Batch[Any, Any]
    item: Any
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    durable: bool
    size: float


_Outcome: TypeAlias = tuple[_Write, Any, Exception | None]  # a write, what it returned, and what it raised


class SqliteDatabase:
    """An open SQLite file."""

    blocks: ClassVar[bool] = True
    in_order: ClassVar[bool] = True

    def __init__(self, path: Path, batch: int = BATCH) -> None:
        """Open `path`, which must exist (see `create_file`). Blocks for a moment.

        A transaction has at most `batch` writes.
        """
        self._path = path
        self._batch = batch
        self._closed = False
        self._submitting = threading.Lock()  # guards `_closed` and `_pending`
        self._pending: list[_Write] = []  # submitted in this iteration of an event loop
        self._queue: SimpleQueue[_Write | None] = SimpleQueue()  # read by the writer; None ends it
        self._durable = True  # whether the writing connection waits for the disk (`_DURABLE`, `_PASSING`)
        with translated():
            self._writing = connect(path)
            # No busy timeout: `_begin` waits for the lock. The statement journal of a multi-row INSERT stays in memory.
            self._writing.executescript(
                f"PRAGMA cache_size=-{_CACHE_KB}; PRAGMA busy_timeout=0; PRAGMA temp_store=MEMORY"
            )
            near = connect(path)
        self._file = _file_at(path)  # identifies the open file; `path` may name another one later
        near.executescript("PRAGMA busy_timeout=0")  # the event loop must not wait for a lock
        self._near = near
        self._near_lock = threading.Lock()
        self._slow_until = 0.0
        self._readers = ThreadPoolExecutor(_READERS, "palimpsest-read")
        self._reader = threading.local()
        self._connections = [near]  # to be closed: this one, and those of the reader threads
        self._probing: asyncio.Future[None] | None = None
        self._writing_since: float | None = None  # when the writer's current transaction began
        self._commits = 0  # number of committed transactions
        # A daemon, so that a process that ends without close() does not hang. Writes lost then were not acknowledged.
        self._writer = threading.Thread(target=self._write_all, name="palimpsest-write", daemon=True)
        self._writer.start()

    async def read(self, unit: Unit[Result], *, short: bool = False) -> Result:
        """Run `unit` on a snapshot of the database: a short one on the event loop, any other in a reader thread."""
        if self._closed:
            raise closed()
        if short and time.monotonic() >= self._slow_until and self._near_lock.acquire(blocking=False):
            try:
                with self._timed(_SLOW_SECONDS):
                    return _read_with(self._near, unit)
            except sqlite3.Error as why:
                if not _is_busy(why):
                    raise _reported(why) from why
            finally:
                self._near_lock.release()
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read_there, unit)

    async def write(
        self,
        unit: Unit[Result],
        *,
        durable: bool = True,
        again: bool = True,  # noqa: ARG002 - there is no connection to lose
    ) -> Result:
        """Run `unit` in the next transaction; return after its COMMIT."""
        return cast("Result", await self.submit(_run_units, unit, durable=durable))

    def start(self, exchange: Exchange) -> asyncio.Future[Any]:
        """Begin or settle an exchange in the next transaction."""
        # The beginning of an exchange acknowledges nothing yet. The settlement, which follows, makes it durable too.
        durable = isinstance(exchange, Settlement)
        return self.submit(write_exchanges, exchange, durable=durable, size=size_of(exchange))

    def submit(
        self, batch: Batch[Item, Result], item: Item, *, durable: bool = True, size: float = inf
    ) -> asyncio.Future[Result]:
        """Run `batch` with `item` in the next transaction. It writes about `size` bytes there.

        All items that an event loop submits in one iteration are queued together. Otherwise the writer would wake for
        the first one and commit it alone.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._submitting:
            if self._closed:
                raise closed()
            is_first = not self._pending or self._pending[-1].loop is not loop
            self._pending.append(_Write(batch=batch, item=item, future=future, loop=loop, durable=durable, size=size))
        if is_first:
            loop.call_soon(self._hand_over)
        return future

    @property
    def is_busy(self) -> bool:
        """Whether the writer is in a long transaction, such as an import."""
        since = self._writing_since
        return since is not None and _LONG_SECONDS < time.monotonic() - since < _LONGEST_SECONDS

    async def probe(self, unit: Unit[None], *, same: bool) -> None:
        """Write and read the file that `path` names, in a thread of its own."""
        if self._probing is not None and not self._probing.done():
            raise TimeoutError
        future = self._probing = asyncio.get_running_loop().create_future()
        commits = self._commits
        probe = partial(_probe_file, unit, self._path, self._file if same else None)
        threading.Thread(target=_in_thread, args=(probe, future), name="palimpsest-probe", daemon=True).start()
        try:
            await asyncio.shield(future)
        except StoreUnavailable as why:
            if not (is_locked_out(why) and (self.is_busy or self._commits > commits)):  # this process has the lock
                raise

    async def close(self) -> None:
        """Write everything in the queue, then close every connection."""
        with self._submitting:
            is_open, self._closed = not self._closed, True
        if is_open:
            self._hand_over()  # the event loop that scheduled this may have ended
            self._queue.put(None)
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._writer.join()
        self._readers.shutdown()
        with self._near_lock:
            for connection in self._connections:
                connection.close()

    @contextmanager
    def _timed(self, most: float) -> Generator[None]:
        """Measure the block. If it takes longer than `most` seconds, keep work off the event loop for a while."""
        started = time.monotonic()
        try:
            yield
        finally:
            now = time.monotonic()
            if now - started > most:
                self._slow_until = now + _SPARED_SECONDS

    # ----------------------------------------------------------------------------------- reading

    def _read_there(self, unit: Unit[Result]) -> Result:
        with translated():
            raw: sqlite3.Connection | None = getattr(self._reader, "raw", None)
            if raw is None:
                raw = self._reader.raw = connect(self._path)
                self._connections.append(raw)
            return _read_with(raw, unit)

    # ----------------------------------------------------------------------------------- writing

    def _hand_over(self) -> None:
        with self._submitting:
            pending, self._pending = self._pending, []
            for write in pending:
                self._queue.put(write)

    def _write_all(self) -> None:
        """Commit the queue, batch by batch, until None comes."""
        ends = False
        while not ends and (first := self._queue.get()) is not None:
            batch = [first]
            with suppress(Empty):
                while len(batch) < self._batch and not ends:
                    following = self._queue.get_nowait()
                    if following is None:
                        ends = True
                    else:
                        batch.append(following)
            _tell_callers(self._commit(batch))
            del batch, first  # free long texts now: the next write may come much later
        self._writing.close()

    def _commit(self, writes: list[_Write]) -> list[_Outcome]:
        """Run the writes in one transaction."""
        raw = self._writing
        durable = any(write.durable for write in writes)
        try:
            if _file_at(self._path) != self._file:
                raise _missed(self._path)
            if durable is not self._durable:
                # As a script, which is not cached: some PRAGMAs take effect when they are prepared, not when executed.
                raw.executescript(_DURABLE if durable else _PASSING)
                self._durable = durable
            self._begin(raw)
            self._writing_since = time.monotonic()
            try:
                outcomes = self._run_in_turn(writes)
            except Exception:
                if len(writes) == 1:
                    raise
                # One item failed. All run again, each in a savepoint, so that only the failing one is rolled back.
                _roll_back(raw)
                self._begin(raw)
                outcomes = [(write, *self._run(write)) for write in writes]
            raw.execute("COMMIT")
            self._commits += 1
        except Exception as why:  # noqa: BLE001 - passed to the callers, who wait in another thread
            # The whole transaction failed (locked, disk full, or its only item failed): nothing is stored.
            _roll_back(raw)
            return [(write, None, _reported(why)) for write in writes]
        finally:
            self._writing_since = None
        return outcomes

    @staticmethod
    def _begin(raw: sqlite3.Connection) -> None:
        """Begin a transaction. Retries while another process has the lock, for `BUSY_SECONDS` at most."""
        deadline = time.monotonic() + BUSY_SECONDS
        while True:
            try:
                raw.execute("BEGIN IMMEDIATE")
            except sqlite3.OperationalError as why:
                if why.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() >= deadline:
                    raise
                time.sleep(_TRY_SECONDS)
            else:
                return

    def _run_in_turn(self, writes: Sequence[_Write]) -> list[_Outcome]:
        """Run several items on the event loop, unless they are so large that they would block it.

        The transaction has its lock already, so no statement waits for one. In the writer thread, each statement would
        wait for the GIL, and the event loop for the thread: that costs a third of the throughput (case small-64-json).
        A single item runs in the writer thread, because the event loop is hardly busy then.
        """
        is_small = len(writes) > 1 and sum([write.size for write in writes]) <= _TURN_BYTES
        if not is_small or time.monotonic() < self._slow_until:
            return self._run_all(writes)
        turn: Future[list[_Outcome]] = Future()

        def run() -> None:
            if turn.set_running_or_notify_cancel():
                try:
                    with self._timed(_SLOW_TURN_SECONDS):
                        turn.set_result(self._run_all(writes))
                except Exception as why:  # noqa: BLE001 - passed to the writer, which waits
                    turn.set_exception(why)
                except BaseException:  # the process is ending: do not leave the writer waiting
                    turn.set_exception(closed())
                    raise

        with suppress(RuntimeError):  # the loop has ended
            writes[0].loop.call_soon_threadsafe(run)
            wait([turn], _TURN_SECONDS)
        return self._run_all(writes) if turn.cancel() else turn.result()

    def _run_all(self, writes: Sequence[_Write]) -> list[_Outcome]:
        """Run items. Adjacent ones with the same batch function run in one call."""
        connection = SqliteConnection(self._writing)
        outcomes: list[_Outcome] = []
        for batch, group in groupby(writes, key=attrgetter("batch")):
            together = list(group)
            results = batch(connection, [write.item for write in together])
            outcomes += [(write, result, None) for write, result in zip(together, results, strict=True)]
        return outcomes

    def _run(self, write: _Write) -> tuple[Any, Exception | None]:
        """Run one item in a savepoint, so that a failure rolls back nothing else."""
        raw = self._writing
        raw.execute("SAVEPOINT unit")
        result, error = None, None
        try:
            (result,) = write.batch(SqliteConnection(raw), [write.item])
        except Exception as why:
            if not raw.in_transaction:
                raise  # SQLite has rolled back everything (the disk is full or fails)
            raw.execute("ROLLBACK TO unit")
            error = _reported(why)
        raw.execute("RELEASE unit")
        return result, error


def _run_units(connection: StoreConnection, units: Sequence[Unit[Any]]) -> list[Any]:
    return [unit(connection) for unit in units]


def _read_with(raw: sqlite3.Connection, unit: Unit[Result]) -> Result:
    """Run a unit on one snapshot of the database."""
    raw.execute("BEGIN")
    try:
        return unit(SqliteConnection(raw))
    finally:
        _roll_back(raw)


def _tell_callers(outcomes: list[_Outcome]) -> None:
    """Resolve the callers' futures, each on its own event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].loop, []).append(outcome)
    for loop, theirs in by_loop.items():
        with suppress(RuntimeError):  # the loop has ended, so nobody waits there
            loop.call_soon_threadsafe(_resolve, theirs)


def _resolve(outcomes: list[_Outcome]) -> None:
    for job, result, error in outcomes:
        tell(job.future, result, error)


def _in_thread(work: Callable[[], None], future: asyncio.Future[None]) -> None:
    """Do `work`, and resolve the future on its event loop."""
    failure: Exception | None = None
    try:
        work()
    except Exception as why:  # noqa: BLE001 - passed to the future
        failure = why

    def pass_on() -> None:
        if future.done():
            return
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)
            future.exception()  # mark it as retrieved: the caller may be gone

    with suppress(RuntimeError):  # the loop has ended
        future.get_loop().call_soon_threadsafe(pass_on)


def _probe_file(unit: Unit[None], path: Path, file: tuple[int, int] | None) -> None:
    """Write and read the file at `path`. If `file` is given, it must be that file."""
    found = _file_at(path)
    if found is None or (file is not None and found != file):
        raise _missed(path)
    if hasattr(os, "statvfs"):
        room = os.statvfs(path.absolute().parent)
        if (room.f_bavail if os.geteuid() else room.f_bfree) * room.f_frsize < _LEAST_ROOM:
            raise StoreUnavailable("The store cannot be used. The disk is full: make room.")
    with translated(), closing(connect(path)) as raw:
        raw.executescript(f"PRAGMA busy_timeout={_PROBE_MS}")
        raw.execute("BEGIN IMMEDIATE")
        try:
            unit(SqliteConnection(raw))
            raw.execute("COMMIT")
        finally:
            _roll_back(raw)


def _is_busy(why: BaseException | None) -> bool:
    """Tell whether another connection has the lock."""
    return getattr(why, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def is_locked_out(why: StoreUnavailable) -> bool:
    """Tell whether the store could not be used only because another connection has its lock."""
    return _is_busy(why.__cause__)


def _file_at(path: Path) -> tuple[int, int] | None:
    """Return the device and inode of the file at `path`, which identify it; None if there is no file."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _missed(path: Path) -> StoreUnavailable:
    return StoreUnavailable(
        f"The store cannot be used. Its file {str(path)!r} was deleted, or replaced by another one: put it back, "
        "or start the proxy again."
    )


def _reported(why: Exception) -> Exception:
    """Return the error that the caller gets for this one."""
    failure = unavailable(why)
    if failure is None:
        return why
    failure.__cause__ = why
    return failure


# -------------------------------------------------------------------------------------- statements

_DIALECT: Final[Dialect] = SQLiteDialect(paramstyle="qmark")
_LIST: Final = re.compile(r"\(__\[POSTCOMPILE_(\w+)\]\)")
"""SQLAlchemy's placeholder for the values of an expanding IN."""
_ROW: Final = re.compile(r"VALUES (\([?, ]+\))")
_ROWS: Final = 64  # most rows of one INSERT; SQLite allows 32,766 values in a statement


class SqliteConnection:
    """Executes SQLAlchemy statements on a `sqlite3` connection. It neither begins nor commits transactions."""

    __slots__ = ("_raw",)

    dialect = _DIALECT

    def __init__(self, raw: sqlite3.Connection) -> None:
        self._raw = raw

    def execute(self, statement: Executable, parameters: Parameters | None = None, /) -> FetchedRows:
        """Execute a statement once, or once for each mapping of a sequence. All must have the same names."""
        # It is nearly always a dictionary; an isinstance test against Sequence takes longer than the rest of this.
        if type(parameters) is not dict and isinstance(parameters, Sequence):
            if len(parameters) != 1:
                return self._execute_many(statement, parameters)
            parameters = parameters[0]
        asked = cast("Values", parameters or {})
        compiled = _compiled(statement, tuple(asked) if isinstance(statement, UpdateBase) else ())
        values = compiled.pick(asked)
        if compiled.lists:
            cursor = self._raw.execute(*compiled.expanded(values))
        else:
            cursor = self._raw.execute(compiled.text, values)
        if cursor.description is None:
            return NO_ROWS
        return FetchedRows(
            cursor.fetchall(), compiled.make or compiled.maker([column[0] for column in cursor.description])
        )

    def _execute_many(self, statement: Executable, several: Sequence[Values]) -> FetchedRows:
        if several:
            compiled = _compiled(statement, tuple(several[0]) if isinstance(statement, UpdateBase) else ())
            if compiled.lists:
                raise TypeError("a statement with a list in it is executed for one list at a time")
            rows = list(map(compiled.pick, several))
            while compiled.is_insert and len(rows) > 1:
                some = min(1 << (len(rows).bit_length() - 1), _ROWS)
                self._raw.execute(compiled.inserting(some), tuple(chain.from_iterable(rows[:some])))
                del rows[:some]
            self._raw.executemany(compiled.text, rows)
        return NO_ROWS


class _Compiled(CompiledStatement):
    """A statement compiled for SQLite."""

    def __init__(self, statement: Executable, columns: tuple[str, ...]) -> None:
        super().__init__(statement, columns, _DIALECT)
        for bind in self.binds.values():
            if isinstance(bind.type, StoredAsBytes):
                continue
            kind = bind.type.dialect_impl(_DIALECT)
            if kind.bind_processor(_DIALECT) is not None and not isinstance(kind, (Boolean, Float)):
                raise TypeError(f"SQLite takes no {bind.type!r} as it is")
        self.converters += [
            (place, convert)
            for place, column in enumerate(self.exported)
            if not isinstance(column.type, StoredAsBytes)
            and (convert := column.type.dialect_impl(_DIALECT).result_processor(_DIALECT, None)) is not None
        ]
        self.is_insert = isinstance(statement, Insert) and statement.select is None and not self.exported
        self.pick = self.picker(self.order)
        """Picks the values from the parameters, in the order of their places."""
        if self.text.startswith("INSERT INTO"):
            # A failure rolls back the transaction or the savepoint anyway. Without OR FAIL, SQLite would copy each page
            # that a multi-row INSERT changes, to be able to undo the statement alone.
            self.text = self.text.replace("INSERT INTO", "INSERT OR FAIL INTO", 1)
        self.texts: dict[tuple[int, ...], str] = {}  # SQL by the number of values in each list, or of rows

    def expanded(self, values: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
        """Return the SQL and its values, with the lists expanded.

        Each list is padded to the next power of two, so that a few prepared statements serve all lengths. The padding
        repeats the last value, which does not change what the list contains.
        """
        flat: list[Any] = []
        sizes: list[int] = []
        for name, value in zip(self.order, values, strict=True):
            if name in self.lists:
                size = 1 << (len(value) - 1).bit_length() if value else 0
                sizes.append(size)
                flat += value
                flat += value[-1:] * (size - len(value))
            else:
                flat.append(value)
        key = tuple(sizes)
        text = self.texts.get(key)
        if text is None:
            room = iter(sizes)
            text = self.texts[key] = _LIST.sub(lambda _: f"({', '.join('?' * next(room))})", self.text)
        return text, tuple(flat)

    def inserting(self, rows: int) -> str:
        """Return the SQL of an INSERT of so many rows. Fewer statements mean fewer releases of the GIL."""
        text = self.texts.get((rows,))
        if text is None:
            text = self.texts[rows,] = _ROW.sub(lambda row: "VALUES " + ", ".join([row[1]] * rows), self.text)
        return text


@lru_cache(maxsize=512)
def _compiled(statement: Executable, columns: tuple[str, ...]) -> _Compiled:
    """Compile a statement for SQLite, cached. `columns` are those that an INSERT or UPDATE sets; empty means all."""
    return _Compiled(statement, columns)

"""SQLite: one writer thread with group commit, and readers beside it.

SQLite takes one writer at a time. So every write of a process goes to one thread, which commits all that waits as one
transaction. A caller hears of its write after the COMMIT. Writes run in the order of submission, those of one batch
together. If one fails, all run again, each in a savepoint, so that it does not take its neighbours with it. A
transaction begins with BEGIN IMMEDIATE, which waits for another process's lock. One that begins as a read and turns
into a write fails at once ("database is locked"), whatever the time-out.

The thread waits for locks and for the disk. What is short runs on the event loop meanwhile: the statements of several
exchanges, and short reads. That is faster than the way to a thread and back. What is long runs in threads, and so does
everything for a second after something on the event loop was slow (a cold disk).

Statements are compiled once by SQLAlchemy Core and run by `sqlite3` itself: SQLAlchemy's way from a statement to its
rows takes five times as long as SQLite does.
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

BUSY_SECONDS: Final = 15  # how long to wait for another process's lock
_TRY_SECONDS: Final = 0.001
"""How long the writer sleeps before it tries again to get the lock. SQLite's own handler soon sleeps 100 ms: with four
workers and 16 connections, p99 was 265 ms and is 70 (p50: 15 and 25, at the same throughput)."""
_READERS: Final = 4
BATCH: Final = 32  # writes of one transaction at most; 64 give .87 of the throughput, 16 the same (case small-64-json)
_TURN_BYTES: Final = 300_000  # of writes that run on the event loop together: they hold it up for some 10 ms
_TURN_SECONDS: Final = 1.0  # how long the writer waits for a turn of the event loop: it may be busy, or have ended
_SLOW_SECONDS: Final = 0.05  # a read that held the event loop this long is slow
_SLOW_TURN_SECONDS: Final = 0.2  # a transaction that held the event loop this long is slow
_SPARED_SECONDS: Final = 1.0  # how long nothing then runs on it
_LONG_SECONDS: Final = 0.2  # a transaction that has lasted longer is an import, or the like
_LONGEST_SECONDS: Final = 60.0  # one that has lasted longer than this hangs
_PROBE_MS: Final = 500  # how long a probe waits for another process's lock
_WAL_SECONDS: Final = 0.01  # between two tries to put a new file into WAL mode
_EMPTYING_MS: Final = 50  # how long everybody may wait for whoever reads the write-ahead log, so that it can be emptied
_LEAST_ROOM: Final = 1_048_576  # a disk with fewer free bytes is full
_STATEMENTS: Final = 256  # prepared statements that a connection keeps; there are about a hundred
_CACHE_KB: Final = 16_384
"""Of the file, kept in memory by the writer. SQLite's own 2,048 are less than the pages that transactions of some dozen
sessions change: it would read them again, and write them twice."""
_CHECKPOINT_PAGES: Final = 4_000
"""Of the write-ahead log, 16 MB: a COMMIT that finds it larger also copies it into the file."""

_DURABLE: Final = f"PRAGMA synchronous=FULL; PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}"
"""A COMMIT waits for the disk: it outlives a loss of power."""
_PASSING: Final = "PRAGMA synchronous=NORMAL; PRAGMA wal_autocheckpoint=0"
"""A COMMIT does not wait for the disk; the next durable one brings both there."""


# `sqlite3` looks for a way to adapt each value that is no int, float or str. Where none is registered it goes on to
# look for attributes that are not there, which takes longer.
sqlite3.register_adapter(bytes, bytes.__bytes__)  # each is itself
_NOTHING: Final[dict[None, None]] = {}
sqlite3.register_adapter(type(None), _NOTHING.get)  # of None that is None

# ---------------------------------------------------------------------------------------- the file


def create_file(path: Path) -> None:
    """Make the file, readable and writable by its owner alone, and put it into WAL mode.

    SQLite gives the files it puts beside it (`-wal`, `-shm`) the same mode. One that is there stays as it is, and is
    opened by SQLite alone: who closes a file gives up all locks that this process has on it. Another process could then
    take itself for the last one, and delete the `-wal` that is in use.
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
            except sqlite3.OperationalError as why:  # SQLite itself does not wait here for another process that does it
                if not _is_busy(why) or time.monotonic() > until:
                    raise
                time.sleep(_WAL_SECONDS)
            else:
                return


def connect(path: Path) -> sqlite3.Connection:
    """Connect without the module's own transactions, which begin too late."""
    # Never create it: a file that was deleted is to be missed, and not to be replaced by an empty one.
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?mode=rw",
        uri=True,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENTS,
    )
    try:
        connection.execute("PRAGMA secure_delete=ON")  # a deleted session is gone from the file
        connection.executescript(_DURABLE)
    except sqlite3.Error:  # it may be no database
        connection.close()
        raise
    return connection


def empty_log(path: Path) -> bool:
    """Empty the write-ahead log, which keeps what was deleted until it is written over; return whether it is empty.

    It is not where somebody reads it, or writes just now.
    """
    with translated(), closing(connect(path)) as connection:
        connection.execute("PRAGMA wal_checkpoint(PASSIVE)")  # nobody waits for the greater part
        connection.execute(f"PRAGMA busy_timeout={_EMPTYING_MS}")
        busy, *_ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    return not busy


def sqlite_engine(path: Path) -> Engine:
    """Return SQLAlchemy's engine for the file; its transactions take SQLite's write lock as they begin."""
    engine = create_engine("sqlite://", creator=partial(connect, path), poolclass=NullPool, hide_parameters=True)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]  # the event calls it
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return engine


def _roll_back(raw: sqlite3.Connection) -> None:
    """Take back the transaction, if there is one."""
    if raw.in_transaction:  # SQLite itself takes everything back where the disk is full or fails
        with suppress(sqlite3.Error):  # what went wrong before is what counts
            raw.execute("ROLLBACK")


# ------------------------------------------------------------------------------------ the database


Item = TypeVar("Item")
Batch: TypeAlias = Callable[[StoreConnection, Sequence[Item]], Sequence[Result]]
"""Work on several callers' items at once; its results are in the order of the items. It never commits."""


class _Write(Struct, frozen=True, kw_only=True):
    """An item that waits for the writer."""

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
        """Open `path`, which must exist (`create_file`); blocks for a moment.

        One transaction has at most `batch` writes.
        """
        self._path = path
        self._batch = batch
        self._closed = False
        self._submitting = threading.Lock()  # guards `_closed` and `_pending`
        self._pending: list[_Write] = []  # what was submitted in this turn of an event loop
        self._queue: SimpleQueue[_Write | None] = SimpleQueue()  # what the writer takes, up to None
        self._durable = True  # whether the writing connection waits for the disk (`_DURABLE`, `_PASSING`)
        with translated():
            self._writing = connect(path)
            # `_begin` waits for the lock. What an INSERT of several rows may have to take back stays in memory.
            self._writing.executescript(
                f"PRAGMA cache_size=-{_CACHE_KB}; PRAGMA busy_timeout=0; PRAGMA temp_store=MEMORY"
            )
            near = connect(path)
        self._file = _file_at(path)  # the file that is open, whatever `path` names later
        near.executescript("PRAGMA busy_timeout=0")  # an event loop waits for no lock
        self._near = near
        self._near_lock = threading.Lock()
        self._slow_until = 0.0
        self._readers = ThreadPoolExecutor(_READERS, "palimpsest-read")
        self._reader = threading.local()
        self._connections = [near]  # what the readers have opened
        self._probing: asyncio.Future[None] | None = None
        self._writing_since: float | None = None  # when the transaction began that the writer is in
        self._commits = 0  # how many transactions were committed
        # A daemon: a process that ends without close() must not hang; nobody was told of what is lost.
        self._writer = threading.Thread(target=self._write_all, name="palimpsest-write", daemon=True)
        self._writer.start()

    async def read(self, unit: Unit[Result], *, short: bool = False) -> Result:
        """Run `unit` on one state of the database: a short one here, any other in a reader's thread."""
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
        """Run `unit` in the next transaction; returns after its COMMIT."""
        return cast("Result", await self.submit(_run_units, unit, durable=durable))

    def start(self, exchange: Exchange) -> asyncio.Future[Any]:
        """Begin or settle an exchange in the next transaction."""
        # Nothing has been acknowledged of what begins: what follows from it is durable no later than this is.
        durable = isinstance(exchange, Settlement)
        return self.submit(write_exchanges, exchange, durable=durable, size=size_of(exchange))

    def submit(
        self, batch: Batch[Item, Result], item: Item, *, durable: bool = True, size: float = inf
    ) -> asyncio.Future[Result]:
        """Have `batch` run with `item` in the next transaction, in which it writes about `size` bytes.

        The writer gets what an event loop submits in one turn at once. It would wake for the first item, and make a
        transaction of that alone.
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
        """Whether the writer is in a long transaction: an import, say."""
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
            if not (is_locked_out(why) and (self.is_busy or self._commits > commits)):  # the lock is our own
                raise

    async def close(self) -> None:
        """Write what waits, then close every connection."""
        with self._submitting:
            is_open, self._closed = not self._closed, True
        if is_open:
            self._hand_over()  # an event loop that should have done so may have ended
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
        """Note whether what is done here took longer than `most` seconds: it holds up the event loop."""
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
        """Commit what waits, batch by batch, until None comes."""
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
            del batch, first  # they may hold long texts, and the next may be long in coming
        self._writing.close()

    def _commit(self, writes: list[_Write]) -> list[_Outcome]:
        """Make one transaction of what waits."""
        raw = self._writing
        durable = any(write.durable for write in writes)
        try:
            if _file_at(self._path) != self._file:
                raise _missed(self._path)
            if durable is not self._durable:
                # A script: a statement that is kept prepared may have had its effect when it was prepared.
                raw.executescript(_DURABLE if durable else _PASSING)
                self._durable = durable
            self._begin(raw)
            self._writing_since = time.monotonic()
            try:
                outcomes = self._run_in_turn(writes)
            except Exception:
                if len(writes) == 1:
                    raise
                # One item failed. All run again, with a savepoint each, so that it takes back only its own work.
                _roll_back(raw)
                self._begin(raw)
                outcomes = [(write, *self._run(write)) for write in writes]
            raw.execute("COMMIT")
            self._commits += 1
        except Exception as why:  # noqa: BLE001 - it belongs to the callers, who wait in another thread
            # The transaction as a whole failed (locked, full, or the one item in it): nothing is kept.
            _roll_back(raw)
            return [(write, None, _reported(why)) for write in writes]
        finally:
            self._writing_since = None
        return outcomes

    @staticmethod
    def _begin(raw: sqlite3.Connection) -> None:
        """Begin a transaction once no other process is in one."""
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
        """Run several items in a turn of the event loop, unless they are so large that they would hold it up.

        None waits for a lock. In the writer's thread each statement would wait for the interpreter's lock (GIL), and
        the loop for it: that costs a third of the throughput (case small-64-json). One item alone runs in the thread:
        the loop is hardly busy then.
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
                except Exception as why:  # noqa: BLE001 - it is the writer's, who waits
                    turn.set_exception(why)
                except BaseException:  # the process is to end: the writer goes on by itself
                    turn.set_exception(closed())
                    raise

        with suppress(RuntimeError):  # the loop has ended
            writes[0].loop.call_soon_threadsafe(run)
            wait([turn], _TURN_SECONDS)
        return self._run_all(writes) if turn.cancel() else turn.result()

    def _run_all(self, writes: Sequence[_Write]) -> list[_Outcome]:
        """Run items, those of one batch together."""
        connection = SqliteConnection(self._writing)
        outcomes: list[_Outcome] = []
        for batch, group in groupby(writes, key=attrgetter("batch")):
            together = list(group)
            results = batch(connection, [write.item for write in together])
            outcomes += [(write, result, None) for write, result in zip(together, results, strict=True)]
        return outcomes

    def _run(self, write: _Write) -> tuple[Any, Exception | None]:
        """Run one item so that its failure takes back its own work and nothing else."""
        raw = self._writing
        raw.execute("SAVEPOINT unit")
        result, error = None, None
        try:
            (result,) = write.batch(SqliteConnection(raw), [write.item])
        except Exception as why:
            if not raw.in_transaction:
                raise  # SQLite has taken back everything (the disk is full or fails)
            raw.execute("ROLLBACK TO unit")
            error = _reported(why)
        raw.execute("RELEASE unit")
        return result, error


def _run_units(connection: StoreConnection, units: Sequence[Unit[Any]]) -> list[Any]:
    return [unit(connection) for unit in units]


def _read_with(raw: sqlite3.Connection, unit: Unit[Result]) -> Result:
    """Run a unit on one state of the database."""
    raw.execute("BEGIN")
    try:
        return unit(SqliteConnection(raw))
    finally:
        _roll_back(raw)


def _tell_callers(outcomes: list[_Outcome]) -> None:
    """Let the callers go on, each in its own event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].loop, []).append(outcome)
    for loop, theirs in by_loop.items():
        with suppress(RuntimeError):  # the loop has ended: nobody waits in it any more
            loop.call_soon_threadsafe(_resolve, theirs)


def _resolve(outcomes: list[_Outcome]) -> None:
    for job, result, error in outcomes:
        tell(job.future, result, error)


def _in_thread(work: Callable[[], None], future: asyncio.Future[None]) -> None:
    """Do `work`, and tell the future's event loop how it ended."""
    failure: Exception | None = None
    try:
        work()
    except Exception as why:  # noqa: BLE001 - it is the future's
        failure = why

    def pass_on() -> None:
        if future.done():
            return
        if failure is None:
            future.set_result(None)
        else:
            future.set_exception(failure)
            future.exception()  # nobody may wait for it any more

    with suppress(RuntimeError):  # the loop has ended
        future.get_loop().call_soon_threadsafe(pass_on)


def _probe_file(unit: Unit[None], path: Path, file: tuple[int, int] | None) -> None:
    """Write and read the file at `path`, which must be `file`, where that is given."""
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
    """Tell whether somebody else has the lock."""
    return getattr(why, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY


def is_locked_out(why: StoreUnavailable) -> bool:
    """Tell whether the store could not be used only because another connection has its lock."""
    return _is_busy(why.__cause__)


def _file_at(path: Path) -> tuple[int, int] | None:
    """Return what tells the file that `path` names from every other one; None where there is none."""
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
    """Return what the caller hears of an error."""
    failure = unavailable(why)
    if failure is None:
        return why
    failure.__cause__ = why
    return failure


# -------------------------------------------------------------------------------------- statements

_DIALECT: Final[Dialect] = SQLiteDialect(paramstyle="qmark")
_LIST: Final = re.compile(r"\(__\[POSTCOMPILE_(\w+)\]\)")
"""Where SQLAlchemy leaves room for the values of an expanding IN."""
_ROW: Final = re.compile(r"VALUES (\([?, ]+\))")
_ROWS: Final = 64  # of one INSERT at most; 32,766 values are what SQLite takes


class SqliteConnection:
    """A connection of `sqlite3` that executes SQLAlchemy's statements. It neither begins nor commits."""

    __slots__ = ("_raw",)

    dialect = _DIALECT

    def __init__(self, raw: sqlite3.Connection) -> None:
        self._raw = raw

    def execute(self, statement: Executable, parameters: Parameters | None = None, /) -> FetchedRows:
        """Execute a statement, once or once for each of several parameters, which all have the same names."""
        # Nearly always it is a dictionary; to ask one whether it is a sequence takes longer than all this.
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
    """A statement as SQLite takes it."""

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
        """Takes the values out, in the order of their places."""
        if self.text.startswith("INSERT INTO"):
            # Whoever sees it fail takes back the transaction or the savepoint. Else SQLite would keep a copy of each
            # page that an INSERT of several rows changes, so as to take back that alone.
            self.text = self.text.replace("INSERT INTO", "INSERT OR FAIL INTO", 1)
        self.texts: dict[tuple[int, ...], str] = {}  # texts with room for so many values in each list

    def expanded(self, values: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
        """Give each list as many places as the next power of two, so that a few texts serve all lengths.

        The places that are left over repeat the last value, which changes nothing about what is in the list.
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
        """Return the text of an INSERT with room for so many rows: each statement leaves and takes the GIL."""
        text = self.texts.get((rows,))
        if text is None:
            text = self.texts[rows,] = _ROW.sub(lambda row: "VALUES " + ", ".join([row[1]] * rows), self.text)
        return text


@lru_cache(maxsize=512)
def _compiled(statement: Executable, columns: tuple[str, ...]) -> _Compiled:
    """Return what a statement is for SQLite; `columns` are those that an INSERT or UPDATE sets, empty for all."""
    return _Compiled(statement, columns)

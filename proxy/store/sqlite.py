"""SQLite: one connection writes for all, short work where it is asked for, the disk's waits in a thread.

SQLite takes one writer at a time, and Python's `sqlite3` gives up the interpreter's lock (GIL) at every
step of a statement. A thread that runs twenty statements must win it back twenty times from a busy event
loop, which need not give it up for 5 ms each time. So short units run on the event loop itself, a few
milliseconds in a row at most. What waits for something, and what is long, is a thread's:

- the COMMIT of what must outlive a loss of power. Units that come meanwhile wait, and are the next
  transaction together (group commit);
- another process's lock. The file may be shared: a write begins with BEGIN IMMEDIATE, since a transaction
  that begins as a read and turns into a write fails at once ("database is locked"), whatever the time-out;
- units that nobody called short, and for a second every unit, after one was slow (a cold disk);
- a transaction of several units of which one failed: each is run again, in a savepoint of its own.

A transaction whose units may all be lost with the power, and only so, is not waited for: its COMMIT reaches
the operating system, and the next one that waits for the disk brings both there.

A caller hears of its unit only after the COMMIT. Units are run in the order in which they were asked for.

It knows no table.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any, ClassVar, Final, TypeAlias

from msgspec import Struct
from sqlalchemy import Connection, Engine, NullPool, create_engine, event

from proxy.errors import StoreUnavailable
from proxy.store.database import Result, Unit
from proxy.store.failures import translated, unavailable
from proxy.store.statements import SqliteConnection

_LOG: Final = logging.getLogger("palimpsest.store")

BUSY_SECONDS: Final = 15
"""How long to wait for another process's lock."""
_READERS: Final = 4
_CHECKPOINT_PAGES: Final = 4_000
"""Of the write-ahead log, 16 MB: at that size a COMMIT also copies it into the file, and takes milliseconds.
SQLite's own 1,000 pages come four times as often, for half the time."""
_WRITING_CACHE: Final = 16_384
"""Kilobytes of the file that the writing connection keeps in memory. SQLite's own 2,048 are less than the
pages that transactions of some dozen sessions change: it would read them again, and write them twice."""
_STATEMENTS: Final = 256
"""Prepared statements that a connection keeps; there are about a hundred."""
_BATCH: Final = 256
"""Units of one transaction at most, so that the first of them is not kept waiting without bound."""
_SLICE: Final = 32
"""Units of one transaction on an event loop at most."""
_SLICE_SECONDS: Final = 0.005
"""How long units are run on an event loop in a row; one that has begun is finished."""
_SLOW_SECONDS: Final = 0.05
"""A unit that held an event loop so long shows that short ones are not short just now."""
_SPARED_SECONDS: Final = 1.0
"""How long the event loops are spared then."""

_LASTING: Final = f"PRAGMA synchronous=FULL; PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}"
"""A COMMIT waits for the disk: it may outlive a loss of power."""
_PASSING: Final = "PRAGMA synchronous=NORMAL; PRAGMA wal_autocheckpoint=0"
"""A COMMIT waits for nothing, not even for the copying of the write-ahead log into the file."""
_IMPATIENT: Final = "PRAGMA busy_timeout=0"
"""Another process's lock is an error at once."""


class _Job(Struct, frozen=True):
    """A unit that waits."""

    unit: Unit[Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop
    short: bool = False
    """Whether it may run on an event loop."""
    lasting: bool = True
    """Whether its caller may hear of it only once the power may fail."""


class _Failed(Struct, frozen=True):
    """What a unit raised."""

    error: Exception


_Outcome: TypeAlias = tuple[_Job, Any]
"""A job and what its unit returned, or `_Failed`."""


class SqliteDatabase:
    """An open SQLite file."""

    blocks: ClassVar[bool] = True
    in_order: ClassVar[bool] = True

    def __init__(self, path: Path) -> None:
        """Open `path`, which must exist (`create_file`); blocks for a moment.

        Raises:
            StoreUnavailable: it cannot be opened.
        """
        self._path = path
        self._closed = False
        self._turn = threading.Condition(threading.Lock())
        """Guards what follows up to the next blank line; told whenever a transaction has ended."""
        self._waiting: deque[_Job] = deque()
        self._busy = False
        """Whether someone has the writing connection. Nobody else may touch it then."""
        self._called: asyncio.AbstractEventLoop | None = None
        """The event loop that will see to what waits before it waits itself."""

        self._lasting = True
        """How the writing connection commits (`_LASTING`, `_PASSING`)."""
        self._spared_until = 0.0
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """What the writer's thread has to do."""
        self._reads: SimpleQueue[_Job | None] = SimpleQueue()
        self._near: tuple[sqlite3.Connection, SqliteConnection] | None = None
        """Reads on event loops, by whoever holds the next."""
        self._reading = threading.Lock()
        with translated():
            self._writing = _connect(path)
            self._writing.executescript(_IMPATIENT)
            self._writing.execute(f"PRAGMA cache_size=-{_WRITING_CACHE}")
            self._on_writing = SqliteConnection(self._writing)
        # Daemons: a process that ends without close() must not hang; nobody was told of what is lost.
        # No executor: its futures cost more than the shorter reads do.
        self._threads = [
            threading.Thread(target=self._serve, name="palimpsest-write", daemon=True),
            *(
                threading.Thread(target=self._read_all, name=f"palimpsest-read-{number}", daemon=True)
                for number in range(_READERS)
            ),
        ]
        for thread in self._threads:
            thread.start()

    async def read(self, unit: Unit[Result], *, short: bool = False) -> Result:
        """Run `unit` on one state of the database: a short one here, any other in a reader's thread."""
        if short and not self._is_slow() and self._reading.acquire(blocking=False):
            try:
                return self._read_here(unit)
            except sqlite3.OperationalError as why:
                if not _is_locked(why):
                    raise _raised(why) from why
            finally:
                self._reading.release()
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._turn:
            if self._closed:
                raise _closed()
            self._reads.put(_Job(unit, future, loop))
        return await future

    async def write(
        self, unit: Unit[Result], *, short: bool = False, lasting: bool = True, again: bool = True
    ) -> Result:
        """Run `unit` in the next transaction; returns after its COMMIT."""
        return await self.start(unit, short=short, lasting=lasting, again=again)

    def start(
        self,
        unit: Unit[Result],
        *,
        short: bool = False,
        lasting: bool = True,
        again: bool = True,  # noqa: ARG002 - there is no connection to lose
    ) -> asyncio.Future[Result]:
        """Have `unit` run in the next transaction, with all that is asked for before the event loop waits.

        So requests that came together read one after the other, each what the one before it has read into
        memory, and share a transaction.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._turn:
            if self._closed:
                raise _closed()
            self._waiting.append(_Job(unit, future, loop, short, lasting))
            calls = not self._busy and self._called is not loop
            if calls:
                self._called = loop
        if calls:
            loop.call_soon(self._go_on)
        return future

    def instead(self, asked: asyncio.Future[Any], unit: Unit[Any], *, short: bool = False) -> bool:
        """Put `unit` in the place of one that waits; whoever waits for that hears of this."""
        with self._turn:
            for place, job in enumerate(self._waiting):
                if job.future is asked:
                    self._waiting[place] = _Job(unit, asked, job.loop, job.short and short)
                    return True
        return False

    async def close(self) -> None:
        """Write what waits, then close every connection."""
        with self._turn:
            if not self._closed:
                self._closed = True
                for _ in range(_READERS):
                    self._reads.put(None)
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        with self._turn:
            while self._busy or self._waiting:
                if not self._busy:  # an event loop that should have gone on has ended
                    self._hand_over(self._take(_BATCH))
                self._turn.wait()
        self._tasks.put(None)
        for thread in self._threads:
            thread.join()
        self._writing.close()
        with self._reading:
            if self._near is not None:
                self._near[0].close()
                self._near = None

    # ----------------------------------------------------------------------------------- reading

    def _read_here(self, unit: Unit[Result]) -> Result:
        """Run a short unit; raises SQLITE_BUSY rather than wait."""
        if self._closed:
            raise _closed()
        if self._near is None:
            with translated():
                made = _connect(self._path)
                made.executescript(_IMPATIENT)
                self._near = (made, SqliteConnection(made))
        raw, connection = self._near
        started = time.monotonic()
        # Not `_transaction`: what surrounds so little would cost as much.
        raw.execute("BEGIN")
        try:
            result = unit(connection)
            raw.execute("COMMIT")
        except BaseException:
            _roll_back(raw)
            raise
        self._note(time.monotonic() - started)
        return result

    def _read_all(self) -> None:
        """Take one unit after the other, until None comes. The connection is made when one comes."""
        raw: sqlite3.Connection | None = None
        while job := self._reads.get():
            if job.future.cancelled():
                continue
            try:
                if raw is None:
                    raw = _connect(self._path)
                with _transaction(raw, "BEGIN"):
                    result = job.unit(SqliteConnection(raw))
            except Exception as why:  # noqa: BLE001 - it belongs to the caller, who waits in another thread
                result = _Failed(_raised(why))
            _tell([(job, result)])
        if raw is not None:
            raw.close()

    # ----------------------------------------------------------------------------------- writing

    def _go_on(self) -> None:
        """Run what waits, on the event loop that calls this, or hand it to the thread.

        Does nothing while a transaction is under way: whoever ends it sees to it that this is called again.
        """
        with self._turn:
            self._called = None
            if self._busy or not self._waiting:
                return
            if not self._waiting[0].short or self._is_slow():
                self._hand_over(self._take(_BATCH))
                return
            self._busy = True
            batch = self._take(_SLICE, short=True)
        self._run_here(batch)

    def _take(self, most: int, *, short: bool = False) -> list[_Job]:
        """Take the first that wait; with `short`, only up to the first that is not."""
        batch: list[_Job] = []
        while self._waiting and len(batch) < most and (self._waiting[0].short or not short):
            batch.append(self._waiting.popleft())
        return batch

    def _hand_over(self, batch: list[_Job]) -> None:
        """Let the thread have the writing connection, and run a batch on it."""
        self._busy = True
        self._tasks.put(partial(self._run_there, batch))

    def _run_here(self, batch: list[_Job]) -> None:
        """Run a batch on this event loop, as far as it gets in time."""
        raw = self._writing
        lasting = any(job.lasting for job in batch)
        outcomes: list[_Outcome] = []
        started = now = time.monotonic()
        try:
            self._commit_so(lasting=lasting)
            raw.execute("BEGIN IMMEDIATE")
            for job in batch:
                outcomes.append((job, job.unit(self._on_writing)))
                began, now = now, time.monotonic()
                self._note(now - began)
                if now - started > _SLICE_SECONDS:
                    break
            if not lasting:
                raw.execute("COMMIT")
        except Exception:  # noqa: BLE001 - the thread runs them again, and finds out whose it is
            _roll_back(raw)
            self._hand_over(batch)
            return
        except BaseException:
            _roll_back(raw)
            self._let_go([])
            raise
        late = batch[len(outcomes) :]
        if lasting:
            with self._turn:
                self._waiting.extendleft(reversed(late))
            self._tasks.put(partial(self._commit, outcomes))
        else:
            self._let_go(late)
            _tell(outcomes, asyncio.get_running_loop())

    def _let_go(self, late: list[_Job]) -> None:
        """Let go of the writing connection, on an event loop; for `late` ones it had no time."""
        with self._turn:
            self._waiting.extendleft(reversed(late))
            self._busy = False
            if self._waiting:
                self._called = asyncio.get_running_loop()
                self._called.call_soon(self._go_on)
            self._turn.notify_all()

    def _run_there(self, batch: list[_Job]) -> None:
        """Run a batch in the thread, which may wait for another process's lock."""
        self._commit_so(lasting=any(job.lasting for job in batch))
        self._writing.executescript(f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}")
        outcomes = self._write(batch)
        self._writing.executescript(_IMPATIENT)
        self._finish(outcomes)

    def _write(self, batch: list[_Job]) -> list[_Outcome]:
        """Run a batch in one transaction."""
        try:
            with _transaction(self._writing, "BEGIN IMMEDIATE"):
                return [(job, _run(self._writing, job, alone=len(batch) == 1)) for job in batch]
        except Exception as why:  # noqa: BLE001 - it belongs to the callers, who wait in another thread
            # The transaction as a whole failed (locked, full, or the one unit in it): nobody's unit is kept.
            return [(job, _Failed(_raised(why))) for job in batch]

    def _commit(self, outcomes: list[_Outcome]) -> None:
        """Commit what an event loop has run, in the thread."""
        try:
            self._writing.execute("COMMIT")
        except Exception as why:  # noqa: BLE001 - it belongs to the callers, who wait in another thread
            _roll_back(self._writing)
            outcomes = [(job, _Failed(_raised(why))) for job, _ in outcomes]
        self._finish(outcomes)

    def _finish(self, outcomes: list[_Outcome]) -> None:
        """Let go of the writing connection, in the thread, and let the next transaction begin."""
        _tell(outcomes)
        with self._turn:
            self._busy = False
            if self._waiting and not (
                self._waiting[0].short and not self._is_slow() and _soon(self._waiting[0].loop, self._go_on)
            ):
                self._hand_over(self._take(_BATCH))
            self._turn.notify_all()

    def _commit_so(self, *, lasting: bool) -> None:
        """Say whether the next COMMIT waits for the disk."""
        if lasting is not self._lasting:
            # A script, since a statement that is kept prepared may have had its effect when it was prepared.
            self._writing.executescript(_LASTING if lasting else _PASSING)
            self._lasting = lasting

    def _serve(self) -> None:
        """Do one task after the other, until None comes."""
        while task := self._tasks.get():
            task()

    def _is_slow(self) -> bool:
        return time.monotonic() < self._spared_until

    def _note(self, seconds: float) -> None:
        """Take note of how long an event loop was held."""
        if seconds > _SLOW_SECONDS:
            self._spared_until = time.monotonic() + _SPARED_SECONDS


def create_file(path: Path) -> None:
    """Make the file, readable and writable by its owner alone, and put it into WAL mode.

    SQLite gives the files it puts beside it (`-wal`, `-shm`) the same mode. One that is there stays as it is.

    Raises:
        StoreUnavailable: it cannot be made.
    """
    if not path.parent.is_dir():
        raise StoreUnavailable(
            f"The store cannot be used. The folder {str(path.parent)!r} of its file does not exist: "
            "make it, or name another one in store.url."
        )
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as why:
        raise StoreUnavailable(
            f"The store cannot be used. Its file {str(path)!r} cannot be opened: {why.strerror}."
        ) from why
    with translated(), closing(_connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")


def sqlite_engine(path: Path, begin: str) -> Engine:
    """Return an engine on the file whose transactions start with the statement `begin`."""
    engine = create_engine("sqlite://", creator=partial(_connect, path), poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]  # the event calls it
        connection.exec_driver_sql(begin)

    return engine


def _connect(path: Path) -> sqlite3.Connection:
    """Connect without the module's own transactions, which begin too late."""
    connection = sqlite3.connect(
        path,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENTS,
    )
    connection.execute("PRAGMA synchronous=FULL")  # what was committed survives a loss of power
    connection.execute("PRAGMA secure_delete=ON")  # a deleted session is gone from the file
    connection.execute(f"PRAGMA wal_autocheckpoint={_CHECKPOINT_PAGES}")
    return connection


@contextmanager
def _transaction(raw: sqlite3.Connection, begin: str) -> Generator[None]:
    raw.execute(begin)
    try:
        yield
        raw.execute("COMMIT")
    except BaseException:
        _roll_back(raw)
        raise


def _roll_back(raw: sqlite3.Connection) -> None:
    if raw.in_transaction:  # SQLite itself takes everything back where the disk is full or fails
        with suppress(sqlite3.Error):  # what went wrong before is what counts
            raw.execute("ROLLBACK")


def _run(raw: sqlite3.Connection, job: _Job, *, alone: bool) -> Any:
    """Run one unit so that its failure takes back its own work and nothing else."""
    connection = SqliteConnection(raw)
    if alone:  # the transaction itself can be taken back
        return job.unit(connection)
    raw.execute("SAVEPOINT unit")
    try:
        result = job.unit(connection)
    except Exception as why:
        if not raw.in_transaction:
            raise  # SQLite has taken back everything (the disk is full or fails)
        raw.execute("ROLLBACK TO unit")
        raw.execute("RELEASE unit")
        return _Failed(_raised(why))
    raw.execute("RELEASE unit")
    return result


def _raised(why: Exception) -> Exception:
    """Return what the caller hears of it."""
    failure = unavailable(why)
    if failure is None:
        return why
    failure.__cause__ = why
    return failure


def _is_locked(why: sqlite3.Error) -> bool:
    return why.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


def _tell(outcomes: list[_Outcome], here: asyncio.AbstractEventLoop | None = None) -> None:
    """Let the callers go on, each in its own event loop; `here` is the one that this runs on."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].loop, []).append(outcome)
    for loop, theirs in by_loop.items():
        if loop is here:
            _resolve(theirs)
        else:
            _soon(loop, partial(_resolve, theirs))


def _soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> bool:
    """Have a loop call this; return whether it is there: else nobody waits in it any more."""
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
        return False
    return True


def _resolve(outcomes: list[_Outcome]) -> None:
    for job, result in outcomes:
        if job.future.done():  # the caller was cancelled; its write is done all the same
            if isinstance(result, _Failed):
                _LOG.error("work that nobody waits for any more failed: %s", result.error)
            continue
        if isinstance(result, _Failed):
            job.future.set_exception(result.error)
        else:
            job.future.set_result(result)


def _closed() -> StoreUnavailable:
    return StoreUnavailable("The store cannot be used. It is closed: the process is stopping.")

"""SQLite: one thread writes for all, a few threads read.

SQLite takes one writer at a time. Units that wait are put into one transaction (group commit), so
that many share the wait for the disk; a savepoint keeps a failing one from the others. A caller hears
of its unit only after the COMMIT. Other processes may use the same file: a write begins with BEGIN
IMMEDIATE, since a transaction that begins as a read and turns into a write fails at once
("database is locked"), whatever the time-out.

It knows no table.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
from collections.abc import Callable, Generator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, Engine, NullPool, create_engine, event

from proxy.errors import StoreUnavailable
from proxy.store.database import Result, Unit
from proxy.store.failures import translated, unavailable
from proxy.store.statements import SqliteConnection

BUSY_SECONDS: Final = 15
"""How long to wait for another process's lock."""
_READERS: Final = 4
_CHECKPOINT_PAGES: Final = 4_000
"""Of the write-ahead log, 16 MB: at that size a COMMIT also copies it into the file, and takes milliseconds.
SQLite's own 1,000 pages come four times as often, for half the time."""
_STATEMENTS: Final = 256
"""Prepared statements that a connection keeps; there are about a hundred."""
_BATCH: Final = 256
"""Units of one transaction at most, so that the first of them is not kept waiting without bound."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A unit that waits for a thread."""

    unit: Unit[Any]
    future: asyncio.Future[Any]
    loop: asyncio.AbstractEventLoop


@dataclass(frozen=True, slots=True)
class _Failed:
    """What a unit raised."""

    error: Exception


_Outcome: TypeAlias = tuple[_Job, Any]
"""A job and what its unit returned, or `_Failed`."""


class SqliteDatabase:
    """An open SQLite file."""

    def __init__(self, path: Path) -> None:
        """Open `path`, which must exist (`create_file`); blocks for a moment.

        Raises:
            StoreUnavailable: it cannot be opened.
        """
        self._writes: SimpleQueue[_Job | None] = SimpleQueue()
        self._reads: SimpleQueue[_Job | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._path = path
        with translated():
            self._writing = _connect(path)
        # Daemons: a process that ends without close() must not hang; nobody was told of what is lost.
        # No executor: its futures cost more than the shorter reads do.
        self._threads = [
            threading.Thread(target=self._write_all, name="palimpsest-write", daemon=True),
            *(
                threading.Thread(target=self._read_all, name=f"palimpsest-read-{number}", daemon=True)
                for number in range(_READERS)
            ),
        ]
        for thread in self._threads:
            thread.start()

    async def read(self, unit: Unit[Result]) -> Result:
        """Run `unit` on one state of the database, in a reader's thread."""
        return await self._ask(self._reads, unit)

    async def write(self, unit: Unit[Result]) -> Result:
        """Run `unit` in the writer's next transaction; returns after its COMMIT."""
        return await self._ask(self._writes, unit)

    async def close(self) -> None:
        """Write what waits, then close every connection."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._writes.put(None)
                for _ in range(_READERS):
                    self._reads.put(None)
        await asyncio.to_thread(self._end)

    async def _ask(self, queue: SimpleQueue[_Job | None], unit: Unit[Result]) -> Result:
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._closing:
            if self._closed:
                raise _closed()
            queue.put(_Job(unit, future, loop))
        return await future

    def _end(self) -> None:
        for thread in self._threads:
            thread.join()
        self._writing.close()

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
                result = _failed(why)
            _tell([(job, result)])
        if raw is not None:
            raw.close()

    def _write_all(self) -> None:
        """Take what waits, again and again, until None comes: that is the last there is."""
        going = True
        while going:
            batch: list[_Job] = []
            item = self._writes.get()
            while item is not None:
                batch.append(item)
                if len(batch) == _BATCH:
                    break
                try:
                    item = self._writes.get_nowait()
                except Empty:
                    break
            going = item is not None
            if batch:
                _tell(self._write(batch))

    def _write(self, batch: list[_Job]) -> list[_Outcome]:
        """Run a batch in one transaction."""
        try:
            with _transaction(self._writing, "BEGIN IMMEDIATE"):
                return [(job, _run(self._writing, job, alone=len(batch) == 1)) for job in batch]
        except Exception as why:  # noqa: BLE001 - it belongs to the callers, who wait in another thread
            # The transaction as a whole failed (locked, full, or the one unit in it): nobody's unit is kept.
            return [(job, _failed(why)) for job in batch]


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
        if raw.in_transaction:  # SQLite itself takes everything back where the disk is full or fails
            raw.execute("ROLLBACK")
        raise


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
        return _failed(why)
    raw.execute("RELEASE unit")
    return result


def _failed(why: Exception) -> _Failed:
    failure = unavailable(why)
    if failure is None:
        return _Failed(why)
    failure.__cause__ = why
    return _Failed(failure)


def _tell(outcomes: list[_Outcome]) -> None:
    """Let the callers go on, each in its own event loop."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Outcome]] = {}
    for outcome in outcomes:
        by_loop.setdefault(outcome[0].loop, []).append(outcome)
    for loop, theirs in by_loop.items():
        _soon(loop, partial(_resolve, theirs))


def _soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        if not loop.is_closed():
            raise
        # The loop has ended: nobody waits any more, and what was written stays written.


def _resolve(outcomes: list[_Outcome]) -> None:
    for job, result in outcomes:
        if job.future.done():
            continue  # the caller was cancelled; its write is done all the same
        if isinstance(result, _Failed):
            job.future.set_exception(result.error)
        else:
            job.future.set_result(result)


def _closed() -> StoreUnavailable:
    return StoreUnavailable("The store cannot be used. It is closed: the process is stopping.")

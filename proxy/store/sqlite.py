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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, Final, TypeAlias

from sqlalchemy import Connection, Engine, NullPool, create_engine, event

from proxy.errors import StoreUnavailable
from proxy.store.database import Result, Unit
from proxy.store.failures import translated, unavailable

BUSY_SECONDS: Final = 15
"""How long to wait for another process's lock."""
_READERS: Final = 4
_BATCH: Final = 256
"""Units of one transaction at most, so that the first of them is not kept waiting without bound."""


@dataclass(frozen=True, slots=True)
class _Job:
    """A unit that waits for the writer."""

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
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._local = threading.local()
        self._opened: list[Connection] = []
        self._reading = sqlite_engine(path, "BEGIN")
        with translated():
            self._writing = sqlite_engine(path, "BEGIN IMMEDIATE").connect()
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="palimpsest-read")
        # A daemon: a process that ends without close() must not hang; nobody was told of what is lost.
        self._writer = threading.Thread(target=self._write_all, name="palimpsest-write", daemon=True)
        self._writer.start()

    async def read(self, unit: Unit[Result]) -> Result:
        """Run `unit` on one state of the database, in a reader's thread."""
        if self._closed:
            raise _closed()
        return await asyncio.get_running_loop().run_in_executor(self._readers, self._read, unit)

    async def write(self, unit: Unit[Result]) -> Result:
        """Run `unit` in the writer's next transaction; returns after its COMMIT."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Result] = loop.create_future()
        with self._closing:
            if self._closed:
                raise _closed()
            self._jobs.put(_Job(unit, future, loop))
        return await future

    async def close(self) -> None:
        """Write what waits, then close every connection."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._jobs.put(None)
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        self._writer.join()
        self._readers.shutdown()
        while self._opened:
            self._opened.pop().close()
        self._writing.close()

    def _read(self, unit: Unit[Result]) -> Result:
        with translated():
            connection: Connection | None = getattr(self._local, "connection", None)
            if connection is None:
                connection = self._local.connection = self._reading.connect()
                self._opened.append(connection)
            with connection.begin():
                return unit(connection)

    def _write_all(self) -> None:
        """Take what waits, again and again, until None comes: that is the last there is."""
        going = True
        while going:
            batch: list[_Job] = []
            item = self._jobs.get()
            while item is not None:
                batch.append(item)
                if len(batch) == _BATCH:
                    break
                try:
                    item = self._jobs.get_nowait()
                except Empty:
                    break
            going = item is not None
            if batch:
                _tell(self._write(batch))

    def _write(self, batch: list[_Job]) -> list[_Outcome]:
        """Run a batch in one transaction."""
        try:
            with self._writing.begin():
                return [(job, _run(self._writing, job, alone=len(batch) == 1)) for job in batch]
        except Exception as why:  # noqa: BLE001 - it belongs to the callers, who wait in another thread
            # The transaction as a whole failed (locked, full, or the one unit in it): nobody's unit is kept.
            return [(job, _Failed(unavailable(why) or why)) for job in batch]


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
    connection = sqlite3.connect(path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA synchronous=FULL")  # what was committed survives a loss of power
    connection.execute("PRAGMA secure_delete=ON")  # a deleted session is gone from the file
    return connection


def _run(connection: Connection, job: _Job, *, alone: bool) -> Any:
    """Run one unit so that its failure takes back its own work and nothing else."""
    if alone:  # the transaction itself can be taken back
        return job.unit(connection)
    raw = connection.connection.dbapi_connection
    if not isinstance(raw, sqlite3.Connection):
        raise TypeError("the connection is not SQLite's")
    raw.execute("SAVEPOINT unit")  # straight to SQLite: by SQLAlchemy it costs as much as a statement of work
    try:
        result = job.unit(connection)
    except Exception as why:
        if not raw.in_transaction:
            raise  # SQLite has taken back everything (the disk is full or fails)
        raw.execute("ROLLBACK TO unit")
        raw.execute("RELEASE unit")
        return _Failed(unavailable(why) or why)
    raw.execute("RELEASE unit")
    return result


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

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

Short reads that an event loop comes to in one turn see one state: that of the first of them. What was written
before a request came in is in it, since what the loop has heard of by then it turns to later.

It knows no table.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import ClassVar, Final

from proxy.errors import StoreUnavailable
from proxy.store.database import Result, Unit
from proxy.store.failures import translated
from proxy.store.holding import HoldingConnection
from proxy.store.jobs import Failed, Job, Outcome, raised, run, soon, tell
from proxy.store.sqlite_file import BUSY_SECONDS, CHECKPOINT_PAGES, connect, is_locked, roll_back, transaction
from proxy.store.statements import SqliteConnection

_READERS: Final = 4
_WRITING_CACHE: Final = 16_384
"""Kilobytes of the file that the writing connection keeps in memory. SQLite's own 2,048 are less than the
pages that transactions of some dozen sessions change: it would read them again, and write them twice."""
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

_LASTING: Final = f"PRAGMA synchronous=FULL; PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}"
"""A COMMIT waits for the disk: it may outlive a loss of power."""
_PASSING: Final = "PRAGMA synchronous=NORMAL; PRAGMA wal_autocheckpoint=0"
"""A COMMIT waits for nothing, not even for the copying of the write-ahead log into the file."""
_IMPATIENT: Final = "PRAGMA busy_timeout=0"
"""Another process's lock is an error at once."""


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
        self._waiting: deque[Job] = deque()
        self._busy = False
        """Whether someone has the writing connection. Nobody else may touch it then."""
        self._called: asyncio.AbstractEventLoop | None = None
        """The event loop that will see to what waits before it waits itself."""

        self._lasting = True
        """How the writing connection commits (`_LASTING`, `_PASSING`)."""
        self._spared_until = 0.0
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        """What the writer's thread has to do."""
        self._reads: SimpleQueue[Job | None] = SimpleQueue()
        self._near: tuple[sqlite3.Connection, SqliteConnection] | None = None
        """Reads on event loops, by whoever holds the next."""
        self._reading = threading.Lock()
        self._looking: asyncio.AbstractEventLoop | None = None
        """The event loop that holds it, until it has run what was there to be run at once."""
        with translated():
            self._writing = connect(path)
            self._writing.executescript(_IMPATIENT)
            self._writing.execute(f"PRAGMA cache_size=-{_WRITING_CACHE}")
            self._on_writing = HoldingConnection(self._writing)
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
        loop = asyncio.get_running_loop()
        if short and self._looks(loop):
            try:
                return self._read_here(unit)
            except sqlite3.OperationalError as why:
                if not is_locked(why):
                    raise raised(why) from why
        future: asyncio.Future[Result] = loop.create_future()
        with self._turn:
            if self._closed:
                raise _closed()
            self._reads.put(Job(unit=unit, future=future, loop=loop))
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
            self._waiting.append(Job(unit=unit, future=future, loop=loop, short=short, lasting=lasting))
            calls = not self._busy and self._called is not loop
            if calls:
                self._called = loop
        if calls:
            loop.call_soon(self._go_on)
        return future

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
        if self._looking is not None and not self._looking.is_running():
            self._look_away()  # it ended in the turn in which it read
        with self._reading:
            if self._near is not None:
                self._near[0].close()
                self._near = None

    # ----------------------------------------------------------------------------------- reading

    def _looks(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Tell whether this event loop may read on the connection near it; from now on it alone does."""
        if self._is_slow():
            return False
        if self._looking is loop:
            return True
        if not self._reading.acquire(blocking=False):
            return False
        self._looking = loop
        loop.call_soon(self._look_away)
        return True

    def _look_away(self) -> None:
        """End what the units that came together saw, so that the next ones see what was written since."""
        self._looking = None
        try:
            if self._near is not None:
                roll_back(self._near[0])  # nothing was written, and this takes no work on either side
        finally:
            self._reading.release()

    def _read_here(self, unit: Unit[Result]) -> Result:
        """Run a short unit; raises SQLITE_BUSY rather than wait."""
        if self._closed:
            raise _closed()
        if self._near is None:
            with translated():
                made = connect(self._path)
                made.executescript(_IMPATIENT)
                self._near = (made, SqliteConnection(made))
        raw, connection = self._near
        started = time.monotonic()
        if not raw.in_transaction:
            raw.execute("BEGIN")
        result = unit(connection)
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
                    raw = connect(self._path)
                with transaction(raw, "BEGIN"):
                    result = job.unit(SqliteConnection(raw))
            except Exception as why:  # noqa: BLE001 - it belongs to the caller, who waits in another thread
                result = Failed(error=raised(why))
            tell([(job, result)])
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

    def _take(self, most: int, *, short: bool = False) -> list[Job]:
        """Take the first that wait; with `short`, only up to the first that is not."""
        batch: list[Job] = []
        while self._waiting and len(batch) < most and (self._waiting[0].short or not short):
            batch.append(self._waiting.popleft())
        return batch

    def _hand_over(self, batch: list[Job]) -> None:
        """Let the thread have the writing connection, and run a batch on it."""
        self._busy = True
        self._tasks.put(partial(self._run_there, batch))

    def _run_here(self, batch: list[Job]) -> None:
        """Run a batch on this event loop, as far as it gets in time."""
        raw = self._writing
        lasting = any(job.lasting for job in batch)
        outcomes: list[Outcome] = []
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
            self._on_writing.write()
            self._note(time.monotonic() - now)
            if not lasting:
                raw.execute("COMMIT")
        except Exception:  # noqa: BLE001 - the thread runs them again, and finds out whose it is
            self._take_back()
            self._hand_over(batch)
            return
        except BaseException:
            self._take_back()
            self._let_go([])
            raise
        late = batch[len(outcomes) :]
        if lasting:
            with self._turn:
                self._waiting.extendleft(reversed(late))
            self._tasks.put(partial(self._commit, outcomes))
        else:
            self._let_go(late)
            tell(outcomes, asyncio.get_running_loop())

    def _take_back(self) -> None:
        """Take back what units have written on this event loop."""
        self._on_writing.forget()
        roll_back(self._writing)

    def _let_go(self, late: list[Job]) -> None:
        """Let go of the writing connection, on an event loop; for `late` ones it had no time."""
        with self._turn:
            self._waiting.extendleft(reversed(late))
            self._busy = False
            if self._waiting:
                self._called = asyncio.get_running_loop()
                self._called.call_soon(self._go_on)
            self._turn.notify_all()

    def _run_there(self, batch: list[Job]) -> None:
        """Run a batch in the thread, which may wait for another process's lock."""
        self._commit_so(lasting=any(job.lasting for job in batch))
        self._writing.executescript(f"PRAGMA busy_timeout={int(BUSY_SECONDS * 1000)}")
        outcomes = self._write(batch)
        self._writing.executescript(_IMPATIENT)
        self._finish(outcomes)

    def _write(self, batch: list[Job]) -> list[Outcome]:
        """Run a batch in one transaction."""
        try:
            with transaction(self._writing, "BEGIN IMMEDIATE"):
                return [(job, run(self._writing, job, alone=len(batch) == 1)) for job in batch]
        except Exception as why:  # noqa: BLE001 - it belongs to the callers, who wait in another thread
            # The transaction as a whole failed (locked, full, or the one unit in it): nobody's unit is kept.
            return [(job, Failed(error=raised(why))) for job in batch]

    def _commit(self, outcomes: list[Outcome]) -> None:
        """Commit what an event loop has run, in the thread."""
        try:
            self._writing.execute("COMMIT")
        except Exception as why:  # noqa: BLE001 - it belongs to the callers, who wait in another thread
            roll_back(self._writing)
            outcomes = [(job, Failed(error=raised(why))) for job, _ in outcomes]
        self._finish(outcomes)

    def _finish(self, outcomes: list[Outcome]) -> None:
        """Let go of the writing connection, in the thread, and let the next transaction begin."""
        tell(outcomes)
        with self._turn:
            self._busy = False
            if self._waiting and not (
                self._waiting[0].short and not self._is_slow() and soon(self._waiting[0].loop, self._go_on)
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


def _closed() -> StoreUnavailable:
    return StoreUnavailable("The store cannot be used. It is closed: the process is stopping.")

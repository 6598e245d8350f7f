"""SQLite: the writer, the readers, the file, and statements."""

from __future__ import annotations

import asyncio
import gc
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
from sqlalchemy import (
    Boolean,
    Column,
    DateTime,
    Integer,
    MetaData,
    Table,
    Text,
    bindparam,
    insert,
    literal_column,
    select,
    text,
    union_all,
    update,
)
from sqlalchemy.schema import CreateTable

from proxy.errors import StoreUnavailable
from proxy.store import sqlite
from proxy.store import sqlite as statements
from proxy.store.database import StoreConnection, Unit
from proxy.store.sqlite import SqliteConnection, SqliteDatabase, connect, create_file, sqlite_engine

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "palimpsest.db"
    create_file(file)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE names (name TEXT)")
    return file


def put(connection: StoreConnection, name: str) -> None:
    connection.execute(text("INSERT INTO names VALUES (:name)"), {"name": name})


def names(connection: StoreConnection) -> list[str]:
    return sorted(connection.execute(text("SELECT name FROM names")).scalars())


class Held:
    """Keeps the writer busy for a moment, so that other writes must wait."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self._begun, self._go_on = threading.Event(), threading.Event()

    async def __aenter__(self) -> None:
        self._write = asyncio.get_running_loop().create_task(self._database.write(self._hold))
        await asyncio.to_thread(self._begun.wait)
        asyncio.get_running_loop().call_later(0.05, self._go_on.set)

    async def __aexit__(self, *_: object) -> None:
        await self._write

    def _hold(self, connection: StoreConnection) -> None:
        self._begun.set()
        assert self._go_on.wait(10)
        put(connection, "held")


async def test_the_log_in_use_survives_what_other_processes_close(path: Path) -> None:
    database = SqliteDatabase(path)
    await database.write(partial(put, name="a"))
    create_file(path)  # as a migration of an open store does
    look = "import sqlite3, sys; print(sqlite3.connect(sys.argv[1]).execute('SELECT name FROM names').fetchall())"
    command = [sys.executable, "-c", look, str(path)]
    looked = await asyncio.to_thread(subprocess.check_output, command, text=True)
    assert looked == "[('a',)]\n"
    assert path.with_name(f"{path.name}-wal").stat().st_size > 0
    assert await asyncio.to_thread(database._read_there, names) == ["a"]
    await database.close()


async def test_a_copy_that_is_made_amid_writes_ends_and_takes_writes_itself(path: Path) -> None:
    database, copied = SqliteDatabase(path), False
    # More than `.backup` copies between two looks at whether something was written.
    for _ in range(300):
        await database.write(partial(put, name="long" * 1_000))

    async def write() -> None:
        while not copied:
            await database.write(partial(put, name="b"))

    def copy() -> None:
        with closing(sqlite3.connect(path)) as source:
            source.execute("VACUUM INTO ?", (str(path.with_name("copy.db")),))

    writes = asyncio.get_running_loop().create_task(write())
    await asyncio.to_thread(copy)
    copied = True
    await writes
    await database.close()
    restored = SqliteDatabase(path.with_name("copy.db"))
    await restored.write(partial(put, name="c"))
    assert len([name for name in await restored.read(names) if name != "b"]) == 301
    await restored.close()


def setting(connection: StoreConnection, name: str) -> object:
    return connection.execute(text(f"PRAGMA {name}")).scalar_one_or_none()


async def test_only_its_owner_can_read_the_file(path: Path) -> None:
    database = SqliteDatabase(path)
    await database.write(partial(put, name="a"))
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    await database.close()
    assert modes == {"palimpsest.db": 0o600, "palimpsest.db-wal": 0o600, "palimpsest.db-shm": 0o600}


async def test_commits_survive_a_power_loss_and_deletes_overwrite_the_file(path: Path) -> None:
    database = SqliteDatabase(path)
    runs: tuple[Any, ...] = (database.write, database.read, partial(database.read, short=True))
    # The writer tries again itself, and an event loop waits for no lock.
    for run, patience in zip(runs, (0, 15_000, 0), strict=True):
        assert await run(partial(setting, name="journal_mode")) == "wal"
        assert await run(partial(setting, name="synchronous")) == 2
        assert await run(partial(setting, name="secure_delete")) == 1
        assert await run(partial(setting, name="busy_timeout")) == patience
    await database.close()


async def test_only_durable_commits_wait_for_the_disk(path: Path) -> None:
    database = SqliteDatabase(path)
    found: list[tuple[object, object]] = []

    def note(connection: StoreConnection) -> None:
        found.append((setting(connection, "synchronous"), setting(connection, "wal_autocheckpoint")))

    for durable in (True, False, False, True):
        await database.write(note, durable=durable)
    async with Held(database), asyncio.TaskGroup() as tasks:  # two in one transaction: both are durable
        tasks.create_task(database.write(note, durable=False))
        tasks.create_task(database.write(note, durable=True))
        await asyncio.sleep(0)
    assert found == [(2, 4_000), (1, 0), (1, 0), (2, 4_000), (2, 4_000), (2, 4_000)]
    await database.close()


async def test_writes_that_wait_share_one_transaction(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = SqliteDatabase(path)
    batches: list[int] = []
    commit = SqliteDatabase._commit

    def counting(self: SqliteDatabase, batch: list[Any]) -> list[Any]:
        batches.append(len(batch))
        return commit(self, batch)

    monkeypatch.setattr(SqliteDatabase, "_commit", counting)
    async with Held(database), asyncio.TaskGroup() as tasks:
        for number in range(300):
            tasks.create_task(database.write(partial(put, name=str(number))))
        await asyncio.sleep(0)
    assert batches == [1, *[32] * 9, 12]
    assert len(await database.read(names)) == 301
    await database.close()


async def test_a_lock_that_is_held_too_long_is_told_and_harms_no_later_write(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "BUSY_SECONDS", 0.05)
    database = SqliteDatabase(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(StoreUnavailable, match="Another process holds its lock"):
            await database.write(partial(put, name="a"))
        assert await database.read(names) == []  # readers do not wait for a writer
        other.execute("COMMIT")
    await database.write(partial(put, name="b"))
    assert await database.read(names) == ["b"]
    await database.close()


async def test_the_writer_tries_again_until_another_process_lets_go_of_its_lock(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = threading.Semaphore(0)
    monkeypatch.setattr(sqlite.time, "sleep", lambda _: tries.release())
    database = SqliteDatabase(path)
    async with asyncio.TaskGroup() as tasks:
        with closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            written = tasks.create_task(database.write(partial(put, name="a")))
            for _ in range(3):
                assert await asyncio.to_thread(tries.acquire, timeout=10)
            assert not written.done()
            other.execute("COMMIT")
    assert await database.read(names) == ["a"]
    await database.close()


@pytest.mark.parametrize("commits", [True, False])
async def test_a_probe_that_finds_the_lock_taken_by_a_writer_who_gets_on_finds_nothing_wrong(
    path: Path, monkeypatch: pytest.MonkeyPatch, *, commits: bool
) -> None:
    database, loop = SqliteDatabase(path), asyncio.get_running_loop()

    def never_in_turn(*_: object) -> None:
        if commits:
            asyncio.run_coroutine_threadsafe(database.write(partial(put, name="written")), loop).result()
        locked = sqlite3.OperationalError("database is locked")
        locked.sqlite_errorcode = sqlite3.SQLITE_BUSY
        raise StoreUnavailable("locked") from locked

    monkeypatch.setattr(sqlite, "_probe_file", never_in_turn)
    if commits:
        await database.probe(lambda _: None, same=True)
    else:
        with pytest.raises(StoreUnavailable):
            await database.probe(lambda _: None, same=True)
    await database.close()


async def test_where_the_disk_is_full_everyone_in_the_transaction_is_told(path: Path) -> None:
    database = SqliteDatabase(path)

    def fill(connection: StoreConnection) -> None:
        # No smaller than the file is: it cannot insert_nodes any more.
        connection.execute(text("PRAGMA max_page_count = 1"))
        for number in range(2_000):
            put(connection, f"{number:0500}")

    async with Held(database), asyncio.TaskGroup() as tasks:
        others = [tasks.create_task(_outcome(database, unit)) for unit in (partial(put, name="other"), fill)]
        await asyncio.sleep(0)
    assert [type(task.result()) for task in others] == [StoreUnavailable, StoreUnavailable]
    assert await database.read(names) == ["held"]
    await database.write(partial(put, name="next"))
    assert await database.read(names) == ["held", "next"]
    await database.close()


async def _outcome(database: SqliteDatabase, unit: Unit[None]) -> BaseException | None:
    try:
        await database.write(unit)
    except StoreUnavailable as why:
        return why
    return None


@pytest.mark.parametrize("durable", [False, True])
async def test_a_transaction_that_cannot_be_committed_is_told_and_harms_no_later_write(
    path: Path, durable: bool
) -> None:
    database = SqliteDatabase(path)
    database._writing.executescript(
        "PRAGMA foreign_keys=ON; CREATE TABLE a (id INTEGER PRIMARY KEY);"
        "CREATE TABLE b (id INTEGER REFERENCES a (id) DEFERRABLE INITIALLY DEFERRED)"
    )

    def orphan(connection: StoreConnection) -> None:
        put(connection, "orphan")
        connection.execute(text("INSERT INTO b VALUES (1)"))  # it is the COMMIT that finds fault with it

    with pytest.raises(sqlite3.IntegrityError):
        await database.write(orphan, durable=durable)
    await database.write(partial(put, name="next"), durable=durable)
    assert await database.read(names) == ["next"]
    await database.close()


class Where:
    """Writes, and records the thread."""

    def __init__(self) -> None:
        self.threads: dict[str, str] = {}

    def unit(self, name: str) -> Unit[None]:
        def write(connection: StoreConnection) -> None:
            self.threads[name] = threading.current_thread().name
            put(connection, name)

        return write


async def test_writes_run_in_one_thread_and_short_reads_on_the_event_loop(path: Path) -> None:
    database, where, here = SqliteDatabase(path), Where(), threading.current_thread().name
    for name, durable in (("a", True), ("b", False)):
        await database.write(where.unit(name), durable=durable)
        with closing(sqlite3.connect(path)) as other:  # whoever hears of it can rely on it
            assert (name,) in other.execute("SELECT name FROM names").fetchall()
    assert where.threads == {"a": "palimpsest-write", "b": "palimpsest-write"}
    seen = [await database.read(lambda _: threading.current_thread().name, short=short) for short in (True, False)]
    assert seen[0] == here
    assert seen[1].startswith("palimpsest-read_")
    await database.close()


async def test_units_run_in_the_order_of_submission(path: Path) -> None:
    database = SqliteDatabase(path)
    order: list[int] = []

    def note(_: StoreConnection, number: int) -> None:
        order.append(number)

    async with Held(database), asyncio.TaskGroup() as tasks:
        for number in range(300):
            tasks.create_task(database.write(partial(note, number=number)))
        await asyncio.sleep(0)
    assert order == list(range(300))
    await database.close()


async def test_after_a_slow_read_on_the_event_loop_reads_run_in_threads_for_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, here = SqliteDatabase(path), threading.current_thread().name
    monkeypatch.setattr(sqlite, "_SLOW_SECONDS", -1)  # each is slow
    monkeypatch.setattr(sqlite, "_SPARED_SECONDS", 600)
    reads = [database.read(lambda _: threading.current_thread().name, short=True) for _ in range(3)]
    first, *others = await asyncio.gather(*reads)
    assert first == here
    assert all(name.startswith("palimpsest-read_") for name in others)
    database._slow_until = 0  # the while is over
    assert await database.read(lambda _: threading.current_thread().name, short=True) == here
    await database.close()


async def test_a_unit_that_fails_takes_back_its_own_work_only(path: Path) -> None:
    database = SqliteDatabase(path)

    def fail(connection: StoreConnection) -> None:
        put(connection, "failed")
        raise KeyError("mine")

    async with Held(database), asyncio.TaskGroup() as tasks:
        tasks.create_task(database.write(partial(put, name="before")))
        failing = tasks.create_task(_failure(database, fail))
        tasks.create_task(database.write(partial(put, name="after")))
        await asyncio.sleep(0)
    assert failing.result() == "'mine'"
    assert await _failure(database, fail) == "'mine'"  # alone in its transaction
    assert await database.read(names) == ["after", "before", "held"]
    await database.close()


async def test_an_insert_of_several_rows_that_fails_keeps_none_of_them(path: Path) -> None:
    database = SqliteDatabase(path)
    await database.write(lambda connection: connection.execute(text("CREATE UNIQUE INDEX one ON names (name)")))
    rows = [{"name": name} for name in ("failed", "before")]
    named = Table("names", MetaData(), Column("name", Text))

    async def fail() -> None:
        with pytest.raises(sqlite3.IntegrityError):
            await database.write(lambda connection: connection.execute(insert(named), rows))

    async with Held(database), asyncio.TaskGroup() as tasks:
        tasks.create_task(database.write(partial(put, name="before")))
        tasks.create_task(fail())
        tasks.create_task(database.write(partial(put, name="after")))
        await asyncio.sleep(0)
    await fail()  # alone in its transaction
    assert await database.read(names) == ["after", "before", "held"]
    await database.close()


async def _failure(database: SqliteDatabase, unit: Unit[None]) -> str:
    with pytest.raises(KeyError) as caught:
        await database.write(unit)
    return str(caught.value)


def put_all(connection: StoreConnection, names: Sequence[str]) -> list[int]:
    """Store the names of several callers; return to each how many were stored together."""
    if "bad" in names:
        raise ValueError("bad")
    for name in names:
        put(connection, name)
    return [len(names)] * len(names)


async def test_items_of_one_batch_run_together_in_the_order_of_their_coming(path: Path) -> None:
    database = SqliteDatabase(path)
    first = [database.submit(put_all, "a", size=0), database.submit(put_all, "b", size=0)]
    unit = asyncio.gather(database.write(partial(put, name="c")))
    await asyncio.sleep(0)
    assert await asyncio.gather(*first, database.submit(put_all, "d", size=0)) == [2, 2, 1]
    await unit
    assert await database.read(names) == ["a", "b", "c", "d"]
    await database.close()


async def test_an_item_that_fails_takes_no_other_one_with_it(path: Path) -> None:
    database = SqliteDatabase(path)
    writes = [database.submit(put_all, name, size=0) for name in ("a", "bad", "b")]
    results = await asyncio.gather(*writes, return_exceptions=True)
    assert [results[0], str(results[1]), results[2]] == [1, "bad", 1]
    assert await database.read(names) == ["a", "b"]
    await database.close()


async def _threads(database: SqliteDatabase, *sizes: float) -> list[str]:
    """Return the threads that run items of these sizes in one transaction."""
    async with Held(database):
        started = [database.submit(_thread_of_each, "a", size=size) for size in sizes]
        await asyncio.sleep(0)
    return await asyncio.gather(*started)


async def test_several_small_items_run_in_a_turn_of_the_event_loop_and_all_else_in_the_writer(path: Path) -> None:
    database, here, there = SqliteDatabase(path), threading.current_thread().name, "palimpsest-write"
    assert await _threads(database, 0, 0) == [here] * 2
    assert await _threads(database, 1_000, 1_000, 1_000) == [here] * 3
    assert await _threads(database, 0) == [there]  # the loop is not busy
    assert await _threads(database, 100_001, 100_000, 100_000) == [there] * 3  # they would hold it up
    assert await database.write(lambda _: threading.current_thread().name) == there
    async with Held(database):
        both = [database.submit(_thread_of_each, "a", size=0), database.submit(sqlite._run_units, lambda _: None)]
        await asyncio.sleep(0)
    assert (await asyncio.gather(*both))[0] == there  # the unit may take long
    await database.close()


def test_an_interrupt_during_a_batch_ends_the_event_loop_and_not_the_writer(path: Path) -> None:
    database, comes = SqliteDatabase(path), [True]

    def interrupted(connection: StoreConnection, items: Sequence[str]) -> list[int]:
        written = put_all(connection, items)
        if comes:
            comes.clear()
            raise KeyboardInterrupt
        return written

    async def submit() -> None:
        async with Held(database):
            started = [database.submit(interrupted, name, size=0) for name in "cd"]
            await asyncio.sleep(0)
        await asyncio.gather(*started)

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(submit())
    assert asyncio.run(database.write(names)) == ["c", "d", "held"]  # the writer goes on, and runs both again
    asyncio.run(database.close())


async def test_after_a_slow_batch_on_the_event_loop_batches_run_in_the_writer_for_a_while(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    database, here = SqliteDatabase(path), threading.current_thread().name
    monkeypatch.setattr(sqlite, "_SLOW_TURN_SECONDS", -1)  # each is slow
    monkeypatch.setattr(sqlite, "_SPARED_SECONDS", 600)
    assert [await _threads(database, 0, 0) for _ in range(2)] == [[here] * 2, ["palimpsest-write"] * 2]
    database._slow_until = 0  # the while is over
    assert await _threads(database, 0, 0) == [here] * 2
    await database.close()


async def test_a_batch_waits_no_longer_for_a_busy_event_loop_than_it_may(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "_TURN_SECONDS", 0.001)
    database, ran = SqliteDatabase(path), threading.Semaphore(0)

    def running(_: StoreConnection, items: Sequence[str]) -> list[str]:
        ran.release(len(items))
        return [threading.current_thread().name] * len(items)

    written = [database.submit(running, name, size=0) for name in "abc"]
    database._hand_over()
    for _ in written:
        assert ran.acquire(timeout=60)  # this turn of the loop goes on
    assert await asyncio.gather(*written) == ["palimpsest-write"] * 3
    await database.close()


def _thread_of_each(_: StoreConnection, items: Sequence[str]) -> list[str]:
    return [threading.current_thread().name] * len(items)


async def test_a_batch_does_not_wait_for_an_event_loop_that_has_ended(path: Path) -> None:
    database = SqliteDatabase(path)
    loop = asyncio.new_event_loop()

    async def submit() -> None:
        database.submit(put_all, "a", size=0)
        database._hand_over()

    await asyncio.to_thread(loop.run_until_complete, submit())
    loop.close()
    await database.close()
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM names").fetchall() == [("a",)]


async def test_what_is_asked_for_at_once_is_one_transaction(path: Path) -> None:
    database, commits = SqliteDatabase(path), list[str]()
    database._writing.set_trace_callback(commits.append)  # pyright: ignore[reportPrivateUsage]
    writes = [database.submit(put_all, f"{number}", durable=False, size=0) for number in range(3)]
    assert not any(write.done() for write in writes)
    assert not commits
    await asyncio.gather(*writes)
    assert commits.count("COMMIT") == 1
    assert await database.read(names) == ["0", "1", "2"]
    await database.close()


async def test_who_does_not_wait_for_a_unit_has_it_done_all_the_same(path: Path) -> None:
    database = SqliteDatabase(path)
    database.submit(put_all, "a", size=0).cancel()
    await database.close()
    with closing(sqlite3.connect(path)) as other:
        assert other.execute("SELECT name FROM names").fetchall() == [("a",)]


async def test_a_lock_of_another_process_holds_up_no_event_loop(path: Path) -> None:
    database, where = SqliteDatabase(path), Where()
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        # This can be called only if the event loop goes on.
        asyncio.get_running_loop().call_later(0.05, other.execute, "ROLLBACK")
        await database.write(where.unit("a"))
    assert where.threads == {"a": "palimpsest-write"}
    assert await database.read(names, short=True) == ["a"]
    await database.close()


async def test_a_short_read_waits_for_nothing_here(path: Path) -> None:
    database, runs = SqliteDatabase(path), list[str]()

    def busy_at_first(_: StoreConnection) -> str:
        runs.append(threading.current_thread().name)
        if len(runs) == 1:
            with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as other:
                other.execute("BEGIN IMMEDIATE")
                with closing(sqlite3.connect(path, isolation_level=None, timeout=0)) as another:
                    another.execute("BEGIN IMMEDIATE")
        return "read"

    assert await database.read(busy_at_first, short=True) == "read"
    with database._near_lock:  # another event loop reads
        assert await database.read(busy_at_first, short=True) == "read"
    assert runs[0] == threading.current_thread().name
    assert all(name.startswith("palimpsest-read_") for name in runs[1:])
    assert len(runs) == 3
    with pytest.raises(StoreUnavailable, match="run `palimpsest upgrade`"):
        await database.read(lambda connection: connection.execute(text("SELECT 1 FROM none")), short=True)
    await database.close()
    with pytest.raises(StoreUnavailable, match="It is closed"):
        await database.read(names, short=True)


async def test_a_short_read_sees_one_state_and_holds_up_no_checkpoint(path: Path) -> None:
    database = SqliteDatabase(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:

        def twice(connection: StoreConnection) -> list[list[str]]:
            before = names(connection)
            other.execute("INSERT INTO names VALUES ('a')")
            return [before, names(connection)]

        assert await database.read(twice, short=True) == [[], []]
        assert await database.read(names, short=True) == ["a"]
        assert other.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()[0] == 0  # nobody reads any more
    await database.write(partial(put, name="b"))
    assert await database.read(names, short=True) == ["a", "b"]
    await database.close()


async def test_a_short_read_that_fails_leaves_the_others_their_state(path: Path) -> None:
    database = SqliteDatabase(path)

    def fail(connection: StoreConnection) -> list[str]:
        names(connection)
        raise LookupError

    for _ in range(2):
        with pytest.raises(LookupError):
            await database.read(fail, short=True)
        assert await database.read(names, short=True) == []
    await database.write(partial(put, name="a"))
    assert await database.read(names, short=True) == ["a"]
    await database.close()


@contextmanager
def away(path: Path) -> Generator[None]:
    """Replace the file with a folder for a moment."""

    elsewhere = path.rename(path.with_name("elsewhere.db"))
    path.mkdir()
    yield
    path.rmdir()
    elsewhere.rename(path)


async def test_a_read_that_finds_no_file_is_told_and_harms_no_later_one(path: Path) -> None:
    database = SqliteDatabase(path)
    with away(path), pytest.raises(StoreUnavailable, match="cannot be opened"):
        await database.read(names)
    assert await database.read(names) == []
    await database.close()


async def test_a_read_sees_one_state_and_cannot_hold_up_the_writer(path: Path) -> None:
    database = SqliteDatabase(path)
    begun, go_on = threading.Event(), threading.Event()

    def twice(connection: StoreConnection) -> list[list[str]]:
        before = names(connection)
        begun.set()
        assert go_on.wait(10)
        return [before, names(connection)]

    async with asyncio.TaskGroup() as tasks:
        reading = tasks.create_task(database.read(twice))
        await asyncio.to_thread(begun.wait)
        await database.write(partial(put, name="a"))
        go_on.set()
    assert reading.result() == [[], []]
    assert await database.read(names) == ["a"]
    await database.close()


async def test_a_read_whose_caller_left_before_its_turn_is_not_begun(path: Path) -> None:
    database = SqliteDatabase(path)
    go_on, ran = threading.Event(), list[str]()

    def wait(_: StoreConnection) -> None:
        assert go_on.wait(10)

    async with asyncio.TaskGroup() as tasks:
        for _ in range(sqlite._READERS):
            tasks.create_task(database.read(wait))
        left = tasks.create_task(database.read(lambda _: ran.append("left")))
        stays = tasks.create_task(database.read(lambda _: ran.append("stays")))
        await asyncio.sleep(0)
        left.cancel()
        await asyncio.sleep(0)
        go_on.set()
        await stays
    assert ran == ["stays"]
    await database.close()


async def test_two_processes_worth_of_writers_share_a_file(path: Path) -> None:
    first, second = SqliteDatabase(path), SqliteDatabase(path)
    await asyncio.gather(*(base.write(partial(put, name=str(n))) for n in range(100) for base in (first, second)))
    assert len(await first.read(names)) == 200
    assert await first.read(names) == await second.read(names)
    await first.close()
    await second.close()


async def test_the_log_says_what_failed_for_a_caller_who_left(
    path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.store.database._logged", {})
    database = SqliteDatabase(path)
    begun, go_on = threading.Event(), threading.Event()

    def fail(_: StoreConnection) -> None:
        begun.set()
        assert go_on.wait(10)
        raise StoreUnavailable("The store cannot be used. It is a test.")

    left = asyncio.get_running_loop().create_task(database.write(fail))
    await asyncio.to_thread(begun.wait)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    go_on.set()
    await database.write(partial(put, name="a"))
    assert caplog.messages == ["a write failed after its caller was cancelled: The store cannot be used. It is a test."]
    assert await database.read(names) == ["a"]
    await database.close()


@pytest.mark.parametrize("then", ["write", "close"])
def test_what_an_event_loop_that_ended_had_asked_for_is_done(path: Path, then: str) -> None:
    database = SqliteDatabase(path)
    begun, go_on = threading.Event(), threading.Event()

    def hold(_: StoreConnection) -> None:
        begun.set()
        assert go_on.wait(10)

    async def leave() -> None:
        tasks = [
            asyncio.get_running_loop().create_task(write)
            for write in (database.write(hold), database.write(partial(put, name="a")))
        ]
        await asyncio.to_thread(begun.wait)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)

    asyncio.run(leave())
    go_on.set()

    async def stay() -> None:
        if then == "write":
            await database.write(partial(put, name="b"))
        await database.close()

    asyncio.run(stay())
    with closing(sqlite3.connect(path)) as other:
        found = [name for (name,) in other.execute("SELECT name FROM names ORDER BY name")]
    assert found == (["a", "b"] if then == "write" else ["a"])


def test_a_loop_that_ended_leaves_the_writer_working(path: Path) -> None:
    database = SqliteDatabase(path)
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")

        async def leave() -> None:
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(database.write(partial(put, name="a")), 0.01)

        asyncio.run(leave())
        other.execute("COMMIT")

    async def stay() -> list[str]:
        await database.write(partial(put, name="b"))
        found = await database.read(names)
        await database.close()
        return found

    assert asyncio.run(stay()) == ["a", "b"]


def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "palimpsest.db"
    create_file(path)
    path.chmod(0o640)
    create_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_several_that_make_one_file_at_once_wait_for_each_other(tmp_path: Path) -> None:
    at_once = threading.Barrier(4)

    def make(number: int) -> None:
        at_once.wait()
        create_file(tmp_path / f"{number}.db")

    with ThreadPoolExecutor(4) as pool:
        for number in range(50):
            list(pool.map(make, [number] * 4))


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"folder '.*/none' of its file does not exist"):
        create_file(tmp_path / "none" / "palimpsest.db")


def test_a_folder_in_place_of_the_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be opened: Is a directory"):
        create_file(tmp_path)


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    file = tmp_path / "palimpsest.db"
    file.write_text("no database " * 100)
    with pytest.raises(StoreUnavailable, match="no SQLite database"):
        create_file(file)


def test_an_engines_transactions_begin_as_they_are_told(tmp_path: Path) -> None:
    path = tmp_path / "palimpsest.db"
    create_file(path)
    engine = sqlite_engine(path)
    with closing(connect(path)) as other, engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        other.execute("PRAGMA busy_timeout=0")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
    engine.dispose()


THINGS = Table(
    "things", MetaData(), Column("id", Integer, primary_key=True), Column("name", Text), Column("on", Boolean)
)


@pytest.fixture
def connection() -> Generator[SqliteConnection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)) as raw:
        raw.execute("CREATE TABLE things (id INTEGER PRIMARY KEY, name TEXT, 'on' BOOLEAN)")
        yield SqliteConnection(raw)


def test_many_rows_go_in_at_once_and_none_is_nothing(connection: SqliteConnection) -> None:
    new = insert(THINGS)
    assert connection.execute(new, [{"id": n, "name": f"{n}", "on": n > 1} for n in (1, 2, 3)]).all() == []
    assert connection.execute(new, []).all() == []
    assert connection.execute(select(THINGS)).all() == [(1, "1", False), (2, "2", True), (3, "3", True)]


def test_a_statement_without_values_runs_as_often_as_it_is_asked_for(connection: SqliteConnection) -> None:
    connection.execute(insert(THINGS), {"id": 1, "name": "", "on": None})
    connection.execute(text("UPDATE things SET name = name || 'x'"), [{}, {}])
    assert connection.execute(select(THINGS.c.name)).scalars() == ["xx"]


def test_an_insert_of_several_rows_that_fails_is_taken_back_by_its_caller(connection: SqliteConnection) -> None:
    new = insert(THINGS)
    rows = [{"id": n, "name": f"{n}", "on": None} for n in (1, 2, 1, 3)]
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute(new, rows)
    # Who sees it fail takes back what it did.
    assert connection.execute(select(THINGS.c.id)).scalars() == [1, 2]


def test_null_is_neither_true_nor_false(connection: SqliteConnection) -> None:
    connection.execute(insert(THINGS), {"id": 1, "name": None, "on": None})
    row = connection.execute(select(THINGS)).one_or_none()
    assert row.on is None
    assert row.name is None


def test_an_insert_has_a_text_for_each_set_of_columns(connection: SqliteConnection) -> None:
    new = insert(THINGS)
    connection.execute(new, {"id": 1, "name": "a"})
    connection.execute(new, {"id": 2, "on": True})
    assert connection.execute(select(THINGS)).all() == [(1, "a", None), (2, None, True)]


def test_a_statement_is_compiled_once(connection: SqliteConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    compile_ = statements._Compiled

    def counting(statement: select, columns: tuple[str, ...]) -> object:  # type: ignore[valid-type]
        compiled.append(statement)
        return compile_(statement, columns)

    monkeypatch.setattr(statements, "_Compiled", counting)
    several = select(THINGS.c.name).where(THINGS.c.id.in_(bindparam("ids", expanding=True)))
    for size in range(9):
        assert connection.execute(several, {"ids": list(range(size))}).all() == []
    assert compiled == [several]
    form = statements._compiled(several, ())
    assert compiled == [several]
    assert sorted(form.texts) == [(0,), (1,), (2,), (4,), (8,)]


def test_statements_made_for_one_call_are_forgotten_in_the_end(connection: SqliteConnection) -> None:
    several = [select(THINGS).where(THINGS.c.id == number) for number in range(600)]
    first = ref(several[0])
    for statement in several:
        connection.execute(statement).all()
    del several, statement
    gc.collect()
    assert first() is None


def test_threads_that_meet_at_a_new_statement_all_get_its_rows(connection: SqliteConnection) -> None:
    new = select(THINGS.c.id, THINGS.c.on).where(THINGS.c.id > bindparam("least"))
    connection.execute(insert(THINGS), {"id": 1, "on": False})
    start, found = threading.Barrier(4), list[object]()

    def read() -> None:
        start.wait(10)
        found.append(connection.execute(new, {"least": 0}).one_or_none())

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [(1, False)] * 4


def test_columns_without_a_name_of_their_own_are_read_by_place(connection: SqliteConnection) -> None:
    row = connection.execute(select(literal_column("1"), literal_column("2 + 3"))).one_or_none()
    assert tuple(row) == (1, 5)


def test_several_lists_in_one_statement_keep_apart(connection: SqliteConnection) -> None:
    connection.execute(insert(THINGS), [{"id": n, "name": "ab"[n % 2], "on": None} for n in range(6)])
    both = (
        select(THINGS.c.id)
        .where(THINGS.c.id.in_(bindparam("ids", expanding=True)), THINGS.c.id < bindparam("below"))
        .where(THINGS.c.name.in_(bindparam("names", expanding=True)))
        .order_by(THINGS.c.id)
    )
    assert connection.execute(both, {"ids": [0, 1, 2, 5], "below": 5, "names": ["a"]}).scalars() == [0, 2]
    assert connection.execute(both, {"ids": [1, 3, 4], "below": 9, "names": ["b", "a", "c"]}).scalars() == [1, 3, 4]


def test_values_that_the_statement_itself_lists_are_bound_too(connection: SqliteConnection) -> None:
    connection.execute(insert(THINGS), [{"id": n, "name": "x", "on": None} for n in range(4)])
    assert connection.execute(select(THINGS.c.id).where(THINGS.c.id.in_([1, 3, 7]))).scalars() == [1, 3]


def test_text_and_unions_are_statements_too(connection: SqliteConnection) -> None:
    assert connection.execute(text("SELECT :a || '?' AS said"), {"a": "why"}).one_or_none().said == "why?"
    connection.execute(insert(THINGS), {"id": 1, "on": True})
    twice = union_all(select(THINGS.c.on), select(THINGS.c.on))
    assert connection.execute(twice).scalars() == [True, True]


def test_what_sqlite_refuses_is_its_own_error(connection: SqliteConnection) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        connection.execute(text("SELECT 1 FROM nowhere"))
    connection.execute(insert(THINGS), {"id": 1})
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute(insert(THINGS), {"id": 1})


def test_what_cannot_be_run_here_is_refused(connection: SqliteConnection) -> None:
    when = Column("at", DateTime)
    with pytest.raises(TypeError, match="DateTime"):
        connection.execute(select(THINGS.c.id).where(when > datetime.now(UTC)))
    with pytest.raises(TypeError, match="reads or writes rows"):
        connection.execute(CreateTable(THINGS))
    change = update(THINGS).where(THINGS.c.id.in_(bindparam("ids", expanding=True)))
    with pytest.raises(TypeError, match="one list at a time"):
        connection.execute(change, [{"name": "a", "ids": [1]}, {"name": "b", "ids": [2]}])
    connection.execute(change, [{"name": "a", "ids": [1, 2, 3]}])


def test_what_is_no_database_is_closed_again(tmp_path: Path) -> None:
    file = tmp_path / "palimpsest.db"
    file.write_bytes(b"no database" * 1000)
    with pytest.raises(sqlite3.DatabaseError):
        connect(file)
    opened = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert file not in opened

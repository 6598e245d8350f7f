from __future__ import annotations

import asyncio
import sqlite3
import stat
import threading
from collections.abc import Generator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import text

from proxy.errors import StoreUnavailable
from proxy.store import sqlite
from proxy.store.connection import Connection
from proxy.store.database import Unit
from proxy.store.sqlite import SqliteDatabase, create_file

pytestmark = pytest.mark.anyio


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "palimpsest.db"
    create_file(file)
    with closing(sqlite3.connect(file)) as connection:
        connection.execute("CREATE TABLE names (name TEXT)")
    return file


def put(connection: Connection, name: str) -> None:
    connection.execute(text("INSERT INTO names VALUES (:name)"), {"name": name})


def names(connection: Connection) -> list[str]:
    return sorted(connection.execute(text("SELECT name FROM names")).scalars())


class Held:
    """Keeps the writer busy for a moment, so that what is asked for meanwhile must wait."""

    def __init__(self, database: SqliteDatabase) -> None:
        self._database = database
        self._begun, self._go_on = threading.Event(), threading.Event()

    async def __aenter__(self) -> None:
        self._write = asyncio.get_running_loop().create_task(self._database.write(self._hold))
        await asyncio.to_thread(self._begun.wait)
        asyncio.get_running_loop().call_later(0.05, self._go_on.set)

    async def __aexit__(self, *_: object) -> None:
        await self._write

    def _hold(self, connection: Connection) -> None:
        self._begun.set()
        assert self._go_on.wait(10)
        put(connection, "held")


def setting(connection: Connection, name: str) -> object:
    return connection.execute(text(f"PRAGMA {name}")).scalar_one_or_none()


async def test_only_its_owner_can_read_the_file(path: Path) -> None:
    database = SqliteDatabase(path)
    await database.write(partial(put, name="a"))
    modes = {file.name: stat.S_IMODE(file.stat().st_mode) for file in path.parent.iterdir()}
    await database.close()
    assert modes == {"palimpsest.db": 0o600, "palimpsest.db-wal": 0o600, "palimpsest.db-shm": 0o600}


def test_a_file_that_is_there_keeps_its_mode(path: Path) -> None:
    path.chmod(0o640)
    create_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


async def test_what_was_committed_outlives_a_loss_of_power_and_what_was_deleted_is_gone(path: Path) -> None:
    database = SqliteDatabase(path)
    for run in (database.write, database.read):
        assert await run(partial(setting, name="journal_mode")) == "wal"
        assert await run(partial(setting, name="synchronous")) == 2
        assert await run(partial(setting, name="secure_delete")) == 1
        assert await run(partial(setting, name="busy_timeout")) == 15_000
    await database.close()


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


async def test_writes_that_wait_share_one_transaction(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    database = SqliteDatabase(path)
    batches: list[int] = []
    write = SqliteDatabase._write

    def counting(self: SqliteDatabase, batch: list[sqlite._Job]) -> list[sqlite._Outcome]:
        batches.append(len(batch))
        return write(self, batch)

    monkeypatch.setattr(SqliteDatabase, "_write", counting)
    async with Held(database), asyncio.TaskGroup() as tasks:
        for number in range(300):
            tasks.create_task(database.write(partial(put, name=str(number))))
        await asyncio.sleep(0)
    assert batches == [1, 256, 44]
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


async def test_where_the_disk_is_full_everyone_in_the_transaction_is_told(path: Path) -> None:
    database = SqliteDatabase(path)

    def fill(connection: Connection) -> None:
        # No smaller than the file is: it cannot grow any more.
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


@contextmanager
def away(path: Path) -> Generator[None]:
    """Put a folder in the place of the file for a moment."""
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

    def twice(connection: Connection) -> list[list[str]]:
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

    def wait(_: Connection) -> None:
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
    await asyncio.gather(
        *(base.write(partial(put, name=str(n))) for n in range(100) for base in (first, second))
    )
    assert len(await first.read(names)) == 200
    assert await first.read(names) == await second.read(names)
    await first.close()
    await second.close()


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

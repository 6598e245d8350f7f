"""What every database keeps to, as the store needs it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator
from functools import partial

import pytest
from sqlalchemy import select

from proxy.errors import StoreUnavailable
from proxy.store.database import Connection, Database
from proxy.store.schema import SECRETS, insert_new
from proxy.store.store import Store

pytestmark = pytest.mark.anyio


@pytest.fixture
async def database(store_url: str) -> AsyncGenerator[Database]:
    store = await Store.open(store_url)
    yield store._database
    await store.close()


def put(connection: Connection, name: str) -> str:
    insert_new(connection, SECRETS, [{"name": name, "value": "00"}])
    return name


def names(connection: Connection) -> set[str]:
    return set(connection.execute(select(SECRETS.c.name)).scalars())


async def test_what_is_written_is_there_when_the_write_returns(database: Database) -> None:
    assert await database.write(partial(put, name="a")) == "a"
    assert await database.read(names) == {"a"}


async def test_a_unit_that_fails_leaves_nothing_and_raises_its_own_error(database: Database) -> None:
    def fail(connection: Connection) -> None:
        put(connection, "half")
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        await database.write(fail)
    assert await database.read(names) == set()
    await database.write(partial(put, name="next"))
    assert await database.read(names) == {"next"}


async def test_of_many_units_at_once_only_the_failing_one_is_lost(database: Database) -> None:
    def unit(connection: Connection, number: int) -> int:
        put(connection, str(number))
        if number % 7 == 3:
            raise LookupError(str(number))
        return number

    results = await asyncio.gather(
        *(database.write(partial(unit, number=number)) for number in range(50)), return_exceptions=True
    )
    failed = {number for number in range(50) if number % 7 == 3}
    assert {number for number, result in enumerate(results) if isinstance(result, LookupError)} == failed
    assert [result for result in results if isinstance(result, int)] == sorted(set(range(50)) - failed)
    assert await database.read(names) == {str(number) for number in range(50) if number not in failed}


async def test_a_write_is_done_though_its_caller_is_cancelled(database: Database, store_url: str) -> None:
    go_on = threading.Event()
    loop = asyncio.get_running_loop()
    begun = asyncio.Event()

    def slow(connection: Connection) -> None:
        put(connection, "first")
        loop.call_soon_threadsafe(begun.set)
        # On PostgreSQL the unit runs in the loop's own thread, which must not be held up.
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(10)
        put(connection, "second")

    async with asyncio.TaskGroup() as tasks:
        caller = tasks.create_task(database.write(slow))
        await begun.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        waiting = tasks.create_task(database.write(partial(put, name="third")))
        go_on.set()
        await waiting
    await database.close()  # waits for what is under way
    again = await Store.open(store_url)
    assert await again._database.read(names) == {"first", "second", "third"}
    await again.close()


async def test_closing_finishes_what_was_asked_for_and_refuses_the_rest(
    database: Database, store_url: str
) -> None:
    async with asyncio.TaskGroup() as tasks:
        writes = [tasks.create_task(database.write(partial(put, name=str(number)))) for number in range(20)]
        await asyncio.sleep(0)  # let each ask
        await database.close()
    assert [write.result() for write in writes] == [str(number) for number in range(20)]
    with pytest.raises(StoreUnavailable, match="closed"):
        await database.write(partial(put, name="late"))
    with pytest.raises(StoreUnavailable, match="closed"):
        await database.read(names)
    await database.close()  # a second time changes nothing

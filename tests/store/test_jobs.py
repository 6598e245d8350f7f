from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import Generator
from contextlib import closing
from typing import Any

import pytest
from sqlalchemy import text

from proxy.errors import StoreUnavailable
from proxy.store.connection import Connection
from proxy.store.jobs import Failed, Job, raised, run, soon, tell

pytestmark = pytest.mark.anyio


@pytest.fixture
def raw() -> Generator[sqlite3.Connection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        connection.execute("CREATE TABLE names (name TEXT)")
        connection.execute("BEGIN")
        yield connection


def put(connection: Connection) -> str:
    connection.execute(text("INSERT INTO names VALUES ('a')"))
    return "done"


def fail(connection: Connection) -> None:
    put(connection)
    raise LookupError("no")


async def job(unit: Any = put) -> Job:
    loop = asyncio.get_running_loop()
    return Job(unit=unit, future=loop.create_future(), loop=loop)


async def test_a_unit_that_fails_among_others_takes_back_its_own_work_only(raw: sqlite3.Connection) -> None:
    assert run(raw, await job(), alone=False) == "done"
    failed = run(raw, await job(fail), alone=False)
    assert isinstance(failed, Failed)
    assert str(failed.error) == "no"
    assert raw.execute("SELECT count(*) FROM names").fetchone() == (1,)


async def test_a_unit_that_fails_alone_says_so_itself(raw: sqlite3.Connection) -> None:
    assert run(raw, await job(), alone=True) == "done"
    with pytest.raises(LookupError, match="no"):
        run(raw, await job(fail), alone=True)


async def test_callers_hear_what_came_of_their_units(caplog: pytest.LogCaptureFixture) -> None:
    here = asyncio.get_running_loop()
    done, failed, left = await job(), await job(), await job()
    left.future.cancel()
    with caplog.at_level(logging.ERROR):
        tell(
            [(done, 1), (failed, Failed(error=LookupError("no"))), (left, Failed(error=LookupError("lost")))],
            here,
        )
    assert done.future.result() == 1
    assert isinstance(failed.future.exception(), LookupError)
    assert [record.getMessage() for record in caplog.records] == [
        "work that nobody waits for any more failed: lost"
    ]
    later = await job()
    tell([(later, 2)])  # from elsewhere: not at once
    assert not later.future.done()
    assert await later.future == 2


def test_a_loop_that_ended_hears_nothing() -> None:
    loop = asyncio.new_event_loop()
    called: list[bool] = []
    assert soon(loop, lambda: called.append(True))
    loop.run_until_complete(asyncio.sleep(0))
    loop.close()
    assert not soon(loop, lambda: called.append(False))
    assert called == [True]


def test_what_means_that_the_store_cannot_be_used_is_told_so() -> None:
    assert isinstance(raised(TimeoutError()), StoreUnavailable)
    mistake = LookupError("no")
    assert raised(mistake) is mistake

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.conversation import ROOT
from proxy.errors import ConfigurationError, StoreUnavailable
from proxy.store.migrate import downgrade
from proxy.store.store import Store
from tests.support.talk import Talk, body

pytestmark = pytest.mark.anyio


async def test_an_open_store_is_ready(store: Store) -> None:
    await store.ready()


async def test_a_store_without_tables_says_what_to_do(tmp_path: Path) -> None:
    store = await Store.open(f"sqlite:///{tmp_path / 'palimpsest.db'}", migrate=False)
    with pytest.raises(StoreUnavailable, match=r"at revision none, not \d+: run `palimpsest upgrade`"):
        await store.ready()
    with pytest.raises(StoreUnavailable, match="palimpsest upgrade"):
        await store.session("tenant", "session")
    await store.close()


async def test_a_postgresql_store_without_tables_says_what_to_do(empty_postgres: str) -> None:
    store = await Store.open(empty_postgres, migrate=False)
    with pytest.raises(StoreUnavailable, match="palimpsest upgrade"):
        await store.ready()
    with pytest.raises(StoreUnavailable, match="palimpsest upgrade"):
        await store.session("tenant", "session")
    await store.close()


async def test_tables_that_were_taken_away_are_noticed(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path / 'palimpsest.db'}"
    store = await Store.open(url)
    await downgrade(url, "base")
    with pytest.raises(StoreUnavailable, match="palimpsest upgrade"):
        await store.ready()
    await store.close()


async def test_what_cannot_be_opened_says_why(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="not supported"):
        await Store.open("mysql://host/db")
    with pytest.raises(StoreUnavailable, match="does not exist"):
        await Store.open(f"sqlite:///{tmp_path / 'none' / 'palimpsest.db'}")
    with pytest.raises(StoreUnavailable, match="can be reached"):
        await Store.open("postgresql://127.0.0.1:9/db")


async def test_two_stores_on_one_database_see_one_another(store: Store, store_url: str) -> None:
    other = await Store.open(store_url)
    here, there = Talk(store=store), Talk(store=other)
    await asyncio.gather(*(talk.say(f"{number}", "ok") for number in range(15) for talk in (here, there)))
    session = await other.session("tenant", "session")
    assert session is not None
    assert (session.messages, session.requests) == (60, 30)
    assert await store.session("tenant", "session") == session
    assert len(await store.branches(here.key)) == 1
    await other.close()


async def test_what_was_settled_is_there_after_a_restart(store: Store, store_url: str) -> None:
    settled = await Talk(store=store).say("one", "1")
    await store.close()
    again = await Store.open(store_url)
    assert await Talk(store=again).texts(settled.head) == ["one", "1"]
    await again.close()


async def test_a_settlement_whose_caller_is_cancelled_is_stored(store: Store, store_url: str) -> None:
    talk = Talk(store=store)
    asked = body("user", "one")
    exchange = await talk.begin(asked)
    async with asyncio.TaskGroup() as tasks:
        settling = tasks.create_task(talk.settle(exchange, asked, replies=(body("assistant", "1"),)))
        await asyncio.sleep(0)  # it is asked for
        settling.cancel()
    assert settling.cancelled()
    await store.close()
    again = await Store.open(store_url)
    session = await again.session("tenant", "session")
    assert session is not None
    assert await Talk(store=again).texts(session.head) == ["one", "1"]
    await again.close()


@pytest.mark.parametrize("name", ["a\x00b", "\ud800"])
async def test_what_cannot_be_stored_is_not_there(store: Store, name: str) -> None:
    key = Talk(store=store).key
    assert await store.find(name) == []
    assert await store.sessions(name, limit=5) == ([], None)
    assert await store.path(key, name) == []
    assert await store.instructions(key, name) is None
    assert await store.exchange(name) is None
    assert await store.body(key, name) is None
    assert await store.tools(key, name) is None
    assert await store.cut_at(key, name, name, name) is None


async def test_nothing_is_asked_of_the_database_for_nothing(store: Store) -> None:
    await store.close()  # it would raise if it were asked
    assert await store.recorded("a\x00b", "node") == []
    assert await store.path("key", ROOT) == []
    assert await store.cut("key", [], "default", None) is None

"""Rows of sessions, and secrets."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path

import pytest
from sqlalchemy import func, select

from proxy.conversation import ROOT
from proxy.errors import ConfigurationError, InvalidRequest, StoreUnavailable
from proxy.store import Inferred, UnnamedRequest
from proxy.store.database import StoreConnection
from proxy.store.migrate import downgrade
from proxy.store.records import session_key
from proxy.store.schema import OF_A_SESSION
from proxy.store.sessions import open_sessions
from proxy.store.store import Store
from proxy.store.tree import instructions_at
from proxy.trimming import Cut
from tests.support.asides import HIDDEN, reply, say, summary
from tests.support.talk import Talk, body, message, opening

pytestmark = pytest.mark.anyio


async def test_sessions_of_one_name_belong_to_their_tenants(store: Store) -> None:
    for tenant in ("b", "a"):
        await Talk(store=store, tenant=tenant, session="same").say(f"of {tenant}", "ok")
    await Talk(store=store, tenant="a", session="other").say("x", "ok")
    mine = await store.session("a", "same")
    assert mine is not None
    assert (mine.tenant, mine.id, mine.key) == ("a", "same", session_key("a", "same"))
    assert await Talk(store=store).texts(mine.head) == []  # another session's key does not reach it
    assert [row.tenant for row in await store.find("same")] == ["a", "b"]
    assert await store.find("none") == []
    assert await store.session("c", "same") is None


@pytest.mark.parametrize("name", ["会话 🦊", "a b%2F", "x" * 500, "'; DROP TABLE sessions; --"])
async def test_any_name_is_a_name(store: Store, name: str) -> None:
    await Talk(store=store, tenant=name, session=name).say("one", "1")
    (row,) = await store.find(name)
    assert (row.tenant, row.id) == (name, name)


async def test_sessions_are_listed_page_by_page_newest_first(store: Store) -> None:
    for number in range(7):
        # Pairs share a time, so that the order within one must hold too.
        await Talk(store=store, tenant="a", session=f"s{number}").begin(created_at=1_000 + number // 2)
    await Talk(store=store, tenant="b", session="theirs").begin(created_at=1_001)
    pages, after = [], None
    while True:
        page, after = await store.sessions("a", limit=3, after=after)
        pages.append(page)
        if after is None:
            break
    assert [len(page) for page in pages] == [3, 3, 1]
    rows = [row for page in pages for row in page]
    assert {row.id for row in rows} == {f"s{number}" for number in range(7)}
    assert [row.updated_at for row in rows] == [1_003, 1_002, 1_002, 1_001, 1_001, 1_000, 1_000]
    everyone, _ = await store.sessions(None, limit=10)
    assert len(everyone) == 8
    assert await store.sessions("a", limit=7) == (rows, None)


async def test_a_page_shows_nobody_twice_though_a_session_moves_meanwhile(store: Store) -> None:
    for number in range(4):
        await Talk(store=store, tenant="a", session=f"s{number}").begin(created_at=1_000 + number)
    first, after = await store.sessions("a", limit=2)
    await Talk(store=store, tenant="a", session="s2").begin(created_at=2_000)
    second, end = await store.sessions("a", limit=2, after=after)
    assert [row.id for row in (*first, *second)] == ["s3", "s2", "s1", "s0"]
    assert end is None


async def test_a_cursor_of_another_making_is_refused(store: Store) -> None:
    with pytest.raises(InvalidRequest):
        await store.sessions("a", limit=2, after="yesterday")


async def test_deleting_leaves_nothing_of_the_session_and_everything_of_the_others(store: Store) -> None:
    gone, stays = (Talk(store=store, tenant="a", session="gone"), Talk(store=store, tenant="a", session="stays"))
    for talk in (gone, stays):
        asked = body("user", "one")
        exchange = await talk.begin(asked, instructions=(message("system", "x"),), tools=b"[{}]")
        settled = await talk.settle(
            exchange,
            asked,
            replies=(body("assistant", "1"),),
            cut=Cut(position=1, policy="default", version="v1", changes=(), tokens=1, messages=1, tool_calls=0),
        )
        await talk.begin(asked, forms=((settled.head, message("assistant", "one")),))
        second = await say(talk, "two", reply("2", HIDDEN))
        assert await store.keep_summary(talk.key, summary("a", second.head, 4))
        assert await store.lease(talk.key, "recipe", "worker", 1_000, 2_000)
        await store.keep_provider_ids(talk.tenant, talk.session, "chat", ["resp_1"], second.head)

    def rows(connection: StoreConnection) -> dict[str, dict[str, int]]:
        counted: dict[str, dict[str, int]] = {}
        for table in OF_A_SESSION:
            found = select(table.c.session, func.count().label("rows")).group_by(table.c.session)
            for row in connection.execute(found):
                counted.setdefault(row.session, {})[table.name] = row.rows
        return counted

    before = await store._database.read(rows)
    assert set(before[gone.key]) == {table.name for table in OF_A_SESSION}  # each table would show a rest
    assert await store.delete(gone.key)
    assert await store._database.read(rows) == {stays.key: before[stays.key]}
    assert not await store.delete(gone.key)
    assert await store.session("a", "gone") is None


async def test_a_session_with_an_exchange_under_way_is_not_among_the_least_recently_used(store: Store) -> None:
    waits = Talk(store=store, tenant="t", session="waits")
    asked = body("user", "a long question")
    exchange = await waits.begin(asked, created_at=1_000)
    for number in range(4):
        talk = Talk(store=store, tenant="t", session=f"s{number}")
        await talk.say("hi", "hello", settled_at=10_000_000 + number)
    assert await store.sweep(before=None, most=2) == 3
    assert await store.sweep(before=None, most=2) == 0
    await waits.settle(exchange, asked, replies=(body("assistant", "a long answer"),))
    rows, _ = await store.sessions("t", limit=10)
    assert {row.id for row in rows} == {"waits", "s3"}
    assert await store.sweep(before=2_000_000, most=1) == 1
    rows, _ = await store.sessions("t", limit=10)
    assert [row.id for row in rows] == ["s3"]


async def test_a_session_that_is_used_again_after_a_long_time_is_not_swept_amid_an_exchange(store: Store) -> None:
    talk = Talk(store=store, tenant="t", session="s")
    await talk.say("hi", "hello", settled_at=1_000)
    await talk.begin(body("user", "still there?"), created_at=3_000)
    assert await store.sweep(before=2_000, most=None) == 0
    assert await store.sweep(before=4_000, most=None) == 1  # an exchange that never ended


async def test_an_id_of_the_provider_s_leads_to_the_last_reply_that_came_with_it(store: Store) -> None:
    talk = Talk(store=store)
    heads = [(await say(talk, text, reply("a"))).head for text in ("one", "two")]
    for node in ("", heads[0], heads[1], ""):
        await store.keep_provider_ids(talk.tenant, talk.session, "chat", ["conv_1", f"resp_{node}"], node)
    place = await store.provider_place(talk.tenant, "chat", "conv_1")
    assert place is not None
    assert place.node == heads[1]


async def test_a_reply_was_given_behind_the_instructions_of_its_own_request(store: Store) -> None:
    talk = Talk(store=store)
    heads = []
    for number, told in enumerate(["be brief", None, "be kind"]):
        asked = body("user", str(number))
        exchange = await talk.begin(asked, instructions=None if told is None else (message("system", told),))
        heads.append((await talk.settle(exchange, asked, replies=(body("assistant", "a"),))).head)

    async def told_at(node: str) -> list[str]:
        found = await store._database.read(partial(instructions_at, key=talk.key, node=node))
        return [each.text for each in found]

    assert [await told_at(head) for head in heads] == [["be brief"], [], ["be kind"]]
    assert await told_at("ab" * 20) == ["be kind"]  # the newest


async def test_opening_a_session_makes_it_once_and_tells_its_newest_instructions(store: Store) -> None:
    talk = Talk(store=store)
    unit = partial(open_sessions, openings=[opening("exc_new", body("user", "hello"))])
    assert (await store._database.write(unit)).get(talk.key) is None
    made = await store.session("tenant", "session")
    assert (await store._database.write(unit))[talk.key] is None
    assert await store.session("tenant", "session") == made
    asked = body("user", "hello")
    exchange = await talk.begin(asked, instructions=(message("system", "be brief"),))
    assert (await store._database.write(unit))[talk.key] is None  # no request with them was answered
    await talk.settle(exchange, asked, replies=(body("assistant", "hi"),))
    session = await store.session("tenant", "session")
    assert session is not None
    assert session.instructions is not None
    assert (await store._database.write(unit))[talk.key] == session.instructions


async def test_a_secret_is_made_once_whoever_asks_first(store: Store, store_url: str) -> None:
    other = await Store.open(store_url)
    made = await asyncio.gather(*(one.secret("tenants") for _ in range(10) for one in (store, other)))
    assert len(set(made)) == 1
    assert len(made[0]) == 32
    await other.close()
    assert await store.secret("another") != made[0]
    assert await store.secret("tenants") == made[0]


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
    asked = UnnamedRequest(tenant="a\x00b", dialect="chat", messages=(), names=(), contents=(), instructions=None)
    assert await store.infer(asked) == Inferred()
    assert await store.path("key", ROOT) == []
    assert await store.cut("key", [], "default", None) is None

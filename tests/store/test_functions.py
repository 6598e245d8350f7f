"""PostgreSQL's functions write the same as `write_exchanges`, and leave to it what they cannot write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import ExitStack
from functools import partial
from random import Random
from typing import Any

import psycopg
import pytest
from msgspec.structs import replace
from sqlalchemy import make_url, select

from proxy.conversation import ROOT, Incoming, Mode, content_hash, node_id
from proxy.store import METADATA, Opening, Settled, Settlement, Status, Store, session_key
from proxy.store.database import StoreConnection
from proxy.store.exchanges import write_exchanges
from proxy.store.postgres import DriverConnection, PostgresDatabase
from proxy.store.records import HistoryQuery
from proxy.store.schema import CUTS, EXCHANGES, NODES, PENDING
from proxy.trimming import Change, Cut
from tests.store.test_batches import conversation, rows_of
from tests.support import postgres
from tests.support.forked import Forked, run_program
from tests.support.talk import body, message, opening, settlement

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncpg", "psycopg", "pooled"])
def url(request: pytest.FixtureRequest, _migrated_postgres: str) -> str:
    """URL of an empty store on PostgreSQL, for each driver, and as behind a pool that shares connections."""
    postgres.execute(_migrated_postgres, f"TRUNCATE {', '.join(METADATA.tables)}")
    if request.param == "pooled":
        return _migrated_postgres + ("&" if "?" in _migrated_postgres else "?") + "statement_cache_size=0"
    return _migrated_postgres.replace("postgresql", f"postgresql+{request.param}", 1)


@pytest.fixture
async def store(url: str) -> AsyncGenerator[Store]:
    opened = await Store.open(url, migrate=False)  # its tables exist already
    yield opened
    await opened.close()


def database_of(store: Store) -> PostgresDatabase:
    database = store._database
    assert isinstance(database, PostgresDatabase)
    return database


@pytest.fixture
def alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[list[Opening | Settlement]]:
    """Return a list that collects what the functions leave to `write_exchanges`."""
    left: list[list[Opening | Settlement]] = []
    writer = database_of(store)._writer
    transact: Callable[[Sequence[Opening | Settlement]], Awaitable[list[Any]]] = writer._transact

    async def noting(items: Sequence[Opening | Settlement]) -> list[Any]:
        left.append(list(items))
        return await transact(items)

    monkeypatch.setattr(writer, "_transact", noting)
    return left


def cut(position: int) -> Cut:
    return Cut(position=position, policy="default", version="v1", changes=(), tokens=3, messages=1, tool_calls=0)


async def exchange(store: Store, number: int, session: str, **changes: Any) -> Settled:
    """Begin and settle one exchange, at the root unless `changes` say otherwise."""
    asked, names = body("user", f"question {number}"), {"session": session, "kind": "resend"}
    name = f"exc_{number:08d}"
    began = store.begin(opening(name, asked, digest=str(number), **names))
    replies = (body("assistant", f"answer {number}"),)
    ended = settlement(name, asked, replies=replies, at_head=False, **names)
    return await store.settle(replace(ended, **changes), began)


@pytest.mark.parametrize("seed", range(2))
async def test_they_write_what_is_written_without_them(store: Store, alone: list[Any], seed: int) -> None:
    random = Random(seed)  # noqa: S311 - a test

    def varied(item: Opening | Settlement) -> Opening | Settlement:
        """Give it what a plain one may have."""
        if isinstance(item, Opening):
            brief = (message("system", random.choice(["be brief", "be kind"])),)
            tools = random.choice([None, b'[{"a":1}]'])
            return replace(item, instructions=random.choice([None, brief]), instructions_tokens=3, tools=tools)
        return replace(
            item,
            cost=random.choice([None, 0.25]),
            scale=random.choice([None, 1.5]),
            cut=cut(random.randrange(5)) if item.replies and random.random() < 0.4 else None,
            kind=random.choice([item.kind, item.kind, "side"]),
            moves_head=random.random() < 0.8,
            agent=random.choice([None, "a"]),
            relayed=random.choice([(), (0,)]),
        )

    items = [varied(item) for item in await conversation(store, "none", random)]
    one = [replace(item, tenant="one") for item in items]
    alone.clear()
    for item in one:
        await store._database.start(item)
    assert len(alone) < len(items) / 2
    for item in items:
        await store._database.write(partial(write_exchanges, items=[replace(item, tenant="other")]))
    read = store._database.read
    first, second = [await read(partial(rows_of, tenant=tenant)) for tenant in ("one", "other")]
    # A piece of evidence is another number for another tenant.
    assert [row["session"] for row in first.pop("evidence")] == [row["session"] for row in second.pop("evidence")]
    assert first == second
    recorded = select(NODES.c.node, NODES.c.recorded).order_by(NODES.c.node)

    def of_tenant(connection: StoreConnection, *, tenant: str) -> list[tuple[str, bool]]:
        keys = [session_key(tenant, session) for session in ("s0", "s1", "s2")]
        found = connection.execute(recorded.where(NODES.c.session.in_(keys)))
        return [(row.node, row.recorded == tenant) for row in found]

    assert await read(partial(of_tenant, tenant="one")) == await read(partial(of_tenant, tenant="other"))
    assert Status.COMPLETE.value in {row["status"] for row in first["exchanges"]}
    assert {row["status"] for row in first["pending"]} == {Status.PENDING.value}


async def statuses(store: Store) -> list[str]:
    def read(connection: StoreConnection) -> list[str]:
        return [
            status for table in (EXCHANGES, PENDING) for status in connection.execute(select(table.c.status)).scalars()
        ]

    return await store._database.read(read)


async def nodes_of(store: Store, session: str) -> set[str]:
    def read(connection: StoreConnection) -> set[str]:
        found = select(NODES.c.node).where(NODES.c.session == session_key("tenant", session))
        return set(connection.execute(found).scalars())

    return await store._database.read(read)


async def test_one_that_fails_takes_no_neighbour_with_it(store: Store, alone: list[Any]) -> None:
    bad = {"policy_version": "a\x00b"}  # no text of the database holds it
    results = await asyncio.gather(
        *(exchange(store, number, f"s{number}", **(bad if number == 7 else {})) for number in range(20)),
        return_exceptions=True,
    )
    assert [number for number, result in enumerate(results) if not isinstance(result, Settled)] == [7]
    assert len(alone) == 20  # nothing of that call was kept, so each was written by itself
    assert sorted(await statuses(store)) == ["complete"] * 19 + ["pending"]
    alone.clear()
    assert (await exchange(store, 20, "s20")).replies
    assert alone == []


async def test_a_locked_session_holds_up_nobody_else(store: Store, url: str) -> None:
    await exchange(store, 0, "s0")
    plain = make_url(url).set(drivername="postgresql")
    plain = plain.difference_update_query(["statement_cache_size"])
    async with await psycopg.AsyncConnection.connect(plain.render_as_string(hide_password=False)) as other:
        await other.execute("SELECT 1 FROM sessions FOR UPDATE")
        async with asyncio.TaskGroup() as tasks:
            waiting = tasks.create_task(exchange(store, 1, "s0"))
            for number in range(2, 6):
                assert (await asyncio.wait_for(exchange(store, number, f"s{number}"), 10)).replies
            assert not waiting.done()
            await other.rollback()
    assert waiting.result().replies
    assert await statuses(store) == ["complete"] * 6


async def test_connections_that_the_server_ends_lose_nothing_and_store_nothing_twice(store: Store, url: str) -> None:
    acknowledged: dict[int, Settled] = {}
    ended = 0

    async def client(first: int) -> None:
        for number in range(first, first + 90):
            if ended and number >= first + 10:  # until a connection was found in a call
                break
            acknowledged[number] = await exchange(store, number, f"s{number % 10}")

    async def killer() -> None:
        nonlocal ended
        plain = make_url(url).set(drivername="postgresql").difference_update_query(["statement_cache_size"])
        async with await psycopg.AsyncConnection.connect(
            plain.render_as_string(hide_password=False), autocommit=True
        ) as other:
            while len(acknowledged) < (80 if ended else 900):
                # The one that writes together: its last statement is a call.
                found = await other.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND query LIKE '%palimpsest_%' AND pid <> pg_backend_pid()"
                )
                ended += len(await found.fetchall())
                await asyncio.sleep(0.03)

    await asyncio.gather(killer(), *(client(100 * number) for number in range(10)))
    assert ended
    assert await statuses(store) == ["complete"] * len(acknowledged)
    for number, settled in acknowledged.items():
        assert {*settled.nodes, *settled.replies} <= await nodes_of(store, f"s{number % 10}")
    for number in range(10):
        session = await store.session("tenant", f"s{number}")
        assert session is not None
        requests = sum(other % 10 == number for other in acknowledged)
        assert (session.requests, session.tokens_sent) == (requests, requests * 60)


PROCESS = """
import asyncio, sys
from proxy.store import Store
from tests.store.test_functions import exchange

async def main(url, first, count):
    store = await Store.open(url, migrate=False)
    await asyncio.gather(*(exchange(store, first + number, "s0") for number in range(count)))
    await store.close()

asyncio.run(main(sys.argv[1], *map(int, sys.argv[2:])))
"""


async def test_two_processes_write_to_one_session(store: Store, url: str) -> None:
    with ExitStack() as stack:
        processes = [stack.enter_context(Forked(run_program, PROCESS, url, str(first), "20")) for first in (1000, 2000)]
        assert [await asyncio.to_thread(process.wait, 60) for process in processes] == [0, 0]
    session = await store.session("tenant", "s0")
    assert session is not None
    assert session.requests == 40
    assert len(await nodes_of(store, "s0")) == 80


async def test_appends_at_once_to_one_session_all_go_behind_one_another(store: Store) -> None:
    async def append(number: int) -> Settled:
        asked, name = body("user", f"question {number}"), f"exc_{number:08d}"
        began = store.begin(opening(name, asked, digest=str(number)))
        return await store.settle(settlement(name, asked, replies=(body("assistant", f"answer {number}"),)), began)

    results = await asyncio.gather(*(append(number) for number in range(30)))
    session = await store.session("tenant", "session")
    assert session is not None
    assert (session.messages, session.rounds, session.requests) == (60, 30, 30)
    assert {row.node for row in await store.path(session.key, session.head)} == {
        node for settled in results for node in (*settled.nodes, *settled.replies)
    }


async def test_a_second_settling_returns_what_the_first_one_made(store: Store) -> None:
    first = await exchange(store, 1, "s0")
    asked = body("user", "question 1")
    again = settlement("exc_00000001", asked, replies=(body("assistant", "other"),), session="s0", at_head=False)
    assert await store.settle(again) == replace(first, are_new=False)
    assert len(await nodes_of(store, "s0")) == 2


async def test_a_cancelled_caller_leaves_its_exchange_written(store: Store, url: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        callers = [tasks.create_task(exchange(store, number, f"s{number}")) for number in range(5)]
        await asyncio.sleep(0)  # let each ask
        for caller in callers:
            caller.cancel()
    await store.close()
    again = await Store.open(url)
    assert len(await statuses(again)) == 5
    await again.close()


def long_cut(number: int) -> Cut:
    """Return a cut that extends the previous one."""
    changes = tuple(
        Change(
            position=position,
            edit="clear_tool_results",
            reason=f"result {position} of a tool was cleared",
            message=message("assistant", f"[cleared {position}]"),
            tokens_before=100 + position,
            tokens_after=3,
        )
        for position in range(10 + number)
    )
    return replace(cut(2 * number + 1), changes=changes)


async def test_trims_are_settled_by_the_functions_each_against_the_one_before(
    store: Store, url: str, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def trim(at: Store, number: int, base: str, follows: str | None) -> tuple[str, str]:
        """Return the nodes of the cut and of the reply."""
        asked, name = body("user", f"question {number}"), f"exc_{number:032x}"
        began = at.begin(opening(name, asked, digest=str(number), base=base, kind="resend"))
        ended = settlement(name, asked, base=base, kind="resend", replies=(body("assistant", f"answer {number}"),))
        ended = replace(ended, at_head=False, cut=long_cut(number), follows=follows)
        settled = await at.settle(ended, began)
        return settled.nodes[-1], settled.head

    async def is_kept(at: Store, node: str, number: int) -> None:
        found = await at.cut_at(session_key("tenant", "session"), node, "default", None)
        assert found is not None
        assert found.changes == long_cut(number).changes

    def bases(connection: StoreConnection) -> list[str | None]:
        return list(connection.execute(select(CUTS.c.base).order_by(CUTS.c.position)).scalars())

    node, head = await trim(store, 0, ROOT, None)
    nodes = [node]
    monkeypatch.setattr("proxy.store.cuts._CHAIN_LENGTH", 8)
    for number in range(1, 12):
        node, head = await trim(store, number, head, node)
        nodes.append(node)
    assert alone == []
    for number, each in enumerate(nodes):
        await is_kept(store, each, number)
    # Every eighth is stored whole.
    assert await store._database.read(bases) == [None, *nodes[:7], None, *nodes[8:11]]
    # Another process does not have the previous cut in memory, so it reads it.
    other = await Store.open(url)
    node, head = await trim(other, 12, head, node)
    await is_kept(store, node, 12)
    await other.close()
    # The cuts in this process's memory may belong to a deleted session.
    await store.delete(session_key("tenant", "session"))
    node, head = await trim(store, 0, ROOT, None)
    assert await store.delete(session_key("tenant", "session"))
    again, head = await trim(store, 1, ROOT, None)
    node, head = await trim(store, 2, head, node)
    await is_kept(store, node, 2)
    await is_kept(store, again, 1)


async def test_the_index_of_exchanges_under_way_reuses_the_room_of_those_that_ended(
    _migrated_postgres: str,  # noqa: PT019 - its value is used
) -> None:
    postgres.execute(_migrated_postgres, f"TRUNCATE {', '.join(METADATA.tables)}")
    store = await Store.open(_migrated_postgres)
    for number in range(400):
        await exchange(store, number, "session")
    await store.close()
    with psycopg.connect(_migrated_postgres) as connection:
        size = connection.execute("SELECT pg_relation_size('pk_pending')").fetchone()
    assert size is not None
    assert size[0] <= 2 * 8192  # one page of entries


async def test_an_exchange_takes_three_round_trips_and_updates_no_index(
    store: Store, url: str, alone: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    texts: list[str] = []
    fetch = DriverConnection.fetch

    async def counting(self: DriverConnection, text: str, values: Sequence[Any]) -> Any:
        texts.append(text.partition("(")[0][:40])
        return await fetch(self, text, values)

    monkeypatch.setattr(DriverConnection, "fetch", counting)
    plain = make_url(url).set(drivername="postgresql").difference_update_query(["statement_cache_size"])
    postgres.execute(plain.render_as_string(hide_password=False), "SELECT pg_stat_reset()")
    known = [message("user", "hello"), message("assistant", "hi")]
    first = settlement("exc_first", body("user", "hello"), replies=(body("assistant", "hi"),), at_head=False)
    await store.settle(first, store.begin(opening("exc_first", body("user", "hello"))))
    base = node_id(node_id(ROOT, known[0]), known[1])

    async def ask(number: int) -> None:
        asked = body("user", f"question {number}")
        messages = [*known, asked.message]
        names = [node_id(ROOT, known[0]), base, node_id(base, asked.message)]
        contents = [content_hash(message) for message in messages]
        incoming = Incoming(names=names, contents=contents, replies=[1], mode=Mode.FULL)
        question = HistoryQuery(
            tenant="tenant", session="session", incoming=incoming, messages=messages, policy=None, agent=None
        )
        found = await store.recall(question)
        assert found.arrival.base == base
        name = f"exc_{number:08d}"
        began = store.begin(opening(name, asked, digest=str(number), base=base, kind="resend"))
        ended = settlement(name, asked, base=base, kind="resend", replies=(body("assistant", f"a {number}"),))
        if number % 3 == 0:
            ended = replace(ended, cut=long_cut(10 + number % 40), follows=trims[-1] if trims else None)
        settled = await store.settle(replace(ended, at_head=False), began)
        if number % 3 == 0:
            trims.append(settled.nodes[-1])

    trims: list[str] = []

    await ask(0)
    texts.clear()
    for number in range(1, 40):
        await ask(number)
        assert len(texts) == 3
        texts.clear()
    assert alone == []
    await store.close()  # what a connection did is counted at its end
    with psycopg.connect(plain.render_as_string(hide_password=False)) as other:
        found = other.execute("SELECT relname, n_tup_ins, n_tup_upd FROM pg_stat_user_tables WHERE n_tup_ins > 0")
        counted = {name: (inserted, updated) for name, inserted, updated in found.fetchall()}
    # No update adds index entries for an exchange, and no update of a session only locks it.
    assert counted["exchanges"] == (41, 0)
    assert counted["pending"] == (41, 0)
    assert counted["sessions"] == (1, 41)

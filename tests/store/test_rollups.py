"""Sums over exchanges: written as exchanges are settled, and read by group and time."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import insert, select

from proxy.errors import StoreUnavailable
from proxy.pipeline.statistics import stats_query
from proxy.store import HOUR, SUMS, ExchangeFigures, Group, StatsQuery, StatsRow, Status, Store, session_key
from proxy.store.database import StoreConnection
from proxy.store.rollups import fold, slot_of
from proxy.store.schema import ROLLUPS, SESSION_ROLLUPS, SESSIONS
from tests.support.stores import another_process
from tests.support.talk import Talk, body, opening, settlement

pytestmark = pytest.mark.anyio

ALL = StatsQuery(since=0, until=2**40, group="day")


async def ask(store: Store, exchange: str, **changes: Any) -> None:
    """Have one exchange settled; `changes` are of its figures, or of the settlement."""
    names = {name: changes.pop(name) for name in ("tenant", "session") if name in changes}
    own = {name: changes.pop(name) for name in ("settled_at", "status") if name in changes}
    asked = body("user", exchange)
    await store.begin(opening(exchange, asked, digest=exchange, **names))
    ended = settlement(exchange, asked, replies=(body("assistant", "yes"),), **names, **own)
    figures = replace(ended.figures or ExchangeFigures(model="", policy=""), **changes)
    await store.settle(replace(ended, figures=figures))


def by_group(rows: list[StatsRow], name: str = "requests") -> dict[str, Any]:
    return {row.group: row.sums[name] for row in rows}


async def test_exchanges_are_summed_up_by_each_group(store: Store) -> None:
    await ask(store, "exc_1", session="a", cost=1.0, cost_saved=-0.25, tokens_before=10)
    await ask(store, "exc_2", session="a", cost=2.0, model="m2", miss="trim")
    await ask(store, "exc_3", session="b", tenant="t2", policy="lean", settled_at=2_000 + 30 * HOUR)
    await ask(store, "exc_4", session="b", tenant="t2", settled_at=2_000 + HOUR, status=Status.PARTIAL)
    expected: dict[Group, dict[str, int]] = {
        "day": {"1970-01-01": 3, "1970-01-02": 1},
        "hour": {"1970-01-01T00:00Z": 2, "1970-01-01T01:00Z": 1, "1970-01-02T06:00Z": 1},
        "model": {"model": 3, "m2": 1},
        "policy": {"default": 3, "lean": 1},
        "tenant": {"tenant": 2, "t2": 2},
        "session": {"a": 2, "b": 2},
        "kind": {"append": 4},
        "status": {"complete": 3, "partial": 1},
        "dialect": {"chat": 4},
        "miss": {"": 3, "trim": 1},
    }
    for group, requests in expected.items():
        rows = (await store.stats_and_total(replace(ALL, group=group)))[0]
        assert by_group(rows) == requests, group
        if group != "miss":
            assert sum(row.sessions for row in rows) >= 2
    days = (await store.stats_and_total(ALL))[0]
    assert [(row.group, row.sessions) for row in days] == [("1970-01-01", 2), ("1970-01-02", 1)]  # by time
    _, total = await store.stats_and_total(ALL)
    assert (total.sums["requests"], total.sums["cost"], total.sums["cost_saved"], total.sessions) == (4, 4.0, -0.25, 2)


async def test_a_time_a_tenant_a_policy_and_a_session_can_be_chosen(store: Store) -> None:
    await ask(store, "exc_1", session="a")
    await ask(store, "exc_2", session="a", tenant="t2", policy="lean")
    await ask(store, "exc_3", session="a", tenant="t2", model="m2", settled_at=5 * HOUR)
    for chosen, requests in (
        ({"until": 5}, 2),
        ({"since": 5}, 1),
        ({"tenant": "t2"}, 2),
        ({"tenant": "nobody"}, 0),
        ({"policy": "lean"}, 1),
        ({"model": "m2", "tenant": "tenant"}, 0),
        ({"session": session_key("t2", "a")}, 2),
        ({"session": session_key("t2", "a"), "tenant": "tenant"}, 0),
    ):
        query = replace(ALL, **chosen)
        assert (await store.stats_and_total(query))[1].sums["requests"] == requests, chosen
        groups: tuple[Group, ...] = ("day", "policy", "session", "tenant")
        for group in groups:
            rows = (await store.stats_and_total(replace(query, group=group)))[0]
            assert sum(row.sums["requests"] for row in rows) == requests, (chosen, group)
        if "session" not in chosen:
            several: tuple[Group, ...] = ("model", "policy", "tenant", "status", "kind", "miss")
            together = await store.stats_by(query, several)
            one_by_one = [(await store.stats_and_total(replace(query, group=group)))[0] for group in several]
            assert together == dict(zip(several, one_by_one, strict=True))


async def test_what_is_settled_again_counts_once(store: Store) -> None:
    asked = body("user", "hi")
    await store.begin(opening("exc_1", asked))
    ended = settlement("exc_1", asked, replies=(body("assistant", "yes"),))
    for _ in range(3):
        await store.settle(ended)
    assert (await store.stats_and_total(ALL))[1].sums["requests"] == 1


async def test_what_ends_after_its_session_was_deleted_was_paid_all_the_same(store: Store) -> None:
    talk = Talk(store=store)
    asked = body("user", "hi")
    for number in range(2):
        exchange = await talk.begin(asked)
        assert await store.delete(talk.key)
        if number:  # there is another one of this name
            await store.begin(opening("exc_1", asked))
        await talk.settle(exchange, asked, replies=(body("assistant", "yes"),))
        assert (await store.stats_and_total(ALL))[1].sums["requests"] == number + 1
        assert (await store.stats_and_total(replace(ALL, group="session")))[0] == []


async def test_what_could_not_be_begun_counts_once_it_is_stored(store: Store) -> None:
    asked = body("user", "hi")
    ended = settlement("exc_1", asked, status=Status.COMPLETE, replies=(body("assistant", "yes"),))
    refused = asyncio.get_running_loop().create_future()
    refused.set_exception(StoreUnavailable("The store cannot be used."))
    with pytest.raises(StoreUnavailable):
        await store.settle(ended, refused)
    assert await store.circuit.closes(5)
    await store.settle(ended, store.begin(opening("exc_1", asked)))
    assert (await store.stats_and_total(ALL))[1].sums["requests"] == 1


async def test_sums_stay_when_a_session_is_deleted_and_its_own_go(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("hi", "yes")
    await store.delete(talk.key)
    _, total = await store.stats_and_total(ALL)
    assert (total.sums["requests"], total.sessions) == (1, 0)
    assert (await store.stats_and_total(replace(ALL, group="session")))[0] == []


def test_a_process_adds_to_a_row_of_its_own() -> None:
    assert [slot_of("exc_0f"), slot_of("exc_09"), slot_of("exc_x"), slot_of("")] == [15, 9, 0, 0]


async def test_a_month_is_summed_up_from_sums_alone(store: Store) -> None:
    """200 sessions of 50 requests, under three policies, by two models. No row of an exchange is there."""

    def fill(connection: StoreConnection) -> None:
        sums = dict.fromkeys(SUMS, 1)
        sessions: list[dict[str, Any]] = []
        theirs: list[dict[str, Any]] = []
        for number in range(200):
            key, hour = f"{number:032x}", 490_000 + 7 * number % 720
            sessions.append({"session": key, "tenant": f"t{number % 7}", "id": key, "updated_at": hour * HOUR})
            for kind, requests in (("first", 1), ("resend", 48), ("rewind", 1)):
                row = {"session": key, "hour": hour, "model": f"m{number % 2}", "policy": f"p{number % 3}"}
                theirs.append(row | sums | {"kind": kind, "status": "complete", "requests": requests})
        written = [column for column in SESSIONS.columns if column.computed is None]
        empty = {column.name: None if column.nullable else 0 for column in written} | {"head": ""}
        connection.execute(insert(SESSIONS), [empty | {"dialect": "chat"} | row for row in sessions])
        connection.execute(insert(SESSION_ROLLUPS), theirs)
        whole = {"slot": 0, "dialect": "chat", "miss": "", "status": "complete", **sums}
        wholes = [
            whole | {"hour": hour, "tenant": f"t{t}", "model": f"m{m}", "policy": f"p{p}", "kind": kind, "requests": n}
            for hour in range(490_000, 490_720, 12)
            for t in range(7)
            for m in range(2)
            for p in range(3)
            for kind, n in (("first", 1), ("resend", 31), ("rewind", 1))
        ]
        connection.execute(insert(ROLLUPS), wholes)

    await store._database.write(fill)
    groups: tuple[Group, ...] = ("day", "model", "policy", "tenant", "session", "kind")
    for group in groups:
        rows, total = await store.stats_and_total(replace(ALL, group=group))
        assert rows
        assert (total.sessions, total.sums["requests"]) == (200, 60 * 42 * 33)


async def test_folded_sums_are_the_same_sums(store: Store) -> None:
    now = 60 * 24  # hours since 1970
    for number in range(60):
        hours = (number % 4) * 500 + number % 3
        tenant = f"t{number % 2}"
        name = f"exc_{number:03d}{number % 16:x}"
        await ask(store, name, tenant=tenant, session=f"{tenant}-{number % 6}", settled_at=hours * HOUR, cost=0.5)

    async def told() -> list[Any]:
        found = [await store.stats_and_total(replace(ALL, group=group)) for group in ("day", "tenant", "session")]
        recent = replace(ALL, since=now - 2 * 24, until=now + 1, group="hour")
        return [*found, await store.stats_and_total(recent), await store.spent("t1", (now - 100) * HOUR)]

    before, rows = await told(), await rows_of(store)
    assert len(rows) > 40
    while await store.fold(now * HOUR):
        pass
    assert await told() == before
    folded = await rows_of(store)
    assert len(folded) < len(rows) / 2
    month_ago = now - 30 * 24
    assert all(row.slot == 0 for row in folded if row.hour < now - 2)
    assert all(row.hour % 24 == 0 for row in folded if row.hour < month_ago)
    assert any(row.hour % 24 for row in folded)
    await ask(store, "exc_late5", settled_at=HOUR)  # it waited in the spool
    while await store.fold(now * HOUR):
        pass
    assert (await store.stats_and_total(ALL))[1].sums["requests"] == 61
    assert len(await rows_of(store)) == len(folded) + 1


async def test_a_time_long_ago_begins_with_its_day(store: Store) -> None:
    now = datetime(2026, 11, 28, 6, 30, tzinfo=UTC)
    for number, days in enumerate((60, 30)):
        at = now - timedelta(days=days) + timedelta(hours=2)
        await ask(store, f"exc_{number}0", settled_at=int(at.timestamp() * 1000))
    while await store.fold(int(now.timestamp() * 1000)):
        pass
    for since, until, requests in (("60d", None, 2), ("59d", None, 1), ("2026-09-29T08:00Z", "2026-09-29T09:00Z", 1)):
        query = stats_query(now, group="day", since=since, until=until)
        assert (await store.stats_and_total(query))[1].sums["requests"] == requests
    assert stats_query(now, group="day", since="30d").since % 24 == 6


async def test_several_processes_fold_at_once(store_url: str) -> None:
    stores = [await Store.open(store_url) for _ in range(3)]
    for number in range(80):
        await ask(
            stores[0], f"exc_{number:03d}{number % 16:x}", session=f"s{number % 8}", settled_at=number % 30 * HOUR
        )

    async def fold_all(store: Store) -> None:
        while await store.fold(10_000 * HOUR):
            pass

    await asyncio.gather(*map(fold_all, stores))
    assert (await stores[0].stats_and_total(ALL))[1].sums["requests"] == 80
    assert len(await rows_of(stores[0])) == 2  # of two days
    for each in stores:
        await each.close()


async def test_who_erases_a_tenant_misses_no_sums_that_are_being_folded(store: Store, store_url: str) -> None:
    for number in range(4):
        await ask(store, f"exc_{number:03d}{number:x}", settled_at=HOUR)
    with another_process(store_url) as other:  # it has not committed when the tenant is erased
        assert fold(other, 10_000)
        erasing = asyncio.get_running_loop().create_task(store.erase("tenant"))
        await asyncio.wait([erasing], timeout=0.3)
    assert await erasing == 1
    assert await rows_of(store) == []


async def rows_of(store: Store) -> list[Any]:
    return list(await store._read(lambda connection: connection.execute(select(ROLLUPS)).all()))


async def test_groups_that_are_left_out_are_in_the_total(store: Store) -> None:
    for number in range(4):
        await ask(store, f"exc_{number}", model=f"m{number}")
    rows, total = await store.stats_and_total(replace(ALL, group="model", limit=2))
    assert (len(rows), total.sums["requests"]) == (2, 4)

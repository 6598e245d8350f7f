from __future__ import annotations

import pytest

from proxy.errors import InvalidRequest
from proxy.store.records import Status
from proxy.store.store import Store
from tests.support.talk import Talk, body, opening

pytestmark = pytest.mark.anyio


async def test_exchanges_are_listed_page_by_page_newest_first(store: Store) -> None:
    talk = Talk(store=store)
    made = [await talk.begin(created_at=1_000 + number // 2) for number in range(5)]
    await Talk(store=store, tenant="other").begin()
    first, after = await store.exchanges(talk.key, limit=2)
    second, more = await store.exchanges(talk.key, limit=2, after=after)
    third, end = await store.exchanges(talk.key, limit=2, after=more)
    assert [row.id for row in (*first, *second, *third)] == made[::-1]
    assert end is None
    assert (await store.exchanges(talk.key, limit=5))[1] is None
    with pytest.raises(InvalidRequest):
        await store.exchanges(talk.key, limit=5, after="x")


async def test_what_a_process_left_pending_is_interrupted_and_the_rest_is_not(store: Store) -> None:
    talk = Talk(store=store)
    await talk.say("one", "1")
    left = [
        await talk.begin(body("user", "two")),
        await Talk(store=store, tenant="other").begin(body("user", "two")),
    ]
    assert await store.interrupt_pending(5_000) == 2
    assert await store.interrupt_pending(6_000) == 0
    for exchange in left:
        row = await store.exchange(exchange)
        assert row is not None
        assert (row.status, row.settled_at) == (Status.INTERRUPTED, 5_000)
    done = await store.exchange(talk.exchanges[0])
    assert done is not None
    assert (done.status, done.settled_at) == (Status.COMPLETE, 2_000)


async def test_only_what_the_processes_with_these_marks_left_is_interrupted(store: Store) -> None:
    talk, other = Talk(store=store), Talk(store=store, tenant="other")
    ids = [f"exc_{n:024x}{mark}" for n, mark in enumerate(("aaaaaaaa", "bbbbbbbb", "cccccccc", "aaaaaaaa"))]
    for exchange in ids[:3]:
        await store.begin(opening(exchange, body("user", "hello"), session=talk.session))
    await store.begin(opening(ids[3], body("user", "hello"), session=other.session))
    assert await store.interrupt_pending(5_000, ()) == 0
    assert await store.interrupt_pending(5_000, ("dddddddd",)) == 0
    assert await store.interrupt_pending(5_000, ("aaaaaaaa", "cccccccc")) == 3
    rows = [await store.exchange(exchange) for exchange in ids]
    assert [row and row.status for row in rows] == [
        *(Status.INTERRUPTED, Status.PENDING, Status.INTERRUPTED, Status.INTERRUPTED)
    ]


async def test_an_exchange_nobody_knows_is_not_there(store: Store) -> None:
    assert await store.exchange("exc_none") is None

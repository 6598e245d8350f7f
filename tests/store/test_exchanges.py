from __future__ import annotations

import pytest

from proxy.errors import InvalidRequest
from proxy.store.records import Status
from proxy.store.store import Store
from tests.support.talk import Talk, body

pytestmark = pytest.mark.anyio


async def test_exchanges_are_listed_page_by_page_newest_first(store: Store) -> None:
    talk = Talk(store)
    made = [await talk.begin(created_at=1_000 + number // 2) for number in range(5)]
    await Talk(store, "other").begin()
    first, after = await store.exchanges(talk.key, limit=2)
    second, more = await store.exchanges(talk.key, limit=2, after=after)
    third, end = await store.exchanges(talk.key, limit=2, after=more)
    assert [row.id for row in (*first, *second, *third)] == made[::-1]
    assert end is None
    assert (await store.exchanges(talk.key, limit=5))[1] is None
    with pytest.raises(InvalidRequest):
        await store.exchanges(talk.key, limit=5, after="x")


async def test_the_last_one_is_the_newest_settled_or_not(store: Store) -> None:
    talk = Talk(store)
    assert await store.last_exchange(talk.key) is None
    await talk.say("one", "1")
    pending = await talk.begin(body("user", "two"), created_at=1_001)
    last = await store.last_exchange(talk.key)
    assert last is not None
    assert (last.id, last.status) == (pending, Status.PENDING)


async def test_what_a_process_left_pending_is_interrupted_and_the_rest_is_not(store: Store) -> None:
    talk = Talk(store)
    await talk.say("one", "1")
    left = [await talk.begin(body("user", "two")), await Talk(store, "other").begin(body("user", "two"))]
    assert await store.interrupt_pending(5_000) == 2
    assert await store.interrupt_pending(6_000) == 0
    for exchange in left:
        row = await store.exchange(exchange)
        assert row is not None
        assert (row.status, row.settled_at) == (Status.INTERRUPTED, 5_000)
    done = await store.exchange(talk.exchanges[0])
    assert done is not None
    assert (done.status, done.settled_at) == (Status.COMPLETE, 2_000)


async def test_an_exchange_nobody_knows_is_not_there(store: Store) -> None:
    assert await store.exchange("exc_none") is None


async def test_the_newest_request_that_said_the_same_is_found(store: Store) -> None:
    talk = Talk(store)
    assert await store.last_request(talk.key, "same") is None
    made = [
        await talk.begin(digest=digest, created_at=at)
        for digest, at in (("same", 1_000), ("same", 1_002), ("same", 1_001), ("other", 1_003))
    ]
    await Talk(store, "other").begin(digest="same", created_at=1_004)
    found = await store.last_request(talk.key, "same")
    assert found is not None
    assert (found.id, found.digest, found.status) == (made[1], "same", Status.PENDING)
    assert await store.last_request(talk.key, "none") is None
    assert await store.last_request(talk.key, "a\x00b") is None

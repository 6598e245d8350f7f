"""Leases: one holder at a time, renewed during the work, free after it or after the holder's death."""

from __future__ import annotations

import asyncio

import pytest

from proxy.errors import StoreUnavailable
from proxy.store import Store
from proxy.summaries.jobs import Terms, held
from tests.support.talk import Talk

pytestmark = pytest.mark.anyio


class Clock:
    """Seconds that pass only when they are told to."""

    now = 1_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
async def key(store: Store) -> str:
    talk = Talk(store=store)
    await talk.say("hello", "hi")
    return talk.key


async def is_free(store: Store, key: str, name: str, at: float) -> bool:
    """Tell whether another one could take it, and leave it as it is."""
    free = await store.lease(key, name, "asker", int(at * 1000), int(at * 1000) + 1)
    await store.release(key, name, "asker")
    return free


async def test_a_lease_has_one_holder(store: Store, key: str) -> None:
    async with held(store, key, "r", "a", Terms()) as mine:
        assert mine
        async with held(store, key, "r", "b", Terms()) as other:
            assert not other
        async with held(store, key, "of another name", "b", Terms()) as other:
            assert other
        async with held(store, key, "r", "b", Terms()) as other:
            assert not other  # who had not got it has given back nothing
    async with held(store, key, "r", "b", Terms()) as other:
        assert other


async def test_a_waiter_obtains_the_lease_once_it_is_free(store: Store, key: str) -> None:
    order: list[str] = []

    async def second() -> None:
        async with held(store, key, "r", "b", Terms(), patience=60) as mine:
            assert mine
            order.append("second")

    async with asyncio.TaskGroup() as group, held(store, key, "r", "a", Terms()):
        group.create_task(second())
        await asyncio.sleep(0.12)  # it tries at least twice
        order.append("first")
    assert order == ["first", "second"]


async def test_a_waiter_gives_up_after_its_patience(store: Store, key: str) -> None:
    terms = Terms()
    async with held(store, key, "r", "a", terms), held(store, key, "r", "b", terms, patience=0.1) as other:
        assert not other


async def test_the_lease_of_a_dead_holder_ends(store: Store, key: str) -> None:
    clock = Clock()
    assert await store.lease(key, "r", "dead", 1_000_000, 1_015_000)
    terms = Terms(clock=clock)
    clock.now += 14.9
    async with held(store, key, "r", "b", terms) as mine:
        assert not mine
    clock.now += 0.1
    async with held(store, key, "r", "b", terms) as mine:
        assert mine


async def test_a_lease_is_renewed_during_the_work(store: Store, key: str) -> None:
    clock = Clock()
    async with held(store, key, "r", "a", Terms(renewed_after=0.001, clock=clock)):
        clock.now += 14
        async with asyncio.timeout(20):
            # Without that it would have ended long before.
            while await is_free(store, key, "r", clock.now + 10):  # noqa: ASYNC110 - the database has no event
                await asyncio.sleep(0)


async def test_a_store_failure_during_the_work_is_ignored(
    store: Store, key: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried = asyncio.Event()

    async def fail(*_: object) -> bool:
        tried.set()
        raise StoreUnavailable("gone")

    async with held(store, key, "r", "a", Terms(renewed_after=0.001)) as mine:
        assert mine
        monkeypatch.setattr(store, "lease", fail)
        monkeypatch.setattr(store, "release", fail)
        await tried.wait()


async def test_a_lease_is_released_when_the_work_is_cancelled(store: Store, key: str) -> None:
    begun = asyncio.Event()

    async def work() -> None:
        async with held(store, key, "r", "a", Terms()):
            begun.set()
            await asyncio.Event().wait()

    async with asyncio.TaskGroup() as group:
        task = group.create_task(work())
        await begun.wait()
        task.cancel()
    async with held(store, key, "r", "b", Terms()) as mine:
        assert mine


async def test_a_missing_session_has_no_leases(store: Store) -> None:
    async with held(store, "0" * 32, "r", "a", Terms()) as mine:
        assert not mine

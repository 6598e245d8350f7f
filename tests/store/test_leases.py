"""Who alone may do something for a session just now."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from proxy.store.store import Store
from tests.support.talk import Talk

pytestmark = pytest.mark.anyio

RACE = """
import asyncio, sys
from proxy.store.store import Store

async def run(url, key, holder):
    store = await Store.open(url, migrate=False)
    print("ready", flush=True)
    sys.stdin.readline()
    won = [n for n in range(60) if await store.lease(key, f"n{n}", holder, 1_000, 2_000)]
    await store.close()
    print(*won)

asyncio.run(run(*sys.argv[1:]))
"""


async def test_one_has_it_at_a_time(store: Store) -> None:
    talk = Talk(store=store)
    await talk.begin()
    assert await store.lease(talk.key, "recipe", "a", 1_000, 2_000)
    assert not await store.lease(talk.key, "recipe", "b", 1_999, 5_000)
    assert await store.lease(talk.key, "other", "b", 1_000, 2_000)
    other = Talk(store=store, session="another")
    await other.begin()
    assert await store.lease(other.key, "recipe", "b", 1_000, 2_000)


async def test_its_holder_prolongs_it(store: Store) -> None:
    talk = Talk(store=store)
    await talk.begin()
    assert await store.lease(talk.key, "recipe", "a", 1_000, 2_000)
    assert await store.lease(talk.key, "recipe", "a", 1_500, 9_000)
    assert not await store.lease(talk.key, "recipe", "b", 8_999, 9_999)


async def test_who_comes_after_its_end_has_it(store: Store) -> None:
    talk = Talk(store=store)
    await talk.begin()
    assert await store.lease(talk.key, "recipe", "dead", 1_000, 2_000)
    assert await store.lease(talk.key, "recipe", "b", 2_000, 3_000)
    assert not await store.lease(talk.key, "recipe", "dead", 2_500, 9_000)  # it lives after all, and is told


async def test_what_is_given_back_is_free(store: Store) -> None:
    talk = Talk(store=store)
    await talk.begin()
    assert await store.lease(talk.key, "recipe", "a", 1_000, 2_000)
    await store.release(talk.key, "recipe", "b")  # that is not b's to give
    assert not await store.lease(talk.key, "recipe", "b", 1_000, 2_000)
    await store.release(talk.key, "recipe", "a")
    await store.release(talk.key, "recipe", "a")
    assert await store.lease(talk.key, "recipe", "b", 1_000, 2_000)


async def test_without_a_session_there_is_nothing_to_have(store: Store) -> None:
    talk = Talk(store=store)
    assert not await store.lease(talk.key, "recipe", "a", 1_000, 2_000)
    await talk.begin()
    assert await store.lease(talk.key, "recipe", "a", 1_000, 2_000)
    assert await store.delete(talk.key)
    assert not await store.lease(talk.key, "recipe", "a", 1_000, 2_000)
    await talk.begin()
    assert await store.lease(talk.key, "recipe", "b", 1_000, 2_000)  # nothing was left of the old one


async def test_of_many_at_once_one_has_it(store: Store) -> None:
    talk = Talk(store=store)
    await talk.begin()
    asked = [store.lease(talk.key, "recipe", f"h{number}", 1_000, 2_000) for number in range(12)]
    assert sum(await asyncio.gather(*asked)) == 1


async def test_two_processes_never_have_the_same_one(store: Store, store_url: str) -> None:
    talk = Talk(store=store)
    await talk.begin()
    processes = [
        subprocess.Popen(  # noqa: ASYNC220, S603 - our own program; the two must run at once
            [sys.executable, "-c", RACE, store_url, talk.key, holder],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for holder in ("a", "b")
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            assert process.stdin is not None
            process.stdin.write("go\n")
            process.stdin.flush()
        won = [process.communicate()[0].split() for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0]
    assert sorted(map(int, won[0] + won[1])) == list(range(60))
    for holder, names in zip("ab", won, strict=True):
        for name in names:
            assert not await store.lease(talk.key, f"n{name}", "other", 1_999, 3_000)
            assert await store.lease(talk.key, f"n{name}", holder, 1_999, 3_000)

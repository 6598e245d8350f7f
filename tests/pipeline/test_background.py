"""Work that outlives the request that began it."""

from __future__ import annotations

import asyncio
import logging
import threading

import pytest

from proxy.pipeline.background import OFF_LOOP_BYTES, Background, compute

pytestmark = pytest.mark.anyio


async def test_cancelling_the_caller_does_not_cancel_the_work() -> None:
    background = Background()
    go, done = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        await go.wait()
        done.set()

    caller = Background().start(background.finish(work()))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go.set()
    await background.drain()
    assert done.is_set()


async def test_draining_waits_for_work_that_starts_meanwhile() -> None:
    background = Background()
    order: list[str] = []

    async def second() -> None:
        order.append("second")

    async def first() -> None:
        await asyncio.sleep(0)
        background.start(second())
        order.append("first")

    background.start(first())
    await background.drain()
    assert order == ["first", "second"]


async def test_a_failure_reaches_the_caller_and_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        raise ValueError("broken")

    with caplog.at_level(logging.ERROR, "palimpsest.background"), pytest.raises(ValueError, match="broken"):
        await Background().finish(work())
    assert "broken" in caplog.text


async def test_small_work_is_done_at_once_and_large_work_in_a_thread() -> None:
    here = threading.get_ident()
    assert await compute(OFF_LOOP_BYTES - 1, threading.get_ident) == here
    assert await compute(OFF_LOOP_BYTES, threading.get_ident) != here


@pytest.mark.parametrize("size", [0, OFF_LOOP_BYTES])
async def test_work_is_given_what_it_works_on(size: int) -> None:
    assert await compute(size, "{}-{last}".format, "a", last="b") == "a-b"

"""`kill -9` at any moment: each reply whose end a client saw is stored exactly once, and sessions continue."""

from __future__ import annotations

import asyncio
import random
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.support.served import LONG_RUN, Served, config_file
from tests.support.talker import CutOffError, Talker, shown
from tests.support.upstream import Upstream

pytestmark = pytest.mark.anyio

EXCHANGES = 200 if LONG_RUN else 60
KILLS = 7 if LONG_RUN else 3
TALKERS = 4
SLOW = "+delay:2+chunkdelay:1"
"""Delays, so that a kill can hit a running exchange."""
CUT_OFF = "cut-off"
"""A session whose exchanges are each killed in the middle of a stream."""


@pytest.fixture
def config(tmp_path: Path, upstream: Upstream, store_url: str) -> Path:
    return config_file(tmp_path, upstream, store_url)


class Talk:
    """Some talkers, each in its own session, and the number of their replies so far."""

    def __init__(self, http: aiohttp.ClientSession, goal: int, talkers: int = TALKERS) -> None:
        self.talkers = [
            Talker(
                http=http,
                base="",
                session=f"{'appends' if number % 2 else 'resends'}-{number}",
                appends=number % 2 == 1,
            )
            for number in range(talkers)
        ]
        self.seen = 0
        self.cuts = 0
        self._goal = goal
        self._serves = asyncio.Event()
        self._moved = asyncio.Condition()

    @property
    def done(self) -> bool:
        return self.seen >= self._goal

    def at(self, base: str) -> None:
        """Continue at this address."""
        for talker in self.talkers:
            talker.base = base
        self._serves.set()

    def hold(self) -> None:
        """Pause until there is an address again."""
        self._serves.clear()

    async def reaches(self, seen: int) -> None:
        """Wait until this many replies were seen."""
        async with self._moved:
            await self._moved.wait_for(lambda: self.seen >= min(seen, self._goal))

    async def run(self, talker: Talker) -> None:
        """Send turns until there are enough: text and calls, JSON or streamed. Each is retried until it is answered."""
        turn = 0
        while not self.done:
            turn += 1
            calls, stream = turn % 3 == 0, turn % 2 == 0
            model = f"tool:find{SLOW}" if calls else f"echo{SLOW}"
            message: dict[str, Any] = {"role": "user", "content": f"{talker.session}, turn {turn}"}
            await self._insist(talker, message, model, stream=stream)
            if calls:
                (call,) = talker.history[-1]["tool_calls"]
                result = {"role": "tool", "tool_call_id": call["id"], "content": f"found in turn {turn}"}
                await self._insist(talker, result, f"say:done-{talker.session}-{turn}{SLOW}", stream=stream)

    async def _insist(self, talker: Talker, message: dict[str, Any], model: str, *, stream: bool) -> None:
        retried = False
        while True:
            await self._serves.wait()
            try:
                await talker.say(message, model, stream=stream, retried=retried)
            except CutOffError:
                retried = True
                self.cuts += 1
                await asyncio.sleep(0)  # let the task that kills pause the others next
                continue
            self.seen += 1
            async with self._moved:
                self._moved.notify_all()
            return

    async def check(self, http: aiohttp.ClientSession, base: str) -> None:
        """Check that the API shows each reply that was seen."""
        async with http.get(f"{base}/sessions?limit=1000") as answer:
            known = {row["id"] for row in (await answer.json())["data"]}
        for talker in self.talkers:
            if talker.session not in known:
                assert not talker.seen
                continue
            session = await shown(http, base, talker.session)
            assert session.lacks(talker.seen) == {}
            assert session.statuses["pending"] == 0
            assert session.statuses["complete"] >= len(talker.seen)


def _under_way(http: aiohttp.ClientSession, base: str) -> AbstractAsyncContextManager[Any]:
    """Return a stream in whose middle the stand-in waits. The state of the other requests is random."""
    body = {"model": "long:9+gate", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    return http.post(f"{base}/v1/chat/completions", json=body, headers={"x-session-id": CUT_OFF})


async def test_whatever_was_acknowledged_survives_kill_9(config: Path) -> None:
    dice = random.Random(9)  # noqa: S311 - the same moments in every run, as far as a machine allows
    async with aiohttp.ClientSession() as http, asyncio.TaskGroup() as group:
        talk = Talk(http, EXCHANGES)
        talks = [group.create_task(talk.run(talker)) for talker in talk.talkers]
        for kill in range(1, KILLS + 1):
            with Served(config).wait() as served:
                await talk.check(http, served.url)
                talk.at(served.url)
                await talk.reaches(kill * EXCHANGES // (KILLS + 1))
                async with _under_way(http, served.url):
                    await asyncio.sleep(dice.random() * 0.02)
                    served.kill()
                talk.hold()
        with Served(config).wait() as served:
            await talk.check(http, served.url)
            cut_off = await shown(http, served.url, CUT_OFF)
            assert cut_off.statuses == {"interrupted": KILLS}
            talk.at(served.url)
            await asyncio.gather(*talks)
            await talk.check(http, served.url)
            assert talk.seen >= EXCHANGES
            assert talk.cuts >= KILLS
            assert served.stop() == 0

"""Workers are killed and PostgreSQL is restarted under load: what a client saw the end of is stored, once."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from pathlib import Path
from urllib.parse import quote

import aiohttp
import pytest

from tests.e2e.test_store_away import Server
from tests.support import postgres
from tests.support.served import LONG_RUN, SECONDS, Served, config_file, is_running
from tests.support.talker import CutOffError, Talker, shown
from tests.support.upstream import Upstream

pytestmark = pytest.mark.anyio

WORKERS = 4
CLIENTS = 64 if LONG_RUN else 12
KILLS = 12 if LONG_RUN else 4
SECONDS_BETWEEN_KILLS = 2.0 if LONG_RUN else 1.0
RESTARTS = (KILLS // 3, 2 * KILLS // 3)
"""After which kills the server is restarted."""
SLOW = "+delay:20+chunkdelay:2"


class Insisting(Talker):
    """A client that says everything until it is answered."""

    async def insist(self, text: str, *, stream: bool) -> int:
        """Return how often it was cut off, or told that the store cannot be used."""
        message, tries = {"role": "user", "content": text}, 0
        while True:
            try:
                await self.say(message, f"echo{SLOW}", stream=stream, retried=tries > 0)
            except CutOffError:
                tries += 1
            except AssertionError as why:
                if "store" not in str(why):
                    raise
                tries += 1
            else:
                return tries
            await asyncio.sleep(0.1)


async def test_nothing_is_lost_or_stored_twice(tmp_path: Path, upstream: Upstream) -> None:
    if postgres.VARIABLE in os.environ:  # noqa: TID251 - a setting of the tests
        pytest.skip("the server that is named is not ours to stop")
    dice = random.Random(5)  # noqa: S311 - a test
    with postgres.server() as admin, postgres.database(admin) as url:
        server = Server(admin, url)
        config = config_file(tmp_path, upstream, url)
        with Served(config, "--workers", str(WORKERS)).wait() as served:
            # A connection of its own for each: they go to all workers.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            async with aiohttp.ClientSession(connector=connector) as http:
                talkers = [
                    Insisting(http=http, base=served.url, session=f"client {number}", appends=number % 2 == 1)
                    for number in range(CLIENTS)
                ]
                over = asyncio.Event()
                cuts = 0

                async def talk(talker: Insisting) -> None:
                    nonlocal cuts
                    turn = 0
                    while not over.is_set():
                        turn += 1
                        cuts += await talker.insist(f"{talker.session}, turn {turn}", stream=turn % 2 == 0)

                async with asyncio.TaskGroup() as group:
                    for talker in talkers:
                        group.create_task(talk(talker))
                    for kill in range(1, KILLS + 1):
                        await asyncio.sleep(SECONDS_BETWEEN_KILLS)
                        alive = [worker for worker in served.workers if is_running(worker)]
                        os.kill(dice.choice(alive), signal.SIGKILL)
                        if kill in RESTARTS:
                            await asyncio.to_thread(server.stop)
                            await asyncio.sleep(dice.random())
                            await asyncio.to_thread(server.start)
                    await asyncio.sleep(SECONDS_BETWEEN_KILLS)
                    over.set()
                await _settled(http, talkers)
                assert cuts
                for talker in talkers:
                    assert talker.seen
                    assert (await shown(http, served.url, talker.session)).lacks(talker.seen) == {}
            assert served.stop() == 0


async def _settled(http: aiohttp.ClientSession, talkers: list[Insisting]) -> None:
    """Wait until nothing is under way, and what was written aside meanwhile is stored."""
    for _ in range(5 * SECONDS):
        if all([await _is_settled(http, talker) for talker in talkers]):
            return
        await asyncio.sleep(0.2)


async def _is_settled(http: aiohttp.ClientSession, talker: Insisting) -> bool:
    async with http.get(f"{talker.base}/sessions/{quote(talker.session)}/exchanges?limit=1000") as answer:
        if answer.status != 200 or any(row["status"] == "pending" for row in (await answer.json())["data"]):
            return False
    return not (await shown(http, talker.base, talker.session)).lacks(talker.seen)

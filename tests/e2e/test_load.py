"""Several workers on one store, many clients: each acknowledged reply is stored once, and no client gets an error."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psycopg
import pytest

from proxy.store.packing import unpack
from tests.support import postgres
from tests.support.served import LONG_RUN, Served, config_file
from tests.support.stores import empty_store
from tests.support.talker import Reply, Talker, reply_of, shown
from tests.support.upstream import Upstream

pytestmark = pytest.mark.anyio

WORKERS = 4 if LONG_RUN else 2
APPENDERS, RESENDERS = 20, 12
EXCHANGES = 2_000 if LONG_RUN else 240
ROUNDS = 12 if LONG_RUN else 4
_STORED = """
    SELECT coalesce(nodes.text, bodies.text) FROM nodes
    LEFT JOIN bodies ON bodies.session = nodes.session AND bodies.body = nodes.body
    WHERE nodes.source = 'upstream'
"""
_STATUSES = "SELECT status, id FROM exchanges"


@dataclass(frozen=True)
class Crew:
    """The workers, and the store beneath them."""

    base: str
    store: str

    def rows(self, query: str) -> list[tuple[Any, ...]]:
        """Query the database directly."""
        if self.store.startswith("postgresql"):
            with psycopg.connect(self.store) as connection:
                return connection.execute(query.encode()).fetchall()
        with closing(sqlite3.connect(self.store.removeprefix("sqlite:///"))) as file:
            return file.execute(query).fetchall()

    def replies(self) -> Counter[Reply]:
        """Return how many nodes hold each reply."""
        return Counter(reply_of(orjson.loads(unpack(text))) for (text,) in self.rows(_STORED))


@pytest.fixture(scope="module", params=["sqlite", "postgres"])
def crew(
    request: pytest.FixtureRequest, provider: Upstream, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Crew]:
    """Workers that were started on an empty store, and are shut down cleanly."""
    folder = tmp_path_factory.mktemp("crew")
    if request.param == "sqlite":
        yield from _serving(folder, provider, empty_store(folder / "palimpsest.db"))
        return
    server, like = (request.getfixturevalue(name) for name in ("postgres_server", "postgres_template"))
    with postgres.database(server, like) as url:
        yield from _serving(folder, provider, url)


def _serving(folder: Path, provider: Upstream, store: str) -> Iterator[Crew]:
    config = config_file(folder, provider, store, telemetry={"log_level": "warning"})
    with Served(config, "--workers", str(WORKERS)).wait() as served:
        yield Crew(base=served.url, store=store)
        assert served.stop() == 0
        assert "Traceback" not in served.log
        assert "error" not in served.log


@pytest.fixture
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as opened:
        yield opened


@pytest.fixture
async def pair(crew: Crew) -> AsyncIterator[tuple[aiohttp.ClientSession, aiohttp.ClientSession]]:
    """Two clients, connected to different workers."""
    found: dict[str, aiohttp.ClientSession] = {}
    try:
        for _ in range(200):
            client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=1))
            talker = Talker(http=client, base=crew.base, session="pair", appends=True)
            exchange = await talker.say({"role": "user", "content": "who is there?"}, "echo", stream=False)
            if found.setdefault(exchange[-8:], client) is not client:
                await client.close()
            elif len(found) == 2:
                break
        first, second = found.values()
        yield first, second
    finally:
        for client in found.values():
            await client.close()


async def test_two_workers_append_to_one_session_at_the_same_moment(
    crew: Crew, pair: tuple[aiohttp.ClientSession, aiohttp.ClientSession]
) -> None:
    for number in range(ROUNDS):
        session = f"moment-{number}"
        talkers = [Talker(http=client, base=crew.base, session=session, appends=True) for client in pair]
        for turn in range(2):  # the first creates the session, twice at once
            await asyncio.gather(
                *(
                    talker.say(_user(f"{session} {turn} {who}"), "echo", stream=bool(who))
                    for who, talker in enumerate(talkers)
                )
            )
        found = await shown(pair[0], crew.base, session)
        assert found.lacks(reply for talker in talkers for reply in talker.seen) == {}
        async with pair[0].get(f"{crew.base}/sessions/{session}/messages") as answer:
            messages = (await answer.json())["data"]
        # No message is missing on the head's branch, and each is followed by its answer.
        assert sorted(message["content"] for message in messages[::2]) == sorted(
            f"{session} {turn} {who}" for turn in range(2) for who in range(2)
        )
        assert [message["content"] for message in messages[1::2]] == [
            f"echo: {message['content']}" for message in messages[::2]
        ]


async def test_the_same_request_at_two_workers_at_once_stores_nothing_twice(
    crew: Crew, pair: tuple[aiohttp.ClientSession, aiohttp.ClientSession]
) -> None:
    for number in range(ROUNDS):
        session = f"twice-{number}"
        talkers = [Talker(http=client, base=crew.base, session=session, appends=False) for client in pair]
        for turn in range(2):
            said = [talker.say(_user(f"{session} {turn}"), "echo", stream=False) for talker in talkers]
            await asyncio.gather(*said)
        found = await shown(pair[0], crew.base, session)
        assert found.lacks({reply for talker in talkers for reply in talker.seen}) == {}
        assert found.replies.total() == 2
        assert found.statuses == {"complete": 4}


async def test_many_clients_of_few_sessions(crew: Crew, http: aiohttp.ClientSession) -> None:
    appenders = [Talker(http=http, base=crew.base, session=f"load-{n % 6}", appends=True) for n in range(APPENDERS)]
    # Most share sessions with other clients that resend; some use sessions of clients that append.
    resenders = [
        Talker(http=http, base=crew.base, session=f"load-{n % 6 + 4}", appends=False) for n in range(RESENDERS)
    ]
    left = iter(range(EXCHANGES))

    async def talk(name: str, talker: Talker) -> None:
        for number in left:
            await talker.say(_user(f"{name} says {number}"), "echo", stream=number % 2 == 0)

    async with asyncio.TaskGroup() as group:
        for number, talker in enumerate([*appenders, *resenders]):
            group.create_task(talk(f"client {number}", talker))

    seen = [reply for talker in [*appenders, *resenders] for reply in talker.seen]
    stored = crew.replies()
    assert len(seen) == EXCHANGES
    assert {reply: stored[reply] for reply in seen if stored[reply] != 1} == {}
    exchanges = crew.rows(_STATUSES)
    assert {status for status, _ in exchanges} == {"complete"}
    assert len({name[-4:] for _, name in exchanges}) > 1
    for number in range(10):
        async with http.get(f"{crew.base}/sessions/load-{number}/messages") as answer:
            assert answer.status == 200


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}

"""Workers are killed and the database fails under load: replies whose end a client saw are stored exactly once.

    python -m tests.hostile.kills                       one worker every 2 s, the database restarted twice
    python -m tests.hostile.kills --away                the database is unavailable for 30 s
    python -m tests.hostile.kills --away --kill         the same, with kills then and while the spool is stored

Each runs on SQLite and on PostgreSQL (or on one: `--on sqlite`), with 64 clients and 4 workers. Clients use all three
APIs, JSON and streams, and tool calls. Two of three resend their whole history, the third sends only new messages.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import sqlite3
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import aiohttp
import orjson
from msgspec import Struct

from tests.support import postgres
from tests.support.served import Served, config_file, is_running
from tests.support.stores import empty_store
from tests.support.tongues import TONGUES, Tongue
from tests.support.upstream import Upstream

SLOW: Final = "+delay:60+chunkdelay:2"
"""Delays, so that a kill can hit a running exchange."""
TOOLS: Final = [{"type": "function", "function": {"name": "find", "parameters": {"type": "object", "properties": {}}}}]
RESULT: Final = "\n".join(f"line {number}" for number in range(40))
EXCHANGES_OF_A_SESSION: Final = 40
_PATIENCE: Final = 60.0  # timeout in seconds for an answer, and for everything to be stored once the database is back


class Scenario(Struct, frozen=True, kw_only=True):
    """What happens in a run."""

    clients: int = 64
    workers: int = 4
    exchanges: int = 10_000  # to be acknowledged; 0: as many as there are while the database is unavailable
    kill_every: float = 2.0  # seconds; 0: no worker is killed
    restarts: int = 2
    away: float = 1.0  # seconds for which the database is unavailable, each time
    beside: float = 3.0  # seconds of requests before and after that, if `exchanges` is 0


class Counted(Struct, kw_only=True):
    """The answers that clients got."""

    acknowledged: int = 0
    cut: int = 0  # requests whose connection broke because their worker was killed
    refused: int = 0  # 503 for requests that need the store
    failed: list[str] = []  # requests with their whole history that got another error
    kills: int = 0
    slowest: float = 0.0  # most seconds that an acknowledged request took


class Outcome(Struct, kw_only=True):
    """What is stored, compared with what clients saw."""

    told: Counted
    lost: int = 0  # acknowledged replies that are not stored
    twice: int = 0
    pending: int = 0
    other: int = 0  # sessions whose branch differs from the client's copy
    settled: float = 0.0  # seconds from the last answer until all is stored
    seconds: float = 0.0

    @property
    def holds(self) -> bool:
        """Whether nothing is lost, stored twice or pending, and no request failed that does not need the store."""
        return not (self.lost or self.twice or self.pending or self.other or self.told.failed)


class Client(Struct, kw_only=True):
    """One client, in one session after another. It retries each message until it is answered."""

    number: int
    tongue: Tongue
    http: aiohttp.ClientSession
    base: str
    told: Counted
    appends: bool
    session: str = ""
    history: list[dict[str, Any]] = []
    seen: dict[str, list[str]] = {}  # by session: the unique word of each reply
    held: dict[str, list[dict[str, Any]]] = {}  # by session: the client's copy at the end

    async def talk(self, is_over: Callable[[], bool]) -> None:
        """Send messages until `is_over` returns true."""
        turn = 0
        while not is_over():
            if turn % EXCHANGES_OF_A_SESSION == 0:
                self.session, self.history = f"{self.tongue.name}-{self.number}-{turn}", []
                self.seen[self.session] = []
            turn += 1
            calls, stream = turn % 3 == 0, turn % 2 == 0
            word = f"<{self.session} {turn}>"
            said = {"role": "user", "content": f"find {word}"}
            made = await self.insist(said, word, f"tool:find{SLOW}" if calls else f"say:done {word}{SLOW}", stream)
            if calls:
                (call,) = made["tool_calls"]
                found = {
                    "role": "tool",
                    "tool_call_id": call["id"],
                    "content": "\n".join(f"line {n}" for n in range(40)),
                }
                word = f"<{self.session} {turn} found>"
                await self.insist(found, word, f"say:done {word}{SLOW}", stream)
            self.held[self.session] = self.history

    async def insist(self, message: dict[str, Any], word: str, model: str, stream: bool) -> dict[str, Any]:
        """Send one more message, retrying until it is answered; return the reply as a chat message."""
        tries = 0
        while True:
            reply = await self._ask(message, model, stream, retried=tries > 0)
            if reply is not None:
                self.told.acknowledged += 1
                self.seen[self.session].append(word)
                self.history = [*self.history, message, *reply]
                return self.tongue.told([{"role": "user", "content": "-"}, *reply])[-1]
            tries += 1
            await asyncio.sleep(0.1)

    async def _ask(
        self, message: dict[str, Any], model: str, stream: bool, *, retried: bool
    ) -> list[dict[str, Any]] | None:
        asked = [message] if self.appends else [*self.history, message]
        body = self.tongue.body(asked, model, tools=TOOLS, stream=stream)
        headers = {"x-session-id": self.session, "x-session-mode": "append" if self.appends else "full"}
        headers |= self.tongue.headers | ({"x-stainless-retry-count": "1"} if retried else {})
        begun = time.monotonic()
        try:
            async with self.http.post(self.base + self.tongue.path, json=body, headers=headers) as answer:
                raw = await answer.read()
        except (aiohttp.ClientError, OSError) as why:
            if isinstance(why, TimeoutError):
                self.told.failed.append(f"no answer within {_PATIENCE:g} s")
            self.told.cut += 1
            return None
        if answer.status != 200:
            if self.appends and answer.status == 503 and b"store_unavailable" in raw:
                self.told.refused += 1
            else:
                self.told.failed.append(f"{answer.status} {raw[:300]!r}")
            return None
        if stream and not _is_whole(raw):
            if b"error" in raw:
                self.told.failed.append(f"stream: {raw[-300:]!r}")
            self.told.cut += 1
            return None
        self.told.slowest = max(self.told.slowest, time.monotonic() - begun)
        return self.tongue.reply(raw, stream=stream)


def _is_whole(raw: bytes) -> bool:
    """Tell whether a stream is complete."""
    tail = raw[-8192:]
    return tail.endswith(b"data: [DONE]\n\n") or b"event: message_stop" in tail or b"event: response.completed" in tail


# ------------------------------------------------------------------------------------------ databases


class Database(Struct, frozen=True, kw_only=True):
    """A store's database, which can be made unavailable."""

    url: str
    leaves: Callable[[], None]
    returns: Callable[[], None]


@contextmanager
def sqlite_database(folder: Path) -> Generator[Database]:
    """Yield a file that another process locks."""
    url = empty_store(folder / "palimpsest.db")
    holder = sqlite3.connect(folder / "palimpsest.db", isolation_level=None, timeout=30, check_same_thread=False)

    def lock() -> None:
        holder.execute("BEGIN IMMEDIATE")

    def unlock() -> None:
        holder.execute("ROLLBACK")

    yield Database(url=url, leaves=lock, returns=unlock)
    holder.close()


@contextmanager
def postgres_database(folder: Path) -> Generator[Database]:
    """Yield a database of its own server, which is stopped and started."""
    from tests.e2e.test_store_away import Server  # noqa: PLC0415 - it starts a server's package

    with postgres.server() as admin, postgres.database(admin) as url:
        server = Server(admin, url)
        yield Database(url=url, leaves=server.stop, returns=server.start)


DATABASES: Final = {"sqlite": sqlite_database, "postgres": postgres_database}

# ---------------------------------------------------------------------------------------------- running


async def run(scenario: Scenario, served: Served, database: Database) -> Outcome:
    """Run the clients and the scenario; return the outcome."""
    told, begun, tongues = Counted(), time.monotonic(), list(TONGUES.values())
    async with _connected() as http:
        clients = [
            Client(
                number=number,
                tongue=tongues[number % len(tongues)],
                http=http,
                base=served.url,
                told=told,
                appends=number // len(tongues) % 3 == 2,
                seen={},
                held={},
            )
            for number in range(scenario.clients)
        ]
        over = asyncio.Event()

        def is_over() -> bool:
            return over.is_set() or (scenario.exchanges > 0 and told.acknowledged >= scenario.exchanges)

        async with asyncio.TaskGroup() as group:
            talks = [group.create_task(client.talk(is_over)) for client in clients]
            killing = group.create_task(_kill(scenario, served, told))
            if scenario.exchanges:
                await _restart(scenario, database, told)
                await asyncio.wait(talks)
            else:
                await asyncio.sleep(scenario.beside)
                await _go_away(scenario.away, database)
                await asyncio.sleep(scenario.beside)  # the spool is stored under load
                over.set()
                await asyncio.wait(talks)
            killing.cancel()
        ended = time.monotonic()
        outcome = await _compared(http, clients, told)
        while not outcome.holds and time.monotonic() - ended < _PATIENCE:
            await asyncio.sleep(1)
            outcome = await _compared(http, clients, told)
        outcome.settled, outcome.seconds = time.monotonic() - ended, ended - begun
        return outcome


@asynccontextmanager
async def _connected() -> AsyncGenerator[aiohttp.ClientSession]:
    # A new connection for each request, so that they go to all workers.
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    limit = aiohttp.ClientTimeout(total=_PATIENCE)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as http:
        yield http


async def _kill(scenario: Scenario, served: Served, told: Counted) -> None:
    dice = random.Random(5)  # noqa: S311 - a test
    while scenario.kill_every:
        await asyncio.sleep(scenario.kill_every)
        alive = [worker for worker in served.workers if is_running(worker)]
        with suppress(IndexError, ProcessLookupError):
            os.kill(dice.choice(alive), signal.SIGKILL)
            told.kills += 1
        before = told.acknowledged
        while told.acknowledged == before:  # noqa: ASYNC110 - a busy machine starts the next one late
            await asyncio.sleep(0.05)


async def _restart(scenario: Scenario, database: Database, told: Counted) -> None:
    for number in range(1, scenario.restarts + 1):
        while told.acknowledged < scenario.exchanges * number / (scenario.restarts + 1):  # noqa: ASYNC110 - a test
            await asyncio.sleep(0.1)
        await _go_away(scenario.away, database)


async def _go_away(seconds: float, database: Database) -> None:
    await asyncio.to_thread(database.leaves)
    await asyncio.sleep(seconds)
    await asyncio.to_thread(database.returns)


async def _compared(http: aiohttp.ClientSession, clients: list[Client], told: Counted) -> Outcome:
    """Compare what clients saw with what is stored."""
    outcome = Outcome(told=told)
    for client in clients:
        for session, seen in client.seen.items():
            if not seen:
                continue
            try:
                found = await _stored(http, client.base, session)
            except LookupError:
                outcome.lost += len(seen)
                continue
            outcome.lost += sum(found.replies[word] == 0 for word in seen)
            outcome.twice += sum(found.replies[word] > 1 for word in seen)
            outcome.pending += found.pending
            held = client.tongue.told(client.tongue.entries(client.held.get(session, [])))
            if held and not client.appends and client.tongue.told(found.branch) != held:
                outcome.other += 1
    return outcome


class Stored(Struct, frozen=True, kw_only=True):
    """The stored state of a session."""

    replies: Counter[str]  # number of reply nodes with each word
    branch: list[dict[str, Any]]  # the messages of the head's branch
    pending: int


async def _stored(http: aiohttp.ClientSession, base: str, session: str) -> Stored:
    async def get(path: str) -> Any:
        async with http.get(f"{base}/sessions/{quote(session, safe='')}{path}") as answer:
            if answer.status != 200:
                raise LookupError(path, answer.status)
            return orjson.loads(await answer.read())

    words: dict[str, str] = {}
    for branch in (await get(""))["branches"]:
        for row in (await get(f"/messages?meta=true&branch={branch['head']}"))["data"]:
            message = row["message"]
            if message.get("role") == "assistant" or message.get("type") == "function_call":
                words[row["node"]] = orjson.dumps(message).decode()
    replies = Counter(f"<{text.partition('<')[2].partition('>')[0]}>" for text in words.values())
    statuses = Counter(row["status"] for row in (await get("/exchanges?limit=1000"))["data"])
    return Stored(replies=replies, branch=(await get("/messages"))["data"], pending=statuses["pending"])


def attack(scenario: Scenario, on: str, folder: Path) -> tuple[Outcome, str]:
    """Run a scenario on a database; return the outcome, and the proxy's log."""
    with ExitStack() as stack:
        upstream = stack.enter_context(Upstream())
        database = stack.enter_context(DATABASES[on](folder))
        config = config_file(folder, upstream, database.url)
        served = stack.enter_context(Served(config, "--workers", str(scenario.workers)))
        outcome = asyncio.run(run(scenario, served.wait(), database))
        assert served.stop() == 0
        return outcome, served.log


def main(arguments: list[str]) -> int:
    """Run the chosen scenario; return 1 if the outcome is wrong."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--away", action="store_true")
    parser.add_argument("--kill", action="store_true")
    parser.add_argument("--on", choices=list(DATABASES), action="append")
    parser.add_argument("--exchanges", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args(arguments)
    os.environ["NO_PROXY"] = "127.0.0.1"  # noqa: TID251 - of this program and its child
    scenario = Scenario(exchanges=given.exchanges)
    if given.away:
        scenario = Scenario(exchanges=0, away=given.seconds, kill_every=1.0 if given.kill else 0.0)
    failed = 0
    for on in given.on or DATABASES:
        folder = Path(tempfile.mkdtemp(prefix="kills"))
        found, log = attack(scenario, on, folder)
        told = found.told
        sys.stdout.write(
            f"{on}: {told.acknowledged} acknowledged in {found.seconds:.0f} s, {told.kills} kills, {told.cut} cut, "
            f"{told.refused} refused, {len(told.failed)} failed; lost {found.lost}, twice {found.twice}, "
            f"pending {found.pending}, other {found.other} after {found.settled:.0f} s; slowest {told.slowest:.1f} s; "
            f"{log.count('Traceback')} tracebacks; log in {folder}\n"
        )
        sys.stdout.writelines(f"    {line} x{times}\n" for line, times in Counter(told.failed).most_common(10))
        sys.stdout.flush()
        failed |= not found.holds or "Traceback" in log
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

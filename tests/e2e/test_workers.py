"""`serve --workers N`: any worker serves any session. A worker that dies is replaced, and the others are unaffected."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from collections import defaultdict
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import aiohttp
import httpx
import pytest

from tests.support.served import SECONDS, Served, config_file, is_running
from tests.support.upstream import Upstream
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


@pytest.fixture
def config(tmp_path: Path, upstream: Upstream, store_url: str) -> Path:
    return config_file(tmp_path, upstream, store_url)


@pytest.fixture
def on_sqlite(tmp_path: Path, upstream: Upstream) -> Path:
    return config_file(tmp_path, upstream, f"sqlite:///{tmp_path / 'palimpsest.db'}")


def ask(base: str, text: str, session: str = "s") -> str:
    """Append to the session over a new connection; return the mark of the worker that answered."""
    body = {"model": "echo", "messages": [{"role": "user", "content": text}]}
    with httpx.Client(base_url=base, trust_env=False, timeout=SECONDS) as client:
        answer = client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == f"echo: {text}"
    return answer.headers["x-exchange-id"][-8:]


def get(base: str, path: str) -> Any:
    answer = httpx.get(f"{base}{path}", trust_env=False, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()["data"]


def statuses(base: str) -> dict[str, str]:
    """Return the status of each exchange of the session."""
    return {row["id"]: row["status"] for row in get(base, "/sessions/s/exchanges?limit=1000")}


async def test_a_worker_that_dies_is_replaced_and_its_siblings_go_on(config: Path, upstream: Upstream) -> None:
    with Served(config, "--workers", "2").wait() as served:
        ask(served.url, "first")
        by_mark: dict[str, list[aiohttp.ClientResponse]] = defaultdict(list)
        async with AsyncExitStack() as stack:
            # Streams that pause in the middle, some on each worker.
            while len(by_mark) < 2:
                assert sum(map(len, by_mark.values())) < 100, "one worker takes all connections"
                client = await stack.enter_async_context(aiohttp.ClientSession())
                asked = {"role": "user", "content": f"slow {sum(map(len, by_mark.values()))}"}
                body = {"model": "long:10+gate", "messages": [asked], "stream": True}
                answer = await client.post(
                    f"{served.url}/v1/chat/completions", json=body, headers={"x-session-id": "s"}
                )
                assert answer.status == 200
                by_mark[answer.headers["x-exchange-id"][-8:]].append(answer)
            os.kill(served.workers[0], signal.SIGKILL)
            broken = await asyncio.to_thread(_whose_broke, by_mark)
            lost = {answer.headers["x-exchange-id"] for answer in by_mark.pop(broken)}
            ((_, others),) = by_mark.items()
            alive = {answer.headers["x-exchange-id"] for answer in others}

            def given_up() -> bool:
                found = statuses(served.url)
                assert {found[name] for name in alive} == {"pending"}
                return {found[name] for name in lost} == {"interrupted"}

            await asyncio.to_thread(until, given_up, "the next one gives up what is lost", SECONDS)
            upstream.gate.set()
            for answer in others:
                assert b"[DONE]" in await answer.read()
        found = statuses(served.url)
        assert {found[name] for name in alive} == {"complete"}
        assert {found[name] for name in lost} == {"interrupted"}
        assert len(served.workers) == 3
        # The new worker serves too, and finds the complete session.
        marks: set[str] = set()
        while not marks - {broken, *by_mark}:
            assert len(get(served.url, "/sessions/s/messages")) < 600, "the new one takes no connection"
            marks.add(ask(served.url, "again"))
        said = [message["content"] for message in get(served.url, "/sessions/s/messages")]
        assert said[:2] == ["first", "echo: first"]
        assert sum(str(text).startswith("slow") for text in said) == len(others)
        assert said[-2:] == ["again", "echo: again"]
        assert served.log.count("use it:") == 1
        # Like Ctrl-C in a terminal, which signals all processes.
        for process in (served.process.pid, *served.workers[1:]):
            os.kill(process, signal.SIGINT)
        assert served.process.wait(SECONDS) == 0
        assert not any(map(is_running, served.workers))
        assert "Traceback" not in served.log


def _whose_broke(by_mark: dict[str, list[aiohttp.ClientResponse]]) -> str:
    """Return the mark of the worker whose connections broke."""
    found: list[str] = []

    def broke() -> bool:
        found.extend(mark for mark, answers in by_mark.items() if all(answer.content.exception() for answer in answers))
        return bool(found)

    until(broke, "a connection breaks", SECONDS)
    return found[0]


def test_a_parent_that_is_killed_leaves_nobody_behind(on_sqlite: Path) -> None:
    with Served(on_sqlite, "--workers", "2").wait() as served:
        mark = ask(served.url, "first")
        port = int(served.url.rpartition(":")[2])
        served.kill()
        until(lambda: not any(map(is_running, served.workers)), "the workers end", SECONDS)
        # The address is free for the next server.
        with Served(on_sqlite, "--workers", "2", "--port", str(port)).wait() as again:
            assert ask(again.url, "second") != mark
            assert len(get(again.url, "/sessions/s/messages")) == 4


@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_port_that_is_taken_stops_the_start_before_the_store_is_touched(on_sqlite: Path, workers: str) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = str(holder.getsockname()[1])
        with Served(on_sqlite, "--workers", workers, "--port", port) as served:
            assert served.process.wait(SECONDS) == 1
    assert f"Cannot listen on 127.0.0.1:{port}: address already in use. Another program" in served.log
    assert "Traceback" not in served.log
    assert served.workers == []
    assert not on_sqlite.with_name("palimpsest.db").exists()


def test_several_that_start_at_once_on_an_empty_store_all_serve(
    tmp_path: Path, upstream: Upstream, request: pytest.FixtureRequest
) -> None:
    empty = request.getfixturevalue("empty_postgres")
    with ExitStack() as stack:
        started = []
        for name, url in (("sqlite", f"sqlite:///{tmp_path / 'shared.db'}"), ("postgres", empty)):
            folder = tmp_path / name
            folder.mkdir()
            config = config_file(folder, upstream, url)
            started.append([stack.enter_context(Served(config)) for _ in range(2)])
        for pair in started:
            for turn, served in enumerate(pair):
                ask(served.wait().url, f"turn {turn}")
            assert len(get(pair[0].url, "/sessions/s/messages")) == 4

"""A server and its writer process: what each does when the other one ends."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.served import SECONDS, Served, children, config_file, is_running
from tests.support.upstream import Upstream
from tests.support.waiting import until

CLIENTS = 8
EACH = 20


@pytest.fixture
def config(tmp_path: Path, upstream: Upstream, store_url: str) -> Path:
    return config_file(tmp_path, upstream, store_url)


@pytest.fixture(autouse=True)
def _two_processors() -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("there is no writer where there is one processor")


def writer_of(served: Served) -> int:
    (process,) = children(served.process.pid)
    return process


def ask(client: httpx.Client, session: str, text: str) -> str:
    """Append to a session; return the exchange's id."""
    body = {"model": "echo", "messages": [{"role": "user", "content": text}]}
    answer = client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["message"]["content"] == f"echo: {text}"
    assert "x-context-warning" not in answer.headers
    return answer.headers["x-exchange-id"]


def talk(url: str, session: str) -> None:
    with httpx.Client(base_url=url, trust_env=False, timeout=SECONDS) as client:
        for number in range(EACH):
            ask(client, session, f"{session} {number}")


def told(url: str, session: str) -> list[Any]:
    """Return the stored texts of a session; empty if the session does not exist yet."""

    answer = httpx.get(f"{url}/sessions/{session}/messages?limit=1000", trust_env=False, timeout=SECONDS)
    assert answer.status_code in {200, 404}, answer.text
    return [message["content"] for message in answer.json().get("data", ())]


def expected(session: str) -> list[str]:
    return [said for n in range(EACH) for said in (f"{session} {n}", f"echo: {session} {n}")]


def test_a_writer_that_is_killed_under_load_takes_no_exchange_along(config: Path) -> None:
    sessions = [f"s{number}" for number in range(CLIENTS)]
    with Served(config).wait() as served, ThreadPoolExecutor(CLIENTS) as pool:
        asked = [pool.submit(talk, served.url, session) for session in sessions]
        writer = writer_of(served)
        until(lambda: len(told(served.url, sessions[0])) >= 8, "some is stored")
        os.kill(writer, signal.SIGKILL)
        for each in asked:
            each.result()
        until(lambda: not is_running(writer), "nothing is left of it")
        for session in sessions:
            assert told(served.url, session) == expected(session)
        assert served.log.count("the process that writes exchanges") == 1
        assert served.stop() == 0


def test_the_writer_ends_with_a_server_that_is_killed_and_keeps_what_was_acknowledged(config: Path) -> None:
    with Served(config).wait() as served:
        writer = writer_of(served)
        with httpx.Client(base_url=served.url, trust_env=False, timeout=SECONDS) as client:
            ask(client, "s", "one")
        served.kill()
        until(lambda: not is_running(writer), "the writer ends")
    with Served(config).wait() as again:
        assert told(again.url, "s") == ["one", "echo: one"]
        assert "the process that writes exchanges" not in again.log


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_both_ends_the_server_in_its_own_time(config: Path, number: signal.Signals) -> None:
    with Served(config).wait() as served:
        writer = writer_of(served)
        os.kill(writer, number)
        with httpx.Client(base_url=served.url, trust_env=False, timeout=SECONDS) as client:
            ask(client, "s", "one")
        assert is_running(writer)
        assert served.stop() == 0
        assert not is_running(writer)
        assert "the process that writes exchanges" not in served.log


def test_several_workers_write_themselves(config: Path) -> None:
    with Served(config, "--workers", "2").wait() as served:
        workers = children(served.process.pid)
        assert len(workers) == 2
        assert not any(children(worker) for worker in workers)

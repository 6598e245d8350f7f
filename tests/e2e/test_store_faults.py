"""A store that fails: locked by another process, full, or restarted.

In each case nothing acknowledged is lost, refusals say what to do, and service resumes once the fault is over.
"""

from __future__ import annotations

import resource
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psycopg
import pytest

from tests.support.answers import Answering, options_of
from tests.support.received import Received
from tests.support.served import Served, children, config_file
from tests.support.server import Proxy, settings_for
from tests.support.stores import empty_store
from tests.support.upstream import Upstream
from tests.support.waiting import until

LOCK_SECONDS = 10
HOLDER = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], isolation_level=None, timeout=60)
connection.execute("BEGIN IMMEDIATE")
print("held", flush=True)
time.sleep(float(sys.argv[2]))
connection.execute("ROLLBACK")
"""
"""A program that blocks all writers."""


class Gated(Upstream):
    """A provider whose non-streamed answers wait at the gate too."""

    async def _serve(self, received: Received, out: Answering) -> None:
        does = options_of(received.json.get("model")) if received.body else {}
        if "gate" in does and not received.json.get("stream"):
            await out.wait_for_gate()
        await super()._serve(received, out)


@pytest.fixture(scope="module")
def gated(_direct: None) -> Iterator[Gated]:
    with Gated() as provider:
        yield provider


@pytest.fixture
def upstream(gated: Gated) -> Gated:
    gated.forget()
    return gated


@contextmanager
def proxy_at(upstream: Upstream, folder: Path, **sections: Any) -> Iterator[Proxy]:
    with Proxy(settings_for(upstream, folder, sections)) as proxy:
        yield proxy


def texts(proxy: Proxy, session: str) -> list[Any]:
    return [message["content"] for message in proxy.messages(session)]


def is_unavailable(answer: httpx.Response, advice: str) -> bool:
    """Tell whether an answer is the error that says what to do about the store."""
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["code"]) == (503, "server_error", "store_unavailable")
    assert set(error) == {"message", "type", "param", "code"}
    return advice in str(error["message"])


# ----------------------------------------------------------------------------------- locked


def test_ten_seconds_of_another_processs_lock(upstream: Upstream, tmp_path: Path) -> None:
    file = tmp_path / "sessions.db"
    config = config_file(tmp_path, upstream, empty_store(file))
    with Served(config) as served, ThreadPoolExecutor(8) as threads:
        url = served.wait().url

        def ask(session: str, text: str, **given: Any) -> httpx.Response:
            body = {"model": "echo", "messages": [{"role": "user", "content": text}], **given}
            headers = {"x-session-id": session}
            return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False)

        assert ask("known", "before").status_code == 200
        command = [sys.executable, "-c", HOLDER, str(file), str(LOCK_SECONDS)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as holder:  # noqa: S603 - our own
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            heard = len(upstream.log)
            asked = [threads.submit(ask, f"new-{number}", "hello") for number in range(3)]
            asked.append(threads.submit(ask, "known", "append"))
            asked.append(threads.submit(ask, "streamed", "hello", stream=True))
            until(lambda: len(upstream.log) == heard + 5, "the provider is asked, all the same")
            # Readers do not wait for a writer.
            known = httpx.get(f"{url}/sessions/known/messages", trust_env=False).json()["data"]
            assert [message["content"] for message in known] == ["before", "echo: before"]
            assert "lock" in httpx.get(f"{url}/readyz", trust_env=False).json()["error"]["message"]
            assert holder.poll() is None
            # Paid answers are relayed while the store is still locked: they wait in the spool.
            until(lambda: all(answer.done() for answer in asked), "all are answered")
            assert holder.poll() is None
            assert holder.wait(60) == 0
        until(lambda: httpx.get(f"{url}/readyz", trust_env=False).status_code == 200, "the store is used again")
        answers = [answer.result() for answer in asked]
        assert [answer.status_code for answer in answers] == [200] * 5
        assert answers[-1].content.endswith(b"data: [DONE]\n\n")
        stored = {
            name: [
                message["content"]
                for message in httpx.get(f"{url}/sessions/{name}/messages", trust_env=False).json()["data"]
            ]
            for name in ("new-0", "new-1", "new-2", "known", "streamed")
        }
        assert stored.pop("known") == ["before", "echo: before", "append", "echo: append"]
        assert list(stored.values()) == [["hello", "echo: hello"]] * 4


def begun(proxy: Proxy, upstream: Upstream, session: str, model: str, stream: bool) -> Future[httpx.Response]:
    """Send a request that waits at the gate; return once its exchange is stored as begun."""
    asked: Future[httpx.Response] = Future()
    threading.Thread(
        target=lambda: asked.set_result(proxy.chat(session, "second", model, stream=stream)), daemon=True
    ).start()

    def pending() -> bool:
        return bool(proxy.exchanges(session)[-1]["status"] == "pending")

    until(pending, "it is under way")
    until(lambda: upstream.open == 1, "the provider is asked")
    return asked


def ended_with_an_error(answer: httpx.Response, stream: bool, advice: str) -> bool:
    """Tell whether an answer that could not be stored ends with an error and without the end marker."""
    if not stream:
        return is_unavailable(answer, advice)
    assert answer.status_code == 200
    assert b"[DONE]" not in answer.content
    last: bytes = answer.content.rstrip().rpartition(b"\n\n")[2]
    return last.startswith(b'data: {"error":') and advice.encode() in last


# ------------------------------------------------------------------------------------- full


LARGE = "0123456789abcdef" * 8_000
"""More than fits into the free pages of a file."""


def test_files_that_cannot_grow(upstream: Upstream, tmp_path: Path) -> None:
    """The operating system limits the file size of a child process: what is in the file is kept, and served."""
    file = tmp_path / "sessions.db"
    config = config_file(tmp_path, upstream, empty_store(file))
    with Served(config) as served:
        url = served.wait().url
        processes = [served.process.pid, *children(served.process.pid)]

        def ask(text: str) -> httpx.Response:
            body = {"model": "say:ok", "messages": [{"role": "user", "content": text}]}
            headers = {"x-session-id": "s"}
            return httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False)

        def said() -> list[Any]:
            rows = httpx.get(f"{url}/sessions/s/messages", trust_env=False).json()["data"]
            return [message["content"] for message in rows if message["role"] == "user"]

        assert ask("first").status_code == 200
        _, hard = resource.prlimit(processes[0], resource.RLIMIT_FSIZE)
        size = max(path.stat().st_size for path in tmp_path.iterdir())
        for process in processes:
            resource.prlimit(process, resource.RLIMIT_FSIZE, (size, hard))
        kept = ["first"]
        refused = 0
        for number in range(4):
            text = f"{number} {LARGE}"
            answer = ask(text)
            if answer.status_code != 200:
                assert is_unavailable(answer, "The disk")
                refused += 1
            else:  # it is in the file, in the spool, or waits in memory
                kept.append(text)
        assert refused
        for process in processes:
            resource.prlimit(process, resource.RLIMIT_FSIZE, (hard, hard))
        until(lambda: httpx.get(f"{url}/readyz", trust_env=False).status_code == 200, "the store is used again")
        assert said() == kept
        assert ask("last").status_code == 200
        assert said() == [*kept, "last"]
        assert served.process.poll() is None
    with closing(sqlite3.connect(file)) as connection:
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]


# ------------------------------------------------------------------------------- PostgreSQL


OTHERS = "FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"


def cut_off(url: str) -> None:
    """Terminate every connection to a database, and wait until they are closed."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"SELECT pg_terminate_backend(pid, 10000) {OTHERS}")


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_connections_that_are_cut_off(empty_postgres: str, upstream: Upstream, tmp_path: Path, driver: str) -> None:
    url = empty_postgres.replace("postgresql:", f"postgresql+{driver}:", 1)
    with proxy_at(upstream, tmp_path, store={"url": url}) as proxy:
        assert proxy.chat("s", "first").status_code == 200
        cut_off(empty_postgres)
        assert is_well_or_says_why(proxy.chat("s", "second"))
        until(lambda: proxy.client.get("/readyz").status_code == 200, "the store is used again")
        assert proxy.chat("s", "third").status_code == 200
        asked = begun(proxy, upstream, "s", "long:6+gate", stream=True)
        cut_off(empty_postgres)
        upstream.gate.set()
        assert asked.result(30).content.endswith(b"data: [DONE]\n\n")
        assert proxy.exchanges("s")[-1]["status"] == "complete"
        acknowledged = hurried(proxy, lambda: cut_off(empty_postgres))
        until(lambda: proxy.client.get("/readyz").status_code == 200, "the store is used again")
        assert proxy.chat("s", "last").status_code == 200
        said = texts(proxy, "s")
        assert said[-2:] == ["last", "echo: last"]
        for text in acknowledged:
            assert said.count(f"echo: {text}") == 1, text


@pytest.mark.parametrize("driver", ["asyncpg", "psycopg"])
def test_a_session_that_another_transaction_holds(
    empty_postgres: str, upstream: Upstream, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, driver: str
) -> None:
    monkeypatch.setattr("proxy.store.store._STORED_SECONDS", 0.5)
    url = empty_postgres.replace("postgresql:", f"postgresql+{driver}:", 1)
    with proxy_at(upstream, tmp_path, store={"url": url}) as proxy:
        assert proxy.chat("s", "first").status_code == 200
        with psycopg.connect(empty_postgres) as holder:
            assert holder.execute("SELECT FROM sessions FOR UPDATE").rowcount == 1
            answer = proxy.chat("s", "second")  # the paid answer is relayed while the session is still locked
            assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "echo: second")
            assert "stored later" in answer.headers["x-context-warning"]
            assert "a transaction that stands still" in proxy.client.get("/readyz").json()["error"]["message"]
        until(lambda: proxy.client.get("/readyz").status_code == 200, "the store is used again")
        assert texts(proxy, "s") == ["first", "echo: first", "second", "echo: second"]
        assert [row["status"] for row in proxy.exchanges("s")] == ["complete"] * 2


def is_well_or_says_why(answer: httpx.Response) -> bool:
    return answer.status_code == 200 or is_unavailable(answer, "The store cannot be used.")


def hurried(proxy: Proxy, disturb: Callable[[], None]) -> list[str]:
    """Send many requests at once while `disturb` runs repeatedly; return the acknowledged ones."""
    done = threading.Event()

    def ask(number: int) -> tuple[str, httpx.Response]:
        text = f"hurried {number}"
        return text, proxy.chat("s", text)

    def again() -> None:
        while not done.is_set():
            disturb()

    with ThreadPoolExecutor(5) as threads:
        disturbing = threads.submit(again)
        answers = list(threads.map(ask, range(24)))
        done.set()
        disturbing.result()
    assert all(is_well_or_says_why(answer) for _, answer in answers)
    return [text for text, answer in answers if answer.status_code == 200]

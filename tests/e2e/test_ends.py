"""Shutdown: running answers may finish, other requests get an error, and a second signal does not wait."""

from __future__ import annotations

import os
import signal
import threading
from concurrent.futures import Future
from pathlib import Path

import httpx
import orjson
import pytest

from tests.support.raw_socket import RawClient
from tests.support.served import Served, config_file, is_running
from tests.support.stores import empty_store
from tests.support.upstream import Upstream
from tests.support.waiting import until


def ask(url: str, session: str, model: str, *, stream: bool) -> Future[httpx.Response]:
    """Send a request in a thread."""
    asked: Future[httpx.Response] = Future()
    body = {"model": model, "messages": [{"role": "user", "content": "hi"}], "stream": stream}

    def work() -> None:
        try:
            headers = {"x-session-id": session, "authorization": "Bearer sk-test"}
            asked.set_result(
                httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=60, trust_env=False)
            )
        except httpx.HTTPError as why:
            asked.set_exception(why)

    threading.Thread(target=work, daemon=True).start()
    return asked


def _is_refused(url: str) -> bool:
    try:
        httpx.get(f"{url}/healthz", trust_env=False)
    except httpx.TransportError:
        return True
    return False


@pytest.mark.parametrize("workers", [1, 2])
def test_answers_that_take_too_long_end_with_an_error(upstream: Upstream, tmp_path: Path, workers: int) -> None:
    store = empty_store(tmp_path / "s.db")
    config = config_file(tmp_path, upstream, store, server={"workers": workers, "drain_timeout": 1})
    with Served(config).wait() as served:
        long = ask(served.url, "long", "long:6+gate", stream=True)
        whole = ask(served.url, "whole", "echo+hold", stream=False)
        short = ask(served.url, "short", "echo+delay:600", stream=True)
        until(lambda: len(upstream.log) == 3, "all are asked")
        assert served.stop() == 0
        last = long.result(20).content.rstrip().rpartition(b"\n\n")[2]
        assert last.startswith(b'data: {"error":')
        assert b"stopping" in last
        assert (whole.result(20).status_code, whole.result().json()["error"]["code"]) == (503, "stopping")
        assert short.result(20).content.endswith(b"data: [DONE]\n\n")
    with Served(config).wait() as served:
        for session, status in (("long", "partial"), ("whole", "cancelled"), ("short", "complete")):
            rows = httpx.get(f"{served.url}/sessions/{session}/exchanges", trust_env=False).json()["data"]
            assert [row["status"] for row in rows] == [status]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_second_signal_ends_at_once(upstream: Upstream, tmp_path: Path, workers: int) -> None:
    store = empty_store(tmp_path / "s.db")
    config = config_file(tmp_path, upstream, store, server={"workers": workers, "drain_timeout": 600})
    with Served(config).wait() as served:
        asked = ask(served.url, "long", "long:6+gate", stream=True)
        until(lambda: upstream.open == 1, "it is asked")
        served.process.send_signal(signal.SIGTERM)
        until(lambda: _is_refused(served.url), "nothing new is accepted")
        served.stop()
        with pytest.raises(httpx.HTTPError):
            asked.result(20)
        until(lambda: not any(map(is_running, served.workers[1:])), "no worker is left")


def test_a_signal_to_every_process_cuts_no_answer_off(upstream: Upstream, tmp_path: Path) -> None:
    config = config_file(tmp_path, upstream, empty_store(tmp_path / "s.db"), server={"workers": 2})
    with Served(config).wait() as served:
        asked = ask(served.url, "long", "long:6+gate", stream=True)
        until(lambda: upstream.open == 1, "it is asked")
        for process in served.workers:
            os.kill(process, signal.SIGTERM)
        until(lambda: served.log.count("Shutting down") >= 2, "they stop")
        served.process.send_signal(signal.SIGTERM)
        until(lambda: _is_refused(served.url), "nothing new is accepted")
        upstream.gate.set()
        assert asked.result(20).content.endswith(b"data: [DONE]\n\n")
        assert served.process.wait(20) == 0


def test_a_stop_does_not_wait_for_clients_that_take_nothing_or_send_half(upstream: Upstream, tmp_path: Path) -> None:
    config = config_file(tmp_path, upstream, empty_store(tmp_path / "s.db"), server={"drain_timeout": 1})
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nX-Session-ID: deaf\r\n"
    body = orjson.dumps({"model": "long:400000", "messages": [{"role": "user", "content": "hi"}], "stream": True})
    with Served(config).wait() as served:
        port = int(served.url.rsplit(":", 1)[1])
        with RawClient(port) as deaf, RawClient(port) as slow:
            slow.socket.sendall(head + b"Content-Length: 1000\r\n\r\n{")
            deaf.socket.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            heard = b""
            while b"word" not in heard:
                heard += deaf.socket.recv(1000)
            assert served.stop() == 0
        assert " error " not in served.log
        assert "Traceback" not in served.log
    with Served(config).wait() as served:
        rows = httpx.get(f"{served.url}/sessions/deaf/exchanges", trust_env=False).json()["data"]
        assert [(row["status"], row["error"]) for row in rows] == [("partial", "the proxy stopped")]

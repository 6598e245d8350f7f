"""A client that disconnects: the provider's request is cancelled, and what had arrived is stored."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import orjson
import pytest

from tests.e2e.conftest import Serve
from tests.support.raw_socket import RawClient, chat, request
from tests.support.server import Proxy
from tests.support.upstream import Upstream
from tests.support.waiting import until

SECONDS = 1.0
"""How soon the provider must be free."""


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve()


@pytest.fixture(scope="module")
def finishing(serve: Serve) -> Proxy:
    return serve(sessions={"on_disconnect": "finish"})


def asked(proxy: Proxy, session: str, model: str, stream: bool) -> tuple[dict[str, Any], dict[str, str]]:
    body = {"model": model, "messages": [{"role": "user", "content": "a"}], "stream": stream}
    return body, {"x-session-id": session}


def status(proxy: Proxy, session: str) -> str | None:
    """Return the status of the session's only exchange, or None while it is not stored yet."""
    answer = proxy.client.get(f"/sessions/{session}/exchanges")
    return answer.json()["data"][0]["status"] if answer.status_code == 200 else None


def leave_unanswered(proxy: Proxy, upstream: Upstream, session: str, model: str, stream: bool) -> None:
    """Send a request, and disconnect before the provider answers."""
    body, headers = asked(proxy, session, model, stream)
    client = httpx.Client(base_url=proxy.url, trust_env=False)

    def ask() -> None:
        with pytest.raises(httpx.TransportError):
            client.post("/v1/chat/completions", json=body, headers=headers)

    thread = threading.Thread(target=ask)
    thread.start()
    until(lambda: upstream.open == 1, "the provider is asked")
    # A process that ends shuts its sockets down like this.
    for connection in client._transport._pool.connections:  # type: ignore[attr-defined]  # httpx offers no other way
        connection._connection._network_stream.get_extra_info("socket").shutdown(2)
    thread.join()
    client.close()


def leave_in_the_middle(proxy: Proxy, session: str, model: str) -> bytes:
    """Send a request, and disconnect once some words have arrived."""
    body, headers = asked(proxy, session, model, stream=True)
    seen = b""
    with proxy.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        for piece in answer.iter_raw():
            seen += piece
            if b"word3" in seen:
                break
    return seen


def test_a_client_that_leaves_while_its_next_request_waits_frees_the_provider(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    body, headers = asked(proxy, session, "hold", stream=False)
    first = chat(orjson.dumps(body), *[f"{name}: {value}".encode() for name, value in headers.items()])
    with RawClient(proxy.port) as client:
        client.socket.sendall(first.replace(b"Connection: close\r\n", b"") + request(b"GET", b"/healthz"))
        until(lambda: upstream.open == 1, "the provider is asked")
    until(lambda: upstream.open == 0, "the provider is free")
    until(lambda: status(proxy, session) == "cancelled", "it is stored")


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_before_the_first_byte(proxy: Proxy, upstream: Upstream, session: str, stream: bool) -> None:
    leave_unanswered(proxy, upstream, session, "fault:hang", stream)
    until(lambda: upstream.open == 0 and upstream.left == 1, "the provider is free", SECONDS)
    until(lambda: status(proxy, session) == "cancelled", "it is settled")
    assert proxy.messages(session) == []


def test_in_the_middle(proxy: Proxy, upstream: Upstream, session: str) -> None:
    leave_in_the_middle(proxy, session, "long:10+gate")
    until(lambda: upstream.open == 0 and upstream.left == 1, "the provider is free", SECONDS)
    until(lambda: status(proxy, session) == "partial", "it is settled")
    assert proxy.messages(session)[-1]["content"].startswith("word0 word1 word2 word3")


def test_a_session_goes_on_after_it(proxy: Proxy, upstream: Upstream, session: str) -> None:
    leave_unanswered(proxy, upstream, session, "fault:hang", stream=True)
    until(lambda: status(proxy, session) == "cancelled", "it is settled")
    assert proxy.chat(session, "a").status_code == 200
    assert [message["content"] for message in proxy.messages(session)] == ["a", "echo: a"]


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_finish_finishes_what_was_not_answered(
    finishing: Proxy, upstream: Upstream, session: str, stream: bool
) -> None:
    leave_unanswered(finishing, upstream, session, "long:10+delay:300", stream)
    until(lambda: status(finishing, session) == "complete", "it is finished")
    assert finishing.messages(session)[-1]["content"].endswith("word9")
    assert upstream.left == 0


def test_finish_finishes_what_was_begun(finishing: Proxy, upstream: Upstream, session: str) -> None:
    seen = leave_in_the_middle(finishing, session, "long:10+gate")
    assert b"[DONE]" not in seen
    upstream.gate.set()
    until(lambda: status(finishing, session) == "complete", "it is finished")
    assert finishing.messages(session)[-1]["content"].endswith("word9")
    assert upstream.left == 0

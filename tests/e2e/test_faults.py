"""A provider that fails: its own error reaches the client, and nothing is lost or duplicated."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream
from tests.support.waiting import until


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(upstream={"read_timeout": 0.3})


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port without a listener. It is reserved, and refuses connections."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
@pytest.mark.parametrize("fault", ["429", "500", "html"])
def test_its_errors_come_untouched(proxy: Proxy, upstream: Upstream, session: str, fault: str, stream: bool) -> None:
    body = {"model": f"fault:{fault}", "messages": [{"role": "user", "content": "a"}], "stream": stream}
    told = httpx.post(f"{upstream.base_url}/chat/completions", json=body, trust_env=False)
    answer = proxy.client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})

    assert (answer.status_code, answer.content) == (told.status_code, told.content)
    hop = {"date", "server", "connection", "keep-alive"}
    ours = {name for name in answer.headers if name.startswith(("x-context-", "x-session-", "x-exchange-"))}
    assert {k: v for k, v in answer.headers.items() if k not in hop | ours} == {
        k: v for k, v in told.headers.items() if k not in hop
    }
    assert answer.headers["x-session-id"] == session
    assert ("retry-after" in answer.headers) == (fault == "429")
    assert proxy.messages(session) == []
    (row,) = proxy.exchanges(session)
    assert (row["status"], row["upstream_status"], row["replies"]) == ("failed", told.status_code, [])
    assert row["error"]


def test_a_first_request_without_an_id_that_is_asked_until_it_is_answered_is_one_session(proxy: Proxy) -> None:
    said = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where does the Inn rise?"}]

    def ask(model: str) -> str:
        answer = proxy.client.post("/v1/chat/completions", json={"model": model, "messages": said})
        return answer.headers["x-session-id"]

    sessions = [ask(model) for model in ("fault:500", "fault:429", "fault:drop-before", "echo", "echo", "fault:500")]
    assert len({*sessions[:4]}) == 1
    assert len({*sessions}) == 3  # a request that is repeated after its answer starts a new session
    assert [message["role"] for message in proxy.messages(sessions[0])] == ["user", "assistant"]
    assert [row["status"] for row in proxy.exchanges(sessions[0])] == ["failed", "failed", "failed", "complete"]


def test_a_question_beside_a_first_request_that_failed_stays_beside_it(proxy: Proxy) -> None:
    def ask(model: str, system: str, **more: Any) -> str:
        said = [{"role": "system", "content": system}, {"role": "user", "content": "Where does the Lech rise?"}]
        answer = proxy.client.post("/v1/chat/completions", json={"model": model, "messages": said, **more})
        return answer.headers["x-session-id"]

    river = {"type": "function", "function": {"name": "river", "parameters": {"type": "object"}}}
    failed, titled = ask("fault:500", "You know rivers."), ask("echo", "Make a title.")
    equipped, answered = ask("echo", "You know rivers.", tools=[river]), ask("echo", "You know rivers.")
    assert len({failed, titled, equipped}) == 3
    assert answered == failed


def test_a_session_that_was_named_after_its_first_request_failed_is_taken_by_no_other(
    proxy: Proxy, upstream: Upstream
) -> None:
    def ask(model: str, text: str, **headers: str) -> str:
        body = {"model": model, "messages": [{"role": "user", "content": text}]}
        return proxy.client.post("/v1/chat/completions", json=body, headers=headers).headers["x-session-id"]

    failed = ask("fault:500", "Where does the Ilz rise?")
    for text in ("Where does the Ilz rise?", "My key is 1234."):
        assert ask("echo", text, **{"x-session-id": failed, "x-session-mode": "append"}) == failed
    other = ask("echo", "Where does the Ilz rise?")
    assert b"1234" not in upstream.last.body
    assert other != failed


def test_named_agents_that_say_the_same_first_have_sessions_of_their_own(proxy: Proxy) -> None:
    body = {"model": "fault:500", "messages": [{"role": "user", "content": "Where does the Isar rise?"}]}
    sessions = {
        proxy.client.post("/v1/chat/completions", json=body, headers={"x-agent-name": agent}).headers["x-session-id"]
        for agent in ("one", "two")
    }
    assert len(sessions) == 2


@pytest.mark.parametrize("own", [False, True], ids=["plain", "own tools"])
@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_an_answer_without_content(serve: Serve, session: str, stream: bool, own: bool) -> None:
    proxy = serve(virtual_tools={"recall_context": own, "only_with_tools": False})
    for _ in range(2):  # on one connection
        body = {"model": "fault:no-content", "messages": [{"role": "user", "content": "a"}], "stream": stream}
        answer = proxy.client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})
        assert (answer.status_code, answer.content) == (204, b"")
    assert {row["status"] for row in proxy.exchanges(session)} == {"failed"}
    assert proxy.chat(session, "a").status_code == 200


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_a_provider_that_is_not_there(serve: Serve, closed_port: int, session: str, stream: bool) -> None:
    proxy = serve(upstream={"base_url": f"http://127.0.0.1:{closed_port}/v1"})
    answer = proxy.chat(session, "a", stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_unreachable")
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["x-exchange-id"] == proxy.exchanges(session)[0]["id"]
    assert proxy.exchanges(session)[0]["status"] == "failed"
    assert proxy.client.get("/v1/models").status_code == 502


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_a_provider_that_says_nothing(proxy: Proxy, upstream: Upstream, session: str, stream: bool) -> None:
    answer = proxy.chat(session, "a", "fault:hang", stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "upstream_timeout")
    assert proxy.exchanges(session)[0]["status"] == "failed"
    until(lambda: upstream.left == 1, "the provider is free")


@pytest.mark.parametrize("stream", [False, True], ids=["json", "stream"])
def test_a_provider_that_hangs_up(proxy: Proxy, upstream: Upstream, session: str, stream: bool) -> None:
    answer = proxy.chat(session, "a", "fault:drop-before", stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_unreachable")
    # The provider may have processed it, so only the client may retry.
    assert len(upstream.log) == 1
    assert proxy.exchanges(session)[0]["status"] == "failed"


def test_an_answer_that_is_no_json(proxy: Proxy, session: str) -> None:
    answer = proxy.chat(session, "a", "fault:bad-json")
    assert (answer.status_code, answer.content) == (200, b'{"id": "chatcmpl-1", "choices": [')
    assert proxy.messages(session) == []
    assert proxy.exchanges(session)[0]["status"] == "failed"


@pytest.mark.parametrize("whole", [True, False], ids=["resend", "append"])
def test_a_repetition_makes_nothing_twice(proxy: Proxy, session: str, whole: bool) -> None:
    past = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "echo: a"}]
    proxy.chat(session, past[:1])
    new = [{"role": "user", "content": "b"}]
    said = past + new if whole else new
    for model in ("fault:500", "fault:429", "fault:hang", "fault:drop-before"):
        proxy.chat(session, said, model)
        assert [message["content"] for message in proxy.messages(session)] == ["a", "echo: a"]
    assert proxy.chat(session, said).status_code == 200

    assert [message["content"] for message in proxy.messages(session)] == ["a", "echo: a", "b", "echo: b"]
    shown = proxy.get(f"/sessions/{session}")
    assert (shown["messages"], shown["rounds"]) == (4, 2)
    assert len(shown["branches"]) == 1
    assert [row["status"] for row in proxy.exchanges(session)] == ["complete", *["failed"] * 4, "complete"]


def test_a_retry_after_a_lost_reply_makes_nothing_twice(proxy: Proxy, upstream: Upstream, session: str) -> None:
    proxy.chat(session, "a")
    for count in ("0", "1"):
        proxy.chat(session, "b", headers={"x-stainless-retry-count": count})
    assert [message["content"] for message in proxy.messages(session)] == ["a", "echo: a", "b", "echo: b"]
    assert [message["content"] for message in upstream.last.messages] == ["a", "echo: a", "b"]


def test_a_failed_first_request_is_readable(proxy: Proxy, session: str) -> None:
    proxy.chat(session, "a", "fault:500")
    shown = proxy.get(f"/sessions/{session}")
    assert (shown["id"], shown["messages"], shown["head"]) == (session, 0, None)
    assert proxy.messages(session) == []
    assert proxy.exchanges(session)[0]["status"] == "failed"
    assert session in [row["id"] for row in proxy.get("/sessions")["data"]]


def test_a_busy_pool_says_so(serve: Serve, upstream: Upstream, session: str) -> None:
    proxy = serve(upstream={"max_connections": 1, "connect_timeout": 1})
    body = {"model": "long:10+gate", "messages": [{"role": "user", "content": "a"}], "stream": True}
    with proxy.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        pieces = answer.iter_raw()
        next(pieces)
        refused = proxy.chat(session, "b")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "upstream_busy")
        upstream.gate.set()
        assert b"".join(pieces).endswith(b"[DONE]\n\n")
    assert proxy.chat(session, "b").status_code == 200

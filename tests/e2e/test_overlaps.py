"""Overlapping requests of one session: none waits for another, and the head's branch loses no turn."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream
from tests.support.waiting import until

RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve()


@contextmanager
def slow(proxy: Proxy, upstream: Upstream, session: str, text: str) -> Iterator[None]:
    """Send `text`; its answer ends only when the block ends."""
    body = {"model": "long:3+gate", "messages": [{"role": "user", "content": text}], "stream": True}
    before = len(upstream.log)
    with proxy.client.stream("POST", "/v1/chat/completions", json=body, headers={"x-session-id": session}) as answer:
        assert answer.status_code == 200
        until(lambda: len(upstream.log) > before, "the slow request arrives")
        yield
        upstream.gate.set()
        assert b"[DONE]" in answer.read()


def said(proxy: Proxy, session: str) -> list[Any]:
    """Return the texts of users and tools on the head's branch."""
    return [m["content"] for m in proxy.messages(session) if m["role"] in {"user", "tool"}]


def ask(proxy: Proxy, session: str, text: str, **given: Any) -> httpx.Response:
    answer = proxy.chat(session, text, **given)
    assert answer.status_code == 200, answer.text
    return answer


def test_two_appends_at_once_lose_none(proxy: Proxy, upstream: Upstream, session: str) -> None:
    ask(proxy, session, "a")
    with slow(proxy, upstream, session, "slow"):
        ask(proxy, session, "quick")
    assert said(proxy, session) == ["a", "quick", "slow"]


def test_nothing_comes_between_a_call_and_its_result(proxy: Proxy, upstream: Upstream, session: str) -> None:
    ask(proxy, session, "a")
    with slow(proxy, upstream, session, "slow"):
        call = ask(proxy, session, "look it up", model="tool:find").json()["choices"][0]["message"]["tool_calls"][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "found"}
    assert proxy.chat(session, [result], "tool:find").status_code == 200
    assert said(proxy, session) == ["a", "look it up", "slow", "found"]
    sent = upstream.log[-1].json["messages"]
    assert sent[-2]["tool_calls"][0]["id"] == call["id"]
    assert sent[-1] == result


def test_a_retry_goes_where_the_request_went(proxy: Proxy, upstream: Upstream, session: str) -> None:
    ask(proxy, session, "a")
    with slow(proxy, upstream, session, "slow"):
        ask(proxy, session, "quick")
    ask(proxy, session, "slow", headers=RETRY)
    assert said(proxy, session) == ["a", "quick", "slow"]


def test_a_retry_that_says_so_is_known_behind_later_requests(proxy: Proxy, session: str) -> None:
    for text in ("a", "b", "c"):
        ask(proxy, session, text)
    ask(proxy, session, "b", headers=RETRY)
    assert said(proxy, session) == ["a", "b", "c"]
    assert len({node for e in proxy.exchanges(session) for node in e["nodes"]}) == 3
    ask(proxy, session, "b")
    assert said(proxy, session) == ["a", "b", "c", "b"]


@pytest.mark.parametrize("count", ["", "0", "-1", "x", "%C2%B2", "9" * 5000])
def test_a_count_that_is_none_announces_nothing(proxy: Proxy, session: str, count: str) -> None:
    for _ in range(2):
        ask(proxy, session, "again", headers={"x-stainless-retry-count": count})
    assert len(said(proxy, session)) == (1 if count.startswith("9") else 2)


def test_results_that_come_one_by_one_stay_with_their_calls(proxy: Proxy, upstream: Upstream, session: str) -> None:
    reply = ask(proxy, session, "both", model="tools:find,look").json()["choices"][0]["message"]
    for call in reply["tool_calls"]:
        result = {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]}
        assert proxy.chat(session, [result], "lenient+tools:find,look").status_code == 200
    assert said(proxy, session) == ["both", "find", "look"]
    assert [message["role"] for message in upstream.last.messages[-3:]] == ["assistant", "tool", "tool"]


def test_results_that_come_at_once_stay_with_their_calls(proxy: Proxy, upstream: Upstream, session: str) -> None:
    calls = ask(proxy, session, "both", model="tools:find,look").json()["choices"][0]["message"]["tool_calls"]
    before = len(upstream.log)
    with ThreadPoolExecutor(2) as threads:
        asked = []
        for call in calls:
            result = {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]}
            asked.append(threads.submit(proxy.chat, session, [result], "lenient+long:3+gate", stream=True))
        until(lambda: len(upstream.log) == before + 2, "both have arrived")
        upstream.gate.set()
        assert all(each.result().content.endswith(b"data: [DONE]\n\n") for each in asked)
    assert sorted(said(proxy, session)) == ["both", "find", "look"]
    assert [m["role"] for m in proxy.messages(session)] == ["user", "assistant", "tool", "tool", "assistant"]


def test_first_messages_at_once_make_one_conversation(proxy: Proxy, upstream: Upstream, session: str) -> None:
    with slow(proxy, upstream, session, "slow"):
        ask(proxy, session, "quick")
    assert said(proxy, session) == ["quick", "slow"]


@pytest.mark.parametrize("use", ["resend", "first", "append", "retry"])
def test_the_same_request_twice_has_one_place(proxy: Proxy, upstream: Upstream, session: str, use: str) -> None:
    new: list[Any] = [{"role": "user", "content": "b"}]
    past: list[Any] = []
    if use != "first":
        ask(proxy, session, "a")
        past = proxy.messages(session)
    sent = past + new if use == "resend" else new
    headers = RETRY if use == "retry" else {}

    def pending() -> bool:
        answer = proxy.client.get(f"/sessions/{session}/exchanges")
        return answer.status_code == 200 and answer.json()["data"][0]["status"] == "pending"

    with ThreadPoolExecutor(1) as threads:
        one = threads.submit(proxy.chat, session, sent, "long:3+gate", stream=True, headers=headers)
        until(pending, "the first one is under way")
        # The second one is answered before the first.
        other = proxy.chat(session, sent, "long:3", stream=True, headers=headers)
        upstream.gate.set()
        assert all(answer.content.endswith(b"data: [DONE]\n\n") for answer in (one.result(), other))
    assert proxy.messages(session) == [*past, *new, {"role": "assistant", "content": "word0 word1 word2"}]
    shown = proxy.get(f"/sessions/{session}")
    assert (len(shown["branches"]), shown["messages"]) == (1, len(past) + 2)


@pytest.mark.parametrize("use", ["append", "resend"])
def test_the_same_request_twice_at_the_same_moment_has_one_place(
    proxy: Proxy, upstream: Upstream, session: str, use: str
) -> None:
    ask(proxy, session, "a")
    past = proxy.messages(session)
    new: list[Any] = [{"role": "user", "content": "b"}]
    sent = past + new if use == "resend" else new
    before = len(upstream.log)
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(proxy.chat, session, sent, "long:3+gate", stream=True) for _ in range(2)]
        until(lambda: len(upstream.log) == before + 2, "both have arrived")
        upstream.gate.set()
        assert all(each.result().content.endswith(b"data: [DONE]\n\n") for each in asked)
    assert [row["status"] for row in proxy.exchanges(session)] == ["complete"] * 3
    turn = [*new, {"role": "assistant", "content": "word0 word1 word2"}]
    assert proxy.messages(session) == past + turn
    ask(proxy, session, "c", headers={"x-session-mode": "append"})
    assert proxy.messages(session)[-2]["content"] == "c"


def test_a_resend_while_the_last_reply_is_still_streaming(proxy: Proxy, upstream: Upstream, session: str) -> None:
    ask(proxy, session, "a")
    past = proxy.messages(session)
    asked: list[Any] = [*past, {"role": "user", "content": "b"}]
    # The client has seen some words, and continues from them.
    part: list[Any] = [{"role": "assistant", "content": "word0"}, {"role": "user", "content": "stop, c"}]
    with ThreadPoolExecutor(1) as threads:
        before = len(upstream.log)
        slow_one = threads.submit(proxy.chat, session, asked, "long:3+gate", stream=True)
        until(lambda: len(upstream.log) > before, "the slow request arrives")
        quick = proxy.chat(session, [*asked, *part])
        assert quick.status_code == 200
        assert [m["content"] for m in upstream.last.messages] == ["a", "echo: a", "b", "word0", "stop, c"]
        assert [m["content"] for m in proxy.messages(session)][-2:] == ["stop, c", "echo: stop, c"]
        upstream.gate.set()
        assert slow_one.result().content.endswith(b"data: [DONE]\n\n")
    branches = proxy.get(f"/sessions/{session}")["branches"]
    logs = [
        [m["content"] for m in proxy.get(f"/sessions/{session}/messages", branch=branch["head"])["data"]]
        for branch in branches
    ]
    assert sorted(logs) == [
        ["a", "echo: a", "b", "word0", "stop, c", "echo: stop, c"],
        ["a", "echo: a", "b", "word0 word1 word2"],
    ]
    # The session follows the branch that the client continues.
    more = [*asked, *part, {"role": "assistant", "content": "echo: stop, c"}, {"role": "user", "content": "d"}]
    assert proxy.chat(session, more).status_code == 200
    assert [m["content"] for m in proxy.messages(session)][-4:] == [*("stop, c", "echo: stop, c", "d", "echo: d")]


def test_an_append_after_the_client_left_in_the_middle(proxy: Proxy, upstream: Upstream, session: str) -> None:
    ask(proxy, session, "a")
    body = {"model": "long:6+gate", "messages": [{"role": "user", "content": "b"}], "stream": True}
    headers = {"x-session-id": session}
    with proxy.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
        seen = b""
        for piece in answer.iter_raw():
            seen += piece
            if b"word1" in seen:
                break
    # The next request does not wait until the last one is settled: it may come before or after.
    ask(proxy, session, "c")
    until(lambda: "pending" not in [row["status"] for row in proxy.exchanges(session)], "all is settled")
    statuses = sorted(row["status"] for row in proxy.exchanges(session))
    assert statuses == ["complete", "complete", "partial"]
    assert sorted(said(proxy, session)) == ["a", "b", "c"]
    ask(proxy, session, "d")
    assert [m["content"] for m in upstream.last.messages if m["role"] == "user"][-1] == "d"
    partial = next(m["content"] for m in proxy.messages(session) if str(m["content"]).startswith("word0"))
    assert "word5" not in partial

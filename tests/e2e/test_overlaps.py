"""Requests of one session that overlap: each waits for nothing, and the branch of the head loses no turn."""

from __future__ import annotations

from collections.abc import Iterator
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
    """Ask `text`, whose answer ends only when the block does."""
    body = {"model": "long:3+gate", "messages": [{"role": "user", "content": text}], "stream": True}
    before = len(upstream.log)
    with proxy.client.stream(
        "POST", "/v1/chat/completions", json=body, headers={"x-session-id": session}
    ) as answer:
        assert answer.status_code == 200
        until(lambda: len(upstream.log) > before, "the slow request arrives")
        yield
        upstream.gate.set()
        assert b"[DONE]" in answer.read()


def said(proxy: Proxy, session: str) -> list[Any]:
    """Return the user's texts and the tools' on the branch of the head."""
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
        call = ask(proxy, session, "look it up", model="tool:find").json()["choices"][0]["message"][
            "tool_calls"
        ][0]
    result = {"role": "tool", "tool_call_id": call["id"], "content": "found"}
    assert proxy.chat(session, [result], "tool:find").status_code == 200
    assert said(proxy, session) == ["a", "look it up", "found"]
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


def test_results_that_come_one_by_one_stay_with_their_calls(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    reply = ask(proxy, session, "both", model="tools:find,look").json()["choices"][0]["message"]
    for call in reply["tool_calls"]:
        result = {"role": "tool", "tool_call_id": call["id"], "content": call["function"]["name"]}
        assert proxy.chat(session, [result], "lenient+tools:find,look").status_code == 200
    assert said(proxy, session) == ["both", "find", "look"]
    assert [message["role"] for message in upstream.last.messages[-3:]] == ["assistant", "tool", "tool"]


def test_first_messages_at_once_make_one_conversation(proxy: Proxy, upstream: Upstream, session: str) -> None:
    with slow(proxy, upstream, session, "slow"):
        ask(proxy, session, "quick")
    assert said(proxy, session) == ["quick", "slow"]

"""Upstreams that require an order of roles accept the views that the proxy builds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream

SUMMARY = {"type": "summarize", "mode": "statistics", "keep_rounds": 1, "min_messages": 4}
LEAN: dict[str, Any] = {"trigger": {"messages": 6}, "keep": {"rounds": 1, "first_user": True}}


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    policies = {
        "system": {**LEAN, "match": {"models": ["*as-system*"]}, "edits": [{**SUMMARY, "role": "system"}]},
        "user": {**LEAN, "match": {"models": ["*as-user*"]}, "edits": [{**SUMMARY, "role": "user"}]},
        "merged": {**LEAN, "match": {"models": ["*merged*"]}, "edits": [SUMMARY]},
        "digests": {
            "trigger": {"every_request": True},
            "keep": {"rounds": 0},
            "edits": [{"type": "digest_agent_calls", "keep": 1}],
        },
    }
    return serve(policies=policies)


def converse(proxy: Proxy, session: str, model: str, **given: Any) -> list[int]:
    """Run a conversation that resends its history; return the statuses."""
    said: list[dict[str, Any]] = [{"role": "system", "content": "Help."}]
    statuses = []
    for number in range(8):
        said.append({"role": "user", "content": f"question {number}"})
        answer = proxy.chat(session, said, f"say:fine+{model}", **given)
        statuses.append(answer.status_code)
        said.append({"role": "assistant", "content": "fine"})
    return statuses


@pytest.mark.parametrize("rule", ["one-system", "alternate"])
@pytest.mark.parametrize("how", ["as-system", "as-user", "merged"])
@pytest.mark.parametrize("stream", [False, True])
def test_sessions_with_summaries_go_through(
    proxy: Proxy, upstream: Upstream, session: str, rule: str, how: str, stream: bool
) -> None:
    assert converse(proxy, session, f"strict:{rule}+{how}", stream=stream) == [200] * 8
    refused = [request for request in upstream.log if request.refused]
    assert len(refused) <= 1  # the proxy remembers what a model requires
    assert "question 0" in str(upstream.last.messages)
    summed = [row for row in proxy.exchanges(session) if row["summary"]]
    assert summed
    said = [row["warnings"] for row in proxy.exchanges(session) if "upstream wants" in str(row["warnings"])]
    assert said or not refused


def test_requests_at_once_go_through_before_anything_is_known(proxy: Proxy, upstream: Upstream, session: str) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    model = "strict:alternate+delay:100+at-once"

    def ask(number: int) -> int:
        return proxy.chat(f"{session}-{number}", said, model).status_code

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, range(4))) == [200] * 4
    assert [message["role"] for message in upstream.last.messages] == ["user"]


def test_both_orders_may_be_asked_for_one_after_the_other(proxy: Proxy, upstream: Upstream, session: str) -> None:
    said = [
        {"role": "user", "content": "a"},
        {"role": "system", "content": "between"},
        {"role": "user", "content": "b"},
    ]
    answer = proxy.chat(session, said, "strict:one-system,alternate+both")
    assert answer.status_code == 200, answer.text
    assert [message["role"] for message in upstream.last.messages] == ["system", "user"]
    assert answer.headers["x-context-warning"].count("upstream wants") == 2


def test_a_refusal_that_only_sounds_like_it_teaches_nothing(proxy: Proxy, upstream: Upstream, session: str) -> None:
    """A client's own text may look like such a refusal. It must not change the requests of others."""
    said = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    words = "Conversation roles must alternate user/assistant"
    refused = proxy.chat(session, said, "quotes+innocent", metadata={"note": words})
    assert refused.status_code == 400
    fine = proxy.chat(f"{session}-2", said, "quotes+innocent")
    assert (fine.status_code, upstream.last.messages) == (200, said)


def test_sessions_with_digests_go_through(proxy: Proxy, upstream: Upstream, session: str) -> None:
    model = "say:fine+strict:alternate+digests"
    said: list[dict[str, Any]] = []
    for number in range(6):
        said += [
            {"role": "user", "content": f"<Agent: Scout> [调用工具 look_{number}]"},
            {"role": "user", "content": f"question {number}"},
        ]
        answer = proxy.chat(session, said, model)
        assert answer.status_code == 200, answer.text
        said.append({"role": "assistant", "content": "fine"})
    assert "早期工具调用摘要" in upstream.last.messages[0]["content"]
    assert len([request for request in upstream.log if request.refused]) == 1
    assert [message["role"] for message in proxy.messages(session)][:3] == ["user", "user", "assistant"]


def test_what_is_not_to_be_trimmed_is_not_put_together_either(proxy: Proxy, upstream: Upstream, session: str) -> None:
    said = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    answer = proxy.chat(session, said, "strict:alternate+off", headers={"x-context-policy": "off"})
    assert answer.status_code == 400
    assert "alternate" in answer.json()["error"]["message"]
    assert len(upstream.log) == 1

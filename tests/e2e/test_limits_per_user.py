"""Limits per user: each tenant has a policy that extends a base policy with its differences."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream

USERS = ("anne", "bert", "carl")
TARGETS = {"anne": 120, "bert": 240}

POLICIES: dict[str, Any] = {
    "anne": {"extends": "limited", "match": {"tenants": ["anne"]}, "target": {"tokens": TARGETS["anne"]}},
    "bert": {
        "extends": "limited",
        "match": {"tenants": ["bert"]},
        "trigger": {"messages": 14},
        "target": {"tokens": TARGETS["bert"]},
        "on_arrival": [],
    },
    "limited": {
        "match": {"tenants": ["whoever is limited and has no limits of their own"]},
        "trigger": {"messages": 10},
        "target": {"tokens": 60},
        "keep": {"rounds": 0},
        "on_arrival": [{"type": "truncate_tool_output", "max_bytes": 40}],
        "edits": [{"type": "drop_oldest"}],
    },
}


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    keys = [{"key": f"{user}-key-0123456789", "tenant": user} for user in USERS]
    return serve(auth={"mode": "keys", "keys": keys}, policies=POLICIES)


def ask(proxy: Proxy, user: str, session: str, messages: list[dict[str, Any]]) -> httpx.Response:
    answer = proxy.chat(session, messages, headers={"authorization": f"Bearer {user}-key-0123456789"})
    assert answer.status_code == 200, answer.text
    return answer


def talk(length: int) -> list[dict[str, Any]]:
    """Return this many messages of about thirty tokens each; the last one is the user's."""
    roles = ("user", "assistant") if length % 2 else ("assistant", "user")
    return [{"role": roles[turn % 2], "content": f"{turn} " + "some words " * 12} for turn in range(length)]


def test_each_user_has_limits_of_their_own(proxy: Proxy, upstream: Upstream, session: str) -> None:
    sent: dict[tuple[str, int], int] = {}
    for length in (10, 11, 13, 15):
        for user in USERS:
            answer = ask(proxy, user, f"{session}-{length}", talk(length))
            assert answer.headers["x-context-policy"] == (user if user in POLICIES else "default")
            sent[user, length] = len(upstream.last.messages)
            if sent[user, length] < length:
                assert int(answer.headers["x-context-tokens-sent"]) <= TARGETS[user]
                assert answer.headers["x-context-edits"] == "drop_oldest"
    for length in (10, 11, 13, 15):
        assert (sent["anne", length] < length) == (length > 10)
        assert (sent["bert", length] < length) == (length > 14)
        assert sent["carl", length] == length
    assert sent["anne", 15] < sent["bert", 15]


def test_a_list_that_a_user_leaves_empty_takes_the_base_ones_place(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    turn: list[dict[str, Any]] = [
        {"role": "user", "content": "read it"},
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "line\n" * 40},
    ]
    whole: dict[str, bool] = {}
    for user in USERS:
        ask(proxy, user, session, turn)
        whole[user] = upstream.last.messages[-1]["content"] == turn[-1]["content"]
    assert whole == {"anne": False, "bert": True, "carl": True}

"""Agents with tools that share one session by appending: each sees all messages, and nothing is lost."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream

TOOL = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object"}}}


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve()


def _text(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def _call(name: str) -> dict[str, Any]:
    function = {"name": "lookup", "arguments": "{}"}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": name, "type": "function", "function": function}],
    }


def _result(call: str, text: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": text}


def _say(
    proxy: Proxy, upstream: Upstream, session: str, agent: str, message: dict[str, Any], reply: dict[str, Any]
) -> list[dict[str, Any]]:
    """Append a message as an agent; return the messages that the upstream received."""
    upstream.load(session, [reply])
    headers = {"x-agent-name": agent, "x-session-mode": "append"}
    answer = proxy.chat(session, [message], f"script:{session}", headers=headers, tools=[TOOL])
    assert answer.status_code == 200, answer.text
    sent: list[dict[str, Any]] = upstream.last.json["messages"]
    return sent


def _user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def test_what_another_agent_said_while_a_tool_ran_is_seen_with_its_result(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    first = _say(proxy, upstream, session, "A", _user("look it up"), _call("ca"))
    meanwhile = _say(proxy, upstream, session, "B", _user("and this"), _call("cb"))
    # No result is invented, and each request begins with the previous one.
    assert meanwhile == [*first, _user("and this")]
    one = _say(proxy, upstream, session, "A", _result("ca", "found"), _text("done a"))
    assert one == [*meanwhile, _call("ca"), _result("ca", "found")]
    two = _say(proxy, upstream, session, "B", _result("cb", "this too"), _text("done b"))
    assert two == [*one, _text("done a"), _call("cb"), _result("cb", "this too")]
    stored = [(each["role"], each["content"]) for each in proxy.messages(session)]
    assert stored == [(each["role"], each["content"]) for each in [*two, _text("done b")]]


def test_all_that_three_agents_say_stays_on_the_branch(proxy: Proxy, upstream: Upstream, session: str) -> None:
    random = Random(3)  # noqa: S311 - the same turns in every run
    waiting: dict[str, str] = {}
    said: list[str] = []
    before: list[dict[str, Any]] = []
    for turn in range(40):
        agent = random.choice("ABC")
        call = waiting.pop(agent, None)
        said.append(f"said {turn}")
        message = _user(said[-1]) if call is None else _result(call, said[-1])
        if random.random() < 0.5:
            waiting[agent] = f"call {turn}"
            reply = _call(waiting[agent])
        else:
            said.append(f"reply {turn}")
            reply = _text(said[-1])
        sent = _say(proxy, upstream, session, agent, message, reply)
        assert sent[: len(before)] == before
        assert sent[-1] == message
        before = sent
    stored = proxy.messages(session)
    assert sorted(each["content"] for each in stored if each["content"]) == sorted(said)
    blocks = [place for place, each in enumerate(stored) if each.get("tool_calls")]
    unanswered = [
        place for place in blocks if stored[place + 1 : place + 2] == [] or stored[place + 1]["role"] != "tool"
    ]
    assert len(unanswered) == len(waiting)
    for place in blocks:
        if place not in unanswered:
            assert stored[place + 1]["tool_call_id"] == stored[place]["tool_calls"][0]["id"]
    assert sum(each["role"] == "tool" for each in stored) == len(blocks) - len(unanswered)
    assert [row["warnings"] for row in proxy.exchanges(session) if row.get("warnings")] == []

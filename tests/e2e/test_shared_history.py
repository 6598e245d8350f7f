"""Several agents on one history: what each agent is sent, and what is hidden from other clients.

The policy is examples/policies/shared-history.yaml.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.support.examples import serving
from tests.support.server import Proxy
from tests.support.upstream import Upstream
from tests.support.waiting import until


@pytest.fixture(scope="module")
def proxy(provider: Upstream, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    with serving("shared-history", provider, tmp_path_factory.mktemp("store")) as served:
        yield served


def say(proxy: Proxy, session: str, agent: str, *messages: dict[str, Any], **headers: str) -> None:
    """Append messages as an agent."""
    named = {"x-agent-name": agent, "x-session-mode": "append"}
    answer = proxy.chat(session, list(messages), f"say:{agent} answers", headers=named | headers)
    assert answer.status_code == 200, answer.text


def test_each_agent_reads_what_the_others_said(proxy: Proxy, upstream: Upstream, session: str) -> None:
    say(proxy, session, "planner", {"role": "user", "content": "plan it"})
    say(proxy, session, "coder", {"role": "user", "content": "code it", "agent": "planner"})
    say(proxy, session, "planner", {"role": "user", "content": "is it done?"})
    texts = ["plan it", "planner answers", "code it", "coder answers", "is it done?"]
    assert [message["content"] for message in upstream.last.messages] == texts
    assert not {"agent", "is_internal"} & {key for message in upstream.last.messages for key in message}
    assert "x-agent-name" not in upstream.last.names
    stored = proxy.messages(session)
    assert stored[2]["agent"] == "planner"
    say(proxy, f"{session}-own", "coder", {"role": "user", "content": "alone"})
    assert len(upstream.last.messages) == 1


def test_internal_messages_are_stored_and_a_policy_leaves_them_out(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    say(proxy, session, "planner", {"role": "user", "content": "a note", "is_internal": True, "agent": "x"})
    say(proxy, session, "planner", {"role": "user", "content": "seen by all"})
    texts = ["a note", "planner answers", "seen by all"]
    assert [message["content"] for message in upstream.last.messages] == texts
    asked = {"role": "user", "content": "a title?"}
    say(proxy, session, "titles", asked, **{"x-context-policy": "public"})
    texts = ["planner answers", "seen by all", "planner answers", "a title?"]
    assert [message["content"] for message in upstream.last.messages] == texts
    assert proxy.messages(session)[0] == {"role": "user", "content": "a note", "is_internal": True, "agent": "x"}


def test_no_agent_is_sent_the_reasoning_that_another_one_did_behind_its_own_view(
    serve: Serve, upstream: Upstream, session: str
) -> None:
    """Each agent has its own trims. A provider that checks the prefix of reasoning would refuse another agent's."""
    tight = {"trigger": {"messages": 12}, "edits": [{"type": "keep_rounds", "last": 1}]}
    proxy = serve(policies={"tight": tight}, upstream={"reasoning": "keep"})
    for number in range(18):
        agent = ("planner", "coder", "coder")[number % 3]
        named = {"x-agent-name": agent, "x-session-mode": "append"}
        answer = proxy.chat(session, f"question {number}", "say:ok+reason+prefix:400", headers=named)
        assert answer.status_code == 200, answer.text
        assert "refused" not in answer.headers.get("x-context-warning", "")
        view = proxy.get(f"/exchanges/{answer.headers['x-exchange-id']}/view")["messages"]
        assert view == upstream.last.messages
    assert any("reasoning_details" in message for message in upstream.last.messages)  # the agent's own


@pytest.mark.parametrize("policy", [{}, {"mode": "observe"}, None], ids=["trims", "observes", "off"])
def test_an_agent_without_a_name_is_another_one(
    serve: Serve, upstream: Upstream, session: str, policy: dict[str, Any] | None
) -> None:
    """All that one of them is sent hides, or shows, the reasoning of the other: no request is refused."""
    proxy = serve(policies={"mine": policy or {}}, upstream={"reasoning": "keep"})
    for number in range(6):
        named = {"x-agent-name": "helper"} if number % 2 else {}
        headers = {"x-session-mode": "append", "x-context-policy": "off" if policy is None else "mine", **named}
        before = len(upstream.log)
        answer = proxy.chat(session, f"question {number}", "say:ok+reason+prefix:400", headers=headers)
        assert answer.status_code == 200, answer.text
        assert len(upstream.log) - before == 1
        view = proxy.get(f"/exchanges/{answer.headers['x-exchange-id']}/view")["messages"]
        assert view == upstream.last.messages


def test_new_instructions_take_the_place_of_older_ones(proxy: Proxy, upstream: Upstream, session: str) -> None:
    for version in ("old", "new"):
        system = {"role": "system", "content": f"{version} instructions"}
        say(proxy, session, "planner", system, {"role": "user", "content": "go on"})
    systems = [message["content"] for message in upstream.last.messages if message["role"] == "system"]
    assert systems == ["new instructions"]
    assert upstream.last.messages[0]["role"] == "system"


def test_what_is_old_is_compressed_beside_the_requests_for_all_of_them(
    proxy: Proxy, upstream: Upstream, session: str
) -> None:
    talk = [{"role": ("user", "assistant")[at % 2], "content": f"{at} " + "word " * 2_000} for at in range(23)]
    model = "say:fine+summary:good"  # it writes the summaries of its own conversations
    answer = proxy.chat(session, talk, model, headers={"x-agent-name": "planner"})
    assert 48_000 < int(answer.headers["x-context-tokens-before"]) < 60_000
    assert answer.headers["x-context-edits"] == ""
    until(lambda: len(proxy.get(f"/sessions/{session}")["summaries"]) == 1, "a summary is there")
    more = [*talk, {"role": "assistant", "content": "fine"}]
    more += [{"role": ("user", "assistant")[at % 2], "content": f"{at} " + "word " * 2_000} for at in range(7)]
    answer = proxy.chat(session, more, model, headers={"x-agent-name": "planner"})
    assert int(answer.headers["x-context-tokens-before"]) > 60_000
    assert int(answer.headers["x-context-tokens-sent"]) <= 30_000
    assert answer.headers["x-context-edits"].split(",")[0] == "summarize"
    first = upstream.last.messages[0]
    assert first["role"] == "system"
    assert first["content"].startswith("Archived Session Summary\n")
    asked = {"role": "user", "content": "and now?"}
    answer = proxy.chat(session, [asked], model, headers={"x-agent-name": "coder", "x-session-mode": "append"})
    assert int(answer.headers["x-context-tokens-sent"]) <= 60_000
    assert "summarize" in answer.headers["x-context-edits"]  # the other agent's view has a cut of its own
    assert len(proxy.messages(session)) == 34


def test_a_summarizer_that_fails_stops_nobody(proxy: Proxy, upstream: Upstream, session: str) -> None:
    talk = [{"role": ("user", "assistant")[at % 2], "content": f"{at} " + "word " * 2_000} for at in range(31)]
    model = "say:fine+summary:good+sum-fault:500"
    answer = proxy.chat(session, talk, model, headers={"x-agent-name": "planner"})
    assert int(answer.headers["x-context-tokens-sent"]) <= 60_000
    more = [*talk, {"role": "assistant", "content": "fine"}, talk[0]]
    answer = proxy.chat(session, more, model, headers={"x-agent-name": "planner"})
    assert int(answer.headers["x-context-tokens-sent"]) <= 60_000
    assert "drop_oldest" in answer.headers["x-context-edits"]
    until(lambda: proxy.get(f"/sessions/{session}")["summarizer"]["failed"] > 0, "it is noted")
    assert len(proxy.messages(session)) == 34


def test_the_model_asks_for_compression_itself(proxy: Proxy, upstream: Upstream, session: str) -> None:
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    said = [{"role": ("user", "assistant")[at % 2], "content": f"{at} " + "word " * 300} for at in range(11)]
    model = "tool:compress_chat_history+summary:good"
    answer = proxy.chat(session, said, model, tools=tools)
    reply = answer.json()["choices"][0]["message"]
    assert not reply.get("tool_calls")
    assert "compress_chat_history" in str([request.json.get("tools") for request in upstream.log])
    until(lambda: len(proxy.get(f"/sessions/{session}")["summaries"]) == 1, "a summary is there")
    said += [{"role": "assistant", "content": reply["content"]}, {"role": "user", "content": "go on"}]
    answer = proxy.chat(session, said, "say:fine", tools=tools)
    assert "summarize" in answer.headers["x-context-edits"]
    assert proxy.exchanges(session)[-1]["cut"]["fired"] == "a summary was asked for"


def test_a_finished_task_is_not_asked_again(proxy: Proxy, upstream: Upstream, session: str) -> None:
    asked = {"role": "user", "content": "do it"}
    reply = proxy.chat(session, [asked], "tool:finish_task").json()["choices"][0]["message"]
    again = proxy.chat(session, [asked, reply], "say:something else").json()["choices"][0]["message"]
    assert again == reply
    assert len(upstream.log) == 1

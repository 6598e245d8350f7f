"""A finished task stays finished: if its history is sent again, the answer comes from the store."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from openai import OpenAI

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream

ASK = {"role": "user", "content": "do it"}


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(finish={"tools": ["finish_task", "ask_user"]})


def finish(proxy: Proxy, session: str, tool: str = "finish_task", **given: Any) -> dict[str, Any]:
    """Send a request that is answered with a call of the tool; return the reply."""
    answer = proxy.chat(session, [ASK], f"tool:{tool}", **given)
    reply: dict[str, Any] = answer.json()["choices"][0]["message"]
    assert reply["tool_calls"][0]["function"]["name"] == tool
    return reply


def result_of(reply: dict[str, Any]) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "noted"}


@pytest.mark.parametrize("tool", ["finish_task", "ask_user"])
@pytest.mark.parametrize("with_result", [False, True])
def test_the_history_sent_again_is_answered_from_the_store(
    proxy: Proxy, upstream: Upstream, session: str, tool: str, with_result: bool
) -> None:
    reply = finish(proxy, session, tool)
    told = [ASK, reply, *([result_of(reply)] if with_result else [])]
    for _ in range(2):
        answer = proxy.chat(session, told)
        assert answer.status_code == 200
        choice = answer.json()["choices"][0]
        assert (choice["message"], choice["finish_reason"]) == (reply, "tool_calls")
        assert answer.headers["x-context-messages-sent"] == "0"
        assert "finished" in answer.headers["x-context-warning"]
    assert len(upstream.log) == 1
    stored = proxy.messages(session)
    assert [message["role"] for message in stored] == ["user", "assistant", "tool"][: len(told)]
    receipt = proxy.exchanges(session)[-1]
    assert (receipt["status"], receipt["finished"]) == ("complete", True)
    assert proxy.get(f"/sessions/{session}")["finished"] is True


def test_a_stream_says_the_same(proxy: Proxy, upstream: Upstream, session: str) -> None:
    reply = finish(proxy, session)
    client = OpenAI(base_url=f"{proxy.url}/v1", api_key="sk-test", default_headers={"x-session-id": session})
    with client.chat.completions.stream(model="echo", messages=[ASK, reply]) as stream:  # type: ignore[list-item]  # plain JSON is what the SDK sends
        final = stream.get_final_completion()
    call = final.choices[0].message.tool_calls
    assert call is not None
    assert call[0].function.name == "finish_task"
    assert orjson.loads(call[0].function.arguments) == orjson.loads(reply["tool_calls"][0]["function"]["arguments"])
    assert len(upstream.log) == 1


def test_by_appending_the_result_belongs_to_the_log(proxy: Proxy, upstream: Upstream, session: str) -> None:
    reply = finish(proxy, session)
    again = proxy.chat(session, [result_of(reply)])
    assert again.json()["choices"][0]["message"] == reply
    assert len(upstream.log) == 1
    proxy.chat(session, "and now something else", "say:fine")
    assert [message["role"] for message in upstream.last.messages] == ["user", "assistant", "tool", "user"]
    assert proxy.get(f"/sessions/{session}")["finished"] is False


def test_a_new_question_is_asked(proxy: Proxy, upstream: Upstream, session: str) -> None:
    reply = finish(proxy, session)
    told = [ASK, reply, result_of(reply), {"role": "user", "content": "more"}]
    answer = proxy.chat(session, told, "say:more of it")
    assert answer.json()["choices"][0]["message"]["content"] == "more of it"
    assert len(upstream.log) == 2


def test_a_finished_history_from_elsewhere_is_answered_too(proxy: Proxy, upstream: Upstream, session: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "finish_task", "arguments": "{}"}}
    reply = {"role": "assistant", "content": "All done.", "tool_calls": [call]}
    answer = proxy.chat(session, [ASK, reply])
    assert answer.json()["choices"][0]["message"] == reply
    assert not upstream.log
    assert proxy.messages(session) == [ASK, reply]


def test_other_tools_go_on(proxy: Proxy, upstream: Upstream, session: str) -> None:
    answer = proxy.chat(session, [ASK], "tool:search")
    reply = answer.json()["choices"][0]["message"]
    proxy.chat(session, [ASK, reply, result_of(reply)], "say:found")
    assert len(upstream.log) == 2
    assert proxy.get(f"/sessions/{session}")["finished"] is False

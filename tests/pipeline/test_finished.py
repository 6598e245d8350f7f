from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.dialects.chat.completion import CompletionAccumulator, read_completion
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.sse import EventDecoder
from proxy.pipeline.finished import completion_of, events_of, finishing_reply
from proxy.trimming import Entry

ASK = {"role": "user", "content": "do it"}
CALL = {"id": "c1", "type": "function", "function": {"name": "finish_task", "arguments": '{"ok": true}'}}
OTHER = {"id": "c2", "type": "function", "function": {"name": "search", "arguments": "{}"}}
DONE = {"role": "assistant", "content": "All is done.", "tool_calls": [CALL]}
BOTH = {"role": "assistant", "content": None, "tool_calls": [OTHER, CALL]}
SEARCH = {"role": "assistant", "content": None, "tool_calls": [OTHER]}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "noted"}
TOOLS = ("finish_task", "ask_user")


def log(*messages: dict[str, Any]) -> list[Entry]:
    return [
        Entry(message=ChatMessage.of(m), tokens=1, ref=f"ref_{i}", position=i) for i, m in enumerate(messages)
    ]


@pytest.mark.parametrize(
    ("messages", "found"),
    [
        ([ASK, DONE], 1),
        ([ASK, DONE, RESULT], 1),
        ([ASK, BOTH, RESULT, RESULT], 1),
        ([ASK, DONE, RESULT, ASK], None),
        ([ASK, SEARCH, RESULT], None),
        ([ASK, DONE, RESULT, {"role": "assistant", "content": "and more"}], None),
        ([ASK, DONE, {"role": "system", "content": "go on"}], None),
        ([RESULT], None),
        ([], None),
    ],
)
def test_a_history_that_ends_with_such_a_call_is_finished(messages: list[Any], found: int | None) -> None:
    entries = log(*messages)
    reply = finishing_reply(entries, TOOLS)
    assert reply == (None if found is None else entries[found])


def test_without_such_tools_nothing_is_finished() -> None:
    assert finishing_reply(log(ASK, DONE), ()) is None


def test_the_answer_is_the_reply_as_it_was() -> None:
    raw = b'{"role": "assistant", "x-unknown": 1.50, "content": null, "tool_calls": []}'
    body = completion_of(ChatMessage(raw), id="chatcmpl-1", created=7, model="m")
    assert raw in body
    completion = read_completion(orjson.loads(body))
    assert completion.choices[0].finish_reason == "tool_calls"
    assert completion.usage == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize("message", [DONE, BOTH, {"role": "assistant", "content": "plain"}])
def test_the_stream_amounts_to_the_same_reply(message: dict[str, Any], usage: bool) -> None:
    events = EventDecoder().feed(
        events_of(ChatMessage.of(message), id="chatcmpl-1", created=7, model="m", usage=usage)
    )
    reply = CompletionAccumulator()
    for event in events[:-1]:
        assert event.data is not None
        reply.add(orjson.loads(event.data))
    assert events[-1].is_done
    (choice,) = reply.choices()
    assert {**message, "tool_calls": message.get("tool_calls")} == {
        "role": choice.message["role"],
        "content": choice.message.get("content"),
        "tool_calls": choice.message.get("tool_calls"),
    }
    assert (reply.usage is not None) is usage

"""Valid requests and answers in all three dialects, from which attacks are made.

Each is small, but has every kind of part: texts, calls with their results, reasoning, usage.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from msgspec import Struct

JsonObject = dict[str, Any]

_RESULT: Final = "\n".join(f"line {number}: value-{number * 7}" for number in range(200))
_ARGUMENTS: Final = '{"a": [1, "b"]}'
_SCHEMA: Final[JsonObject] = {"type": "object", "properties": {}}


class Seeds(Struct, frozen=True, kw_only=True):
    """The requests and answers of one dialect."""

    path: str
    items: str  # the field that holds the conversation
    beside: JsonObject  # fields that every request needs beside it
    talks: tuple[list[JsonObject], ...]
    more: tuple[JsonObject, ...]  # further fields of a request
    answer: JsonObject
    events: tuple[tuple[str, JsonObject], ...]  # (its name or nothing, its data)
    closing: bytes  # the end of a stream after its events

    @property
    def bodies(self) -> list[JsonObject]:
        """Requests with each talk, and with each of the further fields."""
        return [self.body(talk, more) for talk in self.talks for more in self.more]

    def body(self, talk: list[JsonObject], more: Mapping[str, Any]) -> JsonObject:
        """Return a request."""
        return {"model": "echo", **self.beside, self.items: talk, **more}

    def raw_body(self, items: bytes, more: bytes = b"") -> bytes:
        """Return a request with these items, whatever they are."""
        beside = b"".join(b'"%b":%b,' % (name.encode(), orjson.dumps(value)) for name, value in self.beside.items())
        return b'{"model":"echo",%b"%b":[%b]%b}' % (beside, self.items.encode(), items, more)

    def streamed(self, events: list[tuple[str, bytes]], end: bytes = b"\n\n") -> bytes:
        """Return a stream of events."""
        lines = [(b"event: %b\n" % name.encode() if name else b"") + b"data: " + data + end for name, data in events]
        return b"".join(lines) + self.closing


# ----------------------------------------------------------------------------------- Chat Completions

_TOOL: Final[JsonObject] = {"type": "function", "function": {"name": "f", "parameters": _SCHEMA}}
_CALL: Final[JsonObject] = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": _ARGUMENTS}}
_TALK: Final[list[JsonObject]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": [{"type": "text", "text": "看一下这个文件"}, {"type": "text", "text": "please"}]},
    {"role": "assistant", "content": None, "tool_calls": [_CALL]},
    {"role": "tool", "tool_call_id": "call_1", "content": _RESULT},
    {"role": "assistant", "content": "done", "reasoning_content": "hm", "refusal": None},
    {"role": "user", "content": "go on", "name": "anne"},
]
_HEAD: Final[JsonObject] = {"id": "chatcmpl-1", "model": "m", "created": 1}
_USAGE: Final[JsonObject] = {"prompt_tokens": 9, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}


def _chunk(delta: JsonObject, finish: str | None = None) -> tuple[str, JsonObject]:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return "", _HEAD | {"object": "chat.completion.chunk", "choices": [choice]}


CHAT: Final = Seeds(
    path="/v1/chat/completions",
    items="messages",
    beside={},
    talks=(_TALK, _TALK[-1:]),
    more=(
        {"tools": [_TOOL], "tool_choice": "auto"},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"n": 2, "metadata": {"a": "b"}, "temperature": 0.5},
    ),
    answer=_HEAD
    | {
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "fine", "tool_calls": [_CALL]},
                "finish_reason": "stop",
            }
        ],
        "usage": _USAGE,
    },
    events=(
        _chunk({"role": "assistant", "content": ""}),
        _chunk({"content": "fi"}),
        _chunk({"content": "ne 好"}),
        _chunk({"tool_calls": [{"index": 0, **_CALL}]}),
        _chunk({"tool_calls": [{"index": 0, "function": {"arguments": " "}}]}),
        _chunk({}, "tool_calls"),
        ("", _HEAD | {"object": "chat.completion.chunk", "choices": [], "usage": _USAGE}),
    ),
    closing=b"data: [DONE]\n\n",
)

# ------------------------------------------------------------------------------------------ Responses

_ITEMS: Final[list[JsonObject]] = [
    {"type": "message", "role": "developer", "content": "Be brief."},
    {"role": "user", "content": [{"type": "input_text", "text": "看一下这个文件"}]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "x"},
    {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "f", "arguments": _ARGUMENTS},
    {"type": "function_call_output", "call_id": "call_1", "output": _RESULT},
    {
        "type": "message",
        "id": "msg_1",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": "done", "annotations": []}],
    },
    {"role": "user", "content": "go on"},
]
_OUT_TEXT: Final[JsonObject] = {"type": "output_text", "text": "fine 好", "annotations": []}
_OUT_MESSAGE: Final[JsonObject] = {
    "type": "message",
    "id": "msg_2",
    "status": "completed",
    "role": "assistant",
    "content": [_OUT_TEXT],
}
_OUT_CALL: Final[JsonObject] = {
    "type": "function_call",
    "id": "fc_2",
    "call_id": "call_2",
    "name": "f",
    "arguments": _ARGUMENTS,
    "status": "completed",
}
_RESPONSE: Final[JsonObject] = {
    "id": "resp_1",
    "object": "response",
    "created_at": 1,
    "status": "completed",
    "model": "m",
    "error": None,
    "output": [_OUT_MESSAGE, _OUT_CALL],
    "usage": {"input_tokens": 9, "output_tokens": 3, "input_tokens_details": {"cached_tokens": 4}},
}
_BEGUN: Final[JsonObject] = _RESPONSE | {"status": "in_progress", "output": [], "usage": None}


def _told(*events: JsonObject) -> tuple[tuple[str, JsonObject], ...]:
    return tuple([(str(event["type"]), event | {"sequence_number": at}) for at, event in enumerate(events)])


_TEXT_AT: Final[JsonObject] = {"item_id": "msg_2", "output_index": 0, "content_index": 0}
_CALL_AT: Final[JsonObject] = {"item_id": "fc_2", "output_index": 1}

RESPONSES: Final = Seeds(
    path="/v1/responses",
    items="input",
    beside={},
    talks=(_ITEMS, _ITEMS[-1:]),
    more=(
        {"tools": [{"type": "function", "name": "f", "parameters": _SCHEMA}], "instructions": "Be kind."},
        {"stream": True, "store": False, "include": ["reasoning.encrypted_content"]},
        {"previous_response_id": "resp_1", "metadata": {"a": "b"}, "truncation": "auto"},
    ),
    answer=_RESPONSE,
    events=_told(
        {"type": "response.created", "response": _BEGUN},
        {"type": "response.in_progress", "response": _BEGUN},
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": _OUT_MESSAGE | {"status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **_TEXT_AT, "part": _OUT_TEXT | {"text": ""}},
        {"type": "response.output_text.delta", **_TEXT_AT, "delta": "fi"},
        {"type": "response.output_text.delta", **_TEXT_AT, "delta": "ne 好"},
        {"type": "response.output_text.done", **_TEXT_AT, "text": "fine 好"},
        {"type": "response.content_part.done", **_TEXT_AT, "part": _OUT_TEXT},
        {"type": "response.output_item.done", "output_index": 0, "item": _OUT_MESSAGE},
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": _OUT_CALL | {"arguments": "", "status": "in_progress"},
        },
        {"type": "response.function_call_arguments.delta", **_CALL_AT, "delta": _ARGUMENTS},
        {"type": "response.function_call_arguments.done", **_CALL_AT, "arguments": _ARGUMENTS},
        {"type": "response.output_item.done", "output_index": 1, "item": _OUT_CALL},
        {"type": "response.completed", "response": _RESPONSE},
    ),
    closing=b"",
)

# ------------------------------------------------------------------------------------------- Messages

_USE: Final[JsonObject] = {"type": "tool_use", "id": "toolu_1", "name": "f", "input": {"a": [1, "b"]}}
_BLOCKS: Final[list[JsonObject]] = [
    {"role": "user", "content": [{"type": "text", "text": "看一下这个文件", "cache_control": {"type": "ephemeral"}}]},
    {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm", "signature": "c2ln"}, _USE]},
    {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": _RESULT}]},
    {"role": "assistant", "content": "done"},
    {"role": "user", "content": "go on"},
]
_SPENT: Final[JsonObject] = {"input_tokens": 5, "output_tokens": 3, "cache_read_input_tokens": 4}
_MESSAGE: Final[JsonObject] = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "m",
    "content": [{"type": "text", "text": "fine 好"}, _USE | {"id": "toolu_2"}],
    "stop_reason": "tool_use",
    "stop_sequence": None,
    "usage": _SPENT,
}

MESSAGES: Final = Seeds(
    path="/v1/messages",
    items="messages",
    beside={"max_tokens": 100},
    talks=(_BLOCKS, _BLOCKS[-1:]),
    more=(
        {"tools": [{"name": "f", "input_schema": _SCHEMA}], "system": "Be brief."},
        {"stream": True, "system": [{"type": "text", "text": "Be kind.", "cache_control": {"type": "ephemeral"}}]},
        {"thinking": {"type": "enabled", "budget_tokens": 1024}, "metadata": {"user_id": "a"}, "stop_sequences": ["x"]},
    ),
    answer=_MESSAGE,
    events=tuple(
        (str(event["type"]), event)
        for event in (
            {"type": "message_start", "message": _MESSAGE | {"content": [], "stop_reason": None}},
            {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
            {"type": "ping"},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "fi"}},
            {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "ne 好"}},
            {"type": "content_block_stop", "index": 0},
            {"type": "content_block_start", "index": 1, "content_block": _USE | {"id": "toolu_2", "input": {}}},
            {
                "type": "content_block_delta",
                "index": 1,
                "delta": {"type": "input_json_delta", "partial_json": _ARGUMENTS},
            },
            {"type": "content_block_stop", "index": 1},
            {
                "type": "message_delta",
                "delta": {"stop_reason": "tool_use", "stop_sequence": None},
                "usage": {"output_tokens": 3},
            },
            {"type": "message_stop"},
        )
    ),
    closing=b"",
)

DIALECTS: Final[Mapping[str, Seeds]] = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}

"""A provider with all three APIs that counts requests and tokens, and what they cost.

Half of a longer prompt comes from its cache. If `recall_context` is offered and the newest message asks for it
("look it up"), it calls that first. It answers a request for a summary with a summary.
"""

from __future__ import annotations

import threading
from typing import Any

import orjson

from tests.support.plain_provider import EVENTS, Asked, PlainProvider, Told
from tests.support.summarizing import summary_of
from tests.support.tongues import event_of

PRICES = {"input": 2.0, "cached_read": 0.5, "cache_write": 2.5, "output": 8.0}
"""Dollars per million tokens."""
_OUTPUT = 20
_SAID = "The parcel was moved to the other shelf."


class Bill:
    """The requests and tokens of one API, or of all summaries."""

    def __init__(self) -> None:
        self.requests = self.input = self.cached = self.written = self.output = 0

    @property
    def dollars(self) -> float:
        """The cost at `PRICES`."""
        fresh = self.input - self.cached - self.written
        parts = {"input": fresh, "cached_read": self.cached, "cache_write": self.written, "output": self.output}
        return sum(tokens * PRICES[name] for name, tokens in parts.items()) / 1_000_000


class Metered(PlainProvider):
    """The provider."""

    def __init__(self) -> None:
        super().__init__()
        self.bills = {"chat": Bill(), "responses": Bill(), "messages": Bill(), "summaries": Bill()}
        self.refuses: bytes = b"\0"
        """If set, a request that does not contain these bytes is refused, unless it is for a summary."""
        self._lock = threading.Lock()

    @property
    def headers(self) -> list[dict[str, str]]:
        """The headers of each request."""
        return [asked.headers for asked in self.got]

    def answer(self, asked: Asked) -> Told:
        """Return the answer to a request."""
        path = asked.path.partition("?")[0]
        status, answer = self._answer(path, asked.raw, asked.body)
        if status == 200 and asked.body.get("stream"):
            return Told(kind=EVENTS, body=_STREAMS[path.rpartition("/")[2]](answer))
        return Told(status=status, body=orjson.dumps(answer))

    def _answer(self, path: str, raw: bytes, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        sums_up = b"<transcript-" in raw
        if self.refuses != b"\0" and self.refuses not in raw and not sums_up:
            return 400, {"error": {"message": "this is not what I want", "type": "invalid_request_error"}}
        dialect = "chat" if path.endswith("/chat/completions") else path.rpartition("/")[2]
        prompt = len(raw) // 4
        cached = prompt // 256 * 128 if prompt > 2048 else 0
        written = 128 if dialect == "messages" else 0
        with self._lock:
            bill = self.bills["summaries" if sums_up else dialect]
            bill.requests += 1
            bill.input += prompt
            bill.cached += cached
            bill.written += written
            bill.output += _OUTPUT
        newest = body["messages"][-1] if dialect == "chat" else {}
        asks = b'"recall_context"' in raw and newest.get("role") == "user" and newest["content"].endswith("look it up")
        message: dict[str, Any] = {"role": "assistant", "content": _SAID}
        if sums_up:
            lead = [{"content": body["system"]}] if "system" in body else []
            message |= summary_of({"messages": [*lead, *body["messages"]]}, "good")
        elif asks:
            function = {"name": "recall_context", "arguments": '{"query":"parcel"}'}
            message |= {"content": None, "tool_calls": [{"id": "call_1", "type": "function", "function": function}]}
        return 200, _answer(dialect, body["model"], message, prompt, cached, written)


def _answer(
    dialect: str, model: str, message: dict[str, Any], prompt: int, cached: int, written: int
) -> dict[str, Any]:
    text = message["content"]
    if dialect == "messages":
        usage: dict[str, Any] = {"input_tokens": prompt - cached - written, "output_tokens": _OUTPUT}
        usage |= {"cache_read_input_tokens": cached, "cache_creation_input_tokens": written}
        told: dict[str, Any] = {"id": "msg_1", "type": "message", "role": "assistant", "model": model, "usage": usage}
        return told | {"content": [{"type": "text", "text": text}], "stop_reason": "end_turn", "stop_sequence": None}
    if dialect == "responses":
        usage = {"input_tokens": prompt, "input_tokens_details": {"cached_tokens": cached}}
        usage |= {"output_tokens": _OUTPUT, "total_tokens": prompt + _OUTPUT}
        said = {"type": "output_text", "text": text, "annotations": []}
        item = {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant", "content": [said]}
        told = {"id": "resp_1", "object": "response", "model": model, "status": "completed", "created_at": 1}
        return told | {"output": [item], "usage": usage}
    usage = {"prompt_tokens": prompt, "completion_tokens": _OUTPUT, "total_tokens": prompt + _OUTPUT}
    usage |= {"prompt_tokens_details": {"cached_tokens": cached}}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls" if "tool_calls" in message else "stop"}
    told = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": model}
    return told | {"choices": [choice], "usage": usage}


def _completion_events(answer: dict[str, Any]) -> bytes:
    """Return an answer of Chat Completions as a stream."""
    choice = answer["choices"][0]
    chunk = {**answer, "object": "chat.completion.chunk", "usage": None}
    first = {"index": 0, "delta": choice["message"], "finish_reason": None}
    last = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    chunks = [{**chunk, "choices": [first]}, {**chunk, "choices": [last]}]
    chunks.append({**chunk, "choices": [], "usage": answer["usage"]})
    return b"".join([b"data: " + orjson.dumps(each) + b"\n\n" for each in chunks]) + b"data: [DONE]\n\n"


def _response_events(answer: dict[str, Any]) -> bytes:
    """Return an answer of Responses as a stream."""
    (item,) = answer["output"]
    begun = {**answer, "status": "in_progress", "output": [], "usage": None}
    return (
        event_of("response.created", {"sequence_number": 0, "response": begun})
        + event_of("response.output_item.done", {"sequence_number": 1, "output_index": 0, "item": item})
        + event_of("response.completed", {"sequence_number": 2, "response": answer})
    )


def _message_events(answer: dict[str, Any]) -> bytes:
    """Return an answer of Messages as a stream. The output tokens at its end are the total."""
    (block,) = answer["content"]
    begun = {**answer, "content": [], "stop_reason": None, "usage": answer["usage"] | {"output_tokens": 1}}
    delta = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    return (
        event_of("message_start", {"message": begun})
        + event_of("content_block_start", {"index": 0, "content_block": block | {"text": ""}})
        + event_of("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": block["text"]}})
        + event_of("content_block_stop", {"index": 0})
        + event_of("message_delta", {"delta": delta, "usage": {"output_tokens": answer["usage"]["output_tokens"]}})
        + event_of("message_stop", {})
    )


_STREAMS = {"completions": _completion_events, "responses": _response_events, "messages": _message_events}

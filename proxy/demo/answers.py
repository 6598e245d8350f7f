"""A reply in the two forms in which a provider sends it: one JSON object, or a stream of events.

The form is that of OpenAI's API reference (the chat completion object, the chat completion chunk object).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Final

import orjson

from proxy.dialects import JsonObject

_CREATED: Final = 1715785200
"""A fixed moment, so that two runs answer with the same bytes."""
_WORD: Final = re.compile(r"\s*\S+\s*")
_PIECE: Final = 24
"""Characters of a tool call's arguments in one event."""


def completion(number: int, model: str, reply: JsonObject, usage: JsonObject) -> bytes:
    """Return the reply as a chat completion."""
    choice = {"index": 0, "message": reply, "logprobs": None, "finish_reason": _finish_reason(reply)}
    return orjson.dumps(_envelope(number, model, "chat.completion") | {"choices": [choice], "usage": usage})


def events(number: int, model: str, reply: JsonObject, usage: JsonObject | None) -> Iterator[bytes]:
    """Yield the reply as events, its text word by word; `usage` is None where nobody asked for it."""
    for delta in _deltas(reply):
        yield _event(number, model, [_choice(delta, None)], usage)
    yield _event(number, model, [_choice({}, _finish_reason(reply))], usage)
    if usage is not None:
        yield _event(number, model, [], usage, last=True)
    yield b"data: [DONE]\n\n"


def _deltas(reply: JsonObject) -> Iterator[JsonObject]:
    text = reply.get("content")
    yield {"role": "assistant", "content": "" if text else None}
    for word in _WORD.findall(text or ""):
        yield {"content": word}
    for index, call in enumerate(reply.get("tool_calls") or ()):
        function, arguments = call["function"], call["function"]["arguments"]
        head = {"name": function["name"], "arguments": ""}
        yield {"tool_calls": [{"index": index, "id": call["id"], "type": call["type"], "function": head}]}
        for start in range(0, len(arguments), _PIECE):
            piece = {"arguments": arguments[start : start + _PIECE]}
            yield {"tool_calls": [{"index": index, "function": piece}]}


def _choice(delta: JsonObject, finish_reason: str | None) -> JsonObject:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}


def _event(
    number: int, model: str, choices: list[JsonObject], usage: JsonObject | None, *, last: bool = False
) -> bytes:
    """Return one event; where usage was asked for, all but the last say null."""
    chunk: dict[str, Any] = _envelope(number, model, "chat.completion.chunk") | {"choices": choices}
    if usage is not None:
        chunk["usage"] = usage if last else None
    return b"data: " + orjson.dumps(chunk) + b"\n\n"


def _envelope(number: int, model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-practice-{number}", "object": kind, "created": _CREATED, "model": model}


def _finish_reason(reply: JsonObject) -> str:
    return "tool_calls" if reply.get("tool_calls") else "stop"

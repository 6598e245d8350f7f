"""Replies with calls, streamed or whole, written in a one-line notation.

    Let me look. | >recall_context a | >weather b | Done.

Texts and calls are in the order in which they arrive. A call is `>name id`, or `>name id arguments`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, Literal

import orjson

USAGE = {"prompt_tokens": 10, "completion_tokens": 4, "total_tokens": 14, "prompt_tokens_details": {"cached_tokens": 2}}
DONE = b"data: [DONE]\n\n"

Order = Literal["serial", "heads first"]
Names = Literal["whole", "pieces", "late", "repeated"]


def parts_of(line: str) -> list[str | tuple[str, str, str]]:
    """Return texts, and calls as (name, id, arguments), in order."""
    parts: list[str | tuple[str, str, str]] = []
    for part in filter(None, line.split(" | ")):
        if part.startswith(">"):
            name, identity, *rest = part[1:].split(" ", 2)
            parts.append((name, identity, rest[0] if rest else f'{{"q":"{name} {identity}"}}'))
        else:
            parts.append(part)
    return parts


def message_of(line: str) -> dict[str, Any]:
    """Return the whole message."""
    parts = parts_of(line)
    text = "".join(part for part in parts if isinstance(part, str))
    calls = [_call(*part) for part in parts if not isinstance(part, str)]
    return {"role": "assistant", "content": text or None} | ({"tool_calls": calls} if calls else {})


def body_of(line: str, finish: str | None = None, number: int = 0) -> bytes:
    """Return a completion's body."""
    message = message_of(line)
    reason = finish or ("tool_calls" if "tool_calls" in message else "stop")
    choice = {"index": 0, "message": {**message, "refusal": None}, "logprobs": None, "finish_reason": reason}
    data = {"id": f"chatcmpl-{number}", "object": "chat.completion", "created": number, "model": "m-1"}
    return orjson.dumps(data | {"choices": [choice], "usage": USAGE}, option=orjson.OPT_INDENT_2)


def events_of(
    line: str,
    finish: str | None = None,
    number: int = 0,
    *,
    order: Order = "serial",
    names: Names = "whole",
    usage: bool = True,
    crlf: bool = False,
) -> bytes:
    """Return a completion's events, `[DONE]` included."""
    base = {"id": f"chatcmpl-{number}", "object": "chat.completion.chunk", "created": number, "model": "m-1"}
    calls = any(not isinstance(part, str) for part in parts_of(line))
    reason = finish or ("tool_calls" if calls else "stop")
    deltas = [*_deltas(line, order, names), {}]
    raw = b""
    for place, delta in enumerate(deltas):
        ends = reason if place == len(deltas) - 1 else None
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": ends}
        raw += b"data: " + orjson.dumps({**base, "choices": [choice], "usage": None}) + b"\n\n"
    if usage:
        raw += b"data: " + orjson.dumps({**base, "choices": [], "usage": USAGE}) + b"\n\n"
    raw += DONE
    return raw.replace(b"\n\n", b"\r\n\r\n") if crlf else raw


def _call(name: str, identity: str, arguments: str) -> dict[str, Any]:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def _deltas(line: str, order: Order, names: Names) -> Iterator[dict[str, Any]]:
    yield {"role": "assistant", "content": None, "refusal": None}
    index, waiting = 0, list[list[dict[str, Any]]]()
    for part in parts_of(line):
        if isinstance(part, str):
            for piece in re.findall(r"\S+\s*|\s+", part):
                yield {"content": piece}
            continue
        name, identity, arguments = part
        yield from _heads(index, name, identity, names)
        again = {"name": name} if names == "repeated" else {}
        rest: list[dict[str, Any]] = [
            {"tool_calls": [{"index": index, "function": {**again, "arguments": piece}}]}
            for piece in re.findall(r".{1,5}", arguments)
        ]
        if order == "serial":
            yield from rest
        else:
            waiting.append(rest)
        index += 1
    while any(waiting):
        for rest in waiting:
            if rest:
                yield rest.pop(0)


def _heads(index: int, name: str, identity: str, names: Names) -> Iterator[dict[str, Any]]:
    pieces: list[str | None] = [name]
    if names == "pieces":
        pieces = list(re.findall(r".{1,4}", name))
    elif names == "late":
        pieces = [None, name]
    for place, piece in enumerate(pieces):
        function = {"arguments": ""} if piece is None else {"name": piece, "arguments": ""}
        head = {"id": identity, "type": "function"} if place == 0 else {}
        yield {"tool_calls": [{"index": index, **head, "function": function}]}

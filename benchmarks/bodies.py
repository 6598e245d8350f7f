"""Requests as templates for the load generator, and answers for the fake upstream.

Texts are random words of a small vocabulary. The seed is fixed, so every run has the same bytes. A history repeats
the turn of an agent: a question, a tool call, its result, an answer.
"""

from __future__ import annotations

import random
from typing import Any, Final

import orjson

Message = dict[str, Any]

CONNECTION: Final = "{{conn}}"
"""Replaced by the number of the connection."""
SEQUENCE: Final = "{{seqn}}"
"""Replaced by a number that is unique to the request."""
GROWING: Final = "{{grow}}"
"""Where the load generator inserts the turns so far."""
REPLY: Final = "{{rply}}"
"""Replaced by the number of the answer."""
_SIZE: Final = "{{size}}"

ANSWER: Final = f"This is answer no. {REPLY}: the window is open, the light is on, and the door is closed."

_VOCABULARY: Final = (
    "the open window light door river stone table between carry seven letters morning paper because "
    "number system reports value error index could not found please check order customer delivery later "
    "version release branch commit function returns list string object nothing changed again tomorrow"
)
_WORDS: Final = tuple(_VOCABULARY.split())


def words(length: int, seed: int) -> str:
    """Return text of exactly `length` characters."""
    drawn = random.Random(seed)  # noqa: S311 - the same text in every run, no secret
    text = ""
    while len(text) < length:
        text += drawn.choice(_WORDS) + " "
    return text[:length]


def history(messages: int, size: int) -> list[Message]:
    """Return the stored part of a conversation, which ends with an answer.

    Args:
        messages: how many, an even number. The instructions before them are not counted.
        size: bytes of the JSON array, instructions included.
    """
    shorter = (_question, _answer) if messages % len(_ROUND) else ()
    kinds = [_instructions, *shorter, *_ROUND * (messages // len(_ROUND))]
    empty = [kind(number, 0) for number, kind in enumerate(kinds)]
    each, rest = divmod(max(size - len(orjson.dumps(empty)), 0), len(kinds))
    return [kind(number, each + (number < rest)) for number, kind in enumerate(kinds)]


def _instructions(_number: int, length: int) -> Message:
    return {"role": "system", "content": words(length, 0)}


def _question(number: int, length: int) -> Message:
    return {"role": "user", "content": words(length, number)}


def _call(number: int, length: int) -> Message:
    arguments = orjson.dumps({"path": f"src/{number}.py", "query": words(length, number)}).decode()
    function = {"name": "search", "arguments": arguments}
    call = {"id": f"call_{number:08}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _result(number: int, length: int) -> Message:
    return {"role": "tool", "tool_call_id": f"call_{number - 1:08}", "content": words(length, number)}


def _answer(number: int, length: int) -> Message:
    return {"role": "assistant", "content": words(length, number)}


_ROUND: Final = (_question, _call, _result, _answer)

_TOOLS: Final = [
    {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the files.",
            "parameters": {"type": "object", "properties": {"path": {"type": "string"}, "query": {"type": "string"}}},
        },
    }
]


def question(length: int) -> str:
    """Return the text of a user message: `length` characters, unique to each request."""
    return f"Question no. {SEQUENCE}. " + words(max(length - 23, 0), 1)


def request(
    session: str, messages: list[Message], *, stream: bool = False, model: str = "gpt-4o", growing: bool = False
) -> bytes:
    """Return a whole HTTP request as a template for the load generator.

    Args:
        session: the session's id; with a placeholder, each connection or each request has its own session.
        messages: the history, and the new message at its end.
        stream: whether to ask for a stream.
        model: the name of the model.
        growing: whether each finished turn is inserted before the last message.
    """
    calls = any("tool_calls" in message for message in messages)
    fields: dict[str, Any] = {"model": model} | ({"stream": True} if stream else {})
    if calls:
        fields["tools"] = _TOOLS
    written = [orjson.dumps(message) for message in messages]
    last = (GROWING.encode() if growing else b"") + b"," + written[-1] if len(written) > 1 else written[-1]
    listed = b",".join(written[:-1]) + last
    body = orjson.dumps(fields)[:-1] + b',"messages":[' + listed + b"]}"
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\n"
        "Host: localhost\r\n"
        "Authorization: Bearer sk-benchmark\r\n"
        "Content-Type: application/json\r\n"
        "Accept: */*\r\n"
        f"X-Session-ID: {session}\r\n"
        f"Content-Length: {_SIZE}\r\n\r\n"
    )
    return head.encode() + body


def turn(text: str) -> bytes:
    """Return a question with this text and its answer, as the next request of the session contains them."""
    pair: list[Message] = [{"role": "user", "content": text}, {"role": "assistant", "content": ANSWER}]
    return b"".join(b"," + orjson.dumps(message) for message in pair)


def completion() -> bytes:
    """Return the body of a non-streamed answer."""
    choice = {
        "index": 0,
        "message": {"role": "assistant", "content": ANSWER, "refusal": None, "annotations": []},
        "logprobs": None,
        "finish_reason": "stop",
    }
    return orjson.dumps({**_frame("chat.completion"), "choices": [choice], "usage": _USAGE})


def events(*, usage: bool) -> bytes:
    """Return the body of a streamed answer; `usage`: as for a request with `include_usage`."""
    opening = {"role": "assistant", "content": "", "refusal": None}
    parts = [ANSWER[:39], *(ANSWER[i : i + 12] for i in range(39, len(ANSWER), 12))]
    deltas = [opening, *({"content": part} for part in parts), {}]
    tail = {"usage": None} if usage else {}
    chunks: list[dict[str, Any]] = [
        {
            **_frame("chat.completion.chunk"),
            "choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": None if delta else "stop"}],
            **tail,
        }
        for delta in deltas
    ]
    if usage:
        chunks.append({**_frame("chat.completion.chunk"), "choices": [], "usage": _USAGE})
    return b"".join(b"data: " + orjson.dumps(chunk) + b"\n\n" for chunk in chunks) + b"data: [DONE]\n\n"


_USAGE: Final = {"prompt_tokens": 100, "completion_tokens": 25, "total_tokens": 125}


def _frame(kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{REPLY}",
        "object": kind,
        "created": 1700000000,
        "model": "gpt-4o-2024-08-06",
        "system_fingerprint": "fp_benchmark",
    }

"""A task that is finished: the reply that a history ends with, given once more without asking upstream.

An agent that called `finish_task` is done. Asked again with nothing new, a model would only say something
else. It does not know how an answer reaches the client, nor what is stored of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import orjson

from proxy.dialects import JsonObject, Message
from proxy.dialects.jsontext import is_array, is_object
from proxy.trimming import Entry

FINISHED: Final = "answered from the store: the task is finished"
"""What is said of an exchange for which upstream was not asked."""

FINISH_REASON: Final = "tool_calls"
_NOTHING_SPENT: Final = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def finishing_reply(entries: Sequence[Entry], tools: Collection[str]) -> Entry | None:
    """Return the reply that finishes a task, where nothing came after it but results of its calls.

    Args:
        entries: the log of the branch with what the request brings, oldest first.
        tools: names of the tools that finish a task.
    """
    if not tools:
        return None
    last = next((entry for entry in reversed(entries) if not entry.message.is_result), None)
    finishes = last is not None and any(call.name in tools for call in last.message.calls)
    return last if finishes else None


def finished_answer(
    reply: Message,
    *,
    id: str,  # noqa: A002 - the field's name
    created: int,
    model: str,
    stream: bool,
    usage: bool,
) -> tuple[bytes, bytes]:
    """Return content type and body of an answer with this reply; `created` is in seconds since 1970.

    With `usage`, a stream tells that nothing was spent.
    """
    if stream:
        return b"text/event-stream", events_of(reply, id=id, created=created, model=model, usage=usage)
    return b"application/json", completion_of(reply, id=id, created=created, model=model)


def completion_of(reply: Message, *, id: str, created: int, model: str) -> bytes:  # noqa: A002 - the field's name
    """Return a JSON answer with this reply; `created` is in seconds since 1970."""
    return orjson.dumps(
        {
            "id": id,
            "object": "chat.completion",
            "created": created,
            "model": model,
            "choices": [
                {
                    "index": 0,
                    "message": orjson.Fragment(reply.raw),
                    "logprobs": None,
                    "finish_reason": FINISH_REASON,
                }
            ],
            "usage": _NOTHING_SPENT,
        }
    )


def events_of(reply: Message, *, id: str, created: int, model: str, usage: bool) -> bytes:  # noqa: A002 - as above
    """Return the same as a stream of events; with `usage`, a chunk tells that nothing was spent."""

    def chunk(choices: list[JsonObject], **more: Any) -> bytes:
        said: JsonObject = {"id": id, "object": "chat.completion.chunk", "created": created, "model": model}
        return b"data: %b\n\n" % orjson.dumps(said | {"choices": choices} | more)

    events = [
        chunk([{"index": 0, "delta": _delta(reply.data), "finish_reason": None}]),
        chunk([{"index": 0, "delta": {}, "finish_reason": FINISH_REASON}]),
    ]
    if usage:
        events.append(chunk([], usage=_NOTHING_SPENT))
    return b"".join([*events, b"data: [DONE]\n\n"])


def _delta(message: JsonObject) -> JsonObject:
    """Return a message as the one delta of a stream: each call says its place."""
    calls = message.get("tool_calls")
    if not is_array(calls):
        return message
    placed = [{"index": place, **call} for place, call in enumerate(calls) if is_object(call)]
    return {**message, "tool_calls": placed}

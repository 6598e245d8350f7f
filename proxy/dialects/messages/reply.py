"""Reads the reply of a body or a stream. Also formats the API's errors and answers of the proxy's own.

Order of a stream's events: message_start; for each block content_block_start, content_block_delta …,
content_block_stop; then message_delta (stop reason, usage) and message_stop. `ping` and `error` may come anywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import orjson
from msgspec import Struct

from proxy.dialects import JsonObject, Message, Replies
from proxy.dialects.chat.completion import words_of
from proxy.dialects.jsontext import as_array, as_object, as_text, is_array, is_object, read, write
from proxy.dialects.messages.message import UNFINISHED, MessagesMessage
from proxy.dialects.sse import Event
from proxy.errors import PalimpsestError

THREAD_NOT_FOUND: Final = "thread_not_found"  # the API's own code
CALLING: Final = "tool_use"  # the `stop_reason` of an answer made from a stored reply
_NOTHING_SPENT: Final = {"input_tokens": 0, "output_tokens": 0}
_INPUT_TOKENS: Final = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
_INPUTS: Final = ("tool_use", "server_tool_use", "mcp_tool_use")  # blocks whose input arrives as JSON text
_ERRORS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""The API's error type for each status. Others are `invalid_request_error`, or `api_error` from 500 on."""


def read_body(body: bytes) -> Replies:
    """Read a body. Raises ValueError if it is not JSON."""
    data = read(body)
    if not is_object(data) or not is_array(content := data.get("content")):
        return Replies(messages=(), finish_reasons=(), usage=None, model=None, error=_error_in(data))
    return Replies(
        messages=(MessagesMessage.as_stored({"role": "assistant", "content": content}),),
        finish_reasons=(_text(data.get("stop_reason")),),
        usage=usage_of(data.get("usage")),
        model=_text(data.get("model")),
        error=None,
        ids=_ids(data),
    )


def _ids(message: JsonObject) -> tuple[str, ...]:
    """Return the id by which a later request can name a reply, if the provider keeps it in a thread."""
    return tuple(filter(None, [as_text(message.get("id"))]))


def usage_of(usage: Any) -> JsonObject | None:
    """Return a usage in the format of Chat Completions, with `cache_creation`: it shows what was cached for an hour.

    `prompt_tokens` is None if the input was not reported. Then the cost is unknown.
    """
    if not is_object(usage):
        return None
    says_input = any(type(usage.get(name)) is int for name in _INPUT_TOKENS)
    fresh, output = _count(usage, "input_tokens"), _count(usage, "output_tokens")
    read_, written = _count(usage, "cache_read_input_tokens"), _count(usage, "cache_creation_input_tokens")
    asked = fresh + read_ + written
    told: JsonObject = {
        "prompt_tokens": asked if says_input else None,
        "completion_tokens": output,
        "total_tokens": asked + output,
        "prompt_tokens_details": {"cached_tokens": read_, "cache_write_tokens": written},
    }
    details, creation = usage.get("output_tokens_details"), usage.get("cache_creation")
    if is_object(details) and (thought := _count(details, "thinking_tokens")):
        told["completion_tokens_details"] = {"reasoning_tokens": thought}
    if is_object(creation):
        told["cache_creation"] = creation
    return told


class _Block(Struct, kw_only=True):
    """A content block as far as it has arrived. Texts are kept in pieces, so that adding to a long one is cheap."""

    fields: JsonObject
    texts: dict[str, list[str]] = {}
    citations: list[Any] = []
    json: list[str] = []  # pieces of the JSON text of its input
    ended: bool = False

    def add(self, delta: JsonObject) -> None:
        for name, value in delta.items():
            if name == "partial_json" and isinstance(value, str):
                self.json.append(value)
            elif name == "citation":
                self.citations.append(value)
            elif name != "type" and isinstance(value, str):
                self.texts.setdefault(name, [as_text(self.fields.get(name))]).append(value)
            elif name != "type":
                self.fields[name] = value

    def built(self) -> JsonObject:
        block = self.fields | {name: "".join(pieces) for name, pieces in self.texts.items()}
        if self.citations:
            block["citations"] = [*as_array(block.get("citations")), *self.citations]
        if block.get("type") not in _INPUTS:
            return block
        text = "".join(self.json)
        try:
            given = orjson.loads(text) if text else block.get("input")
        except orjson.JSONDecodeError:
            given = None
        if is_object(given) and (self.ended or text):
            return block | {"input": given}
        return block | {"input": {}, UNFINISHED: text}


class MessageReader:
    """Merges the events of one stream into a reply."""

    def __init__(self) -> None:
        self._blocks: dict[int, _Block] = {}
        self.stop: str | None = None  # why it ended; None until that is reported
        self.spent: JsonObject = {}  # the usage in the API's own form
        self._model: str | None = None
        self._ids: tuple[str, ...] = ()
        self._error: str | None = None

    @property
    def content(self) -> list[JsonObject]:
        return [block.built() for _, block in sorted(self._blocks.items())]

    @property
    def replies(self) -> Replies:
        content = self.content
        some = bool(content) or self.stop is not None
        return Replies(
            messages=(MessagesMessage.as_stored({"role": "assistant", "content": content}),) if some else (),
            finish_reasons=(self.stop,) if some else (),
            usage=usage_of(self.spent) if self.spent else None,
            model=self._model,
            error=self._error,
            ids=self._ids,
        )

    @property
    def failed(self) -> bool:
        return self._error is not None

    def take(self, event: Event) -> bool:
        self.add(event.value)
        return False

    def add(self, data: Any) -> None:
        if not is_object(data):
            return
        kind = data.get("type")
        if kind == "message_start" and is_object(message := data.get("message")):
            self._model = _text(message.get("model"))
            self._ids = _ids(message)
            self._spend(message.get("usage"))
        elif kind == "message_delta":
            self.stop = as_text(as_object(data.get("delta")).get("stop_reason")) or self.stop
            self._spend(data.get("usage"))
        elif kind == "error":
            self._error = self._error or _error_in(data)
        elif isinstance(index := data.get("index"), int):
            self._take_block(kind, index, data)

    def _take_block(self, kind: Any, index: int, data: JsonObject) -> None:
        block = self._blocks.get(index)
        if kind == "content_block_start" and is_object(begun := data.get("content_block")):
            self._blocks[index] = _Block(fields=dict(begun))
        elif block is not None and kind == "content_block_delta" and is_object(delta := data.get("delta")):
            block.add(delta)
        elif block is not None and kind == "content_block_stop":
            block.ended = True

    def _spend(self, usage: Any) -> None:
        """Merge the usage of a later event. Its numbers are totals of the whole reply."""
        if is_object(usage):
            self.spent |= {name: value for name, value in usage.items() if value is not None}


def _text(value: Any) -> str | None:
    return as_text(value) or None


def _count(usage: Mapping[str, Any], name: str) -> int:
    value = usage.get(name)
    return value if type(value) is int and value > 0 else 0


# ------------------------------------------------------------------------------------------ errors


def _error_in(data: Any) -> str | None:
    told = as_object(data)
    if (error := told.get("error")) is not None:
        return words_of(error)
    return "unknown error" if told.get("type") == "error" else None


def error_words(body: bytes) -> str | None:
    """Return the message of an error answer; None if it is not a JSON object with an `error`."""
    try:
        return _error_in(orjson.loads(body))
    except orjson.JSONDecodeError:
        return None


def error_body(error: PalimpsestError) -> JsonObject:
    """Return an error of the proxy's in the API's format."""
    kind = _ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    told: JsonObject = {"type": kind, "message": error.message}
    told |= {name: value for name, value in (("param", error.param), ("code", error.code)) if value is not None}
    if error.code == THREAD_NOT_FOUND:  # SDKs look here; they then begin a new thread with the whole history
        told["details"] = {"error_code": THREAD_NOT_FOUND}
    return {"type": "error", "error": told}


# ---------------------------------------------------------------------------- an answer of our own


def made_answer(
    reply: Message, *, exchange: str, created: int, model: str, stream: bool, usage: bool
) -> tuple[bytes, bytes]:
    """Return content type and body of an answer with this reply and a usage of zero."""
    del created, usage  # the API reports no time, and always reports usage
    answer: JsonObject = {
        "id": f"msg_{exchange}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": reply.data["content"],
        "stop_reason": CALLING,
        "stop_sequence": None,
        "usage": _NOTHING_SPENT,
    }
    if not stream:
        return b"application/json", orjson.dumps(answer)
    return b"text/event-stream", b"".join([named_event(data) for data in events_of(answer)])


def events_of(answer: JsonObject) -> list[JsonObject]:
    """Return the data of the events that stream a complete answer."""
    opened: JsonObject = {**answer, "content": [], "stop_reason": None}
    events: list[JsonObject] = [{"type": "message_start", "message": opened}]
    for index, block in enumerate(answer["content"]):
        begun, delta = dict(block), None
        if block.get("type") in _INPUTS:
            given = orjson.dumps(block.get("input")).decode()
            begun["input"], delta = {}, {"type": "input_json_delta", "partial_json": given}
        elif block.get("type") == "text":
            begun["text"], delta = "", {"type": "text_delta", "text": block.get("text")}
        events.append({"type": "content_block_start", "index": index, "content_block": begun})
        if delta is not None:
            events.append({"type": "content_block_delta", "index": index, "delta": delta})
        events.append({"type": "content_block_stop", "index": index})
    stop = {"stop_reason": answer["stop_reason"], "stop_sequence": None}
    return [*events, {"type": "message_delta", "delta": stop, "usage": answer["usage"]}, {"type": "message_stop"}]


def named_event(data: JsonObject) -> bytes:
    """Return an event with this data, named by its type."""
    return b"event: %b\ndata: %b\n\n" % (str(data["type"]).encode(), write(data))

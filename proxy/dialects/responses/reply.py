"""Reads a response, from one body or from a stream of events.

The last event of a stream holds the whole response, and that counts. Until it arrives, finished items count as they are
(`response.output_item.done`), and unfinished items by their deltas.
"""

from __future__ import annotations

from typing import Any, Final

import msgspec
import orjson

from proxy.dialects import JsonObject, Message, Replies, begun_under
from proxy.dialects.chat.completion import words_of
from proxy.dialects.jsontext import FIELDS, ITEMS, as_array, as_object, as_text, is_array, is_object, read, write
from proxy.dialects.responses.items import Item, kind_of, turn_of
from proxy.dialects.sse import Event, EventDecoder

DONE: Final = "completed"  # the status of a complete response, also of one that calls tools
ENDS: Final = (b"response.completed", b"response.incomplete", b"response.failed", b"[DONE]")
"""Names of the events that end a stream. Some servers send `[DONE]`."""
OPENINGS: Final = ("response.created", "response.in_progress", "response.queued")
WHOLE: Final = ("response.completed", "response.incomplete", "response.failed")
"""Types of the events that hold the complete response at the end of a stream."""
_RUNNING: Final = ("queued", "in_progress")
_UNFINISHED: Final = (*_RUNNING, "cancelled")
_DELTAS: Final = {
    "response.output_text.delta": ("output_text", "text"),
    "response.refusal.delta": ("refusal", "refusal"),
    "response.function_call_arguments.delta": ("", "arguments"),
    "response.custom_tool_call_input.delta": ("", "input"),
}
"""Events that add to an item, with the type of the content part ("" for a field of the item) and the field's name."""


def read_body(body: bytes) -> Replies:
    """Read a body. Raises ValueError if it is not JSON."""
    data = as_object(read(body))
    return _replies(data, _output_of(body, data))


def _output_of(body: bytes, data: JsonObject) -> list[bytes]:
    """Return the texts of a response's output items, with their original bytes if possible."""
    output = as_array(data.get("output"))
    try:
        raws = [bytes(each) for each in ITEMS.decode(FIELDS.decode(body)["output"])]
        if all(is_object(each) for each in map(orjson.loads, raws)):
            return raws
    except (msgspec.DecodeError, ValueError, KeyError, RecursionError):  # ValueError: from orjson, or not UTF-8
        pass
    return [Item.as_stored(item).raw for item in output if is_object(item)]


def _replies(data: JsonObject, output: list[bytes]) -> Replies:
    """Return the content of a response object (which may be empty), given the texts of its output items."""
    status = data.get("status")
    error = words_of(data.get("error"))
    if error is None and status in _UNFINISHED:
        error = f"the response is {status}"
    reason = None if status == "failed" or status in _UNFINISHED else DONE
    if status == "incomplete":
        reason = as_text(as_object(data.get("incomplete_details")).get("reason")) or "incomplete"
    return Replies(
        messages=(Item(turn_of(output)),) if output else (),
        finish_reasons=(reason,) if output else (),
        usage=usage_of(data.get("usage")),
        model=data["model"] if isinstance(data.get("model"), str) else None,
        error=error,
        ids=_ids(data, output) if data else (),
        kept=data.get("store") is not False,
        later=status in _RUNNING,
        cancelled=status == "cancelled",
    )


def _ids(data: JsonObject, output: list[bytes]) -> tuple[str, ...]:
    """Return the ids under which the provider may keep a response and its items."""
    conversation = data.get("conversation")
    named = [data.get("id"), conversation.get("id") if is_object(conversation) else conversation]
    named += [orjson.loads(raw).get("id") for raw in output]
    return tuple(filter(None, map(as_text, named)))


def usage_of(usage: Any) -> JsonObject | None:
    """Return a usage in the format of Chat Completions."""
    if not is_object(usage):
        return None
    told: JsonObject = {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
        "total_tokens": usage.get("total_tokens"),
        "prompt_tokens_details": usage.get("input_tokens_details"),
        "completion_tokens_details": usage.get("output_tokens_details"),
    }
    return {name: value for name, value in told.items() if value is not None}


def opening_error(text: bytes) -> bytes | None:
    """Return the body of the error that a stream begins with: empty if there is none, None if not known yet."""
    for event in EventDecoder().feed(text):
        data = event.value
        told = as_object(data)
        kind, response = told.get("type"), told.get("response")
        if data is None or kind in OPENINGS:
            continue
        if kind == "error":
            return write({"error": told.get("error") or told})
        return write({"error": response.get("error")}) if kind == "response.failed" and is_object(response) else b""
    return None


class ResponseReader:
    """Merges the events of one stream into a reply."""

    def __init__(self) -> None:
        self._response: JsonObject = {}  # the response object of the last event that held one
        self._output: list[bytes] = []
        self._done: dict[int, bytes] = {}  # finished items
        self._begun: dict[int, JsonObject] = {}  # unfinished items
        self._pieces: dict[int, dict[tuple[int, str], list[str]]] = {}  # for each item the deltas of each part and kind
        self._error: Any = None
        self._opened: str | None = None  # the id of the response in the first event that held one
        self._ended = False

    def take(self, event: Event) -> bool:
        if event.data is not None and is_object(data := event.value):
            self._take(event.data, data)
        return False

    def _take(self, raw: bytes, data: JsonObject) -> None:
        kind = data.get("type")
        index = data.get("output_index")
        place = index if isinstance(index, int) else 0
        if isinstance(kind, str) and kind in _DELTAS:
            part = data.get("content_index")
            if isinstance(data.get("delta"), str):
                pieces = self._pieces.setdefault(place, {})
                pieces.setdefault((part if isinstance(part, int) else 0, kind), []).append(data["delta"])
        elif kind == "response.output_item.added" and is_object(data.get("item")):
            self._begun[place] = data["item"]
        elif kind == "response.output_item.done" and is_object(data.get("item")):
            self._done[place] = _member(raw, "item", data["item"])
        elif kind == "error" or (kind is None and data.get("error")):
            self._error = self._error or data.get("error") or data
        elif is_object(response := data.get("response")):
            self._response = response
            if self._opened is None and isinstance(response.get("id"), str):
                self._opened = response["id"]
            self._ended = kind in WHOLE
            if self._ended:
                self._output = _output_of(_member(raw, "response", response), response)
            if response.get("error"):
                self._error = self._error or response["error"]

    @property
    def replies(self) -> Replies:
        found = _replies(self._response, self._output or self._items())
        reasons = found.finish_reasons if self._ended else tuple([None for _ in found.finish_reasons])
        error = words_of(self._error) if self._error is not None else found.error if self._ended else None
        # Without `background`, the provider does nothing more after the end of the stream.
        later = found.later and self._response.get("background") is True
        ids = found.ids
        if self._opened is not None and self._opened not in ids:
            ids = (*ids, self._opened, begun_under(self._opened))
        return msgspec.structs.replace(found, finish_reasons=reasons, error=error, ids=ids, later=later)

    @property
    def failed(self) -> bool:
        return self._error is not None

    def _items(self) -> list[bytes]:
        places = sorted({*self._done, *self._begun})
        return [self._done.get(at) or Item.as_stored(self._under_way(at)).raw for at in places]

    def _under_way(self, at: int) -> JsonObject:
        item = dict(self._begun[at])
        parts: dict[int, JsonObject] = {}
        for (part, kind), pieces in self._pieces.get(at, {}).items():
            part_type, field = _DELTAS[kind]
            text = "".join(pieces)
            if part_type:
                parts[part] = {"type": part_type, field: text}
            else:
                item[field] = text
        if parts:
            item["content"] = [parts[part] for part in sorted(parts)]
        return item


def _member(raw: bytes, name: str, value: JsonObject) -> bytes:
    """Return the text of a member of an object, with its original bytes if possible."""
    try:
        text = bytes(FIELDS.decode(raw)[name])
        orjson.loads(text)
    except (msgspec.DecodeError, ValueError, KeyError, RecursionError):  # ValueError: from orjson, or not UTF-8
        return Item.as_stored(value).raw
    return text


# ----------------------------------------------------------------------------- an answer of our own


_NOTHING_SPENT: Final = {
    "input_tokens": 0,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 0,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 0,
}
_REQUIRED: Final[JsonObject] = {
    **dict.fromkeys(("error", "incomplete_details", "instructions", "temperature", "top_p")),
    "metadata": {},
    "parallel_tool_calls": True,
    "tool_choice": "auto",
    "tools": [],
}
"""Fields that the API requires in every response and that carry no information here. SDKs read them unchecked."""


def answer_id(exchange: str) -> str:
    """Return the id of an answer of the proxy's own."""
    return f"resp_{exchange}"


def made_answer(
    reply: Message, *, exchange: str, created: int, model: str, stream: bool, usage: bool
) -> tuple[bytes, bytes]:
    """Return content type and body of an answer with this reply. `created` is in seconds since 1970."""
    del usage  # it is always included
    items = reply.items if isinstance(reply, Item) else []
    output = [_output_item(item, place) for place, item in enumerate(items)]
    response: JsonObject = {
        "id": answer_id(exchange),
        "object": "response",
        "created_at": created,
        "status": DONE,
        "model": model,
        "output": output,
        "usage": _NOTHING_SPENT,
        **_REQUIRED,
    }
    if not stream:
        return b"application/json", write(response)
    opened: JsonObject = {**response, "status": "in_progress", "output": [], "usage": None}
    events: list[tuple[str, JsonObject]] = [("response.created", {"response": opened})]
    for place, item in enumerate(output):
        events += item_events(place, item)
    events.append(("response.completed", {"response": response}))
    numbered = [(name, {"type": name, **data, "sequence_number": at}) for at, (name, data) in enumerate(events)]
    return b"text/event-stream", b"".join([event_of(name, data) for name, data in numbered])


def _output_item(item: JsonObject, place: int) -> JsonObject:
    """Return an item in the form of a response. A client may have sent its own form: without id, status and parts."""
    whole: JsonObject = {"id": f"item_{place}", "status": DONE, **{k: v for k, v in item.items() if v is not None}}
    if kind_of(item) != "message":
        return whole
    content: Any = item.get("content")
    if isinstance(content, str):
        content = [{"type": "output_text", "text": content, "annotations": []}]
    return {**whole, "type": "message", "content": content}


def item_events(place: int, item: JsonObject) -> list[tuple[str, JsonObject]]:
    """Return the events (name and data) that stream one complete output item."""
    at: JsonObject = {"output_index": place, "item_id": item.get("id")}
    begun: JsonObject = {**item, "status": "in_progress"}
    events: list[tuple[str, JsonObject]] = []
    content = item.get("content")
    if kind_of(item) == "message" and is_array(content):
        begun["content"] = []
        for index, part in enumerate(content):
            here = {**at, "content_index": index}
            told = is_object(part) and isinstance(part.get("text"), str)
            # SDKs add the deltas to the part that begins, so it begins empty.
            events.append(("response.content_part.added", {**here, "part": {**part, "text": ""} if told else part}))
            if told:
                events.append(("response.output_text.delta", {**here, "delta": part["text"], "logprobs": []}))
                events.append(("response.output_text.done", {**here, "text": part["text"], "logprobs": []}))
            events.append(("response.content_part.done", {**here, "part": part}))
    for field, name in (("arguments", "function_call_arguments"), ("input", "custom_tool_call_input")):
        if kind_of(item) in {"function_call", "custom_tool_call"} and isinstance(item.get(field), str):
            begun[field] = ""
            events.append((f"response.{name}.delta", {**at, "delta": item[field]}))
            events.append((f"response.{name}.done", {**at, field: item[field]}))
    added = ("response.output_item.added", {"output_index": place, "item": begun})
    return [added, *events, ("response.output_item.done", {"output_index": place, "item": item})]


def event_of(name: str, data: JsonObject) -> bytes:
    """Return one event of a stream."""
    return b"event: %b\ndata: %b\n\n" % (name.encode(), write(data))


# ------------------------------------------------------------------------------------------ errors


def error_event(body: bytes) -> bytes:
    """Return the event that ends a broken stream. SDKs read `error`; other clients read the fields beside it."""
    error = as_object(read(body)).get("error")
    told = error if is_object(error) else {"message": words_of(error), "code": None, "param": None}
    beside = {name: told.get(name) for name in ("code", "message", "param")}
    data = {"type": "error", **beside, "error": told, "sequence_number": 0}
    return b"event: error\ndata: %b\n\n" % write(data)

"""The replies that a completion holds, whether it came as one body or as a stream of chunks.

A stream's deltas are folded field by field:

    a text        (`content`, `refusal`, `reasoning`, `arguments` …) is joined piece by piece
    a name        (`role`, `id`, `type`) is set once; repeating it changes nothing
    a tool's name by the rules of `ToolName`
    a list        (`reasoning_details`, `annotations` …) gets longer
    a tool call   is known by its `index`, in whatever order and however interleaved
    all the rest  the last value counts

It reads whatever a provider sends and never fails: what cannot be understood is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct

from proxy.dialects import JsonObject, Message
from proxy.dialects.jsontext import is_array, is_object, write


class ReplyChoice(Struct, frozen=True, kw_only=True):
    """One of the replies that were asked for."""

    index: int
    """Its place among the choices, from 0."""
    message: JsonObject
    """The reply as a message. Of a body: as it stands there. Of a stream: what the deltas amount to."""
    finish_reason: str | None
    """Why it ended; None where it broke off, or nothing was said about it."""


class Completion(Struct, frozen=True, kw_only=True):
    """What one body says."""

    choices: tuple[ReplyChoice, ...]
    """By index."""
    usage: JsonObject | None
    id: str | None
    model: str | None
    """The model that answered, as it calls itself."""
    error: JsonObject | None
    """The error object, where it is an error."""


def read_completion(body: Any) -> Completion:
    """Return what the parsed JSON body of a completion says. Messages are the very objects of the body."""
    if not is_object(body):
        return Completion(choices=(), usage=None, id=None, model=None, error=None)
    choices: list[ReplyChoice] = []
    for position, item in enumerate(_objects(body.get("choices"))):
        message = item.get("message")
        if is_object(message):
            choices.append(
                ReplyChoice(index=_index(item, position), message=message, finish_reason=_name(item, "finish_reason"))
            )
    if len(choices) > 1:
        choices.sort(key=lambda choice: choice.index)
    return Completion(
        choices=tuple(choices), usage=_usage(body), id=_name(body, "id"), model=_name(body, "model"), error=_error(body)
    )


class CompletionAccumulator:
    """Folds the chunks of one stream into replies."""

    __slots__ = ("_choices", "error", "id", "model", "usage")

    usage: JsonObject | None
    """The last usage that was reported."""
    id: str | None
    model: str | None
    """The model that answers, as it calls itself."""
    error: JsonObject | None
    """The first error that was reported in the stream."""

    def __init__(self) -> None:
        self.usage = self.id = self.model = self.error = None
        self._choices: dict[int, _Choice] = {}

    def add(self, chunk: Any) -> bool:
        """Take the next chunk, the parsed data of one event, whatever it is; tell if it is `usage_only`."""
        if not is_object(chunk):
            return False
        if self.id is None:
            self.id = _name(chunk, "id")
        if self.model is None:
            self.model = _name(chunk, "model")
        if chunk.get("usage"):
            self.usage = _usage(chunk) or self.usage
        if self.error is None:
            self.error = _error(chunk)
        choices = chunk.get("choices")
        if not choices:
            return usage_only(chunk)
        position = 0
        for item in choices if is_array(choices) else ():
            if is_object(item):
                self._add(item, position)
                position += 1
        return False

    def _add(self, item: JsonObject, position: int) -> None:
        """Take what a chunk says of one choice."""
        index = item.get("index")
        if not isinstance(index, int):
            index = position
        choice = self._choices.get(index)
        if choice is None:
            choice = self._choices[index] = _Choice()
        # Some providers answer a stream with one chunk that holds a whole message.
        delta = item["delta"] if "delta" in item else item.get("message")
        if delta and is_object(delta):
            choice.deltas.add(delta)
        if item.get("finish_reason"):
            choice.finish_reason = _name(item, "finish_reason") or choice.finish_reason

    def choices(self) -> tuple[ReplyChoice, ...]:
        """Return the replies as far as they have come, by index."""
        return tuple(
            ReplyChoice(index=index, message=choice.deltas.message(), finish_reason=choice.finish_reason)
            for index, choice in sorted(self._choices.items())
        )

    @property
    def finished(self) -> bool:
        """Whether there is a choice, and every choice said why it ended."""
        return bool(self._choices) and all(choice.finish_reason for choice in self._choices.values())


class _Choice:
    """One choice as far as it has come."""

    __slots__ = ("deltas", "finish_reason")

    def __init__(self) -> None:
        self.deltas = Deltas()
        self.finish_reason: str | None = None


def usage_only(chunk: Any) -> bool:
    """Tell whether a chunk is there for its usage alone (`stream_options.include_usage`)."""
    return is_object(chunk) and chunk.get("usage") is not None and chunk.get("choices") == []


def _objects(value: Any) -> Sequence[JsonObject]:
    return [item for item in value if is_object(item)] if is_array(value) else ()


def _index(item: JsonObject, position: int) -> int:
    index = item.get("index")
    return index if isinstance(index, int) else position


def _name(item: JsonObject, name: str) -> str | None:
    value = item.get(name)
    return value if isinstance(value, str) and value else None


def _usage(item: JsonObject) -> JsonObject | None:
    usage = item.get("usage")
    return usage if is_object(usage) else None


def _error(item: JsonObject) -> JsonObject | None:
    """Return the error that an object reports, in whichever of the forms that providers use."""
    error = item.get("error")
    if is_object(error):
        return error or {"message": "unknown error"}
    if error:
        return {"message": error if isinstance(error, str) else write(error).decode()}
    return item if item.get("object") == "error" else None


class ToolName:
    """A name as far as it has come."""

    __slots__ = ("value", "whole")

    value: Any
    """A text; what came first, where that is none; None where nothing came."""
    whole: bool
    """Whether nothing is added any more."""

    def __init__(self) -> None:
        self.value = None
        self.whole = False

    def learn(self, said: JsonObject) -> None:
        """Take the next delta of the call's `function` or `custom`, a parsed JSON object."""
        name = said.get("name")
        if name and not self.whole:
            self.value = _grown(self.value, name)
        if self.value and (said.get("arguments") or said.get("input")):
            self.whole = True


def _grown(known: Any, said: Any) -> Any:
    if not known:
        return said
    if not (isinstance(known, str) and isinstance(said, str)):
        return known
    return said if said.startswith(known) else known + said


class _Shape(Struct, frozen=True, kw_only=True):
    """How an object grows."""

    texts: frozenset[str] = frozenset()
    """Fields that come in pieces."""
    once: frozenset[str] = frozenset()
    """Fields that are said once."""
    named: bool = False
    """Whether that is the name of a tool, and nothing else."""
    objects: Mapping[str, _Shape] = {}
    """Fields that are objects which grow themselves."""
    calls: str = ""
    """The field that lists tool calls."""


_FUNCTION: Final = _Shape(texts=frozenset({"arguments"}), once=frozenset({"name"}), named=True)
_CUSTOM: Final = _Shape(texts=frozenset({"input"}), once=frozenset({"name"}), named=True)
_CALL: Final = _Shape(once=frozenset({"id", "type"}), objects={"function": _FUNCTION, "custom": _CUSTOM})
_AUDIO: Final = _Shape(texts=frozenset({"data", "transcript"}), once=frozenset({"id"}))
_MESSAGE: Final = _Shape(
    texts=frozenset({"content", "refusal", "reasoning", "reasoning_content"}),
    once=frozenset({"role"}),
    objects={"function_call": _FUNCTION, "audio": _AUDIO},
    calls="tool_calls",
)


class _Pieces(list[str]):
    """A text in pieces, joined at the end: adding to a long text must not copy it each time."""

    __slots__ = ()


class _Folded:
    """An object that grows by its shape."""

    __slots__ = ("_fields", "_name", "_shape")

    def __init__(self, shape: _Shape) -> None:
        self._shape = shape
        self._name = ToolName() if shape.named else None
        self._fields: dict[str, Any] = {}

    def add(self, delta: JsonObject) -> None:
        if self._name is not None:
            self._name.learn(delta)
        for name, value in delta.items():
            known = self._fields.get(name)
            if isinstance(known, _Pieces) and isinstance(value, str):  # nearly all that ever comes
                known.append(value)
            elif value is not None:
                self._put(name, known, value)

    def said(self, name: str) -> Any:
        """Return what a field that is said once says; None while it does not."""
        return self._fields.get(name)

    def part(self, name: str) -> _Folded | None:
        """Return an object in it that grows; None while it has not begun."""
        part = self._fields.get(name)
        return part if isinstance(part, _Folded) else None

    def built(self) -> JsonObject:
        return {name: _built(value) for name, value in self._fields.items()}

    def _put(self, name: str, known: Any, value: Any) -> None:
        fields, shape = self._fields, self._shape
        if name in shape.texts and isinstance(value, str):
            if is_array(known):
                _text_at_end(known).append(value)
            else:
                fields[name] = _Pieces([value])
        elif name in shape.once:
            self._put_once(name, known, value)
        elif name in shape.objects and is_object(value):
            if not isinstance(known, _Folded):
                fields[name] = known = _Folded(shape.objects[name])
            known.add(value)
        elif name == shape.calls:
            self._put_calls(name, known, value)
        elif is_array(value):
            fields[name] = _listed(known)
            fields[name].extend(value)
        else:
            fields[name] = value

    def _put_once(self, name: str, known: Any, value: Any) -> None:
        if self._name is not None:
            known, value = None, self._name.value
        if value and not known:
            self._fields[name] = value

    def _put_calls(self, name: str, known: Any, value: Any) -> None:
        items = [item for item in value if is_object(item)] if is_array(value) else []
        if items and known is None:
            self._fields[name] = known = _Calls()
        for item in items:
            known.add(item)


class Deltas(_Folded):
    """A message as far as it has come: `add` takes the next delta, a parsed JSON object."""

    __slots__ = ()

    def __init__(self) -> None:
        super().__init__(_MESSAGE)

    def message(self) -> JsonObject:
        """Return the message, fields in the order of their first coming after `role` and `content`.

        `content` is None where nothing came for it but nulls, "" where an empty string did.
        """
        return {"role": "assistant", "content": None} | self.built()


class _Calls:
    """The tool calls of a message."""

    __slots__ = ("_by_index", "_calls", "_last")

    def __init__(self) -> None:
        self._calls: list[tuple[int, _Folded]] = []  # (index, or place where there is none; call)
        self._by_index: dict[int, _Folded] = {}
        self._last: _Folded | None = None

    def add(self, delta: JsonObject) -> None:
        index = delta.get("index")
        if isinstance(index, int):
            call = self._by_index.get(index)
            if call is None or _begins_another(call, delta):
                call = self._by_index[index] = self._begin(index)
        else:
            call = self._continued(delta.get("id")) or self._begin(len(self._calls))
        self._last = call
        call.add({name: value for name, value in delta.items() if name != "index"})

    def built(self) -> list[JsonObject]:
        return [call.built() for _, call in sorted(self._calls, key=_call_index)]

    def _begin(self, index: int) -> _Folded:
        call = _Folded(_CALL)
        self._calls.append((index, call))
        return call

    def _continued(self, identity: Any) -> _Folded | None:
        """Return the call that a delta without an index belongs to; None where it begins one."""
        if not identity or self._last is None:
            return self._last
        return next((call for _, call in self._calls if call.said("id") == identity), None)


def _call_index(call: tuple[int, _Folded]) -> int:
    return call[0]


def _begins_another(call: _Folded, delta: JsonObject) -> bool:
    """Tell whether a delta at the index of a call is another call all the same.

    Some providers give every call the index 0, others give every delta of one call another id:
    another id and a name again are another call.
    """
    identity, known = delta.get("id"), call.said("id")
    if not identity or not known or identity == known:
        return False
    function, begun = delta.get("function"), call.part("function")
    return is_object(function) and bool(function.get("name")) and begun is not None and bool(begun.said("name"))


def _listed(known: Any) -> list[Any]:
    """Return what is known of a field as the list that it turns out to be."""
    if isinstance(known, _Pieces):
        return [known]
    return known if is_array(known) else []


def _text_at_end(parts: list[Any]) -> _Pieces:
    """Return the text that a list of content parts ends in, begun if there is none."""
    if not parts or not isinstance(parts[-1], _Pieces):
        parts.append(_Pieces())
    pieces: _Pieces = parts[-1]
    return pieces


def _built(value: Any) -> Any:
    """Return what grew as plain JSON data."""
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, (_Folded, _Calls)):
        return value.built()
    if is_array(value):
        return [_text_part(item) if isinstance(item, _Pieces) else item for item in value]
    return value


def _text_part(pieces: _Pieces) -> JsonObject:
    return {"type": "text", "text": "".join(pieces)}


FINISH_REASON: Final = "tool_calls"
"""The `finish_reason` of an answer that the proxy makes of a stored reply."""
_NOTHING_SPENT: Final = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def made_answer(
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
                {"index": 0, "message": orjson.Fragment(reply.raw), "logprobs": None, "finish_reason": FINISH_REASON}
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

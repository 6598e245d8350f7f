"""Reads the replies of a completion, from one body or from a stream of chunks.

The deltas of a stream are merged field by field:

    a text          (`content`, `refusal`, `reasoning`, `arguments` …) is joined piece by piece
    a name          (`role`, `id`, `type`) is set once; repeating it changes nothing
    a tool's name   follows the rules of `ToolName`
    a list          (`reasoning_details`, `annotations` …) is extended
    a tool call     is found by `CallFinder`, in any order and however interleaved
    anything else   the last value counts
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any, Final

import orjson
from msgspec import Struct, field

from proxy.dialects import JsonObject, Message, Replies
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.jsontext import as_object, is_array, is_object, read, write
from proxy.dialects.sse import Event


class ReplyChoice(Struct, frozen=True, kw_only=True):
    """One of the requested replies."""

    index: int  # its index among the choices, from 0
    message: JsonObject
    """The reply as a message: as it stands in a body, or as the deltas of a stream add up."""
    finish_reason: str | None  # why it ended; None if it broke off, or gave no reason


class Completion(Struct, frozen=True, kw_only=True):
    """The content of one body."""

    choices: tuple[ReplyChoice, ...] = ()  # sorted by index
    usage: JsonObject | None = None
    model: str | None = None  # the answering model, as it names itself
    error: JsonObject | None = None  # the error object, if it is an error


def read_completion(body: Any) -> Completion:
    """Read the parsed JSON body of a completion. Messages are the very objects of the body."""
    if not is_object(body):
        return Completion()
    choices = [
        ReplyChoice(index=_index(item, position), message=message, finish_reason=_name(item, "finish_reason"))
        for position, item in enumerate(_objects(body.get("choices")))
        if is_object(message := item.get("message"))
    ]
    usage = body.get("usage")
    return Completion(
        choices=tuple(sorted(choices, key=attrgetter("index"))),
        usage=usage if is_object(usage) else None,
        model=_name(body, "model"),
        error=_error(body),
    )


def read_body(body: bytes) -> Replies:
    """Read a body. Raises ValueError if it is not JSON."""
    return _replies(read_completion(read(body)))


def _replies(found: Completion) -> Replies:
    return Replies(
        messages=tuple([ChatMessage.as_stored(choice.message) for choice in found.choices]),
        finish_reasons=tuple([choice.finish_reason for choice in found.choices]),
        usage=found.usage,
        model=found.model,
        error=words_of(found.error),
    )


class CompletionAccumulator:
    """Merges the chunks of one stream into replies."""

    def __init__(self) -> None:
        self.usage: JsonObject | None = None  # the last one that was reported
        self.model: str | None = None  # the answering model, as it names itself
        self.error: JsonObject | None = None  # the first one that was reported in the stream
        self._choices: dict[int, Deltas] = {}
        self._names: frozenset[str] | None = None  # the names of the first chunk's fields

    def take(self, event: Event) -> bool:
        return not event.is_done and self.add(event.value)

    def add(self, chunk: Any) -> bool:
        """Take the next chunk: the parsed data of one event, whatever it is.

        Return whether it only reports usage: it is `usage_only`, and has no values in fields the first chunk lacks.
        Providers name their sources in such fields.
        """
        if not is_object(chunk):
            return False
        names, self._names = self._names, self._names or frozenset(chunk)
        if self.model is None:
            self.model = _name(chunk, "model")
        if is_object(chunk.get("usage")):
            self.usage = chunk["usage"] or self.usage
        if self.error is None:
            self.error = _error(chunk)
        choices = chunk.get("choices")
        if not choices:
            if names is not None and any(chunk[name] for name in chunk.keys() - names - _BESIDE_USAGE):
                return False
            return usage_only(chunk)
        for position, item in enumerate(_objects(choices)):
            self._add(item, position)
        return False

    def _add(self, item: JsonObject, position: int) -> None:
        index = _index(item, position)
        reply = self._choices.get(index)
        if reply is None:
            reply = self._choices[index] = Deltas()
        # Some providers answer a stream with one chunk that holds a whole message.
        delta = item["delta"] if "delta" in item else item.get("message")
        if delta and is_object(delta):
            reply.add(delta)
        if item.get("finish_reason"):
            reply.finish_reason = _name(item, "finish_reason") or reply.finish_reason

    def choices(self) -> tuple[ReplyChoice, ...]:
        """Return the replies so far, sorted by index."""
        return tuple(
            ReplyChoice(index=index, message=reply.message(), finish_reason=reply.finish_reason)
            for index, reply in sorted(self._choices.items())
        )

    @property
    def replies(self) -> Replies:
        return _replies(Completion(choices=self.choices(), usage=self.usage, model=self.model, error=self.error))

    @property
    def failed(self) -> bool:
        return self.error is not None


_BESIDE_USAGE: Final = frozenset({"usage", "obfuscation", "service_tier", "system_fingerprint"})
"""Fields of a usage chunk that may be missing in the first chunk."""


def usage_only(chunk: Any) -> bool:
    """Tell whether a chunk only reports usage (`stream_options.include_usage`)."""
    return is_object(chunk) and chunk.get("usage") is not None and chunk.get("choices") == []


def _objects(value: Any) -> list[JsonObject]:
    return [item for item in value if is_object(item)] if is_array(value) else []


def _index(item: JsonObject, position: int) -> int:
    index = item.get("index")
    return index if isinstance(index, int) else position


def _name(item: JsonObject, name: str) -> str | None:
    value = item.get(name)
    return value if isinstance(value, str) and value else None


def _error(item: JsonObject) -> JsonObject | None:
    """Return the error that an object reports, in any of the forms that providers use."""
    error = item.get("error")
    if is_object(error):
        return error or {"message": "unknown error"}
    if error:
        return {"message": error if isinstance(error, str) else write(error).decode()}
    return item if item.get("object") == "error" else None


# ---------------------------------------------------------------------------------------- deltas


class ToolName(Struct, eq=False):
    """The name of a called tool, as far as it has arrived.

    A name in pieces is joined. A piece that begins with the name so far replaces it.
    """

    value: Any = None  # a text; any other value only if it came first; None if nothing came
    whole: bool = False  # whether the name is complete: arguments have begun

    def learn(self, said: JsonObject) -> None:
        """Take the next delta of the call's `function` or `custom`, a parsed JSON object."""
        name = said.get("name")
        if name and not self.whole:
            if not self.value:
                self.value = name
            elif isinstance(self.value, str) and isinstance(name, str):
                self.value = name if name.startswith(self.value) else self.value + name
        if self.value and (said.get("arguments") or said.get("input")):
            self.whole = True


class CallFinder(Struct, kw_only=True, eq=False):
    """Finds the tool call of a message that each delta belongs to."""

    ids: list[Any] = []  # the id of each call, in the order in which they began; None until it arrives
    by_index: dict[int, int] = {}  # the last call that began at each index
    _by_id: dict[bytes, int] = {}  # the first call with each id (any JSON value)
    _named: list[bool] = []
    _last: int | None = None

    def place(self, delta: JsonObject) -> int:
        """Return the place of the delta's call, in the order in which the calls began.

        At a known index, a delta starts a new call only if it has another id, and a name although the call has one.
        Some providers give every call the index 0. Others give every delta of one call another id.
        """
        index, identity = delta.get("index"), delta.get("id") or None
        named = bool(as_object(delta.get("function")).get("name"))
        place: int | None = None
        if isinstance(index, int):
            place = self.by_index.get(index)
            if place is not None and named and self._named[place]:
                place = place if not identity or self.ids[place] in (None, identity) else None
        elif identity is None:
            place = self._last
        else:
            place = self._by_id.get(write(identity))
        if place is None:
            place = len(self.ids)
            self.ids.append(None)
            self._named.append(False)
        if isinstance(index, int):
            self.by_index[index] = place
        if self.ids[place] is None and identity is not None:
            self.ids[place] = identity
            self._by_id.setdefault(write(identity), place)
        self._named[place] = self._named[place] or named
        self._last = place
        return place


class _Shape(Struct, frozen=True, kw_only=True):
    """How an object grows from deltas."""

    texts: frozenset[str] = frozenset()  # fields that arrive in pieces
    once: frozenset[str] = frozenset()  # fields that are set once
    named: bool = False  # whether the only field in `once` is the name of a tool
    objects: Mapping[str, _Shape] = {}  # fields that are objects and grow themselves
    calls: str = ""  # the field that lists tool calls


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
    """A text in pieces, joined at the end, so that adding to a long text does not copy it each time."""

    __slots__ = ()


class _Folded:
    """An object that grows from deltas, according to its shape."""

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
            if isinstance(known, _Pieces) and isinstance(value, str):  # nearly all deltas
                known.append(value)
            elif value is not None:
                self._put(name, known, value)

    def _put(self, name: str, known: Any, value: Any) -> None:
        fields, shape = self._fields, self._shape
        if name in shape.texts and isinstance(value, str):
            _put_text(fields, name, value)
        elif name in shape.once:
            if self._name is not None:
                known, value = None, self._name.value
            if value and not known:
                fields[name] = value
        elif name in shape.objects and is_object(value):
            if not isinstance(known, _Folded):
                fields[name] = known = _Folded(shape.objects[name])
            known.add(value)
        elif name == shape.calls:
            for item in _objects(value):
                known = fields.setdefault(name, _Calls())
                known.add(item)
        elif is_array(value):
            fields[name] = [known] if isinstance(known, _Pieces) else known if is_array(known) else []
            fields[name].extend(value)
        else:
            fields[name] = value

    def built(self) -> JsonObject:
        return {name: _built(value) for name, value in self._fields.items()}


def _put_text(fields: JsonObject, name: str, text: str) -> None:
    """Begin a text, or append it to a list of content parts."""
    known = fields.get(name)
    if not is_array(known):
        fields[name] = _Pieces([text])
    elif known and isinstance(known[-1], _Pieces):
        known[-1].append(text)
    else:
        known.append(_Pieces([text]))


class Deltas(_Folded):
    """A message as far as it has arrived. `add` takes the next delta, a parsed JSON object."""

    __slots__ = ("finish_reason",)

    finish_reason: str | None  # why it ended; None until that is reported

    def __init__(self) -> None:
        super().__init__(_MESSAGE)
        self.finish_reason = None

    def message(self) -> JsonObject:
        """Return the message: `role` and `content`, then the other fields in the order of their arrival.

        `content` is None if only nulls arrived for it, and "" if an empty string did.
        """
        return {"role": "assistant", "content": None} | self.built()


class _Calls(Struct, kw_only=True, eq=False):
    """The tool calls of a message."""

    _finder: CallFinder = field(default_factory=CallFinder)
    _calls: list[tuple[int, _Folded]] = []  # (index, or place if it has no index; call)

    def add(self, delta: JsonObject) -> None:
        place, index = self._finder.place(delta), delta.get("index")
        if place == len(self._calls):
            self._calls.append((index if isinstance(index, int) else place, _Folded(_CALL)))
        self._calls[place][1].add({name: value for name, value in delta.items() if name != "index"})

    def built(self) -> list[JsonObject]:
        return [call.built() for _, call in sorted(self._calls, key=lambda call: call[0])]


def _built(value: Any) -> Any:
    if isinstance(value, _Pieces):
        return "".join(value)
    if isinstance(value, (_Folded, _Calls)):
        return value.built()
    if is_array(value):
        return [{"type": "text", "text": "".join(item)} if isinstance(item, _Pieces) else item for item in value]
    return value


# ---------------------------------------------------------------------------- an answer of our own

CALLING: Final = "tool_calls"  # the `finish_reason` of an answer made from a stored reply
_NOTHING_SPENT: Final = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def made_answer(
    reply: Message, *, exchange: str, created: int, model: str, stream: bool, usage: bool
) -> tuple[bytes, bytes]:
    """Return content type and body of an answer with this reply. `created` is in seconds since 1970.

    `usage` adds a usage of zero to a stream. Content that a client sent in parts becomes one text, as in replies.
    """
    if is_array(reply.data.get("content")):
        reply = ChatMessage.of({**reply.data, "content": reply.text})
    kind = "chat.completion.chunk" if stream else "chat.completion"
    answer: JsonObject = {"id": f"chatcmpl-{exchange}", "object": kind, "created": created, "model": model}
    if not stream:
        raw = orjson.Fragment(reply.raw)
        answer["choices"] = [{"index": 0, "message": raw, "logprobs": None, "finish_reason": CALLING}]
        return b"application/json", orjson.dumps(answer | {"usage": _NOTHING_SPENT})
    delta = reply.data
    if is_array(calls := delta.get("tool_calls")):  # in a stream each call has its index
        placed = [{"index": place, **call} for place, call in enumerate(calls) if is_object(call)]
        delta = {**delta, "tool_calls": placed}
    chunks: list[JsonObject] = [
        {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": CALLING}]},
    ]
    if usage:
        chunks.append({"choices": [], "usage": _NOTHING_SPENT})
    events = [b"data: %b\n\n" % orjson.dumps(answer | chunk) for chunk in chunks]
    return b"text/event-stream", b"".join([*events, b"data: [DONE]\n\n"])


# ------------------------------------------------------------------------------------------ errors


def words_of(error: Any) -> str | None:
    """Return the message of an error object, in any of the forms that providers use; None if it has none."""
    if is_object(error):
        message = error.get("message")
        return message if isinstance(message, str) else write(error).decode()
    return error if isinstance(error, str) else None


def error_words(body: bytes) -> str | None:
    """Return the message of an error answer; None if it is not a JSON object with an `error`."""
    try:
        return words_of(as_object(orjson.loads(body)).get("error"))
    except orjson.JSONDecodeError:
        return None

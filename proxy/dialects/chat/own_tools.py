"""The proxy's own tools: offers them beside the client's, and removes their calls from the replies that clients see.

Beside strict functions the schemas follow strict mode: every property is required, no other is allowed, and there are
no unions of types. An empty string then means that a parameter is not given.

How a stream is filtered:

    a text           is shown at once, whatever else waits
    a tool call      waits until its name is complete, or cannot become the name of a tool of the proxy's
    the proxy's      calls are removed
    the client's     calls are shown with their original bytes. After a removed call their `index` is renumbered from 0
                     on, because SDKs assemble calls by their `index`
    an end           of a round that another one follows is removed: its finish reason, its usage, its `[DONE]`
    a later round    has the `id`, `created` and `model` of the first one, no role, and the usage of all rounds so far.
                     A chunk of the proxy's own separates its first text from the text before (`gap`). That chunk is not
                     part of the round's text
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct, field, structs

from proxy.dialects import Call, JsonObject, Message, OwnCalls, Request, ToolDefinition, ToolOffer
from proxy.dialects.chat.completion import CallFinder, CompletionAccumulator, ToolName, read_completion, usage_only
from proxy.dialects.chat.message import ChatMessage, without_unfinished_calls
from proxy.dialects.jsontext import (
    added,
    as_array,
    as_object,
    as_text,
    is_array,
    is_object,
    is_object_text,
    parsed,
    read,
    sound,
    write,
)
from proxy.dialects.own_tools import STOPPED, BodyFilter, RoundEnding, StreamFilter, offer, schema_of, unused_id
from proxy.dialects.sse import Event

# ------------------------------------------------------------------------------------- the offer

_LEAVES_ROOM: Final[dict[str, tuple[Any, ...]]] = {
    "tool_choice": (None, "auto", "required"),
    "n": (None, 1),
    "functions": (None, []),
    "function_call": (None,),
}
"""Fields of a request, and the values with which the model may call any tool and gives one reply."""


def leaves_room(request: Request) -> bool:
    """Tell whether the proxy may add its tools to a request.

    It may not if the request forces a certain tool, forbids tools, wants several choices, or uses `functions`.
    """
    asked = {name: request.fields.get(name) for name in _LEAVES_ROOM}
    return all((None if text is None else orjson.loads(text)) in _LEAVES_ROOM[name] for name, text in asked.items())


def add_tools(tools: bytes | None, own: Sequence[ToolDefinition]) -> ToolOffer:
    """Return the client's tools followed by the proxy's. These are strict only beside strict functions."""
    return offer(tools, own, _definition, name_of=tool_name, function_of=lambda tool: tool.get("function"))


def _definition(tool: ToolDefinition, strict: bool) -> bytes:
    function: JsonObject = {"name": tool.name, "description": tool.description}
    function["parameters"] = schema_of(tool, strict=strict)
    if strict:
        function["strict"] = True
    return orjson.dumps({"type": "function", "function": function})


def tool_name(tool: JsonObject) -> Any:
    """Return the name of a client's tool, whatever kind it is; None if it has none."""
    return next((tool[kind] for kind in ("function", "custom") if is_object(tool.get(kind))), tool).get("name")


# ------------------------------------------------------------------------------------- the calls

CUT_OFF: Final = ("length", "content_filter")  # values of `finish_reason` that may have cut off a call
BLANK_LINE: Final = "\n\n"


def without_own(message: JsonObject, names: Collection[str]) -> JsonObject:
    """Return a reply without its calls of the proxy's tools; the same object if it has none."""
    items, calls = _calls(message)
    kept = [item for item, call in zip(items, calls, strict=True) if call.name not in names]
    if len(kept) == len(items):
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls" or kept}
    return rest | ({"tool_calls": kept} if kept else {})


def says_something(message: JsonObject) -> bool:
    """Tell whether a reply has anything to read or hear."""
    content = message.get("content")
    if isinstance(content, str):
        content = content.strip()
    return bool(content or message.get("refusal") or message.get("audio"))


class CalledRound(Struct, frozen=True, kw_only=True):
    """One answer of the upstream, with the calls of the proxy's tools separated from the others."""

    names: Collection[str]  # the proxy's tools
    message: JsonObject = {}  # the whole reply, including all calls; empty if there is none
    finish: str = ""  # why it ended
    usage: JsonObject | None = None

    @property
    def calls(self) -> OwnCalls:
        """Its calls, and the round as it can be sent back.

        Calls of the proxy's tools are completed for that: an id that no other call of the block has, a type, and
        arguments that are a JSON object (`{}` for anything else, which some providers refuse). `OwnCalls.own` has the
        arguments as they came. Arguments that are not JSON make a call broken only if the reply was cut off.
        """
        items, found = _calls(self.message)
        ids = [call.id for call in found]
        kept: list[Any] = []
        own: list[Call] = []
        broken, others = False, bool(self.message.get("function_call"))
        for place, (item, call) in enumerate(zip(items, found, strict=True)):
            if call.name not in self.names:
                others = True
                kept.append(item)
            elif self.cut and not without_unfinished_calls({"tool_calls": [item]}):
                broken = True
            else:
                if not call.id or ids.count(call.id) > 1:
                    ids[place] = unused_id(place, ids)
                own.append(structs.replace(call, id=ids[place]))
                kept.append(_complete(item, own[-1]))
        sent = reply_of({**self.message, "tool_calls": kept})
        return OwnCalls(message=sent, own=tuple(own), broken=broken, others=others)

    @property
    def says(self) -> bool:
        return says_something(self.message)

    @property
    def cut(self) -> bool:
        return self.finish in CUT_OFF


def reply_of(message: JsonObject) -> ChatMessage:
    """Return a reply in stored form."""
    return ChatMessage.as_stored({**message, "role": "assistant"})


def _calls(message: JsonObject) -> tuple[list[Any], tuple[Call, ...]]:
    """Return the items of a reply's `tool_calls`, and each as a `Call`."""
    items = as_array(message.get("tool_calls"))
    return items, ChatMessage(b"", {"role": "assistant", "tool_calls": items}).calls


def _complete(item: JsonObject, call: Call) -> JsonObject:
    """Return a call with all fields that a request needs, without `index`, which only streams have."""
    rest = {name: value for name, value in item.items() if name != "index"}
    if call.custom:
        return {**rest, "id": call.id}
    arguments = call.arguments if is_object_text(call.arguments) else "{}"
    return {**rest, "id": call.id, "type": "function", "function": {**item["function"], "arguments": arguments}}


def gap(before: Any, after: Any) -> str:
    """Return the separator between the content `before` and the text `after`: a blank line, or "".

    It is empty if either has white space or no text there, or if `after` consists of parts, which are separate anyway.
    """
    if is_array(before) and before:
        before = as_object(before[-1]).get("text")
    if not before or not isinstance(before, str) or not after or not isinstance(after, str):
        return ""
    return "" if before[-1].isspace() or after[0].isspace() else BLANK_LINE


# -------------------------------------------------------------------------------- bodies on their way


class ToolBodyFilter(BodyFilter[CalledRound]):
    """Filters one reply on its way to the client. Each body holds one round of it."""

    _whole = "stop"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._said: list[Any] = []  # contents of the rounds whose bodies the client does not see
        self._body = b""
        self._round = CalledRound(names=names)
        self.last = reply_of({})

    @property
    def _has_said(self) -> bool:
        return any(says_something({"content": content}) for content in self._said)

    def _read(self, body: bytes) -> bool:
        data = parsed(body)
        found = read_completion(data)
        self._body, self._round = body, CalledRound(names=self._names, usage=found.usage)
        if len(as_array(as_object(data).get("choices"))) == 1 and found.choices:
            said, finish = found.choices[0].message, found.choices[0].finish_reason or ""
            self._round = structs.replace(self._round, message=said, finish=finish)
        self.last = reply_of(self._round.message)
        return bool(self._round.message)

    def _begin(self) -> None:
        self._said.append(self._round.message.get("content"))
        self._round = CalledRound(names=self._names)

    def _shown(self, how: RoundEnding) -> bytes:
        last = without_own(self._round.message, self._names)
        if how.text:
            last = {**last, "content": _joined([last.get("content"), how.text])}
        self.last = reply_of(last)
        data = read(self._body)
        choice = data["choices"][0]
        message = choice["message"] = without_own(choice["message"], self._names)
        content = _joined([*self._said, last.get("content")])
        if content != message.get("content"):
            message["content"] = content
        if how.finish != as_text(choice.get("finish_reason")):
            choice["finish_reason"] = how.finish
        if self.rounds and self.usage is not None:
            data["usage"] = self.usage
        return write(sound(data))


def _joined(contents: Sequence[Any]) -> Any:
    """Return several contents as one: a text, or parts if any content has parts; the last one if all are empty.

    Texts that would run together are separated by `gap`.
    """
    said: list[Any] = []
    for content in contents:
        if content:
            between = gap(said[-1], content) if said else ""
            said.append(between + content if between else content)
    if all(isinstance(content, str) for content in said):
        return "".join(said) if said else contents[-1]
    parts: list[Any] = []
    for content in said:
        parts += content if is_array(content) else [{"type": "text", "text": content}]
    return parts


# -------------------------------------------------------------------------------- streams on their way


class StreamedCall(Struct, kw_only=True, eq=False):
    """One tool call as far as it has arrived."""

    name: ToolName = field(default_factory=ToolName)
    own: bool | None = None  # whether it calls a tool of the proxy's; None until that is known
    shown: bool = False  # whether the client has seen its beginning; set by `_indexed`
    index: int | None = None
    """The `index` that the client knows it by, if renumbered; set by `_indexed`. None: the upstream's, if any."""


class StreamedCalls(Struct, kw_only=True, eq=False):
    """The tool calls of one stream."""

    names: Collection[str]  # the proxy's tools
    finder: CallFinder = field(default_factory=CallFinder)
    begun: list[StreamedCall] = []  # all calls, in the order in which they began
    any_own: bool = False  # whether any call is known to call a tool of the proxy's
    _decided: int = 0  # the number of calls for which that is decided

    def learn(self, items: Any) -> list[tuple[JsonObject, StreamedCall]]:
        """Read the deltas of one chunk. Return each with its call."""
        return [(item, self._learn(item)) for item in as_array(items) if is_object(item)]

    def decide(self) -> None:
        """Decide all open calls, taking each name as complete."""
        if self.undecided:
            for call in self.begun:
                if call.own is None:
                    self._decide(call, own=call.name.value in self.names)

    @property
    def undecided(self) -> bool:
        return self._decided < len(self.begun)

    def _decide(self, call: StreamedCall, *, own: bool) -> None:
        call.own = own
        self.any_own |= own
        self._decided += 1

    def _learn(self, item: JsonObject) -> StreamedCall:
        index = item.get("index")
        before = self.finder.by_index.get(index) if isinstance(index, int) else None
        place = self.finder.place(item)
        if place == len(self.begun):
            self.begun.append(StreamedCall())
            if before is not None and (earlier := self.begun[before]).own is None:
                self._decide(earlier, own=earlier.name.value in self.names)
        call = self.begun[place]
        function, custom = item.get("function"), item.get("custom")
        call.name.learn(function if is_object(function) else custom if is_object(custom) else {})
        if call.own is None and call.name.value:
            known = call.name.value
            if not isinstance(known, str) or not any(name.startswith(known) for name in self.names):
                self._decide(call, own=False)
            elif call.name.whole:
                self._decide(call, own=known in self.names)
        return call


_SAME: Final = ("id", "created", "model")  # fields that all chunks of one reply share


class _Part(Struct, frozen=True, kw_only=True):
    """A chunk, or a part of one, on its way to the client."""

    event: Event | None  # the event of exactly this chunk; None for a part of a chunk
    chunk: JsonObject
    choice: JsonObject
    key: str  # the key of the choice's delta: `delta` or `message`
    delta: JsonObject
    items: list[tuple[JsonObject, StreamedCall]]  # the deltas of tool calls in it, each with its call

    @property
    def finish(self) -> str:
        """Why the reply ended; empty if it goes on."""
        return as_text(self.choice.get("finish_reason"))

    def split(self) -> tuple[_Part, _Part]:
        """Return two parts: one without the tool calls, and one with only them."""
        said = {name: value for name, value in self.delta.items() if name != "tool_calls"}
        calls = {"tool_calls": self.delta["tool_calls"]}
        return (
            structs.replace(self, event=None, chunk=self.with_delta(said), delta=said, items=[]),
            structs.replace(self, event=None, chunk=self.with_delta(calls), delta=calls),
        )

    def with_delta(self, delta: JsonObject, **changed: Any) -> JsonObject:
        return {**self.chunk, "choices": [{**self.choice, self.key: delta, **changed}]}


class ToolStreamFilter(StreamFilter[CompletionAccumulator]):
    """Filters one streamed reply on its way to the client, event by event."""

    _whole = "stop"

    def __init__(self, names: Collection[str], hides_usage: bool) -> None:
        """Remove calls of the tools `names`. `hides_usage` also removes the chunks that only report usage."""
        super().__init__(names)
        self._hides_usage = hides_usage
        self.reply = CompletionAccumulator()
        self._same: JsonObject = {}
        self._has_role = False
        self._last: JsonObject | None = None  # the last chunk, a template for chunks of the proxy's own
        self._usage_chunk: JsonObject | None = None
        self._begin()

    def _begin(self) -> None:
        self._calls = StreamedCalls(names=self._names)
        self._reply = CompletionAccumulator()  # the whole round, including what is hidden
        self._held: deque[_Part] = deque()  # chunks that wait until the name of a call is decided
        self._finish = ""  # why the round ended, in upstream's terms
        self._is_apart = False  # whether some text of the round was shown, so that no gap is needed any more
        self.ended = False

    @property
    def message(self) -> JsonObject:
        """The whole reply of this round, including all calls; empty if there is none."""
        choices = self._reply.choices()
        return choices[0].message if choices else {}

    def _current(self) -> CalledRound:
        return CalledRound(names=self._names, message=self.message, finish=self._finish)

    @property
    def _spent(self) -> JsonObject | None:
        # Some servers report usage in every chunk, so this does not build the round's message.
        return added(self._usage_before, self._reply.usage)

    @property
    def last(self) -> Message:
        return reply_of(without_own(self.message, self._names))

    @property
    def hides(self) -> bool:
        return self.rounds > 0 or bool(self._held) or self._calls.any_own

    def take(self, event: Event) -> bytes:
        chunk = event.value
        if not is_object(chunk):  # a comment, or something unreadable
            self.said = True
            return event.raw
        if self.rounds == 0 and len(self._same) < len(_SAME):
            self._same |= {name: chunk[name] for name in _SAME if name not in self._same and chunk.get(name)}
        choices = as_array(chunk.get("choices"))
        choice = choices[0] if len(choices) == 1 else None
        return self._of_choice(event, chunk, choice) if is_object(choice) else self._aside(event, chunk)

    def end(self, event: Event | None = None) -> bytes:
        del event  # it holds nothing else
        if self.ended:
            return b""
        self.ended = True
        self._calls.decide()
        shown = self._release()
        text, finish = self._ended_by("stop")
        # If the upstream gives no reason for the end and nothing was removed, none is added.
        own = self._calls.any_own and not self.again and not self.calls.others
        return shown + self._made(text, finish) if text or own else shown

    def give_up(self) -> bytes:
        usage, wanted = self.usage, self._usage_chunk is not None and not self._hides_usage
        self.next(may_ask=False)
        self.ended = True
        shown = self._made(STOPPED, "stop")
        if wanted:
            shown += _event({**(self._usage_chunk or {}), **self._same, "usage": usage})
        return shown + b"data: [DONE]\n\n"

    def _of_choice(self, event: Event, chunk: JsonObject, choice: JsonObject) -> bytes:
        if self.again:  # another round follows; only the usage counts
            self._reply.add({"usage": chunk.get("usage")})
            return b""
        key = "delta" if "delta" in choice else "message"
        delta = as_object(choice.get(key))
        self._last = chunk
        if self.rounds == 0 and not delta.get("tool_calls") and not choice.get("finish_reason"):
            self._reply.add(chunk)  # text: nearly every chunk
            self._note(chunk, delta, "")
            return event.raw
        items = self._calls.learn(delta.get("tool_calls"))
        part = _Part(event=event, chunk=chunk, choice=choice, key=key, delta=delta, items=items)
        if part.finish:
            self._calls.decide()
            return self._release() + self._show(part)
        if not part.items or not (self._held or self._calls.undecided):
            return self._show(part)
        shown = b""
        if _says(part.delta):
            said, part = part.split()
            shown = self._show(said)
        self._held.append(part)
        return shown + self._release()

    def _release(self) -> bytes:
        """Show the waiting chunks whose calls are decided, in the order of their arrival."""
        held, shown = self._held, b""
        while held and all(call.own is not None for _, call in held[0].items):
            shown += self._show(held.popleft())
        return shown

    def _show(self, part: _Part) -> bytes:
        """Record a chunk, and return the bytes of it that the client may see."""
        self._reply.add(part.chunk)
        text, finish = "", part.finish
        if finish and not self.ended:
            self.ended = True
            text, finish = self._ended_by(finish)
        shown = self._made(text, "") if text else b""
        shown += self._apart(part.delta.get("content"))
        own = any(call.own for _, call in part.items)
        untouched = not (self.rounds or own or finish != part.finish)
        if untouched and all(self._indexed(item, call) is item for item, call in part.items):
            self._note(part.chunk, part.delta, finish)
            return shown + (part.event.raw if part.event is not None else _event(part.chunk))
        delta = dict(part.delta)
        if part.items:
            delta["tool_calls"] = [self._indexed(item, call) for item, call in part.items if not call.own]
            if not delta["tool_calls"]:
                del delta["tool_calls"]
        if self.rounds and self._has_role:
            delta.pop("role", None)
        if not finish and "role" not in delta and not _says_or_calls(delta):
            return shown
        changed: JsonObject = {"finish_reason": finish or None} if "finish_reason" in part.choice else {}
        if own and part.choice.get("logprobs"):
            changed["logprobs"] = None  # some servers include those of the calls
        chunk = self._as_first(part.with_delta(delta, **changed))
        if self.rounds and is_object(chunk.get("usage")):
            chunk["usage"] = self.usage
        self._note(chunk, delta, finish)
        return shown + _event(chunk, part.event)

    def _indexed(self, item: JsonObject, call: StreamedCall) -> JsonObject:
        """Return a delta with the `index` by which the client knows its call."""
        if not call.shown:
            call.shown = True
            earlier = self._calls.begun if self._calls.any_own else []
            earlier = earlier[: earlier.index(call)] if earlier else []
            if any(other.own for other in earlier):
                call.index = sum(other.shown for other in earlier)
        if call.index is None or call.index == item.get("index"):
            return item
        return {**item, "index": call.index}

    def _ended_by(self, finish: str) -> tuple[str, str]:
        """Decide how the round ends. Return the text to add at its end, and the finish reason.

        An empty reason means that the end is hidden from the client, because another round follows.
        """
        self._finish = finish
        if not self.hides:
            return "", finish
        how = self._ending(said=any(says_something(choice.message) for choice in self.reply.choices()))
        return how.text, how.finish

    def _apart(self, content: Any) -> bytes:
        """Return an event that separates `content` from the text of earlier rounds; empty if none is needed."""
        if not content or self._is_apart or not self.rounds:
            return b""
        self._is_apart = True
        choices = self.reply.choices()
        text = gap(choices[0].message.get("content"), content) if choices else ""
        return _event(self._chunk(text, "")) if text else b""

    def _made(self, text: str, finish: str) -> bytes:
        """Return an event of the proxy's own, with `text` and the finish reason."""
        shown, chunk = self._apart(text), self._chunk(text, finish)
        self._reply.add(chunk)
        return shown + _event(chunk)

    def _chunk(self, text: str, finish: str) -> JsonObject:
        """Build a chunk of the proxy's own in the shape of the stream's chunks, record it as shown, and return it."""
        base: JsonObject = {"object": "chat.completion.chunk", "choices": []}
        if self._last is not None:
            base = {name: value for name, value in self._last.items() if name != "usage"}
        delta = {"content": text} if text else {}
        choice = {"index": 0, "delta": delta, "finish_reason": finish or None}
        chunk = self._as_first({**base, "choices": [choice]})
        self._note(chunk, delta, finish)
        return chunk

    def _aside(self, event: Event, chunk: JsonObject) -> bytes:
        """Read a chunk without a part of the reply: usage, an error, or an extra of the provider."""
        self._reply.add(chunk)
        error = self.reply.error
        self.reply.add(chunk)
        if self.reply.error is not error:
            self.said = True
            return event.raw
        if usage_only(chunk):
            self._usage_chunk = chunk
            if self._hides_usage:
                return b""
            chunk = {**chunk, "usage": self.usage}
        if self.again:
            return b""
        return _event(self._as_first(chunk), event) if self.rounds else event.raw

    def _as_first(self, chunk: JsonObject) -> JsonObject:
        """Return a chunk with the `id`, `created` and `model` of the first round."""
        return {**chunk, **{name: value for name, value in self._same.items() if name in chunk}}

    def _note(self, chunk: JsonObject, delta: JsonObject, finish: str) -> None:
        self.reply.add(chunk)
        if not self._has_role:
            self._has_role = bool(delta.get("role"))
        if not self.said:
            self.said = bool(finish) or _says_or_calls(delta)


def _says(delta: JsonObject) -> bool:
    return any(value for name, value in delta.items() if name not in {"role", "tool_calls"})


def _says_or_calls(delta: JsonObject) -> bool:
    return _says(delta) or bool(delta.get("tool_calls"))


def _event(chunk: JsonObject, event: Event | None = None) -> bytes:
    """Return an event with `chunk` as its data, in the form of `event` if that has its data in one piece."""
    data = write(chunk)
    if event is None or event.data is None or event.raw.count(event.data) != 1:
        return b"data: %b\n\n" % data
    return event.raw.replace(event.data, data)

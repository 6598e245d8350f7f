"""The proxy's own tools: offered beside the client's, and their calls taken out of what the client is shown.

Among strict functions the schemas are as strict mode wants them: every property required, none beside them, no
unions of types; an empty string then stands for what is not given.

Of a stream

    a text           is shown at once, whatever else waits
    a tool call      waits until its name is whole, or cannot become that of a tool of the proxy's
    ours             is taken out
    the client's     is shown with the bytes it came with; where one of ours came before it, it is numbered
                     anew, from 0 on (SDKs put calls together by their `index`)
    an end           of a round that another one follows is taken out: its finish, its usage, its `[DONE]`
    a later round    shows the `id`, `created` and `model` of the first, says no role again, and its usage is
                     that of all rounds so far; its first text is kept apart from what was said before it
                     (`gap`), by a chunk of our own, which is no part of what the round says
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
"""Fields of a request, and what they say where the model may call any tool, and is asked for one reply."""


def leaves_room(request: Request) -> bool:
    """Tell whether a request may get tools.

    Not one that chooses a tool itself or none, wants several choices, or speaks of `functions`.
    """
    asked = {name: request.fields.get(name) for name in _LEAVES_ROOM}
    return all((None if text is None else orjson.loads(text)) in _LEAVES_ROOM[name] for name, text in asked.items())


def add_tools(tools: bytes | None, own: Sequence[ToolDefinition]) -> ToolOffer:
    """Return the client's tools with these behind them; strict ones beside strict functions alone."""
    return offer(tools, own, _definition, name_of=tool_name, function_of=lambda tool: tool.get("function"))


def _definition(tool: ToolDefinition, strict: bool) -> bytes:
    function: JsonObject = {"name": tool.name, "description": tool.description}
    function["parameters"] = schema_of(tool, strict=strict)
    if strict:
        function["strict"] = True
    return orjson.dumps({"type": "function", "function": function})


def tool_name(tool: JsonObject) -> Any:
    """Return the name of a tool of the client's, whatever kind it is; None where it has none."""
    return next((tool[kind] for kind in ("function", "custom") if is_object(tool.get(kind))), tool).get("name")


# ------------------------------------------------------------------------------------- the calls

CUT_OFF: Final = ("length", "content_filter")  # values of `finish_reason` that may have cut a call in two
BLANK_LINE: Final = "\n\n"


def without_own(message: JsonObject, names: Collection[str]) -> JsonObject:
    """Return a reply without its calls of the proxy's tools; the same object where it has none."""
    items, calls = _calls(message)
    kept = [item for item, call in zip(items, calls, strict=True) if call.name not in names]
    if len(kept) == len(items):
        return message
    rest = {name: value for name, value in message.items() if name != "tool_calls" or kept}
    return rest | ({"tool_calls": kept} if kept else {})


def says_something(message: JsonObject) -> bool:
    """Tell whether a reply has anything to read or to hear."""
    content = message.get("content")
    if isinstance(content, str):
        content = content.strip()
    return bool(content or message.get("refusal") or message.get("audio"))


class CalledRound(Struct, frozen=True, kw_only=True):
    """One answer of the upstream's, with the calls of the proxy's tools told apart."""

    names: Collection[str]  # the proxy's tools
    message: JsonObject = {}  # all that it says, whoever is meant; empty where it says nothing
    finish: str = ""  # why it ended
    usage: JsonObject | None = None

    @property
    def calls(self) -> OwnCalls:
        """Its calls, and the round as it can be sent back.

        Of the proxy's own calls each gets what a request needs: an id that no other call of the block has, a type, and
        arguments that are a JSON object (`{}` for what is none: some providers refuse it). `OwnCalls.own` has the
        arguments as they came. Those that are not JSON count as broken only where the reply was cut off.
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
    """Return a reply as it is stored."""
    return ChatMessage.as_stored({**message, "role": "assistant"})


def _calls(message: JsonObject) -> tuple[list[Any], tuple[Call, ...]]:
    """Return the `tool_calls` of a reply as they stand there, and each as a call."""
    items = as_array(message.get("tool_calls"))
    return items, ChatMessage(b"", {"role": "assistant", "tool_calls": items}).calls


def _complete(item: JsonObject, call: Call) -> JsonObject:
    """Return a call with everything that a request's call has; its `index` is a stream's."""
    rest = {name: value for name, value in item.items() if name != "index"}
    if call.custom:
        return {**rest, "id": call.id}
    arguments = call.arguments if is_object_text(call.arguments) else "{}"
    return {**rest, "id": call.id, "type": "function", "function": {**item["function"], "arguments": arguments}}


def gap(before: Any, after: Any) -> str:
    """Return what keeps the text `after` apart from the content `before`: a blank line, or nothing.

    Nothing where either has white space there, has no text there, or `after` comes in parts, which stand
    apart by themselves.
    """
    if is_array(before) and before:
        before = as_object(before[-1]).get("text")
    if not before or not isinstance(before, str) or not after or not isinstance(after, str):
        return ""
    return "" if before[-1].isspace() or after[0].isspace() else BLANK_LINE


# -------------------------------------------------------------------------------- bodies on their way


class ToolBodyFilter(BodyFilter[CalledRound]):
    """One reply on its way to the client, made of bodies that each hold one round of it."""

    _whole = "stop"

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._said: list[Any] = []  # the contents of the rounds that the client is not shown
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
    """Return several contents as one: text, or parts where one has parts; the last where all are empty.

    Texts that would run into each other are kept apart.
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
    """One tool call as far as it has come."""

    name: ToolName = field(default_factory=ToolName)
    own: bool | None = None  # whether it is of a tool of the proxy's; None while that is not known
    shown: bool = False  # whether the client saw its beginning; noted by who shows it
    index: int | None = None
    """The `index` by which the client knows it, noted likewise; None: upstream's, if it has one."""


class StreamedCalls(Struct, kw_only=True, eq=False):
    """The tool calls of one stream."""

    names: Collection[str]  # the proxy's tools
    finder: CallFinder = field(default_factory=CallFinder)
    begun: list[StreamedCall] = []  # all calls, in the order in which they began
    any_own: bool = False  # whether any call is known to be of the proxy's tools
    _decided: int = 0  # of how many it is known whose they are

    def learn(self, items: Any) -> list[tuple[JsonObject, StreamedCall]]:
        """Read the deltas of one chunk; return each with its call."""
        return [(item, self._learn(item)) for item in as_array(items) if is_object(item)]

    def decide(self) -> None:
        """Take every name for whole."""
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


_SAME: Final = ("id", "created", "model")  # fields that all chunks of one reply have in common


class _Part(Struct, frozen=True, kw_only=True):
    """A chunk, or a part of one, on its way to the client."""

    event: Event | None  # the event that is this chunk and no more; None for a part of one
    chunk: JsonObject
    choice: JsonObject
    key: str  # where the choice has its delta
    delta: JsonObject
    items: list[tuple[JsonObject, StreamedCall]]  # the deltas of tool calls in it

    @property
    def finish(self) -> str:
        """Why the reply ended; empty where it goes on."""
        return as_text(self.choice.get("finish_reason"))

    def split(self) -> tuple[_Part, _Part]:
        """Return the part that says something, and the part that calls."""
        said = {name: value for name, value in self.delta.items() if name != "tool_calls"}
        calls = {"tool_calls": self.delta["tool_calls"]}
        return (
            structs.replace(self, event=None, chunk=self.with_delta(said), delta=said, items=[]),
            structs.replace(self, event=None, chunk=self.with_delta(calls), delta=calls),
        )

    def with_delta(self, delta: JsonObject, **changed: Any) -> JsonObject:
        return {**self.chunk, "choices": [{**self.choice, self.key: delta, **changed}]}


class ToolStreamFilter(StreamFilter[CompletionAccumulator]):
    """One streamed reply on its way to the client, event by event."""

    _whole = "stop"

    def __init__(self, names: Collection[str], hides_usage: bool) -> None:
        """Take calls of the tools `names` out; `hides_usage`: usage chunks too, and only those of usage."""
        super().__init__(names)
        self._hides_usage = hides_usage
        self.reply = CompletionAccumulator()
        self._same: JsonObject = {}
        self._has_role = False
        self._last: JsonObject | None = None  # how this upstream writes a chunk
        self._usage_chunk: JsonObject | None = None
        self._begin()

    def _begin(self) -> None:
        self._calls = StreamedCalls(names=self._names)
        self._reply = CompletionAccumulator()  # all that the round says
        self._held: deque[_Part] = deque()  # chunks that wait for a name
        self._finish = ""  # why it ended, in upstream's words
        self._is_apart = False  # whether any text of it was shown, so that nothing need keep it apart
        self.ended = False

    @property
    def message(self) -> JsonObject:
        """All that this round says, whoever is meant; empty where it says nothing."""
        choices = self._reply.choices()
        return choices[0].message if choices else {}

    def _current(self) -> CalledRound:
        return CalledRound(names=self._names, message=self.message, finish=self._finish)

    @property
    def _spent(self) -> JsonObject | None:
        # Some servers tell it in each chunk: what the round says is not put together for that.
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
        del event  # it says nothing beside
        if self.ended:
            return b""
        self.ended = True
        self._calls.decide()
        shown = self._release()
        text, finish = self._ended_by("stop")
        # Of an upstream that does not say why it ended, nothing is said where nothing was taken out.
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
        if self.again:  # the reply goes on elsewhere
            self._reply.add({"usage": chunk.get("usage")})
            return b""
        key = "delta" if "delta" in choice else "message"
        delta = as_object(choice.get(key))
        self._last = chunk
        if self.rounds == 0 and not delta.get("tool_calls") and not choice.get("finish_reason"):
            self._reply.add(chunk)  # text: nearly all that is ever said
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
        """Show what waits for nothing any more, in the order of its coming."""
        held, shown = self._held, b""
        while held and all(call.own is not None for _, call in held[0].items):
            shown += self._show(held.popleft())
        return shown

    def _show(self, part: _Part) -> bytes:
        """Note a chunk, and return what of it the client is shown."""
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
            changed["logprobs"] = None  # some servers give those of calls, too
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
        """Decide how the round ends; return what is said at its end beside it, and why it ends.

        No reason: it is kept from the client, because another round follows.
        """
        self._finish = finish
        if not self.hides:
            return "", finish
        how = self._ending(said=any(says_something(choice.message) for choice in self.reply.choices()))
        return how.text, how.finish

    def _apart(self, content: Any) -> bytes:
        """Return what is shown before `content`, which a round says, because of what was said before it."""
        if not content or self._is_apart or not self.rounds:
            return b""
        self._is_apart = True
        choices = self.reply.choices()
        text = gap(choices[0].message.get("content"), content) if choices else ""
        return _event(self._chunk(text, "")) if text else b""

    def _made(self, text: str, finish: str) -> bytes:
        """Return an event of our own making: it says `text`, and why the reply ends."""
        shown, chunk = self._apart(text), self._chunk(text, finish)
        self._reply.add(chunk)
        return shown + _event(chunk)

    def _chunk(self, text: str, finish: str) -> JsonObject:
        """Note a chunk of our own making, of the shape that the stream's chunks have, and return it."""
        base: JsonObject = {"object": "chat.completion.chunk", "choices": []}
        if self._last is not None:
            base = {name: value for name, value in self._last.items() if name != "usage"}
        delta = {"content": text} if text else {}
        choice = {"index": 0, "delta": delta, "finish_reason": finish or None}
        chunk = self._as_first({**base, "choices": [choice]})
        self._note(chunk, delta, finish)
        return chunk

    def _aside(self, event: Event, chunk: JsonObject) -> bytes:
        """Read a chunk that says nothing of the reply itself: usage, an error, what a provider adds."""
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
        """Return a chunk as one of the first round's."""
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
    """Return the event that says `chunk`; in the form of `event`, where that has its data in one piece."""
    data = write(chunk)
    if event is None or event.data is None or event.raw.count(event.data) != 1:
        return b"data: %b\n\n" % data
    return event.raw.replace(event.data, data)

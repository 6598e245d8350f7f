"""The proxy's own tools: offers them beside the client's, and removes their calls from the replies that clients see.

How a stream is filtered:

    a block        is shown as it arrives; after a removed block, and in later rounds, it is renumbered
    the proxy's    calls are removed; the first event of a block has the complete name
    an end         of a round that another one follows is removed: `message_delta` and `message_stop`
    a later round  begins without `message_start`, and has the usage of all rounds so far
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct

from proxy.dialects import JsonObject, Message, OwnCalls, Request, ToolDefinition, ToolOffer
from proxy.dialects.jsontext import as_object, as_text, is_array, is_object, parsed, write
from proxy.dialects.messages.message import THINKING, UNFINISHED, MessagesMessage, is_call
from proxy.dialects.messages.reply import MessageReader, named_event, usage_of
from proxy.dialects.own_tools import STOPPED, BodyFilter, RoundEnding, StreamFilter, offer, schema_of
from proxy.dialects.sse import Event

CUT_OFF: Final = ("max_tokens", "model_context_window_exceeded", "refusal")
"""Values of `stop_reason` that may have cut off a call."""
ENDED: Final = "end_turn"
_LEAVES_ROOM: Final = (None, "auto", "any")  # types of `tool_choice` with which the model may call any tool


def leaves_room(request: Request) -> bool:
    """Tell whether the proxy may add its tools.

    It may not if the request forces a certain tool, forbids tools, or belongs to a thread. The provider would keep the
    tools for later requests of the thread, which do not pass through the proxy in full.
    """
    choice = request.parameters.get("tool_choice")
    wanted = choice.get("type") if is_object(choice) else choice
    return wanted in _LEAVES_ROOM and not is_object(request.parameters.get("thread"))


def add_tools(tools: bytes | None, own: Sequence[ToolDefinition]) -> ToolOffer:
    """Return the client's tools followed by the proxy's."""

    def define(tool: ToolDefinition, _: bool) -> bytes:
        return orjson.dumps({"name": tool.name, "description": tool.description, "input_schema": schema_of(tool)})

    return offer(tools, own, define)


# ------------------------------------------------------------------------------------- the calls


class MessagesRound(Struct, frozen=True, kw_only=True):
    """One answer of the upstream, with the calls of the proxy's tools separated from the others."""

    content: list[Any] = []  # its blocks
    finish: str = ""  # why it ended
    usage: JsonObject | None = None  # in the API's own form
    names: Collection[str] = frozenset()  # the proxy's tools

    @property
    def cut(self) -> bool:
        return self.finish in CUT_OFF

    @property
    def shown(self) -> list[Any]:
        """Its blocks without calls of the proxy's tools."""
        return [block for block in self.content if not self._is_own(block)]

    @property
    def says(self) -> bool:
        return reply_of(self.content).has_content

    @property
    def last(self) -> Message:
        return reply_of(self.shown)

    @property
    def calls(self) -> OwnCalls:
        """Its calls, separated, and the round as it can be sent back."""
        kept: list[Any] = []
        broken = False
        for block in self.content:
            if not self._is_own(block):
                kept.append(block)
            elif UNFINISHED in block or not block.get("id") or (self.cut and block is self.content[-1]):
                broken = True
            else:
                kept.append({**block, "input": as_object(block.get("input"))})
        message = reply_of(kept)
        own = tuple([call for call in message.calls if call.name in self.names])
        return OwnCalls(message=message, own=own, broken=broken, others=len(message.calls) > len(own))

    def _is_own(self, block: Any) -> bool:
        return is_call(block) and as_text(block.get("name")) in self.names


def reply_of(content: Sequence[Any]) -> MessagesMessage:
    """Return a reply with these blocks in stored form."""
    return MessagesMessage.as_stored({"role": "assistant", "content": content})


# -------------------------------------------------------------------------------- bodies on their way


class MessagesBodyFilter(BodyFilter[MessagesRound]):
    """Filters one reply on its way to the client. Each body holds one round of it."""

    _whole = ENDED
    _as_chat = staticmethod(usage_of)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._said: list[Any] = []  # the blocks of the rounds whose bodies the client does not see
        self._data: JsonObject = {}
        self._round = MessagesRound()
        self.last = self._round.last

    @property
    def _has_said(self) -> bool:
        return any(not (is_object(block) and block.get("type") in THINKING) for block in self._said)

    def _read(self, body: bytes) -> bool:
        self._data, self._round = as_object(parsed(body)), MessagesRound(names=self._names)
        if is_array(content := self._data.get("content")):
            usage, finish = self._data.get("usage"), as_text(self._data.get("stop_reason"))
            usage = usage if is_object(usage) else None
            self._round = MessagesRound(content=content, finish=finish, usage=usage, names=self._names)
        self.last = self._round.last
        return bool(self._round.content)

    def _begin(self) -> None:
        self._said += self._round.shown
        self._round = MessagesRound(names=self._names)

    def _shown(self, how: RoundEnding) -> bytes:
        said = [*self._round.shown, *([{"type": "text", "text": how.text}] if how.text else [])]
        self.last = reply_of(said)
        usage = self._spent
        shown = self._data | {"content": [*self._said, *said], "stop_reason": how.finish}
        return write(shown | ({"usage": usage} if usage is not None else {}))


# -------------------------------------------------------------------------------- streams on their way

_BLOCKS: Final = ("content_block_start", "content_block_delta", "content_block_stop")


class MessagesStreamFilter(StreamFilter[MessageReader]):
    """Filters one streamed reply on its way to the client, event by event."""

    _whole = ENDED
    _as_chat = staticmethod(usage_of)

    def __init__(self, names: Collection[str], hides_usage: bool) -> None:  # noqa: ARG002 - usage is always shown
        super().__init__(names)
        self.reply = MessageReader()
        self._next = 0  # the index of the next block for the client
        self._begin()

    def _begin(self) -> None:
        self._reply = MessageReader()  # the whole round, including what is hidden
        self._shown: dict[int, int | None] = {}  # each block's index as the client sees it; None: hidden
        self.ended = self._has_hidden = False

    def _current(self) -> MessagesRound:
        whole = self._reply
        return MessagesRound(
            content=whole.content, finish=whole.stop or "", usage=whole.spent or None, names=self._names
        )

    @property
    def last(self) -> Message:
        return self._current().last

    @property
    def hides(self) -> bool:
        return self.rounds > 0 or self._has_hidden

    def take(self, event: Event) -> bytes:
        data = event.value
        if not is_object(data) or (kind := data.get("type")) == "ping":
            return event.raw
        if kind == "error":
            self.said = True
            self.reply.add(data)
        self._reply.add(data)
        if self.again:  # another round follows
            return b""
        if kind == "message_start":
            return b"" if self.rounds else self._as_it_came(event, data)
        if kind in _BLOCKS and isinstance(data.get("index"), int):
            return self._block(event, data, kind)
        if kind == "message_delta":
            return self._end(event, data)
        return event.raw

    def give_up(self) -> bytes:
        self.next(may_ask=False)
        self.ended = True
        shown, delta = self._text(STOPPED), {"stop_reason": ENDED, "stop_sequence": None}
        shown += self._made({"type": "message_delta", "delta": delta, "usage": self._spent or {"output_tokens": 0}})
        return shown + named_event({"type": "message_stop"})

    def _as_it_came(self, event: Event, data: JsonObject) -> bytes:
        self.reply.add(data)
        return event.raw

    def _block(self, event: Event, data: JsonObject, kind: str) -> bytes:
        """Show an event of a block under the index by which the client knows the block."""
        index = data["index"]
        if kind == "content_block_start":
            begun = as_object(data.get("content_block"))
            if is_call(begun) and as_text(begun.get("name")) in self._names:
                self._shown[index], self._has_hidden = None, True
            else:
                known = self._shown[index] = self._next if self.hides else index
                self._next = max(self._next, known + 1)
        known = self._shown.get(index, None if self.hides else index)  # without a start: unchanged if nothing is hidden
        if known is None:
            return b""
        self.said = True
        if known == index:
            return self._as_it_came(event, data)
        return self._made({**data, "index": known})

    def _end(self, event: Event, data: JsonObject) -> bytes:
        """Decide how the round ends, if this event reports the end."""
        if self._reply.stop is None or self.ended:
            return event.raw if not self.rounds else b""
        self.ended = True
        if not self.hides:
            self.said = True
            return self._as_it_came(event, data)
        said = any(message.has_content for message in self.reply.replies.messages)
        how = self._ending(said=said)
        if how.again:
            return b""
        told = {**data, "delta": {**as_object(data.get("delta")), "stop_reason": how.finish}}
        if is_object(usage := data.get("usage")) and (spent := self._spent) is not None:
            told["usage"] = {name: spent.get(name, value) for name, value in usage.items()}
        self.said = True
        return (self._text(how.text) if how.text else b"") + self._made(told)

    def _made(self, data: JsonObject) -> bytes:
        """Record an event of the proxy's own, and return it."""
        self.reply.add(data)
        return named_event(data)

    def _text(self, text: str) -> bytes:
        """Return the events of a text block of the proxy's own."""
        index, self._next = self._next, self._next + 1
        begun: JsonObject = {
            "type": "content_block_start",
            "index": index,
            "content_block": {"type": "text", "text": ""},
        }
        said = {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}}
        shown = [self._made(data) for data in (begun, said, {"type": "content_block_stop", "index": index})]
        # It becomes the last block of the round, so that it is part of the reply when that is sent back.
        at = max(self._shown, default=-1) + 1
        self._reply.add({"type": "content_block_start", "index": at, "content_block": {"type": "text", "text": text}})
        return b"".join(shown)

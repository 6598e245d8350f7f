"""What a client is shown of a streamed reply in which the proxy answers the calls of its own tools.

A reply may take several rounds: one that calls nothing but the proxy's tools is followed by another one, and the client
sees one reply.

    a block        is shown as it comes; behind one of ours, and in a later round, it is numbered anew
    ours           is taken out: its name is whole when it begins
    an end         of a round that another one follows is taken out: `message_delta` and `message_stop`
    a later round  begins unseen, and its usage is that of all rounds so far

What cannot be read, and what says nothing of a reply, is shown as it came. `reply` is the reply as the client has it.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

from proxy.dialects import JsonObject, Message
from proxy.dialects.jsontext import is_object, is_one_of, write
from proxy.dialects.messages.message import is_call
from proxy.dialects.messages.own_tools import ENDED, MessagesRound
from proxy.dialects.messages.reply import MessageReader, named_event, usage_of
from proxy.dialects.own_tools import STOPPED, StreamFilter
from proxy.dialects.sse import Event

_BLOCKS: Final = ("content_block_start", "content_block_delta", "content_block_stop")


class MessagesStreamFilter(StreamFilter[MessageReader]):
    """One streamed reply on its way to the client, event by event."""

    _whole = ENDED
    _as_chat = staticmethod(usage_of)

    def __init__(self, names: Collection[str], hides_usage: bool) -> None:  # noqa: ARG002 - usage is always shown
        super().__init__(names)
        self.reply = MessageReader()
        self._next = 0  # the index of the next block that the client is shown
        self._begin()

    def _begin(self) -> None:
        self._reply = MessageReader()  # all that the round says
        self._shown: dict[int, int | None] = {}  # by index of a block, the one that the client is shown; None: hidden
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
        kind = data.get("type") if is_object(data) else None
        if not is_object(data) or kind == "ping":
            return event.raw
        if kind == "error":
            self.said = True
            self.reply.add(data)
        if self.again:  # the reply goes on elsewhere
            self._reply.add(data)
            return b""
        self._reply.add(data)
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
        return self._text(STOPPED) + self._closed(ENDED) + named_event({"type": "message_stop"})

    def _as_it_came(self, event: Event, data: JsonObject) -> bytes:
        self.reply.add(data)
        return event.raw

    def _block(self, event: Event, data: JsonObject, kind: str) -> bytes:
        """Show an event of a block, under the index by which the client knows it."""
        index = data["index"]
        if kind == "content_block_start":
            begun = data.get("content_block")
            if is_object(begun) and is_call(begun) and is_one_of(begun.get("name"), self._names):
                self._shown[index], self._has_hidden = None, True
            else:
                known = self._shown[index] = self._next if self.hides else index
                self._next = max(self._next, known + 1)
        known = self._shown.get(index, None if self.hides else index)  # of a block that never began: as it came
        if known is None:
            return b""
        self.said = True
        if known == index:
            return self._as_it_came(event, data)
        return self._made({**data, "index": known})

    def _end(self, event: Event, data: JsonObject) -> bytes:
        """Decide how the round ends, where the event says that it does."""
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
        delta, usage = data.get("delta"), data.get("usage")
        told = {**data, "delta": {**(delta if is_object(delta) else {}), "stop_reason": how.finish}}
        if is_object(usage) and (spent := self._spent) is not None:
            told["usage"] = {name: spent.get(name, value) for name, value in usage.items()}
        self.said = True
        return (self._text(how.text) if how.text else b"") + self._made(told)

    def _made(self, data: JsonObject) -> bytes:
        """Return an event of our own making, and note it."""
        self.reply.add(data)
        return b"event: %b\ndata: %b\n\n" % (str(data["type"]).encode(), write(data))

    def _text(self, text: str) -> bytes:
        """Return the events of a block of text that the model did not say."""
        index, self._next = self._next, self._next + 1
        shown = self._made(
            {"type": "content_block_start", "index": index, "content_block": {"type": "text", "text": ""}}
        )
        shown += self._made(
            {"type": "content_block_delta", "index": index, "delta": {"type": "text_delta", "text": text}}
        )
        # It is what the round says last: the reply is sent back with it.
        at = max(self._shown, default=-1) + 1
        self._reply.add({"type": "content_block_start", "index": at, "content_block": {"type": "text", "text": text}})
        return shown + self._made({"type": "content_block_stop", "index": index})

    def _closed(self, stop: str) -> bytes:
        delta = {"stop_reason": stop, "stop_sequence": None}
        return self._made({"type": "message_delta", "delta": delta, "usage": self._spent or {"output_tokens": 0}})

"""The proxy's own tools: offers them beside the client's, and removes their calls from the replies that clients see.

The client sees one response with the items of all rounds, except the calls of the proxy's tools and a reasoning item
right before such a call.

In a stream, the first event of an item names the tool. It decides whether the item is shown. After a removed item,
later events are renumbered.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct, structs

from proxy.dialects import Call, JsonObject, Message, OwnCalls, Request, ToolDefinition, ToolOffer
from proxy.dialects.jsontext import (
    RawFields,
    as_object,
    as_text,
    is_object,
    is_object_text,
    read,
    with_field,
    with_value,
    write,
)
from proxy.dialects.own_tools import STOPPED, BodyFilter, RoundEnding, StreamFilter, offer, schema_of, unused_id
from proxy.dialects.responses.items import Item, Placed, is_whole, kind_of, turn_of
from proxy.dialects.responses.reply import OPENINGS, WHOLE, ResponseReader, event_of, item_events, read_body, usage_of
from proxy.dialects.sse import Event

# ------------------------------------------------------------------------------------- the offer

_LEAVES_ROOM: Final = (None, "auto", "required")  # values of `tool_choice` with which the model may call any tool


def leaves_room(request: Request) -> bool:
    """Tell whether the proxy may add its tools.

    It may not if the request forces a certain tool, forbids tools, or is answered in the background.
    """
    told = request.parameters
    return told.get("tool_choice") in _LEAVES_ROOM and told.get("background") is not True


def add_tools(tools: bytes | None, own: Sequence[ToolDefinition]) -> ToolOffer:
    """Return the client's tools followed by the proxy's."""
    return offer(tools, own, _definition, function_of=lambda tool: tool if tool.get("type") == "function" else None)


def _definition(tool: ToolDefinition, strict: bool) -> bytes:
    """Return the JSON text of a tool. `strict` is always included, because it defaults to true."""
    named = {"type": "function", "name": tool.name, "description": tool.description}
    return orjson.dumps({**named, "parameters": schema_of(tool, strict=strict), "strict": strict})


# ------------------------------------------------------------------------------------- one round


class ItemRound(Struct, kw_only=True, eq=False):
    """One answer of the upstream."""

    names: Collection[str]  # the proxy's tools
    turn: Item = Item(turn_of([]))
    usage: JsonObject | None = None  # as the API gives it
    cut: bool = False  # whether the response is incomplete

    finish = ""  # a response does not say why it ended

    @property
    def says(self) -> bool:
        return self.turn.has_content

    def is_own(self, item: JsonObject) -> bool:
        return kind_of(item) == "function_call" and as_text(item.get("name")) in self.names

    @property
    def shown(self) -> Item:
        return self.turn.keeping(lambda each: None if self.is_own(each.item) else each.raw).with_paired_reasoning()

    @property
    def calls(self) -> OwnCalls:
        """Its calls, separated. The proxy's are completed for resending: an id, and arguments as a JSON object."""
        ours = [at for at, item in enumerate(self.turn.items) if self.is_own(item)]
        broken = {at for at in ours if self.cut and not is_whole(self.turn.items[at])}
        taken = [call.id for call in self.turn.calls]
        own: dict[int, Call] = {}
        for at, call in self.turn.placed_calls:
            if at in ours and at not in broken:
                own[at] = call
                if not call.id or taken.count(call.id) > 1:
                    own[at] = structs.replace(call, id=unused_id(at, taken))
                    taken.append(own[at].id)

        def complete(each: Placed) -> bytes | None:
            if each.at not in own:
                return None if each.at in broken else each.raw
            raw, name = each.raw, own[each.at].id
            if each.item.get("call_id") != name:
                raw = with_value(raw, "call_id", name)
            return raw if is_object_text(each.item.get("arguments")) else with_value(raw, "arguments", "{}")

        message = self.turn.keeping(complete).with_paired_reasoning()
        others = len(self.turn.calls) > len(ours)
        return OwnCalls(message=message, own=tuple(own.values()), broken=bool(broken), others=others)


def _has_text(raws: Sequence[bytes]) -> bool:
    return bool(Item(turn_of(raws)).text)


def _message(text: str, response: Any) -> JsonObject:
    """Return an output item of the proxy's own for the end of a response."""
    return {
        "type": "message",
        "id": f"msg_proxy_{as_text(as_object(response).get('id'))[-32:]}",
        "status": "completed",
        "role": "assistant",
        "content": [{"type": "output_text", "text": text, "annotations": [], "logprobs": []}],
    }


# -------------------------------------------------------------------------------- bodies on their way


class ItemBodyFilter(BodyFilter[ItemRound]):
    """Filters one reply on its way to the client. Each body holds one round of it."""

    _as_chat = staticmethod(usage_of)

    def __init__(self, names: Collection[str]) -> None:
        super().__init__(names)
        self._said: list[bytes] = []  # the items that earlier rounds showed
        self._body = b""
        self._round = ItemRound(names=names)
        self.last = self._round.turn

    @property
    def _has_said(self) -> bool:
        return _has_text(self._said)

    def _read(self, body: bytes) -> bool:
        self._body, self._round = body, ItemRound(names=self._names)
        try:
            data, found = read(body), read_body(body).messages
        except ValueError:
            data, found = None, ()
        if found and isinstance(found[0], Item):
            self._round.turn = found[0]
        told = as_object(data)
        self._round.usage = told["usage"] if is_object(told.get("usage")) else None
        self._round.cut = told.get("status") == "incomplete"
        self.last = self._round.shown
        return is_object(data)

    def _begin(self) -> None:
        self._said += self._round.shown.raws
        self._round = ItemRound(names=self._names)

    def _shown(self, how: RoundEnding) -> bytes:
        raws = self._round.shown.raws
        if how.text:
            raws.append(write(_message(how.text, read(self._body))))
        self.last = Item(turn_of(raws))
        output = b"[%b]" % b",".join([*self._said, *raws])
        body = with_field(self._body, RawFields(self._body), "output", output)
        return with_field(body, RawFields(body), "usage", write(self._spent)) if self.rounds else body


# -------------------------------------------------------------------------------- streams on their way


class ItemStreamFilter(StreamFilter[ResponseReader]):
    """Filters one streamed reply on its way to the client, event by event."""

    _as_chat = staticmethod(usage_of)

    def __init__(self, names: Collection[str], hides_usage: bool) -> None:
        super().__init__(names)
        del hides_usage  # usage is always shown
        self.reply = ResponseReader()
        self._said: list[bytes] = []
        self._round = ItemRound(names=self._names)
        self._begin()
        self._shown_items = 0  # items of all rounds that the client has seen
        self._number = 0  # the `sequence_number` of the next event
        self._changed = False  # whether anything was removed
        self._response: JsonObject = {}  # the last response object of the upstream
        self._ours: list[JsonObject] = []  # items of the proxy's own

    def _begin(self) -> None:
        self._said += self._round.shown.raws
        self._reply = ResponseReader()  # the whole round, including what is hidden
        self._places: dict[int, int | None] = {}  # each item's index as the client sees it; None: hidden
        self._round = ItemRound(names=self._names)
        self.ended = False
        self._end = self._closing = b""

    def _current(self) -> ItemRound:
        return self._round

    @property
    def last(self) -> Message:
        self._read_round()
        return Item(turn_of([*self._round.shown.raws, *map(write, self._ours)]))

    @property
    def hides(self) -> bool:
        return self.rounds > 0 or None in self._places.values()

    def take(self, event: Event) -> bytes:
        data = event.value
        if not is_object(data):  # a comment, or something unreadable
            self.said = True
            return event.raw
        kind = data.get("type")
        if kind in WHOLE:
            return self.end(event) + self._closing
        self._reply.take(event)
        if kind in OPENINGS:
            if self.rounds:
                return b""
            return self._show(event, data)
        self.said = True
        index = data.get("output_index")
        if not isinstance(index, int):
            return self._show(event, data)
        if index not in self._places:
            own = self._round.is_own(as_object(data.get("item")))
            self._places[index] = None if own else self._shown_items
            self._shown_items += not own
        place = self._places[index]
        if place is None:
            self._changed = True
            return b""
        return self._show(event, {**data, "output_index": place} if place != index else data)

    def end(self, event: Event | None = None) -> bytes:
        if self.ended:
            return b""
        self.ended = True
        if event is not None:
            self._reply.take(event)
        self._read_round()
        data = as_object(None if event is None else event.value)
        if event is not None and is_object(response := data.get("response")):
            self._response, self._end = response, event.raw
            self._round.usage = response["usage"] if is_object(response.get("usage")) else None
            self._round.cut = data.get("type") == "response.incomplete"
        if self._reply.failed or not self._end:
            self._closing = self._end
            if event is not None:
                self.reply.take(event)
            return b""
        how = self._ending(said=_has_text(self._said))
        self.again = self.hides and how.again
        if self.again:
            return b""
        shown = self._made(how.text) if self.hides and how.text else b""
        self._closing = self._closed(event, data) if event is not None else b""
        return shown

    def closing(self, tail: bytes) -> bytes:
        return self._closing + tail.removeprefix(self._end) if self._end else tail

    def give_up(self) -> bytes:
        kind = "response.completed"
        self.next(may_ask=False)
        self.ended = True
        shown = self._made(STOPPED)
        return shown + self._closed(None, {"type": kind, "response": self._response})

    def _read_round(self) -> None:
        found = self._reply.replies.messages
        if found and isinstance(found[0], Item):
            self._round.turn = found[0]

    def _closed(self, event: Event | None, data: JsonObject) -> bytes:
        """Return the event that ends the stream, with the output that the client has seen."""
        if event is not None and not self._changed and not self.rounds:
            self.reply.take(event)
            return event.raw
        shown = [orjson.loads(raw) for raw in (*self._said, *self._round.shown.raws)]
        output = [*shown, *self._ours]
        told = {**data["response"], "output": output, "usage": self._spent}
        return self._show(event, {**data, "response": told})

    def _made(self, text: str) -> bytes:
        """Return events of the proxy's own that carry `text`."""
        self.said = self._changed = True
        item = _message(text, self._response)
        self._ours.append(item)
        place = self._shown_items
        self._shown_items += 1
        return b"".join([self._show(None, {"type": name, **data}) for name, data in item_events(place, item)])

    def _show(self, event: Event | None, data: JsonObject) -> bytes:
        """Record an event, and return it in the form for the client."""
        number = data.get("sequence_number")
        if event is not None and not self._changed and not self.rounds:
            self._number = number + 1 if isinstance(number, int) else self._number + 1
            self.reply.take(event)
            return event.raw
        numbered = {**data, "sequence_number": self._number}
        self._number += 1
        raw = event_of(str(data.get("type")), numbered)
        self.reply.take(Event(raw=raw, data=write(numbered)))
        return raw

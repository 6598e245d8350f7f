"""The proxy's own tools: offered beside the client's, and their calls taken out of what the client is shown.

A reply may take several rounds: one that calls nothing but the proxy's tools is followed by another one, and the
client sees one response. It has what all rounds said: without the calls, and without a reasoning item right before one.

Of a stream an item is shown, or not, from its first event on, which names the tool. Where something was left out,
the events after it are numbered anew.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import lru_cache
from typing import Any, Final

import orjson
from msgspec import Struct, structs

from proxy.dialects import Call, JsonObject, Message, OwnCalls, Request, ToolDefinition, ToolOffer
from proxy.dialects.jsontext import RawFields, added, is_object, is_one_of, read, with_field, write
from proxy.dialects.own_tools import STOPPED, RoundCalls, RoundEnding, offer, schema_of
from proxy.dialects.responses.items import Item, Placed, kind_of, turn_of
from proxy.dialects.responses.reply import ResponseReader, event_of, item_events, read_body, usage_of
from proxy.dialects.sse import Event

# ------------------------------------------------------------------------------------- the offer

_LEAVES_ROOM: Final = (None, "auto", "required")  # what `tool_choice` says where the model may call any tool


def leaves_room(request: Request) -> bool:
    """Tell whether a request may get tools: not one that chooses a tool itself or none."""
    return request.parameters.get("tool_choice") in _LEAVES_ROOM


def add_tools(tools: bytes | None, own: Sequence[ToolDefinition]) -> ToolOffer:
    """Return the client's tools with these behind them."""
    return offer(tools, own, _definition, function_of=lambda tool: tool if tool.get("type") == "function" else None)


@lru_cache
def _definition(tool: ToolDefinition, strict: bool) -> bytes:
    """Return the JSON text of a tool. What is not called strict is so by default."""
    named = {"type": "function", "name": tool.name, "description": tool.description}
    return orjson.dumps({**named, "parameters": schema_of(tool, strict=strict), "strict": strict})


# ------------------------------------------------------------------------------------- one round


class _Round(Struct, kw_only=True, eq=False):
    """One answer of the upstream's."""

    names: Collection[str]  # the proxy's tools
    turn: Item = Item(turn_of([]))
    usage: JsonObject | None = None  # as the API gives it
    cut: bool = False  # whether the response is incomplete

    @property
    def own(self) -> tuple[int, ...]:
        """Places of the items that the proxy answers."""
        return tuple(
            [at for at, item in enumerate(self.turn.items) if self._is_own(item) and not self._is_broken(item)]
        )

    @property
    def broken(self) -> tuple[int, ...]:
        """Places of calls of the proxy's tools that broke off."""
        return tuple([at for at, item in enumerate(self.turn.items) if self._is_own(item) and self._is_broken(item)])

    @property
    def others(self) -> bool:
        """Whether it calls anything that the client answers."""
        return len(self.turn.calls) > len(self.own) + len(self.broken)

    def _is_own(self, item: JsonObject) -> bool:
        return kind_of(item) == "function_call" and is_one_of(item.get("name"), self.names)

    def _is_broken(self, item: JsonObject) -> bool:
        return self.cut and not Item(turn_of([write(item)])).without_unfinished_calls().items

    @property
    def shown(self) -> Item:
        """What the client is shown of it."""
        return self.turn.keeping(lambda each: None if self._is_own(each.item) else each.raw).with_paired_reasoning()

    @property
    def calls(self) -> OwnCalls:
        """The calls, told apart, each of the proxy's with what a request needs: an id, and a JSON object."""
        placed = {at: call for at, call in self.turn.placed_calls if at in self.own}
        taken = [call.id for call in self.turn.calls]
        answered: list[Call] = []
        named: dict[int, str] = {}
        for at, call in placed.items():
            name = call.id
            if not name or taken.count(name) > 1:
                name = f"call_{at}"
                while name in taken:
                    name += "_"
                taken.append(name)
            named[at] = name
            answered.append(structs.replace(call, id=name))

        def complete(each: Placed) -> bytes | None:
            if each.at in self.broken:
                return None
            if each.at not in named:
                return each.raw
            item = Item(each.raw)
            if each.item.get("call_id") != named[each.at]:
                item = item.replacing("call_id", named[each.at])
            return item.raw if _is_json_object(each.item.get("arguments")) else item.replacing("arguments", "{}").raw

        message = self.turn.keeping(complete).with_paired_reasoning()
        return OwnCalls(message=message, own=tuple(answered), others=self.others)

    def ending(self, *, later: bool, said: bool, may_ask: bool) -> RoundEnding:
        """Decide how it ends; see `RoundCalls.ending`. A response says nothing of why."""
        told = RoundCalls(
            own=bool(self.own),
            broken=bool(self.broken),
            others=self.others,
            says=self.turn.has_content,
            cut=self.cut,
            finish="",
            whole="",
        )
        return told.ending(later=later, said=said, may_ask=may_ask)


def _is_json_object(text: Any) -> bool:
    try:
        return is_object(orjson.loads(text))
    except (orjson.JSONDecodeError, TypeError):
        return False


def _message(text: str, response: Any) -> JsonObject:
    """Return an output item of our own, for the end of a response."""
    name = response.get("id") if is_object(response) else None
    part: JsonObject = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {
        "type": "message",
        "id": f"msg_proxy_{name[-32:] if isinstance(name, str) else ''}",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }


def _round_of(names: Collection[str], body: bytes, data: Any) -> _Round:
    """Return what a body says; a round without items where it is no response."""
    try:
        found = read_body(body)
    except ValueError:
        return _Round(names=names)
    turn = found.messages[0] if found.messages else None
    return _Round(
        names=names,
        turn=turn if isinstance(turn, Item) else Item(turn_of([])),
        usage=data.get("usage") if is_object(data) and is_object(data.get("usage")) else None,
        cut=is_object(data) and data.get("status") == "incomplete",
    )


# -------------------------------------------------------------------------------- bodies on their way


class ItemBodyFilter:
    """One reply on its way to the client, made of bodies that each hold one round of it."""

    def __init__(self, names: Collection[str]) -> None:
        """Take calls of the tools `names` out."""
        self._names = names
        self.rounds = 0
        self._said: list[bytes] = []  # what the rounds before this one showed
        self._may_ask = True
        self._usage_before: JsonObject | None = None
        self._body = b""
        self._round = _Round(names=names)
        self.again = False
        self.last: Message = Item(turn_of([]))

    @property
    def calls(self) -> OwnCalls:
        return self._round.calls

    @property
    def usage(self) -> JsonObject | None:
        return usage_of(added(self._usage_before, self._round.usage))

    def take(self, body: bytes) -> bytes:
        try:
            data = read(body)
        except ValueError:
            data = None
        self._body, self._round = body, _round_of(self._names, body, data)
        current = self._round
        self.last = current.shown
        if not self.rounds and not current.own and not current.broken:
            return body
        said = bool(Item(turn_of(self._said)).text)
        how = current.ending(later=bool(self.rounds), said=said, may_ask=self._may_ask)
        self.again = how.again
        return b"" if how.again else self._shown(current.shown, how.text)

    def next(self, *, may_ask: bool) -> None:
        self._usage_before = added(self._usage_before, self._round.usage)
        self._said += self._round.shown.raws
        self._round = _Round(names=self._names)
        self.rounds += 1
        self._may_ask, self.again = may_ask, False

    def give_up(self) -> bytes:
        self.next(may_ask=False)
        return self._shown(Item(turn_of([])), STOPPED)

    def _shown(self, last: Item, text: str) -> bytes:
        """Return the reply that ends with the round `last` and a text of ours, in the body of that round."""
        raws = last.raws
        if text:
            raws.append(write(_message(text, read(self._body))))
        self.last = Item(turn_of(raws))
        output = b"[%b]" % b",".join([*self._said, *raws])
        usage = write(added(self._usage_before, self._round.usage)) if self.rounds else None
        body = self._body
        for name, value in (("output", output), ("usage", usage)):
            if value is not None:
                body = with_field(body, RawFields(body), name, value)
        return body


# -------------------------------------------------------------------------------- streams on their way

_ENDS: Final = ("response.completed", "response.incomplete", "response.failed")
_OPENINGS: Final = ("response.created", "response.in_progress", "response.queued")


class ItemStreamFilter:
    """One streamed reply on its way to the client, event by event."""

    def __init__(self, names: Collection[str], hides_usage: bool) -> None:
        """Take calls of the tools `names` out; usage is always told."""
        del hides_usage
        self._names = frozenset(names)
        self.reply = ResponseReader()
        self.said = False
        self.rounds = 0
        self._may_ask = True
        self._said: list[bytes] = []
        self._usage_before: JsonObject | None = None
        self._begin()
        self._shown_items = 0  # items of all rounds that the client was shown
        self._number = 0  # the `sequence_number` of the next event
        self._changed = False  # whether anything was left out
        self._response: JsonObject = {}  # the last response as upstream gave it
        self._ours: list[JsonObject] = []  # items of our own making

    def _begin(self) -> None:
        self._whole = ResponseReader()
        self._places: dict[int, int | None] = {}  # where the client was shown each item of the round; None: not at all
        self._round = _Round(names=self._names)
        self.ended = self.again = False
        self._end = self._closing = b""

    @property
    def calls(self) -> OwnCalls:
        return self._round.calls

    @property
    def last(self) -> Message:
        self._read_round()
        return Item(turn_of([*self._round.shown.raws, *map(write, self._ours)]))

    @property
    def hides(self) -> bool:
        return self.rounds > 0 or None in self._places.values()

    @property
    def usage(self) -> JsonObject | None:
        return usage_of(added(self._usage_before, self._round.usage))

    def next(self, *, may_ask: bool) -> None:
        self._usage_before = added(self._usage_before, self._round.usage)
        self._said += self._round.shown.raws
        self.rounds += 1
        self._may_ask = may_ask
        self._begin()

    def take(self, event: Event) -> bytes:
        data = event.value
        if not is_object(data):  # a comment, or something unreadable
            self.said = True
            return event.raw
        kind = data.get("type")
        if kind in _ENDS:
            return self.end(event) + self._closing
        self._whole.take(event)
        if kind in _OPENINGS:
            if self.rounds:
                return b""
            return self._show(event, data)
        self.said = True
        index = data.get("output_index")
        if not isinstance(index, int):
            return self._show(event, data)
        if index not in self._places:
            item = data.get("item")
            own = is_object(item) and kind_of(item) == "function_call" and is_one_of(item.get("name"), self._names)
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
            self._whole.take(event)
        self._read_round()
        data: Any = None if event is None else event.value
        response = data.get("response") if is_object(data) else None
        if event is not None and is_object(data) and is_object(response):
            self._response, self._end = response, event.raw
            self._round.usage = response["usage"] if is_object(response.get("usage")) else None
            self._round.cut = data.get("type") == "response.incomplete"
        if self._whole.failed or not self._end:
            self._closing = self._end
            if event is not None:
                self.reply.take(event)
            return b""
        said = bool(Item(turn_of(self._said)).text)
        how = self._round.ending(later=self.rounds > 0, said=said, may_ask=self._may_ask)
        if self.hides and how.again:
            self.again = True
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
        """Note what the round said as far as it has come."""
        found = self._whole.replies.messages
        if found and isinstance(found[0], Item):
            self._round.turn = found[0]

    def _closed(self, event: Event | None, data: JsonObject) -> bytes:
        """Return the event that ends the stream: with what the client was shown."""
        if event is not None and not self._changed and not self.rounds:
            self.reply.take(event)
            return event.raw
        shown = [orjson.loads(raw) for raw in (*self._said, *self._round.shown.raws)]
        output = [*shown, *self._ours]
        usage = added(self._usage_before, self._round.usage)
        return self._show(event, {**data, "response": {**data["response"], "output": output, "usage": usage}})

    def _made(self, text: str) -> bytes:
        """Return events of our own making, which say `text`."""
        self.said = self._changed = True
        item = _message(text, self._response)
        self._ours.append(item)
        place = self._shown_items
        self._shown_items += 1
        return b"".join([self._show(None, {"type": name, **data}) for name, data in item_events(place, item)])

    def _show(self, event: Event | None, data: JsonObject) -> bytes:
        """Note an event, and return it as the client is shown it."""
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

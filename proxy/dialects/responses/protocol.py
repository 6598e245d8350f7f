"""The rules of the Responses API about calls and reasoning, the repair of violations, and the API as a dialect.

    - A call has a `call_id` that no other call of its turn has.
    - Each call is answered before the model's next turn, by one output of its own type. Other items may stand between.
      A call with `async: true` may be answered at any later time, or not yet.
    - A reasoning item is followed by another item of the model.
    - No two items have the same id.

Source: the API's error messages ("No tool output found for function call …", "No tool call found for function call
output with call_id …", "Item 'rs_…' of type 'reasoning' was provided without its required following item.",
"Duplicate item found with id …").

A reference (`item_reference`) may stand for a call or a result. So if a turn holds one, its results are left unchanged.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, Final, cast

from proxy.dialects.base import (
    NO_RESULT,
    Dialect,
    Message,
    ReplySide,
    RequestSide,
    RulesWalk,
    Span,
    SpokenRole,
    joined_spans,
)
from proxy.dialects.chat.completion import error_words
from proxy.dialects.chat.refusals import overflow_of
from proxy.dialects.jsontext import write
from proxy.dialects.responses import own_tools, reply, request
from proxy.dialects.responses.canonical import canonical
from proxy.dialects.responses.items import Item, Placed, call_id_of, is_call, kind_of, turn_of

_FILLED: Final = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
"""Calls for which a result can be made up, and the type of that result."""
_NOT_THEIR_OWN: Final = frozenset({"item_reference", "local_shell_call_output"})
"""Items whose `id` is, or may be, the id of another item."""


class ItemProblem(StrEnum):
    """What can be wrong with an entry."""

    MISSING = "tool call without a result"
    ORPHAN = "tool result without a call"
    SECOND = "second result of a tool call"
    NAMELESS = "tool call without an id"
    TWICE = "tool call with the id of another one in its turn"
    ALONE = "reasoning without the item after it"
    SAME_ID = "item with the id of another one"


class _ItemWalk(RulesWalk):
    """Repairs entries: inserts missing results, and leaves out everything else that breaks the rules."""

    def __init__(self, entries: Sequence[Item]) -> None:
        super().__init__()
        self._ids: set[str] = set()
        self._open: dict[str, str] = {}  # the calls that wait for a result, and its type
        self._running: dict[str, str] = {}  # the same for `async` calls, whose results the model does not wait for
        self._known: Collection[str] = ()  # the ids of the last turn's calls
        self._answered: set[str] = set()
        self._refers = False
        self._last = 0  # length of `messages` after the last turn and its results
        for at, entry in enumerate(entries):
            if entry.role == "assistant":
                self._fill(at)
                self._turn(at, entry)
            elif entry.is_result:
                self._result(at, entry)
            else:
                self._keep_unique(at, entry)
        self._fill(len(entries))

    def _turn(self, at: int, entry: Item) -> None:
        seen: set[str] = set()
        self._answered = set()
        self._refers = any(kind_of(item) == "item_reference" for item in entry.items)

        def sound(each: Placed) -> bytes | None:
            if not is_call(each.item):
                return each.raw
            name = call_id_of(each.item)
            if not name or name in seen:
                self.problems.append((at, ItemProblem.TWICE if name else ItemProblem.NAMELESS))
                return None
            seen.add(name)
            if each.kind in _FILLED:
                waiting = self._running if each.item.get("async") is True else self._open
                waiting[name] = _FILLED[each.kind]
            return each.raw

        made = entry.keeping(sound)
        paired = made.with_paired_reasoning()
        if paired is not made:
            self.problems.append((at, ItemProblem.ALONE))
        unique = self._unique(at, paired)
        if unique.items:
            self.keep(at if unique is entry else None, unique)
        self._known = seen
        self._last = len(self.messages)

    def _result(self, at: int, entry: Item) -> None:
        name = entry.answers or ""
        wanted = self._open.get(name) or self._running.get(name)
        if name in self._answered:
            self.problems.append((at, ItemProblem.SECOND))
        elif wanted not in {None, entry.kind} or not (self._refers or name in self._known or name in self._running):
            self.problems.append((at, ItemProblem.ORPHAN))
        else:
            self._answered.add(name)
            self._open.pop(name, None)
            self._running.pop(name, None)
            self._keep_unique(at, entry)
            self._last = len(self.messages)

    def _fill(self, at: int) -> None:
        """Insert a text for each result that is missing before the next turn."""
        missing = [result(name, kind, NO_RESULT) for name, kind in self._open.items()]
        self.problems += [(max(0, at - 1), ItemProblem.MISSING) for _ in missing]
        self.messages[self._last : self._last] = missing
        self.sources[self._last : self._last] = [None] * len(missing)
        self._open = {}

    def _unique(self, at: int, entry: Item) -> Item:
        """Return an entry without the ids that earlier items already have."""

        def unique(each: Placed) -> bytes | None:
            name = each.item.get("id")
            if not isinstance(name, str) or not name or each.kind in _NOT_THEIR_OWN:
                return each.raw
            if name not in self._ids:
                self._ids.add(name)
                return each.raw
            self.problems.append((at, ItemProblem.SAME_ID))
            return None if each.kind == "reasoning" else Item(each.raw).without("id").raw

        return entry.keeping(unique)

    def _keep_unique(self, at: int, entry: Item) -> None:
        unique = self._unique(at, entry)
        self.keep(at if unique is entry else None, unique)


def result(call: str, kind: str, text: str) -> Item:
    """Return a result of this type for the call with this id."""
    return Item.as_stored({"type": kind, "call_id": call, "output": text})


class ResponsesDialect(Dialect):
    """The Responses API."""

    name: ClassVar[str] = "responses"
    message: ClassVar[type[Message]] = Item
    cures: ClassVar[Mapping[StrEnum, str]] = {ItemProblem.MISSING: "a result was put in"}
    requests: ClassVar[RequestSide] = RequestSide(
        path="/responses",
        parse=request.parse_responses_request,
        compose=request.compose,
        leaves_room=own_tools.leaves_room,
        add_tools=own_tools.add_tools,
        decides_caching=lambda fields: "prompt_cache_options" in fields,
        overflow_of=overflow_of,
        state_fields=request.STATE_FIELDS,
        resolved=request.resolved,
        opening_error=reply.opening_error,
    )
    replies: ClassVar[ReplySide] = ReplySide(
        read=reply.read_body,
        reader=reply.ResponseReader,
        ends=reply.ENDS,
        body_filter=own_tools.ItemBodyFilter,
        stream_filter=own_tools.ItemStreamFilter,
        repeat=reply.made_answer,
        repeat_id=reply.answer_id,
        calling=reply.DONE,
        error_words=error_words,
        error_body=lambda error: write(error.body()),
        error_event=reply.error_event,
    )

    def spoken(self, role: SpokenRole, text: str) -> Item:
        if role != "assistant":
            return Item.of({"type": "message", "role": role, "content": text})
        said = {"type": "message", "role": role, "content": [{"type": "output_text", "text": text}]}
        return Item(turn_of([write(said)]))

    def result(self, call: str, text: str) -> Item:
        return result(call, "function_call_output", text)

    def canonical(self, message: Message) -> bytes:
        return canonical(cast("Item", message))

    def earlier_canonicals(self, message: Message) -> Sequence[bytes]:
        return (canonical(cast("Item", message), loosely=False),)

    def spans(self, messages: Sequence[Message]) -> tuple[Span, ...]:
        # A span is a turn and everything up to its last result before the next turn.
        found: list[Span] = []
        position = number = 0
        while position < len(messages):
            start, first = position, messages[position]
            position += 1
            if first.role == "user":
                number += 1
            waiting = {call.id for call in first.calls} if first.role == "assistant" else set[str]()
            at, users = position, 0
            while waiting and at < len(messages) and messages[at].role != "assistant":
                users += messages[at].role == "user"
                at += 1
                answered = messages[at - 1].answers
                if answered in waiting:
                    number, users = number + users, 0
                    position = at
            found.append(Span(start=start, stop=position, round=number))
        return joined_spans(found, [message.programs for message in cast("Sequence[Item]", messages)])

    def walk(self, messages: Sequence[Message]) -> RulesWalk:
        return _ItemWalk(cast("Sequence[Item]", messages))


RESPONSES: Final = ResponsesDialect()
Item.dialect = RESPONSES

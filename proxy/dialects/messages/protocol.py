"""The rules of the Messages API about tool calls, the repair of violations, and the API as a dialect.

    - A reply with `tool_use` blocks is followed at once by a user's turn that begins with one result for each call.
      Consecutive user messages are one turn.
    - A `tool_result` stands nowhere else, and answers a call of the reply before it by its id.
    - Each call has an id that no other call of the conversation has.
    - No message is empty, and the first one is a user's. A system message follows a user's turn.

Source: Anthropic's API reference and its error messages ("`tool_use` ids were found without `tool_result` blocks
immediately after", "unexpected `tool_use_id` found in `tool_result` blocks", "messages: first message must use the
"user" role").

The repair of a reply and its results depends only on these. So the repair of a longer history begins with the repair of
the shorter one, unless results for its last calls have arrived meanwhile.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from enum import StrEnum
from typing import ClassVar, Final, cast

import orjson

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
    spans_of,
)
from proxy.dialects.chat.refusals import overflow_of
from proxy.dialects.jsontext import read, write
from proxy.dialects.messages import cache_marks, own_tools, reply, request
from proxy.dialects.messages.canonical import canonical, first_canonical
from proxy.dialects.messages.message import BlockTies, MessagesMessage

_ANSWER: Final = 4096  # tokens of the answer to a request of the proxy's own; every model can produce that many
OPENING: Final = "[The beginning of this conversation is not shown.]"
"""Stands before a conversation that would begin with a reply."""


class BrokenRule(StrEnum):
    """What can be wrong with a message."""

    MISSING = "tool call without a result"
    ORPHAN = "tool result without a call"
    SECOND = "second result of a tool call"
    BEHIND = "tool result behind other content"
    NAMELESS = "tool call without an id"
    TWICE = "tool call with the id of another one"
    EMPTY = "message without content"
    SYSTEM = "system message that follows no user's turn"
    BEGINNING = "conversation that begins with a reply"


class _TurnWalk(RulesWalk):
    """Repairs messages. Whatever breaks the rules and cannot be repaired otherwise is left out."""

    def __init__(self, messages: Sequence[Message], ties: Sequence[BlockTies]) -> None:
        super().__init__()
        self._ids: set[str] = set()  # the ids of all calls so far
        position = 0
        while position < len(ties):
            start, role = position, ties[position].role
            position += 1
            if role == "tool":
                # Other content beside results that answer nothing stays.
                number = messages[start].result_count
                self.problems += [(start, BrokenRule.ORPHAN)] * number
                if (left := messages[start].with_results([None] * number)) is not None:
                    self.keep(None, left)
            elif role == "assistant":
                ids = self._reply(start, messages[start], ties[start])
                while ids and position < len(ties) and ties[position].role == "tool":
                    position += 1
                if ids:
                    self._results(start, ids, messages, ties, position)
            elif ties[start].empty:
                self.problems.append((start, BrokenRule.EMPTY))
            elif role == "system" and (not self.messages or self.messages[-1].role == "assistant"):
                self.problems.append((start, BrokenRule.SYSTEM))
                self.keep(None, MESSAGES.spoken("user", messages[start].text))
            else:
                self.keep(start, messages[start])

    def keep(self, source: int | None, message: Message) -> None:
        if not self.messages and message.role == "assistant":
            self.problems.append((source or 0, BrokenRule.BEGINNING))
            super().keep(None, MESSAGES.spoken("user", OPENING))
        super().keep(source, message)

    def _reply(self, position: int, message: Message, ties: BlockTies) -> Collection[str]:
        """Keep the valid part of a reply. Return the ids of its calls."""
        ids: dict[str, None] = {}
        kept: set[int] = set()
        for index, identity in enumerate(ties.ids):
            if not identity or identity in ids or identity in self._ids:
                self.problems.append((position, BrokenRule.TWICE if identity else BrokenRule.NAMELESS))
            else:
                kept.add(index)
                ids[identity] = None
        self._ids.update(ids)
        if len(kept) == len(ties.ids) and not ties.empty:
            self.keep(position, message)
        elif ids or (not ties.empty and message.has_content):
            self.keep(None, message.with_calls(kept))
        else:
            self.problems.append((position, BrokenRule.EMPTY))
        return ids

    def _results(
        self, block: int, ids: Collection[str], messages: Sequence[Message], ties: Sequence[BlockTies], stop: int
    ) -> None:
        """Keep the user's turn if it answers the calls of a reply. Otherwise make one that does."""
        run = range(block + 1, stop)
        if _are_answers([ties[at] for at in run], ids):
            for at in run:
                self.keep(at, messages[at])
            return
        waiting = dict.fromkeys(ids, True)
        results: list[Message] = []
        beside: list[Message] = []
        behind = False
        for at in run:
            behind = behind or bool(beside) or not ties[at].leads
            for result in messages[at].results:
                answered = result.answers or ""
                if waiting.get(answered):
                    waiting[answered] = False
                    results.append(result)
                else:
                    self.problems.append((at, BrokenRule.SECOND if answered in waiting else BrokenRule.ORPHAN))
            if (left := messages[at].with_results([None] * messages[at].result_count)) is not None:
                beside.append(left)
        if behind and results:
            self.problems.append((block, BrokenRule.BEHIND))
        missing = [answered for answered, waits in waiting.items() if waits]
        self.problems += [(block, BrokenRule.MISSING)] * len(missing)
        for message in (*results, *[MESSAGES.result(answered, NO_RESULT) for answered in missing], *beside):
            self.keep(None, message)


def _ties_of(messages: Sequence[Message]) -> list[BlockTies]:
    return [message.ties for message in cast("Sequence[MessagesMessage]", messages)]


def _are_sound(ties: Sequence[BlockTies]) -> bool:
    """Tell whether consecutive messages with these ties break no rule."""
    used: set[str] = set()
    waiting: set[str] = set()
    before = ""
    for each in ties:
        if waiting:
            if not _is_answered(waiting, each):
                return False
        elif each.role == "assistant":
            ids = set(each.ids)
            if not before or each.empty or "" in ids or len(ids) < len(each.ids) or not used.isdisjoint(ids):
                return False
            used |= ids
            waiting = ids.copy()
        elif each.role == "tool" or each.empty or (each.role == "system" and before in {"", "assistant"}):
            return False
        before = each.role
    return not waiting


def _are_answers(run: Sequence[BlockTies], ids: Collection[str]) -> bool:
    """Tell whether consecutive messages with results are a valid answer to these calls."""
    waiting = set(ids)
    return all([_is_answered(waiting, each) for each in run]) and not waiting


def _is_answered(waiting: set[str], ties: BlockTies) -> bool:
    """Tell whether a message validly answers some of the waiting calls. Answered calls are removed from `waiting`."""
    answers = set(ties.answers)
    is_sound = ties.leads and len(answers) == len(ties.answers) > 0 and answers <= waiting
    waiting -= answers
    return is_sound and (ties.alone or not waiting)


class MessagesDialect(Dialect):
    """The Messages API."""

    name: ClassVar[str] = "messages"
    message: ClassVar[type[Message]] = MessagesMessage
    cures: ClassVar[Mapping[StrEnum, str]] = {
        BrokenRule.MISSING: "a result was put in",
        BrokenRule.BEHIND: "put first",
        BrokenRule.SYSTEM: "said by the user",
        BrokenRule.BEGINNING: "a text was put before it",
    }
    requests: ClassVar[RequestSide] = RequestSide(
        path="/messages",
        headers=((b"anthropic-version", b"2023-06-01"),),
        parse=request.parse_messages_request,
        compose=request.compose,
        leaves_room=own_tools.leaves_room,
        add_tools=own_tools.add_tools,
        decides_caching=cache_marks.decides_itself,
        marked=cache_marks.marked,
        broken=cache_marks.broken,
        overflow_of=overflow_of,
        refuses_caching=lambda body: b"cache_control" in body,
        unknown_state=reply.THREAD_NOT_FOUND,
    )
    replies: ClassVar[ReplySide] = ReplySide(
        read=reply.read_body,
        reader=reply.MessageReader,
        ends=(b"message_stop",),
        body_filter=own_tools.MessagesBodyFilter,
        stream_filter=own_tools.MessagesStreamFilter,
        repeat=reply.made_answer,
        calling=reply.CALLING,
        error_words=reply.error_words,
        error_body=lambda error: orjson.dumps(reply.error_body(error)),
        error_event=lambda body: b"event: error\ndata: %b\n\n" % write(read(body)),
    )

    def spoken(self, role: SpokenRole, text: str) -> MessagesMessage:
        return MessagesMessage.of({"role": role, "content": text})

    def result(self, call: str, text: str) -> MessagesMessage:
        block = {"type": "tool_result", "tool_use_id": call, "content": text}
        return MessagesMessage.as_stored({"role": "user", "content": [block]})

    def question(self, model: str, instructions: str, text: str) -> bytes:
        asked = {"role": "user", "content": text}
        return write({"model": model, "max_tokens": _ANSWER, "system": instructions, "messages": [asked]})

    def canonical(self, message: Message) -> bytes:
        return canonical(message.data)

    def earlier_canonicals(self, message: Message) -> Sequence[bytes]:
        return canonical(message.data, loosely=False), first_canonical(message.data)

    def spans(self, messages: Sequence[Message]) -> tuple[Span, ...]:
        ties = _ties_of(messages)
        return joined_spans(spans_of(ties), [(each.begun, each.parts) for each in ties])

    def walk(self, messages: Sequence[Message]) -> RulesWalk:
        ties = _ties_of(messages)
        # Most histories are sound, and this check runs for every request.
        return RulesWalk(messages) if _are_sound(ties) else _TurnWalk(messages, ties)


MESSAGES: Final = MessagesDialect()
MessagesMessage.dialect = MESSAGES

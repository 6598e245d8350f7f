"""The rules of Chat Completions about tool calls, the repair of violations, and the API as a dialect.

    - An assistant message with `tool_calls` is followed at once by one `tool` message for each call.
    - A `tool` message stands nowhere else, and answers a call of that block by its id.
    - Each call has an id that no other call of the block has. Some servers give empty ids. If as many results with
      empty ids follow, calls and results get ids in order.
    - `tool_calls` is not empty, and an assistant message has content or calls.

Source: OpenAI's API reference and its error messages ("An assistant message with 'tool_calls' must
be followed by tool messages responding to each 'tool_call_id'", "messages with role 'tool' must be
a response to a preceding message with 'tool_calls'", "[] is too short - 'messages.1.tool_calls'").
The older form, `function_call` with role `function`, has no such rules and is left unchanged.

Some servers require users and assistants to take turns. If the repair removes a message between two users, a text
replaces it.

The repair of a block depends only on the block and its results, or on the question after it. So the repair of a longer
history begins with the repair of the shorter one, unless results for its last calls have arrived meanwhile.
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
    spans_of,
)
from proxy.dialects.chat import cache_marks, completion, own_tools, refusals, request
from proxy.dialects.chat.canonical import canonical, first_canonical
from proxy.dialects.chat.message import ChatMessage, ChatTies
from proxy.dialects.jsontext import read, write

NO_REPLY: Final = "[the reply was empty]"  # replaces an empty reply between two questions


class Problem(StrEnum):
    """What can be wrong with a message."""

    MISSING = "tool call without a result"
    ORPHAN = "tool result without a call"
    SECOND = "second result of a tool call"
    NAMELESS = "tool call without an id"
    UNNAMED = "tool call without an id, as its result is"
    TWICE = "tool call with the id of another one in its message"
    NO_CALLS = "tool_calls without a call"
    EMPTY = "assistant message without content and calls"
    SILENT = "assistant message without content and calls between two questions"


class _Walk(RulesWalk):
    """Repairs messages: inserts missing results, and leaves out everything else that breaks the rules."""

    def __init__(self, messages: Sequence[Message], ties: Sequence[ChatTies]) -> None:
        super().__init__()
        self._left_out: int | None = None
        """Index in `problems` of an assistant message left out since the last kept message; None if there is none."""
        position = 0
        while position < len(ties):
            start, role = position, ties[position].role
            position += 1
            if role == "assistant":
                ids: Collection[str] = ties[start].ids
                if _is_nameless(ties, start) and all([call.name for call in messages[start].calls]):
                    position += len(ids)
                    self._named(start, messages[start:position])
                    continue
                if _is_sound(ties[start]):
                    self.keep(start, messages[start])
                else:
                    ids = self._block(start, messages[start], ties[start])
                if ids:
                    position = self._results(start, ids, messages, ties)
            elif role == "tool":
                self.problems.append((start, Problem.ORPHAN))
            else:
                if role == "user" and self._left_out is not None and self.messages and self.messages[-1].role == "user":
                    self.problems[self._left_out] = (self.problems[self._left_out][0], Problem.SILENT)
                    self.keep(None, ChatMessage.of({"role": "assistant", "content": NO_REPLY}))
                self.keep(start, messages[start])

    def _results(self, block: int, ids: Collection[str], messages: Sequence[Message], ties: Sequence[ChatTies]) -> int:
        """Keep the results that answer a block and insert missing ones. Return the position after the results."""
        position = block + 1
        known, answered = frozenset(ids), set[str]()
        while position < len(ties) and ties[position].role == "tool":
            answer = ties[position].answers
            if answer is None or answer not in known:
                self.problems.append((position, Problem.ORPHAN))
            elif answer in answered:
                self.problems.append((position, Problem.SECOND))
            else:
                answered.add(answer)
                self.keep(position, messages[position])
            position += 1
        for missing in ids:
            if missing not in answered:
                self.keep(None, CHAT.result(missing, NO_RESULT))
                self.problems.append((block, Problem.MISSING))
        return position

    def keep(self, source: int | None, message: Message) -> None:
        super().keep(source, message)
        self._left_out = None

    def _named(self, position: int, block: Sequence[Message]) -> None:
        """Keep calls and results that have empty ids, with new ids that every server accepts."""
        names = [f"call{number:05}" for number in range(1, len(block))]
        self.problems += [(position, Problem.UNNAMED)] * len(names)
        self.keep(None, cast("ChatMessage", block[0]).with_ids(names))
        for name, each in zip(names, block[1:], strict=True):
            self.keep(None, each.replacing("tool_call_id", name))

    def _block(self, position: int, message: Message, ties: ChatTies) -> Collection[str]:
        """Keep the valid part of an unsound assistant message. Return the ids of its remaining calls."""
        ids: dict[str, None] = {}
        kept: set[int] = set()
        calls = [call for call in message.calls if not call.legacy]
        for index, call in enumerate(calls):
            if not call.id or call.id in ids:
                self.problems.append((position, Problem.TWICE if call.id else Problem.NAMELESS))
            else:
                kept.add(index)
                ids[call.id] = None
        if ties.names_calls and not calls:
            self.problems.append((position, Problem.NO_CALLS))
        sound = message.with_calls({*kept, len(calls)}) if calls else message.without("tool_calls")
        # An empty text that the client sent is kept; an empty message that the repair leaves is not.
        if ties.names_calls and (ids or ties.legacy_call or sound.has_content):
            self.keep(None, sound)
        else:
            self.problems.append((position, Problem.EMPTY))
            self._left_out = len(self.problems) - 1
        return ids


def _ties_of(messages: Sequence[Message]) -> list[ChatTies]:
    return [message.ties for message in cast("Sequence[ChatMessage]", messages)]


def _are_sound(ties: Sequence[ChatTies]) -> bool:
    """Tell whether consecutive messages with these ties break no rule."""
    waiting: set[str | None] = set()
    for each in ties:
        if waiting:
            if each.answers not in waiting:
                return False
            waiting.remove(each.answers)
        elif each.role == "assistant":
            if not _is_sound(each):
                return False
            waiting.update(each.ids)
        elif each.role == "tool":
            return False
    return not waiting


def _is_nameless(ties: Sequence[ChatTies], block: int) -> bool:
    """Tell whether a block's calls, and as many results right after it, all have empty ids."""
    count = len(ties[block].ids)
    results = ties[block + 1 : block + 1 + count]
    return count > 0 and not any(ties[block].ids) and [each.answers for each in results] == [""] * count


def _is_sound(ties: ChatTies) -> bool:
    """Tell whether an assistant message on its own breaks no rule."""
    ids = ties.ids
    if ids:
        return "" not in ids and (len(ids) == 1 or len(set(ids)) == len(ids))
    return not ties.names_calls and (ties.legacy_call or ties.has_content)


class ChatDialect(Dialect):
    """The Chat Completions API."""

    name: ClassVar[str] = "chat"
    message: ClassVar[type[Message]] = ChatMessage
    repairs_blocks_alone: ClassVar[bool] = True
    cures: ClassVar[Mapping[StrEnum, str]] = {
        Problem.MISSING: "a result was put in",
        Problem.UNNAMED: "both got one",
        Problem.SILENT: "a text was put in",
    }
    requests: ClassVar[RequestSide] = RequestSide(
        path="/chat/completions",
        parse=request.parse_chat_request,
        compose=request.compose,
        leaves_room=own_tools.leaves_room,
        add_tools=own_tools.add_tools,
        tool_name=own_tools.tool_name,
        decides_caching=cache_marks.decides_itself,
        marked=cache_marks.marked,
        broken=cache_marks.broken,
        overflow_of=refusals.overflow_of,
        demanded_order=refusals.demanded_order,
        reordered=refusals.reordered,
        refuses_usage=refusals.refuses_usage,
    )
    replies: ClassVar[ReplySide] = ReplySide(
        read=completion.read_body,
        reader=completion.CompletionAccumulator,
        ends=(b"[DONE]",),
        body_filter=own_tools.ToolBodyFilter,
        stream_filter=own_tools.ToolStreamFilter,
        repeat=completion.made_answer,
        calling=completion.CALLING,
        error_words=completion.error_words,
        error_body=lambda error: orjson.dumps(error.body()),
        error_event=lambda body: b"data: %b\n\n" % write(read(body)),
    )

    def spoken(self, role: SpokenRole, text: str) -> ChatMessage:
        return ChatMessage.of({"role": role, "content": text})

    def result(self, call: str, text: str) -> ChatMessage:
        return ChatMessage.as_stored({"role": "tool", "tool_call_id": call, "content": text})

    def canonical(self, message: Message) -> bytes:
        return canonical(message.data)

    def earlier_canonicals(self, message: Message) -> Sequence[bytes]:
        data = message.data
        return canonical(data, private=True), canonical(data, loosely=False), first_canonical(data)

    def spans(self, messages: Sequence[Message]) -> tuple[Span, ...]:
        return spans_of(_ties_of(messages))

    def walk(self, messages: Sequence[Message]) -> RulesWalk:
        ties = _ties_of(messages)
        # Most histories are sound, and this check runs for every request.
        return RulesWalk(messages) if _are_sound(ties) else _Walk(messages, ties)


CHAT: Final = ChatDialect()
ChatMessage.dialect = CHAT

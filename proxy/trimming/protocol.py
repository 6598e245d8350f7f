"""The rules of the Chat Completions API about tool calls, and the repair of what breaks them.

    - An assistant message with `tool_calls` is followed at once by one `tool` message for each call.
    - A `tool` message stands nowhere else, and answers a call of that block by its id.
    - Each call has an id, and no other call of the block has the same one.
    - `tool_calls` is not empty, and an assistant message has content or calls.

Source: OpenAI's API reference and its error messages ("An assistant message with 'tool_calls' must
be followed by tool messages responding to each 'tool_call_id'", "messages with role 'tool' must be
a response to a preceding message with 'tool_calls'", "[] is too short - 'messages.1.tool_calls'").
The older form, `function_call` with role `function`, has no such rules and is left alone.

A repair of a block depends on the block and on what answers it, on nothing before or after: so the
repair of a longer history begins with that of the shorter one, unless its last calls were answered
meanwhile. This module does not know why a history is broken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from proxy.history.spans import calls_function
from proxy.wire.messages import Message

NO_RESULT: Final = "[no result was recorded for this call]"
"""What stands in for a result that was never recorded."""


class Problem(StrEnum):
    """What can be wrong with a message. The value says it, and reads on as a note of the repair."""

    MISSING = "tool call without a result"
    ORPHAN = "tool result without a call"
    SECOND = "second result of a tool call"
    NAMELESS = "tool call without an id"
    TWICE = "tool call with the id of another one in its message"
    NO_CALLS = "tool_calls without a call"
    EMPTY = "assistant message without content and calls"


_EMPTY_PARTS: Final = [{"type": "text", "text": ""}]

_CURES: Final = {Problem.MISSING: "a result was put in"}
"""How a problem is cured where that is not by leaving out."""


@dataclass(frozen=True, slots=True)
class Repaired:
    """Messages that keep the rules."""

    messages: tuple[Message, ...]
    notes: tuple[str, ...]
    """What was repaired: at most one line for each kind of problem, with its number."""
    sources: tuple[int | None, ...]
    """For each message its position before the repair where it is the very same; None where it was made."""


@dataclass(frozen=True, slots=True)
class _Step:
    """One message that stays or is put in, or one problem."""

    position: int
    message: Message | None = None
    problem: Problem | None = None


def problems(messages: Sequence[Message]) -> list[str]:
    """Return what breaks the rules, in words with the position of the message; empty where nothing does."""
    return [
        f"message {step.position}: {step.problem}" for step in _walk(messages) if step.problem is not None
    ]


def repair(messages: Sequence[Message]) -> Repaired:
    """Return the messages as a provider takes them. What keeps the rules stays the very same object.

    A missing result is put in, everything else that breaks the rules is left out.
    """
    repaired: list[Message] = []
    sources: list[int | None] = []
    found: Counter[Problem] = Counter()
    for step in _walk(messages):
        if step.message is not None:
            repaired.append(step.message)
            sources.append(step.position if step.message is messages[step.position] else None)
        if step.problem is not None:
            found[step.problem] += 1
    notes = (
        f"repaired: {found[problem]} x {problem}, {_CURES.get(problem, 'left out')}"
        for problem in Problem
        if found[problem]
    )
    return Repaired(tuple(repaired), tuple(notes), tuple(sources))


def says_something(message: Message) -> bool:
    """Tell whether an assistant message has anything beside its calls that can be sent back."""
    content = message.data.get("content")
    if content == _EMPTY_PARTS or (isinstance(content, str) and not content.strip()):
        content = None
    return bool(content or message.data.get("refusal") or message.data.get("audio"))


def _walk(messages: Sequence[Message]) -> Iterator[_Step]:
    """Yield what stays, what is put in, and what is wrong, in order."""
    position = 0
    while position < len(messages):
        message, start = messages[position], position
        position += 1
        if message.role == "tool":
            yield _Step(start, problem=Problem.ORPHAN)
            continue
        if message.role != "assistant":
            yield _Step(start, message)
            continue
        ids: list[str] = []
        yield from _block(message, start, ids)
        answered: set[str | None] = set()
        while position < len(messages) and messages[position].role == "tool":
            answer = messages[position].answers
            if answer in ids and answer not in answered:
                yield _Step(position, messages[position])
            else:
                yield _Step(position, problem=Problem.SECOND if answer in answered else Problem.ORPHAN)
            answered.update({answer} & set(ids))
            position += 1
        for missing in ids:
            if missing not in answered:
                yield _Step(start, _stand_in(missing), Problem.MISSING)


def _block(message: Message, position: int, ids: list[str]) -> Iterator[_Step]:
    """Yield an assistant message with the calls that keep the rules, and add their ids to `ids`."""
    sound = message
    if message.data.get("tool_calls") is not None:
        kept: set[int] = set()
        for index, call in enumerate(message.calls):
            if not call.id or call.id in ids:
                yield _Step(position, problem=Problem.TWICE if call.id else Problem.NAMELESS)
            else:
                kept.add(index)
                ids.append(call.id)
        if not message.calls:
            yield _Step(position, problem=Problem.NO_CALLS)
            sound = message.without("tool_calls")
        elif len(kept) < len(message.calls):
            sound = message.keeping_calls(frozenset(kept))
    if ids or calls_function(message) or _may_stand(sound, changed=sound is not message):
        yield _Step(position, sound)
    else:
        yield _Step(position, problem=Problem.EMPTY)


def _may_stand(message: Message, *, changed: bool) -> bool:
    """Tell whether an assistant message without calls is sent.

    An empty text that the client sent is its own affair; one that the repair left over is not.
    """
    return says_something(message) or (not changed and message.data.get("content") not in (None, []))


def _stand_in(call: str) -> Message:
    """Return the message that stands in for a result that was never recorded."""
    return Message.of({"role": "tool", "tool_call_id": call, "content": NO_RESULT})

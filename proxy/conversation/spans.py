"""Spans and rounds: how a run of messages falls into parts that belong together.

A span is the smallest run that can be removed without breaking the protocol: an assistant
message with its tool calls and all their results, or one other message. A round is a user message
and everything up to the next one.

Ids pair a block with the results right after it and nothing else, since real sessions use an id
again in later blocks. Nothing is removed or judged here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from msgspec import Struct

from proxy.dialects.chat.facts import Ties
from proxy.dialects.chat.messages import Message

RESULT_ROLES: Final = frozenset({"tool", "function"})
"""Roles of the messages that carry what a tool gave; `function` is the older form."""
_TOOL: Final = frozenset({"tool"})
_FUNCTION: Final = frozenset({"function"})
_NOTHING: Final = frozenset[str]()


class Span(Struct, frozen=True):
    """A run of messages that stay or go together."""

    start: int
    """Position of its first message."""
    stop: int
    """Position after its last message."""
    round: int
    """Number of the round that it lies in."""


class Round(Struct, frozen=True):
    """A user message and everything up to the next one."""

    number: int
    """User messages up to and with this one; 0 for what precedes the first (a preamble)."""
    start: int
    """Position of its first message."""
    stop: int
    """Position after its last message."""


class OpenCalls(Struct, frozen=True):
    """The last span, where it still waits for results."""

    span: Span
    ids: tuple[str, ...]
    """The ids that have no result yet, in the order of the calls; "" for a call of the older form."""


def calls_function(message: Message) -> bool:
    """Tell whether an assistant message holds a call of the older form, `function_call`."""
    return message.ties.calls_function


def is_result(message: Message) -> bool:
    """Tell whether a message carries what a tool gave."""
    return message.role in RESULT_ROLES


def spans(messages: Sequence[Message]) -> tuple[Span, ...]:
    """Return the spans of `messages`, in order; together they cover every position once.

    All the results directly after a block are its span, those that answer none of its calls too.
    """
    found: list[Span] = []
    ties = [message.ties for message in messages]
    position = number = 0
    while position < len(ties):
        start, first = position, ties[position]
        position += 1
        if first.role == "user":
            number += 1
        answering = _answering(first)
        while position < len(ties) and ties[position].role in answering:
            position += 1
        found.append(Span(start, position, number))
    return tuple(found)


def span_start(messages: Sequence[Message], position: int) -> int:
    """Return where the span begins that holds `position`, reading only what is near it."""
    start = position
    while start > 0 and is_result(messages[start]):
        start -= 1
    return start + spans(messages[start : position + 1])[-1].start


def rounds(messages: Sequence[Message]) -> tuple[Round, ...]:
    """Return the rounds of `messages`, in order; together they cover every position once."""
    starts = [position for position, message in enumerate(messages) if message.role == "user"]
    first = 1
    if messages and starts[:1] != [0]:
        starts.insert(0, 0)
        first = 0
    stops = [*starts[1:], len(messages)]
    return tuple(
        Round(number, start, stop)
        for number, (start, stop) in enumerate(zip(starts, stops, strict=False), first)
    )


def open_calls(messages: Sequence[Message]) -> OpenCalls | None:
    """Return the calls of the last span that have no result yet; None where there are none."""
    if not messages:
        return None
    start = span_start(messages, len(messages) - 1)
    block, results = messages[start], messages[start + 1 :]
    answered = {result.answers for result in results}
    ids = [call.id for call in block.calls if call.id and call.id not in answered]
    if calls_function(block) and not any(result.role == "function" for result in results):
        ids.append("")
    if not ids:
        return None
    number = sum(message.role == "user" for message in messages)
    return OpenCalls(Span(start, len(messages), number), tuple(dict.fromkeys(ids)))


def _answering(ties: Ties) -> frozenset[str]:
    """Return the roles of the messages that may follow a message within its span."""
    if ties.ids:
        return RESULT_ROLES if ties.calls_function else _TOOL
    return _FUNCTION if ties.calls_function else _NOTHING

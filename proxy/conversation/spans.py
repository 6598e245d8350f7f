"""Spans and rounds: they divide a run of messages into parts that belong together.

A span is the smallest run that can be removed without breaking the protocol: an assistant message with its tool calls
and all their results, or one other message. A round is a user message and everything up to the next one.

Ids pair a block only with the results right after it, because real sessions reuse ids in later blocks. This module
removes nothing and judges nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct

from proxy.dialects import Call, Message, Span


class Round(Struct, frozen=True, kw_only=True):
    """A user message and everything up to the next one."""

    number: int  # counts user messages from 1; 0 for the preamble, the messages before the first one
    start: int  # position of its first message
    stop: int  # position after its last message


def spans(messages: Sequence[Message]) -> tuple[Span, ...]:
    """Return the spans of `messages`, in order. Together they cover every position exactly once."""
    return messages[0].dialect.spans(messages) if messages else ()


def span_start(messages: Sequence[Message], position: int) -> int:
    """Return the start of the span that holds `position`. Reads only the messages near it."""
    start = position
    while start > 0 and messages[start].is_result:
        start -= 1
    return start + spans(messages[start : position + 1])[-1].start


def rounds(messages: Sequence[Message]) -> tuple[Round, ...]:
    """Return the rounds of `messages`, in order. Together they cover every position exactly once."""
    starts = [position for position, message in enumerate(messages) if message.role == "user"]
    first = 1
    if messages and starts[:1] != [0]:
        starts.insert(0, 0)
        first = 0
    stops = [*starts[1:], len(messages)]
    return tuple(
        Round(number=number, start=start, stop=stop)
        for number, (start, stop) in enumerate(zip(starts, stops, strict=False), first)
    )


def open_calls(messages: Sequence[Message]) -> tuple[str, ...]:
    """Return the ids of the last span's calls that have no result yet; "" for a call of the legacy form."""
    if not messages:
        return ()
    start = span_start(messages, len(messages) - 1)
    block, results = messages[start], messages[start + 1 :]
    answered = {name for result in results for name in result.answered}

    def waits(call: Call) -> bool:
        if call.legacy:
            return not any(result.answers_call(call) for result in results)
        return bool(call.id) and call.id not in answered

    return tuple(dict.fromkeys(call.id for call in block.calls if waits(call)))

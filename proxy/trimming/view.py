"""What is sent: the messages that stand, a summary before them, and the repair of what breaks the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from proxy.dialects import Dialect, Message, Repaired
from proxy.trimming.model import Entry, Hidden, PlanningContext, Size, Summary

_EMPTY: Final = Repaired(messages=(), notes=(), sources=())
_NOTHING: Final[Mapping[int, Hidden]] = MappingProxyType({})


class View(Struct, frozen=True, kw_only=True):
    """What would be sent."""

    messages: tuple[Message, ...]
    tokens: int  # with those of instructions and tools, and of a summary that is merged into the instructions
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> Size:
        """How much it is. Each message is read for its tool results: ask only where these matter."""
        calls = sum([message.is_result for message in self.messages])
        return Size(tokens=self.tokens, messages=len(self.messages), tool_calls=calls)


def view_of(
    entries: Sequence[Entry],
    messages: Sequence[Message | None],
    tokens: Sequence[int],
    context: PlanningContext,
    *,
    repairing: bool,
    summary: Summary | None = None,
    hidden: Mapping[int, Hidden] = _NOTHING,
) -> View:
    """Return what is sent of a log of `entries`, of which `messages` are left, with their tokens.

    What is `hidden` is put in by place, its tokens being among those of the message there. The repair does
    not see it: it sees the calls that the client saw. Of a message that is repaired it goes.
    """
    total = context.fixed_tokens + sum(tokens)
    left = tuple([message for message in messages if message is not None])
    lead: tuple[Message, ...] = ()
    if summary is not None:
        total += summary.tokens
        if summary.role != "merge":
            lead = (summary.message(entries[0].message.dialect),)
    if not repairing:
        return View(messages=lead + left, tokens=total)
    repaired = left[0].dialect.repair(left) if left else _EMPTY
    sent = _spliced(messages, repaired, hidden) if hidden else repaired.messages
    if repaired.notes:
        counts = [count for message, count in zip(messages, tokens, strict=True) if message is not None]
        after = [
            context.count(message) if source is None else counts[source]
            for message, source in zip(repaired.messages, repaired.sources, strict=True)
        ]
        total += sum(after) - sum(tokens)
    return View(messages=lead + sent, tokens=total, notes=repaired.notes)


def _spliced(
    messages: Sequence[Message | None], repaired: Repaired, hidden: Mapping[int, Hidden]
) -> tuple[Message, ...]:
    """Return the repaired messages with what is hidden of those that needed no repair."""
    places = [place for place, message in enumerate(messages) if message is not None]
    sent: list[Message] = []
    for message, source in zip(repaired.messages, repaired.sources, strict=True):
        beside = hidden.get(places[source]) if source is not None else None
        if beside is None:
            sent.append(message)
        else:
            reply = message if beside.reply is None else beside.reply
            sent += (*beside.before, reply, *beside.after)
    return tuple(sent)


def merged(instructions: Sequence[Message], summary: Summary, dialect: Dialect) -> tuple[Message, ...]:
    """Return instructions with a summary at the end of the last one; it leads alone where there are none."""
    if not instructions:
        return (summary.message(dialect),)
    *ahead, last = instructions
    return (*ahead, last.with_appended(summary.text))

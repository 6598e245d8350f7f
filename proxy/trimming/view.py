"""What is sent: the messages that stand, a summary before them, and the repair of what breaks the rules."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from proxy.dialects import Message, Repaired
from proxy.trimming.plan import Hidden, PlanningContext, Summary

_EMPTY: Final = Repaired(messages=(), notes=(), sources=())
_NOTHING: Final[Mapping[int, Hidden]] = MappingProxyType({})


class View(Struct, frozen=True, kw_only=True):
    """What would be sent."""

    messages: tuple[Message, ...]
    tokens: int
    """With those of instructions and tools, and of a summary that is merged into the instructions."""
    notes: tuple[str, ...] = ()

    @property
    def tool_calls(self) -> int:
        """Tool results in it. Each message is read for that: ask only where it matters."""
        return sum(message.is_result for message in self.messages)


def view_of(
    messages: Sequence[Message | None],
    tokens: Sequence[int],
    known: PlanningContext,
    *,
    repairing: bool,
    summary: Summary | None = None,
    hidden: Mapping[int, Hidden] = _NOTHING,
) -> View:
    """Return what is sent of messages, with their tokens, some of which were removed.

    What is `hidden` is put in by place, its tokens being among those of the message there. The repair does
    not see it: it sees the calls that the client saw. Of a message that is repaired it goes.
    """
    total = known.fixed_tokens + sum(tokens)
    standing = tuple([message for message in messages if message is not None])
    lead: tuple[Message, ...] = ()
    if summary is not None:
        total += summary.tokens
        lead = () if summary.role == "merge" else (summary.message,)
    if not repairing:
        return View(messages=lead + standing, tokens=total)
    repaired = standing[0].dialect.repair(standing) if standing else _EMPTY
    sent = _spliced(messages, repaired, hidden) if hidden else repaired.messages
    if not repaired.notes:
        return View(messages=lead + sent, tokens=total)
    left = [count for message, count in zip(messages, tokens, strict=True) if message is not None]
    counts = [
        known.count(message) if source is None else left[source]
        for message, source in zip(repaired.messages, repaired.sources, strict=True)
    ]
    return View(messages=lead + sent, tokens=total - sum(tokens) + sum(counts), notes=repaired.notes)


def with_hidden(message: Message, hidden: Hidden | None) -> tuple[Message, ...]:
    """Return what is sent for a message: itself, and what the client was not shown of it."""
    if hidden is None:
        return (message,)
    return (*hidden.before, message if hidden.reply is None else hidden.reply, *hidden.after)


def _spliced(
    messages: Sequence[Message | None], repaired: Repaired, hidden: Mapping[int, Hidden]
) -> tuple[Message, ...]:
    """Return the repaired messages with what is hidden of those that needed no repair."""
    places = [place for place, message in enumerate(messages) if message is not None]
    sent: list[Message] = []
    for message, source in zip(repaired.messages, repaired.sources, strict=True):
        sent += with_hidden(message, hidden.get(places[source]) if source is not None else None)
    return tuple(sent)


def merged(instructions: Sequence[Message], summary: Summary) -> tuple[Message, ...]:
    """Return instructions with a summary at the end of the last one; it leads alone where there are none."""
    if not instructions:
        return (summary.message,)
    *ahead, last = instructions
    return (*ahead, last.with_appended(summary.text))

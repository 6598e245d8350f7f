"""What is sent: the messages that stand, a summary before them, and the repair of what breaks the rules."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.history.spans import is_result
from proxy.trimming.plan import Known, Summary
from proxy.trimming.protocol import repair
from proxy.wire.messages import Message
from proxy.wire.shapes import is_array


@dataclass(frozen=True, slots=True)
class View:
    """What would be sent."""

    messages: tuple[Message, ...]
    tokens: int
    """With those of instructions and tools, and of a summary that is merged into the instructions."""
    notes: tuple[str, ...] = ()

    @property
    def tool_calls(self) -> int:
        """Tool results in it. Each message is read for that: ask only where it matters."""
        return sum(map(is_result, self.messages))


def view_of(
    messages: Sequence[Message | None],
    tokens: Sequence[int],
    known: Known,
    *,
    repairing: bool,
    summary: Summary | None = None,
) -> View:
    """Return what is sent of messages, with their tokens, some of which were removed."""
    total = known.fixed_tokens + sum(tokens)
    standing = tuple([message for message in messages if message is not None])
    lead: tuple[Message, ...] = ()
    if summary is not None:
        total += summary.tokens
        lead = () if summary.role == "merge" else (summary.message,)
    if not repairing:
        return View(lead + standing, total)
    repaired = repair(standing)
    if not repaired.notes:
        return View(lead + standing, total)
    left = [count for message, count in zip(messages, tokens, strict=True) if message is not None]
    counts = [
        known.count(message) if source is None else left[source]
        for message, source in zip(repaired.messages, repaired.sources, strict=True)
    ]
    return View(lead + repaired.messages, total - sum(tokens) + sum(counts), repaired.notes)


def merged(instructions: Sequence[Message], summary: Summary) -> tuple[Message, ...]:
    """Return instructions with a summary at the end of the last one; it leads alone where there are none."""
    if not instructions:
        return (summary.message,)
    *ahead, last = instructions
    content = last.data.get("content")
    if is_array(content):
        longer = last.replacing("content", [*content, {"type": "text", "text": summary.text}])
    else:
        text = f"{content}\n\n{summary.text}" if isinstance(content, str) else summary.text
        longer = last.replacing("content", text)
    return (*ahead, longer)

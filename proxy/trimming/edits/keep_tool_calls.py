"""`keep_tool_calls`: of the tool calls of the history only the newest are sent."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

from msgspec import Struct
from pydantic import Field

from proxy.dialects import Span
from proxy.trimming.draft import Draft
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.model import Change
from proxy.trimming.settings import Natural


class _Call(Struct, frozen=True, kw_only=True):
    """One tool call and where its results stand."""

    span: Span
    index: int  # place among the block's calls
    name: str
    results: tuple[int, ...]

    @property
    def order(self) -> int:
        """Where its first result stands; one that was never recorded would stand after the others."""
        return self.results[0] if self.results else self.span.stop


class KeepToolCalls(BaseEdit, frozen=True):
    """The most recent calls of the history stay, counted by their results; older ones go.

    A block of parallel calls keeps those that are kept. With none left its text stays, and where
    it has no text it goes. A call whose result was never recorded counts as one with a result,
    since one is put in for it; only calls that still wait for theirs do not count.
    """

    type: Literal["keep_tool_calls"] = "keep_tool_calls"
    """Which strategy this is."""
    last: Natural = 3
    """So many calls stay."""
    scope: Literal["history", "all"] = "history"
    """Where calls are counted and removed: `history` leaves the current round alone, `all` does not."""
    exclude_tools: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Calls of tools of these names are neither counted nor removed."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Remove the older calls and their results, block by block."""
        reach = len(draft.messages) if self.scope == "all" or not draft.rounds else draft.rounds[-1].start
        blocks = {span: tuple(_calls(draft, span)) for span in draft.spans if span.start < reach}
        every = (call for calls in blocks.values() for call in calls if call.name not in self.exclude_tools)
        # One that still waits for its result does not count.
        answered = (call for call in every if call.results or call.span.stop < len(draft.messages))
        counted = sorted(answered, key=lambda call: call.order)
        older = frozenset(counted[: max(0, len(counted) - self.last)])
        for span, calls in blocks.items():
            kept = [call for call in calls if call not in older]
            if len(kept) < len(calls) and span.start not in draft.protected:
                yield from self._reduced(draft, span, kept)

    def _reduced(self, draft: Draft, span: Span, kept: Sequence[_Call]) -> Iterator[Change]:
        """Leave of a span only the calls of `kept`, with their results."""
        reason = f"not among the newest {self.last} tool calls"
        staying = {position for call in kept for position in call.results}
        for position, message in draft.remaining(span.start, span.stop):
            if position == span.start:
                reduced = message.with_calls({call.index for call in kept})
                if kept or reduced.has_content:
                    yield draft.replacing(position, self.type, reason, reduced)
                else:
                    yield draft.removing(position, self.type, reason)
            elif position not in staying:
                yield draft.removing(position, self.type, reason)


def _calls(draft: Draft, span: Span) -> Iterator[_Call]:
    """Yield the calls of a span that results can answer: those with an id, the first of each."""
    block = draft.messages[span.start]
    if block is None:
        return
    results = list(draft.remaining(span.start + 1, span.stop))
    seen: set[str] = set()
    for index, call in enumerate(block.calls):
        if call.legacy or (call.id and call.id not in seen):
            seen.add(call.id)
            answers = tuple([at for at, message in results if message.answers_call(call)])
            yield _Call(span=span, index=index, name=call.name, results=answers)

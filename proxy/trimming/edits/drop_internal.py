"""`drop_internal`: messages that are marked `is_internal` are not sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from proxy.conversation import Span, calls_function
from proxy.dialects.chat.messages import Message
from proxy.trimming.draft import Draft
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.plan import Change
from proxy.trimming.protocol import says_something

_MARKED: Final = "it is marked as internal"
_WITH_IT: Final = "its call or result is marked as internal"


class DropInternal(BaseEdit, frozen=True):
    """Messages with `is_internal` go. A call and its results go together, whichever of them is marked.

    An assistant message that is marked takes the results of its calls along. A result that is marked takes
    its call along; the other calls of that message, and its text, stay.
    """

    type: Literal["drop_internal"] = "drop_internal"
    """Which strategy this is."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Remove what is marked, span by span."""
        marked = {place for place, entry in enumerate(draft.entries) if entry.is_internal}
        for span in draft.spans:
            if span.start not in draft.protected and not marked.isdisjoint(range(span.start, span.stop)):
                yield from self._without(draft, span, marked)

    def _without(self, draft: Draft, span: Span, marked: set[int]) -> Iterator[Change]:
        """Take what is marked out of a span, with what belongs to it."""
        standing = list(draft.standing(span.start, span.stop))
        block = draft.messages[span.start]
        whole = span.start in marked
        answered = {message.answers for at, message in standing if at in marked}
        function = any(at in marked and message.role == "function" for at, message in standing)
        for position, message in standing:
            if position in marked:
                yield draft.removing(position, self.type, _MARKED)
            elif message is block:
                reduced = _reduced(message, answered, function=function)
                if reduced is message:
                    continue
                if reduced.calls or calls_function(reduced) or says_something(reduced):
                    yield draft.replacing(position, self.type, _WITH_IT, reduced)
                else:
                    yield draft.removing(position, self.type, _WITH_IT)
            elif whole or (message.answers is not None and message.answers in answered):
                yield draft.removing(position, self.type, _WITH_IT)


def _reduced(block: Message, answered: set[str | None], *, function: bool) -> Message:
    """Return the block without the calls of these ids; the very same message where it has none of them."""
    calls = block.calls
    kept = frozenset(index for index, call in enumerate(calls) if call.id not in answered)
    if len(kept) < len(calls):
        block = block.keeping_calls(kept)
    return block.without("function_call") if function else block

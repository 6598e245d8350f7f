"""`drop_internal`: messages that are marked `is_internal` are not sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal

from proxy.dialects import Span
from proxy.trimming.draft import Draft
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.model import Change

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
        left = list(draft.remaining(span.start, span.stop))
        block = draft.messages[span.start]
        going = [message for at, message in left if at in marked]
        calls = block.calls if block is not None else ()
        answered = [call for call in calls if any(result.answers_call(call) for result in going)]
        for position, message in left:
            if position in marked:
                yield draft.removing(position, self.type, _MARKED)
            elif message is block:
                kept = {index for index, call in enumerate(calls) if call not in answered}
                if len(kept) == len(calls):
                    continue
                reduced = message.with_calls(kept)
                if reduced.calls or reduced.has_content:
                    yield draft.replacing(position, self.type, _WITH_IT, reduced)
                else:
                    yield draft.removing(position, self.type, _WITH_IT)
            elif span.start in marked or any(message.answers_call(call) for call in answered):
                yield draft.removing(position, self.type, _WITH_IT)

"""When rounds that the client was not shown are let go: what the model had asked the proxy for, and got.

For some turns nobody touches them: the model asked for them because it needs them. After that they go at a
move of the cut, before anything else does, since all of it can be asked for again. It knows nothing of how
they came about.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import ClassVar, Final, Literal

from proxy.conversation import Round
from proxy.dialects import Span
from proxy.trimming.draft import Draft
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.plan import Change

_ROUNDS: Final = 3
"""Rounds whose replies keep their hidden rounds, the newest; the current one is the first of them."""
_SPANS: Final = 16
"""Spans of which the same is true: an agent that runs 300 calls on one instruction has one round."""
_REASON: Final = "what was recalled for it is older than the newest turns"


class Release(BaseEdit, frozen=True):
    """Hidden rounds of older replies go, from the oldest; the reply stays as the client saw it.

    No configuration names it. It stands before all edits of every policy.
    """

    piecemeal: ClassVar[bool] = True

    type: Literal["hidden_rounds"] = "hidden_rounds"
    """What is said in the place of an edit's type."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Let go of what is not protected, until the view is within the target."""
        total = draft.total
        for place in sorted(draft.hidden):
            if draft.target is not None and total <= draft.target:
                return
            message, tokens = draft.messages[place], draft.entries[place].tokens
            if place in draft.protected or message is None or tokens >= draft.tokens[place]:
                continue
            total += tokens - draft.tokens[place]
            yield Change(
                position=place,
                edit=self.type,
                reason=_REASON,
                message=message,
                tokens_before=draft.tokens[place],
                tokens_after=tokens,
            )


def exempt(spans: Sequence[Span], rounds: Sequence[Round], hidden: Collection[int]) -> frozenset[int]:
    """Return the places that nobody may touch since hidden rounds of the newest turns hang on their span."""
    if not hidden:
        return frozenset()
    oldest = rounds[max(0, len(rounds) - _ROUNDS)].start
    newest = [span for span in spans[max(0, len(spans) - _SPANS) :] if span.start >= oldest]
    return frozenset(
        place for span in newest if span.start in hidden for place in range(span.start, span.stop)
    )

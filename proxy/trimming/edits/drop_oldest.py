"""`drop_oldest`: what is oldest goes, until the view is within the target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from proxy.trimming.draft import Draft
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.model import Change
from proxy.trimming.settings import Target


class DropOldest(BaseEdit, frozen=True):
    """Whole rounds go, from the oldest; then, inside the current round, its oldest spans.

    What is protected stays, and the rest of its round goes. It stops as soon as the view is
    within the target: its own, or else the policy's.
    """

    type: Literal["drop_oldest"] = "drop_oldest"
    """Which strategy this is."""
    target: Target | None = None
    """How far this edit goes, in place of the policy's target."""

    @property
    def lacks_target(self) -> bool:
        """Whether it names no target of its own."""
        return self.target is None

    def is_done(self, draft: Draft) -> bool:
        """Tell whether the view is within its own target, or else the policy's."""
        return draft.within(self.target)

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Remove group after group, as long as the draft is above the target."""
        target, total = draft.limit(self.target), draft.total
        for start, stop, reason in _groups(draft):
            if target is None or total <= target:
                return
            for place, _ in draft.free(start, stop):
                total -= draft.tokens[place]
                yield draft.removing(place, self.type, reason)


def _groups(draft: Draft) -> Iterator[tuple[int, int, str]]:
    """Yield what goes together as (start, stop, reason), the oldest first."""
    for past in draft.rounds[:-1]:
        yield past.start, past.stop, "its round was the oldest"
    for current in draft.rounds[-1:]:
        for span in draft.spans:
            if span.start >= current.start:
                yield span.start, span.stop, "it was the oldest span of the current round"

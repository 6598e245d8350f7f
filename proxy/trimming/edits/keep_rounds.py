"""`keep_rounds`: of the rounds of the history only the newest are sent."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from proxy.trimming.draft import Draft
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.model import Change
from proxy.trimming.settings import Natural


class KeepRounds(BaseEdit, frozen=True):
    """The newest whole rounds of the history stay, and the current one; older ones go.

    A round begins with a user message. What stands before the first one goes with the oldest round. What is
    protected stays, and the rest of its round goes.
    """

    type: Literal["keep_rounds"] = "keep_rounds"
    """Which strategy this is."""
    last: Natural = 10
    """So many rounds of the history stay; the current one is not counted."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Remove what is older than the rounds that stay."""
        reason = f"its round is not among the newest {self.last} of the history"
        for place, _ in draft.free(0, draft.history_before(self.last)):
            yield draft.removing(place, self.type, reason)

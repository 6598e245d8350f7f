"""`recent_window`: of the messages, from the newest back, what fits into a budget of tokens."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal, Self

from pydantic import model_validator

from proxy.dialects.jsontext import is_object
from proxy.trimming.draft import Draft
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.model import Change
from proxy.trimming.settings import Positive, Share, Target


class RecentWindow(BaseEdit, frozen=True):
    """From the newest message back, what fits into a budget of tokens stays; the rest goes.

    An assistant message with its tool calls and all their results is one chain, kept whole or not at all.
    What is protected stays in any case and is counted first. The budget is its own limit: it acts above that,
    though the policy's target may be met already.
    """

    type: Literal["recent_window"] = "recent_window"
    """Which strategy this is."""
    tokens: Positive | None = None
    """The budget: so many tokens of messages; instructions, tools and a summary are not counted."""
    ratio: Share | None = 0.65
    """The budget: this part of the target minus instructions and tools; only where `tokens` is not set."""
    target: Target | None = None
    """What `ratio` is a part of, in place of the policy's target."""
    on_overflow: Literal["skip", "stop"] = "skip"
    """When a chain does not fit: `skip` leaves it out and goes on with older ones, `stop` ends there."""

    @model_validator(mode="before")
    @classmethod
    def _tokens_take_the_place_of_the_ratio(cls, settings: Any) -> Any:
        if is_object(settings) and settings.get("tokens") is not None and "ratio" not in settings:
            return {**settings, "ratio": None}
        return settings

    @model_validator(mode="after")
    def _says_how_much(self) -> Self:
        if (self.tokens is None) == (self.ratio is None):
            raise ValueError("set one of tokens, ratio")
        return self

    @property
    def lacks_target(self) -> bool:
        """Whether its budget is a part of the policy's target."""
        return self.tokens is None and self.target is None

    @property
    def budget(self) -> Target | None:
        """What its window is a part of."""
        return self.target

    def is_done(self, draft: Draft) -> bool:
        """Tell whether all messages fit into the budget."""
        budget = self._budget(draft)
        return budget is None or sum(draft.tokens) <= budget

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Remove what does not fit."""
        budget = self._budget(draft)
        if budget is None:
            return
        left = budget - sum(draft.tokens[position] for position in draft.protected)
        reason, stopped = "it is not among the newest that fit into the window", False
        for span in reversed(draft.spans):
            free = [place for place, _ in draft.free(span.start, span.stop)]
            cost = sum(draft.tokens[at] for at in free)
            if cost <= left and not stopped:
                left -= cost
                continue
            stopped = stopped or (bool(free) and self.on_overflow == "stop")
            for position in free:
                yield draft.removing(position, self.type, reason)

    def _budget(self, draft: Draft) -> int | None:
        """Return how many tokens may stay; None where it is a part of a target that is not known."""
        if self.ratio is None:
            return draft.limit(Target(tokens=self.tokens))
        target = draft.limit(self.target)
        return int(self.ratio * (target - draft.fixed_tokens)) if target is not None else None

"""When to trim, and how far: the two thresholds of a policy, and the sizes they are compared with.

A threshold is passed by what is *above* it: `{messages: 10}` says "more than ten messages".
It does not know what is sent nor how it is trimmed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, Literal, Self

from msgspec import Struct
from pydantic import model_validator

from proxy.trimming.plan import Cut, PlanningContext
from proxy.trimming.prices import ASSUMED
from proxy.trimming.section import Positive, Section, Share

_PATIENCE: Final = 4
"""Without a target, a view that stays above its trigger waits for a fourth of the trigger more."""

IDLE: Final = "idle"
"""How the words begin that say that time alone has passed."""

UNKNOWN_WINDOW: Final = "the context window of this model is not known: `ratio` cannot be used"
"""What is said where a `ratio` stands and nobody knows of what."""


class Size(Struct, frozen=True, kw_only=True):
    """How much is sent."""

    tokens: int
    """Tokens, those of instructions and tools included."""
    messages: int
    """Messages of the log."""
    tool_calls: int
    """Tool results among them."""


class _Threshold(Struct, frozen=True, kw_only=True):
    """One key of a trigger beside the size that it speaks of."""

    key: str
    value: int
    limit: float
    after: int
    """The same size right after the last move of the cut; 0 where there was none."""
    target: int | None = None
    """How far to trim then; None where nothing says it."""
    share: float | None = None
    """Where the limit is a part of the window: which."""
    window: int | None = None
    """That window, in tokens."""

    @property
    def passed(self) -> bool:
        """Whether the value is above the limit."""
        return self.value > self.limit

    @property
    def fires(self) -> bool:
        """Whether it is passed, and by enough where the last move could not help."""
        return self.passed and (
            self.after <= self.limit or self.value >= self.after + _growth(self.limit, self.target)
        )

    @property
    def words(self) -> str:
        """What is above what."""
        if self.window is None:
            return f"{self.key} {self.value} > {self.limit}"
        return f"{self.key} {self.value / self.window:.3f} > {self.share} of {self.window} tokens"


class Trigger(Section, frozen=True):
    """When: any key that is passed is enough under `trigger`, all are needed under `when`."""

    tokens: Positive | None = None
    """Above so many tokens, those of instructions and tools included."""
    ratio: Share | None = None
    """Above this part of the model's context window, counted like `tokens`."""
    messages: Positive | None = None
    """Above so many messages; instructions are not counted."""
    tool_calls: Positive | None = None
    """Above so many tool results."""
    idle_seconds: Positive | Literal["auto"] | None = None
    """When the session was idle for longer: the provider's prompt cache is cold, and what is trimmed then
    costs nothing to rewrite. `auto` takes the time that the model's cache lives."""
    cost: Literal["auto"] | None = None
    """`auto`: when trimming pays, by the model's prices and the session's own growth. An edit then runs only
    if what it frees pays for what it rewrites in the provider's cache."""
    every_request: bool = False
    """At every request: the provider's prompt cache then finds little, which can cost more than it saves."""

    @model_validator(mode="after")
    def _says_when(self) -> Self:
        """Refuse a trigger that can never fire."""
        if not self.model_dump(exclude_defaults=True):
            allowed = ", ".join(type(self).model_fields)
            raise ValueError(f"it never fires: set at least one of {allowed}")
        return self

    @property
    def only_ratio(self) -> bool:
        """Whether nothing but a ratio can make it fire."""
        return self.ratio is not None and set(self.model_dump(exclude_defaults=True)) == {"ratio"}

    def fired(self, size: Size, known: PlanningContext, standing: Cut | None, target: int | None) -> str:
        """Return in words what fires for a view of `size`, "" where nothing does; `cost` is not judged here.

        Where the last move left the view above a threshold, because nothing more may be trimmed,
        that threshold waits until the view has grown by trigger minus `target` (tokens; a fourth
        of the trigger without one, and for messages and tool calls): a cut that moved at every
        request would cost more than it saves.
        """
        words = ["every_request"] if self.every_request else []
        thresholds = self._thresholds(size, known, standing, target)
        words += [each.words for each in thresholds if each.fires]
        if self.idle_seconds is not None and self._idle(known):
            words.append(f"{IDLE} for {known.idle or 0:.0f} s")
        return "; ".join(words)

    def holds(self, size: Size, known: PlanningContext) -> bool:
        """Tell whether all keys are passed by `size`; a `ratio` of an unknown window is not.

        `cost` is not judged here: it depends on what the edit would change.
        """
        if self.ratio is not None and known.context_window is None:
            return False
        if self.idle_seconds is not None and not self._idle(known):
            return False
        return all(each.passed for each in self._thresholds(size, known, None, None))

    def shares(self, size: Size, known: PlanningContext) -> Iterator[float]:
        """Yield what part of each threshold `size` has reached, of those that can be judged."""
        yield from (each.value / each.limit for each in self._thresholds(size, known, None, None))

    def _idle(self, known: PlanningContext) -> bool:
        """Tell whether the session was idle for long enough."""
        given = self.idle_seconds
        limit = given if isinstance(given, int) else (known.prices or ASSUMED).lifetime
        return known.idle is not None and known.idle > limit

    def _thresholds(
        self, size: Size, known: PlanningContext, standing: Cut | None, target: int | None
    ) -> Iterator[_Threshold]:
        """Yield the keys that are set and can be judged; tokens as upstream counts them."""
        tokens, window = round(size.tokens * known.scale), known.context_window
        after = round(standing.tokens * known.scale) if standing is not None else 0
        if self.tokens is not None:
            yield _Threshold(key="tokens", value=tokens, limit=self.tokens, after=after, target=target)
        if self.ratio is not None and window is not None:
            yield _Threshold(
                key="ratio",
                value=tokens,
                limit=self.ratio * window,
                after=after,
                target=target,
                share=self.ratio,
                window=window,
            )
        if self.messages is not None:
            after = standing.messages if standing is not None else 0
            yield _Threshold(key="messages", value=size.messages, limit=self.messages, after=after)
        if self.tool_calls is not None:
            after = standing.tool_calls if standing is not None else 0
            yield _Threshold(key="tool_calls", value=size.tool_calls, limit=self.tool_calls, after=after)


class Target(Section, frozen=True):
    """How far: edits run in order until the view is not above it."""

    tokens: Positive | None = None
    """So many tokens, those of instructions and tools included."""
    ratio: Share | None = None
    """This part of the model's context window, counted like `tokens`."""

    @model_validator(mode="after")
    def _says_how_far(self) -> Self:
        """Refuse a target of no unit, or of two."""
        if (self.tokens is None) == (self.ratio is None):
            raise ValueError("set one of tokens, ratio")
        return self

    def within(self, window: int | None) -> int | None:
        """Return the target in tokens; None where it is a part of a window that is not known."""
        if self.tokens is not None:
            return self.tokens
        return int((self.ratio or 0) * window) if window is not None else None


def _growth(limit: float, target: int | None) -> float:
    """Return by how much a view must grow after a move that left it above `limit`; at least 1."""
    return max(1, limit - target if target is not None else limit // _PATIENCE)

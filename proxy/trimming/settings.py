"""The types of the settings of policies and edits: sections, numbers, patterns, triggers and targets."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

import re2  # type: ignore[import-untyped]  # the package ships no types
from msgspec import Struct
from msgspec.structs import replace
from pydantic import BaseModel, BeforeValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from proxy.trimming.model import ASSUMED, Cut, PlanningContext, Size

_RE2: Final[Any] = re2
_PATIENCE: Final = 4  # without a target, a view that stays above a threshold must grow by a fourth of it to fire again

IDLE: Final = "idle"  # prefix of `Plan.fired` if the idle time fired

UNKNOWN_WINDOW: Final = "the context window of this model is not known: `ratio` cannot be used"
"""The warning if a `ratio` is set and the context window is unknown."""


class Section(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A mapping whose keys are fields: frozen, unknown keys refused, docstrings in the JSON Schema.

    Subclasses repeat `frozen=True` for type checkers.
    """

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """Return a copy with other settings and without cached properties, which may depend on the settings."""
        copied = super().model_copy(update=update, deep=deep)
        kept = vars(copied)  # holds the fields and the values of cached properties
        for name in kept.keys() - type(self).model_fields.keys():
            del kept[name]
        return copied


def contradiction(message: str, *at: str | int) -> PydanticCustomError:
    """Return an error for the value at the path `at`, relative to the model that raises it."""
    return PydanticCustomError("contradiction", "{message}", {"message": message, "at": at})  # pyright: ignore[reportArgumentType] - a LiteralString is asked for, and is given


def _no_truth_value(value: object) -> object:
    """Refuse booleans. YAML reads an unquoted yes, no, on or off as one, and Python would count true as 1."""
    if isinstance(value, bool):
        raise ValueError("a number is needed here, not true or false (YAML reads yes, no, on, off as these)")  # noqa: TRY004  pydantic turns a ValueError, not a TypeError, into an error of the file
    return value


NO_TRUTH_VALUE: Final = BeforeValidator(_no_truth_value)

_MOST: Final = 10**15  # larger than anything counted, and exact in JSON

Positive: TypeAlias = Annotated[int, Field(gt=0, le=_MOST), NO_TRUTH_VALUE]  # a whole number, at least 1

Natural: TypeAlias = Annotated[int, Field(ge=0, le=_MOST), NO_TRUTH_VALUE]  # a whole number, at least 0

Share: TypeAlias = Annotated[float, Field(gt=0, le=1), NO_TRUTH_VALUE]
"""A part of a whole: above 0, at most 1."""


def checked(regex: str) -> str:
    """Return the pattern if RE2 accepts it; raise `ValueError` with RE2's reason if not."""
    try:
        _pattern(regex)
    except ValueError as why:
        raise ValueError(f"not a pattern that RE2 takes: {why}") from why
    return regex


def is_found(regex: str, text: str) -> bool:
    """Tell whether the pattern is found anywhere in a text."""
    return _pattern(regex).search(text) is not None


def group_names(regex: str) -> frozenset[str]:
    """Return the names of a pattern's groups."""
    return frozenset(_pattern(regex).groupindex)


def named_groups(regex: str, text: str) -> Mapping[str, str] | None:
    """Return the values of the named groups at the first match; None if there is no match."""
    match = _pattern(regex).search(text)
    if match is None:
        return None
    return {name: held for name, held in match.groupdict().items() if held is not None}


def compiled(regex: str) -> Any:
    """Return the compiled pattern; raise `ValueError` with RE2's reason if it is invalid."""
    options = _RE2.Options()
    options.log_errors = False  # RE2 would write to stderr
    try:
        return _RE2.compile(regex, options)
    except _RE2.error as why:
        raise ValueError(why.args[0].decode()) from why


_pattern: Final = lru_cache(maxsize=256)(compiled)
"""A cache of compiled patterns, only for those of policies. Search patterns of models and users would evict them, and
each pattern that has searched a text takes megabytes."""


class _Threshold(Struct, frozen=True, kw_only=True):
    """One key of a trigger with the value that it limits."""

    key: str
    value: int
    limit: float
    after: int  # the value right after the last trim; 0 if there was none
    target: int | None = None  # the target of a trim; None if there is none
    share: float | None = None  # the part of the context window, if the limit is one
    window: int | None = None  # that window in tokens

    @property
    def fires(self) -> bool:
        """Whether the limit is passed. If the last trim left the view above it, it must also have grown enough."""
        growth = self.limit // _PATIENCE if self.target is None else self.limit - self.target
        return self.value > self.limit and (self.after <= self.limit or self.value >= self.after + max(1, growth))

    @property
    def words(self) -> str:
        """The value and the limit in words."""
        if self.window is None:
            return f"{self.key} {self.value} > {self.limit}"
        return f"{self.key} {self.value / self.window:.3f} > {self.share} of {self.window} tokens"


class Trigger(Section, frozen=True):
    """When to trim or to run an edit. Under `trigger`, one key that fires is enough; under `when`, all must fire."""

    tokens: Positive | None = None
    """Fires above this number of tokens, instructions and tools included."""
    ratio: Share | None = None
    """Fires above this part of the model's context window, counted like `tokens`."""
    messages: Positive | None = None
    """Fires above this number of messages. Instructions are not counted."""
    tool_calls: Positive | None = None
    """Fires above this number of tool results."""
    idle_seconds: Positive | Literal["auto"] | None = None
    """Fires if the session was idle for longer. The provider's prompt cache is then cold, so a trim costs no cache
    rewrite. `auto` uses the lifetime of the model's cache."""
    cost: Literal["auto"] | None = None
    """`auto` fires when trimming pays, judged by the model's prices and the session's own growth. An edit then runs
    only if what it frees pays for what it rewrites in the provider's cache."""
    every_request: bool = False
    """Whether to fire at every request. The provider's prompt cache then finds little, which can cost more than it
    saves."""

    @model_validator(mode="after")
    def _says_when(self) -> Self:
        if not self.model_dump(exclude_defaults=True):
            allowed = ", ".join(type(self).model_fields)
            raise ValueError(f"it never fires: set at least one of {allowed}")
        return self

    @property
    def only_ratio(self) -> bool:
        """Whether nothing but a ratio can make it fire."""
        return self.ratio is not None and set(self.model_dump(exclude_defaults=True)) == {"ratio"}

    def fired(self, size: Size, context: PlanningContext, current: Cut | None, target: int | None) -> str:
        """Return in words what fires for a view of `size`, or "" if nothing does. `cost` is not judged here.

        If the last trim left the view above a threshold, that threshold fires again only after growth, since a trim at
        every request costs more than it saves. The view must grow by threshold minus `target` if that is known (only
        for tokens), else by a fourth of the threshold.
        """
        words = ["every_request"] if self.every_request else []
        thresholds = self._thresholds(size, context, current, target)
        words += [threshold.words for threshold in thresholds if threshold.fires]
        if self.idle_seconds is not None and self._idle(context):
            words.append(f"{IDLE} for {context.idle or 0:.0f} s")
        return "; ".join(words)

    def holds(self, size: Size, context: PlanningContext) -> bool:
        """Tell whether all keys are passed. A `ratio` of an unknown window is not passed; `cost` is not judged."""
        if self.ratio is not None and context.context_window is None:
            return False
        if self.idle_seconds is not None and not self._idle(context):
            return False
        return all(each.value > each.limit for each in self._thresholds(size, context))

    def shares(self, size: Size, context: PlanningContext) -> list[float]:
        """Return for each threshold that can be judged the part of it that `size` has reached."""
        return [each.value / each.limit for each in self._thresholds(size, context)]

    def _idle(self, context: PlanningContext) -> bool:
        given = self.idle_seconds
        limit = given if isinstance(given, int) else (context.prices or ASSUMED).lifetime
        return context.idle is not None and context.idle > limit

    def _thresholds(
        self, size: Size, context: PlanningContext, current: Cut | None = None, target: int | None = None
    ) -> list[_Threshold]:
        """Return the thresholds that are set and can be judged, with tokens as upstream counts them."""
        found: list[_Threshold] = []
        tokens, window = round(size.tokens * context.scale), context.context_window
        after = round(current.tokens * context.scale) if current is not None else 0
        if self.tokens is not None:
            found.append(_Threshold(key="tokens", value=tokens, limit=self.tokens, after=after, target=target))
        if (share := self.ratio) is not None and window is not None:
            ratio = _Threshold(key="ratio", value=tokens, limit=share * window, after=after, target=target)
            found.append(replace(ratio, share=share, window=window))
        if self.messages is not None:
            after = current.messages if current is not None else 0
            found.append(_Threshold(key="messages", value=size.messages, limit=self.messages, after=after))
        if self.tool_calls is not None:
            after = current.tool_calls if current is not None else 0
            found.append(_Threshold(key="tool_calls", value=size.tool_calls, limit=self.tool_calls, after=after))
        return found


class Target(Section, frozen=True):
    """How far to trim. Edits run in order until the view is within the target."""

    tokens: Positive | None = None
    """Maximum tokens, instructions and tools included."""
    ratio: Share | None = None
    """Maximum part of the model's context window, counted like `tokens`."""

    @model_validator(mode="after")
    def _says_how_far(self) -> Self:
        if (self.tokens is None) == (self.ratio is None):
            raise ValueError("set one of tokens, ratio")
        return self

    def within(self, window: int | None) -> int | None:
        """Return the target in tokens; None if it is a part of an unknown window."""
        if self.tokens is not None:
            return self.tokens
        return int((self.ratio or 0) * window) if window is not None else None

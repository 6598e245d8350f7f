"""A policy as the operator writes it: whom it serves, when to trim, how far, what to keep and how.

A wrong policy is an error here and says what is allowed. What a policy *does* stands elsewhere:
in its edits, and in the engine that runs them.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

import orjson
import re2  # type: ignore[import-untyped]  # the package ships no types
from pydantic import AfterValidator, Field, field_validator, model_validator

from proxy.trimming.edits import TOOL_OUTPUT_TYPES, Edit, ToolOutputEdit
from proxy.trimming.section import Natural, Section
from proxy.trimming.trigger import Target, Trigger
from proxy.wire.messages import Message

_RE2: Final[Any] = re2
"""Patterns come from users and texts from tools: RE2 takes linear time on any of both."""

_VERSION_BYTES: Final = 6

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]
"""The roles of the Chat Completions API."""

ROLES: Final[tuple[Role, ...]] = ("system", "developer", "user", "assistant", "tool", "function")


class Match(Section, frozen=True):
    """Whom a policy serves: both patterns must fit. `*` stands for anything, `?` for one character."""

    models: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Names of models as the client asks for them; one that fits is enough."""
    tenants: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Names of tenants; one that fits is enough."""

    def covers(self, tenant: str, model: str) -> bool:
        """Tell whether requests of `tenant` for `model` are meant. Case counts."""
        return _fits(tenant, self.tenants) and _fits(model, self.models)


class Keep(Section, frozen=True):
    """What is sent verbatim, whatever the edits say, as it stands when the cut moves."""

    rounds: Natural = 1
    """Of so many rounds, the newest ones; the current one is the first of them."""
    spans: Natural = 4
    """In each of these rounds so many spans, its newest ones."""
    first_user: bool = False
    """The first user message of the session too."""


class Pin(Section, frozen=True):
    """Messages that are never trimmed; a pinned message keeps its whole span."""

    regex: Annotated[str, Field(min_length=1)]
    """What is searched for in the text of a message, in RE2's syntax (no look-around, no back-references)."""
    roles: Annotated[tuple[Role, ...], Field(min_length=1)] = ROLES
    """Only in messages of these roles."""

    @field_validator("regex")
    @classmethod
    def _compiles(cls, regex: str) -> str:
        """Refuse a pattern that RE2 does not take, with RE2's own reason."""
        try:
            _compiled(regex)
        except _RE2.error as error:
            raise ValueError(f"not a pattern that RE2 takes: {error.args[0].decode()}") from error
        return regex

    def fits(self, message: Message) -> bool:
        """Tell whether `message` is pinned."""
        return message.role in self.roles and _compiled(self.regex).search(message.text) is not None


def _only_tool_output(edit: Edit) -> Edit:
    """Refuse an edit that decides about more than one message's own content."""
    if not isinstance(edit, ToolOutputEdit):
        allowed = ", ".join(TOOL_OUTPUT_TYPES)
        raise ValueError(f"{edit.type} may not stand under on_arrival; allowed here: {allowed}")  # noqa: TRY004  pydantic turns a ValueError, not a TypeError, into an error of the file
    return edit


class Policy(Section, frozen=True):
    """One policy. Without trigger and edits it sends everything."""

    match: Match = Match()
    """Whom it serves; the first policy of the file that fits is taken."""
    trigger: Trigger | None = None
    """When the cut moves: any key that is passed is enough. Until then requests grow by what is new."""
    target: Target | None = None
    """How far to trim; without it each edit runs once."""
    keep: Keep = Keep()
    """What is sent verbatim, whatever the edits say."""
    pin: tuple[Pin, ...] = ()
    """Messages that are never trimmed."""
    on_arrival: tuple[Annotated[Edit, AfterValidator(_only_tool_output)], ...] = ()
    """Edits of tool output that act from the first time it is sent. `keep` does not bind them, `pin` does."""
    edits: tuple[Edit, ...] = ()
    """Edits that run, in this order, when the cut moves."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        """Refuse keys that contradict each other or could never do anything."""
        for wrong in self._contradictions():
            raise ValueError(wrong)
        return self

    def _contradictions(self) -> Iterable[str]:
        """Yield what is wrong with the keys taken together, the first cause first."""
        if self.trigger is None and (self.edits or self.target is not None):
            yield f"edits and target need a trigger; it takes any of {', '.join(Trigger.model_fields)}"
        if self.trigger is not None and not self.edits:
            yield "a trigger without edits trims nothing: add edits, or leave the trigger out"
        for edit in self.edits:
            if edit.needs_target and self.target is None:
                yield f"{edit.type} needs a target: set target.tokens or target.ratio"
        if self.trigger is not None and self.target is not None:
            for unit in ("tokens", "ratio"):
                above, below = getattr(self.trigger, unit), getattr(self.target, unit)
                if above is not None and below is not None and below > above:
                    yield f"target.{unit} ({below}) is above trigger.{unit} ({above}), the most it may be"

    @cached_property
    def version(self) -> str:
        """Twelve hexadecimal digits that stand for what the policy does; `match` is no part of it."""
        content = self.model_dump(mode="json", exclude={"match"}, exclude_none=True)
        return blake2b(
            orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=_VERSION_BYTES
        ).hexdigest()

    @property
    def arrival_edits(self) -> tuple[ToolOutputEdit, ...]:
        """The edits of `on_arrival`, as what they are."""
        return tuple(edit for edit in self.on_arrival if isinstance(edit, ToolOutputEdit))

    def pins(self, message: Message) -> bool:
        """Tell whether a pin fits `message`."""
        return any(pin.fits(message) for pin in self.pin)


def _fits(name: str, patterns: Iterable[str]) -> bool:
    """Tell whether one of the patterns fits the name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@lru_cache(maxsize=256)
def _compiled(regex: str) -> Any:
    """Return the compiled pattern. RE2 is told not to write to stderr on its own."""
    options = _RE2.Options()
    options.log_errors = False
    return _RE2.compile(regex, options)

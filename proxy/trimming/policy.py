"""A policy as the operator writes it: which requests it serves, when and how far to trim, what to keep, the edits."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fnmatch import fnmatchcase
from functools import cached_property
from hashlib import blake2b
from typing import Annotated, Any, Final, Literal, Self, TypeAlias

import orjson
from pydantic import AfterValidator, Field, model_validator

from proxy.dialects import Message
from proxy.trimming.edits import TOOL_OUTPUT_TYPES, Edit, ToolOutputEdit
from proxy.trimming.edits.summarize import COMPACTION, Summarize
from proxy.trimming.settings import Natural, Section, Share, Target, Trigger, checked, contradiction, is_found

_VERSION_BYTES: Final = 6

Role: TypeAlias = Literal["system", "developer", "user", "assistant", "tool", "function"]
"""The roles of the Chat Completions API."""

Place: TypeAlias = tuple[str | int, ...]  # the path from a policy to a value in it

_KEEPING: Final = {"keep_tool_calls": "last", "keep_rounds": "last", "evict_images": "keep"}
"""Edits that keep the newest of something, and the setting that says how many."""

_ROOM: Final = 0.1  # a trim should free at least this part of the trigger

ROLES: Final[tuple[Role, ...]] = ("system", "developer", "user", "assistant", "tool", "function")


class Match(Section, frozen=True):
    """Whom a policy serves: both patterns must fit. `*` stands for anything, `?` for one character."""

    models: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Names of models as the client asks for them; one that fits is enough."""
    tenants: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Names of tenants; one that fits is enough."""

    def covers(self, tenant: str, model: str) -> bool:
        """Tell whether requests of `tenant` for `model` match. Case-sensitive."""
        return self.covers_tenant(tenant) and _fits(model, self.models)

    def covers_tenant(self, tenant: str) -> bool:
        """Tell whether requests of `tenant` can match."""
        return _fits(tenant, self.tenants)


class Keep(Section, frozen=True):
    """What is sent verbatim, whatever the edits say, as it stands when the log is trimmed."""

    rounds: Natural = 1
    """Of so many rounds, the newest ones; the current one is the first of them."""
    spans: Natural = 4
    """In each of these rounds so many spans, its newest ones."""
    first_user: bool = False
    """The first user message of the session too."""


class ToolRules(Section, frozen=True):
    """Which of the client's tools are offered to the model."""

    remove: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of tools that are left out, unless the history calls them, the request forces them, or the provider runs
    them."""


class Pin(Section, frozen=True):
    """Messages that are never trimmed; a pinned message keeps its whole span."""

    regex: Annotated[str, Field(min_length=1), AfterValidator(checked)]
    """What is searched for in the text of a message, in RE2's syntax (no look-around, no back-references)."""
    roles: Annotated[tuple[Role, ...], Field(min_length=1)] = ROLES
    """Only in messages of these roles."""

    def fits(self, message: Message) -> bool:
        """Tell whether `message` is pinned."""
        if message.role in self.roles:
            return is_found(self.regex, message.text)
        return message.is_result and "user" in self.roles and is_found(self.regex, message.beside)


def _only_tool_output(edit: Edit) -> Edit:
    if not isinstance(edit, ToolOutputEdit):
        allowed = ", ".join(TOOL_OUTPUT_TYPES)
        raise ValueError(f"{edit.type} may not stand under on_arrival; allowed here: {allowed}")  # noqa: TRY004  pydantic turns a ValueError, not a TypeError, into an error of the file
    return edit


class Policy(Section, frozen=True):
    """One policy. Without trigger and edits it sends everything."""

    extends: str | None = None
    """The policy that it takes everything over from but `match`; what is written here goes before that."""
    match: Match = Match()
    """Whom it serves; the first policy of the file that fits is taken."""
    mode: Literal["trim", "observe"] = "trim"
    """`observe` plans and records what it would trim, and sends everything."""
    share: Share = 1.0
    """The part of the sessions that it serves, always the same ones; the others go on to the next policy that fits."""
    tools: ToolRules = ToolRules()
    """Tools that are left out."""
    trigger: Trigger | None = None
    """When to trim: any key that is passed is enough. Until then requests grow by what is new."""
    target: Target | None = None
    """How far to trim; without it each edit runs once."""
    trim_at: Literal["turn", "any"] = "turn"
    """`turn`: where reasoning is sent, a trim waits for the next user message, unless the request would pass 1.25 times
    the trigger, or the window. Trimming makes reasoning behind it invalid. Never under `every_request`."""
    agents: Literal["separate", "merge"] = "separate"
    """`merge`: an agent that resends its own history is also sent what other agents of the session said since."""
    keep: Keep = Keep()
    """What is sent verbatim, whatever the edits say."""
    pin: tuple[Pin, ...] = ()
    """Messages that are never trimmed."""
    on_arrival: tuple[Annotated[Edit, AfterValidator(_only_tool_output)], ...] = ()
    """Edits of tool output that act from the first time it is sent. `keep` does not bind them, `pin` does."""
    edits: tuple[Edit, ...] = ()
    """Edits that run, in this order, when the log is trimmed."""

    @model_validator(mode="after")
    def _makes_sense(self) -> Self:
        for wrong, *at in self._contradictions():
            raise contradiction(wrong, *at)
        return self

    def _contradictions(self) -> Iterator[tuple[str, *Place]]:
        """Yield (error, *path) for each contradiction between keys, root causes first."""
        if self.trigger is None and (self.edits or self.target is not None):
            allowed = ", ".join(Trigger.model_fields)
            at = "edits" if self.edits else "target"
            yield f"edits and target need a trigger; it takes any of {allowed}", at
        if self.trigger is not None and not self.edits:
            yield "a trigger without edits trims nothing: add edits, or leave the trigger out", "trigger"
        for place, edit in enumerate(self.edits):
            if edit.lacks_target and self.target is None:
                said = f"{edit.type} needs a target: set target.tokens or target.ratio"
                yield said, "edits", place
        if self.trigger is not None and self.target is not None:
            for unit in ("tokens", "ratio"):
                above, below = getattr(self.trigger, unit), getattr(self.target, unit)
                if above is not None and below is not None and below > above:
                    said = f"target.{unit} ({below}) is above trigger.{unit} ({above}), the most it may be"
                    yield said, "target", unit
        yield from _idle(self.edits, "edits")
        yield from _idle(self.on_arrival, "on_arrival")

    @property
    def warnings(self) -> tuple[tuple[str, *Place], ...]:
        """Settings that are allowed but have no effect or a bad one, each as (warning, *path)."""
        found: list[tuple[str, *Place]] = []
        if self.mode == "observe" and not self.edits and not self.on_arrival:
            found.append(("it has no edits to observe; the built-in ones: extends: built-in", "mode"))
        if self.trigger is not None and self.trigger.every_request:
            named = (key for key in Trigger.model_fields if key not in {"every_request", "cost"})
            found += [
                (f"beside every_request, {key} decides nothing", "trigger", key)
                for key in named
                if getattr(self.trigger, key) is not None
            ]
        pays = self.trigger is not None and self.trigger.cost is not None  # then edits that do not pay are skipped
        if self.target is not None and self.target.tokens is not None and not pays:
            for place, edit in enumerate(self.edits[:-1]):
                if edit.type == "drop_oldest" and edit.when is None and getattr(edit, "target", None) is None:
                    after = ", ".join(dict.fromkeys(later.type for later in self.edits[place + 1 :]))
                    said = f"drop_oldest goes on until the target is met, and leaves nothing to {after}"
                    found.append((f"{said}: put it last", "edits", place))
        for name, edits in (("edits", self.edits), ("on_arrival", self.on_arrival)):
            for place, edit in enumerate(edits):
                found += [(said, name, place, setting) for setting, said in edit.without_effect.items()]
        return (*found, *self._too_near())

    def _too_near(self) -> Iterator[tuple[str, *Place]]:
        """Yield (warning, *path) for each target so near to the trigger that the next request fires it again."""
        for unit in ("tokens", "ratio"):
            above = getattr(self.trigger, unit, None)
            named: list[tuple[float | None, Place]] = [(getattr(self.target, unit, None), ("target", unit))]
            for place, edit in enumerate(self.edits):
                own = edit if edit.type == "recent_window" and unit == "tokens" else getattr(edit, "target", None)
                named.append((getattr(own, unit, None), ("edits", place)))
            for below, way in named:
                if above is not None and below is not None and above * (1 - _ROOM) < below <= above:
                    said = f"{below} is too near to trigger.{unit} ({above})"
                    yield f"{said}: the next requests trim again, and nothing stays cached; leave a tenth", *way

    @cached_property
    def version(self) -> str:
        """A hash of how the policy trims, as 12 hexadecimal digits; `match` and the name in `extends` do not count."""
        # These settings decide whether and when to trim, and what is there to trim, but not how.
        beside = {"match", "extends", "trim_at", "agents", "mode", "share", "tools"}
        content = self.model_dump(mode="json", exclude=beside, exclude_none=True)
        return blake2b(orjson.dumps(content, option=orjson.OPT_SORT_KEYS), digest_size=_VERSION_BYTES).hexdigest()

    def written(self) -> dict[str, Any]:
        """Return the settings that differ from the defaults, as in a configuration file; edits include their type."""
        made = self.model_dump(mode="json", exclude_defaults=True)
        for name, edits in (("on_arrival", self.on_arrival), ("edits", self.edits)):
            if edits:
                made[name] = [
                    {"type": edit.type, **edit.model_dump(mode="json", exclude_defaults=True)} for edit in edits
                ]
        return made

    @cached_property
    def uses_cost(self) -> bool:
        """Whether any of its decisions depends on the cost of a trim."""
        return (self.trigger is not None and self.trigger.cost is not None) or any(edit.must_pay for edit in self.edits)

    @cached_property
    def relies_on_window(self) -> bool:
        """Whether the operator relies on a `ratio`, which cannot be judged without the context window."""
        trigger = self.trigger
        if (trigger is not None and trigger.only_ratio) or (self.target and self.target.ratio is not None):
            return True
        if trigger is not None and trigger.ratio is not None:
            return False  # other keys can still fire the trigger
        return any(edit.when is not None and edit.when.ratio is not None for edit in self.on_arrival + self.edits)

    @cached_property
    def summarizer(self) -> Summarize | None:
        """The first `summarize` edit with `mode: model`, or None."""
        return next((edit for edit in self.edits if isinstance(edit, Summarize) and edit.mode == "model"), None)

    @cached_property
    def summarizing(self) -> Summarize:
        """The edit for summaries that are explicitly requested: the policy's own, or `COMPACTION`."""
        return self.summarizer or COMPACTION

    @cached_property
    def budget(self) -> Target | None:
        """The first budget that an edit has of its own, or None."""
        return next((edit.budget for edit in self.edits if edit.budget is not None), None)

    @cached_property
    def arrival_edits(self) -> tuple[ToolOutputEdit, ...]:
        """The edits of `on_arrival`, typed as tool output edits."""
        return tuple(edit for edit in self.on_arrival if isinstance(edit, ToolOutputEdit))

    def pins(self, message: Message) -> bool:
        """Tell whether a pin matches `message`."""
        return any(pin.fits(message) for pin in self.pin)


def _idle(edits: Sequence[Edit], name: str) -> Iterator[tuple[str, *Place]]:
    """Yield (error, *path) for each edit of the list `name` that can do nothing after an earlier edit."""
    for place, edit in enumerate(edits):
        before = (at for at, other in enumerate(edits[:place]) if _leaves_nothing_to(other, edit))
        if (earlier := next(before, None)) is not None:
            said = f"{edit.type} can never do anything here: {name}[{earlier}] does as much before it"
            yield said, name, place


def _leaves_nothing_to(first: Edit, second: Edit) -> bool:
    """Tell whether `second`, run after `first`, certainly changes nothing.

    This is so if `first` has the same type, runs whenever `second` does, and has the same settings or keeps less.
    """
    if first.type != second.type or first.when not in {None, second.when}:
        return False
    counted = _KEEPING.get(first.type)
    if counted is not None and getattr(first, counted) > getattr(second, counted):
        return False
    ignored = {"when"} if counted is None else {"when", counted}
    return first.model_dump(exclude=ignored) == second.model_dump(exclude=ignored)


def _fits(name: str, patterns: Collection[str]) -> bool:
    """Tell whether one of the patterns matches the name. The common case `*` is tested first."""
    return "*" in patterns or any(fnmatchcase(name, pattern) for pattern in patterns)

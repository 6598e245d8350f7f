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
    """Which requests a policy serves. Models and tenants must both match. `*` matches anything, `?` one character."""

    models: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Model names as the client sends them. One match is enough."""
    tenants: Annotated[tuple[str, ...], Field(min_length=1)] = ("*",)
    """Names of tenants. One match is enough."""

    def covers(self, tenant: str, model: str) -> bool:
        """Tell whether requests of `tenant` for `model` match. Case-sensitive."""
        return self.covers_tenant(tenant) and _fits(model, self.models)

    def covers_tenant(self, tenant: str) -> bool:
        """Tell whether requests of `tenant` can match."""
        return _fits(tenant, self.tenants)


class Keep(Section, frozen=True):
    """What is always sent verbatim, whatever the edits say. It is determined at each trim."""

    rounds: Natural = 1
    """Number of newest rounds in which spans are kept, the current one included. A round is a user message and
    everything up to the next one."""
    spans: Natural = 4
    """Number of newest spans to keep in each of these rounds. A span is an assistant message with its tool calls and
    all their results, or one other message."""
    first_user: bool = False
    """Whether to keep the first user message of the session too."""


class ToolRules(Section, frozen=True):
    """Which of the client's tools are offered to the model."""

    remove: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of tools to leave out. A tool stays if the history calls it, the request forces it, or the provider runs
    it."""


class Pin(Section, frozen=True):
    """Messages that are never trimmed. A pinned message keeps its whole span."""

    regex: Annotated[str, Field(min_length=1), AfterValidator(checked)]
    """Pattern to search for in the text of a message, in RE2 syntax (no look-around, no back-references)."""
    roles: Annotated[tuple[Role, ...], Field(min_length=1)] = ROLES
    """Roles of the messages to search."""

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
    """When to trim, how far, and with which edits. Without trigger and edits, everything is sent."""

    extends: str | None = None
    """Name of a policy to inherit from. Everything but `match` is inherited; settings written here override it."""
    match: Match = Match()
    """Which requests the policy serves. The first policy in the file that matches is used."""
    mode: Literal["trim", "observe"] = "trim"
    """`trim` trims. `observe` plans and records what it would trim, but sends everything."""
    share: Share = 1.0
    """Part of the sessions that the policy serves, always the same ones. The others go to the next policy that
    matches."""
    tools: ToolRules = ToolRules()
    """Tools to leave out."""
    trigger: Trigger | None = None
    """When to trim. One key that fires is enough. Until then, requests only grow by what is new."""
    target: Target | None = None
    """How far to trim. If unset, each edit runs once."""
    trim_at: Literal["turn", "any"] = "turn"
    """`turn`: if reasoning is sent, a trim waits for the next user message, because it invalidates the reasoning after
    it. It does not wait if the request would exceed 1.25 times the trigger or the context window, or with
    `every_request`. A trim that pays waits for at most 8 replies. `any`: a trim does not wait for a user message."""
    agents: Literal["separate", "merge"] = "separate"
    """`merge`: an agent that resends its own history is also sent what other agents of the session have said since.
    `separate`: it is not."""
    keep: Keep = Keep()
    """What is always sent verbatim, whatever the edits say."""
    pin: tuple[Pin, ...] = ()
    """Messages that are never trimmed."""
    on_arrival: tuple[Annotated[Edit, AfterValidator(_only_tool_output)], ...] = ()
    """Edits for tool output that act from the first time it is sent. `pin` applies to them, `keep` does not."""
    edits: tuple[Edit, ...] = ()
    """Edits to run at a trim, in this order."""

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

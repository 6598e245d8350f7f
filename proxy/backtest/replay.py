"""One history sent again, request by request, as its agent would have sent it under some strategy.

A strategy says for each request which messages are sent. A policy is one: it is replayed by the engine that
serves requests, and what it decided is carried along just as the proxy keeps it: what was decided on arrival
by message, the cut by agent. It knows no price: caches that it is given count for themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from msgspec.structs import replace

from proxy.backtest.cache import PromptCache, Rule, Use
from proxy.backtest.counted import Counted
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.trimming import Cut, Entry, Plan, PlanningContext, Policy, Prices, merged, plan


@dataclass(frozen=True, slots=True)
class Model:
    """What is known of the model that is asked."""

    prices: Prices | None = None
    context_window: int | None = None
    """Tokens that it takes; None where that is not known."""
    marks: bool = True
    """Whether the proxy sets cache marks for it, where it takes any."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What one request sends."""

    messages: tuple[Message, ...]
    """Instructions included."""
    moved: bool
    """Whether the cut moved; without a cut: whether the request does not begin with all of the last one."""
    warnings: tuple[str, ...] = ()
    """What could not be done, in words."""
    settled: tuple[int, ...] = ()
    """Places of the messages after which the proxy sets a cache mark, where the model takes any."""


class Course(Protocol):
    """A strategy on its way through one history."""

    def request(self, stop: int, idle: float | None) -> Sent:
        """Return what is sent of the first `stop` messages of the log; asked once for each request, in order.

        `idle` are the seconds since the last reply, None where nobody knows.
        """
        ...


class Strategy(Protocol):
    """A way to choose what is sent."""

    @property
    def name(self) -> str:
        """What it is asked for by."""
        ...

    @property
    def about(self) -> str:
        """What it does, in words."""
        ...

    @property
    def by_price(self) -> bool:
        """Whether it sends something else where prices are others."""
        ...

    def begin(self, counted: Counted, model: Model) -> Course:
        """Return its way through a history, before the first request."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a replay."""

    stop: int
    """Messages of the log that there were."""
    sent: Sent
    uses: Mapping[Rule, Use]
    """Where its tokens came from, by the rule of the provider's cache."""
    untrimmed: int
    """Tokens that it would have had without trimming."""

    @property
    def tokens(self) -> int:
        """Tokens that it has."""
        return next(iter(self.uses.values())).sent


def replayed(counted: Counted, strategy: Strategy, rules: Sequence[Rule], model: Model) -> Iterator[Request]:
    """Yield each request of a history under a strategy.

    Args:
        counted: The history.
        strategy: What chooses.
        rules: At least one: how the provider's cache works. Each counts for itself.
        model: What is known of the model.
    """
    course = strategy.begin(counted, model)
    caches = {rule: PromptCache(rule) for rule in rules}
    times, ended = counted.history.times, None
    untrimmed, done = counted.fixed_tokens, 0
    for stop in counted.history.requests:
        # A request is sent when the newest message that it holds has come.
        at = None if times is None else times[max(stop - 1, 0)]
        sent = course.request(stop, None if at is None or ended is None else max(0.0, at - ended))
        if times is not None:
            ended = times[min(stop, len(times) - 1)]  # the time of its reply
        untrimmed += sum([entry.tokens for entry in counted.entries[done:stop]])
        done = stop
        prompt, marks = (
            counted.prompt(sent.messages),
            counted.marks(sent.messages, sent.settled if model.marks else ()),
        )
        uses = {rule: cache.read(prompt, at or 0.0, marks) for rule, cache in caches.items()}
        yield Request(stop=stop, sent=sent, uses=uses, untrimmed=untrimmed)


@dataclass(frozen=True)
class PolicyStrategy:
    """A policy, decided by the proxy's own engine."""

    name: str
    policy: Policy
    about: str = "a policy of the configuration"

    @property
    def by_price(self) -> bool:
        """Whether anything in it depends on what the model costs, or on how long its cache lives."""
        waits = self.policy.trigger is not None and self.policy.trigger.idle_seconds == "auto"
        return self.policy.reckons or waits

    def begin(self, counted: Counted, model: Model) -> Course:
        """Return its way through a history."""
        return _PolicyCourse(self, counted, model)


class _PolicyCourse:
    """A policy on its way through a history."""

    def __init__(self, strategy: PolicyStrategy, counted: Counted, model: Model) -> None:
        self._strategy = strategy
        self._counted = counted
        self._model = model
        self._entries: list[Entry] = []
        self._cuts: dict[str | None, Cut] = {}

    def request(self, stop: int, idle: float | None) -> Sent:
        """Plan the request, and keep what was decided."""
        counted, entries = self._counted, self._entries
        known = len(entries)
        entries += counted.entries[known:stop]
        agent = counted.agent(stop)
        planned = plan(
            entries,
            self._strategy.policy,
            self._strategy.name,
            _known(counted, self._model, agent, idle),
            self._cuts.get(agent),
        )
        if planned.cut is not None:
            self._cuts[agent] = planned.cut
        for place in range(known, stop):
            entries[place] = replace(entries[place], arrival=planned.decided[place])
        messages = sent_messages(counted.instructions, planned)
        ahead = len(messages) - len(planned.view)
        settled = tuple([ahead + end - 1 for end in planned.settled])
        return Sent(messages=messages, moved=planned.moved, warnings=planned.warnings, settled=settled)


def _known(counted: Counted, model: Model, agent: str | None, idle: float | None) -> PlanningContext:
    """Return what trimming is told."""
    return PlanningContext(
        count=counted.count,
        fixed_tokens=counted.fixed_tokens,
        context_window=model.context_window,
        agent=agent,
        idle=idle,
        prices=model.prices,
    )


def sent_messages(instructions: Sequence[Message], planned: Plan) -> tuple[Message, ...]:
    """Return the messages of a request: the instructions, with what is merged into them, and the view."""
    summary = planned.summary
    if summary is not None and summary.role == "merge":
        instructions = merged(instructions, summary, ChatMessage.dialect)
    return (*instructions, *planned.view)

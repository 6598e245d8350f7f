"""A history sent again, request by request, as its client would have sent it under some strategy.

A strategy chooses the messages of each request. A policy is one: the engine that serves requests applies it.
The tests compare a replay with what the real proxy sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Final, Protocol, TypeAlias

from msgspec import Struct
from msgspec.structs import replace

from proxy.backtest.cost import CacheRule, PromptCache, Segment, Use
from proxy.backtest.histories import SessionHistory
from proxy.backtest.recall import References
from proxy.conversation import body_of
from proxy.dialects import Message
from proxy.dialects.chat import CHAT
from proxy.tokens import TokenCounter
from proxy.trimming import Cut, Entry, Plan, PlanningContext, Policy, Prices, merged, plan

_MARKS: Final = (b'"cache_control"', b'"prompt_cache_breakpoint"')
"""Explicit cache marks, as fields of messages or of their parts."""
_REF_DIGITS: Final = 16


class Counted:
    """A history ready for replaying: its messages as they are sent, each counted once."""

    def __init__(self, history: SessionHistory, counter: TokenCounter, model: str = "") -> None:
        """Count everything with `counter`, for `model` if the history names none."""
        self.history: Final = history
        self.model: Final = history.model or model
        """The model that is asked; empty if it is unknown."""
        self._counter = counter
        self._segments: dict[bytes, Segment] = {}
        self._marked: set[bytes] = set()
        self.instructions: Final = tuple([message.without_own_fields() for message in history.instructions])
        self.entries: Final = tuple(
            [self._entry(position, message) for position, message in enumerate(history.messages)]
        )
        """The messages; nothing was decided on arrival yet."""
        self.messages: Final = tuple([entry.message for entry in self.entries])
        """The messages as they are sent when nothing is trimmed."""
        tools = history.tools
        self.tools: Final[tuple[Segment, ...]] = (
            () if tools is None else (Segment(text=tools, tokens=counter.json(tools, self.model)),)
        )
        self.fixed_tokens: Final = sum([part.tokens for part in self.tools]) + sum(
            [self.count(message) for message in self.instructions]
        )
        """Tokens of instructions and tools."""

    def count(self, message: Message) -> int:
        """Return the tokens of any message."""
        return self.segment(message).tokens

    def segment(self, message: Message) -> Segment:
        """Return a message as a part of a prompt. Cache marks do not count when prompts are compared."""
        found = self._segments.get(message.raw)
        if found is None:
            text = message.raw
            if any(mark in text for mark in _MARKS):
                self._marked.add(text)
                text = message.dialect.canonical(message)
            found = self._segments[message.raw] = Segment(text=text, tokens=self._counter.message(message, self.model))
        return found

    def is_marked(self, message: Message) -> bool:
        """Tell whether a message has an explicit cache mark."""
        self.segment(message)
        return message.raw in self._marked

    def prompt(self, messages: Sequence[Message]) -> list[Segment]:
        """Return what a model reads, in the order in which it is cached: tools, then messages."""
        return [*self.tools, *map(self.segment, messages)]

    def marks(self, messages: Sequence[Message], beside: Iterable[int] = ()) -> set[int]:
        """Return the parts of the prompt after which there is an explicit cache mark.

        These are the client's own marks and those after the messages at the places `beside`.
        """
        ahead = len(self.tools)
        found = {place + ahead for place in beside}
        if self._marked:
            found.update(place + ahead for place, message in enumerate(messages) if self.is_marked(message))
        return found

    def reply_tokens(self, position: int) -> int:
        """Return the tokens that a model wrote for the reply at `position`, with its reasoning."""
        message = self.messages[position]
        return self.count(message) + self._counter.text(message.countable().reasoning, self.model)

    def agent(self, position: int) -> str | None:
        """Return the agent that asked for the reply at `position`; None if the message names none."""
        return self.entries[position].agent if position < len(self.entries) else None

    @cached_property
    def references(self) -> References:
        """What the tool calls of the history used."""
        tools = (self.history.tools or b"").decode()
        return References(self.instructions, self.messages, tools=tools)

    def _entry(self, position: int, message: Message) -> Entry:
        sent = message.without_own_fields()
        return Entry(
            message=sent,
            tokens=self.count(sent),
            ref=f"ref_{body_of(message)[:_REF_DIGITS]}",
            position=position,
            agent=message.agent,
            is_internal=message.is_internal,
        )


class ReplayModel(Struct, frozen=True, kw_only=True):
    """The model that is asked."""

    prices: Prices | None = None
    context_window: int | None = None
    """Tokens that it accepts; None if they are unknown."""
    marks: bool = True
    """Whether the proxy sets cache marks, if the model accepts any."""


class SentRequest(Struct, frozen=True, kw_only=True):
    """What one request sends."""

    messages: tuple[Message, ...]
    """With the instructions."""
    moved: bool
    """Whether the cut moved; without a cut, whether the beginning of the previous request changed."""
    warnings: tuple[str, ...] = ()
    """What could not be done, in words."""
    settled: tuple[int, ...] = ()
    """Positions of the messages after which the proxy sets a cache mark, if the model accepts any."""


NextRequest: TypeAlias = Callable[[int, float | None], SentRequest]
"""Returns what is sent of the first so many messages. It is called once for each request, in order.

The second argument is the number of seconds since the last reply; None if it is unknown.
"""


class Strategy(Protocol):
    """A way to choose what is sent."""

    @property
    def name(self) -> str:
        """Its name on the command line."""
        ...

    @property
    def about(self) -> str:
        """What it does, in words."""
        ...

    @property
    def by_price(self) -> bool:
        """Whether what it sends depends on prices."""
        ...

    def begin(self, counted: Counted, model: ReplayModel) -> NextRequest:
        """Start on a history, before the first request."""
        ...


class ReplayedRequest(Struct, frozen=True, kw_only=True):
    """One request of a replay."""

    stop: int
    """Number of messages that there were."""
    sent: SentRequest
    uses: Mapping[CacheRule, Use]
    """Where its tokens came from, by cache rule."""
    untrimmed: int
    """Tokens that it would have without trimming."""

    @property
    def tokens(self) -> int:
        """Tokens that were sent."""
        return next(iter(self.uses.values())).sent


def replayed(
    counted: Counted, strategy: Strategy, rules: Sequence[CacheRule], model: ReplayModel
) -> Iterator[ReplayedRequest]:
    """Yield each request of a history under a strategy.

    Args:
        counted: the history.
        strategy: what chooses the messages.
        rules: rules of the provider's cache, at least one. Each has a cache of its own.
        model: the model that is asked.
    """
    next_request = strategy.begin(counted, model)
    caches = {rule: PromptCache(rule) for rule in rules}
    times, ended = counted.history.times, None
    untrimmed, done = counted.fixed_tokens, 0
    for stop in counted.history.requests:
        # A request is sent when its newest message comes.
        at = None if times is None else times[max(stop - 1, 0)]
        sent = next_request(stop, None if at is None or ended is None else max(0.0, at - ended))
        if times is not None:
            ended = times[min(stop, len(times) - 1)]  # the time of its reply
        untrimmed += sum([entry.tokens for entry in counted.entries[done:stop]])
        done = stop
        prompt = counted.prompt(sent.messages)
        marks = counted.marks(sent.messages, sent.settled if model.marks else ())
        uses = {rule: cache.read(prompt, at or 0.0, marks) for rule, cache in caches.items()}
        yield ReplayedRequest(stop=stop, sent=sent, uses=uses, untrimmed=untrimmed)


class PolicyStrategy(Struct, frozen=True, kw_only=True):
    """A policy, applied by the proxy's own engine."""

    name: str
    policy: Policy
    about: str = "a policy of the configuration"

    @property
    def by_price(self) -> bool:
        """Whether anything in it depends on prices or on the lifetime of the cache."""
        waits = self.policy.trigger is not None and self.policy.trigger.idle_seconds == "auto"
        return self.policy.uses_cost or waits

    def begin(self, counted: Counted, model: ReplayModel) -> NextRequest:
        """Start on a history. Cuts and decisions on arrival are kept, as the proxy keeps them."""
        entries: list[Entry] = []
        cuts: dict[str | None, Cut] = {}

        def next_request(stop: int, idle: float | None) -> SentRequest:
            known = len(entries)
            entries.extend(counted.entries[known:stop])
            agent = counted.agent(stop)
            context = PlanningContext(
                count=counted.count,
                fixed_tokens=counted.fixed_tokens,
                context_window=model.context_window,
                agent=agent,
                idle=idle,
                prices=model.prices,
            )
            planned = plan(entries, self.policy, self.name, context, cuts.get(agent))
            if planned.cut is not None:
                cuts[agent] = planned.cut
            for place in range(known, stop):
                entries[place] = replace(entries[place], arrival=planned.decided[place])
            messages = sent_messages(counted.instructions, planned)
            ahead = len(messages) - len(planned.view)
            settled = tuple([ahead + end - 1 for end in planned.settled])
            return SentRequest(messages=messages, moved=planned.trimmed, warnings=planned.warnings, settled=settled)

        return next_request


def sent_messages(instructions: Sequence[Message], planned: Plan) -> tuple[Message, ...]:
    """Return the messages of a request: the instructions, a summary merged into them, and the view."""
    summary = planned.summary
    if summary is not None and summary.role == "merge":
        instructions = merged(instructions, summary, CHAT)
    return (*instructions, *planned.view)

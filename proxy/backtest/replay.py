"""Replays a history, request by request, as its client would have sent it under a policy or a baseline.

Policies are applied by the same engine that serves requests. Baselines are common other ways to keep a context small
(`_KINDS`), named `baseline:NAME` or `baseline:NAME=NUMBER`. They keep calls and results together, as far as the
history does. A baseline that a policy can express is implemented as a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Final, TypeAlias

import msgspec
import orjson
from msgspec import Struct
from msgspec.structs import replace

from proxy.backtest.cost import CacheRule, PromptCache, Segment, Use
from proxy.backtest.histories import SessionHistory
from proxy.backtest.recall import References
from proxy.conversation import body_of, span_start, spans
from proxy.dialects import Message
from proxy.errors import InvalidRequest
from proxy.recall import ref_of
from proxy.tokens import TokenCounter
from proxy.trimming import Cut, DropOldest, Entry, Plan, PlanningContext, Policy, Prices, Target, Trigger, merged, plan

PREFIX: Final = "baseline:"
NONE: Final = "baseline:none"
ORACLE: Final = "baseline:oracle"
NO_SUMMARY: Final = "no summary: a backtest asks no model, and the other edits do the work"
"""The warning for a trim that would have used a summary by a model in the proxy."""
CLEARED: Final = "[Old tool result content cleared]"  # the placeholder for a tool result, as in Claude Code
ORACLE_CLEARED: Final = "[cleared]"
_CLEAR_KEEPS: Final = 3

_MARKS: Final = (b'"cache_control"', b'"prompt_cache_breakpoint"')
"""Explicit cache marks: fields of messages or of their parts."""


class Counted:
    """A history ready for replaying: its messages as they are sent, each counted once."""

    def __init__(
        self, history: SessionHistory, counter: TokenCounter, model: str = "", strangers: Sequence[str] = ()
    ) -> None:
        """Count a history; `strangers` are values that calls of other sessions used."""
        self.history: Final = history
        self._strangers = strangers
        self.model: Final = history.model or model  # the model of the requests; empty if it is unknown
        self._counter = counter
        self._segments: dict[bytes, Segment] = {}
        self._marked: set[bytes] = set()
        self.instructions: Final = tuple([message.without_own_fields() for message in history.instructions])
        self.entries: Final = tuple([self._entry(*numbered) for numbered in enumerate(history.messages)])
        """The messages as entries, without decisions on arrival."""
        self.messages: Final = tuple([entry.message for entry in self.entries])
        """The messages as they are sent if nothing is trimmed."""
        self.tools: Final = self._segments_of(history.tools)
        """The tools of every request as one segment of a prompt; empty if there are none."""
        self.fixed_tokens: Final = sum([part.tokens for part in self.prompt(self.instructions)])

    def count(self, message: Message) -> int:
        """Return the tokens of a message, which need not be of the history."""
        return self.segment(message).tokens

    def segment(self, message: Message) -> Segment:
        """Return a message as a segment of a prompt. Cache marks are ignored when prompts are compared."""
        found = self._segments.get(message.raw)
        if found is None:
            text = message.raw
            if any(mark in text for mark in _MARKS):
                self._marked.add(text)
                text = message.dialect.canonical(message)
            found = self._segments[message.raw] = Segment(text=text, tokens=self._counter.message(message, self.model))
        return found

    def tools_without(self, names: Collection[str]) -> tuple[Segment, ...]:
        """Return the tools without those of these names, as a policy leaves them out from a new session on.

        Tools that the first request's messages call stay. If no tool would be left, all stay.
        """
        tools = self.history.tools
        if tools is None or not names:
            return self.tools
        first = next(iter(self.history.requests), 0)
        called = {call.name for message in self.messages[:first] for call in message.calls}
        kept = [
            text
            for name, text in self.messages[0].dialect.requests.declared(tools)
            if name is None or name not in names or name in called
        ]
        return self._segments_of(msgspec.json.encode(kept)) if kept else self.tools

    def prompt(self, messages: Sequence[Message], tools: Sequence[Segment] | None = None) -> list[Segment]:
        """Return the prompt in the order in which it is cached: tools (by default all), then messages."""
        return [*(self.tools if tools is None else tools), *map(self.segment, messages)]

    def marks(self, messages: Sequence[Message], beside: Iterable[int] = ()) -> set[int]:
        """Return the indexes of segments with an explicit cache mark: the client's own, and the messages `beside`."""
        own = [place for place, message in enumerate(messages) if message.raw in self._marked]
        return {place + len(self.tools) for place in (*beside, *own)}

    def reply_tokens(self, position: int) -> int:
        """Return the output tokens of the reply at `position`, including its reasoning."""
        message = self.messages[position]
        return self.count(message) + self._counter.text(message.countable().reasoning, self.model)

    @cached_property
    def references(self) -> References:
        """The values that the tool calls of the history used."""
        tools = (self.history.tools or b"").decode()
        return References(self.instructions, self.messages, tools=tools, strangers=self._strangers)

    def _segments_of(self, tools: bytes | None) -> tuple[Segment, ...]:
        return () if tools is None else (Segment(text=tools, tokens=self._counter.json(tools, self.model)),)

    def _entry(self, position: int, message: Message) -> Entry:
        sent = message.without_own_fields()
        return Entry(
            message=sent,
            tokens=self.count(sent),
            ref=ref_of(body_of(message)),
            position=position,
            agent=message.agent,
            is_internal=message.is_internal,
        )


class ReplayModel(Struct, frozen=True, kw_only=True):
    """The model of a replay."""

    prices: Prices | None = None
    context_window: int | None = None  # in tokens; None if it is unknown
    marks: bool = True  # whether the proxy sets cache marks, if the model accepts them


class SentRequest(Struct, frozen=True, kw_only=True):
    """The content of one request."""

    messages: tuple[Message, ...]
    moved: bool  # whether the cut moved; without a cut, whether the beginning of the previous request changed
    warnings: tuple[str, ...] = ()
    stable_ends: tuple[int, ...] = ()
    """Indexes of the messages after which the proxy sets a cache mark, if the model accepts them."""
    tools: tuple[Segment, ...] | None = None  # the tools that are offered; None for all of them


NextRequest: TypeAlias = Callable[[int, float | None], SentRequest]
"""Returns the request for the first so many messages of the history. Called once for each request, in order.

The second argument is the number of seconds since the last reply; None if it is unknown.
"""


class PolicyStrategy(Struct, frozen=True, kw_only=True):
    """A policy applied by the proxy's own engine."""

    name: str
    policy: Policy
    about: str = "a policy of the configuration"

    @property
    def by_price(self) -> bool:
        """Whether its decisions depend on prices or on the lifetime of the cache."""
        waits = self.policy.trigger is not None and self.policy.trigger.idle_seconds == "auto"
        return self.policy.uses_cost or waits

    def begin(self, counted: Counted, model: ReplayModel) -> NextRequest:
        """Begin a replay. Cuts and decisions on arrival are kept from request to request, as in the proxy."""
        entries: list[Entry] = []
        cuts: dict[str | None, Cut] = {}
        tools = counted.tools_without(self.policy.tools.remove)
        fixed_tokens = sum([part.tokens for part in counted.prompt(counted.instructions, tools)])

        def next_request(stop: int, idle: float | None) -> SentRequest:
            known = len(entries)
            entries.extend(counted.entries[known:stop])
            agent = counted.entries[stop].agent if stop < len(counted.entries) else None  # the author of the reply
            context = PlanningContext(
                count=counted.count,
                fixed_tokens=fixed_tokens,
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
            lacks_summary = planned.summary_request is not None and planned.summary_request.urgent
            stable_ends = tuple([ahead + end - 1 for end in planned.stable_ends])
            return SentRequest(
                messages=messages,
                moved=planned.trimmed,
                warnings=planned.warnings + ((NO_SUMMARY,) if lacks_summary else ()),
                stable_ends=stable_ends,
                tools=tools,
            )

        return next_request


def sent_messages(instructions: Sequence[Message], planned: Plan) -> tuple[Message, ...]:
    """Return the messages of a request: the instructions, a summary merged into them, and the view."""
    summary = planned.summary
    if summary is not None and summary.role == "merge":
        instructions = merged(instructions, summary, planned.view[0].dialect)
    return (*instructions, *planned.view)


Choose = Callable[[int], Sequence[Message]]
"""Returns what is sent of the first so many messages. Called once for each request, in order."""


class Baseline(Struct, frozen=True, kw_only=True):
    """A strategy that is not a policy."""

    name: str
    about: str
    start: Callable[[Counted], Choose]

    by_price: bool = False

    def begin(self, counted: Counted, model: ReplayModel) -> NextRequest:  # noqa: ARG002 - none needs the model
        """Begin a replay."""
        choose = self.start(counted)
        last: tuple[Message, ...] = ()

        def next_request(stop: int, idle: float | None) -> SentRequest:  # noqa: ARG001 - none needs a clock
            nonlocal last
            chosen = (*counted.instructions, *choose(stop))
            moved = chosen[: len(last)] != last
            last = chosen
            return SentRequest(messages=chosen, moved=moved)

        return next_request


def _last(counted: Counted, number: int) -> Choose:
    messages = counted.messages

    def choose(stop: int) -> Sequence[Message]:
        start = max(0, stop - number)
        while start < stop and messages[start].is_result:
            start += 1  # a result whose call is not sent
        if start == stop and stop:
            start = span_start(messages, stop - 1)  # only results of the newest span were left: send the whole span
        return messages[start:stop]

    return choose


def _masked(counted: Counted, keep: int, above: int | None = None) -> Choose:
    """Clear all but the `keep` newest tool results: at every request, or only at those of more than `above` tokens."""
    results = [place for place, message in enumerate(counted.messages) if message.is_result]
    messages = list(counted.messages)
    cleared = 0

    def choose(stop: int) -> Sequence[Message]:
        nonlocal cleared
        if above is None or counted.fixed_tokens + sum(map(counted.count, messages[:stop])) > above:
            older = [place for place in results if place < stop]
            for place in older[cleared : max(0, len(older) - keep)]:
                messages[place] = messages[place].with_text(CLEARED)
                cleared += 1
        return messages[:stop]

    return choose


def _middle(counted: Counted, tokens: int) -> Choose:
    messages, budget = counted.messages, tokens - counted.fixed_tokens
    span_starts = [span.start for span in spans(messages)]
    sums = [0, *accumulate([entry.tokens for entry in counted.entries])]

    def choose(stop: int) -> Sequence[Message]:
        whole = sums[stop]
        if whole <= budget:
            return messages[:stop]
        starts = [start for start in span_starts if start < stop]
        # The beginning gets at most half of the budget, the end gets the rest. The newest span always stays.
        heads = [start for start in starts if sums[start] <= budget / 2]
        head = heads[-1] if heads else 0
        room = budget - sums[head]
        tail = next((start for start in starts if start >= head and whole - sums[start] <= room), stop)
        tail = min(tail, max(starts[-1], head))
        return (*messages[:head], *messages[tail:stop])

    return choose


def oracle(references: References) -> Choose:
    """Reduce tool results and arguments of calls to the values that later calls use, after they were sent once.

    A value stays at the first place that had it, unless a text that stays holds it anyway. So recall is 1. This is a
    bound that no real strategy can reach, since it knows the future.
    """
    messages = references.messages
    needed: dict[int, dict[str, None]] = {}  # by message, the values that later calls take from it
    for position in references.positions:
        for call in references.references(position):
            for reference in call:
                value = references.atoms[reference.atom]
                holders = sorted(holder for holder in references.holders(reference.atom) if holder < position)
                left = [messages[holder] for holder in holders if not messages[holder].is_result]
                if not any(not message.calls or value in message.text for message in left):
                    needed.setdefault(holders[0] if holders else -1, {})[value] = None
    shorter = [_reduced(message, tuple(needed.get(place, ()))) for place, message in enumerate(messages)]

    def choose(stop: int) -> Sequence[Message]:
        fresh = stop
        while fresh > 0 and messages[fresh - 1].role != "assistant":
            fresh -= 1
        return [*shorter[:fresh], *messages[fresh:stop]]

    return choose


def _reduced(message: Message, values: Sequence[str]) -> Message:
    """Return a tool result, or a message with calls, reduced to these values if that is shorter."""
    kept = " ".join(values) or ORACLE_CLEARED
    if message.is_result:
        return message.with_text(kept) if len(kept) < len(message.text) else message
    arguments: list[str] = []
    for call in message.calls:
        made = kept if call.custom else orjson.dumps({"kept": kept}).decode()
        arguments.append(made if len(made) < len(call.arguments) else call.arguments)
        kept = ORACLE_CLEARED if arguments[-1] == made else kept
    return message.with_arguments(arguments) if message.calls else message


Strategy: TypeAlias = PolicyStrategy | Baseline


class _BaselineKind(Struct, frozen=True, kw_only=True):
    """One kind of baseline."""

    usual: int  # its default number; 0 if it takes none
    about: str  # a description; `{0}` is replaced with the number
    start: Callable[[Counted, int], Choose] | None  # None if it is a policy


_KINDS: Final = {
    "none": _BaselineKind(usual=0, about="no trimming", start=lambda counted, _: lambda stop: counted.messages[:stop]),
    "last": _BaselineKind(usual=20, about="the last {0} messages", start=_last),
    "slide": _BaselineKind(usual=30_000, about="the oldest dropped down to {0:,} tokens, at every request", start=None),
    "mask": _BaselineKind(usual=3, about="all but the newest {0} tool results masked, at every request", start=_masked),
    "clear": _BaselineKind(
        usual=100_000,
        about=f"clear_tool_uses above {{0:,}} tokens, keep {_CLEAR_KEEPS}",
        start=lambda counted, above: _masked(counted, _CLEAR_KEEPS, above),
    ),
    "middle": _BaselineKind(usual=30_000, about="middle-out to {0:,} tokens, at every request", start=_middle),
    "oracle": _BaselineKind(
        usual=0,
        about="results and arguments reduced to the values that later calls use: the bound that knows the future",
        start=lambda counted, _: oracle(counted.references),
    ),
}


def every_baseline() -> tuple[Strategy, ...]:
    """Return each baseline with its default number; the first one is no trimming."""
    return tuple(baseline(f"{PREFIX}{title}") for title in _KINDS)


def baseline(name: str) -> Strategy:
    """Return the baseline named `baseline:last`, `baseline:last=50`, or such; raise `InvalidRequest` if unknown."""
    title, given, said = name.removeprefix(PREFIX).partition("=")
    kind = _KINDS.get(title)
    if kind is None or (given and not kind.usual):
        allowed = [f"{PREFIX}{known}" + ("=NUMBER" if of.usual else "") for known, of in _KINDS.items()]
        raise InvalidRequest(f"There is no {name!r}. Allowed: {', '.join(allowed)}; the number is optional.")
    number = int(said) if said.isdecimal() and said.isascii() else 0
    if given and number < 1:
        raise InvalidRequest(f"{name!r}: a whole number above 0 is needed after '='.")
    number = number or kind.usual
    name = f"{PREFIX}{title}" + ("" if number == kind.usual else f"={number}")
    about, start = kind.about.format(number), kind.start
    if start is None:
        policy = Policy(trigger=Trigger(tokens=number), target=Target(tokens=number), edits=(DropOldest(),))
        return PolicyStrategy(name=name, policy=policy, about=about)
    return Baseline(name=name, about=about, start=lambda counted: start(counted, number))


class ReplayedRequest(Struct, frozen=True, kw_only=True):
    """One request of a replay."""

    stop: int  # number of messages of the history that the client sent
    sent: SentRequest
    uses: Mapping[CacheRule, Use]  # where its tokens came from, by cache rule
    untrimmed: int  # tokens of the request without trimming

    @property
    def tokens(self) -> int:
        """The number of tokens that were sent."""
        return next(iter(self.uses.values())).sent


def replayed(
    counted: Counted, strategy: Strategy, rules: Sequence[CacheRule], model: ReplayModel
) -> Iterator[ReplayedRequest]:
    """Yield each request of a history under a strategy. Each of the `rules` (at least one) has its own cache."""
    next_request = strategy.begin(counted, model)
    caches = {rule: PromptCache(rule) for rule in rules}
    times, ended = counted.history.times, None
    untrimmed, done = counted.fixed_tokens, 0
    for stop in counted.history.requests:
        # A request is sent at the time of its newest message.
        at = None if times is None else times[max(stop - 1, 0)]
        sent = next_request(stop, None if at is None or ended is None else max(0.0, at - ended))
        if times is not None:
            ended = times[min(stop, len(times) - 1)]  # the time of its reply
        untrimmed += sum([entry.tokens for entry in counted.entries[done:stop]])
        done = stop
        prompt = counted.prompt(sent.messages, sent.tools)
        marks = counted.marks(sent.messages, sent.stable_ends if model.marks else ())
        uses = {rule: cache.read(prompt, at or 0.0, marks) for rule, cache in caches.items()}
        yield ReplayedRequest(stop=stop, sent=sent, uses=uses, untrimmed=untrimmed)

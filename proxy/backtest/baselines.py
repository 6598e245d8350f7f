"""What others do to keep a context small, for comparison with a policy.

    none      everything is sent
    last      the last messages are sent, in whole spans
    slide     at every request the oldest spans are dropped until a budget is met
    mask      at every request all tool results but the newest are replaced by a placeholder
    clear     above a number of tokens all tool results but the newest are cleared, for good
    middle    at every request spans in the middle are dropped until a budget is met
    oracle    every tool result is cleared once nothing in it is used again: it knows the future

Each is named `baseline:NAME` or `baseline:NAME=NUMBER`. They keep calls and results together, as far as the
history does. A baseline that a policy can express is a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Final

from msgspec import Struct

from proxy.backtest.recall import References
from proxy.backtest.replay import Counted, NextRequest, PolicyStrategy, ReplayModel, SentRequest, Strategy
from proxy.conversation import span_start, spans
from proxy.dialects import Message
from proxy.errors import InvalidRequest
from proxy.trimming import DropOldest, Policy, Target, Trigger

PREFIX: Final = "baseline:"
"""What the names of baselines begin with."""
NONE: Final = "baseline:none"
"""The baseline that everything is compared with."""
ORACLE: Final = "baseline:oracle"
"""The baseline that knows the future."""
CLEARED: Final = "[Old tool result content cleared]"
"""The placeholder for a tool result, as in Claude Code."""
ORACLE_CLEARED: Final = "[cleared]"
"""The oracle's placeholder, as short as can be."""
_CLEAR_KEEPS: Final = 3
"""Tool results that `clear` keeps."""

Choose = Callable[[int], Sequence[Message]]
"""Returns what is sent of the first so many messages. It is called once for each request, in order."""


class Baseline(Struct, frozen=True, kw_only=True):
    """A strategy without a policy."""

    name: str
    about: str
    """What it does, in words."""
    start: Callable[[Counted], Choose]
    """Starts on a history."""

    @property
    def by_price(self) -> bool:
        """Whether what it sends depends on prices."""
        return False

    def begin(self, counted: Counted, model: ReplayModel) -> NextRequest:  # noqa: ARG002 - none needs the model
        """Start on a history."""
        choose = self.start(counted)
        last: tuple[Message, ...] = ()

        def next_request(stop: int, idle: float | None) -> SentRequest:  # noqa: ARG001 - none needs a clock
            nonlocal last
            chosen = (*counted.instructions, *choose(stop))
            moved = chosen[: len(last)] != last
            last = chosen
            return SentRequest(messages=chosen, moved=moved)

        return next_request


def _everything(counted: Counted) -> Choose:
    return lambda stop: counted.messages[:stop]


def _last(counted: Counted, number: int) -> Choose:
    messages = counted.messages

    def choose(stop: int) -> Sequence[Message]:
        start = max(0, stop - number)
        while start < stop and messages[start].is_result:
            start += 1  # its call is not sent
        if start == stop and stop:
            start = span_start(messages, stop - 1)  # the newest span has more results: send all of it
        return messages[start:stop]

    return choose


def _masked(counted: Counted, keep: int, above: int | None = None) -> Choose:
    """Clear all tool results but the newest: at every request, or when it has more tokens than `above`."""
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
        # At most half of the budget for the beginning, the rest for the end, whose newest span always stays.
        heads = [start for start in starts if sums[start] <= budget / 2]
        head = heads[-1] if heads else 0
        room = budget - sums[head]
        tail = next((start for start in starts if start >= head and whole - sums[start] <= room), stop)
        tail = min(tail, max(starts[-1], head))
        return (*messages[:head], *messages[tail:stop])

    return choose


def oracle(references: References) -> Choose:
    """Return the views in which only the tool results that are still needed are whole.

    Sent are: all messages except tool results; the results that were not sent before (those after the last
    reply); and each result with a value that this request's call or a later one uses. So its recall is 1. It
    is a bound: nobody can build it.
    """
    messages = references.messages
    cleared = [
        message.with_text(ORACLE_CLEARED) if message.is_result and len(message.text) > len(ORACLE_CLEARED) else message
        for message in messages
    ]
    needed = [-1] * len(messages)  # for each message the position of the last call that needs it
    for position in references.positions:
        for call in references.references(position):
            for reference in call:
                for holder in references.holders(reference.atom):
                    if holder < position:
                        needed[holder] = position

    def choose(stop: int) -> Sequence[Message]:
        fresh = stop
        while fresh > 0 and messages[fresh - 1].role != "assistant":
            fresh -= 1
        return [messages[place] if place >= fresh or needed[place] >= stop else cleared[place] for place in range(stop)]

    return choose


class _BaselineKind(Struct, frozen=True, kw_only=True):
    """One kind of baseline; `{0}` in the words is its number."""

    usual: int
    """Its number if none is named; 0: it has none."""
    about: str
    start: Callable[[Counted, int], Choose] | None
    """None: it is a policy."""


_KINDS: Final = {
    "none": _BaselineKind(usual=0, about="no trimming", start=lambda counted, _: _everything(counted)),
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
        about="every tool result cleared that is never used again: the bound that knows the future",
        start=lambda counted, _: oracle(counted.references),
    ),
}


def every_baseline() -> tuple[Strategy, ...]:
    """Return each baseline with its usual number, no trimming first."""
    return tuple(baseline(f"{PREFIX}{title}") for title in _KINDS)


def baseline(name: str) -> Strategy:
    """Return the baseline of a name such as `baseline:last` or `baseline:last=50`.

    Raises:
        InvalidRequest: there is no such baseline, or the number is not above 0.
    """
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

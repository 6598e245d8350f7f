"""What others do to keep a context small, to be put beside a policy; and doing nothing.

    none          everything is sent
    last          the last so many messages, whole spans
    slide         at every request the oldest go until a budget is met
    mask          of all tool results only the newest stay, at every request
    clear         above so many tokens all tool results but the newest are cleared, and stay so
    middle        at every request the middle goes until a budget is met
    clairvoyant   clears every tool result of which nothing is ever used again: it knows the future

Each is asked for as `baseline:NAME`, or `baseline:NAME=NUMBER`. They are protocol-safe, as far as the history
is: calls and their results stay together. What one of our policies can say is said as a policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import ClassVar, Final

from proxy.backtest.clairvoyant import Clairvoyant
from proxy.backtest.counted import Counted
from proxy.backtest.replay import Course, Model, PolicyStrategy, Sent, Strategy
from proxy.conversation import span_start, spans
from proxy.dialects import Message
from proxy.errors import InvalidRequest
from proxy.trimming import DropOldest, Policy, Target, Trigger

PREFIX: Final = "baseline:"
"""What the names of baselines begin with."""
NONE: Final = "baseline:none"
"""The one beside which everything is put."""
CLAIRVOYANT: Final = "baseline:clairvoyant"
"""The one that knows the future."""
CLEARED: Final = "[Old tool result content cleared]"
"""What stands in the place of a tool result that is not sent, as Claude Code puts it."""


@dataclass(frozen=True)
class Baseline(ABC):
    """A strategy that needs no engine: it chooses messages by itself."""

    number: int = 0
    """How many messages, results or tokens it speaks of."""

    title: ClassVar[str]

    @property
    def name(self) -> str:
        """What it is asked for by."""
        return _name(self.title, self.number)

    @property
    def by_price(self) -> bool:
        """Whether it sends something else where prices are others: none does."""
        return False

    @property
    @abstractmethod
    def about(self) -> str:
        """What it does, in words."""

    def begin(self, counted: Counted, model: Model) -> Course:  # noqa: ARG002 - none of them asks for the model
        """Return its way through a history."""
        return _Course(counted, self.chooser(counted))

    @abstractmethod
    def chooser(self, counted: Counted) -> Chooser:
        """Return what chooses among the messages of one history."""


class Chooser(ABC):
    """Chooses what one request after the other sends of a log."""

    def __init__(self, counted: Counted) -> None:
        self.counted = counted
        self.messages = counted.messages

    @abstractmethod
    def choose(self, stop: int) -> Sequence[Message]:
        """Return what is sent of the first `stop` messages."""


class _Course:
    """A baseline on its way through a history."""

    def __init__(self, counted: Counted, chooser: Chooser) -> None:
        self._instructions = counted.instructions
        self._chooser = chooser
        self._last: tuple[Message, ...] = ()

    def request(self, stop: int, idle: float | None) -> Sent:  # noqa: ARG002 - none of them looks at a clock
        """Choose, and see whether the last request is the beginning of this one."""
        chosen = (*self._instructions, *self._chooser.choose(stop))
        moved = chosen[: len(self._last)] != self._last
        self._last = chosen
        return Sent(messages=chosen, moved=moved)


class _Everything(Chooser):
    def choose(self, stop: int) -> Sequence[Message]:
        return self.messages[:stop]


class NoTrimming(Baseline):
    """Everything is sent."""

    title = "none"

    @property
    def about(self) -> str:
        """What it does, in words."""
        return "no trimming"

    def chooser(self, counted: Counted) -> Chooser:
        """Return what takes everything."""
        return _Everything(counted)


class _Last(Chooser):
    def __init__(self, counted: Counted, number: int) -> None:
        super().__init__(counted)
        self._number = number

    def choose(self, stop: int) -> Sequence[Message]:
        start = max(0, stop - self._number)
        while start < stop and self.messages[start].is_result:
            start += 1  # its call is not sent
        if start == stop and stop:
            start = span_start(
                self.messages, stop - 1
            )  # more results than messages may be sent: their whole span
        return self.messages[start:stop]


class LastMessages(Baseline):
    """The last so many messages are sent; a span that would be cut in two is not."""

    title = "last"

    @property
    def about(self) -> str:
        """What it does, in words."""
        return f"the last {self.number} messages"

    def chooser(self, counted: Counted) -> Chooser:
        """Return what takes the last messages."""
        return _Last(counted, self.number)


class _Masking(Chooser):
    """Clears tool results before a place that a subclass names."""

    def __init__(self, counted: Counted, number: int) -> None:
        super().__init__(counted)
        self._results = [place for place, message in enumerate(self.messages) if message.is_result]
        self._number = number
        self._masked = list(self.messages)
        self._done = 0
        """How many results are cleared."""

    def clear(self, stop: int) -> None:
        """Clear all results but the newest before `stop`."""
        older = [place for place in self._results if place < stop]
        for place in older[self._done : max(0, len(older) - self._number)]:
            self._masked[place] = self.messages[place].replacing("content", CLEARED)
            self._done += 1

    def choose(self, stop: int) -> Sequence[Message]:
        self.clear(stop)
        return self._masked[:stop]


class MaskResults(Baseline):
    """At every request the newest so many tool results are sent, and a bare placeholder for each other."""

    title = "mask"

    @property
    def about(self) -> str:
        """What it does, in words."""
        return f"all but the newest {self.number} tool results masked, at every request"

    def chooser(self, counted: Counted) -> Chooser:
        """Return what masks."""
        return _Masking(counted, self.number)


class _Clearing(_Masking):
    def __init__(self, counted: Counted, above: int) -> None:
        super().__init__(counted, ClearToolUses.KEEP)
        self._above = above

    def choose(self, stop: int) -> Sequence[Message]:
        count = self.counted.count
        sent = self.counted.fixed_tokens + sum([count(message) for message in self._masked[:stop]])
        if sent > self._above:
            self.clear(stop)
        return self._masked[:stop]


class ClearToolUses(Baseline):
    """Above so many tokens all tool results but the newest three are cleared; what is cleared stays so."""

    title = "clear"
    KEEP: ClassVar[int] = 3
    """Tool results that are not cleared."""

    @property
    def about(self) -> str:
        """What it does, in words."""
        return f"clear_tool_uses above {self.number:,} tokens, keep {self.KEEP}"

    def chooser(self, counted: Counted) -> Chooser:
        """Return what clears."""
        return _Clearing(counted, self.number)


class _Middle(Chooser):
    def __init__(self, counted: Counted, budget: int) -> None:
        super().__init__(counted)
        self._budget = budget - counted.fixed_tokens
        self._starts = [span.start for span in spans(self.messages)]
        tokens = [entry.tokens for entry in counted.entries]
        self._sums = [0, *accumulate(tokens)]

    def choose(self, stop: int) -> Sequence[Message]:
        sums, whole = self._sums, self._sums[stop]
        if whole <= self._budget:
            return self.messages[:stop]
        starts = [start for start in self._starts if start < stop]
        # At most half of the budget for the beginning, what is left for the end, its newest span always.
        heads = [start for start in starts if sums[start] <= self._budget / 2]
        head = heads[-1] if heads else 0
        room = self._budget - sums[head]
        tail = next((start for start in starts if start >= head and whole - sums[start] <= room), stop)
        tail = min(tail, max(starts[-1], head))
        return (*self.messages[:head], *self.messages[tail:stop])


class MiddleOut(Baseline):
    """At every request whole spans from the middle of the log go until a budget is met."""

    title = "middle"

    @property
    def about(self) -> str:
        """What it does, in words."""
        return f"middle-out to {self.number:,} tokens, at every request"

    def chooser(self, counted: Counted) -> Chooser:
        """Return what leaves the middle out."""
        return _Middle(counted, self.number)


class _Clairvoyant(Chooser):
    def __init__(self, counted: Counted) -> None:
        super().__init__(counted)
        self._seer = Clairvoyant(counted.references)

    def choose(self, stop: int) -> Sequence[Message]:
        return self._seer.view(stop)


class ClairvoyantClearing(Baseline):
    """Every tool result is cleared as soon as nothing in it is used again, which nobody can know."""

    title = "clairvoyant"

    @property
    def about(self) -> str:
        """What it does, in words."""
        return "every tool result cleared that is never used again: the bound that knows the future"

    def chooser(self, counted: Counted) -> Chooser:
        """Return what knows the future of this history."""
        return _Clairvoyant(counted)


def _sliding(budget: int) -> Strategy:
    """Return the strategy that drops the oldest at every request, until a budget is met."""
    policy = Policy(trigger=Trigger(tokens=budget), target=Target(tokens=budget), edits=(DropOldest(),))
    about = f"the oldest dropped down to {budget:,} tokens, at every request"
    return PolicyStrategy(name=_name("slide", budget), policy=policy, about=about)


_USUAL: Final = {
    NoTrimming.title: 0,
    LastMessages.title: 20,
    "slide": 30_000,
    MaskResults.title: 3,
    ClearToolUses.title: 100_000,
    MiddleOut.title: 30_000,
    ClairvoyantClearing.title: 0,
}
"""The number that each speaks of where none is named; 0 where it speaks of none."""
_KINDS: Final[dict[str, type[Baseline]]] = {
    kind.title: kind
    for kind in (NoTrimming, LastMessages, MaskResults, ClearToolUses, MiddleOut, ClairvoyantClearing)
}


def _name(title: str, number: int) -> str:
    return f"{PREFIX}{title}" + ("" if number == _USUAL[title] else f"={number}")


def every_baseline() -> tuple[Strategy, ...]:
    """Return each of them with its usual number, no trimming first."""
    return tuple(baseline(f"{PREFIX}{name}") for name in _USUAL)


def baseline(name: str) -> Strategy:
    """Return the baseline of a name such as `baseline:last` or `baseline:last=50`.

    Raises:
        InvalidRequest: there is none of that name, or the number is none above 0.
    """
    title, given, said = name.removeprefix(PREFIX).partition("=")
    if title not in _USUAL or (given and not _USUAL[title]):
        allowed = [f"{PREFIX}{known}" + ("=NUMBER" if usual else "") for known, usual in _USUAL.items()]
        raise InvalidRequest(
            f"There is no {name!r}. There are {', '.join(allowed)}; a number may be left out."
        )
    number = int(said) if said.isdecimal() and said.isascii() else 0
    if given and number < 1:
        raise InvalidRequest(f"{name!r}: a whole number above 0 is needed after '='.")
    number = number or _USUAL[title]
    return _sliding(number) if title == "slide" else _KINDS[title](number)

"""What a strategy's replay came to: plain figures of a session, and their sums.

How they are shown is not its business.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from proxy.backtest.cache import NOTHING, Use
from proxy.backtest.price import PriceClass
from proxy.backtest.recall import RecallCounts


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the tokens of all requests came from under one class of prices, and what they cost."""

    use: Use = NOTHING
    input: float = 0.0
    """Dollars for input."""
    output: float | None = 0.0
    """Dollars for output, which no strategy changes; None where no price is known."""

    @property
    def total(self) -> float | None:
        """Dollars for both."""
        return None if self.output is None else self.input + self.output

    def __add__(self, other: Spent) -> Spent:
        """Return both together."""
        known = self.output is not None and other.output is not None
        output = (self.output or 0.0) + (other.output or 0.0) if known else None
        return Spent(use=self.use + other.use, input=self.input + other.input, output=output)


@dataclass(frozen=True, slots=True)
class Figures:
    """What one strategy came to, under one class of prices, on a session or on several."""

    sessions: int = 0
    requests: int = 0
    untrimmed: int = 0
    """Tokens of all requests if nothing were trimmed."""
    sent: int = 0
    """Tokens of all requests."""
    largest: int = 0
    """Tokens of the largest request."""
    most_messages: int = 0
    """Messages of the longest request, instructions included."""
    moves: int = 0
    """Times that the cut moved; without a cut, requests that did not begin with all of the one before."""
    output: int = 0
    """Tokens of the replies."""
    spent: Spent = Spent()
    recall: RecallCounts | None = None
    """What of the values that later tool calls used was still sent; None where nobody looked."""
    warnings: Mapping[str, int] = field(default_factory=dict[str, int])
    """What could not be done, in words, and at how many requests."""

    def __add__(self, other: Figures) -> Figures:
        """Return both together."""
        return Figures(
            sessions=self.sessions + other.sessions,
            requests=self.requests + other.requests,
            untrimmed=self.untrimmed + other.untrimmed,
            sent=self.sent + other.sent,
            largest=max(self.largest, other.largest),
            most_messages=max(self.most_messages, other.most_messages),
            moves=self.moves + other.moves,
            output=self.output + other.output,
            spent=self.spent + other.spent,
            recall=other.recall if self.recall is None else self.recall + (other.recall or RecallCounts()),
            warnings=dict(Counter(self.warnings) + Counter(other.warnings)),
        )


@dataclass(frozen=True, slots=True)
class Line:
    """One strategy under one class of prices, on one session."""

    strategy: str
    session: str
    prices: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Compared:
    """One strategy under one class of prices, on all sessions, beside no trimming."""

    strategy: str
    prices: str
    figures: Figures
    ratio: float | None
    """Its input dollars, where those of no trimming are 1; None where these are 0."""
    dearest: float | None
    """The greatest such ratio of a single session."""
    dearest_session: str | None
    """Which session that is."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Everything that a backtest found."""

    classes: tuple[PriceClass, ...]
    about: Mapping[str, str]
    """The strategies by name, in order, and what each does."""
    lines: tuple[Line, ...]
    compared: tuple[Compared, ...]
    warnings: tuple[str, ...] = ()
    """What concerns the whole of it."""


def ratio(one: Spent, other: Spent) -> float | None:
    """Return what the input of one cost where that of the other is 1; None where that is nothing."""
    return one.input / other.input if other.input else None


def summed(figures: Iterable[Figures]) -> Figures:
    """Return all of them together."""
    return sum(figures, Figures())

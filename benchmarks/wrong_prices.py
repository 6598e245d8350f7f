"""Shows what `cost: auto` costs where the prices that it was told are wrong, and beside the cheapest fixed trigger.

    python -m benchmarks.wrong_prices [--quick] [--whole] [FILE_OR_FOLDER...]

Each session is planned at each of the five classes of prices and billed at each; without a name the sessions are
those of `benchmarks/sessions`. All figures are input dollars relative to no trimming, as `palimpsest backtest` tells
them: of all sessions together, and of the most expensive one. Then each class follows beside the built-in policy with
a fixed number of tokens for a trigger, the cheapest of several; `--quick` leaves these out. Sessions are cut where
their agents compacted; with `--whole` they go on, as if there had been no need to.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from benchmarks.prove import SESSIONS, WINDOW
from proxy.backtest import NONE, Backtest, PolicyStrategy, SessionHistory, Strategy, read_files, standard_classes
from proxy.backtest.comparison import Cost, SessionResult, ratio
from proxy.backtest.replay import Counted, NextRequest, ReplayModel
from proxy.config import BUILT_IN
from proxy.tokens import TokenCounter
from proxy.trimming import Prices, Trigger
from proxy.trimming.cost import DEAR

AUTO: Final = "cost: auto"
FIXED: Final = (4_000, 6_000, 8_000, 10_000, 12_000, 15_000, 17_000, 20_000, 25_000, 30_000, 40_000, 60_000)  # tokens
PART: Final = re.compile(r":\d+$")  # suffix of the name of a session that was cut
PROCESSES: Final = 2
CLASSES: Final = standard_classes()


class PlannedAt(PolicyStrategy, frozen=True, kw_only=True):
    """A policy that plans with these prices, whatever prices are billed."""

    prices: Prices

    @property
    def by_price(self) -> bool:
        """Return False: the plan does not depend on the billed prices."""
        return False

    def begin(self, counted: Counted, model: ReplayModel) -> NextRequest:
        """Start on a history."""
        told = ReplayModel(prices=self.prices, context_window=model.context_window, marks=model.marks)
        return super().begin(counted, told)


def planned() -> Iterator[Strategy]:
    """Yield the built-in policy at each class of prices."""
    for each in CLASSES:
        yield PlannedAt(name=f"{AUTO} at {each.name}", policy=BUILT_IN, prices=each.prices)


def fixed(triggers: Iterable[int] = FIXED) -> Iterator[Strategy]:
    """Yield the built-in policy with fixed triggers, once for each price of a cached token that changes its plan."""
    for tokens in triggers:
        policy = BUILT_IN.model_copy(update={"trigger": Trigger(tokens=tokens)})
        for prices in {fixed_name(tokens, each.prices): each.prices for each in CLASSES}.values():
            yield PlannedAt(name=fixed_name(tokens, prices), policy=policy, prices=prices)


def fixed_name(tokens: int, prices: Prices) -> str:
    """Return the name of a fixed trigger. It has the price of cached tokens where that price changes the plan."""
    return f"{tokens:,} tokens" + (f", read at {prices.read:g}" if prices.read >= DEAR else "")


class Sums:
    """Input dollars by strategy and class of prices, relative to no trimming."""

    def __init__(self, sessions: Iterable[Sequence[SessionResult]]) -> None:
        """Take the results of each session."""
        self._sessions = [
            (each[0].session, {(one.strategy, one.prices): one.figures.cost for one in each}) for each in sessions
        ]

    def pooled(self, strategy: str, prices: str) -> float:
        """Return the ratio of all sessions together."""
        one = sum((costs[strategy, prices] for _, costs in self._sessions), Cost())
        return ratio(one, sum((costs[NONE, prices] for _, costs in self._sessions), Cost())) or 0.0

    def worst(self, strategy: str, prices: str) -> tuple[float, str]:
        """Return the highest ratio of a session, and its name."""
        return max((ratio(costs[strategy, prices], costs[NONE, prices]) or 0.0, name) for name, costs in self._sessions)


def whole(histories: Iterable[SessionHistory]) -> Iterator[SessionHistory]:
    """Yield the sessions with their parts joined again."""
    for name, parts in groupby(histories, lambda each: PART.sub("", each.name)):
        first, *rest = parts
        messages = [message for part in (first, *rest) for message in part.messages]
        yield replace(first, name=name, messages=tuple(messages), times=None) if rest else first


def measured(strategies: Sequence[Strategy], histories: Sequence[SessionHistory], processes: int) -> Sums:
    """Replay the sessions in `processes` processes, the longest first."""
    longest = sorted(histories, key=lambda each: -sum(len(message.raw) for message in each.messages))
    with ProcessPoolExecutor(processes) as pool:
        return Sums(pool.map(partial(_replayed, strategies), longest))


def _replayed(strategies: Sequence[Strategy], history: SessionHistory) -> tuple[SessionResult, ...]:
    test = Backtest(strategies, CLASSES, TokenCounter(), windows=lambda _: WINDOW, recall=False)
    return test.run([history]).sessions


def matrix(sums: Sums) -> Iterator[str]:
    """Yield the lines of the matrix: planned at the prices of the row, billed at those of the column."""
    yield _line("planned at", [f"billed at {each.name}" for each in CLASSES])
    highest: list[tuple[float, str]] = []
    for row in CLASSES:
        name = f"{AUTO} at {row.name}"
        worst = [sums.worst(name, each.name) for each in CLASSES]
        highest.append(max(worst))
        pooled = [sums.pooled(name, each.name) for each in CLASSES]
        cells = [f"{both:.3f}, worst {one:.3f}" for both, (one, _) in zip(pooled, worst, strict=True)]
        yield _line(row.name, cells)
    value, session = max(highest)
    yield f"The worst session of all: {session}, {value:.3f}."


def beside_fixed(sums: Sums, triggers: Iterable[int] = FIXED) -> Iterator[str]:
    """Yield a line per class of prices that compares `cost: auto` with the cheapest fixed trigger."""
    yield _line("billed at", [AUTO, "cheapest fixed trigger", "difference"])
    for each in CLASSES:
        own = sums.pooled(f"{AUTO} at {each.name}", each.name)
        found = [(sums.pooled(fixed_name(tokens, each.prices), each.name), tokens) for tokens in triggers]
        least, tokens = min(found)
        yield _line(each.name, [f"{own:.3f}", f"{least:.3f} at {tokens:,} tokens", f"{100 * (own / least - 1):+.1f} %"])


def _line(first: str, cells: Sequence[str]) -> str:
    return f"{first:22}" + "".join(f"{cell:32}" for cell in cells).rstrip()


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", type=Path, metavar="FILE_OR_FOLDER", default=[SESSIONS])
    parser.add_argument("--quick", action="store_true", help="without the fixed triggers")
    parser.add_argument("--whole", action="store_true", help="sessions go on where their agents compacted")
    given = parser.parse_args()
    histories = [history for name in given.names for history in read_files(name)]
    histories = list(whole(histories)) if given.whole else histories
    strategies = list(planned()) if given.quick else [*planned(), *fixed()]
    sums = measured(strategies, histories, PROCESSES)
    requests = sum(len(each.requests) for each in histories)
    sys.stdout.write(f"{len(histories)} sessions, {requests:,} requests\n\n" + "\n".join(matrix(sums)) + "\n")
    if not given.quick:
        sys.stdout.write("\n" + "\n".join(beside_fixed(sums)) + "\n")


if __name__ == "__main__":
    main()

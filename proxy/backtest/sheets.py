"""What a backtest found, as tables of text: the same for a terminal, a file and a page.

It decides what stands side by side and how numbers are written, and nothing of how a table looks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from proxy.backtest.baselines import NONE
from proxy.backtest.cache import Use
from proxy.backtest.figures import Compared, Figures, Outcome, ratio
from proxy.backtest.price import price_class
from proxy.backtest.recall import CAVEAT, Counts, RecallCounts

_USUAL: Final = price_class(0.1).name

UNKNOWN: Final = "-"
"""What stands where there is no figure."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A table. The first column holds names, the others figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""
    """What must be known to read it."""


def sheets(outcome: Outcome) -> Iterator[Sheet]:
    """Yield the tables about all sessions together."""
    yield _sizes(outcome)
    yield _dollars(outcome)
    yield _totals(outcome)
    yield _dearest(outcome)
    yield _sources(outcome)
    if any(compared.figures.recall is not None for compared in outcome.compared):
        yield _recall(outcome)
    yield _names(outcome)


def usual(outcome: Outcome) -> str:
    """Return the class of prices at which what is shown once is shown: the most common one."""
    names = [each.name for each in outcome.classes]
    return _USUAL if _USUAL in names else names[0]


def session_sheets(outcome: Outcome, classes: Sequence[str]) -> Iterator[Sheet]:
    """Yield for each of these classes of prices a table with a line for each session."""
    strategies = [name for name in outcome.about if name != NONE]
    for prices in classes:
        found = {
            (line.session, line.strategy): line.figures for line in outcome.lines if line.prices == prices
        }
        rows: list[tuple[str, ...]] = []
        for session in dict.fromkeys(line.session for line in outcome.lines):
            whole = found[session, NONE]
            ratios = [_number(ratio(found[session, name].spent, whole.spent)) for name in strategies]
            rows.append(
                (session, f"{whole.requests:,}", f"{whole.largest:,}", _price(whole.spent.input), *ratios)
            )
        yield Sheet(
            title=f"Each session at {prices}: input dollars of no trimming, and of the others where these are 1",
            columns=("session", "requests", "largest", "dollars", *strategies),
            rows=tuple(rows),
        )


def _first(outcome: Outcome) -> list[tuple[str, Figures]]:
    """Return the figures of each strategy that are the same for all prices, or those at the usual ones."""
    prices = usual(outcome)
    return [(each.strategy, each.figures) for each in outcome.compared if each.prices == prices]


def _sizes(outcome: Outcome) -> Sheet:
    rows = [
        (
            *(name, f"{figures.requests:,}", f"{figures.sent:,}", _share(figures.sent, figures.untrimmed)),
            *(f"{figures.largest:,}", f"{figures.most_messages:,}", f"{figures.moves:,}"),
        )
        for name, figures in _first(outcome)
    ]
    return Sheet(
        title="What was sent",
        columns=("", "requests", "tokens", "of all", "largest", "messages", "moves"),
        rows=tuple(rows),
        note=f"largest, messages: of one request. moves: of the cut. At {usual(outcome)}, where prices matter.",
    )


def _by_class(outcome: Outcome, cell: Callable[[Compared], str]) -> tuple[tuple[str, ...], ...]:
    """Return a row for each strategy with a cell for each class of prices."""
    rows: dict[str, list[str]] = {name: [] for name in outcome.about}
    for each in outcome.compared:
        rows[each.strategy].append(cell(each))
    return tuple((name, *cells) for name, cells in rows.items())


def _classes(outcome: Outcome) -> tuple[str, ...]:
    return ("", *(each.name for each in outcome.classes))


def _dollars(outcome: Outcome) -> Sheet:
    def cell(each: Compared) -> str:
        return f"{_price(each.figures.spent.input)} {_number(each.ratio)}"

    prices = ", ".join(dict.fromkeys(f"{each.dollars.input:g}" for each in outcome.classes))
    return Sheet(
        title="Dollars for input, and beside no trimming",
        columns=_classes(outcome),
        rows=_by_class(outcome, cell),
        note=f"A million tokens of input cost {prices} dollars; "
        "read and write: what a token read from the provider's cache or written to it costs, input = 1.",
    )


def _totals(outcome: Outcome) -> Sheet:
    whole = {each.prices: each.figures.spent.total for each in outcome.compared if each.strategy == NONE}

    def cell(each: Compared) -> str:
        total, other = each.figures.spent.total, whole[each.prices]
        if total is None or not other:
            return UNKNOWN
        return f"{_price(total)} {_number(total / other)}"

    return Sheet(
        title="The same with output, of which there is always as much",
        columns=_classes(outcome),
        rows=_by_class(outcome, cell),
    )


def _dearest(outcome: Outcome) -> Sheet:
    return Sheet(
        title="The dearest session of each, beside no trimming",
        columns=_classes(outcome),
        rows=_by_class(outcome, lambda each: _number(each.dearest)),
    )


def _sources(outcome: Outcome) -> Sheet:
    def cell(each: Compared) -> str:
        use: Use = each.figures.spent.use
        return f"{_share(use.read, use.sent)} {_share(use.written, use.sent)}"

    rules = ", ".join(
        dict.fromkeys(f"{each.matching} from {each.prices.minimum:,} tokens on" for each in outcome.classes)
    )
    return Sheet(
        title="Tokens read from the provider's cache, and written to it",
        columns=_classes(outcome),
        rows=_by_class(outcome, cell),
        note=f"The cache is a simulation: {rules}.",
    )


def _recall(outcome: Outcome) -> Sheet:
    def cells(recall: RecallCounts) -> Iterator[str]:
        yield from (_rate(recall.far), _rate(recall.tool_only), _bound(recall.far), _whole(recall.far))
        yield from (_rate(recall.near), _rate(recall.pinned))
        yield f"{recall.far.grounded:,}"

    rows = [(name, *cells(figures.recall or RecallCounts())) for name, figures in _first(outcome)]
    return Sheet(
        title="Of the values that later tool calls really used, those still sent",
        columns=("", "far", "only in results", "far, bound", "far, calls", "near", "pinned", "far values"),
        rows=tuple(rows),
        note=f"{CAVEAT[:1].upper()}{CAVEAT[1:]}: a value that is there may be missed, and one that is not may be "
        "found again. far: last said before the last 6 messages; only in results: and never but by a tool; "
        "bound: near a word that named it; calls: those with all their values.",
    )


def _names(outcome: Outcome) -> Sheet:
    return Sheet(title="What each does", columns=("", "does"), rows=tuple(outcome.about.items()))


def _number(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.2f}"


def _price(value: float) -> str:
    """Return dollars, down to a hundredth of a cent: sessions can be that cheap."""
    return f"{value:,.2f}" if value >= 1000 else f"{value:.4f}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else UNKNOWN


def _rate(counts: Counts) -> str:
    return UNKNOWN if counts.recall is None else f"{counts.recall:.3f}"


def _bound(counts: Counts) -> str:
    return UNKNOWN if counts.bound_recall is None else f"{counts.bound_recall:.3f}"


def _whole(counts: Counts) -> str:
    return UNKNOWN if counts.whole_calls is None else f"{counts.whole_calls:.3f}"

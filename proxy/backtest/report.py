"""The result of a backtest for readers: text tables, an HTML page, JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from html import escape
from random import Random
from typing import Any, Final

from msgspec import Struct, to_builtins
from msgspec.structs import asdict

from proxy.backtest.comparison import BacktestResult, Figures, StrategyResult, ratio
from proxy.backtest.cost import price_class
from proxy.backtest.recall import CAVEAT, RecallCounts
from proxy.backtest.replay import NONE, PREFIX

_STYLE: Final = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 80rem; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .4rem; }
.table { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #8886; padding: .25rem .8rem; text-align: right; white-space: nowrap; }
th:first-child, td:first-child, .words td { text-align: left; }
thead th { border-bottom: 2px solid #888a; }
p { max-width: 60rem; }
"""
_UNKNOWN: Final = "-"
_FEWEST: Final = 5  # sessions from which on an interval is shown
_DRAWS: Final = 400  # bootstrap samples for an interval


class ReportTable(Struct, frozen=True, kw_only=True):
    """A table with a note for its readers. The first column holds names, the others figures."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def report_tables(result: BacktestResult) -> Iterator[ReportTable]:
    """Yield the tables about all sessions together."""
    yield _sizes(result)
    yield _dollars(result)
    yield _totals(result)
    title = "The most expensive session of each, relative to no trimming"
    yield _by_class(result, title, lambda each: _number(each.highest_ratio))
    yield _sources(result)
    if any(each.figures.recall is not None for each in result.strategies):
        yield _recall_table(result)
    yield ReportTable(title="What each does", columns=("", "does"), rows=tuple(result.about.items()))


def headlines(result: BacktestResult) -> Iterator[str]:
    """Yield one line for each policy: its cost and its recall of far values, with 95 % intervals by session."""
    prices = main_prices(result)
    lines = [line for line in result.sessions if line.prices == prices]
    whole = {line.session: line.figures for line in lines if line.strategy == NONE}
    for name in result.about:
        own = [line for line in lines if line.strategy == name]
        if name.startswith(PREFIX) or not own:
            continue
        costs = [(line.figures.cost.input, whole[line.session].cost.input) for line in own]
        if not any(untrimmed for _, untrimmed in costs):
            continue  # no requests, or no price: nothing to compare
        counts = [line.figures.recall.far for line in own if line.figures.recall is not None]
        told = f"{name}: {percent(costs)} of the input cost at {prices}"
        kept = [(float(each.present), float(each.grounded)) for each in counts]
        if sum(grounded for _, grounded in kept):
            told += f", {percent(kept)} of the far values that later calls used was still there"
        yield f"{told}."


def percent(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the sum of the first items as a percentage of that of the second, with an interval if sessions suffice.

    Each pair is one session. Sessions with a second item of 0 are left out.
    """
    pairs = [(one, of) for one, of in pairs if of]

    def share(some: Sequence[tuple[float, float]]) -> float:
        return 100 * sum(one for one, _ in some) / (sum(of for _, of in some) or 1)

    if len(pairs) < _FEWEST:
        return f"{share(pairs):.0f} %"
    chance = Random(0)  # noqa: S311 - the same figures in each run
    drawn = sorted(share(chance.choices(pairs, k=len(pairs))) for _ in range(_DRAWS))
    return f"{share(pairs):.0f} % ({drawn[_DRAWS // 40]:.0f} to {drawn[-_DRAWS // 40]:.0f})"


def main_prices(result: BacktestResult) -> str:
    """Return the class of prices for tables that show only one: the most common one, or else the first."""
    names = [each.name for each in result.classes]
    most_common = price_class(0.1).name
    return most_common if most_common in names else names[0]


def session_tables(result: BacktestResult, classes: Sequence[str]) -> Iterator[ReportTable]:
    """Yield for each of these classes of prices a table with one row per session."""
    strategies = [name for name in result.about if name != NONE]
    for prices in classes:
        found = {(line.session, line.strategy): line.figures for line in result.sessions if line.prices == prices}
        rows: list[tuple[str, ...]] = []
        for session in dict.fromkeys(line.session for line in result.sessions):
            whole = found[session, NONE]
            ratios = [_number(ratio(found[session, name].cost, whole.cost)) for name in strategies]
            rows.append((session, f"{whole.requests:,}", f"{whole.largest:,}", _price(whole.cost.input), *ratios))
        yield ReportTable(
            title=f"Each session at {prices}: input dollars without trimming, others relative to them",
            columns=("session", "requests", "largest", "dollars", *strategies),
            rows=tuple(rows),
        )


def _first(result: BacktestResult) -> list[tuple[str, Figures]]:
    prices = main_prices(result)
    return [(each.strategy, each.figures) for each in result.strategies if each.prices == prices]


def _sizes(result: BacktestResult) -> ReportTable:
    rows = [
        (
            *(name, f"{figures.requests:,}", f"{figures.sent:,}", _share(figures.sent, figures.untrimmed)),
            *(f"{figures.largest:,}", f"{figures.most_messages:,}", f"{figures.moves:,}"),
        )
        for name, figures in _first(result)
    ]
    return ReportTable(
        title="What was sent",
        columns=("", "requests", "tokens", "of all", "largest", "messages", "moves"),
        rows=tuple(rows),
        note="largest, messages: of one request. moves: of the cut. "
        f"Policies that depend on prices are shown at {main_prices(result)}.",
    )


def _by_class(result: BacktestResult, title: str, cell: Callable[[StrategyResult], str], note: str = "") -> ReportTable:
    """Return a table with a row for each strategy and a column for each class of prices."""
    rows: dict[str, list[str]] = {name: [name] for name in result.about}
    for each in result.strategies:
        rows[each.strategy].append(cell(each))
    columns = ("", *(each.name for each in result.classes))
    return ReportTable(title=title, columns=columns, rows=tuple(map(tuple, rows.values())), note=note)


def _dollars(result: BacktestResult) -> ReportTable:
    def cell(each: StrategyResult) -> str:
        return f"{_price(each.figures.cost.input)} {_number(each.ratio)}"

    prices = ", ".join(dict.fromkeys(f"{each.dollars.input:g}" for each in result.classes))
    note = (
        f"A million tokens of input cost {prices} dollars; "
        "read, write: price of a token that is read from the provider's cache or written to it; input is 1."
    )
    return _by_class(result, "Dollars for input, and relative to no trimming", cell, note)


def _totals(result: BacktestResult) -> ReportTable:
    whole = {each.prices: each.figures.cost.total for each in result.strategies if each.strategy == NONE}

    def cell(each: StrategyResult) -> str:
        total, other = each.figures.cost.total, whole[each.prices]
        if total is None or not other:
            return _UNKNOWN
        return f"{_price(total)} {_number(total / other)}"

    return _by_class(result, "The same with output, which no strategy changes", cell)


def _sources(result: BacktestResult) -> ReportTable:
    def cell(each: StrategyResult) -> str:
        use = each.figures.cost.use
        return f"{_share(use.read, use.sent)} {_share(use.written, use.sent)}"

    rules = dict.fromkeys(f"{each.matching} from {each.prices.minimum:,} tokens on" for each in result.classes)
    title = "Tokens read from the provider's cache, and written to it"
    return _by_class(result, title, cell, f"The cache is a simulation: {', '.join(rules)}.")


def _recall_table(result: BacktestResult) -> ReportTable:
    rows: list[tuple[str, ...]] = []
    whole = next(figures.cost for name, figures in _first(result) if name == NONE)
    for name, figures in _first(result):
        recall = figures.recall or RecallCounts()
        far, asked = recall.far, figures.cost.input + figures.cost.asking
        rates = (
            *(far.recall, recall.tool_only.recall, recall.key.recall, far.bound_recall, far.mean_of_calls),
            *(far.whole_calls, recall.near.recall, recall.pinned.recall, recall.chance.recall),
        )
        priced = _number(asked / whole.input) if whole.input else _UNKNOWN
        rows.append((name, *(_number(rate, 3) for rate in rates), f"{far.grounded:,}", priced))
    return ReportTable(
        title="Values that later tool calls used, and the share of them that is still sent",
        columns=(
            *("", "far", "only in results", "far, key", "far, bound", "far, mean", "far, calls"),
            *("near", "pinned", "chance", "far values", "dollars"),
        ),
        rows=tuple(rows),
        note=f"{CAVEAT[:1].upper()}{CAVEAT[1:]}: a model may miss a value that is sent, and find again one "
        "that is not. far: last said before the last 6 messages; only in results: far, and only said by a "
        "tool; key: far, and a whole argument; bound: near a word that named it; mean: of calls; calls: those with all "
        "their values; chance: values of other sessions; dollars: relative to no trimming, where each call that lacks "
        "a far value costs one more request, read from the cache.",
    )


def _number(value: float | None, digits: int = 2) -> str:
    return _UNKNOWN if value is None else f"{value:.{digits}f}"


def _price(value: float) -> str:
    """Return dollars with four decimals, or with two from 1,000 on."""
    return f"{value:,.2f}" if value >= 1000 else f"{value:.4f}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else _UNKNOWN


def page(title: str, lines: Iterable[str], tables: Iterable[ReportTable]) -> str:
    """Return paragraphs and tables as one HTML page without scripts and external resources. All text is escaped."""
    body = [f"<h1>{escape(title)}</h1>", *(f"<p>{escape(line)}</p>" for line in lines)]
    body += [_section(table) for table in tables]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _section(table: ReportTable) -> str:
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in table.columns)
    rows = "\n".join(
        "<tr>"
        + "".join(
            f'<th scope="row">{escape(cell)}</th>' if place == 0 else f"<td>{escape(cell)}</td>"
            for place, cell in enumerate(row)
        )
        + "</tr>"
        for row in table.rows
    )
    note = f"\n<p>{escape(table.note)}</p>" if table.note else ""
    words = ' class="words"' if len(table.columns) == 2 else ""
    return (
        f'<h2>{escape(table.title)}</h2>\n<div class="table"><table{words}>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody>\n</table></div>{note}"
    )


def as_data(result: BacktestResult) -> dict[str, Any]:
    """Return `{strategies, prices, totals, sessions, recall_means, warnings}`.

    `totals` has an object for each strategy and class of prices; `sessions` has one for each of these and each
    session. `ratio` is the input dollars relative to no trimming. Nothing is rounded. Unknown values are null.
    """
    whole = {(line.session, line.prices): line.figures for line in result.sessions if line.strategy == NONE}
    return {
        "strategies": [{"name": name, "does": about} for name, about in result.about.items()],
        "prices": [
            {
                "name": each.name,
                "dollars": to_builtins(each.dollars),
                "matching": each.matching,
                "block": each.block if each.matching == "blocks" else None,
                "minimum": each.prices.minimum,
                "lifetime": each.prices.lifetime,
            }
            for each in result.classes
        ],
        "totals": [
            {
                "strategy": each.strategy,
                "prices": each.prices,
                "ratio": each.ratio,
                "most_expensive": {"session": each.most_expensive_session, "ratio": each.highest_ratio},
                **_figures(each.figures),
            }
            for each in result.strategies
        ],
        "sessions": [
            {
                "session": line.session,
                "strategy": line.strategy,
                "prices": line.prices,
                "ratio": ratio(line.figures.cost, whole[line.session, line.prices].cost),
                **_figures(line.figures),
            }
            for line in result.sessions
        ],
        "recall_means": CAVEAT,
        "warnings": list(result.warnings),
    }


def _figures(figures: Figures) -> dict[str, Any]:
    cost, recall = figures.cost, figures.recall
    return {
        "sessions": figures.sessions,
        "requests": figures.requests,
        "tokens_untrimmed": figures.untrimmed,
        "tokens_sent": figures.sent,
        "tokens_read": cost.use.read,
        "tokens_written": cost.use.written,
        "tokens_uncached": cost.use.plain,
        "tokens_output": figures.output,
        "largest_request": figures.largest,
        "most_messages": figures.most_messages,
        "moves": figures.moves,
        "input_dollars": cost.input,
        "output_dollars": cost.output,
        "dollars": cost.total,
        "asking_dollars": cost.asking,
        "recall": recall and {name: counts.as_data() for name, counts in asdict(recall).items()},
        "warnings": dict(figures.warnings),
    }

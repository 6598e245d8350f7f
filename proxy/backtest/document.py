"""What a backtest found, as JSON data for a script: every figure, none rounded."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from msgspec import to_builtins

from proxy.backtest.baselines import NONE
from proxy.backtest.figures import Figures, Outcome, ratio
from proxy.backtest.price import PriceClass
from proxy.backtest.recall import CAVEAT, Counts, RecallCounts


def as_data(outcome: Outcome) -> dict[str, Any]:
    """Return `{strategies, prices, totals, sessions, recall_means, warnings}`.

    `totals` holds one object for each strategy and class of prices; `sessions` one for each of these and each
    session. Their `ratio` is input dollars beside no trimming. Nothing is rounded, what is not known is null.
    """
    whole = {(line.session, line.prices): line.figures for line in outcome.lines if line.strategy == NONE}
    return {
        "strategies": [{"name": name, "does": about} for name, about in outcome.about.items()],
        "prices": [_class(each) for each in outcome.classes],
        "totals": [
            {
                "strategy": each.strategy,
                "prices": each.prices,
                "ratio": each.ratio,
                "dearest": {"session": each.dearest_session, "ratio": each.dearest},
                **_figures(each.figures),
            }
            for each in outcome.compared
        ],
        "sessions": [
            {
                "session": line.session,
                "strategy": line.strategy,
                "prices": line.prices,
                "ratio": ratio(line.figures.spent, whole[line.session, line.prices].spent),
                **_figures(line.figures),
            }
            for line in outcome.lines
        ],
        "recall_means": CAVEAT,
        "warnings": list(outcome.warnings),
    }


def _class(each: PriceClass) -> dict[str, Any]:
    return {
        "name": each.name,
        "dollars": to_builtins(each.dollars),
        "matching": each.matching,
        "block": each.block if each.matching == "blocks" else None,
        "minimum": each.prices.minimum,
        "lifetime": each.prices.lifetime,
    }


def _figures(figures: Figures) -> dict[str, Any]:
    spent = figures.spent
    return {
        "sessions": figures.sessions,
        "requests": figures.requests,
        "tokens_untrimmed": figures.untrimmed,
        "tokens_sent": figures.sent,
        "tokens_read": spent.use.read,
        "tokens_written": spent.use.written,
        "tokens_uncached": spent.use.plain,
        "tokens_output": figures.output,
        "largest_request": figures.largest,
        "most_messages": figures.most_messages,
        "moves": figures.moves,
        "input_dollars": spent.input,
        "output_dollars": spent.output,
        "dollars": spent.total,
        "recall": None if figures.recall is None else _recall(figures.recall),
        "warnings": dict(figures.warnings),
    }


def _recall(recall: RecallCounts) -> dict[str, Any]:
    return {name: _counts(getattr(recall, name)) for name in ("every", "pinned", "near", "far", "tool_only")}


def _counts(counts: Counts) -> dict[str, Any]:
    return {
        **asdict(counts),
        "recall": counts.recall,
        "bound_recall": counts.bound_recall,
        "whole_calls": counts.whole_calls,
    }

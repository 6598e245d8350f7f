"""Finds the cheapest policy for some sessions that keeps enough of the values that their later calls used."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import yaml
from msgspec import Struct

from proxy.backtest.comparison import BacktestResult, StrategyResult
from proxy.backtest.replay import PolicyStrategy
from proxy.config import BUILT_IN
from proxy.trimming import Policy

RECALL: Final = 0.97  # share of the far values used by later calls that must still be sent

_TRIED: Final = ((3, 600), (5, 600), (5, 1200), (10, 300), (10, 600), (10, 1200), (20, 1200))
"""(results that stay whole, `digest_chars`) of each variant of the built-in policy."""
_SIZES: Final = (30_000, 60_000)  # tokens above which a simple policy clears older results, regardless of cost


class Suggestion(Struct, frozen=True, kw_only=True):
    """A policy with its cost and recall."""

    name: str
    policy: Policy
    ratio: float  # input dollars relative to no trimming
    recall: float  # share of the far values that are still sent; 1 if later calls used none

    @property
    def yaml(self) -> str:
        """The policy as YAML for a configuration file."""
        policies = {"default": self.policy.written()}
        return yaml.safe_dump({"policies": policies}, sort_keys=False, default_flow_style=None)


def candidates() -> Iterator[PolicyStrategy]:
    """Yield the policies to try: the built-in one, variants of it, and simple ones with a token limit."""
    yield PolicyStrategy(name="built-in", policy=BUILT_IN, about="the built-in policy")
    clearing, *others = BUILT_IN.edits
    for keep, digest in _TRIED:
        edit = clearing.model_copy(update={"keep": keep, "digest_chars": digest, "keep_share": 1.0})
        policy = BUILT_IN.model_copy(update={"edits": (edit, *others)})
        name = f"keep {keep}, digests of {digest}"
        yield PolicyStrategy(name=name, policy=policy, about=f"the built-in policy, but {name}")
    for above in _SIZES:
        policy = Policy.model_validate(
            {
                "trigger": {"tokens": above},
                "keep": {"rounds": 1, "spans": 5, "first_user": True},
                "edits": [{"type": "clear_tool_results", "keep": 5, "at_least": above // 10, "digest_chars": 600}],
            }
        )
        yield PolicyStrategy(name=f"above {above:,}", policy=policy, about=f"results cleared above {above:,} tokens")


def suggested(
    result: BacktestResult, strategies: Sequence[PolicyStrategy], prices: str, recall: float = RECALL
) -> tuple[Suggestion | None, tuple[Suggestion, ...]]:
    """Return the cheapest strategy at these prices with at least this `recall` (or None), and all, cheapest first."""
    by_name = {strategy.name: strategy for strategy in strategies}
    found = [
        Suggestion(name=each.strategy, policy=by_name[each.strategy].policy, ratio=each.ratio, recall=_recall(each))
        for each in result.strategies
        if each.strategy in by_name and each.prices == prices and each.ratio is not None
    ]
    found.sort(key=lambda each: each.ratio)
    return next((each for each in found if each.recall >= recall), None), tuple(found)


def _recall(each: StrategyResult) -> float:
    far = each.figures.recall.far.recall if each.figures.recall is not None else None
    return 1.0 if far is None else far

"""What trimming saved in an exchange, in dollars, and why the provider's cache missed.

The counterfactual is the same session without trimming, billed by the same cache rules. Its prompt has all tokens
before trimming. The provider would read the part that the previous request shares with it from the cache, in whole
blocks, if the provider caches, the cache is warm, and nothing but a trim invalidated it. `backtest` computes whole
sessions in the same way.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from proxy.conversation import Kind, body_id, version_of
from proxy.dialects import Request
from proxy.models import Dollars, ModelFacts, Used, input_cost, used
from proxy.pipeline.history import History
from proxy.pipeline.receipt import PlanReport
from proxy.store import ExchangeRow, SessionRow

FIRST: Final = "first"
TRIM: Final = "trim"
EXPIRED: Final = "expired"
HISTORY: Final = "history"
OTHER: Final = "other"
"""Causes of a cache miss, as far as the plan tells. `cause_of` refines `OTHER`."""

UNSURE: Final = frozenset({OTHER, TRIM})  # causes that need a look into the store

_ALONE: Final = frozenset({Kind.FIRST, Kind.FOREIGN, Kind.SIDE})  # kinds of which nothing was sent before
_SLACK: Final = 0.8
"""It is a miss if less than this part of the expected tokens was read; the margin is for differing token counts."""


class Shares(Struct, frozen=True, kw_only=True):
    """How much of a request was sent before, in tokens as counted by the upstream."""

    whole: float  # tokens of the untrimmed request
    known: float  # the part of `whole` that the previous request would have sent too
    expected: float  # tokens of the sent request that should be in the provider's cache


def shares_of(history: History, report: PlanReport, prompt: int) -> Shares:
    """Return the shares of a request. `prompt` is the upstream's count of its tokens.

    The reply that a request continues from counts as new, because it was not part of the previous prompt.
    """
    before, sent = report.tokens_before, report.tokens_sent
    ratio = prompt / sent if sent else 1.0
    new = sum([body.tokens for body in history.fresh])
    known = len(history.nodes)
    if known and history.entries[known - 1].message.role == "assistant":
        new += history.entries[known - 1].tokens
    plan = report.plan
    shrunk = unique_tokens(history, report) if before != sent and (plan.arrivals or plan.made) else 0
    alone = history.arrival.kind in _ALONE
    return Shares(
        whole=prompt + (before - sent) * ratio,
        known=0.0 if alone else max(before - new * report.scale, 0.0) * ratio,
        expected=0.0 if alone else max(sent - (new - shrunk) * report.scale, 0.0) * ratio,
    )


def unique_tokens(history: History, report: PlanReport) -> int:
    """Return the tokens that were left out of the request's new messages. The provider never saw these."""
    plan = report.plan
    if not (plan.arrivals or plan.made) or not history.fresh:
        return 0
    first = history.entries[len(history.nodes)].position
    return sum([change.freed for change in plan.arrivals + plan.made if change.position >= first])


def miss_of(tokens: Used, shares: Shares, history: History, report: PlanReport, facts: ModelFacts, now: int) -> str:
    """Return why the provider's cache missed; empty if it did not miss or if that is unknown."""
    prices = facts.prices
    if not tokens.reports_cache or prices.read >= 1 or tokens.prompt < prices.minimum:
        return ""
    if history.arrival.kind in _ALONE:
        return FIRST if not tokens.read else ""
    if shares.expected < prices.minimum or tokens.read >= shares.expected * _SLACK - facts.block:
        return ""
    if report.plan.trimmed and not report.only_observed:
        return TRIM
    if history.updated_at is not None and now - history.updated_at > prices.lifetime * 1000:
        return EXPIRED
    return HISTORY if history.arrival.kind is Kind.WINDOWED else OTHER


def saved(
    tokens: Used, shares: Shares, miss: str, facts: ModelFacts, dollars: Dollars, *, caches: bool = True
) -> float:
    """Return how many dollars more the prompt would have cost untrimmed; negative if it would have cost less.

    `caches` is false if the provider turned out to cache nothing.
    """
    prices = facts.prices
    whole, known = round(shares.whole), shares.known
    if not (tokens.reports_cache and caches) or prices.read >= 1 or miss == EXPIRED:
        known = 0.0
    elif miss not in {"", TRIM}:
        known = min(known, tokens.read)  # the cause of the miss is independent of trimming
    read = int(known)
    if facts.matching == "blocks":
        read = read // facts.block * facts.block
    if read < prices.minimum:
        read = 0
    written = whole - read if tokens.written else 0
    return input_cost(Used(prompt=whole, read=read, written=written), dollars) - input_cost(tokens, dollars)


def cause_of(request: Request, session: SessionRow | None) -> str:
    """Return what the client changed, if that is why the cache missed; `OTHER` if unknown.

    `session` is the session's row before this request.
    """
    if session is None:
        return OTHER
    if session.model is not None and session.model != request.model:
        return "model"
    if request.instructions and version_of(request.instructions) != session.instructions:
        return "instructions"
    tools = body_id(request.tools) if request.tools is not None else None
    return "tools" if tools != session.tools else OTHER


def cached(before: ExchangeRow) -> bool:
    """Tell whether the provider may cache, judging by the request before this one.

    It may, unless that request read nothing from the cache although it could have.
    """
    tokens = used(before.receipt.get("usage"))
    return tokens is None or before.kind in _ALONE or not tokens.reports_cache or tokens.read > 0

"""What trimming saved in an exchange, in dollars, and why the provider's cache missed.

The counterfactual is the same session untrimmed, billed by the same cache rules. Its prompt would have had all tokens
before trimming. What of it the provider would have read from its cache is what the request before it had in common with
it, in whole blocks, where the provider caches, the cache was warm, and nothing but a trim spoilt it. `backtest` reckons
in the same way, over whole sessions.
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
"""Why the provider's cache missed, where the plan tells; of `OTHER`, `cause_of` knows more."""

UNSURE: Final = frozenset({OTHER, TRIM})  # where the store knows more

_ALONE: Final = frozenset({Kind.FIRST, Kind.FOREIGN, Kind.SIDE})  # nothing of these was sent before
_SLACK: Final = 0.8
"""A miss is when less than this part of what should be cached was read: counts of tokens differ."""


class Shares(Struct, frozen=True, kw_only=True):
    """How much of a request was sent before, in tokens as the upstream counts them."""

    whole: float  # tokens of the request if nothing were trimmed
    known: float  # those of them that the request before it would have sent too
    expected: float  # tokens of what is sent that should be in the provider's cache


def shares_of(history: History, report: PlanReport, prompt: int) -> Shares:
    """Return them; `prompt` are the tokens that the upstream counted.

    A request goes on from a reply, which was no part of the prompt that it answered.
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
    """Return the tokens of the request's new messages that were not sent, and so never will have been."""
    plan = report.plan
    if not (plan.arrivals or plan.made) or not history.fresh:
        return 0
    first = history.entries[len(history.nodes)].position
    return sum([change.freed for change in plan.arrivals + plan.made if change.position >= first])


def miss_of(tokens: Used, shares: Shares, history: History, report: PlanReport, facts: ModelFacts, now: int) -> str:
    """Return why the provider's cache missed; empty where it did not, or where that cannot be known."""
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
    """Return by how many dollars the prompt would have cost more untrimmed; negative where it would have cost less.

    `caches` is false where the provider caches nothing, whatever is known of it.
    """
    prices = facts.prices
    whole, known = round(shares.whole), shares.known
    if not (tokens.reports_cache and caches) or prices.read >= 1 or miss == EXPIRED:
        known = 0.0
    elif miss not in {"", TRIM}:
        known = min(known, tokens.read)  # what spoilt the cache would have spoilt it without trimming too
    read = int(known)
    if facts.matching == "blocks":
        read = read // facts.block * facts.block
    if read < prices.minimum:
        read = 0
    written = whole - read if tokens.written else 0
    return input_cost(Used(prompt=whole, read=read, written=written), dollars) - input_cost(tokens, dollars)


def cause_of(request: Request, session: SessionRow | None) -> str:
    """Return what the client changed, if that is why the cache missed; `OTHER` where nobody knows.

    `session` is as it stood before this request.
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
    """Tell whether the provider may cache, by the request before this one: a first one finds nothing there."""
    tokens = used(before.receipt.get("usage"))
    return tokens is None or before.kind in _ALONE or not tokens.reports_cache or tokens.read > 0

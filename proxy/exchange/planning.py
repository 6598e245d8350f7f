"""The plan of one request, from its place in the log and what is known."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from proxy.exchange.background import TRIMMING, compute
from proxy.exchange.past import Past
from proxy.exchange.receipt import Ticket
from proxy.trimming.engine import bypass, plan
from proxy.trimming.plan import Entry, Known, Plan
from proxy.trimming.policy import Policy


async def planned_of(past: Past, name: str, policy: Policy | None, known: Known) -> Plan:
    """Decide what of the branch is sent; without a policy trimming is switched off."""
    composed = past.arrival.composed
    if policy is None:
        return await compute(past.size, bypass, past.entries, known, composed=composed)
    standing = past.standing.cut if past.standing is not None else None
    return await compute(
        TRIMMING * past.size,
        plan,
        past.entries,
        policy,
        name,
        known,
        standing,
        composed=composed,
        start=past.start,
    )


def nothing_sent(entries: Sequence[Entry], known: Known) -> Plan:
    """Return the plan of a request for which upstream is not asked: it changes nothing."""
    return replace(bypass(entries, known), tokens_sent=0, view=(), warnings=())


def ticket_of(
    past: Past, planned: Plan, known: Known, exchange: str, warnings: tuple[str, ...] = ()
) -> Ticket:
    """Return what is known of an exchange once it is planned; `warnings` beside the plan's own."""
    return Ticket(
        past.id,
        exchange,
        planned,
        instructions=len(past.instructions),
        messages=planned.messages_before,
        warnings=warnings,
        window=known.context_window,
        fixed_tokens=known.fixed_tokens,
        scale=known.scale,
    )

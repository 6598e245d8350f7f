"""The plan of one request, from its place in the log and what is known."""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from proxy.pipeline.background import TRIMMING, compute
from proxy.pipeline.past import History
from proxy.pipeline.receipt import PlanReport
from proxy.trimming import Entry, Plan, PlanningContext, Policy, bypass, plan


async def planned_of(past: History, name: str, policy: Policy | None, known: PlanningContext) -> Plan:
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


def nothing_sent(entries: Sequence[Entry], known: PlanningContext) -> Plan:
    """Return the plan of a request for which upstream is not asked: it changes nothing."""
    return replace(bypass(entries, known), tokens_sent=0, view=(), warnings=())


def report_of(
    past: History, planned: Plan, known: PlanningContext, exchange: str, warnings: tuple[str, ...] = ()
) -> PlanReport:
    """Return what is known of an exchange once it is planned; `warnings` beside the plan's own."""
    return PlanReport(
        session=past.id,
        exchange=exchange,
        plan=planned,
        instructions=len(past.instructions),
        messages=planned.messages_before,
        warnings=warnings,
        window=known.context_window,
        fixed_tokens=known.fixed_tokens,
        scale=known.scale,
    )

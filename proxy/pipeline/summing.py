"""Summaries by a model as an exchange has to do with them: the one that is ready, the one that is wanted.

How one is made is `summaries`' business, whether one is used the engine's.
"""

from __future__ import annotations

from secrets import token_hex

from msgspec.structs import replace

from proxy.conversation import chain
from proxy.pipeline.turn import Call, ExchangeContext
from proxy.store import SummaryRow, SummaryStatus, session_key
from proxy.summaries import Caller, Given, Work
from proxy.trimming import Cut, Policy, Prepared, SummaryRequest


def prepared_of(row: SummaryRow | None) -> Prepared | None:
    """Return a stored summary as trimming sees it; None where there is none that is ready."""
    if row is None or row.status is not SummaryStatus.READY:
        return None
    return Prepared(
        text=row.text,
        tokens=row.tokens,
        until=row.until,
        model=row.model,
        covered_messages=row.covered_messages,
        covered_tokens=row.covered_tokens,
        generation=row.generation,
        asked=row.asked,
    )


def unused(row: SummaryRow | None, cut: Cut | None) -> SummaryRow | None:
    """Return a ready summary that covers more than what the cut uses; None where there is none."""
    if row is None or row.status is not SummaryStatus.READY:
        return None
    used = cut.summary.until if cut is not None and cut.summary is not None else 0
    return row if row.until > used else None


def asked_for(row: SummaryRow, at: int) -> SummaryRow:
    """Return a summary that was made beside the requests as one that somebody asks for; `at` is the time.

    What it cost was booked with the first.
    """
    return replace(row, id=f"sum_{token_hex(12)}", asked=True, usage=None, cost=None, created_at=at)


def caller_of(call: Call) -> Caller:
    """Return on whose behalf a summary is made."""
    return Caller(tenant=call.tenant, headers=tuple(call.headers), query=call.query)


def work_of(
    turn: ExchangeContext,
    policy: Policy,
    wanted: SummaryRequest,
    tip: str | None = None,
    *,
    asked: bool = False,
) -> Work:
    """Return what a summary that an exchange wants is made of.

    `tip` is the end of the branch once the exchange is settled; None before that: then what the request
    brings is given along, where it is the whole branch.
    """
    past, call = turn.past, turn.call
    given: Given | None = None
    if tip is None:
        fresh = [body.message for body in past.fresh]
        nodes = (*past.nodes, *chain(past.arrival.base, fresh))
        tip = nodes[-1] if nodes else past.arrival.base
        if not past.start and not past.arrival.composed:
            given = Given(messages=tuple([entry.message for entry in past.entries]), nodes=nodes)
        else:
            tip = past.arrival.base
    return Work(
        key=session_key(call.tenant, past.id or ""),
        session=past.id or "",
        tip=tip,
        wanted=wanted,
        edit=policy.summarizing,
        model=turn.request.model,
        caller=caller_of(call),
        asked=asked,
        has_target=has_target(policy),
        exchange=turn.ticket.exchange,
        attempt=past.attempt,
        given=given,
    )


def has_target(policy: Policy) -> bool:
    """Tell whether the policy says how far to trim."""
    return policy.target is not None or policy.summarizing.lower is not None


def missed(
    wanted: SummaryRequest | None,
    attempt: SummaryRow | None,
    cut: Cut | None = None,
    *,
    reason: str = "",
    hindered: str = "",
) -> tuple[str, ...]:
    """Return the warning that the cut moves without the summary that it should have used, and why.

    `cut` is where it moves to, `reason` why none was made just now, where one was waited for, and `hindered`
    why none is even begun.
    """
    if wanted is None or not wanted.urgent:
        return ()
    if reason:
        return (f"no summary: {reason}",)
    failed = attempt.reason if attempt is not None else ""
    if failed or hindered:
        return (f"no summary: {'; '.join(filter(None, (failed, hindered)))}",)
    if attempt is None:
        return ("no summary is ready: the other edits did the work",)
    if unused(attempt, cut) is None:
        return ("no newer summary is ready: the other edits did the work",)
    return ("a summary is ready and was not used: what is sent would not get smaller by it",)

"""Summaries by a model, as an exchange deals with them: the one that is ready, the one that is asked for."""

from __future__ import annotations

from secrets import token_hex

from msgspec.structs import replace

from proxy.store import SummaryRow, SummaryStatus
from proxy.trimming import Cut, Policy, ReadySummary, SummaryRequest


def prepared_of(row: SummaryRow | None) -> ReadySummary | None:
    """Return a stored summary as trimming sees it; None where there is none that is ready."""
    if row is None or row.status is not SummaryStatus.READY:
        return None
    return ReadySummary(
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


def as_requested(row: SummaryRow, at: int) -> SummaryRow:
    """Return a summary that was made beside the requests as one that somebody asks for; `at` is the time.

    What it cost was booked with the first.
    """
    return replace(row, id=f"sum_{token_hex(12)}", asked=True, usage=None, cost=None, created_at=at)


def has_target(policy: Policy) -> bool:
    """Tell whether the policy says how far to trim."""
    return policy.target is not None or policy.summarizing.lower is not None


def missing_summary(
    wanted: SummaryRequest | None,
    attempt: SummaryRow | None,
    cut: Cut | None = None,
    *,
    reason: str = "",
    hindered: str = "",
) -> tuple[str, ...]:
    """Return the warning that a trim goes without the summary that it asked for, and why.

    Args:
        wanted: the summary that the plan asks for.
        attempt: the last attempt at one.
        cut: the cut that the trim makes.
        reason: why none was made just now, where the request waited for it.
        hindered: why none is even begun.
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

"""A summary that somebody asks for: made now, and used by the next request."""

from __future__ import annotations

from proxy.errors import UpstreamError
from proxy.pipeline.background import TRIMMING, compute
from proxy.pipeline.means import AppServices
from proxy.pipeline.present import Present
from proxy.pipeline.summing import asked_for, has_target, unused
from proxy.store import SessionRow, SummaryRow, SummaryStatus
from proxy.summaries import Caller, Given, Work
from proxy.trimming import Policy, compaction


async def compact(
    session: SessionRow, now: Present, policy: Policy, caller: Caller, means: AppServices, *, patience: float
) -> SummaryRow | None:
    """Make a summary of all that may be summed up; return it, or None where there is nothing to sum up.

    Args:
        session: whose.
        now: how it stands.
        policy: says how.
        caller: on whose behalf the model is asked.
        means: what it takes.
        patience: seconds to wait; then it goes on in the background.

    Raises:
        UpstreamError: it was not made, and why.
        StoreUnavailable: the session cannot be read.
    """
    cut = now.standing.cut if now.standing is not None else None
    wanted = await compute(TRIMMING * now.size, lambda: compaction(now.entries, policy, now.known, cut))
    if wanted is None:
        ready = unused(now.prepared, cut)
        if ready is None or ready.asked:
            return ready
        row = asked_for(ready, means.knowledge.now)  # made beside the requests, and not used yet
        await means.store.keep_summary(session.key, row)
        return row
    nodes = tuple([row.node for row in now.rows])
    attempt = await means.summaries.make(
        Work(
            key=session.key,
            session=session.id,
            tip=session.head,
            wanted=wanted,
            edit=policy.summarizing,
            model=now.model,
            caller=caller,
            asked=True,
            has_target=has_target(policy),
            given=Given(messages=tuple([row.message for row in now.rows]), nodes=nodes),
        ),
        patience,
    )
    if attempt.row is None or attempt.row.status is not SummaryStatus.READY:
        raise UpstreamError(
            f"No summary was made: {attempt.reason}. The session is as it was.", code="summary_failed"
        )
    return attempt.row

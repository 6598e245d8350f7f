"""The proxy's own tools, as one exchange offers them: what they may read, and what they may begin."""

from __future__ import annotations

from typing import Final

from proxy.pipeline.background import TRIMMING, compute
from proxy.pipeline.summing import unused
from proxy.pipeline.turn import ExchangeContext
from proxy.recall import OwnTools, Recall, RecallBranch, sent_whole
from proxy.store import session_key
from proxy.trimming import compaction

BEGUN: Final = (
    "A summary of the older part of this conversation is being made. It takes the place of that part in one "
    "of the next requests; until then nothing changes. Go on with the task."
)
NOTHING_TO_SUM_UP: Final = (
    "There is nothing yet that a summary would make shorter. Nothing was changed. Go on with the task."
)


def own_tools(turn: ExchangeContext, recall: Recall) -> OwnTools:
    """Return the tools that this exchange offers, with what answers them."""
    return OwnTools(turn.own, recall, _branch(turn), _Compression(turn))


def _branch(turn: ExchangeContext) -> RecallBranch:
    past, plan = turn.past, turn.ticket.plan
    fresh = tuple([body.message for body in past.fresh])
    end = past.entries[-1].position + 1 if past.entries else past.start
    return RecallBranch(
        key=session_key(turn.call.tenant, past.id or ""),
        tip=past.arrival.base,
        depth=end - len(fresh),
        fresh=fresh,
        whole=sent_whole(past.entries, plan.view),
    )


class _Compression:
    """Notes that the model asked for a summary; it is begun when the exchange is settled."""

    def __init__(self, turn: ExchangeContext) -> None:
        self._turn = turn

    async def __call__(self) -> str:
        turn = self._turn
        policy, past = turn.policy, turn.past
        if policy is None:
            return NOTHING_TO_SUM_UP
        standing = past.standing.cut if past.standing is not None else None
        wanted = await compute(
            TRIMMING * past.size,
            lambda: compaction(past.entries, policy, turn.known, standing, start=past.start),
        )
        turn.compaction = wanted or unused(past.prepared, standing)
        return NOTHING_TO_SUM_UP if turn.compaction is None else BEGUN

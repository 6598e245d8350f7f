"""Which summary by a model is wanted, before the cut moves or because somebody asks for one.

Between two moves that is from a part of the trigger on: what is ready when the trigger fires lets nobody
wait. Where `cost: auto` moves the cut, it is where the move would pay if the summary were there. It does not
know who makes a summary, nor whether one is being made.
"""

from __future__ import annotations

from typing import Final

from msgspec.structs import replace

from proxy.trimming.draft import Draft
from proxy.trimming.edits.summarize import Summarize
from proxy.trimming.plan import PlanningContext, SummaryRequest
from proxy.trimming.policy import Policy
from proxy.trimming.trigger import Size
from proxy.trimming.worth import Balance, Costs

ASKED: Final = "a summary was asked for"
"""What moves the cut where somebody did."""


def in_time(draft: Draft, edit: Summarize, added: int | None, costs: Costs | None) -> SummaryRequest | None:
    """Return the summary that should be ready when the cut moves next; None where none would be worth it.

    Args:
        draft: What stands.
        edit: How a model sums up.
        added: Tokens that come before the trigger fires; None where that is too far off: then it must pay.
        costs: What is needed to judge that; without it nothing pays.
    """
    wanted = edit.wanted(draft, added=added or 0)
    if wanted is None or (added is not None and not edit.must_pay):
        return wanted
    paying = costs is not None and pays(edit, draft, wanted, costs, costs.balance(draft))
    return wanted if paying else None


def pays(edit: Summarize, draft: Draft, wanted: SummaryRequest, costs: Costs, before: Balance) -> bool:
    """Tell whether a summary is worth what it costs to make it and to move the cut for it.

    `before` is what everything changes in cost that was done to the draft already.
    """
    imagined = edit.imagined(draft, wanted)
    written = min(wanted.room, edit.max_tokens)
    balance = costs.balance(imagined).since(before)
    making = draft.total - imagined.total + written + costs.prices.output * written
    return replace(balance, loss=balance.loss + making).pays_within(costs.expected)


def until_it_fires(policy: Policy, edit: Summarize, known: PlanningContext, size: Size) -> int | None:
    """Return how many tokens come before the trigger fires, about; None where that is far off."""
    trigger = policy.trigger
    tokens = size.tokens * known.scale
    if trigger is None or (edit.upper is not None and tokens <= edit.soft * edit.upper):
        return None
    if edit.when is not None and any(share <= edit.soft for share in edit.when.shares(size, known)):
        return None
    until_upper = int(edit.upper / known.scale) - size.tokens if edit.upper is not None else 0
    nearest = max(trigger.shares(size, known), default=None)
    if trigger.every_request or (nearest is None and edit.upper is not None):
        return max(0, until_upper)
    if nearest is None or nearest <= edit.soft:  # it speaks of time or of cost; or it is too early
        return None
    return max(0, until_upper, int(size.tokens / nearest) - size.tokens)


def asked_for(draft: Draft, edit: Summarize) -> SummaryRequest | None:
    """Return what is summed up if somebody asks for it; None where nothing is left that would be worth it.

    No condition of the edit counts then. At least one round of the history is covered, where there is one;
    where there is none, what lies behind in the current one.
    """
    history = [each for each in draft.rounds[:-1] if each.number > 0]
    free = edit.model_copy(
        update={
            "keep_rounds": min(edit.keep_rounds, max(0, len(history) - 1)),
            "min_messages": 0,
            "min_new_messages": 1,
            "growth_ratio": 0.0,
        }
    )
    return free.wanted(draft, whole=True)

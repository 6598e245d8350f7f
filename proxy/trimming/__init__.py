"""What is sent of a history, and why: `history + policy + what is known -> plan -> view`. Pure.

    plan          the words of that sentence: entry, change, gap, summary, cut, known, plan
    policy        a policy as the operator writes it: match, trigger, target, keep, pin, edits
    trigger       when to trim and how far: thresholds and the sizes compared with them
    section       one mapping of a policy file, and the numbers that stand in it
    regex         the operator's patterns, in linear time on any text
    prices        what input costs, as numbers relative to one uncached token
    edits         the edits: one file each, one list
    draft         the picture of the log that an edit looks at
    protection    what is never trimmed
    gaps          what was dropped, summed up, and the log without it
    remains       the log without its gaps, as the moves so far have left it
    arrival       what happens to a message the first time it is sent, and every time after
    move          the edits run, and what they change
    coverage, demand, release
                  what a summary covers, when one by a model is wanted, which hidden rounds are let go
    worth         whether a move pays: what it rewrites in the provider's cache against what it frees
    view          what is sent of it, a summary before it
    protocol      the provider's rules about tool calls, and the repair of what breaks them
    engine        all of it together: `plan` and `bypass`

What edits are made of:

    statistics    what a part of a conversation comes to, in numbers and in its own words
    broadcasts    messages in which another agent says that it called a tool
    stub          what stands in the place of a result that was cleared

An edit looks at a draft and returns changes; the engine makes the next draft of them. Nothing here
reads or writes anything, asks a clock or a provider, or changes what it was given.
"""

from __future__ import annotations

from proxy.trimming.broadcasts import BUILT_IN, broadcast_digest, broadcast_of
from proxy.trimming.edits import TOOL_OUTPUT_TYPES, BaseEdit, Edit
from proxy.trimming.edits.drop_oldest import DropOldest
from proxy.trimming.edits.summarize import Summarize
from proxy.trimming.engine import bypass, compaction, plan
from proxy.trimming.gaps import standing
from proxy.trimming.move import BEYOND_KEEP
from proxy.trimming.plan import (
    Account,
    Change,
    Cut,
    Entry,
    Gap,
    Hidden,
    Plan,
    PlanningContext,
    Prepared,
    Summary,
    SummaryRequest,
)
from proxy.trimming.policy import Keep, Match, Pin, Policy
from proxy.trimming.prices import Prices, PriceSource, Step
from proxy.trimming.section import Natural, Positive, contradiction
from proxy.trimming.statistics import Language
from proxy.trimming.trigger import Target, Trigger
from proxy.trimming.view import merged

__all__ = [
    "BEYOND_KEEP",
    "BUILT_IN",
    "TOOL_OUTPUT_TYPES",
    "Account",
    "BaseEdit",
    "Change",
    "Cut",
    "DropOldest",
    "Edit",
    "Entry",
    "Gap",
    "Hidden",
    "Keep",
    "Language",
    "Match",
    "Natural",
    "Pin",
    "Plan",
    "PlanningContext",
    "Policy",
    "Positive",
    "Prepared",
    "PriceSource",
    "Prices",
    "Step",
    "Summarize",
    "Summary",
    "SummaryRequest",
    "Target",
    "Trigger",
    "broadcast_digest",
    "broadcast_of",
    "bypass",
    "compaction",
    "contradiction",
    "merged",
    "plan",
    "standing",
]

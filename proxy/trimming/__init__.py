"""Decides what is sent of a history: `history + policy + context -> plan -> view`. Pure.

    planner     `plan`, the entry point: plans one request; also `bypass`, `untrimmed`, `compaction`
    extend      a fast path for a log that extends the one planned before
    model       the records: entry, change, gap, summary, cut, context, plan, prices
    policy      a policy as the operator writes it: match, trigger, target, keep, pin, edits
    settings    the types of its settings: numbers, patterns, triggers, targets
    history     the log as earlier requests left it: decisions on arrival, gaps, the current cut
    trim        one trim: runs the edits over that log and collects their changes
    draft       the log as an edit sees it
    edits/      the edits
    cost        the cost model: whether a trim pays
    statistics  summarizes a part of a conversation in numbers and quotes

An edit reads a draft and returns changes. Each edit sees the draft that the edit before it left.
"""

from __future__ import annotations

from proxy.trimming.edits import TOOL_OUTPUT_TYPES, Edit
from proxy.trimming.edits.digest_agent_calls import BUILT_IN, broadcast_digest, broadcast_of
from proxy.trimming.edits.dropping import DropOldest
from proxy.trimming.edits.summarize import Summarize
from proxy.trimming.extend import PlannedStart, extended, planned_start
from proxy.trimming.history import outside_gaps, without_reasoning
from proxy.trimming.model import (
    SUMMARIZE,
    UNTRIMMED,
    Account,
    Change,
    Cut,
    Entry,
    Gap,
    Hidden,
    Plan,
    PlanningContext,
    Prices,
    PriceSource,
    ReadySummary,
    StaleRange,
    Step,
    Summary,
    SummaryRequest,
)
from proxy.trimming.planner import bypass, compaction, merged, plan, untrimmed, without_bound_reasoning
from proxy.trimming.policy import Keep, Match, Pin, Policy
from proxy.trimming.settings import Natural, Positive, Target, Trigger, compiled, contradiction
from proxy.trimming.statistics import Language

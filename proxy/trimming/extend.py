"""The plan of a log that begins like the one before it and to which nothing happens, without planning that again.

Between two trims each view begins with the last one. So what is sent of the beginning is known, and only the messages
after it are looked at: whether the trigger fires with them, and whether they keep the protocol. Where anything is to be
decided, or is not certain, `plan` decides, which gives the same plan.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from proxy.dialects import Message
from proxy.trimming.model import Cut, Entry, Plan, PlanningContext, Size
from proxy.trimming.planner import is_due, last_reply
from proxy.trimming.policy import Policy
from proxy.trimming.settings import UNKNOWN_WINDOW


class PlannedStart(Struct, frozen=True, kw_only=True):
    """The beginning of a log, as it was planned."""

    entries: tuple[Entry, ...]  # up to where no call waits for its result, and beyond the cut
    view: tuple[Message, ...]  # what is sent of them
    tokens: int  # of that view, those of a summary among them; of instructions and tools none
    tokens_before: int  # of `entries`, if nothing were trimmed
    window: int | None  # the context window
    plan: Plan  # the plan of the whole log
    after: int  # how many messages came after `entries` in that log


def planned_start(
    entries: Sequence[Entry], stored: int, plan: Plan, policy: Policy, context: PlanningContext
) -> PlannedStart | None:
    """Return what of a plan holds for a log that goes on after the first `stored` entries; None where that is unknown.

    The arguments are those of `plan`, which gave `plan`. The log was given whole.
    """
    if plan.trimmed or plan.needs_whole or policy.on_arrival or policy.summarizer is not None:
        return None
    if plan.warnings not in {(), (UNKNOWN_WINDOW,)}:  # something was repaired
        return None
    end = stored
    while 0 < end < len(entries) and entries[end].message.is_result:
        end -= 1
    after = entries[end:]
    if not end or any([_is_changed(entry) for entry in after]):
        return None
    if plan.cut is not None and entries[end - 1].position + 1 < plan.cut.position:
        return None
    tokens = sum([entry.tokens for entry in after])
    return PlannedStart(
        entries=tuple(entries[:end]),
        view=plan.view[: len(plan.view) - len(after)],
        tokens=plan.tokens_sent - context.fixed_tokens - tokens,
        tokens_before=plan.tokens_before - context.fixed_tokens - tokens,
        window=context.context_window,
        plan=plan,
        after=len(after),
    )


def extended(
    start: PlannedStart,
    entries: Sequence[Entry],
    policy: Policy,
    name: str,
    context: PlanningContext,
    current: Cut | None,
) -> Plan | None:
    """Return what `plan` would for a log that begins like `start`, if nothing is to be done; None where that is unsure.

    The arguments are those of `plan`; the log is given whole.
    """
    before, count = start.plan, len(start.entries)
    after = tuple(entries[count:])
    if (
        (before.policy, before.version, before.cut, start.window)
        != (name, policy.version, current, context.context_window)
        or context.ready_summary is not None
        or tuple(entries[:count]) != start.entries
        or any([_is_changed(entry) for entry in after])
    ):
        return None
    messages = tuple([entry.message for entry in after])
    # Whatever the plan changed of the beginning, or put in, it repairs with what comes after.
    is_repaired = current is not None or before.arrivals or before.messages_before > count + start.after
    if is_repaired and messages and not _is_sound(messages):
        return None
    tokens = sum([entry.tokens for entry in after])
    sent = context.fixed_tokens + start.tokens + tokens
    view = start.view + messages
    if policy.trigger is not None:
        aim = policy.target.within(context.context_window) if policy.target is not None else None
        size = Size(tokens=sent, messages=len(view))
        if policy.trigger.tool_calls is not None or policy.trigger.fired(size, context, current, aim):
            return None
        if policy.trigger.cost is not None and context.keeps:
            reply = last_reply(entries)
            rest = entries[reply:] if reply is not None else ()
            if not rest or view[-len(rest) :] != tuple([entry.message for entry in rest]):  # it was trimmed itself
                return None
            if is_due(rest, [entry.tokens for entry in rest], context, sent):
                return None
    return replace(
        before,
        tokens_before=context.fixed_tokens + start.tokens_before + tokens,
        tokens_sent=sent,
        view=view,
        decided=before.decided[:count] + ((),) * len(after),
        messages_before=before.messages_before - start.after + len(after),
    )


def _is_changed(entry: Entry) -> bool:
    """Tell whether something else than the message is sent of an entry."""
    return bool(entry.arrival) or entry.hidden is not None


def _is_sound(messages: Sequence[Message]) -> bool:
    """Tell whether messages after what keeps the protocol keep it, too."""
    dialect = messages[0].dialect
    if not dialect.repairs_blocks_alone or messages[0].is_result:
        return False
    return not dialect.repair(messages).notes

"""A fast path for `plan`: extends the last plan when a log only grew and no trim is due.

Between two trims each view begins with the last one. So only the new messages are checked: whether the trigger fires
with them, and whether they keep the protocol. If there is anything to decide, or any doubt, `extended` returns None and
the caller uses `plan`. Both give the same plan.
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

    entries: tuple[Entry, ...]  # they end beyond the cut, at a place where no call waits for its result
    view: tuple[Message, ...]  # the part of the view that is sent for them
    tokens: int  # tokens of that view with its summary, without instructions and tools
    tokens_before: int  # tokens of `entries` if nothing were trimmed
    window: int | None  # the context window
    plan: Plan  # the plan of the whole log
    after: int  # number of messages after `entries` in that log


def planned_start(
    entries: Sequence[Entry], stored: int, plan: Plan, policy: Policy, context: PlanningContext
) -> PlannedStart | None:
    """Return the part of a plan that can be reused when the log goes on after its first `stored` entries.

    Returns None if no part can be reused for certain. The other arguments are those of the call of `plan` that
    returned `plan`. The entries must be the whole log.
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
    """Return the plan that `plan` would return for a log that begins like `start` and needs no trim.

    Returns None if that is not certain; then call `plan`. The other arguments are those of `plan`. The entries must be
    the whole log.
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
    # If the plan changed the beginning, `plan` would check the whole view and repair it. Check the new messages here.
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
            if not rest or view[-len(rest) :] != tuple([entry.message for entry in rest]):  # `rest` itself was trimmed
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
    """Tell whether anything but the entry's own message is sent for it."""
    return bool(entry.arrival) or entry.hidden is not None


def _is_sound(messages: Sequence[Message]) -> bool:
    """Tell whether these messages keep the protocol when they follow a view that keeps it."""
    dialect = messages[0].dialect
    if not dialect.repairs_blocks_alone or messages[0].is_result:
        return False
    return not dialect.repair(messages).notes

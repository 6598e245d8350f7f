"""From a log and a policy to what is sent: `history + policy + what is known -> plan`.

The view is `trim(A[:cut]) + A[cut:]`, where A is the log after `on_arrival`. The cut stands still
until the policy's trigger fires; then it moves to the end of the log. Between two moves each view
begins with the last one, byte for byte, so that the provider's prompt cache stays warm.

What a move did stays done: the next one decides on what remains and adds to it, so that it rewrites the
cache only from its own first change on. So the log need not be given whole, and planning costs what is kept,
not what is stored. A policy of another version begins again, on all of A, and asks for it where it is not
there.

A view in which anything was changed, or that was put together here, is checked against the
protocol and repaired; what a client sent itself and nothing changed goes out as it is. What the client was
not shown is put in where it belongs, as long as the message stands unchanged that it hangs on.

A summary by a model takes time to make. So a plan says which one it wants before the cut moves; whoever has
the plan sees to it, and the next move uses what is there by then. One that somebody asked for moves the cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec.structs import replace

from proxy.dialects import Message
from proxy.trimming.arrival import arrive
from proxy.trimming.coverage import start_of_newest
from proxy.trimming.demand import ASKED, asked_for, in_time, until_it_fires
from proxy.trimming.edits.summarize import Summarize
from proxy.trimming.gaps import clipped, joined, missing
from proxy.trimming.move import Move, decide, draft_of, is_above, rescue
from proxy.trimming.plan import (
    Change,
    Cut,
    Entry,
    Gap,
    Hidden,
    Plan,
    PlanningContext,
    Summary,
    SummaryRequest,
)
from proxy.trimming.policy import Policy
from proxy.trimming.remains import TrimmedHistory, trimmed_history
from proxy.trimming.trigger import IDLE, UNKNOWN_WINDOW, Size
from proxy.trimming.view import View, view_of
from proxy.trimming.worth import (
    Balance,
    Costs,
    account_after,
    account_of,
    due,
    is_cold,
    prices_of,
    reads_of,
)

OFF: Final = "off"
"""Name of the policy in a plan that bypasses trimming."""

UNKNOWN_PRICES: Final = "the prices of this model are not known: the most common ones are assumed"
"""What is said where `cost: auto` reckons with prices that nobody gave."""


def plan(
    entries: Sequence[Entry],
    policy: Policy,
    name: str,
    known: PlanningContext,
    standing: Cut | None = None,
    *,
    composed: bool = False,
    start: int = 0,
    overflow: int | None = None,
) -> Plan:
    """Decide what is sent of a log.

    Args:
        entries: The log of the branch from `start` on, oldest first, instructions not among it. What lies in
            the gaps of `standing` may be left out: the plan is the same.
        policy: What decides.
        name: The policy's name, for the plan.
        known: Counts, the tokens sent beside the log, the context window, prices.
        standing: The newest cut of the branch, whichever policy made it: it stays in force until
            the next move. One that lies beyond the log is ignored.
        composed: Whether the request was put together from the store and is no client's own.
        start: Position of the first message that the request speaks of: what lies before it is not sent,
            not counted, and stays as an earlier move left it.
        overflow: Tokens that must not be passed, after upstream refused more: the cut moves whatever the
            trigger says, this is the target, and what is oldest is dropped though no edit says so.

    Returns:
        The plan, its view included. The same arguments always give the same plan. Where it `needs_whole`, the
        trigger fired, or a move may pay, under another version of the policy than the cut's, and entries that
        lie in its gaps are not there: what it holds then is the plan without a move.
    """
    if standing is None and overflow is None and not composed:
        untouched = _untouched(entries, policy, name, known)
        if untouched is not None:
            return untouched
    return _planned(entries, policy, name, known, standing, composed=composed, start=start, overflow=overflow)


def _planned(
    entries: Sequence[Entry],
    policy: Policy,
    name: str,
    known: PlanningContext,
    standing: Cut | None,
    *,
    composed: bool,
    start: int,
    overflow: int | None,
) -> Plan:
    """Return the plan, whatever there is to do."""
    end, cut, absent = _in_force(entries, standing, start)
    if start:  # a summary of what the client left out itself would bring it back
        known = replace(known, prepared=None)
    arrived = arrive(entries, policy, known, absent)
    remains = trimmed_history(arrived, cut, start)
    # Of what earlier moves dropped nothing more is known, whether it is given or not.
    beside = remains.log.hidden.values()
    before = _tokens(entries, known) + sum([size.tokens for _, size in absent])
    before += sum([hidden.tokens for hidden in beside])
    given = len(entries) + sum([size.messages for _, size in absent])
    view = view_of(
        remains.messages,
        remains.tokens,
        known,
        repairing=composed or len(remains.log.entries) < given or remains.touched,
        summary=remains.summary,
        hidden=remains.hidden,
    )
    warnings = _unknown_window(policy, known)
    aim, target = _target(policy, known)
    if overflow is not None:
        aim, target = round(overflow * known.scale), overflow
        fired = f"overflow: more than {aim} tokens may be too many"
    else:
        fired = _fired(policy, view, known, cut, aim)
    # What is too much must go now: where the log is not whole, what went stays gone under any version.
    same = cut is None or cut.version == policy.version or (overflow is not None and bool(absent))
    base = remains if same else trimmed_history(arrived, None)
    moving = policy
    if _is_asked(remains, policy, known, target):
        # Where nothing else moves the cut, nothing else is done; under another version all begins anew.
        others = () if same and not fired else policy.edits
        first = policy.summarizing.model_copy(update={"when": None})
        moving = policy.model_copy(update={"edits": (first, *others)})
        fired = "; ".join(filter(None, (ASKED, fired)))
    costs = _costs(policy, base, remains, entries, cut, known, before=before, always=bool(fired))
    needs_whole = bool((fired or costs is not None) and absent and not same)
    move: Move | None = None
    if needs_whole:
        fired = ""
    elif overflow is not None:
        move, more = rescue(base, moving, known, overflow, costs)
        warnings += more
    else:
        move, fired = _moved(fired, base, moving, known, target, costs)
    earlier = clipped(cut.gaps, start, end) if cut is not None else ()
    if move is not None:
        earlier = earlier if same else ()
        changed = len(base.log.entries) < given or bool(move.made) or base.touched
        view = view_of(
            move.messages,
            move.tokens,
            known,
            repairing=composed or changed or bool(move.hidden),
            summary=move.summary,
            hidden=move.hidden,
        )
        if costs is not None and overflow is None and costs.prices.source == "assumed":
            warnings += (UNKNOWN_PRICES,)
        if aim is not None and target is not None and view.tokens > target:
            # Nothing more may be trimmed, or a repair put something in.
            warnings += (_missed(view.tokens, aim, known),)
        warnings += _all_kept(policy, known, move, base, view)
        fork = known.fork if overflow is None else None
        place = fork if fork is not None and _is_shared(move, view, cut, fork, end) else end
        own = Size(tokens=0, messages=0, tool_calls=0) if place == end else _beyond(base, move, place)
        cut = Cut(
            position=place,
            policy=name,
            version=policy.version,
            changes=_below(cut, start) + move.changes,
            tokens=view.tokens - own.tokens,
            messages=len(view.messages) - own.messages,
            tool_calls=view.tool_calls - own.tool_calls,
            gaps=joined([*_gaps_left(cut, start, same=same), *move.gaps]),
            summary=move.summary or _summary_left(cut, start, same=same),
            account=account_after(costs, move.balance, before) if costs is not None else None,
        )
    return Plan(  # by place as far as that is plain: to look a name up takes as long as to set ten fields
        policy=name,
        version=policy.version,
        cut=cut,
        moved=move is not None,
        fired=fired,
        arrivals=(base if move is not None else remains).log.changes,
        tokens_before=before,
        tokens_sent=view.tokens,
        view=view.messages,
        warnings=warnings + view.notes,
        decided=arrived.decided,
        made=move.made if move is not None else (),
        earlier=earlier,
        messages_before=given + sum([hidden.messages for hidden in beside]),
        target=aim if aim is not None else _budget(policy, known),
        settled=_settled(remains, move, same=same) if not view.notes else (),
        summary=move.summary if move is not None else remains.summary,
        wanted=_wanted(move, remains, policy, known, view, costs, target) if not start else None,
        needs_whole=needs_whole,
    )


def _untouched(entries: Sequence[Entry], policy: Policy, name: str, known: PlanningContext) -> Plan | None:
    """Return the plan of a log without a cut, which goes out as it came; None where more is to be looked at.

    Most requests are small, and so planned: it is the plan that would be made of them otherwise, too.
    """
    if policy.on_arrival or policy.summarizer is not None or known.prepared is not None:
        return None
    if known.context_window is None:  # that may have to be said
        return None
    if [entry for entry in entries if entry.arrival or entry.hidden is not None]:
        return None
    counts = [entry.tokens for entry in entries]
    tokens = known.fixed_tokens + sum(counts)
    view = View(messages=tuple([entry.message for entry in entries]), tokens=tokens)
    aim, _ = _target(policy, known)
    if _fired(policy, view, known, None, aim) or _is_due(policy, entries, counts, known, known.fixed_tokens):
        return None
    return Plan(
        policy=name,
        version=policy.version,
        cut=None,
        moved=False,
        fired="",
        arrivals=(),
        tokens_before=tokens,
        tokens_sent=tokens,
        view=view.messages,
        decided=((),) * len(entries),
        messages_before=len(entries),
        target=aim if aim is not None else _budget(policy, known),
    )


def compaction(
    entries: Sequence[Entry],
    policy: Policy,
    known: PlanningContext,
    standing: Cut | None = None,
    *,
    start: int = 0,
) -> SummaryRequest | None:
    """Return what a model would sum up if somebody asked for it now; None where it would not be worth it.

    No trigger and no condition of the policy counts; how it is done is `policy.summarizing`. The arguments
    are those of `plan`.
    """
    if start:
        return None  # what the client left out itself stays out
    _, cut, absent = _in_force(entries, standing, start)
    remains = trimmed_history(arrive(entries, policy, known, absent), cut)
    return asked_for(draft_of(remains, policy, known, _target(policy, known)[1]), policy.summarizing)


def bypass(entries: Sequence[Entry], known: PlanningContext, *, composed: bool = False) -> Plan:
    """Return the plan that trims nothing (`X-Context-Policy: off`), not even what was trimmed on arrival.

    The entries must be the whole log that the request speaks of. What is sent for the first time is
    recorded as left alone, so that it keeps its bytes later.
    """
    messages = tuple([entry.message for entry in entries])
    view = view_of(messages, [entry.tokens for entry in entries], known, repairing=composed)
    return Plan(
        policy=OFF,
        version="",
        cut=None,
        moved=False,
        fired="",
        arrivals=(),
        tokens_before=_tokens(entries, known),
        tokens_sent=view.tokens,
        view=view.messages,
        warnings=view.notes,
        decided=tuple([entry.arrival or () for entry in entries]),
        messages_before=len(entries),
    )


def _in_force(
    entries: Sequence[Entry], standing: Cut | None, start: int
) -> tuple[int, Cut | None, list[tuple[int, Size]]]:
    """Return how many messages the log has, its cut, and what lies in gaps of that and was not given."""
    end = entries[-1].position + 1 if entries else start
    cut = standing if standing is not None and standing.position <= end else None
    return end, cut, missing(entries, cut.gaps, start) if cut is not None else []


def _target(policy: Policy, known: PlanningContext) -> tuple[int | None, int | None]:
    """Return the target as upstream counts, and as it is counted here; None where there is none."""
    aim = policy.target.within(known.context_window) if policy.target is not None else None
    return aim, None if aim is None else int(aim / known.scale)


def _wanted(
    move: Move | None,
    remains: TrimmedHistory,
    policy: Policy,
    known: PlanningContext,
    view: View,
    costs: Costs | None,
    target: int | None,
) -> SummaryRequest | None:
    """Return the summary by a model that should be made now; `view` is what is sent."""
    edit = policy.summarizer
    if edit is None or (move is not None and move.wanted is not None):
        return move.wanted if move is not None else None
    added = until_it_fires(
        policy, edit, known, Size(tokens=view.tokens, messages=len(view.messages), tool_calls=view.tool_calls)
    )
    by_cost = policy.trigger is not None and policy.trigger.cost is not None
    if costs is None if edit.must_pay else added is None and (costs is None or not by_cost):
        return None
    draft = move.draft if move is not None else draft_of(remains, policy, known, target)
    return in_time(draft, edit, added, costs)


def _is_asked(remains: TrimmedHistory, policy: Policy, known: PlanningContext, target: int | None) -> bool:
    """Tell whether somebody asked for a summary that is there now, and not yet in use."""
    made, standing = known.prepared, remains.summary
    if made is None or not made.asked:
        return False
    if standing is not None and standing.kind == "model" and made.until <= standing.until:
        return False
    return policy.summarizing.ready(draft_of(remains, policy, known, target)) is not None


def _moved(
    fired: str,
    base: TrimmedHistory,
    policy: Policy,
    known: PlanningContext,
    target: int | None,
    costs: Costs | None,
) -> tuple[Move | None, str]:
    """Return the move that is made, and why; none where nothing fires or a move would not pay."""
    if fired:
        move = decide(base, policy, known, target, costs)
        # Where only time has passed and nothing was to be done, the cut may as well stay.
        return (None, "") if fired.startswith(IDLE) and not move.made else (move, fired)
    if costs is not None:
        move = decide(base, policy, known, target, costs, paying=True)
        if costs.timely(move.balance, move.tokens):
            return move, _worth(move.balance, costs)
    return None, ""


def _is_shared(move: Move, view: View, standing: Cut | None, fork: int, end: int) -> bool:
    """Tell whether a move can be kept at `fork`: there is no other one, and nothing beyond is changed."""
    if not 0 < fork < end or (standing is not None and standing.position >= fork):
        return False
    if view.notes:  # what was repaired depends on all of it
        return False
    reaches = [change.position + 1 for change in move.changes] + [gap.stop for gap in move.gaps]
    return max(reaches, default=0) <= fork and (move.summary is None or move.summary.until <= fork)


def _beyond(base: TrimmedHistory, move: Move, place: int) -> Size:
    """Return how much of what is sent stands at `place` or beyond."""
    sent = [
        (message, tokens)
        for entry, message, tokens in zip(base.log.entries, move.messages, move.tokens, strict=True)
        if entry.position >= place and message is not None
    ]
    calls = sum([message.is_result for message, _ in sent])
    return Size(tokens=sum([tokens for _, tokens in sent]), messages=len(sent), tool_calls=calls)


def _budget(policy: Policy, known: PlanningContext) -> int | None:
    """Return what edits keep to of themselves, where the policy has no target: the first such budget."""
    return policy.budget.within(known.context_window) if policy.budget is not None else None


def _fired(policy: Policy, view: View, known: PlanningContext, cut: Cut | None, aim: int | None) -> str:
    """Return in words what fires, "" where nothing does; `aim` is the target in tokens as upstream counts."""
    trigger = policy.trigger
    if trigger is None:
        return ""
    calls = view.tool_calls if trigger.tool_calls is not None else 0
    size = Size(tokens=view.tokens, messages=len(view.messages), tool_calls=calls)
    return trigger.fired(size, known, cut, aim)


def _settled(remains: TrimmedHistory, move: Move | None, *, same: bool) -> tuple[int, ...]:
    """Return where in the view parts end that no later move changes: that of before, and that of a move."""
    if move is None and not remains.changes:
        return ()
    ends: list[int] = []
    if remains.changes and same:
        last = remains.changes[-1].position
        first = min((change.position for change in move.made), default=None) if move is not None else None
        # What a move changes before that place ends this part: it is another one now.
        if first is None or first > remains.log.entries[last].position:
            ends.append(_end(remains.messages, last, remains.summary, remains.hidden))
    if move is not None and move.last is not None:
        ends.append(_end(move.messages, move.last, move.summary, move.hidden))
    return tuple(sorted({end for end in ends if end > 0}))


def _end(
    messages: Sequence[Message | None], last: int, summary: Summary | None, hidden: Mapping[int, Hidden]
) -> int:
    """Return how many messages of the view stand up to the place `last`, itself included."""
    lead = summary is not None and summary.role != "merge"
    more = sum([len(each.before) + len(each.after) for place, each in hidden.items() if place <= last])
    return lead + more + sum([message is not None for message in messages[: last + 1]])


def _missed(tokens: int, aim: int, known: PlanningContext) -> str:
    """Return in words by how much a target was missed, as upstream counts."""
    above = max(1, round(tokens * known.scale) - aim)
    return f"target missed: {aim + above} tokens are {above} above {aim}"


def _all_kept(
    policy: Policy, known: PlanningContext, move: Move, base: TrimmedHistory, view: View
) -> tuple[str, ...]:
    """Return the warning that a move left too much since `keep_rounds` leaves nothing to sum up, if so."""
    if move.wanted is not None or move.summary != base.summary:
        return ()
    if not is_above(
        policy, known, Size(tokens=view.tokens, messages=len(view.messages), tool_calls=view.tool_calls)
    ):
        return ()
    rounds = move.draft.rounds
    keeping = (edit.keep_rounds for edit in policy.edits if isinstance(edit, Summarize))
    kept = next((last for last in keeping if last and not start_of_newest(rounds, last)), None)
    if kept is None:
        return ()
    history = sum(each.number > 0 for each in rounds[:-1])
    words = f"keep_rounds is {kept}, and there are {history} whole rounds"
    return (f"nothing could be summed up: {words}; keep_rounds: 0 sums up within a round, too",)


def _costs(
    policy: Policy,
    base: TrimmedHistory,
    remains: TrimmedHistory,
    entries: Sequence[Entry],
    cut: Cut | None,
    known: PlanningContext,
    *,
    before: int,
    always: bool,
) -> Costs | None:
    """Return what is needed to judge a move by its cost; None where that is not asked, or not now."""
    if policy.trigger is None or not policy.reckons or not known.keeps:
        return None
    beside = known.fixed_tokens + (remains.summary.tokens if remains.summary is not None else 0)
    if not always and not _is_due(policy, remains.log.entries, remains.tokens, known, beside):
        return None
    replied = _last_reply(remains.log.entries)
    sent = base.standing_as(remains)
    account = account_of(entries, cut, known, before)
    return Costs(
        prices=prices_of(known),
        warm=replied is not None and not is_cold(known),
        messages=tuple([message for message, _ in sent]),
        tokens=tuple([tokens for _, tokens in sent]),
        summary=remains.summary,
        fixed=known.fixed_tokens,
        cached=_last_reply(base.log.entries) or 0,
        account=account,
        reads=reads_of(base.log.entries, cut.position if cut is not None else 0),
    )


def _is_due(
    policy: Policy, entries: Sequence[Entry], tokens: Sequence[int], known: PlanningContext, beside: int
) -> bool:
    """Tell whether a move is to be judged by its cost now, with these tokens by place and those `beside`."""
    if policy.trigger is None or policy.trigger.cost is None or not known.keeps:
        return False
    if is_cold(known):
        return True
    replied = _last_reply(entries)
    last = beside + sum(tokens[:replied]) if replied is not None else 0
    return due(beside + sum(tokens), last)


def _last_reply(entries: Sequence[Entry]) -> int | None:
    """Return the place of the newest assistant message: the last request sent what stands before it."""
    for place in range(len(entries) - 1, -1, -1):
        if entries[place].message.role == "assistant":
            return place
    return None


def _worth(balance: Balance, costs: Costs) -> str:
    """Return in words why a move pays."""
    words = f"cost: {balance.freed} tokens less for {balance.rewritten} written anew"
    return f"{words}, paid back in {costs.paid_back(balance)} requests"


def _gaps_left(cut: Cut | None, start: int, *, same: bool) -> tuple[Gap, ...]:
    """Return the gaps that a move leaves as they are: all, or those of which it was told nothing."""
    if cut is None:
        return ()
    return cut.gaps if same else clipped(cut.gaps, 0, start)


def _summary_left(cut: Cut | None, start: int, *, same: bool) -> Summary | None:
    """Return the summary that a move leaves: it may stand for messages of which it was told nothing."""
    if cut is None or cut.summary is None or same:
        return cut.summary if cut is not None else None
    # What it covers from `start` on was decided about anew.
    return replace(cut.summary, until=min(cut.summary.until, start)) if start else None


def _below(cut: Cut | None, start: int) -> tuple[Change, ...]:
    """Return the changes of messages of which a move was told nothing."""
    return tuple(change for change in cut.changes if change.position < start) if cut is not None else ()


def _tokens(entries: Iterable[Entry], known: PlanningContext) -> int:
    """Return the tokens of the request if nothing were trimmed."""
    return known.fixed_tokens + sum([entry.tokens for entry in entries])


def _unknown_window(policy: Policy, known: PlanningContext) -> tuple[str, ...]:
    """Return the warning that a `ratio` cannot be judged, where the operator relies on it and it cannot."""
    if known.context_window is not None:
        return ()
    relied = policy.trigger is not None and policy.trigger.only_ratio
    relied = relied or (policy.target is not None and policy.target.ratio is not None)
    if policy.trigger is None or policy.trigger.ratio is None:
        # Else the trigger says it: with other keys beside it, it is one of several ways to fire.
        conditions = [edit.when for edit in policy.on_arrival + policy.edits]
        relied = relied or any(when is not None and when.ratio is not None for when in conditions)
    return (UNKNOWN_WINDOW,) if relied else ()

"""From a log and a policy to what is sent: `history + policy + what is known -> plan`.

The view is `trim(A[:cut]) + A[cut:]`, where A is the log after `on_arrival`. The cut stands still
until the policy's trigger fires; then it moves to the end of the log. Between two moves each view
begins with the last one, byte for byte, so that the provider's prompt cache stays warm.

What a move did stays done: the next one decides on what remains and adds to it, so that it rewrites the
cache only from its own first change on. So the log need not be given whole, and planning costs what is kept,
not what is stored. A policy of another version begins again, on all of A, and asks for it where it is not
there.

A view in which anything was changed, or that was put together here, is checked against the
protocol and repaired; what a client sent itself and nothing changed goes out as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Final

from proxy.trimming.arrival import arrive
from proxy.trimming.gaps import clipped, joined, missing
from proxy.trimming.move import Move, decide, rescue
from proxy.trimming.plan import Change, Cut, Entry, Gap, Known, Plan, Summary
from proxy.trimming.policy import Policy
from proxy.trimming.remains import Remains, remains_of
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
from proxy.wire.messages import Message

OFF: Final = "off"
"""Name of the policy in a plan that bypasses trimming."""

UNKNOWN_PRICES: Final = "the prices of this model are not known: the most common ones are assumed"
"""What is said where `cost: auto` reckons with prices that nobody gave."""


def plan(
    entries: Sequence[Entry],
    policy: Policy,
    name: str,
    known: Known,
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
    end = entries[-1].position + 1 if entries else start
    cut = standing if standing is not None and standing.position <= end else None
    absent = missing(entries, cut.gaps, start) if cut is not None else []
    arrived = arrive(entries, policy, known, absent)
    remains = remains_of(arrived, cut, start)
    before = _tokens(entries, known) + sum(size.tokens for _, size in absent)
    messages_before = len(entries) + sum(size.messages for _, size in absent)
    view = view_of(
        remains.messages,
        remains.tokens,
        known,
        repairing=composed or len(remains.log.entries) < messages_before or remains.touched,
        summary=remains.summary,
    )
    warnings = _unknown_window(policy, known)
    aim = policy.target.within(known.context_window) if policy.target is not None else None
    target = None if aim is None else int(aim / known.scale)
    if overflow is not None:
        aim, target = round(overflow * known.scale), overflow
        fired = f"overflow: more than {aim} tokens may be too many"
    else:
        fired = _fired(policy, view, known, cut, aim)
    # What is too much must go now: where the log is not whole, what went stays gone under any version.
    same = cut is None or cut.version == policy.version or (overflow is not None and bool(absent))
    base = remains if same else remains_of(arrived, None)
    costs = _costs(policy, base, remains, entries, cut, known, before=before, always=bool(fired))
    needs_whole = bool((fired or costs is not None) and absent and not same)
    move: Move | None = None
    if needs_whole:
        fired = ""
    elif overflow is not None:
        move, more = rescue(base, policy, known, overflow, costs)
        warnings += more
    else:
        move, fired = _moved(fired, base, policy, known, target, costs)
    earlier = clipped(cut.gaps, start, end) if cut is not None else ()
    if move is not None:
        earlier = earlier if same else ()
        changed = len(base.log.entries) < messages_before or bool(move.made) or base.touched
        view = view_of(move.messages, move.tokens, known, repairing=composed or changed, summary=move.summary)
        if costs is not None and overflow is None and costs.prices.source == "assumed":
            warnings += (UNKNOWN_PRICES,)
        if aim is not None and target is not None and view.tokens > target:
            # Nothing more may be trimmed, or a repair put something in.
            warnings += (_missed(view.tokens, aim, known),)
        cut = Cut(
            position=end,
            policy=name,
            version=policy.version,
            changes=_below(cut, start) + move.changes,
            tokens=view.tokens,
            messages=len(view.messages),
            tool_calls=view.tool_calls,
            gaps=joined([*_gaps_left(cut, start, same=same), *move.gaps]),
            summary=move.summary or _summary_left(cut, start, same=same),
            account=account_after(costs, move.balance, before) if costs is not None else None,
        )
    return Plan(
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
        messages_before=messages_before,
        target=aim if aim is not None else _budget(policy, known),
        settled=_settled(remains, move, same=same) if not view.notes else (),
        summary=move.summary if move is not None else remains.summary,
        needs_whole=needs_whole,
    )


def bypass(entries: Sequence[Entry], known: Known, *, composed: bool = False) -> Plan:
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


def _moved(
    fired: str, base: Remains, policy: Policy, known: Known, target: int | None, costs: Costs | None
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


def _budget(policy: Policy, known: Known) -> int | None:
    """Return what edits keep to of themselves, where the policy has no target: the first such budget."""
    budgets = (edit.budget for edit in policy.edits)
    first = next((budget for budget in budgets if budget is not None), None)
    return first.within(known.context_window) if first is not None else None


def _fired(policy: Policy, view: View, known: Known, cut: Cut | None, aim: int | None) -> str:
    """Return in words what fires, "" where nothing does; `aim` is the target in tokens as upstream counts."""
    trigger = policy.trigger
    if trigger is None:
        return ""
    calls = view.tool_calls if trigger.tool_calls is not None else 0
    size = Size(view.tokens, len(view.messages), calls)
    return trigger.fired(size, known, cut, aim)


def _settled(remains: Remains, move: Move | None, *, same: bool) -> tuple[int, ...]:
    """Return where in the view parts end that no later move changes: that of before, and that of a move."""
    ends: list[int] = []
    if remains.changes and same:
        last = remains.changes[-1].position
        first = min((change.position for change in move.made), default=None) if move is not None else None
        # What a move changes before that place ends this part: it is another one now.
        if first is None or first > remains.log.entries[last].position:
            ends.append(_end(remains.messages, last, remains.summary))
    if move is not None and move.last is not None:
        ends.append(_end(move.messages, move.last, move.summary))
    return tuple(sorted({end for end in ends if end > 0}))


def _end(messages: Sequence[Message | None], last: int, summary: Summary | None) -> int:
    """Return how many messages of the view stand up to the place `last`, itself included."""
    lead = summary is not None and summary.role != "merge"
    return lead + sum([message is not None for message in messages[: last + 1]])


def _missed(tokens: int, aim: int, known: Known) -> str:
    """Return in words by how much a target was missed, as upstream counts."""
    above = max(1, round(tokens * known.scale) - aim)
    return f"target missed: {aim + above} tokens are {above} above {aim}"


def _costs(
    policy: Policy,
    base: Remains,
    remains: Remains,
    entries: Sequence[Entry],
    cut: Cut | None,
    known: Known,
    *,
    before: int,
    always: bool,
) -> Costs | None:
    """Return what is needed to judge a move by its cost; None where that is not asked, or not now."""
    if policy.trigger is None or not policy.reckons or not known.keeps:
        return None
    replied = _last_reply(remains.log.entries)
    if not always:
        if policy.trigger.cost is None:
            return None
        beside = known.fixed_tokens + (remains.summary.tokens if remains.summary is not None else 0)
        last = beside + sum(remains.tokens[:replied]) if replied is not None else 0
        if not due(beside + sum(remains.tokens), last) and not is_cold(known):
            return None
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


def _last_reply(entries: Sequence[Entry]) -> int | None:
    """Return the place of the newest assistant message: the last request sent what stands before it."""
    places = reversed(range(len(entries)))
    return next((place for place in places if entries[place].message.role == "assistant"), None)


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


def _tokens(entries: Iterable[Entry], known: Known) -> int:
    """Return the tokens of the request if nothing were trimmed."""
    return known.fixed_tokens + sum([entry.tokens for entry in entries])


def _unknown_window(policy: Policy, known: Known) -> tuple[str, ...]:
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

"""From a log and a policy to what is sent: `history + policy + what is known -> plan`.

The view is `trim(A[:cut]) + A[cut:]`, where A is the log after `on_arrival`. The cut stands still
until the policy's trigger fires; then it moves to the end of the log. Between two moves each view
begins with the last one, byte for byte, so that the provider's prompt cache stays warm.

What a move drops stays dropped: the next one decides on A without the gaps, anew from the originals, and
adds to them. So the log need not be given whole, and planning costs what is kept, not what is stored. A
policy of another version begins again, on all of A, and asks for it where it is not there.

A view in which anything was changed, or that was put together here, is checked against the
protocol and repaired; what a client sent itself and nothing changed goes out as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.history.spans import is_result, rounds, spans
from proxy.trimming.arrival import Arrived, arrive, moved
from proxy.trimming.draft import Draft, overlay
from proxy.trimming.edits import Edit
from proxy.trimming.gaps import clipped, gaps_of, joined, missing
from proxy.trimming.plan import Change, Cut, Entry, Gap, Known, Plan
from proxy.trimming.policy import Policy
from proxy.trimming.protection import protected
from proxy.trimming.protocol import repair
from proxy.trimming.trigger import UNKNOWN_WINDOW, Size, Target, Trigger
from proxy.wire.messages import Message

OFF = "off"
"""Name of the policy in a plan that bypasses trimming."""


@dataclass(frozen=True, slots=True)
class _View:
    """What would be sent."""

    messages: tuple[Message, ...]
    tokens: int
    """With those of instructions and tools."""
    notes: tuple[str, ...] = ()

    @property
    def tool_calls(self) -> int:
        """Tool results in it. Each message is read for that: ask only where it matters."""
        return sum(map(is_result, self.messages))


@dataclass(frozen=True, slots=True)
class _Move:
    """What a move of the cut decided about the log that stood before it."""

    made: tuple[Change, ...]
    """Message by message, by position."""
    gaps: Sequence[Gap]
    """Of these, what became gaps."""
    changes: tuple[Change, ...]
    """Of these, what did not."""
    messages: tuple[Message | None, ...]
    """What stands now in each place of that log."""
    tokens: tuple[int, ...]


def plan(
    entries: Sequence[Entry],
    policy: Policy,
    name: str,
    known: Known,
    standing: Cut | None = None,
    *,
    composed: bool = False,
    start: int = 0,
) -> Plan:
    """Decide what is sent of a log.

    Args:
        entries: The log of the branch from `start` on, oldest first, instructions not among it. What lies in
            the gaps of `standing` may be left out: the plan is the same.
        policy: What decides.
        name: The policy's name, for the plan.
        known: Counts, the tokens sent beside the log, the context window.
        standing: The newest cut of the branch, whichever policy made it: it stays in force until
            the next move. One that lies beyond the log is ignored.
        composed: Whether the request was put together from the store and is no client's own.
        start: Position of the first message that the request speaks of: what lies before it is not sent,
            not counted, and stays as an earlier move left it.

    Returns:
        The plan, its view included. The same arguments always give the same plan. Where it `needs_whole`, the
        trigger fired under another version of the policy than the cut's, and entries that lie in its gaps are
        not there: what it holds then is the plan without a move.
    """
    end = entries[-1].position + 1 if entries else start
    cut = standing if standing is not None and standing.position <= end else None
    absent = missing(entries, cut.gaps, start) if cut is not None else []
    arrived = arrive(entries, policy, known, absent)
    log = arrived.without(cut.gaps) if cut is not None else arrived
    view = _standing_view(arrived, log, cut, known, repairing=composed or bool(absent))
    target = policy.target.within(known.context_window) if policy.target is not None else None
    fired = _fired(policy, view, known, cut, target)
    warnings = _unknown_window(policy, known)
    same = cut is None or cut.version == policy.version
    needs_whole = bool(fired and absent and not same)
    made: tuple[Change, ...] = ()
    earlier = clipped(cut.gaps, start, end) if cut is not None else ()
    if needs_whole:
        fired = ""
    elif fired:
        log, earlier = (log, earlier) if same else (arrived, ())
        move = _decide(log, policy, known, target)
        made = move.made
        changed = composed or bool(absent or made) or len(log.entries) < len(entries) or any(log.decided)
        view = _sent(move.messages, move.tokens, known, repairing=changed)
        cut = Cut(
            position=end,
            policy=name,
            version=policy.version,
            changes=_below(cut, start) + move.changes,
            tokens=view.tokens,
            messages=len(view.messages),
            tool_calls=view.tool_calls,
            gaps=joined([*_gaps_left(cut, start, same=same), *move.gaps]),
        )
        if target is not None and view.tokens > target:
            # Nothing more may be trimmed, or a repair put something in.
            warnings += (f"target missed: {view.tokens} tokens are {view.tokens - target} above {target}",)
    return Plan(
        policy=name,
        version=policy.version,
        cut=cut,
        moved=bool(fired),
        fired=fired,
        arrivals=log.changes,
        tokens_before=_tokens(entries, known) + sum(size.tokens for _, size in absent),
        tokens_sent=view.tokens,
        view=view.messages,
        warnings=warnings + view.notes,
        decided=arrived.decided,
        made=made,
        earlier=earlier,
        messages_before=len(entries) + sum(size.messages for _, size in absent),
        needs_whole=needs_whole,
    )


def bypass(entries: Sequence[Entry], known: Known, *, composed: bool = False) -> Plan:
    """Return the plan that trims nothing (`X-Context-Policy: off`), not even what was trimmed on arrival.

    The entries must be the whole log that the request speaks of. What is sent for the first time is
    recorded as left alone, so that it keeps its bytes later.
    """
    messages = tuple([entry.message for entry in entries])
    view = _sent(messages, [entry.tokens for entry in entries], known, repairing=composed)
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


def _fired(policy: Policy, view: _View, known: Known, cut: Cut | None, target: int | None) -> str:
    """Return what fires for a view, in words; "" where nothing does."""
    trigger = policy.trigger
    if trigger is None:
        return ""
    calls = view.tool_calls if trigger.tool_calls is not None else 0
    size = Size(view.tokens, len(view.messages), calls)
    return trigger.fired(size, known.context_window, cut, target)


def _gaps_left(cut: Cut | None, start: int, *, same: bool) -> tuple[Gap, ...]:
    """Return the gaps that a move leaves as they are: all, or those of which it was told nothing."""
    if cut is None:
        return ()
    return cut.gaps if same else clipped(cut.gaps, 0, start)


def _below(cut: Cut | None, start: int) -> tuple[Change, ...]:
    """Return the changes of messages of which a move was told nothing."""
    return tuple(change for change in cut.changes if change.position < start) if cut is not None else ()


def _decide(arrived: Arrived, policy: Policy, known: Known, target: int | None) -> _Move:
    """Run the edits over the log that stands and return what they change."""
    entries = arrived.entries
    log = [entry.message for entry in entries]
    parts, turns = spans(log), rounds(log)
    draft = Draft(
        entries=entries,
        messages=arrived.messages,
        tokens=arrived.tokens,
        spans=parts,
        rounds=turns,
        protected=protected(log, parts, turns, policy),
        count=known.count,
        fixed_tokens=known.fixed_tokens,
        target=target,
    )
    made: list[Change] = []
    for edit in policy.edits:
        if draft.within_target:
            break
        if _may_run(edit, draft, known):
            changes = tuple(edit.apply(draft))
            made += changes
            draft = draft.after(changes)
    made.sort(key=lambda change: change.position)
    gaps, gone = gaps_of(entries, parts, made)
    placed = [moved(change, entries[change.position].position) for change in made]
    return _Move(
        made=tuple(placed),
        gaps=gaps,
        changes=tuple([at for at, change in zip(placed, made, strict=True) if change.position not in gone]),
        messages=draft.messages,
        tokens=draft.tokens,
    )


def _may_run(edit: Edit, draft: Draft, known: Known) -> bool:
    """Tell whether the edit's own condition holds as things stand."""
    return edit.when is None or edit.when.holds(draft.size, known.context_window)


def _standing_view(
    arrived: Arrived, log: Arrived, cut: Cut | None, known: Known, *, repairing: bool
) -> _View:
    """Return the view without a move: `log` is what of `arrived` the cut left."""
    changes = log.placed(cut.changes) if cut is not None else []
    messages, tokens = overlay(log.messages, log.tokens, changes) if changes else (log.messages, log.tokens)
    changed = bool(changes) or len(log.entries) < len(arrived.entries) or any(log.decided)
    return _sent(messages, tokens, known, repairing=repairing or changed)


def _sent(
    messages: Sequence[Message | None], tokens: Sequence[int], known: Known, *, repairing: bool
) -> _View:
    """Return what is sent of messages, with their tokens, some of which were removed."""
    total = known.fixed_tokens + sum(tokens)
    standing = tuple([message for message in messages if message is not None])
    if not repairing:
        return _View(standing, total)
    repaired = repair(standing)
    if not repaired.notes:
        return _View(standing, total)
    left = [count for message, count in zip(messages, tokens, strict=True) if message is not None]
    counts = (
        known.count(message) if source is None else left[source]
        for message, source in zip(repaired.messages, repaired.sources, strict=True)
    )
    return _View(repaired.messages, known.fixed_tokens + sum(counts), repaired.notes)


def _tokens(entries: Iterable[Entry], known: Known) -> int:
    """Return the tokens of the request if nothing were trimmed."""
    return known.fixed_tokens + sum([entry.tokens for entry in entries])


def _unknown_window(policy: Policy, known: Known) -> tuple[str, ...]:
    """Return the warning that a `ratio` cannot be judged, where the policy has one and it cannot."""
    if known.context_window is not None:
        return ()
    judged: list[Trigger | Target | None] = [policy.trigger, policy.target]
    judged += [edit.when for edit in policy.on_arrival + policy.edits]
    return (UNKNOWN_WINDOW,) if any(each is not None and each.ratio is not None for each in judged) else ()

"""From a log and a policy to what is sent: `history + policy + what is known -> plan`.

The view is `trim(A[:cut]) + A[cut:]`, where A is the log after `on_arrival`. The cut stands still
until the policy's trigger fires; then it moves to the end of the log, and the edits decide anew,
on A, what is left of everything before it. Between two moves each view begins with the last one,
byte for byte, so that the provider's prompt cache stays warm.

A view in which anything was changed, or that was put together here, is checked against the
protocol and repaired; what a client sent itself and nothing changed goes out as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proxy.history.spans import is_result, rounds, spans
from proxy.trimming.arrival import Arrived, arrive
from proxy.trimming.draft import Draft, overlay
from proxy.trimming.edits import Edit
from proxy.trimming.plan import Change, Cut, Entry, Known, Plan
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
    def size(self) -> Size:
        """How much it is."""
        return Size(self.tokens, len(self.messages), sum(map(is_result, self.messages)))


def plan(
    entries: Sequence[Entry],
    policy: Policy,
    name: str,
    known: Known,
    standing: Cut | None = None,
    *,
    composed: bool = False,
) -> Plan:
    """Decide what is sent of a log.

    Args:
        entries: The log of the branch, oldest first, instructions not among it.
        policy: What decides.
        name: The policy's name, for the plan.
        known: Counts, the tokens sent beside the log, the context window.
        standing: The newest cut of the branch, whichever policy made it: it stays in force until
            the next move. One that lies beyond the log is ignored.
        composed: Whether the request was put together from the store and is no client's own.

    Returns:
        The plan, its view included. The same arguments always give the same plan.
    """
    arrived = arrive(entries, policy, known)
    cut = standing if standing is not None and standing.position <= len(entries) else None
    view = _view(arrived, cut, known, composed=composed)
    target = policy.target.within(known.context_window) if policy.target is not None else None
    fired = ""
    if policy.trigger is not None:
        fired = policy.trigger.fired(view.size, known.context_window, cut, target)
    warnings = _unknown_window(policy, known)
    if fired:
        changes = _decide(entries, arrived, policy, known, target)
        view = _view_after(arrived, changes, known, composed=composed)
        size = view.size
        cut = Cut(len(entries), name, policy.version, changes, size.tokens, size.messages, size.tool_calls)
        if target is not None and view.tokens > target:
            # Nothing more may be trimmed, or a repair put something in.
            warnings += (f"target missed: {view.tokens} tokens are {view.tokens - target} above {target}",)
    return Plan(
        policy=name,
        version=policy.version,
        cut=cut,
        moved=bool(fired),
        fired=fired,
        arrivals=arrived.changes,
        tokens_before=_tokens(entries, known),
        tokens_sent=view.tokens,
        view=view.messages,
        warnings=warnings + view.notes,
        decided=arrived.decided,
    )


def bypass(entries: Sequence[Entry], known: Known, *, composed: bool = False) -> Plan:
    """Return the plan that trims nothing (`X-Context-Policy: off`), not even what was trimmed on arrival.

    What is sent for the first time is recorded as left alone, so that it keeps its bytes later.
    """
    messages = tuple(entry.message for entry in entries)
    view = _sent(messages, tuple(entry.tokens for entry in entries), known, repairing=composed)
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
        decided=tuple(entry.arrival or () for entry in entries),
    )


def _decide(
    entries: Sequence[Entry], arrived: Arrived, policy: Policy, known: Known, target: int | None
) -> tuple[Change, ...]:
    """Run the edits over the whole log and return what they change, by position."""
    log = [entry.message for entry in entries]
    parts, turns = spans(log), rounds(log)
    draft = Draft(
        entries=tuple(entries),
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
    return tuple(sorted(made, key=lambda change: change.position))


def _may_run(edit: Edit, draft: Draft, known: Known) -> bool:
    """Tell whether the edit's own condition holds as things stand."""
    return edit.when is None or edit.when.holds(draft.size, known.context_window)


def _view(arrived: Arrived, cut: Cut | None, known: Known, *, composed: bool) -> _View:
    """Return the view with a standing cut."""
    return _view_after(arrived, cut.changes if cut is not None else (), known, composed=composed)


def _view_after(arrived: Arrived, changes: Sequence[Change], known: Known, *, composed: bool) -> _View:
    """Return the view with these changes made to the log after `on_arrival`."""
    messages, tokens = overlay(arrived.messages, arrived.tokens, changes)
    changed = bool(changes) or any(arrived.decided)
    return _sent(messages, tokens, known, repairing=composed or changed)


def _sent(
    messages: Sequence[Message | None], tokens: Sequence[int], known: Known, *, repairing: bool
) -> _View:
    """Return what is sent of messages, with their tokens, some of which were removed."""
    left = [(message, count) for message, count in zip(messages, tokens, strict=True) if message is not None]
    total = known.fixed_tokens + sum(tokens)
    standing = tuple(message for message, _ in left)
    if not repairing:
        return _View(standing, total)
    repaired = repair(standing)
    if not repaired.notes:
        return _View(standing, total)
    counts = (
        known.count(message) if source is None else left[source][1]
        for message, source in zip(repaired.messages, repaired.sources, strict=True)
    )
    return _View(repaired.messages, known.fixed_tokens + sum(counts), repaired.notes)


def _tokens(entries: Iterable[Entry], known: Known) -> int:
    """Return the tokens of the request if nothing were trimmed."""
    return known.fixed_tokens + sum(entry.tokens for entry in entries)


def _unknown_window(policy: Policy, known: Known) -> tuple[str, ...]:
    """Return the warning that a `ratio` cannot be judged, where the policy has one and it cannot."""
    if known.context_window is not None:
        return ()
    judged: list[Trigger | Target | None] = [policy.trigger, policy.target]
    judged += [edit.when for edit in policy.on_arrival + policy.edits]
    return (UNKNOWN_WINDOW,) if any(each is not None and each.ratio is not None for each in judged) else ()

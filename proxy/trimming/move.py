"""A move of the cut: the edits run over what remains of the log, and what they change is the move.

Whether the cut should move at all is not decided here; with `paying`, though, only what pays is done.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from proxy.history.spans import rounds, spans
from proxy.trimming.arrival import moved
from proxy.trimming.draft import Draft
from proxy.trimming.edits import Edit
from proxy.trimming.edits.drop_oldest import DropOldest
from proxy.trimming.edits.truncate_tool_output import TruncateToolOutput
from proxy.trimming.gaps import gaps_of
from proxy.trimming.plan import Change, Gap, Known, Summary
from proxy.trimming.policy import Keep, Policy
from proxy.trimming.protection import protected
from proxy.trimming.remains import Remains
from proxy.trimming.worth import NO_MOVE, Balance, Costs
from proxy.wire.messages import Message

BEYOND_KEEP: Final = "what `keep` names did not fit: it was trimmed too"
"""What is said where an overflow left no other way."""

_PARTS: Final = (1, 4)
"""Tool output is cut to as many bytes as the target has tokens, about a fourth of what may be sent; then,
where that is not enough, to a fourth of that."""
_ANY: Final = 2**31 - 1
"""A number of lines that no limit is."""
_PASSES: Final = 8
"""How often the edits of one move run at most, where what was put back makes them run again: of an output
that came again and again they clear one copy each time."""


@dataclass(frozen=True, slots=True)
class Move:
    """What a move of the cut decided about the log that remained before it."""

    made: tuple[Change, ...]
    """Message by message, by position."""
    gaps: Sequence[Gap]
    """Spans that are not sent any more, and were until now."""
    changes: tuple[Change, ...]
    """What else was done to messages that are no gap now, by this move and by earlier ones."""
    messages: tuple[Message | None, ...]
    """What stands now in each place of that log."""
    tokens: tuple[int, ...]
    total: int
    """Tokens of that, with those of the summary and of what is sent beside the log."""
    summary: Summary | None
    """What is sent in the place of some of the gaps."""
    balance: Balance
    """What it changes in cost; nothing where nobody reckoned."""
    last: int | None
    """The last place of that log that was changed and is no gap now; None where there is none."""


def decide(
    base: Remains,
    policy: Policy,
    known: Known,
    target: int | None,
    costs: Costs | None,
    *,
    paying: bool = False,
) -> Move:
    """Run the edits over what remains and return what they change; with `paying`, only what pays."""
    entries = base.log.entries
    log = [entry.message for entry in entries]
    parts, turns = spans(log), rounds(log)
    draft = Draft(
        entries=entries,
        messages=base.messages,
        tokens=base.tokens,
        spans=parts,
        rounds=turns,
        protected=protected(log, parts, turns, policy),
        count=known.count,
        fixed_tokens=known.fixed_tokens,
        target=target,
        made_by=base.made_by,
        summary=base.summary,
        agent=known.agent,
        context_window=known.context_window,
        scale=known.scale,
    )
    edited, made = _done(draft, policy.edits, known, costs, paying=paying)
    if costs is not None and paying and _is_piecemeal(made, policy.edits) and costs.messages == base.messages:
        first = costs.first_place([span.start for span in parts], edited)
        made = [change for change in made if first is not None and change.position >= first]
        # What is left out may be what something else followed from.
        edited, following = _followed(draft.after(made), policy.edits)
        made += following
    made = sorted(_lasting(made, draft), key=_position)
    every = sorted([*base.changes, *made], key=_position)
    gaps, gone = gaps_of(entries, parts, every)
    left = [change for change in every if change.position not in gone]
    return Move(
        made=tuple([moved(change, entries[change.position].position) for change in made]),
        gaps=gaps,
        changes=tuple([moved(change, entries[change.position].position) for change in left]),
        messages=edited.messages,
        tokens=edited.tokens,
        total=edited.total,
        summary=edited.summary,
        balance=costs.balance(edited) if costs is not None else NO_MOVE,
        last=left[-1].position if left else None,
    )


def rescue(
    base: Remains, policy: Policy, known: Known, target: int, costs: Costs | None
) -> tuple[Move, tuple[str, ...]]:
    """Trim down to what upstream will take, with `drop_oldest` at the end; return warnings too.

    What `keep` names stays if the rest can be made small enough without it. Else tool output is cut before
    anything of it is dropped: a model that is not shown what it just asked for asks for it again.
    """
    edits = tuple([edit for edit in policy.edits if not isinstance(edit, DropOldest)])
    move = decide(base, policy.model_copy(update={"edits": (*edits, DropOldest())}), known, target, costs)
    if move.total <= target:
        return move, ()
    shorter = [TruncateToolOutput(max_lines=_ANY, max_bytes=max(1, target // part)) for part in _PARTS]
    least = policy.model_copy(
        update={"edits": (*edits, *shorter, DropOldest()), "keep": Keep(rounds=0, spans=0)}
    )
    harder = decide(base, least, known, target, costs)
    return (harder, (BEYOND_KEEP,)) if harder.total < move.total else (move, ())


def _done(
    draft: Draft, edits: Sequence[Edit], known: Known, costs: Costs | None, *, paying: bool
) -> tuple[Draft, list[Change]]:
    """Run edits and let follow what must; again where that put something back, which takes room.

    Return the draft after all that, and what was changed, in order.
    """
    made: list[Change] = []
    for _ in range(_PASSES):
        edited, changes = _edited(draft, edits, known, costs, paying=paying)
        edited, following = _followed(edited, edits)
        if edited.messages == draft.messages and edited.summary == draft.summary:
            break  # nothing of it lasts
        draft = edited
        made += [*changes, *following]
        if not following or draft.within_target:
            break
    return draft, made


def _edited(
    draft: Draft, edits: Sequence[Edit], known: Known, costs: Costs | None, *, paying: bool
) -> tuple[Draft, list[Change]]:
    """Run edits in order, each until it is done; return the draft after them, and what they changed.

    One that must pay and does not is asked once more when others ran: they may have rewritten what it would.
    Those whose changes can be taken one by one are not refused here: some of them may pay.
    """
    made: list[Change] = []
    balance = costs.balance(draft) if costs is not None else NO_MOVE
    waiting = list(edits)
    while waiting:
        refused: list[Edit] = []
        for edit in waiting:
            if edit.is_done(draft) or (edit.must_pay and costs is None):
                continue
            if edit.when is not None and not edit.when.holds(draft.size, known):
                continue
            changes, summary = _outcome(edit, draft)
            after = draft.after(changes, summary)
            if costs is not None and (changes or summary is not None):
                reckoned = costs.balance(after)
                judged = edit.must_pay or (paying and not edit.piecemeal)
                if judged and not reckoned.since(balance).pays_within(costs.expected):
                    refused.append(edit)
                    continue
                balance = reckoned
            made += changes
            draft = after
        if len(refused) == len(waiting) or not made:
            break
        waiting = refused
    return draft, made


def _followed(draft: Draft, edits: Sequence[Edit]) -> tuple[Draft, list[Change]]:
    """Let follow what must from what the edits did; return the draft after that, and what was changed."""
    made: list[Change] = []
    for edit in edits:
        following = tuple(edit.afterwards(draft))
        made += following
        draft = draft.after(following)
    return draft, made


def _lasting(made: Sequence[Change], draft: Draft) -> list[Change]:
    """Leave out what was undone: of each place what was done before it stood again as in `draft`."""
    lasting: dict[int, list[Change]] = {}
    for change in made:
        of_place = lasting.setdefault(change.position, [])
        of_place.append(change)
        if change.message == draft.messages[change.position]:
            of_place.clear()
    return [change for of_place in lasting.values() for change in of_place]


def _is_piecemeal(made: Sequence[Change], edits: Sequence[Edit]) -> bool:
    """Tell whether some of the changes can be made without the others."""
    types = {edit.type for edit in edits if edit.piecemeal}
    return bool(made) and all(change.edit in types for change in made)


def _outcome(edit: Edit, draft: Draft) -> tuple[tuple[Change, ...], Summary | None]:
    """Return what an edit changes, and the summary that it makes, if any."""
    outcome = tuple(edit.apply(draft))
    made = [each for each in outcome if isinstance(each, Summary)]
    return tuple([each for each in outcome if isinstance(each, Change)]), made[-1] if made else None


def _position(change: Change) -> int:
    return change.position

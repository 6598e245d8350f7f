"""A move of the cut: the edits run over what remains of the log, and what they change is the move.

Whether the cut should move at all is not decided here; with `paying`, though, only what pays is done.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from proxy.conversation import rounds, spans
from proxy.dialects import Message
from proxy.trimming.arrival import moved
from proxy.trimming.demand import pays
from proxy.trimming.draft import Draft
from proxy.trimming.edits import BaseEdit
from proxy.trimming.edits.drop_oldest import DropOldest
from proxy.trimming.edits.summarize import Summarize
from proxy.trimming.edits.truncate_tool_output import TruncateToolOutput
from proxy.trimming.gaps import gaps_of
from proxy.trimming.plan import Change, Gap, Hidden, PlanningContext, Summary, SummaryRequest
from proxy.trimming.policy import Keep, Policy
from proxy.trimming.protection import protected
from proxy.trimming.release import Release, exempt
from proxy.trimming.remains import TrimmedHistory
from proxy.trimming.trigger import Size
from proxy.trimming.worth import NO_MOVE, Balance, Costs

BEYOND_KEEP: Final = "what `keep` names did not fit: it was trimmed too"
"""What is said where an overflow left no other way."""

_PARTS: Final = (1, 4)
"""Tool output is cut to as many bytes as the target has tokens, about a fourth of what may be sent; then,
where that is not enough, to a fourth of that."""
_ANY: Final = 2**31 - 1
"""A number of lines that no limit is."""
_RELEASE: Final = Release()
_PASSES: Final = 8
"""How often the edits of one move run at most, where what was put back makes them run again: of an output
that came again and again they clear one copy each time."""


class Move(Struct, frozen=True, kw_only=True):
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
    draft: Draft
    """All of that as the edits left it."""
    wanted: SummaryRequest | None
    """A summary by a model that would have been used, and was not there."""

    @property
    def hidden(self) -> Mapping[int, Hidden]:
        """By place what is still sent that the client was not shown."""
        return self.draft.hidden


def draft_of(
    base: TrimmedHistory,
    policy: Policy,
    known: PlanningContext,
    target: int | None,
    *,
    exempting: bool = True,
) -> Draft:
    """Return what remains of a log as edits look at it; with `exempting`, what was recalled lately stays."""
    entries = base.log.entries
    log = [entry.message for entry in entries]
    parts, turns = spans(log), rounds(log)
    untouched = protected(log, parts, turns, policy)
    return Draft(
        entries=entries,
        messages=base.messages,
        tokens=base.tokens,
        spans=parts,
        rounds=turns,
        protected=untouched | exempt(parts, turns, base.hidden) if exempting else untouched,
        count=known.count,
        fixed_tokens=known.fixed_tokens,
        target=target,
        made_by=base.made_by,
        summary=base.summary,
        agent=known.agent,
        context_window=known.context_window,
        scale=known.scale,
        prepared=known.prepared,
        gaps=base.gaps,
        hidden=base.hidden,
    )


def decide(
    base: TrimmedHistory,
    policy: Policy,
    known: PlanningContext,
    target: int | None,
    costs: Costs | None,
    *,
    paying: bool = False,
    exempting: bool = True,
    strict: bool = False,
) -> Move:
    """Run the edits over what remains and return what they change; with `paying`, only what pays.

    With `exempting`, what was recalled for the newest turns is left alone. With `strict` the target must be
    met.
    """
    draft = draft_of(base, policy, known, target, exempting=exempting)
    entries, parts = draft.entries, draft.spans
    edits: Sequence[BaseEdit] = (_RELEASE, *policy.edits) if draft.hidden else policy.edits
    edited, made, wanted = _done(draft, edits, known, costs, paying=paying)
    is_new = edited.summary is not None and edited.summary != draft.summary and edited.summary.kind == "model"
    if is_new and _is_too_much(edited, policy, known, strict=strict):
        # Nothing made room for the summary: it is used only if it makes room itself.
        tight = _done(replace(draft, tight=True), edits, known, costs, paying=paying)
        if tight[0].total < edited.total:
            edited, made, wanted = tight
    if costs is not None and paying and _is_piecemeal(made, edits) and _is_sent(base, costs):
        first = costs.first_place([span.start for span in parts], edited)
        made = [change for change in made if first is not None and change.position >= first]
        # What is left out may be what something else followed from.
        edited, following = _followed(draft.after(made), edits)
        made += following
    made = sorted(_lasting(made, draft), key=_position)
    every = sorted([*base.changes, *made], key=_position)
    dropped, gone = gaps_of(entries, parts, every)
    left = [change for change in every if change.position not in gone]
    return Move(
        made=tuple([moved(change, entries[change.position].position) for change in made]),
        gaps=dropped,
        changes=tuple([moved(change, entries[change.position].position) for change in left]),
        messages=edited.messages,
        tokens=edited.tokens,
        total=edited.total,
        summary=edited.summary,
        balance=costs.balance(edited) if costs is not None else NO_MOVE,
        last=left[-1].position if left else None,
        draft=edited,
        wanted=wanted,
    )


def rescue(
    base: TrimmedHistory, policy: Policy, known: PlanningContext, target: int, costs: Costs | None
) -> tuple[Move, tuple[str, ...]]:
    """Trim down to what upstream will take, with `drop_oldest` at the end; return warnings too.

    What `keep` names stays if the rest can be made small enough without it, and what was recalled for the
    newest turns. Else tool output is cut before anything of it is dropped: a model that is not shown what it
    just asked for asks for it again.
    """
    edits = tuple([edit for edit in policy.edits if not isinstance(edit, DropOldest)])
    first = policy.model_copy(update={"edits": (*edits, DropOldest())})
    move = decide(base, first, known, target, costs, strict=True)
    if move.total <= target:
        return move, ()
    shorter = [TruncateToolOutput(max_lines=_ANY, max_bytes=max(1, target // part)) for part in _PARTS]
    least = policy.model_copy(
        update={"edits": (*edits, *shorter, DropOldest()), "keep": Keep(rounds=0, spans=0)}
    )
    harder = decide(base, least, known, target, costs, exempting=False, strict=True)
    return (harder, (BEYOND_KEEP,)) if harder.total < move.total else (move, ())


def _is_too_much(draft: Draft, policy: Policy, known: PlanningContext, *, strict: bool) -> bool:
    """Tell whether the view is above the target, if that must be met, or else above the trigger."""
    if strict or draft.within_target:
        return not draft.within_target
    return is_above(policy, known, draft.size)


def is_above(policy: Policy, known: PlanningContext, size: Size) -> bool:
    """Tell whether a view of this size is above a threshold of the policy's trigger."""
    return policy.trigger is not None and any(share > 1 for share in policy.trigger.shares(size, known))


def _done(
    draft: Draft, edits: Sequence[BaseEdit], known: PlanningContext, costs: Costs | None, *, paying: bool
) -> tuple[Draft, list[Change], SummaryRequest | None]:
    """Run edits and let follow what must; again where that put something back, which takes room.

    Return the draft after all that, what was changed, in order, and the summary that was missing.
    """
    made: list[Change] = []
    wanted: SummaryRequest | None = None
    for _ in range(_PASSES):
        edited, changes, missing = _edited(draft, edits, known, costs, paying=paying)
        edited, following = _followed(edited, edits)
        wanted = wanted or missing
        if _stands_the_same(edited, draft):
            break  # nothing of it lasts
        draft = edited
        made += [*changes, *following]
        if not following or draft.within_target:
            break
    return draft, made, wanted


def _edited(
    draft: Draft, edits: Sequence[BaseEdit], known: PlanningContext, costs: Costs | None, *, paying: bool
) -> tuple[Draft, list[Change], SummaryRequest | None]:
    """Run edits in order, each until it is done; return the draft after them, and what they changed.

    The third is the summary by a model that one of them would have used, and that is not there.

    One that must pay and does not is asked once more when others ran: they may have rewritten what it would.
    Those whose changes can be taken one by one are not refused here: some of them may pay.
    """
    made: list[Change] = []
    wanted: SummaryRequest | None = None
    balance = costs.balance(draft) if costs is not None else NO_MOVE
    waiting = list(edits)
    while waiting:
        refused: list[BaseEdit] = []
        for edit in waiting:
            if edit.is_done(draft) or (edit.must_pay and costs is None):
                continue
            if edit.when is not None and not edit.when.holds(draft.size, known):
                continue
            changes, summary, missing = _outcome(edit, draft)
            judged = edit.must_pay or (paying and not edit.piecemeal)
            if missing is not None and not (judged and _costs_too_much(edit, draft, missing, costs, balance)):
                wanted = wanted or missing
            after = draft.after(changes, summary)
            if costs is not None and (changes or summary is not None):
                reckoned = costs.balance(after)
                if judged and not reckoned.since(balance).pays_within(costs.expected):
                    refused.append(edit)
                    continue
                balance = reckoned
            made += changes
            draft = after
        if len(refused) == len(waiting) or not made:
            break
        waiting = refused
    return draft, made, wanted


def _costs_too_much(
    edit: BaseEdit, draft: Draft, missing: SummaryRequest, costs: Costs | None, before: Balance
) -> bool:
    """Tell whether a summary that is not there would not pay either."""
    return isinstance(edit, Summarize) and costs is not None and not pays(edit, draft, missing, costs, before)


def _stands_the_same(one: Draft, other: Draft) -> bool:
    """Tell whether the same is sent of two drafts of one log."""
    return one.messages == other.messages and one.summary == other.summary and one.hidden == other.hidden


def _is_sent(base: TrimmedHistory, costs: Costs) -> bool:
    """Tell whether what remains is what would be sent without a move."""
    return costs.messages == base.messages and costs.tokens == base.tokens


def _followed(draft: Draft, edits: Sequence[BaseEdit]) -> tuple[Draft, list[Change]]:
    """Let follow what must from what the edits did; return the draft after that, and what was changed."""
    made: list[Change] = []
    for edit in edits:
        following = tuple(edit.afterwards(draft))
        made += following
        draft = draft.after(following)
    return draft, made


def _lasting(made: Sequence[Change], draft: Draft) -> list[Change]:
    """Leave out what was undone: of each place what was done before it stood again as in `draft`.

    A message that only lost what the client was not shown stands as it did, and is another one all the same.
    """
    lasting: dict[int, list[Change]] = {}
    for change in made:
        of_place = lasting.setdefault(change.position, [])
        of_place.append(change)
        if change.message == draft.messages[change.position] and change.position not in draft.hidden:
            of_place.clear()
    return [change for of_place in lasting.values() for change in of_place]


def _is_piecemeal(made: Sequence[Change], edits: Sequence[BaseEdit]) -> bool:
    """Tell whether some of the changes can be made without the others."""
    types = {edit.type for edit in edits if edit.piecemeal}
    return bool(made) and all(change.edit in types for change in made)


def _outcome(
    edit: BaseEdit, draft: Draft
) -> tuple[tuple[Change, ...], Summary | None, SummaryRequest | None]:
    """Return what an edit changes, the summary that it makes, if any, and the one that it would need."""
    outcome = tuple(edit.apply(draft))
    made = next((each for each in outcome if isinstance(each, Summary)), None)
    missing = next((each for each in outcome if isinstance(each, SummaryRequest)), None)
    return tuple([each for each in outcome if isinstance(each, Change)]), made, missing


def _position(change: Change) -> int:
    return change.position

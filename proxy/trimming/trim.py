"""One trim: the edits run over what is left of the log, and what they change is the trim.

Whether to trim at all is the planner's decision; with `paying`, though, only what pays is done.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import takewhile
from operator import attrgetter
from typing import ClassVar, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from proxy.conversation import Round, open_calls, rounds, spans
from proxy.dialects import Message, Span
from proxy.trimming.cost import DEAR, NO_CHANGE, Balance, Costs
from proxy.trimming.draft import Draft
from proxy.trimming.edits import BaseEdit
from proxy.trimming.edits.clear_tool_results import ClearToolResults
from proxy.trimming.edits.dropping import DropOldest
from proxy.trimming.edits.edit import ToolOutputEdit
from proxy.trimming.edits.summarize import Summarize
from proxy.trimming.edits.truncate_tool_output import TruncateToolOutput
from proxy.trimming.history import TrimmedHistory, gaps_of, without_reasoning
from proxy.trimming.model import (
    ASSUMED,
    HIDDEN_ROUNDS,
    Change,
    Entry,
    Gap,
    PlanningContext,
    Size,
    StaleRange,
    Summary,
    SummaryRequest,
)
from proxy.trimming.policy import Keep, Policy

BEYOND_KEEP: Final = "what `keep` names did not fit: it was trimmed too"
"""The warning where an overflow left no other way."""

_PARTS: Final = (1, 4)  # tool output is cut to as many bytes as the target has tokens, then to a fourth of that
_ANY: Final = 2**31 - 1  # a number of lines that no limit is
_PASSES: Final = 8
"""How often the edits of one trim run at most. They run again where something was put back: of an output that
came many times they clear one copy each time."""
_RECALLED_ROUNDS: Final = 3  # the newest rounds, the current one included, whose replies keep their hidden rounds
_RECALLED_SPANS: Final = 16  # likewise: an agent that runs 300 calls on one instruction has one round

_by_position: Final = attrgetter("position")


class Trim(Struct, frozen=True, kw_only=True):
    """What was decided about what was left of the log."""

    made: tuple[Change, ...]  # message by message, by position
    gaps: Sequence[Gap]  # spans that are not sent any more, and were until now
    changes: tuple[Change, ...]  # what else was done to messages that are no gap now, by this trim and by earlier ones
    balance: Balance  # what it changes in cost; nothing where costs do not count
    last: int | None  # the last place of that log that was changed and is no gap now; None where there is none
    draft: Draft  # all of that as the edits left it
    request: SummaryRequest | None  # a summary by a model that would have been used, and was not there
    stale: StaleRange | None = None  # where reasoning is left out from now on


class ReleaseHidden(BaseEdit, frozen=True):
    """Hidden rounds of older replies go, from the oldest; the reply stays as the client saw it.

    No configuration names it. It runs before all edits, since what it drops can be recalled again.
    """

    piecemeal: ClassVar[bool] = True

    type: Literal["hidden_rounds"] = HIDDEN_ROUNDS
    """What is said in the place of an edit's type."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Let go of what is not protected, until the view is within the target."""
        total = draft.total
        for place in sorted(draft.hidden):
            if draft.target is not None and total <= draft.target:
                return
            message, tokens = draft.messages[place], draft.entries[place].tokens
            if place in draft.protected or message is None or tokens >= draft.tokens[place]:
                continue
            total += tokens - draft.tokens[place]
            yield Change(
                position=place,
                edit=self.type,
                reason="what was recalled for it is older than the newest turns",
                message=message,
                tokens_before=draft.tokens[place],
                tokens_after=tokens,
            )


_RELEASE: Final = ReleaseHidden()


def draft_of(
    base: TrimmedHistory, policy: Policy, context: PlanningContext, target: int | None, *, exempting: bool = True
) -> Draft:
    """Return what is left of a log as edits see it; with `exempting`, what was recalled lately stays.

    Without, results that stay because something must be left to answer may be shortened.
    """
    entries = base.log.entries
    log = [entry.message for entry in entries]
    parts, turns = spans(log), rounds(log)
    untouched = protected(log, parts, turns, policy)
    if exempting:
        untouched |= recalled_lately(parts, turns, base.hidden)
    if context.keeps_loop:
        untouched |= closing(log, parts, untouched)
    return Draft(
        entries=entries,
        messages=base.messages,
        tokens=base.tokens,
        spans=parts,
        rounds=turns,
        protected=untouched,
        cuttable=frozenset() if exempting else _cuttable(log, parts, policy),
        count=context.count,
        fixed_tokens=context.fixed_tokens,
        target=target,
        made_by=base.made_by,
        summary=base.summary,
        agent=context.agent,
        context_window=context.context_window,
        scale=context.scale,
        ready_summary=context.ready_summary,
        gaps=base.gaps,
        hidden=base.hidden,
        dear=min((context.prices or ASSUMED).read / DEAR, 2.0),
    )


def protected(
    messages: Sequence[Message], spans: Sequence[Span], rounds: Sequence[Round], policy: Policy
) -> frozenset[int]:
    """Return the places, of whole spans, of pins, the latest user message, open calls and what `keep` names."""
    users = [place for place, message in enumerate(messages) if message.role == "user"]
    keep, single, whole = policy.keep, set(users[-1:]), set[Span]()
    if keep.first_user:
        single.update(users[:1])
    for number in {each.number for each in rounds[max(0, len(rounds) - keep.rounds) :]}:
        inside = [span for span in spans if span.round == number]
        whole.update(inside[max(0, len(inside) - keep.spans) :])
    whole.update(_asking(messages, spans))
    whole.update(span for span in spans if any([each.is_lasting for each in messages[span.start : span.stop]]))
    if policy.pin:
        whole.update(span for span in spans if any(map(policy.pins, messages[span.start : span.stop])))
    return frozenset(single.union(*(range(span.start, span.stop) for span in whole)))


def _asking(messages: Sequence[Message], spans: Sequence[Span]) -> Iterator[Span]:
    """Yield the spans without which nothing would be left to answer.

    That is the last one, without a question of a user's and where calls are open; and the one with results beside
    which a user said something last.
    """
    if spans and (all(message.role != "user" for message in messages) or open_calls(messages)):
        yield spans[-1]
    newest = next((at for at in range(len(messages) - 1, -1, -1) if _speaks(messages[at])), None)
    if newest is not None and messages[newest].is_result:
        yield from (span for span in spans if span.start <= newest < span.stop)


def _cuttable(messages: Sequence[Message], spans: Sequence[Span], policy: Policy) -> frozenset[int]:
    """Return the places of results that stay only because something must be left to answer: no pin fits them."""
    found = [span for span in _asking(messages, spans) if not any(map(policy.pins, messages[span.start : span.stop]))]
    return frozenset([at for span in found for at in range(span.start, span.stop) if messages[at].is_result])


def _speaks(message: Message) -> bool:
    """Tell whether a user says something in a message, be it beside the results of tools."""
    return message.role == "user" or (message.is_result and bool(message.beside))


def recalled_lately(spans: Sequence[Span], rounds: Sequence[Round], hidden: Collection[int]) -> frozenset[int]:
    """Return the places of spans that hidden rounds of the newest turns belong to."""
    if not hidden:
        return frozenset()
    oldest = rounds[max(0, len(rounds) - _RECALLED_ROUNDS)].start
    newest = [span for span in spans[max(0, len(spans) - _RECALLED_SPANS) :] if span.start >= oldest]
    return frozenset(place for span in newest if span.start in hidden for place in range(span.start, span.stop))


def closing(messages: Sequence[Message], spans: Sequence[Span], kept: Collection[int]) -> frozenset[int]:
    """Return the place of the answer before the latest question, where calls before it are among those to be kept.

    Without it the calls would count as a loop that is under way, whose reasoning must be there.
    """
    asked = next((at for at in range(len(messages) - 1, -1, -1) if messages[at].role == "user"), 0)
    before = [span for span in spans if span.stop <= asked and messages[span.start].role == "assistant"]
    if not before or messages[before[-1].start].calls:
        return frozenset()
    calling = any(messages[span.start].calls and span.start in kept for span in before)
    return frozenset(range(before[-1].start, before[-1].stop)) if calling else frozenset()


def trim(
    base: TrimmedHistory,
    policy: Policy,
    context: PlanningContext,
    target: int | None,
    costs: Costs | None,
    *,
    paying: bool = False,
    exempting: bool = True,
    strict: bool = False,
) -> Trim:
    """Run the edits over what is left and return what they change; with `paying`, only what pays.

    With `exempting`, what was recalled lately is left alone. With `strict` the target must be met.
    """
    draft = draft_of(base, policy, context, target, exempting=exempting)
    entries, parts = draft.entries, draft.spans
    edits: Sequence[BaseEdit] = (_RELEASE, *policy.edits) if draft.hidden else policy.edits
    starts = [span.start for span in parts]
    is_sent = costs is not None and (costs.messages, costs.tokens) == (base.messages, base.tokens)
    choosing = costs if paying and is_sent else None  # what may be done from some place on, or not at all
    if choosing is not None and not choosing.may_pay(starts, _least(draft, edits, context)):
        edits = ()
    edited, made, request = _run(draft, edits, context, costs, paying=paying)
    is_new = edited.summary is not None and edited.summary != draft.summary and edited.summary.kind == "model"
    is_within = edited.within()
    is_too_much = not is_within if strict or is_within else is_above(policy, context, edited.size)
    if is_new and is_too_much:
        # Nothing made room for the summary: it is used only if it makes room itself.
        tight = _run(replace(draft, tight=True), edits, context, costs, paying=paying)
        if tight[0].total < edited.total:
            edited, made, request = tight
    piecemeal = {edit.type for edit in edits if edit.piecemeal}
    if choosing is not None and made and all(change.edit in piecemeal for change in made):
        # Each change can be made without the others: those that pay are.
        first = choosing.first_place(starts, edited)
        made = [change for change in made if first is not None and change.position >= first]
        # What is left out may be what something else followed from.
        edited, following = _followed(draft.after(made), edits)
        made += following
    for edit in () if base.windowed else edits:
        finished = tuple(edit.finished(draft, edited))
        made, edited = [*made, *finished], edited.after(finished)
    last = list(_ending(edited, made))
    edited, made = edited.after(last), sorted(_lasting([*made, *last], draft), key=_by_position)
    every = sorted([*base.changes, *made], key=_by_position)
    dropped, gone = gaps_of(entries, parts, every)
    left = [change for change in every if change.position not in gone]
    return Trim(
        made=tuple([change.at(entries[change.position].position) for change in made]),
        gaps=dropped,
        changes=tuple([change.at(entries[change.position].position) for change in left]),
        balance=costs.balance(edited) if costs is not None else NO_CHANGE,
        last=left[-1].position if left else None,
        draft=edited,
        request=request,
    )


def _least(draft: Draft, edits: Sequence[BaseEdit], context: PlanningContext) -> Sequence[int]:
    """Return by place no more tokens than a trim would leave, in a small part of the time that it takes.

    An edit with a `when`, or one of a type that comes twice, goes by what the edits before it really leave. What
    follows from that nobody knows yet: then it may be nothing at all.
    """
    running = [edit for edit in edits if edit.when is None or edit.when.holds(draft.size, context)]
    is_known = len({edit.type for edit in running}) == len(running) and all(edit.when is None for edit in running[:-1])
    left = draft
    for edit in running:
        least = edit.at_best(left) if is_known else None
        if least is None:
            return [0] * len(draft.tokens)
        left = least
    return left.tokens


def unbound(made: Trim, base: TrimmedHistory, before: TrimmedHistory, *, keeps_loop: bool = False) -> Trim:
    """Return a trim that leaves out the reasoning which it makes invalid: all from the first change on.

    Providers take reasoning only behind the very messages that it was made behind. `before` is what was sent until
    now, of the log that `base` is. With `keeps_loop` the reasoning of a tool loop that is under way stays.
    """
    draft = made.draft
    sent = base.sent_as(before)
    changed = (
        at
        for at, (message, _) in enumerate(sent)
        if message != draft.messages[at] or before.hidden.get(at) != draft.hidden.get(at)
    )
    first = 0 if draft.summary != before.summary else next(changed, None)
    if first is None:
        return made
    reach = range(first, loop_start(draft.entries) if keeps_loop else len(sent))
    messages, hidden = without_reasoning(draft.messages, draft.hidden, reach)
    bound = [at for at in reach if messages[at] is not draft.messages[at] or hidden.get(at) != draft.hidden.get(at)]
    if not bound:
        return made
    tokens = tuple([0 if message is None else count for message, count in zip(messages, draft.tokens, strict=True)])
    stretch = StaleRange(start=draft.position(first), stop=draft.position(bound[-1]) + 1)
    return replace(made, draft=replace(draft, messages=messages, tokens=tokens, hidden=hidden), stale=stretch)


def loop_start(entries: Sequence[Entry]) -> int:
    """Return the place where a tool loop begins that is under way; that after the last message where none is."""
    if not entries[-1].message.is_result:
        return len(entries)
    return next((at + 1 for at in range(len(entries) - 1, -1, -1) if entries[at].message.role == "user"), 0)


def rescue(
    base: TrimmedHistory, policy: Policy, context: PlanningContext, target: int, costs: Costs | None
) -> tuple[Trim, tuple[str, ...]]:
    """Trim down to what upstream will take, with `drop_oldest` at the end; return warnings too.

    What `keep` names and what was recalled lately stays if the rest can be made small enough. Else tool output is
    cut before anything of it is dropped: a model that is not shown what it asked for asks for it again.
    """
    edits = tuple([edit for edit in policy.edits if not isinstance(edit, DropOldest)])
    first = policy.model_copy(update={"edits": (*edits, DropOldest())})
    gentle = trim(base, first, context, target, costs, strict=True)
    if gentle.draft.total <= target:
        return gentle, ()
    shorter = [TruncateToolOutput(max_lines=_ANY, max_bytes=max(1, target // part)) for part in _PARTS]
    least = policy.model_copy(update={"edits": (*edits, *shorter, DropOldest()), "keep": Keep(rounds=0, spans=0)})
    harder = trim(base, least, context, target, costs, exempting=False, strict=True)
    return (harder, (BEYOND_KEEP,)) if harder.draft.total < gentle.draft.total else (gentle, ())


def is_above(policy: Policy, context: PlanningContext, size: Size) -> bool:
    """Tell whether a view of this size is above a threshold of the policy's trigger."""
    return policy.trigger is not None and any(share > 1 for share in policy.trigger.shares(size, context))


def _run(
    draft: Draft, edits: Sequence[BaseEdit], context: PlanningContext, costs: Costs | None, *, paying: bool
) -> tuple[Draft, list[Change], SummaryRequest | None]:
    """Run edits and what must follow, again where that put something back, which takes room.

    Return the draft after all that, what was changed, in order, and the summary that was missing.
    """
    made: list[Change] = []
    request: SummaryRequest | None = None
    for _ in range(_PASSES):
        edited, changes, missing = _pass(draft, edits, context, costs, paying=paying)
        edited, following = _followed(edited, edits)
        request = request or missing
        if (edited.messages, edited.summary, edited.hidden) == (draft.messages, draft.summary, draft.hidden):
            break  # nothing of it lasts
        draft = edited
        made += [*changes, *following]
        if not following or draft.within():
            break
    return draft, made, request


def _pass(
    draft: Draft, edits: Sequence[BaseEdit], context: PlanningContext, costs: Costs | None, *, paying: bool
) -> tuple[Draft, list[Change], SummaryRequest | None]:
    """Run edits in order, each until it is done; return like `_run`.

    An edit that must pay and does not is asked once more when others ran. Piecemeal edits are not refused here:
    some of their changes may pay.
    """
    made = [] if paying else _dropped_anyway(draft, edits, context)
    if made:  # it fires, and goes on when the others are done
        draft, edits = draft.after(made), (*edits[:-1], edits[-1].model_copy(update={"when": None}))
    request: SummaryRequest | None = None
    balance = costs.balance(draft) if costs is not None else NO_CHANGE
    waiting = list(edits)
    while waiting:
        refused: list[BaseEdit] = []
        for edit in waiting:
            if edit.is_done(draft) or (edit.must_pay and costs is None):
                continue
            if edit.when is not None and not edit.when.holds(draft.size, context):
                continue
            outcome = tuple(edit.apply(draft))
            changes = [each for each in outcome if isinstance(each, Change)]
            summary = next((each for each in outcome if isinstance(each, Summary)), None)
            missing = next((each for each in outcome if isinstance(each, SummaryRequest)), None)
            judged = edit.must_pay or (paying and not edit.piecemeal)
            if missing is not None and judged and costs is not None and isinstance(edit, Summarize):
                pays = costs.summary_pays(draft, edit.imagined(draft, missing), balance)
                request = request or (missing if pays else None)
            else:
                request = request or missing
            after = draft.after(changes, summary)
            if costs is not None and (changes or summary is not None):
                now = costs.balance(after)
                if judged and not now.since(balance).pays_within(costs.expected):
                    refused.append(edit)
                    continue
                balance = now
            made += changes
            draft = after
        if len(refused) == len(waiting) or not made:
            break
        waiting = refused
    return draft, made, request


def _dropped_anyway(draft: Draft, edits: Sequence[BaseEdit], context: PlanningContext) -> list[Change]:
    """Return what `drop_oldest` at the end drops even if calls and results before it come to nothing.

    It goes first: of what is not sent no stub is made, and no value counts as said there.
    """
    last = edits[-1] if edits else None
    if not isinstance(last, DropOldest) or last.must_pay or draft.hidden:
        return []
    if any(edit.when is not None or getattr(edit, "at_least", 0) for edit in edits[:-1]):
        return []  # whether they act depends on how long the whole is
    if not all(isinstance(edit, ClearToolResults | ToolOutputEdit) for edit in edits[:-1]):
        return []
    shorter = [message is not None and (message.is_result or bool(message.calls)) for message in draft.messages]
    tokens = [0 if is_shorter else tokens for tokens, is_shorter in zip(draft.tokens, shorter, strict=True)]
    least = replace(draft, tokens=tuple(tokens))
    if last.is_done(least) or (last.when is not None and not last.when.holds(least.size, context)):
        return []
    return [draft.removing(change.position, change.edit, change.reason) for change in last.apply(least)]


def _followed(draft: Draft, edits: Sequence[BaseEdit]) -> tuple[Draft, list[Change]]:
    """Let follow what must from what the edits did; return the draft after that, and what was changed."""
    made: list[Change] = []
    for edit in edits:
        following = tuple(edit.afterwards(draft))
        made += following
        draft = draft.after(following)
    return draft, made


def _ending(draft: Draft, made: Sequence[Change]) -> Iterator[Change]:
    """Yield changes that drop replies which would end the view, where what came after them was trimmed.

    A model takes such a reply for one that it has to go on with, or its provider refuses it.
    """
    if not made or draft.entries[-1].message.role == "assistant":
        return
    left = [*draft.remaining()]
    replies = takewhile(
        lambda each: each[1].role == "assistant" and not each[1].calls and each[0] not in draft.protected,
        reversed(left[1:]),  # something stays
    )
    for place, _ in replies:
        yield draft.removing(place, made[-1].edit, "nothing that followed it is left")


def _lasting(made: Sequence[Change], draft: Draft) -> list[Change]:
    """Leave out what was undone: of each place what was done before it stood again as in `draft`.

    A message that lost only what the client was not shown is another one all the same.
    """
    lasting: dict[int, list[Change]] = {}
    for change in made:
        of_place = lasting.setdefault(change.position, [])
        of_place.append(change)
        if change.message == draft.messages[change.position] and change.position not in draft.hidden:
            of_place.clear()
    return [change for of_place in lasting.values() for change in of_place]

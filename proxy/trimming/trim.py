"""One trim: runs the edits over what is left of the log, and collects their changes.

The planner decides whether to trim at all. With `paying`, only changes that pay are made.
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
"""The warning if an overflow could not be resolved otherwise."""

_PARTS: Final = (1, 4)  # tool output is cut to as many bytes as the target has tokens, then to a fourth of that
_ANY: Final = 2**31 - 1  # a number of lines that means no limit
_PASSES: Final = 8
"""How often the edits of one trim run at most. They run again if something was put back: of an output that occurs many
times, each pass clears one copy."""
_RECALLED_ROUNDS: Final = 3  # replies of so many newest rounds, the current one included, keep their hidden rounds
_RECALLED_SPANS: Final = 16  # but only within so many newest spans: a round may hold 300 calls

_by_position: Final = attrgetter("position")


class Trim(Struct, frozen=True, kw_only=True):
    """The result of one trim."""

    made: tuple[Change, ...]  # the changes of this trim, by position
    gaps: Sequence[Gap]  # spans that this trim dropped
    changes: tuple[Change, ...]  # changes of the messages that are not in gaps, by this trim and earlier ones
    balance: Balance  # how it changes costs; `NO_CHANGE` if costs do not count
    last: int | None  # the last changed place that is not in a gap; None if there is none
    draft: Draft  # the log as the edits left it
    request: SummaryRequest | None  # a summary by a model that would have been used but was not ready
    stale: StaleRange | None = None  # where reasoning is left out from now on


class ReleaseHidden(BaseEdit, frozen=True):
    """Drops the hidden rounds of older replies, the oldest first. The reply stays as the client saw it.

    It is not configurable. It runs before all edits, since the model can recall what it drops.
    """

    piecemeal: ClassVar[bool] = True

    type: Literal["hidden_rounds"] = HIDDEN_ROUNDS
    """The name in its changes."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Drop hidden rounds that are not protected, until the view is within the target."""
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
    """Return the draft of what is left of a log.

    With `exempting`, spans with recently recalled rounds are protected. Without it they are not, and results that are
    protected only because something must be left to answer may be shortened.
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
    """Return the protected places, mostly whole spans: pins, the latest user message, open calls, what `keep` names."""
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
    """Yield the spans without which the model would have nothing to answer.

    One is the last span, if the log has no user message or has open calls. The other is the span whose tool results
    hold the user's newest words, if these words are newer than any user message.
    """
    if spans and (all(message.role != "user" for message in messages) or open_calls(messages)):
        yield spans[-1]
    newest = next((at for at in range(len(messages) - 1, -1, -1) if _speaks(messages[at])), None)
    if newest is not None and messages[newest].is_result:
        yield from (span for span in spans if span.start <= newest < span.stop)


def _cuttable(messages: Sequence[Message], spans: Sequence[Span], policy: Policy) -> frozenset[int]:
    """Return the places of results that are protected only because something must be left to answer, not by a pin."""
    found = [span for span in _asking(messages, spans) if not any(map(policy.pins, messages[span.start : span.stop]))]
    return frozenset([at for span in found for at in range(span.start, span.stop) if messages[at].is_result])


def _speaks(message: Message) -> bool:
    """Tell whether a message holds a user's words, possibly beside tool results."""
    return message.role == "user" or (message.is_result and bool(message.beside))


def recalled_lately(spans: Sequence[Span], rounds: Sequence[Round], hidden: Collection[int]) -> frozenset[int]:
    """Return the places of the spans with hidden rounds in the newest turns."""
    if not hidden:
        return frozenset()
    oldest = rounds[max(0, len(rounds) - _RECALLED_ROUNDS)].start
    newest = [span for span in spans[max(0, len(spans) - _RECALLED_SPANS) :] if span.start >= oldest]
    return frozenset(place for span in newest if span.start in hidden for place in range(span.start, span.stop))


def closing(messages: Sequence[Message], spans: Sequence[Span], kept: Collection[int]) -> frozenset[int]:
    """Return the places of the last answer before the latest user message, if earlier calls are kept.

    Without the answer, these calls would look like a tool loop under way, whose reasoning must be sent.
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
    """Run the edits over what is left of the log and return their changes.

    Args:
        base: What is left of the log.
        policy: The policy with the edits.
        context: Token counter, tokens of instructions and tools, context window, prices.
        target: Maximum tokens of the view; None if there is no limit.
        costs: The data for judging by cost; None if costs do not count.
        paying: Whether only changes that pay are made.
        exempting: Whether spans with recently recalled rounds are protected.
        strict: Whether the target must be met.
    """
    draft = draft_of(base, policy, context, target, exempting=exempting)
    entries, parts = draft.entries, draft.spans
    edits: Sequence[BaseEdit] = (_RELEASE, *policy.edits) if draft.hidden else policy.edits
    starts = [span.start for span in parts]
    is_sent = costs is not None and (costs.messages, costs.tokens) == (base.messages, base.tokens)
    choosing = costs if paying and is_sent else None  # if set, changes may be limited to those from some place on
    if choosing is not None and not choosing.may_pay(starts, _least(draft, edits, context)):
        edits = ()
    edited, made, request = _run(draft, edits, context, costs, paying=paying)
    is_new = edited.summary is not None and edited.summary != draft.summary and edited.summary.kind == "model"
    is_within = edited.within()
    is_too_much = not is_within if strict or is_within else is_above(policy, context, edited.size)
    if is_new and is_too_much:
        # The other edits made no room for the new summary: it is used only if it makes the view smaller itself.
        tight = _run(replace(draft, tight=True), edits, context, costs, paying=paying)
        if tight[0].total < edited.total:
            edited, made, request = tight
    piecemeal = {edit.type for edit in edits if edit.piecemeal}
    if choosing is not None and made and all(change.edit in piecemeal for change in made):
        # The changes do not depend on each other: make only those that pay.
        first = choosing.first_place(starts, edited)
        made = [change for change in made if first is not None and change.position >= first]
        # Other changes may have depended on those that were left out.
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
    """Return a lower bound of the tokens that a trim leaves, by place. Much faster than the trim itself.

    The bound is 0 everywhere if it is unknown: an edit has no bound of its own, an edit but the last has a `when`, or
    two edits have the same type.
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
    """Return the trim without the reasoning that it makes invalid: all reasoning from the first change on.

    Providers accept reasoning only behind the very messages that it was made behind. `before` is the history in force
    until now, `base` the one that the trim began with. With `keeps_loop` the reasoning of a tool loop under way stays.
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
    """Return the place where the tool loop under way begins; if there is none, the place after the last message."""
    if not entries[-1].message.is_result:
        return len(entries)
    return next((at + 1 for at in range(len(entries) - 1, -1, -1) if entries[at].message.role == "user"), 0)


def rescue(
    base: TrimmedHistory, policy: Policy, context: PlanningContext, target: int, costs: Costs | None
) -> tuple[Trim, tuple[str, ...]]:
    """Trim after an overflow to a size that upstream accepts, with `drop_oldest` as the last edit.

    Returns the trim and its warnings. The first attempt protects what `keep` names and what was recalled recently. If
    that is not enough, the second attempt protects neither. It first cuts tool output and only then drops spans, since
    a model that does not see a result calls the tool again.
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
    """Run the edits and their follow-up changes (`afterwards`), again if those put something back.

    Returns the draft after that, the changes in order, and a summary that was needed but not ready.
    """
    made: list[Change] = []
    request: SummaryRequest | None = None
    for _ in range(_PASSES):
        edited, changes, missing = _pass(draft, edits, context, costs, paying=paying)
        edited, following = _followed(edited, edits)
        request = request or missing
        if (edited.messages, edited.summary, edited.hidden) == (draft.messages, draft.summary, draft.hidden):
            break  # the follow-up changes undid everything
        draft = edited
        made += [*changes, *following]
        if not following or draft.within():
            break
    return draft, made, request


def _pass(
    draft: Draft, edits: Sequence[BaseEdit], context: PlanningContext, costs: Costs | None, *, paying: bool
) -> tuple[Draft, list[Change], SummaryRequest | None]:
    """Run the edits once, in order; return the same as `_run`.

    An edit that must pay but does not is tried again if other edits changed something. With `paying` all edits must
    pay except piecemeal ones: some of their changes may pay, which is judged later.
    """
    made = [] if paying else _dropped_anyway(draft, edits, context)
    if made:  # the condition of `drop_oldest` holds already, and it continues after the others
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
    """Return the changes that a final `drop_oldest` makes even if the edits before it clear all calls and results.

    These changes are made first, so that no stub is made for a message that is dropped anyway, and its values do not
    count as present in the view.
    """
    last = edits[-1] if edits else None
    if not isinstance(last, DropOldest) or last.must_pay or draft.hidden:
        return []
    if any(edit.when is not None or getattr(edit, "at_least", 0) for edit in edits[:-1]):
        return []  # dropping first could change whether these edits run
    if not all(isinstance(edit, ClearToolResults | ToolOutputEdit) for edit in edits[:-1]):
        return []
    shorter = [message is not None and (message.is_result or bool(message.calls)) for message in draft.messages]
    tokens = [0 if is_shorter else tokens for tokens, is_shorter in zip(draft.tokens, shorter, strict=True)]
    least = replace(draft, tokens=tuple(tokens))
    if last.is_done(least) or (last.when is not None and not last.when.holds(least.size, context)):
        return []
    return [draft.removing(change.position, change.edit, change.reason) for change in last.apply(least)]


def _followed(draft: Draft, edits: Sequence[BaseEdit]) -> tuple[Draft, list[Change]]:
    """Make the follow-up changes of all edits (`afterwards`); return the draft after them, and the changes."""
    made: list[Change] = []
    for edit in edits:
        following = tuple(edit.afterwards(draft))
        made += following
        draft = draft.after(following)
    return draft, made


def _ending(draft: Draft, made: Sequence[Change]) -> Iterator[Change]:
    """Yield changes that drop replies at the end of the view, if the messages after them were trimmed.

    A model would continue such a reply, or its provider would refuse the request.
    """
    if not made or draft.entries[-1].message.role == "assistant":
        return
    left = [*draft.remaining()]
    replies = takewhile(
        lambda each: each[1].role == "assistant" and not each[1].calls and each[0] not in draft.protected,
        reversed(left[1:]),  # the first message always stays
    )
    for place, _ in replies:
        yield draft.removing(place, made[-1].edit, "nothing that followed it is left")


def _lasting(made: Sequence[Change], draft: Draft) -> list[Change]:
    """Return the changes without those that were undone later: a place whose message is again that of `draft`.

    Places with hidden rounds are never undone: a message that lost only those is equal but still changed.
    """
    lasting: dict[int, list[Change]] = {}
    for change in made:
        of_place = lasting.setdefault(change.position, [])
        of_place.append(change)
        if change.message == draft.messages[change.position] and change.position not in draft.hidden:
            of_place.clear()
    return [change for of_place in lasting.values() for change in of_place]

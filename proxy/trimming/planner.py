"""Plans what is sent for one request: `history + policy + context -> plan -> view`. Start here.

The view is `trim(A[:cut]) + A[cut:]`, where A is the log after `on_arrival`. The cut stays until the policy's
trigger fires. Then the log is trimmed and the cut moves to its end. Between two trims each view begins with the
last one, byte for byte, so that the provider's prompt cache stays warm.

A trim keeps the changes of earlier trims and adds to them. After a change of the policy's version, the next trim
begins again with all of A.

A view that was changed or composed here is checked against the protocol and repaired.

A summary by a model is requested before the trigger fires. The next trim uses it if it is ready.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from math import log
from types import MappingProxyType
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from proxy.dialects import Dialect, Message, Repaired
from proxy.trimming.cost import Costs, account_after, account_of, prices_of, reads_of, summary_tokens
from proxy.trimming.draft import Draft, clipped, joined_ranges
from proxy.trimming.edits.edit import CLEAR_TOOL_RESULTS
from proxy.trimming.edits.summarize import LEAST_ROOM, Summarize
from proxy.trimming.history import TrimmedHistory, arrive, joined, missing_of, trimmed_history
from proxy.trimming.model import (
    ASSUMED,
    UNTRIMMED,
    Change,
    Cut,
    Entry,
    Gap,
    Hidden,
    Plan,
    PlanningContext,
    Size,
    StaleRange,
    Summary,
    SummaryRequest,
)
from proxy.trimming.policy import Policy
from proxy.trimming.settings import IDLE, UNKNOWN_WINDOW
from proxy.trimming.trim import Trim, draft_of, is_above, loop_start, rescue, trim, unbound

OFF: Final = "off"  # name of the policy in a plan that bypasses trimming

ASKED: Final = "a summary was asked for"  # `fired` of a trim for a requested summary

UNBOUND: Final = "upstream refused reasoning that was made behind another view"  # added to `fired` if it was left out

REFUSED: Final = "upstream refused the trimmed request"  # `fired` of a plan that sends the original instead

_NOTHING: Final = Policy()  # trims nothing beyond what the cut already does
_STEP: Final = log(1.05)  # a trim is tried out each time that a view has grown by this factor
_SMALLEST: Final = 2048  # views of fewer tokens are never judged by cost, unless the cache is cold
_UNTIMELY: Final = 1.25  # at more than this multiple of a threshold, a trim does not wait for a user message
_PATIENCE: Final = 8  # after so many replies in one turn, a trim that pays waits no longer: an agent may work for hours
_THOUGHT_ANEW: Final = 4  # so many newest replies of a turn are assumed to need their reasoning again
_BYTES: Final = 4  # bytes of reasoning per token, about; most reasoning is encrypted and cannot be counted

UNKNOWN_PRICES: Final = "the prices of this model are not known: the most common ones are assumed"
"""The warning if `cost: auto` decides by assumed prices."""


def plan(
    entries: Sequence[Entry],
    policy: Policy,
    name: str,
    context: PlanningContext,
    current: Cut | None = None,
    *,
    composed: bool = False,
    start: int = 0,
    overflow: int | None = None,
) -> Plan:
    """Decide what is sent of a log. The same arguments always give the same plan.

    Args:
        entries: The log of the branch from `start` on, oldest first, without instructions. Entries in the gaps of
            `current` may be missing. If the plan then `needs_whole`, plan again with all entries.
        policy: The policy to apply.
        name: The policy's name, for the plan.
        context: Token counter, tokens of instructions and tools, context window, prices.
        current: The newest cut of the branch, by any policy. A cut beyond the end of the log is ignored.
        composed: Whether the request was composed from the store instead of sent by the client.
        start: Position of the first message that the request covers; older ones are not sent.
        overflow: The maximum of tokens that upstream accepts, known since it refused more. The log is trimmed to it
            even if the trigger does not fire, and the oldest spans are dropped even if no edit does that.
    """
    if current is not None and overflow is None and current.version == UNTRIMMED + policy.version:
        return replace(
            untrimmed(entries, policy, name, context, composed=composed), cut=current, trimmed=False, fired=""
        )
    if current is None and overflow is None and not composed:
        untouched = _untouched(entries, policy, name, context)
        if untouched is not None:
            return untouched
    return _Planning(
        entries, policy, context, current, name=name, composed=composed, start=start, overflow=overflow
    ).plan()


def _untouched(entries: Sequence[Entry], policy: Policy, name: str, context: PlanningContext) -> Plan | None:
    """Return the plan of a log that was never changed and needs no trim; None for any other log. A fast path."""
    if policy.on_arrival or policy.summarizer is not None or context.ready_summary is not None:
        return None
    if any([entry.arrival or entry.hidden is not None for entry in entries]):
        return None
    plan, trigger, window = bypass(entries, context), policy.trigger, context.context_window
    aim = policy.target.within(window) if policy.target is not None else None
    if trigger is not None:
        size = Size(tokens=plan.tokens_sent, messages=len(entries))
        if trigger.tool_calls is not None or trigger.fired(size, context, None, aim):
            return None
        counts = [entry.tokens for entry in entries]
        if trigger.cost is not None and context.keeps and is_due(entries, counts, context, size.tokens):
            return None
    return replace(
        plan,
        policy=name,
        version=policy.version,
        target=aim if aim is not None else _budget(policy, context),
        warnings=(UNKNOWN_WINDOW,) if window is None and policy.relies_on_window else (),
    )


def bypass(entries: Sequence[Entry], context: PlanningContext, *, composed: bool = False) -> Plan:
    """Return the plan that trims nothing (`X-Context-Policy: off`), not even what was trimmed on arrival before.

    The entries must be the whole log that the request covers. Entries that are sent for the first time are recorded
    as unchanged, so that they keep their bytes later.
    """
    messages, tokens = [entry.message for entry in entries], [entry.tokens for entry in entries]
    view = view_of(entries, messages, tokens, context, repairing=composed)
    return Plan(
        policy=OFF,
        version="",
        tokens_before=context.fixed_tokens + sum(tokens),
        tokens_sent=view.tokens,
        view=view.messages,
        warnings=view.notes,
        decided=tuple([entry.arrival or () for entry in entries]),
        messages_before=len(entries),
    )


def untrimmed(
    entries: Sequence[Entry], policy: Policy, name: str, context: PlanningContext, *, composed: bool = False
) -> Plan:
    """Return a plan without trimming, after the provider refused the log as `policy` trimmed it.

    Later requests are not trimmed either, until the policy's version changes or an overflow occurs. The entries must
    be the whole log.
    """
    plan = bypass(entries, context, composed=composed)
    cut = Cut(
        position=entries[-1].position + 1 if entries else 0,
        policy=name,
        version=UNTRIMMED + policy.version,
        changes=(),
        tokens=plan.tokens_sent,
        messages=len(plan.view),
        tool_calls=0,
    )
    aim = policy.target.within(context.context_window) if policy.target is not None else None
    target = aim if aim is not None else _budget(policy, context)
    return replace(plan, policy=name, version=policy.version, cut=cut, trimmed=True, fired=REFUSED, target=target)


def without_bound_reasoning(
    made: Plan, entries: Sequence[Entry], context: PlanningContext, *, composed: bool = False, start: int = 0
) -> Plan | None:
    """Return the plan without reasoning, after the provider refused it; None if that changes nothing.

    Reasoning is valid only behind the very view that it was made behind, which may have been made by another policy.
    It is left out from now on, which the new cut records. With `context.keeps_loop` the reasoning of a tool loop
    under way stays. Returns None if the view has no such reasoning, or if trimming is off after a refusal.
    """
    is_untrimmed = made.cut is not None and made.cut.version.startswith(UNTRIMMED)
    if is_untrimmed or not any([message.has_reasoning for message in made.view]):
        return None
    stop = loop_start(entries) if context.keeps_loop else len(entries)
    if not stop:
        return None
    cut = made.cut
    if cut is None:
        cut = Cut(position=0, policy=made.policy, version=made.version, changes=(), tokens=0, messages=0, tool_calls=0)
    stale = joined_ranges([*cut.stale, StaleRange(start=0, stop=entries[stop - 1].position + 1)])
    cut = replace(cut, position=entries[-1].position + 1, stale=stale)
    decided = [replace(entry, arrival=changes) for entry, changes in zip(entries, made.decided, strict=True)]
    as_now = replace(cut, version=_NOTHING.version)
    shown = plan(decided, _NOTHING, made.policy, context, as_now, composed=composed, start=start)
    if shown.view == made.view:
        return None
    calls = sum([message.result_count for message in shown.view])
    return replace(
        made,
        cut=replace(cut, tokens=shown.tokens_sent, messages=len(shown.view), tool_calls=calls),
        trimmed=True,
        fired="; ".join(filter(None, (made.fired, UNBOUND))),
        tokens_sent=shown.tokens_sent,
        view=shown.view,
        stable_ends=(),
    )


def compaction(
    entries: Sequence[Entry], policy: Policy, context: PlanningContext, current: Cut | None = None, *, start: int = 0
) -> SummaryRequest | None:
    """Return the summary that a model would make if it were requested now; None if it would not be worth it.

    The policy's trigger and conditions are ignored. The arguments are those of `plan`.
    """
    if start:
        return None  # the client's window left messages out: a summary would bring them back
    planning = _Planning(entries, policy, context, current)
    draft = draft_of(planning.history, policy, context, planning.target)
    return policy.summarizing.requested_now(draft)


class _Planning:
    """Makes one plan: holds the state before the decisions, and makes them."""

    def __init__(
        self,
        entries: Sequence[Entry],
        policy: Policy,
        context: PlanningContext,
        current: Cut | None,
        *,
        name: str = "",
        composed: bool = False,
        start: int = 0,
        overflow: int | None = None,
    ) -> None:
        """Apply the current cut to the log; the arguments are those of `plan`."""
        if start:  # a summary would bring back what the client itself left out
            context = replace(context, ready_summary=None)
        self.entries, self.policy, self.name, self.context = entries, policy, name, context
        self.composed, self.start, self.overflow = composed, start, overflow
        self.end = entries[-1].position + 1 if entries else start
        is_usable = current is not None and current.position <= self.end and not _is_split(current, start)
        self.cut = cut = current if is_usable else None
        absent = missing_of(entries, cut.gaps, start) if cut is not None else []
        self.is_whole = not absent
        self.arrived = arrive(entries, policy, context, absent)
        self.history = trimmed_history(self.arrived, cut, start)  # what the current cut leaves
        hidden = self.history.log.hidden.values()  # hidden rounds of dropped messages are unknown and not counted
        self.given = len(entries) + sum([size.messages for _, size in absent])
        self.messages = self.given + sum([each.messages for each in hidden])
        # The tokens of the request if nothing were trimmed.
        self.tokens = context.fixed_tokens + sum([entry.tokens for entry in entries])
        self.tokens += sum([size.tokens for _, size in absent]) + sum([each.tokens for each in hidden])
        # The target: `aim` in tokens as upstream counts them, `target` as they are counted here.
        self.aim = policy.target.within(context.context_window) if policy.target is not None else None
        self.target = None if self.aim is None else int(self.aim / context.scale)
        if overflow is not None:
            self.aim, self.target = round(overflow * context.scale), overflow
        # Whether a trim adds to earlier ones instead of starting over. After an overflow it adds to them under any
        # version if entries are missing.
        self.same = cut is None or cut.version == policy.version or (overflow is not None and not self.is_whole)
        self.base = self.history if self.same else trimmed_history(self.arrived, None, start)  # the input of a trim

    def plan(self) -> Plan:
        """Return the plan."""
        history, policy, context, overflow = self.history, self.policy, self.context, self.overflow
        view = self._view(history, changed=len(history.log.entries) < self.given or history.touched)
        warnings: tuple[str, ...] = ()
        if context.context_window is None and policy.relies_on_window:
            warnings = (UNKNOWN_WINDOW,)
        fired, running = self._fired(view), policy
        waits = bool(fired) and self._waits(view)
        if waits:
            fired = ""
        if self._is_asked() and not self._is_bound:
            # If nothing else fired, only the summary is used. Under another version all edits start over.
            others = () if self.same and not fired else policy.edits
            first = policy.summarizing.model_copy(update={"when": None})
            running = policy.model_copy(update={"edits": (first, *others)})
            fired = "; ".join(filter(None, (ASKED, fired)))
        costs = self._costs(always=bool(fired)) if not waits or fired else None
        if costs is not None and not fired and self._waits(view, paying=True):
            costs = None
        needs_whole = bool((fired or costs is not None) and not self.is_whole and not self.same)
        made: Trim | None = None
        if needs_whole:
            fired = ""
        elif overflow is not None:
            made, more = rescue(self.base, running, context, overflow, costs)
            warnings += more
        else:
            made, fired = self._trimmed(fired, running, costs)
        if made is not None:
            made = unbound(made, self.base, self.history, keeps_loop=self.context.keeps_loop)
        cut, earlier = self.cut, clipped(self.cut.gaps, self.start, self.end) if self.cut is not None else ()
        if made is not None:
            earlier = earlier if self.same else ()
            changed = len(self.base.log.entries) < self.given or bool(made.made) or self.base.touched
            view = self._view(made.draft, changed=changed or bool(made.draft.hidden))
            if costs is not None and overflow is None and costs.prices.source == "assumed":
                warnings += (UNKNOWN_PRICES,)
            warnings += self._missed(made, view)
            cut = self._cut(made, view, costs)
        return Plan(
            policy=self.name,
            version=policy.version,
            cut=cut,
            trimmed=made is not None,
            fired=fired,
            arrivals=(self.base if made is not None else history).log.changes,
            tokens_before=self.tokens,
            tokens_sent=view.tokens,
            view=view.messages,
            warnings=warnings + view.notes,
            decided=self.arrived.decided,
            made=made.made if made is not None else (),
            earlier=earlier,
            messages_before=self.messages,
            target=self.aim if self.aim is not None else _budget(policy, context),
            stable_ends=self._stable_ends(made) if not view.notes else (),
            summary=(made.draft if made is not None else history).summary,
            summary_request=self._request(made, view, costs) if not self.start else None,
            needs_whole=needs_whole,
        )

    def _view(self, left: TrimmedHistory | Draft, *, changed: bool) -> View:
        repairing = self.composed or changed
        return view_of(
            self.entries,
            left.messages,
            left.tokens,
            self.context,
            repairing=repairing,
            summary=left.summary,
            hidden=left.hidden,
        )

    def _fired(self, view: View) -> str:
        trigger = self.policy.trigger
        if self.overflow is not None:
            return f"overflow: more than {self.aim} tokens may be too many"
        if trigger is None:
            return ""
        counted = trigger.tool_calls is not None
        size = view.size if counted else Size(tokens=view.tokens, messages=len(view.messages))
        return trigger.fired(size, self.context, self.cut, self.aim)

    def _waits(self, view: View, *, paying: bool = False) -> bool:
        """Tell whether a trim waits for the next user message, since it would invalidate reasoning in the view.

        With `paying`, no threshold was crossed, and the trim is only considered because it may pay.
        """
        policy, context, trigger = self.policy, self.context, self.policy.trigger
        if trigger is None or self.overflow is not None or not self.entries:
            return False
        if self._is_bound:
            return True  # even if the view may be too long: upstream counts exactly, and would refuse a trimmed view
        if context.context_window is not None and view.tokens * context.scale > context.context_window:
            return False
        if policy.trim_at == "any" or trigger.every_request or self.entries[-1].message.begins_turn:
            return False
        if max(trigger.shares(view.size, context), default=0.0) > _UNTIMELY:
            return False
        if paying and sum(entry.message.role == "assistant" for entry in self._since_user()) >= _PATIENCE:
            return False
        return any(message.has_reasoning for message in view.messages)

    @property
    def _is_bound(self) -> bool:
        """Whether a tool loop is under way whose reasoning upstream refuses behind a changed prefix."""
        return self.context.binds_loop and bool(self.entries) and self.entries[-1].message.is_result

    def _since_user(self) -> Sequence[Entry]:
        """Return the entries after the newest user message, the last one first."""
        return list(takewhile(lambda entry: not entry.message.begins_turn, reversed(self.entries)))

    def _earlier(self, turns: int) -> int:
        """Return how many of the branch's `turns` requests came before the newest user message.

        Returns 0 if there is no such message, or if gaps after it hide how many replies followed.
        """
        after = self._since_user()
        asked = len(self.entries) - len(after) - 1
        if asked < 0 or self.entries[-1].position - self.entries[asked].position != len(after):
            return 0
        return max(0, turns - sum(entry.message.role == "assistant" for entry in after))

    def _is_asked(self) -> bool:
        """Tell whether a summary that was explicitly requested is ready and not in use yet."""
        made, current = self.context.ready_summary, self.history.summary
        if made is None or not made.asked:
            return False
        if current is not None and current.kind == "model" and made.until <= current.until:
            return False
        draft = draft_of(self.history, self.policy, self.context, self.target)
        return self.policy.summarizing.ready(draft) is not None

    def _costs(self, *, always: bool) -> Costs | None:
        """Return the data for judging a trim by its cost; None if the policy does not use cost, or no check is due.

        With `always` a check is always due.
        """
        policy, context, history = self.policy, self.context, self.history
        if policy.trigger is None or not policy.uses_cost or not context.keeps:
            return None
        entries, tokens = history.log.entries, history.tokens
        if not always:
            total = context.fixed_tokens + summary_tokens(history.summary) + sum(tokens)
            if policy.trigger.cost is None or not is_due(entries, tokens, context, total):
                return None
        sent = self.base.sent_as(history)
        account = account_of(self.entries, self.cut, context, self.tokens)
        return Costs(
            prices=prices_of(context),
            warm=last_reply(entries) is not None and not is_cold(context),
            messages=tuple([message for message, _ in sent]),
            tokens=tuple([count for _, count in sent]),
            summary=history.summary,
            fixed=context.fixed_tokens,
            cached=last_reply(self.base.log.entries) or 0,
            account=account,
            earlier=self._earlier(account.turns),
            reads=reads_of(self.base.log.entries, self.cut.position if self.cut is not None else 0),
        )

    def _trimmed(self, fired: str, policy: Policy, costs: Costs | None) -> tuple[Trim | None, str]:
        if fired:
            made = trim(self.base, policy, self.context, self.target, costs)
            # If only the idle trigger fired and no edit changed anything, the cut stays.
            return (None, "") if fired.startswith(IDLE) and not made.made else (made, fired)
        if costs is not None:
            made = trim(self.base, policy, self.context, self.target, costs, paying=True)
            lost = self._lost_reasoning(made)
            balance = replace(made.balance, loss=made.balance.loss + costs.prices.output * lost)
            if costs.timely(balance, made.draft.tokens):
                words = f"cost: {balance.freed} tokens less for {balance.rewritten} written anew"
                return made, f"{words}, paid back in {costs.paid_back(balance)} requests"
        return None, ""

    def _lost_reasoning(self, made: Trim) -> float:
        """Return about how many tokens of reasoning the model will produce again, since a trim invalidates them.

        Only the newest reasoning of the current turn counts (`_THOUGHT_ANEW`). Older reasoning is no longer needed.
        """
        draft, left = made.draft, unbound(made, self.base, self.history, keeps_loop=self.context.keeps_loop).draft
        start = loop_start(draft.entries)
        pairs = zip(draft.messages[start:], left.messages[start:], strict=True)
        lost = [(was, now) for was, now in pairs if was is not None and was is not now]
        gone = [len(was.raw) - (len(now.raw) if now is not None else 0) for was, now in lost[-_THOUGHT_ANEW:]]
        return sum(gone) / _BYTES

    def _missed(self, made: Trim, view: View) -> tuple[str, ...]:
        """Return warnings if a trim missed its target, or could not summarize anything, with the reason."""
        warnings: tuple[str, ...] = ()
        if self.aim is not None and self.target is not None and view.tokens > self.target:
            # Everything else is protected, or a repair added something.
            above = max(1, round(view.tokens * self.context.scale) - self.aim)
            warnings = (f"target missed: {self.aim + above} tokens are {above} above {self.aim}",)
        is_summed_up = made.request is not None or made.draft.summary != self.base.summary
        if is_summed_up:
            return warnings
        edit = self.policy.summarizer
        if edit is not None and (room := edit.lacking_room(made.draft)) is not None:
            words = f"budget_ratio leaves it {room} tokens, and it takes {LEAST_ROOM}"
            return (*warnings, f"no summary is made: {words}")
        if not is_above(self.policy, self.context, view.size):
            return warnings
        keeping = [edit.keep_rounds for edit in self.policy.edits if isinstance(edit, Summarize)]
        kept = next((last for last in keeping if last and not made.draft.history_before(last)), None)
        if kept is None:
            return warnings
        rounds = sum(each.number > 0 for each in made.draft.rounds[:-1])
        words = f"keep_rounds is {kept}, and there are {rounds} whole rounds"
        return (*warnings, f"nothing could be summed up: {words}; keep_rounds: 0 sums up within a round, too")

    def _cut(self, made: Trim, view: View, costs: Costs | None) -> Cut:
        """Return the cut after a trim. It is at the end of the log, or at the fork if other branches can share it."""
        old, start, draft = self.cut, self.start, made.draft
        place, fork, beyond = self.end, self.context.fork, list[tuple[int, Message]]()
        if fork is not None and self.overflow is None and self._is_shared(made, view, fork):
            place = fork
            beyond = [each for each in draft.remaining() if draft.entries[each[0]].position >= fork]
        below: tuple[Change, ...] = ()
        left: tuple[Gap, ...] = ()
        summary = draft.summary
        if old is not None:
            # The part before `start` was not read. It stays as earlier trims left it.
            below = tuple([change for change in old.changes if change.position < start])
            left = old.gaps if self.same else clipped(old.gaps, 0, start)
            if summary is None and old.summary is not None and self.same:
                summary = old.summary
            elif summary is None and old.summary is not None and start:
                # From `start` on this trim decided anew, so the old summary covers only the part before.
                summary = replace(old.summary, until=min(old.summary.until, start))
        return Cut(
            position=place,
            policy=self.name,
            version=self.policy.version,
            changes=below + made.changes,
            tokens=view.tokens - sum([draft.tokens[at] for at, _ in beyond]),
            messages=len(view.messages) - len(beyond),
            tool_calls=view.size.tool_calls - sum([message.result_count for _, message in beyond]),
            gaps=joined([*left, *made.gaps]),
            summary=summary,
            stale=self._stale(made),
            account=account_after(costs, made.balance, self.tokens) if costs is not None else None,
        )

    def _stale(self, made: Trim) -> tuple[StaleRange, ...]:
        """Return where reasoning is left out after a trim."""
        stale = [] if made.stale is None else [made.stale]
        for each in self.cut.stale if self.cut is not None else ():
            # The part before `start` was not read, so its ranges stay. Behind it, a new version has started over.
            stop = each.stop if self.same else min(each.stop, self.start)
            if each.start < stop:
                stale.append(replace(each, stop=stop))
        return joined_ranges(stale)

    def _is_shared(self, made: Trim, view: View, fork: int) -> bool:
        """Tell whether the cut can be at `fork`: the current cut is before it, and nothing after it is changed."""
        if not 0 < fork < self.end or (self.cut is not None and self.cut.position >= fork):
            return False
        if view.notes:  # repairs depend on the whole view
            return False
        reaches = [change.position + 1 for change in made.changes] + [gap.stop for gap in made.gaps]
        reaches += [made.stale.stop] if made.stale is not None else []
        summary = made.draft.summary
        return max(reaches, default=0) <= fork and (summary is None or summary.until <= fork)

    def _stable_ends(self, made: Trim | None) -> tuple[int, ...]:
        """Return where stable parts of the view end: the part left by earlier trims, and the part left by this one.

        No later trim changes a stable part.
        """
        history = self.history
        ends: set[int] = set()
        if history.changes and self.same:
            last = history.changes[-1].position
            first = min((change.position for change in made.made), default=None) if made is not None else None
            # If this trim changed something in the earlier part, that part is not stable.
            if first is None or first > history.log.entries[last].position:
                ends.add(_place_in_view(history, last))
        if made is not None and made.last is not None:
            ends.add(_place_in_view(made.draft, made.last))
        return tuple(sorted(end for end in ends if end > 0))

    def _request(self, made: Trim | None, view: View, costs: Costs | None) -> SummaryRequest | None:
        """Return the summary by a model that should be made now to be ready at the next trim, or None."""
        policy, context, edit = self.policy, self.context, self.policy.summarizer
        if edit is None or (made is not None and made.request is not None):
            return made.request if made is not None else None
        added = tokens_left(policy, edit, context, view.size)
        by_cost = policy.trigger is not None and policy.trigger.cost is not None
        if costs is None if edit.must_pay else added is None and (costs is None or not by_cost):
            return None
        draft = made.draft if made is not None else draft_of(self.history, policy, context, self.target)
        return requested_in_time(draft, edit, added, costs)


def _is_split(cut: Cut, start: int) -> bool:
    """Tell whether calls from `start` on are folded into a message before it, which the client's window left out."""
    return start > 0 and any(gap.edit == CLEAR_TOOL_RESULTS and gap.start <= start < gap.stop for gap in cut.gaps)


def requested_in_time(draft: Draft, edit: Summarize, added: int | None, costs: Costs | None) -> SummaryRequest | None:
    """Return the summary that should be ready at the next trim, or None if none is worth it.

    `added` is the number of tokens until the trigger fires. None means that this is far off: then the summary must
    pay for itself.
    """
    request = edit.request(draft, added=added or 0)
    if request is None or (added is not None and not edit.must_pay):
        return request
    if costs is None:
        return None
    imagined = edit.imagined(draft, request)
    return request if costs.summary_pays(draft, imagined, costs.balance(draft)) else None


def tokens_left(policy: Policy, edit: Summarize, context: PlanningContext, size: Size) -> int | None:
    """Return about how many tokens are left until the trigger fires; None if that is far off."""
    trigger = policy.trigger
    tokens = size.tokens * context.scale
    if trigger is None or (edit.upper is not None and tokens <= edit.soft * edit.upper):
        return None
    if edit.when is not None and any(share <= edit.soft for share in edit.when.shares(size, context)):
        return None
    until_upper = int(edit.upper / context.scale) - size.tokens if edit.upper is not None else 0
    nearest = max(trigger.shares(size, context), default=None)
    if trigger.every_request or (nearest is None and edit.upper is not None):
        return max(0, until_upper)
    if nearest is None or nearest <= edit.soft:  # the trigger has no threshold of size, or it is too early
        return None
    return max(0, until_upper, int(size.tokens / nearest) - size.tokens)


def is_due(entries: Sequence[Entry], tokens: Sequence[int], context: PlanningContext, total: int) -> bool:
    """Tell whether a trim should be judged by its cost now. `tokens` are by place, `total` is the whole view."""
    if not entries:
        return False  # only instructions
    if is_cold(context):
        return True
    if total < _SMALLEST:
        return False
    replied = last_reply(entries)
    return due(total, total - sum(tokens[replied:]) if replied is not None else 0)


def due(view: int, last: int) -> bool:
    """Tell whether a trim should be tried out: the view crossed a step of growth (5 %) since the `last` request."""
    if view < _SMALLEST:
        return False
    return last < _SMALLEST or int(log(view) / _STEP) > int(log(last) / _STEP)


def is_cold(context: PlanningContext) -> bool:
    """Tell whether the provider's cache no longer holds what was sent last."""
    return context.idle is not None and context.idle > (context.prices or ASSUMED).lifetime


def last_reply(entries: Sequence[Entry]) -> int | None:
    """Return the place of the newest assistant message, or None."""
    for place in range(len(entries) - 1, -1, -1):
        if entries[place].message.role == "assistant":
            return place
    return None


def _budget(policy: Policy, context: PlanningContext) -> int | None:
    """Return the target of a policy that has none of its own: the budget that its edits keep to, or None."""
    return policy.budget.within(context.context_window) if policy.budget is not None else None


def _place_in_view(left: TrimmedHistory | Draft, last: int) -> int:
    """Return the number of messages of the view up to the place `last`, inclusive."""
    lead = left.summary is not None and left.summary.role != "merge"
    more = sum([each.messages for place, each in left.hidden.items() if place <= last])
    return lead + more + sum([message is not None for message in left.messages[: last + 1]])


# ----------------------------------------------------------------------------------------------- the view


class View(Struct, frozen=True, kw_only=True):
    """A view with its size."""

    messages: tuple[Message, ...]
    tokens: int  # including instructions, tools, and a summary that is merged into the instructions
    notes: tuple[str, ...] = ()

    @property
    def size(self) -> Size:
        """The size with its tool results. They are counted by parsing each message, so this is not cheap."""
        calls = sum([message.result_count for message in self.messages])
        return Size(tokens=self.tokens, messages=len(self.messages), tool_calls=calls)


def view_of(
    entries: Sequence[Entry],
    messages: Sequence[Message | None],
    tokens: Sequence[int],
    context: PlanningContext,
    *,
    repairing: bool,
    summary: Summary | None = None,
    hidden: Mapping[int, Hidden] = MappingProxyType({}),
) -> View:
    """Return the view of a log: `messages` are what is left of `entries`, by place, with their `tokens`.

    Hidden rounds are inserted by place; the tokens of the message there include them. The repair sees only the calls
    that the client saw. A message that is repaired loses its hidden rounds.
    """
    total = context.fixed_tokens + sum(tokens)
    standing = tuple([message for message in messages if message is not None])
    lead: tuple[Message, ...] = ()
    if summary is not None:
        total += summary.tokens
        if summary.role != "merge":
            lead = (summary.message(entries[0].message.dialect),)
    if not repairing:
        return View(messages=lead + standing, tokens=total)
    repaired = standing[0].dialect.repair(standing) if standing else Repaired(messages=(), notes=(), sources=())
    sent = _spliced(messages, repaired, hidden) if hidden else repaired.messages
    if repaired.notes:
        counts = [count for message, count in zip(messages, tokens, strict=True) if message is not None]
        pairs = zip(repaired.messages, repaired.sources, strict=True)
        after = [context.count(message) if source is None else counts[source] for message, source in pairs]
        total += sum(after) - sum(tokens)
    return View(messages=lead + sent, tokens=total, notes=repaired.notes)


def _spliced(
    messages: Sequence[Message | None], repaired: Repaired, hidden: Mapping[int, Hidden]
) -> tuple[Message, ...]:
    """Return the repaired messages, with the hidden rounds of those that needed no repair inserted."""
    places = [place for place, message in enumerate(messages) if message is not None]
    sent: list[Message] = []
    for message, source in zip(repaired.messages, repaired.sources, strict=True):
        beside = hidden.get(places[source]) if source is not None else None
        if beside is None:
            sent.append(message)
        else:
            sent += (*beside.before, beside.reply or message, *beside.after)
    return tuple(sent)


def merged(instructions: Sequence[Message], summary: Summary, dialect: Dialect) -> tuple[Message, ...]:
    """Return the instructions with the summary appended to the last one; without instructions, the summary alone."""
    if not instructions:
        return (summary.message(dialect),)
    *ahead, last = instructions
    return (*ahead, last.with_appended(summary.text))

"""What an edit looks at: the log as it stands after the edits before it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from msgspec import Struct
from msgspec.structs import replace

from proxy.conversation import Round
from proxy.dialects import Call, Message, Span
from proxy.trimming.model import Change, Count, Entry, Gap, Hidden, ReadySummary, Size, StaleRange, Summary
from proxy.trimming.settings import Target


class Result(Struct, frozen=True, kw_only=True):
    """A tool result that still stands."""

    place: int
    index: int  # which of the results of its message it is
    message: Message  # the message, or what it would be with this result alone
    original: Message  # the same of what arrived
    ref: str  # the name under which the original can be read again
    tokens: int  # tokens of the original
    span: Span
    call: Call | None  # the call that it answers, as it was before any trimming; None where it answers none

    @property
    def tool(self) -> str:
        """Name of the tool; empty where neither call nor result names it."""
        return (self.call.name if self.call is not None else "") or self.message.name


class Draft(Struct, frozen=True, kw_only=True):
    """The log without its gaps, what now stands at each place of it, and what must not be touched."""

    entries: tuple[Entry, ...]
    messages: tuple[Message | None, ...]  # what stands at each position now; None where it was removed
    tokens: tuple[int, ...]  # tokens of what stands there, hidden rounds included; 0 where nothing does
    spans: tuple[Span, ...]  # spans of the log, whatever was removed from it
    rounds: tuple[Round, ...]  # rounds of the log; the last one is the current one, the others are history
    protected: frozenset[int]  # positions that no edit may touch; a span is protected as a whole or not at all
    count: Count  # counts the tokens of a message that an edit made
    cuttable: frozenset[int] = frozenset()  # protected positions whose tool results may be shortened all the same
    fixed_tokens: int = 0  # tokens of what is sent beside the log
    target: int | None = None  # how many tokens may be sent; None where no limit is set and each edit runs once
    made_by: tuple[tuple[str, ...], ...] = ()  # by place the types of all edits that made what stands there
    summary: Summary | None = None  # what is sent in the place of what an edit summed up
    agent: str | None = None  # name of the agent that asks
    context_window: int | None = None  # tokens that the model takes, where known, as upstream counts them
    scale: float = 1.0  # how many tokens upstream counts for one that is counted here
    ready_summary: ReadySummary | None = None  # the newest summary by a model that may be used; None without one
    gaps: tuple[Gap, ...] = ()  # what earlier trims dropped: it is no part of the log that is looked at
    hidden: Mapping[int, Hidden] = {}  # by place what the client was not shown; a message that changes loses it
    dear: float = 0.0  # price of a cached token, relative to that from which trims keep more; 2 at most
    tight: bool = False  # whether a summary by a model must make it smaller: nothing after it would make room for more

    @property
    def end(self) -> int:
        """Number of messages that the branch has."""
        return self.position(len(self.entries))

    def position(self, place: int) -> int:
        """Return the position of the message at a place, or of what comes after the last one."""
        if place < len(self.entries):
            return self.entries[place].position
        return self.entries[-1].position + 1 if self.entries else 0

    @property
    def total(self) -> int:
        """Tokens of what stands there, with those sent beside the log."""
        summed = self.summary.tokens if self.summary is not None else 0
        return self.fixed_tokens + summed + sum(self.tokens)

    @property
    def size(self) -> Size:
        """How much would be sent."""
        left = [message for message in self.messages if message is not None]
        left += [message for hidden in self.hidden.values() for message in (*hidden.before, *hidden.after)]
        return Size(tokens=self.total, messages=len(left), tool_calls=sum(message.result_count for message in left))

    def within(self, target: Target | None = None) -> bool:
        """Tell whether no more is sent than `target`, or else the draft's own target; False without one."""
        limit = self.limit(target)
        return limit is not None and self.total <= limit

    def limit(self, target: Target | None) -> int | None:
        """Return a target in tokens as they are counted here: the draft's own where None is given."""
        if target is None:
            return self.target
        tokens = target.within(self.context_window)
        return None if tokens is None else int(tokens / self.scale)

    def remaining(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Message]]:
        """Yield place and message of what still stands from `start` to before `stop`."""
        for position in range(start, len(self.messages) if stop is None else stop):
            message = self.messages[position]
            if message is not None:
                yield position, message

    def free(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Message]]:
        """Yield the same of what no protection covers."""
        return (each for each in self.remaining(start, stop) if each[0] not in self.protected)

    def results(self) -> Iterator[Result]:
        """Yield the tool results that still stand, each with the call that it answers."""
        for span in self.spans:
            standing = [each for each in self.remaining(span.start, span.stop) if each[1].is_result]
            calls = by_id(calls_in(self.entries, span)) if standing else {}
            for place, message in standing:
                for index, result, entry in results_of(message, self.entries[place]):
                    yield Result(
                        place=place,
                        index=index,
                        message=result,
                        original=entry.message,
                        ref=entry.ref,
                        tokens=entry.tokens,
                        span=span,
                        call=answered_by(result, calls),
                    )

    def history_before(self, last: int) -> int:
        """Return where the newest `last` rounds of the history begin; 0 where there are no more.

        The current round is no history, nor is what precedes the first user message.
        """
        history = [each for each in self.rounds[:-1] if each.number > 0]
        if len(history) <= last:
            return 0
        return history[-last].start if last else self.rounds[-1].start

    def removing(self, position: int, edit: str, reason: str) -> Change:
        """Return the change that takes away what stands at `position`."""
        before = self.tokens[position]
        return Change(position=position, edit=edit, reason=reason, message=None, tokens_before=before, tokens_after=0)

    def replacing(self, position: int, edit: str, reason: str, message: Message) -> Change:
        """Return the change that puts `message` in the place of what stands at `position`."""
        return Change(
            position=position,
            edit=edit,
            reason=reason,
            message=message,
            tokens_before=self.tokens[position],
            tokens_after=self.count(message),
        )

    def replacing_results(self, position: int, edit: str, reason: str, results: Mapping[int, Message | None]) -> Change:
        """Return the change that puts these in the place of results of what stands at `position`, by their indexes.

        With None a result goes; what stands beside them stays. The message is made and counted once.
        """
        whole = cast("Message", self.messages[position])  # it stands: it has results
        made = whole.with_results([results.get(index, each) for index, each in enumerate(whole.results)])
        return self.removing(position, edit, reason) if made is None else self.replacing(position, edit, reason, made)

    def reducing(self, position: int, edit: str, reason: str, message: Message) -> Change:
        """Return the change to a `message` with fewer calls, which goes if nothing is left of it."""
        if message.calls or message.has_content:
            return self.replacing(position, edit, reason, message)
        return self.removing(position, edit, reason)

    def after(self, changes: Sequence[Change], summary: Summary | None = None) -> Draft:
        """Return the draft as it is after these changes; a `summary` takes the place of an earlier one."""
        messages, tokens = overlay(self.messages, self.tokens, changes)
        made_by = list(self.made_by) or [()] * len(self.messages)
        for change in changes:
            made_by[change.position] += (change.edit,)
        changed = {change.position for change in changes}
        hidden = {place: rounds for place, rounds in self.hidden.items() if place not in changed}
        made, summary = tuple(made_by), summary or self.summary
        return replace(self, messages=messages, tokens=tokens, made_by=made, summary=summary, hidden=hidden)


def calls_in(entries: Sequence[Entry], span: Span) -> list[Call]:
    """Return the calls of a span. They are those of its first message, but where the provider runs something in it."""
    return [call for entry in entries[span.start : span.stop] for call in entry.message.calls]


def by_id(calls: Sequence[Call]) -> dict[str, Call]:
    """Return calls by the id that a result names, that of the older form under ""; of those of one id the first."""
    return {call.id: call for call in reversed(calls) if call.id or call.legacy}


def answered_by(result: Message, calls: Mapping[str, Call]) -> Call | None:
    """Return which of the calls `by_id` a result answers; None where it answers none."""
    found = (calls.get(each) for each in (*result.answered, ""))
    return next((call for call in found if call is not None and result.answers_call(call)), None)


def results_of(message: Message, entry: Entry) -> Iterator[tuple[int, Message, Entry]]:
    """Yield the results of a message that stands for `entry`: index, result, the entry as if it held this one alone.

    The ref of one among several says which it is.
    """
    results, originals = message.results, entry.message.results
    if len(results) == 1 and len(originals) == 1 and results[0] is message:
        yield 0, message, entry
        return
    known = {original.answers: place for place, original in enumerate(originals)}
    size = max(sum([len(original.raw) for original in originals]), 1)
    for index, result in enumerate(results):
        place = known.get(result.answers, index)
        original = originals[place]
        tokens = entry.tokens * len(original.raw) // size
        ref = entry.ref if len(originals) == 1 else f"{entry.ref}-{place + 1}"
        yield index, result, replace(entry, message=original, tokens=tokens, ref=ref)


def overlay(
    messages: Sequence[Message | None], tokens: Sequence[int], changes: Iterable[Change]
) -> tuple[tuple[Message | None, ...], tuple[int, ...]]:
    """Return messages and tokens with the changes made, in their order."""
    placed, counted = list(messages), list(tokens)
    for change in changes:
        placed[change.position], counted[change.position] = change.message, change.tokens_after
    return tuple(placed), tuple(counted)


def clipped(gaps: Iterable[Gap], start: int, stop: int) -> tuple[Gap, ...]:
    """Return what of the gaps lies from `start` to before `stop`."""
    parts = ((max(gap.start, start), min(gap.stop, stop), gap) for gap in gaps)
    return tuple([gap.part(first, end - first) for first, end, gap in parts if first < end])


def joined_ranges(stretches: Iterable[StaleRange]) -> tuple[StaleRange, ...]:
    """Return stretches in order; those that meet become one."""
    found: list[StaleRange] = []
    for each in sorted(stretches, key=lambda each: each.start):
        if found and each.start <= found[-1].stop:
            found[-1] = StaleRange(start=found[-1].start, stop=max(found[-1].stop, each.stop))
        else:
            found.append(each)
    return tuple(found)

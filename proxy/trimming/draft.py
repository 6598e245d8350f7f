"""The draft that an edit reads: the log as the edits before it left it."""

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
    """A tool result that has not been removed."""

    place: int
    index: int  # its index among the results of its message
    message: Message  # the message as if this were its only result
    original: Message  # the same for the message as it arrived
    ref: str  # the name under which the original can be read again
    tokens: int  # tokens of the original
    span: Span
    call: Call | None  # the call that it answers, as it was before any trimming; None if it answers none

    @property
    def tool(self) -> str:
        """Name of the tool; empty if neither the call nor the result names it."""
        return (self.call.name if self.call is not None else "") or self.message.name


class Draft(Struct, frozen=True, kw_only=True):
    """The log without its gaps, the message to be sent at each place, and the places that must not be changed."""

    entries: tuple[Entry, ...]
    messages: tuple[Message | None, ...]  # by place the current message; None if it was removed
    tokens: tuple[int, ...]  # by place the tokens of that message with its hidden rounds; 0 if it was removed
    spans: tuple[Span, ...]  # spans of the original log, including removed ones
    rounds: tuple[Round, ...]  # rounds of the original log; the last one is current, the others are history
    protected: frozenset[int]  # places that no edit may change; a span is protected as a whole or not at all
    count: Count  # counts the tokens of a message that an edit made
    cuttable: frozenset[int] = frozenset()  # protected places whose tool results may be shortened nevertheless
    fixed_tokens: int = 0  # tokens of instructions and tools
    target: int | None = None  # maximum tokens; None if there is no limit and each edit runs once
    made_by: tuple[tuple[str, ...], ...] = ()  # by place the types of all edits that made the current message
    summary: Summary | None = None  # the summary that is sent in front of the messages
    agent: str | None = None  # name of the requesting agent
    context_window: int | None = None  # the model's context window in tokens as upstream counts them, if known
    scale: float = 1.0  # upstream's token count divided by ours
    ready_summary: ReadySummary | None = None  # the newest summary by a model that may be used; None if there is none
    gaps: tuple[Gap, ...] = ()  # messages that earlier trims dropped; they are not among `entries`
    hidden: Mapping[int, Hidden] = {}  # by place the hidden rounds; a message that changes loses them
    dear: float = 0.0  # price of a cached token divided by `cost.DEAR`, at most 2; from 1 on trims keep more
    tight: bool = False  # whether a summary by a model must be smaller than what it replaces: no later edit makes room

    @property
    def end(self) -> int:
        """The number of messages in the branch."""
        return self.position(len(self.entries))

    def position(self, place: int) -> int:
        """Return the position of the message at a place; for the place after the last one, the next position."""
        if place < len(self.entries):
            return self.entries[place].position
        return self.entries[-1].position + 1 if self.entries else 0

    @property
    def total(self) -> int:
        """Tokens of the whole view, including instructions and tools."""
        summed = self.summary.tokens if self.summary is not None else 0
        return self.fixed_tokens + summed + sum(self.tokens)

    @property
    def size(self) -> Size:
        """The size of the view."""
        left = [message for message in self.messages if message is not None]
        left += [message for hidden in self.hidden.values() for message in (*hidden.before, *hidden.after)]
        return Size(tokens=self.total, messages=len(left), tool_calls=sum(message.result_count for message in left))

    def within(self, target: Target | None = None) -> bool:
        """Tell whether the view is within `target`, or by default the draft's own target; False without a target."""
        limit = self.limit(target)
        return limit is not None and self.total <= limit

    def limit(self, target: Target | None) -> int | None:
        """Return a target in tokens as they are counted here; by default the draft's own target."""
        if target is None:
            return self.target
        tokens = target.within(self.context_window)
        return None if tokens is None else int(tokens / self.scale)

    def remaining(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Message]]:
        """Yield (place, message) of the messages that remain from `start` to before `stop`."""
        for position in range(start, len(self.messages) if stop is None else stop):
            message = self.messages[position]
            if message is not None:
                yield position, message

    def free(self, start: int = 0, stop: int | None = None) -> Iterator[tuple[int, Message]]:
        """Yield (place, message) of the remaining messages that are not protected."""
        return (each for each in self.remaining(start, stop) if each[0] not in self.protected)

    def results(self) -> Iterator[Result]:
        """Yield the remaining tool results, each with the call that it answers."""
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
        """Return the place where the newest `last` rounds of the history begin; 0 if the history has no more than that.

        The current round and the messages before the first user message do not belong to the history.
        """
        history = [each for each in self.rounds[:-1] if each.number > 0]
        if len(history) <= last:
            return 0
        return history[-last].start if last else self.rounds[-1].start

    def removing(self, position: int, edit: str, reason: str) -> Change:
        """Return the change that removes the message at `position`."""
        before = self.tokens[position]
        return Change(position=position, edit=edit, reason=reason, message=None, tokens_before=before, tokens_after=0)

    def replacing(self, position: int, edit: str, reason: str, message: Message) -> Change:
        """Return the change that puts `message` at `position`."""
        return Change(
            position=position,
            edit=edit,
            reason=reason,
            message=message,
            tokens_before=self.tokens[position],
            tokens_after=self.count(message),
        )

    def replacing_results(self, position: int, edit: str, reason: str, results: Mapping[int, Message | None]) -> Change:
        """Return the change that replaces results of the message at `position`; `results` maps index to replacement.

        None removes a result. Other content of the message stays. The new message is made and counted once.
        """
        whole = cast("Message", self.messages[position])  # never None: it has results
        made = whole.with_results([results.get(index, each) for index, each in enumerate(whole.results)])
        return self.removing(position, edit, reason) if made is None else self.replacing(position, edit, reason, made)

    def reducing(self, position: int, edit: str, reason: str, message: Message) -> Change:
        """Return the change to a `message` with fewer calls. It is removed if nothing is left in it."""
        if message.calls or message.has_content:
            return self.replacing(position, edit, reason, message)
        return self.removing(position, edit, reason)

    def after(self, changes: Sequence[Change], summary: Summary | None = None) -> Draft:
        """Return the draft after these changes. A `summary` replaces an earlier one."""
        messages, tokens = overlay(self.messages, self.tokens, changes)
        made_by = list(self.made_by) or [()] * len(self.messages)
        for change in changes:
            made_by[change.position] += (change.edit,)
        changed = {change.position for change in changes}
        hidden = {place: rounds for place, rounds in self.hidden.items() if place not in changed}
        made, summary = tuple(made_by), summary or self.summary
        return replace(self, messages=messages, tokens=tokens, made_by=made, summary=summary, hidden=hidden)


def calls_in(entries: Sequence[Entry], span: Span) -> list[Call]:
    """Return the calls of a span. Most are in its first message; tools that the provider runs may add later ones."""
    return [call for entry in entries[span.start : span.stop] for call in entry.message.calls]


def by_id(calls: Sequence[Call]) -> dict[str, Call]:
    """Return calls by the id that results refer to; of equal ids the first. A legacy function call has the key ""."""
    return {call.id: call for call in reversed(calls) if call.id or call.legacy}


def answered_by(result: Message, calls: Mapping[str, Call]) -> Call | None:
    """Return the call that a result answers, or None; `calls` is a mapping made by `by_id`."""
    found = (calls.get(each) for each in (*result.answered, ""))
    return next((call for call in found if call is not None and result.answers_call(call)), None)


def results_of(message: Message, entry: Entry) -> Iterator[tuple[int, Message, Entry]]:
    """Yield (index, result, entry) for each result of a message that is sent for `entry`.

    The result and the entry are as if they held this result alone. If there are several, its number is added to the
    ref.
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
    """Return messages and tokens after the changes, which are applied in order."""
    placed, counted = list(messages), list(tokens)
    for change in changes:
        placed[change.position], counted[change.position] = change.message, change.tokens_after
    return tuple(placed), tuple(counted)


def clipped(gaps: Iterable[Gap], start: int, stop: int) -> tuple[Gap, ...]:
    """Return the parts of the gaps from `start` to before `stop`."""
    parts = ((max(gap.start, start), min(gap.stop, stop), gap) for gap in gaps)
    return tuple([gap.part(first, end - first) for first, end, gap in parts if first < end])


def joined_ranges(stretches: Iterable[StaleRange]) -> tuple[StaleRange, ...]:
    """Return the ranges in order; adjacent and overlapping ones are merged."""
    found: list[StaleRange] = []
    for each in sorted(stretches, key=lambda each: each.start):
        if found and each.start <= found[-1].stop:
            found[-1] = StaleRange(start=found[-1].start, stop=max(found[-1].stop, each.stop))
        else:
            found.append(each)
    return tuple(found)

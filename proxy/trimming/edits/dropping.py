"""The edits that drop whole messages: by rounds, by tool calls, by a token budget, by age, by the internal mark."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Final, Literal, Self

from msgspec import Struct
from pydantic import Field, model_validator

from proxy.dialects import Call, Message, Span
from proxy.dialects.jsontext import is_object
from proxy.trimming.draft import Draft, answered_by, by_id
from proxy.trimming.edits.edit import BaseEdit
from proxy.trimming.model import Change
from proxy.trimming.settings import Natural, Positive, Share, Target


class KeepRounds(BaseEdit, frozen=True):
    """Removes older rounds. The newest whole rounds of the history and the current round stay.

    A round begins with a user message. Messages before the first one are removed with the oldest round. Protected
    messages stay; the rest of their round is removed.
    """

    type: Literal["keep_rounds"] = "keep_rounds"
    """Name of the edit."""
    last: Natural = 10
    """Number of rounds of the history to keep. The current one is not counted."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Remove the messages before the rounds that stay."""
        reason = f"its round is not among the newest {self.last} of the history"
        for place, _ in draft.free(0, draft.history_before(self.last)):
            yield draft.removing(place, self.type, reason)


class _Call(Struct, frozen=True, kw_only=True):
    """One tool call and the places of its results."""

    span: Span
    index: int  # index among the calls of its message
    call: Call
    results: tuple[int, ...]

    @property
    def order(self) -> int:
        """The place of its first result; a missing result is ordered after the others of its span."""
        return self.results[0] if self.results else self.span.stop


class KeepToolCalls(BaseEdit, frozen=True):
    """Removes older tool calls. The newest calls of the history stay, counted by their results.

    A block of parallel calls loses only its older calls. If it has no calls left, its text stays; without text it is
    removed. A call whose result was never recorded counts as one with a result, because a result is inserted for it.
    Only calls that still wait for their results are not counted. Calls by a program that runs at the provider stay,
    because they belong to the program.
    """

    type: Literal["keep_tool_calls"] = "keep_tool_calls"
    """Name of the edit."""
    last: Natural = 3
    """Number of calls to keep."""
    scope: Literal["history", "all"] = "history"
    """Where to count and remove calls. `history` leaves the current round alone. `all` includes it."""
    exclude_tools: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of tools whose calls are neither counted nor removed."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Remove the older calls and their results, block by block."""
        reach = len(draft.messages) if self.scope == "all" or not draft.rounds else draft.rounds[-1].start
        blocks = {span: tuple(_calls(draft, span)) for span in draft.spans if span.start < reach}
        every = (call for calls in blocks.values() for call in calls if call.call.name not in self.exclude_tools)
        # Calls that still wait for their results do not count.
        answered = (call for call in every if call.results or call.span.stop < len(draft.messages))
        counted = sorted(answered, key=lambda call: call.order)
        older = frozenset(counted[: max(0, len(counted) - self.last)])
        for span, calls in blocks.items():
            kept = [call for call in calls if call not in older]
            if len(kept) < len(calls) and span.start not in draft.protected:
                yield from self._reduced(draft, span, kept)

    def _reduced(self, draft: Draft, span: Span, kept: Sequence[_Call]) -> Iterator[Change]:
        reason = f"not among the newest {self.last} tool calls"
        calls = by_id([call.call for call in kept])
        for position, message in draft.remaining(span.start, span.stop):
            if position == span.start:
                reduced = message.with_calls({call.index for call in kept})
                yield draft.reducing(position, self.type, reason, reduced)
            else:
                yield from _leaving_out(
                    draft, position, self.type, reason, lambda result: answered_by(result, calls) is None
                )


def _calls(draft: Draft, span: Span) -> Iterator[_Call]:
    """Yield the calls of a span that results can answer: the first call with each id, and legacy calls."""
    block = draft.messages[span.start]
    if block is None or any(entry.message.role == "assistant" for entry in draft.entries[span.start + 1 : span.stop]):
        return
    results: defaultdict[str, list[tuple[int, Message]]] = defaultdict(list)  # by the ids that they name
    for at, message in draft.remaining(span.start + 1, span.stop):
        for name in {*message.answered, ""}:
            results[name].append((at, message))
    seen: set[str] = set()
    for index, call in enumerate(block.calls):
        if call.legacy or (call.id and call.id not in seen):
            seen.add(call.id)
            answers = tuple(
                [at for at, message in results["" if call.legacy else call.id] if message.answers_call(call)]
            )
            yield _Call(span=span, index=index, call=call, results=answers)


def _leaving_out(
    draft: Draft, position: int, edit: str, reason: str, goes: Callable[[Message], bool]
) -> Iterator[Change]:
    """Yield the change that removes the results of a message for which `goes` is true. Other content stays."""
    message = draft.messages[position]
    results = message.results if message is not None else ()
    gone = {index: None for index, result in enumerate(results) if goes(result)}
    if gone:
        yield draft.replacing_results(position, edit, reason, gone)


class RecentWindow(BaseEdit, frozen=True):
    """Keeps the newest messages that fit into a budget of tokens, and removes the rest.

    An assistant message with its tool calls and all their results is one chain, kept whole or not at all. Protected
    messages always stay and are counted first. The budget is a limit of its own: above it the edit runs even if the
    policy's target is already met.
    """

    type: Literal["recent_window"] = "recent_window"
    """Name of the edit."""
    tokens: Positive | None = None
    """The budget in tokens of messages. Instructions, tools and a summary are not counted."""
    ratio: Share | None = 0.65
    """The budget as a part of what the target leaves after instructions and tools. Used only if `tokens` is unset."""
    target: Target | None = None
    """The target that `ratio` is a part of, instead of the policy's."""
    on_overflow: Literal["skip", "stop"] = "skip"
    """What to do if a chain does not fit. `skip` leaves it out and continues with older ones. `stop` leaves out all
    older ones too."""

    @model_validator(mode="before")
    @classmethod
    def _tokens_take_the_place_of_the_ratio(cls, settings: Any) -> Any:
        if is_object(settings) and settings.get("tokens") is not None and "ratio" not in settings:
            return {**settings, "ratio": None}
        return settings

    @model_validator(mode="after")
    def _says_how_much(self) -> Self:
        if (self.tokens is None) == (self.ratio is None):
            raise ValueError("set one of tokens, ratio")
        return self

    @property
    def lacks_target(self) -> bool:
        """Whether its budget is a part of the policy's target, which must then be set."""
        return self.tokens is None and self.target is None

    @property
    def budget(self) -> Target | None:
        """The target that `ratio` is a part of, if the edit has its own."""
        return self.target

    def is_done(self, draft: Draft) -> bool:
        """Tell whether all messages fit into the budget."""
        budget = self._budget(draft)
        return budget is None or sum(draft.tokens) <= budget

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Remove the spans that do not fit."""
        budget = self._budget(draft)
        if budget is None:
            return
        left = budget - sum(draft.tokens[position] for position in draft.protected)
        reason, stopped = "it is not among the newest that fit into the window", False
        for span in reversed(draft.spans):
            free = [place for place, _ in draft.free(span.start, span.stop)]
            cost = sum(draft.tokens[at] for at in free)
            if cost <= left and not stopped:
                left -= cost
                continue
            stopped = stopped or (bool(free) and self.on_overflow == "stop")
            for position in free:
                yield draft.removing(position, self.type, reason)

    def _budget(self, draft: Draft) -> int | None:
        """Return the budget in tokens; None if it is a part of an unknown target."""
        if self.ratio is None:
            return draft.limit(Target(tokens=self.tokens))
        target = draft.limit(self.target)
        return int(self.ratio * (target - draft.fixed_tokens)) if target is not None else None


class DropOldest(BaseEdit, frozen=True):
    """Removes whole rounds, oldest first, and then the oldest spans of the current round.

    Protected messages stay; the rest of their round is removed. The edit stops as soon as the view is within the
    target: its own, or else the policy's.

    Where a user message at the end stands behind another one, or behind tool results, these are not answered yet. They
    are of the current round, and go last, with their question. OpenClaw, for example, ends each request with a user
    message.
    """

    type: Literal["drop_oldest"] = "drop_oldest"
    """Name of the edit."""
    target: Target | None = None
    """How far this edit goes, instead of the policy's target."""

    @property
    def lacks_target(self) -> bool:
        """Whether it has no target of its own."""
        return self.target is None

    def is_done(self, draft: Draft) -> bool:
        """Tell whether the view is within the edit's own target, or else the policy's."""
        return draft.within(self.target)

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Remove one group after another while the draft is above the target."""
        target, total = draft.limit(self.target), draft.total
        for start, stop, reason in _groups(draft):
            if target is None or total <= target:
                return
            for place, _ in draft.free(start, stop):
                total -= draft.tokens[place]
                yield draft.removing(place, self.type, reason)


def _groups(draft: Draft) -> Iterator[tuple[int, int, str]]:
    """Yield the groups that are dropped together as (start, stop, reason), in their order."""
    unanswered = _unanswered(draft)
    current = min([*unanswered, *[last.start for last in draft.rounds[-1:]]], default=0)
    for past in draft.rounds:
        if past.start < current:
            yield past.start, past.stop, "its round was the oldest"
    of_round = [span for span in draft.spans if span.start >= current]
    for span in sorted(of_round, key=lambda span: span.start in unanswered):
        yield span.start, span.stop, "it was the oldest span of the current round"


def _unanswered(draft: Draft) -> tuple[int, ...]:
    """Return the starts of the spans that a user message at the end stands behind and that the model has not answered.

    This is another user message, or tool results, with the question that led to them.
    """
    messages = [entry.message for entry in draft.entries]
    first = len(messages)
    while first and messages[first - 1].role == "user":
        first -= 1
    if first == len(messages):
        return ()
    if first and messages[first - 1].is_result:
        question = [at for at in range(first) if messages[at].role == "user"][-1:]
        return (*question, *[span.start for span in draft.spans if span.start < first <= span.stop])
    return (len(messages) - 2,) if first < len(messages) - 1 else ()


_MARKED: Final = "it is marked as internal"
_WITH_IT: Final = "its call or result is marked as internal"


class DropInternal(BaseEdit, frozen=True):
    """Removes messages with `is_internal`. A call and its results go together, whichever of them is marked.

    A marked assistant message is removed with the results of its calls. A marked result is removed with its call; the
    other calls of that message and its text stay.
    """

    type: Literal["drop_internal"] = "drop_internal"
    """Name of the edit."""

    def apply(self, draft: Draft) -> Iterator[Change]:
        """Remove the marked messages, span by span."""
        marked = {place for place, entry in enumerate(draft.entries) if entry.is_internal}
        for span in draft.spans:
            if span.start not in draft.protected and not marked.isdisjoint(range(span.start, span.stop)):
                yield from self._without(draft, span, marked)

    def _without(self, draft: Draft, span: Span, marked: set[int]) -> Iterator[Change]:
        """Remove the marked messages of a span, with the calls and results that belong to them."""
        left = list(draft.remaining(span.start, span.stop))
        block = draft.messages[span.start]
        going = [message for at, message in left if at in marked]
        calls = block.calls if block is not None else ()
        ids = {name for result in going for name in result.answered}
        answered = {
            index
            for index, call in enumerate(calls)
            if (call.id and call.id in ids) or (call.legacy and any(result.answers_call(call) for result in going))
        }
        theirs = by_id([calls[index] for index in sorted(answered)])
        for position, message in left:
            if position in marked:
                yield draft.removing(position, self.type, _MARKED)
            elif message is block:
                kept = set(range(len(calls))) - answered
                if len(kept) == len(calls):
                    continue
                yield draft.reducing(position, self.type, _WITH_IT, message.with_calls(kept))
            else:
                yield from _leaving_out(
                    draft,
                    position,
                    self.type,
                    _WITH_IT,
                    lambda result: span.start in marked or answered_by(result, theirs) is not None,
                )

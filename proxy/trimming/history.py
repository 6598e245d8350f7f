"""The log as earlier requests left it: first the decisions of `on_arrival` are applied, then the current cut.

The `on_arrival` edits decide about a tool result the first time it is sent. The decision is recorded and repeated
from then on, so that a message keeps its bytes.

Dropped messages are recorded as gaps: whole spans, ordered by position, without overlap.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Final, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from proxy.conversation import span_start
from proxy.dialects import Call, Message, Span
from proxy.trimming.draft import by_id, overlay
from proxy.trimming.model import Change, Cut, Entry, Gap, Hidden, PlanningContext, Size, StaleRange, Summary
from proxy.trimming.policy import Policy

_Item = TypeVar("_Item")

KEPT_APART: Final = 8  # so many adjacent gaps keep their own reasons; if there are more, the oldest are merged

_POSITION: Final[Callable[[Entry], int]] = attrgetter("position")
_NOTHING: Final = (float("inf"), Size(tokens=0, messages=0, tool_calls=0))  # sentinel after the last missing part


class Arrived(Struct, frozen=True, kw_only=True):
    """The log, or a part of it, after `on_arrival`."""

    entries: tuple[Entry, ...]  # the messages as they would be sent if nothing were trimmed, by position
    messages: tuple[Message | None, ...]  # the message sent for each; None if a recorded decision removed it
    tokens: tuple[int, ...]  # tokens of that message with its hidden rounds
    decided: tuple[tuple[Change, ...], ...]  # for each entry the decisions: recorded ones, or new if it is sent first

    @property
    def changes(self) -> tuple[Change, ...]:
        """All decisions, by position."""
        return tuple([change for each in self.decided for change in each])

    @property
    def hidden(self) -> dict[int, Hidden]:
        """By place the hidden rounds, even if the message there was changed or removed."""
        return {place: entry.hidden for place, entry in enumerate(self.entries) if entry.hidden is not None}

    def without(self, gaps: Sequence[Gap]) -> Arrived:
        """Return the part of the log that is in none of the gaps."""
        if not gaps:
            return self
        entries = self.entries
        left = outside_gaps(range(len(entries)), gaps, lambda place: entries[place].position)
        return Arrived(
            entries=tuple([entries[place] for place in left]),
            messages=tuple([self.messages[place] for place in left]),
            tokens=tuple([self.tokens[place] for place in left]),
            decided=tuple([self.decided[place] for place in left]),
        )


class TrimmedHistory(Struct, frozen=True, kw_only=True):
    """The log without its gaps, and the message that is sent at each place."""

    log: Arrived
    messages: tuple[Message | None, ...]
    tokens: tuple[int, ...]
    changes: tuple[Change, ...] = ()  # changes of this log's messages by earlier trims, by place
    summary: Summary | None = None
    hidden: Mapping[int, Hidden] = {}  # by place the hidden rounds that are sent with this log's messages
    gaps: tuple[Gap, ...] = ()  # messages that earlier trims dropped; `log` does not hold them
    stale: tuple[StaleRange, ...] = ()  # where reasoning is left out
    windowed: bool = False  # whether the log is the client's own window, which will soon lose its first message

    @property
    def touched(self) -> bool:
        """Whether any message is not sent as it arrived."""
        return bool(self.changes or self.summary or self.hidden or self.log.changes or self.stale)

    @property
    def made_by(self) -> tuple[tuple[str, ...], ...]:
        """For each place the types of the edits that made its message, in the order in which they ran."""
        made = [tuple([change.edit for change in changes]) for changes in self.log.decided]
        for change in self.changes:
            made[change.position] += (change.edit,)
        return tuple(made)

    def sent_as(self, sent: TrimmedHistory) -> list[tuple[Message | None, int]]:
        """Return for each place of this log the (message, tokens) that `sent`, the history in force, sends for it."""
        if sent.log is self.log:
            return list(zip(sent.messages, sent.tokens, strict=True))
        places = {entry.position: place for place, entry in enumerate(sent.log.entries)}
        found = [places.get(entry.position) for entry in self.log.entries]
        return [(None, 0) if at is None else (sent.messages[at], sent.tokens[at]) for at in found]


def arrive(
    entries: Sequence[Entry], policy: Policy, context: PlanningContext, missing: Sequence[tuple[int, Size]] = ()
) -> Arrived:
    """Repeat the recorded decisions of `on_arrival`, and decide about new messages.

    `missing` lists parts of the log that `entries` lacks, each as (position after it, size).
    """
    if policy.on_arrival and any(entry.arrival is None for entry in entries):
        decided = tuple(_decided(entries, policy, context, missing))
    else:
        decided = tuple([entry.arrival or () for entry in entries])
    messages: list[Message | None] = [entry.message for entry in entries]
    tokens = [entry.tokens if entry.hidden is None else entry.tokens + entry.hidden.tokens for entry in entries]
    if any(decided):
        for place, changes in enumerate(decided):
            for change in changes:
                messages[place], tokens[place] = change.message, change.tokens_after
    return Arrived(entries=tuple(entries), messages=tuple(messages), tokens=tuple(tokens), decided=decided)


def trimmed_history(arrived: Arrived, cut: Cut | None, start: int = 0) -> TrimmedHistory:
    """Return the log as `cut` leaves it; the log is given from position `start` on."""
    if cut is None:
        hidden = {place: each for place, each in arrived.hidden.items() if not arrived.decided[place]}
        return TrimmedHistory(
            log=arrived, messages=arrived.messages, tokens=arrived.tokens, hidden=hidden, windowed=start > 0
        )
    log, summary = arrived.without(cut.gaps), cut.summary
    places = {entry.position: place for place, entry in enumerate(log.entries)}
    changes = tuple([change.at(places[change.position]) for change in cut.changes if change.position in places])
    messages, tokens = overlay(log.messages, log.tokens, changes)
    changed = {change.position for change in changes}
    hidden = {place: each for place, each in log.hidden.items() if place not in changed and not log.decided[place]}
    if cut.stale:
        bound = [
            at for at, entry in enumerate(log.entries) if any(s.start <= entry.position < s.stop for s in cut.stale)
        ]
        messages, hidden = without_reasoning(messages, hidden, bound)
    return TrimmedHistory(
        log=log,
        messages=messages,
        tokens=tokens,
        changes=changes,
        # A summary that ends before `start` covers only messages that the client itself left out.
        summary=summary if summary is not None and summary.until > start else None,
        hidden=hidden,
        gaps=cut.gaps,
        stale=cut.stale,
        windowed=start > 0,
    )


def without_reasoning(
    messages: Sequence[Message | None], hidden: Mapping[int, Hidden], places: Iterable[int]
) -> tuple[tuple[Message | None, ...], dict[int, Hidden]]:
    """Return messages and hidden rounds without the reasoning at these places."""
    left, beside = list(messages), dict(hidden)
    for place in places:
        message = left[place]
        left[place] = message.without_reasoning() if message is not None else None
        if (rounds := beside.get(place)) is not None:
            before = [each.without_reasoning() for each in rounds.before]
            beside[place] = replace(
                rounds,
                before=tuple([each for each in before if each is not None]),
                reply=rounds.reply.without_reasoning() if rounds.reply is not None else None,
            )
    return tuple(left), beside


def _decided(
    entries: Sequence[Entry], policy: Policy, context: PlanningContext, missing: Sequence[tuple[int, Size]]
) -> Iterator[tuple[Change, ...]]:
    originals = [entry.message for entry in entries]
    blocks = ResultBlocks(originals, policy)
    # To count results, each message is parsed. Skipped unless an edit has a condition on `tool_calls`.
    counting = any(edit.when is not None and edit.when.tool_calls is not None for edit in policy.on_arrival)
    tokens, count, calls = context.fixed_tokens, 0, 0
    absent = iter(missing)
    stop, size = next(absent, _NOTHING)
    run, following = 0, None
    for place, entry in enumerate(entries):
        if entry.position != following:
            run = place
        following = entry.position + 1
        while stop <= entry.position:
            tokens, count, calls = tokens + size.tokens, count + size.messages, calls + size.tool_calls
            stop, size = next(absent, _NOTHING)
        tokens, count = tokens + entry.tokens, count + 1
        if counting:
            calls += entry.message.result_count
        if entry.arrival is not None:
            yield entry.arrival
        elif not entry.message.is_result or blocks.is_pinned(place, run):
            yield ()
        else:
            size_then = Size(tokens=tokens, messages=count, tool_calls=calls)
            yield tuple(_new(entry, blocks.before(place, run), size_then, policy, context))


class ResultBlocks:
    """Finds the message that a block of tool results follows. Ask with rising places: no message is read twice."""

    def __init__(self, messages: Sequence[Message], policy: Policy) -> None:
        self._messages = messages
        self._policy = policy
        self._known = -1  # the place of the last look-up
        self._block = 0  # the place of the message that the results there follow
        self._calls: dict[str, Call] = {}  # its calls
        self._looked = 0  # messages from the block up to here were checked for pins
        self._fits = False

    def before(self, place: int, floor: int) -> Mapping[str, Call]:
        """Return by id the calls of the message that the results at `place` follow. The search ends at `floor`."""
        self._find(place, floor)
        return self._calls

    def is_pinned(self, place: int, floor: int = 0) -> bool:
        """Tell whether a pin matches the result at `place` or an earlier message of its span, back to `floor`."""
        if not self._policy.pin:
            return False
        self._find(place, floor)
        messages, block = self._messages, self._block
        if block < place and span_start((messages[block], messages[place]), 1):
            return self._policy.pins(messages[place])  # the result is a span of its own
        self._fits = self._fits or any(self._policy.pins(messages[at]) for at in range(self._looked, place + 1))
        self._looked = place + 1
        return self._fits

    def _find(self, place: int, floor: int) -> None:
        start = place
        while start > floor and start != self._known and self._messages[start].is_result:
            start -= 1
        if start != self._known:
            self._block = self._looked = start
            self._calls, self._fits = by_id(self._messages[start].calls), False
        self._known = place


def _new(
    entry: Entry, calls: Mapping[str, Call], size: Size, policy: Policy, context: PlanningContext
) -> Iterator[Change]:
    """Yield the decisions of the policy's edits about a tool result; `size` is the size of the log up to it."""
    message, tokens = entry.message, entry.tokens
    for edit in policy.arrival_edits:
        if edit.when is not None and not edit.when.holds(size, context):
            continue
        shortened = edit.shorten_all(message, entry, calls)
        if shortened is not None and (after := context.count(shortened.message)) < tokens:
            yield Change(
                position=entry.position,
                edit=edit.type,
                reason=shortened.reason,
                message=shortened.message,
                tokens_before=tokens,
                tokens_after=after,
            )
            message, tokens = shortened.message, after


# ----------------------------------------------------------------------------------------------- gaps


def outside_gaps(items: Sequence[_Item], gaps: Iterable[Gap], position: Callable[[_Item], int]) -> list[_Item]:
    """Return the items, ordered by `position`, that lie in none of the gaps."""
    kept: list[_Item] = []
    at = 0
    for gap in gaps:
        start = bisect_left(items, gap.start, at, key=position)
        kept += items[at:start]
        at = bisect_left(items, gap.stop, start, key=position)
    kept += items[at:]
    return kept


def missing_of(entries: Sequence[Entry], gaps: Iterable[Gap], start: int) -> list[tuple[int, Size]]:
    """Return (position after it, size) of each part of a gap from `start` on that is not among the entries."""
    if entries and len(entries) == entries[-1].position + 1 - start:
        return []
    found: list[tuple[int, Size]] = []
    for gap in gaps:
        first = max(gap.start, start)
        given = bisect_left(entries, gap.stop, key=_POSITION) - bisect_left(entries, first, key=_POSITION)
        absent = gap.stop - first - given
        if absent > 0:
            part = gap.part(first, absent)
            found.append((gap.stop, Size(tokens=part.tokens, messages=absent, tool_calls=part.tool_calls)))
    return found


def gaps_of(log: Sequence[Entry], spans: Iterable[Span], changes: Iterable[Change]) -> tuple[list[Gap], set[int]]:
    """Return gaps for the spans that `changes` removed completely, and their places in the log.

    Changes refer to places in the log; those of one place are in order. Gaps refer to positions.
    """
    last = {change.position: change for change in changes}
    removed = {place: change for place, change in last.items() if change.message is None}
    gone: set[int] = set()
    for span in spans:
        inside = range(span.start, span.stop)
        if all(place in removed for place in inside):
            gone.update(inside)
    gaps: list[Gap] = []
    for place in sorted(gone):
        entry, why = log[place], removed[place]
        gap = Gap(
            start=entry.position,
            stop=entry.position + 1,
            edit=why.edit,
            reason=why.reason,
            tokens=entry.tokens,
            tool_calls=entry.message.result_count,
        )
        if gaps and gaps[-1].stop == gap.start and _why(gaps[-1]) == _why(gap):
            gaps[-1] = _together(gaps[-1], gap)
        else:
            gaps.append(gap)
    return gaps, gone


def joined(gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """Return gaps in order. Adjacent ones with equal reasons are merged, and all but the last `KEPT_APART` of a run."""
    runs: list[list[Gap]] = []
    for gap in sorted(gaps, key=attrgetter("start")):
        run = runs[-1] if runs else None
        if run is None or run[-1].stop != gap.start:
            runs.append([gap])
        elif _why(run[-1]) == _why(gap):
            run[-1] = _together(run[-1], gap)
        else:
            run.append(gap)
    return tuple([gap for run in runs for gap in _fewer(run)])


def _fewer(run: Sequence[Gap]) -> Iterator[Gap]:
    """Yield adjacent gaps; if they are too many, the oldest are merged into one."""
    many = len(run) - KEPT_APART
    oldest = run[0]
    for place, gap in enumerate(run[1:], 1):
        if place <= many or _why(oldest) == _why(gap):
            oldest = _together(oldest, gap)
        else:
            yield oldest
            oldest = gap
    yield oldest


def _together(first: Gap, second: Gap) -> Gap:
    """Return two adjacent gaps as one, with the reason of the longer one."""
    tokens, tool_calls = first.tokens + second.tokens, first.tool_calls + second.tool_calls
    told = first if first.messages > second.messages else second
    return replace(told, start=first.start, stop=second.stop, tokens=tokens, tool_calls=tool_calls)


def _why(gap: Gap) -> tuple[str, str]:
    return gap.edit, gap.reason

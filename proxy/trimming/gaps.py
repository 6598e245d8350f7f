"""Gaps: what was dropped, summed up in runs, so that a cut is as long as what is kept.

Gaps are ordered by position and do not overlap. Only whole spans become gaps: of the log without them
every call still has its results. Which edit drops what, and when, is not known here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Final, TypeVar

from proxy.dialects import Span
from proxy.trimming.plan import Change, Entry, Gap
from proxy.trimming.trigger import Size

_Item = TypeVar("_Item")

TOLD_APART: Final = 8
"""Gaps side by side that are kept apart, each with its own reason; of more, the oldest become one."""

_POSITION: Final[Callable[[Entry], int]] = attrgetter("position")


def standing(items: Sequence[_Item], gaps: Iterable[Gap], position: Callable[[_Item], int]) -> list[_Item]:
    """Return the items, ordered by `position`, that lie in none of the gaps."""
    stood: list[_Item] = []
    at = 0
    for gap in gaps:
        start = bisect_left(items, gap.start, at, key=position)
        stood += items[at:start]
        at = bisect_left(items, gap.stop, start, key=position)
    stood += items[at:]
    return stood


def missing(entries: Sequence[Entry], gaps: Iterable[Gap], start: int) -> list[tuple[int, Size]]:
    """Return (position after it, size) of what lies in gaps from `start` on and is not among the entries."""
    if entries and len(entries) == entries[-1].position + 1 - start:
        return []
    found: list[tuple[int, Size]] = []
    for gap in gaps:
        first = max(gap.start, start)
        given = bisect_left(entries, gap.stop, key=_POSITION) - bisect_left(entries, first, key=_POSITION)
        absent = gap.stop - first - given
        if absent > 0:
            part = _part(gap, first, absent)
            found.append((gap.stop, Size(tokens=part.tokens, messages=absent, tool_calls=part.tool_calls)))
    return found


def clipped(gaps: Iterable[Gap], start: int, stop: int) -> tuple[Gap, ...]:
    """Return what of the gaps lies from `start` to before `stop`."""
    parts = ((max(gap.start, start), min(gap.stop, stop), gap) for gap in gaps)
    return tuple([_part(gap, first, end - first) for first, end, gap in parts if first < end])


def gaps_of(
    log: Sequence[Entry], spans: Iterable[Span], changes: Iterable[Change]
) -> tuple[list[Gap], set[int]]:
    """Return gaps for the spans that `changes` removed whole, and their places in the log.

    The changes speak of places in the log, those of one place in their order; the gaps speak of positions.
    """
    last = {change.position: change for change in changes}
    removed = {place: change for place, change in last.items() if change.message is None}
    gone: set[int] = set()
    for span in spans:
        inside = range(span.start, span.stop)
        if all(place in removed for place in inside):
            gone.update(inside)
    found: list[Gap] = []
    run: list[int] = []
    for place in sorted(gone):
        if run and not _goes_on(log, removed, run[-1], place):
            found.append(_gap(log, run, removed[run[0]]))
            run = []
        run.append(place)
    if run:
        found.append(_gap(log, run, removed[run[0]]))
    return found, gone


def joined(gaps: Iterable[Gap]) -> tuple[Gap, ...]:
    """Return gaps in order, those side by side put together where edit and reason are the same.

    However many edits took turns, no more than `TOLD_APART` of them lie side by side afterwards.
    """
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


def _goes_on(log: Sequence[Entry], removed: dict[int, Change], last: int, place: int) -> bool:
    """Tell whether the message at `place` belongs into one gap with the one at `last`."""
    before, now = removed[last], removed[place]
    beside = log[place].position == log[last].position + 1
    return beside and before.edit == now.edit and before.reason == now.reason


def _gap(log: Sequence[Entry], places: Sequence[int], why: Change) -> Gap:
    """Return the messages at these places, which lie side by side, as a gap."""
    entries = [log[place] for place in places]
    return Gap(
        start=entries[0].position,
        stop=entries[-1].position + 1,
        edit=why.edit,
        reason=why.reason,
        tokens=sum([entry.tokens for entry in entries]),
        tool_calls=sum([entry.message.is_result for entry in entries]),
    )


def _fewer(run: Sequence[Gap]) -> Iterator[Gap]:
    """Yield gaps that lie side by side, the oldest as one where they are many."""
    many = len(run) - TOLD_APART
    oldest = run[0]
    for place, gap in enumerate(run[1:], 1):
        if place <= many or _why(oldest) == _why(gap):
            oldest = _together(oldest, gap)
        else:
            yield oldest
            oldest = gap
    yield oldest


def _together(first: Gap, second: Gap) -> Gap:
    """Return two gaps side by side as one, with the reason of the longer one."""
    told = first if first.messages > second.messages else second
    return Gap(
        start=first.start,
        stop=second.stop,
        edit=told.edit,
        reason=told.reason,
        tokens=first.tokens + second.tokens,
        tool_calls=first.tool_calls + second.tool_calls,
    )


def _part(gap: Gap, start: int, messages: int) -> Gap:
    """Return a part of a gap with its share of the sums: what each message had is not known."""
    share = messages / gap.messages
    return Gap(
        start=start,
        stop=start + messages,
        edit=gap.edit,
        reason=gap.reason,
        tokens=round(gap.tokens * share),
        tool_calls=round(gap.tool_calls * share),
    )


def _why(gap: Gap) -> tuple[str, str]:
    return gap.edit, gap.reason

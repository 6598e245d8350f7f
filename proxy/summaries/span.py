"""What a summary is made of: the summary before it on the same branch, and the messages since.

It reads the store, and decides from which summary to go on. It neither asks a model nor judges texts.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from msgspec import Struct

from proxy.dialects import Message
from proxy.store import Store, SummaryRow, SummaryStatus
from proxy.summaries.work import Given, Work

_GUESSES: Final = 3
"""Summaries that are tried, each by reading what lies behind it, before the whole branch is read."""

CountAll = Callable[[Sequence[Message]], list[int]]
"""Counts the tokens of each message."""


class Span(Struct, frozen=True, kw_only=True):
    """The messages of a branch from some place on, and what was made of those before them."""

    start: int
    """Position of the first of `messages`."""
    messages: tuple[Message, ...]
    nodes: tuple[str, ...]
    """Their names."""
    tokens: int
    """Tokens of all messages of the branch up to the last of these."""
    predecessor: SummaryRow | None
    """The summary that covers just what lies before `start`; None where `start` is 0."""

    @property
    def stop(self) -> int:
        """Position after the last message."""
        return self.start + len(self.messages)


class Found(Struct, frozen=True, kw_only=True):
    """What is known of a branch that is to be summed up."""

    reached: SummaryRow | None
    """A summary that is ready and covers all that is wanted."""
    attempt: SummaryRow | None
    """The newest attempt of any outcome on the branch."""
    span: Span | None
    """What is to be summed up; None where `reached` is there, or the branch is not that long (any more)."""


async def found(store: Store, work: Work, count: CountAll) -> Found:
    """Return what is known of the branch, and what a summary up to `work.wanted.stop` is made of.

    Raises:
        StoreUnavailable: it cannot be read.
    """
    recipe = work.edit.recipe
    rows = [row for row in await store.summary_rows(work.key) if row.recipe == recipe]
    if work.given is not None:
        return _found(rows, work, *_given(work.given, count), start=0)
    ready = sorted((row for row in rows if _is_ready(row)), key=_reach, reverse=True)
    for row in ready[:_GUESSES]:
        path = await store.path(work.key, work.tip, below=row.until - 1)
        if path and path[0].node == row.node:
            messages, nodes = tuple(each.message for each in path), tuple(each.node for each in path)
            totals = [each.tokens_total for each in path]
            return _found(rows, work, messages, nodes, totals, start=row.until - 1)
    return _found(rows, work, *await _whole(store, work), start=0)


async def from_the_beginning(store: Store, work: Work, count: CountAll) -> Span | None:
    """Return the span that goes on from no summary; None where the branch is not that long (any more).

    Raises:
        StoreUnavailable: it cannot be read.
    """
    log = _given(work.given, count) if work.given is not None else await _whole(store, work)
    return _found([], work, *log, start=0).span


def _found(
    rows: Sequence[SummaryRow],
    work: Work,
    messages: Sequence[Message],
    nodes: Sequence[str],
    totals: Sequence[int],
    *,
    start: int,
) -> Found:
    """Judge the branch by its end, which begins at position `start`; `rows` are the newest first."""
    stop, names = work.wanted.stop, frozenset(nodes)
    attempt = next((row for row in rows if _is_on(row, names)), None)
    ready = sorted((row for row in rows if _is_ready(row) and row.node in names), key=_reach)
    if ready and ready[-1].until >= stop:
        return Found(reached=ready[-1], attempt=attempt, span=None)
    predecessor = ready[-1] if ready else None
    begin = predecessor.until if predecessor is not None else 0
    if start + len(nodes) < stop or begin < start:
        return Found(reached=None, attempt=attempt, span=None)
    taken = slice(begin - start, stop - start)
    tokens = totals[stop - start - 1]
    return Found(
        reached=None,
        attempt=attempt,
        span=Span(
            start=begin,
            messages=tuple(messages[taken]),
            nodes=tuple(nodes[taken]),
            tokens=tokens,
            predecessor=predecessor,
        ),
    )


def _given(given: Given, count: CountAll) -> tuple[Sequence[Message], Sequence[str], Sequence[int]]:
    totals: list[int] = []
    for tokens in count(given.messages):
        totals.append(tokens + (totals[-1] if totals else 0))
    return given.messages, given.nodes, totals


async def _whole(store: Store, work: Work) -> tuple[Sequence[Message], Sequence[str], Sequence[int]]:
    path = await store.path(work.key, work.tip)
    return [row.message for row in path], [row.node for row in path], [row.tokens_total for row in path]


def _is_on(row: SummaryRow, names: Collection[str]) -> bool:
    return row.node in names or row.tip in names


def _is_ready(row: SummaryRow) -> bool:
    return row.status is SummaryStatus.READY


def _reach(row: SummaryRow) -> int:
    return row.until

"""Which message stands where before some nodes: names and tokens, no texts.

A branch may be very long, and branches share their beginnings: however many nodes are asked for, each
message before them is read about once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection
from itertools import accumulate, chain
from typing import Final

from msgspec import Struct

from proxy.store.database import Connection
from proxy.store.records import Mark
from proxy.store.tree import depths_of, marks_to

_STEP: Final = 64
"""Messages that are read of a branch until a known one is looked for among them; then four times as many."""


class _Run(Struct, frozen=True, kw_only=True):
    """Messages of one branch that follow one another, and what lies below them."""

    start: int
    """Position of the first of them."""
    nodes: list[str]
    totals: list[int]
    """For each, the tokens of the branch up to it, its own included."""
    below: _Run | None
    """Where the message before the first one stands; None where that is the root."""


class Lineage:
    """The branches that end at some nodes."""

    def __init__(self) -> None:
        """Begin with none."""
        self._runs: dict[str, _Run] = {}
        self._depths: dict[str, int] = {}

    def __contains__(self, node: object) -> bool:
        """Tell whether a node is on one of the branches."""
        return node in self._runs

    def depth(self, end: str) -> int:
        """Return the number of messages of the branch that ends at `end`; 0 where there is none."""
        return self._depths.get(end, 0)

    def node_at(self, end: str, position: int) -> str | None:
        """Return the node at a position of the branch that ends at `end`; None where it has no such one."""
        if not 0 <= position < self.depth(end):
            return None
        run = self._run_at(end, position)
        return run.nodes[position - run.start]

    def tokens(self, end: str, start: int, stop: int) -> int:
        """Return the tokens of the messages from `start` to before `stop`, on the branch to `end`."""
        return self._total(end, stop) - self._total(end, start)

    def add(self, end: str, depth: int, marks: list[Mark], below: str | None) -> None:
        """Take in the branch that ends at `end`: `marks` follow `below`, which is known (None: the root)."""
        self._depths[end] = depth
        if not marks:
            return
        start = marks[0].depth - 1
        run = self._runs[below] if below is not None else None
        before = run.totals[start - 1 - run.start] if run is not None else 0
        totals = accumulate((mark.tokens for mark in marks), initial=before)
        next(totals)
        new = _Run(start=start, nodes=[mark.node for mark in marks], totals=list(totals), below=run)
        self._runs.update(dict.fromkeys(new.nodes, new))

    def _total(self, end: str, stop: int) -> int:
        """Return the tokens of the first `stop` messages, of as many as there are."""
        last = min(stop, self.depth(end)) - 1
        if last < 0:
            return 0
        run = self._run_at(end, last)
        return run.totals[last - run.start]

    def _run_at(self, end: str, position: int) -> _Run:
        run = self._runs[end]
        while position < run.start and run.below is not None:
            run = run.below
        return run


def lineage_of(connection: Connection, key: str, ends: Collection[str]) -> Lineage:
    """Return the branches that end at these nodes; those that are not stored are left out."""
    found = Lineage()
    depths = depths_of(connection, key, list(ends))
    # The longest first: it holds most of the others.
    for end, depth in sorted(depths.items(), key=lambda item: -item[1]):
        found.add(end, depth, *_unknown(connection, key, end, depth, found))
    return found


def _unknown(
    connection: Connection, key: str, end: str, depth: int, known: Lineage
) -> tuple[list[Mark], str | None]:
    """Return what of a branch is not known, oldest first, and the node before it that is (None: the root)."""
    parts: list[list[Mark]] = []
    below: str | None = end if end in known else None
    step = _STEP
    while below is None and depth > 0:
        read = marks_to(connection, key, end, below=max(depth - step, 0))
        # What comes before a known one is known too.
        first = bisect_left(read, True, key=lambda mark: mark.node not in known)
        below = read[first - 1].node if first else None
        parts.append(read[first:] if not parts else read[first:-1])
        end, depth, step = read[0].node, max(depth - step, 0), step * 4
    return list(chain.from_iterable(reversed(parts))), below

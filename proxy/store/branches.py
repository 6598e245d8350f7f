"""What was noted about the messages of branches that clients resend, so that each turn reads what is new.

A node's name stands for all that precedes it, and nodes never change: where the name at some place of a
branch is the same, so is everything noted up to there. A session that was deleted and made again is told
by the time of its making.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, TypeAlias

from proxy.store.records import Mark

MARKS: Final = 200_000
"""How many messages are remembered in one process at most: some 60 MB."""

_Branch: TypeAlias = tuple[int, tuple[Mark, ...]]
"""When the session was made, and what was noted about a branch of it, from its root on."""
_NONE: Final[_Branch] = (0, ())


class Branches:
    """The branch of each session that was resent last; those not used for the longest go first.

    Several threads may use it.
    """

    def __init__(self, most: int = MARKS) -> None:
        """Remember `most` messages at most, of all sessions together."""
        self._most: Final = most
        self._branches: OrderedDict[str, _Branch] = OrderedDict()
        self._held = 0
        self._lock = threading.Lock()

    def beginning(self, session: str, created_at: int, names: Sequence[str]) -> tuple[Mark, ...]:
        """Return what is known of the nodes `names`, a branch from its root on, as far as it is known."""
        made_at, known = self._branches.get(session, _NONE)
        return known[: _common(known, names)] if made_at == created_at else ()

    def guess(self, session: str, names: Sequence[str]) -> tuple[int, int]:
        """Return how many of the nodes `names` a session of this name had, and when that was made."""
        made_at, known = self._branches.get(session, _NONE)
        return _common(known, names), made_at

    def keep(self, session: str, created_at: int, marks: tuple[Mark, ...]) -> None:
        """Remember a branch from its root on, in the place of the session's last one."""
        if len(marks) > self._most:
            return
        with self._lock:
            self._held += len(marks) - len(self._branches.pop(session, _NONE)[1])
            self._branches[session] = (created_at, marks)
            while self._held > self._most:
                self._held -= len(self._branches.popitem(last=False)[1][1])


def _common(known: Sequence[Mark], names: Sequence[str]) -> int:
    """Return how many nodes both begin with: where names agree, so do all before them."""
    low, high = 0, min(len(known), len(names))
    if high and known[high - 1].node == names[high - 1]:
        return high
    while low < high:
        middle = (low + high) // 2
        if known[middle].node == names[middle]:
            low = middle + 1
        else:
            high = middle
    return low

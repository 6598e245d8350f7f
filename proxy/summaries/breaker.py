"""A circuit breaker: who failed several times in a row is left alone for a while, then tried once.

    closed      everything is let through; failures in a row are counted
    open        nothing is let through until the pause is over; each further pause is twice as long
    half open   one is let through: its success closes the breaker, its failure opens it again

One for the process, with a state for each name. It knows no clock but the one it is given, and nothing of
what the names stand for.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final

FAILURES: Final = 3
"""Failures in a row that open it."""
PAUSE: Final = 30.0
"""Seconds of the first pause."""
LONGEST_PAUSE: Final = 600.0
_NAMES: Final = 1024
"""Names that are remembered: they hold names of models, which come from clients."""


@dataclass(slots=True)
class _State:
    """How it stands with one name."""

    failures: int = 0
    """In a row."""
    pauses: int = 0
    """In a row."""
    until: float = 0.0
    """When the pause ends, or ended."""
    tried: bool = False
    """Whether the one that is let through after a pause is under way."""


class Breaker:
    """Tells whether somebody may be asked. Used by one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Begin closed for every name; `clock` gives seconds."""
        self._clock = clock
        self._states: OrderedDict[Hashable, _State] = OrderedDict()

    def pause(self, name: Hashable) -> float:
        """Return for how many seconds nobody is let through; 0 where `admits` would let somebody."""
        state = self._states.get(name)
        if state is None:
            return 0.0
        left = state.until - self._clock()
        if left > 0:
            return left
        return PAUSE if state.tried else 0.0

    def admits(self, name: Hashable) -> bool:
        """Tell whether one may go through now; afterwards it is told how that went, or that it did not."""
        if self.pause(name) > 0:
            return False
        state = self._states.get(name)
        if state is not None and state.pauses:
            state.tried = True
        return True

    def succeeded(self, name: Hashable) -> None:
        """Close it."""
        self._states.pop(name, None)

    def failed(self, name: Hashable, wait: float | None = None) -> None:
        """Count a failure. `wait`: seconds for which it asked to be left alone; they hold at once."""
        state = self._states.setdefault(name, _State())
        self._states.move_to_end(name)
        while len(self._states) > _NAMES:
            self._states.popitem(last=False)
        state.failures += 1
        pause = 0.0
        if state.tried or state.failures >= FAILURES:
            pause = min(PAUSE * 2**state.pauses, LONGEST_PAUSE)
            state.pauses, state.failures, state.tried = state.pauses + 1, 0, False
        if wait is not None:
            pause = max(pause, min(wait, LONGEST_PAUSE))
        state.until = max(state.until, self._clock() + pause)

    def abandoned(self, name: Hashable) -> None:
        """Take back that somebody was let through: nothing was learnt."""
        state = self._states.get(name)
        if state is not None:
            state.tried = False

"""How many tokens an upstream counts for one of ours, by model, learnt from the usage that it reports.

Claude, Qwen, DeepSeek and others have vocabularies of their own, and nobody publishes what tools and images
cost. The upstream's own count covers all of it.
"""

from __future__ import annotations

import threading
from typing import Final

from cachetools import LRUCache

_FEWEST_TOKENS: Final = 500  # smaller requests are ignored: what surrounds their messages weighs too much
_LOWEST: Final = 0.5
_HIGHEST: Final = 2.0  # ratios outside these bounds are ignored: the two counts are not of the same thing
_WEIGHT: Final = 0.2  # weight of a new observation against all earlier ones


def learnt(scale: float | None, counted: int, reported: int) -> float | None:
    """Return the scale after one more request; it stays as it is if the request is small or not plausible.

    The first observation sets the scale. A later one moves it by a fifth of the difference. `counted` is our own
    count of all that was sent, without a scale; `reported` is the upstream's, cached tokens included.
    """
    if min(counted, reported) < _FEWEST_TOKENS or not _LOWEST <= reported / counted <= _HIGHEST:
        return scale
    ratio = reported / counted
    return ratio if scale is None else scale + _WEIGHT * (ratio - scale)


def rounded(scale: float) -> float:
    """Return a scale in hundredths. Unrounded, it would move every trigger a little at every request."""
    return round(scale, 2)


class Calibration:
    """The scale of each model in this process, for display. Threads may share it."""

    def __init__(self, models: int = 1024) -> None:
        """Create an empty table for at most `models` models: clients choose the names."""
        self._ratios: LRUCache[str, float] = LRUCache(models)
        self._lock = threading.Lock()

    def learn(self, model: str, counted: int, reported: int) -> None:
        """Learn from one request; the counts are those of `learnt`."""
        with self._lock:
            scale = learnt(self._ratios.get(model), counted, reported)
            if scale is not None:
                self._ratios[model] = scale

    def snapshot(self) -> dict[str, float]:
        """Return the scale of every known model, by name."""
        with self._lock:
            ratios = sorted(self._ratios.items())
        return {model: rounded(ratio) for model, ratio in ratios}

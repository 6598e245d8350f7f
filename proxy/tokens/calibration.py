"""How many tokens an upstream counts for one of ours, by model, learnt from the usage that it reports.

Claude, Qwen, DeepSeek and others have vocabularies of their own, and what tools and images cost cannot be
known from outside; the upstream's own count tells all of it at once. It counts nothing itself.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

MODELS: Final = 1024
"""Models that are remembered; names come from clients, so there could be any number."""
_FEWEST_TOKENS: Final = 500
"""Below so many tokens what surrounds the messages weighs too much to tell anything of larger requests."""
_LOWEST: Final = 0.5
_HIGHEST: Final = 2.0
"""Beyond these the two counts are not of the same thing: an upstream that trims, adds or counts otherwise."""
_WEIGHT: Final = 0.2
"""What a new observation counts beside all the earlier ones."""
_DECIMALS: Final = 2


def learnt(scale: float | None, counted: int, reported: int) -> float | None:
    """Return a scale after one more request; what is too small or not plausible leaves it as it is.

    The first observation counts wholly, a later one moves the scale by a fifth of the way.

    Args:
        scale: what was learnt before; None where nothing was.
        counted: tokens of all that was sent, by our own count, without a scale.
        reported: tokens of the same by the upstream's, cached ones included.
    """
    if min(counted, reported) < _FEWEST_TOKENS or not _LOWEST <= reported / counted <= _HIGHEST:
        return scale
    ratio = reported / counted
    return ratio if scale is None else scale + _WEIGHT * (ratio - scale)


def rounded(scale: float) -> float:
    """Return a scale in hundredths: finer, it would move every trigger a little at every request."""
    return round(scale, _DECIMALS)


class Calibration:
    """The scale of each model in this process, to look at; bounded, and safe to use from several threads."""

    def __init__(self, models: int = MODELS) -> None:
        """Begin with nothing learnt, to remember at most so many models."""
        self._models = models
        self._ratios: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def learn(self, model: str, counted: int, reported: int) -> None:
        """Take in one request for a model, as the client named it; the counts are those of `learnt`."""
        with self._lock:
            scale = learnt(self._ratios.pop(model, None), counted, reported)
            if scale is not None:
                self._ratios[model] = scale
            if len(self._ratios) > self._models:
                self._ratios.popitem(last=False)

    def scale(self, model: str) -> float:
        """Return by what a count of ours is multiplied, in hundredths; 1.0 where nothing was learnt."""
        with self._lock:
            ratio = self._ratios.get(model)
            if ratio is None:
                return 1.0
            self._ratios.move_to_end(model)
        return rounded(ratio)

    def snapshot(self) -> dict[str, float]:
        """Return the scale of every model of which something was learnt, by name."""
        with self._lock:
            ratios = sorted(self._ratios.items())
        return {model: rounded(ratio) for model, ratio in ratios}

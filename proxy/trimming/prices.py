"""What input costs, as numbers relative to one uncached input token: what decides whether trimming pays.

Where the numbers come from is not known here, nor any provider, nor what a dollar is.
"""

from __future__ import annotations

from typing import Final, Literal, TypeAlias

from msgspec import Struct

PriceSource: TypeAlias = Literal["known", "configured", "assumed"]
"""Where prices come from: a published list, the operator, or neither: then what is most common is taken."""


class Step(Struct, frozen=True, kw_only=True):
    """A step of the price: above so many input tokens the whole request costs `factor` times as much."""

    above: int
    """Input tokens, cached ones included, up to which it does not hold."""
    factor: float
    """What input costs above it, in units of what it costs below every step."""


class Prices(Struct, frozen=True, kw_only=True):
    """What input costs, relative to an uncached input token (= 1)."""

    read: float
    """A token that is read from the provider's cache; 1 where the model has none."""
    write: float
    """A token that is written to the cache; 1 where writing is free, since it costs just its input."""
    output: float
    """A token of output."""
    lifetime: float
    """Seconds without a request after which the provider's cache is cold."""
    minimum: int
    """Tokens of the shortest prefix that is cached."""
    steps: tuple[Step, ...] = ()
    """In rising order of `above`."""
    source: PriceSource = "assumed"
    """Where they come from; a receipt says so when they are assumed."""

    def factor(self, tokens: int) -> float:
        """Return what a request of `tokens` input tokens costs, relative to one below every step."""
        in_force = 1.0
        for step in self.steps:
            if tokens > step.above:
                in_force = step.factor
        return in_force


ASSUMED: Final = Prices(read=0.1, write=1.0, output=4.0, lifetime=300.0, minimum=1024)
"""The most common prices, for models of which none are known."""

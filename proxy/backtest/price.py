"""What the tokens of requests cost, and how the provider that takes these prices caches.

A class of prices stands for many models: input at a given price, cached input and writing to the cache as
parts of it. It does not know how many tokens there are, nor why.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from proxy.backtest.cache import Matching, Rule, Use
from proxy.models import COMMON_OUTPUT, Dollars, ModelFacts
from proxy.trimming import Prices

_MILLION: Final = 1_000_000
_LIFETIME: Final = 300.0
_MINIMUM: Final = 1024


@dataclass(frozen=True, slots=True)
class PriceClass:
    """Prices, and the cache that goes with them."""

    name: str
    dollars: Dollars
    """What tokens cost, in dollars per million."""
    prices: Prices
    """The same relative to input, as policies see it."""
    matching: Matching = "blocks"
    block: int = 128
    explicit: bool = True
    """Whether the model takes explicit cache marks."""

    def rule(self, *, timed: bool) -> Rule:
        """Return how the cache works; where no times are known, nothing is forgotten."""
        lifetime = self.prices.lifetime if timed else None
        return Rule(
            matching=self.matching,
            block=self.block,
            minimum=self.prices.minimum,
            lifetime=lifetime,
            explicit=self.explicit,
        )

    def input_dollars(self, use: Use) -> float:
        """Return what the input of one request costs."""
        rates = self.dollars.at(use.sent)
        spent = use.plain * rates.input + use.read * rates.cached_read + use.written * rates.cache_write
        return spent / _MILLION

    def output_dollars(self, use: Use, tokens: int) -> float | None:
        """Return what a reply of so many tokens to that request costs; None where no price is known."""
        rate = self.dollars.at(use.sent).output
        return None if rate is None else tokens * rate / _MILLION


def price_class(
    read: float, write: float = 1.0, *, dollars: float = 1.0, output: float = COMMON_OUTPUT
) -> PriceClass:
    """Return a class of prices: cached input costs `read` times as much as other input, written one `write`.

    Providers that charge for writing match at breakpoints, the others by blocks.

    Args:
        read: of a token read from the cache, input = 1.
        write: of a token written to it; 1 is free, since it costs just its input.
        dollars: of a million tokens of input.
        output: of a token of output, input = 1.
    """
    name = f"read {read:g}" + (f", write {write:g}" if write != 1 else "")
    return PriceClass(
        name=name,
        dollars=Dollars(
            input=dollars, cached_read=dollars * read, cache_write=dollars * write, output=dollars * output
        ),
        prices=Prices(
            read=read, write=write, output=output, lifetime=_LIFETIME, minimum=_MINIMUM, source="configured"
        ),
        matching="blocks" if write == 1 else "breakpoints",
    )


def standard_classes(dollars: float = 1.0) -> tuple[PriceClass, ...]:
    """Return the five classes in which nearly all models are; `dollars` buy a million tokens of input."""
    classes = ((0.5, 1.0), (0.25, 1.0), (0.1, 1.0), (0.1, 1.25), (0.05, 1.25))
    return tuple(price_class(read, write, dollars=dollars) for read, write in classes)


def class_of(model: str, facts: ModelFacts) -> PriceClass | None:
    """Return the prices of a model; None where its dollars are not known."""
    if facts.dollars is None:
        return None
    explicit = facts.breakpoints != "none"
    return PriceClass(
        name=model,
        dollars=facts.dollars,
        prices=facts.prices,
        matching=facts.matching,
        block=facts.block,
        explicit=explicit,
    )

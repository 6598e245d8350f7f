"""What is known of a model, put together: the operator's word, then what is published, then what is common.

Everybody else asks here. It makes no request, and remembers what it found for a quarter of an hour:
some prices depend on the time of day.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final

from msgspec.structs import replace

from proxy.config import ModelPrices, ModelRule, PriceStep
from proxy.models.caches import COMMON, CacheRules, cache_rules
from proxy.models.dollars import Dollars, DollarStep
from proxy.models.facts import ModelFacts
from proxy.models.published import Published, load, published
from proxy.trimming import Prices, PriceSource, Step

COMMON_READ: Final = 0.1
"""What a cached token costs most often, relative to one that is not, where caches are priced at all."""
MARKED_WRITE: Final = 1.25
"""What writing to the cache costs where it matches at breakpoints only, at OpenAI as at Anthropic."""
COMMON_OUTPUT: Final = 4.0
"""What a token of output costs most often, relative to one of input."""

_LONGEST_NAME: Final = 256
"""Letters of the longest name that is looked up: names come from clients."""
_REMEMBERED: Final = 1024
_SHELF_LIFE: Final = 900
"""Seconds for which an answer holds."""
_UNMARKED_WRITE: Final = 1.0
"""What writing costs to a cache that comes by itself: just the input."""


class Catalogue:
    """What is known of models. One for the process; may be used by several threads at once."""

    def __init__(self, rules: tuple[ModelRule, ...] = (), clock: Callable[[], float] = time.time) -> None:
        """Read nothing yet: see `warm`.

        Args:
            rules: what the operator says of models; the first that fits a model is taken.
            clock: seconds since 1970.
        """
        self._rules = [rule for rule in rules if not rule.fallback]
        self._fallbacks = [rule for rule in rules if rule.fallback]
        self._clock = clock
        self._remembered = lru_cache(maxsize=_REMEMBERED)(self._facts)

    def warm(self) -> None:
        """Read the price list (0.15 s): to be called in a thread, so that no request waits for it."""
        load()

    def facts(self, model: str, base_url: str | None) -> ModelFacts:
        """Return what is known of a model.

        Args:
            model: its name as the request gives it.
            base_url: the address of the API that serves it; None where that is not known.
        """
        return self._remembered(model[:_LONGEST_NAME], base_url, int(self._clock() // _SHELF_LIFE))

    def _facts(self, model: str, base_url: str | None, quarter: int) -> ModelFacts:
        rule, fallback = _first(self._rules, model), _first(self._fallbacks, model)
        listed = published(model, base_url, datetime.fromtimestamp(quarter * _SHELF_LIFE, UTC))
        rules = cache_rules(model, base_url) or _overridden(COMMON, fallback)
        source: PriceSource = "assumed"
        dollars: Dollars | None = None
        if rule is not None and rule.prices is not None:
            source, dollars = "configured", _configured(rule.prices)
        elif listed is not None and listed.dollars is not None:
            source, dollars = "known", listed.dollars
            if not listed.caches:
                # Marks would be paid for and bring nothing.
                rules = replace(rules, breakpoints="none")
        elif fallback is not None and fallback.prices is not None:
            dollars = _configured(fallback.prices)
        rules = _overridden(rules, rule)
        return ModelFacts(
            context_window=next(_windows(rule, listed, fallback), None),
            prices=_relative(dollars, rules, source),
            dollars=dollars,
            matching=rules.matching,
            block=rules.block,
            breakpoints=rules.breakpoints,
            takes_key=rules.key,
        )


def _first(rules: list[ModelRule], model: str) -> ModelRule | None:
    fitting = (rule for rule in rules if any(fnmatchcase(model, pattern) for pattern in rule.match))
    return next(fitting, None)


def _windows(rule: ModelRule | None, listed: Published | None, fallback: ModelRule | None) -> Iterator[int]:
    """Yield what is said of the context window, the word that counts most first."""
    for source in (rule, listed, fallback):
        if source is not None and source.context_window is not None:
            yield source.context_window


def _overridden(rules: CacheRules, rule: ModelRule | None) -> CacheRules:
    """Return `rules` with what the operator says of the cache; who says anything of one says there is one."""
    if rule is None or rule.cache is None:
        return rules
    said = rule.cache.model_dump(exclude_none=True)
    return replace(rules, cached=True, **said)


def _configured(prices: ModelPrices) -> Dollars:
    base = Dollars(
        input=prices.input,
        cached_read=prices.input if prices.cached_read is None else prices.cached_read,
        cache_write=prices.input if prices.cache_write is None else prices.cache_write,
        output=prices.output,
    )
    return replace(base, steps=tuple(_step(base, step) for step in prices.steps))


def _step(base: Dollars, step: PriceStep) -> DollarStep:
    factor = step.input / base.input  # the settings see to it that input is not 0
    output = base.output * factor if base.output is not None else None
    return DollarStep(
        above=step.above,
        dollars=Dollars(
            input=step.input,
            cached_read=base.cached_read * factor if step.cached_read is None else step.cached_read,
            cache_write=base.cache_write * factor if step.cache_write is None else step.cache_write,
            output=output if step.output is None else step.output,
        ),
    )


def _relative(dollars: Dollars | None, rules: CacheRules, source: PriceSource) -> Prices:
    """Return prices relative to that of input; where it costs nothing or is not known, what is common."""
    steps: tuple[Step, ...] = ()
    if dollars is None or dollars.input == 0:
        source, read, output = "assumed", COMMON_READ, COMMON_OUTPUT
        write = MARKED_WRITE if rules.matching == "breakpoints" else _UNMARKED_WRITE
    else:
        unit = dollars.input
        read, write = _ratio(dollars.cached_read, unit), _ratio(dollars.cache_write, unit)
        output = COMMON_OUTPUT if dollars.output is None else _ratio(dollars.output, unit)
        steps = tuple(
            Step(above=step.above, factor=_ratio(step.dollars.input, unit)) for step in dollars.steps
        )
        if source == "known" and rules.matching == "blocks":
            # A price of writing is listed for caches that are asked for; this one comes by itself.
            write = _UNMARKED_WRITE
    if not rules.cached:
        read = write = 1.0
    return Prices(
        read=read,
        write=write,
        output=output,
        lifetime=rules.lifetime,
        minimum=rules.minimum,
        steps=steps,
        source=source,
    )


def _ratio(price: float, unit: float) -> float:
    """Return `price` in units of another, as people would write it: 0.3 by 3 is 0.1."""
    return round(price / unit, 6)

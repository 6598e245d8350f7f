"""What a published price list says of a model: `genai-prices`, which comes as a package with its data.

The list is read when it is first asked for (0.15 s, once for the process). Its own look-up is not used:
it remembers every name that it was ever asked for and did not know, and clients choose the names.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from decimal import Decimal
from itertools import chain
from typing import TYPE_CHECKING

from msgspec import Struct

from proxy.models.dollars import Dollars, DollarStep

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, ModelPrice, Provider, TieredPrices


class Published(Struct, frozen=True, kw_only=True):
    """What the list says of one model."""

    context_window: int | None
    """Tokens that a request and its reply may have together."""
    dollars: Dollars | None
    """None where it has no price by tokens."""
    caches: bool
    """Whether it has a price for cached input: without one, nothing is gained by a cache."""


def load() -> list[Provider]:
    """Return all providers of the list, reading it the first time: to be called in a thread then."""
    # Half of what importing it takes is an HTTP client, which nothing here uses.
    from genai_prices.data_snapshot import get_snapshot  # noqa: PLC0415 - it must not slow the start

    return get_snapshot().providers


def published(model: str, base_url: str | None, moment: datetime) -> Published | None:
    """Return what the list says of `model`; None where it does not know it.

    Args:
        model: its name as requests give it, with or without its maker's (`openai/gpt-4o`).
        base_url: the address of the provider's API. If the list knows it, only what it says of this
            provider counts; else the model's maker is found by the name.
        moment: for prices that depend on the date or the hour; with its time zone.
    """
    everyone = load()
    at_home = next(
        (provider for provider in everyone if base_url and re.match(provider.api_pattern, base_url)), None
    )
    if at_home is not None:
        found = at_home.find_model(model, all_providers=everyone)
    else:
        found = next(_by_name(model.lower(), everyone), None)
    return _read(found, moment) if found is not None else None


def _by_name(name: str, everyone: list[Provider]) -> Iterator[ModelInfo]:
    """Yield what may be meant by a name: by its maker's patterns, then by the maker's name before a slash."""
    maker, _, rest = name.rpartition("/")
    maker = maker.rpartition("/")[2]
    candidates = chain(
        ((provider, name) for provider in everyone if _makes(provider, name)),
        ((provider, rest) for provider in everyone if maker and provider.id == maker),
        ((provider, rest) for provider in everyone if maker and _makes(provider, rest)),
    )
    for provider, wanted in candidates:
        model = provider.find_model(wanted)
        if model is not None:
            yield model


def _makes(provider: Provider, name: str) -> bool:
    return provider.model_match is not None and provider.model_match.is_match(name)


def _read(model: ModelInfo, moment: datetime) -> Published:
    prices = model.get_prices(moment)
    starts = {tier.start for price in _tiered(prices) for tier in price.tiers}
    base = _dollars(prices, 0)
    if base is None:
        return Published(context_window=model.context_window, dollars=None, caches=False)
    steps = [
        DollarStep(above=start, dollars=dollars)
        for start in sorted(starts)
        if (dollars := _dollars(prices, start + 1)) is not None
    ]
    whole = Dollars(
        input=base.input,
        cached_read=base.cached_read,
        cache_write=base.cache_write,
        output=base.output,
        steps=tuple(steps),
    )
    return Published(
        context_window=model.context_window, dollars=whole, caches=prices.cache_read_mtok is not None
    )


def _tiered(prices: ModelPrice) -> list[TieredPrices]:
    counted = (prices.input_mtok, prices.cache_read_mtok, prices.cache_write_mtok, prices.output_mtok)
    return [price for price in counted if price is not None and not isinstance(price, Decimal)]


def _dollars(prices: ModelPrice, tokens: int) -> Dollars | None:
    """Return the prices that hold for a request of `tokens` input tokens."""
    fresh = _rate(prices.input_mtok, tokens)
    if fresh is None:
        return None
    read, written = _rate(prices.cache_read_mtok, tokens), _rate(prices.cache_write_mtok, tokens)
    return Dollars(
        input=fresh,
        cached_read=fresh if read is None else read,
        # Some list what keeping the cache costs in its stead: less than the input that must be paid too.
        cache_write=fresh if written is None else max(fresh, written),
        output=_rate(prices.output_mtok, tokens),
    )


def _rate(price: Decimal | TieredPrices | None, tokens: int) -> float | None:
    if price is None or isinstance(price, Decimal):
        return None if price is None else float(price)
    in_force = price.base
    for tier in price.tiers:  # in rising order
        if tokens > tier.start:
            in_force = tier.price
    return float(in_force)

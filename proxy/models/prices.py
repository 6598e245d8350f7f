"""Prices in dollars per million tokens: the cost of an exchange, and the published price list.

The list is `genai-prices`, a package that contains its data. It is loaded when it is first needed (0.15 s). Its own
look-up is not used, because it caches every unknown name, and clients choose the names. Audio and image tokens are
priced as text tokens.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from decimal import Decimal
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, cast

from msgspec import Struct
from msgspec.structs import replace

if TYPE_CHECKING:
    from genai_prices.types import ModelInfo, ModelPrice, Provider, TieredPrices

_MILLION: Final = 1_000_000
_MOST: Final = 10**12  # a larger count of tokens is implausible, and is ignored

_Paths = tuple[tuple[str, ...], ...]  # paths in a usage object; the first with a number above 0 is used
# OpenAI reports in the details; OpenRouter, LiteLLM, DeepSeek and Moonshot next to `prompt_tokens`.
_READ: Final[_Paths] = (
    ("prompt_tokens_details", "cached_tokens"),
    ("cache_read_input_tokens",),
    ("prompt_cache_hit_tokens",),
    ("cached_tokens",),
)
_WRITTEN: Final[_Paths] = (
    ("prompt_tokens_details", "cache_write_tokens"),
    ("prompt_tokens_details", "cache_creation_tokens"),
    ("cache_creation_input_tokens",),
)
_COMPLETION: Final[_Paths] = (("completion_tokens",),)
_LASTING: Final[_Paths] = (("cache_creation", "ephemeral_1h_input_tokens"),)
_LASTING_WRITE: Final = 2.0  # the price of writing to Anthropic's one-hour cache, relative to input
_REASONING: Final[_Paths] = (("completion_tokens_details", "reasoning_tokens"),)
_TOTAL: Final[_Paths] = (("total_tokens",),)


class DollarStep(Struct, frozen=True, kw_only=True):
    """The prices of requests with more than `above` input tokens, including cached ones."""

    above: int
    dollars: Dollars  # apply to the whole request; without further steps


class Dollars(Struct, frozen=True, kw_only=True):
    """What a model costs, in dollars per million tokens."""

    input: float  # input that is neither read from a cache nor written to one
    cached_read: float  # input that is read from the provider's cache; equals `input` without a cache
    cache_write: float  # input that is written to the cache; equals `input` if writing costs nothing extra
    output: float | None = None  # output; None if its price is unknown
    steps: tuple[DollarStep, ...] = ()

    def at(self, tokens: int) -> Dollars:
        """Return the prices of a request with `tokens` input tokens."""
        in_force = self
        for step in self.steps:
            if tokens > step.above:
                in_force = step.dollars
        return in_force


class Used(Struct, frozen=True, kw_only=True):
    """Tokens that an upstream reports."""

    prompt: int  # tokens of the prompt, including those read from a cache or written to one
    read: int = 0  # prompt tokens read from a cache
    written: int = 0  # prompt tokens written to a cache
    lasting: int = 0  # the part of `written` that Anthropic's cache keeps for an hour
    output: int = 0
    reports_cache: bool = False  # whether the usage has a number of cached tokens, even if it is 0

    @property
    def fresh(self) -> int:
        """Tokens of the prompt that were neither read from a cache nor written to one."""
        return self.prompt - self.read - self.written


def used(usage: Mapping[str, Any] | None) -> Used | None:
    """Parse a usage in the form of Chat Completions. Returns None without a plausible number of prompt tokens.

    Tokens read from a cache or written to one are part of `prompt_tokens`. If there are more of them than that, they
    are added instead.
    """
    if usage is None:
        return None
    prompt = usage.get("prompt_tokens")
    if not isinstance(prompt, int) or isinstance(prompt, bool) or not 0 <= prompt <= _MOST:
        return None
    (read, reports), (written, _) = _reported(usage, _READ), _reported(usage, _WRITTEN)
    total = prompt if read + written <= prompt else prompt + read + written
    (output, _), (reasoning, _) = _reported(usage, _COMPLETION), _reported(usage, _REASONING)
    if reasoning and _reported(usage, _TOTAL)[0] == prompt + output + reasoning:
        output += reasoning  # reasoning usually is part of the completion; by this total it is not
    lasting = _reported(usage, _LASTING)[0] if written else 0
    return Used(prompt=total, read=read, written=written, lasting=lasting, output=output, reports_cache=reports)


def cost(usage: Mapping[str, Any] | None, dollars: Dollars | None) -> float | None:
    """Return the cost of an exchange in dollars, from its usage in the form of Chat Completions.

    None if it is unknown: without a price, without a number of prompt tokens, or if output has no price.
    """
    tokens = used(usage)
    return None if tokens is None or dollars is None else cost_of(tokens, dollars)


def cost_of(tokens: Used, dollars: Dollars) -> float | None:
    """Return the cost of these tokens in dollars, or None if there is output without a price."""
    rate = dollars.at(tokens.prompt).output
    if tokens.output and rate is None:
        return None
    return input_cost(tokens, dollars) + tokens.output * (rate or 0.0) / _MILLION


def input_cost(tokens: Used, dollars: Dollars) -> float:
    """Return the cost of the prompt in dollars."""
    rates = dollars.at(tokens.prompt)
    spent = tokens.fresh * rates.input + tokens.read * rates.cached_read + tokens.written * rates.cache_write
    if tokens.written and rates.cache_write > rates.input:
        spent += min(tokens.lasting, tokens.written) * (_LASTING_WRITE * rates.input - rates.cache_write)
    return spent / _MILLION


def _reported(usage: Mapping[str, Any], paths: _Paths) -> tuple[int, bool]:
    """Return the first number above 0 (else 0), and whether there is any number."""
    is_there = False
    for path in paths:
        value: Any = usage
        for name in path:
            # Runs at every request, so `isinstance` is used here instead of a helper.
            value = cast("dict[str, Any]", value).get(name) if isinstance(value, dict) else None
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST:
            if value:
                return value, True
            is_there = True
    return 0, is_there


class Published(Struct, frozen=True, kw_only=True):
    """What the price list says about one model."""

    context_window: int | None
    dollars: Dollars | None  # None if it has no price per token
    caches: bool  # whether the list has a price for cached input; without one, a cache saves nothing


def load() -> list[Provider]:
    """Return all providers of the list. The first call loads the list, so make it in a thread."""
    # Half of the import's time goes to an HTTP client that nothing here uses.
    from genai_prices.data_snapshot import get_snapshot  # noqa: PLC0415 - it must not slow the start

    return get_snapshot().providers


def published(model: str, base_url: str | None, moment: datetime) -> Published | None:
    """Return the entry of a model (`gpt-4o`, `openai/gpt-4o`) at a moment, or None if the list does not have it.

    The prices are those of the provider at `base_url` if the list has it, else those of the model's maker.
    """
    everyone = load()
    there = (provider for provider in everyone if base_url and re.match(provider.api_pattern, base_url))
    provider = next(there, None)
    if provider is not None:
        found = provider.find_model(model, all_providers=everyone)
    else:
        found = next(_by_name(model.lower(), everyone), None)
    return _read(found, moment) if found is not None else None


def _by_name(name: str, everyone: list[Provider]) -> Iterator[ModelInfo]:
    """Yield the models that a name may mean: first by the makers' patterns, then by the maker before a slash."""
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
    base = _dollars(prices, 0)
    if base is None:
        return Published(context_window=model.context_window, dollars=None, caches=False)
    listed = (prices.input_mtok, prices.cache_read_mtok, prices.cache_write_mtok, prices.output_mtok)
    tiered = [price for price in listed if price is not None and not isinstance(price, Decimal)]
    starts = sorted({tier.start for price in tiered for tier in price.tiers})
    dearer = [(start, _dollars(prices, start + 1)) for start in starts]
    steps = tuple([DollarStep(above=start, dollars=dollars) for start, dollars in dearer if dollars is not None])
    caches = prices.cache_read_mtok is not None
    return Published(context_window=model.context_window, dollars=replace(base, steps=steps), caches=caches)


def _dollars(prices: ModelPrice, tokens: int) -> Dollars | None:
    fresh = _rate(prices.input_mtok, tokens)
    if fresh is None:
        return None
    read, written = _rate(prices.cache_read_mtok, tokens), _rate(prices.cache_write_mtok, tokens)
    return Dollars(
        input=fresh,
        cached_read=fresh if read is None else read,
        # For some models the list has the storage price of the cache here, which is added to that of input.
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

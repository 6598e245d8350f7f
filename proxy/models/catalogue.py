"""All facts about a model: from the operator's settings, the price list, and a table of provider caches.

Facts are cached for a quarter of an hour, since some prices depend on the time of day. Providers do not report how
their caches work, so the table is taken from their documentation, as of November 2026:

    OpenAI       before GPT-5.6: prefixes of at least 1,024 tokens in steps of 128, kept for 5 to 10 minutes;
                 since then: only up to breakpoints, one of them at the newest message, kept for 30 minutes
    Anthropic    only up to `cache_control` marks, kept for 5 minutes; the shortest prefix depends on the
                 model. Its own endpoint for OpenAI's clients caches nothing; gateways forward the marks
    Google       prefixes of at least 2,048 tokens (since Gemini 3: 4,096), lifetime unknown
    DeepSeek     prefixes, kept for hours
    Groq         prefixes, kept for 2 hours
    Moonshot     prefixes in steps of 256 (measured by third parties), kept for 5 minutes
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from proxy.config import Breakpoints, Matching, ModelPrices, ModelRule, PriceStep
from proxy.models.prices import Dollars, DollarStep, load, published
from proxy.trimming import Prices, PriceSource, Step

_COMMON_READ: Final = 0.1  # the usual price of a cached token relative to an uncached one
_MARKED_WRITE: Final = 1.25
"""The relative price of writing to a cache that matches at breakpoints only; the same at OpenAI and Anthropic."""
_UNMARKED_WRITE: Final = 1.0  # the relative price of writing to an automatic cache: that of input
COMMON_OUTPUT: Final = 4.0  # the usual price of an output token relative to an input token

_LONGEST_NAME: Final = 256  # longer names are cut before the look-up, since clients choose them
_SHELF_LIFE: Final = 900  # seconds for which facts are cached


class CacheRules(Struct, frozen=True, kw_only=True):
    """How a model's provider caches. The defaults are OpenAI's older rules."""

    matching: Matching = "blocks"
    """`blocks`: the longest common prefix matches, in whole blocks. `breakpoints`: only prefixes up to marks match."""
    block: int = 128
    minimum: int = 1024  # tokens of the shortest prefix that is cached
    lifetime: float = 300.0  # seconds without a request after which a prefix is gone
    breakpoints: Breakpoints = "none"
    cached: bool = True
    key: bool = False  # whether the provider accepts a `prompt_cache_key`; others may refuse it


_LATER_GPT: Final = r"(?<![a-z])gpt-(5\.([6-9]|\d\d)|[6-9]|1\d)(?!\d)"
"""GPT-5.6 and later. Names like gpt-35-turbo and gpt-41 are deployments of older models."""
_HALF_AN_HOUR: Final = 1800.0
_TWO_HOURS: Final = 7200.0


def _claude(minimum: int = 1024) -> CacheRules:
    return CacheRules(matching="breakpoints", minimum=minimum, breakpoints="anthropic")


_TABLE: Final = tuple(
    (re.compile(host), re.compile(model), rules)
    for host, model, rules in (
        (r"^api\.anthropic\.com$", "", CacheRules(cached=False)),
        ("", r"claude-3.*haiku", _claude(2048)),
        ("", r"claude.*haiku|claude-opus-4[-.][567]", _claude(4096)),
        ("", r"claude-(opus|fable|mythos)-5", _claude(512)),
        ("", r"claude", _claude()),
        # Not known to accept OpenAI's marks. The breakpoint at the newest message needs none.
        (
            r"(\.|^)(githubcopilot\.com|amazonaws\.com|azure\.com|azure-api\.net)$",
            _LATER_GPT,
            CacheRules(matching="breakpoints", lifetime=_HALF_AN_HOUR),
        ),
        ("", _LATER_GPT, CacheRules(matching="breakpoints", lifetime=_HALF_AN_HOUR, breakpoints="openai")),
        (r"^api\.groq\.com$", "", CacheRules(lifetime=_TWO_HOURS)),
        ("", r"(?<![a-z])(gpt-|chatgpt-|o[134](?![a-z0-9]))", CacheRules()),
        ("", r"deepseek", CacheRules(block=64, minimum=64, lifetime=_TWO_HOURS)),
        ("", r"gemini-(2|[a-z])", CacheRules(minimum=2048)),
        ("", r"gemini", CacheRules(minimum=4096)),
        ("", r"kimi|moonshot", CacheRules(block=256, minimum=256)),
    )
)
"""Host pattern, model pattern (both in lower case) and rules. The first match is used."""
_KEYED: Final = re.compile(r"(\.|^)(openai\.com|openai\.azure\.com)$")  # hosts that accept a `prompt_cache_key`


def cache_rules(model: str, base_url: str | None) -> CacheRules | None:
    """Return the cache rules of a model (`claude-…`, `anthropic/claude-…`) at `base_url`, or None if they are unknown.

    `base_url` may end with the path of the API, because a provider may cache in its Messages API only.
    """
    parts = urlsplit(base_url or "")
    is_messages = parts.path.endswith("/messages")
    host = "" if is_messages else parts.hostname or ""
    fitting = (rules for hosts, models, rules in _TABLE if hosts.search(host) and models.search(model.lower()))
    # Marks are part of the Messages API, so every provider that offers it accepts them, whatever the model's name.
    rules = next(fitting, _claude() if is_messages else None)
    return replace(rules, key=True) if rules is not None and _KEYED.search(host) else rules


class ModelFacts(Struct, frozen=True, kw_only=True):
    """Facts about a model at a provider."""

    context_window: int | None  # most tokens of a request and its reply together; None if unknown
    prices: Prices  # prices relative to input; assumed if they are unknown
    dollars: Dollars | None  # prices in dollars; None if they are unknown, never assumed
    matching: Matching
    block: int
    breakpoints: Breakpoints
    takes_key: bool = False  # `key` of `CacheRules`; the three fields above are from there too
    base_url: str | None = None  # the address that was passed to `Catalogue.facts`


class Catalogue:
    """Facts about models. One per process; safe to share between threads."""

    def __init__(self, rules: tuple[ModelRule, ...] = (), clock: Callable[[], float] = time.time) -> None:
        self._rules = [rule for rule in rules if not rule.fallback]
        self._fallbacks = [rule for rule in rules if rule.fallback]
        self._clock = clock
        self._remembered = lru_cache(maxsize=1024)(self._facts)

    def warm(self) -> None:
        """Load the price list (0.15 s). Call it in a thread, so that no request waits for it."""
        load()

    def facts(self, model: str, base_url: str | None) -> ModelFacts:
        """Return the facts about a model at the API with this address. `base_url` is None if it is unknown."""
        return self._remembered(model[:_LONGEST_NAME], base_url, int(self._clock() // _SHELF_LIFE))

    def _facts(self, model: str, base_url: str | None, quarter: int) -> ModelFacts:
        rule, fallback = _first(self._rules, model), _first(self._fallbacks, model)
        listed = published(model, base_url, datetime.fromtimestamp(quarter * _SHELF_LIFE, UTC))
        rules = cache_rules(model, base_url) or _overridden(CacheRules(), fallback)
        source: PriceSource = "assumed"
        dollars: Dollars | None = None
        if rule is not None and rule.prices is not None:
            source, dollars = "configured", _configured(rule.prices)
        elif listed is not None and listed.dollars is not None:
            source, dollars = "known", listed.dollars
            if not listed.caches:
                rules = replace(rules, breakpoints="none")  # marks would cost money and save none
        elif fallback is not None and fallback.prices is not None:
            dollars = _configured(fallback.prices)
        rules = _overridden(rules, rule)
        windows = [of.context_window for of in (rule, listed, fallback) if of is not None]
        return ModelFacts(
            context_window=next((window for window in windows if window is not None), None),
            prices=_relative(dollars, rules, source),
            dollars=dollars,
            matching=rules.matching,
            block=rules.block,
            breakpoints=rules.breakpoints,
            takes_key=rules.key,
            base_url=base_url,
        )


def _first(rules: list[ModelRule], model: str) -> ModelRule | None:
    fitting = (rule for rule in rules if any(fnmatchcase(model, pattern) for pattern in rule.match))
    return next(fitting, None)


def _overridden(rules: CacheRules, rule: ModelRule | None) -> CacheRules:
    """Return `rules` with the operator's settings applied. Any setting for the cache means that the model has one."""
    if rule is None or rule.cache is None:
        return rules
    return replace(rules, cached=True, **rule.cache.model_dump(exclude_none=True))


def _configured(prices: ModelPrices) -> Dollars:
    base = Dollars(
        input=prices.input,
        cached_read=prices.input if prices.cached_read is None else prices.cached_read,
        cache_write=prices.input if prices.cache_write is None else prices.cache_write,
        output=prices.output,
    )
    return replace(base, steps=tuple(_step(base, step) for step in prices.steps))


def _step(base: Dollars, step: PriceStep) -> DollarStep:
    factor = step.input / base.input  # the settings refuse steps where input is 0
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
    """Return prices relative to that of input. If input is free or its price is unknown, usual prices are assumed."""
    steps: tuple[Step, ...] = ()
    if dollars is None or dollars.input == 0:
        source, read, output = "assumed", _COMMON_READ, COMMON_OUTPUT
        write = _MARKED_WRITE if rules.matching == "breakpoints" else _UNMARKED_WRITE
    else:
        unit = dollars.input
        read, write = _ratio(dollars.cached_read, unit), _ratio(dollars.cache_write, unit)
        output = COMMON_OUTPUT if dollars.output is None else _ratio(dollars.output, unit)
        steps = tuple(Step(above=step.above, factor=_ratio(step.dollars.input, unit)) for step in dollars.steps)
        if source == "known" and rules.matching == "blocks":
            write = _UNMARKED_WRITE  # the listed price is for caches on request; this one is automatic
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
    """Return `price` / `unit` without floating-point noise: 0.3 / 3 is 0.1."""
    return round(price / unit, 6)

"""Prices in dollars per million tokens, and what an exchange cost by the usage that its provider reports.

It knows no model. Tokens of sound and images are taken for tokens of text.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

from proxy.wire.shapes import is_object

_MILLION: Final = 1_000_000

# Where providers say it: OpenAI's place first, then those of OpenRouter, LiteLLM, DeepSeek and Moonshot.
_READ: Final = (
    ("prompt_tokens_details", "cached_tokens"),
    ("cache_read_input_tokens",),
    ("prompt_cache_hit_tokens",),
    ("cached_tokens",),
)
_WRITTEN: Final = (
    ("prompt_tokens_details", "cache_write_tokens"),
    ("prompt_tokens_details", "cache_creation_tokens"),
    ("cache_creation_input_tokens",),
)


class DollarStep(Struct, frozen=True):
    """Other prices for requests with more than `above` input tokens."""

    above: int
    """Input tokens, cached ones included, up to which it does not hold."""
    dollars: Dollars
    """What then holds, for the whole request; it has no steps of its own."""


class Dollars(Struct, frozen=True):
    """What a model costs, in dollars per million tokens."""

    input: float
    """Input that is neither read from a cache nor written to one."""
    cached_read: float
    """Input that is read from the provider's cache; `input` where there is none."""
    cache_write: float
    """Input that is written to the cache; `input` where writing is free."""
    output: float | None = None
    """Output; None where it is not known."""
    steps: tuple[DollarStep, ...] = ()
    """In rising order of `above`."""

    def at(self, tokens: int) -> Dollars:
        """Return what holds for a request with `tokens` input tokens."""
        in_force = self
        for step in self.steps:
            if tokens > step.above:
                in_force = step.dollars
        return in_force


def cost(usage: Mapping[str, Any] | None, dollars: Dollars | None) -> float | None:
    """Return what an exchange cost in dollars.

    Tokens that are read from a cache or written to one are part of `prompt_tokens`. Where they are more
    than that, the provider counts them apart.

    Args:
        usage: as the provider reported it, in the form of Chat Completions.
        dollars: what the model costs.

    Returns:
        None where it cannot be told: no price, no number of prompt tokens, or output without a price.
    """
    if usage is None or dollars is None:
        return None
    prompt = _count(usage, ("prompt_tokens",))
    if prompt is None:
        return None
    read, written = _first(usage, _READ), _first(usage, _WRITTEN)
    fresh = prompt - read - written
    if fresh < 0:
        fresh = prompt
    rates = dollars.at(fresh + read + written)
    spent = fresh * rates.input + read * rates.cached_read + written * rates.cache_write
    output = _output(usage, prompt)
    if output:
        if rates.output is None:
            return None
        spent += output * rates.output
    return spent / _MILLION


def _output(usage: Mapping[str, Any], prompt: int) -> int:
    """Return the tokens of output. Reasoning is among them, but for providers whose sum says otherwise."""
    completion = _count(usage, ("completion_tokens",)) or 0
    reasoning = _count(usage, ("completion_tokens_details", "reasoning_tokens")) or 0
    apart = _count(usage, ("total_tokens",)) == prompt + completion + reasoning
    return completion + reasoning if apart else completion


def _first(usage: Mapping[str, Any], places: tuple[tuple[str, ...], ...]) -> int:
    """Return the first number above 0 that stands at one of `places`, else 0."""
    return next((count for place in places if (count := _count(usage, place))), 0)


def _count(usage: Mapping[str, Any], place: tuple[str, ...]) -> int | None:
    """Return the number of tokens at `place`; None where there is none, or no whole number from 0 on."""
    found: Any = usage
    for key in place:
        if not (is_object(found) or found is usage):
            return None
        found = found.get(key)
    return found if isinstance(found, int) and not isinstance(found, bool) and found >= 0 else None

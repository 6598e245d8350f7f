"""Prices in dollars per million tokens, and what an exchange cost by the usage that its provider reports.

It knows no model. Tokens of sound and images are taken for tokens of text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeGuard

from msgspec import Struct

from proxy.dialects.jsontext import is_object

_MILLION: Final = 1_000_000

# Where providers say it: OpenAI's place, under `prompt_tokens_details`, first; then, beside `prompt_tokens`,
# those of OpenRouter, LiteLLM, DeepSeek and Moonshot.
_DETAILS: Final = "prompt_tokens_details"
_READ_THERE: Final = ("cached_tokens",)
_READ: Final = ("cache_read_input_tokens", "prompt_cache_hit_tokens", "cached_tokens")
_WRITTEN_THERE: Final = ("cache_write_tokens", "cache_creation_tokens")
_WRITTEN: Final = ("cache_creation_input_tokens",)
_NOTHING: Final[Mapping[str, Any]] = {}


class DollarStep(Struct, frozen=True, kw_only=True):
    """Other prices for requests with more than `above` input tokens."""

    above: int
    """Input tokens, cached ones included, up to which it does not hold."""
    dollars: Dollars
    """What then holds, for the whole request; it has no steps of its own."""


class Dollars(Struct, frozen=True, kw_only=True):
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
    prompt = usage.get("prompt_tokens")
    if not _is_count(prompt):
        return None
    details = _object(usage, _DETAILS)
    read = _first(details, _READ_THERE) or _first(usage, _READ)
    written = _first(details, _WRITTEN_THERE) or _first(usage, _WRITTEN)
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
    completion = _first(usage, ("completion_tokens",))
    reasoning = _first(_object(usage, "completion_tokens_details"), ("reasoning_tokens",))
    if not reasoning:
        return completion
    apart = _first(usage, ("total_tokens",)) == prompt + completion + reasoning
    return completion + reasoning if apart else completion


def _object(usage: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return the object of this name; an empty one where there is none."""
    found = usage.get(name)
    return found if is_object(found) else _NOTHING


def _first(counts: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the first number of tokens above 0 that has one of the names, else 0."""
    for name in names:
        count = counts.get(name)
        if count and _is_count(count):
            return count
    return 0


def _is_count(value: object) -> TypeGuard[int]:
    """Tell whether a value of JSON is a number of tokens: a whole one from 0 on, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0

"""All that is known of a model, in one record. Where it comes from is the catalogue's business."""

from __future__ import annotations

from msgspec import Struct

from proxy.config import Breakpoints, Matching
from proxy.models.dollars import Dollars
from proxy.trimming import Prices


class ModelFacts(Struct, frozen=True, kw_only=True):
    """What is known of a model at a provider."""

    context_window: int | None
    """Tokens that a request and its reply may have together; None where it is not known."""
    prices: Prices
    """What input costs, relative to itself: always there, if need be assumed."""
    dollars: Dollars | None
    """What it costs in dollars; None where it is not known: it is never assumed."""
    matching: Matching
    """`blocks`: the longest common prefix is found again; `breakpoints`: only what ends at a mark."""
    block: int
    """With `blocks`: tokens of one; a prefix counts in whole ones."""
    breakpoints: Breakpoints
    """Which explicit cache marks the model takes."""
    takes_key: bool = False
    """Whether a request may name the cache it belongs to, by `prompt_cache_key`."""

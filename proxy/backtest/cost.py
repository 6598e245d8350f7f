"""The cost of prompts: a simulation of a provider's prompt cache, and classes of prices.

A provider's cache matches prompts by their beginnings. Two rules are in use:

    blocks         any common beginning with an earlier prompt counts, in whole blocks of tokens
    breakpoints    only a beginning that ends at a breakpoint of an earlier prompt counts

Both require a minimum number of tokens. Prompts are stored as a tree of their segments.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from typing import Final, Self

from msgspec import Struct

from proxy.config import Matching
from proxy.models import COMMON_OUTPUT, Dollars, ModelFacts
from proxy.trimming import Prices

_NEVER: Final = float("-inf")
_MILLION: Final = 1_000_000


class CacheRule(Struct, frozen=True, kw_only=True):
    """How a provider's cache works."""

    matching: Matching = "blocks"
    block: int = 128  # tokens of a block; for `blocks` only
    minimum: int = 1024  # tokens of the shortest prefix that is cached
    lifetime: float | None = None  # seconds after which unused entries expire; None: never
    explicit: bool = True  # whether explicit marks set breakpoints; the end of a prompt always is one


class Segment(Struct, frozen=True, kw_only=True):
    """One part of a prompt: the tools, or a message."""

    text: bytes
    tokens: int


class Summable(Struct, frozen=True, kw_only=True):
    """A record whose fields can be added one by one."""

    def __add__(self, other: Self) -> Self:
        return type(self)(**{name: getattr(self, name) + getattr(other, name) for name in self.__struct_fields__})


class Use(Summable, frozen=True, kw_only=True):
    """Where the tokens of prompts came from."""

    read: int = 0
    written: int = 0  # tokens that were not in the cache and were written to it
    plain: int = 0  # neither: the prompt is too short, or they are behind the last breakpoint or whole block

    @property
    def sent(self) -> int:
        """All tokens."""
        return self.read + self.written + self.plain


class _SegmentNode:
    """A segment at its place in one or more prompts."""

    __slots__ = ("after", "end", "texts", "used")

    def __init__(self) -> None:
        self.after: dict[bytes, _SegmentNode] = {}  # the next segments, by their texts
        self.texts: list[bytes] = []  # their texts, sorted: neighbours have the longest common beginnings
        self.used = _NEVER  # time of the last prompt with this segment
        self.end = _NEVER  # time of the last prompt with a breakpoint after it


class PromptCache:
    """A provider's cache after the prompts of one account to one model."""

    def __init__(self, rule: CacheRule) -> None:
        self._rule = rule
        self._root = _SegmentNode()

    def read(self, prompt: Sequence[Segment], at: float = 0.0, marks: Collection[int] = ()) -> Use:
        """Return where the tokens of `prompt` come from, and cache it.

        `at` is the time of the prompt in seconds; it must not decrease from call to call. There is an explicit
        breakpoint after each of the segments in `marks`.
        """
        oldest = _NEVER if self._rule.lifetime is None else at - self._rule.lifetime
        total = sum([segment.tokens for segment in prompt])
        if self._rule.matching == "blocks":
            return self._by_blocks(prompt, total, at, oldest)
        return self._by_breakpoints(prompt, total, at, oldest, marks if self._rule.explicit else ())

    def _by_blocks(self, prompt: Sequence[Segment], total: int, at: float, oldest: float) -> Use:
        node, shared, common = self._root, 0, True
        for segment in prompt:
            child = node.after.get(segment.text)
            if common:
                if child is not None and child.used >= oldest:
                    shared += segment.tokens
                else:
                    common = False
                    shared += _partly(node, segment, oldest)
            node = _step(node, child, segment, at)
        block, minimum = self._rule.block, self._rule.minimum
        read = shared // block * block if shared >= minimum else 0
        written = total // block * block - read if total >= minimum else 0
        return Use(read=read, written=written, plain=total - read - written)

    def _by_breakpoints(
        self, prompt: Sequence[Segment], total: int, at: float, oldest: float, marks: Collection[int]
    ) -> Use:
        minimum, last = self._rule.minimum, len(prompt) - 1
        node, size, read, written, common = self._root, 0, 0, 0, True
        found: _SegmentNode | None = None
        for place, segment in enumerate(prompt):
            child = node.after.get(segment.text)
            common = common and child is not None and child.used >= oldest
            node, size = _step(node, child, segment, at), size + segment.tokens
            if size < minimum:
                continue
            if common and node.end >= oldest and node.end != _NEVER:
                read, found = size, node
            if place == last or place in marks:
                node.end, written = at, size
        if found is not None:
            found.end = at  # using an entry renews its lifetime
        return Use(read=read, written=max(written - read, 0), plain=total - max(written, read))


def _step(node: _SegmentNode, child: _SegmentNode | None, segment: Segment, at: float) -> _SegmentNode:
    """Return the node of the segment after `node`, created if needed, and record its use."""
    if child is None:
        child = node.after[segment.text] = _SegmentNode()
        node.texts.insert(bisect_left(node.texts, segment.text), segment.text)
    child.used = at
    return child


def _partly(node: _SegmentNode, segment: Segment, oldest: float) -> int:
    """Return about how many tokens the segment shares at its beginning with an earlier segment at the same place."""
    texts, equal = node.texts, 0
    place = bisect_left(texts, segment.text)
    for direction, start in ((-1, place - 1), (1, place)):
        near = start
        while 0 <= near < len(texts) and node.after[texts[near]].used < oldest:
            near += direction
        if 0 <= near < len(texts):
            equal = max(equal, _common(segment.text, texts[near]))
    return segment.tokens * equal // max(len(segment.text), 1)


def _common(one: bytes, other: bytes) -> int:
    """Return the length in bytes of the common beginning of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class PriceClass(Struct, frozen=True, kw_only=True):
    """Prices, and how the cache behind them works. A class stands for many models."""

    name: str
    dollars: Dollars
    prices: Prices  # the same relative to the price of input, for policies
    matching: Matching = "blocks"
    block: int = 128
    explicit: bool = True  # whether the model accepts explicit cache marks

    def rule(self, *, timed: bool) -> CacheRule:
        """Return the cache's rule. Without times, nothing expires."""
        return CacheRule(
            matching=self.matching,
            block=self.block,
            minimum=self.prices.minimum,
            lifetime=self.prices.lifetime if timed else None,
            explicit=self.explicit,
        )

    def input_dollars(self, use: Use) -> float:
        """Return the dollars for the input of one request."""
        rates = self.dollars.at(use.sent)
        spent = use.plain * rates.input + use.read * rates.cached_read + use.written * rates.cache_write
        return spent / _MILLION

    def output_dollars(self, use: Use, tokens: int) -> float | None:
        """Return the dollars for a reply of `tokens` to that request; None if the price is unknown."""
        rate = self.dollars.at(use.sent).output
        return None if rate is None else tokens * rate / _MILLION


def price_class(read: float, write: float = 1.0, *, dollars: float = 1.0, output: float = COMMON_OUTPUT) -> PriceClass:
    """Return a class of prices: `dollars` for a million tokens of input, the other prices relative to that.

    Providers that charge for writing match at breakpoints, others by blocks.
    """
    return PriceClass(
        name=f"read {read:g}" + (f", write {write:g}" if write != 1 else ""),
        dollars=Dollars(
            input=dollars, cached_read=dollars * read, cache_write=dollars * write, output=dollars * output
        ),
        prices=Prices(read=read, write=write, output=output, lifetime=300.0, minimum=1024, source="configured"),
        matching="blocks" if write == 1 else "breakpoints",
    )


def standard_classes(dollars: float = 1.0) -> tuple[PriceClass, ...]:
    """Return the five classes that cover nearly all models; a million tokens of input cost `dollars`."""
    classes = ((0.5, 1.0), (0.25, 1.0), (0.1, 1.0), (0.1, 1.25), (0.05, 1.25))
    return tuple(price_class(read, write, dollars=dollars) for read, write in classes)


def class_of(model: str, facts: ModelFacts) -> PriceClass | None:
    """Return the prices of a model; None if they are unknown."""
    if facts.dollars is None:
        return None
    return PriceClass(
        name=model,
        dollars=facts.dollars,
        prices=facts.prices,
        matching=facts.matching,
        block=facts.block,
        explicit=facts.breakpoints != "none",
    )

"""A provider's prompt cache, simulated: what of a prompt was read before, and what is written by it.

Two rules are in use among providers, and both know a prompt by its beginning alone:

    blocks         any common beginning with an earlier prompt counts, in blocks of tokens, from a smallest
                   size on; everything that is read is written too
    breakpoints    only a beginning that ends where an earlier prompt had a breakpoint counts, from the same
                   smallest size on; what is written ends at the last breakpoint. A prompt's end is one

With the first rule this is the same simulation as that of the demonstration's upstream (`proxy.demo`), made
for thousands of long prompts: they are kept as a tree of their segments. Where a clock is given, what was
not used for a lifetime is forgotten. It knows no messages and no prices.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, TypeAlias

Matching: TypeAlias = Literal["blocks", "breakpoints"]
"""How a provider finds a prompt's beginning again."""

_NEVER: Final = float("-inf")


@dataclass(frozen=True, slots=True)
class Rule:
    """What a provider's cache finds, and for how long."""

    matching: Matching = "blocks"
    block: int = 128
    """Tokens by which a common beginning grows; of the rule `blocks` alone."""
    minimum: int = 1024
    """Tokens from which on a beginning counts."""
    lifetime: float | None = None
    """Seconds after which what was not used is forgotten; None where it never is."""
    explicit: bool = True
    """Whether breakpoints can be set explicitly; the one at the end is always there."""


class Segment(NamedTuple):
    """One part of a prompt: the tools, or a message."""

    text: bytes
    tokens: int


@dataclass(frozen=True, slots=True)
class Use:
    """Where the tokens of prompts came from; `+` adds prompts up."""

    read: int = 0
    """Read from the cache."""
    written: int = 0
    """Not found there, and written to it."""
    plain: int = 0
    """Neither: they are too few, or behind the last breakpoint."""

    @property
    def sent(self) -> int:
        """All of them."""
        return self.read + self.written + self.plain

    def __add__(self, other: Use) -> Use:
        """Return both together."""
        return Use(
            read=self.read + other.read, written=self.written + other.written, plain=self.plain + other.plain
        )


NOTHING: Final = Use()
"""No tokens at all."""


class _Node:
    """A segment after what precedes it, in some prompt."""

    __slots__ = ("after", "end", "texts", "tokens", "used")

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens
        self.after: dict[bytes, _Node] = {}
        """What came next in one prompt or another."""
        self.texts: list[bytes] = []
        """The same by their texts, sorted: neighbours have the longest common beginnings."""
        self.used = _NEVER
        """When a prompt last had it."""
        self.end = _NEVER
        """When a prompt last had a breakpoint after it."""


class PromptCache:
    """What one account's prompts to one model have left in the provider's cache."""

    def __init__(self, rule: Rule) -> None:
        """Begin empty."""
        self._rule = rule
        self._root = _Node(0)

    def read(self, prompt: Sequence[Segment], at: float = 0.0, marks: Collection[int] = ()) -> Use:
        """Return where the tokens of `prompt` come from, and remember it.

        Args:
            prompt: Its parts in order.
            at: When it is sent, in seconds; never before an earlier one. Without a clock always the same.
            marks: After which parts (0 is the first) an explicit breakpoint stands, beside that at the end.
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
        found: _Node | None = None
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
            found.end = at  # what is used lives on
        return Use(read=read, written=max(written - read, 0), plain=total - max(written, read))


def _step(node: _Node, child: _Node | None, segment: Segment, at: float) -> _Node:
    """Return the node of the segment after `node`, made where there is none, and note its use."""
    if child is None:
        child = node.after[segment.text] = _Node(segment.tokens)
        node.texts.insert(bisect_left(node.texts, segment.text), segment.text)
    child.used = at
    return child


def _partly(node: _Node, segment: Segment, oldest: float) -> int:
    """Return the tokens of the segment's beginning that it shares with what came there before.

    They are the share of the equal bytes. What is forgotten is passed over.
    """
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
    """Return how many bytes two texts have in common at their beginning."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low

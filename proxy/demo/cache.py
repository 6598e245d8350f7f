"""A provider's prompt cache, simulated: what of a prompt was the beginning of an earlier one.

The rule is that of OpenAI's automatic prompt caching: a common beginning counts from 1,024 tokens
on, in blocks of 128, for each model and account apart. Nothing is ever forgotten here, where a real
cache forgets after minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

SMALLEST: Final = 1024
"""Tokens from which on a common beginning counts."""
BLOCK: Final = 128
"""Tokens by which it grows."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One part of a prompt: the tools, or a message."""

    text: bytes
    tokens: int


Prompt = Sequence[Segment]


class PrefixCache:
    """The prompts that were read so far, by account and model."""

    def __init__(self) -> None:
        """Begin with none."""
        self._read: dict[tuple[str, str], list[Prompt]] = {}

    def read(self, account: str, model: str, prompt: Prompt) -> int:
        """Return how many tokens of `prompt` are cached already, and remember it."""
        earlier = self._read.setdefault((account, model), [])
        shared = max((shared_tokens(prompt, other) for other in earlier), default=0)
        earlier.append(prompt)
        return shared // BLOCK * BLOCK if shared >= SMALLEST else 0


def shared_tokens(one: Prompt, other: Prompt) -> int:
    """Return the tokens of the common beginning; of the first part that differs, its equal bytes' share."""
    pairs = zip(one, other, strict=False)
    whole = list(takewhile(lambda pair: pair[0].text == pair[1].text, pairs))
    tokens = sum(segment.tokens for segment, _ in whole)
    if len(whole) < min(len(one), len(other)):
        segment, differing = one[len(whole)], other[len(whole)]
        equal = sum(
            1 for _ in takewhile(lambda b: b[0] == b[1], zip(segment.text, differing.text, strict=False))
        )
        tokens += segment.tokens * equal // max(len(segment.text), 1)
    return tokens

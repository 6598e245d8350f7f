"""Searching a conversation: which messages say what is asked for, and where in them.

A term counts the more, the fewer messages have it; a message counts by the terms that stand close together in
it; where two are equal, the newer one comes first. The same query over the same messages finds the same. It
takes time in proportion to the texts. It does not know where messages come from, nor who asks.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from math import log
from operator import itemgetter
from typing import Final

from msgspec import Struct

from proxy.dialects import Message
from proxy.recall.page import Pages
from proxy.recall.terms import Term, lowered, places, terms_of

_CLOSER: Final = 64
"""Messages that are looked at line by line."""
_NEIGHBOURS: Final = 4
"""Lines after a line in which terms count as close to it."""
_OCCURRENCES: Final = 200
"""Places of one term in one message that are looked at."""
_LINES: Final = 4
"""Lines that are shown of a message."""
_APART: Final = 0.25
"""What a term counts that stands elsewhere in the message."""
_PHRASE: Final = 0.5
"""What the query counts where it stands in the text word by word, in parts of all its terms."""
_WEAK: Final = 0.35
"""What is found by less than this part of what the best one has is not told."""
_STRONG: Final = 0.5
"""The same for messages that are left out, when they are counted."""


class Passage(Struct, frozen=True, kw_only=True):
    """Where in a message something was found."""

    index: int
    """Which of the messages."""
    score: float
    lines: tuple[tuple[int, str], ...]
    """(number, line), of long lines the part around what was found."""


class Findings(Struct, frozen=True, kw_only=True):
    """What a search found."""

    passages: tuple[Passage, ...]
    """The best first."""
    left_out: int
    """How many of the messages that were to be left out match about as well."""


def search(messages: Sequence[Message], query: str, most: int, leave_out: Container[int] = ()) -> Findings:
    """Return the passages that answer a query best; none where nothing has any term of it.

    Args:
        messages: oldest first.
        query: words, names, numbers, in any language.
        most: how many passages at most.
        leave_out: messages that are not told of, by their place among `messages`.
    """
    terms = terms_of(query)
    masks = [_mask(lowered(message.readable()), terms) for message in messages] if terms else []
    weights = _weights(terms, masks)
    ranked = sorted(
        ((_sum(weights, mask), index) for index, mask in enumerate(masks) if mask),
        key=lambda item: (-item[0], -item[1]),
    )
    phrase = " ".join(query.lower().split())
    found: list[Passage] = []
    texts: set[str] = set()
    for index in [index for _, index in ranked if index not in leave_out][:_CLOSER]:
        text = messages[index].readable()
        if text not in texts:
            texts.add(text)
            found.append(_closer(index, text, terms, weights, phrase))
    found.sort(key=lambda passage: (-passage.score, -passage.index))
    told = [passage for passage in found[:most] if passage.score >= _WEAK * found[0].score]
    least = _STRONG * ranked[0][0] if ranked else 0
    return Findings(
        passages=tuple(told), left_out=sum([index in leave_out for score, index in ranked if score >= least])
    )


def _mask(low: str, terms: Sequence[Term]) -> int:
    """Return which terms a text has, a bit for each."""
    mask = 0
    for number, term in enumerate(terms):
        if term.text in low and next(places(low, term), -1) >= 0:
            mask |= 1 << number
    return mask


def _weights(terms: Sequence[Term], masks: Sequence[int]) -> list[float]:
    """Return what each term counts: the more, the fewer messages have it."""
    total = len(masks)
    counts = [sum([mask >> number & 1 for mask in masks]) for number in range(len(terms))]
    return [
        term.weight * log(1 + (total - count + 0.5) / (count + 0.5))
        for term, count in zip(terms, counts, strict=True)
    ]


def _sum(weights: Sequence[float], mask: int) -> float:
    return sum([weight for number, weight in enumerate(weights) if mask >> number & 1])


def _closer(index: int, text: str, terms: Sequence[Term], weights: Sequence[float], phrase: str) -> Passage:
    """Return the lines of a text in which most of what is asked for stands together."""
    low, pages = lowered(text), Pages(text)
    by_line: dict[int, int] = {}
    first: dict[int, tuple[float, int, int]] = {}  # of each line its weightiest find: (weight, start, stop)
    for number, term in enumerate(terms):
        for count, place in enumerate(places(low, term)):
            if count == _OCCURRENCES:
                break
            line = pages.number_at(place)
            by_line[line] = by_line.get(line, 0) | 1 << number
            if line not in first or weights[number] > first[line][0]:
                first[line] = (weights[number], place, place + len(term.text))
    everything = 0
    for mask in by_line.values():
        everything |= mask
    best, chosen = -1.0, 0
    for line in by_line:
        together = 0
        for near in range(line, line + _NEIGHBOURS + 1):
            together |= by_line.get(near, 0)
        score = _sum(weights, together)
        if (score, -line) > (best, -chosen):
            best, chosen = score, line
    nearest = [line for line in range(chosen, chosen + _NEIGHBOURS + 1) if line in by_line]
    nearest.sort(key=lambda line: (-_sum(weights, by_line[line]), line))
    best += _APART * (_sum(weights, everything) - best)
    if " " in phrase and phrase in " ".join(low.split()):
        best += _PHRASE * sum(weights)
    shown = sorted(((line, pages.near(*first[line][1:])) for line in nearest[:_LINES]), key=itemgetter(0))
    return Passage(index=index, score=best, lines=tuple(shown))

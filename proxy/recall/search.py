"""Search in a conversation: finds the messages, and their lines, that match a query best.

A word matches the beginning of words, so "refund" finds "refunds". Names and numbers (`ORD-1234`, `src/main.c`,
`parse_args`) must match as a whole; matches of their parts count a little. Scripts without spaces (Chinese,
Japanese, Korean, Thai) are compared by pairs of characters. Case is ignored.

Rare terms weigh more than common ones. A message is scored by the terms that occur close together in it. Among
equal scores, the newest message comes first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Container, Iterator, Sequence
from itertools import islice
from math import log
from typing import Final

from msgspec import Struct

from proxy.dialects import Message
from proxy.recall.render import Findings, Pages, Passage

MOST_TERMS: Final = 16  # terms of a query that are used
_LONGEST_QUERY: Final = 1_000  # characters of a query that are read
_SPACELESS: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003134f"
)
_SPACELESS_RUN: Final = re.compile(rf"[{_SPACELESS}]+")
_LETTER: Final = rf"[^\W{_SPACELESS}]"
_TOKEN: Final = re.compile(rf"[{_SPACELESS}]+|{_LETTER}+(?:[-./:@#+\\$%&~=]{{1,3}}{_LETTER}+)*")
_FIRST_SPACELESS: Final = "\u0e00"  # letters from this one on do not continue a word
_STEM_AND_ENDING: Final = re.compile("([a-z]{4,}?)(?:ing|ed|es|s)?")
_MISSES: Final = 50  # after so many occurrences inside other words, the search for a term in a text stops
_RANKED: Final = 64  # best-ranked messages that are compared line by line
_WINDOW: Final = 5  # terms within so many consecutive lines count as close together
_OCCURRENCES: Final = 200  # occurrences of a term in a message that are used
_LINES: Final = 4  # lines of a message that are shown
_APART: Final = 0.25  # factor for the weight of terms elsewhere in the message
_PHRASE: Final = 0.5  # bonus if the message contains the query as a phrase, as a part of the weight of all terms
_WEAK: Final = 0.35  # passages that score less than this part of the best score are dropped
_STRONG: Final = 0.5  # skipped messages that score at least this part of the best score are counted


def search(messages: Sequence[Message], query: str, most: int, leave_out: Container[int] = ()) -> Findings:
    """Return the best `most` passages for a query. `messages` are ordered oldest first.

    The messages at the indexes `leave_out` are only counted.
    """
    terms = terms_of(query)
    matches = [_matching_terms(lowered(message.readable()), terms) for message in messages] if terms else []
    weights: list[float] = []
    for number, term in enumerate(terms):
        count = sum([number in match for match in matches])
        weights.append(term.weight * log(1 + (len(matches) - count + 0.5) / (count + 0.5)))
    ranked = [(_weight(match, weights), index) for index, match in enumerate(matches) if match]
    ranked.sort(reverse=True)
    phrase = " ".join(query.lower().split())
    passages: dict[str, Passage] = {}
    for index in [index for _, index in ranked if index not in leave_out][:_RANKED]:
        text = messages[index].readable()
        if text not in passages:
            passages[text] = _passage(index, text, terms, weights, phrase)
    best = sorted(passages.values(), key=lambda passage: (-passage.score, -passage.index))[:most]
    return Findings(
        passages=tuple([passage for passage in best if passage.score >= _WEAK * best[0].score]),
        left_out=sum([index in leave_out for score, index in ranked if score >= _STRONG * ranked[0][0]]),
    )


def _matching_terms(low: str, terms: Sequence[Term]) -> set[int]:
    return {
        number for number, term in enumerate(terms) if term.text in low and next(places(low, term), None) is not None
    }


def _weight(numbers: Collection[int], weights: Sequence[float]) -> float:
    return sum([weights[number] for number in sorted(numbers)])


def _passage(index: int, text: str, terms: Sequence[Term], weights: Sequence[float], phrase: str) -> Passage:
    """Return the passage of a message: the lines where most of the query occurs close together."""
    low, pages = lowered(text), Pages(text)
    by_line: defaultdict[int, set[int]] = defaultdict(set)
    heaviest: dict[int, tuple[float, int, int]] = {}
    """By line, (weight, start, end) of the first occurrence of its heaviest term."""
    for number, term in enumerate(terms):
        for place in islice(places(low, term), _OCCURRENCES):
            line = pages.number_at(place)
            by_line[line].add(number)
            if line not in heaviest or weights[number] > heaviest[line][0]:
                heaviest[line] = (weights[number], place, place + len(term.text))

    def window_weight(first: int) -> float:
        window = range(first, first + _WINDOW)
        return _weight(set[int]().union(*[by_line[line] for line in window if line in by_line]), weights)

    first = max(by_line, key=lambda line: (window_weight(line), -line))
    together = window_weight(first)
    score = together + _APART * (_weight(set[int]().union(*by_line.values()), weights) - together)
    if " " in phrase and phrase in " ".join(low.split()):
        score += _PHRASE * sum(weights)
    nearest = [line for line in range(first, first + _WINDOW) if line in by_line]
    nearest.sort(key=lambda line: (-_weight(by_line[line], weights), line))
    shown = [(line, pages.near(*heaviest[line][1:])) for line in sorted(nearest[:_LINES])]
    return Passage(index=index, score=score, lines=tuple(shown))


# ------------------------------------------------------------------------------------ terms


class Term(Struct, frozen=True, kw_only=True):
    """A part of a query, in lower case."""

    text: str
    weight: float  # its own weight, before its rarity counts
    begins: bool = True  # whether it must be at the beginning of a word
    ends: bool = False  # whether it must be at the end of a word; a change between letters and digits ends a word too


def terms_of(query: str) -> tuple[Term, ...]:
    """Return the terms of a query, each once, in order."""
    found: dict[str, Term] = {}
    for token in _TOKEN.findall(lowered(query[:_LONGEST_QUERY])):
        for term in _terms_in(token):
            if term.text not in found or found[term.text].weight < term.weight:
                found[term.text] = term
    longer = [term for term in found.values() if len(term.text) > 1]
    return tuple((longer or list(found.values()))[:MOST_TERMS])


def places(low: str, term: Term) -> Iterator[int]:
    """Yield the offsets of a term in a lower-case text."""
    at, misses = low.find(term.text), 0
    while at >= 0 and misses < _MISSES:
        before, after = low[at - 1 : at], low[at + len(term.text) : at + len(term.text) + 1]
        continued = term.ends and _is_letter(after) and after.isdigit() == term.text[-1].isdigit()
        if continued or (term.begins and _is_letter(before)):
            misses += 1
        else:
            yield at
        at = low.find(term.text, at + 1)


def _is_letter(character: str) -> bool:
    return character.isalnum() and character < _FIRST_SPACELESS


def lowered(text: str) -> str:
    """Return a text in lower case. It has the same length, so that offsets stay valid."""
    return text.replace("İ", "i").lower()  # the only letter whose lower case is longer


def _terms_in(token: str) -> Iterator[Term]:
    if _SPACELESS_RUN.match(token):
        if len(token) == 1:
            yield Term(text=token, weight=0.5, begins=False)
        for at in range(len(token) - 1):
            yield Term(text=token[at : at + 2], weight=0.6, begins=False)
        return
    parts = [part for part in re.split(r"[\W_]+", token) if part]
    if len(parts) > 1:
        yield Term(text=token, weight=2.0, ends=True)
        yield from (Term(text=part, weight=0.4) for part in parts if len(part) > 2)
    elif any(letter.isdigit() for letter in token):
        yield Term(text=token, weight=1.5, ends=True)
    else:
        stem = _STEM_AND_ENDING.fullmatch(token)
        text = stem[1] if stem else token
        yield Term(text=text, weight=1.0 if len(token) > 3 else 0.5, ends=len(token) <= 3)

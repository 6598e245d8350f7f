"""Searching a conversation: which messages say what is asked for, and where in them.

Words are found where a word begins, so that "refund" finds "refunds". Names and numbers (`ORD-1234`,
`src/main.c`, `parse_args`) are found whole, and their parts count a little. Scripts that write no spaces
(Chinese, Japanese, Korean, Thai) are compared by pairs of characters. Upper and lower case are the same.

A term counts the more, the fewer messages have it; a message counts by the terms that stand close together in
it; of equals the newer one comes first. A search takes time in proportion to the texts.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Sequence
from math import log
from operator import itemgetter
from typing import Final

from msgspec import Struct

from proxy.dialects import Message
from proxy.recall.render import Findings, Pages, Passage

MOST_TERMS: Final = 16
"""Terms of a query that count; what else it says does not."""
_LONGEST_QUERY: Final = 1_000
"""Characters of a query that are read."""
_SPACELESS: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003134f"
)
_LETTER: Final = rf"[^\W{_SPACELESS}]"
_TOKEN: Final = re.compile(rf"[{_SPACELESS}]+|{_LETTER}+(?:[-./:@#+\\$%&~=]{{1,3}}{_LETTER}+)*")
_FIRST_SPACELESS: Final = "\u0e00"
"""From here on a letter is no sign that a word goes on."""
_ENDINGS: Final = ("ing", "ed", "es", "s")
_STEM: Final = 4
"""Letters of a word that its ending is taken from."""
_TRIES: Final = 50
"""Places in one text at which a term is looked for; after so many that only look like it, it is not there."""
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
        term.weight * log(1 + (total - count + 0.5) / (count + 0.5)) for term, count in zip(terms, counts, strict=True)
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


# ------------------------------------------------------------------------------------ terms


class Term(Struct, frozen=True, kw_only=True):
    """Something to be found."""

    text: str
    """In lower case."""
    weight: float
    """How much it says by itself; how rare it is says more."""
    begins: bool = True
    """Whether a word must begin where it does."""
    ends: bool = False
    """Whether it must end where it does: digits may follow letters, and letters digits."""


def terms_of(query: str) -> tuple[Term, ...]:
    """Return the terms of a query, each once, in its order; none where it says nothing."""
    found: dict[str, Term] = {}
    tokens = _TOKEN.findall(lowered(query[:_LONGEST_QUERY]))
    for token in tokens:
        for term in _terms_in(token):
            known = found.get(term.text)
            if known is None or known.weight < term.weight:
                found[term.text] = term
    # Single letters say nothing beside others.
    terms = [term for term in found.values() if len(term.text) > 1] or list(found.values())
    return tuple(terms[:MOST_TERMS])


def places(low: str, term: Term) -> Iterator[int]:
    """Give the places of a term in a text in lower case, from its beginning."""
    size = len(term.text)
    at = low.find(term.text)
    tries = 0
    while at >= 0 and tries < _TRIES:
        if not (term.begins and at and _is_letter(low[at - 1])) and not (
            term.ends and _goes_on(low[at + size - 1], low[at + size : at + size + 1])
        ):
            yield at
        else:
            tries += 1
        at = low.find(term.text, at + 1)


def lowered(text: str) -> str:
    """Return a text in lower case, as long as before: what is found in it is found at the same place."""
    low = text.lower()
    if len(low) == len(text):
        return low
    low = text.replace("İ", "i").lower()  # the one letter that gets longer, as Unicode is now
    if len(low) == len(text):
        return low
    return "".join([letter.lower() if len(letter.lower()) == 1 else letter for letter in text])


def _terms_in(token: str) -> Iterator[Term]:
    if token[0] >= _FIRST_SPACELESS and re.match(rf"[{_SPACELESS}]", token):
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
        yield Term(text=_stem(token), weight=1.0 if len(token) > 3 else 0.5, ends=len(token) <= 3)


def _stem(word: str) -> str:
    """Return a word without an ending that other forms of it do not have."""
    for ending in _ENDINGS:
        if word.isascii() and word.endswith(ending) and len(word) - len(ending) >= _STEM:
            return word.removesuffix(ending)
    return word


def _is_letter(character: str) -> bool:
    return character.isalnum() and character < _FIRST_SPACELESS


def _goes_on(last: str, following: str) -> bool:
    return _is_letter(following) and following.isdigit() == last.isdigit()

"""What is looked for: the terms of a query, and where they stand in a text.

Words are found where a word begins, so that "refund" finds "refunds"; names and numbers
(`ORD-1234`, `src/main.c`, `parse_args`) are found whole, and their parts count a little; scripts that write
no spaces (Chinese, Japanese, Korean, Thai) are compared by pairs of characters. Upper and lower case are the
same. It does not know which texts are searched.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from msgspec import Struct

MOST_TERMS: Final = 16
"""Terms of a query that count; what else it says does not."""
_LONGEST: Final = 1_000
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
    tokens = _TOKEN.findall(lowered(query[:_LONGEST]))
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

"""Atoms: the small pieces of a text that a later step needs verbatim, and where they occur.

An atom is what cannot be said in other words: an id, a path, an address, a date, a number, a quoted
string, a leaf of a JSON document, a term in Chinese, Japanese or Korean. Ordinary words are none.
Atoms of a tool call's arguments tell what the model needed; `values` of a tool's output are what it may
need. Whether a text still holds an atom is judged at word boundaries, so that 136 is not found in 1360.

Each function takes time that grows with the length of the text and no faster, whatever the text is. It knows
no policy, no message and no tool, and no language's grammar beyond a few words that mean nothing alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from proxy.textscan.shape import CJK, CJK_CHARACTER, LONGEST, NUMBER, SHORTEST, TRIVIA, shape_of, terms_of
from proxy.textscan.values import Value, values_of

MOST: Final = 400
"""Atoms of one call at most: of a whole file that is written, the first ones stand for the others."""
NEAR: Final = 120
"""Characters around an occurrence in which words still name it."""
SMALLEST_NUMBER: Final = 10
"""Numbers below are everywhere: finding one again says nothing."""

_EMPTY_WORDS: Final = frozenset(
    "the and for with from that this are was were has have had not but you your our "  # noqa: SIM905 - readable
    "their its his her all any can will would should could may might been being into onto than then there "
    "these those which while when what where who whom how why also just only very more most some such each "
    "other about after before over under between through please true false null none here out off per via "
    "use used using of to in is it on by as at an or be we if no do so my up he me us am go".split()
)
"""Words that name nothing: they label no value."""

_STEPPED: Final = frozenset({"path", "url"})
_STEP: Final = re.compile(r"[^/?&=#:]+")
"""A step of a path or a URL."""
CHUNKS: Final = re.compile(rf"[{CJK}]|[^\W{CJK}]+")
"""The chunks that atoms are made of, with what is no letter, digit or underscore between: wherever an atom
stands at word boundaries, its chunks are chunks of the text (but for the letter of an escape before it)."""
_WORD: Final = re.compile(rf"[{CJK}]{{2,}}|[^\W\d_{CJK}][^\W\d{CJK}]+")
_KEY: Final = re.compile(r"""([^\W\d][\w-]{1,60}+)\\?["'`]?\s{0,2}[:=](?!//)""")
_WORD_ESCAPES: Final = frozenset("nrt")
"""Letters that, after a backslash, stand for the end of a line or a tab in text that was written as JSON."""


def atoms_of_arguments(arguments: str) -> tuple[str, ...]:
    """Return the atoms of a call's arguments, JSON or free text, each once, in order of appearance.

    They are leaves of one line (2 to 200 characters), what has the shape of a path, an address, an
    identifier, a date or a number of at least 10 inside of longer ones, quoted strings, CJK terms. The
    steps of a path or a URL that have a shape are atoms too: a listing shows the name of a file alone.
    """
    found: dict[str, None] = {}
    for piece in filter(_is_atom, _with_steps(values_of(arguments, "none"))):
        found[piece] = None
        if len(found) == MOST:
            break
    return tuple(found)


def _with_steps(values: Iterable[Value]) -> Iterator[str]:
    """Yield each value, and after a path or a URL those of its steps that have a shape."""
    for value in values:
        yield value.text
        if value.kind in _STEPPED:
            yield from filter(shape_of, _STEP.findall(value.text))


def find(atom: str, text: str) -> Iterator[int]:
    """Yield where `atom` begins in `text`, at word boundaries; an empty atom is nowhere."""
    start = text.find(atom) if atom else -1
    while start >= 0:
        if stands_alone(text, start, start + len(atom)):
            yield start
        start = text.find(atom, start + 1)


def occurs(atom: str, text: str) -> bool:
    """Tell whether `text` holds `atom` at word boundaries."""
    return next(find(atom, text), None) is not None


def stands_alone(text: str, start: int, stop: int) -> bool:
    r"""Tell whether text[start:stop], which must not be empty, begins and ends at word boundaries.

    Its neighbours are no letters, digits or underscores; between CJK characters, and between one and
    anything else, there is always a boundary. A digit does not end at a decimal point with a digit behind
    it. A letter that belongs to an escape (`\n`, in text that is JSON inside of JSON) is no neighbour.
    """
    if start:
        before, first = text[start - 1], text[start]
        second = text[start - 2] if start > 1 else ""
        if before == "." and first.isdigit() and second.isdigit():
            return False
        if (
            (before.isalnum() or before == "_")
            and not (before in _WORD_ESCAPES and second == "\\")
            and not CJK_CHARACTER.match(before)
            and not CJK_CHARACTER.match(first)
        ):
            return False
    if stop < len(text):
        last, after = text[stop - 1], text[stop]
        if after == "." and last.isdigit() and text[stop + 1 : stop + 2].isdigit():
            return False
        if (
            (after.isalnum() or after == "_")
            and not CJK_CHARACTER.match(after)
            and not CJK_CHARACTER.match(last)
        ):
            return False
    return True


def labels_of(text: str, start: int, stop: int) -> frozenset[str]:
    """Return the words that name what stands at text[start:stop], in small letters.

    They are the keys (words before a colon or an equals sign) within 120 characters of it; where there are
    none, the words of its line within that distance. Of CJK text they are its terms.
    """
    before, after = text[max(0, start - NEAR) : start], text[stop : stop + NEAR]
    keys = words_of(" ".join([*_KEY.findall(before), *_KEY.findall(after)]))
    if keys:
        return keys
    return words_of(before.rpartition("\n")[2]) | words_of(after.partition("\n")[0])


def words_near(text: str, start: int, stop: int) -> frozenset[str]:
    """Return all words within 120 characters of text[start:stop] that may name something, small letters."""
    return words_of(text[max(0, start - NEAR) : start]) | words_of(text[stop : stop + NEAR])


def words_of(text: str) -> frozenset[str]:
    """Return the words of a short text that may name something, in small letters, CJK terms among them."""
    words: set[str] = set()
    for word in _WORD.findall(text):
        if CJK_CHARACTER.match(word):
            words.update(terms_of(word))
        else:
            words.add(word.lower())
    return frozenset(words - _EMPTY_WORDS)


def _is_atom(piece: str) -> bool:
    """Tell whether a value, or a step of one, is an atom: long enough, short enough, and not everywhere."""
    if not SHORTEST <= len(piece) <= LONGEST or piece in TRIVIA:
        return False
    return not NUMBER.fullmatch(piece) or _size(piece) >= SMALLEST_NUMBER


def _size(number: str) -> float:
    """Return the size of what has the shape of a number, its sign and unit aside."""
    digits = "".join(character for character in number if character.isdigit() or character == ".")
    return float(digits or 0)

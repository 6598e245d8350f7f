"""Cuts that were read lately, so that a session pays once for reading the one that stands, not at each turn.

A cut is as long as what was put in the place of messages, and it stands for many turns. What its text says
follows from the text alone: nothing here can be out of date, and forgetting costs time alone. With it stays
what was read of those messages.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final, NamedTuple

from proxy.dialects.generations import Generations
from proxy.store.encoding import Decided, decode_cut

MOST_LETTERS: Final = 8 * 1024 * 1024
"""Letters of all the texts that are remembered in one process at most, with what is counted beside them.
With what they say, and what is read of that, these are some 40 MB, or 70 MB where the texts are Chinese."""
_ENTRY_LETTERS: Final = 500
"""What an entry takes beside its text, in letters."""
_ITEM_LETTERS: Final = 30
"""What a change or a gap takes beside its part of the text: 150 to 200 bytes, where it often has four."""


class _Read(NamedTuple):
    """A text, and what it says."""

    text: str
    decided: Decided


class DecodedCuts:
    """What texts of cuts say, bounded in size: what was not asked for the longest goes first.

    Any thread may use it.
    """

    def __init__(self, most: int = MOST_LETTERS) -> None:
        """Begin empty, to hold texts of at most so many letters, about."""
        self._held: Final = Generations[Hashable, _Read](most, _size_of)

    def read(self, place: Hashable, text: str) -> Decided:
        """Return what a text says, which was found at a `place`: there it is looked for first.

        Raises:
            ValueError: it is no text of a cut.
        """
        (found,) = self._held.recall((place,))
        if found is None or found.text != text:
            found = _Read(text=text, decided=decode_cut(text))
            self._held.put(place, found)
        return found.decided


def _size_of(read: _Read) -> int:
    items = len(read.decided.changes) + len(read.decided.gaps)
    return len(read.text) + _ITEM_LETTERS * items + _ENTRY_LETTERS

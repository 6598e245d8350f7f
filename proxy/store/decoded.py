"""Cuts that were read lately, so that a session pays once for reading the one that stands, not at each turn.

A cut is as long as what was put in the place of messages, and it stands for many turns. What its text says
follows from the text alone: nothing here can be out of date, and forgetting costs time alone. With it stays
what was read of those messages.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Final

from proxy.store.encoding import Decided, decode_cut

MOST_LETTERS: Final = 8 * 1024 * 1024
"""Letters of all the texts that are remembered in one process at most: some 60 MB with what they say."""
_ENTRY_LETTERS: Final = 500
"""What an entry takes beside its text, in letters."""


class DecodedCuts:
    """What texts of cuts say, bounded in size: what was not asked for the longest goes first.

    There are two generations, as in `wire.facts`, and threads need no lock for the same reason.
    """

    def __init__(self, most: int = MOST_LETTERS) -> None:
        """Begin empty, to hold texts of at most so many letters, about."""
        self._half: Final = most // 2
        self._young: dict[Hashable, tuple[str, Decided]] = {}
        self._old: dict[Hashable, tuple[str, Decided]] = {}
        self._size = 0

    def read(self, place: Hashable, text: str) -> Decided:
        """Return what a text says, which was found at a `place`: there it is looked for first.

        Raises:
            ValueError: it is no text of a cut.
        """
        found = self._young.get(place)
        if found is not None and found[0] == text:
            return found[1]
        found = self._old.get(place)
        if found is None or found[0] != text:
            found = (text, decode_cut(text))
        self._keep(place, found)
        return found[1]

    def _keep(self, place: Hashable, found: tuple[str, Decided]) -> None:
        size = len(found[0]) + _ENTRY_LETTERS
        if size > self._half:
            return
        if self._size + size > self._half:
            self._old, self._young, self._size = self._young, {}, 0
        self._young[place] = found
        self._size += size

"""A text cut into numbered lines, of which as many are shown as fit.

A line that is longer than a page should be (a JSON document on one line) counts as several, so that any part
of any text can be asked for. What is shown is the text itself, to the character: pieces of one line
are put together again. It does not know where the text comes from.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import islice
from typing import Any, Final

LONGEST: Final = 2_000
"""Characters of a line that count as one; what is longer counts as several."""
_AROUND: Final = 150
"""Characters that are shown before and after what was found in a long line."""
_SHORT: Final = 400
"""Characters of a line that is shown whole where something was found in it."""
_FOUND: Final = 3
"""Finds in one line that are shown."""


class Pages:
    """A text in lines, numbered from 1."""

    def __init__(self, text: str) -> None:
        """Cut the text."""
        self.text = text
        self._starts: list[int] = []
        self._ends: list[int] = []
        at = 0
        for line in text.split("\n"):
            stop = at + len(line)
            starts = range(at, max(stop, at + 1), LONGEST)
            self._starts.extend(starts)
            self._ends.extend([*starts[1:], stop])
            at = stop + 1

    def __len__(self) -> int:
        """Return the number of lines."""
        return len(self._starts)

    def number_at(self, offset: int) -> int:
        """Return the number of the line in which a place of the text lies."""
        return bisect_right(self._starts, offset)

    def start(self, number: int) -> int:
        """Return the place of the text at which a line begins."""
        return self._starts[number - 1]

    def line(self, number: int) -> str:
        """Return a line by its number."""
        return self.text[self._starts[number - 1] : self._ends[number - 1]]

    def from_to(self, span: slice, room: int) -> tuple[int, int, str]:
        """Return as much of the lines of `span` as `room` characters hold: first number, last number, text.

        At least one line, if there is one; the numbers are those of an empty range where there is none.
        """
        first, stop, _ = span.indices(len(self))
        if first >= stop:
            return first + 1, first, ""
        begin = self._starts[first]
        last = min(stop, max(first + 1, bisect_right(self._ends, begin + room)))
        return first + 1, last, self.text[begin : self._ends[last - 1]]

    def near(self, start: int, stop: int) -> str:
        """Return the line that holds a part of the text; of a long one, what is around it, between `…`."""
        begin, end = self.text.rfind("\n", 0, start) + 1, self.text.find("\n", start)
        end = len(self.text) if end < 0 else end
        if end - begin <= _SHORT:
            return self.text[begin:end]
        first = max(begin, start - _AROUND)
        last = min(end, max(start + 1, min(stop, start + _SHORT)) + _AROUND)
        return f"{'…' if first > begin else ''}{self.text[first:last]}{'…' if last < end else ''}"

    def found(self, pattern: Any, span: slice) -> Iterator[tuple[int, str]]:
        """Give (number, line) where `pattern` is found in lines of `span`; of a long line, what is near."""
        first, stop, _ = span.indices(len(self))
        at = 0
        for line in self.text.split("\n"):
            if len(line) > _SHORT:
                yield from islice(self._in_long(line, at, pattern, range(first + 1, stop + 1)), _FOUND)
            elif pattern.search(line):
                number = self.number_at(at)
                if first < number <= stop:
                    yield number, line
            at += len(line) + 1

    def _in_long(self, line: str, at: int, pattern: Any, wanted: range) -> Iterator[tuple[int, str]]:
        """Give what is found in a long line that begins at `at`, where that is in one of these lines."""
        for match in pattern.finditer(line):
            number = self.number_at(at + match.start())
            if number >= wanted.stop:
                return
            if number in wanted:
                yield number, self.near(at + match.start(), at + match.end())

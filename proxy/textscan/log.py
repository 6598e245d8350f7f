"""Lines that differ only in numbers: the first and the last of a kind stay, the others are counted.

A line's kind is the line with `#` in the place of every word that has a digit. Whatever tells of something
gone wrong stays, with the indented lines below it. Lines keep their order. It knows no format of logs.
"""

from __future__ import annotations

import re
from collections import Counter
from itertools import islice
from operator import eq
from typing import Final

from proxy.textscan.alarm import alarms
from proxy.textscan.mark import omitted

FEWEST: Final = 3
"""A run of so many lines or more is left out; a mark costs as much as a shorter one."""

# Tried at the beginning of a word only; letters and digits are two classes: one pass.
_NUMBERED: Final = re.compile(r"\b[^\W\d]*+\d\w*+")
_DIGIT: Final = re.compile(r"\d")
_SHORTEST_KIND: Final = 3
_KINDS_TOLD: Final = 3
_KIND_SHOWN: Final = 60
_TRACE: Final = (" ", "\t")
_THRICE: Final = b"\1\1"


def condensed(text: str, keep: int) -> str:
    """Return the text with `keep` lines at each end of every kind; the same text where that omits nothing."""
    lines = text.split("\n")
    if len(lines) < 2 * keep + FEWEST:
        return text
    kinds = _NUMBERED.sub("#", text).split("\n") if _DIGIT.search(text) else lines
    repeated = _repeated(lines, kinds, keep)
    alarming = frozenset(filter(alarms, frozenset(lines))) if alarms(text) else frozenset[str]()
    if alarming:
        for place, line in enumerate(lines):
            if line in alarming:
                repeated[place] = 0
    kept: list[str] = []
    place = 0
    in_trace = False
    while place < len(lines):
        line = lines[place]
        in_trace = line in alarming or (in_trace and line.startswith(_TRACE))
        if repeated[place] and not in_trace:
            start = place
            place = _end(repeated, start)
            kept += _told(start, place, lines, kinds)
        else:
            kept.append(line)
            place += 1
    return "\n".join(kept)


def _repeated(lines: list[str], kinds: list[str], keep: int) -> bytearray:
    """Tell (1) of each line that is one of many of its kind, and neither of the first nor of the last.

    Lines without a number are a kind only as far as the very same line follows itself.
    """
    repeated = bytearray(len(lines))
    total = Counter(kinds)
    places = {kind: list[int]() for kind, count in total.items() if count > 2 * keep and _is_numbered(kind)}
    if places:
        for place, kind in enumerate(kinds):
            if kind in places:
                places[kind].append(place)
        for found in places.values():
            for place in found[keep:-keep]:
                repeated[place] = 1
    follows = bytes(map(eq, lines, islice(lines, 1, None)))
    start = follows.find(_THRICE)
    while start >= 0:
        stop = _end(follows, start)
        if lines[start].strip() and not _is_numbered(kinds[start]):
            repeated[start + 1 : stop] = b"\1" * (stop - start - 1)
        start = follows.find(_THRICE, stop)
    return repeated


def _end(flags: bytes | bytearray, start: int) -> int:
    """Return where the run of ones ends that begins at `start`."""
    stop = flags.find(0, start)
    return stop if stop >= 0 else len(flags)


def _is_numbered(kind: str) -> bool:
    """Tell whether lines of a kind differ in numbers, and are more than that."""
    return "#" in kind and len(kind.strip()) >= _SHORTEST_KIND


def _told(start: int, stop: int, lines: list[str], kinds: list[str]) -> list[str]:
    """Return what stands in the place of a run of lines: the lines where they are few."""
    if stop - start < FEWEST:
        return lines[start:stop]
    counts = Counter(kinds[start:stop]).most_common(_KINDS_TOLD)
    told = ", ".join(f"{count} x {_short(kind)}" for kind, count in counts)
    return [omitted(f"{stop - start} lines", told)]


def _short(kind: str) -> str:
    stripped = kind.strip()
    return stripped if len(stripped) <= _KIND_SHOWN else f"{stripped[:_KIND_SHOWN]}…"

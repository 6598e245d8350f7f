"""What fits of a text: where there is little room, the beginning of each of its sections.

It knows Markdown's headings and no summary.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Final

_MARK: Final = "…"
"""Stands where something was left out."""
_HEADING: Final = re.compile(r"^[ \t]{0,3}#{1,6}[ \t]+")

Count = Callable[[str], int]
"""Counts the tokens of a text."""


def fitted(text: str, most: int, count: Count) -> str:
    """Return a text, or of a longer one `most` tokens: of each section the beginning, with marks."""
    if not text or most <= 0 or count(text) <= most:
        return text if most > 0 else ""
    sections: list[list[str]] = [[]]
    for line in text.split("\n"):
        if _HEADING.match(line) and sections[-1]:
            sections.append([])
        sections[-1].append(line)
    costs = [[count(line) + 1 for line in section] for section in sections]
    spare = most - 2 * len(sections)
    while sum(map(sum, costs)) > spare:
        largest = max(range(len(costs)), key=lambda at: sum(costs[at][1:]))
        if len(costs[largest]) < 2:
            break
        costs[largest].pop()
    lines: list[str] = []
    for section, cost in zip(sections, costs, strict=True):
        lines += section[: len(cost)] if len(cost) == len(section) else [*section[: len(cost)], _MARK]
    shorter = "\n".join(lines)
    while shorter and (tokens := count(shorter)) > most:
        kept = shorter.rstrip(_MARK)
        kept = kept[: min(len(kept) - 1, len(kept) * most // tokens)]
        shorter = kept + _MARK if kept else ""
    return shorter

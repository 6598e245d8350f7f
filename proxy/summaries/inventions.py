"""Inventions: identifiers and numbers of a text that its source lacks.

Every identifier must stand in the source, and every number from 10 on, or be the sum or the difference of two
that stand in its line. It does not know what is done with a text that invents.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Final

from proxy.summaries.source import Source, scaled_in
from proxy.textscan import SMALLEST_NUMBER, Kind, kind_of, values_of

_NAMING: Final[frozenset[Kind]] = frozenset({"id", "path", "url", "email"})
_CODE: Final = re.compile(r"`([^`\n]{1,200})`")
_NUMBER: Final = re.compile(r"(?<![A-Za-z0-9_.])\d[\d,]*(?:\.\d+)?")
_MONTH: Final = re.compile(r"\b(\d{4}[-/.])\d{1,2}([-/.]\d{1,2})\b|\b\d{1,2}:(\d{2})\b")
"""A date whose month the source may spell out, a time whose hour it may count otherwise."""
_PLAIN: Final = re.compile(r"[^\W\d_]+")
_COMPOUND: Final = re.compile(r"(\d+(?:\.\d+)?)(?:[-–]?[a-z]+)+|[a-z]+(?:[-–][a-z]+)*[-–](\d+)")
"""A number with its unit, or words of English with a number (24-hour, 5GB, step-2)."""
_SMALL: Final = 1000
"""Up to which a number may have been worked out."""
_BESIDE: Final = 6
"""Numbers of a line from which it may have been; of more, nearly any could be."""
_SHORTEST: Final = 3
"""Characters of the shortest identifier that is looked for (Q3 is none)."""


def invented(text: str, source: Source) -> Iterator[str]:
    """Yield the identifiers of a text that its source lacks, then such numbers.

    What numbers the items of its lists is to be taken off before.
    """
    for code in _CODE.findall(text):
        if kind_of(code) == "id" and _PLAIN.fullmatch(code) and not source.has(code):
            yield code
    rest = text
    for identifier in _identifiers(text):
        if not source.has(identifier):
            yield identifier
        rest = rest.replace(identifier, " ")
    for line in rest.split("\n"):
        numbers = list(_numbers(line, source))
        unknown = [number for number in numbers if not source.has_number(number)]
        known = {_worth(number) for number in numbers} - {_worth(number) for number in unknown}
        yield from (number for number in unknown if not _is_worked_out(_worth(number), known))


def _worth(number: str) -> float:
    return float(number.replace(",", ""))


def _is_worked_out(number: float, known: Collection[float]) -> bool:
    """Tell whether a number is a sum or a difference of two beside it: whoever reads it can tell."""
    if not SMALLEST_NUMBER <= number < _SMALL or not number.is_integer() or len(known) > _BESIDE:
        return False
    return any(number in (one + other, one - other) for one in known for other in known if one != other)


def _identifiers(text: str) -> list[str]:
    """Return what stands in a text as an identifier: no word (JavaScript), nothing short, no 24-hour."""
    return [
        value.text
        for value in values_of(text, "none")
        if value.kind in _NAMING
        and len(value.text) >= _SHORTEST
        and not _PLAIN.fullmatch(value.text)
        and not _COMPOUND.fullmatch(value.text)
    ]


def _numbers(text: str, source: Source) -> Iterator[str]:
    """Yield the numbers of a text from 10 on, or with decimals, but for 3k where the source has 3000."""
    for scaled, written in list(scaled_in(text)):
        if source.has_number(scaled):
            text = text.replace(written, " ")
    text = _MONTH.sub(lambda date: f"{date[1]} {date[2]}" if date[1] else f" {date[3]}", text)
    for number in _NUMBER.findall(text):
        if "." in number or float(number.replace(",", "")) >= SMALLEST_NUMBER:
            yield number

"""Exact values: numbers, dates and settings that the user gave by name, or that calls were given.

    budget: 5000 USD      預算：5000 元      log_level=debug      {"amount": 327}

A value that the user gave under a name takes the place of an older one. It does not know which of them
matter.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

from pydantic import BaseModel

from proxy.summaries.wholes import is_whole
from proxy.textscan import SMALLEST_NUMBER, kind_of, leaves_of

_MOST: Final = 120
"""Values that are kept."""
_GIVEN: Final = re.compile(
    r"(?<![\w./:?&-])([^\W\d_][\w-]{0,30})"
    r"(?:(\s{0,2}=\s{0,2})([^\s,;，。；、()\[\]{}<>\"'`]{1,60})"
    r"|(\s{0,2}[:：]\s{0,2})([-+$€£¥￥]?\s?\d[\w.,:/%+-]{0,30}(?:\s(?:USD|EUR|GBP|CNY|RMB))?))"
)
_CHINESE: Final = re.compile(
    "([\u4e00-\u9fff]{2,8}?)((?:是|为|共|约)\\s{0,2})([¥￥$]?\\d[\\d.,]{0,15}\\s?[%％\u4e00-\u9fffA-Za-z]{0,4})"
)
_DIGITS: Final = re.compile(r"\d+(?:\.\d+)?")
_PAGING: Final = re.compile(
    r"(?:max|num|number|start|end|first|last|from|to|top|page|per|view|line|head|tail|result|results|char|chars"
    r"|token|tokens|byte|bytes|line|lines|item|items|row|rows|wait|_|-)*"
    r"(?:limit|offset|page|pages|size|count|cursor|skip|take|top|head|tail|lines?|rows?|results?|items?|chars"
    r"|characters|length|tokens|range|index|depth|timeout|delay|wait|context|start|end|k|n)"
    r"(?:[_-]?(?:ms|s|sec|secs|seconds|number|no|line|index|limit|size|count))?",
    re.IGNORECASE,
)
"""Keys of arguments that only say which part of something a tool is to give, and how long it may take."""


class Value(BaseModel, frozen=True):
    """A value by its name."""

    name: str
    text: str
    said: bool
    """Whether the user gave it; else a call was given it."""
    joint: str = "="
    """What stands between name and value, as the user wrote it."""

    @property
    def written(self) -> str:
        """The value with its name, as the user gave it."""
        return f"{self.name}{self.joint}{self.text}"


def values_said(text: str) -> Iterator[Value]:
    """Yield the values that a user's text gives by name, but for what is an identifier as a whole."""
    for name, equals, setting, colon, number in _GIVEN.findall(text):
        value = Value(
            name=name, text=(setting or number).rstrip(".,:"), said=True, joint=_joint(equals or colon)
        )
        if not is_whole(value.written):
            yield value
    for name, joint, number in _CHINESE.findall(text):
        yield Value(name=name, text=number, said=True, joint=_joint(joint))


def values_given(arguments: str) -> Iterator[Value]:
    """Yield the numbers and dates of a call's arguments by their keys; none where they are no JSON.

    What only says which part of something is looked at (limit, offset, page) is none.
    """
    for leaf in leaves_of(arguments) or ():
        exact = _tells(leaf.text) if leaf.is_number else kind_of(leaf.text) == "date"
        if exact and leaf.key and not _PAGING.fullmatch(leaf.key):
            yield Value(name=leaf.key, text=leaf.text, said=False)


def latest(values: Iterable[Value]) -> tuple[Value, ...]:
    """Return the values, each once, newest mention last; of many the user's and the newest."""
    found: dict[tuple[str, str], Value] = {}
    for value in values:
        key = (value.name, "" if value.said else value.text)
        found.pop(key, None)
        found[key] = value
    kept = list(found.values())
    if len(kept) > _MOST:
        first = sorted(range(len(kept)), key=lambda place: (not kept[place].said, -place))[:_MOST]
        kept = [kept[place] for place in sorted(first)]
    return tuple(kept)


def _joint(between: str) -> str:
    """Return what stands between name and value on one line."""
    return " ".join(between.split("\n")) if "\n" in between else between


def _tells(number: str) -> bool:
    """Tell whether a number is one of its own: not small, or with decimals."""
    found = _DIGITS.search(number)
    return found is not None and ("." in found.group() or float(found.group()) >= SMALLEST_NUMBER)

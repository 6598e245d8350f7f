"""The source of a summary: what was said and given in the part of a conversation that it covers.

It tells whether an identifier or a number stands in it, differences of how it is written aside (1,000 and
1000, the leading zeros of a date, the case of letters, white space and dashes inside). It does not know the
summary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Final

from proxy.dialects import Message
from proxy.summaries.facts import Facts, is_of_user
from proxy.summaries.tongue import Tongue, tongue_of
from proxy.textscan import kind_of, leaves_of

_SPOKEN: Final = 20_000
"""Characters of a message by which its language is told."""
_NUMBER: Final = re.compile(r"\d[\d,]*(?:\.\d+)?")
_RUN: Final = re.compile(r"\d+")
_SCALED: Final = re.compile(
    r"(?<![\d,.])(\d[\d,]{0,20}+(?:\.\d{1,9}+)?+)\s?([kKmMbB千万亿]|百万)(?![a-zA-Z])"
)
_SCALES: Final = {"k": 1e3, "m": 1e6, "b": 1e9, "千": 1e3, "万": 1e4, "百万": 1e6, "亿": 1e8}
_JOINTS: Final = re.compile(r"[\s\-–—_./\\:#'\"`,()\[\]]+")
"""What may stand inside of an identifier in one text and not in another."""
_STEP: Final = re.compile(r"[^/\\?&=#:\s]+")
_WIDE: Final = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
"""Full-width characters and what they stand for."""
_IS_WIDE: Final = re.compile("[\uff01-\uff5e]")
_WORD: Final = re.compile("[^\\W\\d_\u3400-\u9fff]{3,}")


class Source:
    """What a summary may speak of. Reading it takes time; it may be asked by one thread after another."""

    def __init__(self, texts: Iterable[str], own: Iterable[str], spoken: Tongue, messages: int) -> None:
        """Take what was said.

        Args:
            texts: All that was said and given.
            own: What the user said.
            spoken: What user and assistant speak.
            messages: How many messages there are.
        """
        self.text = plain("\n".join(texts))
        """All of it, in small letters."""
        self.own = plain("\n".join(own))
        """What the user said, in small letters."""
        self.spoken = spoken
        self._messages = messages

    @classmethod
    def of(cls, messages: Sequence[Message], previous: str = "", facts: Facts | None = None) -> Source:
        """Read what is summed up.

        Args:
            messages: As they are stored.
            previous: What the model wrote about what came before.
            facts: Those of what came before.
        """
        texts = [previous]
        own: list[str] = []
        spoken = [previous]
        for message in messages:
            text = message.text
            texts += _texts(message)
            if is_of_user(message, text):
                own.append(text)
            if message.role in {"user", "assistant"}:
                spoken.append(text[:_SPOKEN])
        if facts is not None:
            rules = [said.text for said in facts.rules + facts.requests]
            own += rules
            texts += rules
            texts += [name.text for name in facts.names]
            texts += [f"{value.name}={value.text}" for value in facts.values]
            texts += [failure.text for failure in facts.failures]
        tongue = tongue_of("\n".join(spoken))
        if not tongue.size:
            tongue = tongue_of("\n".join(text[:_SPOKEN] for text in texts))
        return cls(texts, own, tongue, len(messages) + (facts.messages if facts is not None else 0))

    def has(self, identifier: str) -> bool:
        """Tell whether an identifier stands there, or, of a path, all of its steps."""
        wanted = plain(identifier)
        if wanted in self.text:
            return True
        squeezed = _JOINTS.sub("", wanted)
        if not squeezed or squeezed in self._squeezed:
            return True
        if "/" not in wanted or "://" in wanted:
            return False
        steps: list[str] = _STEP.findall(wanted)
        return all(step in self.text for step in steps) and any(kind_of(step) for step in steps)

    def has_number(self, number: str) -> bool:
        """Tell whether a number stands there, as it is or as another way of writing it."""
        return _value(number) in self._numbers

    def has_text(self, text: str) -> bool:
        """Tell whether a text stands there, upper and lower case aside."""
        return plain(text) in self.text

    def said(self, text: str) -> bool:
        """Tell whether the user said a text, upper and lower case and white space aside."""
        return " ".join(plain(text).split()).rstrip(".。…") in self._own_on_one_line

    @cached_property
    def words(self) -> frozenset[str]:
        """The words of the text that have three letters or more, Chinese ones aside."""
        return frozenset(_WORD.findall(self.text))

    @cached_property
    def _own_on_one_line(self) -> str:
        return " ".join(self.own.split())

    @cached_property
    def _squeezed(self) -> str:
        """The text without what may stand inside of an identifier."""
        return _JOINTS.sub("", self.text)

    @cached_property
    def _numbers(self) -> frozenset[str]:
        """All numbers of the text, and how many messages there are."""
        found = {_value(number) for number in _NUMBER.findall(self.text)}
        found.update(_value(run) for run in _RUN.findall(self.text))
        found.update(scaled for scaled, _ in scaled_in(self.text))
        found.add(str(self._messages))
        # What is written as a share in one text may be written in per cent in another.
        found.update(_written(float(each) * 100) for each in tuple(found) if each.startswith("0."))
        return frozenset(found)


def plain(text: str) -> str:
    """Return a text in small letters, full-width characters as the others."""
    return (text.translate(_WIDE) if _IS_WIDE.search(text) else text).lower()


def scaled_in(text: str) -> Iterator[tuple[str, str]]:
    """Yield each number that is written as 3k or 3万 are: its value, and as it stands."""
    for found in _SCALED.finditer(text):
        yield _written(float(found[1].replace(",", "")) * _SCALES[found[2].lower()]), found[0]


def _value(number: str) -> str:
    """Return a number as it is compared: without commas, leading zeros, zeros at the end of decimals."""
    whole, dot, decimals = number.replace(",", "").partition(".")
    decimals = decimals.rstrip("0")
    return (whole.lstrip("0") or "0") + (dot + decimals if decimals else "")


def _written(number: float) -> str:
    """Return a number that was worked out as it is compared."""
    return _value(f"{number:.6f}")


def _texts(message: Message) -> Iterator[str]:
    """Yield what stands in a message; of JSON with escapes also the strings that it stands for."""
    for each in message.all_texts():
        yield each
        if "\\" in each:
            yield from _unescaped(each)


def _unescaped(text: str) -> Iterator[str]:
    for leaf in leaves_of(text) or ():
        yield leaf.text

"""Bytes written as text, base64 or hexadecimal: no model reads them.

How many characters they had is said in their place. A long word is no blob: letters of both cases and
digits must be mixed as they are in bytes. It does not know what the bytes are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from proxy.textscan.mark import omitted

SMALLEST: Final = 200
"""Characters of the shortest blob."""

_SAMPLE: Final = 2000
# One attempt for each run of these characters: it begins where the run begins.
_RUN: Final = re.compile(rf"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{{{SMALLEST},}}={{0,2}}")
_LONG: Final = 60
_PART: Final = 1 << 18
_LONG_WORD: Final = re.compile(rf"(?<![A-Za-z0-9+/_-])[A-Za-z0-9+/_-]{{{_LONG}}}")
"""What every blob begins with."""
_WRAPPED: Final = re.compile(r"(?:^[A-Za-z0-9+/]{60,80}\r?\n){3,}[A-Za-z0-9+/]{1,80}={0,2}$", re.MULTILINE)


def without_blobs(text: str) -> str:
    """Return the text with a mark in the place of each blob."""
    kept: list[str] = []
    last, has_long_word = 0, False
    for start in _long_words(text):
        has_long_word = True
        run = _RUN.match(text, start) if start >= last else None
        if run is not None:
            kept += text[last:start], _marked(run)
            last = run.end()
    if not has_long_word:
        return text
    text = "".join([*kept, text[last:]])
    return _WRAPPED.sub(_marked, text) if "\n" in text else text


def _long_words(text: str) -> Iterator[int]:
    """Yield where long words begin. Between two parts of the text other threads get their turn."""
    for start in range(0, len(text), _PART):
        for found in _LONG_WORD.finditer(text, start, start + _PART + _LONG - 1):
            yield found.start()


def _marked(found: re.Match[str]) -> str:
    kind = _kind(found[0][:_SAMPLE].replace("\n", ""))
    return found[0] if kind is None else omitted(f"{len(found[0])} characters of {kind}")


def _kind(sample: str) -> str | None:
    """Return what a run of characters is: base64, hexadecimal, or None where it may be words."""
    digits = sum(map(sample.count, "0123456789"))
    if digits * 4 > len(sample) and all(character in "0123456789abcdefABCDEF" for character in sample):
        return "hexadecimal" if len(set(sample)) > 8 else None
    upper = sum(character.isupper() for character in sample)
    lower = sum(character.islower() for character in sample)
    mixed = min(upper, lower) * 6 > len(sample) and digits * 25 > len(sample)
    return "base64" if mixed and len(set(sample)) > 24 else None

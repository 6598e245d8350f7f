"""A token count by classes of characters: within about a tenth, for Chinese within a sixth.

Slower than a vocabulary, since it is Python: it serves where none can be read, or where the operator
prefers it. The weights are fitted to real sessions. It knows no message.
"""

from __future__ import annotations

import re
from typing import Final

_WEIGHTS: Final = (
    # Words of Latin letters; a run without end (base64) is many words.
    (re.compile(r"[A-Za-z\u00c0-\u024f]{1,12}"), 1.14),
    (re.compile(r"[0-9]{1,3}"), 1.83),
    # One space belongs to the word after it.
    (re.compile(r"[ \t\u00a0]{2,128}"), 0.76),
    (re.compile(r"[\r\n]{1,64}"), 0.96),
    (re.compile(r"[!-/:-@\[-`{-~]"), 0.53),
)
"""What is counted as one, and how many tokens one has."""

_BEYOND_LATIN: Final = (
    # Chinese, Japanese and Korean, their punctuation included.
    (
        re.compile(r"[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]"),
        {"cl100k_base": 0.90, "o200k_base": 0.70},
    ),
    # Other alphabets: Greek, Cyrillic, Arabic, Devanagari, Thai …
    (re.compile(r"[\u0250-\u1fff]"), {"cl100k_base": 0.90, "o200k_base": 0.36}),
    # Signs and emoji.
    (
        re.compile(r"[\u2000-\u2e7f\ua000-\uabff\ud7b0-\uf8ff\ufb00-\ufeff\ufff0-\uffff]"),
        {"cl100k_base": 1.68, "o200k_base": 1.68},
    ),
    (re.compile(r"[\U00010000-\U0010ffff]"), {"cl100k_base": 2.24, "o200k_base": 1.40}),
)
"""Other characters, and how many tokens one has in each vocabulary."""


def estimate(text: str, encoding: str) -> int:
    """Return about how many tokens `text` has in the vocabulary `encoding`; 0 only for an empty text."""
    tokens = sum(weight * len(kind.findall(text)) for kind, weight in _WEIGHTS)
    if not text.isascii():
        tokens += sum(weights[encoding] * len(kind.findall(text)) for kind, weights in _BEYOND_LATIN)
    return max(round(tokens), 1) if text else 0

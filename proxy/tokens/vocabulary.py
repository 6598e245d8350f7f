"""Counts the tokens of a text: exactly with OpenAI's vocabularies, or by an estimate without one.

The package contains the vocabularies. A file holds the tokens in order of rank, each after one byte with its length,
compressed with LZMA. tiktoken's own loader is not used, because it downloads vocabularies without a time limit.
"""

from __future__ import annotations

import logging
import lzma
import re
import threading
from collections.abc import Iterator
from functools import cache, lru_cache
from importlib.resources import files
from itertools import chain
from typing import Final, Literal, TypeAlias

from tiktoken import Encoding
from tiktoken.model import encoding_name_for_model

_LOG: Final = logging.getLogger(__name__)

EncodingName: TypeAlias = Literal["cl100k_base", "o200k_base"]

_PATTERNS: Final[dict[EncodingName, str]] = {
    "cl100k_base": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+"
        r"|\s++$|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "o200k_base": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}
"""The patterns by which each vocabulary splits a text before it looks for tokens. They are part of the vocabulary."""

_LONGEST_GAP: Final = 1000  # white space of this length is split, since tiktoken's regular expressions fail on it
_GAP: Final = re.compile(rf"(?<!\s)\s{{{_LONGEST_GAP},}}")  # the look-behind keeps the search linear
_LONGEST_RUN: Final = 20_000
"""Longer runs without white space are split, because tiktoken's time grows faster than their length."""
_RUN: Final = re.compile(rf"(?<!\S)\S{{{_LONGEST_RUN},}}")
_SPACE: Final = re.compile(r"\s")
_AT_ONCE: Final = 131_072  # characters that are tokenized in one step, while other threads wait
_SEARCHED: Final = 4_096  # the last characters of a step, where a place to cut is searched for
_BETWEEN_WORDS: Final = re.compile(r"(?<=[a-z]) (?=[a-z])")
_PROBE: Final = "Words, 中文 and 1234"


@lru_cache(maxsize=1024)
def encoding_of(model: str) -> EncodingName:
    """Return the vocabulary of a model (`gpt-4o`, `openai/gpt-4o`) by tiktoken's table, or the newest one."""
    try:
        name = encoding_name_for_model(model.rpartition("/")[2])
    except KeyError:
        return "o200k_base"
    # p50k and r50k are older than both; o200k_harmony is o200k with more special tokens.
    return "o200k_base" if name.startswith("o200k") else "cl100k_base"


_WEIGHTS: Final = (
    # Words of Latin letters. A long run such as base64 counts as many words.
    (re.compile(r"[A-Za-z\u00c0-\u024f]{1,12}"), 1.14),
    (re.compile(r"[0-9]{1,3}"), 1.83),
    # One space belongs to the word after it.
    (re.compile(r"[ \t\u00a0]{2,128}"), 0.76),
    (re.compile(r"[\r\n]{1,64}"), 0.96),
    (re.compile(r"[!-/:-@\[-`{-~]"), 0.53),
)
"""Patterns of one unit, and the tokens of a unit. The weights are fitted to real sessions."""

_BEYOND_LATIN: Final = (
    # Chinese, Japanese and Korean, including punctuation.
    (re.compile(r"[\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef]"), {"cl100k_base": 0.90, "o200k_base": 0.70}),
    # Other alphabets: Greek, Cyrillic, Arabic, Devanagari, Thai …
    (re.compile(r"[\u0250-\u1fff]"), {"cl100k_base": 0.90, "o200k_base": 0.36}),
    # Symbols and emoji.
    (
        re.compile(r"[\u2000-\u2e7f\ua000-\uabff\ud7b0-\uf8ff\ufb00-\ufeff\ufff0-\uffff]"),
        {"cl100k_base": 1.68, "o200k_base": 1.68},
    ),
    (re.compile(r"[\U00010000-\U0010ffff]"), {"cl100k_base": 2.24, "o200k_base": 1.40}),
)
"""Patterns of other characters, and the tokens of one character in each vocabulary."""


def estimate(text: str, encoding: str) -> int:
    """Return an estimate of the tokens of `text` in the vocabulary `encoding`. It is 0 only for an empty text.

    The error is about 10 %, for Chinese up to 17 %. Estimating is slower than counting with a vocabulary.
    """
    tokens = 0.0
    for window in _windows(text):
        tokens += sum(weight * len(kind.findall(window)) for kind, weight in _WEIGHTS)
        if not window.isascii():
            tokens += sum(weights[encoding] * len(kind.findall(window)) for kind, weights in _BEYOND_LATIN)
    return max(round(tokens), 1) if text else 0


class Vocabulary:
    """One vocabulary, built when it is first used. Thread-safe."""

    def __init__(self, name: EncodingName, *, estimated: bool = False) -> None:
        """Build nothing yet. With `estimated`, nothing is ever built and every count is an estimate."""
        self.name: Final = name
        self._encoding: Encoding | None = None
        self._tried = estimated
        self._building = threading.Lock()

    @property
    def is_built(self) -> bool:
        """Whether nothing needs to be built before counting."""
        return self._tried

    def build(self) -> Encoding | None:
        """Return the tokenizer, building it the first time (0.4 s), or None if counts are estimated."""
        with self._building:
            if not self._tried:
                try:
                    self._encoding = _load(self.name)
                except (OSError, EOFError, lzma.LZMAError, ValueError):
                    _LOG.exception("the vocabulary %s cannot be read: tokens are estimated", self.name)
                self._tried = True
        return self._encoding

    def count(self, text: str) -> int:
        """Return the tokens of `text`. Special tokens count as plain text, a lone surrogate as one character."""
        encoding = self._encoding or self.build()
        if encoding is None:
            return estimate(text, self.name)
        tokens = 0
        for piece in (text,) if len(text) < _LONGEST_GAP else chain.from_iterable(map(_windows, _pieces(text))):
            try:
                tokens += len(encoding.encode_ordinary(piece))
            except BaseException as why:
                if type(why).__name__ != "PanicException":
                    raise
                _LOG.warning("tiktoken failed on %d characters: their tokens are estimated", len(piece))
                tokens += estimate(piece, self.name)
        return tokens


def _windows(text: str) -> Iterator[str]:
    """Yield a long text in windows. All tokens at once would take ten times the memory of the text.

    Windows are cut at the space between two words, which no token spans, if there is one near the end.
    """
    start = 0
    while len(text) - start > _AT_ONCE:
        found = _BETWEEN_WORDS.search(text, start + _AT_ONCE - _SEARCHED, start + _AT_ONCE)
        end = start + _AT_ONCE if found is None else found.start()
        yield text[start:end]
        start = end
    yield text[start:]


def _pieces(text: str) -> list[str]:
    """Split `text` into pieces without a gap or a run that is too long."""
    pieces = [text]
    # A gap that is too long fills at least one of these blocks, so most texts need no search for gaps.
    block = _LONGEST_GAP // 2
    if any(text[at : at + block].isspace() for at in range(0, len(text), block)):
        pieces = _split(text, _GAP, _LONGEST_GAP - 1)
    block = _LONGEST_RUN // 2
    if any(not _SPACE.search(text, at, at + block) for at in range(0, len(text) - block, block)):
        pieces = [part for piece in pieces for part in _split(piece, _RUN, _LONGEST_RUN)]
    return pieces


def _split(text: str, long: re.Pattern[str], step: int) -> list[str]:
    """Split a text into pieces, and each match of `long` into pieces of `step` characters."""
    pieces: list[str] = []
    start = 0
    for found in long.finditer(text):
        pieces.append(text[start : found.start()])
        pieces += [text[at : min(at + step, found.end())] for at in range(found.start(), found.end(), step)]
        start = found.end()
    pieces.append(text[start:])
    return pieces


@cache
def _load(name: EncodingName) -> Encoding:
    """Return tiktoken's tokenizer. It is shared within the process."""
    encoding, ranks = _made(name)
    before = encoding.encode_ordinary(_PROBE)
    # tiktoken uses its own copy of the ranks. Free this one, which takes as much memory again.
    ranks.clear()
    try:
        if encoding.encode_ordinary(_PROBE) == before:
            return encoding
    except Exception:  # noqa: BLE001 - another version of tiktoken may raise anything here
        _LOG.debug("this tiktoken needs the ranks that it was made from")
    return _made(name)[0]


def _made(name: EncodingName) -> tuple[Encoding, dict[bytes, int]]:
    packed = (files("proxy.tokens") / "vocab" / f"{name}.xz").read_bytes()
    content = lzma.decompress(packed)
    ranks: dict[bytes, int] = {}
    at = 0
    while at < len(content):
        end = at + 1 + content[at]
        ranks[content[at + 1 : end]] = len(ranks)
        at = end
    return Encoding(name, pat_str=_PATTERNS[name], mergeable_ranks=ranks, special_tokens={}), ranks

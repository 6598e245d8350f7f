"""OpenAI's vocabularies, shipped with the package, and a count that no text can break.

The file of a vocabulary holds its tokens in order of rank, each after a byte with its length, packed
by LZMA. tiktoken's own loader is never used: it fetches vocabularies from the network, without a time
limit. It knows no message.
"""

from __future__ import annotations

import logging
import lzma
import re
import threading
from functools import lru_cache
from importlib.resources import files
from typing import Final, Literal, TypeAlias

from tiktoken import Encoding
from tiktoken.model import encoding_name_for_model

from proxy.tokens.estimate import estimate

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
"""How each vocabulary divides a text before it looks for tokens; part of the vocabulary."""

_LONGEST_GAP: Final = 1000
_GAP: Final = re.compile(rf"(?<!\s)\s{{{_LONGEST_GAP},}}")
_LONGEST_RUN: Final = 20_000
"""Characters without white space: of a longer run of letters each takes tiktoken longer."""
_RUN: Final = re.compile(rf"(?<!\S)\S{{{_LONGEST_RUN},}}")
_SPACE: Final = re.compile(r"\s")
"""White space on which tiktoken's regular expressions give up. The look-behind keeps the search linear."""


@lru_cache(maxsize=1024)
def encoding_of(model: str) -> EncodingName:
    """Return the vocabulary for a model: by tiktoken's table (or what is near to it), else the newest.

    A provider's prefix (`openai/gpt-4o`) is passed over.
    """
    try:
        name = encoding_name_for_model(model.rpartition("/")[2])
    except KeyError:
        return "o200k_base"
    # p50k and r50k are older than both; o200k_harmony is o200k with more special tokens.
    return "o200k_base" if name.startswith("o200k") else "cl100k_base"


class Vocabulary:
    """One vocabulary, built when it is first asked. May be used by several threads at once."""

    def __init__(self, name: EncodingName) -> None:
        """Build nothing yet."""
        self.name: Final = name
        self._encoding: Encoding | None = None
        self._tried = False
        self._building = threading.Lock()

    def build(self) -> Encoding | None:
        """Return the tokenizer, building it the first time (0.4 s); None where the file cannot be read."""
        if not self._tried:
            with self._building:
                if not self._tried:
                    try:
                        self._encoding = _load(self.name)
                    except (OSError, EOFError, lzma.LZMAError, ValueError):
                        _LOG.exception("the vocabulary %s cannot be read: tokens are estimated", self.name)
                    self._tried = True
        return self._encoding

    def count(self, text: str) -> int:
        """Return the number of tokens of `text`: special tokens are text, lone surrogates one character."""
        encoding = self._encoding or self.build()
        if encoding is None:
            return estimate(text, self.name)
        if len(text) < _LONGEST_GAP:  # nearly always
            return self._count(encoding, text)
        return sum(self._count(encoding, piece) for piece in _pieces(text))

    def _count(self, encoding: Encoding, text: str) -> int:
        try:
            return len(encoding.encode_ordinary(text))
        except BaseException as why:
            if type(why).__name__ != "PanicException":
                raise
            _LOG.warning("tiktoken failed on a text of %d characters: its tokens are estimated", len(text))
            return estimate(text, self.name)


def _pieces(text: str) -> list[str]:
    """Return `text` in pieces, none with a gap or a run that is too long."""
    pieces = [text]
    # What is too long fills one of these blocks; the look at them is all that most texts cost.
    block = _LONGEST_GAP // 2
    if any(text[at : at + block].isspace() for at in range(0, len(text), block)):
        pieces = _split(text, _GAP, _LONGEST_GAP - 1)
    block = _LONGEST_RUN // 2
    if any(not _SPACE.search(text, at, at + block) for at in range(0, len(text) - block, block)):
        pieces = [part for piece in pieces for part in _split(piece, _RUN, _LONGEST_RUN)]
    return pieces


def _split(text: str, long: re.Pattern[str], step: int) -> list[str]:
    """Return a text in pieces: what is too long by itself, in steps."""
    pieces: list[str] = []
    start = 0
    for found in long.finditer(text):
        pieces.append(text[start : found.start()])
        pieces += [text[at : min(at + step, found.end())] for at in range(found.start(), found.end(), step)]
        start = found.end()
    pieces.append(text[start:])
    return pieces


def _load(name: EncodingName) -> Encoding:
    packed = (files("proxy.tokens") / "vocab" / f"{name}.xz").read_bytes()
    content = lzma.decompress(packed)
    ranks: dict[bytes, int] = {}
    at = 0
    while at < len(content):
        end = at + 1 + content[at]
        ranks[content[at + 1 : end]] = len(ranks)
        at = end
    return Encoding(name, pat_str=_PATTERNS[name], mergeable_ranks=ranks, special_tokens={})

"""Counts the tokens of texts, messages and JSON for a model, with a cache.

The overhead of a message beside its text is a rule of thumb, since providers do not publish theirs. Claude, Qwen,
DeepSeek and others have their own vocabularies, and the cost of tools and images is not published either. Therefore the
ratio of the upstream's counts to ours is learnt for each model from the reported usage, which covers everything.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b
from typing import Final

from cachetools import LRUCache
from msgspec import Struct

from proxy.config import TokenMethod
from proxy.dialects import Message, body_id
from proxy.dialects.jsontext import read, write
from proxy.tokens.vocabulary import EncodingName, Vocabulary, encoding_of

MESSAGE_TOKENS: Final = 4  # tokens of a message besides its text: its role and the separator
MEDIA_TOKENS: Final = 765  # tokens of an image, a sound or a file of any size: those of 1024 x 1024 pixels
LOW_DETAIL_TOKENS: Final = 85  # tokens of an image that is sent with `detail: low`

ENTRY_BYTES: Final = 320
"""Approximate memory of one cached count: a key of some forty characters, a number, and table space."""
_CACHE_BYTES: Final = 8 * 1024 * 1024
_JSON_COUNTS: Final = 3000  # number of JSON texts (lists of tools) whose counts are cached
_FEWEST_TOKENS: Final = 500  # smaller requests are ignored, since the overhead of messages dominates
_LOWEST: Final = 0.5
_HIGHEST: Final = 2.0  # ratios outside these bounds are ignored: the counts cannot be of the same content
_WEIGHT: Final = 0.2  # weight of a new observation against all earlier ones


class Cached(Struct, frozen=True, kw_only=True):
    """The size of the cache."""

    cached_messages: int
    total_cached_tokens: int


def learnt(scale: float | None, counted: int, reported: int) -> float | None:
    """Return the scale after one more request. Small requests and implausible ratios leave it unchanged.

    The first observation sets the scale; each later one moves it by a fifth of the difference. `counted` is our own
    unscaled count of everything that was sent; `reported` is the upstream's count, including cached tokens.
    """
    if min(counted, reported) < _FEWEST_TOKENS or not _LOWEST <= reported / counted <= _HIGHEST:
        return scale
    ratio = reported / counted
    return ratio if scale is None else scale + _WEIGHT * (ratio - scale)


def _compact(raw: bytes) -> bytes:
    """Return a JSON text without white space and escapes, which models do not see. Other texts are unchanged."""
    try:
        return write(read(raw))
    except ValueError:
        return raw


def rounded(scale: float) -> float:
    """Return a scale rounded to hundredths. An unrounded scale would shift every trigger a little at each request."""
    return round(scale, 2)


class Calibration:
    """The scale of each model in this process, for display. Thread-safe."""

    def __init__(self, models: int = 1024) -> None:
        """Create an empty table for at most `models` models. It is bounded because clients choose the names."""
        self._ratios: LRUCache[str, float] = LRUCache(models)
        self._lock = threading.Lock()

    def learn(self, model: str, counted: int, reported: int) -> None:
        """Learn from one request; the counts are those of `learnt`."""
        with self._lock:
            scale = learnt(self._ratios.get(model), counted, reported)
            if scale is not None:
                self._ratios[model] = scale

    def snapshot(self) -> dict[str, float]:
        """Return the scale of every known model, by name."""
        with self._lock:
            ratios = sorted(self._ratios.items())
        return {model: rounded(ratio) for model, ratio in ratios}


class TokenCounter:
    """Counts tokens and caches the counts. One per process; thread-safe."""

    def __init__(self, method: TokenMethod = "tiktoken", *, cache_bytes: int = _CACHE_BYTES) -> None:
        """Create a counter whose cache of messages takes about `cache_bytes`.

        `tiktoken` counts with a vocabulary, `estimate` by classes of characters.
        """
        self.calibration: Final = Calibration()
        """Ratios of the upstreams' counts to these counts. They do not change the counts, and `clear` keeps them."""
        estimated = method == "estimate"
        self._vocabularies: dict[EncodingName, Vocabulary] = {
            name: Vocabulary(name, estimated=estimated) for name in ("o200k_base", "cl100k_base")
        }
        self._lock = threading.Lock()
        self._limit = max(cache_bytes // ENTRY_BYTES, 1)
        self._counts: OrderedDict[tuple[EncodingName, str], int] = OrderedDict()
        """Counts of messages by encoding and body id, the least recently used first."""
        self._json: dict[tuple[EncodingName, bytes], int] = {}
        """Counts of JSON texts by encoding and hash, the oldest first."""

    def warm(self) -> None:
        """Build all vocabularies (0.5 s)."""
        for vocabulary in self._vocabularies.values():
            vocabulary.build()

    def is_built(self, model: str) -> bool:
        """Tell whether the vocabulary of `model` is built. If not, the first count for it takes 0.3 s."""
        return self._vocabularies[encoding_of(model)].is_built

    def build(self, model: str) -> None:
        """Build the vocabulary of `model`. Call it in a thread."""
        self._vocabularies[encoding_of(model)].build()

    def text(self, text: str, model: str) -> int:
        """Return the tokens of `text` for `model`. Unknown models use the vocabulary of OpenAI's newest."""
        return self._vocabularies[encoding_of(model)].count(text)

    def message(self, message: Message, model: str) -> int:
        """Return the tokens of `message` for `model`: its countable content plus `MESSAGE_TOKENS`."""
        return self.messages((message,), model)[0]

    def messages(self, messages: Sequence[Message], model: str) -> list[int]:
        """Return the tokens of each of `messages`. Counts are cached by the bytes of the message."""
        encoding = encoding_of(model)
        keys: list[tuple[EncodingName, str]] = []
        for message in messages:  # hash before taking the lock, because hashing a long text takes time
            facts = message.facts
            keys.append((encoding, (facts.body if facts is not None else None) or body_id(message.raw)))
        cached = self._counts
        counts: list[int] = []
        new: list[int] = []
        with self._lock:
            for place, key in enumerate(keys):
                count = cached.get(key)
                if count is None:
                    new.append(place)
                    counts.append(0)
                else:
                    cached.move_to_end(key)
                    counts.append(count)
        for place in new:
            counts[place] = self._new_count(messages[place], keys[place])
        return counts

    def json(self, raw: bytes, model: str) -> int:
        """Return the tokens of a JSON text, such as a request's tools, for `model`. Its formatting does not matter.

        The count is cached.
        """
        encoding = encoding_of(model)
        key = (encoding, blake2b(raw, digest_size=16).digest())
        count = self._json.get(key)
        if count is None:
            count = self._vocabularies[encoding].count(_compact(raw).decode("utf-8", "replace"))
            with self._lock:
                self._json[key] = count
                if len(self._json) > _JSON_COUNTS:
                    del self._json[next(iter(self._json))]
        return count

    @property
    def cached(self) -> Cached:
        """The number of cached messages and the sum of their tokens."""
        with self._lock:
            return Cached(cached_messages=len(self._counts), total_cached_tokens=sum(self._counts.values()))

    def clear(self) -> None:
        """Drop all cached counts."""
        with self._lock:
            self._counts.clear()
            self._json.clear()

    def _new_count(self, message: Message, key: tuple[EncodingName, str]) -> int:
        countable = message.countable()
        count = sum(map(self._vocabularies[key[0]].count, countable.texts), MESSAGE_TOKENS)
        count += MEDIA_TOKENS * countable.media + LOW_DETAIL_TOKENS * countable.small_images
        with self._lock:
            self._counts[key] = count
            if len(self._counts) > self._limit:
                self._counts.popitem(last=False)
        return count

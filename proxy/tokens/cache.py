"""Counts that are known already: the least recently used go first. It counts nothing itself."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from typing import Final

from msgspec import Struct

ENTRY_BYTES: Final = 320
"""What one entry takes, about: a key of some forty letters, a number, and their places in the table."""


class Cached(Struct, frozen=True, kw_only=True):
    """How much is in a cache."""

    cached_messages: int
    """Number of messages whose count is known."""
    total_cached_tokens: int
    """Sum of these counts."""


class CountCache:
    """A table from keys to token counts, bounded in size; may be used by several threads at once.

    Keys should be short (a digest, not the text), since an entry is taken for `ENTRY_BYTES`.
    """

    def __init__(self, max_bytes: int) -> None:
        """Begin empty, to hold at most `max_bytes` bytes, about."""
        self._limit = max(max_bytes // ENTRY_BYTES, 1)
        self._counts: OrderedDict[Hashable, int] = OrderedDict()
        self._tokens = 0
        self._lock = threading.Lock()

    def get(self, key: Hashable) -> int | None:
        """Return the count under `key`, which becomes the most recently used; None where there is none."""
        with self._lock:
            count = self._counts.get(key)
            if count is not None:
                self._counts.move_to_end(key)
            return count

    def get_all(self, keys: Sequence[Hashable]) -> list[int | None]:
        """Return what `get` returns for each of `keys`, all at one time."""
        with self._lock:
            found = list(map(self._counts.get, keys))
            used = self._counts.move_to_end
            for place, count in enumerate(found):
                if count is not None:
                    used(keys[place])
            return found

    def put(self, key: Hashable, count: int) -> None:
        """Keep `count` under `key`, and forget the least recently used where there are too many."""
        with self._lock:
            self._tokens += count - self._counts.pop(key, 0)
            self._counts[key] = count
            if len(self._counts) > self._limit:
                self._tokens -= self._counts.popitem(last=False)[1]

    def clear(self) -> None:
        """Forget everything."""
        with self._lock:
            self._counts.clear()
            self._tokens = 0

    @property
    def cached(self) -> Cached:
        """How much is in it now."""
        with self._lock:
            return Cached(cached_messages=len(self._counts), total_cached_tokens=self._tokens)

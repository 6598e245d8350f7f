"""Caches bounded by the size of their values. They evict the least recently used, by generations."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def scaled(size: int) -> int:
    """Return the limit for this process, given the limit `size` on a small machine."""
    return size * SharedRoom.factor


class SharedRoom:
    """A size limit that several caches share. If a process uses only one of them, that one gets all of it."""

    factor: ClassVar[int] = 1  # multiple of the limit on a small machine; set once, before serving

    def __init__(self, size: int) -> None:
        self._size: Final = size
        self.taken = 0  # by the younger generations of all caches
        self.caches: Final[list[Generations[Any, Any]]] = []

    def make(self, size: int) -> bool:
        """Make room for a value. If there is too little, all caches begin a new generation.

        Return whether the value may be stored: not if it is larger than half of the limit.
        """
        half = self._size * self.factor // 2
        if size > half:
            return False
        if self.taken + size > half:
            for cache in self.caches:
                cache.grow_old()
            self.taken = 0
        return True


class Generations(Generic[Key, Value]):
    """A cache in two generations.

    A value that is used moves to the younger generation. When the younger generations have filled half of the room, the
    older ones are evicted and the younger ones take their place. Threads need no lock: each step is one dictionary
    operation, and a race only evicts a value too early, or stores it twice for a while.
    """

    def __init__(self, room: int | SharedRoom, size_of: Callable[[Value], int]) -> None:
        """Start empty. The values may take about `room`, together with those of other caches if it is shared."""
        self._room: Final = SharedRoom(room) if isinstance(room, int) else room
        self._room.caches.append(self)
        self._size_of: Final = size_of
        self._young: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}

    @property
    def size(self) -> int:
        """The size of all its values, computed anew."""
        return sum(map(self._size_of, (self._old | self._young).values()))

    def recall(self, keys: Sequence[Key]) -> list[Value | None]:
        """Return the cached value of each key; None for a key without one."""
        found = list(map(self._young.get, keys))
        if None in found:
            old = self._old
            for place, value in enumerate(found):
                if value is None and (older := old.get(keys[place])) is not None:
                    found[place] = older
                    self.put(keys[place], older)
        return found

    def put(self, key: Key, value: Value) -> None:
        """Store a value, replacing the key's previous one. A value larger than half of the room is not stored."""
        size = self._size_of(value)
        if not self._room.make(size):
            return
        before = self._young.get(key)
        self._young[key] = value
        self._room.taken += size if before is None else size - self._size_of(before)

    def grow_old(self) -> None:
        """Evict the older generation. The younger one takes its place."""
        self._old, self._young = self._young, {}

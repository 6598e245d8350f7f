"""A cache bounded by the size of its values: what was not asked for the longest goes first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


class Generations(Generic[Key, Value]):
    """Values by their keys, in two generations.

    What is used moves to the younger one; when that has half of the room, the older one is forgotten and the
    younger one takes its place. Threads need no lock: each step is one step of a dictionary, and a race only
    forgets something too early, or holds a value twice for a while.
    """

    def __init__(self, room: int, size_of: Callable[[Value], int]) -> None:
        """Begin empty, to hold values of at most about `room` together."""
        self._half: Final = room // 2
        self._size_of: Final = size_of
        self._young: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}
        self._size = 0

    @property
    def size(self) -> int:
        """How much it holds, added up anew."""
        return sum(map(self._size_of, (self._old | self._young).values()))

    def recall(self, keys: Sequence[Key]) -> list[Value | None]:
        """Return what is held of each key; None for what is not."""
        found = list(map(self._young.get, keys))
        if None in found:
            old = self._old
            for place, value in enumerate(found):
                if value is None and (older := old.get(keys[place])) is not None:
                    found[place] = older
                    self.put(keys[place], older)
        return found

    def put(self, key: Key, value: Value) -> None:
        """Hold a value in the place of the key's last one; a value that takes half of the room is not held."""
        size = self._size_of(value)
        if size > self._half:
            return
        if self._size + size > self._half:
            self._old, self._young, self._size = self._young, {}, 0
        before = self._young.get(key)
        if before is not None:
            size -= self._size_of(before)
        self._young[key] = value
        self._size += size

"""Caches bounded by the size of their values: what was not asked for the longest goes first."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, ClassVar, Final, Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)
Value = TypeVar("Value")


def scaled(size: int) -> int:
    """Return how much this process may hold of what it holds `size` of on a small machine."""
    return size * SharedRoom.factor


class SharedRoom:
    """Room that several caches share: where a process uses one of them alone, that one has it all."""

    factor: ClassVar[int] = 1  # how much larger it is than on a small machine; set once, before anything is served

    def __init__(self, size: int) -> None:
        self._size: Final = size
        self.taken = 0  # by the younger generations
        self.caches: Final[list[Generations[Any, Any]]] = []

    def make(self, size: int) -> bool:
        """Make room for a value: where there is too little, all caches begin a new generation.

        Return whether it may be held: not if it takes more than a generation has.
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
    """Values by their keys, in two generations.

    What is used moves to the younger one; when that has half of the room, the older one is forgotten and the
    younger one takes its place. Threads need no lock: each step is one step of a dictionary, and a race only
    forgets something too early, or holds a value twice for a while.
    """

    def __init__(self, room: int | SharedRoom, size_of: Callable[[Value], int]) -> None:
        """Begin empty, to hold values of at most about `room` together, with those of other caches if it is shared."""
        self._room: Final = SharedRoom(room) if isinstance(room, int) else room
        self._room.caches.append(self)
        self._size_of: Final = size_of
        self._young: dict[Key, Value] = {}
        self._old: dict[Key, Value] = {}

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
        if not self._room.make(size):
            return
        before = self._young.get(key)
        self._young[key] = value
        self._room.taken += size if before is None else size - self._size_of(before)

    def grow_old(self) -> None:
        """Forget the older generation; the younger one takes its place."""
        self._old, self._young = self._young, {}

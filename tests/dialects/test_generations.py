"""What is held is bounded, and what was not asked for the longest goes first."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.generations import Generations, SharedRoom, scaled

SIZE = 10
ROOM = 5 * SIZE
"""Two values in each half."""


class Value:
    """Something that is equal to nothing else."""

    def __init__(self, name: int, size: int = SIZE) -> None:
        self.name, self.size = name, size


def holding(*names: int, room: int = ROOM) -> Generations[int, Value]:
    known = Generations[int, Value](room, size_of)
    for name in names:
        known.put(name, Value(name))
    return known


def size_of(value: Value) -> int:
    return value.size


def held(known: Generations[int, Value], *names: int) -> list[int]:
    return [found.name for found in known.recall(names) if found is not None]


def test_values_are_recalled_in_the_order_of_the_keys() -> None:
    known = holding(1)
    two = Value(2)
    known.put(2, two)
    found = known.recall([2, 3, 1, 2])
    assert [value and value.name for value in found] == [2, None, 1, 2]
    assert found[0] is two
    assert known.recall([]) == []


def test_the_least_recently_used_value_is_forgotten_first() -> None:
    known = holding(1, 2, 3)
    assert held(known, 1) == [1]
    for name in (4, 5):
        known.put(name, Value(name))
    assert held(known, 1, 2, 3, 4, 5) == [1, 3, 4, 5]


def test_a_value_that_takes_half_of_the_room_is_not_held() -> None:
    known = Generations[int, Value](ROOM, size_of)
    known.put(1, Value(1, ROOM // 2 + 1))
    assert held(known, 1) == []
    known.put(1, Value(1, ROOM // 2))
    assert held(known, 1) == [1]


def test_another_value_takes_the_place_of_the_one_before_and_of_its_size() -> None:
    known = holding(1)
    newer = Value(2, SIZE // 2)
    known.put(1, newer)
    assert known.recall([1]) == [newer]
    assert known.size == SIZE // 2
    for _ in range(9):  # none of them makes it forget
        known.put(1, newer)
    assert known.size == SIZE // 2
    old = holding(0, 1)
    for _ in range(9):
        old.put(1, Value(1))
    old.put(2, Value(2))
    assert held(old, 0) == [0]


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 2 * SIZE)), max_size=40))
def test_the_bound_holds_whatever_is_put_and_recalled(steps: list[tuple[bool, int, int]]) -> None:
    known = holding()
    for puts, name, size in steps:
        if puts:
            known.put(name, Value(name, size))
            assert held(known, name) == [name]
        else:
            held(known, name)
        assert 0 <= known.size <= ROOM
    put = {name for puts, name, _ in steps if puts}
    assert held(known, *(set(range(10)) - put)) == []


def test_caches_that_share_room_hold_no_more_together_and_one_may_have_it_all() -> None:
    room = SharedRoom(ROOM)
    first, other = (Generations[int, Value](room, size_of) for _ in range(2))
    for name in range(20):
        first.put(name, Value(name))
    assert held(first, 18, 19) == [18, 19]
    for name in range(20):
        (first, other)[name % 2].put(name, Value(name))
        assert 0 < first.size + other.size <= ROOM
    for name in range(4):
        other.put(name, Value(name))
    assert (held(first, *range(20)), held(other, 2, 3)) == ([], [2, 3])


def test_where_there_is_more_memory_more_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    few = holding()
    monkeypatch.setattr(SharedRoom, "factor", 3)
    for name in range(100):
        few.put(name, Value(name))
    assert ROOM < few.size <= 3 * ROOM
    assert scaled(7) == 21


def test_many_threads_may_use_it_at_once() -> None:
    known = holding()

    def work(turn: int) -> bool:
        known.put(turn % 9, Value(turn % 9))
        (found,) = known.recall([turn % 7])
        return found is None or found.name == turn % 7

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(800)))
    assert known.size < (5 + 8 + 1) * SIZE  # where threads meet, each may bring a value too much

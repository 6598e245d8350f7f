from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from hypothesis import given
from hypothesis import strategies as st

from proxy.wire.facts import Facts, FactsByText

LARGE = 10_000
"""Bytes of a text beside which nothing else counts much."""


def text(name: int) -> bytes:
    return b"%d" % name * LARGE


def facts(name: int) -> Facts:
    return Facts(text(name), "user", has_own_fields=False, has_calls=True)


def test_what_was_kept_is_recalled_by_an_equal_text_in_the_order_asked_for() -> None:
    known = FactsByText()
    one, two = facts(1), facts(2)
    known.keep([one, two])
    assert known.recall([text(2), text(3), text(1), text(2)]) == [two, None, one, two]
    assert known.recall([]) == []


def test_new_facts_know_no_more_than_they_are_told() -> None:
    new = Facts(b"{}", "tool", has_own_fields=True, has_calls=True)
    assert (new.raw, new.role, new.has_own_fields) == (b"{}", "tool", True)
    assert (new.content, new.body, new.step, new.ties) == (None, None, None, None)


def test_the_first_facts_of_a_text_stay() -> None:
    known = FactsByText()
    first = facts(1)
    known.keep([first])
    size = known.size
    known.keep([facts(1), facts(1)])
    assert known.recall([text(1)]) == [first]
    assert known.size == size


def held(known: FactsByText, *names: int) -> list[int]:
    return [name for name, found in zip(names, known.recall(list(map(text, names))), strict=True) if found]


def test_what_was_not_asked_for_goes_first() -> None:
    known = FactsByText(5 * LARGE)  # two texts in each half
    known.keep(map(facts, (1, 2, 3)))
    assert held(known, 1) == [1]
    known.keep(map(facts, (4, 5)))
    assert held(known, 1, 2, 3, 4, 5) == [1, 3, 4, 5]


def test_a_text_that_would_take_half_of_the_room_is_not_held() -> None:
    known = FactsByText(2 * LARGE)
    known.keep([facts(1)])
    assert known.recall([text(1)]) == [None]
    assert known.size == 0


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9)), max_size=40))
def test_the_bound_holds_whatever_is_kept_and_recalled(steps: list[tuple[bool, int]]) -> None:
    bound = 5 * LARGE
    known = FactsByText(bound)
    for keeps, name in steps:
        if keeps:
            known.keep([facts(name)])
            assert held(known, name) == [name]
        else:
            held(known, name)
        assert 0 <= known.size <= bound
    asked = {name for _, name in steps}
    assert held(known, *(set(range(10)) - asked)) == []


def test_many_threads_may_use_it_at_once() -> None:
    known = FactsByText(5 * LARGE)

    def work(turn: int) -> bool:
        known.keep([facts(turn % 9)])
        (found,) = known.recall([text(turn % 7)])
        return found is None or found.raw == text(turn % 7)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(work, range(800)))
    assert known.size < (5 + 8 + 1) * LARGE  # where threads meet, each may bring a text too much

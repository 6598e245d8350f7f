from __future__ import annotations

from proxy.dialects import Facts
from proxy.dialects.chat.message import FactsByText

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


def test_facts_of_a_short_text_take_some_room_too() -> None:
    known = FactsByText()
    known.keep([Facts(b"{}", "user", has_own_fields=False, has_calls=False)])
    assert known.size > 500

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.recall.lines import pattern_of
from proxy.recall.page import LONGEST, Pages

ALL = slice(None)
LONG = "x" * (2 * LONGEST) + "needle" + "y" * 10
"""A line that counts as three."""


def test_a_text_has_its_lines() -> None:
    pages = Pages("one\n\nthree\n")
    assert [pages.line(number) for number in range(1, len(pages) + 1)] == ["one", "", "three", ""]
    assert [pages.number_at(place) for place in (0, 2, 3, 4, 5, 9)] == [1, 1, 1, 2, 3, 3]
    assert pages.from_to(ALL, 100) == (1, 4, "one\n\nthree\n")
    assert pages.from_to(slice(1, 3), 100) == (2, 3, "\nthree")
    assert pages.from_to(slice(3, 99), 100) == (4, 4, "")
    assert pages.from_to(slice(7, 9), 100) == (5, 4, "")
    assert len(Pages("")) == 1


def test_a_long_line_counts_as_several_and_is_shown_as_it_is() -> None:
    pages = Pages(f"first\n{LONG}\nlast")
    assert len(pages) == 5
    assert pages.from_to(slice(1, 4), 10 * LONGEST) == (2, 4, LONG)
    assert pages.from_to(slice(3, 5), 100)[2] == f"needle{'y' * 10}\nlast"


def test_as_much_is_shown_as_there_is_room_for() -> None:
    pages = Pages("\n".join(["12345"] * 10))
    assert pages.from_to(ALL, 17) == (1, 3, "12345\n12345\n12345")
    assert pages.from_to(ALL, 16) == (1, 2, "12345\n12345")
    assert pages.from_to(ALL, 0) == (1, 1, "12345")
    assert pages.from_to(slice(8, 10), 17) == (9, 10, "12345\n12345")


@given(st.text("ab\n", max_size=200), st.integers(1, 40))
def test_page_after_page_is_the_whole_text(text: str, room: int) -> None:
    text *= 100  # with lines longer than what counts as one
    pages = Pages(text)
    parts, first = [], 1
    while first <= len(pages):
        number, last, part = pages.from_to(slice(first - 1, None), room * 100)
        assert number == first <= last
        parts.append(part)
        first = last + 1
        if first <= len(pages) and pages.start(first) > pages.start(last) + len(pages.line(last)):
            parts.append("\n")
    assert "".join(parts) == text


def test_lines_are_found() -> None:
    pages = Pages("red\nblue\nred")
    assert list(pages.found(pattern_of("red"), ALL)) == [(1, "red"), (3, "red")]
    assert list(pages.found(pattern_of("red"), slice(1, 3))) == [(3, "red")]
    assert list(pages.found(pattern_of("x"), ALL)) == []
    assert list(pages.found(pattern_of("^$"), ALL)) == []
    assert list(Pages("\n").found(pattern_of("^$"), ALL)) == [(1, ""), (2, "")]


def test_of_a_long_line_what_is_around_is_shown() -> None:
    pages = Pages(f"needle\n{LONG}")
    assert list(pages.found(pattern_of("needle"), ALL)) == [
        (1, "needle"),
        (4, f"…{'x' * 150}needle{'y' * 10}"),
    ]
    assert list(pages.found(pattern_of("needle"), slice(1, 3))) == []
    assert len(list(pages.found(pattern_of("needle"), slice(3, 4)))) == 1
    assert len(list(pages.found(pattern_of("x"), ALL))) == 3  # of one line only the first ones
    assert [number for number, _ in pages.found(pattern_of("x|y"), slice(2, 3))] == [3, 3, 3]
    assert [number for number, _ in pages.found(pattern_of("n|y"), slice(3, 4))] == [4, 4, 4]


def test_a_part_of_a_line_shows_that_it_is_one() -> None:
    pages = Pages(f"before\n{LONG}\nafter")
    assert pages.near(2, 3) == "before"
    assert pages.near(7, 8) == "x" * 151 + "…"
    assert pages.near(7 + len(LONG), 7 + len(LONG)) == f"…{LONG[-150:]}"
    assert pages.near(2_000, 2_001) == f"…{'x' * 301}…"
    assert len(pages.near(7, 7 + len(LONG))) < 600

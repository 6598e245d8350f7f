"""What fits of a text: of each section something, and never more than it may."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from proxy.summaries.fitting import fitted
from tests.trimming.histories import TRIED


def count(text: str) -> int:
    return len(text.encode()) // 4 + 1


def test_what_fits_of_a_text() -> None:
    assert fitted("a b c", 10, count) == "a b c"
    assert fitted("a b c", 0, count) == ""
    assert fitted("", 10, count) == ""
    assert fitted("## A\none\ntwo\n## B\n" + "three " * 40, 20, count) == "## A\none\ntwo\n## B\n…"
    cut = fitted("word " * 100, 20, count)
    assert fitted("字" * 3, 2, len) == "字…"
    assert cut.endswith("…")
    assert count(cut) <= 20
    assert fitted("word " * 100, 1, count) == ""


@TRIED
@given(st.text(alphabet="ab #\n字", max_size=200), st.integers(min_value=-2, max_value=60))
def test_what_fits_has_no_more_than_it_may(text: str, most: int) -> None:
    assert fitted(text, most, count) == "" or count(fitted(text, most, count)) <= most

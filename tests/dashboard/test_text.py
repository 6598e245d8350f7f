"""How values look: hostile texts, differences."""

from __future__ import annotations

from urllib.parse import unquote

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import escape

from proxy.dashboard.text import clip, difference, hour, is_tall, returned, visible, when

UNSEEN = "\x00\x07\x08\x1b\x7f\x85\u200b\u200e\u200f\u202a\u202e\u2066\u2069\ufeff\ud800\U000e0041"


@pytest.mark.parametrize("character", list(UNSEEN))
def test_what_cannot_be_seen_is_spelled_out(character: str) -> None:
    shown = visible(f"a{character}b")
    assert character not in shown
    assert shown.startswith("a")
    assert shown.endswith("b")
    shown.encode()


def test_what_scripts_need_stays() -> None:
    for text in ("tab\tand\nline", "👩\u200d💻", "می\u200cخواهم", "שלום", "中文", "é"):
        assert visible(text) == text


@given(st.text(), st.text())
def test_a_difference_holds_both_texts(before: str, after: str) -> None:
    pieces = difference(before, after)
    assert "".join(piece.text for piece in pieces if piece.kind != "new") == before
    assert "".join(piece.text for piece in pieces if piece.kind != "gone") == after


def test_a_difference_is_told_word_by_word_where_much_is_alike() -> None:
    pieces = difference("the parcel is on shelf 4 now", "the parcel is on shelf 5 now")
    assert [(piece.kind, piece.text) for piece in pieces][1:3] == [("gone", "4"), ("new", "5")]


def test_long_texts_are_not_compared_word_by_word() -> None:
    pieces = difference("a b " * 50_000, "a d " * 50_000)
    assert [piece.kind for piece in pieces] == ["same", "gone", "new", "same"]


def test_times_are_written_for_people() -> None:
    assert when(1_793_620_800_000) == "2026-11-02 12:00:00"
    assert when("2026-11-02T12:00:00.123Z") == "2026-11-02 12:00:00"
    assert hour("2026-11-02T12:00:00Z") == "2026-11-02 12:00"
    assert when(None) == "–"


@pytest.mark.parametrize("text", ["\U000e0041" * 5_000, '"' * 5_000, ("word <" + "\u202e" * 9) * 500])
def test_a_text_takes_little_room_whatever_is_in_it(text: str) -> None:
    shown = clip(text)
    assert 300 < len(shown) < 1_200
    assert text.startswith(shown)
    assert len(escape(visible(shown)).encode()) <= 3_600
    assert clip("中文" * 5_000) == "中文" * 600


def test_a_text_is_tall_by_its_length_or_its_lines() -> None:
    assert is_tall("x" * 300)
    assert is_tall("x\n" * 10)
    assert not is_tall("x" * 100 + "\n")


def test_a_form_sends_back_what_cannot_be_seen() -> None:
    assert returned("night shift 50%") == "night shift 50%"
    assert unquote(returned("a\u202eb")) == "a\u202eb" != returned("a\u202eb")

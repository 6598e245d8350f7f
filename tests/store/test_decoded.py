"""Texts of cuts are read once as long as they are asked for, and what is held is bounded."""

from __future__ import annotations

import pytest

from proxy.store.cuts import DecodedCuts
from proxy.store.encoding import decode_cut, encode_cut
from proxy.trimming import Change, Gap
from tests.support.talk import message


def text_of(number: int) -> str:
    shorter = message("tool", f"so short: {number:04}")
    return encode_cut(
        [
            Change(
                position=number,
                edit="clear_tool_results",
                reason="old",
                message=shorter,
                tokens_before=900,
                tokens_after=5,
            )
        ],
        (),
        ["a", "b"],
    )


ROOM = 8 * (len(text_of(1)) + 30 + 500)
"""A generation has room for four."""


def test_a_text_is_read_once_and_says_what_it_says() -> None:
    decoded = DecodedCuts()
    first = decoded.read("here", text_of(1))
    assert first == decode_cut(text_of(1))
    assert decoded.read("here", text_of(1)) is first
    assert decoded.read("there", text_of(1)) == first


def test_another_text_at_the_same_place_is_another_cut() -> None:
    decoded = DecodedCuts()
    first, second = (decoded.read("here", text_of(number)) for number in (1, 2))
    assert (first, second) == (decode_cut(text_of(1)), decode_cut(text_of(2)))
    assert decoded.read("here", text_of(1)) == first


def test_another_text_is_another_cut_where_the_first_is_nearly_forgotten_too() -> None:
    decoded = DecodedCuts(most=ROOM)
    decoded.read("here", text_of(1))
    for number in range(10, 14):  # fill the younger generation
        decoded.read(number, text_of(number))
    assert "here" not in decoded._held._young
    assert "here" in decoded._held._old
    assert decoded.read("here", text_of(2)) == decode_cut(text_of(2))


def test_a_cut_that_changes_again_and_again_leaves_others_where_they_are() -> None:
    decoded = DecodedCuts(most=ROOM)
    other = decoded.read("other", text_of(0))
    for number in range(1, 40):
        decoded.read("here", text_of(number))
    assert decoded.read("other", text_of(0)) is other


def test_what_its_items_take_counts_beside_the_text() -> None:
    dropped = [
        Change(
            position=number, edit="drop_oldest", reason="old", message=None, tokens_before=9, tokens_after=0
        )
        for number in range(1000)
    ]
    gaps = [
        Gap(start=2 * number, stop=2 * number + 1, edit="drop_oldest", reason="old", tokens=9, tool_calls=0)
        for number in range(1000)
    ]
    for text in (encode_cut(dropped, (), None), encode_cut((), gaps, None)):
        # The text alone would have room.
        for most, stays in ((2 * len(text) + 50_000, False), (2 * len(text) + 70_000, True)):
            decoded = DecodedCuts(most)
            assert (decoded.read("here", text) is decoded.read("here", text)) is stays


def test_what_is_asked_for_stays_and_what_is_not_goes() -> None:
    decoded = DecodedCuts(most=ROOM)
    used, left = decoded.read("used", text_of(1)), decoded.read("left", text_of(2))
    for number in range(10, 40):
        decoded.read(number, text_of(number))
        assert decoded.read("used", text_of(1)) is used
    again = decoded.read("left", text_of(2))
    assert again == left
    assert again is not left


def test_a_text_that_would_take_half_of_the_room_is_not_held() -> None:
    decoded = DecodedCuts(most=100)
    first = decoded.read("here", text_of(1))
    assert decoded.read("here", text_of(1)) is not first


def test_what_is_no_text_of_a_cut_is_refused_each_time() -> None:
    decoded = DecodedCuts()
    for _ in range(2):
        with pytest.raises(ValueError, match="reason"):
            decoded.read("here", '{"drop":[[3,0,[[0,[5]]]]]}')

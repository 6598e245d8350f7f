"""Texts of cuts are read once as long as they are asked for, and what is held is bounded."""

from __future__ import annotations

import pytest

from proxy.store.decoded import DecodedCuts
from proxy.store.encoding import decode_cut, encode_cut
from proxy.trimming.plan import Change
from tests.support.talk import message


def text_of(number: int) -> str:
    shorter = message("tool", f"so short: {number:04}")
    return encode_cut([Change(number, "clear_tool_results", "old", shorter, 900, 5)], (), ["a", "b"])


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


def test_what_is_asked_for_stays_and_what_is_not_goes() -> None:
    decoded = DecodedCuts(most=8 * (len(text_of(1)) + 500))  # a generation has room for four
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

from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects.chat.own_calls import added

ONE = {"prompt_tokens": 5, "cost": 0.5, "prompt_tokens_details": {"cached_tokens": 1, "audio_tokens": None}}
OTHER = {"prompt_tokens": 7, "cost": 0.25, "prompt_tokens_details": {"cached_tokens": 2, "audio_tokens": 3}}


def test_numbers_add_up_however_deep() -> None:
    assert added(ONE, OTHER) == {
        "prompt_tokens": 12,
        "cost": 0.75,
        "prompt_tokens_details": {"cached_tokens": 3, "audio_tokens": 3},
    }
    assert ONE["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("one", "other", "total"),
    [
        (None, None, None),
        (ONE, None, ONE),
        (None, OTHER, OTHER),
        ({}, {}, {}),
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": 1}, {"a": None}, {"a": 1}),
        ({"a": None}, {"a": None}, {"a": None}),
        ({"a": {"b": 1}}, {"a": None}, {"a": {"b": 1}}),
        ({"a": None}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"tier": "x"}, {"tier": "y"}, {"tier": "y"}),
        ({"a": True}, {"a": True}, {"a": True}),
        ({"a": 1}, {"a": {"b": 1}}, {"a": {"b": 1}}),
    ],
)
def test_what_is_no_number_is_the_last_word(one: Any, other: Any, total: Any) -> None:
    assert added(one, other) == total

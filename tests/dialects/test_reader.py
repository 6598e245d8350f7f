"""JSON text as strangers write it."""

from __future__ import annotations

import math
from typing import Any

import orjson
import pytest

from proxy.dialects.jsontext import mended, read, sound


@pytest.mark.parametrize(
    ("text", "value"),
    [(b'{"a": [1]}', {"a": [1]}), (b'"\\ud83d"', "\ud83d"), (b'{"p": -Infinity}', {"p": -math.inf})],
)
def test_what_a_client_could_read_is_read(text: bytes, value: Any) -> None:
    assert read(text) == value


@pytest.mark.parametrize("text", [b"", b"{", b'{"a": }', b'"\xff"', b"[" * 100_000])
def test_what_nobody_could_read_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read(text)


def test_halves_that_met_are_one_character_and_lone_ones_are_marked() -> None:
    assert mended({"a": "\ud83d" + "\ude00", "b": ["x\ude00"]}) == {"a": "😀", "b": ["x\ufffd"]}


def test_what_json_does_not_have_is_null() -> None:
    value = mended({"p": math.nan, "q": [math.inf, 1.5]})
    assert value == {"p": None, "q": [None, 1.5]}
    assert orjson.loads(orjson.dumps(value)) == value


@pytest.mark.parametrize("value", [{"a": "\ud83d"}, {"n": 10**30}, ["\ude00", -(10**25)]])
def test_what_no_parser_would_take_again_is_made_sound(value: Any) -> None:
    made = sound(value)
    assert orjson.loads(orjson.dumps(made)) == made == mended(value)


def test_what_is_sound_is_left_alone() -> None:
    value = {"a": [1, 2**63 - 1, "😀", None]}
    assert sound(value) is value

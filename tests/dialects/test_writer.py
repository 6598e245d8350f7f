from __future__ import annotations

import json
from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects.jsontext import _write_anything, write

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.text(st.characters(exclude_categories=["Cs"]))
)
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text('abé"\\'), inner), max_leaves=20
)


@given(VALUES, st.booleans())
@settings(deadline=None)
def test_what_is_written_reads_back_by_either_way(value: Any, sort_keys: bool) -> None:
    assert orjson.loads(write(value, sort_keys=sort_keys)) == value
    assert orjson.loads(_write_anything(value, sort_keys=sort_keys)) == value


def test_keys_keep_their_order_unless_they_are_to_be_sorted() -> None:
    value = {"b": 1, "a": {"d": [], "c": {}}}

    assert write(value) == b'{"b":1,"a":{"d":[],"c":{}}}'
    assert _write_anything(value, sort_keys=False) == write(value)
    assert write(value, sort_keys=True) == b'{"a":{"c":{},"d":[]},"b":1}'
    assert _write_anything(value, sort_keys=True) == write(value, sort_keys=True)


def test_the_general_way_writes_compactly() -> None:
    assert _write_anything([1, "a", {"x": [], "y": None}, 1.5, True], sort_keys=False) == (
        b'[1,"a",{"x":[],"y":null},1.5,true]'
    )


@pytest.mark.parametrize("levels", [254, 255, 2000, 50_000])
def test_any_depth_is_written(levels: int) -> None:
    value: Any = "x"
    for _ in range(levels):
        value = [value]

    assert write(value) == b"[" * levels + b'"x"' + b"]" * levels


@pytest.mark.parametrize("digits", [19, 25, 400, 6000])
def test_any_integer_is_written_with_all_its_digits(digits: int) -> None:
    assert write({"n": 10 ** (digits - 1)}) == b'{"n":1' + b"0" * (digits - 1) + b"}"
    assert write(-(10 ** (digits - 1))) == b"-1" + b"0" * (digits - 1)


def test_half_a_character_is_written_as_an_escape() -> None:
    assert write({"\udc00": "a\ud83d"}) == b'{"\\udc00":"a\\ud83d"}'
    assert json.loads(write("\ud83d")) == "\ud83d"
    assert write("\ud83d") != write("\\ud83d")

"""JSON that a stranger wrote: read leniently, written whatever it holds, changed without parsing."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

import msgspec
import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.jsontext import (
    RawFields,
    _write_anything,
    emitted,
    is_array,
    is_object,
    members_of,
    mended,
    read,
    sound,
    with_break,
    with_field,
    without_member,
    write,
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b'{"a": [1]}', {"a": [1]}),
        (b'"\\ud83d"', "\ud83d"),
        (b'{"p": -Infinity}', {"p": -math.inf}),
        (b'"a\xf0\x9fb\xffc"', "a\ufffdb\ufffdc"),
    ],
)
def test_text_that_some_parser_takes_is_read(text: bytes, value: Any) -> None:
    assert read(text) == value


@pytest.mark.parametrize("text", [b"", b"{", b'{"a": }', b"\xff", b'\0"\0', b"[" * 100_000, b"\xff" + b"[" * 100_000])
def test_text_that_no_parser_takes_is_an_error(text: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        read(text)


@pytest.mark.parametrize("text", [b"[" * 1025 + b"]" * 1025, b'{"a":' * 1025 + b"NaN" + b"}" * 1025])
def test_more_levels_than_orjson_reads_are_an_error_however_many_python_reads(text: bytes) -> None:
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)  # what limits the parser up to Python 3.11
    try:
        with pytest.raises(ValueError, match="deeply"):
            read(text)
    finally:
        sys.setrecursionlimit(before)


def test_a_long_text_that_only_python_reads_is_not_deep() -> None:
    assert len(read(b"[NaN" + b",[],{}" * 600 + b"]")) == 1201


def test_surrogate_pairs_are_joined_and_lone_surrogates_replaced() -> None:
    assert mended({"a": "\ud83d" + "\ude00", "b": ["x\ude00"]}) == {"a": "😀", "b": ["x\ufffd"]}


def test_numbers_that_json_does_not_have_become_null() -> None:
    value = mended({"p": math.nan, "q": [math.inf, 1.5]})
    assert value == {"p": None, "q": [None, 1.5]}
    assert orjson.loads(orjson.dumps(value)) == value


@pytest.mark.parametrize("value", [{"a": "\ud83d"}, {"n": 10**30}, ["\ude00", -(10**25)]])
def test_a_value_that_no_parser_takes_is_mended(value: Any) -> None:
    made = sound(value)
    assert orjson.loads(orjson.dumps(made)) == made == mended(value)


@pytest.mark.parametrize("levels", [255, 1000])
def test_what_no_parser_reads_for_its_depth_ends_in_null(levels: int) -> None:
    value = {"kept": 1, "deep": orjson.loads(b'[{"a":' * (levels // 2) + b"1" + b"}]" * (levels // 2))}
    made = sound(value)
    assert made["kept"] == 1
    text = orjson.dumps(made)
    assert text.count(b"[") == 100
    assert b"null" in text


def test_a_sound_value_is_left_alone() -> None:
    value = {"a": [1, 2**63 - 1, "😀", None]}
    assert sound(value) is value


@pytest.mark.parametrize(
    ("value", "object_", "array"),
    [({}, True, False), ({"a": 1}, True, False), ([], False, True), ([{}], False, True)]
    + [(value, False, False) for value in (None, "", "{}", "[]", 0, 1.5, True)],
)
def test_an_object_and_an_array_are_told_apart(value: Any, object_: bool, array: bool) -> None:
    assert is_object(value) is object_
    assert is_array(value) is array


SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.text(st.characters(exclude_categories=["Cs"]))
VALUES = st.recursive(SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text('abé"\\'), inner), max_leaves=20)


@given(VALUES, st.booleans())
def test_written_json_reads_back_by_either_way(value: Any, sort_keys: bool) -> None:
    assert orjson.loads(write(value, sort_keys=sort_keys)) == value
    assert orjson.loads(_write_anything(value, sort_keys=sort_keys)) == value


def test_keys_keep_their_order_unless_sorting_is_asked_for() -> None:
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


def test_a_lone_surrogate_is_written_as_an_escape() -> None:
    assert write({"\udc00": "a\ud83d"}) == b'{"\\udc00":"a\\ud83d"}'
    assert json.loads(write("\ud83d")) == "\ud83d"
    assert write("\ud83d") != write("\\ud83d")


def test_raw_fields_are_the_texts_of_an_object_in_order() -> None:
    fields = RawFields(b' { "b" : 1.50 , "a": {"x":\t[ ]} } ')

    assert list(fields) == ["b", "a"]
    assert len(fields) == 2
    assert dict(fields) == {"b": b"1.50", "a": b'{"x":\t[ ]}'}
    assert fields.without("a") == {"b": b"1.50"}
    assert "c" not in fields
    span = fields.span("a")
    assert span is not None
    assert bytes(span) == b'{"x":\t[ ]}'
    assert fields.span("c") is None


def test_raw_fields_of_something_else_than_an_object_are_refused() -> None:
    with pytest.raises(msgspec.DecodeError):
        RawFields(b"[1]")

    assert members_of(b"[1]") == {}
    assert members_of(None) == {}


@pytest.mark.parametrize(
    ("text", "path", "left"),
    [
        (b'{"a":1,"b": 2}', ["a"], b'{"b":2}'),
        (b'{"a":1}', ["a"], None),
        (b'{ "a":1}', ["b"], b'{ "a":1}'),
        (b'{"a":{"b":1,"c": 1.0}}', ["a", "b"], b'{"a":{"c":1.0}}'),
        (b'{"a":{"b":1},"d":0}', ["a", "b"], b'{"d":0}'),
        (b'{"a":{"b":1}}', ["a", "b"], None),
        (b'{"a": {"b":1}}', ["a", "x"], b'{"a": {"b":1}}'),
        (b'{"a": "b"}', ["a", "b"], b'{"a": "b"}'),
        (b'"text"', ["a"], b'"text"'),
        (b"1", [], None),
    ],
)
def test_a_member_is_taken_out_with_the_objects_that_it_leaves_empty(
    text: bytes, path: list[str], left: bytes | None
) -> None:
    assert without_member(text, path) == left


def test_a_new_field_comes_last() -> None:
    text = b' {"a": 1 }\n'

    assert with_field(text, RawFields(text), "b", b"[2]") == b' {"a": 1 ,"b":[2]}\n'


@pytest.mark.parametrize(
    "text", [b'{"a":1,"b":2,"c":3}', b'\n{ "a" : 1 ,\r\n"b" :\t2, "c":3 }', b'{"a\\"\\\\":"}{\\"","b":2}']
)
def test_a_field_is_replaced_and_no_other_byte_changes(text: bytes) -> None:
    changed = with_field(text, RawFields(text), "b", b'{"new":true}')

    before, after = text.split(b"2")
    assert changed == before + b'{"new":true}' + after


@pytest.mark.parametrize(
    "text",
    [
        b'{"a":[1,2,3],"b":2,"a":1}',  # the places do not add up
        b'{"a":1,"b":2,"a":[1,2,3]}',
        b'{"b":2,"a":1,"b":5}',
        b'{"a":"x","b":7, "k":"aaaa","a":"\\"b\\":7,"}',  # they do, by accident
        b'{"a":1,"b":2222,"b":2}',
        b'{"a":12,"b":"}","a":1}',
        b'{"a":"\\"","b":1,"a":12345}',
    ],
)
def test_a_field_that_stands_there_twice_counts_as_its_last(text: bytes) -> None:
    changed = with_field(text, RawFields(text), "b", b"0")

    assert orjson.loads(changed) == orjson.loads(text) | {"b": 0}


def test_fields_without_a_text_are_not_emitted() -> None:
    assert emitted({"a": b"1.0", "b": None, "é\n": b"[ ]"}) == '{"a":1.0,"é\\n":[ ]}'.encode()
    assert emitted({"a": None}) == b"{}"


@pytest.mark.parametrize(
    ("content", "at", "after"),
    [
        ('"stable 12:01"', 7, [{"type": "text", "text": "stable ", "mark": 1}, {"type": "text", "text": "12:01"}]),
        ('"all of it"', 9, [{"type": "text", "text": "all of it", "mark": 1}]),
        (
            ' [{"type":"image"}, {"text":"ab","x":1.0}, {"text":"cd\\n","mark":2}, {"text":"ef"}]',
            3,
            [{"type": "image"}, {"text": "ab", "x": 1.0}, {"text": "c", "mark": 1}, {"text": "d\n"}, {"text": "ef"}],
        ),
        ('[{"text":"ab"}, {"text":"cd"}]', 2, [{"text": "ab", "mark": 1}, {"text": "cd"}]),
        ('"  blank"', 2, None),
        ('"short"', 6, None),
        ("null", 0, None),
    ],
)
def test_a_mark_within_a_text_leaves_what_it_says(content: str, at: int, after: list[Any] | None) -> None:
    made = with_break(content.encode(), at, "mark", b"1")
    assert (None if made is None else json.loads(made)) == after

from __future__ import annotations

import msgspec
import orjson
import pytest

from proxy.dialects.jsontext import RawFields, emitted, members_of, with_field, without_member


def test_fields_are_texts_in_order() -> None:
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


def test_what_is_no_object_has_no_fields_to_read() -> None:
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

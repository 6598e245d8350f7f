"""Leaves: what a document holds, in its order, under which name, and what is no document."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.textscan.leaves import Leaf, document_in, leaves_of

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=20,
)


def test_the_leaves_of_a_document_come_with_their_keys() -> None:
    found = leaves_of('{"a": [1, {"b": "x"}, []], "c": {}, "d": null, "e": "y"}')

    assert found == [
        Leaf(key="a", text="1", is_number=True),
        Leaf(key="b", text="x", is_number=False),
        Leaf(key="e", text="y", is_number=False),
    ]
    assert leaves_of("free text") is None


def test_a_leaf_deep_down_has_the_last_key_on_its_way() -> None:
    found = leaves_of('{"k":' + "[" * 100 + '"x"' + "]" * 100 + "}")
    assert found == [Leaf(key="k", text="x", is_number=False)]
    assert leaves_of('{"k":{"":["x"]}}') == [Leaf(key="", text="x", is_number=False)]


def test_numbers_stay_as_they_are_written() -> None:
    leaves = leaves_of("[1.50, 1e3, -0]") or []
    assert [leaf.text for leaf in leaves] == ["1.50", "1e3", "-0"]
    assert leaves_of("[NaN, Infinity, 1]") == [Leaf(key="", text="1", is_number=True)]


@pytest.mark.parametrize(
    "text", ["", "3", '"text"', "null", "{", "[1,]", "[007]", "plain {text}", "[" * 100_000]
)
def test_what_is_no_document(text: str) -> None:
    assert document_in(text) is None
    assert leaves_of(text) is None


def test_one_that_is_too_deep_is_none() -> None:
    assert leaves_of("[" * 100_000 + "]" * 100_000) is None


@given(JSON)
def test_every_string_of_any_document_is_there(document: object) -> None:
    def strings(value: object) -> list[str]:
        if isinstance(value, str):
            return [value]
        if isinstance(value, dict):
            return [text for each in value.values() for text in strings(each)]
        return [text for each in value for text in strings(each)] if isinstance(value, list) else []

    leaves = leaves_of(json.dumps(document)) or []
    wanted = strings(document) if isinstance(document, (dict, list)) else []
    assert [leaf.text for leaf in leaves if not leaf.is_number] == wanted

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.chat.completion import ToolName


def learnt(*deltas: dict[str, Any]) -> ToolName:
    name = ToolName()
    for delta in deltas:
        name.learn(delta)
    return name


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ([], None),
        ([None, ""], None),
        (["search"], "search"),
        ([None, "", "search", "", None], "search"),
        (["se", "ar", "ch"], "search"),
        (["search", "search", "search"], "search"),
        (["se", "arch", "search"], "search"),
        (["s", "se", "search"], "search"),
        (["a", "a"], "a"),
        (["b", "a", "a"], "baa"),
        ([7, "search"], 7),
        (["search", ["x"]], "search"),
    ],
)
def test_a_name_is_what_came_of_it(said: list[Any], value: Any) -> None:
    name = learnt(*({"name": piece} for piece in said))
    assert name.value == value
    assert not name.whole


@pytest.mark.parametrize("field", ["arguments", "input"])
def test_a_name_is_whole_when_arguments_come(field: str) -> None:
    assert learnt({"name": "se", field: ""}, {"name": "arch", field: "{"}).value == "search"
    assert learnt({"name": "search", field: "{"}, {"name": "_more", field: "}"}).value == "search"
    assert learnt({"name": "search"}, {field: "{"}, {"name": "search_more"}).value == "search"


def test_arguments_before_a_name_end_nothing() -> None:
    name = learnt({"arguments": "{}"}, {"name": "se"}, {"name": "arch"})
    assert (name.value, name.whole) == ("search", False)


@given(st.text(min_size=1), st.data())
def test_every_way_in_which_names_come_says_the_same(text: str, data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(1, len(text)), unique=True).map(sorted))
    pieces = [text[start:end] for start, end in pairwise([0, *places, len(text)])]
    assert learnt(*({"name": text[:end]} for end in [*places, len(text)])).value == text
    assert learnt(*({"name": text} for _ in pieces)).value == text
    known = ["".join(pieces[:number]) for number in range(len(pieces))]
    if not any(before and piece.startswith(before) for before, piece in zip(known, pieces, strict=True)):
        assert learnt(*({"name": piece} for piece in pieces)).value == text

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects.chat.completion import Deltas

Data = dict[str, Any]


def message(*deltas: Data) -> Data:
    folded = Deltas()
    for delta in deltas:
        before = deepcopy(delta)
        folded.add(delta)
        assert delta == before
    return folded.message()


def called(*deltas: Data) -> Any:
    return message(*({"tool_calls": [delta]} for delta in deltas)).get("tool_calls")


def function(arguments: str | None = None, name: str | None = None, **fields: Any) -> Data:
    inner = {key: value for key, value in (("name", name), ("arguments", arguments)) if value is not None}
    return fields | {"function": inner}


def test_nothing_is_an_empty_reply() -> None:
    assert message() == {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    ("contents", "content"),
    [([None, None], None), ([""], ""), (["", None], ""), (["a", "b", None, "c"], "abc"), ([None, "a"], "a")],
)
def test_content_is_what_came(contents: list[str | None], content: str | None) -> None:
    assert message(*({"content": piece} for piece in contents)) == {"role": "assistant", "content": content}


@pytest.mark.parametrize("name", ["content", "refusal", "reasoning", "reasoning_content"])
def test_texts_are_put_together(name: str) -> None:
    assert message({name: "a"}, {"x": 1}, {name: "b"})[name] == "ab"


def test_a_role_is_said_once() -> None:
    assert (
        message({"role": "assistant"}, {"role": "assistant"}, {"role": "user"}, {"role": ""})["role"]
        == "assistant"
    )
    assert message({"role": ""}, {"role": "tool"})["role"] == "tool"
    assert message({"role": ""})["role"] == "assistant"


def test_the_last_word_counts_for_what_is_not_known() -> None:
    assert message({"x": 1, "y": {"a": 1}}, {"x": None}, {"x": 2, "y": {"b": 2}, "z": False}) == {
        "role": "assistant",
        "content": None,
        "x": 2,
        "y": {"b": 2},
        "z": False,
    }


def test_nulls_are_no_fields() -> None:
    assert message({"refusal": None, "tool_calls": None, "function_call": None}) == message()
    assert message({"tool_calls": []}, {"tool_calls": {}}, {"tool_calls": ["x", None]}) == message()


def test_role_and_content_come_first() -> None:
    assert list(message({"reasoning": "r"}, {"x": 1}, {"content": "c"})) == [
        "role",
        "content",
        "reasoning",
        "x",
    ]


@pytest.mark.parametrize("name", ["reasoning_details", "thinking_blocks", "annotations", "unheard_of"])
def test_lists_get_longer(name: str) -> None:
    assert message({name: [{"a": 1}]}, {name: []}, {name: [2]})[name] == [{"a": 1}, 2]
    assert message({name: "x"}, {name: [1]})[name] == [1]
    assert message({name: [1]}, {name: "x"})[name] == "x"


def test_content_in_parts() -> None:
    think = {"type": "thinking", "thinking": "t"}

    assert message(
        {"content": [think]}, {"content": "a"}, {"content": "b"}, {"content": [think]}, {"content": "c"}
    )["content"] == [
        think,
        {"type": "text", "text": "ab"},
        think,
        {"type": "text", "text": "c"},
    ]
    assert message({"content": "a"}, {"content": [think]})["content"] == [
        {"type": "text", "text": "a"},
        think,
    ]
    assert message({"content": []}, {"content": "a"})["content"] == [{"type": "text", "text": "a"}]


def test_a_legacy_call_is_put_together() -> None:
    deltas: list[Data] = [
        {"name": "f", "arguments": ""},
        {"arguments": '{"a"'},
        {"arguments": ":1}", "name": ""},
    ]

    assert message(*({"function_call": delta} for delta in deltas))["function_call"] == {
        "name": "f",
        "arguments": '{"a":1}',
    }
    assert message({"function_call": "none"}, {"function_call": {"name": "f"}})["function_call"] == {
        "name": "f"
    }


def test_audio_is_put_together() -> None:
    assert message(
        {"audio": {"id": "a", "data": "x"}},
        {"audio": {"data": "y", "transcript": "t"}},
        {"audio": {"expires_at": 5}},
    )["audio"] == {"id": "a", "data": "xy", "transcript": "t", "expires_at": 5}


def test_a_call_is_put_together() -> None:
    assert called(
        function("", "f", index=0, id="a", type="function"),
        function('{"a"', index=0),
        function(":1}", index=0, type=None),
    ) == [{"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"a":1}'}}]


def test_a_custom_call_is_put_together() -> None:
    assert called(
        {"index": 0, "id": "a", "type": "custom", "custom": {"name": "f", "input": "x"}},
        {"index": 0, "custom": {"input": "y"}, "extra_content": {"s": 1}},
    ) == [{"id": "a", "type": "custom", "custom": {"name": "f", "input": "xy"}, "extra_content": {"s": 1}}]


def test_calls_are_known_by_their_index_in_whatever_order() -> None:
    assert called(
        function("1", "f", index=2, id="c"),
        function("2", "g", index=0, id="a"),
        function("3", index=2),
        function("4", index=0),
        function("5", "h", index=1, id="b"),
    ) == [function("24", "g", id="a"), function("5", "h", id="b"), function("13", "f", id="c")]


def test_several_calls_in_one_delta() -> None:
    assert message(
        {"tool_calls": [function("1", "f", index=0, id="a"), function("2", "g", index=1, id="b")]},
        {"tool_calls": [function("3", index=1), "odd", function("4", index=0)]},
    )["tool_calls"] == [function("14", "f", id="a"), function("23", "g", id="b")]


def test_without_an_index_a_new_id_begins_a_call() -> None:
    assert called(
        function("1", "f", id="a"),
        function("2"),
        function("3", "g", id="b"),
        function("4", id="a"),
        function("5", id=""),
        function("6", "h", id="c"),
    ) == [function("1245", "f", id="a"), function("3", "g", id="b"), function("6", "h", id="c")]


def test_calls_without_any_id_are_one() -> None:
    assert called(function("1", "f"), function("2")) == [function("12", "f")]


def test_another_id_and_name_at_the_same_index_are_another_call() -> None:
    assert called(
        function("1", "f", index=0, id="a"),
        function("2", "g", index=0, id="b"),
        function("3", index=0),
        function("4", "h", index=1, id="c"),
    ) == [function("1", "f", id="a"), function("23", "g", id="b"), function("4", "h", id="c")]


def test_another_id_alone_is_not() -> None:
    assert called(
        function("1", "f", index=0, id="a"),
        function("2", index=0, id="b"),
        function("3", "", index=0, id="c"),
    ) == [function("123", "f", id="a")]
    assert called({"index": 0, "id": "a"}, function("1", "f", index=0, id="b")) == [
        function("1", "f", id="a")
    ]
    assert called({"index": 0, "id": "a"}, {"index": 0, "id": "b", "function": "odd"}) == [
        {"id": "a", "function": "odd"}
    ]


def test_a_name_in_pieces_is_put_together_and_one_that_is_no_text_stays() -> None:
    pieces = (function(name="wea", index=0, id="a"), function(name="ther", index=0), function("{}", index=0))
    assert called(*pieces)[0]["function"] == {"name": "weather", "arguments": "{}"}
    assert called(function(name="f", index=0), function(name="f", index=0))[0]["function"] == {"name": "f"}
    assert called(*pieces, function(name="more", index=0))[0]["function"]["name"] == "weather"  # it is whole
    grows = (function(name="wea", index=0), function(name="weather", index=0))
    assert called(*grows)[0]["function"] == {"name": "weather"}
    assert called(function("", "", index=0))[0]["function"] == {"arguments": ""}
    odd = {"index": 0, "function": {"name": 7}}
    assert called(odd, function(name="f", index=0))[0]["function"] == {"name": 7}


def test_a_name_that_is_said_again_is_not_said_twice() -> None:
    assert called(function("1", "f", index=0, id="a"), function("2", "f", index=0, id="a")) == [
        function("12", "f", id="a")
    ]


NAMES = st.sampled_from(
    [
        "role",
        "content",
        "refusal",
        "tool_calls",
        "function_call",
        "audio",
        "index",
        "id",
        "function",
        "custom",
        "name",
        "arguments",
        "x",
    ]
)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(st.dictionaries(NAMES, ODD, max_size=4), max_size=6))
@settings(deadline=None)
def test_nothing_that_providers_send_makes_it_fail(deltas: list[Data]) -> None:
    built = message(*deltas)

    assert {"role", "content"} <= built.keys()
    assert message(*deltas) == built


TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=6)
FILLED = TEXT.filter(bool)
MESSAGES = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": st.none() | TEXT},
    optional={
        "refusal": TEXT,
        "reasoning_content": TEXT,
        "annotations": st.lists(st.integers(), min_size=1),
        "x": st.booleans() | st.integers(),
        "tool_calls": st.lists(
            st.fixed_dictionaries(
                {
                    "id": st.uuids().map(str),
                    "type": st.just("function"),
                    "function": st.fixed_dictionaries({"name": FILLED, "arguments": TEXT}),
                }
            ),
            min_size=1,
            max_size=3,
        ),
    },
)


def pieces(data: st.DataObject, text: str) -> list[str]:
    places = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=3))})
    return [text[start:end] for start, end in pairwise(places)] or [text]


@given(MESSAGES, st.data(), st.booleans())
@settings(deadline=None)
def test_the_deltas_of_a_message_amount_to_it(whole: Data, data: st.DataObject, with_index: bool) -> None:
    tracks: list[list[Data]] = []  # deltas that must keep their order among themselves
    for name, value in whole.items():
        if name == "tool_calls":
            for index, call in enumerate(value):
                place = {"index": index} if with_index else {}
                first = place | call | {"function": {"name": call["function"]["name"], "arguments": ""}}
                rest = [
                    place | ({} if with_index else {"id": call["id"]}) | {"function": {"arguments": piece}}
                    for piece in pieces(data, call["function"]["arguments"])
                ]
                tracks.append([{"tool_calls": [delta]} for delta in [first, *rest]])
        elif isinstance(value, str) and name != "role":
            tracks.append([{name: piece} for piece in pieces(data, value)])
        elif isinstance(value, list):
            tracks.append([{name: [item]} for item in value])
        else:
            tracks.append([{name: value}])
    order = data.draw(st.permutations([number for number, track in enumerate(tracks) for _ in track]))
    if not with_index:  # then the order of beginning is the order of calls
        order = sorted(order)
    waiting = [list(track) for track in tracks]

    assert message(*(waiting[number].pop(0) for number in order)) == whole

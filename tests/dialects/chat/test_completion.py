"""The replies that a body, or the chunks of a stream, hold; and the answer made of a stored reply."""

from __future__ import annotations

from copy import deepcopy
from itertools import pairwise
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects.chat import CHAT
from proxy.dialects.chat.completion import (
    Completion,
    CompletionAccumulator,
    Deltas,
    ReplyChoice,
    ToolName,
    made_answer,
    read_body,
    read_completion,
    usage_only,
)
from proxy.dialects.chat.message import ChatMessage, without_unfinished_calls
from proxy.dialects.jsontext import write
from proxy.dialects.sse import EventDecoder
from proxy.errors import InvalidRequest

Data = dict[str, Any]
USAGE = {"prompt_tokens": 1, "completion_tokens": 2}


def chunk(delta: Any = None, index: int = 0, finish_reason: str | None = None, **fields: Any) -> Data:
    return {"choices": [{"index": index, "delta": delta or {}, "finish_reason": finish_reason}]} | fields


def finished(folded: CompletionAccumulator) -> bool:
    reasons = folded.replies.finish_reasons
    return bool(reasons) and all(reasons)


def accumulate(*chunks: Any) -> CompletionAccumulator:
    folded = CompletionAccumulator()
    for item in chunks:
        folded.add(item)
    return folded


def call(arguments: Any = "{}", identity: str | None = "a", name: str | None = "f") -> Data:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def custom(identity: str = "a", name: str = "f") -> Data:
    return {"id": identity, "type": "custom", "custom": {"name": name, "input": "x"}}


# -------------------------------------------------------------------------------------- streams


def test_a_stream_amounts_to_a_reply() -> None:
    folded = accumulate(
        chunk({"role": "assistant", "content": ""}, id="c", model="m", usage=None),
        chunk({"content": "Hel"}, id="d"),
        chunk({"content": "lo"}, model="n"),
        chunk(finish_reason="stop"),
        {"choices": [], "usage": USAGE},
    )

    assert folded.choices() == (
        ReplyChoice(index=0, message={"role": "assistant", "content": "Hello"}, finish_reason="stop"),
    )
    assert (folded.model, folded.usage, folded.error) == ("m", USAGE, None)
    assert finished(folded)


def test_an_empty_stream_holds_no_reply() -> None:
    folded = CompletionAccumulator()

    assert folded.choices() == ()
    assert (folded.model, folded.usage, folded.error) == (None, None, None)
    assert not finished(folded)


@pytest.mark.parametrize("delta", [None, "x", []])
def test_a_choice_without_a_delta_may_still_end(delta: Any) -> None:
    folded = accumulate({"choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]})

    assert folded.choices() == (
        ReplyChoice(index=0, message={"role": "assistant", "content": None}, finish_reason="stop"),
    )
    assert finished(folded)


def test_choices_are_apart_and_in_order() -> None:
    folded = accumulate(
        chunk({"content": "b"}, 1),
        chunk({"content": "a"}, 0),
        chunk({"content": "B"}, 1, "stop"),
        chunk({"content": "A"}, 0),
    )

    assert [(choice.index, choice.message["content"]) for choice in folded.choices()] == [(0, "aA"), (1, "bB")]
    assert not finished(folded)
    folded.add(chunk({}, 0, "length"))
    assert finished(folded)
    assert [choice.finish_reason for choice in folded.choices()] == ["length", "stop"]


def test_an_empty_finish_reason_does_not_end_a_reply() -> None:
    assert not finished(accumulate(chunk({"content": "a"}, finish_reason="")))
    assert finished(accumulate(chunk(finish_reason="stop"), chunk(finish_reason="")))


def test_the_last_usage_counts() -> None:
    assert accumulate(chunk(usage={"n": 1}), chunk(usage=USAGE), chunk(usage=None)).usage == USAGE


@pytest.mark.parametrize(
    ("item", "error"),
    [
        ({"error": {"message": "m"}}, {"message": "m"}),
        ({"error": "words"}, {"message": "words"}),
        ({"error": ["x", 1]}, {"message": '["x",1]'}),
        ({"error": {}}, {"message": "unknown error"}),
        ({"object": "error", "message": "m", "code": 400}, {"object": "error", "message": "m", "code": 400}),
        ({"error": None, "object": "chat.completion"}, None),
        ({"error": ""}, None),
    ],
)
def test_an_error_is_read_in_every_form(item: Data, error: Data | None) -> None:
    assert accumulate(item, {"error": "a later one"} if error else {}).error == error
    assert read_completion(item) == Completion(choices=(), usage=None, model=None, error=error)


def test_a_whole_message_in_a_stream_is_taken() -> None:
    item = {"choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}]}

    assert accumulate(item).choices() == (
        ReplyChoice(index=0, message={"role": "assistant", "content": "a"}, finish_reason="stop"),
    )


def test_a_choice_without_an_index_has_its_place() -> None:
    item = {"choices": [{"delta": {"content": "a"}}, {"delta": {"content": "b"}}]}

    assert [(choice.index, choice.message["content"]) for choice in accumulate(item, item).choices()] == [
        (0, "aa"),
        (1, "bb"),
    ]


NAMES = st.sampled_from(
    ["id", "model", "usage", "error", "choices", "index", "delta", "message", "content", "finish_reason", "object"]
)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", "error"]) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)


@given(st.lists(ODD, max_size=5))
def test_no_chunks_make_it_fail(chunks: list[Any]) -> None:
    folded = accumulate(*chunks)

    assert finished(folded) == bool(folded.choices() and all(choice.finish_reason for choice in folded.choices()))
    for item in chunks:
        assert all(choice.index >= 0 for choice in read_completion(item).choices)


# --------------------------------------------------------------------------------------- bodies


def test_a_body_is_read_and_its_message_kept_as_it_is() -> None:
    message = {"content": "a", "role": "assistant", "new": 1, "refusal": None}
    body = {
        "id": "c",
        "model": "m",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
        "usage": USAGE,
    }

    read = read_completion(body)

    assert read == Completion(
        choices=(ReplyChoice(index=0, message=message, finish_reason="stop"),), usage=USAGE, model="m", error=None
    )
    assert read.choices[0].message is message


def test_choices_of_a_body_are_in_order() -> None:
    body = {
        "choices": [
            {"index": 1, "message": {"content": "b"}},
            {"index": 0, "message": {"content": "a"}},
            {"message": {}},
        ]
    }

    assert [(choice.index, choice.message.get("content")) for choice in read_completion(body).choices] == [
        (0, "a"),
        (1, "b"),
        (2, None),
    ]


@pytest.mark.parametrize(
    "body",
    [None, [], "x", 5, {}, {"choices": {}}, {"choices": ["x", {"message": "y"}]}, {"usage": 5, "id": 6, "model": ""}],
)
def test_a_body_that_is_no_completion_holds_no_reply(body: Any) -> None:
    assert read_completion(body) == Completion(choices=(), usage=None, model=None, error=None)


# -------------------------------------------------------------------------------------- replies


@pytest.mark.parametrize(
    ("calls", "kept"),
    [
        ([call('{"a": 1}'), call("{}", "b")], [0, 1]),
        ([call('{"a": 1}'), call('{"a": ', "b")], [0]),
        ([call('{"a": '), call("{}", "b")], [1]),
        ([call(""), call(None), call("[]"), call("5"), call("null")], []),
        ([call({"a": 1})], [0]),
        ([call(identity=None), call(identity=""), call(name=None), call(name="")], []),
        (["odd", None, {}, {"id": "a"}, {"id": "a", "function": "f"}], []),
        ([custom(), call()], [0, 1]),
        ([call(), custom()], [0]),
        ([custom(name=""), custom(identity=""), {"id": "a", "type": "custom", "custom": 5}, call()], [3]),
    ],
)
def test_calls_that_broke_off_are_left_out(calls: list[Any], kept: list[int]) -> None:
    message = {"role": "assistant", "tool_calls": calls, "content": "a"}
    copy = dict(message)

    left = without_unfinished_calls(message)

    rest = {"tool_calls": [calls[i] for i in kept]} if kept else {}
    assert left == {"role": "assistant", "content": "a"} | rest
    assert list(left) == [name for name in message if name in left]
    assert message == copy
    assert (left is message) == (len(kept) == len(calls))


def test_a_legacy_call_that_broke_off_is_left_out() -> None:
    whole = {"content": None, "function_call": {"name": "f", "arguments": '{"a":1}'}}

    assert without_unfinished_calls(whole) is whole
    assert without_unfinished_calls({"content": None, "function_call": {"name": "f", "arguments": '{"a"'}}) == {
        "content": None
    }
    assert without_unfinished_calls({"content": None, "function_call": {"arguments": "{}"}}) == {"content": None}


@pytest.mark.parametrize(
    "message", [{"content": "a"}, {"content": "a", "tool_calls": None, "function_call": None}, {"tool_calls": "odd"}]
)
def test_a_reply_without_calls_stays(message: Data) -> None:
    assert without_unfinished_calls(message) is message


@pytest.mark.parametrize(
    ("item", "only"),
    [
        ({"choices": [], "usage": USAGE}, True),
        ({"choices": [], "usage": {}}, True),
        ({"choices": [], "usage": None}, False),
        ({"choices": []}, False),
        ({"usage": USAGE}, False),
        ({"choices": None, "usage": USAGE}, False),
        ({"choices": [{"index": 0}], "usage": USAGE}, False),
        ([], False),
        ("x", False),
    ],
)
def test_a_chunk_that_is_there_for_its_usage(item: Any, only: bool) -> None:
    assert (usage_only(item), CompletionAccumulator().add(item)) == (only, only)


def test_a_chunk_of_usage_that_says_more_than_the_others_is_for_the_client() -> None:
    first = {"id": "a", "provider": "b", "choices": [{"index": 0, "delta": {"content": "hi"}}]}
    usage: Data = {"id": "a", "provider": "b", "choices": [], "usage": {"total_tokens": 3}, "obfuscation": "x"}
    for more, hidden in (({}, True), ({"citations": []}, True), ({"citations": ["https://example.com"]}, False)):
        reply = CompletionAccumulator()
        assert not reply.add(first)
        assert reply.add({**usage, **more}) is hidden
        assert reply.usage == {"total_tokens": 3}


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


def test_no_deltas_amount_to_an_empty_reply() -> None:
    assert message() == {"role": "assistant", "content": None}


@pytest.mark.parametrize(
    ("contents", "content"),
    [([None, None], None), ([""], ""), (["", None], ""), (["a", "b", None, "c"], "abc"), ([None, "a"], "a")],
)
def test_content_is_the_deltas_put_together(contents: list[str | None], content: str | None) -> None:
    assert message(*({"content": piece} for piece in contents)) == {"role": "assistant", "content": content}


@pytest.mark.parametrize("name", ["content", "refusal", "reasoning", "reasoning_content"])
def test_texts_are_put_together(name: str) -> None:
    assert message({name: "a"}, {"x": 1}, {name: "b"})[name] == "ab"


def test_a_role_is_said_once() -> None:
    assert message({"role": "assistant"}, {"role": "assistant"}, {"role": "user"}, {"role": ""})["role"] == "assistant"
    assert message({"role": ""}, {"role": "tool"})["role"] == "tool"
    assert message({"role": ""})["role"] == "assistant"


def test_the_last_value_of_an_unknown_field_counts() -> None:
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
    assert list(message({"reasoning": "r"}, {"x": 1}, {"content": "c"})) == ["role", "content", "reasoning", "x"]


@pytest.mark.parametrize("name", ["reasoning_details", "thinking_blocks", "annotations", "unheard_of"])
def test_lists_get_longer(name: str) -> None:
    assert message({name: [{"a": 1}]}, {name: []}, {name: [2]})[name] == [{"a": 1}, 2]
    assert message({name: "x"}, {name: [1]})[name] == [1]
    assert message({name: [1]}, {name: "x"})[name] == "x"


def test_content_in_parts() -> None:
    think = {"type": "thinking", "thinking": "t"}

    assert message({"content": [think]}, {"content": "a"}, {"content": "b"}, {"content": [think]}, {"content": "c"})[
        "content"
    ] == [think, {"type": "text", "text": "ab"}, think, {"type": "text", "text": "c"}]
    assert message({"content": "a"}, {"content": [think]})["content"] == [{"type": "text", "text": "a"}, think]
    assert message({"content": []}, {"content": "a"})["content"] == [{"type": "text", "text": "a"}]


def test_a_legacy_call_is_put_together() -> None:
    deltas: list[Data] = [{"name": "f", "arguments": ""}, {"arguments": '{"a"'}, {"arguments": ":1}", "name": ""}]

    assert message(*({"function_call": delta} for delta in deltas))["function_call"] == {
        "name": "f",
        "arguments": '{"a":1}',
    }
    assert message({"function_call": "none"}, {"function_call": {"name": "f"}})["function_call"] == {"name": "f"}


def test_audio_is_put_together() -> None:
    assert message(
        {"audio": {"id": "a", "data": "x"}}, {"audio": {"data": "y", "transcript": "t"}}, {"audio": {"expires_at": 5}}
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


def test_very_many_ids_are_not_compared_one_by_one() -> None:
    compared = 0

    class Identity(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    calls = called(*(function("1", f"f{at}", id=Identity(f"id {at}")) for at in range(2000)))
    assert calls == [function("1", f"f{at}", id=f"id {at}") for at in range(2000)]
    assert compared <= 4000


def test_calls_without_any_id_are_one() -> None:
    assert called(function("1", "f"), function("2")) == [function("12", "f")]


def test_another_id_and_name_at_the_same_index_are_another_call() -> None:
    assert called(
        function("1", "f", index=0, id="a"),
        function("2", "g", index=0, id="b"),
        function("3", index=0),
        function("4", "h", index=1, id="c"),
    ) == [function("1", "f", id="a"), function("23", "g", id="b"), function("4", "h", id="c")]


def test_another_id_alone_is_not_another_call() -> None:
    assert called(
        function("1", "f", index=0, id="a"), function("2", index=0, id="b"), function("3", "", index=0, id="c")
    ) == [function("123", "f", id="a")]
    assert called({"index": 0, "id": "a"}, function("1", "f", index=0, id="b")) == [function("1", "f", id="a")]
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


DELTA_NAMES = st.sampled_from(
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
ODD_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", "b"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(DELTA_NAMES, inner, max_size=4),
    max_leaves=10,
)


@given(st.lists(st.dictionaries(DELTA_NAMES, ODD_VALUES, max_size=4), max_size=6))
def test_no_deltas_make_it_fail(deltas: list[Data]) -> None:
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


# --------------------------------------------------------------------- the answer made of a stored reply

FINISH = {"id": "c1", "type": "function", "function": {"name": "finish_task", "arguments": '{"ok": true}'}}
SEARCH = {"id": "c2", "type": "function", "function": {"name": "search", "arguments": "{}"}}


def test_an_answer_in_one_piece_holds_the_reply_as_it_was() -> None:
    raw = b'{"role": "assistant", "x-unknown": 1.50, "content": null, "tool_calls": []}'
    kind, body = made_answer(ChatMessage(raw), exchange="1", created=7, model="m", stream=False, usage=False)
    assert kind == b"application/json"
    assert raw in body
    completion = read_completion(orjson.loads(body))
    assert completion.choices[0].finish_reason == "tool_calls"
    assert completion.usage == {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_has_its_text_in_one_piece_however_a_client_sent_it(stream: bool) -> None:
    parts = [{"type": "text", "text": "All is "}, {"type": "text", "text": "done."}]
    reply = ChatMessage.of({"role": "assistant", "content": parts, "tool_calls": [FINISH]})
    _, body = made_answer(reply, exchange="1", created=7, model="m", stream=stream, usage=False)
    assert b'"content":"All is done."' in body


@pytest.mark.parametrize("usage", [False, True])
@pytest.mark.parametrize(
    "reply",
    [
        {"role": "assistant", "content": "All is done.", "tool_calls": [FINISH]},
        {"role": "assistant", "content": None, "tool_calls": [SEARCH, FINISH]},
        {"role": "assistant", "content": "plain"},
    ],
)
def test_an_answer_as_a_stream_amounts_to_the_same_reply(reply: Data, usage: bool) -> None:
    kind, body = made_answer(ChatMessage.of(reply), exchange="1", created=7, model="m", stream=True, usage=usage)
    assert kind == b"text/event-stream"
    events = EventDecoder().feed(body)
    read = CompletionAccumulator()
    for event in events[:-1]:
        assert event.data is not None
        read.add(orjson.loads(event.data))
    assert events[-1].is_done
    (choice,) = read.choices()
    assert {**reply, "tool_calls": reply.get("tool_calls")} == {
        "role": choice.message["role"],
        "content": choice.message.get("content"),
        "tool_calls": choice.message.get("tool_calls"),
    }
    assert (read.usage is not None) is usage


def test_replies_are_stored_so_that_every_parser_takes_them() -> None:
    sound, half = {"role": "assistant", "content": "a"}, {"role": "assistant", "content": "a\ud83d"}
    body = b'{"choices":[{"index":0,"message":%b},{"index":1,"message":%b}]}' % (write(sound), write(half))
    assert [reply.data["content"] for reply in read_body(body).messages] == ["a", "a\ufffd"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"error":{"message":"no"}}', "no"),
        (b'{"error":{"code":7}}', '{"code":7}'),
        (b'{"error":"no"}', "no"),
        (b'{"error":1}', None),
        (b"[1]", None),
        (b"<html>", None),
    ],
)
def test_what_an_error_says(body: bytes, words: str | None) -> None:
    assert CHAT.replies.error_words(body) == words


def test_the_proxy_s_own_errors_have_the_api_s_shape() -> None:
    body = CHAT.replies.error_body(InvalidRequest("so", param="p", code="c"))
    error = {"message": "so", "type": "invalid_request_error", "param": "p", "code": "c"}
    assert orjson.loads(body) == {"error": error}
    assert CHAT.replies.error_event(b'{"error":\n{"code": 7}}') == b'data: {"error":{"code":7}}\n\n'


def test_a_stream_is_read_event_by_event_whatever_it_holds() -> None:
    reader = CHAT.replies.reader()
    text = {"choices": [{"index": 0, "delta": {"content": "hi"}, "finish_reason": None}], "model": "m"}
    usage = {"choices": [], "usage": {"prompt_tokens": 1}}
    lines = [b": a comment\n\n", b"data: {\n\n", *(b"data: %b\n\n" % orjson.dumps(each) for each in (text, usage))]
    events = EventDecoder(CHAT.replies.ends).feed(b"".join([*lines, b"data: [DONE]\n\n"]))
    assert [reader.take(event) for event in events] == [False, False, False, True, False]
    found = reader.replies
    assert [message.text for message in found.messages] == ["hi"]
    assert (found.finish_reasons, found.usage, found.model, found.error) == ((None,), {"prompt_tokens": 1}, "m", None)
    assert not reader.failed
    reader.take(EventDecoder().feed(b'data: {"error":{"message":"oh"}}\n\n')[0])
    assert (reader.failed, reader.replies.error) == (True, "oh")

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects.chat.completion import (
    Completion,
    CompletionAccumulator,
    ReplyChoice,
    read_completion,
    usage_only,
)
from proxy.dialects.chat.message import without_unfinished_calls

Data = dict[str, Any]
USAGE = {"prompt_tokens": 1, "completion_tokens": 2}


def chunk(delta: Any = None, index: int = 0, finish_reason: str | None = None, **fields: Any) -> Data:
    return {"choices": [{"index": index, "delta": delta or {}, "finish_reason": finish_reason}]} | fields


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
    assert (folded.id, folded.model, folded.usage, folded.error) == ("c", "m", USAGE, None)
    assert folded.finished


def test_nothing_is_no_reply() -> None:
    folded = CompletionAccumulator()

    assert folded.choices() == ()
    assert (folded.id, folded.model, folded.usage, folded.error) == (None, None, None, None)
    assert not folded.finished


@pytest.mark.parametrize("delta", [None, "x", []])
def test_a_choice_without_a_delta_may_still_end(delta: Any) -> None:
    folded = accumulate({"choices": [{"index": 0, "delta": delta, "finish_reason": "stop"}]})

    assert folded.choices() == (
        ReplyChoice(index=0, message={"role": "assistant", "content": None}, finish_reason="stop"),
    )
    assert folded.finished


def test_choices_are_apart_and_in_order() -> None:
    folded = accumulate(
        chunk({"content": "b"}, 1),
        chunk({"content": "a"}, 0),
        chunk({"content": "B"}, 1, "stop"),
        chunk({"content": "A"}, 0),
    )

    assert [(choice.index, choice.message["content"]) for choice in folded.choices()] == [
        (0, "aA"),
        (1, "bB"),
    ]
    assert not folded.finished
    folded.add(chunk({}, 0, "length"))
    assert folded.finished
    assert [choice.finish_reason for choice in folded.choices()] == ["length", "stop"]


def test_an_end_that_says_nothing_is_none() -> None:
    assert not accumulate(chunk({"content": "a"}, finish_reason="")).finished
    assert accumulate(chunk(finish_reason="stop"), chunk(finish_reason="")).finished


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
    assert read_completion(item) == Completion(choices=(), usage=None, id=None, model=None, error=error)


def test_a_whole_message_in_a_stream_is_taken() -> None:
    item = {
        "choices": [{"index": 0, "message": {"role": "assistant", "content": "a"}, "finish_reason": "stop"}]
    }

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
    [
        "id",
        "model",
        "usage",
        "error",
        "choices",
        "index",
        "delta",
        "message",
        "content",
        "finish_reason",
        "object",
    ]
)
ODD = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2) | st.sampled_from(["", "a", "error"]) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)


@given(st.lists(ODD, max_size=5))
@settings(deadline=None)
def test_nothing_that_providers_send_makes_it_fail(chunks: list[Any]) -> None:
    folded = accumulate(*chunks)

    assert folded.finished == bool(
        folded.choices() and all(choice.finish_reason for choice in folded.choices())
    )
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
        choices=(ReplyChoice(index=0, message=message, finish_reason="stop"),),
        usage=USAGE,
        id="c",
        model="m",
        error=None,
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
    [
        None,
        [],
        "x",
        5,
        {},
        {"choices": {}},
        {"choices": ["x", {"message": "y"}]},
        {"usage": 5, "id": 6, "model": ""},
    ],
)
def test_what_is_no_completion_holds_nothing(body: Any) -> None:
    assert read_completion(body) == Completion(choices=(), usage=None, id=None, model=None, error=None)


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
    assert without_unfinished_calls(
        {"content": None, "function_call": {"name": "f", "arguments": '{"a"'}}
    ) == {"content": None}
    assert without_unfinished_calls({"content": None, "function_call": {"arguments": "{}"}}) == {
        "content": None
    }


@pytest.mark.parametrize(
    "message",
    [{"content": "a"}, {"content": "a", "tool_calls": None, "function_call": None}, {"tool_calls": "odd"}],
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

"""One message: how it is read and rewritten, and what is remembered of its text."""

from __future__ import annotations

from typing import Any

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.dialects import Call, Facts
from proxy.dialects.chat.message import _MOST_IDS as MOST_IDS
from proxy.dialects.chat.message import ChatMessage, FactsByText, Ties, text_of

CALLS = [
    {"id": "a", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}},
    {"id": "b", "type": "custom", "custom": {"name": "g", "input": "free text"}},
]


def test_a_message_is_its_text() -> None:
    message = ChatMessage(b'{"role": "user", "content": "a", "n": 1.0}')

    assert message == ChatMessage(b'{"role": "user", "content": "a", "n": 1.0}')
    assert message != ChatMessage(b'{"role":"user","content":"a","n":1.0}')
    assert message != message.raw
    assert len({message, ChatMessage(message.raw)}) == 1
    assert repr(message) == f"ChatMessage({message.raw!r})"
    assert len(repr(ChatMessage(b'"' + b"x" * 1000 + b'"'))) < 100


def test_data_is_parsed_once_and_a_known_one_not_at_all() -> None:
    known = {"role": "user"}

    assert ChatMessage(b'{"role":"user"}', known).data is known
    message = ChatMessage(b'{"role":"user"}')
    assert message.data == known
    assert message.data is message.data


def test_a_message_is_made_of_data_in_its_order() -> None:
    assert (
        ChatMessage.of({"role": "user", "content": "é", "a": None}).raw
        == '{"role":"user","content":"é","a":null}'.encode()
    )


def test_a_message_is_made_of_data_of_any_depth() -> None:
    deep: Any = []
    for _ in range(700):
        deep = [deep]

    assert ChatMessage.of({"role": "assistant", "x": deep}).data["x"] == deep
    assert ChatMessage(b"{}").replacing("x", deep).data == {"x": deep}
    called = ChatMessage.of({"role": "assistant", "tool_calls": [{"function": {"arguments": {"a": deep}}}]})
    assert called.calls[0].arguments == '{"a":' + "[" * 701 + "]" * 701 + "}"


@pytest.mark.parametrize(
    ("data", "role", "answers"),
    [
        ({"role": "user", "tool_call_id": "a"}, "user", None),
        ({"role": "tool", "tool_call_id": "a"}, "tool", "a"),
        ({"role": "tool"}, "tool", None),
        ({"role": "tool", "tool_call_id": 5}, "tool", None),
        ({"role": 5}, "", None),
        ({}, "", None),
    ],
)
def test_role_and_answered_call(data: dict[str, Any], role: str, answers: str | None) -> None:
    assert ChatMessage.of(data).role == role
    assert ChatMessage.of(data).answers == answers


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("abc", "abc"),
        (
            [
                {"type": "text", "text": "a"},
                {"type": "image_url", "image_url": {}},
                {"type": "text", "text": "b"},
            ],
            "ab",
        ),
        ([{"type": "text", "text": 5}, "a", None, {"text": "b"}], "b"),
        (None, ""),
        ({"text": "a"}, ""),
        (5, ""),
    ],
)
def test_text_of_a_content(content: Any, text: str) -> None:
    assert text_of(content) == text
    assert ChatMessage.of({"content": content}).text == text


def test_calls_of_functions_and_of_custom_tools() -> None:
    message = ChatMessage.of({"role": "assistant", "tool_calls": CALLS})

    assert message.calls == (
        Call(id="a", name="f", arguments='{"x": 1}'),
        Call(id="b", name="g", arguments="free text", custom=True),
    )
    assert ChatMessage.of({"role": "user", "tool_calls": CALLS}).calls == ()


@pytest.mark.parametrize(
    ("item", "call"),
    [
        ("x", Call(id="", name="", arguments="")),
        ({}, Call(id="", name="", arguments="")),
        ({"id": 5, "function": {"name": None, "arguments": None}}, Call(id="", name="", arguments="")),
        ({"id": "a", "function": "f"}, Call(id="a", name="", arguments="")),
        (
            {"id": "a", "function": {"name": "f", "arguments": {"x": 1}}},
            Call(id="a", name="f", arguments='{"x":1}'),
        ),
        (
            {"id": "a", "type": "custom", "function": {"name": "f", "arguments": "{}"}},
            Call(id="a", name="", arguments="", custom=True),
        ),
        (
            {"id": "a", "type": "other", "function": {"name": "f", "arguments": ""}},
            Call(id="a", name="f", arguments=""),
        ),
    ],
)
def test_a_call_that_is_not_as_it_should_be_is_read_as_far_as_it_goes(item: Any, call: Call) -> None:
    assert ChatMessage.of({"role": "assistant", "tool_calls": [item]}).calls == (call,)


@pytest.mark.parametrize("calls", [None, {}, "x", 5])
def test_calls_that_are_no_list_are_none(calls: Any) -> None:
    assert ChatMessage.of({"role": "assistant", "tool_calls": calls}).calls == ()


def test_fields_are_left_out_and_the_others_keep_their_bytes() -> None:
    message = ChatMessage(
        b'{ "agent":"x", "role" : "user","n": 1.50, "is_internal" :true, "content":"\\u00e9" }'
    )

    assert message.without("agent", "is_internal").raw == b'{"role":"user","n":1.50,"content":"\\u00e9"}'
    assert message.without("other") is message


def test_a_field_is_left_out_however_its_name_is_written() -> None:
    assert ChatMessage(b'{"\\u0061gent":1,"role":"user"}').without("agent").raw == b'{"role":"user"}'


def test_a_field_is_replaced_at_its_place_and_the_others_keep_their_bytes() -> None:
    message = ChatMessage(b'{"role" : "user","content":"a","n": 1.50}')

    assert message.replacing("content", ["é"]).raw == '{"role":"user","content":["é"],"n":1.50}'.encode()
    assert message.replacing("new", None).raw == b'{"role":"user","content":"a","n":1.50,"new":null}'
    assert message.data["content"] == "a"


def test_calls_are_kept_by_position_with_their_bytes() -> None:
    message = ChatMessage(b'{"role":"assistant","tool_calls":[ {"id": "a"}, {"id":  "b"},{"id":"c"}],"x":1}')

    kept = message.with_calls(frozenset({1, 2}))
    assert kept.raw == b'{"role":"assistant","tool_calls":[{"id":  "b"},{"id":"c"}],"x":1}'
    assert message.with_calls(frozenset()).raw == b'{"role":"assistant","x":1}'


NAMES = st.sampled_from(["role", "content", "agent", "is_internal", "é", "x"])
TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.dictionaries(NAMES, st.none() | TEXT | st.lists(st.integers(-(2**53), 2**53))), NAMES, TEXT)
@settings(deadline=None)
def test_changing_a_message_is_changing_its_data(data: dict[str, Any], name: str, value: str) -> None:
    message = ChatMessage(orjson.dumps(data, option=orjson.OPT_INDENT_2))

    assert message.replacing(name, value).data == data | {name: value}
    assert message.without(name).data == {key: kept for key, kept in data.items() if key != name}
    assert list(message.replacing(name, value).data) == list(dict.fromkeys([*data, name]))


@pytest.mark.parametrize(
    ("data", "own"),
    [
        ({"role": "user", "content": "agent"}, ()),
        ({"role": "user", "agent": None}, ("agent",)),
        ({"is_internal": True, "role": "user", "agent": "a"}, ("agent", "is_internal")),
    ],
)
def test_which_fields_are_ours(data: dict[str, Any], own: tuple[str, ...]) -> None:
    raw = orjson.dumps(data)

    assert ChatMessage(raw).own_fields == own
    assert (
        ChatMessage(raw, None, Facts(raw, "user", has_own_fields=bool(own), has_calls=True)).own_fields == own
    )


def test_a_message_whose_text_is_known_is_not_parsed_for_its_role() -> None:
    raw = b"not even JSON"
    message = ChatMessage(raw, None, Facts(raw, "user", has_own_fields=False, has_calls=True))

    assert (message.role, message.calls, message.answers, message.own_fields) == ("user", (), None, ())


def test_a_reply_that_is_known_to_call_nothing_is_not_parsed_for_its_calls() -> None:
    raw = b"not even JSON"
    message = ChatMessage(raw, None, Facts(raw, "assistant", has_own_fields=False, has_calls=False))

    assert message.calls == ()
    assert message.without_own_fields() is message


def test_what_may_go_upstream_has_no_field_of_ours() -> None:
    message = ChatMessage(b'{"role":"user","agent":"a","content":"x"}')

    assert message.without_own_fields().raw == b'{"role":"user","content":"x"}'


def test_ties_are_what_holds_a_message_to_others() -> None:
    assert ChatMessage.of({"role": "user", "content": "a", "tool_calls": CALLS}).ties == Ties(role="user")
    assert ChatMessage.of({"role": "tool", "tool_call_id": "a"}).ties == Ties(role="tool", answers="a")
    assert ChatMessage.of({"role": "tool", "tool_call_id": 1}).ties == Ties(role="tool")
    both = ChatMessage.of(
        {"role": "assistant", "tool_calls": [*CALLS, {}], "function_call": {}, "content": "a"}
    )
    assert both.ties == Ties(
        role="assistant",
        ids=("a", "b", ""),
        answers=None,
        legacy_call=True,
        names_calls=True,
        has_content=True,
    )
    assert ChatMessage.of({"role": "assistant", "tool_calls": [], "content": []}).ties == Ties(
        role="assistant", names_calls=True
    )
    assert ChatMessage.of({"role": "assistant", "audio": {"id": "x"}}).ties == Ties(
        role="assistant", has_content=True
    )


class Unread(ChatMessage):
    """A message whose text must not be parsed."""

    @property
    def data(self) -> dict[str, Any]:
        raise AssertionError


@pytest.mark.parametrize(
    "data",
    [
        {"role": "assistant", "content": None, "tool_calls": CALLS},
        {"role": "assistant", "content": "so"},
        {"role": "tool", "tool_call_id": "a", "content": "1"},
    ],
)
def test_ties_are_remembered_with_the_text(data: dict[str, Any]) -> None:
    raw = ChatMessage.of(data).raw
    facts = Facts(raw, data["role"], has_own_fields=False, has_calls="tool_calls" in data)
    ties = ChatMessage(raw, None, facts).ties

    assert Unread(raw, None, facts).ties is ties
    assert Unread(raw, None, facts).answers == data.get("tool_call_id")


def test_of_very_many_calls_nothing_is_remembered_with_the_text() -> None:
    calls = [{"id": str(number)} for number in range(MOST_IDS + 1)]
    raw = ChatMessage.of({"role": "assistant", "tool_calls": calls}).raw
    message = ChatMessage(raw, None, Facts(raw, "assistant", has_own_fields=False, has_calls=True))

    assert message.ties is message.ties
    assert len(message.ties.ids) == MOST_IDS + 1
    assert message.facts is not None
    assert message.facts.ties is None


def test_calls_are_read_once() -> None:
    message = ChatMessage.of({"role": "assistant", "tool_calls": CALLS})
    assert message.calls is message.calls


TEXT_PART = {"type": "text", "text": "a"}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("a", "a"),
        (None, ""),
        ([], ""),
        ([TEXT_PART, TEXT_PART], "aa"),
        ([TEXT_PART, {"type": "image_url", "image_url": {"url": "x"}}], None),
        (["odd"], None),
    ],
)
def test_it_is_none_where_there_is_anything_else(content: Any, text: str | None) -> None:
    assert ChatMessage.of({"role": "user", "content": content}).plain_text == text


LARGE = 10_000
"""Bytes of a text beside which nothing else counts much."""


def text(name: int) -> bytes:
    return b"%d" % name * LARGE


def facts(name: int) -> Facts:
    return Facts(text(name), "user", has_own_fields=False, has_calls=True)


def test_what_was_kept_is_recalled_by_an_equal_text_in_the_order_asked_for() -> None:
    known = FactsByText()
    one, two = facts(1), facts(2)
    known.keep([one, two])
    assert known.recall([text(2), text(3), text(1), text(2)]) == [two, None, one, two]
    assert known.recall([]) == []


def test_new_facts_know_no_more_than_they_are_told() -> None:
    new = Facts(b"{}", "tool", has_own_fields=True, has_calls=True)
    assert (new.raw, new.role, new.has_own_fields) == (b"{}", "tool", True)
    assert (new.content, new.body, new.step, new.ties) == (None, None, None, None)


def test_the_first_facts_of_a_text_stay() -> None:
    known = FactsByText()
    first = facts(1)
    known.keep([first])
    size = known.size
    known.keep([facts(1), facts(1)])
    assert known.recall([text(1)]) == [first]
    assert known.size == size


def held(known: FactsByText, *names: int) -> list[int]:
    return [name for name, found in zip(names, known.recall(list(map(text, names))), strict=True) if found]


def test_what_was_not_asked_for_goes_first() -> None:
    known = FactsByText(5 * LARGE)  # two texts in each half
    known.keep(map(facts, (1, 2, 3)))
    assert held(known, 1) == [1]
    known.keep(map(facts, (4, 5)))
    assert held(known, 1, 2, 3, 4, 5) == [1, 3, 4, 5]


def test_facts_of_a_short_text_take_some_room_too() -> None:
    known = FactsByText()
    known.keep([Facts(b"{}", "user", has_own_fields=False, has_calls=False)])
    assert known.size > 500

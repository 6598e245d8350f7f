"""The rules about tool calls, and what the repair makes of histories that break them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage, ChatTies
from proxy.dialects.chat.protocol import CHAT, NO_REPLY, NO_RESULT, _ties_of
from tests.support import api_rules
from tests.trimming.histories import TRIED, broken, grown, valid
from tests.trimming.notation import lines, messages

LOST = f"tool a {NO_RESULT}"


@pytest.mark.parametrize(
    ("before", "after", "notes"),
    [
        pytest.param(["user hi", "assistant | a f", "tool a 1", "assistant so"], None, [], id="nothing wrong"),
        pytest.param(["assistant | a f, b g", "tool b 2", "tool a 1"], None, [], id="any order of results"),
        pytest.param(["assistant | a f", "tool a 1", "assistant | a f", "tool a 2"], None, [], id="an id used again"),
        pytest.param(["assistant | f()", "function f 1", "function f 2"], None, [], id="the older form is left alone"),
        pytest.param(["assistant | f()", "user hi", "function f 1"], None, [], id="even where it is broken"),
        pytest.param(
            ["assistant | a f", "user hi"],
            ["assistant | a f", LOST, "user hi"],
            ["repaired: 1 x tool call without a result, a result was put in"],
            id="a missing result",
        ),
        pytest.param(
            ["assistant | b f, a g", "tool b 1"],
            ["assistant | b f, a g", "tool b 1", LOST],
            ["repaired: 1 x tool call without a result, a result was put in"],
            id="a missing result at the end, after those that came",
        ),
        pytest.param(
            ["tool a 1", "user hi", "tool b 2", "assistant so"],
            ["user hi", "assistant so"],
            ["repaired: 2 x tool result without a call, left out"],
            id="orphans",
        ),
        pytest.param(
            ["assistant | a f", "tool x 0", "tool a 1", "tool a 2"],
            ["assistant | a f", "tool a 1"],
            [
                "repaired: 1 x tool result without a call, left out",
                "repaired: 1 x second result of a tool call, left out",
            ],
            id="an orphan and a second result in a block",
        ),
        pytest.param(
            ["assistant | a f", "user wait", "tool a 1"],
            ["assistant | a f", LOST, "user wait"],
            [
                "repaired: 1 x tool call without a result, a result was put in",
                "repaired: 1 x tool result without a call, left out",
            ],
            id="a result that came too late",
        ),
        pytest.param(
            ["assistant | a f, a g, b h", "tool a 1", "tool b 2"],
            ["assistant | a f, b h", "tool a 1", "tool b 2"],
            ["repaired: 1 x tool call with the id of another one in its message, left out"],
            id="one id twice",
        ),
        pytest.param(
            ["assistant text | f(), a f", "function f 1"],
            ["assistant text | a f, f()", LOST, "function f 1"],
            ["repaired: 1 x tool call without a result, a result was put in"],
            id="both forms: only the newer one has rules",
        ),
    ],
)
def test_repair(before: list[str], after: list[str] | None, notes: list[str]) -> None:
    given_messages = messages(before)
    repaired = CHAT.repair(given_messages)
    assert lines(repaired.messages) == (after if after is not None else before)
    assert list(repaired.notes) == notes
    assert bool(CHAT.problems(given_messages)) == bool(notes)
    assert CHAT.problems(repaired.messages) == []


CALL = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NOBODY = {**CALL, "id": ""}


@pytest.mark.parametrize(
    ("fields", "left", "found"),
    [
        ({"content": "hi", "tool_calls": []}, {"content": "hi"}, ["tool_calls without a call"]),
        ({"content": "hi", "tool_calls": {"id": "a"}}, {"content": "hi"}, ["tool_calls without a call"]),
        ({"content": "hi", "tool_calls": None}, {"content": "hi", "tool_calls": None}, []),
        ({"content": "hi", "tool_calls": [NOBODY]}, {"content": "hi"}, ["tool call without an id"]),
        ({"content": "hi", "tool_calls": ["a", 5]}, {"content": "hi"}, ["tool call without an id"] * 2),
        (
            {"content": "", "tool_calls": [NOBODY]},
            None,
            ["tool call without an id", "assistant message without content and calls"],
        ),
        (
            {"content": " \n", "tool_calls": []},
            None,
            ["tool_calls without a call", "assistant message without content and calls"],
        ),
        (
            {"content": [], "tool_calls": []},
            None,
            ["tool_calls without a call", "assistant message without content and calls"],
        ),
        ({"content": None}, None, ["assistant message without content and calls"]),
        ({}, None, ["assistant message without content and calls"]),
        ({"content": []}, None, ["assistant message without content and calls"]),
        ({"content": ""}, {"content": ""}, []),
        ({"content": None, "refusal": "no"}, {"content": None, "refusal": "no"}, []),
        ({"content": None, "audio": {"id": "x"}}, {"content": None, "audio": {"id": "x"}}, []),
        (
            {"content": None, "tool_calls": [], "function_call": {"name": "f", "arguments": ""}},
            {"content": None, "function_call": {"name": "f", "arguments": ""}},
            ["tool_calls without a call"],
        ),
    ],
)
def test_repair_of_an_assistant_message(fields: dict[str, Any], left: dict[str, Any] | None, found: list[str]) -> None:
    message = ChatMessage.of({"role": "assistant", **fields})
    assert CHAT.problems([message]) == [f"message 0: {each}" for each in found]
    kept = [each.data for each in CHAT.repair([message]).messages]
    assert kept == ([{"role": "assistant", **left}] if left is not None else [])


@pytest.mark.parametrize("count", [1, 2])
def test_calls_without_ids_get_some_where_as_many_results_without_follow(count: int) -> None:
    block = ChatMessage.of({"role": "assistant", "content": None, "tool_calls": [NOBODY] * count})
    result = ChatMessage.of({"role": "tool", "tool_call_id": "", "content": "1"})
    talk = [*messages(["user hi"]), block, *[result] * count, *messages(["assistant done", "user so?"])]
    repaired = CHAT.repair(talk)
    assert repaired.notes == (f"repaired: {count} x tool call without an id, as its result is, both got one",)
    names = [f"call0000{number}" for number in range(1, count + 1)]
    assert [call.id for call in repaired.messages[1].calls] == names
    assert [each.answers for each in repaired.messages[2 : 2 + count]] == names
    assert CHAT.problems(repaired.messages) == []
    odd = ChatMessage.of({"role": "assistant", "content": None, "tool_calls": ["a"] * count})
    fewer = [*talk[: count + 1], *talk[-2:]]
    assert CHAT.repair([talk[0], odd, *talk[2:]]).messages == (talk[0], *talk[-2:])
    assert "repaired: 1 x assistant message without content and calls, left out" in CHAT.repair(fewer).notes


def test_a_result_without_an_id_answers_nothing() -> None:
    (block,) = messages(["assistant | a f"])
    nameless = ChatMessage.of({"role": "tool", "content": "1"})
    assert lines(CHAT.repair([block, nameless]).messages) == ["assistant | a f", LOST]


def test_the_ids_of_very_many_calls_are_not_searched_for_each_result(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = 0

    class Ids(tuple[str, ...]):
        __slots__ = ()

        def __contains__(self, name: object) -> bool:
            nonlocal searched
            searched += 1
            return super().__contains__(name)

    def ties_of(given_messages: Sequence[Message]) -> list[ChatTies]:
        return [structs.replace(each, ids=Ids(each.ids)) for each in _ties_of(given_messages)]

    monkeypatch.setattr("proxy.dialects.chat.protocol._ties_of", ties_of)
    many = 200
    results = [f"tool i{at} {at}" for at in reversed(range(1, many))]
    block = messages([f"assistant | {', '.join(f'i{at} f' for at in range(many))}", *results])
    assert lines(CHAT.repair(block).messages)[1:] == [*results, f"tool i0 {NO_RESULT}"]
    assert searched <= 2


def test_problems_say_where() -> None:
    found = CHAT.problems(messages(["user hi", "assistant | a f", "tool b 1", "tool c 2"]))
    assert found == [
        "message 2: tool result without a call",
        "message 3: tool result without a call",
        "message 1: tool call without a result",
    ]


def test_a_sound_message_stays_the_same_object_with_its_position() -> None:
    given_messages = messages(["tool x 0", "user hi", "assistant | a f, a f", "user so"])
    repaired = CHAT.repair(given_messages)
    assert repaired.sources == (1, None, None, 3)
    assert repaired.messages[0] is given_messages[1]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("hi", True),
        (" ", False),
        ("", False),
        (None, False),
        ([], False),
        ([{"type": "text", "text": ""}], False),
        ([{"type": "text", "text": "hi"}], True),
        ([{"type": "image_url"}], True),
    ],
)
def test_a_reply_has_content_where_it_can_be_sent_back(content: Any, *, says: bool) -> None:
    assert ChatMessage.of({"role": "assistant", "content": content}).has_content is says


@TRIED
@given(broken())
def test_a_repaired_history_keeps_the_rules_and_needs_no_repair(given_messages: list[Message]) -> None:
    raw = [message.raw for message in given_messages]
    repaired = CHAT.repair(given_messages)
    assert CHAT.problems(repaired.messages) == []
    assert CHAT.repair(repaired.messages).messages == repaired.messages
    assert bool(repaired.notes) == bool(CHAT.problems(given_messages))
    assert len(repaired.notes) <= 7
    if repaired.messages:
        body = {"model": "m", "messages": [message.data for message in repaired.messages]}
        api_rules.check(body, plain=False, lenient=False)
    assert [message.raw for message in given_messages] == raw


@TRIED
@given(valid())
def test_a_history_that_keeps_the_rules_is_left_alone(given_messages: list[Message]) -> None:
    repaired = CHAT.repair(given_messages)
    assert CHAT.problems(given_messages) == []
    assert repaired.messages == tuple(given_messages)
    assert repaired.sources == tuple(range(len(given_messages)))


@TRIED
@given(broken(), st.data())
def test_the_repair_of_a_longer_history_begins_with_that_of_the_shorter(
    given_messages: list[Message], data: st.DataObject
) -> None:
    longer = data.draw(grown(given_messages))
    shorter = CHAT.repair(given_messages).messages
    assert CHAT.repair(longer).messages[: len(shorter)] == shorter


def test_an_empty_reply_between_two_questions_is_no_reason_for_two_in_a_row() -> None:
    said = ["user one", "assistant", "assistant", "user two", "assistant", "assistant three", "assistant", "user four"]
    repaired = CHAT.repair(messages(said))
    assert lines(repaired.messages) == ["user one", f"assistant {NO_REPLY}", "user two", "assistant three", "user four"]
    assert repaired.sources == (0, None, 3, 5, 7)
    assert repaired.notes == (
        "repaired: 3 x assistant message without content and calls, left out",
        "repaired: 1 x assistant message without content and calls between two questions, a text was put in",
    )
    # Before the question comes, nothing is put in: what was sent stays the beginning of what is sent.
    assert lines(CHAT.repair(messages(said[:3])).messages) == ["user one"]
    assert lines(CHAT.repair(messages(["assistant", "user one", "user two"])).messages) == ["user one", "user two"]
    lost = ["user one", "assistant", "tool a 1", "user two"]
    assert lines(CHAT.repair(messages(lost)).messages) == ["user one", f"assistant {NO_REPLY}", "user two"]


# ------------------------------------------------------------------------------------ spans, the dialect


def _spans(written: list[str]) -> list[tuple[int, int, int]]:
    return [(span.start, span.stop, span.round) for span in CHAT.spans(messages(written))]


def test_a_block_of_calls_and_the_results_right_after_it_are_one_span() -> None:
    assert _spans(["user a", "assistant b", "user c"]) == [(0, 1, 1), (1, 2, 1), (2, 3, 2)]
    block = ["user a", "assistant | f1 a, f2 b", "tool f1 x", "tool f2 y", "tool f9 z", "assistant b"]
    assert _spans(block) == [(0, 1, 1), (1, 5, 1), (5, 6, 1)]
    assert _spans(["assistant b", "tool f1 x"]) == [(0, 1, 0), (1, 2, 0)]
    assert _spans([]) == []


def test_the_older_form_of_a_call_holds_its_result_in_its_span() -> None:
    function = ChatMessage.of({"role": "function", "name": "f", "content": "r"})
    tool = ChatMessage.of({"role": "tool", "tool_call_id": "c", "content": "r"})
    old = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    both = ChatMessage.of({**old, "tool_calls": [call]})

    def ends(*said: Message) -> list[int]:
        return [span.stop for span in CHAT.spans(said)]

    assert ends(ChatMessage.of(old), function) == [2]
    assert ends(ChatMessage.of(old), tool) == [1, 2]
    assert ends(both, tool, function) == [3]


def test_the_dialect_makes_and_reads_messages() -> None:
    assert CHAT.name == "chat"
    read = CHAT.message(b'{"role":"user","content":"a"}')
    assert (read, read.dialect) == (CHAT.spoken("user", "a"), CHAT)
    assert CHAT.result("c1", "r").data == {"role": "tool", "tool_call_id": "c1", "content": "r"}
    spaced = CHAT.message(b'{"content": [{"type": "text", "text": "a"}], "role": "user"}')
    assert CHAT.canonical(spaced) == CHAT.canonical(read)
    broken = messages(["user a", "assistant | f1 a"])
    assert CHAT.problems(broken) == CHAT.problems(broken) != []
    assert CHAT.repair(broken) == CHAT.repair(broken)

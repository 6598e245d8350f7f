"""Spans and rounds of valid and of broken histories."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.conversation.spans import Round, open_calls, rounds, span_start, spans
from proxy.dialects import Call, Message, Span
from proxy.dialects.chat.message import ChatMessage

USER = ChatMessage.of({"role": "user", "content": "hello"})
SYSTEM = ChatMessage.of({"role": "system", "content": "be kind"})
REPLY = ChatMessage.of({"role": "assistant", "content": "well"})
CALLS_FUNCTION = ChatMessage.of({"role": "assistant", "function_call": {"name": "f", "arguments": ""}})
FUNCTION = ChatMessage.of({"role": "function", "name": "f", "content": "1"})


def block(*ids: str, **more: object) -> Message:
    return ChatMessage.of({"role": "assistant", "tool_calls": [{"id": each} for each in ids], **more})


def result(identity: str) -> Message:
    return ChatMessage.of({"role": "tool", "tool_call_id": identity, "content": "1"})


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([SYSTEM, USER, REPLY], [(0, 1, 0), (1, 2, 1), (2, 3, 1)], id="single messages"),
        pytest.param(
            [USER, block("a", "b"), result("b"), result("a"), REPLY], [(0, 1, 1), (1, 4, 1), (4, 5, 1)], id="parallel"
        ),
        pytest.param([block("a"), result("a"), block("a"), result("a")], [(0, 2, 0), (2, 4, 0)], id="an id used again"),
        pytest.param(
            [block("a"), result("a"), result("x"), USER],
            [(0, 3, 0), (3, 4, 1)],
            id="an orphan right after belongs to it",
        ),
        pytest.param([result("a"), USER, result("a")], [(0, 1, 0), (1, 2, 1), (2, 3, 1)], id="orphans stand alone"),
        pytest.param(
            [block("a"), USER, result("a")], [(0, 1, 0), (1, 2, 1), (2, 3, 1)], id="a late result is no result"
        ),
        pytest.param([CALLS_FUNCTION, FUNCTION, USER], [(0, 2, 0), (2, 3, 1)], id="older form"),
        pytest.param([CALLS_FUNCTION, result("a")], [(0, 1, 0), (1, 2, 0)], id="older form, newer result"),
        pytest.param([block("a"), FUNCTION], [(0, 1, 0), (1, 2, 0)], id="newer form, older result"),
        pytest.param([block("a", function_call={"name": "f"}), FUNCTION, result("a")], [(0, 3, 0)], id="both forms"),
        pytest.param([block(), result("a")], [(0, 1, 0), (1, 2, 0)], id="an empty list of calls is no block"),
        pytest.param([USER, USER], [(0, 1, 1), (1, 2, 2)], id="two user messages are two rounds"),
    ],
)
def test_spans(messages: list[Message], expected: list[tuple[int, int, int]]) -> None:
    assert spans(messages) == tuple(Span(start=start, stop=stop, round=number) for start, stop, number in expected)


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        pytest.param([], [], id="nothing"),
        pytest.param([REPLY, SYSTEM], [(0, 0, 2)], id="nobody asked"),
        pytest.param([USER], [(1, 0, 1)], id="one question"),
        pytest.param([SYSTEM, USER, REPLY, USER], [(0, 0, 1), (1, 1, 3), (2, 3, 4)], id="a preamble is round 0"),
        pytest.param([USER, REPLY, USER, USER], [(1, 0, 2), (2, 2, 3), (3, 3, 4)], id="no preamble"),
    ],
)
def test_rounds(messages: list[Message], expected: list[tuple[int, int, int]]) -> None:
    assert rounds(messages) == tuple(Round(number=number, start=start, stop=stop) for number, start, stop in expected)


@pytest.mark.parametrize(
    ("messages", "ids"),
    [
        pytest.param([], None, id="nothing"),
        pytest.param([USER, REPLY], None, id="no calls"),
        pytest.param([USER, block("a", "b")], ("a", "b"), id="no result yet"),
        pytest.param([USER, block("a", "b"), result("b")], ("a",), id="one is missing"),
        pytest.param([USER, block("a", "b"), result("b"), result("a")], None, id="all answered"),
        pytest.param([block("a"), result("a"), block("a")], ("a",), id="an earlier result of that id does not count"),
        pytest.param([block("a"), USER], None, id="given up, since somebody spoke"),
        pytest.param([block("a"), result("x")], ("a",), id="an orphan answers nothing"),
        pytest.param([block("a", "a", "")], ("a",), id="each id once, none for calls without"),
        pytest.param([USER, CALLS_FUNCTION], ("",), id="older form"),
        pytest.param([USER, CALLS_FUNCTION, FUNCTION], None, id="older form, answered"),
    ],
)
def test_open_calls(messages: list[Message], ids: tuple[str, ...] | None) -> None:
    assert open_calls(messages) == (ids or ())


def test_results_are_of_both_forms() -> None:
    assert [each.is_result for each in (result("a"), FUNCTION, USER, REPLY)] == [True, True, False, False]


ANY = st.lists(
    st.sampled_from(
        [USER, SYSTEM, REPLY, CALLS_FUNCTION, FUNCTION, block("a"), block("a", "b"), result("a"), result("b")]
    )
)


@given(ANY)
def test_spans_and_rounds_cover_every_position_once_and_spans_lie_in_rounds(messages: list[Message]) -> None:
    parts, turns = spans(messages), rounds(messages)
    assert [at for part in parts for at in range(part.start, part.stop)] == list(range(len(messages)))
    assert [at for turn in turns for at in range(turn.start, turn.stop)] == list(range(len(messages)))
    for part in parts:
        (around,) = [turn for turn in turns if turn.number == part.round]
        assert around.start <= part.start < part.stop <= around.stop


@given(ANY)
def test_the_start_of_a_span_is_found_from_any_place_in_it(messages: list[Message]) -> None:
    for part in spans(messages):
        assert [span_start(messages, at) for at in range(part.start, part.stop)] == [part.start] * (
            part.stop - part.start
        )


@given(ANY, ANY)
def test_spans_of_a_longer_history_begin_with_those_of_the_shorter(
    messages: list[Message], more: list[Message]
) -> None:
    complete = spans(messages)[:-1]
    assert spans(messages + more)[: len(complete)] == complete


def test_of_very_many_calls_none_is_compared_with_each_result(comparisons: list[Call]) -> None:
    names = [f"i{at}" for at in range(200)]
    calls = [{"id": name, "type": "function", "function": {"name": "f", "arguments": "{}"}} for name in names]
    results = [ChatMessage.of({"role": "tool", "tool_call_id": name, "content": "1"}) for name in names[:-1]]
    assert open_calls([ChatMessage.of({"role": "assistant", "content": None, "tool_calls": calls}), *results]) == (
        "i199",
    )
    assert len(comparisons) <= 400

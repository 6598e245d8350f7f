"""The rules about calls and results: spans, what breaks the rules, and the repair."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proxy.dialects import Message
from proxy.dialects.messages import DIALECT as MESSAGES
from proxy.dialects.messages.message import MessagesMessage
from proxy.dialects.messages.protocol import NO_RESULT, OPENING

USER = MessagesMessage.of({"role": "user", "content": "hi"})
REPLY = MessagesMessage.of({"role": "assistant", "content": "ho"})
SYSTEM = MessagesMessage.of({"role": "system", "content": "Be brief."})


def calling(*ids: Any, said: str = "") -> MessagesMessage:
    blocks: list[Any] = [{"type": "text", "text": said}] if said else []
    blocks += [{"type": "tool_use", "id": each, "name": "look", "input": {}} for each in ids]
    return MessagesMessage.of({"role": "assistant", "content": blocks})


def answering(*ids: str, said: str = "", first: bool = False) -> MessagesMessage:
    blocks: list[Any] = [{"type": "tool_result", "tool_use_id": each, "content": "x"} for each in ids]
    beside = [{"type": "text", "text": said}] if said else []
    return MessagesMessage.of({"role": "user", "content": [*beside, *blocks] if first else [*blocks, *beside]})


SOUND: list[list[Message]] = [
    [USER, calling("a", "b"), answering("a", "b", said="go on"), REPLY, USER],
    [USER, calling("a", "b"), answering("a"), answering("b", said="go on"), REPLY],
    [USER, REPLY, REPLY, USER, USER, SYSTEM, calling("a"), answering("a"), SYSTEM],
]


@pytest.mark.parametrize("messages", SOUND)
def test_a_sound_history_stays_the_very_same(messages: list[Message]) -> None:
    repaired = MESSAGES.repair(messages)
    assert (repaired.notes, MESSAGES.problems(messages)) == ((), [])
    assert [id(message) for message in repaired.messages] == [id(message) for message in messages]
    assert repaired.sources == tuple(range(len(messages)))


def test_spans_hold_a_reply_with_the_results_of_its_calls() -> None:
    messages = [USER, calling("a", "b"), answering("a"), answering("b", said="go on"), REPLY, USER]
    found = [(span.start, span.stop, span.round) for span in MESSAGES.spans(messages)]
    assert found == [(0, 1, 1), (1, 4, 1), (4, 5, 1), (5, 6, 2)]


def running(*blocks: dict[str, Any]) -> MessagesMessage:
    return MessagesMessage.of({"role": "assistant", "content": list(blocks)})


def test_spans_hold_all_of_what_the_provider_runs() -> None:
    def begun(name: str) -> dict[str, Any]:
        return {"type": "server_tool_use", "id": name, "name": "code_execution", "input": {}}

    def called(name: str, caller: str) -> dict[str, Any]:
        caused = {"type": "code_execution_20250825", "tool_id": caller}
        return {"type": "tool_use", "id": name, "name": "look", "input": {}, "caller": caused}

    def ended(name: str) -> dict[str, Any]:
        return {"type": "code_execution_tool_result", "tool_use_id": name, "content": {}}

    text = {"type": "text", "text": "So it is."}
    messages = [
        *[USER, running(begun("s1"), called("a", "s1")), answering("a"), running(called("b", "s1")), answering("b")],
        *[running(begun("s2"), ended("s1")), running(ended("s2"), text), USER],
        *[
            running(begun("s3"), ended("s3"), text),
            USER,
            running(begun("s4")),
            running(text),
            running(called("c", "x")),
        ],
    ]

    def spans(stop: int) -> list[tuple[int, int, int]]:
        return [(span.start, span.stop, span.round) for span in MESSAGES.spans(messages[:stop])]

    assert spans(3) == [(0, 1, 1), (1, 3, 1)]
    assert spans(5) == [(0, 1, 1), (1, 5, 1)]
    rest = [(7, 8, 2), (8, 9, 2), (9, 10, 3), (10, 11, 3), (11, 12, 3), (12, 13, 3)]
    assert spans(13) == [(0, 1, 1), (1, 7, 1), *rest]


def told(messages: list[Message]) -> list[tuple[str, Any]]:
    repaired = MESSAGES.repair(messages)
    assert MESSAGES.problems(repaired.messages) == []
    return [
        (message.role, message.answered or tuple(call.id for call in message.calls) or message.text)
        for message in repaired.messages
    ]


@pytest.mark.parametrize(
    ("messages", "expected", "note"),
    [
        ([USER, calling("a")], [("user", "hi"), ("assistant", ("a",)), ("tool", ("a",))], "tool call without a result"),
        (
            [USER, calling("a", "b"), answering("b", said="go on"), USER],
            [
                ("user", "hi"),
                ("assistant", ("a", "b")),
                ("tool", ("b",)),
                ("tool", ("a",)),
                ("user", "go on"),
                ("user", "hi"),
            ],
            "1 x tool call without a result, a result was put in",
        ),
        (
            [USER, calling("a"), answering("a", "z", "a")],
            [("user", "hi"), ("assistant", ("a",)), ("tool", ("a",))],
            "1 x tool result without a call, left out",
        ),
        ([USER, answering("z"), REPLY], [("user", "hi"), ("assistant", "ho")], "tool result without a call"),
        ([USER, answering("z", said="go on")], [("user", "hi"), ("user", "go on")], "tool result without a call"),
        (
            [USER, calling("a"), answering("a", said="go on", first=True)],
            [("user", "hi"), ("assistant", ("a",)), ("tool", ("a",)), ("user", "go on")],
            "tool result behind other content, put first",
        ),
        (
            [USER, calling("a", "b"), answering("a", said="go on"), answering("b")],
            [("user", "hi"), ("assistant", ("a", "b")), ("tool", ("a",)), ("tool", ("b",)), ("user", "go on")],
            "tool result behind other content, put first",
        ),
        (
            [USER, calling("", "a", "a", said="look"), answering("a")],
            [("user", "hi"), ("assistant", ("a",)), ("tool", ("a",))],
            "tool call with the id of another one",
        ),
        (
            [USER, calling("a"), answering("a"), calling("a", said="again"), answering("a")],
            [("user", "hi"), ("assistant", ("a",)), ("tool", ("a",)), ("assistant", "again")],
            "tool call with the id of another one",
        ),
        ([USER, calling(""), USER], [("user", "hi"), ("user", "hi")], "message without content"),
        ([USER, calling(), USER], [("user", "hi"), ("user", "hi")], "message without content"),
        (
            [MessagesMessage.of({"role": "user", "content": []}), USER],
            [("user", "hi")],
            "1 x message without content, left out",
        ),
        ([REPLY, USER], [("user", OPENING), ("assistant", "ho"), ("user", "hi")], "begins with a reply"),
        ([answering("z"), REPLY], [("user", OPENING), ("assistant", "ho")], "begins with a reply"),
        (
            [SYSTEM, USER, REPLY, SYSTEM],
            [("user", "Be brief."), ("user", "hi"), ("assistant", "ho"), ("user", "Be brief.")],
            "2 x system message that follows no user's turn, said by the user",
        ),
    ],
)
def test_what_breaks_the_rules_is_repaired(messages: list[Message], expected: list[tuple[str, Any]], note: str) -> None:
    assert told(messages) == expected
    assert any(note in each for each in MESSAGES.repair(messages).notes)
    assert MESSAGES.problems(messages)


def test_a_result_that_is_put_in_says_so() -> None:
    assert MESSAGES.repair([USER, calling("a")]).messages[-1].text == NO_RESULT
    assert MESSAGES.spoken("user", "x").data == {"role": "user", "content": "x"}
    assert MESSAGES.message(b'{"role":"user","content":"x"}') == MESSAGES.spoken("user", "x")


def test_a_question_of_the_proxy_s_own_is_a_request() -> None:
    asked = MESSAGES.requests.parse(MESSAGES.question("m", "Be brief.", "Why?"))
    assert (asked.model, asked.instructions[0].text, asked.messages[0].text) == ("m", "Be brief.", "Why?")


def test_nothing_is_learnt_about_orders_of_roles() -> None:
    api = MESSAGES.requests
    assert api.demanded_order(400, b"roles must alternate") is None
    assert api.reordered([USER, USER], "alternate") == (USER, USER)
    assert not api.refuses_usage(b"stream_options")


_IDS = ["a", "b", "c", ""]


@st.composite
def any_message(draw: st.DrawFn) -> MessagesMessage:
    """Return a message of any kind, sound or not."""
    kind = draw(st.sampled_from(["user", "reply", "system", "calling", "answering"]))
    said = draw(st.sampled_from(["", "x"]))
    if kind == "calling":
        return calling(*draw(st.lists(st.sampled_from(_IDS), max_size=3)), said=said)
    if kind == "answering":
        ids = draw(st.lists(st.sampled_from(_IDS), min_size=1, max_size=3))
        return answering(*ids, said=said, first=draw(st.booleans()))
    return {"user": USER, "reply": REPLY, "system": SYSTEM}[kind]


@given(st.lists(any_message(), max_size=8))
def test_whatever_is_repaired_keeps_the_rules(messages: list[Message]) -> None:
    repaired = MESSAGES.repair(messages)
    assert MESSAGES.problems(repaired.messages) == []
    assert bool(repaired.notes) == bool(MESSAGES.problems(messages))
    for message, source in zip(repaired.messages, repaired.sources, strict=True):
        assert source is None or message is messages[source]

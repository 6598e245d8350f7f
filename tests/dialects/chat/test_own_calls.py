"""Calls of the proxy's own tools: told apart, taken out of a body, and the texts around them joined."""

from __future__ import annotations

import json
from typing import Any

import orjson
import pytest

from proxy.dialects import Call
from proxy.dialects.chat.own_tools import BLANK_LINE, CalledRound, ToolBodyFilter, gap, says_something, without_own
from proxy.dialects.jsontext import added
from proxy.dialects.own_tools import BROKE_OFF, SAID_NOTHING, STOPPED, RoundEnding, round_ending

Data = dict[str, Any]
NAMES = frozenset({"ours"})


def call(name: str, identity: Any = "a", arguments: Any = "{}") -> Data:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def reply(*calls: Any, content: Any = None, **more: Any) -> Data:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


OURS, THEIRS = call("ours"), call("theirs", "b")
CUT = call("ours", "c", '{"q')


@pytest.mark.parametrize(
    ("message", "finish", "own", "broken", "others"),
    [
        ({}, "", 0, False, False),
        (reply(OURS, THEIRS, OURS), "tool_calls", 2, False, True),
        (reply(OURS), "stop", 1, False, False),
        (reply(THEIRS), "stop", 0, False, True),
        ({"function_call": {"name": "f"}}, "function_call", 0, False, True),
        (reply("junk", OURS), "", 1, False, True),
        (reply(CUT), "tool_calls", 1, False, False),
        (reply(OURS, CUT), "length", 1, True, False),
        (reply(CUT), "content_filter", 0, True, False),
    ],
)
def test_calls_are_told_apart(message: Data, finish: str, own: int, broken: bool, others: bool) -> None:
    calls = CalledRound(names=NAMES, message=message, finish=finish).calls
    assert (len(calls.own), calls.broken, calls.others) == (own, broken, others)


def test_a_message_without_the_proxys_calls() -> None:
    assert without_own(reply(OURS, THEIRS), NAMES)["tool_calls"] == [THEIRS]
    assert without_own(reply(OURS), NAMES) == {"role": "assistant", "content": None}
    untouched = reply(THEIRS)
    assert without_own(untouched, NAMES) is untouched


@pytest.mark.parametrize(
    ("message", "finish", "how", "expected"),
    [
        (reply(OURS), "tool_calls", {}, RoundEnding(again=True, text="", finish="")),
        (reply(OURS), "length", {}, RoundEnding(again=True, text="", finish="")),
        (reply(OURS, THEIRS), "tool_calls", {}, RoundEnding(again=False, text="", finish="tool_calls")),
        (reply(OURS), "tool_calls", {"may_ask": False}, RoundEnding(again=False, text=STOPPED, finish="stop")),
        (reply(CUT), "length", {}, RoundEnding(again=False, text=BROKE_OFF, finish="length")),
        (
            reply(OURS, CUT),
            "content_filter",
            {"may_ask": False},
            RoundEnding(again=False, text=BROKE_OFF, finish="content_filter"),
        ),
        (reply(CUT, content="So"), "length", {}, RoundEnding(again=False, text="", finish="length")),
        ({"content": ""}, "stop", {}, RoundEnding(again=False, text="", finish="stop")),
        ({"content": " "}, "stop", {"later": True}, RoundEnding(again=False, text=SAID_NOTHING, finish="stop")),
        ({"content": ""}, "length", {"later": True}, RoundEnding(again=False, text="", finish="length")),
        ({}, "stop", {"later": True, "said": True}, RoundEnding(again=False, text="", finish="stop")),
        ({"content": "So"}, "stop", {"later": True}, RoundEnding(again=False, text="", finish="stop")),
    ],
)
def test_how_a_round_ends(message: Data, finish: str, how: Data, expected: RoundEnding) -> None:
    current = CalledRound(names=NAMES, message=message, finish=finish)
    given = {"later": False, "said": False, "may_ask": True, **how}
    assert round_ending(current, "stop", **given) == expected


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"content": "x"}, True),
        ({"content": [{"type": "text"}]}, True),
        ({"refusal": "no"}, True),
        ({"audio": {"id": "x"}}, True),
        ({"content": " \n"}, False),
        (reply(THEIRS), False),
    ],
)
def test_a_reply_says_something_where_it_has_content_to_show(message: Data, says: bool) -> None:
    assert says_something(message) is says


def test_a_message_sent_back_has_all_that_a_request_needs() -> None:
    message = reply(
        {"index": 0, "id": "", "function": {"name": "ours", "arguments": ""}},
        call("theirs", "call_0", "junk"),
        call("ours", "call_0", "[1]"),
        CUT,
        {"id": "x", "type": "custom", "custom": {"name": "ours", "input": "free"}},
        content="So",
    )
    calls = CalledRound(names=NAMES, message=message, finish="tool_calls").calls

    assert calls.message.data["content"] == "So"
    assert calls.message.data["tool_calls"] == [
        call("ours", "call_0_"),
        call("theirs", "call_0", "junk"),
        call("ours", "call_2"),
        call("ours", "c"),
        {"id": "x", "type": "custom", "custom": {"name": "ours", "input": "free"}},
    ]
    assert calls.own == (
        Call(id="call_0_", name="ours", arguments=""),
        Call(id="call_2", name="ours", arguments="[1]"),
        Call(id="c", name="ours", arguments='{"q'),
        Call(id="x", name="ours", arguments="free", custom=True),
    )


def test_a_whole_message_is_sent_back_as_it_came() -> None:
    said = call("ours", "a", '{ "q": 1 }')
    calls = CalledRound(names=NAMES, message=reply(said)).calls
    assert calls.message.data == reply(said)
    assert calls.own == (Call(id="a", name="ours", arguments='{ "q": 1 }'),)
    broken = CalledRound(names=NAMES, message=reply(call("ours", "a", "{oops"))).calls
    assert (broken.message.data["tool_calls"], broken.own[0].arguments) == ([call("ours", "a", "{}")], "{oops")


def part(text: Any) -> dict[str, Any]:
    return {"type": "text", "text": text}


@pytest.mark.parametrize("before", ["Let me look.", [part("?"), part("Let me look.")]])
def test_texts_that_would_run_into_each_other_are_kept_apart(before: Any) -> None:
    assert gap(before, "It is blue.") == BLANK_LINE


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("One. ", "Two."),
        ("One.", " Two."),
        ("One.\n", "\nTwo."),
        ("One.", "\u00a0Two."),
        ([part("One. ")], "Two."),
        ("", "Two."),
        (None, "Two."),
        ([], "Two."),
        (["odd"], "Two."),
        ([part(None)], "Two."),
        ([{"type": "image_url", "image_url": {"url": "x"}}], "Two."),
        ("One.", ""),
        ("One.", None),
        ("One.", [part("Two.")]),
    ],
)
def test_there_is_no_gap_where_texts_do_not_run_together(before: Any, after: Any) -> None:
    assert gap(before, after) == ""


ONE = {"prompt_tokens": 5, "cost": 0.5, "prompt_tokens_details": {"cached_tokens": 1, "audio_tokens": None}}
OTHER = {"prompt_tokens": 7, "cost": 0.25, "prompt_tokens_details": {"cached_tokens": 2, "audio_tokens": 3}}


def test_numbers_add_up_however_deep() -> None:
    assert added(ONE, OTHER) == {
        "prompt_tokens": 12,
        "cost": 0.75,
        "prompt_tokens_details": {"cached_tokens": 3, "audio_tokens": 3},
    }
    assert ONE["prompt_tokens"] == 5


@pytest.mark.parametrize(
    ("one", "other", "total"),
    [
        (None, None, None),
        (ONE, None, ONE),
        (None, OTHER, OTHER),
        ({}, {}, {}),
        ({"a": 1}, {"b": 2}, {"a": 1, "b": 2}),
        ({"a": 1}, {"a": None}, {"a": 1}),
        ({"a": None}, {"a": None}, {"a": None}),
        ({"a": {"b": 1}}, {"a": None}, {"a": {"b": 1}}),
        ({"a": None}, {"a": {"b": 1}}, {"a": {"b": 1}}),
        ({"tier": "x"}, {"tier": "y"}, {"tier": "y"}),
        ({"a": True}, {"a": True}, {"a": True}),
        ({"a": 1}, {"a": {"b": 1}}, {"a": {"b": 1}}),
    ],
)
def test_the_last_value_counts_where_it_is_no_number(one: Any, other: Any, total: Any) -> None:
    assert added(one, other) == total


# ------------------------------------------------------------------------------------- bodies on their way

SPENT = {"prompt_tokens": 2, "completion_tokens": 1}


def completion(*messages: Data, finish: str | None = "stop", **more: Any) -> bytes:
    choices = [{"index": at, "message": each, "finish_reason": finish} for at, each in enumerate(messages)]
    return orjson.dumps({"choices": choices, "usage": SPENT, **more})


def shown_of(body: bytes) -> tuple[Any, Any, Any]:
    """Return content, finish reason and usage of a body with one choice."""
    data = json.loads(body)
    (choice,) = data["choices"]
    return choice["message"].get("content"), choice["finish_reason"], data["usage"]


@pytest.mark.parametrize(
    "body",
    [
        b"no JSON",
        b"[]",
        b'{"choices":{}}',
        completion(),
        completion({"content": "a"}, {"content": "b"}),
        completion({"role": "assistant", "content": "Hello."}),
        completion(reply(THEIRS), finish=None),
    ],
)
def test_a_body_without_calls_of_ours_is_shown_as_it_is(body: bytes) -> None:
    found = ToolBodyFilter(NAMES)
    assert found.take(body) is body
    assert (found.again, found.rounds, found.calls.own) == (False, 0, ())


def test_a_round_of_ours_is_kept_back_and_the_next_one_goes_on_with_it() -> None:
    found = ToolBodyFilter(NAMES)
    assert found.take(completion(reply(OURS, content="Let me look."), finish="tool_calls")) == b""
    assert found.again
    assert [each.id for each in found.calls.own] == ["a"]
    assert found.calls.message.data["content"] == "Let me look."
    found.next(may_ask=True)
    assert (found.rounds, found.again, found.usage) == (1, False, SPENT)
    shown = found.take(completion({"role": "assistant", "content": "Blue."}))
    assert shown_of(shown) == ("Let me look.\n\nBlue.", "stop", {"prompt_tokens": 4, "completion_tokens": 2})
    assert found.last.text == "Blue."


def test_contents_in_parts_stay_parts() -> None:
    found = ToolBodyFilter(NAMES)
    parts = [{"type": "text", "text": "So. "}]
    found.take(completion(reply(OURS, content=parts), finish="tool_calls"))
    found.next(may_ask=True)
    content, _, _ = shown_of(found.take(completion({"role": "assistant", "content": "Blue."})))
    assert content == [*parts, {"type": "text", "text": "Blue."}]


def test_beside_the_client_s_calls_ours_are_taken_out() -> None:
    found = ToolBodyFilter(NAMES)
    shown = json.loads(found.take(completion(reply(OURS, THEIRS), finish="tool_calls")))
    assert shown["choices"][0]["message"]["tool_calls"] == [THEIRS]
    assert (len(found.calls.own), found.calls.others) == (1, True)
    assert [each.id for each in found.last.calls] == ["b"]


def test_a_call_of_ours_that_broke_off_is_told_as_such() -> None:
    found = ToolBodyFilter(NAMES)
    assert shown_of(found.take(completion(reply(CUT), finish="length"))) == (BROKE_OFF, "length", SPENT)
    assert not found.again


def test_where_no_other_round_may_follow_the_reply_says_so() -> None:
    found = ToolBodyFilter(NAMES)
    found.take(completion(reply(OURS), finish="tool_calls"))
    found.next(may_ask=False)
    found.take(completion(reply(OURS), finish="tool_calls"))
    assert not found.again

    found = ToolBodyFilter(NAMES)
    found.take(completion(reply(OURS), finish="tool_calls"))
    assert shown_of(found.give_up()) == (STOPPED, "stop", SPENT)
    assert found.last.text == STOPPED


def test_a_later_round_without_a_reply_is_shown_as_it_is() -> None:
    found = ToolBodyFilter(NAMES)
    found.take(completion(reply(OURS), finish="tool_calls"))
    found.next(may_ask=True)
    assert found.take(completion()) == completion()
    assert found.take(completion({"content": None, "role": "assistant"})) != b""
    assert SAID_NOTHING in found.last.text

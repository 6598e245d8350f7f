from __future__ import annotations

from typing import Any

import pytest

from proxy.dialects import Call
from proxy.dialects.chat.own_calls import (
    BROKE_OFF,
    SAID_NOTHING,
    STOPPED,
    Ending,
    Parted,
    answerable,
    ending,
    parted,
    says_something,
    without_own,
)

Data = dict[str, Any]
NAMES = frozenset({"ours"})


def call(name: str, identity: Any = "a", arguments: Any = "{}") -> Data:
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def reply(*calls: Any, content: Any = None, **more: Any) -> Data:
    return {"role": "assistant", "content": content, "tool_calls": list(calls), **more}


OURS, THEIRS = call("ours"), call("theirs", "b")
CUT = call("ours", "c", '{"q')


@pytest.mark.parametrize(
    ("message", "finish", "expected"),
    [
        ({}, None, Parted(own=(), broken=(), others=False)),
        (reply(OURS, THEIRS, OURS), "tool_calls", Parted(own=(0, 2), broken=(), others=True)),
        (reply(OURS), "stop", Parted(own=(0,), broken=(), others=False)),
        (reply(THEIRS), "stop", Parted(own=(), broken=(), others=True)),
        ({"function_call": {"name": "f"}}, "function_call", Parted(own=(), broken=(), others=True)),
        (reply("junk", OURS), None, Parted(own=(1,), broken=(), others=True)),
        (reply(CUT), "tool_calls", Parted(own=(0,), broken=(), others=False)),
        (reply(OURS, CUT), "length", Parted(own=(0,), broken=(1,), others=False)),
        (reply(CUT), "content_filter", Parted(own=(), broken=(0,), others=False)),
    ],
)
def test_calls_are_told_apart(message: Data, finish: str | None, expected: Parted) -> None:
    assert parted(message, NAMES, finish) == expected


def test_what_is_left_without_ours() -> None:
    assert without_own(reply(OURS, THEIRS), NAMES)["tool_calls"] == [THEIRS]
    assert without_own(reply(OURS), NAMES) == {"role": "assistant", "content": None}
    untouched = reply(THEIRS)
    assert without_own(untouched, NAMES) is untouched


@pytest.mark.parametrize(
    ("message", "finish", "how", "expected"),
    [
        (reply(OURS), "tool_calls", {}, Ending(again=True, text="", finish="")),
        (reply(OURS), "length", {}, Ending(again=True, text="", finish="")),
        (reply(OURS, THEIRS), "tool_calls", {}, Ending(again=False, text="", finish="tool_calls")),
        (reply(OURS), "tool_calls", {"may_ask": False}, Ending(again=False, text=STOPPED, finish="stop")),
        (reply(CUT), "length", {}, Ending(again=False, text=BROKE_OFF, finish="length")),
        (
            reply(OURS, CUT),
            "content_filter",
            {"may_ask": False},
            Ending(again=False, text=BROKE_OFF, finish="content_filter"),
        ),
        (reply(CUT, content="So"), "length", {}, Ending(again=False, text="", finish="length")),
        ({"content": ""}, "stop", {}, Ending(again=False, text="", finish="stop")),
        ({"content": " "}, "stop", {"later": True}, Ending(again=False, text=SAID_NOTHING, finish="stop")),
        ({"content": ""}, "length", {"later": True}, Ending(again=False, text="", finish="length")),
        ({}, "stop", {"later": True, "said": True}, Ending(again=False, text="", finish="stop")),
        ({"content": "So"}, "stop", {"later": True}, Ending(again=False, text="", finish="stop")),
    ],
)
def test_how_a_round_ends(message: Data, finish: str, how: Data, expected: Ending) -> None:
    assert (
        ending(message, NAMES, finish, **{"later": False, "said": False, "may_ask": True, **how}) == expected
    )


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
def test_what_says_something(message: Data, says: bool) -> None:
    assert says_something(message) is says


def test_what_is_sent_back_has_all_that_a_request_needs() -> None:
    message = reply(
        {"index": 0, "id": "", "function": {"name": "ours", "arguments": ""}},
        call("theirs", "call_0", "junk"),
        call("ours", "call_0", "[1]"),
        CUT,
        {"id": "x", "type": "custom", "custom": {"name": "ours", "input": "free"}},
        content="So",
    )
    sent, own = answerable(message, Parted(own=(0, 2, 4), broken=(3,), others=True))

    assert sent["content"] == "So"
    assert sent["tool_calls"] == [
        call("ours", "call_0_"),
        call("theirs", "call_0", "junk"),
        call("ours", "call_2"),
        {"id": "x", "type": "custom", "custom": {"name": "ours", "input": "free"}},
    ]
    assert own == (
        Call(id="call_0_", name="ours", arguments=""),
        Call(id="call_2", name="ours", arguments="[1]"),
        Call(id="x", name="ours", arguments="free", custom=True),
    )


def test_what_is_whole_is_sent_back_as_it_came() -> None:
    said = call("ours", "a", '{ "q": 1 }')
    sent, own = answerable(reply(said), Parted(own=(0,), broken=(), others=False))
    assert sent == reply(said)
    assert own == (Call(id="a", name="ours", arguments='{ "q": 1 }'),)
    broken, [first] = answerable(reply(call("ours", "a", "{oops")), Parted(own=(0,), broken=(), others=False))
    assert (broken["tool_calls"], first.arguments) == ([call("ours", "a", "{}")], "{oops")

from typing import Any

import pytest

from proxy.demo.refusals import Refused, check

USER = {"role": "user", "content": "hi"}


def calling(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": [{"id": i, "type": "function"} for i in ids]}


def result(call: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": "{}"}


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [USER, calling("a"), result("a"), calling("a"), result("a"), USER],
        [USER, calling("a", "b"), result("b"), result("a")],
        [{"role": "assistant", "content": "hello"}, USER],
    ],
    ids=["plain", "an id used again", "parallel calls", "assistant first"],
)
def test_it_is_taken(messages: list[Any]) -> None:
    request = {"model": "m", "messages": messages}
    assert check(request) is request


@pytest.mark.parametrize(
    ("messages", "param", "words"),
    [
        ([USER, calling("a"), USER], "messages.[2].role", "did not have response messages: a"),
        ([USER, calling("a", "b"), result("a")], "messages.[3].role", "did not have response messages: b"),
        ([USER, result("a")], "messages.[1].role", "must be a response to"),
        ([USER, calling("a"), result("a"), result("a")], "messages.[3].role", "must be a response to"),
        ([USER, calling()], "messages[1].tool_calls", "empty array"),
        ([{"role": "robot"}], "messages[0].role", "'robot'"),
        (["hi"], "messages[0]", "expected an object"),
        ([], "messages", "empty array"),
    ],
    ids=[
        "no result",
        "one missing",
        "orphan",
        "answered twice",
        "no calls",
        "role",
        "no object",
        "no messages",
    ],
)
def test_messages_are_refused(messages: list[Any], param: str, words: str) -> None:
    with pytest.raises(Refused, match=words) as caught:
        check({"model": "m", "messages": messages})
    error = caught.value.body["error"]
    assert (error["param"], error["type"]) == (param, "invalid_request_error")


@pytest.mark.parametrize(
    ("request_", "words"),
    [
        (None, "could not parse"),
        ({"messages": [USER]}, "model"),
        ({"model": "m"}, "Missing required parameter: 'messages'"),
        ({"model": "m", "messages": [USER], "tools": []}, "Invalid 'tools': empty array"),
    ],
)
def test_requests_are_refused(request_: Any, words: str) -> None:
    with pytest.raises(Refused, match=words):
        check(request_)

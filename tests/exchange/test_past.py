"""Stored replies in the form in which a request carries them."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.exchange.past import ref_of, request_form
from proxy.wire.messages import Message

CALL = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
HALF = {"id": "c2", "type": "function", "function": {"name": "g", "arguments": '{"a": '}}


def _form(data: dict[str, Any], reasoning: Any = "auto", *, partial: bool = False) -> dict[str, Any]:
    return request_form(Message.of({"role": "assistant"} | data), reasoning, partial=partial).data


def test_what_only_a_response_has_goes() -> None:
    reply: dict[str, Any] = {
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert _form(reply) == {"role": "assistant", "content": "hi"}


def test_a_reply_without_them_keeps_its_bytes() -> None:
    message = Message(b'{ "role":"assistant", "content": "hi" }')
    assert request_form(message, "auto", partial=False) is message


@pytest.mark.parametrize(
    "data", [{"content": None, "tool_calls": [CALL]}, {"content": ""}, {"content": "x", "refusal": "no"}]
)
def test_what_a_request_may_have_stays(data: dict[str, Any]) -> None:
    assert _form(data) == {"role": "assistant"} | data


def test_audio_is_sent_back_by_its_id() -> None:
    assert _form({"content": None, "audio": {"id": "a1", "data": "AAAA", "expires_at": 1}})["audio"] == {
        "id": "a1"
    }


@pytest.mark.parametrize(
    ("mode", "calls", "kept"),
    [("auto", True, True), ("auto", False, False), ("keep", False, True), ("drop", True, False)],
)
def test_reasoning_goes_back_where_it_is_wanted(mode: str, calls: bool, kept: bool) -> None:
    data: dict[str, Any] = {"content": "x", "reasoning_content": "hm"} | (
        {"tool_calls": [CALL]} if calls else {}
    )
    assert ("reasoning_content" in _form(data, mode)) is kept


def test_what_exists_only_to_be_sent_back_is_kept_unless_all_is_dropped() -> None:
    data = {"content": "x", "reasoning_details": [{"type": "reasoning.text"}]}
    assert "reasoning_details" in _form(data)
    assert "reasoning_details" not in _form(data, "drop")


def test_a_reply_that_broke_off_loses_the_calls_that_are_not_whole() -> None:
    assert _form({"content": "x", "tool_calls": [CALL, HALF]}, partial=True)["tool_calls"] == [CALL]
    assert "tool_calls" not in _form({"content": "x", "tool_calls": [HALF]}, partial=True)
    assert _form({"content": "x", "tool_calls": [HALF]})["tool_calls"] == [HALF]


def test_a_ref_names_a_text() -> None:
    assert ref_of("0123456789abcdef0000") == "ref_0123456789abcdef"

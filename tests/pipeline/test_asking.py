from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.conversation import Mode
from proxy.dialects.chat.request import ChatRequest, parse_chat_request
from proxy.errors import InvalidRequest
from proxy.pipeline.asking import context_of
from proxy.trimming import Policy

POLICY = Policy.model_validate(
    {"trigger": {"tokens": 9}, "edits": [{"type": "summarize", "mode": "model", "heading": "So far"}]}
)


def request(*messages: dict[str, Any]) -> ChatRequest:
    return parse_chat_request(orjson.dumps({"model": "m", "messages": messages}))


ASKED = request({"role": "user", "content": "hi"})


def test_headers_say_how_it_asks() -> None:
    sent = {
        b"x-session-mode": b" Append ",
        b"x-stainless-retry-count": b"02",
        b"idempotency-key": b"once",
        b"x-agent-name": b"Sp%C3%A4her",
    }
    asking = context_of("t", sent, ASKED, "lean", POLICY)
    assert (asking.mode, asking.retried, asking.agent) == (Mode.APPEND, True, "Späher")
    assert asking.idempotency == context_of("t", sent, ASKED, "lean", POLICY).idempotency != "once"
    assert (asking.policy, asking.recipe, asking.whole) == ("lean", POLICY.summarizing.recipe, False)


def test_without_them_it_asks_as_usual_and_off_wants_neither_cut_nor_summary() -> None:
    asking = context_of("t", {b"x-stainless-retry-count": b"0"}, ASKED, "off", None)
    assert (asking.mode, asking.retried, asking.idempotency, asking.agent) == (Mode.AUTO, False, None, None)
    assert (asking.policy, asking.recipe) == (None, None)


def test_a_mode_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="auto, append, full"):
        context_of("t", {b"x-session-mode": b"sideways"}, ASKED, "off", None)


@pytest.mark.parametrize(
    ("message", "agent"),
    [
        ({"role": "user", "content": "a", "agent": "planner"}, "planner"),
        ({"role": "user", "content": "a", "is_internal": True}, None),
        ({"role": "user", "content": "a", "agent": ""}, None),
        ({"role": "user", "content": "a", "agent": 7}, None),
    ],
)
def test_the_newest_message_says_who_asks_where_no_header_does(
    message: dict[str, Any], agent: str | None
) -> None:
    asked = request({"role": "user", "content": "b", "agent": "earlier"}, message)
    assert context_of("t", {}, asked, "off", None).agent == agent
    assert context_of("t", {b"x-agent-name": b"boss"}, asked, "off", None).agent == "boss"


def test_a_request_of_instructions_alone_says_nothing_of_it() -> None:
    assert context_of("t", {}, request({"role": "system", "content": "S"}), "off", None).agent is None

"""What the headers of a request say: its session, policy, mode, agent, and whether it is a retry."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from proxy.config import Policies, SessionSettings
from proxy.conversation import Mode
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.request import parse_chat_request
from proxy.errors import InvalidRequest
from proxy.pipeline.context import MAX_ID_BYTES, ClientRequest, RequestContext, read_context
from proxy.trimming import Policy

POLICY = Policy.model_validate(
    {"trigger": {"tokens": 9}, "edits": [{"type": "summarize", "mode": "model", "heading": "So far"}]}
)
HI = {"role": "user", "content": "hi"}


def context_of(
    sent: dict[str, str] | None = None, *messages: dict[str, Any], extra: dict[str, Any] | None = None, **how: Any
) -> RequestContext:
    """Read the context of a request with these headers and messages; `how` are settings of sessions."""
    body = orjson.dumps({"model": "m", "messages": messages or (HI,), **(extra or {})})
    sent_headers = [(name.encode(), value.encode("latin-1")) for name, value in (sent or {}).items()]
    call = ClientRequest(dialect=CHAT, tenant="t", headers=sent_headers, query=b"", body=body)
    return read_context(call, parse_chat_request(body), SessionSettings(**how), Policies({"lean": POLICY}))


def test_headers_say_mode_retry_agent_and_idempotency_key() -> None:
    sent = {
        "x-session-mode": " Append ",
        "x-stainless-retry-count": "02",
        "idempotency-key": "once",
        "x-agent-name": "Sp%C3%A4her",
    }
    context = context_of(sent)
    assert (context.tenant, context.mode, context.retried) == ("t", Mode.APPEND, True)
    assert context.agent == "Späher"
    assert context.idempotency == context_of(sent).idempotency != "once"
    assert (context.policy_name, context.policy) == ("lean", POLICY)


def test_an_idempotency_key_may_be_percent_encoded() -> None:
    keys = {context_of({"idempotency-key": key}).idempotency for key in ("%6Fnce", "once")}
    assert len(keys) == 1
    with pytest.raises(InvalidRequest):
        context_of({"idempotency-key": "%ff"})


def test_a_request_without_them_has_the_defaults() -> None:
    context = context_of({"x-stainless-retry-count": "0"})
    assert (context.mode, context.retried, context.idempotency) == (Mode.AUTO, False, None)
    assert (context.agent, context.session) == (None, None)


def test_the_policy_off_means_no_policy() -> None:
    context = context_of({"x-context-policy": "off"})
    assert (context.policy_name, context.policy) == ("off", None)


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="auto, append, full"):
        context_of({"x-session-mode": "sideways"})


# ---------------------------------------------------------------------------------------------- the agent


@pytest.mark.parametrize(
    ("message", "agent"),
    [
        ({"role": "user", "content": "a", "agent": "planner"}, "planner"),
        ({"role": "user", "content": "a", "is_internal": True}, None),
        ({"role": "user", "content": "a", "agent": ""}, None),
        ({"role": "user", "content": "a", "agent": 7}, None),
    ],
)
def test_without_a_header_the_newest_message_names_the_agent(message: dict[str, Any], agent: str | None) -> None:
    said = ({"role": "user", "content": "b", "agent": "earlier"}, message)
    assert context_of({}, *said).agent == agent
    assert context_of({"x-agent-name": "boss"}, *said).agent == "boss"


def test_a_request_of_instructions_alone_names_no_agent() -> None:
    assert context_of({}, {"role": "system", "content": "S"}).agent is None


def test_a_blank_header_is_as_none() -> None:
    message = {"role": "user", "content": "a", "agent": "planner"}
    assert context_of({"x-agent-name": " \t"}, message).agent == "planner"


# -------------------------------------------------------------------------------------------- the session


def _session(sent: dict[str, str], extra: dict[str, Any] | None = None, **how: Any) -> str | None:
    return context_of(sent, extra=extra, **how).session


def test_the_header_names_the_session() -> None:
    assert _session({"x-session-id": "chat-1"}) == "chat-1"


def test_session_ids_outside_ascii_are_percent_encoded() -> None:
    assert _session({"X-Session-ID": "%E4%BC%9A%E8%AF%9D a%2Fb%25"}) == "会话 a/b%"


def test_a_header_comes_before_a_field_and_the_first_header_before_the_second() -> None:
    how: dict[str, Any] = {"headers": ("X-One", "X-Two"), "body_fields": ("metadata.session_id",)}
    extra = {"metadata": {"session_id": "from-body"}}
    assert _session({"x-two": "2", "x-one": "1"}, extra, **how) == "1"
    assert _session({"x-two": "2"}, extra, **how) == "2"
    assert _session({}, extra, **how) == "from-body"


@pytest.mark.parametrize("told", ["conv_1", {"id": "conv_1"}])
def test_a_conversation_names_the_session_in_both_of_its_forms(told: Any) -> None:
    assert _session({}, {"conversation": told}, body_fields=("conversation",), missing="reject") == "conv_1"


def test_a_request_may_name_no_session() -> None:
    assert _session({}) is None


def test_a_request_without_a_session_is_served_stateless_or_refused_as_configured() -> None:
    assert _session({}, missing="stateless") is None
    with pytest.raises(InvalidRequest, match="X-Session-ID") as why:
        _session({}, missing="reject")
    assert why.value.param == "X-Session-ID"
    with pytest.raises(InvalidRequest, match="X-Session-ID"):
        _session({}, missing="reject", headers=())


@pytest.mark.parametrize("value", ["a%00b", "a%0Ab", "a" * (MAX_ID_BYTES + 1), "%E4%BC%9A" * 200, "a%ff"])
def test_a_session_id_with_control_characters_or_too_long_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as why:
        _session({"x-session-id": value})
    assert why.value.param == "X-Session-ID"


def test_white_space_around_a_session_id_is_not_part_of_it() -> None:
    assert _session({"x-session-id": " s\t "}) == "s"

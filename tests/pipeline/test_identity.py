"""Which session a request belongs to."""

from __future__ import annotations

from typing import Any

import pytest

from proxy.config import SessionSettings
from proxy.dialects.chat.request import ChatRequest, parse_chat_request
from proxy.dialects.headers import first_values
from proxy.errors import InvalidRequest
from proxy.pipeline.identity import MAX_ID_BYTES, header_of, session_of


def _request(extra: str = "") -> ChatRequest:
    return parse_chat_request(f'{{"model":"m","messages":[{{"role":"user","content":"x"}}]{extra}}}'.encode())


def _session(given: dict[str, str], extra: str = "", **settings: Any) -> str | None:
    sent = [(name.encode(), value.encode("latin-1")) for name, value in given.items()]
    return session_of(first_values(sent), _request(extra), SessionSettings(**settings))


def test_the_header_names_it() -> None:
    assert _session({"x-session-id": "chat-1"}) == "chat-1"


def test_names_outside_ascii_are_percent_encoded() -> None:
    assert _session({"X-Session-ID": "%E4%BC%9A%E8%AF%9D a%2Fb%25"}) == "会话 a/b%"


def test_a_header_comes_before_a_field_and_the_first_header_before_the_second() -> None:
    settings: dict[str, Any] = {"headers": ("X-One", "X-Two"), "body_fields": ("metadata.session_id",)}
    field = ',"metadata":{"session_id":"from-body"}'
    assert _session({"x-two": "2", "x-one": "1"}, field, **settings) == "1"
    assert _session({"x-two": "2"}, field, **settings) == "2"
    assert _session({}, field, **settings) == "from-body"


def test_a_request_may_name_no_session() -> None:
    assert _session({}) is None


def test_without_an_id_the_operator_may_want_nothing_stored_or_a_refusal() -> None:
    assert _session({}, missing="stateless") is None
    with pytest.raises(InvalidRequest, match="X-Session-ID") as why:
        _session({}, missing="reject")
    assert why.value.param == "X-Session-ID"
    with pytest.raises(InvalidRequest, match="X-Session-ID"):
        _session({}, missing="reject", headers=())


@pytest.mark.parametrize("value", ["a%00b", "a%0Ab", "a" * (MAX_ID_BYTES + 1), "%E4%BC%9A" * 200, "a%ff"])
def test_an_id_that_cannot_be_shown_or_is_too_long_is_refused(value: str) -> None:
    with pytest.raises(InvalidRequest) as why:
        _session({"x-session-id": value})
    assert why.value.param == "X-Session-ID"


def test_a_header_that_is_not_there_or_empty_is_none() -> None:
    assert header_of({}, "X-Agent-Name") is None
    assert header_of(first_values([(b"x-agent-name", b" \t")]), "X-Agent-Name") is None


def test_white_space_around_a_value_is_not_part_of_it() -> None:
    assert _session({"x-session-id": " s\t "}) == "s"

"""Invalid requests that are refused, and odd ones that are served."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream

USER = {"role": "user", "content": "a"}
LIMIT = 10_000


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve(server={"max_body_bytes": LIMIT})


def refused(proxy: Proxy, session: str, body: bytes, **headers: str) -> tuple[int, str | None]:
    """Send a request that must be refused; return the status and the parameter in the error."""
    answer = proxy.client.post("/v1/chat/completions", content=body, headers={"x-session-id": session} | headers)
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return answer.status_code, error["param"]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"", None),
        (b"not json", None),
        (b'{"model":"echo","messages":[{"role":"user","content":"a"}]', None),
        (b'{"model":"echo","messages":[{"role":"user","content":"\xff"}]}', "messages[0]"),
        (b"[" * 5000, None),
        (b"[]", None),
        (b'"text"', None),
        (b"{}", "messages"),
        (b'{"model":"echo"}', "messages"),
        (b'{"model":"echo","messages":null}', "messages"),
        (b'{"model":"echo","messages":{}}', "messages"),
        (b'{"model":"echo","messages":[]}', "messages"),
        (b'{"model":"echo","messages":[1]}', "messages[0]"),
        (b'{"model":"echo","messages":[{"role":"user","content":"a"},null]}', "messages[1]"),
        (b'{"model":"echo","messages":[{"content":"a"}]}', "messages[0].role"),
        (b'{"model":"echo","messages":[{"role":1,"content":"a"}]}', "messages[0].role"),
        (b'{"model":"echo","messages":[{"role":"user","content":1}]}', "messages[0].content"),
        (b'{"model":"echo","messages":[{"role":"user","content":true}]}', "messages[0].content"),
        (b'{"model":1,"messages":[{"role":"user","content":"a"}]}', "model"),
        (b'{"model":"","messages":[{"role":"user","content":"a"}]}', "model"),
        (b'{"model":"echo","stream":"yes","messages":[{"role":"user","content":"a"}]}', "stream"),
        (b'{"model":"echo","tools":{},"messages":[{"role":"user","content":"a"}]}', "tools"),
    ],
)
def test_a_body_that_cannot_be_read(
    proxy: Proxy, upstream: Upstream, session: str, body: bytes, param: str | None
) -> None:
    assert refused(proxy, session, body) == (400, param)
    assert upstream.log == []
    assert proxy.client.get(f"/sessions/{session}").status_code == 404


def test_half_a_character(proxy: Proxy, upstream: Upstream, session: str) -> None:
    body = b'{"model":"echo","messages":[{"role":"user","content":"a"},{"role":"user","content":"\\ud83d"}]}'
    status, param = refused(proxy, session, body)
    assert status == 400
    assert param is not None
    assert param.startswith("messages[1]")
    assert upstream.log == []
    assert proxy.client.get(f"/sessions/{session}").status_code == 404


def test_more_than_is_allowed(proxy: Proxy, upstream: Upstream, session: str) -> None:
    body = b'{"model":"echo","messages":[{"role":"user","content":"%s"}]}' % (b"a" * LIMIT)
    assert refused(proxy, session, body)[0] == 413

    def pieces() -> Any:
        yield body[:LIMIT]
        yield body[LIMIT:]

    unannounced = proxy.client.post("/v1/chat/completions", content=pieces(), headers={"x-session-id": session})
    assert unannounced.status_code == 413
    assert upstream.log == []
    fits = b'{"model":"echo","messages":[{"role":"user","content":"%s"}]}' % (b"a" * (LIMIT - len(body) + LIMIT))
    assert proxy.client.post("/v1/chat/completions", content=fits).status_code == 200


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-context-policy", "nonsense"),
        ("x-session-mode", "sometimes"),
        ("x-session-id", "a%00b"),
        ("x-session-id", "%ff"),
        ("x-session-id", "%0a"),
        ("x-session-id", "x" * 513),
        ("x-agent-name", "%00"),
        ("content-encoding", "gzip"),
    ],
)
def test_a_header_that_cannot_be_meant(proxy: Proxy, upstream: Upstream, session: str, name: str, value: str) -> None:
    body = b'{"model":"echo","messages":[{"role":"user","content":"a"}]}'
    status, param = refused(proxy, session, body, **{name: value})
    assert (status, (param or "").lower()) == (400, name)
    assert upstream.log == []
    assert proxy.client.get(f"/sessions/{session}").status_code == 404


def test_an_unknown_policy_names_the_known(serve: Serve, session: str) -> None:
    edits = [{"type": "keep_tool_calls"}]
    proxy = serve(policies={"lean": {"trigger": {"tokens": 9}, "edits": edits}})
    answer = proxy.chat(session, "a", headers={"x-context-policy": "lea"})
    assert answer.status_code == 400
    assert "lean" in answer.json()["error"]["message"]
    assert proxy.chat(session, "a", headers={"x-context-policy": "off"}).headers["x-context-policy"] == "off"


@pytest.mark.parametrize(
    "path",
    [
        *("/sessions/none", "/sessions/none/messages", "/sessions/none/context", "/sessions/none/exchanges"),
        *("/sessions/none/export", "/sessions/none/refs/ref_0123456789abcdef", "/exchanges/none"),
    ],
)
def test_what_is_not_there(proxy: Proxy, path: str) -> None:
    answer = proxy.client.get(path)
    assert answer.status_code == 404
    assert answer.json()["error"]["code"] == "not_found"


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "limit=100000", "after=%00", "after=nonsense"])
def test_a_page_that_cannot_be_meant(proxy: Proxy, query: str) -> None:
    answer = proxy.client.get(f"/sessions?{query}")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == query.partition("=")[0]


def test_a_session_can_be_required(serve: Serve, upstream: Upstream) -> None:
    answer = serve(sessions={"missing": "reject"}).chat(None, "a")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "session_missing")
    assert upstream.log == []


def test_nothing_need_be_stored(serve: Serve) -> None:
    proxy = serve(sessions={"missing": "stateless"})
    answer = proxy.chat(None, "a")
    assert answer.status_code == 200
    assert "x-session-id" not in answer.headers
    assert proxy.get("/sessions")["data"] == []


def test_a_session_without_a_name_gets_one(proxy: Proxy) -> None:
    name = proxy.chat(None, "a").headers["x-session-id"]
    assert proxy.chat(name, "b").headers["x-session-id"] == name
    assert len(proxy.messages(name)) == 4


@pytest.mark.parametrize("name", ["a b/c", "\u4f60\u597d", "a%2Fb", "\xe9\U0001f600", "x" * 512])
def test_names_of_any_kind(proxy: Proxy, session: str, name: str) -> None:
    quoted = quote(name, safe="")
    answer = proxy.chat(None, "a", headers={"x-session-id": quoted})
    assert answer.status_code == 200
    assert proxy.messages(name)[0]["content"] == "a"
    assert proxy.get("/sessions")["data"][0]["id"] == name
    assert proxy.client.get(f"/exchanges/{answer.headers['x-exchange-id']}").json()["session"] == name


ODD: list[list[dict[str, Any]]] = [
    [USER, {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": "{}"}}],
    [{"role": "function", "name": "f", "content": "r"}, USER],
    [
        USER,
        {
            "role": "assistant",
            "tool_calls": [{"id": "c", "type": "custom", "custom": {"name": "f", "input": "free text"}}],
        },
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ],
    [{"role": "critic", "content": "an unknown role", "x": {"y": [None, 1.5, "z"]}}, USER],
    [
        {
            "role": "user",
            "content": [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}],
        }
    ],
    [{"role": "user", "content": "nul \x00 and \u2028 and \x7f"}],
    [{"role": "user", "content": [{"type": "unheard_of", "z": 1}]}],
    [{"role": "user", "content": None}, USER],
    [{"role": "user"}, USER],
]


@pytest.mark.parametrize("said", ODD)
def test_what_is_odd_passes_and_is_stored(
    proxy: Proxy, upstream: Upstream, session: str, said: list[dict[str, Any]]
) -> None:
    assert proxy.chat(session, said, "lenient+say:ok").status_code == 200
    assert upstream.last.messages == said
    assert proxy.messages(session)[:-1] == said
    more = [*said, {"role": "assistant", "content": "ok"}, USER]
    assert proxy.chat(session, more, "lenient").status_code == 200
    assert proxy.exchanges(session)[-1]["kind"] == "resend"
    assert proxy.messages(session)[: len(said)] == said

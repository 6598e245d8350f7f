"""What reaches the provider, byte for byte: the client's own text wherever nothing was trimmed or added."""

from __future__ import annotations

from typing import Any

import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream

ODD = (
    b'\n{ "messages" :\t[ {"content":"h\\u00e9llo \\ud83d\\ude00 \xf0\x9f\x98\x80 \\/ \\u0000", '
    b'"role" : "user"} ,\r\n'
    b'  {"role":"assistant","content":null,"tool_calls":[{"id":"a","type":"function","function":'
    b'{"name":"f","arguments":"{ \\"x\\" : 1.0 }"}}],"x_note":{"b":1,"a":1.50E+2}},'
    b'{"role":"tool","tool_call_id":"a","content":[ {"type":"text","text":"ok"} ]} ],'
    b' "x_unknown": {"z":1,"a":[1,2,  3]}, "temperature":1.00, "model":"lenient",\n'
    b' "seed": 12345678901234567890%s }\n'
)
USAGE = b',"stream_options":{"include_usage":true}'


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    edits = [{"type": "drop_oldest"}]
    policy = {"trigger": {"tokens": 100_000}, "target": {"tokens": 50_000}, "edits": edits}
    return serve(policies={"default": policy}, sessions={"body_fields": ["metadata.session_id", "x_session"]})


def post(proxy: Proxy, body: bytes, **headers: str) -> None:
    answer = proxy.client.post("/v1/chat/completions", content=body, headers=headers)
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("extra", "added"),
    [
        (b"", b""),
        (b', "stream": false', b""),
        (b', "stream" :true', USAGE),
        (b', "stream":true, "stream_options":{"include_usage":false}', b""),
        (b', "stream":true, "stream_options":{ "include_usage" : true, "x":1}', b""),
    ],
)
def test_an_untrimmed_body_is_untouched(
    proxy: Proxy, upstream: Upstream, session: str, extra: bytes, added: bytes
) -> None:
    body = ODD % extra
    post(proxy, body, **{"x-session-id": session})
    sent = upstream.last.body
    if added:
        end = sent.index(added)
        # Only this was added, at the very end of the object.
        assert sent[end + len(added) :].strip() == b"}"
        sent = sent[:end] + sent[end + len(added) :]
        assert sent.split() == body.split()
    else:
        assert sent == body


def test_what_was_stored_is_what_arrived(proxy: Proxy, session: str) -> None:
    post(proxy, ODD % b"", **{"x-session-id": session})
    text = proxy.client.get(f"/sessions/{session}/messages").content
    # Whitespace between fields may change. Texts and the spelling of numbers and escapes may not.
    for part in (b"h\\u00e9llo \\ud83d\\ude00 \xf0\x9f\x98\x80 \\/ \\u0000", b"1.50E+2", b'{ \\"x\\" : 1.0 }'):
        assert part in text


def test_a_member_of_stream_options_is_kept(proxy: Proxy, upstream: Upstream, session: str) -> None:
    proxy.chat(session, "a", "lenient", stream=True, stream_options={"include_obfuscation": False})
    assert upstream.last.json["stream_options"] == {"include_obfuscation": False, "include_usage": True}


def test_usage_can_be_left_alone(serve: Serve, upstream: Upstream, session: str) -> None:
    proxy = serve(upstream={"include_usage": "never"})
    proxy.chat(session, "a", stream=True)
    assert "stream_options" not in upstream.last.json


def test_headers_arrive_but_for_ours_and_those_of_the_hop(proxy: Proxy, upstream: Upstream, session: str) -> None:
    sent = {
        "X-Session-ID": session,
        "X-Session-Mode": "full",
        "X-Session-Anything": "x",
        "X-Context-Policy": "default",
        "X-Context-Anything": "x",
        "X-Agent-Name": "planner",
        "Connection": "keep-alive, X-Hop",
        "X-Hop": "1",
        "Keep-Alive": "timeout=5",
        "TE": "trailers",
        "Proxy-Authorization": "Basic eDp5",
        "X-Custom": "caf\u00e9 \u4f60",
        "OpenAI-Organization": "org-1",
        "Idempotency-Key": "k1",
        "Cookie": "a=b",
        "User-Agent": "mine/1",
        "Content-Type": "application/json",
    }
    raw = [(name.encode(), value.encode()) for name, value in sent.items()]
    proxy.client.post("/v1/chat/completions", content=ODD % b"", headers=raw)

    received = upstream.last
    gone = {name.lower() for name in sent if name.startswith(("X-Session", "X-Context", "X-Agent", "X-Hop"))}
    gone |= {"keep-alive", "te", "proxy-authorization"}
    assert not gone & received.names
    assert (received.header("x-custom") or "").encode("latin-1").decode() == "caf\u00e9 \u4f60"
    assert received.header("openai-organization") == "org-1"
    assert received.header("idempotency-key") == "k1"
    assert received.header("cookie") == "a=b"
    assert received.header("user-agent") == "mine/1"
    assert received.header("content-type") == "application/json"
    assert received.header("authorization") == "Bearer sk-test"
    assert received.header("content-length") == str(len(received.body))
    assert received.header("host") == f"127.0.0.1:{upstream.port}"
    assert received.header("accept-encoding") == "identity"


def test_no_header_is_made_up(proxy: Proxy, upstream: Upstream, session: str) -> None:
    request = proxy.client.build_request("POST", "/v1/chat/completions", content=ODD % b"")
    for name in ("user-agent", "accept", "content-type", "authorization"):
        request.headers.pop(name, None)
    assert proxy.client.send(request).status_code == 200
    assert upstream.last.names <= {"host", "content-length", "accept-encoding", "connection"}


def test_fields_of_ours_are_stored_and_not_sent(proxy: Proxy, upstream: Upstream, session: str) -> None:
    said: list[dict[str, Any]] = [
        {"role": "user", "content": "a", "agent": "planner"},
        {"role": "assistant", "content": "b", "is_internal": True, "agent": "coder"},
        {"role": "user", "content": "c"},
    ]
    assert proxy.chat(session, said).status_code == 200
    assert upstream.last.messages == [{"role": m["role"], "content": m["content"]} for m in said]
    assert proxy.messages(session)[:3] == said
    meta = proxy.get(f"/sessions/{session}/messages", meta=True)["data"]
    assert [row["agent"] for row in meta[:2]] == ["planner", "coder"]


def test_the_field_that_names_the_session_is_taken_out(proxy: Proxy, upstream: Upstream, session: str) -> None:
    proxy.chat(None, "a", "lenient", metadata={"session_id": session, "other": 1})
    assert upstream.last.json["metadata"] == {"other": 1}
    proxy.chat(None, "b", "lenient", metadata={"session_id": session})
    assert "metadata" not in upstream.last.json
    answer = proxy.chat(None, "c", "lenient", x_session=session)
    assert answer.headers["x-session-id"] == session
    assert set(upstream.last.json) == {"model", "messages"}
    assert [m["content"] for m in proxy.messages(session)[::2]] == ["a", "b", "c"]


def test_a_header_names_the_session_before_a_field_does(proxy: Proxy, session: str) -> None:
    answer = proxy.chat(session, "a", metadata={"session_id": "another"})
    assert answer.headers["x-session-id"] == session


def test_the_query_string_goes_along(proxy: Proxy, upstream: Upstream, session: str) -> None:
    query = "api-version=2024%2D06&x=%20a+b&flag"
    proxy.client.post(f"/v1/chat/completions?{query}", content=ODD % b"")
    assert upstream.last.query == query


def test_a_path_without_v1_works_too(proxy: Proxy, upstream: Upstream, session: str) -> None:
    answer = proxy.client.post("/chat/completions", content=ODD % b"", headers={"x-session-id": session})
    assert answer.status_code == 200
    assert upstream.last.target == "/v1/chat/completions"
    assert len(proxy.messages(session)) == 4


def test_a_trimmed_body_keeps_all_but_its_messages(serve: Serve, upstream: Upstream, session: str) -> None:
    edits = [{"type": "keep_tool_calls", "last": 0}]
    proxy = serve(policies={"p": {"trigger": {"every_request": True}, "edits": edits}})
    head = b'{"x_first": 1.50, "model":"lenient", "messages":'
    first = b'{"role":"user","content":"h\\u00e9", "x":1.0}'
    call = b'{"id":"a","type":"function","function":{"name":"f","arguments":"{}"}}'
    block = b'{"role":"assistant","content":null,"tool_calls":[' + call + b"]}"
    rest = b'{"role":"tool","tool_call_id":"a","content":"r"}'
    last = b'{"content":"\\u4f60", "role":"user"}'
    tail = b', "x_last": {"b": 1, "a": 2}}'
    body = head + b"[ " + b" , ".join([first, block, rest, last]) + b"]" + tail
    post(proxy, body, **{"x-session-id": session})

    sent = upstream.last
    assert [m["role"] for m in sent.messages] == ["user", "user"]
    assert first in sent.body
    assert last in sent.body
    assert list(sent.json) == ["x_first", "model", "messages", "x_last"]
    assert b"1.50" in sent.body
    assert b'{"b": 1, "a": 2}' in sent.body


def test_instructions_lead_what_is_sent(proxy: Proxy, upstream: Upstream, session: str) -> None:
    def ask(*messages: dict[str, Any]) -> list[Any]:
        assert proxy.chat(session, list(messages)).status_code == 200
        return [message["content"] for message in upstream.last.messages]

    assert ask({"role": "system", "content": "S1"}, {"role": "user", "content": "a"}) == ["S1", "a"]
    assert ask({"role": "user", "content": "b"}) == ["S1", "a", "echo: a", "b"]
    assert ask({"role": "developer", "content": "S2"}, {"role": "user", "content": "c"})[0] == "S2"
    assert ask({"role": "user", "content": "d"})[0] == "S2"
    assert [m["content"] for m in proxy.messages(session)[::2]] == ["a", "b", "c", "d"]
    assert proxy.get(f"/sessions/{session}")["instructions"] == [{"role": "developer", "content": "S2"}]

"""Complete and broken streams: what the client sees, and what is stored."""

from __future__ import annotations

from typing import Any

import httpx
import orjson
import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream
from tests.support.waiting import until

WHOLE = [
    "echo",
    "fault:crlf",
    "fault:split-utf8",
    "fault:empty-choices",
    "fault:dup-usage",
    "fault:no-done",
    "fault:bad-event",
]
SAYING = ["say:gr\xfc\xdf \u4f60\u597d \U0001f600 a\u2028b", "reason+long:30", "tools:weather,clock", "long:2000"]
TEXT = "gr\xfc\xdf \u4f60"


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve()


@pytest.fixture
def direct(upstream: Upstream) -> httpx.Client:
    return httpx.Client(base_url=upstream.base_url, trust_env=False)


def raw(client: httpx.Client, path: str, session: str, body: dict[str, Any]) -> bytes:
    """Return the bytes of a streamed answer, as far as they arrived."""
    data = b""
    try:
        with client.stream("POST", path, json=body, headers={"x-session-id": session}) as answer:
            assert answer.status_code == 200
            assert answer.headers["content-type"].startswith("text/event-stream")
            for piece in answer.iter_raw():
                data += piece
    except httpx.RemoteProtocolError:
        data += b"<broken>"
    return data


def both(proxy: Proxy, direct: httpx.Client, session: str, model: str, **given: Any) -> tuple[bytes, bytes]:
    """Return what a client gets through the proxy, and what it gets directly from the provider."""
    body = {"model": model, "messages": [{"role": "user", "content": TEXT}], "stream": True, **given}
    sent = {"stream_options": {"include_usage": True}} | body
    with direct:
        return raw(proxy.client, "/v1/chat/completions", session, body), raw(direct, "/chat/completions", "", sent)


def without_usage(stream: bytes) -> bytes:
    """Return a stream without the chunks that contain only usage."""
    end = b"\r\n\r\n" if b"\r\n\r\n" in stream else b"\n\n"
    return b"".join(event + end for event in stream.split(end)[:-1] if b'"choices":[],"usage"' not in event)


def stored(proxy: Proxy, session: str) -> dict[str, Any]:
    return {name: value for name, value in proxy.messages(session)[-1].items() if value}


@pytest.mark.parametrize("says", SAYING, ids=lambda model: model[:8])
@pytest.mark.parametrize("fault", WHOLE)
def test_a_whole_stream_passes_byte_for_byte(
    proxy: Proxy, direct: httpx.Client, session: str, says: str, fault: str
) -> None:
    if fault == "fault:split-utf8" and says == "long:2000":
        says = "long:50"  # it is sent byte by byte, so a short text is enough
    received, sent = both(proxy, direct, session, f"{says}+{fault}")
    assert received == without_usage(sent)
    assert b'"usage":{' not in received
    with httpx.Client(base_url=direct.base_url, trust_env=False) as again:
        body = {"model": says, "messages": [{"role": "user", "content": TEXT}]}
        said = again.post("/chat/completions", json=body).json()["choices"][0]["message"]
    assert stored(proxy, session) == {name: value for name, value in said.items() if value}
    (row,) = proxy.exchanges(session)
    assert (row["status"], row["usage"]["completion_tokens"]) == ("complete", 7)


@pytest.mark.parametrize("fault", WHOLE)
def test_usage_that_was_asked_for_passes_too(proxy: Proxy, direct: httpx.Client, session: str, fault: str) -> None:
    received, sent = both(proxy, direct, session, f"echo+{fault}", stream_options={"include_usage": True})
    assert received == sent
    assert b'"usage":{' in received


def test_a_provider_that_knows_no_usage_is_asked_without(serve: Serve, upstream: Upstream, session: str) -> None:
    proxy = serve()
    assert proxy.chat(session, "a", "plain", stream=True).status_code == 200
    assert ["stream_options" in request.json for request in upstream.log] == [True, False]
    assert proxy.chat(session, "b", "plain", stream=True).status_code == 200
    assert ["stream_options" in request.json for request in upstream.log] == [True, False, False]
    assert proxy.exchanges(session)[0]["usage"] is None
    refused = proxy.chat(session, "c", "plain", stream=True, stream_options={"include_usage": True})
    assert (refused.status_code, len(upstream.log)) == (422, 4)


def test_a_stream_that_breaks_ends_in_one_error(proxy: Proxy, direct: httpx.Client, session: str) -> None:
    received, sent = both(proxy, direct, session, "long:10+fault:drop")
    assert sent.endswith(b"<broken>")
    told, _, error = received.removesuffix(b"\n\n").rpartition(b"data: ")
    assert told == sent.removesuffix(b"<broken>")
    assert orjson.loads(error)["error"]["code"] == "upstream_unreachable"
    assert b"[DONE]" not in received
    kept = stored(proxy, session)
    chunks = [orjson.loads(event[6:]) for event in told.removesuffix(b"\n\n").split(b"\n\n")]
    said = "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
    assert kept["content"] == said != ""
    (row,) = proxy.exchanges(session)
    assert row["status"] == "partial"
    assert row["error"]
    meta = proxy.get(f"/sessions/{session}/messages", meta=True)["data"]
    assert [line["partial"] for line in meta] == [False, True]


def test_an_error_of_the_providers_is_not_repeated(proxy: Proxy, direct: httpx.Client, session: str) -> None:
    received, sent = both(proxy, direct, session, "long:10+fault:error-event")
    assert received == sent
    assert received.count(b'"error"') == 1
    assert stored(proxy, session)["content"].startswith("word0 word1")
    (row,) = proxy.exchanges(session)
    assert (row["status"], row["error"]) == ("partial", "The server had an error")


def test_a_stream_that_says_no_more_is_given_up(serve: Serve, upstream: Upstream, session: str) -> None:
    proxy = serve(upstream={"read_timeout": 0.3})
    answer = proxy.chat(session, "a", "long:10+fault:stall", stream=True)
    assert answer.status_code == 200
    events = answer.content.removesuffix(b"\n\n").split(b"\n\n")
    assert orjson.loads(events[-1].removeprefix(b"data: "))["error"]["code"] == "upstream_timeout"
    assert b"[DONE]" not in answer.content
    assert proxy.exchanges(session)[0]["status"] == "partial"
    until(lambda: upstream.left == 1, "the provider is free")


def test_calls_that_broke_off_are_no_reply(proxy: Proxy, direct: httpx.Client, session: str) -> None:
    received, _ = both(proxy, direct, session, "tools:weather,clock+fault:drop")
    assert b"[DONE]" not in received
    assert proxy.messages(session) == []
    (row,) = proxy.exchanges(session)
    assert row["status"] == "failed"


def test_a_partial_reply_is_gone_on_from(proxy: Proxy, upstream: Upstream, session: str) -> None:
    proxy.chat(session, "count", "long:10+fault:drop", stream=True)
    part = proxy.messages(session)[-1]["content"]
    assert proxy.chat(session, "go on").status_code == 200
    assert [m["content"] for m in upstream.last.messages] == ["count", part, "go on"]
    assert [m["content"] for m in proxy.messages(session)] == ["count", part, "go on", "echo: go on"]


def test_a_json_answer_to_a_streamed_request_is_relayed(proxy: Proxy, direct: httpx.Client, session: str) -> None:
    answer = proxy.chat(session, "a", "fault:bad-json", stream=True)
    assert (answer.status_code, answer.content) == (200, b'{"id": "chatcmpl-1", "choices": [')
    assert proxy.exchanges(session)[0]["status"] == "failed"
    assert proxy.messages(session) == []


def test_events_are_relayed_as_they_come(proxy: Proxy, upstream: Upstream, session: str) -> None:
    body = {"model": "long:10+gate", "messages": [{"role": "user", "content": "a"}], "stream": True}
    with proxy.client.stream("POST", "/v1/chat/completions", json=body, headers={"x-session-id": session}) as answer:
        seen = b""
        pieces = answer.iter_raw()
        while b"word3" not in seen:  # the provider waits at its gate meanwhile
            seen += next(pieces)
        assert proxy.exchanges(session)[0]["status"] == "pending"
        assert proxy.messages(session) == []
        upstream.gate.set()
        while b"[DONE]" not in seen:
            seen += next(pieces)
        # The reply is stored before the client sees its end.
        assert proxy.exchanges(session)[0]["status"] == "complete"
        assert proxy.messages(session)[-1]["content"].endswith("word9")


def test_the_reply_is_stored_before_its_end_is_seen(proxy: Proxy, session: str) -> None:
    for number in range(20):
        name = f"{session}-{number}"
        body = {"model": "echo", "messages": [{"role": "user", "content": "a"}], "stream": number % 2 == 0}
        with proxy.client.stream("POST", "/v1/chat/completions", json=body, headers={"x-session-id": name}) as answer:
            seen = b""
            for piece in answer.iter_raw():
                seen += piece
                if b"[DONE]" in seen or seen.endswith(b"}"):
                    break
            assert proxy.messages(name)[-1]["content"] == "echo: a"


def test_a_compressed_stream_is_relayed_readable(proxy: Proxy, upstream: Upstream, session: str) -> None:
    answer = proxy.chat(session, "a", "gzip")
    assert answer.json()["choices"][0]["message"]["content"] == "echo: a"
    assert proxy.messages(session)[-1]["content"] == "echo: a"
    assert upstream.last.header("accept-encoding") == "identity"

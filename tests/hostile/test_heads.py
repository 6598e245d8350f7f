"""Requests that are endless, slow or ambiguous are refused while their bytes arrive."""

from __future__ import annotations

import re
import socket
import time
from contextlib import suppress
from pathlib import Path

import orjson
import pytest

from proxy.server import limits
from tests.e2e.conftest import Serve
from tests.support.raw_socket import RawClient, chat, request, sent
from tests.support.served import Served, peak, resident
from tests.support.server import Proxy
from tests.support.upstream import Upstream
from tests.support.waiting import until

MEGABYTE = 1_048_576
BODY = b'{"model": "echo", "messages": [{"role": "user", "content": "a"}]}'
BEGIN = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n"


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve()


@pytest.fixture
def hasty(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> Proxy:
    """A proxy that waits at most half a second for a head or a body."""
    monkeypatch.setattr(limits.LimitedProtocol, "head_seconds", 0.5)
    monkeypatch.setattr(limits.LimitedProtocol, "body_seconds", 0.5)
    return serve()


def port_of(served: Served) -> int:
    return int(served.url.rsplit(":", 1)[1])


@pytest.mark.parametrize(
    ("begin", "piece", "refusal"),
    [
        (b"GET /", b"a" * 65_536, (414, "uri_too_long")),
        (BEGIN, b"X-A: b\r\n" * 8_192, (431, "headers_too_large")),
        (BEGIN + b"X-A: ", b"a" * 65_536, (431, "headers_too_large")),
        (BEGIN, b"a" * 65_536, (431, "headers_too_large")),
        (b"", b"\r\n" * 32_768, (431, "headers_too_large")),
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
            b"X-A: b\r\n" * 8_192,
            (431, "headers_too_large"),
        ),
        (
            b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n0\r\nX-A: ",
            b"a" * 65_536,
            (431, "headers_too_large"),
        ),
    ],
    ids=["line", "headers", "value", "name", "blank lines", "trailers", "trailer"],
)
def test_an_endless_head_is_refused_and_takes_no_memory(
    served: Served, begin: bytes, piece: bytes, refusal: tuple[int, str]
) -> None:
    before = resident(served.process.pid)
    with RawClient(port_of(served)) as client:
        assert client.flood(begin, piece, 64 * MEGABYTE) < 32 * MEGABYTE
        assert client.refusal() == refusal
    assert resident(served.process.pid) - before < 16 * MEGABYTE
    assert sent(port_of(served), request(b"GET", b"/healthz"))[0] == 200


@pytest.mark.parametrize(
    ("line", "headers", "status"),
    [(16_000, 1, 404), (16_500, 1, 414), (1, 197, 404), (1, 201, 431), (1, -60_000, 404), (1, -66_000, 431)],
)
def test_limits_of_a_head_that_is_complete(proxy: Proxy, line: int, headers: int, status: int) -> None:
    fields = [b"X-A: b"] * headers if headers > 0 else [b"X-A: " + b"b" * -headers]
    assert sent(proxy.port, request(b"GET", b"/" + b"a" * line, b"", *fields))[0] == status


def test_requests_that_wait_behind_another_one_take_no_memory(served: Served) -> None:
    before = resident(served.process.pid)
    Path(f"/proc/{served.process.pid}/clear_refs").write_text("5")  # forget the peak
    with RawClient(port_of(served)) as client, suppress(OSError):
        client.socket.sendall((BEGIN + b"\r\n") * 50_000)
        while client.socket.recv(65_536):
            pass
    assert peak(served.process.pid) - before < 32 * MEGABYTE
    assert sent(port_of(served), request(b"GET", b"/healthz"))[0] == 200


def test_a_few_requests_sent_at_once_are_answered_in_their_order(proxy: Proxy) -> None:
    paths = [b"/healthz", b"/nowhere"] * (limits.MAX_WAITING // 2)
    asked = [request(b"GET", path).replace(b"Connection: close\r\n", b"") for path in paths]
    with RawClient(proxy.port) as client:
        client.socket.sendall(b"".join(asked) + request(b"GET", b"/healthz"))
        _, _, rest = client.answer()
    assert re.findall(rb"HTTP/1.1 (\d+)", rest) == [b"404", b"200"] * (limits.MAX_WAITING // 2)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("method", [b"POST", b"HEAD"])
def test_an_answer_to_http_1_0_has_no_chunks(proxy: Proxy, stream: bool, method: bytes) -> None:
    body = orjson.dumps({"model": "echo", "messages": [{"role": "user", "content": "a"}], "stream": stream})
    path = b"/v1/chat/completions" if method == b"POST" else b"/v1/models"
    asked = request(method, path, body, b"Authorization: Bearer x", b"Content-Type: application/json")
    status, headers, answer = sent(proxy.port, asked.replace(b"HTTP/1.1", b"HTTP/1.0"))
    assert (status, "transfer-encoding" in headers) == (200, False)
    if method == b"HEAD":
        assert answer == b""
    elif stream:
        assert "content-length" not in headers
        assert answer.startswith(b"data: {")
        assert answer.endswith(b"data: [DONE]\n\n")
    else:
        assert len(answer) == int(headers["content-length"])


def test_what_is_no_http_is_told_so_in_the_form_of_all_errors(proxy: Proxy) -> None:
    with RawClient(proxy.port) as client:
        client.socket.sendall(b"\x16\x03\x01\x00\r\n\r\n")
        status, _, body = client.answer()
    assert (status, orjson.loads(body)["error"]["type"]) == (400, "invalid_request_error")


def test_half_requests_do_not_stay_open(hasty: Proxy) -> None:
    halves = [socket.create_connection(("127.0.0.1", hasty.port), timeout=60) for _ in range(300)]
    for number, half in enumerate(halves):
        half.sendall(BEGIN if number % 2 else b"")
    answers = [half.recv(65_536) for half in halves]
    assert {answer[:12] for answer in answers} == {b"", b"HTTP/1.1 408"}
    for half in halves:
        half.close()


def test_a_head_that_trickles_is_refused(hasty: Proxy) -> None:
    with RawClient(hasty.port) as client:
        head = BEGIN + b"X-A: " + b"a" * 500
        for place in range(len(head)):
            time.sleep(0.05)
            try:
                client.socket.sendall(head[place : place + 1])
            except OSError:
                break
            if client.has_answer():
                break
        else:
            pytest.fail("each byte gave it more time")
        assert client.refusal() == (408, "request_timeout")


def test_the_next_head_of_a_connection_has_a_time_limit_too(hasty: Proxy) -> None:
    with RawClient(hasty.port) as client:
        for pause in (0, 0.7):  # idle connections stay open
            time.sleep(pause)
            client.socket.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
            said = b""
            while not said.endswith(b"}"):  # head and body may come one after the other
                piece = client.socket.recv(65_536)
                assert piece
                said += piece
            assert said.startswith(b"HTTP/1.1 200")
        client.socket.sendall(BEGIN)
        assert client.refusal() == (408, "request_timeout")


@pytest.mark.parametrize("framing", [b"Content-Length: 1000", b"Transfer-Encoding: chunked"])
def test_a_body_that_does_not_come_is_refused(hasty: Proxy, framing: bytes) -> None:
    begin = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    first = b"1\r\n{\r\n" if b"chunked" in framing else b"{"
    with RawClient(hasty.port) as client:
        client.socket.sendall(begin + framing + b"\r\n\r\n" + first)
        assert client.refusal() == (408, "request_timeout")


def test_a_body_that_comes_steadily_is_taken_and_a_slow_answer_is_no_slow_body(hasty: Proxy) -> None:
    body = BODY.replace(b"echo", b"delay:600").replace(b'"a"', b'"' + b"a" * 2_400 + b'"')
    with RawClient(hasty.port) as client:
        data = chat(body)
        for start in range(0, len(data), 400):
            client.socket.sendall(data[start : start + 400])
            time.sleep(0.1)
        assert client.answer()[0] == 200


def test_a_refused_request_whose_body_goes_on_is_closed_without_a_second_answer(hasty: Proxy) -> None:
    with RawClient(hasty.port) as client:
        client.socket.sendall(b"POST /sessions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{")
        status, _, body = client.answer()
    assert status == 405
    assert body.count(b'"error"') == 1
    assert b"HTTP/1.1" not in body


def test_connections_of_one_address_are_limited_where_that_is_set(serve: Serve) -> None:
    proxy = serve(server={"max_connections_per_address": 2})
    first, second = RawClient(proxy.port), RawClient(proxy.port)
    try:
        for client in (first, second):
            client.socket.sendall(BEGIN)
        status, headers, _ = sent(proxy.port, request(b"GET", b"/healthz"))
        assert (status, headers["retry-after"]) == (503, "1")
    finally:
        first.socket.close()
        second.socket.close()
    until(lambda: sent(proxy.port, request(b"GET", b"/healthz"))[0] == 200, "there is room for a connection")


def test_a_trailer_decides_nothing(serve: Serve, upstream: Upstream) -> None:
    keys = [{"key": "key-of-anne-0123", "tenant": "anne"}, {"key": "key-of-bert-0123", "tenant": "bert"}]
    proxy = serve(auth={"mode": "keys", "keys": keys})
    trailers = b"Authorization: Bearer key-of-bert-0123\r\nX-Session-ID: of-the-trailer\r\n"
    body = b"%x\r\n%b\r\n0\r\n%b\r\n" % (len(BODY), BODY, trailers)
    headers = (b"Transfer-Encoding: chunked", b"X-Session-ID: of-the-head")
    status, _, _ = sent(proxy.port, chat(body, *headers))
    assert status == 401
    anne = b"Authorization: Bearer key-of-anne-0123"
    status, answered, _ = sent(proxy.port, chat(body, anne, *headers))
    assert (status, answered["x-session-id"]) == (200, "of-the-head")
    found = proxy.client.get("/sessions", headers={"authorization": "Bearer key-of-bert-0123"}).json()
    assert found["data"] == []


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("pause", [False, True])
def test_an_offer_of_another_protocol_is_passed_over_and_the_body_read(
    proxy: Proxy, upstream: Upstream, chunked: bool, pause: bool
) -> None:
    """Java's client offers an upgrade on each new connection, and may send the body in a separate packet."""
    body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY) if chunked else BODY
    framing = b"Transfer-Encoding: chunked" if chunked else b"Content-Length: %d" % len(BODY)
    offer = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\n%b%b\r\n\r\n"
    first, last = head % (offer, framing), chat(BODY, b"Authorization: Bearer k")
    with RawClient(proxy.port) as client:
        client.socket.sendall(first if pause else first + body + last)
        if pause:
            time.sleep(0.05)
            client.socket.sendall(body + last)
        data = client.answer()
    assert (data[0], data[2].count(b"chat.completion")) == (200, 2)
    assert not {"upgrade", "http2-settings"} & {name.lower() for name, _ in upstream.log[-2].headers}


@pytest.mark.parametrize(("version", "connection"), [(b"1.1", b"close, "), (b"1.0", b"")])
def test_an_offer_is_passed_over_where_the_connection_closes_too(
    proxy: Proxy, version: bytes, connection: bytes
) -> None:
    head = b"POST /v1/chat/completions HTTP/%b\r\nHost: localhost\r\nAuthorization: Bearer k\r\nContent-Length: %d\r\n"
    offer = b"Connection: %bUpgrade\r\nUpgrade: h2c\r\n\r\n" % connection
    with RawClient(proxy.port) as client:
        client.socket.sendall(head % (version, len(BODY)) + offer + BODY)
        data = client.answer()
    assert (data[0], data[2].count(b"chat.completion")) == (200, 1)


@pytest.mark.parametrize("method", [b"POST", b"GET"])
def test_the_body_of_a_websocket_s_beginning_is_no_request(proxy: Proxy, method: bytes) -> None:
    """A gateway treats these bytes as a body, so they must not be answered as a second request."""
    hidden = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
    offer = b"Connection: Upgrade\r\nUpgrade: websocket\r\nContent-Length: %d\r\n\r\n" % len(hidden)
    first = (
        method + b" /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer k\r\n" + offer + hidden
    )
    with RawClient(proxy.port) as client:
        client.socket.sendall(first + b"GET /readyz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        told = b""
        while piece := client.socket.recv(65_536):
            told += piece
    assert told.count(b"HTTP/1.1 ") == 2


def test_a_websocket_is_refused_in_words(proxy: Proxy) -> None:
    data = b"GET /v1/realtime HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    with RawClient(proxy.port) as client:
        client.socket.sendall(data)
        assert client.socket.recv(65_536).startswith(b"HTTP/1.1 426 ")


@pytest.mark.parametrize("mode", ["passthrough", "none"])
def test_a_second_credential_is_refused(serve: Serve, mode: str) -> None:
    proxy = serve(auth={"mode": mode})
    two = (b"Authorization: Bearer key-of-anne-0123", b"authorization: Bearer key-of-bert-0123")
    for data in (chat(BODY, *two), request(b"GET", b"/v1/models", b"", *two), request(b"GET", b"/sessions", b"", *two)):
        status, _, body = sent(proxy.port, data)
        assert (status, b"more than once" in body) == (400, True)


def test_the_limits_are_documented() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text("utf-8")
    numbers = (limits.MAX_LINE_BYTES // 1024, limits.MAX_HEAD_BYTES // 1024, limits.MAX_HEADERS)
    for number in (*numbers, limits.HEAD_SECONDS, limits.BODY_SECONDS):
        assert re.search(rf"\b{number:g}\b", page), number

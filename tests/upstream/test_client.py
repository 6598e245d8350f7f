"""The upstream client against a server that answers with the very bytes it is told."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proxy.config import UpstreamSettings
from proxy.errors import UpstreamBusy, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream import transport
from proxy.upstream.client import Upstream

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class _Provider:
    """Answers each request with the next of `answers`; None leaves it unanswered, `b""` closes."""

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.open = 0
        self.closed = asyncio.Event()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.open += 1
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = next((int(v) for k, v in _headers(head) if k.lower() == b"content-length"), 0)
                self.requests.append(head + await reader.readexactly(length))
                answer = self.answers.pop(0)
                if answer == b"":
                    break
                if answer is None:
                    await reader.read()
                    break
                writer.write(answer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            self.closed.set()
            writer.close()


def _headers(head: bytes) -> list[tuple[bytes, bytes]]:
    return [(k, v.strip()) for k, _, v in (line.partition(b":") for line in head.split(b"\r\n")[1:] if line)]


@asynccontextmanager
async def _upstream(provider: _Provider, **settings: Any) -> AsyncIterator[Upstream]:
    server = await asyncio.start_server(provider, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    upstream = Upstream(
        UpstreamSettings(base_url=f"http://127.0.0.1:{port}/v1", **settings), shares_key=False
    )
    try:
        yield upstream
    finally:
        await upstream.aclose()
        server.close()


async def test_what_is_sent_is_what_was_given_and_nothing_else() -> None:
    provider = _Provider(OK)
    headers = [(b"Authorization", b"Bearer k"), (b"X-Twice", b"1"), (b"X-Twice", b"2")]
    async with _upstream(provider) as upstream:
        answer = await upstream.ask(upstream.base, "POST", "/files/%7E%2f%E4?q=a%20b+%3D", headers, b"{}")
        assert (answer.status, await answer.read()) == (200, b"ok")
        await answer.aclose()
    head, _, body = provider.requests[0].partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == b"POST /v1/files/%7E%2f%E4?q=a%20b+%3D HTTP/1.1"
    assert body == b"{}"
    assert [(k, v) for k, v in _headers(head) if k.lower() not in {b"host", b"content-length"}] == headers


async def test_a_proxy_of_the_environment_is_asked_for_completions_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    provider = _Provider(OK)
    server = await asyncio.start_server(provider, "127.0.0.1", 0)
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    monkeypatch.setenv("no_proxy", "")
    transport.proxy_of.cache_clear()
    upstream = Upstream(UpstreamSettings(base_url="http://provider.example/v1"), shares_key=False)
    try:
        answer = await upstream.ask(upstream.base, "POST", "/chat/completions", [], b"{}")
        assert await answer.read() == b"ok"
        await answer.aclose()
    finally:
        transport.proxy_of.cache_clear()
        await upstream.aclose()
        server.close()
    assert provider.requests[0].startswith(b"POST http://provider.example/v1/chat/completions HTTP/1.1\r\n")


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_whichever_way_a_request_goes_its_path_is_the_same(method: str) -> None:
    provider = _Provider(OK)
    async with _upstream(provider) as upstream:
        answer = await upstream.ask(upstream.base, method, "/x?q=%7e#part", [(b"x-a", b"1")], b"")
        assert await answer.read() == b"ok"
        await answer.aclose()
    assert provider.requests[0].startswith(b"%b /v1/x?q=%%7e HTTP/1.1\r\nHost: 127.0.0.1:" % method.encode())


@pytest.mark.parametrize(("method", "is_known"), [("POST", True), ("GET", False)])
async def test_of_what_goes_straight_it_is_known_when_all_of_it_is_here(method: str, is_known: bool) -> None:
    provider = _Provider(OK)
    async with _upstream(provider) as upstream:
        answer = await upstream.ask(upstream.base, method, "/x", [], b"")
        body = b""
        while len(body) < 2:
            assert not answer.ended
            body += await answer.chunk()
        assert (body, answer.ended) == (b"ok", is_known)
        assert await answer.chunk() == b""
        await answer.aclose()


async def test_no_cookie_is_kept_for_the_next_tenant() -> None:
    provider = _Provider(OK.replace(b"\r\n\r\n", b"\r\nSet-Cookie: a=b\r\n\r\n", 1), OK)
    async with _upstream(provider) as upstream:
        for _ in range(2):
            answer = await upstream.ask(upstream.base, "GET", "/models", [], b"")
            await answer.read()
            await answer.aclose()
    assert b"ookie" not in provider.requests[1]


async def test_redirects_and_encodings_are_left_to_the_client() -> None:
    moved = b"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:9/\r\nContent-Encoding: gzip\r\n"
    moved += b"Content-Length: 2\r\n\r\nxx"
    async with _upstream(_Provider(moved)) as upstream:
        answer = await upstream.ask(upstream.base, "GET", "/x", [], b"")
        assert answer.status == 302
        assert b"".join([chunk async for chunk in answer.chunks()]) == b"xx"
        await answer.aclose()


async def test_an_encoded_answer_can_be_read_plain() -> None:
    body = gzip.compress(b'{"a":1}')
    head = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    broken = b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\nxx"
    async with _upstream(_Provider(head + body, broken)) as upstream:
        answer = await upstream.ask(upstream.base, "GET", "/x", [], b"")
        assert (answer.encoding, answer.readable) == (b"gzip", True)
        assert await answer.read() == await answer.read() == b'{"a":1}'
        await answer.aclose()
        answer = await upstream.ask(upstream.base, "GET", "/x", [], b"")
        with pytest.raises(UpstreamUnreachable, match="encoded"):
            await answer.read()
        await answer.aclose()


async def test_silence_is_a_time_out_before_and_during_the_answer() -> None:
    half = b"HTTP/1.1 200 OK\r\nContent-Length: 4\r\n\r\nok"
    async with _upstream(_Provider(None), read_timeout=0.2) as upstream:
        with pytest.raises(UpstreamTimeout):
            await upstream.ask(upstream.base, "POST", "/x", [], b"{}")
    async with _upstream(_Provider(half), read_timeout=0.2) as upstream:
        answer = await upstream.ask(upstream.base, "POST", "/x", [], b"{}")
        with pytest.raises(UpstreamTimeout):
            await answer.read()
        await answer.aclose()


@pytest.mark.parametrize("answer", [b"", b"nonsense\r\n\r\n"])
async def test_an_upstream_that_breaks_off_or_does_not_speak_http_is_unreachable(answer: bytes) -> None:
    async with _upstream(_Provider(answer)) as upstream:
        with pytest.raises(UpstreamUnreachable):
            await upstream.ask(upstream.base, "POST", "/x", [], b"{}")


async def test_nobody_listening_is_unreachable() -> None:
    server = await asyncio.start_server(_Provider(), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    upstream = Upstream(UpstreamSettings(base_url=f"http://127.0.0.1:{port}"), shares_key=False)
    with pytest.raises(UpstreamUnreachable, match=r"upstream\.base_url"):
        await upstream.ask(upstream.base, "GET", "/models", [], b"")
    await upstream.aclose()


async def test_beyond_the_limit_a_request_waits_and_then_is_told_so() -> None:
    async with _upstream(_Provider(OK, OK), max_connections=1, connect_timeout=0.2) as upstream:
        held = await upstream.ask(upstream.base, "GET", "/x", [], b"")
        with pytest.raises(UpstreamBusy, match=r"upstream\.max_connections"):
            await upstream.ask(upstream.base, "GET", "/x", [], b"")
        await held.aclose()
        await held.aclose()  # a second time gives back nothing more
        answer = await upstream.ask(upstream.base, "GET", "/x", [], b"")
        await answer.aclose()


async def test_closing_an_unread_answer_frees_the_connection() -> None:
    provider = _Provider(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nfirst")
    async with _upstream(provider) as upstream:
        answer = await upstream.ask(upstream.base, "POST", "/x", [], b"{}")
        await answer.aclose()
        await asyncio.wait_for(provider.closed.wait(), 5)
    assert provider.open == 0


async def test_a_route_takes_its_models_with_its_own_key_and_never_the_clients() -> None:
    routes = [
        {"models": ["deepseek-*"], "base_url": "http://a.example/v1", "api_key": "ka"},
        {"models": ["local-?"], "base_url": "http://b.example"},
    ]
    upstream = Upstream(UpstreamSettings(routes=routes), shares_key=False)  # type: ignore[arg-type] # pydantic makes them
    first, second, base = (upstream.destination(model) for model in ("deepseek-v4", "local-1", "gpt"))
    assert (first.base_url, first.authorization, first.forwards_credentials) == (
        "http://a.example/v1",
        b"Bearer ka",
        False,
    )
    assert (second.authorization, second.forwards_credentials) == (None, False)
    assert (base.authorization, base.forwards_credentials) == (None, True)
    assert (first.forwards_query, second.forwards_query, base.forwards_query) == (False, False, True)
    await upstream.aclose()


async def test_a_key_of_the_proxys_own_never_leaves_it() -> None:
    shared = Upstream(UpstreamSettings(), shares_key=True)
    own = Upstream(UpstreamSettings(api_key="sk"), shares_key=False)  # type: ignore[arg-type] # pydantic makes it
    assert not shared.base.forwards_credentials
    assert (own.base.authorization, own.base.forwards_credentials) == (b"Bearer sk", False)
    await shared.aclose()
    await own.aclose()

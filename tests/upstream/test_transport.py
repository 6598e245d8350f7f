"""One HTTP request on the wire: >> what was asked for, << what a server that only reads bytes was sent."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import httpx
import pytest

from proxy.upstream import transport
from proxy.upstream.transport import ExactTransport

pytestmark = pytest.mark.anyio

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\nConnection: close\r\n\r\nok"
Body = bytes | AsyncIterator[bytes]


@pytest.fixture(autouse=True)
def no_proxy_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    transport.proxy_of.cache_clear()


class _Server:
    """Reads one request of each connection and answers all with the same bytes."""

    def __init__(self, answer: bytes) -> None:
        self.answer = answer
        self.heads: list[bytes] = []
        self.bodies: list[bytes] = []
        self.port = 0

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.heads.append(head)
        lengths = [
            line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")
        ]
        if b"chunked" in head:
            self.bodies.append(await reader.readuntil(b"0\r\n\r\n"))
        else:
            self.bodies.append(await reader.readexactly(int(lengths[0]) if lengths else 0))
        writer.write(self.answer)
        await writer.drain()
        writer.close()

    @property
    def line(self) -> bytes:
        """The request line of the newest request."""
        return self.heads[-1].split(b"\r\n")[0]

    @property
    def headers(self) -> list[bytes]:
        """The header lines of the newest request, but for its Host."""
        return [line for line in self.heads[-1].split(b"\r\n")[1:] if line and not line.startswith(b"Host:")]


@asynccontextmanager
async def _serving(answer: bytes = OK) -> AsyncIterator[_Server]:
    server = _Server(answer)
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    server.port = listening.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listening.close()


async def _ask(
    target: str, method: str = "GET", headers: Iterable[tuple[bytes, bytes]] = (), content: Body = b""
) -> tuple[httpx.Response, bytes]:
    """Send a request through a transport of its own; return the response and its body."""
    exact = ExactTransport()
    try:
        request = httpx.Request(
            method,
            target.partition("/v1")[0],
            headers=list(headers),
            stream=httpx.ByteStream(b""),
            extensions={
                "target": target.encode(),
                "content": content,
                "timeout": {"connect": 5, "read": 5},
            },
        )
        response = await exact.handle_async_request(request)
        assert isinstance(response.stream, httpx.AsyncByteStream)
        body = b"".join([chunk async for chunk in response.stream])
        await response.stream.aclose()
        return response, body
    finally:
        await exact.aclose()


@pytest.mark.parametrize(
    ("method", "content", "added"),
    [
        ("GET", b"", []),
        ("HEAD", b"", []),
        ("OPTIONS", b"", []),
        ("DELETE", b"", [b"Content-Length: 0"]),
        ("POST", b"", [b"Content-Length: 0"]),
        ("POST", b"{}", [b"Content-Length: 2"]),
        ("PATCH", b"{}", [b"Content-Length: 2"]),
    ],
)
async def test_no_header_is_added_but_the_length(method: str, content: bytes, added: list[bytes]) -> None:
    async with _serving(OK.replace(b"ok", b"") if method == "HEAD" else OK) as server:
        await _ask(f"http://127.0.0.1:{server.port}/v1/x", method, content=content)
    assert (server.headers, server.bodies) == (added, [content])


async def test_headers_keep_case_order_repetitions_and_utf_8() -> None:
    headers = [(b"X-B", b"1"), (b"x-a", b"  two  words"), (b"X-B", b"2"), (b"X-U", "grün 蓝".encode())]
    async with _serving() as server:
        await _ask(f"http://127.0.0.1:{server.port}/v1/x", headers=headers)
    sent = [tuple(line.split(b": ", 1)) for line in server.headers]
    assert [(name, value.strip()) for name, value in sent] == [
        (name, value.strip()) for name, value in headers
    ]


@pytest.mark.parametrize("machine", ["127.0.0.1", "default"])
async def test_netrc_is_not_read(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, machine: str) -> None:
    file = tmp_path / "netrc"
    file.write_text(
        f"{'default' if machine == 'default' else 'machine ' + machine} login anne password secret\n"
    )
    file.chmod(0o600)
    monkeypatch.setenv("NETRC", str(file))
    async with _serving() as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
        await _ask(f"http://127.0.0.1:{server.port}/v1/x")
    assert not any(line.lower().startswith(b"authorization") for line in server.headers)


@pytest.mark.parametrize(
    "path",
    ["/a%2Fb", "/%7Ea", "/a//b/../c/", "/x?q=%20+%2b&&=", "/x?", "/%E4%BD%A0", "/a:b@c!$&'()*+,;=", "/%zz"],
)
async def test_a_target_goes_as_it_is_written(path: str) -> None:
    async with _serving() as server:
        await _ask(f"http://127.0.0.1:{server.port}/v1{path}")
    assert server.line in {f"GET /v1{path} HTTP/1.1".encode(), f"GET /v1{path.rstrip('?')} HTTP/1.1".encode()}


@pytest.mark.parametrize(
    "written", ["http://127.0.0.1:{}", "127.0.0.1:{}", "http://anne:secret@127.0.0.1:{}/"]
)
async def test_a_proxy_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch, written: str) -> None:
    async with _serving() as server:
        monkeypatch.setenv("http_proxy", written.format(server.port))
        await _ask("http://provider.example:81/v1/a%2Fb")
    assert server.line == b"GET http://provider.example:81/v1/a%2Fb HTTP/1.1"
    assert (b"Proxy-Authorization: Basic YW5uZTpzZWNyZXQ=" in server.headers) == ("anne" in written)


async def test_a_proxy_is_asked_for_a_tunnel_to_what_is_encrypted(monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = b"HTTP/1.1 403 No\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
    async with _serving(refusal) as server:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{server.port}")
        with pytest.raises(aiohttp.ClientError):
            await _ask("https://provider.example/v1/x", headers=[(b"Authorization", b"Bearer k")])
    assert server.line.startswith(b"CONNECT provider.example:443 ")
    assert not any(b"Bearer" in head for head in server.heads)


@pytest.mark.parametrize(
    ("exempt", "direct"),
    [
        ("127.0.0.1", True),
        ("127.0.0.1:{}", True),
        ("*", True),
        ("other.example, 127.0.0.1", True),
        ("127.0.0.1:1", False),
        ("other.example", False),
    ],
)
async def test_what_needs_no_proxy(monkeypatch: pytest.MonkeyPatch, exempt: str, direct: bool) -> None:
    async with _serving() as server:
        monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{server.port}")
        monkeypatch.setenv("no_proxy", exempt.format(server.port))
        await _ask(f"http://127.0.0.1:{server.port}/v1/x")
    assert server.line.startswith(b"GET /v1/x" if direct else b"GET http://")


async def test_a_body_of_unknown_length_goes_in_chunks_with_one_header() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        yield b"second"

    async with _serving() as server:
        await _ask(f"http://127.0.0.1:{server.port}/v1/x", "POST", content=pieces())
    assert server.headers == [b"Transfer-Encoding: chunked"]
    assert server.bodies == [b"5\r\nfirst\r\n6\r\nsecond\r\n0\r\n\r\n"]


async def test_a_body_of_known_length_goes_plain_piece_by_piece() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        yield b"second"

    async with _serving() as server:
        headers = [(b"content-length", b"11")]
        await _ask(f"http://127.0.0.1:{server.port}/v1/x", "POST", headers, pieces())
    assert [line.lower() for line in server.headers] == [b"content-length: 11"]
    assert server.bodies == [b"firstsecond"]


async def test_a_body_that_breaks_off_is_an_error() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        raise ConnectionResetError

    async with _serving() as server:
        with pytest.raises((aiohttp.ClientError, OSError)):
            await _ask(f"http://127.0.0.1:{server.port}/v1/x", "POST", content=pieces())


async def test_the_headers_of_a_response_come_as_they_are() -> None:
    lines = b"Set-Cookie: a=1\r\nset-cookie: b=2\r\nX-Raw: \xff\xfe\r\nX-Empty:\r\n"
    async with _serving(OK.replace(b"Content-Length", lines + b"Content-Length", 1)) as server:
        response, _ = await _ask(f"http://127.0.0.1:{server.port}/v1/x")
    assert list(response.headers.raw)[:4] == [
        (b"Set-Cookie", b"a=1"),
        (b"set-cookie", b"b=2"),
        (b"X-Raw", b"\xff\xfe"),
        (b"X-Empty", b""),
    ]


async def test_a_large_header_is_taken_and_a_huge_one_is_not() -> None:
    for size in (60_000, 70_000):
        large = b"X-Large: " + b"a" * size + b"\r\n"
        async with _serving(OK.replace(b"Content-Length", large + b"Content-Length", 1)) as server:
            if size == 60_000:
                response, body = await _ask(f"http://127.0.0.1:{server.port}/v1/x")
                assert (len(response.headers["x-large"]), body) == (size, b"ok")
            else:
                with pytest.raises(aiohttp.ClientError):
                    await _ask(f"http://127.0.0.1:{server.port}/v1/x")


@pytest.mark.parametrize(
    "answer",
    [
        b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nhalf",
    ],
)
async def test_all_that_came_before_a_break_is_given(answer: bytes) -> None:
    exact = ExactTransport()
    got = b""
    async with _serving(answer) as server:
        target = f"http://127.0.0.1:{server.port}/v1/x"
        extensions = {"target": target.encode(), "content": b"", "timeout": {"connect": 5, "read": 5}}
        response = await exact.handle_async_request(httpx.Request("GET", target, extensions=extensions))
        await asyncio.sleep(0.05)  # the break has come before the body is read
        assert isinstance(response.stream, httpx.AsyncByteStream)
        with pytest.raises(aiohttp.ClientError):  # noqa: PT012 - it breaks on the way
            async for chunk in response.stream:
                got += chunk
        await response.stream.aclose()
    await exact.aclose()
    assert got == b"half"


async def test_an_answer_before_the_end_of_the_request_is_read() -> None:
    async def pieces() -> AsyncIterator[bytes]:
        yield b"first"
        await asyncio.sleep(60)

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(OK.replace(b"200 OK", b"413 Large"))
        await writer.drain()
        await reader.read()
        writer.close()

    listening = await asyncio.start_server(refuse, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    response, body = await asyncio.wait_for(
        _ask(f"http://127.0.0.1:{port}/v1/x", "POST", content=pieces()), 5
    )
    assert (response.status_code, body) == (413, b"ok")
    listening.close()

"""A server that answers with the very bytes it is told, for tests of the upstream client."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from proxy.config import UpstreamSettings
from proxy.upstream import Answer, Upstream

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"


class Provider:
    """Answers each request with the next of `answers`, the last one again and again.

    `b""` closes the connection, None never answers. Bytes that end with `CUT` are sent without it, and then
    the connection is closed.
    """

    CUT = b"<cut>"

    def __init__(self, *answers: bytes | None) -> None:
        self.answers = list(answers)
        self.requests: list[bytes] = []
        self.connections = 0
        self.open = 0
        self.port = 0
        self.writers: list[asyncio.StreamWriter] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.open += 1
        self.writers.append(writer)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                body = b""
                if b"chunked" in head.lower():
                    body = await reader.readuntil(b"0\r\n\r\n")
                else:
                    sizes = [int(value) for name, value in fields(head) if name.lower() == b"content-length"]
                    body = await reader.readexactly(sizes[0] if sizes else 0)
                self.requests.append(head + body)
                answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
                if answer == b"":
                    break
                if answer is None:
                    await reader.read()
                    break
                writer.write(answer.removesuffix(self.CUT))
                if answer.endswith(self.CUT):
                    await writer.drain()
                    break
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self.open -= 1
            writer.close()

    @property
    def line(self) -> bytes:
        """The request line of the newest request."""
        return self.requests[-1].split(b"\r\n")[0]

    @property
    def sent(self) -> list[tuple[bytes, bytes]]:
        """The header fields of the newest request, but for its `Host`."""
        return [field for field in fields(self.requests[-1].partition(b"\r\n\r\n")[0]) if field[0] != b"Host"]

    @property
    def body(self) -> bytes:
        """The body of the newest request."""
        return self.requests[-1].partition(b"\r\n\r\n")[2]


def fields(head: bytes) -> list[tuple[bytes, bytes]]:
    """Return the header fields of a request."""
    lines = [line for line in head.split(b"\r\n")[1:] if line]
    return [(name, value.strip()) for name, _, value in (line.partition(b":") for line in lines)]


def with_header(answer: bytes, *lines: bytes) -> bytes:
    """Return the answer with more header lines."""
    return answer.replace(b"\r\n\r\n", b"\r\n" + b"".join(line + b"\r\n" for line in lines) + b"\r\n", 1)


@asynccontextmanager
async def listening(provider: Provider, tls: ssl.SSLContext | None = None) -> AsyncIterator[Provider]:
    """Let the provider listen."""
    server = await asyncio.start_server(provider, "127.0.0.1", 0, ssl=tls)
    provider.port = server.sockets[0].getsockname()[1]
    try:
        yield provider
    finally:
        server.close()
        for writer in provider.writers:
            writer.close()


@asynccontextmanager
async def connected(provider: Provider, **settings: Any) -> AsyncIterator[Upstream]:
    """Let the provider listen, and return an upstream that points at it."""
    async with listening(provider):
        settings.setdefault("base_url", f"http://127.0.0.1:{provider.port}/v1")
        upstream = Upstream(UpstreamSettings(**settings), shares_key=False)
        try:
            yield upstream
        finally:
            await upstream.aclose()


async def ask(
    upstream: Upstream, method: str = "POST", path: str = "/x", headers: Any = (), content: Any = b"{}"
) -> tuple[Answer, bytes]:
    """Send a request; return the closed answer and its body as it came."""
    answer = await upstream.ask(upstream.base, method, path, headers, content)
    try:
        return answer, b"".join([chunk async for chunk in answer.chunks()])
    finally:
        await answer.aclose()


async def until(true: Callable[[], object]) -> None:
    """Return once `true()` holds."""
    async with asyncio.timeout(60):
        while not true():  # noqa: ASYNC110 - what is waited for tells nobody
            await asyncio.sleep(0.005)

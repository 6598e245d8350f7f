"""One HTTP request on the wire, exactly as it was asked for.

httpx's transport on aiohttp, with aiohttp's own habits switched off: it keeps no cookies (a
provider's cookie would cross tenants), adds no header of its own, never re-quotes a URL, reads no
netrc, follows no redirect and decompresses nothing. It knows no error of this project: aiohttp's
come through as they are.
"""

from __future__ import annotations

from collections.abc import AsyncIterable, AsyncIterator
from functools import lru_cache
from typing import Final
from urllib.request import getproxies, proxy_bypass

import aiohttp
import httpx
from aiohttp.abc import AbstractStreamWriter
from aiohttp.payload import Payload
from httpx_aiohttp import AiohttpTransport
from httpx_aiohttp.transport import AiohttpResponseStream
from multidict import CIMultiDict
from yarl import URL

_AUTOMATIC: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")
_KEEP_ALIVE_SECONDS: Final = 60.0
_HEADER_BYTES: Final = 65536
"""Largest header accepted from an upstream; aiohttp's own limit of 8 kB is below what gateways send."""
_PORTS: Final = {"http": 80, "https": 443}


class ExactTransport(AiohttpTransport):
    """A transport for the life of the process; to be made and closed inside the event loop.

    `request.extensions["target"]` is the absolute URL, already quoted: what is sent is that text. The body is
    `request.extensions["content"]`, whole or as it comes, and the request's own stream is not looked at.
    The number of connections is not limited here: who asks counts them.
    """

    def __init__(self) -> None:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=_AUTOMATIC,
            trust_env=False,
            auto_decompress=False,
            max_line_size=_HEADER_BYTES,
            max_field_size=_HEADER_BYTES,
        )
        super().__init__(client=self._session)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send `request` and return the response once its headers are here, its body unread.

        Raises `aiohttp.ClientError` and `TimeoutError`.
        """
        target = request.extensions["target"].decode("ascii")
        timeout = request.extensions["timeout"]
        content: bytes | AsyncIterable[bytes] = request.extensions["content"]
        data = (_Whole(content) if content else None) if isinstance(content, bytes) else content
        headers = CIMultiDict(
            (name.decode("latin-1"), _header_text(value)) for name, value in request.headers.raw
        )
        response = await self._session.request(
            request.method,
            URL(target, encoded=True),
            headers=headers,
            data=data,
            allow_redirects=False,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=timeout["connect"], sock_read=timeout["read"]
            ),
            proxy=proxy_of(request.url.scheme, request.url.host, request.url.port),
        )
        return httpx.Response(
            status_code=response.status,
            headers=response.raw_headers,
            stream=_WholeStream(response),
            request=request,
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._session.close()


class _Whole(Payload):
    """A body that is in memory, written at once, whatever its size.

    aiohttp's own warns of bodies above 1 MB, and would have them written in pieces, as files are.
    """

    _value: bytes
    _autoclose = True

    def __init__(self, body: bytes) -> None:
        super().__init__(body)
        self._size = len(body)

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text."""
        return self._value.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the body."""
        await writer.write(self._value)


class _WholeStream(AiohttpResponseStream):
    """A body up to the last byte that came: aiohttp tells of a break before what it has read by then."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the bytes as they come."""
        content = self._aiohttp_response.content
        try:
            async for chunk in content.iter_any():
                yield chunk
        except (aiohttp.ClientError, OSError):
            if rest := content._read_nowait(-1):  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - the public ways raise the error again
                yield rest
            raise


def _header_text(value: bytes) -> str:
    """Return the text that aiohttp, which writes UTF-8, turns into `value` again; in vain for other bytes."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value.decode("latin-1")


@lru_cache(maxsize=64)
def proxy_of(scheme: str, host: str, port: int | None) -> str | None:
    """Return the proxy that the environment names for this host (`HTTPS_PROXY`, `NO_PROXY`), if any.

    aiohttp would ask the environment itself, but only together with reading netrc. As with other
    clients, a proxy without a scheme speaks HTTP, and `NO_PROXY` may name a port.
    """
    proxy = getproxies().get(scheme)
    if proxy is None or proxy_bypass(host) or proxy_bypass(f"{host}:{port or _PORTS[scheme]}"):
        return None
    return proxy if "://" in proxy else f"http://{proxy}"

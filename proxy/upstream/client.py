"""The upstream: where a request goes, with which credential, for how long, and what can go wrong.

It knows addresses, keys and time limits. It does not know what is said.
"""

from __future__ import annotations

import asyncio
import re
import zlib
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterable
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Final, Protocol

import aiohttp
import httpx
from msgspec import Struct

from proxy.config import Route, UpstreamSettings
from proxy.errors import UpstreamBusy, UpstreamError, UpstreamTimeout, UpstreamUnreachable
from proxy.upstream.channel import Broken
from proxy.upstream.direct import DirectTransport, Unreachable, origin_of
from proxy.upstream.transport import ExactTransport, proxy_of

Headers = list[tuple[bytes, bytes]]

_NOT_ASCII: Final = re.compile(b"[\x80-\xff]")
_INFLATE: Final = {b"gzip": 16 + zlib.MAX_WBITS, b"x-gzip": 16 + zlib.MAX_WBITS, b"deflate": zlib.MAX_WBITS}
"""Content encodings that can be read, with zlib's `wbits` for each."""


class Destination(Struct, frozen=True, kw_only=True):
    """Where a request goes."""

    base_url: str
    """Address that stands for the client's `/v1`, without a slash at its end."""
    authorization: bytes | None
    """The header to send instead of the client's; None: see `forwards_credentials`."""
    forwards_credentials: bool
    """Whether the client's own `Authorization` goes along."""
    forwards_query: bool = False
    """Whether the query string of the client's request goes along: it may hold a key too."""


class _Closing(Protocol):
    def release(self) -> None: ...


class _Response(Protocol):
    """What either transport returns."""

    @property
    def status(self) -> int: ...

    @property
    def headers(self) -> Headers: ...

    @property
    def ended(self) -> bool: ...

    async def piece(self) -> bytes: ...

    async def aclose(self) -> None: ...


_FAILURES: Final = (Broken, Unreachable, httpx.TransportError, aiohttp.ClientError, OSError)
"""What either transport raises where the upstream is at fault, or the way there."""


class Answer:
    """What the upstream answered: status, headers, and a body that is read once.

    Whoever holds it closes it; until then it occupies a connection.
    """

    def __init__(self, response: _Response, slots: _Closing) -> None:
        """Wrap `response`; `slots` is released when it is closed."""
        self.status = response.status
        self.headers: Headers = response.headers
        self._response = response
        self._slots: _Closing | None = slots
        self._body: bytes | None = None
        self._inflate: Callable[[bytes], bytes] | None = None
        # From the last to the first, so that the first stays.
        self._values = {name.lower(): value for name, value in reversed(self.headers)}
        encoding = self._values.get(b"content-encoding", b"").strip().lower()
        self.encoding: Final = b"" if encoding == b"identity" else encoding
        """The content encoding in lower case; empty where the body is sent as it is."""

    def header(self, name: bytes) -> bytes | None:
        """Return the first header of this lower-case name."""
        return self._values.get(name)

    @property
    def readable(self) -> bool:
        """Whether `chunk(plain=True)` can undo the content encoding."""
        return not self.encoding or self.encoding in _INFLATE

    @property
    def ended(self) -> bool:
        """Whether all of the body is known to have been returned: whoever reads on waits for nothing."""
        return self._response.ended

    async def chunk(self, *, plain: bool = False) -> bytes:
        """Return what has come of the body since the last call, at least one byte; nothing at its end.

        `plain` undoes the content encoding, where it is `readable`.

        Raises:
            UpstreamTimeout: nothing came for as long as `read_timeout`.
            UpstreamUnreachable: the connection broke.
        """
        try:
            while piece := await self._response.piece():
                if not (plain and self.encoding):
                    return piece
                if self._inflate is None:
                    self._inflate = zlib.decompressobj(_INFLATE[self.encoding]).decompress
                if inflated := self._inflate(piece):
                    return inflated
        except zlib.error as why:
            raise UpstreamUnreachable("The upstream's answer is not encoded as it says. Try again.") from why
        except _FAILURES as why:
            raise _error_of(why) from why
        return b""

    async def chunks(self, *, plain: bool = False) -> AsyncIterator[bytes]:
        """Yield the body's bytes as they come; see `chunk`."""
        while chunk := await self.chunk(plain=plain):
            yield chunk

    async def read(self) -> bytes:
        """Return the whole body, decoded where it is `readable`; raises as `chunks` does."""
        if self._body is None:
            parts: list[bytes] = []
            while part := await self.chunk(plain=self.readable):
                parts.append(part)
            self._body = b"".join(parts)
        return self._body

    async def aclose(self) -> None:
        """Give the connection back, or break it where the body was not read to its end."""
        if self._slots is None:
            return
        slots, self._slots = self._slots, None
        try:
            await self._response.aclose()
        except _FAILURES:
            pass  # it is being thrown away: how it ended is of no interest
        finally:
            slots.release()


class Upstream:
    """The configured provider. One for the life of the process, made inside the event loop."""

    def __init__(self, settings: UpstreamSettings, *, shares_key: bool) -> None:
        """Connect to nothing yet.

        Args:
            settings: the `upstream` section.
            shares_key: whether a client's credential is one of this proxy's, which must not leave it.
        """
        self._settings = settings
        key = settings.api_key.get_secret_value() if settings.api_key is not None else None
        self.base: Final = Destination(
            base_url=settings.base_url,
            authorization=_bearer(key),
            forwards_credentials=key is None and not shares_key,
            forwards_query=True,
        )
        """Where everything goes that no route takes."""
        self._routes = tuple([(route.models, _destination_of(route)) for route in settings.routes])
        self._direct = DirectTransport()
        self._transport = ExactTransport()
        self._slots = asyncio.Semaphore(settings.max_connections)

    async def aclose(self) -> None:
        """Close every connection."""
        await self._direct.aclose()
        await self._transport.aclose()

    def destination(self, model: str) -> Destination:
        """Return where a request for `model` goes: the first route that matches, else the base.

        The client's own key goes to the base only, never to a route, and so does its query string.
        """
        for patterns, destination in self._routes:
            if any(fnmatchcase(model, pattern) for pattern in patterns):
                return destination
        return self.base

    async def ask(
        self,
        destination: Destination,
        method: str,
        path: str,
        headers: Iterable[tuple[bytes, bytes]],
        content: bytes | AsyncIterable[bytes],
    ) -> Answer:
        """Send a request and return the answer once its status and headers are here.

        Args:
            destination: where to.
            method: the HTTP method.
            path: what follows the base address, quoted, with its query: `/chat/completions`.
            headers: as the client sent them, less what must not leave (`wire.headers.to_upstream`).
            content: the body, whole or as it comes.

        Raises:
            UpstreamBusy: no connection became free within `connect_timeout`.
            UpstreamTimeout: no connection or no answer in time.
            UpstreamUnreachable: no connection, or it broke before the answer.
        """
        if destination.authorization is not None:
            headers = [*headers, (b"authorization", destination.authorization)]
        if self._slots.locked():
            await self._wait_for_slot()
        else:
            await self._slots.acquire()
        settings, base_url = self._settings, destination.base_url
        response: _Response | None = None
        try:
            if method == "POST" and isinstance(content, bytes):
                origin = origin_of(base_url)
                if origin is not None and proxy_of(origin.scheme, origin.host, origin.port) is None:
                    response = await self._direct.ask(
                        origin,
                        _quoted((origin.path + path).partition("#")[0]),
                        headers,
                        content,
                        connect_timeout=settings.connect_timeout,
                        read_timeout=settings.read_timeout,
                    )
            if response is None:
                response = await self._send(base_url, method, path, headers, content)
        except _FAILURES as why:
            self._slots.release()
            raise _error_of(why) from why
        except BaseException:  # cancelled, above all: the slot must not be lost with the caller
            self._slots.release()
            raise
        return Answer(response, self._slots)

    async def _send(
        self,
        base_url: str,
        method: str,
        path: str,
        headers: Iterable[tuple[bytes, bytes]],
        content: bytes | AsyncIterable[bytes],
    ) -> _Response:
        """Send a request that cannot go straight to its server."""
        settings = self._settings
        request = httpx.Request(
            method,
            _parsed(base_url),
            headers=list(headers),
            # With `content` it would add headers that the transport writes itself, at some cost.
            stream=_NO_STREAM,
            extensions={
                "content": content,
                "target": _quoted(base_url + path),
                "timeout": {"connect": settings.connect_timeout, "read": settings.read_timeout},
            },
        )
        return _Httpx(await self._transport.handle_async_request(request))

    async def _wait_for_slot(self) -> None:
        """Wait for one of `max_connections` connections."""
        try:
            await asyncio.wait_for(self._slots.acquire(), self._settings.connect_timeout)
        except TimeoutError as why:
            raise UpstreamBusy(
                f"All {self._settings.max_connections} connections to the upstream are in use. "
                "Try again, or raise upstream.max_connections."
            ) from why


class _Httpx:
    """A response of httpx's kind."""

    __slots__ = ("_pieces", "_stream", "ended", "headers", "status")

    def __init__(self, response: httpx.Response) -> None:
        if not isinstance(response.stream, httpx.AsyncByteStream):  # what a transport returns by its contract
            raise TypeError(f"not an asynchronous stream: {type(response.stream).__name__}")
        self.status = response.status_code
        self.headers: Headers = list(response.headers.raw)
        self._stream = response.stream
        self._pieces = aiter(response.stream)
        self.ended = False  # it is not known before it is waited for

    async def piece(self) -> bytes:
        async for piece in self._pieces:
            if piece:
                return piece
        return b""

    async def aclose(self) -> None:
        await self._stream.aclose()


_NO_STREAM: Final = httpx.ByteStream(b"")


@lru_cache(maxsize=64)
def _parsed(base_url: str) -> httpx.URL:
    return httpx.URL(base_url)  # dearer than all the rest of making a request


def _quoted(target: str) -> bytes:
    """Return the target as it was sent; bytes that no URL may hold are quoted."""
    if target.isascii():
        return target.encode()
    return _NOT_ASCII.sub(lambda match: b"%%%02X" % match[0][0], target.encode("latin-1"))


def _destination_of(route: Route) -> Destination:
    key = route.api_key.get_secret_value() if route.api_key is not None else None
    return Destination(base_url=route.base_url, authorization=_bearer(key), forwards_credentials=False)


def _bearer(key: str | None) -> bytes | None:
    return None if key is None else f"Bearer {key}".encode()


def _error_of(why: Exception) -> UpstreamError:
    """Return our error for one of the HTTP client's. Addresses stay out of it."""
    if isinstance(why, (httpx.TimeoutException, TimeoutError)):
        return UpstreamTimeout(
            "The upstream did not answer in time. Try again, or raise upstream.read_timeout and "
            "upstream.connect_timeout."
        )
    if isinstance(why, (Unreachable, aiohttp.ClientConnectorError)):
        return UpstreamUnreachable(
            "The upstream cannot be reached. Check that it runs, and upstream.base_url."
        )
    return UpstreamUnreachable(
        "The connection to the upstream broke before its answer was complete. Try again."
    )

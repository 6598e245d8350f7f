"""An aiohttp session that sends requests unchanged, and a connection pool with stricter reuse.

The session keeps no cookies (they would be shared between tenants), adds no header but `Host` and the body's length,
does not re-quote URLs, reads no netrc, follows no redirect and decompresses nothing.
"""

from __future__ import annotations

import asyncio
import re
import select
import ssl
import time
from functools import lru_cache, partial
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.request import getproxies, proxy_bypass
from weakref import WeakKeyDictionary

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.http import HttpProcessingError
from aiohttp.payload import Payload
from msgspec import Struct
from yarl import URL

from proxy.errors import UpstreamBusy, UpstreamUnreachable

if TYPE_CHECKING:
    from aiohttp import StreamReader
    from aiohttp.abc import AbstractStreamWriter
    from aiohttp.client_reqrep import ConnectionKey
    from aiohttp.connector import Connection
    from aiohttp.http import RawResponseMessage
    from aiohttp.tracing import Trace

IDLE_SECONDS: Final = 4.0
"""How long an idle connection is kept. Many servers close it after five seconds. A request sent at that moment is lost:
the client cannot tell whether the server has read it."""
SPARE_SECONDS: Final = 1.0
"""A connection is dropped this much earlier than the server announces (`Keep-Alive: timeout=5`)."""
DISTRUST_SECONDS: Final = 30.0
"""How long no connection to a server is reused after a second loss in a row. See `Connector.distrust`."""
_KEEP_ALIVE_TIMEOUT: Final = re.compile(r"\btimeout=([0-9]{1,9})\b", re.IGNORECASE)
_HEADER_BYTES: Final = 65_536
"""Longest status line or header field of an answer. aiohttp's limit of 8 kB is below what gateways send."""
_MOST_HEADERS: Final = 1000  # of an answer; aiohttp's default is 128
_HEAD_BYTES: Final = 1_048_576  # longest head of an answer, including informational (1xx) heads before it
_BUFFER_BYTES: Final = 131_072  # reading pauses while more than twice as much of a body is buffered
_PIECE_BYTES: Final = 1_048_576  # largest part of a request body that is written in one step
_SOCKET_BYTES: Final = 65_536  # a request body up to this size is written at once, without a time limit
_AUTOMATIC_HEADERS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # aiohttp would add these
_IDEMPOTENCY_KEYS: Final = ("Idempotency-Key", "X-Idempotency-Key")
"""A request with one of these headers may be sent twice. Go's HTTP client has the same rule."""
_LOST: Final = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError)


class Origin(Struct, frozen=True, kw_only=True):
    """The server of a base address."""

    name: str  # host and port, for error messages
    proxy: str | None = None  # address of the proxy that the environment names for this server; None: connect directly
    proxy_name: str = ""  # host and port of the proxy, without its password


@lru_cache(maxsize=64)
def origin_of(base_url: str, chosen: str | None = None) -> Origin:
    """Return the server of `base_url` and the forward proxy for it: `chosen`, or else that of the environment.

    Reads `HTTP_PROXY`, `HTTPS_PROXY` and `NO_PROXY`, since aiohttp reads them only together with netrc. As in other
    clients, a proxy without a scheme speaks HTTP, and `NO_PROXY` may name a port. Raises `ValueError` if `base_url` is
    not a URL.
    """
    url = URL(base_url)
    name = _name_of(url)
    if chosen is not None:
        return Origin(name=name, proxy=chosen, proxy_name=_name_of(URL(chosen)))
    proxy = getproxies().get(url.scheme)
    if proxy is None or proxy_bypass(url.host or "") or proxy_bypass(f"{url.host}:{url.port}"):
        return Origin(name=name)
    proxy = proxy if "://" in proxy else f"http://{proxy}"
    try:
        return Origin(name=name, proxy=proxy, proxy_name=_name_of(URL(proxy)))
    except ValueError:  # the original message may show a password
        raise UpstreamUnreachable("HTTP_PROXY or HTTPS_PROXY is no address of a proxy: http://HOST:PORT.") from None


def _name_of(url: URL) -> str:
    return f"{url.host_subcomponent}:{url.port}"


def trusting(ca_file: Path) -> ssl.SSLContext:
    """Return a TLS context that trusts the authorities in a file, whose certificates may be of an older style.

    Since Python 3.13 the default context refuses certificates without key usage or key identifiers. Corporate
    authorities often issue such certificates.
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def open_session(
    *, connect_timeout: float, read_timeout: float, limit: int, ca_file: Path | None = None
) -> aiohttp.ClientSession:
    """Return the session of this process. Must be called inside the event loop.

    `connect_timeout` covers the wait for the pool, the name look-up and TLS; `read_timeout` covers each wait for bytes.
    `limit` is the largest number of connections in use. `ca_file` holds the certificates of the authorities to trust,
    instead of the system's.
    """
    trusted = True if ca_file is None else trusting(ca_file)
    return aiohttp.ClientSession(
        connector=Connector(limit, trusted),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None, connect=connect_timeout, sock_read=read_timeout),
        trust_env=False,
        auto_decompress=False,
        skip_auto_headers=_AUTOMATIC_HEADERS,
        read_bufsize=_BUFFER_BYTES,
        max_line_size=_HEADER_BYTES,
        max_field_size=_HEADER_BYTES,
        max_headers=_MOST_HEADERS,
        request_class=_Request,
        middlewares=(_send,),
    )


class RequestBody(Payload):
    """A request body in memory. aiohttp's own class warns above 1 MB and has no time limit for sending."""

    _value: bytes
    _autoclose = True

    def __init__(self, body: bytes, patience: float) -> None:
        """Create the payload. Sending fails if the server accepts no bytes for `patience` seconds."""
        super().__init__(body)
        self._size = len(body)
        self._patience = patience

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text."""
        return self._value.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the body. Raises `TimeoutError`."""
        if len(self._value) <= _SOCKET_BYTES:
            await writer.write(self._value)
            return
        for start in range(0, len(self._value), _PIECE_BYTES):
            async with asyncio.timeout(self._patience):
                await writer.write(self._value[start : start + _PIECE_BYTES])
                await writer.drain()


class _Request(aiohttp.ClientRequest):
    """A request that knows its connection."""

    protocol: ResponseHandler | None = None
    reused = False  # whether that connection served an earlier request
    needs_new_connection = False
    unwritten = False  # whether that connection was found closed before a byte was written

    async def write_bytes(
        self, writer: AbstractStreamWriter, conn: Connection, content_length: int | None = None
    ) -> None:
        """Write the request, unless the server has closed the reused connection in the meantime."""
        protocol = self.protocol
        if self.reused and protocol is not None and (protocol.should_close or _has_input(protocol.transport)):
            self.unwritten = True
            protocol.set_exception(aiohttp.ClientConnectionResetError("the server closed the connection"))
            return
        await super().write_bytes(writer, conn, content_length)


class _Protocol(ResponseHandler):
    """A connection with a limit on the length of heads, and a time limit on every wait.

    aiohttp's own class accepts heads of any length, has no time limit after an informational head (1xx), and waits for
    more of a body after invalid HTTP.
    """

    _head_bytes = 0  # bytes of the current head so far
    _informed = False  # whether the last head was informational (1xx)

    def data_received(self, data: bytes) -> None:
        """Parse bytes of a head or a body."""
        if self._payload is None or self._payload.is_eof():
            self._head_bytes += len(data)
            if self._head_bytes > _HEAD_BYTES:
                if self.transport is not None:
                    self.transport.close()
                self.set_exception(HttpProcessingError(message="The head is too long."))
                return
        super().data_received(data)
        if self._informed:
            self._informed = False
            self.start_timeout()

    def feed_data(self, data: tuple[RawResponseMessage, StreamReader], size: int = 0) -> None:
        """Pass a parsed head on."""
        self._informed = data[0].code < 200  # another head follows
        if not self._informed:
            self._head_bytes = 0
        super().feed_data(data, size)

    def set_exception(self, exc: BaseException, exc_cause: BaseException | None = None) -> None:
        """Fail the awaited head, and also the body that is being read if this is a parse error."""
        super().set_exception(exc, *() if exc_cause is None else (exc_cause,))
        body = self._payload
        if isinstance(exc, HttpProcessingError) and body is not None and not body.is_eof():
            body.set_exception(aiohttp.ClientPayloadError("The body is not valid HTTP."))


class _Used(Struct, kw_only=True):
    """Times of a connection that was used."""

    since: float  # first use
    deadline: float = inf  # the connection is not reused after this time


class Connector(aiohttp.TCPConnector):
    """aiohttp's pool, but a connection is reused only while it is certainly open."""

    def __init__(self, limit: int, trusted: ssl.SSLContext | bool = True) -> None:
        """Allow `limit` connections in use at a time. Idle connections do not count."""
        super().__init__(  # pyright: ignore[reportUnknownMemberType] - a parameter that is not used here
            limit=limit, limit_per_host=0, keepalive_timeout=IDLE_SECONDS, ssl=trusted
        )
        protocol: type[ResponseHandler] = _Protocol
        self._factory = partial(protocol, loop=self._loop)
        self._used: WeakKeyDictionary[ResponseHandler, _Used] = WeakKeyDictionary()
        self._distrusted: dict[ConnectionKey, float] = {}
        """By server that lost a request: connections first used before this time are not reused."""

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's signature
    ) -> Connection:
        """Return a connection for `req`. Raises `UpstreamBusy` if none became free in time."""
        try:
            while True:
                connection = await super().connect(req, traces, timeout)
                if self._is_usable(connection, req):
                    return connection
                connection.close()
        except TimeoutError as why:
            if self._available_connections(req.connection_key) > 0:
                raise
            raise UpstreamBusy(
                f"All {self.limit} connections to the upstream are in use. "
                "Try again, or raise upstream.max_connections."
            ) from why

    def _is_usable(self, connection: Connection, request: aiohttp.ClientRequest) -> bool:
        protocol = connection.protocol
        if protocol is None or not isinstance(request, _Request):
            return True
        used = self._used.get(protocol)
        if used is None:
            self._used[protocol] = _Used(since=time.monotonic())
        elif (
            request.needs_new_connection
            or used.deadline <= time.monotonic()
            or used.since <= self._distrusted.get(request.connection_key, -inf)
            or protocol.should_close  # for example, the server sent unrequested data
            or _has_input(protocol.transport)
        ):
            return False
        request.protocol, request.reused = protocol, used is not None
        return True

    def distrust(self, server: ConnectionKey, protocol: ResponseHandler | None) -> None:
        """Drop all connections to a server that lost a request: the next request on one of them may be lost too.

        If the lost connection was newer than the last loss, and that was less than 60 s ago, the server does so
        regularly: no connection to it is reused for `DISTRUST_SECONDS`.
        """
        now, before = time.monotonic(), self._distrusted.get(server, -inf)
        used = None if protocol is None else self._used.get(protocol)
        if used is not None and used.since > before > now - 2 * DISTRUST_SECONDS:
            self._distrusted[server] = now + DISTRUST_SECONDS
        else:
            self._distrusted[server] = max(before, now)

    def limit_reuse(self, protocol: ResponseHandler, seconds: float) -> None:
        """Do not reuse this connection after so many seconds."""
        now = time.monotonic()  # not `loop.time()`: uvloop updates it only once per iteration
        self._used.setdefault(protocol, _Used(since=now)).deadline = now + seconds


def _has_input(transport: asyncio.Transport | None) -> bool:
    """Return whether an idle connection has unread input, which usually is its end."""
    if transport is None:
        return True
    if not hasattr(select, "poll"):  # on Windows
        return False
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


async def _send(request: aiohttp.ClientRequest, send_once: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Send a request. Retry it once if a reused connection lost it, and it has an idempotency key or was not written.

    Any other lost POST is an error, because a repeated completion costs twice. aiohttp itself retries a lost GET.
    """
    try:
        response = await send_once(request)
        if isinstance(request, _Request) and request.unwritten:  # not an answer to this request
            response.close()
            raise aiohttp.ClientConnectionResetError("the server closed the connection")
    except _LOST as why:
        answered = isinstance(why, aiohttp.ServerDisconnectedError) and not isinstance(why.message, str)
        spent = isinstance(request.body, Payload) and request.body.consumed  # a streamed body cannot be sent again
        repeatable = not spent and any(name in request.headers for name in _IDEMPOTENCY_KEYS)
        if not isinstance(request, _Request) or not request.reused or answered:
            raise
        if not request.unwritten and isinstance(connector := request.session.connector, Connector):
            connector.distrust(request.connection_key, request.protocol)
        if not repeatable and not request.unwritten:
            raise
        request.needs_new_connection, request.unwritten = True, False
        response = await send_once(request)
    announced = response.headers.get("Keep-Alive")
    if announced is not None and isinstance(request, _Request) and request.protocol is not None:
        timeout = _KEEP_ALIVE_TIMEOUT.search(announced)
        if timeout is not None and isinstance(connector := request.session.connector, Connector):
            connector.limit_reuse(request.protocol, int(timeout[1]) - SPARE_SECONDS)
    return response

"""aiohttp's session with its habits switched off, and its connection pool with stricter reuse.

The session keeps no cookies (a provider's cookie would cross tenants), adds no header but `Host` and the
body's length, does not re-quote URLs, reads no netrc, follows no redirect and decompresses nothing.
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
"""How long an idle connection is kept. Many servers close it after five seconds, and a request that is sent
at that moment is lost: the client cannot tell whether the server has read it."""
SPARE_SECONDS: Final = 1.0
"""A connection is given up this much sooner than the server announces (`Keep-Alive: timeout=5`)."""
DISTRUST_SECONDS: Final = 30.0
"""How long no connection to a server is used again after it closed a new one too, and just as it was used again."""
_KEEP_ALIVE_TIMEOUT: Final = re.compile(r"\btimeout=([0-9]{1,9})\b", re.IGNORECASE)
_HEADER_BYTES: Final = 65_536
"""Longest status line or header field of an answer. aiohttp's limit of 8 kB is below what gateways send."""
_MOST_HEADERS: Final = 1000  # of an answer; aiohttp takes 128
_HEAD_BYTES: Final = 1_048_576  # longest head of an answer, with the informational ones before it
_BUFFER_BYTES: Final = 131_072  # reading from the upstream pauses while twice as much of a body waits to be taken
_PIECE_BYTES: Final = 1_048_576  # largest part of a request body that is written in one step
_SOCKET_BYTES: Final = 65_536  # a request body of this size is handed to the socket without waiting
_AUTOMATIC_HEADERS: Final = ("Accept", "Accept-Encoding", "Content-Type", "User-Agent")  # aiohttp would add these
_IDEMPOTENCY_KEYS: Final = ("Idempotency-Key", "X-Idempotency-Key")
"""A client that sends one of these allows its request to arrive twice. Go's HTTP client has the same rule."""
_LOST: Final = (aiohttp.ServerDisconnectedError, aiohttp.ClientOSError, aiohttp.ClientConnectionResetError)


class Origin(Struct, frozen=True, kw_only=True):
    """The server of a base address."""

    name: str  # host and port, for error messages
    proxy: str | None = None  # address of the proxy that the environment names for this server; None: connect directly
    proxy_name: str = ""  # host and port of the proxy, without its password


@lru_cache(maxsize=64)
def origin_of(base_url: str, chosen: str | None = None) -> Origin:
    """Return the server of `base_url`, and the proxy on the way to it: the chosen one, or `HTTPS_PROXY`, `NO_PROXY`.

    aiohttp reads these variables only together with netrc. As in other clients a proxy without a scheme
    speaks HTTP, and `NO_PROXY` may name a port. Raises `ValueError` if this is not a URL.
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
    except ValueError:  # its message may show a password
        raise UpstreamUnreachable("HTTP_PROXY or HTTPS_PROXY is no address of a proxy: http://HOST:PORT.") from None


def _name_of(url: URL) -> str:
    return f"{url.host_subcomponent}:{url.port}"


def trusting(ca_file: Path) -> ssl.SSLContext:
    """Return a TLS context that trusts the authorities in a file, the same ones with every version of Python.

    From Python 3.13 on the default refuses certificates without key usage or key identifiers. Authorities of companies
    often issue such ones.
    """
    context = ssl.create_default_context(cafile=ca_file)
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT
    return context


def open_session(
    *, connect_timeout: float, read_timeout: float, limit: int, ca_file: Path | None = None
) -> aiohttp.ClientSession:
    """Return the session of this process; call it inside the event loop.

    `connect_timeout` covers the wait for the pool, the name lookup and TLS; `read_timeout` each wait for
    bytes. `limit` is the largest number of connections in use. `ca_file` has the certificates of
    authorities to trust, in place of the system's.
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
    """A request body in memory. aiohttp's own class warns above 1 MB, and may wait forever to send it."""

    _value: bytes
    _autoclose = True

    def __init__(self, body: bytes, patience: float) -> None:
        """Send `body`; the server may take no byte of it for `patience` seconds."""
        super().__init__(body)
        self._size = len(body)
        self._patience = patience

    def decode(self, encoding: str = "utf-8", errors: str = "strict") -> str:
        """Return the body as text."""
        return self._value.decode(encoding, errors)

    async def write(self, writer: AbstractStreamWriter) -> None:
        """Write the body; raises `TimeoutError`."""
        if len(self._value) <= _SOCKET_BYTES:
            await writer.write(self._value)
            return
        for start in range(0, len(self._value), _PIECE_BYTES):
            async with asyncio.timeout(self._patience):
                await writer.write(self._value[start : start + _PIECE_BYTES])
                await writer.drain()


class _Request(aiohttp.ClientRequest):
    """A request that knows which connection it is sent on."""

    protocol: ResponseHandler | None = None
    reused = False  # whether that connection served an earlier request
    needs_new_connection = False
    unwritten = False  # whether that connection was found closed before a byte was written

    async def write_bytes(
        self, writer: AbstractStreamWriter, conn: Connection, content_length: int | None = None
    ) -> None:
        """Write the request, unless the server closed the connection since it was chosen."""
        protocol = self.protocol
        if self.reused and protocol is not None and (protocol.should_close or _has_input(protocol.transport)):
            self.unwritten = True
            protocol.set_exception(aiohttp.ClientConnectionResetError("the server closed the connection"))
            return
        await super().write_bytes(writer, conn, content_length)


class _Protocol(ResponseHandler):
    """A connection on which no head is endless, and nothing is waited for without a limit of time.

    aiohttp's own takes heads of any length, has no limit of time after an informational one, and waits for more of a
    body that becomes invalid HTTP.
    """

    _head_bytes = 0  # of the head that is awaited
    _informed = False  # whether the last head was an informational one

    def data_received(self, data: bytes) -> None:
        """Take bytes of a head, or of a body."""
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
        """Hand a head on."""
        self._informed = data[0].code < 200  # another head follows
        if not self._informed:
            self._head_bytes = 0
        super().feed_data(data, size)

    def set_exception(self, exc: BaseException, exc_cause: BaseException | None = None) -> None:
        """Fail what is awaited from this connection, the body too that it was reading."""
        super().set_exception(exc, *() if exc_cause is None else (exc_cause,))
        body = self._payload
        if isinstance(exc, HttpProcessingError) and body is not None and not body.is_eof():
            body.set_exception(aiohttp.ClientPayloadError("The body is not valid HTTP."))


class _Used(Struct, kw_only=True):
    """What is known of a connection that was used."""

    since: float
    deadline: float = inf  # it is not used again after this


class Connector(aiohttp.TCPConnector):
    """aiohttp's pool, but it reuses a connection only while the connection is surely open."""

    def __init__(self, limit: int, trusted: ssl.SSLContext | bool = True) -> None:
        """Allow `limit` connections in use at one time; idle ones are not counted."""
        super().__init__(  # pyright: ignore[reportUnknownMemberType] - a parameter that is not used here
            limit=limit, limit_per_host=0, keepalive_timeout=IDLE_SECONDS, ssl=trusted
        )
        protocol: type[ResponseHandler] = _Protocol
        self._factory = partial(protocol, loop=self._loop)
        self._used: WeakKeyDictionary[ResponseHandler, _Used] = WeakKeyDictionary()
        self._distrusted: dict[ConnectionKey, float] = {}
        """By server that closed a connection without a word: one that was opened before this time is not used again."""

    async def connect(
        self,
        req: aiohttp.ClientRequest,
        traces: list[Trace],
        timeout: aiohttp.ClientTimeout,  # noqa: ASYNC109 - aiohttp's signature
    ) -> Connection:
        """Return a connection for `req`; raises `UpstreamBusy` if all stayed in use."""
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
            or protocol.should_close  # the server sent something that nobody had asked for
            or _has_input(protocol.transport)
        ):
            return False
        request.protocol, request.reused = protocol, used is not None
        return True

    def distrust(self, server: ConnectionKey, protocol: ResponseHandler | None) -> None:
        """Give up all connections to the server of a lost request: the next request on one may be lost too.

        If this one was opened after the last loss, the server does so as a rule: none is used again for a while.
        """
        now, before = time.monotonic(), self._distrusted.get(server, -inf)
        used = None if protocol is None else self._used.get(protocol)
        if used is not None and used.since > before > now - 2 * DISTRUST_SECONDS:
            self._distrusted[server] = now + DISTRUST_SECONDS
        else:
            self._distrusted[server] = max(before, now)

    def limit_reuse(self, protocol: ResponseHandler, seconds: float) -> None:
        """Do not use this connection again after so many seconds."""
        now = time.monotonic()  # uvloop's own time is as it was when the turn of its loop began
        self._used.setdefault(protocol, _Used(since=now)).deadline = now + seconds


def _has_input(transport: asyncio.Transport | None) -> bool:
    """Return whether an idle connection has unread input, as a rule its end."""
    if transport is None:
        return True
    if not hasattr(select, "poll"):  # on Windows
        return False
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)
    return bool(poll.poll(0))


async def _send(request: aiohttp.ClientRequest, send_once: aiohttp.ClientHandlerType) -> aiohttp.ClientResponse:
    """Send a request, and once more if it was lost on a reused connection and may arrive twice, or was not written.

    Any other lost POST is an error: a completion that is asked for twice is paid for twice. aiohttp repeats a
    lost GET itself.
    """
    try:
        response = await send_once(request)
        if isinstance(request, _Request) and request.unwritten:  # it answers nothing that was asked
            response.close()
            raise aiohttp.ClientConnectionResetError("the server closed the connection")
    except _LOST as why:
        answered = isinstance(why, aiohttp.ServerDisconnectedError) and not isinstance(why.message, str)
        spent = isinstance(request.body, Payload) and request.body.consumed  # a body that came in pieces is gone
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

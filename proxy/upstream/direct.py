"""Requests with a whole body, straight to their server, over connections that are kept: the hot way upstream.

A general HTTP client does much for each request that is of no use to a proxy: cookies, redirects, tracing,
objects that nobody looks at. Here a request is its bytes. What needs more than that (a proxy of the
environment, a body that comes in pieces, HEAD) goes through `transport`. It adds nothing but `Host` and
`Content-Length`, and knows no error of this project.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import Iterable
from functools import cache, lru_cache
from ipaddress import ip_address
from typing import Final, NamedTuple

from aiohappyeyeballs import (
    start_connection,  # pyright: ignore[reportUnknownVariableType] - of tuples of anything
)
from msgspec import Struct

from proxy.upstream.channel import Broken, Channel, Headers

IDLE_SECONDS: Final = 4.0
"""How long a connection is kept that nobody needs. Many servers close it after five seconds, and a request
that is sent just then is lost: it cannot be told whether they read it."""
_SPARE_SECONDS: Final = 1.0
"""By how much sooner than a server says (`Keep-Alive: timeout=5`) a connection is given up."""
_FRESH_SECONDS: Final = 0.1
"""A connection that rested for less is used without looking whether its end has come: none closes so soon."""
_REPEATABLE: Final = re.compile(rb"\n(?:X-)?Idempotency-Key:", re.IGNORECASE)
"""A header by which a client says that its request may come twice. (Go's HTTP client has it so, too.)"""
_NEXT_ADDRESS_SECONDS: Final = 0.25
"""RFC 8305: how long one address of a host is waited for before the next one is tried beside it."""
_TURNS: Final = 10
"""Of the event loop, in which connections that are broken off have ended: one or two."""
_ORIGIN: Final = re.compile(
    r"(?P<scheme>https?)://(?P<authority>(?:(?P<host>[A-Za-z0-9._-]+)|\[(?P<six>[0-9A-Fa-f:.]+)\])"
    r"(?::(?P<port>[0-9]{1,5}))?)(?P<path>/[^#?]*)?"
)
_PORTS: Final = {"http": 80, "https": 443}


class Unreachable(Exception):
    """No connection could be made."""


class Origin(Struct, frozen=True, kw_only=True):
    """Where connections go."""

    encrypted: bool
    host: str
    port: int
    authority: bytes
    """What `Host` says."""
    path: str
    """What stands before the path of each request."""

    @property
    def scheme(self) -> str:
        """`http` or `https`."""
        return "https" if self.encrypted else "http"


@lru_cache(maxsize=64)
def origin_of(base_url: str) -> Origin | None:
    """Return where an address leads; None for one that holds more than scheme, plain host, port and path."""
    found = _ORIGIN.fullmatch(base_url)
    if found is None or not found["authority"].isascii():
        return None
    usual = _PORTS[found["scheme"]]
    port = int(found["port"] or usual)
    host = found["host"] or found["six"]
    name = f"[{found['six']}]" if found["six"] else host
    return Origin(
        encrypted=found["scheme"] == "https",
        host=host,
        port=port,
        authority=(name if port == usual else f"{name}:{port}").encode(),
        path=found["path"] or "",
    )


class _Resting(NamedTuple):
    """A connection that waits for a request."""

    channel: Channel
    since: float
    """When it began to, by the event loop's clock."""
    until: float
    """When it is given up."""


class DirectTransport:
    """The connections of one process; to be made and closed inside the event loop.

    The number of connections is not limited here: who asks counts them.
    """

    def __init__(self, idle_seconds: float = IDLE_SECONDS) -> None:
        """Connect to nothing yet; keep a connection for so long while nobody needs it."""
        self._idle_seconds = idle_seconds
        self._open: dict[Channel, socket.socket] = {}
        self._idle: dict[Origin, list[_Resting]] = {}
        """Those that wait for a request, the longest first."""
        self._sweeping: asyncio.TimerHandle | None = None
        """Set for the first moment at which one of them is given up, or sooner."""

    async def ask(
        self,
        origin: Origin,
        target: bytes,
        headers: Iterable[tuple[bytes, bytes]],
        body: bytes,
        *,
        connect_timeout: float,
        read_timeout: float,
    ) -> DirectResponse:
        """POST `body`, and return the response once its headers are here, its body unread.

        Args:
            origin: where to.
            target: path and query as they are to be sent.
            headers: all but `Host` and `Content-Length`.
            body: the whole of it.
            connect_timeout: seconds until a connection must stand, encryption included.
            read_timeout: seconds of silence that are waited for.

        Raises:
            Unreachable: no connection could be made.
            Broken: the connection ended before the answer began. If it was a kept one and not a byte came,
                the request was sent once more over a new one, where the client allows that.
            TimeoutError: one of the two limits was passed.
            ValueError: a header would be several.
        """
        head = _head(origin, target, headers, len(body))
        kept = self._take(origin)
        while True:
            channel = kept or await self._connect(origin, connect_timeout)
            try:
                await channel.ask(head, body, read_timeout)
            except BaseException as why:  # cancelled too: what would come on it belongs to nobody
                self._give_up(channel)
                lost = kept is not None and isinstance(why, Broken) and channel.silent
                if not (lost and _REPEATABLE.search(head)):
                    raise
                kept = None
            else:
                return DirectResponse(channel, self, origin)

    async def aclose(self) -> None:
        """Close every connection."""
        if self._sweeping is not None:
            self._sweeping.cancel()
        self._idle.clear()
        for channel in self._open:
            channel.close()
        for _ in range(_TURNS):
            if all(channel.closed for channel in self._open):
                break
            await asyncio.sleep(0)
        self._open.clear()

    def give_back(self, channel: Channel, origin: Origin) -> None:
        """Keep a connection for the next request, or close it where none can be sent."""
        seconds = self._idle_seconds
        if channel.rests is not None:
            seconds = min(seconds, channel.rests - _SPARE_SECONDS)
        if not channel.free or seconds <= 0:
            self._give_up(channel)
            return
        channel.rest()
        loop = asyncio.get_running_loop()
        now = loop.time()
        self._idle.setdefault(origin, []).append(_Resting(channel=channel, since=now, until=now + seconds))
        if self._sweeping is not None and self._sweeping.when() > now + seconds:
            self._sweeping.cancel()
            self._sweeping = None
        if self._sweeping is None:
            self._sweeping = loop.call_at(now + seconds, self._sweep)

    def _take(self, origin: Origin) -> Channel | None:
        """Return the connection that was used last, if it still stands and is not too old."""
        idle = self._idle.get(origin)
        now = asyncio.get_running_loop().time()
        while idle:
            channel, since, until = idle.pop()
            # The sweep may be late, and so may the news be that the server has closed it.
            seen = until > now and channel.free
            if seen and (now - since < _FRESH_SECONDS or not _has_news(self._open[channel])):
                return channel
            self._give_up(channel)
        return None

    def _give_up(self, channel: Channel) -> None:
        """Use a connection no more."""
        self._open.pop(channel, None)
        channel.close()

    def _sweep(self) -> None:
        """Close what was not needed for long."""
        self._sweeping = None
        loop = asyncio.get_running_loop()
        now = loop.time()
        for origin, idle in list(self._idle.items()):
            for resting in idle:
                if resting.until <= now:
                    self._give_up(resting.channel)
            left = [resting for resting in idle if resting.until > now]
            if left:
                self._idle[origin] = left
            else:
                del self._idle[origin]
        ends = [resting.until for idle in self._idle.values() for resting in idle]
        if ends:
            self._sweeping = loop.call_at(min(ends), self._sweep)

    async def _connect(self, origin: Origin, seconds: float) -> Channel:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(seconds):
                context = await asyncio.to_thread(_encryption) if origin.encrypted else None
                addresses = await loop.getaddrinfo(
                    origin.host,
                    origin.port,
                    type=socket.SOCK_STREAM,
                    flags=0 if _is_address(origin.host) else socket.AI_ADDRCONFIG,
                )
                connected = await start_connection(
                    addresses, happy_eyeballs_delay=_NEXT_ADDRESS_SECONDS, loop=loop
                )
                _, channel = await loop.create_connection(
                    Channel,
                    sock=connected,
                    ssl=context,
                    server_hostname=None if context is None else origin.host.rstrip("."),
                )
        except OSError as why:
            if isinstance(why, TimeoutError) and why.errno is None:
                raise  # ours; the system's own says of an address that it does not answer
            raise Unreachable(str(why)) from why
        except UnicodeError as why:  # a name that is none: `a..b`, or a part of more than 63 characters
            raise Unreachable(f"{origin.host!r} is no name of a host") from why
        self._open[channel] = connected
        return channel


class DirectResponse:
    """An answer whose headers are here. Whoever holds it closes it."""

    __slots__ = ("_channel", "_origin", "_transport")

    def __init__(self, channel: Channel, transport: DirectTransport, origin: Origin) -> None:
        """Hold the connection on which the rest of it comes."""
        self._channel = channel
        self._transport = transport
        self._origin = origin

    @property
    def status(self) -> int:
        """The HTTP status."""
        return self._channel.status

    @property
    def headers(self) -> Headers:
        """The header fields, as they came."""
        return self._channel.headers

    @property
    def ended(self) -> bool:
        """Whether there is no more of the body than was returned."""
        return self._channel.exhausted

    async def piece(self) -> bytes:
        """Return what has come of the body, nothing at its end; raises `Broken` and `TimeoutError`."""
        return await self._channel.piece()

    async def aclose(self) -> None:
        """Let go of the connection, which is broken off where the body was not read to its end."""
        self._transport.give_back(self._channel, self._origin)


def _head(origin: Origin, target: bytes, headers: Iterable[tuple[bytes, bytes]], length: int) -> bytes:
    lines = [b"POST %b HTTP/1.1" % target, b"Host: %b" % origin.authority]
    lines += map(b": ".join, headers)
    lines.append(b"Content-Length: %d\r\n\r\n" % length)
    head = b"\r\n".join(lines)
    ends = len(lines) + 1
    if head.count(b"\n") != ends or head.count(b"\r") != ends or b"\0" in head:
        raise ValueError("a header field holds the end of a line")
    return head


def _has_news(connected: socket.socket) -> bool:
    """Tell whether anything has come on a connection on which nothing is waited for: its end, as a rule."""
    try:
        connected.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    except OSError:  # it was reset
        return True
    return True


def _is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


@cache
def _encryption() -> ssl.SSLContext:
    """Return what connections are encrypted with; reads the system's certificates, which takes a moment."""
    context = ssl.create_default_context()
    context.set_alpn_protocols(["http/1.1"])
    return context

"""One connection to an upstream, and one HTTP/1.1 request after the other on it.

It writes the bytes that it is given, and gives back what comes: status, headers and body, as they are. The
parser is llhttp (by httptools), as lenient as aiohttp's. It knows no address and no pool, sends nothing on
its own, and raises no error of this project. It does not know what was asked: requests whose answers have
no body by their method (HEAD, CONNECT) are not for it.
"""

from __future__ import annotations

import asyncio
import re
from typing import Final, cast

import httptools

Headers = list[tuple[bytes, bytes]]

FIELD_BYTES: Final = 65_536
"""Longest header field that is taken, name and value: gateways send long ones."""
_FIELDS: Final = 128
_IDLE_BYTES: Final = 262_144
"""How much may come without a byte of a body: the head with all its fields, what precedes it (1xx), or what
stands around chunks and after the last one."""
_PAUSE_BYTES: Final = 262_144
"""How much of a body waits to be taken before the upstream has to wait."""
_TOGETHER_BYTES: Final = 65_536
"""Up to this size head and body are put together and sent by one call."""
_TIMEOUT: Final = re.compile(rb"\btimeout=([0-9]{1,9})\b", re.IGNORECASE)
"""What `Keep-Alive` says of how long the connection may rest (RFC 2068, section 19.7.1.1)."""
_BODILESS: Final = frozenset({204, 304})
"""RFC 9110, section 6.4.1: their answers end with their headers, whatever those say."""


class Broken(Exception):
    """The connection ended before the answer did, or what came is no answer."""


class Channel(asyncio.Protocol):
    """A connection that is open, or was. Whoever holds it asks; nobody else may meanwhile."""

    __slots__ = (
        "_asked",
        "_begun",
        "_closed",
        "_failure",
        "_heard",
        "_keeps",
        "_loop",
        "_overhead",
        "_parser",
        "_parts",
        "_patience",
        "_paused",
        "_size",
        "_timer",
        "_transport",
        "_unsent",
        "_until_end",
        "_waiter",
        "complete",
        "headers",
        "rests",
        "status",
    )

    status: int
    """The answer's status, once `ask` has returned."""
    headers: Headers
    """Its header fields in order, repetitions and bytes as they came; those of trailers are left out."""
    complete: bool
    """Whether all of the answer has come."""
    rests: int | None
    """Seconds for which the server keeps the connection for another request; None: it does not say."""

    def __init__(self) -> None:
        """Belong to the running event loop; asyncio calls the rest."""
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = _parser(self)
        self._closed = False
        self._asked = False
        self._timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._paused = False
        self._forget()

    def _forget(self) -> None:
        """Be as before any request."""
        self.status = 0
        self.headers = []
        self.complete = False
        self.rests = None
        self._begun = False
        self._keeps = False
        self._until_end = False
        self._failure: Exception | None = None
        self._parts: list[bytes] = []
        self._size = 0
        self._overhead = 0

    # --------------------------------------------------------------------------- by whoever holds it

    async def ask(self, head: bytes, body: bytes, patience: float) -> None:
        """Send a request, and return once the status and the headers of its answer are here.

        Args:
            head: the request line and the header fields, with the empty line after them.
            body: what follows.
            patience: seconds in which something must come, from now on and again after all that comes.
                What is not sent yet counts as well, as long as some of it is.

        Raises:
            Broken: the connection ended before, or what came is no answer.
            TimeoutError: nothing came for as long as `patience`.
        """
        transport = self._transport
        if transport is None or self._closed:
            raise Broken("the connection was closed before it was used")
        self._forget()
        self._asked = True
        if len(body) <= _TOGETHER_BYTES:
            transport.write(head + body)
        else:
            transport.writelines((head, body))
        self._unsent = transport.get_write_buffer_size()
        self._patience = patience
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(patience, self._check)
        while not self._begun:
            await self._news()

    async def piece(self) -> bytes:
        """Return what has come of the body since the last call, at least one byte; nothing at its end.

        Raises:
            Broken: the answer broke off; all that came before was returned.
            TimeoutError: nothing came for as long as `patience`.
        """
        while not self._parts:
            if self.complete:
                return b""
            await self._news()
        parts, self._parts, self._size = self._parts, [], 0
        if self._paused and self._transport is not None and not self._closed:
            self._paused = False
            self._heard = self._loop.time()  # it was not the upstream that kept silent
            self._transport.resume_reading()
        return parts[0] if len(parts) == 1 else b"".join(parts)

    @property
    def silent(self) -> bool:
        """Whether not a byte has come since the request was sent."""
        return not self._begun and not self._overhead

    @property
    def exhausted(self) -> bool:
        """Whether all of the answer has come, and was returned."""
        return self.complete and not self._parts

    @property
    def free(self) -> bool:
        """Whether another request can be sent."""
        return (
            not self._closed
            and self._transport is not None
            and not self._transport.is_closing()
            and (not self._asked or (self.complete and self._keeps and not self._paused))
            and not self._transport.get_write_buffer_size()
        )

    @property
    def closed(self) -> bool:
        """Whether the connection has ended."""
        return self._closed or self._transport is None

    def rest(self) -> None:
        """Wait for the next request: whatever comes before it closes the connection."""
        self._asked = False

    def close(self) -> None:
        """Break the connection off."""
        self._stop_timer()
        if self._transport is not None and not self._closed:
            self._transport.abort()

    async def _news(self) -> None:
        """Wait until something has come that may be waited for."""
        if self._failure is not None:
            raise self._failure
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # ------------------------------------------------------------------------------------ by asyncio

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take note of the way out."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's are of no class of asyncio's

    def data_received(self, data: bytes) -> None:
        """Read what has come."""
        if not self._asked or self.complete:
            self._keeps = False  # nobody asked for it: what would come next could not be told from it
            if not self._asked:
                self.close()
            return
        if self._failure is not None:
            return
        self._heard = self._loop.time()
        wrong = self._read(data)
        if wrong is not None:
            self._fail(Broken(wrong))
        elif self._size > _PAUSE_BYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        if self._begun:
            self._wake()

    def _read(self, data: bytes) -> str | None:
        """Give it to the parser; return what is wrong with it, None where that matters no more."""
        self._overhead += len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as why:
            self._keeps = False
            return None if self.complete else f"what came is no HTTP: {why}"
        much = self._overhead > _IDLE_BYTES and not self.complete
        return f"{self._overhead} bytes came without one of a body" if much else None

    def connection_lost(self, exc: Exception | None) -> None:
        """Note the end, which some answers have for theirs."""
        self._closed = True
        if self._asked and not self.complete and self._failure is None:
            if self._begun and self._until_end and exc is None:
                self._end()
            else:
                self._failure = Broken("the connection ended before the answer did")
                self._failure.__cause__ = exc
        self._keeps = False
        self._stop_timer()
        self._wake()

    def _check(self) -> None:
        """See how long the upstream has kept silent."""
        self._timer = None
        if self._transport is None:
            return
        now = self._loop.time()
        unsent = self._transport.get_write_buffer_size()
        if self._paused or unsent < self._unsent:
            self._unsent = unsent
            self._heard = now
        left = self._heard + self._patience - now
        if left > 0:
            self._timer = self._loop.call_later(left, self._check)
        else:
            self._fail(TimeoutError("the upstream kept silent"))

    def _fail(self, why: Exception) -> None:
        """End the request, and the connection with it."""
        self._failure = why
        self._keeps = False
        self.close()
        self._wake()

    def _end(self) -> None:
        """All of the answer is here."""
        self.complete = True
        self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --------------------------------------------------------------------------------- by the parser

    def on_message_begin(self) -> None:
        """Note what comes after the answer."""
        if self.complete:
            self._keeps = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take a field; trailers come here too, and are left out."""
        if self._begun:
            return
        if len(name) + len(value) > FIELD_BYTES or len(self.headers) == _FIELDS or b"\0" in value:
            raise Broken("a header field that cannot be taken")  # the parser makes an error of its own of it
        self.headers.append((name, value.rstrip(b" \t")))

    def on_headers_complete(self) -> None:
        """Find out how the body ends, unless it is an answer before the answer (1xx)."""
        if self._begun:
            self._keeps = False
            return
        status = self._parser.get_status_code()
        if status < 100 or status == 101:
            raise Broken(f"nobody asked for status {status}")
        if status < 200:
            self.headers = []
            return
        self.status = status
        self._begun = True
        self._keeps = self._parser.should_keep_alive()
        lengths: list[bytes] = []
        codings: list[bytes] = []
        for name, value in self.headers:
            lower = name.lower()
            if lower == b"content-length":
                lengths.append(value)
            elif lower == b"transfer-encoding":
                codings.append(value)
            elif lower == b"keep-alive" and (found := _TIMEOUT.search(value)) is not None:
                self.rests = int(found[1])
        if status in _BODILESS:
            self._keeps = self._keeps and not codings and all(length == b"0" for length in lengths)
            self._end()
        elif codings:
            self._until_end = not codings[-1].lower().endswith(b"chunked")
        else:
            self._until_end = not lengths

    def on_body(self, data: bytes) -> None:
        """Take a piece of the body."""
        if not self.complete:
            self._parts.append(data)
            self._size += len(data)
            self._overhead = 0

    def on_message_complete(self) -> None:
        """Note the end of the answer, or of what preceded it."""
        if self._begun and not self.complete:
            self._end()


def _parser(channel: Channel) -> httptools.HttpResponseParser:
    parser = httptools.HttpResponseParser(channel)
    # What servers get wrong without harm: a connection has one upstream, which can but deceive itself.
    parser.set_dangerous_leniencies(
        lenient_headers=True, lenient_optional_cr_before_lf=True, lenient_spaces_after_chunk_size=True
    )
    return parser

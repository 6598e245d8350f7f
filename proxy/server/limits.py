"""Limits on incoming bytes: the head of a request, its pace, connections, and the memory of bodies.

uvicorn's parser accepts heads of any length and waits without a limit. `LimitedProtocol` counts and times its input:

    request line over 16 KB                             414
    headers or trailers over 64 KB or 200 lines         431
    no complete head 10 s after its first byte          408; without any byte the connection is closed
    body slower than 1 kB/s over 30 s                   408
    too many connections from one address               503
    over 16 requests that wait behind another one       the connection is closed

Trailers are read and discarded.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
from collections import Counter
from collections.abc import Callable
from http import HTTPStatus
from math import inf
from pathlib import Path
from typing import Any, ClassVar, Final, Self

import orjson
from httptools import HttpParserUpgrade, HttpRequestParser
from msgspec import Struct
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from proxy.config import ServerSettings
from proxy.dialects.jsontext import excess_of
from proxy.errors import HeadersTooLarge, InvalidRequest, LineTooLong, Overloaded, PalimpsestError, TimedOut, TooLarge

MAX_LINE_BYTES: Final = 16_384
MAX_HEAD_BYTES: Final = 65_536
MAX_HEADERS: Final = 200
MAX_WAITING: Final = 16  # pipelined requests of one connection that wait for an earlier answer
HEAD_SECONDS: Final = 10.0
BODY_SECONDS: Final = 30.0
BODY_RATE: Final = 1_000  # bytes a second
LINGER_SECONDS: Final = 1.0
"""How long input from a refused client is still read. If it is still sending, a reset would destroy the answer."""
LAST_CALL_SECONDS: Final = 0.5
"""How long idle connections are still read when the server stops. A reset would lose a request that is on its way."""
BODY_FACTOR: Final = 10
"""Peak memory of a body, as a multiple of its size: its bytes, fields and messages, and the body sent upstream."""
ANSWERS_PART: Final = 4
"""Large answers may take this part (a quarter) of the budget in addition: bodies take less than they are charged."""
OBJECT_BYTES: Final = 3_072
"""Memory that is charged for each JSON object of a body in addition."""
PIECE_BYTES: Final = 1_048_576  # most bytes of an answer that are sent at once
_LARGE: Final = 33_554_432
"""Freed memory above this size is returned to the system. Less may stay with the allocator."""
_GIVE_BACK_SECONDS: Final = 0.5  # delay before memory is returned
_GIVE_BACK_PAUSE: Final = 5.0  # least seconds between two returns, since each scans the whole heap
_UNKNOWN_MEMORY: Final = 4 << 30  # assumed memory of a machine that does not report it
_SMALL: Final = 2 << 30  # memory for request bodies in a process on a small machine
_MOST_ROOM: Final = 16
_BODY_FIELDS: Final = frozenset({b"content-length", b"transfer-encoding"})
_FIELD_BYTES: Final = 4  # bytes of a header line besides name and value: colon, space, CR LF
_TOO_LARGE: Final = "The request body takes more memory than server.max_memory allows. Send less, or raise it."
_TOO_LARGE_STORED: Final = (
    "The request takes, with the stored messages that it needs, more memory than server.max_memory allows: "
    f"they count {BODY_FACTOR} times. Raise it, or send the newest messages of the history along with the new "
    "ones: then no others are read. GET /sessions/{id}/messages and /export read a session in portions."
)


def _trimmer() -> Callable[[int], Any] | None:
    """Return the C library's `malloc_trim`, or None if it has none."""
    try:
        return ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError, TypeError):  # not Linux, or another C library
        return None


_malloc_trim: Final = _trimmer()


class _PlainParser(HttpRequestParser):
    """Ignores `Upgrade` offers and stays with HTTP/1.1. Java's client, for example, offers `h2c` on new connections.

    httptools ends such a request after its head, so its body would be lost.
    """

    def __init__(self, protocol: LimitedProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does

    def feed_data(self, data: bytes) -> None:  # type: ignore[override] # pyright: ignore[reportIncompatibleMethodOverride]
        """Parse the data. A request that offers another protocol is parsed again without the offer."""
        parser: HttpRequestParser = self
        while True:
            try:
                return HttpRequestParser.feed_data(parser, data)
            except HttpParserUpgrade as offer:
                if not self._protocol.declines_upgrade():
                    raise
                data = self._protocol.plain_head() + data[offer.args[0] :]
                parser = self._protocol.parser = _PlainParser(self._protocol)  # the old one may be closed


class _UnchunkedCycle(RequestResponseCycle):
    """A response to HTTP/1.0, which has no chunked encoding: a body without a length ends with the connection."""

    _is_open = False  # whether the response has no length

    async def send(self, message: Any) -> None:
        """Send a part of the response, as uvicorn's cycle does."""
        if message["type"] == "http.response.start":
            self._is_open = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            self.chunked_encoding = False if self._is_open else None
        elif self._is_open:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's HTTP protocol with limits. Each server has a subclass: see `limited_http`."""

    most_per_address: ClassVar[int] = 0
    open_by_address: ClassVar[Counter[str]]
    head_seconds: ClassVar[float] = HEAD_SECONDS
    body_seconds: ClassVar[float] = BODY_SECONDS
    last_call_seconds: ClassVar[float] = LAST_CALL_SECONDS

    url = b""
    _in_head = True
    _extra = 0  # received bytes that are not body: of the head, later of chunk framing or trailers
    _body_bytes = 0  # received bytes of the body
    _body_seen = 0  # value of `_body_bytes` at the last check of the pace
    _timer: asyncio.TimerHandle | None = None
    _counted = ""  # the address under which this connection is counted
    _refusal: PalimpsestError | None = None
    _running: RequestResponseCycle | None = None  # the request being answered; `cycle` is the newest request
    _stops = False  # whether the server stops: the next request is the last one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _PlainParser(self)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Start waiting for a head, or refuse the connection."""
        super().connection_made(transport)
        if self.most_per_address and self.client is not None:
            address = self.client[0]
            if self.open_by_address[address] >= self.most_per_address:
                self._refuse(Overloaded("Too many connections from this address. Close some, and try again."))
                return
            self._counted = address
            self.open_by_address[address] += 1
        self._timer = self.loop.call_later(self.head_seconds, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        """Clean up after the connection."""
        self._stop_timer()
        if self._running is not None and self._running is not self.cycle:
            self._running.disconnected = True
            self._running.message_event.set()
        if self._counted:
            self.open_by_address[self._counted] -= 1
            if not self.open_by_address[self._counted]:
                del self.open_by_address[self._counted]
            self._counted = ""
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Feed the parser, then check the limits."""
        self._extra += len(data)
        super().data_received(data)
        if self.parser is None:  # pyright: ignore[reportUnnecessaryComparison] - the request was refused
            return
        if self._extra > MAX_HEAD_BYTES:
            self._refuse(self._over_limit())
        elif self._timer is None and (self._extra > 0 or not self._in_head):
            self._await_rest()

    def shutdown(self) -> None:
        """Close after the current answer. An idle connection is closed after `last_call_seconds` or one last answer."""
        if self._is_answering():
            super().shutdown()
        else:
            self._stops = True
            self.loop.call_later(self.last_call_seconds, super().shutdown)

    def on_response_complete(self) -> None:
        """Start the next waiting request, if any. While others still wait, no more input is read."""
        self._running = None
        super().on_response_complete()
        if self.pipeline and not self.transport.is_closing():
            self.flow.pause_reading()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def declines_upgrade(self) -> bool:
        """Whether the request offers another protocol and the offer is ignored.

        A GET that offers a WebSocket keeps its offer, because it is refused later with an explanation. If it has a
        body, the offer is ignored too, or the body would be parsed as a request.
        """
        if not self.parser.should_upgrade():
            return False
        offers = [value.lower() for name, value in self.headers if name == b"upgrade"]
        has_body = any(name in _BODY_FIELDS for name, _ in self.headers)
        # CONNECT has no `Upgrade` header; it is refused elsewhere.
        return offers != [] and (has_body or offers != [b"websocket"] or self.parser.get_method() != b"GET")

    def plain_head(self) -> bytes:
        """Return the head of the request without its `Upgrade` header."""
        version = self.parser.get_http_version().encode()
        fields = [name + b": " + value + b"\r\n" for name, value in self.headers if name != b"upgrade"]
        return b"%s %s HTTP/%s\r\n%s\r\n" % (self.parser.get_method(), self.url, version, b"".join(fields))

    def on_headers_complete(self) -> None:
        """Accept the request, unless its head is too large."""
        if self.declines_upgrade():
            return
        size = self._extra
        if size > MAX_HEAD_BYTES:  # part of it may be body: count the headers alone
            size = sum([len(name) + len(value) + _FIELD_BYTES for name, value in self.headers])
        if len(self.url) > MAX_LINE_BYTES or len(self.headers) > MAX_HEADERS or size > MAX_HEAD_BYTES:
            self._refusal = self._over_limit()
            raise self._refusal
        if len(self.pipeline) >= MAX_WAITING:
            self._refusal = Overloaded(f"More than {MAX_WAITING} requests wait on this connection. Await answers.")
            raise self._refusal
        self._stop_timer()
        self._in_head = False
        super().on_headers_complete()
        if self.parser.get_http_version() == "1.0":
            self.cycle.__class__ = _UnchunkedCycle
        if self._stops:
            self.cycle.keep_alive = False
        self.headers = []  # the cycle keeps the request's list; this new one collects trailers

    def on_body(self, body: bytes) -> None:
        """Count the bytes of the body."""
        self._extra -= len(body)
        self._body_bytes += len(body)
        super().on_body(body)

    def on_chunk_header(self) -> None:
        """Reset the count: each chunk may have framing."""
        self._extra = 0

    def on_message_complete(self) -> None:
        """Wait for the next head."""
        if self.declines_upgrade():
            return
        self._stop_timer()
        self._in_head = True
        self._extra = self._body_bytes = self._body_seen = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse a request that is malformed or over a limit."""
        self._refuse(self._refusal or InvalidRequest(msg))

    def _over_limit(self) -> PalimpsestError:
        if len(self.url) > MAX_LINE_BYTES:
            return LineTooLong(f"The request line is longer than {MAX_LINE_BYTES} bytes. Send a shorter URL.")
        return HeadersTooLarge(
            f"There are more than {MAX_HEADERS} headers, or they are longer than {MAX_HEAD_BYTES} bytes."
        )

    # ------------------------------------------------------------------------------------ time

    def _await_rest(self) -> None:
        """Start the timer for the rest of a request that has begun."""
        if self._in_head:
            self._timer = self.loop.call_later(self.head_seconds, self._head_is_late)
        else:
            self._body_seen = self._body_bytes
            self._timer = self.loop.call_later(self.body_seconds, self._check_pace)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _head_is_late(self) -> None:
        self._timer = None
        if self._is_answering():  # the next request has to wait for this one anyway
            self._await_rest()
        elif self._extra > 0:
            self._refuse(TimedOut(f"No complete request came within {self.head_seconds:g} s."))
        else:
            self.transport.close()

    def _check_pace(self) -> None:
        """Refuse a body that is too slow, unless the proxy itself holds it back."""
        self._timer = None
        came = self._body_bytes - self._body_seen
        held_back = self.flow.read_paused or self.cycle.waiting_for_100_continue
        if held_back or came >= BODY_RATE * self.body_seconds:
            self._await_rest()
        else:
            self._refuse(TimedOut(f"The body came at less than {BODY_RATE} bytes a second. Send it faster."))

    # --------------------------------------------------------------------------------- refusals

    def _is_answering(self) -> bool:
        """Whether a response is or may be under way, which an error response would corrupt."""
        cycle = self.cycle
        if cycle is None:  # pyright: ignore[reportUnnecessaryComparison] - before the first request
            return False
        if self._in_head:
            return not cycle.response_complete
        return cycle.response_started or len(self.pipeline) > 0

    def _refuse(self, error: PalimpsestError) -> None:
        """Send an error, unless a response is under way, and close the connection."""
        transport = self.transport
        answers = not self._is_answering()
        self._unset_keepalive_if_required()
        self.connection_lost(ConnectionAbortedError())
        if not answers or transport.is_closing():
            transport.close()
            return
        body = orjson.dumps(error.body())
        retry = "" if error.retry_after is None else f"retry-after: {error.retry_after}\r\n"
        head = (
            f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{retry}connection: close\r\n\r\n"
        )
        transport.write(head.encode() + body)
        transport.set_protocol(_Lingering(transport, self.loop))


class _Lingering(asyncio.Protocol):
    """Keeps reading for a moment, so that the client receives the answer, then closes."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._close = loop.call_later(LINGER_SECONDS, transport.close)
        if transport.can_write_eof():
            transport.write_eof()
        transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002 - asyncio's signature
        """Cancel the timer."""
        self._close.cancel()


def limited_http(settings: ServerSettings) -> type[asyncio.Protocol]:
    """Return the protocol class of one server, for uvicorn's `http`."""
    counted: dict[str, Any] = {"most_per_address": settings.max_connections_per_address, "open_by_address": Counter()}
    return type("LimitedProtocol", (LimitedProtocol,), counted)


# ------------------------------------------------------------------------------------------ memory


class MemoryBudget:
    """The memory that request bodies may take together in one process. A request without room is refused at once."""

    def __init__(self, settings: ServerSettings, give_back: Callable[[int], object] | None = _malloc_trim) -> None:
        """Create an unused budget. `give_back` is the C library's `malloc_trim`, or None if it has none."""
        self.most: Final = memory_of(settings)
        self.used = 0
        self._trim_heap: Final = give_back
        self._gives_back = False
        self._gave_back = -inf  # not 0, because the loop's clock is near 0 on a machine that has just booted

    def give_back(self) -> None:
        """Schedule the return of freed memory from the allocator to the system."""
        if not self._gives_back:
            self._gives_back = True
            loop = asyncio.get_running_loop()
            loop.call_at(max(loop.time() + _GIVE_BACK_SECONDS, self._gave_back + _GIVE_BACK_PAUSE), self._trim)

    def _trim(self) -> None:
        loop = asyncio.get_running_loop()
        self._gives_back, self._gave_back = False, loop.time()
        if self._trim_heap is not None:
            loop.run_in_executor(None, self._trim_heap, 0)


class Reservation:
    """The memory that one body takes from the budget. Use it as a `with` block around the work on the body."""

    __slots__ = ("_budget", "_taken")

    def __init__(self, budget: MemoryBudget) -> None:
        self._budget = budget
        self._taken = 0

    def add(self, size: int, objects: int = 0, refusal: str = _TOO_LARGE) -> None:
        """Reserve memory for `size` more bytes and `objects` JSON objects. Raises `Overloaded` or `TooLarge`."""
        asked = size * BODY_FACTOR + objects * OBJECT_BYTES
        budget = self._budget
        if self._taken + asked > budget.most:
            raise TooLarge(refusal)
        if budget.used + asked > budget.most:
            raise Overloaded("The proxy has no memory left for another request. Try again soon.")
        budget.used += asked
        self._taken += asked

    def add_stored(self, size: int, objects: int) -> None:
        """Reserve memory for stored messages that a request needs. Raises what `add` raises."""
        self.add(size, objects, _TOO_LARGE_STORED)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self._budget.used -= self._taken
        if self._taken > _LARGE:
            self._budget.give_back()


def forget_way(why: BaseException) -> None:
    """Drop the tracebacks of an error and its causes, and so the local variables that they hold.

    An error from a thread is part of a reference cycle, which would keep a body until the next full garbage collection.
    """
    seen: set[int] = set()
    error: BaseException | None = why
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


class BodyLimits(Struct, frozen=True, kw_only=True):
    """Limits on the JSON in a body, independent of its length in bytes."""

    messages: int
    values: int

    @classmethod
    def of(cls, settings: ServerSettings) -> Self:
        """Return the limits of these settings."""
        return cls(messages=settings.max_messages, values=settings.max_json_values)

    def check(self, body: bytes) -> None:
        """Raise `InvalidRequest` if a body holds too many messages or values."""
        excess = excess_of(body, self.values, self.messages)
        if excess == "items":
            raise InvalidRequest(
                f"The request has more than {self.messages} messages, or items in one field. "
                "Send fewer, or raise server.max_messages.",
                code="too_many_messages",
            )
        if excess == "values":
            raise InvalidRequest(
                f"The request holds more than {self.values} JSON values. Send less, or raise server.max_json_values.",
                code="too_many_values",
            )


def memory_of(settings: ServerSettings) -> int:
    """Return how many bytes of memory request bodies may take in each process."""
    return (settings.max_memory or machine_memory() // 2) // settings.workers


def room_of(settings: ServerSettings) -> int:
    """Return the factor for cache sizes of each process, relative to a small machine (1 to 16)."""
    return max(1, min(memory_of(settings) // _SMALL, _MOST_ROOM))


def machine_memory() -> int:
    """Return the memory of this machine in bytes, or of the container if that is less."""
    if not hasattr(os, "sysconf"):  # on Windows
        return _UNKNOWN_MEMORY
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            written = Path(name).read_text("ascii").strip()
        except OSError:
            continue
        if written.isdigit():
            total = min(total, int(written))
    return total

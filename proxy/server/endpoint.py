"""The endpoint of every dialect on raw ASGI: reads the request, passes it to the pipeline, watches the client.

This is the entry point; the main flow is in `pipeline/exchange.py`. `ClientConnection` is the client's side of a
request. The passthrough uses it too.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterable, AsyncIterator, Awaitable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import msgspec
from msgspec.structs import replace
from starlette.types import Receive, Scope, Send

from proxy.dialects import LONG_BODY, Dialect, dialect_named
from proxy.dialects.jsontext import RawFields, with_field, write
from proxy.errors import ClientLeft, Forbidden, PalimpsestError, Stopping, TooLarge
from proxy.pipeline import Background, ClientRequest, ExchangeHandler, compute, headers
from proxy.pipeline.context import Headers
from proxy.server.dependencies import Services
from proxy.server.limits import PIECE_BYTES, BodyLimits, Reservation, forget_way

if TYPE_CHECKING:  # it would import OpenTelemetry
    from proxy.telemetry.tracing import Tracing

_CHAT: Final = dialect_named("chat")
_REFUSED: Final = (headers.CONTEXT_KIND.encode(), b"refused")
"""The header of a request that was refused before reconciliation."""
UNWATCHED_SECONDS: Final = 0.1  # work may take this long before the proxy watches for the client to disconnect


class ClientConnection:
    """The client's side of one request: receives the body, sends the response, and notices a disconnect."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, dialect: Dialect = _CHAT) -> None:
        """Wrap one ASGI call of type `http`. Errors have the shape of `dialect`."""
        self.dialect = dialect
        self.headers: list[tuple[bytes, bytes]] = list(scope["headers"])
        self.first: dict[bytes, bytes] = dict(reversed(self.headers))
        """The first value of each header, by lower-case name."""
        self.method: str = scope["method"]
        self.query: bytes = scope["query_string"]
        self.gone = False  # whether the client has disconnected
        self.stopping = False  # whether the request is cancelled because the process stops
        self._receive = receive
        self._send = send
        self._started = False
        self._body_read = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None

    async def body(self, limit: int, memory: Reservation | None = None) -> bytes:
        """Return the request's body. Raises `TooLarge`, `Overloaded`, or `ClientLeft` if the client disconnects."""
        return await bounded(self.pieces(), self.first.get(b"content-length"), limit, memory)

    async def pieces(self) -> AsyncIterator[bytes]:
        """Yield the request's body as it arrives. Raises `ClientLeft` if the client disconnects."""
        more = True
        while more:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                self.gone = True
                raise ClientLeft("The client left before its request was complete.")
            if body := message.get("body", b""):
                yield body
            more = message.get("more_body", False)
        self._body_read.set()

    async def left(self) -> None:
        """Wait until the client disconnects. Run this concurrently with the work for the client."""
        await self._body_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True

    async def serve(self, work: Awaitable[None], background: Background, *, stops: bool = True) -> None:
        """Do the work for the client. If the client disconnects and `stops` is set, cancel the work.

        ASGI servers do not report a disconnect on their own before the response begins, so a task in `background` waits
        for it. The task is started only if the work takes longer than `UNWATCHED_SECONDS`.
        """
        loop = asyncio.get_running_loop()
        mine = asyncio.current_task(loop)
        if mine is None:
            raise RuntimeError("a connection is served by a task")
        unwatched = loop.call_later(UNWATCHED_SECONDS, self._watch, mine, background, stops)
        background.requests[mine] = self
        try:
            await work
        except asyncio.CancelledError:
            if not (self.stopping or (self.gone and stops)):
                raise
            mine.uncancel()
            if self.stopping:  # if the client reads nothing, its connection is closed soon
                self._stop_watching(unwatched)
                await self.fail(Stopping("The proxy stops. Try again."))
        finally:
            del background.requests[mine]
            self._stop_watching(unwatched)

    def _watch(self, work: asyncio.Task[Any], background: Background, stops: bool) -> None:
        self._watching = background.start(self._stop_when_left(work, stops=stops))

    def _stop_watching(self, unwatched: asyncio.TimerHandle) -> None:
        unwatched.cancel()
        if self._watching is not None:
            self._watching.cancel()
            self._watching = None  # breaks a reference cycle, which would wait for the garbage collector

    async def _stop_when_left(self, work: asyncio.Task[Any], *, stops: bool) -> None:
        await self.left()
        if stops:
            work.cancel()

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status and the headers."""
        self._started = True
        if not self.gone:
            await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def write(self, data: bytes) -> None:
        """Send a piece of the body."""
        if not self.gone:
            await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece of the body."""
        # Send a long answer in pieces, at the client's pace: bytes buffered in the transport are not accounted for.
        start = 0
        while len(data) - start > PIECE_BYTES:
            await self.write(data[start : start + PIECE_BYTES])
            start += PIECE_BYTES
        if not self.gone:
            await self._send({"type": "http.response.body", "body": data[start:], "more_body": False})

    async def fail(self, error: PalimpsestError, headers: Headers = ()) -> None:
        """Send an error: as a response, or as the last event if the response has begun."""
        api = self.dialect.replies
        body = api.error_body(error)
        if self._started:
            await self.end(api.error_event(body))
            return
        length = (b"content-length", b"%d" % len(body))
        if error.retry_after is not None:
            headers = [*headers, (b"retry-after", b"%d" % error.retry_after)]
        await self.start(error.status, [(b"content-type", b"application/json"), length, *headers])
        await self.end(body)


async def bounded(
    pieces: AsyncIterable[bytes], announced: bytes | None, limit: int, memory: Reservation | None = None
) -> bytes:
    """Return the pieces of a body joined. `announced` is its `Content-Length`.

    Stops reading and raises `TooLarge` over `limit`, or what `Reservation.add` raises if `memory` has no room.
    """
    parts: list[bytes] = []
    size = int(announced) if announced is not None and announced.isdigit() else 0
    if size <= limit:
        size = 0
        async for part in pieces:
            parts.append(part)
            size += len(part)
            if size > limit:
                break
            if memory is not None:
                memory.add(len(part))
        else:
            return b"".join(parts)
    raise TooLarge(f"The request body is larger than {limit} bytes. Send less, or raise server.max_body_bytes.")


def _with_model(body: bytes, model: str) -> bytes:
    """Return the body with `model` added if it names none. A body that is not an object is left to the parser."""
    try:
        fields = RawFields(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    return body if "model" in fields or not fields else with_field(body, fields, "model", write(model))


class DialectEndpoint:
    """Serves completion requests in every dialect. One per process."""

    def __init__(self, services: Services, handler: ExchangeHandler, tracing: Tracing | None = None) -> None:
        server = services.settings.server
        self._services = services
        self._handler = handler
        self._tracing = tracing
        self._background = services.app.background
        self._cancels = services.settings.sessions.on_disconnect == "cancel"
        self._limits = BodyLimits.of(server)
        self._countable = min(server.max_messages, server.max_json_values, LONG_BODY - 1)

    async def serve(self, connection: ClientConnection, model: str = "") -> None:
        """Answer one request. `model` is the model that its path names, or empty."""
        try:
            with Reservation(self._services.budget) as memory:
                call = await self._call(connection, memory)
                if model:
                    call = replace(call, body=_with_model(call.body, model))
                if self._tracing is not None:
                    await self._traced(call, connection, self._tracing)
                    return
                await connection.serve(self._handler.answer(call, connection), self._background, stops=self._cancels)
        except ClientLeft as why:
            forget_way(why)
        except PalimpsestError as why:
            forget_way(why)
            await connection.fail(why, [_REFUSED])

    async def _traced(self, call: ClientRequest, connection: ClientConnection, tracing: Tracing) -> None:
        """Answer a request inside its own tracing span."""
        trace = tracing.begin(call.headers)
        connection.write = trace.noting(connection.write)  # type: ignore[method-assign,assignment]
        call = replace(call, headers=trace.headers, trace=trace)
        try:
            await connection.serve(self._handler.answer(call, connection), self._background, stops=self._cancels)
        except BaseException as why:
            trace.end(why.code if isinstance(why, PalimpsestError) else type(why).__name__)
            raise
        trace.end()

    async def _call(self, connection: ClientConnection, memory: Reservation) -> ClientRequest:
        services = self._services
        caller = services.authenticator.admit(connection.first, connection.method, connection.headers)
        if caller.admin:
            raise Forbidden("The admin key owns no sessions. Ask models with a tenant's key.")
        services.authenticator.check_content_type(connection.first)
        if services.budgets.in_force:
            await services.budgets.admit(caller)
        body = await connection.body(services.settings.server.max_body_bytes, memory)
        if b"content-encoding" in connection.first:
            body = await self._decoded(connection, body, memory)
        short = len(body) <= self._countable  # too short to hold too many values or messages
        if short:
            memory.add(0, body.count(b"{"))
        return ClientRequest(
            dialect=connection.dialect,
            tenant=caller.tenant,
            key=caller.key,
            headers=connection.headers,
            query=connection.query,
            body=body,
            admit=None if short else partial(self._admit, body, memory),
            charge=memory.add_stored,
        )

    async def _decoded(self, connection: ClientConnection, body: bytes, memory: Reservation) -> bytes:
        """Return the body without its encoding, and forget that it had one: the upstream gets it plain."""
        encoding = connection.first[b"content-encoding"].strip().lower()
        connection.headers = [header for header in connection.headers if header[0] != b"content-encoding"]
        if encoding in {b"", b"identity"}:
            return body
        from proxy.server.encoding import decoded  # noqa: PLC0415 - few clients encode

        return await bounded(decoded(body, encoding), None, self._services.settings.server.max_body_bytes, memory)

    async def _admit(self, body: bytes, memory: Reservation, messages: int, size: int) -> None:
        """Refuse a body that holds too many values or messages; raises what `check` and `Reservation.add` raise.

        The first `size` bytes, which hold `messages` messages, were admitted before.
        """
        limits = self._limits
        if len(body) > limits.values or messages + len(body) - size > limits.messages:  # else it is too short for that
            await compute(len(body), limits.check, body)
        memory.add(0, body.count(b"{", size))

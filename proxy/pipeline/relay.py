"""Relays the upstream's answer to the client, and reads it alongside.

The client gets what the upstream sent, event by event, byte for byte. Reading never harms relaying: an answer that
cannot be understood is relayed anyway. Only the end (the last event, the close, the JSON body) is held back, until the
reply is durable.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from typing import Final

import anyio
from msgspec import Struct

from proxy.dialects import Dialect, JsonObject, Message, Replies, StreamReader
from proxy.dialects.sse import Event, EventDecoder
from proxy.errors import PalimpsestError, UpstreamError
from proxy.pipeline.background import OFF_LOOP_BYTES, compute
from proxy.pipeline.context import Client, Headers
from proxy.pipeline.headers import to_client
from proxy.store import Status
from proxy.trimming import Hidden
from proxy.upstream import HELD_BYTES, MAX_REPLY_VALUES, Answer, check_values, too_large

_LOG: Final = logging.getLogger("palimpsest.relay")

AFTER_DONE_SECONDS: Final = 1.0
"""How long the upstream may take to close the connection after the last event."""
MAX_EVENT_BYTES: Final = 16_777_216  # limit for one event of a stream
_LARGE_EVENT: Final = 1_048_576  # memory is not accounted for events up to this size, nor for bytes after the last one
_FRAME: Final = 4  # an event is usually at least this many times as long as what it adds to the reply


class OwnCall(Struct, frozen=True, kw_only=True):
    """One call of one of the proxy's own tools, for the receipt."""

    tool: str
    ms: float  # milliseconds that the answer took
    chars: int  # characters of the answer
    round: int  # number of the upstream's answer that held the call, from 1
    error: str | None = None  # why the model did not get the answer; None if it did


class Answered(Struct, kw_only=True):
    """The outcome of asking the upstream: the third stage of an exchange."""

    status: Status
    replies: tuple[tuple[Message, bool], ...] = ()  # (message, broke off) for each choice
    finish_reasons: tuple[str | None, ...] = ()
    usage: JsonObject | None = None
    model: str | None = None  # the model's name in the answer
    error: str | None = None  # what went wrong, in words; None if nothing did
    upstream_status: int | None = None
    hidden: Hidden | None = None
    """The messages of the (only) reply that the client was not shown; its `tokens` are not counted yet."""
    own_calls: tuple[OwnCall, ...] = ()  # all calls that the proxy answered itself, in order
    asked_again: bool = False  # whether the upstream was asked again for the rest of the reply
    first_usage: JsonObject | None = None
    """If the upstream was asked again: the usage of its first answer, which belongs to the plan."""
    ids: tuple[str, ...] = ()  # ids under which the provider keeps the reply and parts of it
    kept: bool = True  # whether the provider keeps the reply
    later: bool = False  # whether the provider makes the reply in the background, to be fetched later


Settle = Callable[[Answered], Awaitable[None]]
EVENTS: Final = b"text/event-stream"
_DECODED: Final = frozenset({b"content-encoding"})  # headers to drop if a body is relayed decoded
HeadersOf = Callable[[Answer], Headers]  # returns the response headers for the client
_NO_REPLY: Final = "the upstream's answer holds no reply"
_TOO_LONG: Final = "the stream was too long to be stored whole: the client got the rest of it all the same"


def headers_of_answer(answer: Answer) -> list[tuple[bytes, bytes]]:
    """Return the headers of an answer that go to the client. `content-encoding` is dropped if the body is decoded."""
    decoded = answer.encoding and answer.readable
    return to_client(answer.headers, extra_drop=_DECODED if decoded else ())


async def relay_whole(dialect: Dialect, answer: Answer, client: Client, headers: HeadersOf, settle: Settle) -> None:
    """Relay an answer without a stream, or an error, unchanged. It is stored first."""
    body = await answer.read()
    work = (dialect, body, answer.status)
    await settle(await compute(len(body), read_answer, *work) if len(body) > OFF_LOOP_BYTES else read_answer(*work))
    await send_whole(client, answer.status, headers(answer), body)  # made after settling: they report how it went


async def send_whole(client: Client, status: int, headers: Headers, body: bytes) -> None:
    """Send a response that is not a stream."""
    await client.start(status, [*headers, (b"content-length", b"%d" % len(body))])
    await client.end(body)


def read_answer(dialect: Dialect, body: bytes, status: int) -> Answered:
    """Read a JSON answer. An error, and an answer that cannot be understood, is a failure with its reason."""
    answered = Answered(status=Status.FAILED, upstream_status=status)
    if not 200 <= status < 300:
        answered.error = dialect.replies.error_words(body) or f"HTTP {status}"
        return answered
    try:
        found = dialect.replies.read(body)
    except ValueError:
        answered.error = "the upstream's answer is not JSON"
        return answered
    except Exception as why:  # noqa: BLE001 - whatever it is, the client gets the answer
        _LOG.error("an answer of the upstream could not be read (%s: %s)", type(why).__name__, why)
        answered.error = f"the proxy could not read the answer: {type(why).__name__}"
        return answered
    if found.messages or found.later:
        return _answered(found, [(message, False) for message in found.messages], status)
    answered.status = Status.CANCELLED if found.cancelled else Status.FAILED
    answered.error, answered.usage = found.error or _NO_REPLY, found.usage
    answered.ids, answered.kept = found.ids, found.kept
    return answered


def _answered(found: Replies, replies: Iterable[tuple[Message, bool]], status: int) -> Answered:
    """Return the outcome of an answer with these replies, as complete."""
    return Answered(
        status=Status.COMPLETE,
        replies=tuple(replies),
        finish_reasons=found.finish_reasons,
        usage=found.usage,
        model=found.model,
        upstream_status=status,
        ids=found.ids,
        kept=found.kept,
        later=found.later,
    )


def _before_error(event: Event, shown: bytes) -> bytes:
    """Return what to show of a last event before an error event. Without its end it would swallow the error event.

    An event that lacks only its end was read as part of the reply, so it is shown, and its end is added.
    """
    if event.complete or not shown:
        return shown
    return shown + b"\n\n" if event.value is not None else b""


class StreamRelay:
    """Relays one stream of events to the client. Used once.

    `VirtualStream` overrides some of its steps.
    """

    def __init__(
        self, dialect: Dialect, answer: Answer, client: Client, headers: HeadersOf, *, hides_usage: bool
    ) -> None:
        """Relay `answer` to `client`. `hides_usage` holds back the usage chunk that only the proxy asked for."""
        self._api = dialect.replies
        self._answer = answer
        self._client = client
        self._headers = headers
        self._hides_usage = hides_usage
        self._events = EventDecoder(self._api.ends)
        self._reply: StreamReader = self._api.reader()
        self._done = False
        self._tail = b""  # the last event, and the bytes after it
        self._failure: PalimpsestError | None = None  # why the stream broke off
        self._size = 0  # bytes received
        self._finish_reasons: tuple[str | None, ...] = ()  # set by `answered`
        self._unread = False  # whether the rest is relayed unread, because the reply is too long to be stored

    async def run(self, settle: Settle) -> None:
        """Relay until the stream ends or breaks off. Settle before the client sees its end.

        If this is cancelled, it has not settled. `ending` then returns what had arrived.
        """
        await self._client.start(self._answer.status, self._headers(self._answer))
        last = await self._relay()
        await settle(await self.ending())
        await self._close(last)

    async def ending(self, *, left: bool = False) -> Answered:
        """Return `answered`, computed in a thread if the reply is long."""
        return await compute(self._size // _FRAME, self.answered, left=left)

    def answered(self, *, left: bool = False) -> Answered:
        """Return what has arrived so far. `left` says that the client did not wait for more.

        A choice is complete if it has a `finish_reason`, or if the stream ended properly. A choice that broke off is
        kept only if it has text or a complete call, which the client may have answered.
        """
        reply, ended, found = self._reply, self._ended and not self._unread, self._reply.replies
        self._finish_reasons = found.finish_reasons
        kept: list[tuple[Message, bool]] = []
        for message, finish_reason in zip(found.messages, found.finish_reasons, strict=True):
            partial = not ended and finish_reason is None
            if not partial or message.text or message.without_unfinished_calls().calls:
                kept.append((message, partial))
        answered = _answered(found, kept, self._answer.status)
        if not kept and found.later:  # the same as for a reply requested without a stream
            return answered
        if not kept or not (ended or (all(found.finish_reasons) and not reply.failed)):
            answered.error = self._reason(found.error, left=left)
            answered.status = Status.PARTIAL if kept else Status.CANCELLED if left else Status.FAILED
        return answered

    @property
    def _ended(self) -> bool:
        """Whether the stream ended properly."""
        return self._done and not self._reply.failed

    async def _relay(self) -> list[tuple[Event, bytes]]:
        """Relay until the last event or the close. Return events without an end, each with what is shown of it."""
        plain, held = self._answer.readable, 0  # bytes for which memory was accounted
        try:
            while not self._done and (chunk := await self._answer.chunk(plain=plain)):
                shown: list[bytes] = []
                self._size += len(chunk)
                # The event that ends next may hold too many values only if it is long: a value takes at least a byte.
                large = self._events.waiting + len(chunk) > MAX_REPLY_VALUES
                for event in self._events.feed(chunk):
                    if large:
                        await compute(len(event.raw), check_values, event.raw)
                        large = False
                    if self._done:
                        self._tail += event.raw
                    elif event.is_done:
                        shown.append(self._read_end(event))
                        self._done, self._tail = True, event.raw
                    else:
                        shown.append(self._read(event))
                await self._send(b"".join(shown))
                takes = self._size > held + HELD_BYTES or (not held and self._events.waiting > _LARGE_EVENT)
                if takes and not (self._unread or self._done):
                    held += HELD_BYTES
                    if not self._answer.hold_stream():
                        self._stop_reading()
                longest = _LARGE_EVENT if self._unread else MAX_EVENT_BYTES
                if self._events.waiting > longest:
                    self._events = EventDecoder(self._api.ends)  # drops the unfinished event
                    raise too_large(f"has an event longer than {longest} bytes")
        except UpstreamError as why:
            self._failure = why
            why.__traceback__ = None  # breaks a reference cycle: the traceback holds this object
        return [] if self._done else [(event, self._read_last(event)) for event in self._events.flush()]

    def _stop_reading(self) -> None:
        """Relay the rest unread: the client paid for it, and there is no memory to store more."""
        self._unread = True

    def _read(self, event: Event) -> bytes:
        """Read an event. Return what the client is shown of it."""
        if self._unread:
            return event.raw
        return self._tried(self._take, event, event.raw)

    @staticmethod
    def _tried(take: Callable[[Event], bytes], event: Event, otherwise: bytes) -> bytes:
        """Return `take(event)`, or `otherwise` if it raises, so that a bug in reading never stops the stream."""
        try:
            return take(event)
        except Exception as why:  # noqa: BLE001 - whatever it is, the client gets the event
            _LOG.error("an event of the upstream could not be read (%s: %s)", type(why).__name__, why)
            return otherwise

    def _take(self, event: Event) -> bytes:
        """Add an event to the reply. Return what the client is shown of it."""
        return b"" if self._reply.take(event) and self._hides_usage else event.raw

    def _read_last(self, event: Event) -> bytes:
        """Read an event that the close cut off. Return what the client is shown of it."""
        return self._read(event)

    def _read_end(self, event: Event) -> bytes:
        """Read the event that ends the stream. Return what the client is shown before it."""
        self._read(event)
        return b""

    async def _send(self, shown: bytes, *, flush: bool = False) -> None:  # noqa: ARG002 - nothing waits here
        if shown:
            await self._client.write(shown)

    async def _end(self, shown: bytes) -> None:
        await self._client.end(shown)

    async def _close(self, last: Sequence[tuple[Event, bytes]]) -> None:
        """Send the last event and the bytes after it. If the stream broke off, send what is left and an error event."""
        if self._done:
            self._tail += b"".join([event.raw for event in self._events.flush()])
            if not self._answer.ended:
                await self._send(self._tail, flush=True)
                self._tail = b""
            await self._end(self._tail + await self._rest())
            return
        error = self._closing_error()
        await self._end(b"".join([_before_error(*each) if error else each[1] for each in last]) + error)

    async def _rest(self) -> bytes:
        """Return the bytes after the last event. Reading to the end lets the connection be reused."""
        rest = b""
        if self._answer.ended:  # the usual case
            return rest
        with anyio.move_on_after(AFTER_DONE_SECONDS):
            try:
                while len(rest) < _LARGE_EVENT and (chunk := await self._answer.chunk(plain=self._answer.readable)):
                    rest += chunk
            except UpstreamError:
                pass
        return rest

    def _closing_error(self) -> bytes:
        """Return the error event that ends a broken stream.

        It is empty if every choice was complete, if the upstream sent an error itself, or if the stream was not read.
        """
        reasons = self._finish_reasons
        if (reasons and all(reasons)) or self._reply.failed or not self._answer.readable:
            return b""
        if self._unread and self._failure is None:  # it may have ended well
            return b""
        why = self._failure or UpstreamError(
            "The upstream closed the stream before the reply was complete. Try again.", code="upstream_incomplete"
        )
        return self._api.error_event(self._api.error_body(why))

    def _reason(self, error: str | None, *, left: bool) -> str:
        """Return in words why there is no complete reply. `error` is what the upstream reported."""
        if self._reply.failed:
            return error or "the upstream reported an error"
        if left:
            return "the client left"
        if self._failure is not None:
            return self._failure.message
        if self._unread:
            return _TOO_LONG
        return _NO_REPLY if self._done else "the upstream closed the stream before the reply was complete"

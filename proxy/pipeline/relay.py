"""The upstream's answer on its way to the client, and what is read of it beside.

What the client gets is what upstream sent, event by event, byte for byte. Reading never harms
relaying: an answer that cannot be understood is passed on all the same. The one thing held back
is the end (`[DONE]`, the close, the JSON body), until the reply is durable.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

import anyio
import orjson
from msgspec import Struct

from proxy.dialects import JsonObject, Message
from proxy.dialects.chat.completion import CompletionAccumulator, ReplyChoice, read_completion
from proxy.dialects.chat.message import ChatMessage
from proxy.dialects.jsontext import is_object, mended, read, write
from proxy.dialects.sse import Event, EventDecoder
from proxy.errors import UpstreamError
from proxy.pipeline.context import Client, Headers
from proxy.store import Status
from proxy.trimming import Hidden
from proxy.upstream import Answer

AFTER_DONE_SECONDS: Final = 1.0
"""How long an upstream may take to close after `[DONE]`; the client has everything by then."""


class OwnCall(Struct, frozen=True, kw_only=True):
    """One call of a tool of the proxy's own, for the receipt."""

    tool: str
    ms: float
    """Milliseconds that the answer took."""
    chars: int
    """Characters of the answer."""
    round: int
    """Upstream's answer that held the call, from 1 on."""
    error: str | None = None
    """Why the model was not given the answer; None where it was."""


class Answered(Struct, kw_only=True):
    """What came of asking upstream: the third stage of an exchange."""

    status: Status
    replies: tuple[tuple[Message, bool], ...] = ()
    """(message, whether it broke off), one for each choice."""
    finish_reasons: tuple[str | None, ...] = ()
    usage: JsonObject | None = None
    model: str | None = None
    """The model that answered, as it calls itself."""
    error: str | None = None
    """What went wrong, in words; None where nothing did."""
    upstream_status: int | None = None
    hidden: Hidden | None = None
    """What belongs to the (only) reply and was not shown to the client; its `tokens` are not counted yet."""
    own_calls: tuple[OwnCall, ...] = ()
    """The calls that the proxy answered itself, in order; kept or not."""
    asked_again: bool = False
    """Whether upstream was asked again for the rest of the reply."""
    first_usage: JsonObject | None = None
    """Where upstream was asked again: the usage of its first answer, which is that of the plan."""


Settle = Callable[[Answered], Awaitable[None]]


async def relay_refusal(answer: Answer, client: Client, headers: Headers, body: bytes, settle: Settle) -> None:
    """Pass on an answer that is an error: status, headers and body as they are."""
    await settle(
        Answered(status=Status.FAILED, error=error_text(body) or f"HTTP {answer.status}", upstream_status=answer.status)
    )
    await client.start(answer.status, [*headers, (b"content-length", b"%d" % len(body))])
    await client.end(body)


async def relay_json(answer: Answer, client: Client, headers: Headers, settle: Settle) -> None:
    """Pass on an answer that comes in one piece, once what it says is stored.

    Raises:
        UpstreamError: the answer did not come whole; nothing was sent to the client.
    """
    body = await answer.read()
    await settle(read_answer(body, answer.status))
    await client.start(answer.status, [*headers, (b"content-length", b"%d" % len(body))])
    await client.end(body)


def read_answer(body: bytes, status: int) -> Answered:
    """Return what a JSON answer says; one that cannot be understood is a failure with its reason."""
    try:
        completion = read_completion(read(body))
    except ValueError:
        return Answered(status=Status.FAILED, error="the upstream's answer is not JSON", upstream_status=status)
    replies = tuple([(as_stored(choice.message), False) for choice in completion.choices])
    if not replies:
        error = words_of(completion.error) or "the upstream's answer holds no reply"
        return Answered(status=Status.FAILED, error=error, usage=completion.usage, upstream_status=status)
    return Answered(
        status=Status.COMPLETE,
        replies=replies,
        finish_reasons=tuple([choice.finish_reason for choice in completion.choices]),
        usage=completion.usage,
        model=completion.model,
        upstream_status=status,
    )


class StreamRelay:
    """One stream of events on its way to the client. Used once."""

    def __init__(self, answer: Answer, client: Client, *, hides_usage: bool) -> None:
        """Relay `answer` to `client`; `hides_usage` keeps the chunk back that only the proxy asked for."""
        self._answer = answer
        self._plain = answer.readable
        self._client = client
        self._hides_usage = hides_usage
        self._events = EventDecoder()
        self._reply = CompletionAccumulator()
        self._done = False
        self._tail = b""
        """`[DONE]`, and what came with it."""
        self._failure: UpstreamError | None = None

    async def run(self, headers: Headers, settle: Settle) -> None:
        """Relay until the stream ends, one way or another; settle before the client sees its end.

        Cancelled, it has not settled: `answered` says what had come by then.
        """
        await self._client.start(self._answer.status, headers)
        try:
            while chunk := await self._answer.chunk(plain=self._plain):
                await self._pass_on(chunk)
                if self._done:
                    break
        except UpstreamError as why:
            self._failure = why
        if self._done:
            await settle(self.answered())
            await self._end()
            return
        last = self._events.flush()
        rest = self._read(last)
        await settle(self.answered())
        error = self._closing_error()
        if error:  # half an event before it would swallow it
            rest = b"".join(event.raw for event in last if event.complete)
        await self._client.end(rest + error)

    def answered(self, *, left: bool = False) -> Answered:
        """Return what has come so far; `left` says that the client did not wait for more."""
        ended = self._done and self._reply.error is None
        choices = self._reply.choices()
        kept = worth_keeping(choices, ended=ended)
        answered = Answered(
            status=Status.COMPLETE,
            replies=kept,
            finish_reasons=tuple([choice.finish_reason for choice in choices]),
            usage=self._reply.usage,
            model=self._reply.model,
            upstream_status=self._answer.status,
        )
        whole = ended or (self._reply.finished and self._reply.error is None)
        if not whole or not kept:
            answered.error = self._reason(left=left)
            answered.status = Status.PARTIAL if kept else Status.CANCELLED if left else Status.FAILED
        return answered

    async def _pass_on(self, chunk: bytes) -> None:
        """Relay the events that `chunk` completes, up to `[DONE]`."""
        events = self._events.feed(chunk)
        done = next((place for place, event in enumerate(events) if event.is_done), None)
        ready = self._read(events if done is None else events[:done])
        if ready:
            await self._client.write(ready)
        if done is not None:
            self._tail = b"".join([event.raw for event in events[done:]])
            self._done = True

    def _read(self, events: Sequence[Event]) -> bytes:
        """Read these events and return the bytes of those to be relayed."""
        kept: list[bytes] = []
        for event in events:
            if event.data is not None:
                try:
                    chunk = read(event.data)
                except ValueError:
                    pass  # whatever it is, it is not ours to judge
                else:
                    if self._reply.add(chunk) and self._hides_usage:
                        continue
            kept.append(event.raw)
        return b"".join(kept)

    async def _end(self) -> None:
        """Send `[DONE]`, and what follows it: nothing as a rule."""
        self._tail += b"".join([event.raw for event in self._events.flush()])
        if not self._answer.ended:
            await self._client.write(self._tail)
            self._tail = await rest_after_done(self._answer, plain=self._plain)
        await self._client.end(self._tail)

    def _closing_error(self) -> bytes:
        """Return the error event that ends a broken stream; nothing where upstream sent one itself."""
        if self._reply.finished or self._reply.error is not None or not self._answer.readable:
            return b""
        return error_event((self._failure or broken_off()).body())

    def _reason(self, *, left: bool) -> str:
        failure = self._failure.message if self._failure is not None else None
        return why_broken(self._reply.error, failure, left=left, done=self._done)


async def rest_after_done(answer: Answer, *, plain: bool) -> bytes:
    """Return what comes between `[DONE]` and the close: nothing, as a rule.

    A connection that was read to its end is used again. By then the reply is whole and settled.
    """
    rest = b""
    with anyio.move_on_after(AFTER_DONE_SECONDS):
        try:
            while chunk := await answer.chunk(plain=plain):
                rest += chunk
        except UpstreamError:
            pass
    return rest


def worth_keeping(choices: Sequence[ReplyChoice], *, ended: bool) -> tuple[tuple[Message, bool], ...]:
    """Return the replies of a stream that are stored, each with whether it broke off.

    A choice is whole if it has a `finish_reason`, or if the stream `ended` as it should; of one that broke
    off only text is worth keeping.
    """
    return tuple(
        [
            (as_stored(choice.message), broken)
            for choice in choices
            for broken in [not ended and choice.finish_reason is None]
            if not broken or choice.message.get("content")
        ]
    )


def why_broken(error: JsonObject | None, failure: str | None, *, left: bool, done: bool) -> str:
    """Return in words why a stream gave no whole reply.

    Args:
        error: what upstream reported in the stream.
        failure: what became of the connection.
        left: whether the client did not wait.
        done: whether the stream came to its end.
    """
    if error is not None:
        return words_of(error) or "the upstream reported an error"
    if left:
        return "the client left"
    if failure is not None:
        return failure
    if done:
        return "the upstream's answer holds no reply"
    return "the upstream closed the stream before the reply was complete"


def broken_off() -> UpstreamError:
    """Return what is said of a stream that ended too early, and of which nothing else is known."""
    return UpstreamError(
        "The upstream closed the stream before the reply was complete. Try again.", code="upstream_incomplete"
    )


def error_event(body: JsonObject) -> bytes:
    """Return the event that ends a broken stream; `body` is an error's, in OpenAI's shape."""
    return b"data: " + write(body) + b"\n\n"


def as_stored(message: JsonObject) -> Message:
    """Return a reply as it is stored: what no parser would take again is mended."""
    made = ChatMessage.of(message)
    try:
        made.data  # noqa: B018 - it is parsed here, or never
    except orjson.JSONDecodeError:
        return ChatMessage.of(mended(message))
    return made


def words_of(error: Any) -> str | None:
    """Return the words of an error object, as providers put them; None where there is none."""
    if is_object(error):
        message = error.get("message")
        return message if isinstance(message, str) else write(error).decode()
    return error if isinstance(error, str) else None


def error_text(body: bytes) -> str | None:
    """Return the words of an error answer; None where it is no JSON object with an `error`."""
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return None
    return words_of(data.get("error")) if is_object(data) else None

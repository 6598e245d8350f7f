"""A reply of a model that may call tools of the proxy's own: `recall_context`, `compress_chat_history`.

It is relayed like any other, event by event, as long as it calls nothing of the proxy's. A reply that calls
only the proxy's tools is answered unseen: upstream is asked again with the results, and what comes then
goes on with the same reply. A reply that calls the client's tools too goes to the client with the client's
calls alone; those of the proxy are answered before it is stored.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any, Final

import anyio

from proxy.dialects import JsonObject, Message
from proxy.dialects.sse import Event, EventDecoder
from proxy.errors import PalimpsestError, UpstreamError
from proxy.pipeline.context import Client
from proxy.pipeline.own_tools import Rounds
from proxy.pipeline.relay import Answered, HeadersOf, Settle, StreamRelay, read_answer, send_whole
from proxy.store import Status
from proxy.upstream import Answer, too_large

_LOG: Final = logging.getLogger("palimpsest.relay")

INTERVAL: Final = 3.0
"""Seconds of silence after which a client is told that the line is up, where the proxy causes the silence."""
COMMENT: Final = b": working\n\n"

StartTask = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]  # runs work in a task: `Background.start`


def virtual_relay(
    answer: Answer,
    client: Client,
    headers: HeadersOf,
    rounds: Rounds,
    *,
    stream: bool,
    hides_usage: bool,
    start: StartTask,
    interval: float = INTERVAL,
) -> StreamRelay | WholeRelay:
    """Return what relays `answer`, and those that follow it, to `client`.

    `hides_usage` keeps the chunk back that only the proxy asked for. `start` runs the task that sends the
    client a comment after `interval` seconds of silence.
    """
    if not stream:
        return WholeRelay(answer, client, headers, rounds)
    if not answer.readable:  # in an encoding that nobody here reads: whatever it calls, it goes to the client
        return StreamRelay(rounds.dialect, answer, client, headers, hides_usage=hides_usage)
    return VirtualStream(answer, client, headers, rounds, hides_usage=hides_usage, interval=interval, start=start)


class WholeRelay:
    """A reply in one piece, made of answers that each come in one piece. Used once."""

    def __init__(self, answer: Answer, client: Client, headers: HeadersOf, rounds: Rounds) -> None:
        """Relay `answer` and those that follow it, as `StreamRelay` does."""
        self._answer = self._first = answer
        self._client = client
        self._headers = headers
        self._rounds = rounds
        self._filter = rounds.dialect.replies.body_filter(rounds.names)
        self._first_usage: JsonObject | None = None

    async def run(self, settle: Settle) -> None:
        """Relay the reply once it is settled.

        Raises a `PalimpsestError` where there is none: it was settled as failed, and the client was told nothing.
        """
        try:
            answered, body = await self._reply()
        except PalimpsestError as why:
            status = self._answer.status
            await settle(self._with_rounds(Answered(status=Status.FAILED, error=why.message, upstream_status=status)))
            raise
        except Exception as why:  # noqa: BLE001 - whatever it is, the client gets what upstream answered last
            _LOG.error("an answer with calls could not be read (%s: %s)", type(why).__name__, why)
            body = await self._answer.read()
            answered = read_answer(self._rounds.dialect, body, self._answer.status)
        finally:
            if self._answer is not self._first:
                await self._answer.aclose()
        await settle(answered)
        await send_whole(self._client, self._answer.status, self._headers(self._answer), body)

    def answered(self, *, left: bool = False) -> Answered:
        """Return what has come so far: no reply."""
        why = "the client left" if left else "there is no reply"
        return self._with_rounds(Answered(status=Status.CANCELLED if left else Status.FAILED, error=why))

    async def ending(self, *, left: bool = False) -> Answered:
        """Return `answered`, as `StreamRelay` does."""
        return self.answered(left=left)

    async def _reply(self) -> tuple[Answered, bytes]:
        """Return what came of it, and the body that the client gets."""
        found, rounds = self._filter, self._rounds
        while True:
            body = await self._answer.read()
            if not 200 <= self._answer.status < 300:
                return self._with_rounds(read_answer(rounds.dialect, body, self._answer.status)), body
            shown = found.take(body)
            calls = found.calls
            if not found.again:
                await rounds.answer_last(calls)
                return self._read(shown), shown
            if not len(rounds):
                self._first_usage = found.usage
            await rounds.answer(calls)
            answer = await rounds.ask()
            if answer is None:
                shown = found.give_up()
                return self._read(shown), shown
            found.next(may_ask=rounds.may_ask)
            before, self._answer = self._answer, answer
            await before.discard()

    def _read(self, body: bytes) -> Answered:
        """Return what the client is shown, and what belongs to it and is not shown."""
        answered = self._with_rounds(read_answer(self._rounds.dialect, body, self._answer.status))
        if len(answered.replies) == 1:
            answered.hidden = self._rounds.hidden(answered.replies[0][0], self._filter.last, partial=False)
        return answered

    def _with_rounds(self, answered: Answered) -> Answered:
        """Return the answered with what is known of all rounds."""
        answered.usage, answered.first_usage = self._filter.usage, self._first_usage
        self._rounds.note(answered)
        return answered


class VirtualStream(StreamRelay):
    """A reply as events, made of answers that each come as events. Used once.

    Text goes to the client as it comes. What says nothing is held back a little: as long as the client was
    told nothing, the status may still change.
    """

    def __init__(
        self,
        answer: Answer,
        client: Client,
        headers: HeadersOf,
        rounds: Rounds,
        *,
        hides_usage: bool,
        interval: float,
        start: StartTask,
    ) -> None:
        """Relay `answer` and those that follow it, as `virtual_relay` says."""
        super().__init__(rounds.dialect, answer, client, headers, hides_usage=hides_usage)
        self._first = answer
        self._rounds = rounds
        self._interval = interval
        self._start = start
        self._filter = self._api.stream_filter(rounds.names, hides_usage)
        self._reply = self._filter.reply
        self._first_usage: JsonObject | None = None
        self._line = anyio.Lock()  # who holds it may write
        self._waiting = b""  # shown, and not sent: it says nothing
        self._started = self._over = False
        self._quiet = True

    async def run(self, settle: Settle) -> None:
        """Relay until the reply ends; raises as `WholeRelay.run` does."""
        # Not a task group: it would wait for its tasks, and who is cancelled then would lose what it has.
        alive = self._start(self._keep_alive())
        try:
            while await self._round(settle):
                pass
        finally:
            alive.cancel()
            if self._answer is not self._first:
                await self._answer.aclose()

    def answered(self, *, left: bool = False) -> Answered:
        """Return what the client has so far."""
        answered = super().answered(left=left)
        answered.usage, answered.first_usage = self._filter.usage, self._first_usage
        self._rounds.note(answered)
        if len(answered.replies) == 1:
            reply, partial = answered.replies[0]
            last: Message = self._filter.last
            if len(self._rounds) > self._filter.rounds:  # it is among them: nothing came after it
                last = self._rounds.dialect.spoken("assistant", "")
            answered.hidden = self._rounds.hidden(reply, last, partial=partial)
        return answered

    @property
    def _ended(self) -> bool:
        return super()._ended and not self._filter.again

    def _stop_reading(self) -> None:
        """Give up: what the proxy's own tools are asked cannot be passed on unread."""
        raise too_large("is a stream longer than server.max_memory allows")

    async def _round(self, settle: Settle) -> bool:
        """Relay one answer; tell whether another one follows."""
        last = await self._relay()
        whole = not self._reply.failed
        if self._filter.again and whole:
            await self._send(b"".join([shown for _, shown in last]))
            return await self._go_on(settle)
        if whole and (self._done or self._filter.ended):
            await self._rounds.answer_last(self._filter.calls)
        await settle(await self.ending())
        self._tail = self._filter.closing(self._tail)
        await self._close(last)
        return False

    def _take(self, event: Event) -> bytes:
        return self._filter.take(event)

    def _read_last(self, event: Event) -> bytes:
        if event.is_done:
            return b"" if self._filter.again else event.raw
        shown = self._read(event)
        if not self._filter.again or event.complete:
            return shown
        return shown + b"\n\n" if shown and event.data is not None else b""  # other events follow it

    def _read_end(self, event: Event) -> bytes:
        return self._tried(self._filter.end, event, b"")

    async def _go_on(self, settle: Settle) -> bool:
        """Answer what the round called, and ask again; tell whether there is an answer to be relayed."""
        if self._done:
            await self._rest()
        await self._answer.discard()
        if self._first_usage is None and not len(self._rounds):
            self._first_usage = self._filter.usage
        await self._rounds.answer(self._filter.calls)
        try:
            answer = await self._rounds.ask()
            refusal = None
            if answer is not None:
                self._answer = answer
                self._failure = None  # if the last round broke off, it had all that counts
                refusal = None if 200 <= answer.status < 300 else await answer.read()
        except PalimpsestError as why:
            self._failure = why
            await settle(await self.ending())
            if not await self._break_off(self._api.error_body(why)):
                raise
            return False
        if refusal is not None:
            await self._refuse(refusal, settle)
            return False
        if answer is None:
            shown, self._done = self._filter.give_up(), True
            await settle(await self.ending())
            await self._end(shown)
            return False
        self._filter.next(may_ask=self._rounds.may_ask)
        self._events, self._done, self._tail = EventDecoder(self._api.ends), False, b""
        return True

    async def _refuse(self, body: bytes, settle: Settle) -> None:
        """Pass on an error with which upstream answered a later round."""
        status, words = self._answer.status, self._api.error_words(body)
        self._failure = UpstreamError(words or f"HTTP {status}")
        await settle(await self.ending())
        error = UpstreamError(
            f"The upstream answered with HTTP {status} when it was asked for the rest of the reply. Try again.",
            code="upstream_incomplete",
        )
        if not await self._break_off(body if words is not None else self._api.error_body(error)):
            await send_whole(self._client, status, self._headers(self._answer), body)

    async def _break_off(self, error: bytes) -> bool:
        """End a stream that has begun with the body of an error; tell whether it had. No comment comes any more."""
        async with self._line:
            self._over = True
        if self._started:
            await self._client.end(self._api.error_event(error))
        return self._started

    async def _send(self, shown: bytes, *, flush: bool = False) -> None:
        """Send what is shown. What says nothing waits: until something does, the status may still change."""
        async with self._line:
            self._waiting += shown
            if self._waiting and (self._started or self._filter.said or flush):
                await self._flush()

    async def _end(self, shown: bytes) -> None:
        async with self._line:
            self._over = True
            await self._begin()
            await self._client.end(self._waiting + shown)

    async def _flush(self) -> None:
        await self._begin()
        shown, self._waiting, self._quiet = self._waiting, b"", False
        if shown:
            await self._client.write(shown)

    async def _begin(self) -> None:
        if not self._started:
            self._started = True
            await self._client.start(self._answer.status, self._headers(self._answer))

    async def _keep_alive(self) -> None:
        """Break every long silence: first with what was held back, later with comments where we cause it."""
        while True:
            await anyio.sleep(self._interval)
            async with self._line:
                if self._over:
                    return
                if self._started and self._quiet and self._filter.hides:
                    self._waiting += COMMENT
                await self._flush()
                self._quiet = True

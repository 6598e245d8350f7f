"""A reply as events that is made of several answers, each of them events: see `own_tools`.

Text goes to the client as it comes. Where the proxy is what makes it wait, comments keep the line alive. What
says nothing is held back a little: as long as the client was told nothing, the status may still change.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final

import anyio

from proxy.dialects import JsonObject, Message
from proxy.dialects.chat.own_tools import Parted, parted, without_own
from proxy.dialects.chat.tool_stream import ToolStreamFilter
from proxy.dialects.jsontext import read
from proxy.dialects.sse import Event, EventDecoder
from proxy.errors import PalimpsestError, UpstreamError
from proxy.pipeline.context import Client, Headers
from proxy.pipeline.relay import (
    Answered,
    Settle,
    broken_off,
    error_event,
    error_text,
    rest_after_done,
    why_broken,
    worth_keeping,
)
from proxy.pipeline.rounds import Rounds
from proxy.store import Status
from proxy.trimming import Hidden
from proxy.upstream import Answer

INTERVAL: Final = 3.0
"""Seconds of silence after which a client is told that the line is up, where the proxy causes the silence."""
COMMENT: Final = b": working\n\n"

StartTask = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Runs work in a task that is kept track of: see `Background.start`."""
HeadersOf = Callable[[Answer], Headers]
"""Returns the headers with which an answer goes to the client."""


class VirtualStream:
    """A reply as events, made of answers that each come as events. Used once."""

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
        """Relay `answer` and those that follow it, as `VirtualRelay` says."""
        self._answer = self._first = answer
        self._client = client
        self._headers = headers
        self._rounds = rounds
        self._interval = interval
        self._start = start
        self._sieve = ToolStreamFilter(rounds.names, hides_usage=hides_usage)
        self._events = EventDecoder()
        self._plain = True
        self._done = False  # this round's `[DONE]` came
        self._tail = b""  # that, and what came with it
        self._failure: str | None = None  # why there is no more
        self._error = b""  # the event that says so
        self._first_usage: JsonObject | None = None
        self._line = anyio.Lock()  # who holds it may write
        self._waiting = b""  # shown, and not sent: it says nothing
        self._started = self._over = False
        self._quiet = True

    async def run(self, settle: Settle) -> None:
        """Relay until the reply ends; see `VirtualRelay.run`."""
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
        """Return what the client has so far, as `StreamRelay.answered` does."""
        reply = self._sieve.reply
        ended = self._done and reply.error is None and not self._sieve.again
        choices = reply.choices()
        kept = worth_keeping(choices, ended=ended)
        answered = Answered(
            status=Status.COMPLETE,
            replies=kept,
            finish_reasons=tuple(choice.finish_reason for choice in choices),
            usage=self._sieve.usage,
            model=reply.model,
            upstream_status=self._answer.status,
            own_calls=self._rounds.answered,
            asked_again=self._rounds.asked,
            first_usage=self._first_usage,
        )
        whole = ended or (reply.finished and reply.error is None)
        if not whole or not kept:
            answered.error = self._reason(left=left)
            answered.status = Status.PARTIAL if kept else Status.CANCELLED if left else Status.FAILED
        if len(kept) == 1:
            answered.hidden = self._hidden(*kept[0])
        return answered

    def _hidden(self, reply: Message, partial: bool) -> Hidden | None:
        last = without_own(self._sieve.message, self._rounds.names)
        if len(self._rounds) > self._sieve.rounds:  # it is among them: nothing came after it
            last = {"role": "assistant"}
        return self._rounds.hidden(reply, last, partial=partial)

    async def _round(self, settle: Settle) -> bool:
        """Relay one answer; tell whether another one follows."""
        last = await self._relay()
        sieve = self._sieve
        if sieve.again and sieve.reply.error is None:
            await self._send(b"".join(shown for _, shown in last))
            return await self._go_on(settle)
        if sieve.reply.error is None and (self._done or sieve.ended):
            calls = self._parted()
            if calls.own and calls.others:
                await self._rounds.answer_mixed(sieve.message, calls)
        await settle(self.answered())
        if self._done:
            if not self._answer.ended:
                await self._send(self._tail, flush=True)
                self._tail = b""
            await self._end(self._tail + await self._after_done())
            return False
        error = self._closing_error()
        if error:  # half an event before it would swallow it
            last = [(event, shown) for event, shown in last if event.complete]
        await self._end(b"".join(shown for _, shown in last) + error)
        return False

    async def _relay(self) -> list[tuple[Event, bytes]]:
        """Relay until `[DONE]` or the end; return what came last without an end, and what is shown of it."""
        try:
            while chunk := await self._answer.chunk(plain=self._plain):
                await self._pass_on(chunk)
                if self._done:
                    return []
        except UpstreamError as why:
            self._failure, self._error = why.message, error_event(why.body())
        return [(event, self._shown_of_last(event)) for event in self._events.flush()]

    def _shown_of_last(self, event: Event) -> bytes:
        """Return what is shown of an event that the stream ended in."""
        if event.is_done:
            return b"" if self._sieve.again else event.raw
        shown = self._sieve.take(event)
        if not self._sieve.again or event.complete:
            return shown
        return shown + b"\n\n" if shown and event.data is not None else b""  # other events follow it

    async def _pass_on(self, chunk: bytes) -> None:
        """Relay the events that `chunk` completes, up to `[DONE]`."""
        shown = b""
        for event in self._events.feed(chunk):
            if self._done:
                self._tail += event.raw
            elif event.is_done:
                shown += self._sieve.end()
                self._done, self._tail = True, event.raw
            else:
                shown += self._sieve.take(event)
        await self._send(shown)

    async def _go_on(self, settle: Settle) -> bool:
        """Answer what the round called, and ask again; tell whether there is an answer to be relayed."""
        if self._done:
            await self._after_done()
        if self._answer is not self._first:
            await self._answer.aclose()
        if self._first_usage is None and not len(self._rounds):
            self._first_usage = self._sieve.usage
        await self._rounds.answer(self._sieve.message, self._parted())
        try:
            answer = await self._rounds.ask()
            refusal = None
            if answer is not None:
                self._answer = answer
                self._failure, self._error = None, b""  # if the last round broke off, it had all that counts
                refusal = None if 200 <= answer.status < 300 else await answer.read()
        except PalimpsestError as why:
            self._failure, self._error = why.message, error_event(why.body())
            await settle(self.answered())
            if not await self._break_off():
                raise
            return False
        if refusal is not None:
            await self._refuse(refusal, settle)
            return False
        if answer is None:
            shown, self._done = self._sieve.give_up(), True
            await settle(self.answered())
            await self._end(shown)
            return False
        self._sieve.next(may_ask=self._rounds.may_ask)
        self._events, self._plain = EventDecoder(), answer.readable
        self._done, self._tail = False, b""
        return True

    async def _refuse(self, body: bytes, settle: Settle) -> None:
        """Pass on an error with which upstream answered a later round."""
        words = error_text(body)
        self._failure = words or f"HTTP {self._answer.status}"
        error = UpstreamError(
            f"The upstream answered with HTTP {self._answer.status} when it was asked for the rest of the "
            "reply. Try again.",
            code="upstream_incomplete",
        )
        self._error = error_event(read(body) if words is not None else error.body())
        await settle(self.answered())
        if await self._break_off():
            return
        headers = [*self._headers(self._answer), (b"content-length", b"%d" % len(body))]
        await self._client.start(self._answer.status, headers)
        await self._client.end(body)

    async def _break_off(self) -> bool:
        """End a stream that has begun with the error; tell whether it had. No comment comes any more."""
        async with self._line:
            self._over = True
        if self._started:
            await self._client.end(self._error)
        return self._started

    async def _send(self, shown: bytes, *, flush: bool = False) -> None:
        """Send what is shown. What says nothing waits: until something does, the status may still change."""
        async with self._line:
            self._waiting += shown
            if self._waiting and (self._started or self._sieve.said or flush):
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
                if self._started and self._quiet and self._sieve.hides:
                    self._waiting += COMMENT
                await self._flush()
                self._quiet = True

    async def _after_done(self) -> bytes:
        """Return what follows `[DONE]`: nothing, as a rule."""
        rest = b"".join([event.raw for event in self._events.flush()])
        if self._answer.ended:
            return rest
        return rest + await rest_after_done(self._answer, plain=self._plain)

    def _closing_error(self) -> bytes:
        """Return the error event that ends a broken stream; nothing where upstream sent one itself."""
        if self._sieve.reply.finished or self._sieve.reply.error is not None:
            return b""
        return self._error or error_event(broken_off().body())

    def _reason(self, *, left: bool) -> str:
        return why_broken(self._sieve.reply.error, self._failure, left=left, done=self._done)

    def _parted(self) -> Parted:
        return parted(self._sieve.message, self._rounds.names, self._sieve.finish_reason)

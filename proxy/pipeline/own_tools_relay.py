"""A reply of a model that may call tools of the proxy's own: `recall_context`, `compress_chat_history`.

It is relayed like any other, event by event, as long as it calls nothing of the proxy's. A reply that calls
only the proxy's tools is answered unseen: upstream is asked again with the results, and what comes then
goes on with the same reply. A reply that calls the client's tools too goes to the client with the client's
calls alone; those of the proxy are answered before it is stored.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Final

import anyio

from proxy.dialects import JsonObject
from proxy.dialects.chat.completion import read_completion
from proxy.dialects.chat.own_tools import (
    STOPPED,
    Correction,
    Parted,
    added,
    corrected,
    ending,
    gap,
    parted,
    says_something,
    without_own,
)
from proxy.dialects.chat.tool_stream import ToolStreamFilter
from proxy.dialects.jsontext import is_array, is_object, read
from proxy.dialects.sse import Event, EventDecoder
from proxy.errors import PalimpsestError, UpstreamError
from proxy.pipeline.context import Client
from proxy.pipeline.own_tools import Rounds
from proxy.pipeline.relay import (
    Answered,
    HeadersOf,
    Settle,
    StreamRelay,
    error_event,
    error_text,
    read_answer,
    send_whole,
)
from proxy.store import Status
from proxy.upstream import Answer

INTERVAL: Final = 3.0
"""Seconds of silence after which a client is told that the line is up, where the proxy causes the silence."""
COMMENT: Final = b": working\n\n"

StartTask = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Runs work in a task that is kept track of: see `Background.start`."""


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
        return StreamRelay(answer, client, headers, hides_usage=hides_usage)
    return VirtualStream(answer, client, headers, rounds, hides_usage=hides_usage, interval=interval, start=start)


class WholeRelay:
    """A reply in one piece, made of answers that each come in one piece. Used once."""

    def __init__(self, answer: Answer, client: Client, headers: HeadersOf, rounds: Rounds) -> None:
        """Relay `answer` and those that follow it, as `StreamRelay` does."""
        self._answer = self._first = answer
        self._client = client
        self._headers = headers
        self._rounds = rounds
        self._said: list[Any] = []
        """The contents of the rounds that the client is not shown."""
        self._usage: JsonObject | None = None
        self._first_usage: JsonObject | None = None

    async def run(self, settle: Settle) -> None:
        """Relay the reply once it is settled.

        Raises a `PalimpsestError` where there is none: it was settled as failed, and the client was told nothing.
        """
        try:
            answered, body = await self._reply()
        except PalimpsestError as why:
            await settle(self._failed(why.message))
            raise
        finally:
            if self._answer is not self._first:
                await self._answer.aclose()
        await settle(answered)
        await send_whole(self._client, self._answer.status, self._headers(self._answer), body)

    def answered(self, *, left: bool = False) -> Answered:
        """Return what has come so far: no reply."""
        why = "the client left" if left else "there is no reply"
        return self._with_rounds(Answered(status=Status.CANCELLED if left else Status.FAILED, error=why), None)

    async def _reply(self) -> tuple[Answered, bytes]:
        """Return what came of it, and the body that the client gets."""
        while True:
            body = await self._answer.read()
            if not 200 <= self._answer.status < 300:
                return self._failed(error_text(body) or f"HTTP {self._answer.status}"), body
            message, finish, usage = _only_reply(body)
            names, later = self._rounds.names, len(self._rounds) > 0
            calls = parted(message, names, finish)
            if not message or not (later or calls.own or calls.broken):
                return self._with_rounds(read_answer(body, self._answer.status), usage), body
            said = any(says_something({"content": content}) for content in self._said)
            how = ending(message, names, finish, later=later, said=said, may_ask=self._rounds.may_ask)
            if not how.again:
                if calls.others and calls.own:
                    await self._rounds.answer_mixed(message, calls)
                last = without_own(message, names)
                if how.text:
                    last = {**last, "content": _joined([last.get("content"), how.text])}
                return self._made(body, usage, last, how.finish)
            self._first_usage = self._first_usage if later else usage
            self._usage = added(self._usage, usage)
            await self._rounds.answer(message, calls)
            answer = await self._rounds.ask()
            self._said.append(message.get("content"))
            if answer is None:
                return self._made(body, None, {"role": "assistant", "content": STOPPED}, "stop")
            before, self._answer = self._answer, answer
            if before is not self._first:
                await before.aclose()

    def _made(self, body: bytes, usage: JsonObject | None, last: JsonObject, finish: str) -> tuple[Answered, bytes]:
        """Return the reply that ends with the round `last`, in the body of that round.

        `last` is without the proxy's calls; `usage` is that of this round where it is not counted yet.
        """
        message, was, _ = _only_reply(body)
        calls = parted(message, self._rounds.names, was)
        content = _joined([*self._said, last.get("content")])
        taken = (*calls.own, *calls.broken)
        items = message.get("tool_calls")
        places = range(len(items)) if taken and is_array(items) else ()
        later = len(self._rounds) > 0
        body = corrected(
            body,
            Correction(
                content=content if content != message.get("content") else None,
                calls=[place for place in places if place not in taken] if taken else None,
                finish_reason=finish if finish != was else None,
                usage=added(self._usage, usage) if later else None,
            ),
        )
        answered = self._with_rounds(read_answer(body, self._answer.status), usage)
        answered.hidden = self._rounds.hidden(answered.replies[0][0], last, partial=False)
        return answered, body

    def _failed(self, why: str) -> Answered:
        answered = Answered(status=Status.FAILED, error=why, upstream_status=self._answer.status)
        return self._with_rounds(answered, None)

    def _with_rounds(self, answered: Answered, usage: JsonObject | None) -> Answered:
        """Return the answered with what is known of all rounds; `usage` is that of the last."""
        answered.usage, answered.first_usage = added(self._usage, usage), self._first_usage
        self._rounds.note(answered)
        return answered


def _only_reply(body: bytes) -> tuple[JsonObject, str, JsonObject | None]:
    """Return the message of a body with one choice, why it ended, and the usage; else an empty message."""
    try:
        data = read(body)
    except ValueError:
        return {}, "", None
    found = read_completion(data)
    choices = data.get("choices") if is_object(data) else None
    if not is_array(choices) or len(choices) != 1 or not found.choices:
        return {}, "", found.usage
    return found.choices[0].message, found.choices[0].finish_reason or "", found.usage


def _joined(contents: Sequence[Any]) -> Any:
    """Return several contents as one: text, or parts where one has parts; the last where all are empty.

    Texts that would run into each other are kept apart.
    """
    said: list[Any] = []
    for content in contents:
        if content:
            between = gap(said[-1], content) if said else ""
            said.append(between + content if between else content)
    if all(isinstance(content, str) for content in said):
        return "".join(said) if said else (contents[-1] if contents else None)
    parts: list[Any] = []
    for content in said:
        parts += content if is_array(content) else [{"type": "text", "text": content}]
    return parts


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
        super().__init__(answer, client, headers, hides_usage=hides_usage)
        self._first = answer
        self._rounds = rounds
        self._interval = interval
        self._start = start
        self._filter = ToolStreamFilter(rounds.names, hides_usage=hides_usage)
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
            last = without_own(self._filter.message, self._rounds.names)
            if len(self._rounds) > self._filter.rounds:  # it is among them: nothing came after it
                last = {"role": "assistant"}
            answered.hidden = self._rounds.hidden(reply, last, partial=partial)
        return answered

    @property
    def _ended(self) -> bool:
        return super()._ended and not self._filter.again

    async def _round(self, settle: Settle) -> bool:
        """Relay one answer; tell whether another one follows."""
        last = await self._relay()
        whole = self._reply.error is None
        if self._filter.again and whole:
            await self._send(b"".join([shown for _, shown in last]))
            return await self._go_on(settle)
        if whole and (self._done or self._filter.ended):
            calls = self._parted()
            if calls.own and calls.others:
                await self._rounds.answer_mixed(self._filter.message, calls)
        await settle(self.answered())
        await self._close(last)
        return False

    def _read(self, event: Event) -> bytes:
        return self._filter.take(event)

    def _read_last(self, event: Event) -> bytes:
        if event.is_done:
            return b"" if self._filter.again else event.raw
        shown = self._filter.take(event)
        if not self._filter.again or event.complete:
            return shown
        return shown + b"\n\n" if shown and event.data is not None else b""  # other events follow it

    def _read_end(self) -> bytes:
        return self._filter.end()

    async def _go_on(self, settle: Settle) -> bool:
        """Answer what the round called, and ask again; tell whether there is an answer to be relayed."""
        if self._done:
            await self._rest()
        if self._answer is not self._first:
            await self._answer.aclose()
        if self._first_usage is None and not len(self._rounds):
            self._first_usage = self._filter.usage
        await self._rounds.answer(self._filter.message, self._parted())
        try:
            answer = await self._rounds.ask()
            refusal = None
            if answer is not None:
                self._answer = answer
                self._failure = None  # if the last round broke off, it had all that counts
                refusal = None if 200 <= answer.status < 300 else await answer.read()
        except PalimpsestError as why:
            self._failure = why
            await settle(self.answered())
            if not await self._break_off(error_event(why.body())):
                raise
            return False
        if refusal is not None:
            await self._refuse(refusal, settle)
            return False
        if answer is None:
            shown, self._done = self._filter.give_up(), True
            await settle(self.answered())
            await self._end(shown)
            return False
        self._filter.next(may_ask=self._rounds.may_ask)
        self._events, self._done, self._tail = EventDecoder(), False, b""
        return True

    async def _refuse(self, body: bytes, settle: Settle) -> None:
        """Pass on an error with which upstream answered a later round."""
        status, words = self._answer.status, error_text(body)
        self._failure = UpstreamError(words or f"HTTP {status}")
        await settle(self.answered())
        error = UpstreamError(
            f"The upstream answered with HTTP {status} when it was asked for the rest of the reply. Try again.",
            code="upstream_incomplete",
        )
        if not await self._break_off(error_event(read(body) if words is not None else error.body())):
            await send_whole(self._client, status, self._headers(self._answer), body)

    async def _break_off(self, error: bytes) -> bool:
        """End a stream that has begun with the error; tell whether it had. No comment comes any more."""
        async with self._line:
            self._over = True
        if self._started:
            await self._client.end(error)
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

    def _parted(self) -> Parted:
        return parted(self._filter.message, self._rounds.names, self._filter.finish_reason)

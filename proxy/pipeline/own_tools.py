"""The proxy's own tools in one exchange: answers their calls, and relays the reply of a model that may call them.

A reply is relayed event by event, as usual, until it calls one of the proxy's tools. If it calls only the proxy's
tools, the client does not see the calls: the upstream is asked again with the results, and its next answer continues
the same reply. If it also calls the client's tools, the client gets its own calls only, and the proxy's calls are
answered before the reply is stored.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from functools import partial
from typing import Any, Final

import anyio
from msgspec import Struct
from msgspec.structs import replace

from proxy.dialects import Call, Dialect, JsonObject, Message, OwnCalls
from proxy.dialects.sse import Event, EventDecoder
from proxy.errors import PalimpsestError, UpstreamError
from proxy.pipeline.background import TRIMMING, compute
from proxy.pipeline.context import Client
from proxy.pipeline.prepare import unused
from proxy.pipeline.relay import Answered, HeadersOf, OwnCall, Settle, StreamRelay, read_answer, send_whole
from proxy.pipeline.settle import Exchange
from proxy.recall import OwnTools, Recall, RecallBranch, sent_whole
from proxy.store import Status
from proxy.trimming import Hidden, compaction
from proxy.upstream import Answer, too_large

_LOG: Final = logging.getLogger("palimpsest.relay")

INTERVAL: Final = 3.0
"""Seconds of silence, if the proxy causes it, after which the client gets a sign that the connection is alive."""
COMMENT: Final = b": working\n\n"

StartTask = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]  # runs work in a task: `Background.start`

MOST_ASKS: Final = 3  # how often the upstream may be asked again for one reply
MOST_CALLS: Final = 8  # calls of one block that are answered; each may take as long as a search
TOO_MANY: Final = "These are too many calls at once: this one was not answered. Ask again, for less."
TOO_LONG: Final = "What this call found is too long to be shown here. Ask again, for fewer lines of it."
"""The result of a call whose answer made the request too long for the model."""
BEGUN: Final = (
    "A summary of the older part of this conversation is being made. It takes the place of that part in one "
    "of the next requests; until then nothing changes. Go on with the task."
)
NOTHING_TO_SUM_UP: Final = (
    "There is nothing yet that a summary would make shorter. Nothing was changed. Go on with the task."
)


def own_tools(exchange: Exchange, recall: Recall) -> OwnTools:
    """Return the tools that this exchange offers, with the functions that answer their calls."""
    prepared, history = exchange.prepared, exchange.prepared.history
    fresh = tuple([body.message for body in history.fresh])
    end = history.entries[-1].position + 1 if history.entries else history.start
    branch = RecallBranch(
        key=prepared.key,
        tip=history.arrival.base,
        depth=end - len(fresh),
        fresh=fresh,
        whole=sent_whole(history.entries, exchange.report.plan.view),
    )
    return OwnTools(prepared.own_tools, recall, branch, partial(_request_summary, exchange))


async def _request_summary(exchange: Exchange) -> str:
    """Note that the model asked for a summary; it is started when the exchange is settled. Return the call's result."""
    prepared, history = exchange.prepared, exchange.prepared.history
    policy = prepared.context.policy
    if policy is None:
        return NOTHING_TO_SUM_UP
    cut = history.standing.cut if history.standing is not None else None
    request = await compute(
        TRIMMING * history.size, compaction, history.entries, policy, prepared.planning, cut, start=history.start
    )
    exchange.requested_summary = request or unused(history.ready_summary, cut)
    return NOTHING_TO_SUM_UP if exchange.requested_summary is None else BEGUN


class OwnRound(Struct, kw_only=True):
    """A reply with calls of the proxy's tools, and their results. Only an exchange's last one may have other calls."""

    message: Message  # the reply in the form in which it is sent back
    results: tuple[Message, ...]
    shortened: bool = False  # whether its results were replaced by a text that says that they were too long


class Rounds:
    """The rounds of calls and results behind one reply. Used once."""

    def __init__(
        self,
        dialect: Dialect,
        names: Collection[str],
        answer_call: Callable[[Call], Awaitable[str]],
        ask_again: Callable[[Sequence[Message]], Awaitable[Answer]],
        form: Callable[[Message, bool], Message],
    ) -> None:
        """`answer_call` returns the text of a result and never raises. `ask_again` sends messages after the view.

        `form` returns a reply in the form of a request; its flag says whether the reply broke off.
        """
        self.dialect = dialect
        self.names = names
        self._answer_call = answer_call
        self._ask_again = ask_again
        self._form = form
        self._rounds: list[OwnRound] = []
        self._mixed: OwnRound | None = None
        self._asks = 0
        self.answered: list[OwnCall] = []  # every call that was answered, in order
        self._first_usage: JsonObject | None = None  # usage of the first round

    def __len__(self) -> int:
        """Return the number of rounds that the client was not shown."""
        return len(self._rounds)

    @property
    def may_ask(self) -> bool:
        """Whether the upstream may be asked once more."""
        return self._asks < MOST_ASKS

    def note(self, answered: Answered) -> None:
        """Add what happened in these rounds to `answered`."""
        answered.own_calls, answered.asked_again = tuple(self.answered), self._asks > 0
        answered.first_usage = self._first_usage

    @property
    def messages(self) -> tuple[Message, ...]:
        """The rounds as messages to send: each is a reply with its calls, then their results."""
        return _messages_of(self._rounds)

    async def answer(self, calls: OwnCalls, usage: JsonObject | None) -> None:
        """Answer all calls of a reply that calls only the proxy's tools. `usage` covers all replies so far."""
        if not self._rounds:
            self._first_usage = usage
        self._rounds.append(await self._answer(calls))

    async def answer_last(self, calls: OwnCalls) -> None:
        """Answer the proxy's calls in the last reply, if it also calls the client's tools.

        If the provider may hold the reply as a state, answer them in any case, because a request that continues from it
        must bring their results.
        """
        if calls.own and (calls.others or self.dialect.requests.state_fields):
            self._mixed = await self._answer(calls)

    async def ask(self) -> Answer | None:
        """Ask the upstream again with the results. If they are too long for it, ask with shorter ones.

        Returns the answer, whatever its status; the caller must close it. Returns None if the upstream may not be asked
        again. Raises a `PalimpsestError` if there is no answer.
        """
        while self.may_ask:
            self._asks += 1
            answer = await self._ask_again(self.messages)
            try:
                too_long = False
                if answer.status >= 400:
                    body, overflow_of = await answer.read(), self.dialect.requests.overflow_of
                    too_long = await compute(len(body), overflow_of, answer.status, body) is not None
            except BaseException:  # also if cancelled: nothing else holds the answer, and it occupies a connection
                await answer.aclose()
                raise
            if not (too_long and self._shorten()):
                return answer
            await answer.aclose()
        if self._rounds and self.dialect.requests.state_fields:  # the provider holds it as the last reply
            self._mixed = self._rounds.pop()
        return None

    def hidden(self, reply: Message, last: Message, *, partial: bool) -> Hidden | None:
        """Return the hidden messages to send with the reply from now on, or None if the client was shown everything.

        `reply` is the whole reply, as the client has it. `last` is its last round, without calls of the proxy's tools.
        """
        if self._mixed is not None:
            return Hidden(before=self.messages, reply=self._mixed.message, after=self._mixed.results, tokens=0)
        kept = list(self._rounds)
        sent = self._form(last, partial)
        while kept and not (sent.text or sent.has_content or sent.calls):
            # No provider accepts an empty message. The last round takes over the content of the round before it.
            sent = self._form(last.with_content_of(kept.pop().message), partial)
        if not kept:
            return None
        is_all = sent.data == self._form(reply, partial).data
        return Hidden(before=_messages_of(kept), reply=None if is_all else sent, after=(), tokens=0)

    async def _answer(self, calls: OwnCalls) -> OwnRound:
        results: list[Message] = []
        for number, call in enumerate(calls.own):
            began = time.monotonic()
            text = await self._answer_call(call) if number < MOST_CALLS else TOO_MANY
            took = round((time.monotonic() - began) * 1000, 2)
            self.answered.append(OwnCall(tool=call.name, ms=took, chars=len(text), round=len(self._rounds) + 1))
            results.append(self.dialect.result(call.id, text))
        return OwnRound(message=self._form(calls.message, False), results=tuple(results))

    def _shorten(self) -> bool:
        """Replace the newest results that are not shortened yet by a short text. Tell whether there were any."""
        for number, made in reversed(list(enumerate(self._rounds, 1))):
            if not made.shortened:
                made.results = tuple([result.with_text(TOO_LONG) for result in made.results])
                made.shortened = True
                self.answered = [
                    replace(call, error=TOO_LONG) if call.round == number else call for call in self.answered
                ]
                return True
        return False


def _messages_of(rounds: Sequence[OwnRound]) -> tuple[Message, ...]:
    return tuple([message for made in rounds for message in (made.message, *made.results)])


# ------------------------------------------------------------------------------- relaying to the client


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
    """Return the relay that sends `answer`, and the answers that follow it, to `client`.

    `hides_usage` holds back the usage chunk that only the proxy asked for. `start` runs the task that sends the client
    a comment after `interval` seconds of silence.
    """
    if not stream:
        return WholeRelay(answer, client, headers, rounds)
    if not answer.readable:  # its encoding is not supported here: relay it unread, whatever it calls
        return StreamRelay(rounds.dialect, answer, client, headers, hides_usage=hides_usage)
    return VirtualStream(answer, client, headers, rounds, hides_usage=hides_usage, interval=interval, start=start)


class WholeRelay:
    """A reply without a stream, combined from answers without a stream. Used once."""

    def __init__(self, answer: Answer, client: Client, headers: HeadersOf, rounds: Rounds) -> None:
        """Relay `answer` and the answers that follow it, as `StreamRelay` does."""
        self._answer = self._first = answer
        self._client = client
        self._headers = headers
        self._rounds = rounds
        self._filter = rounds.dialect.replies.body_filter(rounds.names)

    async def run(self, settle: Settle) -> None:
        """Relay the reply after settling it.

        Raises a `PalimpsestError` if there is no reply. It is then settled as failed, and nothing was sent to the
        client.
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

    async def ending(self, *, left: bool = False) -> Answered:
        """Return what has arrived so far, which is no reply."""
        why = "the client left" if left else "there is no reply"
        return self._with_rounds(Answered(status=Status.CANCELLED if left else Status.FAILED, error=why))

    async def _reply(self) -> tuple[Answered, bytes]:
        """Return the outcome, and the body that the client gets."""
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
            await rounds.answer(calls, found.usage)
            answer = await rounds.ask()
            if answer is None:
                shown = found.give_up()
                return self._read(shown), shown
            found.next(may_ask=rounds.may_ask)
            before, self._answer = self._answer, answer
            await before.discard()

    def _read(self, body: bytes) -> Answered:
        """Read the body that the client is shown. Add the hidden rounds that belong to it."""
        answered = self._with_rounds(read_answer(self._rounds.dialect, body, self._answer.status))
        if len(answered.replies) == 1:
            answered.hidden = self._rounds.hidden(answered.replies[0][0], self._filter.last, partial=False)
        return answered

    def _with_rounds(self, answered: Answered) -> Answered:
        """Add the usage and the calls of all rounds to `answered`, and return it."""
        answered.usage = self._filter.usage
        self._rounds.note(answered)
        return answered


class VirtualStream(StreamRelay):
    """A streamed reply, combined from streamed answers. Used once.

    Text goes to the client as it arrives. Events without content are held back for a moment, because the status can
    still change until something was sent to the client.
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
        """Relay `answer` and the answers that follow it; the parameters are those of `virtual_relay`."""
        super().__init__(rounds.dialect, answer, client, headers, hides_usage=hides_usage)
        self._first = answer
        self._rounds = rounds
        self._interval = interval
        self._start = start
        self._filter = self._api.stream_filter(rounds.names, hides_usage)
        self._reply = self._filter.reply
        self._line = anyio.Lock()  # guards writing to the client
        self._waiting = b""  # events without content that are to be sent and are held back
        self._started = self._over = False
        self._quiet = True

    async def run(self, settle: Settle) -> None:
        """Relay until the reply ends. Raises as `WholeRelay.run` does."""
        # Not a task group: that would wait for its tasks, and a cancellation meanwhile would lose the reply.
        alive = self._start(self._keep_alive())
        try:
            while await self._round(settle):
                pass
        finally:
            alive.cancel()
            if self._answer is not self._first:
                await self._answer.aclose()

    def answered(self, *, left: bool = False) -> Answered:
        """Return what the client has got so far."""
        answered = super().answered(left=left)
        answered.usage = self._filter.usage
        self._rounds.note(answered)
        if len(answered.replies) == 1:
            reply, partial = answered.replies[0]
            last: Message = self._filter.last
            if len(self._rounds) > self._filter.rounds:  # `last` is one of the rounds, and nothing came after it
                last = self._rounds.dialect.spoken("assistant", "")
            answered.hidden = self._rounds.hidden(reply, last, partial=partial)
        return answered

    @property
    def _ended(self) -> bool:
        return super()._ended and not self._filter.again

    def _stop_reading(self) -> None:
        """Raise an error, because calls of the proxy's own tools cannot be relayed unread."""
        raise too_large("is a stream longer than server.max_memory allows")

    async def _round(self, settle: Settle) -> bool:
        """Relay one answer. Tell whether another one follows."""
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
        """Answer the round's calls, and ask again. Tell whether there is an answer to relay."""
        if self._done:
            await self._rest()
        await self._answer.discard()
        await self._rounds.answer(self._filter.calls, self._filter.usage)
        try:
            answer = await self._rounds.ask()
            refusal = None
            if answer is not None:
                self._answer = answer
                self._failure = None  # if the last round broke off, its calls were complete
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
        """Relay an error that the upstream answered in a later round."""
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
        """If the stream has begun, end it with an error; stop the keep-alive comments. Tell whether it had begun."""
        async with self._line:
            self._over = True
        if self._started:
            await self._client.end(self._api.error_event(error))
        return self._started

    async def _send(self, shown: bytes, *, flush: bool = False) -> None:
        """Send what the client is shown. Events without content wait, so that the status can still change."""
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
        """Break every long silence: first with held-back events, later with comments if the proxy causes it."""
        while True:
            await anyio.sleep(self._interval)
            async with self._line:
                if self._over:
                    return
                if self._started and self._quiet and self._filter.hides:
                    self._waiting += COMMENT
                await self._flush()
                self._quiet = True

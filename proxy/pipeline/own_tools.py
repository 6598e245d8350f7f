"""A reply of a model that may call tools of the proxy's own: `recall_context`, `compress_chat_history`.

It is relayed like any other, event by event, as long as it calls nothing of the proxy's. A reply that calls
only the proxy's tools is answered unseen: upstream is asked again with the results, and what comes then
goes on with the same reply. A reply that calls the client's tools too goes to the client with the client's
calls alone; those of the proxy are answered before it is stored.

As in `relay`: reading never harms relaying, and the end is held back until the reply is durable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from proxy.dialects import JsonObject
from proxy.dialects.chat.completion import read_completion
from proxy.dialects.chat.own_tools import (
    STOPPED,
    Correction,
    added,
    corrected,
    ending,
    gap,
    parted,
    says_something,
    without_own,
)
from proxy.dialects.jsontext import is_array, is_object, read
from proxy.errors import PalimpsestError
from proxy.pipeline.background import TRIMMING, compute
from proxy.pipeline.context import Client
from proxy.pipeline.own_tools_stream import INTERVAL, HeadersOf, StartTask, VirtualStream
from proxy.pipeline.relay import Answered, Settle, StreamRelay, error_text, read_answer
from proxy.pipeline.rounds import Rounds
from proxy.pipeline.settle import Exchange
from proxy.pipeline.summary_requests import unused
from proxy.recall import OwnTools, Recall, RecallBranch, sent_whole
from proxy.store import Status, session_key
from proxy.trimming import compaction
from proxy.upstream import Answer

BEGUN: Final = (
    "A summary of the older part of this conversation is being made. It takes the place of that part in one "
    "of the next requests; until then nothing changes. Go on with the task."
)
NOTHING_TO_SUM_UP: Final = (
    "There is nothing yet that a summary would make shorter. Nothing was changed. Go on with the task."
)


def own_tools(exchange: Exchange, recall: Recall) -> OwnTools:
    """Return the tools that this exchange offers, with what answers them."""
    return OwnTools(exchange.prepared.own_tools, recall, _branch(exchange), _Compression(exchange))


def _branch(exchange: Exchange) -> RecallBranch:
    prepared, history = exchange.prepared, exchange.prepared.history
    fresh = tuple([body.message for body in history.fresh])
    end = history.entries[-1].position + 1 if history.entries else history.start
    return RecallBranch(
        key=session_key(prepared.call.tenant, history.id or ""),
        tip=history.arrival.base,
        depth=end - len(fresh),
        fresh=fresh,
        whole=sent_whole(history.entries, exchange.report.plan.view),
    )


class _Compression:
    """Notes that the model asked for a summary, which is begun when the exchange is settled."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def __call__(self) -> str:
        prepared, history = self._exchange.prepared, self._exchange.prepared.history
        policy = prepared.context.policy
        if policy is None:
            return NOTHING_TO_SUM_UP
        cut = history.standing.cut if history.standing is not None else None
        request = await compute(
            TRIMMING * history.size, compaction, history.entries, policy, prepared.planning, cut, start=history.start
        )
        self._exchange.requested_summary = request or unused(history.prepared, cut)
        return NOTHING_TO_SUM_UP if self._exchange.requested_summary is None else BEGUN


class VirtualRelay:
    """One answer on its way to the client, in one piece or as events. Used once."""

    def __init__(
        self,
        answer: Answer,
        client: Client,
        headers: HeadersOf,
        rounds: Rounds,
        *,
        stream: bool,
        hides_usage: bool,
        start: StartTask,
        interval: float = INTERVAL,
    ) -> None:
        """Relay `answer`, and those that follow it, to `client`.

        Args:
            answer: upstream's first, with a status that is no error. The caller closes it.
            client: who asked.
            headers: makes the headers for the client.
            rounds: answers the proxy's calls, and asks again.
            stream: whether it is a stream of events.
            hides_usage: keep the chunk back that only the proxy asked for.
            start: runs work in a task that is kept track of.
            interval: seconds of silence after which the client is sent a comment.
        """
        self._relay: VirtualStream | _Whole | _Unread
        if not stream:
            self._relay = _Whole(answer, client, headers, rounds)
        elif answer.readable:
            self._relay = VirtualStream(
                answer, client, headers, rounds, hides_usage=hides_usage, interval=interval, start=start
            )
        else:
            self._relay = _Unread(answer, client, headers, hides_usage=hides_usage)

    async def run(self, settle: Settle) -> None:
        """Relay until the reply ends, one way or another; settle before the client sees its end.

        Cancelled, it has not settled: `answered` says what had come by then.

        Raises:
            PalimpsestError: there is no reply, and the client was told nothing yet. It was settled as failed.
        """
        await self._relay.run(settle)

    def answered(self, *, left: bool = False) -> Answered:
        """Return what has come so far; `left` says that the client did not wait for more."""
        return self._relay.answered(left=left)


class _Unread:
    """A stream in an encoding that nobody here reads: whatever it calls, it goes to the client."""

    def __init__(self, answer: Answer, client: Client, headers: HeadersOf, *, hides_usage: bool) -> None:
        self._relay = StreamRelay(answer, client, hides_usage=hides_usage)
        self._out = headers(answer)

    async def run(self, settle: Settle) -> None:
        await self._relay.run(self._out, settle)

    def answered(self, *, left: bool) -> Answered:
        return self._relay.answered(left=left)


class _Whole:
    """A reply in one piece, made of answers that each come in one piece."""

    def __init__(self, answer: Answer, client: Client, headers: HeadersOf, rounds: Rounds) -> None:
        self._answer = self._first = answer
        self._client = client
        self._headers = headers
        self._rounds = rounds
        self._said: list[Any] = []
        """The contents of the rounds that the client is not shown."""
        self._usage: JsonObject | None = None
        self._first_usage: JsonObject | None = None

    async def run(self, settle: Settle) -> None:
        try:
            answered, body = await self._reply()
        except PalimpsestError as why:
            await settle(self._failed(why.message))
            raise
        finally:
            if self._answer is not self._first:
                await self._answer.aclose()
        await settle(answered)
        length = (b"content-length", b"%d" % len(body))
        await self._client.start(self._answer.status, [*self._headers(self._answer), length])
        await self._client.end(body)

    def answered(self, *, left: bool) -> Answered:
        if left:
            return self._with_rounds(Answered(status=Status.CANCELLED, error="the client left"), None)
        return self._failed("there is no reply")

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
        answered.usage = added(self._usage, usage)
        answered.own_calls, answered.first_usage = self._rounds.answered, self._first_usage
        answered.asked_again = self._rounds.asked
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

"""One chat completion, top to bottom.

    read the request -> find its session -> find its place in the log -> plan -> open the exchange
    -> ask upstream -> relay -> settle

The request is stored while upstream is asked and before the client hears of an answer; the reply
is stored before the client sees its end. Whatever ends the exchange, it is settled once.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from msgspec.structs import replace

from proxy.config import Policies, Settings
from proxy.dialects import Message, headers
from proxy.errors import PalimpsestError
from proxy.models import cost
from proxy.pipeline.background import COUNTING, OFF_LOOP_BYTES, compute
from proxy.pipeline.finished import FINISH_REASON, finished_answer
from proxy.pipeline.inquiry import UpstreamSender
from proxy.pipeline.means import AppServices
from proxy.pipeline.offering import own_tools
from proxy.pipeline.past import request_form, size_of
from proxy.pipeline.planning import planned_of, report_of
from proxy.pipeline.receipt import log_line
from proxy.pipeline.reception import Reception
from proxy.pipeline.relay import Client, Outcome, StreamRelay, relay_json, relay_refusal
from proxy.pipeline.rounds import Rounds
from proxy.pipeline.summing import asked_for, prepared_of, work_of
from proxy.pipeline.turn import Call, ExchangeContext, opening_of, settlement_of
from proxy.pipeline.virtual import VirtualRelay
from proxy.recall import name_in
from proxy.store import Settled, Status, SummaryRow, session_key
from proxy.telemetry import log_exchange
from proxy.trimming import Entry
from proxy.upstream import Answer

_LOG: Final = logging.getLogger("palimpsest.exchange")
_EVENTS: Final = b"text/event-stream"
_NO_CONTENT: Final = 204
"""An answer that has no body, and can be given none."""
_UNNAMED: Final = frozenset({b"", b"application/octet-stream", b"text/plain"})


class ChatCompletions:
    """Answers requests for chat completions. One for the life of the process."""

    def __init__(
        self, settings: Settings, means: AppServices, mark: str | None = None, cache_secret: bytes = b""
    ) -> None:
        """Put together what an exchange needs.

        `mark`: 8 hexadecimal digits that every exchange's id ends with, the process's own. `cache_secret`:
        what the names of sessions in the provider's cache are made with.
        """
        self._settings = settings
        self._store = means.store
        self._background = means.background
        self._knowledge = means.knowledge
        self._summaries = means.summaries
        self._recall = means.recall
        self._reception = Reception(settings, means, secrets.token_hex(4) if mark is None else mark)
        self._inquiry = UpstreamSender(settings, means.upstream, cache_secret)

    @property
    def policies(self) -> Policies:
        """Those in force."""
        return self._reception.policies

    async def answer(self, call: Call, client: Client) -> None:
        """Serve one request from its bytes to the end of the response.

        Raises:
            PalimpsestError: it could not be read or planned; `client` was told nothing yet.
        """
        turn = await self._reception.turn(call)
        turn.mark("planned")
        self._begin(turn)
        try:
            if turn.finishing is not None:
                await self._repeat(turn, turn.finishing, client)
            else:
                await self._sum_up_first(turn)
                await self._serve(turn, client)
        except PalimpsestError as why:
            await self._settle(turn, Outcome(status=Status.FAILED, error=why.message))
            await client.fail(why, turn.ticket.headers())
        except BaseException as why:
            # The client left (or the server stops) before there was anything to keep, or we made a
            # mistake: either way nothing more will come, and the exchange must not stay pending.
            left = isinstance(why, asyncio.CancelledError)
            await self._settle(
                turn,
                Outcome(status=Status.CANCELLED, error="the client left")
                if left
                else Outcome(status=Status.FAILED, error=f"internal error: {type(why).__name__}"),
            )
            raise

    def _begin(self, turn: ExchangeContext) -> None:
        """Store what is new, while upstream is being asked."""
        if turn.stored:
            turn.began = self._store.begin(opening_of(turn, self._now(), self._knowledge.counter))

    async def _begun(self, turn: ExchangeContext) -> None:
        """Wait until what is new is stored.

        Raises:
            StoreUnavailable: it could not be.
        """
        if turn.began is not None:
            try:
                # Most upstreams take longer, and nothing is left to shield.
                await (turn.began if turn.began.done() else asyncio.shield(turn.began))
            except PalimpsestError:
                turn.stored = False  # there is nothing to settle
                raise

    async def _repeat(self, turn: ExchangeContext, entry: Entry, client: Client) -> None:
        """Answer with a reply that is stored: the task is finished, and upstream is not asked."""
        await self._begun(turn)
        reply = entry.message
        if turn.stored:
            key = session_key(turn.call.tenant, turn.past.id or "")
            found = await self._store.body(key, name_in(entry.ref) or "")
            reply = found[1].without_own_fields() if found is not None else reply
        await self._settle(turn, Outcome(status=Status.COMPLETE, finish_reasons=(FINISH_REASON,)))
        request, created = turn.request, self._now() // 1000
        kind, body = finished_answer(
            reply,
            id=f"chatcmpl-{turn.ticket.exchange}",
            created=created,
            model=request.model,
            stream=request.stream,
            usage=bool(request.wants_usage),
        )
        length = (b"content-length", b"%d" % len(body))
        await client.start(200, [(b"content-type", kind), length, *turn.ticket.headers()])
        await client.end(body)

    async def _sum_up_first(self, turn: ExchangeContext) -> None:
        """Wait for the summary that a move of the cut wants, where that is how they are to be made."""
        wanted, policy = turn.ticket.plan.wanted, turn.policy
        if wanted is None or policy is None or not turn.stored or self._settings.summarizer.background:
            return
        if wanted.urgent:
            await self._begun(turn)  # among workers one makes it: the session must be there for that
            attempt = await self._summaries.make(work_of(turn, policy, wanted))
            turn.waited = attempt.reason
            if attempt.row is not None:
                turn.past = replace(turn.past, attempt=attempt.row)
            prepared = prepared_of(attempt.row)
            if prepared is not None:
                turn.known = replace(turn.known, prepared=prepared)
                name = turn.ticket.plan.policy
                planned = await planned_of(turn.past, name, policy, turn.known)
                turn.ticket = report_of(turn.past, planned, turn.known, turn.ticket.exchange)
            self._reception.warned(turn)
            turn.mark("summed")

    def _sum_up_after(self, turn: ExchangeContext, settled: Settled) -> None:
        """Begin the summary that is wanted, now that the messages are nodes."""
        policy, asked = turn.policy, turn.compaction
        if policy is None or not settled.replies:
            return
        if isinstance(asked, SummaryRow):
            key = session_key(turn.call.tenant, turn.past.id or "")
            # The reply is stored: whatever becomes of this, the client is to hear of it, and now.
            self._background.start(self._store.keep_summary(key, asked_for(asked, self._now())))
        elif asked is not None:
            self._summaries.begin(work_of(turn, policy, asked, settled.replies[0], asked=True))
        elif turn.ticket.plan.wanted is not None and self._settings.summarizer.background:
            self._summaries.begin(work_of(turn, policy, turn.ticket.plan.wanted, settled.replies[0]))

    async def _serve(self, turn: ExchangeContext, client: Client) -> None:
        """Ask upstream and relay its answer."""
        answer, hides_usage = await self._inquiry.ask(turn)
        try:
            turn.mark("answered")

            def out(answer: Answer) -> list[tuple[bytes, bytes]]:
                passed = headers.to_client(answer.headers, extra_drop=_decoded(answer))
                return [*passed, *turn.ticket.headers()]

            async def settle(outcome: Outcome) -> None:
                await self._settle(turn, outcome)

            if not 200 <= answer.status < 300:
                body = await answer.read()
                await relay_refusal(answer, client, out(answer), body, settle)
                return
            stream = _is_stream(answer, asked=turn.request.stream)
            if stream or turn.own:
                await self._begun(turn)  # the others are told nothing before it is settled
            if turn.own:
                rounds = self._rounds(turn, hides_usage=hides_usage)
                relay = VirtualRelay(answer, client, out, rounds, stream=stream, hides_usage=hides_usage)
                await self._run(turn, relay.run(settle), relay.outcome)
            elif stream:
                plain = StreamRelay(answer, client, hides_usage=hides_usage)
                await self._run(turn, plain.run(out(answer), settle), plain.outcome)
            else:
                await relay_json(answer, client, out(answer), settle)
        finally:
            await answer.aclose()

    async def _run(
        self, turn: ExchangeContext, relaying: Awaitable[None], outcome: Callable[..., Outcome]
    ) -> None:
        """Relay; where the client leaves meanwhile, settle with what had come by then."""
        try:
            await relaying
        except asyncio.CancelledError:
            await self._settle(turn, outcome(left=True))
            raise

    def _rounds(self, turn: ExchangeContext, *, hides_usage: bool) -> Rounds:
        """Return what answers calls of the proxy's own tools in this exchange, and asks upstream again."""

        async def ask_again(messages: Sequence[Message]) -> Answer:
            turn.rounds = tuple(messages)
            return await self._inquiry.ask_again(turn, adds_usage=hides_usage)

        def form(message: Message, partial: bool) -> Message:
            return request_form(message, self._settings.upstream.reasoning, partial=partial)

        return Rounds(own_tools(turn, self._recall), ask_again, form)

    async def _settle(self, turn: ExchangeContext, outcome: Outcome) -> None:
        """Store how the exchange ended, once, whatever happens to the request meanwhile.

        Raises:
            StoreUnavailable: it could not be stored; nothing was acknowledged.
        """
        if turn.settled:
            return
        turn.settled = True
        turn.mark("settled")
        # Where upstream was asked again, only its first answer tells what the plan's tokens came to.
        usage = outcome.first_usage if turn.rounds else outcome.usage
        if usage is not None:
            model, planned, scale = turn.request.model, turn.ticket.plan, turn.past.scale
            reported = usage.get("prompt_tokens")
            turn.scale = self._knowledge.learn(model, scale, planned.tokens_sent, reported)
        took = turn.timings["settled"]
        log_exchange(_LOG, log_line(turn.ticket, turn.past.arrival.kind, outcome.status, took))
        if not turn.stored:
            return
        waits = self._store.waits_for_beginnings and turn.began is not None and not turn.began.done()
        work = COUNTING * size_of(message for message, _ in outcome.replies)
        if outcome.status is Status.COMPLETE and not waits and work < OFF_LOOP_BYTES:
            # Nearly always. What the store was asked for is done, whatever becomes of who asked: it needs no
            # task of its own. Who is being cancelled already could not even ask.
            await self._store_outcome(turn, outcome, work)
        else:
            await self._background.finish(self._store_outcome(turn, outcome, work))

    async def _store_outcome(self, turn: ExchangeContext, outcome: Outcome, work: int) -> None:
        spent, counter = cost(outcome.usage, turn.facts.dollars), self._knowledge.counter
        settlement = await compute(work, settlement_of, turn, outcome, self._now(), counter, spent)
        settled = await self._store.settle(settlement, turn.began)
        if turn.compaction is not None or turn.ticket.plan.wanted is not None:
            self._sum_up_after(turn, settled)

    def _now(self) -> int:
        return self._knowledge.now


def _is_stream(answer: Answer, *, asked: bool) -> bool:
    """Tell whether the answer is a stream of events; some servers do not say so, where one was asked for."""
    if answer.status == _NO_CONTENT:
        return False
    kind = (answer.header(b"content-type") or b"").partition(b";")[0].strip().lower()
    return kind == _EVENTS or (asked and kind in _UNNAMED)


def _decoded(answer: Answer) -> frozenset[bytes]:
    """Return the headers that no longer hold once the body is relayed decoded."""
    return frozenset({b"content-encoding"}) if answer.encoding and answer.readable else frozenset()

"""One exchange, top to bottom. Start here.

    prepare -> open -> send -> relay -> settle

The request is stored while the upstream is asked, and before the client sees an answer. The reply is stored before
the client sees its end. However the exchange ends, it is settled exactly once.
"""

from __future__ import annotations

import asyncio
import secrets
from functools import partial
from typing import Final

from proxy.config import Settings
from proxy.conversation import chain
from proxy.errors import PalimpsestError
from proxy.pipeline.background import STOPPED
from proxy.pipeline.context import Client, ClientRequest
from proxy.pipeline.own_tools import Rounds, WholeRelay, own_tools, virtual_relay
from proxy.pipeline.prepare import Prepared, Preparer, as_requested, has_target
from proxy.pipeline.receipt import response_headers
from proxy.pipeline.relay import EVENTS, Answered, Settle, StreamRelay, headers_of_answer, relay_whole
from proxy.pipeline.send import Sent, UpstreamSender
from proxy.pipeline.services import AppServices
from proxy.pipeline.settle import Exchange
from proxy.recall import name_in
from proxy.store import Settled, Status, SummaryRow
from proxy.summaries import Given, Work
from proxy.trimming import Entry, Policy, SummaryRequest
from proxy.upstream import Answer

_UNTYPED: Final = frozenset({b"", b"application/octet-stream", b"text/plain"})  # some servers send streams as these
_OPENING_SECONDS: Final = 2.0  # how long to wait for the first byte of such an answer


class ExchangeHandler:
    """Answers completion requests of every dialect. One for the life of the process."""

    def __init__(
        self, settings: Settings, services: AppServices, process_mark: str | None = None, cache_secret: bytes = b""
    ) -> None:
        """Set up for the process. Exchange ids end with `process_mark`, 8 hexadecimal digits.

        For `cache_secret` see `cache_key`.
        """
        self._settings = settings
        self._services = services
        self._preparer = Preparer(settings, services, process_mark or secrets.token_hex(4))
        self._sender = UpstreamSender(settings, services.upstream, self._preparer, cache_secret)
        self.policies: Final = self._preparer.policies  # the policies in force

    async def answer(self, call: ClientRequest, client: Client) -> None:
        """Serve one request from its bytes to the end of the response.

        Raises a `PalimpsestError` if the request cannot be planned. Nothing was sent to the client then.
        """
        exchange = Exchange(await self._preparer.prepare(call), self._services)
        exchange.mark("planned")
        try:
            exchange.open()
            if exchange.prepared.finishing is not None:
                await self._repeat_reply(exchange, exchange.prepared.finishing, client)
                return
            if exchange.report.plan.summary_request is not None and not self._settings.summarizer.background:
                await self._await_summary(exchange, exchange.report.plan.summary_request)
            sent = await self._sender.send(exchange.prepared, exchange.replanned)
            exchange.report = sent.attempt.report
            await self._relay(exchange, sent, client)
        except PalimpsestError as why:
            await self._settle(exchange, Answered(status=Status.FAILED, error=why.message))
            await client.fail(why, response_headers(exchange.report))
        except BaseException as why:
            # The client left, the server is stopping, or this is a bug. The exchange must not stay pending.
            answered = Answered(status=Status.FAILED, error=f"internal error: {type(why).__name__}")
            if isinstance(why, asyncio.CancelledError):
                told = STOPPED if STOPPED in why.args else "the client left"
                answered = Answered(status=Status.CANCELLED, error=told)
            await self._settle(exchange, answered)
            raise

    async def _relay(self, exchange: Exchange, sent: Sent, client: Client) -> None:
        """Relay the upstream's answer to the client, and settle before the client sees its end."""
        answer, prepared, reasoning = sent.answer, exchange.prepared, self._settings.upstream.reasoning
        dialect = prepared.call.dialect

        def headers_of(each: Answer) -> list[tuple[bytes, bytes]]:
            return headers_of_answer(each) + response_headers(exchange.report)

        settle = partial(self._settle, exchange)
        try:
            exchange.mark("answered")
            stream = await _is_stream(answer, asked=prepared.request.stream)
            if not 200 <= answer.status < 300 or not (stream or prepared.own_tools):
                await relay_whole(dialect, answer, client, headers_of, settle)
                return
            await exchange.opened()
            if prepared.own_tools:
                own = own_tools(exchange, self._services.recall)
                rounds = Rounds(
                    dialect,
                    own.names,
                    own.answer,
                    partial(self._sender.send_rounds, sent),
                    lambda message, broke_off: message.as_request(reasoning, partial=broke_off),
                )
                relay = virtual_relay(
                    answer,
                    client,
                    headers_of,
                    rounds,
                    stream=stream,
                    hides_usage=sent.attempt.adds_usage,
                    start=self._services.background.start,
                )
            else:
                relay = StreamRelay(dialect, answer, client, headers_of, hides_usage=sent.attempt.adds_usage)
            try:
                await relay.run(settle)
            except asyncio.CancelledError as why:
                # If the process stops now, this task is cancelled a second time.
                await self._services.background.finish(_settle_left(relay, settle, stopped=STOPPED in why.args))
                raise
        finally:
            await answer.aclose()

    async def _repeat_reply(self, exchange: Exchange, entry: Entry, client: Client) -> None:
        """Answer with the stored reply of a finished task. The upstream is not asked."""
        await exchange.opened()
        prepared, services, api = exchange.prepared, self._services, exchange.prepared.call.dialect.replies
        reply = entry.message
        if prepared.stored and prepared.history.unplaced is None:
            found = await services.store.body(prepared.key, name_in(entry.ref) or "")
            reply = found[1].without_own_fields() if found is not None else reply
        ids = () if api.repeat_id is None else (api.repeat_id(exchange.report.exchange),)
        await self._settle(exchange, Answered(status=Status.COMPLETE, finish_reasons=(api.calling,), ids=ids))
        kind, body = api.repeat(
            reply,
            exchange=exchange.report.exchange,
            created=services.knowledge.now // 1000,
            model=prepared.request.model,
            stream=prepared.request.stream,
            usage=bool(prepared.request.wants_usage),
        )
        length = (b"content-length", b"%d" % len(body))
        await client.start(200, [(b"content-type", kind), length, *response_headers(exchange.report)])
        await client.end(body)

    async def _await_summary(self, exchange: Exchange, wanted: SummaryRequest) -> None:
        """Wait for the summary that a trim asks for, and plan again with it."""
        prepared = exchange.prepared
        policy = prepared.context.policy
        if policy is None or not prepared.stored or not wanted.urgent or prepared.history.unplaced is not None:
            return
        await exchange.opened()  # only one of the workers makes it, and needs the stored session for that
        attempt = await self._services.summaries.make(summary_work(prepared, policy, wanted))
        exchange.prepared = await self._preparer.with_summary(prepared, attempt.row, attempt.reason)
        exchange.report = exchange.prepared.report
        exchange.mark("summed")

    async def _settle(self, exchange: Exchange, answered: Answered) -> None:
        await exchange.settle(answered, partial(self._begin_summary, exchange))

    def _begin_summary(self, exchange: Exchange, settled: Settled) -> None:
        """Start the requested summary, now that the messages are stored as nodes."""
        prepared, requested = exchange.prepared, exchange.requested_summary
        policy, services = prepared.context.policy, self._services
        if policy is None:
            return
        if isinstance(requested, SummaryRow):
            row = as_requested(requested, services.knowledge.now)
            # The reply is stored, so the client gets it now. It does not wait for this write.
            services.background.start(services.store.keep_summary(prepared.key, row, None))
            return
        wanted = exchange.report.plan.summary_request if self._settings.summarizer.background else None
        if (request := requested or wanted) is not None:
            asked = requested is not None
            services.summaries.begin(summary_work(prepared, policy, request, settled.replies[0], asked=asked))


def summary_work(
    prepared: Prepared, policy: Policy, wanted: SummaryRequest, tip: str | None = None, *, asked: bool = False
) -> Work:
    """Return the job that makes the summary that an exchange asks for.

    `tip` is the end of the branch once the exchange is settled; before that it is None. Without a tip, the job carries
    messages itself: the request's messages if they are the whole branch, or its new ones if the summary reaches them.
    `asked`: the model itself asked for the summary.
    """
    history, call = prepared.history, prepared.call
    given: Given | None = None
    if tip is None:
        tip, fresh = history.arrival.base, tuple([body.message for body in history.fresh])
        if not history.start and not history.composed:
            nodes = (*history.nodes, *chain(tip, fresh))
            given = Given(messages=tuple([entry.message for entry in history.entries]), nodes=nodes)
        elif fresh and not history.carried and wanted.stop > history.entries[-len(fresh)].position:
            given = Given(messages=fresh, nodes=tuple(chain(tip, fresh)), base=tip)
        if given is not None and given.nodes:
            tip = given.nodes[-1]
    return Work(
        key=prepared.key,
        session=history.id or "",
        tip=tip,
        wanted=wanted,
        edit=policy.summarizing,
        model=prepared.request.model,
        caller=call.caller,
        policy=prepared.report.plan.policy,
        asked=asked,
        has_target=has_target(policy),
        exchange=prepared.report.exchange,
        attempt=history.attempt,
        given=given,
    )


async def _settle_left(relay: StreamRelay | WholeRelay, settle: Settle, *, stopped: bool) -> None:
    """Settle what had arrived when the client left or the process stopped."""
    answered = await relay.ending(left=True)
    if stopped:
        answered.error = STOPPED
    await settle(answered)


async def _is_stream(answer: Answer, *, asked: bool) -> bool:
    """Tell whether the answer is a stream of events.

    The media type alone does not decide: some servers mislabel a requested stream, others label a whole reply a stream.
    """
    if answer.status == 204:  # it has no body
        return False
    if answer.media_type == EVENTS:
        if asked:
            return True
    elif not asked or answer.media_type not in _UNTYPED:
        return False
    if not answer.readable:
        return True
    # JSON begins with a brace, and no event does.
    return await answer.opening(lambda text: text.lstrip()[:1] or None, _OPENING_SECONDS) != b"{"

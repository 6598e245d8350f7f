"""What is stored of an exchange: its new messages while upstream is asked, its end in one transaction."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Final

from msgspec.structs import asdict, replace

from proxy.conversation import node_id
from proxy.dialects import Message
from proxy.errors import PalimpsestError, StoreUnavailable
from proxy.models import cost
from proxy.pipeline.background import COUNTING, OFF_LOOP_BYTES, compute
from proxy.pipeline.history import History, size_of
from proxy.pipeline.outage import LOST, WAITS, SpooledExchange
from proxy.pipeline.prepare import Prepared
from proxy.pipeline.receipt import PlanReport, log_line, receipt_of, summary_request_of
from proxy.pipeline.relay import Answered
from proxy.pipeline.services import AppServices
from proxy.store import Body, Kept, Opening, Reply, Settled, Settlement, Status, SummaryRow
from proxy.telemetry import log_exchange
from proxy.tokens import TokenCounter
from proxy.trimming import UNTRIMMED, Cut, Hidden, SummaryRequest, outside_gaps

_LOG: Final = logging.getLogger("palimpsest.exchange")


class Exchange:
    """One exchange under way: opened once, while upstream is asked, and settled once, whatever happens."""

    def __init__(self, prepared: Prepared, services: AppServices) -> None:
        """Begin with a prepared request."""
        self.prepared = prepared
        self.report: PlanReport = prepared.report  # the plan as it was sent
        self.requested_summary: SummaryRequest | SummaryRow | None = None
        """The summary that the model asked for, or the one that is there and was not used yet."""
        self.timings: dict[str, float] = {}  # milliseconds from the request's arrival, by event
        self._services = services
        self._opening: asyncio.Future[None] | None = None
        self._stored = prepared.stored
        self._waits = prepared.history.unplaced is not None  # whether it can only be stored later
        self._settled = False

    def mark(self, event: str) -> float:
        """Note when something happened; return the milliseconds from the request's arrival."""
        took = round((time.monotonic() - self.prepared.received) * 1000, 2)
        self.timings[event] = took
        return took

    def replanned(self, report: PlanReport, event: str) -> None:
        """Note what became of the request ("overflowed", "refused"), and that the plan of `report` is sent instead."""
        self.report = report
        self.mark(event)

    def open(self) -> None:
        """Begin to store what is new; upstream is asked meanwhile."""
        if self._stored and not self._waits:
            services = self._services
            self._opening = services.store.begin(opening_of(self.prepared, services.knowledge.now))

    async def opened(self) -> None:
        """Wait until what is new is stored. Where it cannot be, the exchange is stored later: upstream was asked."""
        if self._opening is not None:
            try:
                await self._services.store.began(self._opening)
            except StoreUnavailable:
                self._warn(WAITS)
                self._waits = True
            except PalimpsestError:
                self._stored = False  # there is nothing to settle
                raise

    async def settle(self, answered: Answered, then: Callable[[Settled], None]) -> None:
        """Store how the exchange ended, once; call `then` with what was stored, if there is a reply.

        An answer was paid for: it is not withheld, whatever becomes of this.
        """
        if self._settled:
            return
        self._settled = True
        try:
            await self._settle(answered, then)
        except PalimpsestError:
            raise
        except Exception as why:  # noqa: BLE001 - whatever it is, the client gets its answer
            _LOG.exception("an exchange could not be settled as it ended: it is kept as failed")
            error = f"the proxy could not read the answer: {type(why).__name__}"
            failed = Answered(status=Status.FAILED, error=error, upstream_status=answered.upstream_status)
            with suppress(Exception):
                await self._services.background.finish(self._store(failed, None, 0, then))

    async def _settle(self, answered: Answered, then: Callable[[Settled], None]) -> None:
        prepared, services = self.prepared, self._services
        took, scale = self.mark("settled"), None
        # Where upstream was asked again, only its first answer tells what the plan's tokens came to.
        usage = answered.first_usage if answered.asked_again else answered.usage
        # Of what the provider adds nothing was counted here.
        if usage is not None and (not prepared.request.state or prepared.history.arrival.expanded):
            scale = services.knowledge.learn(
                prepared.request.model, prepared.history.scale, self.report.plan.tokens_sent, usage.get("prompt_tokens")
            )
        log_exchange(_LOG, log_line(self.report, answered.status, took))
        if not self._stored:
            return
        store, work = services.store, COUNTING * size_of([message for message, _ in answered.replies])
        opening = self._opening
        waits = self._waits or (opening is not None and not opening.done() and store.waits_for_beginnings)
        storing = self._store(answered, scale, work, then)
        if answered.status is Status.COMPLETE and not waits and work < OFF_LOOP_BYTES:
            try:
                await storing  # nearly always: no task is needed
            except asyncio.CancelledError:
                # A submitted write completes; but if the store fails, the exchange has to wait in the spool.
                services.background.start(self._store(answered, scale, work, then))
                raise
        else:
            await services.background.finish(storing)

    async def _store(self, answered: Answered, scale: float | None, work: int, then: Callable[[Settled], None]) -> None:
        services = self._services
        dollars = self.prepared.facts.dollars
        spent = None if dollars is None else cost(answered.usage, dollars)
        settlement = await compute(
            work, settlement_of, self, answered, services.knowledge.now, services.counter, spent, scale
        )
        if not self._waits:
            try:
                settled = await services.store.settle(settlement, self._opening)
            except StoreUnavailable:
                self._warn(WAITS)
            else:
                if answered.ids:
                    await self._keep_ids(settlement, settled, answered.ids)
                if settled.replies:
                    self._remember(settled.replies)
                    then(settled)
                return
        await self._spool(settlement)

    async def _keep_ids(self, settlement: Settlement, settled: Settled, ids: Sequence[str]) -> None:
        """Keep the ids under which the provider keeps the reply; the exchange itself is stored."""
        node = settled.replies[0] if settled.replies else ""
        with suppress(StoreUnavailable):
            await self._services.store.keep_provider_ids(
                settlement.tenant, settlement.session, settlement.dialect, ids, node
            )

    async def _spool(self, settlement: Settlement) -> None:
        """Let the exchange wait until the store can be used."""
        unplaced = self.prepared.history.unplaced
        if unplaced is not None and not unplaced.infers:
            replies = [reply.body.message for reply in settlement.replies]
            self._remember([node_id(unplaced.incoming.digest, reply) for reply in replies])
        spooled = SpooledExchange(
            opening=opening_of(self.prepared, self._services.knowledge.now),
            settlement=settlement,
            incoming=unplaced.incoming if unplaced is not None else None,
            infers=unplaced is not None and unplaced.infers,
        )
        try:
            await self._services.outage.keep(spooled)
        except StoreUnavailable as why:
            _LOG.error("exchange %s is lost: %s", settlement.exchange, why)
            self._warn(LOST)

    def _remember(self, replies: Iterable[str]) -> None:
        """Remember where a conversation without a name stands: the store may be away at its next turn."""
        context, session = self.prepared.context, self.prepared.history.id
        if context.session is None and session is not None:
            self._services.loader.remember(context, session, replies)

    def _warn(self, warning: str) -> None:
        if warning not in self.report.warnings:
            self.report = replace(self.report, warnings=(*self.report.warnings, warning))


def opening_of(prepared: Prepared, now: int) -> Opening:
    """Return what is stored of a request before its answer is here; `now` is in milliseconds since 1970."""
    request, history, report = prepared.request, prepared.history, prepared.report
    return Opening(
        dialect=prepared.call.dialect.name,
        tenant=prepared.call.tenant,
        session=history.id or "",
        exchange=report.exchange,
        created_at=now,
        kind=history.arrival.kind,
        base=history.arrival.base,
        messages=history.fresh,
        instructions=request.instructions or None,
        instructions_tokens=prepared.instructions_tokens if request.instructions else 0,
        digest=history.digest,
        model=request.model,
        agent=prepared.context.agent,
        policy=report.plan.policy,
        policy_version=report.plan.version,
        stream=request.stream,
        parameters=request.parameters,
        tools=request.tools,
        idempotency=prepared.context.idempotency,
        forms=history.variants,
    )


def settlement_of(
    exchange: Exchange,
    answered: Answered,
    now: int,
    counter: TokenCounter,
    cost: float | None = None,
    scale: float | None = None,
) -> Settlement:
    """Return how the exchange ended, for the store.

    `now` is in milliseconds since 1970, `cost` in dollars; `scale` is what upstream's usage taught about its
    counting.
    """
    prepared, report = exchange.prepared, exchange.report
    history, made, model = prepared.history, report.plan, prepared.request.model
    arrival = history.arrival
    # Where the request stands is not known: neither is where its cut does.
    new_cut = made.cut if (made.trimmed or history.borrowed) and history.unplaced is None else None
    finished = prepared.finishing is not None
    receipt = receipt_of(report, history.standing)
    receipt |= {
        "usage": answered.usage,
        "finish_reasons": list(answered.finish_reasons),
        "upstream_model": answered.model,
        "upstream_status": answered.upstream_status,
        "error": answered.error,
        "cost": cost,
        "finished": finished,
        "summarizer": summary_request_of(made.summary_request, history.attempt, prepared.no_summary),
        "own_calls": [asdict(call) for call in answered.own_calls],
        "timings": exchange.timings,
    }
    return Settlement(
        dialect=prepared.call.dialect.name,
        tenant=prepared.call.tenant,
        session=history.id or "",
        exchange=report.exchange,
        settled_at=now,
        status=answered.status,
        kind=arrival.kind,
        base=arrival.base,
        at_head=arrival.at_head,
        moves_head=arrival.moves_head,
        resends=arrival.resends,
        messages=history.fresh,
        arrivals=made.decided[len(history.nodes) :],
        policy_version=made.version,
        agent=prepared.context.agent,
        replies=tuple(
            [_reply(message, partial, answered.hidden, model, counter) for message, partial in answered.replies]
        ),
        cut=new_cut,
        tokens_before=report.tokens_before,
        tokens_sent=report.tokens_sent,
        receipt=receipt,
        kept=_kept(history, new_cut) if new_cut is not None else None,
        follows=None if history.standing is None or history.borrowed else history.standing.node,
        heard=history.heard if prepared.context.policy is not None else None,
        vouched=history.vouched,
        scale=scale,
        finished=finished,
        cost=cost,
        carried=history.carried,
    )


def _reply(message: Message, partial: bool, hidden: Hidden | None, model: str, counter: TokenCounter) -> Reply:
    """Return a reply as it is stored, with what the client was not shown."""
    tokens = counter.message(message, model)
    if hidden is not None:
        added = sum(counter.messages([*hidden.before, *hidden.after], model))
        if hidden.reply is not None:
            added += counter.message(hidden.reply, model) - tokens
        hidden = replace(hidden, tokens=added)
    return Reply(body=Body(message=message, tokens=tokens), partial=partial, hidden=hidden)


def _kept(history: History, cut: Cut) -> Kept | None:
    """Return what the cut left; None for all, and where the request did not speak of the whole history before it."""
    if history.start or cut.version.startswith(UNTRIMMED):
        return None
    before = [item for item in enumerate(history.entries) if item[1].position < cut.position]
    places = [place for place, _ in outside_gaps(before, cut.gaps, lambda item: item[1].position)]
    stored = len(history.nodes)
    return Kept(
        nodes=tuple([history.nodes[place] for place in places if place < stored]),
        messages=tuple([place - stored for place in places if place >= stored]),
    )

"""What is stored of an exchange: its new messages while upstream is asked, its end in one transaction."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Final

from msgspec.structs import asdict, replace

from proxy.dialects import Message
from proxy.errors import PalimpsestError
from proxy.models import cost
from proxy.pipeline.background import COUNTING, OFF_LOOP_BYTES, compute
from proxy.pipeline.history import History, size_of
from proxy.pipeline.prepare import Prepared
from proxy.pipeline.receipt import PlanReport, log_line, receipt_of, summary_request_of
from proxy.pipeline.relay import Answered
from proxy.pipeline.services import AppServices
from proxy.store import Body, Kept, Opening, Reply, Settled, Settlement, Status, SummaryRow
from proxy.telemetry import log_exchange
from proxy.tokens import TokenCounter
from proxy.trimming import Cut, Hidden, SummaryRequest, outside_gaps

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
        self._settled = False

    def mark(self, event: str) -> float:
        """Note when something happened; return the milliseconds from the request's arrival."""
        took = round((time.monotonic() - self.prepared.received) * 1000, 2)
        self.timings[event] = took
        return took

    def replanned(self, report: PlanReport) -> None:
        """Note that upstream found the request too long, and that the shorter plan of `report` is sent."""
        self.report = report
        self.mark("overflowed")

    def open(self) -> None:
        """Begin to store what is new; upstream is asked meanwhile."""
        if self._stored:
            services = self._services
            self._opening = services.store.begin(opening_of(self.prepared, services.knowledge.now))

    async def opened(self) -> None:
        """Wait until what is new is stored; raises `StoreUnavailable` if it could not be."""
        if self._opening is not None:
            try:
                # Most upstreams take longer than the store; then there is nothing left to shield.
                await (self._opening if self._opening.done() else asyncio.shield(self._opening))
            except PalimpsestError:
                self._stored = False  # there is nothing to settle
                raise

    async def settle(self, answered: Answered, then: Callable[[Settled], None]) -> None:
        """Store how the exchange ended, once; call `then` with what was stored, if there is a reply."""
        if self._settled:
            return
        self._settled = True
        prepared, services = self.prepared, self._services
        took, scale = self.mark("settled"), None
        # Where upstream was asked again, only its first answer tells what the plan's tokens came to.
        usage = answered.first_usage if answered.asked_again else answered.usage
        if usage is not None:
            scale = services.knowledge.learn(
                prepared.request.model, prepared.history.scale, self.report.plan.tokens_sent, usage.get("prompt_tokens")
            )
        log_exchange(_LOG, log_line(self.report, prepared.history.arrival.kind, answered.status, took))
        if not self._stored:
            return
        store, work = services.store, COUNTING * size_of([message for message, _ in answered.replies])
        opening = self._opening
        waits = opening is not None and not opening.done() and store.waits_for_beginnings
        storing = self._store(answered, scale, work, then)
        if answered.status is Status.COMPLETE and not waits and work < OFF_LOOP_BYTES:
            # Nearly always. A submitted write completes even if the caller is cancelled: no task is needed.
            await storing
        else:
            await services.background.finish(storing)

    async def _store(self, answered: Answered, scale: float | None, work: int, then: Callable[[Settled], None]) -> None:
        services = self._services
        dollars = self.prepared.facts.dollars
        spent = None if dollars is None else cost(answered.usage, dollars)
        settlement = await compute(
            work, settlement_of, self, answered, services.knowledge.now, services.counter, spent, scale
        )
        settled = await services.store.settle(settlement, self._opening)
        if settled.replies:
            then(settled)


def opening_of(prepared: Prepared, now: int) -> Opening:
    """Return what is stored of a request before its answer is here; `now` is in milliseconds since 1970."""
    request, history, report = prepared.request, prepared.history, prepared.report
    return Opening(
        dialect=prepared.call.dialect.name,
        tenant=prepared.call.tenant,
        session=report.session or "",
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
    new_cut = made.cut if made.trimmed or history.borrowed else None
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
        session=report.session or "",
        exchange=report.exchange,
        settled_at=now,
        status=answered.status,
        kind=arrival.kind,
        base=arrival.base,
        at_head=arrival.at_head,
        moves_head=arrival.moves_head,
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
    """Return what the cut left; None where the request did not speak of the whole history before it."""
    if history.start:
        return None
    before = [item for item in enumerate(history.entries) if item[1].position < cut.position]
    places = [place for place, _ in outside_gaps(before, cut.gaps, lambda item: item[1].position)]
    stored = len(history.nodes)
    return Kept(
        nodes=tuple([history.nodes[place] for place in places if place < stored]),
        messages=tuple([place - stored for place in places if place >= stored]),
    )

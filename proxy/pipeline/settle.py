"""Stores an exchange: its new messages while the upstream is asked, and its end in one transaction."""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

from msgspec.structs import asdict, replace

from proxy.conversation import node_id
from proxy.dialects import Message
from proxy.dialects.jsontext import sound
from proxy.errors import PalimpsestError, StoreUnavailable
from proxy.models import Used, cost_of, used
from proxy.pipeline import headers
from proxy.pipeline.background import COUNTING, OFF_LOOP_BYTES, compute
from proxy.pipeline.context import Headers
from proxy.pipeline.history import History, size_of
from proxy.pipeline.outage import LOST, WAITS, SpooledExchange, keep_ids
from proxy.pipeline.prepare import Prepared
from proxy.pipeline.receipt import PlanReport, log_line, receipt_of, summary_request_of
from proxy.pipeline.relay import Answered
from proxy.pipeline.savings import OTHER, UNSURE, cached, cause_of, miss_of, saved, shares_of, unique_tokens
from proxy.pipeline.services import AppServices
from proxy.store import Body, ExchangeFigures, Kept, Opening, Reply, Settled, Settlement, Status, SummaryRow
from proxy.telemetry import BUCKETS, ExchangePlaces, Meters, log_exchange
from proxy.tokens import TokenCounter
from proxy.trimming import UNTRIMMED, Cut, Hidden, SummaryRequest, outside_gaps
from proxy.upstream import Destination

if TYPE_CHECKING:  # importing it at runtime would load OpenTelemetry
    from proxy.telemetry.tracing import TracedExchange

_LOG: Final = logging.getLogger("palimpsest.exchange")
_MILLION: Final = 1_000_000
_LONGEST_ERROR: Final = 4_000  # characters of an error that a receipt keeps; some errors repeat the request
_SHORTEST_KEY: Final = 8  # a shorter key, such as `none` for a local server, is no secret and may be a common word
_CHANGE_WORK: Final = 1024  # work to record a change in a receipt, in bytes to parse (see `compute`)
_LEARNT_FROM: Final = frozenset({"", OTHER})  # misses that show how much a provider really caches


class Exchange:
    """One exchange in progress: opened once, while the upstream is asked, and settled once, whatever happens."""

    def __init__(self, prepared: Prepared, services: AppServices) -> None:
        """Start from a prepared request."""
        self.prepared = prepared
        self.report: PlanReport = prepared.report  # of the plan that was sent
        self.requested_summary: SummaryRequest | SummaryRow | None = None
        """The summary that the model asked for, or a ready one that no trim has used yet."""
        self.timings: dict[str, float] = {}  # milliseconds from the request's arrival, by event
        self._services = services
        self._opening: asyncio.Future[None] | None = None
        self._stored = prepared.stored
        self._waits = prepared.history.unplaced is not None  # whether the exchange can only be stored later
        self._settled = False
        self._counted = False

    def mark(self, event: str) -> float:
        """Record the time of an event. Return the milliseconds since the request's body had arrived."""
        took = round((time.monotonic() - self.prepared.received) * 1000, 2)
        self.timings[event] = took
        return took

    def replanned(self, report: PlanReport, event: str) -> None:
        """Record an event (see `Replanned`) and the report that holds from now on."""
        self.report = report
        self.mark(event)
        if event == "refused":
            self._services.counts.add("palimpsest_fail_open")

    def open(self) -> None:
        """Start to store the new messages. The upstream is asked meanwhile."""
        services = self._services
        services.counts.values[services.counts.under_way] += 1
        if self._stored and not self._waits:
            opening = opening_of(self.prepared, services.knowledge.now)
            self._opening = services.store.begin(opening, self.prepared.packing)

    async def opened(self) -> None:
        """Wait until the new messages are stored. If the store is away, the exchange is stored later."""
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
        """Store the end of the exchange, once. Call `then` with what was stored if there is a reply.

        The client paid for its answer, so an unexpected error here does not withhold it.
        """
        if self._settled:
            return
        self._settled = True
        try:
            await self._settle(answered, then)
        except PalimpsestError:
            raise
        except Exception as why:  # noqa: BLE001 - whatever it is, the client gets its answer
            of_answer = isinstance(why, OverflowError | RecursionError)  # a huge number, or deep nesting
            told = "an exchange could not be settled as it ended: it is kept as failed (%s)"
            _LOG.error(told, why, exc_info=not of_answer)
            what = "read the answer" if of_answer else "store how the exchange ended"
            error = f"the proxy could not {what}: {type(why).__name__}"
            failed = Answered(status=Status.FAILED, error=error, upstream_status=answered.upstream_status)
            now = self._services.knowledge.now
            figures = ExchangeFigures(model=self.prepared.request.model, policy=self.report.plan.policy)
            with suppress(Exception):
                figures = figures_of(self, failed, now, None)
            with suppress(Exception):
                await self._services.background.finish(self._settle_with(failed, figures, None, now, 0, then))

    async def _settle(self, answered: Answered, then: Callable[[Settled], None]) -> None:
        prepared, services = self.prepared, self._services
        took, scale = self.mark("settled"), None
        # If the upstream was asked again, only its first answer counts the tokens of the plan.
        usage = answered.first_usage if answered.asked_again else answered.usage
        reported, now = used(answered.usage), services.knowledge.now
        figures = figures_of(self, answered, now, reported)
        # Messages that the provider adds were not counted here.
        if usage is not None and (not prepared.request.state or prepared.history.arrival.expanded):
            usual = figures.miss in _LEARNT_FROM
            scale = services.knowledge.learn(
                prepared.request.model,
                prepared.history.scale,
                self.report.plan.tokens_sent,
                usage.get("prompt_tokens"),
                base_url=prepared.facts.base_url,
                read=figures.tokens_cached if usual else 0,
                missed=figures.tokens_missed if usual else 0,
            )
        log_exchange(_LOG, log_line(self.report, answered.status, took))
        if prepared.call.trace is not None:
            prepared.call.trace.tell(traced(prepared, self.report, answered, reported))
        if not self._stored:
            self._count(figures, answered.status)
            return
        work = COUNTING * size_of([message for message, _ in answered.replies])
        work += _CHANGE_WORK * len(self.report.plan.made)
        settling = partial(self._settle_with, answered, figures, scale, now, work, then)
        if answered.status is not Status.COMPLETE or self._waits or work >= OFF_LOOP_BYTES or figures.miss in UNSURE:
            await services.background.finish(settling())  # this may take long, or the client may have left
            return
        try:
            await settling()  # the usual case needs no task
        except asyncio.CancelledError:
            # A submitted write completes anyway. But if the store fails, the exchange must go to the spool.
            services.background.start(settling())
            raise

    async def _settle_with(
        self,
        answered: Answered,
        figures: ExchangeFigures,
        scale: float | None,
        now: int,
        work: int,
        then: Callable[[Settled], None],
    ) -> None:
        if figures.miss in UNSURE:
            with suppress(StoreUnavailable):  # the answer does not depend on the store
                figures = await self._explained(figures, answered)
        counter = self._services.counter
        settlement = await compute(work, settlement_of, self, answered, now, counter, figures, scale)
        # Count only now: an exchange that cannot be settled like this is settled, and counted, as failed.
        self._count(figures, answered.status)
        await self._store(settlement, self._kept_ids(answered), then)

    async def _store(self, settlement: Settlement, ids: Sequence[str], then: Callable[[Settled], None]) -> None:
        """Store the end of the exchange. If the store cannot be used, put the exchange into the spool."""
        services, counts = self._services, self._services.counts
        if not self._waits:
            began = time.monotonic()
            counts.values[counts.queue] += 1
            try:
                settled = await services.store.settle(settlement, self._opening)
                if ids:
                    await keep_ids(services.store, settlement, settled, ids)
            except StoreUnavailable:
                self._warn(WAITS)
            else:
                if settled.replies:
                    self._remember(settled.replies)
                    then(settled)
                else:
                    services.loader.remember_unanswered(self.prepared.history)
                return
            finally:
                counts.values[counts.queue] -= 1
                _observe(counts, counts.storing, time.monotonic() - began)
        await self._spool(settlement, ids)

    async def _spool(self, settlement: Settlement, ids: Sequence[str]) -> None:
        """Put the exchange into the spool until the store can be used."""
        unplaced, masker = self.prepared.history.unplaced, self._services.store.masker
        if unplaced is not None and not unplaced.infers:
            replies = [reply.body.message for reply in settlement.replies]
            if masker is not None:
                replies = [masker.message(reply) for reply in replies]
            self._remember([node_id(unplaced.incoming.digest, reply) for reply in replies])
        opening = opening_of(self.prepared, self._services.knowledge.now)
        spooled = SpooledExchange(
            opening=opening if masker is None else masker.opening(opening),
            settlement=settlement if masker is None else masker.settlement(settlement),
            incoming=unplaced.incoming if unplaced is not None else None,
            infers=unplaced is not None and unplaced.infers,
            state=unplaced.state if unplaced is not None else "",
            ids=tuple(ids),
        )
        try:
            waits = await self._services.outage.keep(spooled, failed=not self._waits)
        except StoreUnavailable as why:
            _LOG.error(
                "exchange %s is lost if this process ends before the store is back: %s", settlement.exchange, why
            )
            self._warn(LOST)
        else:
            if waits:
                self._services.counts.add("palimpsest_spooled")

    def _kept_ids(self, answered: Answered) -> tuple[str, ...]:
        """Return the ids by which later requests may refer to the reply.

        If the proxy expands ids itself, the provider need not keep the reply, and does not report which conversation
        the reply belongs to.
        """
        request = self.prepared.request
        if not request.keeps_reply:
            return ()
        ids = answered.ids if answered.kept or self._services.loader.expands else ()
        return (*ids, request.conversation) if request.conversation else ids

    def _remember(self, replies: Iterable[str]) -> None:
        """Remember the replies of an unnamed session, because the store may be away at its next turn."""
        context, session = self.prepared.context, self.prepared.history.id
        if context.session is None and session is not None:
            self._services.loader.remember(context, session, replies)

    def _warn(self, warning: str) -> None:
        if warning not in self.report.warnings:
            self.report = replace(self.report, warnings=(*self.report.warnings, warning))

    async def _explained(self, figures: ExchangeFigures, answered: Answered) -> ExchangeFigures:
        """Return the figures, refined by what the store knows about the cause of the cache miss."""
        prepared, store = self.prepared, self._services.store
        if figures.miss == OTHER:  # the client changed what leads the history, or the provider evicted it
            session = await store.session_at(prepared.key)
            request = prepared.request if store.masker is None else store.masker.request(prepared.request)
            return replace(figures, miss=cause_of(request, session))
        rows, _ = await store.exchanges(prepared.key, limit=2)
        before = next((row for row in rows if row.id != self.report.exchange), None)
        caches = before is None or cached(before)
        return figures_of(self, answered, self._services.knowledge.now, used(answered.usage), caches=caches)

    def _count(self, figures: ExchangeFigures, status: Status) -> None:
        """Count the exchange for Prometheus, once. Adds to the array directly, which costs less than a call."""
        if self._counted:  # the exchange is being settled a second time, as failed
            return
        self._counted = True
        prepared, report, counts = self.prepared, self.report, self._services.counts
        like = (prepared.call.dialect.name, prepared.history.arrival.kind.value, status.value, figures.policy)
        at = counts.exchanges.get(like) or counts.of_exchanges(*like)
        counts.values[counts.under_way] -= 1
        counts.values[at.requests] += 1
        _observe(counts, at.added, figures.added_ms / 1000)
        _observe(counts, at.upstream, figures.upstream_ms / 1000)
        count_usage(self._services, at, figures, prepared.call.tenant, prepared.call.key)
        for edit in report.edits:
            counts.add("palimpsest_edits", edit)
        if figures.miss:
            counts.add("palimpsest_cache_misses", figures.miss)


def count_usage(
    services: AppServices, at: ExchangePlaces, figures: ExchangeFigures, tenant: str, key: str | None
) -> None:
    """Count the usage of an exchange, for Prometheus and for budgets. `key` is the name of the client's key."""
    values = services.counts.values
    for place, name in at.sums:
        if amount := getattr(figures, name):
            values[place] += amount
    if services.used_by is not None:
        services.used_by(tenant, key, figures.tokens_input + figures.tokens_output, figures.cost)


def traced(prepared: Prepared, report: PlanReport, answered: Answered, reported: Used | None) -> TracedExchange:
    """Return the facts about an exchange for OpenTelemetry."""
    from proxy.telemetry.tracing import TracedExchange  # noqa: PLC0415 - only if tracing is on

    error = None
    if answered.status is not Status.COMPLETE:
        status = answered.upstream_status
        error = str(status) if status is not None and status >= 400 else str(answered.status.value)
    return TracedExchange(
        model=prepared.request.model,
        base_url=prepared.destination.base_url,
        messages_api=prepared.call.dialect.name == "messages",
        answered_by=answered.model,
        stream=prepared.request.stream,
        session=report.session,
        exchange=report.exchange,
        kind=report.kind,
        status=answered.status.value,
        policy=report.plan.policy,
        edits=report.edits,
        finish_reasons=[reason for reason in answered.finish_reasons if reason],
        tokens_before=report.tokens_before,
        tokens_sent=report.tokens_sent,
        input=None if reported is None else reported.prompt,
        cached=0 if reported is None else reported.read,
        written=0 if reported is None else reported.written,
        output=0 if reported is None else reported.output,
        error=error,
    )


def _observe(counts: Meters, place: int, seconds: float) -> None:
    """Add a value to the histogram at `place`."""
    if place:  # 0 means no histogram
        counts.values[place + bisect_left(BUCKETS, seconds)] += 1
        counts.values[place + len(BUCKETS) + 1] += seconds


def opening_of(prepared: Prepared, now: int) -> Opening:
    """Return what is stored of a request before its answer arrives. `now` is in milliseconds since 1970."""
    request, history, report = prepared.request, prepared.history, prepared.report
    # A request that continues from an expanded one needs all instructions that were sent.
    instructions = history.instructions if history.arrival.expanded else request.instructions
    return Opening(
        dialect=prepared.call.dialect.name,
        tenant=prepared.call.tenant,
        session=history.id or "",
        exchange=report.exchange,
        created_at=now,
        kind=history.arrival.kind,
        base=history.arrival.base,
        messages=history.fresh,
        instructions=instructions or None,
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


def told_error(error: str | None, destination: Destination, client: Headers, query: bytes) -> str | None:
    """Return an upstream's error for a receipt, shortened, and without the keys that were sent.

    Some errors repeat the key, and keys are never stored. `client` are the client's headers, `query` is its query
    string.
    """
    if error is None:
        return None
    sent = [value for value in (destination.authorization, destination.api_key) if value is not None]
    if destination.forwards_credentials:
        sent += headers.credentials(client)
    if destination.forwards_query:
        sent += headers.query_credentials(query)
    for value in sent:
        _, _, key = value.decode("latin-1").strip().rpartition(" ")
        if len(key) >= _SHORTEST_KEY:
            error = error.replace(key, "[key]")
    return error[:_LONGEST_ERROR]


def settlement_of(
    exchange: Exchange,
    answered: Answered,
    now: int,
    counter: TokenCounter,
    figures: ExchangeFigures,
    scale: float | None,
) -> Settlement:
    """Return the end of the exchange in the form for the store.

    `now` is in milliseconds since 1970. `figures` are for the statistics. `scale` is the session's new scale, learnt
    from the upstream's token counts.
    """
    prepared, report = exchange.prepared, exchange.report
    history, made, model = prepared.history, report.plan, prepared.request.model
    arrival = history.arrival
    # The position of a cut is unknown while the request is unplaced.
    new_cut = made.cut if (made.trimmed or history.borrowed) and history.unplaced is None else None
    if finished := prepared.finishing is not None:
        new_cut = None  # nothing was sent
    receipt = receipt_of(report, history.standing, borrowed=history.borrowed)
    cost = figures.cost if figures.priced else None
    receipt |= {
        "usage": answered.usage,
        "finish_reasons": list(answered.finish_reasons),
        "upstream_model": answered.model,
        "upstream_status": answered.upstream_status,
        "error": told_error(answered.error, prepared.destination, prepared.call.headers, prepared.call.query),
        "cost": cost,
        "cost_saved": figures.cost_saved if figures.priced else None,
        "cache_miss": figures.miss or None,
        "cost_missed": figures.cost_missed if figures.miss and figures.priced else None,
        "finished": finished,
        "summarizer": summary_request_of(made.summary_request, history.attempt, prepared.no_summary),
        "own_calls": [asdict(call) for call in answered.own_calls],
        "timings": exchange.timings,
    }
    if history.start:  # the client left out the messages before it
        receipt["start"] = history.start
    if answered.later and answered.ids:
        receipt["response_id"] = answered.ids[0]
        if prepared.request.conversation:
            receipt["conversation_id"] = prepared.request.conversation
    if prepared.own_tools:
        receipt["own_tools"] = list(prepared.own_tools)
    if prepared.removed_tools:
        receipt["removed_tools"] = list(prepared.removed_tools)
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
        yields=arrival.yields,
        messages=history.fresh,
        arrivals=made.decided[len(history.nodes) :],
        policy_version=made.version,
        agent=prepared.context.agent,
        replies=tuple(
            [reply_of(message, partial, answered.hidden, model, counter) for message, partial in answered.replies]
        ),
        cut=new_cut,
        tokens_before=report.tokens_before,
        tokens_sent=report.tokens_sent,
        # An upstream's error may hold values that neither the spool nor another process can take.
        receipt=sound(receipt),
        kept=_kept(history, new_cut) if new_cut is not None else None,
        follows=None if history.standing is None or history.borrowed else history.standing.node,
        heard=history.heard if prepared.context.policy is not None else None,
        relayed=history.relayed,
        scale=scale,
        finished=finished or answered.later,
        cost=cost,
        carried=history.carried,
        figures=figures,
    )


def figures_of(
    exchange: Exchange, answered: Answered, now: int, all_rounds: Used | None, *, caches: bool = True
) -> ExchangeFigures:
    """Return what the exchange adds to the statistics. `now` is in milliseconds since 1970.

    `all_rounds` is the usage of all the upstream's answers together; None if it could not be read. `caches` is false if
    the request before this one showed that the provider caches nothing.
    """
    prepared, report, timings = exchange.prepared, exchange.report, exchange.timings
    facts, plan = prepared.facts, report.plan
    dollars = facts.dollars
    planned, settled = timings.get("planned", 0.0), timings.get("settled", 0.0)
    cost = cost_recalls = cost_saved = cost_cache_saved = cost_missed = 0.0
    miss, missed, priced = "", 0, 0
    # The plan covers the first round. The other rounds are calls of the proxy's own tools.
    tokens = used(answered.first_usage) if answered.asked_again else all_rounds
    trims = report.tokens_before != report.tokens_sent
    if tokens is not None and all_rounds is not None:
        shares = None
        if trims or tokens.prompt >= facts.prices.minimum:
            shares = shares_of(prepared.history, report, tokens.prompt)
            miss = miss_of(tokens, shares, prepared.history, report, facts, now)
            missed = max(round(min(shares.expected, tokens.prompt)) - tokens.read, 0) if miss else 0
        spent = None if dollars is None else cost_of(all_rounds, dollars)
        if dollars is not None and spent is not None:
            cost, priced = spent, 1
            rates = dollars.at(all_rounds.prompt)
            if answered.asked_again:
                cost_recalls = spent - (cost_of(tokens, dollars) or 0.0)
            if trims and shares is not None:
                cost_saved = saved(tokens, shares, miss, facts, dollars, caches=caches)
            cost_saved -= cost_recalls
            cost_cache_saved = all_rounds.read * (rates.input - rates.cached_read) / _MILLION
            cost_cache_saved -= all_rounds.written * (rates.cache_write - rates.input) / _MILLION
            cost_missed = missed * (rates.input - rates.cached_read) / _MILLION
    return ExchangeFigures(
        model=prepared.request.model,
        policy=plan.policy,
        miss=miss,
        tokens_before=report.tokens_before,
        tokens_sent=report.tokens_sent,
        tokens_input=all_rounds.prompt if all_rounds is not None else 0,
        tokens_cached=all_rounds.read if all_rounds is not None else 0,
        tokens_written=all_rounds.written if all_rounds is not None else 0,
        tokens_output=all_rounds.output if all_rounds is not None else 0,
        tokens_missed=missed,
        tokens_unique=round(unique_tokens(prepared.history, report) * report.scale) if trims else 0,
        trims=int(plan.trimmed and not report.only_observed),
        edits=len(report.edits),
        warnings=len(report.warnings),
        recalls=len(answered.own_calls),
        priced=priced,
        cost=cost,
        cost_saved=cost_saved,
        cost_cache_saved=cost_cache_saved,
        cost_missed=cost_missed,
        cost_recalls=cost_recalls,
        added_ms=planned,
        upstream_ms=max(settled - planned, 0.0),
    )


def reply_of(message: Message, partial: bool, hidden: Hidden | None, model: str, counter: TokenCounter) -> Reply:
    """Return a reply in the form for the store, with what the client was not shown."""
    tokens = counter.message(message, model)
    if hidden is not None:
        added = sum(counter.messages([*hidden.before, *hidden.after], model))
        if hidden.reply is not None:
            added += counter.message(hidden.reply, model) - tokens
        hidden = replace(hidden, tokens=added)
    return Reply(body=Body(message=message, tokens=tokens), partial=partial, hidden=hidden)


def _kept(history: History, cut: Cut) -> Kept | None:
    """Return the messages before the cut that it kept.

    Returns None if it kept all, or if the request did not include the whole history before it.
    """
    if history.start or cut.version.startswith(UNTRIMMED):
        return None
    before = [item for item in enumerate(history.entries) if item[1].position < cut.position]
    places = [place for place, _ in outside_gaps(before, cut.gaps, lambda item: item[1].position)]
    stored = len(history.nodes)
    return Kept(
        nodes=tuple([history.nodes[place] for place in places if place < stored]),
        messages=tuple([place - stored for place in places if place >= stored]),
    )

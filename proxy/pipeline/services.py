"""The services that are open while the process serves, and what is known of models."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

import anyio.to_thread
from cachetools import LRUCache
from msgspec import Struct
from msgspec.structs import replace

from proxy.config import Settings
from proxy.dialects import Dialect, Message
from proxy.errors import StoreUnavailable
from proxy.models import Catalogue, ModelFacts
from proxy.pipeline.background import Background
from proxy.pipeline.history import HistoryLoader
from proxy.pipeline.outage import Outage, serves_without, spool_of
from proxy.recall import Recall
from proxy.store import Store, WriterProcess
from proxy.summaries import Summaries, Summarizer, UsedBy
from proxy.telemetry import Meters
from proxy.tokens import Calibration, TokenCounter, learnt, rounded
from proxy.trimming import PlanningContext, ReadySummary
from proxy.upstream import Upstream

_MODELS: Final = 1024  # limit of remembered models; clients choose the names
_NEWS: Final = 0.1  # weight of a new observation of the provider's cache, against all earlier ones


class Knowledge:
    """Facts about models and their token counts. One for the life of the process."""

    def __init__(
        self,
        counter: TokenCounter,
        catalogue: Catalogue,
        upstream: Upstream,
        calibration: Calibration | None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Count with `counter`. Without `calibration` nothing is learnt from the upstream's counts.

        `clock` returns seconds since 1970.
        """
        self.counter = counter
        self.clock = clock
        self.catalogue = catalogue  # replaced when the configuration is reloaded
        self._upstream = upstream
        self._calibration = calibration
        self._cached_shares: LRUCache[tuple[str | None, str], float] = LRUCache(_MODELS)  # by address and model

    def facts(self, model: str, dialect: Dialect) -> ModelFacts:
        """Return the facts about a model at the upstream that serves it in this dialect."""
        return self.facts_at(model, self._upstream.destination(model, dialect.name).base_url + dialect.requests.path)

    def facts_at(self, model: str, base_url: str) -> ModelFacts:
        """Return the facts about a model at an address."""
        return self.catalogue.facts(model, base_url)

    async def can_count(self, model: str) -> None:
        """Build the model's vocabulary if it is missing. Runs in a thread, because it takes 0.3 s."""
        if not self.counter.is_built(model):
            await anyio.to_thread.run_sync(self.counter.build, model)

    @property
    def now(self) -> int:
        """Milliseconds since 1970."""
        return int(self.clock() * 1000)

    def planning(
        self,
        model: str,
        facts: ModelFacts,
        *,
        fixed: int,
        agent: str | None,
        updated_at: int | None,
        scale: float | None = None,
        ready_summary: ReadySummary | None = None,
        keeps: bool = True,
    ) -> PlanningContext:
        """Return the context for planning.

        `fixed` is the token count of instructions and tools. `updated_at` is when the session's last exchange ended, in
        milliseconds since 1970. `scale` is the session's scale, learnt from the upstream's counts. `ready_summary` is
        the summary that may be used. `keeps`: a new cut is kept for the next request.
        """
        share = round(self._cached_shares.get((facts.base_url, model), 1.0), 1)  # really cached
        return PlanningContext(
            count=lambda message: self.counter.message(message, model),
            fixed_tokens=fixed,
            context_window=facts.context_window,
            agent=agent,
            idle=None if updated_at is None else max(0, self.now - updated_at) / 1000,
            prices=facts.prices if share == 1 else replace(facts.prices, served=share),
            scale=1.0 if scale is None or self._calibration is None else rounded(scale),
            ready_summary=ready_summary,
            keeps=keeps,
        )

    def fixed_tokens(self, instructions: Sequence[Message], tools: bytes | None, model: str) -> int:
        """Return the tokens of instructions and tools, which are sent beside the history."""
        tokens = sum(self.counter.messages(instructions, model)) if instructions else 0
        return tokens + (self.counter.json(tools, model) if tools is not None else 0)

    def learn(
        self,
        model: str,
        scale: float | None,
        counted: int,
        reported: object,
        *,
        base_url: str | None = None,
        read: int = 0,
        missed: int = 0,
    ) -> float | None:
        """Return a session's scale after the upstream `reported` its own count of a request of `counted` tokens.

        The scale is stored with the session, so that every process uses the same one, also after a restart. Of the
        tokens that should have been cached, `read` were and `missed` were not. That is learnt by model and `base_url`,
        the address of its `facts`.
        """
        if read + missed:
            place = (base_url, model)
            known = self._cached_shares.get(place, 1.0)
            self._cached_shares[place] = known + _NEWS * (read / (read + missed) - known)
        if self._calibration is None or not isinstance(reported, int) or isinstance(reported, bool):
            return scale
        self._calibration.learn(model, counted, reported)
        return learnt(scale, counted, reported)


class AppServices(Struct, kw_only=True):
    """The open services that exchanges use."""

    store: Store
    upstream: Upstream
    background: Background
    loader: HistoryLoader
    outage: Outage
    knowledge: Knowledge
    summaries: Summaries
    recall: Recall
    counter: TokenCounter
    counts: Meters
    used_by: UsedBy | None = None  # called with the tokens and dollars that a tenant and a key used


@asynccontextmanager
async def open_services(
    settings: Settings,
    counts: Meters | None = None,
    writer: WriterProcess | None = None,
    away: StoreUnavailable | None = None,
) -> AsyncGenerator[AppServices]:
    """Open all services, and close them in reverse order. Without `counts`, the figures are this process's own.

    `writer` writes exchanges; without it this process does. `away` says why the store could not be used just now. If
    requests can be served without the store, the process then starts without waiting for it again.

    Raises `ConfigurationError` for a wrong store URL, and `StoreUnavailable` if the store cannot be used and requests
    cannot be served without it.
    """
    async with AsyncExitStack() as stack:
        counter = TokenCounter(settings.tokens.method)
        forwards = settings.store.on_failure == "forward"
        spool = await anyio.to_thread.run_sync(spool_of, settings)
        stack.callback(spool.close)
        bare = serves_without(settings, spool)
        migrate = settings.store.migrate
        store = await Store.open(settings.store.url, migrate=migrate, spool=spool, bare=bare, away=away)
        store.searches_index = settings.store.search == "index"
        stack.push_async_callback(store.close)
        if writer is not None:
            await store.use(writer)
        try:
            await store.ready()
        except StoreUnavailable:
            if not bare:
                raise
        expands = settings.responses.state == "proxy"
        loader = HistoryLoader(store, counter, settings.upstream.reasoning, expands=expands)
        outage = Outage(store, spool, loader, forwards=forwards)
        background = Background()
        stack.push_async_callback(background.drain)
        upstream = Upstream(settings.upstream, shares_key=settings.auth.mode == "keys")
        stack.push_async_callback(upstream.aclose)
        catalogue = Catalogue(settings.models)
        await anyio.to_thread.run_sync(catalogue.warm)
        calibration = counter.calibration if settings.tokens.calibrate else None
        knowledge = Knowledge(counter, catalogue, upstream, calibration)
        summarizer = Summarizer(settings.summarizer, upstream)
        counts = counts or Meters()
        summaries = Summaries(
            store, summarizer, counter, knowledge.facts_at, background.start, counts=counts, later=outage.later
        )
        stack.push_async_callback(summaries.aclose)
        yield AppServices(
            store=store,
            upstream=upstream,
            background=background,
            loader=loader,
            outage=outage,
            knowledge=knowledge,
            summaries=summaries,
            recall=Recall(store),
            counter=counter,
            counts=counts,
        )

"""What exchanges are made with: everything that is open while the process serves."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio.to_thread
from msgspec import Struct

from proxy.config import Settings
from proxy.models import Catalogue
from proxy.pipeline.background import Background
from proxy.pipeline.knowledge import Knowledge
from proxy.pipeline.past import HistoryLoader
from proxy.recall import Recall
from proxy.store import Store
from proxy.summaries import Summaries, Summarizer
from proxy.tokens import TokenCounter
from proxy.upstream import Upstream


class AppServices(Struct, frozen=True, kw_only=True):
    """What exchanges are made with, open."""

    store: Store
    upstream: Upstream
    background: Background
    memory: HistoryLoader
    knowledge: Knowledge
    summaries: Summaries
    recall: Recall

    counter: TokenCounter


@asynccontextmanager
async def opened(settings: Settings) -> AsyncGenerator[AppServices]:
    """Open everything, and close it in the opposite order.

    Raises:
        ConfigurationError: the store's address is no URL of a supported database.
        StoreUnavailable: the store cannot be opened, or its tables are of another version.
    """
    async with AsyncExitStack() as stack:
        store = await Store.open(settings.store.url, migrate=settings.store.migrate)
        stack.push_async_callback(store.close)
        await store.ready()
        background = Background()
        stack.push_async_callback(background.drain)
        upstream = Upstream(settings.upstream, shares_key=settings.auth.mode == "keys")
        stack.push_async_callback(upstream.aclose)
        counter = TokenCounter(settings.tokens.method)
        await anyio.to_thread.run_sync(counter.warm)  # or the first request would wait for it
        catalogue = Catalogue(settings.models)
        await anyio.to_thread.run_sync(catalogue.warm)
        calibration = counter.calibration if settings.tokens.calibrate else None
        knowledge = Knowledge(counter, catalogue, upstream, calibration)
        summarizer = Summarizer(settings.summarizer, upstream)
        summaries = Summaries(store, summarizer, counter, knowledge.facts_at, background.start)
        stack.push_async_callback(summaries.aclose)
        memory = HistoryLoader(store, counter, settings.upstream.reasoning)
        yield AppServices(
            store=store,
            upstream=upstream,
            background=background,
            memory=memory,
            knowledge=knowledge,
            summaries=summaries,
            recall=Recall(store),
            counter=counter,
        )

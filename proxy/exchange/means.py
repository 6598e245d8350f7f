"""What exchanges are made with: everything that is open while the process serves."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager

import anyio.to_thread
from msgspec import Struct

from proxy.exchange.background import Background
from proxy.exchange.knowledge import Knowledge
from proxy.exchange.past import Memory
from proxy.models.catalogue import Catalogue
from proxy.recall.answering import Recall
from proxy.settings.model import Settings
from proxy.store.store import Store
from proxy.summaries.making import Summaries
from proxy.summaries.summarizer import Summarizer
from proxy.tokens.counter import TokenCounter
from proxy.upstream.client import Upstream


class Means(Struct, frozen=True):
    """What exchanges are made with, open."""

    store: Store
    upstream: Upstream
    background: Background
    memory: Memory
    knowledge: Knowledge
    summaries: Summaries
    recall: Recall

    counter: TokenCounter


@asynccontextmanager
async def opened(settings: Settings) -> AsyncGenerator[Means]:
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
        memory = Memory(store, counter, settings.upstream.reasoning)
        yield Means(store, upstream, background, memory, knowledge, summaries, Recall(store), counter)

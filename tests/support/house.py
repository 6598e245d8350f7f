"""Runs exchanges without an HTTP server: the services that they need, and a client that records the answer."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import orjson

from proxy.config import Settings
from proxy.dialects.chat import CHAT
from proxy.errors import PalimpsestError
from proxy.models import Catalogue
from proxy.pipeline import AppServices, Background, ClientRequest, ExchangeHandler
from proxy.pipeline.history import HistoryLoader
from proxy.pipeline.outage import Outage
from proxy.pipeline.services import Knowledge
from proxy.recall import Recall
from proxy.store import ExchangeRow, Spool, Store, session_key
from proxy.summaries import Summaries, Summarizer
from proxy.telemetry import Meters
from proxy.tokens import TokenCounter
from proxy.upstream import Upstream
from tests.support.server import settings_for
from tests.support.upstream import Upstream as Provider

SESSION = (b"x-session-id", b"s")
KEY = session_key("t", "s")
LONG = [
    message
    for number in range(40)
    for message in (
        {"role": "user", "content": f"{number} " + "parcel " * 100},
        {"role": "assistant", "content": "noted"},
    )
] + [{"role": "user", "content": "and now?"}]
"""A conversation of 81 messages, about 4,500 tokens."""


class Heard:
    """The client of an exchange; records the answer."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.got = b""
        self.error: PalimpsestError | None = None
        self.ended = False

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        self.status = status
        self.headers = {name.decode().lower(): value.decode() for name, value in headers}

    async def write(self, data: bytes) -> None:
        self.got += data

    async def end(self, data: bytes = b"") -> None:
        self.got += data
        self.ended = True

    async def fail(self, error: PalimpsestError, headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.error = error
        self.headers = {name.decode().lower(): value.decode() for name, value in headers}


class House:
    """The services that an exchange needs, open."""

    def __init__(self, settings: Settings, store: Store, spool: Spool) -> None:
        self.settings = settings
        self.store = store
        self.spool = spool
        self.upstream = Upstream(settings.upstream, shares_key=False)
        self.background = Background()
        counter = TokenCounter(settings.tokens.method)
        loader = HistoryLoader(store, counter, settings.upstream.reasoning)
        seconds = count(1_000)  # a clock that advances with every call, so that there is a newest one
        knowledge = Knowledge(counter, Catalogue(settings.models), self.upstream, None, lambda: float(next(seconds)))
        summarizer = Summarizer(settings.summarizer, self.upstream)
        outage = Outage(store, spool, loader, forwards=settings.store.on_failure == "forward")
        summaries = Summaries(store, summarizer, counter, knowledge.facts_at, self.background.start, later=outage.later)
        recall = Recall(store)
        self.services = AppServices(
            store=store,
            upstream=self.upstream,
            background=self.background,
            loader=loader,
            outage=outage,
            knowledge=knowledge,
            summaries=summaries,
            recall=recall,
            counter=counter,
            counts=Meters(),
        )
        self.chat = ExchangeHandler(settings, self.services)

    async def ask(
        self, model: str = "echo", *headers: tuple[bytes, bytes], client: Heard | None = None, **body: Any
    ) -> Heard:
        client = client or Heard()
        asked = {"model": model, "messages": [{"role": "user", "content": "hi"}], **body}
        await self.chat.answer(
            ClientRequest(dialect=CHAT, tenant="t", headers=[SESSION, *headers], query=b"", body=orjson.dumps(asked)),
            client,
        )
        return client

    async def last(self) -> ExchangeRow:
        rows, _ = await self.store.exchanges(KEY, limit=1)
        return rows[0]


@asynccontextmanager
async def opened(provider: Provider, folder: Path, **sections: Any) -> AsyncIterator[House]:
    settings = settings_for(provider, folder, sections)
    spool = Spool(folder / "spool", "test", settings.store.spool_max_bytes)
    spool.open()
    house = House(settings, await Store.open(settings.store.url, migrate=False, spool=spool), spool)
    try:
        yield house
    finally:
        await house.background.drain()
        await house.upstream.aclose()
        await house.store.close()
        spool.close()

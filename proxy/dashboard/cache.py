"""The cache page: causes and costs of misses of the provider's cache; declared tools compared with called tools."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import asdict, replace

from proxy.dashboard.overview import RANGES, RangeQuery
from proxy.dashboard.render import Page
from proxy.dialects import dialect_named
from proxy.errors import NotFound
from proxy.pipeline import AppServices, compute
from proxy.pipeline.statistics import statistics
from proxy.store import HOUR, NodeRow, SessionListQuery, SessionRow

MEANINGS: Final = {
    "": ("no miss", "what was sent before came from the cache, or the provider does not tell"),
    "first": ("first request", "nothing of it was sent before"),
    "trim": ("a trim", "the policy changed the beginning; the next requests are cheaper for it"),
    "expired": ("expired", "the session rested longer than the provider keeps its cache"),
    "instructions": ("changed system prompt", "the client sent other instructions than before"),
    "tools": ("changed tools", "the client declared other tools than before"),
    "model": ("changed model", "the client asked another model than before"),
    "history": ("changed history", "the client left out or changed older messages"),
    "other": ("unknown", "nothing that the proxy knows of has changed"),
}
ENOUGH: Final = 20  # least sessions before a tool without calls is shown as removable
_SECONDS: Final = 0.4  # time limit for scanning sessions for tools
_PAGE: Final = 50
_MILLION: Final = 1_000_000
_COLUMNS: Final = ("cause", "requests", "tokens_missed", "cost_missed")


class DeclaredTool(Struct, kw_only=True):
    """Statistics of one tool over the scanned sessions."""

    name: str
    tokens: int = 0  # tokens of its largest definition
    sessions: int = 0  # number of sessions that declare it
    requests: int = 0  # number of requests of these sessions
    calls: int = 0
    called_in: int = 0  # number of sessions that call it
    tokens_sent: int = 0  # tokens of its definition in all these requests
    cost: float = 0.0  # dollars for `tokens_sent` at the price of cached input


class Inventory(Struct, frozen=True, kw_only=True):
    """The tools of the scanned sessions."""

    tools: tuple[DeclaredTool, ...]
    sessions: int  # number of scanned sessions
    complete: bool  # whether all sessions of the requested range were scanned


async def read_inventory(services: AppServices, query: SessionListQuery) -> Inventory:
    """Scan sessions for their tools, newest first, for at most `_SECONDS`."""
    until = time.monotonic() + _SECONDS
    found: dict[str, DeclaredTool] = {}
    looked = 0
    after: str | None = None
    while True:
        listed, after = await services.store.listed(replace(query, limit=_PAGE, after=after))
        for each in listed:
            if time.monotonic() > until:
                return Inventory(tools=tuple(found.values()), sessions=looked, complete=False)
            looked += 1
            await _add_session(services, each.row, found)
        if after is None:
            return Inventory(tools=tuple(found.values()), sessions=looked, complete=True)


async def _add_session(services: AppServices, session: SessionRow, found: dict[str, DeclaredTool]) -> None:
    store, model, dialect = services.store, session.model or "", dialect_named(session.dialect)
    tools = await store.tools(session.key, session.tools) if session.tools is not None else None
    if tools is None:
        return
    calls: Counter[str] = Counter()
    with suppress(NotFound):  # deleted in the meantime
        nodes = (await store.lineage(session.key, [session.head])).nodes(session.head)
        async for rows in store.portions(session.key, nodes):
            size = sum([len(row.message.raw) for row in rows])
            calls.update(await compute(size, _calls_in, rows))
    dollars = services.knowledge.facts(model, dialect).dollars
    for name, definition in dialect.requests.declared(tools):
        if name is None:  # the provider runs the tool, so its calls are not visible here
            continue
        tokens = services.counter.json(bytes(definition), model)
        use = found.setdefault(name, DeclaredTool(name=name))
        use.tokens = max(use.tokens, tokens)
        use.sessions += 1
        use.requests += session.requests
        use.tokens_sent += tokens * session.requests
        use.calls += calls[name]
        use.called_in += name in calls
        if dollars is not None:
            use.cost += tokens * session.requests * dollars.cached_read / _MILLION


def _calls_in(rows: Sequence[NodeRow]) -> list[str]:
    return [call.name for row in rows for call in row.message.calls]


class CacheData(Struct, frozen=True, kw_only=True):
    """The data of the page."""

    asked: RangeQuery
    misses: Mapping[str, Any]  # by cause, in the format of `GET /stats`
    models: Mapping[str, Any]
    inventory: Inventory


async def read_cache(services: AppServices, asked: RangeQuery) -> CacheData:
    """Read the data of the page."""
    now = datetime.now(UTC)
    query = asked.within("miss", now)
    sessions = SessionListQuery(
        tenant=asked.tenant, model=asked.model or None, since=query.since * HOUR, until=query.until * HOUR
    )
    misses, models, inventory = await asyncio.gather(
        statistics(services.store, query),
        statistics(services.store, replace(query, group="model")),
        read_inventory(services, sessions),
    )
    return CacheData(asked=asked, misses=misses, models=models, inventory=inventory)


def cache_page(found: CacheData, *, admin: bool) -> Page:
    """Return the page about the cache and the tools."""
    asked, total = found.asked, found.misses["total"]
    causes = [_cause(row) for row in found.misses["data"]]
    tools = sorted(found.inventory.tools, key=lambda use: (-use.tokens_sent, use.name))
    data = {
        "asked": {"since": asked.since, "until": asked.until, "model": asked.model, "policy": asked.policy}
        | {"tenant": asked.tenant if admin else None},
        "ranges": RANGES,
        "since": found.misses["since"],
        "until": found.misses["until"],
        "total": total,
        "misses": causes,
        "missed": sum([each["requests"] for each in causes if each["cause"]]),
        "models": found.models["data"],
        "tools": [asdict(use) | {"removable": not use.calls and use.sessions >= ENOUGH} for use in tools],
        "inventory": {"sessions": found.inventory.sessions, "complete": found.inventory.complete, "enough": ENOUGH},
    }
    return Page(template="cache.html", title="Cache and tools", data=data, columns=_COLUMNS, rows=causes)


def _cause(row: Mapping[str, Any]) -> dict[str, Any]:
    name, meaning = MEANINGS.get(row["group"], (row["group"], ""))
    told = {each: row[each] for each in ("requests", "tokens_input", "tokens_cached", "tokens_missed", "cost_missed")}
    return {"cause": row["group"], "name": name, "meaning": meaning, **told}

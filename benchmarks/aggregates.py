"""How long statistics over many exchanges take: `python -m benchmarks.aggregates [--exchanges 1000000]`.

The exchanges are made up and counted by the store's own functions, as settling counts them: in sessions of twenty, by
tenants, models and policies, over three months, by four workers.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Final, get_args

from msgspec.structs import replace

from proxy.dashboard.overview import RangeQuery, read_overview
from proxy.store import HOUR, Group, SessionListQuery, Sort, StatsQuery, Store
from proxy.store.database import StoreConnection
from proxy.store.records import ExchangeFigures, session_key
from proxy.store.rollups import Sums, add_figures, sums_of
from proxy.store.sessions import create_session

_DAYS: Final = 90
_IN_SESSION: Final = 20
_BATCH: Final = 50  # sessions per write
_TENANTS: Final = 20
_MODELS: Final = ("gpt-5.6", "gpt-5.6-mini", "claude-sonnet-5")
_POLICIES: Final = ("default", "lean", "off")
_WORKERS: Final = 4
_RUNS: Final = 5
_LAST: Final = 500_000  # the hour since 1970 in which the last exchange ended
_POSTGRES: Final = "PostgreSQL"


def main(words: Sequence[str] | None = None) -> int:
    """Print the median and the maximum time of each query."""
    from tests.support import postgres  # noqa: PLC0415 - it is needed for this alone

    parser = argparse.ArgumentParser(prog="python -m benchmarks.aggregates", description=__doc__)
    parser.add_argument("--exchanges", type=int, default=1_000_000)
    given = parser.parse_args(words)
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        url = stack.enter_context(postgres.database(stack.enter_context(postgres.server())))
        for name, store in (("SQLite", f"sqlite:///{Path(folder) / 'sums.db'}"), (_POSTGRES, url)):
            for line in asyncio.run(_measure(store, given.exchanges)):
                print(f"{name:<11} {line}", flush=True)
    return 0


async def _measure(url: str, exchanges: int) -> list[str]:
    store = await Store.open(url)
    try:
        began = time.monotonic()
        for batch in _batches(exchanges):
            await store.direct()._write(partial(_fill, batch=batch))  # noqa: SLF001 - a unit of its own
        lines = [f"{exchanges:,} exchanges counted in {time.monotonic() - began:.0f} s"]
        began, most = time.monotonic(), 0.0
        while True:
            start = time.monotonic()
            if not await store.direct().fold(_LAST * HOUR + HOUR // 2):
                break
            most = max(most, time.monotonic() - start)
        lines.append(f"folded in {time.monotonic() - began:.0f} s, {most * 1000:.0f} ms at most at once")
        for question, query in _questions():
            took: list[float] = []
            for _ in range(_RUNS):
                start = time.monotonic()
                rows, total = await store.stats_and_total(query)
                took.append(time.monotonic() - start)
                if query.since == 0 and query.tenant is query.policy is None and query.group != "session":
                    assert total.sums["requests"] == exchanges  # noqa: S101
                    assert sum(row.sums["requests"] for row in rows) == exchanges  # noqa: S101
            lines.append(f"{question:<28} {_told(took)}")
        took = []
        for _ in range(_RUNS):
            start = time.monotonic()
            await read_overview(store, RangeQuery(since="all", until="2027-02-01"), admin=True)
            took.append(time.monotonic() - start)
        lines.append(f"{'the overview of all time':<28} {_told(took)}")
        for sort in get_args(Sort):
            took = []
            for _ in range(_RUNS):
                start = time.monotonic()
                await store.listed(SessionListQuery(sort=sort))
                took.append(time.monotonic() - start)
            lines.append(f"{f'sessions by {sort}':<28} {_told(took)}")
        start = time.monotonic()
        await store.spent("tenant-1", (_LAST - 24 * 30) * HOUR)
        lines.append(f"{'dollars of a month':<28} {_told([time.monotonic() - start])}")
        return lines
    finally:
        await store.close()


def _told(took: Sequence[float]) -> str:
    ordered = sorted(took)
    return f"{ordered[len(ordered) // 2] * 1000:8.0f} ms at the median, {ordered[-1] * 1000:8.0f} ms at most"


def _questions() -> Iterator[tuple[str, StatsQuery]]:
    everything = StatsQuery(since=0, until=_LAST + 1, group="day", limit=10_000)
    for group in get_args(Group):
        yield f"all, by {group}", replace(everything, group=group)
    yield "7 days, by hour", replace(everything, since=_LAST - 7 * 24, group="hour")
    yield "a tenant's, by day", replace(everything, tenant="tenant-1")
    yield "a policy's, by model", replace(everything, policy="lean", group="model")


def _batches(exchanges: int) -> Iterator[list[list[Sums]]]:
    """Yield the exchanges in batches of sessions, with one list per session."""
    chance = random.Random(7)  # noqa: S311 - the same ones at each run
    sessions = exchanges // _IN_SESSION
    for first in range(0, sessions, _BATCH):
        numbers = range(first, min(first + _BATCH, sessions))
        yield [list(_session(number, sessions, chance)) for number in numbers]


def _session(number: int, sessions: int, chance: random.Random) -> Iterator[Sums]:
    tenant, dialect = f"tenant-{number % _TENANTS}", ("chat", "messages")[number % 5 == 0]
    key = session_key(tenant, f"s{number}", dialect)
    model, policy, slot = chance.choice(_MODELS), chance.choice(_POLICIES), chance.randrange(_WORKERS)
    at = int((_LAST - _DAYS * 24 * (1 - number / sessions)) * HOUR)
    for turn in range(_IN_SESSION):
        trims = turn % 10 == 9
        figures = ExchangeFigures(
            model=model,
            policy=policy,
            miss="first" if not turn else "trim" if trims else "",
            tokens_before=1000 * turn,
            tokens_sent=600 * turn,
            priced=1,
            cost=0.01,
            cost_saved=0.004,
            trims=int(trims),
        )
        ended = {"kind": "resend" if turn else "first", "status": "failed" if chance.random() < 0.01 else "complete"}
        mark = (slot + turn) % _WORKERS  # any worker serves any request
        yield sums_of(
            figures, session=key, tenant=tenant, dialect=dialect, exchange=f"x{mark}", at=at + turn * 90_000, **ended
        )


def _fill(connection: StoreConnection, batch: Sequence[Sequence[Sums]]) -> None:
    for ended in batch:
        first = ended[0]
        create_session(connection, first["session"], first["tenant"], first["session"], first["hour"] * HOUR)
    add_figures(connection, [each for ended in batch for each in ended])


if __name__ == "__main__":
    raise SystemExit(main())

"""Summaries with several workers on one session: each span is summarized once, even if a worker dies."""

from __future__ import annotations

import sqlite3
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.support.parcels import FULL, REPLY, RULE, SECTIONS, SOFT, ask, asked_for, parcels, sent, stored, tried
from tests.support.served import Served, config_file
from tests.support.server import Proxy, settings_for
from tests.support.stores import empty_store
from tests.support.upstream import Upstream
from tests.support.waiting import until


@pytest.fixture(params=[True, False], ids=["background", "waiting"])
def pair(request: pytest.FixtureRequest, provider: Upstream, tmp_path: Path) -> Iterator[tuple[Proxy, Proxy]]:
    """Two proxies on one store, which act like two processes."""
    settings = settings_for(provider, tmp_path, {**SECTIONS, "summarizer": {"background": request.param}})
    with Proxy(settings) as one, Proxy(settings) as other:
        for proxy in (one, other):
            # FastAPI prepares its routes at the first request. That is not thread-safe, because it suppresses
            # pydantic's warnings with a global. So each proxy gets a first request alone.
            ask(proxy, "first", parcels(1), "x")
            proxy.get("/sessions/first")
        yield one, other


def test_two_that_want_the_same_one_make_it_once(pair: tuple[Proxy, Proxy], upstream: Upstream) -> None:
    waits = not pair[0].settings.summarizer.background
    model = "summary:good+sum-hold"
    with ThreadPoolExecutor(2) as threads:
        asked = [threads.submit(ask, proxy, "s", parcels(FULL if waits else SOFT), model) for proxy in pair]
        until(lambda: asked_for(upstream), "it is asked for")
        if not waits:
            for number, proxy in enumerate(pair * 2, 1):  # each of these requests wants the summary
                ask(proxy, "s", parcels(SOFT + number), model)
        upstream.gate.set()
        receipts = [each.result() for each in asked]
    assert tried(pair[0], "s")["ready"] == 1
    assert len(asked_for(upstream)) == 1
    if waits:
        assert [receipt["edits"] for receipt in receipts] == [["summarize"]] * 2
    # Both use it, no matter which one made it.
    for proxy in pair:
        assert ask(proxy, "s", parcels(FULL + 1), "x")["summary"]["kind"] == "model"
        assert RULE in sent(upstream)[0]["content"]


def test_of_one_that_was_killed_another_takes_over(provider: Upstream, upstream: Upstream, tmp_path: Path) -> None:
    file = tmp_path / "palimpsest.db"
    model = f"say:{REPLY}+summary:good+sum-hold"
    with Served(config_file(tmp_path, provider, empty_store(file), **SECTIONS)).wait() as served:
        answer = _post(served.url, "s", SOFT, model)
        assert answer.status_code == 200, answer.text
        until(lambda: asked_for(upstream), "it is asked for")
        served.kill()
    upstream.gate.set()
    with Proxy(settings_for(provider, tmp_path, SECTIONS)) as proxy:
        ask(proxy, "s", parcels(SOFT + 1), "summary:good")  # the dead worker still holds the lease
        ask(proxy, "s", parcels(SOFT + 2), "summary:good")
        assert proxy.get("/sessions/s")["summarizer"]["ready"] == 0
        assert len(asked_for(upstream)) == 1
        with sqlite3.connect(file) as database:  # fifteen seconds later
            assert database.execute("UPDATE leases SET expires_at = 1").rowcount == 1
        ask(proxy, "s", parcels(SOFT + 3), "summary:good")
        assert tried(proxy, "s")["ready"] == 1
        assert ask(proxy, "s", parcels(FULL), "x")["edits"] == ["summarize"]
        assert RULE in sent(upstream)[0]["content"]


def test_four_workers_make_one_for_each_span(provider: Upstream, upstream: Upstream, tmp_path: Path) -> None:
    """Requests of five sessions go to any worker, with summarizers that fail in different ways."""
    faults = ["summary:good", "summary:good+sum-delay:30", "summary:invents", "sum-fault:500", "summary:bare"]
    settings = settings_for(provider, tmp_path, SECTIONS)
    lengths = (SOFT, SOFT, SOFT + 2, FULL, FULL, FULL + 2, FULL + 8)
    with ExitStack() as stack, ThreadPoolExecutor(8) as threads:
        workers = [stack.enter_context(Proxy(settings)) for _ in range(4)]
        for turn, length in enumerate(lengths):
            asked = [
                threads.submit(_post, worker.url, f"s{number}", length, f"say:{REPLY}+{fault}")
                for number, fault in enumerate(faults)
                for worker in (workers[(turn + number) % 4], workers[(turn + number + 1) % 4])
            ]
            assert [each.result().status_code for each in asked] == [200] * len(asked)
        for number, fault in enumerate(faults):
            tried(workers[0], f"s{number}")
            shown = workers[0].get(f"/sessions/s{number}")
            spans = Counter(each["summarized_until"] for each in shown["summaries"])
            assert set(spans.values()) <= {1}, fault
            assert bool(spans) == (fault not in {"summary:invents", "sum-fault:500"}), fault
            assert stored(workers[0], f"s{number}")[:-1] == parcels(FULL + 8)
    assert all(request.refused is None for request in upstream.log)


def _post(url: str, session: str, rounds: int, model: str) -> httpx.Response:
    body = {"model": model, "messages": parcels(rounds)}
    with httpx.Client(trust_env=False, timeout=60) as client:  # a new connection, which any worker may get
        return client.post(f"{url}/v1/chat/completions", json=body, headers={"x-session-id": session})

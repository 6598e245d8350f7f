"""Liveness, readiness, and the cache of token counts."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import cast

import orjson
import pytest

from proxy.config import Settings
from proxy.server.authentication import Identity
from proxy.server.dependencies import Services
from proxy.server.operations import show_cache
from proxy.store import downgrade, upgrade
from proxy.tokens import TokenCounter
from tests.e2e.conftest import Serve
from tests.support.waiting import until


def test_ready_is_only_who_can_use_the_store(serve: Serve) -> None:
    proxy = serve()
    assert proxy.get("/healthz") == {"status": "ok"}
    assert proxy.get("/readyz") == {"status": "ready"}
    asyncio.run(downgrade(proxy.settings.store.url, "base"))
    assert proxy.get("/healthz") == {"status": "ok"}
    until(lambda: proxy.client.get("/readyz").status_code == 503, "it is noticed")
    answer = proxy.client.get("/readyz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
    assert "palimpsest upgrade" in answer.json()["error"]["message"]
    asyncio.run(upgrade(proxy.settings.store.url))
    until(lambda: proxy.client.get("/readyz").status_code == 200, "it is used again")


@pytest.mark.parametrize("dashboard", [True, False])
def test_the_root_says_what_answers_there(serve: Serve, dashboard: bool) -> None:
    proxy = serve(dashboard={"enabled": dashboard})
    told = proxy.get("/")
    assert (told["name"], told["dashboard"]) == ("palimpsest", "/ui" if dashboard else None)
    browser = proxy.client.get("/", headers={"accept": "text/html,*/*;q=0.8"})
    assert (browser.status_code, browser.headers.get("location")) == ((303, "/ui") if dashboard else (200, None))
    assert proxy.client.head("/").status_code == 200


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_a_checker_that_asks_for_the_head_alone_is_told(serve: Serve, path: str) -> None:
    """`wget --spider` does, which many containers are checked with."""
    answer = serve().client.head(path)
    assert (answer.status_code, answer.content) == (200, b"")


@pytest.mark.parametrize("path", ["/", "/healthz", "/readyz"])
def test_a_foreign_name_hears_nothing(serve: Serve, path: str) -> None:
    answer = serve().client.get(path, headers={"host": "evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")


def test_counts_can_be_looked_at_and_forgotten(serve: Serve) -> None:
    proxy = serve()
    proxy.chat("s", "hello")
    cached = proxy.get("/tokens/cache")
    assert cached["cached_messages"] >= 1
    assert cached["total_cached_tokens"] >= 1
    assert cached["calibration"] == {}  # nobody could learn from so few tokens
    assert proxy.client.delete("/tokens/cache").json() == {"cached_messages": 0, "total_cached_tokens": 0}


def test_what_upstreams_count_is_shown_by_model_and_outlives_the_counts() -> None:
    counter = TokenCounter("estimate")
    counter.calibration.learn("qwen", 1000, 1234)
    counter.clear()
    services = cast("Services", SimpleNamespace(app=SimpleNamespace(counter=counter), settings=Settings()))
    answer = asyncio.run(show_cache(services, Identity(tenant="anyone")))
    assert orjson.loads(answer.body) == {"cached_messages": 0, "total_cached_tokens": 0, "calibration": {"qwen": 1.23}}


def test_a_tenant_learns_nothing_of_what_all_share(serve: Serve) -> None:
    proxy = serve(
        auth={"mode": "keys", "keys": [{"key": "key-of-anne-0123", "tenant": "a"}], "admin_key": "key-of-the-admin"}
    )
    tenant, admin = ({"authorization": f"Bearer {key}"} for key in ("key-of-anne-0123", "key-of-the-admin"))
    assert proxy.client.get("/tokens/cache", headers=tenant).status_code == 403
    assert "calibration" in proxy.client.get("/tokens/cache", headers=admin).json()
    assert proxy.client.delete("/tokens/cache", headers=tenant).status_code == 403
    assert proxy.client.delete("/tokens/cache", headers=admin).status_code == 200
    assert proxy.client.get("/tokens/cache").status_code == 401

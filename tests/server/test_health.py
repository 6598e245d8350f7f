"""Liveness and readiness."""

from __future__ import annotations

import asyncio

import pytest

from proxy.store import downgrade, upgrade
from tests.e2e.conftest import Serve


def test_ready_is_only_who_can_use_the_store(serve: Serve) -> None:
    proxy = serve()
    assert proxy.get("/healthz") == {"status": "ok"}
    assert proxy.get("/readyz") == {"status": "ready"}
    asyncio.run(downgrade(proxy.settings.store.url, "base"))
    assert proxy.get("/healthz") == {"status": "ok"}
    answer = proxy.client.get("/readyz")
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
    assert "palimpsest upgrade" in answer.json()["error"]["message"]
    asyncio.run(upgrade(proxy.settings.store.url))
    assert proxy.get("/readyz") == {"status": "ready"}


@pytest.mark.parametrize("path", ["/healthz", "/readyz"])
def test_a_foreign_name_hears_nothing(serve: Serve, path: str) -> None:
    answer = serve().client.get(path, headers={"host": "evil.example"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "host_not_allowed")

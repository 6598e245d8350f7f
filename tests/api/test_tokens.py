"""What a process remembers of token counts."""

from __future__ import annotations

from tests.e2e.conftest import Serve


def test_counts_can_be_looked_at_and_forgotten(serve: Serve) -> None:
    proxy = serve()
    proxy.chat("s", "hello")
    cached = proxy.get("/tokens/cache")
    assert cached["cached_messages"] >= 1
    assert cached["total_cached_tokens"] >= 1
    assert proxy.client.delete("/tokens/cache").json() == {"cached_messages": 0, "total_cached_tokens": 0}


def test_a_tenant_may_look_but_not_clear_what_all_share(serve: Serve) -> None:
    proxy = serve(auth={"mode": "keys", "keys": [{"key": "ka", "tenant": "a"}], "admin_key": "root"})
    tenant, admin = ({"authorization": f"Bearer {key}"} for key in ("ka", "root"))
    assert proxy.client.get("/tokens/cache", headers=tenant).status_code == 200
    assert proxy.client.delete("/tokens/cache", headers=tenant).status_code == 403
    assert proxy.client.delete("/tokens/cache", headers=admin).status_code == 200
    assert proxy.client.get("/tokens/cache").status_code == 401

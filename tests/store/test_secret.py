from __future__ import annotations

import asyncio

import pytest

from proxy.store.store import Store

pytestmark = pytest.mark.anyio


async def test_a_secret_is_made_once_whoever_asks_first(store: Store, store_url: str) -> None:
    other = await Store.open(store_url)
    made = await asyncio.gather(*(one.secret("tenants") for _ in range(10) for one in (store, other)))
    assert len(set(made)) == 1
    assert len(made[0]) == 32
    await other.close()
    assert await store.secret("another") != made[0]
    assert await store.secret("tenants") == made[0]

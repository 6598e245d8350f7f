"""A lease of the store's, held as long as some work takes: among all workers one does it.

It is renewed while the work goes on, so that it may be short: where a worker dies, another one may begin soon
after. It does not know what the work is.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Final

from msgspec import Struct

from proxy.errors import StoreUnavailable
from proxy.store import Store

SECONDS: Final = 15.0
"""How long a lease holds that nobody renews."""
RENEWED_AFTER: Final = 5.0
_FIRST_WAIT: Final = 0.05
_LONGEST_WAIT: Final = 0.5


class Terms(Struct, frozen=True, kw_only=True):
    """For how long leases are taken."""

    seconds: float = SECONDS
    renewed_after: float = RENEWED_AFTER
    """Seconds after which a lease is renewed, again and again."""
    clock: Callable[[], float] = time.time
    """Seconds since 1970: workers on several hosts compare it."""


@asynccontextmanager
async def held(
    store: Store, key: str, name: str, holder: str, terms: Terms, *, patience: float = 0.0
) -> AsyncGenerator[bool]:
    """Hold the lease `name` of a session while the block runs, where it can be had; tell whether it can.

    Args:
        store: where leases are.
        key: the session.
        name: what is leased.
        holder: who holds it, a name that nobody else has.
        terms: for how long.
        patience: seconds for which a lease of somebody else's is waited for.

    Raises:
        StoreUnavailable: it cannot be known.
    """
    if not await _taken(store, key, name, holder, terms, patience):
        yield False
        return
    try:
        async with asyncio.TaskGroup() as group:
            renewing = group.create_task(_renewed(store, key, name, holder, terms))
            yield True
            renewing.cancel()
    finally:
        with suppress(StoreUnavailable):  # it ends by itself
            await store.release(key, name, holder)


async def _taken(store: Store, key: str, name: str, holder: str, terms: Terms, patience: float) -> bool:
    ends = time.monotonic() + patience
    wait = _FIRST_WAIT
    while not await _take(store, key, name, holder, terms):
        left = ends - time.monotonic()
        if left <= 0:
            return False
        await asyncio.sleep(min(wait, left))
        wait = min(2 * wait, _LONGEST_WAIT)
    return True


async def _renewed(store: Store, key: str, name: str, holder: str, terms: Terms) -> None:
    """Renew it until cancelled. Who comes too late goes on all the same: the store keeps one summary."""
    while True:
        await asyncio.sleep(terms.renewed_after)
        with suppress(StoreUnavailable):
            await _take(store, key, name, holder, terms)


async def _take(store: Store, key: str, name: str, holder: str, terms: Terms) -> bool:
    now = terms.clock()
    return await store.lease(key, name, holder, int(now * 1000), int((now + terms.seconds) * 1000))

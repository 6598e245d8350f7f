"""Circuit breaker of the store: a failure opens it, and it closes within a second after the store is back.

While the circuit is open, calls fail at once with the reason and do not reach the store. It opens on a failure, or if
the store answers neither a caller nor a probe in time. Then it probes the store repeatedly. Once the store answers, the
waiting records of the spool are stored, and the circuit closes.
"""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Awaitable, Callable
from math import inf
from typing import Final, TypeAlias

from proxy.errors import StoreUnavailable
from proxy.store.database import Tasks, log_seldom

_LOG: Final = logging.getLogger("palimpsest.store")

SLOW_SECONDS: Final = 2.0  # once a caller has waited this long for the store, the store is probed
PROBE_SECONDS: Final = 0.8  # timeout of a probe
_PAUSE_SECONDS: Final = 0.25  # between two probes
_REPEAT_SECONDS: Final = 30.0
"""An opening of the circuit is logged at most this often, unless it stays open. A store that answers probes but fails
other calls (because of a damaged page, for example) opens it again and again."""

FROZEN: Final = (
    f"The store cannot be used. It did not answer within {PROBE_SECONDS:g} s: look for a lock, or a slow disk."
)

_BROKEN: Final = "The store cannot be used. What waits in the spool cannot be stored: the log has the details."

Probe: TypeAlias = Callable[[], Awaitable[None]]
"""Writes and reads; raises `StoreUnavailable`."""
Drain: TypeAlias = Callable[[], Awaitable[bool]]
"""Stores the waiting records of the spool; returns whether the spool is empty, or raises `StoreUnavailable`."""


class Circuit:
    """The circuit breaker of one process."""

    def __init__(self, probe: Probe, is_busy: Callable[[], bool]) -> None:
        """Begin closed. `is_busy` tells whether the store is in a long write of this process."""
        self.down: StoreUnavailable | None = None  # why the circuit is open; None while it is closed
        self.returns = False  # whether the store answers again, and the spool is being stored
        self.drain: Drain | None = None
        self.waiting: dict[asyncio.Timeout, float] = {}
        """The timeouts of the waiting callers, and since when each waits; the longest wait is first."""
        self.watched = False  # whether a call of `watch` is scheduled
        self._probe = probe
        self._is_busy = is_busy
        self._tasks = Tasks()
        self._probing: asyncio.Task[StoreUnavailable | None] | None = None
        self._probed: tuple[float, StoreUnavailable | None] = (-1.0, None)
        self._recovering: asyncio.Task[None] | None = None
        self._closed_again = asyncio.Event()
        self._told_at = -inf  # when an opening was last logged
        self._is_told = False  # whether the current opening was logged

    def watch(self) -> None:
        """Check whether a caller has waited too long. If so, probe the store, and open if it does not answer."""
        loop = asyncio.get_running_loop()
        since = next(iter(self.waiting.values()), None)
        self.watched = since is not None
        if since is None:
            return
        now = loop.time()
        if now - since < SLOW_SECONDS or self.down is not None:
            loop.call_later(max(0.1, since + SLOW_SECONDS - now), self.watch)
        else:
            self._tasks.follow(self._watch())

    async def _watch(self) -> None:
        await self.suspect()
        asyncio.get_running_loop().call_later(SLOW_SECONDS, self.watch)

    async def suspect(self) -> None:
        """Probe the store, and open if it fails. It takes two timeouts in a row, because a busy machine is slow too."""
        for _ in range(2):
            found = await self.health(0.0)
            if found is None or self._is_busy():
                return
            if found.message != FROZEN:
                break
        else:
            found = StoreUnavailable(FROZEN)
        self.open(found)

    def open(self, why: StoreUnavailable) -> None:
        """Open the circuit. The waiting callers time out at once."""
        if self.down is not None:
            return
        now = asyncio.get_running_loop().time()
        self._is_told = False
        if now - self._told_at >= _REPEAT_SECONDS:
            self._tell(why, now)
        self.down = why
        self._closed_again.clear()
        for limit in self.waiting:
            if not limit.expired():  # an expired one cannot be rescheduled
                limit.reschedule(now)
        try:
            self._recovering = self._tasks.start(self._recover())
        except StoreUnavailable:  # the process is stopping
            self._recovering = None

    def _tell(self, why: StoreUnavailable, now: float) -> None:
        _LOG.error("the store is not asked until it answers again: %s", why)
        self._is_told, self._told_at = True, now

    def reason(self, otherwise: str) -> str:
        """Return the message of the reason if the circuit is open, else `otherwise`."""
        return otherwise if self.down is None else self.down.message

    async def closes(self, seconds: float) -> bool:
        """Wait until the circuit closes, for at most `seconds`; return whether it did."""
        try:
            async with asyncio.timeout(seconds):
                await self._closed_again.wait()
        except TimeoutError:
            return False
        return True

    async def health(self, age: float) -> StoreUnavailable | None:
        """Return why the store cannot be used, or None if it can. The result of a probe is reused for `age` seconds."""
        now = asyncio.get_running_loop().time()
        at, found = self._probed
        if at >= 0 and now - at <= age:
            return found
        if self._probing is None or self._probing.done():
            self._probing = self._tasks.follow(self._ask())
        return await asyncio.shield(self._probing)

    async def close(self) -> None:
        """Stop probing."""
        if self._recovering is not None:
            self._recovering.cancel()
        if self._probing is not None:
            self._probing.cancel()
        await self._tasks.close()

    async def _ask(self) -> StoreUnavailable | None:
        found: StoreUnavailable | None = None
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._probe()
        except StoreUnavailable as why:
            found = why
        except TimeoutError:
            found = StoreUnavailable(FROZEN)
        except Exception as why:  # noqa: BLE001 - any error means that the store cannot be used
            _LOG.exception("the store could not be probed")
            found = StoreUnavailable(f"The store cannot be used. {type(why).__name__}: {why}")
        self._probed = asyncio.get_running_loop().time(), found
        return found

    async def _recover(self) -> None:
        refuses = False  # whether the store answers probes but fails to store the spool; then no caller waits for it
        while True:
            found = await self.health(0.0)
            self.returns = found is None and not refuses
            if found is None:
                try:
                    if self.drain is None or await self.drain():
                        break
                    refuses = False
                except StoreUnavailable as why:
                    log_seldom(logging.WARNING, f"what waits in the spool could not be stored: {why}")
                    refuses, found = True, why
                except Exception as why:  # noqa: BLE001 - this task must go on: nothing else closes the circuit
                    log_seldom(logging.ERROR, "".join(traceback.format_exception(why)).strip())
                    refuses, found = True, StoreUnavailable(_BROKEN)
            self.down = found or self.down
            if not self._is_told and self.down is not None:
                self._tell(self.down, asyncio.get_running_loop().time())
            await asyncio.sleep(_PAUSE_SECONDS)
        if self._is_told:
            _LOG.warning("the store is used again")
        self.down, self.returns = None, False
        self._closed_again.set()

"""What tenants and keys may use, counted over all workers.

Requests and tokens of the last minute are counted by second, in memory that the workers of one host share; dollars come
from the sums in the store, which all hosts share.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Final

from proxy.config import Budget
from proxy.errors import OverBudget
from proxy.server.authentication import Identity
from proxy.store import Spent, Store
from proxy.telemetry import Meters

MOST: Final = 64  # budgets
_SECONDS: Final = 60
_FIGURES: Final = 3  # of each second: which one it is, requests, tokens
_ROW: Final = _SECONDS * _FIGURES
_PART: Final = MOST * _ROW  # of one process
_REQUESTS: Final = 1
_TOKENS: Final = 2
_FRESH_SECONDS: Final = 1.0


def budget_memory(parts: int) -> mmap.mmap:
    """Return memory for so many processes, which share it if they are forked after this."""
    return mmap.mmap(-1, parts * _PART * 8)


class Budgets:
    """Knows what is used up. One for the life of the process."""

    def __init__(
        self,
        budgets: Sequence[Budget],
        store: Store,
        memory: mmap.mmap | None = None,
        part: int = 0,
        clock: Callable[[], float] = time.time,
        counts: Meters | None = None,
    ) -> None:
        """Count in a part of `memory`; without it, in memory of the process's own. Refusals go to `counts`."""
        self.rows = tuple(budgets)  # those in force
        self._store = store
        self._values = memoryview(budget_memory(1) if memory is None else memory).cast("d")
        self._part = part * _PART
        self._clock = clock
        self._counts = Meters() if counts is None else counts
        self._known: dict[tuple[str, int], tuple[float, Spent | None]] = {}  # by tenant and time: when, and what

    def take(self, budgets: Sequence[Budget]) -> None:
        """Hold to these budgets from now on."""
        self.rows = tuple(budgets)

    async def admit(self, caller: Identity) -> None:
        """Count a request; raises `OverBudget` if the caller has used up a budget."""
        now = self._clock()
        mine = [(row, budget) for row, budget in enumerate(self.rows) if _is_for(budget, caller.tenant, caller.key)]
        # Counted first and then looked at: of several workers at once none lets in one too many.
        for row, _ in mine:
            self._add(row, _REQUESTS, 1, now)
        try:
            for row, budget in mine:
                if budget.requests_per_minute is not None:
                    self._check(row, budget, "requests_per_minute", budget.requests_per_minute + 1, _REQUESTS, now)
                if budget.tokens_per_minute is not None:
                    self._check(row, budget, "tokens_per_minute", budget.tokens_per_minute, _TOKENS, now)
                await self._check_dollars(budget, caller.tenant, now)
        except OverBudget:
            for row, _ in mine:
                self._add(row, _REQUESTS, -1, now)
            raise

    def used(self, tenant: str, key: str | None, tokens: int) -> None:
        """Count tokens that a request came to."""
        now = self._clock()
        for row, budget in enumerate(self.rows):
            if _is_for(budget, tenant, key):
                self._add(row, _TOKENS, tokens, now)

    async def _check_dollars(self, budget: Budget, tenant: str, now: float) -> None:
        today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
        month = today.replace(day=1)
        for name, limit, start, end in (
            ("dollars_per_day", budget.dollars_per_day, today, today + timedelta(days=1)),
            ("dollars_per_month", budget.dollars_per_month, month, (month + timedelta(days=32)).replace(day=1)),
        ):
            if limit is None:
                continue
            spent = await self._spent(tenant, int(start.timestamp() * 1000), now)
            if spent.dollars >= limit:
                self._counts.add("palimpsest_refused", name)
                raise OverBudget(
                    f"{_whose(budget)} has used {spent.dollars:.4f} of {limit:g} dollars ({name}). "
                    f"It goes on at {end:%Y-%m-%d %H:%M} UTC.",
                    wait=end.timestamp() - now,
                )

    async def _spent(self, tenant: str, since: int, now: float) -> Spent:
        """Return what a tenant used since a time, as the store knew it at most a second ago."""
        at, spent = self._known.get((tenant, since), (0.0, None))
        if spent is None or not 0 <= now - at < _FRESH_SECONDS:
            spent = await self._store.spent(tenant, since)
            if len(self._known) >= 2 * MOST:  # times that are over
                self._known.clear()
            self._known[tenant, since] = now, spent
        return spent

    def _check(self, row: int, budget: Budget, name: str, limit: int, figure: int, now: float) -> None:
        """Raise `OverBudget` if the last 60 seconds hold as much as the limit; of requests, this one is among them."""
        seconds = self._seconds(row, figure, int(now))
        used = sum(amount for _, amount in seconds)
        if used < limit:
            return
        left, wait, itself = used, float(_SECONDS), figure == _REQUESTS
        for second, amount in seconds:  # the oldest first
            left -= amount
            if left < limit:
                wait = second + _SECONDS - now
                break
        self._counts.add("palimpsest_refused", name)
        over = f"{_whose(budget)} has used {used - itself:.0f} of {limit - itself} ({name})."
        raise OverBudget(f"{over} Try again in {max(1, ceil(wait))} seconds.", wait=wait)

    def _seconds(self, row: int, figure: int, now: int) -> list[tuple[int, float]]:
        """Return what was used in each of the last 60 seconds, the oldest first."""
        values, sums = self._values, dict[int, float]()
        for part in range(0, len(values), _PART):
            first = part + row * _ROW
            for place in range(first, first + _ROW, _FIGURES):
                second = int(values[place])
                if now - _SECONDS < second <= now and (amount := values[place + figure]):
                    sums[second] = sums.get(second, 0.0) + amount
        return sorted(sums.items())

    def _add(self, row: int, figure: int, amount: float, now: float) -> None:
        second = int(now)
        place = self._part + row * _ROW + second % _SECONDS * _FIGURES
        values = self._values
        if values[place] != second:
            values[place + _REQUESTS] = values[place + _TOKENS] = 0.0
            values[place] = second
        values[place + figure] += amount


def _is_for(budget: Budget, tenant: str, key: str | None) -> bool:
    return budget.tenant == tenant if budget.key is None else budget.key == key


def _whose(budget: Budget) -> str:
    return f"Tenant {budget.tenant!r}" if budget.key is None else f"Key {budget.key!r}"

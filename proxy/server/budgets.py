"""What tenants and keys may use, counted over all workers.

Requests and tokens of the last minute are counted by second, in memory that the workers of one host share; dollars are
in the store, which all hosts share: a tenant's in the sums of its exchanges, a key's in sums of its own.
"""

from __future__ import annotations

import logging
import mmap
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from math import ceil
from typing import Any, Final, TypeAlias
from zlib import crc32

from msgspec import Struct

from proxy.config import Budget
from proxy.errors import OverBudget, StoreUnavailable
from proxy.pipeline import Background
from proxy.server.authentication import Identity
from proxy.store import Store
from proxy.telemetry import Meters

OnceBack: TypeAlias = Callable[[Callable[[Store], Awaitable[None]]], Coroutine[Any, Any, None]]

_LOG: Final = logging.getLogger("palimpsest.budgets")
MOST: Final = 64  # budgets
_SECONDS: Final = 60
_FIGURES: Final = 3  # of each second: which one it is, requests, tokens
_ROW: Final = 1 + _SECONDS * _FIGURES  # whose it is comes first
_PART: Final = MOST * _ROW  # of one process
_REQUESTS: Final = 1
_TOKENS: Final = 2
_UNUSED: Final = bytes(_ROW * 8)
_FRESH_SECONDS: Final = 1.0


def budget_memory(parts: int) -> mmap.mmap:
    """Return memory for so many processes, which share it if they are forked after this."""
    return mmap.mmap(-1, parts * _PART * 8)


class BudgetRow(Struct, frozen=True, kw_only=True):
    """One budget, and where it is counted."""

    number: int
    budget: Budget

    @property
    def owner(self) -> float:
        """A number for whose it is: after a change of the budgets the row may hold what another one used."""
        return 1.0 + crc32(_whose(self.budget).encode())


class BudgetUse(Struct, frozen=True, kw_only=True):
    """One limit of a budget, and what is used of it."""

    whose: str
    limit: str  # its name in the configuration
    used: float
    most: float


class DollarLimit(Struct, frozen=True, kw_only=True):
    """How many dollars may be used in a time."""

    name: str
    most: float
    start: int  # milliseconds since 1970
    end: datetime


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
        background: Background | None = None,
        *,
        once_back: OnceBack,
    ) -> None:
        """Count in a part of `memory`; without it, in memory of the process's own. Refusals go to `counts`.

        `once_back` does work with the store, as soon as that is back where it is away.
        """
        self._store = store
        self._values = memoryview(budget_memory(1) if memory is None else memory).cast("d")
        self._part = part * _PART
        self._clock = clock
        self._counts = Meters() if counts is None else counts
        self._background = Background() if background is None else background
        self._once_back = once_back
        self._known: dict[tuple[str, str | None, int], tuple[float, float]] = {}
        """Dollars since a time: of a tenant, or with a key; and when the store knew so."""
        self._unspent: Counter[tuple[str, str]] = Counter()  # dollars that are not stored yet, by tenant and key
        self._is_spending = False
        self.take(budgets)

    def take(self, budgets: Sequence[Budget]) -> None:
        """Hold to these budgets from now on."""
        self.rows = tuple(budgets)  # those in force
        self._rows = [BudgetRow(number=number, budget=budget) for number, budget in enumerate(budgets)]

    async def admit(self, caller: Identity) -> None:
        """Count a request; raises `OverBudget` if the caller has used up a budget."""
        now = self._clock()
        mine = self._rows_for(caller.tenant, caller.key)
        # Counted first and then looked at: of several workers at once none lets in one too many.
        for row in mine:
            self._add(row, _REQUESTS, 1, now)
        try:
            for row in mine:
                budget = row.budget
                if budget.requests_per_minute is not None:
                    self._check(row, "requests_per_minute", budget.requests_per_minute + 1, _REQUESTS, now)
                if budget.tokens_per_minute is not None:
                    self._check(row, "tokens_per_minute", budget.tokens_per_minute, _TOKENS, now)
                await self._check_dollars(budget, caller.tenant, now)
        except OverBudget:
            for row in mine:
                self._add(row, _REQUESTS, -1, now)
            raise

    def used(self, tenant: str, key: str | None, tokens: int, dollars: float) -> None:
        """Count what a request, or a summary, came to."""
        now, mine = self._clock(), self._rows_for(tenant, key)
        for row in mine:
            self._add(row, _TOKENS, tokens, now)
        if key is not None and dollars and any(row.budget.key is not None and _in_dollars(row.budget) for row in mine):
            self._unspent[tenant, key] += dollars  # type: ignore[assignment]  # its stub knows whole numbers only
            if not self._is_spending:
                self._is_spending = True
                self._background.start(self._once_back(self._spend))

    async def _spend(self, store: Store) -> None:
        """Store what was spent with keys; what comes meanwhile is stored next, together. Raises `StoreUnavailable`."""
        while self._unspent:
            tenant, key = next(iter(self._unspent))
            dollars = self._unspent.pop((tenant, key))
            try:
                await store.spend(tenant, key, int(self._clock() * 1000), dollars)
            except StoreUnavailable:  # called again once the store is back
                self._unspent[tenant, key] += dollars
                raise
            except Exception:  # noqa: BLE001 - the next request tries again
                self._unspent[tenant, key] += dollars
                _LOG.exception("what was spent with the key %s could not be stored", key)
                break
        self._is_spending = False

    async def _check_dollars(self, budget: Budget, tenant: str, now: float) -> None:
        for limit in _dollar_limits(budget, now):
            dollars = await self._spent(tenant, budget.key, limit.start, now)
            if dollars >= limit.most:
                self._counts.add("palimpsest_refused", limit.name)
                raise OverBudget(
                    f"{_whose(budget)} has used {dollars:.4f} of {limit.most:g} dollars ({limit.name}). "
                    f"It goes on at {limit.end:%Y-%m-%d %H:%M} UTC.",
                    wait=limit.end.timestamp() - now,
                )

    async def standing(self, reader: Identity | None) -> list[BudgetUse]:
        """Return what is used of the budgets of a tenant and its key; None: of all."""
        now, found = self._clock(), list[BudgetUse]()
        for row in self._rows if reader is None else self._rows_for(reader.tenant, reader.key):
            budget, whose = row.budget, _whose(row.budget)
            for name, most, figure in (
                ("requests_per_minute", budget.requests_per_minute, _REQUESTS),
                ("tokens_per_minute", budget.tokens_per_minute, _TOKENS),
            ):
                if most is not None:
                    used = sum(amount for _, amount in self._seconds(row, figure, int(now)))
                    found.append(BudgetUse(whose=whose, limit=name, used=used, most=most))
            for limit in _dollar_limits(budget, now):
                used = await self._spent(budget.tenant or "", budget.key, limit.start, now)
                found.append(BudgetUse(whose=whose, limit=limit.name, used=used, most=limit.most))
        return found

    async def _spent(self, tenant: str, key: str | None, since: int, now: float) -> float:
        """Return the dollars of a tenant, or of a key, since a time, as the store knew them at most a second ago."""
        place = (tenant if key is None else "", key, since)
        at, dollars = self._known.get(place, (-_FRESH_SECONDS, 0.0))
        if not 0 <= now - at < _FRESH_SECONDS:
            if key is None:
                dollars = (await self._store.spent(tenant, since)).dollars
            else:
                dollars = await self._store.spent_with(key, since)
            if len(self._known) >= 2 * MOST:  # times that are over
                self._known.clear()
            self._known[place] = now, dollars
        return dollars

    def _rows_for(self, tenant: str, key: str | None) -> list[BudgetRow]:
        return [row for row in self._rows if _is_for(row.budget, tenant, key)]

    def _check(self, row: BudgetRow, name: str, limit: int, figure: int, now: float) -> None:
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
        over = f"{_whose(row.budget)} has used {used - itself:.0f} of {limit - itself} ({name})."
        raise OverBudget(f"{over} Try again in {max(1, ceil(wait))} seconds.", wait=wait)

    def _seconds(self, row: BudgetRow, figure: int, now: int) -> list[tuple[int, float]]:
        """Return what was used in each of the last 60 seconds, the oldest first."""
        values, sums = self._values, dict[int, float]()
        for part in range(0, len(values), _PART):
            first = part + row.number * _ROW
            if values[first] != row.owner:
                continue
            for place in range(first + 1, first + _ROW, _FIGURES):
                second = int(values[place])
                if now - _SECONDS < second <= now and (amount := values[place + figure]):
                    sums[second] = sums.get(second, 0.0) + amount
        return sorted(sums.items())

    def _add(self, row: BudgetRow, figure: int, amount: float, now: float) -> None:
        second = int(now)
        first, values = self._part + row.number * _ROW, self._values
        if values[first] != row.owner:
            values[first : first + _ROW] = memoryview(_UNUSED).cast("d")
            values[first] = row.owner
        place = first + 1 + second % _SECONDS * _FIGURES
        if values[place] != second:
            values[place + _REQUESTS] = values[place + _TOKENS] = 0.0
            values[place] = second
        values[place + figure] += amount


def _is_for(budget: Budget, tenant: str, key: str | None) -> bool:
    return budget.tenant == tenant if budget.key is None else budget.key == key


def _dollar_limits(budget: Budget, now: float) -> Iterator[DollarLimit]:
    today = datetime.fromtimestamp(now, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    month = today.replace(day=1)
    for name, most, start, end in (
        ("dollars_per_day", budget.dollars_per_day, today, today + timedelta(days=1)),
        ("dollars_per_month", budget.dollars_per_month, month, (month + timedelta(days=32)).replace(day=1)),
    ):
        if most is not None:
            yield DollarLimit(name=name, most=most, start=int(start.timestamp() * 1000), end=end)


def _in_dollars(budget: Budget) -> bool:
    return budget.dollars_per_day is not None or budget.dollars_per_month is not None


def _whose(budget: Budget) -> str:
    return f"Tenant {budget.tenant!r}" if budget.key is None else f"Key {budget.key!r}"

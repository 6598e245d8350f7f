"""Budgets: limits on what tenants and keys may use, counted over all workers.

Requests and tokens of the last minute are counted per second, in memory that the workers of one host share. Dollars are
kept in the store, which all hosts share: those of a tenant in the sums of its exchanges, those of a key in sums of its
own.
"""

from __future__ import annotations

import asyncio
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
MOST: Final = 64  # largest number of budgets
_SECONDS: Final = 60
_FIGURES: Final = 3  # numbers for each second: the second itself, requests, tokens
_ROW: Final = 1 + _SECONDS * _FIGURES  # numbers for each budget; the first is its owner
_PART: Final = MOST * _ROW  # numbers for each process
_REQUESTS: Final = 1
_TOKENS: Final = 2
_UNUSED: Final = bytes(_ROW * 8)
_FRESH_SECONDS: Final = 1.0


def budget_memory(parts: int) -> mmap.mmap:
    """Return memory for `parts` processes. Processes that are forked after this call share it."""
    return mmap.mmap(-1, parts * _PART * 8)


class OwnedBudget(Struct, frozen=True, kw_only=True):
    """A budget and `owner`, the number that marks its rows in the memory.

    The number stays the same when budgets are added, removed or reordered, and it is the same in every process.
    """

    budget: Budget
    owner: float


class BudgetUse(Struct, frozen=True, kw_only=True):
    """One limit of a budget and how much of it is used."""

    whose: str
    limit: str  # its name in the configuration
    used: float
    most: float


class DollarLimit(Struct, frozen=True, kw_only=True):
    """A limit in dollars on the current day or month."""

    name: str
    most: float
    start: int  # milliseconds since 1970
    end: datetime


class Budgets:
    """Counts use and refuses requests over a budget. One per process."""

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
        """Count in part `part` of `memory`, or in private memory if it is None. Refusals are counted in `counts`.

        `once_back` runs work on the store; if the store is unavailable, as soon as it is back.
        """
        self._store = store
        self._values = memoryview(budget_memory(1) if memory is None else memory).cast("d")
        self._part = part * _PART
        self._clock = clock
        self._counts = Meters() if counts is None else counts
        self._background = Background() if background is None else background
        self._once_back = once_back
        self._known: dict[tuple[str, str | None, int], tuple[float, float]] = {}
        """By tenant or key, and start of the period: when the store was last read, and the dollars that it returned."""
        self._since_known: Counter[tuple[str, str | None, int]] = Counter()
        """Dollars that this process used since that reading. They count while the store is unavailable."""
        self._unspent: Counter[tuple[str, str]] = Counter()  # dollars not stored yet, by tenant and key
        self._is_spending = False
        self.take(budgets)

    def take(self, budgets: Sequence[Budget]) -> None:
        """Enforce these budgets from now on."""
        self.in_force = tuple(budgets)
        self._owned: list[OwnedBudget] = []
        before = Counter[str]()  # a tenant or key may have several budgets
        for budget in budgets:
            whose = _whose(budget)
            self._owned.append(OwnedBudget(budget=budget, owner=1.0 + crc32(f"{whose} {before[whose]}".encode())))
            before[whose] += 1

    async def admit(self, caller: Identity) -> None:
        """Count a request. Raises `OverBudget` if the caller has used up a budget."""
        now = self._clock()
        mine = self._owned_by(caller.tenant, caller.key)
        # Count first, then check: several workers at once cannot admit one request too many.
        for each in mine:
            self._add(each, _REQUESTS, 1, now)
        try:
            for each in mine:
                budget = each.budget
                if budget.requests_per_minute is not None:
                    self._check(each, "requests_per_minute", budget.requests_per_minute + 1, _REQUESTS, now)
                if budget.tokens_per_minute is not None:
                    self._check(each, "tokens_per_minute", budget.tokens_per_minute, _TOKENS, now)
                await self._check_dollars(budget, caller.tenant, now)
        except OverBudget:
            for each in mine:
                self._take_back(each, now)
            raise

    def used(self, tenant: str, key: str | None, tokens: int, dollars: float) -> None:
        """Count the tokens and dollars of a request or a summary."""
        now, mine = self._clock(), self._owned_by(tenant, key)
        for each in mine:
            self._add(each, _TOKENS, tokens, now)
        for place in self._known:
            if place[:2] in {(tenant, None), ("", key)}:
                self._since_known[place] += dollars  # type: ignore[assignment]  # its stub knows whole numbers only
        budgets = [each.budget for each in mine]
        if key is not None and dollars and any(budget.key is not None and _in_dollars(budget) for budget in budgets):
            self._unspent[tenant, key] += dollars  # type: ignore[assignment]  # its stub knows whole numbers only
            if not self._is_spending:
                self._is_spending = True
                self._background.start(self._once_back(self._spend))

    async def _spend(self, store: Store) -> None:
        """Store the dollars spent with keys. Raises `StoreUnavailable`.

        Amounts that are added in the meantime are stored next, as one sum per key.
        """
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

    async def usage(self, reader: Identity | None) -> list[BudgetUse]:
        """Return the use of the budgets of a tenant and its key. None means all budgets."""
        mine = self._owned if reader is None else self._owned_by(reader.tenant, reader.key)
        return [use for uses in await asyncio.gather(*map(self._usage_of, mine)) for use in uses]

    async def _usage_of(self, owned: OwnedBudget) -> list[BudgetUse]:
        now, found = self._clock(), list[BudgetUse]()
        budget, whose = owned.budget, _whose(owned.budget)
        for name, most, figure in (
            ("requests_per_minute", budget.requests_per_minute, _REQUESTS),
            ("tokens_per_minute", budget.tokens_per_minute, _TOKENS),
        ):
            if most is not None:
                used = sum(amount for _, amount in self._seconds(owned, figure, int(now)))
                found.append(BudgetUse(whose=whose, limit=name, used=used, most=most))
        for limit in _dollar_limits(budget, now):
            used = await self._spent(budget.tenant or "", budget.key, limit.start, now)
            found.append(BudgetUse(whose=whose, limit=limit.name, used=used, most=limit.most))
        return found

    async def _spent(self, tenant: str, key: str | None, since: int, now: float) -> float:
        """Return the dollars that a tenant or a key spent since a time. The store's sum is cached for a second.

        While the store is unavailable, this is the last known sum plus what this process has used since.
        """
        place = (tenant if key is None else "", key, since)
        at, dollars = self._known.get(place, (-_FRESH_SECONDS, 0.0))
        if not 0 <= now - at < _FRESH_SECONDS:
            try:
                if key is None:
                    dollars = await self._store.spent(tenant, since)
                else:
                    dollars = await self._store.spent_with(key, since)
            except StoreUnavailable:  # the request may do without the store: that is decided later
                self._known.setdefault(place, (at, dollars))
                return dollars + self._since_known[place]
            if len(self._known) >= 2 * MOST:  # entries of past days and months
                self._known.clear()
                self._since_known.clear()
            self._known[place] = now, dollars
            del self._since_known[place]
        return dollars

    def _owned_by(self, tenant: str, key: str | None) -> list[OwnedBudget]:
        return [
            each
            for each in self._owned
            if (each.budget.tenant == tenant if each.budget.key is None else each.budget.key == key)
        ]

    def _check(self, owned: OwnedBudget, name: str, limit: int, figure: int, now: float) -> None:
        """Raise `OverBudget` if the sum of the last 60 seconds has reached the limit.

        For requests the sum includes this one, so the caller passes the limit plus one.
        """
        seconds = self._seconds(owned, figure, int(now))
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
        # The sum may include requests that are being refused at the same moment: the message leaves them out.
        told = min(used, limit) if itself else used
        over = f"{_whose(owned.budget)} has used {told - itself:.0f} of {limit - itself} ({name})."
        raise OverBudget(f"{over} Try again in {max(1, ceil(wait))} seconds.", wait=wait)

    def _seconds(self, owned: OwnedBudget, figure: int, now: int) -> list[tuple[int, float]]:
        """Return what was used in each of the last 60 seconds, the oldest first."""
        values, sums = self._values, dict[int, float]()
        for part in range(0, len(values), _PART):
            first = self._row_in(part, owned)
            if first is None:
                continue
            for place in range(first + 1, first + _ROW, _FIGURES):
                second = int(values[place])
                if now - _SECONDS < second <= now and (amount := values[place + figure]):
                    sums[second] = sums.get(second, 0.0) + amount
        return sorted(sums.items())

    def _row_in(self, part: int, owned: OwnedBudget) -> int | None:
        """Return the start of a budget's row in the part of a process, or None if it has no row yet."""
        owners = list[float](self._values[part : part + _PART : _ROW])
        return part + owners.index(owned.owner) * _ROW if owned.owner in owners else None

    def _claimed(self, owned: OwnedBudget) -> int:
        """Claim and clear a row of this process for a budget: an unused one, else one of a removed budget."""
        values, in_force = self._values, {each.owner for each in self._owned}
        free = [at for at in range(self._part, self._part + _PART, _ROW) if values[at] not in in_force]
        first = next((at for at in free if not values[at]), free[0])
        values[first : first + _ROW] = memoryview(_UNUSED).cast("d")
        values[first] = owned.owner
        return first

    def _take_back(self, owned: OwnedBudget, now: float) -> None:
        """Uncount a request, if its second is still in the memory."""
        first = self._row_in(self._part, owned)
        if first is not None:
            place = first + 1 + int(now) % _SECONDS * _FIGURES
            if self._values[place] == int(now):
                self._values[place + _REQUESTS] -= 1

    def _add(self, owned: OwnedBudget, figure: int, amount: float, now: float) -> None:
        second, values = int(now), self._values
        first = self._row_in(self._part, owned)
        if first is None:
            first = self._claimed(owned)
        place = first + 1 + second % _SECONDS * _FIGURES
        if values[place] != second:
            values[place + _REQUESTS] = values[place + _TOKENS] = 0.0
            values[place] = second
        values[place + figure] += amount


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

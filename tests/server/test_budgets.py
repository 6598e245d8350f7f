"""What tenants and keys may use, beside the end-to-end tests of it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from proxy.config import Budget
from proxy.errors import OverBudget, StoreUnavailable
from proxy.pipeline import Background
from proxy.server.authentication import Identity
from proxy.server.budgets import Budgets, budget_memory

pytestmark = pytest.mark.anyio


class _Store:
    """Keeps what was spent, while it is there."""

    def __init__(self) -> None:
        self.away = False
        self.rows: list[tuple[str, str, float]] = []
        self.afterwards: list[Callable[[Any], Awaitable[None]]] = []

    async def spend(self, tenant: str, key: str, at: int, dollars: float) -> None:  # noqa: ARG002
        if self.away:
            raise StoreUnavailable("away")
        self.rows.append((tenant, key, dollars))

    async def spent_with(self, key: str, since: int) -> float:  # noqa: ARG002
        if self.away:
            raise StoreUnavailable("away")
        return sum(dollars for _, name, dollars in self.rows if name == key)

    async def spent(self, tenant: str, since: int) -> float:  # noqa: ARG002
        if self.away:
            raise StoreUnavailable("away")
        return sum(dollars for name, _, dollars in self.rows if name == tenant)

    async def once_back(self, work: Callable[[Any], Awaitable[None]]) -> None:
        try:
            await work(self)
        except StoreUnavailable:
            self.afterwards.append(work)


async def test_what_a_key_spent_while_the_store_was_away_is_stored_later() -> None:
    store: Any = _Store()
    background = Background()
    budgets = Budgets(
        [Budget(key="k", dollars_per_day=1.0), Budget(tenant="t", tokens_per_minute=9)],
        store,
        background=background,
        once_back=store.once_back,
    )
    budgets.used("t", "k", 1, 0.25)
    budgets.used("t", "other", 1, 7.0)  # nobody asks how much
    await background.drain()
    assert store.rows == [("t", "k", 0.25)]
    store.away = True
    budgets.used("t", "k", 1, 0.5)
    await background.drain()
    await budgets.admit(Identity(tenant="t", key="k"))
    store.away = False
    budgets.used("t", "k", 1, 0.25)
    budgets.used("u", "k", 1, 0.125)
    await background.drain()
    (work,) = store.afterwards
    await work(store)
    assert store.rows[1:] == [("t", "k", 0.75), ("u", "k", 0.125)]
    late = Budgets(budgets.in_force, store, once_back=store.once_back)
    with pytest.raises(OverBudget, match=r"Key 'k' has used 1.1250 of 1 dollars \(dollars_per_day\)"):
        await late.admit(Identity(tenant="t", key="k"))


async def test_while_the_store_is_away_what_is_known_counts() -> None:
    store: Any = _Store()
    now = 1_800_000_000.0
    store.rows.append(("t", "k", 0.5))
    limits = [Budget(key="k", dollars_per_day=1.0), Budget(tenant="t", dollars_per_month=9.0)]
    budgets = Budgets(limits, store, clock=lambda: now, once_back=store.once_back)
    caller = Identity(tenant="t", key="k")
    await budgets.admit(caller)
    store.away = True
    now += 60
    await budgets.admit(caller)
    budgets.used("t", "k", 1, 0.25)
    budgets.used("t", "other", 1, 7.0)
    await budgets.admit(caller)
    budgets.used("t", "k", 1, 0.25)
    with pytest.raises(OverBudget, match=r"Key 'k' has used 1.0000 of 1 dollars"):
        await budgets.admit(caller)
    store.away = False
    now += 60
    await budgets.admit(caller)
    late = Budgets(limits, store, clock=lambda: now, once_back=store.once_back)  # it has never seen the store
    store.away = True
    await late.admit(caller)
    late.used("t", None, 1, 9.0)
    with pytest.raises(OverBudget, match=r"Tenant 't' has used 9.0000 of 9 dollars"):
        await late.admit(caller)


async def test_a_change_of_budgets_lays_nobodys_requests_to_another_ones_charge() -> None:
    store: Any = _Store()
    first, second = (Budget(tenant=name, requests_per_minute=2) for name in ("first", "second"))
    memory = budget_memory(2)
    budgets = Budgets([first, second], store, memory, once_back=store.once_back)
    sibling = Budgets([first, second], store, memory, part=1, once_back=store.once_back)
    for each in (budgets, sibling):
        await each.admit(Identity(tenant="first"))
    with pytest.raises(OverBudget, match=r"Tenant 'first' has used 2 of 2 \(requests_per_minute\)"):
        await budgets.admit(Identity(tenant="first"))
    budgets.take([second])  # its sibling has not read this yet
    for _ in range(2):
        await budgets.admit(Identity(tenant="second"))
    (use,) = await budgets.usage(Identity(tenant="second"))
    assert (use.whose, use.limit, use.used, use.most) == ("Tenant 'second'", "requests_per_minute", 2, 2)
    assert await budgets.usage(Identity(tenant="first")) == []
    assert [use.used for use in await sibling.usage(None)] == [2, 2]
    with pytest.raises(OverBudget):
        await sibling.admit(Identity(tenant="second"))


async def test_what_was_used_stays_when_budgets_change_places() -> None:
    store: Any = _Store()
    one, other, new = (Budget(tenant=name, requests_per_minute=3) for name in ("one", "other", "new"))
    budgets = Budgets([one, one, other], store, once_back=store.once_back)
    for _ in range(3):
        await budgets.admit(Identity(tenant="other"))
    await budgets.admit(Identity(tenant="one"))
    budgets.take([new, other, *[one] * 62])
    assert [use.used for use in await budgets.usage(None)] == [0, 3, 1, 1, *[0] * 60]
    with pytest.raises(OverBudget):
        await budgets.admit(Identity(tenant="other"))
    await budgets.admit(Identity(tenant="one"))
    assert [use.used for use in await budgets.usage(Identity(tenant="one"))] == [2, 2, *[1] * 60]


async def test_a_refusal_after_a_change_of_budgets_takes_nothing_of_others_back() -> None:
    store: Any = _Store()
    gone = Budget(tenant="gone", requests_per_minute=100, dollars_per_day=1)
    stays = Budget(tenant="stays", requests_per_minute=3)
    budgets = Budgets([gone], store, once_back=store.once_back)

    async def spent(tenant: str, since: int) -> float:
        budgets.take([stays])
        for _ in range(3):
            await budgets.admit(Identity(tenant="stays"))
        return 2.0

    store.spent = spent
    with pytest.raises(OverBudget):
        await budgets.admit(Identity(tenant="gone"))
    assert [use.used for use in await budgets.usage(None)] == [3]

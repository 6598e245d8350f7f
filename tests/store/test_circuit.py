"""The circuit breaker: open while the store fails, closed soon after it is back, and not opened by a busy machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from proxy.errors import StoreUnavailable
from proxy.store import Store
from proxy.store.circuit import FROZEN, Circuit
from tests.support.stores import empty_store
from tests.support.talk import opening, settlement

pytestmark = pytest.mark.anyio
AWAY = "The store cannot be used. It is a test."


class Fake:
    """A store that answers, fails or does not respond."""

    def __init__(self) -> None:
        self.does = "answers"
        self.probes = 0
        self.busy = False
        self.circuit = Circuit(self.probe, lambda: self.busy)

    async def probe(self) -> None:
        self.probes += 1
        if self.does == "fails":
            raise StoreUnavailable(AWAY)
        if self.does == "breaks":
            raise KeyError("a bug")
        if self.does == "is silent":
            await asyncio.sleep(60)


@pytest.fixture(autouse=True)
def _short(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, seconds in (("SLOW_SECONDS", 0.1), ("PROBE_SECONDS", 0.1), ("_PAUSE_SECONDS", 0.02)):
        monkeypatch.setattr(f"proxy.store.circuit.{name}", seconds)


@pytest.mark.parametrize("how", ["fails", "breaks", "is silent"])
async def test_it_closes_once_the_store_is_back_and_all_is_stored(how: str) -> None:
    fake, drains = Fake(), [False, True]

    async def drain() -> bool:
        return drains.pop(0)

    fake.circuit.drain, fake.does = drain, how
    fake.circuit.open(StoreUnavailable(AWAY))
    fake.circuit.open(StoreUnavailable("something else"))
    assert not await fake.circuit.closes(0.3)
    assert fake.circuit.down is not None
    assert not fake.circuit.returns
    fake.does = "answers"
    assert await fake.circuit.closes(5)
    assert not drains
    assert [fake.circuit.down, fake.circuit.returns] == [None, False]
    await fake.circuit.close()


async def test_who_waits_for_a_store_that_answers_and_stores_nothing_is_told(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.store.database._logged", {})
    fake, waits = Fake(), 3

    async def drain() -> bool:
        nonlocal waits
        waits -= 1
        if waits == 2:
            assert fake.circuit.returns  # at first it looks as if it is back
        elif waits >= 0:
            assert not fake.circuit.returns
        if waits > 0:
            raise StoreUnavailable("The disk is full.")
        return True

    fake.circuit.drain = drain
    fake.circuit.open(StoreUnavailable(AWAY))
    assert not fake.circuit.returns
    assert await fake.circuit.closes(5)
    assert [text for text in caplog.messages if "disk" in text] == [
        "what waits in the spool could not be stored: The disk is full."
    ]
    await fake.circuit.close()


async def test_it_goes_on_trying_whatever_happens_to_what_waits() -> None:
    fake, told = Fake(), list[str]()

    async def drain() -> bool:
        if len(told) < 2:
            told.append(str(fake.circuit.down))
            raise OverflowError("a bug")
        return True

    fake.circuit.drain = drain
    fake.circuit.open(StoreUnavailable(AWAY))
    assert await fake.circuit.closes(5)
    assert told[0] == AWAY
    assert "What waits in the spool cannot be stored" in told[1]
    await fake.circuit.close()


async def test_a_store_that_answers_probes_alone_does_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    fake = Fake()
    for _ in range(3):
        fake.circuit.open(StoreUnavailable(AWAY))
        assert await fake.circuit.closes(5)
    opened = f"the store is not asked until it answers again: {AWAY}"
    assert caplog.messages == [opened, "the store is used again"]
    fake.does = "fails"
    fake.circuit.open(StoreUnavailable(AWAY))
    async with asyncio.timeout(5):
        while len(caplog.messages) < 3:  # noqa: ASYNC110 - it stays open, and says so
            await asyncio.sleep(0.01)
    fake.does = "answers"
    assert await fake.circuit.closes(5)
    assert caplog.messages[2:] == [opened, "the store is used again"]
    await fake.circuit.close()


async def test_health_is_asked_once_for_all_and_holds_for_a_while() -> None:
    fake = Fake()
    assert await asyncio.gather(*[fake.circuit.health(1.0) for _ in range(5)]) == [None] * 5
    assert await fake.circuit.health(60) is None
    assert fake.probes == 1
    fake.does = "fails"
    assert str(await fake.circuit.health(0)) == AWAY
    fake.does = "is silent"
    assert str(await fake.circuit.health(0)) == FROZEN
    await fake.circuit.close()


async def test_silence_opens_it_the_second_time_and_not_where_the_store_is_busy() -> None:
    fake = Fake()
    await fake.circuit.suspect()
    assert fake.circuit.down is None
    fake.does, fake.busy = "is silent", True
    await fake.circuit.suspect()
    assert fake.circuit.down is None
    fake.busy = False
    before = fake.probes
    await fake.circuit.suspect()
    assert str(fake.circuit.down) == FROZEN
    assert fake.probes - before == 2
    await fake.circuit.close()


async def test_an_exchange_that_is_not_stored_in_time_may_wait_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await Store.open(empty_store(tmp_path / "s.db"))
    monkeypatch.setattr("proxy.store.store._STORED_SECONDS", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(store, "_start", lambda _: asyncio.get_running_loop().create_future())
        began = store.begin(opening("exc_1"))
        # Both time out in the same turn of the event loop.
        late = await asyncio.gather(*[store.began(began) for _ in range(2)], return_exceptions=True)
        assert [type(each) for each in late] == [StoreUnavailable] * 2
        assert "transaction that stands still" in str(late[0])
        assert not began.done()  # it is not cancelled
        assert await store.circuit.closes(5)
        with pytest.raises(StoreUnavailable, match="transaction that stands still"):
            await store.settle(settlement("exc_1"))
    assert await store.circuit.closes(5)
    await store.close()


async def test_who_waits_is_told_when_it_opens(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = await Store.open(empty_store(tmp_path / "s.db"))
    monkeypatch.setattr("proxy.store.store.SLOW_SECONDS", 0.1)

    async def hangs(*_: object, **__: object) -> None:
        await asyncio.sleep(60)

    async def silent() -> None:
        await asyncio.sleep(60)

    with monkeypatch.context() as patch:
        patch.setattr(store._database, "read", hangs)
        patch.setattr(store.circuit, "_probe", silent)
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await store.session("t", "s")
        with pytest.raises(StoreUnavailable, match="did not answer"):
            await store.session("t", "s")
        assert not store.circuit.waiting
    assert await store.circuit.closes(5)
    assert await store.session("t", "s") is None
    assert await store.health() is None
    await store.close()

"""Long requests are written in portions, with the same result as in one transaction."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import shake_256
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import Executable, func, select

from proxy.conversation import ROOT, Incoming, Kind, content_hash, fingerprints, names_under
from proxy.errors import Conflict, NotFound, StoreUnavailable
from proxy.store import archive, portions, sessions
from proxy.store.database import Parameters, Result, Rows, SqlDialect, StoreConnection, Unit
from proxy.store.records import Body, HistoryQuery, Settled, Settlement, Status, session_key
from proxy.store.schema import CUTS, OF_A_SESSION
from proxy.store.sessions import SessionListQuery, removed_sessions
from proxy.store.store import Store
from proxy.trimming import Change, Cut
from tests.store.test_batches import SESSIONS, rows_of
from tests.support.talk import body, message, opening, settlement

pytestmark = pytest.mark.anyio

EXCHANGE = "exc_00000001"
SESSION = SESSIONS[0]


@pytest.fixture
async def store(store: Store) -> Store:
    """A store without a circuit breaker, which would open when a test makes a write fail."""
    return store.direct()


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.store._LONG", 4)
    monkeypatch.setattr(portions, "_ROWS", 4)
    monkeypatch.setattr(portions, "_ALONE", 1)


def long_talk(count: int = 21) -> list[Body]:
    """Return messages whose first and last are the user's; two have the same text."""
    roles = ("user", "assistant")
    return [body(roles[number % 2], f"said {number % 20} and a good deal more") for number in range(count)]


async def ask(store: Store, messages: list[Body], *, settle: bool = True, **changes: Any) -> Settled | None:
    """Begin a long exchange, and settle it."""
    named = {"session": SESSION, "kind": "foreign"} | changes
    began = store.begin(opening(EXCHANGE, *messages, **named))
    if not settle:
        await began
        return None
    ended: dict[str, Any] = {"at_head": False, "replies": (body("assistant", "the answer"),)}
    return await store.settle(settlement(EXCHANGE, *messages, **(ended | named)), began)


class Counted:
    """Records how many rows each transaction writes, by table; may fail at one."""

    def __init__(self, store: Store, monkeypatch: pytest.MonkeyPatch, fails_at: int | None = None) -> None:
        self.portions: list[dict[str, int]] = []
        self.between: Callable[[int], Any] | None = None
        """Called before each transaction, with its number."""
        self._fails_at = fails_at
        self._database = store._database
        self._write = store._database.write
        monkeypatch.setattr(store._database, "write", self.write)

    async def write(self, unit: Unit[Result], *, durable: bool = True, again: bool = True) -> Result:
        number = len(self.portions)
        counts: dict[str, int] = {}
        self.portions.append(counts)
        if number == self._fails_at:
            raise StoreUnavailable("killed here")
        if self.between is not None:
            await self.between(number)

        def counting(connection: StoreConnection) -> Result:
            counts.clear()
            return unit(Counting(connection, counts))

        return await self._write(counting, durable=durable, again=again)


class Counting:
    """A connection that counts the rows that are inserted."""

    def __init__(self, connection: StoreConnection, counts: dict[str, int]) -> None:
        self._connection = connection
        self._counts = counts

    @property
    def dialect(self) -> SqlDialect:
        return self._connection.dialect

    def execute(self, statement: Executable, parameters: Parameters | None = None, /) -> Rows:
        table: Any = getattr(statement, "table", None)
        if table is not None and parameters:
            rows = 1 if isinstance(parameters, Mapping) else len(parameters)
            self._counts[table.name] = self._counts.get(table.name, 0) + rows
        return self._connection.execute(statement, parameters)


async def rows_in(store: Store, tenant: str) -> dict[str, list[dict[str, Any]]]:
    return await store._database.read(lambda connection: rows_of(connection, tenant))


async def count_of(store: Store) -> int:
    """Return how many rows a session has in all tables."""
    key = session_key("tenant", SESSION)

    def count(connection: StoreConnection) -> int:
        counts = [
            connection.execute(
                select(func.count()).select_from(table).where(table.c.session == key)
            ).scalar_one_or_none()
            for table in OF_A_SESSION
        ]
        return sum(counts)

    return await store._database.read(count)


async def test_portions_come_to_what_one_transaction_does(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = long_talk()
    told = Counted(store, monkeypatch)
    many = await ask(store, messages, tenant="many")
    assert many is not None
    # A second time changes nothing.
    assert await ask(store, messages, tenant="many") == replace(many, are_new=False)
    with monkeypatch.context() as patch:
        patch.setattr("proxy.store.store.is_long", lambda _: False)
        one = await ask(store, messages, tenant="one")
    assert one == many
    assert await rows_in(store, "many") == await rows_in(store, "one")
    assert max(max(each.values(), default=0) for each in told.portions) <= 4
    assert len(told.portions) >= 10


async def test_what_is_known_of_the_messages_is_stored_with_them(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = Change(position=3, edit="e", reason="r", message=message("tool", "x"), tokens_before=9, tokens_after=1)

    def ended(tenant: str) -> Settlement:
        return settlement(
            EXCHANGE,
            *long_talk(),
            replies=(body("assistant", "the answer"),),
            at_head=False,
            tenant=tenant,
            session=SESSION,
            kind="foreign",
            relayed=tuple([at for at, each in enumerate(long_talk()) if each.message.role == "assistant"]),
            arrivals=((), (), (), (changed,)),
        )

    await ask(store, long_talk(), settle=False, tenant="many")
    await store.settle(ended("many"))
    with monkeypatch.context() as patch:
        patch.setattr("proxy.store.store.is_long", lambda _: False)
        await ask(store, long_talk(), settle=False, tenant="one")
        await store.settle(ended("one"))
    many, one = await rows_in(store, "many"), await rows_in(store, "one")
    assert many == one
    assert len(many["evidence"]) == len(one["evidence"]) > 9


async def test_one_large_text_is_a_portion(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("portions", "store"):
        monkeypatch.setattr(f"proxy.store.{module}.PORTION_BYTES", 100)
    told = Counted(store, monkeypatch)
    large = [shake_256(name).hexdigest(200) for name in (b"x", b"y")]  # packed it has more than 100 bytes
    await ask(store, [body("user", large[0]), body("assistant", large[1]), body("user", "z")])
    assert [each.get("bodies") for each in told.portions[:3]] == [1, 1, 1]


async def test_others_write_in_between(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Counted(store, monkeypatch)
    answered: list[int] = []

    async def small(number: int) -> None:
        exchange, asked = f"exc_1{number:07d}", body("user", f"small {number}")
        named = {"session": f"small {number}"}
        began = store.begin(opening(exchange, asked, **named))
        await store.settle(settlement(exchange, asked, replies=(body("assistant", "yes"),), **named), began)
        answered.append(number)

    told.between = small
    settled = await ask(store, long_talk())
    assert settled is not None
    assert answered == list(range(len(told.portions)))


@pytest.mark.parametrize("fails_at", [0, 1, 4, 5, 6, 8, 11])
async def test_what_was_cut_off_is_whole_when_it_is_asked_again(
    store: Store, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    messages = long_talk()
    with monkeypatch.context() as patch:
        Counted(store, patch, fails_at)
        with pytest.raises(StoreUnavailable):
            await ask(store, messages)
    session = await store.session("tenant", SESSION)
    assert session is None or session.head == ROOT
    settled = await ask(store, messages)
    assert settled is not None
    names = names_under(ROOT, [content_hash(each.message) for each in messages])
    assert list(settled.nodes) == names
    rows = await store.path(session_key("tenant", SESSION), settled.head)
    assert [row.node for row in rows] == [*names, settled.head]
    assert [row.message.raw for row in rows[:-1]] == [each.message.raw for each in messages]
    assert [branch.head for branch in await store.branches(session_key("tenant", SESSION))] == [settled.head]
    exchange = await store.exchange(EXCHANGE)
    assert exchange is not None
    assert exchange.status is Status.COMPLETE


@pytest.mark.parametrize("number", range(1, 13))
async def test_a_session_that_is_deleted_in_between_stays_away_or_is_whole(
    store: Store, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    told = Counted(store, monkeypatch)
    key = session_key("tenant", SESSION)

    async def delete(at: int) -> None:
        if at == number:
            told.between = None
            await store.delete(key)

    told.between = delete
    settled = await ask(store, long_talk())
    assert settled is not None
    if settled.head == ROOT:
        assert await store.session("tenant", SESSION) is None
        assert await count_of(store) == 0
    else:  # it was deleted before the exchange itself was stored
        rows = await store.path(key, settled.head)
        assert [row.message.raw for row in rows[:-1]] == [each.message.raw for each in long_talk()]


async def test_what_goes_on_from_a_stored_message_is_written_in_portions_too(store: Store) -> None:
    first = await ask(store, long_talk())
    assert first is not None
    more = [body("user", f"more {number}") for number in range(9)]
    named: dict[str, Any] = {"session": SESSION, "kind": "resend", "base": first.head}
    began = store.begin(opening("exc_00000002", *more, **named))
    replies = (body("assistant", "and again"),)
    settled = await store.settle(settlement("exc_00000002", *more, replies=replies, at_head=False, **named), began)
    rows = await store.path(session_key("tenant", SESSION), settled.head)
    assert [row.depth for row in rows] == list(range(1, 33))
    assert [row.node for row in rows[22:31]] == list(settled.nodes)


async def test_a_long_append_goes_where_the_session_stands(store: Store) -> None:
    asked = [body("user", f"one {number}") for number in range(9)]
    began = store.begin(opening(EXCHANGE, *asked, session=SESSION, digest="long"))
    await began
    other = body("user", "meanwhile")
    meanwhile = store.begin(opening("exc_00000002", other, session=SESSION))
    reply = (body("assistant", "yes"),)
    first = await store.settle(settlement("exc_00000002", other, replies=reply, session=SESSION), meanwhile)
    settled = await store.settle(settlement(EXCHANGE, *asked, replies=reply, session=SESSION), began)
    rows = await store.path(session_key("tenant", SESSION), settled.head)
    assert rows[1].node == first.head
    assert len(rows) == 12


async def test_a_long_request_that_failed_leaves_its_texts(store: Store) -> None:
    messages = long_talk()
    await ask(store, messages, settle=False)
    await store.settle(settlement(EXCHANGE, *messages, session=SESSION, kind="foreign", at_head=False))
    exchange = await store.exchange(EXCHANGE)
    assert exchange is not None
    assert (exchange.status, len(exchange.messages), exchange.nodes) == (Status.FAILED, 21, ())


async def test_a_caller_that_leaves_does_not_stop_it(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    told = Counted(store, monkeypatch)
    messages = long_talk()
    await ask(store, messages, settle=False)
    ended = settlement(
        EXCHANGE, *messages, replies=(body("assistant", "yes"),), at_head=False, session=SESSION, kind="foreign"
    )
    at = len(told.portions)
    settling = asyncio.get_running_loop().create_task(store.settle(ended))

    async def leave(number: int) -> None:
        if number == at + 1:
            settling.cancel()

    told.between = leave
    with pytest.raises(asyncio.CancelledError):
        await settling
    again = await store.settle(ended)
    assert again.head != ROOT
    assert len(await store.branches(session_key("tenant", SESSION))) == 1


# ------------------------------------------------------------------------------ sessions that go, or come


KEY = session_key("tenant", SESSION)


@pytest.fixture
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(portions, "_DELETED", 10)
    monkeypatch.setattr(portions, "_SESSIONS", 2)
    monkeypatch.setattr(archive, "PORTION", 4)


def on_sqlite(store: Store) -> bool:
    return store._database.in_order


async def asked(store: Store) -> Kind:
    """Send a request with two messages in the session; return its context kind."""
    said = [each.message for each in long_talk(2)]
    names, contents = fingerprints(ROOT, said)
    incoming = Incoming(names=names, contents=contents, replies=[1])
    query = HistoryQuery(tenant="tenant", session=SESSION, incoming=incoming, messages=said, policy=None, agent=None)
    return (await store.recall(query)).arrival.kind


@pytest.mark.usefixtures("_few_rows")
async def test_a_long_session_is_deleted_in_portions(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    await ask(store, long_talk())
    rows = await count_of(store)
    told = Counted(store, monkeypatch)
    assert await store.delete(KEY)
    assert await count_of(store) == 0
    assert len(told.portions) == ((rows - 5) // 10 + 3 if on_sqlite(store) else 1)  # one looks for an index
    assert not await store.delete(KEY)


@pytest.mark.usefixtures("_few_rows")
@pytest.mark.parametrize("fails_at", [1, 2, 4])
async def test_a_session_whose_deletion_was_cut_off_is_not_there(
    store: Store, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    if not on_sqlite(store):
        return  # one transaction
    await ask(store, long_talk())
    with monkeypatch.context() as patch:
        Counted(store, patch, fails_at)
        with pytest.raises(StoreUnavailable):
            await store.delete(KEY)
    assert await count_of(store) > 0
    assert await store.session("tenant", SESSION) is None
    assert await store.find(SESSION) == []
    assert await store.sessions("tenant", limit=9) == ([], None)
    assert await store.listed(SessionListQuery()) == ([], None)
    with pytest.raises(NotFound):
        async for _ in store.export(KEY):
            pass
    if fails_at == 1:
        await store.finish_removals()
    elif fails_at == 2:
        assert await store.erase("tenant") == 1
    else:
        assert await asked(store) is Kind.FIRST  # who asks in it finds nothing of what was deleted
    assert await count_of(store) == 0


async def test_who_finishes_a_deletion_leaves_what_was_made_anew(store: Store) -> None:
    if not on_sqlite(store):
        return  # one transaction
    await ask(store, long_talk())
    await store._database.write(partial(sessions.remove_some, key=KEY, most=5, begins=True))
    removed = await store._database.read(partial(removed_sessions, at=10**15))
    assert removed == [KEY]
    anew = body("user", "a new life")
    named: dict[str, Any] = {"session": SESSION, "kind": "first"}
    began = store.begin(opening("exc_00000002", anew, **named))
    replies = (body("assistant", "yes"),)
    await store.settle(settlement("exc_00000002", anew, **named, at_head=False, replies=replies), began)
    await store._finish(removed)
    found = await store.session_at(KEY)
    assert found is not None
    assert found.messages == 2


async def test_a_cut_stands_where_it_belongs_though_nodes_were_stored_before(store: Store) -> None:
    first = body("user", "base")
    began = store.begin(opening(EXCHANGE, first, session=SESSION, kind="first"))
    ended = settlement(
        EXCHANGE, first, session=SESSION, kind="first", at_head=False, replies=(body("assistant", "answer"),)
    )
    base = (await store.settle(ended, began)).head
    cut = Cut(position=8, policy="p", version="1", changes=(), tokens=1, messages=1, tool_calls=0)
    for number in (2, 3):  # both were planned at the same place
        exchange = f"exc_0000000{number}"
        named: dict[str, Any] = {"session": SESSION, "kind": "rewind", "base": base}
        began = store.begin(opening(exchange, *long_talk(), **named))
        named |= {"at_head": False, "replies": (body("assistant", "z"),), "cut": cut if number == 3 else None}
        await store.settle(settlement(exchange, *long_talk(), **named), began)
    found = await store._database.read(lambda connection: connection.execute(select(CUTS.c.node)).scalars())
    assert base not in list(found)


@pytest.mark.usefixtures("_few_rows")
async def test_a_session_that_is_made_anew_while_it_is_deleted_has_nothing_of_the_old_one(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    await ask(store, long_talk())
    told = Counted(store, monkeypatch)
    new = body("user", "another beginning")

    async def begin(number: int) -> None:
        if number == 2:
            told.between = None
            await store.begin(opening("exc_00000002", new, session=SESSION))

    told.between = begin
    assert await store.delete(KEY)
    if on_sqlite(store):  # elsewhere it is deleted in one transaction
        settled = await store.settle(
            settlement("exc_00000002", new, replies=(body("assistant", "yes"),), session=SESSION)
        )
        assert [row.message.text for row in await store.path(KEY, settled.head)] == ["another beginning", "yes"]
        assert len(await store.branches(KEY)) == 1


async def exported(store: Store) -> list[Any]:
    """Store a long session, and return its export."""
    await ask(store, long_talk())
    return [record async for record in store.export(KEY)]


def content_of(records: list[Any]) -> list[Any]:
    """Return the part of an export that an import preserves."""
    kept = [dict(record) for record in records if record["record"] not in {"exchange", "form"}]
    own = ("id", "tenant", "requests", "tokens_sent", "tokens_saved", "exchange", "recorded", "cost", "scale")
    for record in kept:
        for name in own:
            record.pop(name, None)
    return kept


@pytest.mark.usefixtures("_few_rows")
async def test_a_long_session_is_imported_in_portions_and_is_there_when_it_is_whole(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = await exported(store)
    told = Counted(store, monkeypatch)

    async def look(number: int) -> None:
        if number > 0:
            assert await store.session("tenant", "copy") is None
            assert await store.find("copy") == []

    told.between = look
    made = await store.load("tenant", "copy", records)
    assert made.messages == 22
    assert len(told.portions) >= (10 if on_sqlite(store) else 1)
    if on_sqlite(store):
        assert max(max(each.values(), default=0) for each in told.portions) <= 4
    again = [record async for record in store.export(made.key)]
    assert content_of(again) == content_of(records)


@pytest.mark.usefixtures("_few_rows")
@pytest.mark.parametrize("fails_at", [1, 4, 9])
async def test_an_import_that_was_cut_off_is_done_once_more(
    store: Store, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    if not on_sqlite(store):
        return  # one transaction
    records = await exported(store)
    with monkeypatch.context() as patch:
        Counted(store, patch, fails_at)
        patch.setattr(archive, "delete_sessions", never)  # as if the process had been killed
        with pytest.raises(StoreUnavailable):
            await store.load("tenant", "copy", records)
    assert await store.session("tenant", "copy") is None
    await store.finish_removals()  # another process may be at work on it
    assert len(await store._database.read(partial(removed_sessions, at=2**50))) == 1
    made = await store.load("tenant", "copy", records)
    again = [record async for record in store.export(made.key)]
    assert content_of(again) == content_of(records)


async def never(_: object, keys: list[str], *, begins: bool) -> int:
    return 0 * len(keys) * begins


@pytest.mark.usefixtures("_few_rows")
async def test_an_import_that_fails_leaves_nothing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    records = await exported(store)
    told = Counted(store, monkeypatch)

    async def fail(number: int) -> None:
        if number == (4 if on_sqlite(store) else 0):
            told.between = None
            raise StoreUnavailable("full")

    told.between = fail
    with pytest.raises(StoreUnavailable):
        await store.load("tenant", "copy", records)
    assert await store._database.read(partial(removed_sessions, at=2**50)) == []
    assert await store.find("copy") == []


@pytest.mark.usefixtures("_few_rows")
async def test_who_asks_in_a_session_that_is_being_imported_has_it(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not on_sqlite(store):
        return  # one transaction
    records = await exported(store)
    told = Counted(store, monkeypatch)
    mine = body("user", "mine")

    async def begin(number: int) -> None:
        if number == 4:
            told.between = None
            await store.begin(opening("exc_00000002", mine, session="copy"))

    told.between = begin
    with pytest.raises(Conflict):
        await store.load("tenant", "copy", records)
    settled = await store.settle(settlement("exc_00000002", mine, replies=(body("assistant", "yes"),), session="copy"))
    key = session_key("tenant", "copy")
    assert [row.message.text for row in await store.path(key, settled.head)] == ["mine", "yes"]
    assert len(await store.branches(key)) == 1


@pytest.mark.usefixtures("_few_rows")
async def test_short_sessions_are_deleted_several_at_once(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        await store.begin(opening(f"exc_0000001{number}", body("user", "short"), session=f"short {number}"))
    await ask(store, long_talk())
    told = Counted(store, monkeypatch)
    assert await store.erase("tenant") == 5
    assert await count_of(store) == 0
    assert await store.sessions("tenant", limit=9) == ([], None)
    assert len(told.portions) < (12 if on_sqlite(store) else 5)
    assert await store.erase("tenant") == 0


async def test_erasing_a_tenant_ends_though_it_goes_on_asking(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        await store.begin(opening(f"exc_0000001{number}", body("user", "old"), session=f"old {number}"))
    told = Counted(store, monkeypatch)

    async def more(number: int) -> None:
        assert number < 300
        await store.begin(opening(f"exc_1{number:07d}", body("user", "new"), session=f"new {number}"))

    told.between = more
    assert await store.erase("tenant") >= 3
    told.between = None
    left, _ = await store.sessions("tenant", limit=1000)
    assert {row.id for row in left}.isdisjoint({"old 0", "old 1", "old 2"})

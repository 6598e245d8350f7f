from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import QueuePool, create_engine, make_url, select, text
from sqlalchemy.exc import DBAPIError

from proxy.errors import StoreUnavailable
from proxy.store import Store, upgrade
from proxy.store.database import PostgresServer, StoreConnection, address_of
from proxy.store.postgres import PostgresDatabase, _pass_over_dead_connections
from tests.support import postgres
from tests.support.waiting import until

pytestmark = pytest.mark.anyio


END_THE_OTHERS = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
    "WHERE datname = current_database() AND pid <> pg_backend_pid()"
)


def opened(url: str) -> PostgresDatabase:
    address = address_of(url)
    assert isinstance(address, PostgresServer)
    return PostgresDatabase(address)


def one(connection: StoreConnection) -> object:
    return connection.execute(select(text("1"))).scalar_one_or_none()


@pytest.mark.parametrize(("why", "traced"), [(BrokenPipeError(), False), (RuntimeError("a bug"), True)])
def test_no_trace_is_logged_of_a_connection_whose_server_is_away(
    caplog: pytest.LogCaptureFixture, why: Exception, traced: bool
) -> None:
    class Dead(sqlite3.Connection):
        def close(self) -> None:
            raise why

    engine = create_engine("sqlite://", poolclass=QueuePool, connect_args={"factory": Dead})
    _pass_over_dead_connections(engine)
    with engine.connect() as connection:
        connection.invalidate()
    assert any(record.exc_info for record in caplog.records) is traced
    assert not any("cannot be used" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("scheme", ["postgres", "postgresql+asyncpg", "postgresql+psycopg"])
@pytest.mark.parametrize("option", ["", "statement_cache_size=0"])
async def test_either_driver_reads_and_writes(empty_postgres: str, scheme: str, option: str) -> None:
    url = empty_postgres.replace("postgresql", scheme, 1)
    database = opened(url + ("&" if "?" in url else "?") + option if option else url)
    for _ in range(3):
        assert await database.read(one) == 1
        assert await database.write(one) == 1
    await database.close()


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
async def test_options_that_providers_put_into_a_url_are_taken(empty_postgres: str, scheme: str) -> None:
    more = "sslmode=prefer&connect_timeout=5&application_name=one%20two&options=-cwork_mem%3D5MB"
    url = empty_postgres.replace("postgresql", scheme, 1)
    database = opened(url + ("&" if "?" in url else "?") + more)

    def settings(connection: StoreConnection) -> list[str]:
        return [
            str(connection.execute(text(f"SHOW {name}")).scalar_one_or_none())
            for name in ("application_name", "work_mem")
        ]

    assert await database.read(settings) == ["one two", "5MB"]
    await database.close()


async def test_an_option_that_only_the_driver_can_judge_is_an_outage_with_advice(tmp_path: Path) -> None:
    database = opened(f"postgresql://me@127.0.0.1:1/db?target_session_attrs=any&sslnegotiation={tmp_path.name}")
    with pytest.raises(StoreUnavailable, match=r"refuses an option of store\.url"):
        await database.read(one)
    await database.close()


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
async def test_an_error_says_nothing_of_the_values_of_its_statement(empty_postgres: str, scheme: str) -> None:
    database = opened(empty_postgres.replace("postgresql", scheme, 1))

    def fails(connection: StoreConnection) -> None:
        connection.execute(text("SELECT length(:said) / 0"), {"said": "a secret"})

    for unit in (database.read, database.write):
        with pytest.raises(DBAPIError) as raised:
            await unit(fails)
        assert "by zero" in str(raised.value)
        assert "secret" not in str(raised.value)
    await database.close()


async def test_transactions_that_block_each_other_are_tried_again(empty_postgres: str) -> None:
    postgres.execute(
        empty_postgres, "CREATE TABLE t (id int PRIMARY KEY, n int)", "INSERT INTO t VALUES (1, 0), (2, 0)"
    )
    database = opened(empty_postgres)
    tries = 0
    held: set[int] = set()

    def add_to(connection: StoreConnection, place: int) -> None:
        connection.execute(text("UPDATE t SET n = n + 1 WHERE id = :id"), {"id": place})

    def crossing(connection: StoreConnection, order: tuple[int, int]) -> None:
        nonlocal tries
        tries += 1
        first, second = order
        add_to(connection, first)
        held.add(first)
        while len(held) < len(order):  # until each holds what the other one wants
            connection.execute(text("SELECT pg_sleep(0.01)"))
        add_to(connection, second)

    await asyncio.gather(*(database.write(partial(crossing, order=order)) for order in ((1, 2), (2, 1))))
    assert tries > 2

    def sums(connection: StoreConnection) -> list[int]:
        return list(connection.execute(text("SELECT n FROM t")).scalars())

    assert await database.read(sums) == [2, 2]
    await database.close()


async def test_a_connection_that_the_server_ended_is_made_anew(empty_postgres: str) -> None:
    database = opened(empty_postgres)
    assert await database.read(one) == 1
    postgres.execute(empty_postgres, END_THE_OTHERS)
    assert await database.read(one) == 1
    await database.close()


@pytest.mark.parametrize("few", [1, 3])
@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
async def test_the_few_connections_that_a_server_gives_are_taken_in_turns(
    empty_postgres: str, caplog: pytest.LogCaptureFixture, scheme: str, few: int
) -> None:
    def some(connection: StoreConnection) -> object:
        connection.execute(text("SELECT pg_sleep(0.05)"))
        return one(connection)

    def nothing(connection: StoreConnection) -> None:
        one(connection)

    with postgres.role(empty_postgres, few) as url:
        database = opened(url.replace("postgresql", scheme, 1))
        ways = [partial(database.read, some, short=True), partial(database.read, some), partial(database.write, some)]
        for many in ways:  # each kind keeps its connections, which the next one needs
            assert await asyncio.gather(*[many() for _ in range(20)]) == [1] * 20
            await database.probe(nothing, same=True)
        under_way = [asyncio.create_task(many()) for many in ways * 10]  # noqa: TID251 - awaited below
        await database.probe(nothing, same=True)
        assert not all(task.done() for task in under_way)  # the probe does not wait for all of them
        assert await asyncio.gather(*under_way) == [1] * 30
        await database.close()
    assert [record.message for record in caplog.records if record.levelname == "WARNING"] == [
        "the server gives fewer connections than are wanted: what is asked of the store takes turns"
    ]


@pytest.mark.parametrize("short", [True, False])
async def test_an_error_of_our_own_is_none_of_the_server_whatever_its_words_are(
    empty_postgres: str, short: bool
) -> None:
    tries: list[object] = []

    def wrong(connection: StoreConnection) -> None:
        tries.append(one(connection))
        raise ValueError("too many values to unpack")

    database = opened(empty_postgres)
    with pytest.raises(ValueError, match="too many"):
        await database.read(wrong, short=short)
    assert tries == [1]
    assert not database._turns.are_few
    await database.close()


async def test_a_server_that_gives_no_connection_at_all_is_away(empty_postgres: str) -> None:
    with postgres.role(empty_postgres, 1) as url:
        other, database = opened(url), opened(url)
        assert await other.write(one) == 1
        with pytest.raises(StoreUnavailable, match="gives no more connections"):
            await database.write(one)
        await other.close()
        assert await database.write(one) == 1
        await database.close()


async def test_a_server_that_gives_more_connections_again_is_asked_for_them(
    empty_postgres: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nap(connection: StoreConnection) -> None:
        connection.execute(text("SELECT pg_sleep(0.05)"))

    with postgres.role(empty_postgres, 1) as url:
        database = opened(url)
        await asyncio.gather(*[database.write(nap) for _ in range(3)])
        assert database._turns.are_few
        postgres.execute(empty_postgres, f"ALTER ROLE {make_url(url).username} CONNECTION LIMIT -1")
        monkeypatch.setattr("proxy.store.postgres._FEW_SECONDS", 0.0)
        for _ in range(20):
            await database.write(nap)
        assert not database._turns.are_few
        await database.close()


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
async def test_an_idle_connection_is_tried_out_before_a_write(
    empty_postgres: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.store.postgres._TRUSTED_SECONDS", 0.0)
    database = opened(empty_postgres.replace("postgresql", scheme, 1))
    assert await database.write(one) == 1
    postgres.execute(empty_postgres, END_THE_OTHERS)
    assert await database.write(one) == 1
    await database.close()


@asynccontextmanager
async def forwarded(url: str) -> AsyncIterator[tuple[str, Callable[[], None]]]:
    """Yield the URL of a forwarder to a server, and a function that makes its open connections unresponsive."""
    folder = make_url(url).query.get("host")
    if folder is None:
        pytest.skip("the server that is named has no socket in a folder")
    ends: list[asyncio.StreamWriter] = []
    silent: list[asyncio.StreamWriter] = []

    async def forward(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            if target not in silent:
                target.write(data)
        target.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_unix_connection(f"{folder}/.s.PGSQL.5432")
        ends.extend((writer, far_writer))
        await asyncio.gather(forward(reader, far_writer), forward(far_reader, writer))

    async with await asyncio.start_server(connected, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        here = make_url(url).set(host="127.0.0.1", port=port, query={})
        yield here.render_as_string(hide_password=False), lambda: silent.extend(ends)
        for end in ends:
            end.close()


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
async def test_a_connection_that_says_nothing_any_more_is_made_anew(
    empty_postgres: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.store.postgres._TRUSTED_SECONDS", 0.0)
    monkeypatch.setattr("proxy.store.postgres._SILENT_SECONDS", 1.0)
    async with forwarded(empty_postgres) as (url, fall_silent):
        database = opened(url.replace("postgresql", scheme, 1))
        for _ in range(2):
            assert await database.read(one) == 1
            assert await database.read(one, short=True) == 1
            assert await database.write(one) == 1
            fall_silent()
        await database.close()


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
async def test_a_read_of_several_slow_statements_is_waited_for_the_second_time(
    empty_postgres: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.store.postgres._SILENT_SECONDS", 0.2)

    def slow(connection: StoreConnection) -> object:
        for _ in range(2):
            connection.execute(text("SELECT pg_sleep(0.4)")).all()
        return one(connection)

    database = opened(empty_postgres.replace("postgresql", scheme, 1))
    assert await database.read(one, short=True) == 1
    assert await database.read(slow, short=True) == 1
    await database.close()


async def test_a_table_that_may_not_be_read_is_told(empty_postgres: str) -> None:
    await upgrade(empty_postgres)
    with postgres.role(empty_postgres, 20) as url:
        name = make_url(url).username
        postgres.execute(empty_postgres, f"GRANT ALL ON ALL TABLES IN SCHEMA public TO {name}")
        async with await Store.open(url, migrate=False) as store:
            assert await store.health() is None
            postgres.execute(empty_postgres, f"REVOKE SELECT ON nodes FROM {name}")  # noqa: S608 - the name is ours
            assert "grant it the tables" in str(await store.circuit.health(0.0))
        postgres.execute(empty_postgres, f"DROP OWNED BY {name}")


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
async def test_a_write_that_waits_for_another_transaction_ends(
    empty_postgres: str, scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.store.postgres._STATEMENT_SECONDS", 0.5)
    postgres.execute(empty_postgres, "CREATE TABLE held (number int)", "INSERT INTO held VALUES (1)")
    database = opened(empty_postgres.replace("postgresql", scheme, 1))
    with psycopg.connect(empty_postgres) as holder:
        holder.execute("SELECT FROM held FOR UPDATE")
        with pytest.raises(StoreUnavailable, match="a transaction that stands still"):
            await database.write(lambda connection: connection.execute(text("UPDATE held SET number = 2")))
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        with psycopg.connect(empty_postgres, autocommit=True) as watching:
            until(lambda: watching.execute(waiting).fetchone() == (0,), "the server waits no more")
    assert await database.write(lambda connection: connection.execute(text("SELECT number FROM held")).all()) == [(1,)]
    await database.close()


async def test_a_connection_just_used_is_not_tried_out(empty_postgres: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> bool:
        raise AssertionError("it was tried out")

    monkeypatch.setattr("proxy.store.postgres._TRUSTED_SECONDS", 3600.0)
    monkeypatch.setattr("sqlalchemy.dialects.postgresql.asyncpg.PGDialect_asyncpg.do_ping", fail)
    database = opened(empty_postgres)
    for _ in range(3):
        assert await database.write(one) == 1
    postgres.execute(empty_postgres, END_THE_OTHERS)
    assert await database.write(one) == 1  # on a new connection
    await database.close()


async def test_a_server_that_ends_the_connection_in_a_transaction_is_unavailable(empty_postgres: str) -> None:
    database = opened(empty_postgres)

    def die(connection: StoreConnection) -> None:
        connection.execute(text("SELECT pg_terminate_backend(pg_backend_pid())"))

    with pytest.raises(StoreUnavailable):
        await database.write(die)
    assert await database.read(one) == 1
    await database.close()


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
async def test_a_server_that_is_not_there_is_unavailable(scheme: str) -> None:
    database = opened(f"{scheme}://me:secret@127.0.0.1:9/db")
    with pytest.raises(StoreUnavailable, match="can be reached") as refused:
        await database.read(one)
    assert "secret" not in refused.value.message
    await database.close()


@pytest.mark.parametrize("scheme", ["postgresql+asyncpg", "postgresql+psycopg"])
async def test_a_database_that_is_not_there_is_unavailable(postgres_server: str, scheme: str) -> None:
    url = postgres_server.replace("/postgres?", "/none?").replace("postgresql", scheme, 1)
    database = opened(url)
    with pytest.raises(StoreUnavailable):
        await database.read(one)
    await database.close()

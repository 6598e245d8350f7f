"""What all databases guarantee, how URLs are parsed, and which errors mean that a database is unavailable."""

from __future__ import annotations

import asyncio
import re
import sqlite3
import sys
import threading
import tomllib
from collections.abc import AsyncGenerator
from functools import partial
from pathlib import Path
from typing import Any

import asyncpg.exceptions
import psycopg
import pytest
from pydantic import TypeAdapter, ValidationError
from sqlalchemy import bindparam, delete, func, insert, select, true, update
from sqlalchemy.dialects.postgresql.asyncpg import AsyncAdapt_asyncpg_dbapi
from sqlalchemy.exc import DBAPIError, IntegrityError, MultipleResultsFound, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from proxy.config.settings import StoreUrl
from proxy.errors import ConfigurationError, StoreUnavailable
from proxy.store.database import (
    Database,
    PostgresServer,
    SqliteFile,
    StoreConnection,
    address_of,
    is_worth_another_try,
    translated,
    unavailable,
)
from proxy.store.schema import NODES, SECRETS, insert_into, insert_new
from proxy.store.store import Store

pytestmark = pytest.mark.anyio


@pytest.fixture
async def database(store_url: str) -> AsyncGenerator[Database]:
    store = await Store.open(store_url)
    yield store._database
    await store.close()


def put(connection: StoreConnection, name: str) -> str:
    insert_new(connection, SECRETS, [{"name": name, "value": "00"}])
    return name


def names(connection: StoreConnection) -> set[str]:
    return set(connection.execute(select(SECRETS.c.name)).scalars())


async def test_what_is_written_is_there_when_the_write_returns(database: Database) -> None:
    assert await database.write(partial(put, name="a")) == "a"
    assert await database.read(names) == {"a"}


async def test_a_unit_that_fails_leaves_nothing_and_raises_its_own_error(database: Database) -> None:
    def fail(connection: StoreConnection) -> None:
        put(connection, "half")
        raise LookupError("no")

    with pytest.raises(LookupError, match="no"):
        await database.write(fail)
    assert await database.read(names) == set()
    await database.write(partial(put, name="next"))
    assert await database.read(names) == {"next"}


async def test_of_many_units_at_once_only_the_failing_one_is_lost(database: Database) -> None:
    def unit(connection: StoreConnection, number: int) -> int:
        put(connection, str(number))
        if number % 7 == 3:
            raise LookupError(str(number))
        return number

    results = await asyncio.gather(
        *(database.write(partial(unit, number=number)) for number in range(50)), return_exceptions=True
    )
    failed = {number for number in range(50) if number % 7 == 3}
    assert {number for number, result in enumerate(results) if isinstance(result, LookupError)} == failed
    assert [result for result in results if isinstance(result, int)] == sorted(set(range(50)) - failed)
    assert await database.read(names) == {str(number) for number in range(50) if number not in failed}


async def test_a_write_is_done_though_its_caller_is_cancelled(database: Database, store_url: str) -> None:
    go_on = threading.Event()
    loop = asyncio.get_running_loop()
    begun = asyncio.Event()

    def slow(connection: StoreConnection) -> None:
        put(connection, "first")
        loop.call_soon_threadsafe(begun.set)
        # On PostgreSQL the unit runs in the event loop's thread, which must not block.
        if threading.current_thread() is not threading.main_thread():
            assert go_on.wait(10)
        put(connection, "second")

    async with asyncio.TaskGroup() as tasks:
        caller = tasks.create_task(database.write(slow))
        await begun.wait()
        caller.cancel()
        with pytest.raises(asyncio.CancelledError):
            await caller
        waiting = tasks.create_task(database.write(partial(put, name="third")))
        go_on.set()
        await waiting
    await database.close()  # waits for running units
    again = await Store.open(store_url)
    assert await again._database.read(names) == {"first", "second", "third"}
    await again.close()


async def test_closing_finishes_what_was_asked_for_and_refuses_the_rest(database: Database, store_url: str) -> None:
    async with asyncio.TaskGroup() as tasks:
        writes = [tasks.create_task(database.write(partial(put, name=str(number)))) for number in range(20)]
        await asyncio.sleep(0)  # let each ask
        await database.close()
    assert [write.result() for write in writes] == [str(number) for number in range(20)]
    with pytest.raises(StoreUnavailable, match="closed"):
        await database.write(partial(put, name="late"))
    with pytest.raises(StoreUnavailable, match="closed"):
        await database.read(names)
    await database.close()  # a second time changes nothing


NAMES = select(SECRETS.c.name).order_by(SECRETS.c.name)
SOME = select(SECRETS.c.name).where(SECRETS.c.name.in_(bindparam("names", expanding=True)))
OTHERS = select(SECRETS.c.name).where(SECRETS.c.name.not_in(bindparam("names", expanding=True)))


def put_connection(connection: StoreConnection, *names: str) -> None:
    connection.execute(insert(SECRETS), [{"name": name, "value": f"<{name}>"} for name in names])


async def test_a_row_is_read_by_place_by_name_and_as_a_whole(database: Database) -> None:
    await database.write(lambda connection: put_connection(connection, "a"))
    one = select(SECRETS.c.value, SECRETS.c.name.label("called"), func.length(SECRETS.c.name))

    def read(connection: StoreConnection) -> tuple[Any, ...]:
        (row,) = connection.execute(one)
        value, name, length = row
        return value, name, length, row.value, row.called, list(row._asdict().items())[:2], len(row)

    assert await database.read(read) == ("<a>", "a", 1, "<a>", "a", [("value", "<a>"), ("called", "a")], 3)


async def test_each_way_of_taking_rows(database: Database) -> None:
    await database.write(lambda connection: put_connection(connection, "a", "b"))
    of_name = select(SECRETS).where(SECRETS.c.name == bindparam("asked"))

    def read(connection: StoreConnection) -> list[Any]:
        run = connection.execute
        with pytest.raises(MultipleResultsFound):
            run(NAMES).one_or_none()
        with pytest.raises(MultipleResultsFound):
            run(NAMES).scalar_one_or_none()
        found = run(of_name, {"asked": "a"}).one_or_none()
        return [
            [row.name for row in run(NAMES)],
            [row.name for row in run(NAMES).all()],
            list(run(NAMES).scalars()),
            None if found is None else found.value,
            run(of_name, {"asked": "c"}).one_or_none(),
            run(of_name, {"asked": "c"}).all(),
            run(of_name, {"asked": "b"}).scalar_one_or_none(),
            run(of_name, {"asked": "c"}).scalar_one_or_none(),
        ]

    names = ["a", "b"]
    assert await database.read(read) == [names, names, names, "<a>", None, [], "b", None]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 64, 500])
async def test_a_list_of_any_length_is_asked_for(database: Database, count: int) -> None:
    asked = [f"n{number:03}" for number in range(count)]
    await database.write(lambda connection: put_connection(connection, "n000", "n001", "n004", "other"))

    def read(connection: StoreConnection, statement: Any) -> set[str]:
        return set(connection.execute(statement, {"names": asked}).scalars())

    stored = {"n000", "n001", "n004", "other"}
    assert await database.read(partial(read, statement=SOME)) == stored & set(asked)
    assert await database.read(partial(read, statement=OTHERS)) == stored - set(asked)


async def test_names_of_any_characters_are_found(database: Database) -> None:
    strange = ["", "'", '"', "\\", "?", ":names", "%s", "[1]", "\u2028", "\U0001f600", "\x01", " a ", "{}"]
    await database.write(lambda connection: put_connection(connection, *strange, "other"))

    def read(connection: StoreConnection) -> set[str]:
        return set(connection.execute(SOME, {"names": strange}).scalars())

    assert await database.read(read) == set(strange)


async def test_what_is_true_or_false_stays_so(database: Database) -> None:
    row = {
        **dict.fromkeys(("session", "node", "parent", "body", "source"), "x"),
        **dict.fromkeys(("depth", "round", "tokens_total", "tokens", "created_at"), 1),
    }
    own = set(NODES.c.keys()) - row.keys() - {"partial"}
    rows = [
        row | {"node": name, "partial": name == "b"} | {column: None for column in own if NODES.c[column].nullable}
        for name in ("a", "b")
    ]
    both = select(NODES.c.node, NODES.c.partial).order_by(NODES.c.node)

    def flags(connection: StoreConnection) -> list[Any]:
        connection.execute(insert(NODES), rows)
        torn = connection.execute(both.where(NODES.c.partial == true())).scalars()
        return [*(row.partial for row in connection.execute(both)), *torn]

    assert [(type(flag), flag) for flag in await database.write(flags)] == [(bool, False), (bool, True), (str, "b")]


async def test_one_update_sets_what_each_call_names(database: Database) -> None:
    change = update(SECRETS).where(SECRETS.c.name == bindparam("the_name"))

    def work(connection: StoreConnection) -> list[str]:
        put_connection(connection, "a", "b")
        connection.execute(change, {"the_name": "a", "value": "new"})
        connection.execute(change, {"value": "renamed", "name": "c", "the_name": "b"})
        return [f"{row.name}: {row.value}" for row in connection.execute(select(SECRETS).order_by(SECRETS.c.name))]

    assert await database.write(work) == ["a: new", "c: renamed"]


async def test_an_insert_tells_what_it_made(database: Database) -> None:
    def make(connection: StoreConnection) -> Any:
        new = insert_into(connection.dialect.name, SECRETS).on_conflict_do_nothing().returning(SECRETS.c.name)
        return connection.execute(new, {"name": "a", "value": "1"}).scalar_one_or_none()

    assert [await database.write(make), await database.write(make)] == ["a", None]


async def test_a_statement_without_parameters_and_one_with_values_of_its_own(database: Database) -> None:
    def work(connection: StoreConnection) -> list[str]:
        put_connection(connection, "a", "b", "c")
        connection.execute(delete(SECRETS).where(SECRETS.c.name == "b"))
        page = NAMES.where(SECRETS.c.name > bindparam("after")).limit(1)
        return [*connection.execute(NAMES).scalars(), *connection.execute(page, {"after": "a"}).scalars()]

    assert await database.write(work) == ["a", "c", "c"]


async def test_a_value_that_is_missing_is_no_failure_of_the_database(database: Database) -> None:
    with pytest.raises(Exception, match="asked") as failed:
        await database.read(
            lambda connection: connection.execute(NAMES.where(SECRETS.c.name == bindparam("asked"))).all()
        )
    assert type(failed.value).__name__ in {"KeyError", "StatementError"}


@pytest.mark.parametrize("driver", ["sqlite", "sqlite+aiosqlite", "sqlite+pysqlite"])
def test_any_sqlite_driver_names_the_same_file(driver: str) -> None:
    assert address_of(f"{driver}:///palimpsest.db") == SqliteFile(path=Path("palimpsest.db"))
    assert address_of(f"{driver}:////var/lib/palimpsest.db") == SqliteFile(path=Path("/var/lib/palimpsest.db"))


@pytest.mark.parametrize(
    ("scheme", "driver"),
    [
        ("postgres", "asyncpg"),
        ("postgresql", "asyncpg"),
        ("postgresql+asyncpg", "asyncpg"),
        ("postgresql+psycopg", "psycopg"),
        ("postgresql+psycopg_async", "psycopg"),
    ],
)
def test_postgresql_is_reached_by_an_async_driver(scheme: str, driver: str) -> None:
    address = address_of(f"{scheme}://me:secret@host:6543/db")
    assert isinstance(address, PostgresServer)
    assert address.url.get_driver_name() == driver
    assert (address.url.username, address.url.password, address.url.host) == ("me", "secret", "host")
    assert (address.url.port, address.url.database) == (6543, "db")


def test_behind_a_pooler_no_statement_is_prepared_for_later() -> None:
    asyncpg = address_of("postgresql://host/db?statement_cache_size=0")
    assert isinstance(asyncpg, PostgresServer)
    assert asyncpg.options["statement_cache_size"] == 0
    assert asyncpg.options["prepared_statement_cache_size"] == 0
    name = asyncpg.options["prepared_statement_name_func"]
    assert name() != name()
    assert not asyncpg.url.query

    psycopg = address_of("postgresql+psycopg://host/db?statement_cache_size=0")
    assert isinstance(psycopg, PostgresServer)
    assert psycopg.options["prepare_threshold"] is None


def test_the_word_of_libpq_for_tls_is_understood() -> None:
    address = address_of("postgresql://host/db?sslmode=require&host=other")
    assert isinstance(address, PostgresServer)
    assert address.options["ssl"] == "require"
    assert dict(address.url.query) == {"host": "other"}


SUPPORTED = [
    "sqlite:///a.db",
    "sqlite+aiosqlite:////var/lib/a.db",
    "sqlite+pysqlite:///:a.db",
    "postgres://host/db",
    "postgresql://me:p%40ss@host:6543/db?sslmode=require",
    "postgresql+asyncpg://host/db?statement_cache_size=0",
    "postgresql+psycopg://host/db?statement_cache_size=100",
    "postgresql+psycopg_async:///db?host=/run/postgresql",
    "postgresql://host/db?sslmode=verify-full&sslrootcert=/ca.pem&application_name=palimpsest&connect_timeout=10",
    "postgresql+psycopg://host/db?sslmode=require&channel_binding=require&connect_timeout=10",
]
UNSUPPORTED = [
    ("palimpsest.db", "no database URL"),
    ("", "no database URL"),
    ("sqlite", "no database URL"),
    ("postgresql://me:secret@host:port/db", "no database URL"),
    ("mysql://me:secret@host/db", "not supported"),
    ("SQLite:///a.db", "not supported"),
    ("postgres+asyncpg://me:secret@host/db", "not supported"),
    ("postgresql+psycopg2://me:secret@host/db", "not supported"),
    ("sqlite://", "after three slashes"),
    ("sqlite:///", "after three slashes"),
    ("sqlite:///:memory:", "after three slashes"),
    ("sqlite+aiosqlite:///:memory:", "after three slashes"),
    ("sqlite:///file:x", "after three slashes"),
    ("sqlite://palimpsest.db", "after three slashes"),
    ("sqlite:///file:x?mode=memory", "no options"),
    ("sqlite:///a?x=1", "no options"),
    ("sqlite:///a\x00b", "control characters"),
    ("postgresql://me:secret@host/db?statement_cache_size=none", "is a number"),
    ("postgresql://me:secret@host/db?statement_cache_size=0&statement_cache_size=1", "is a number"),
    ("postgresql+psycopg://me:secret@host/db?statement_cache_size=-1", "is a number"),
    ("postgresql+psycopg://me:secret@host/db?connect_timeout=secret", "number of seconds"),
    ("postgresql://me:secret@host/db?sslmode=secret", "sslmode can be: disable, "),
    ("postgresql://me:secret@host/db?channel_binding=require", r"takes all of libpq's"),
    ("postgresql://me@host/db?secret=1", "unknown to asyncpg"),
]


def test_an_option_that_libpq_does_not_know_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"store\.url: .* unknown to libpq") as raised:
        address_of("postgresql+psycopg://host/db?secret=1")
    assert "secret" not in raised.value.message


@pytest.mark.parametrize("url", SUPPORTED)
def test_what_the_settings_let_through_is_an_address(url: str) -> None:
    assert TypeAdapter(StoreUrl).validate_python(url) == url
    assert isinstance(address_of(url), SqliteFile | PostgresServer)


@pytest.mark.parametrize(("url", "told"), UNSUPPORTED)
def test_what_is_not_supported_is_refused_by_both_without_showing_the_password(url: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"^store\.url: .*{told}") as refused:
        address_of(url)
    assert "secret" not in refused.value.message
    with pytest.raises(ValidationError, match=told) as invalid:
        TypeAdapter(StoreUrl).validate_python(url)
    assert "secret" not in invalid.value.errors()[0]["msg"]


@pytest.mark.parametrize("scheme", ["postgresql+psycopg", "postgresql+psycopg_async"])
def test_a_driver_that_is_not_installed_is_named_with_its_extra(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'palimpsest\[psycopg\]'"):
        address_of(f"{scheme}://host/db")
    assert isinstance(address_of("postgresql://host/db"), PostgresServer)


def test_the_extra_that_is_named_is_there() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert [name.partition("[")[0] for name in project["optional-dependencies"]["psycopg"]] == ["psycopg"]


def of_sqlite(code: int, text: str) -> OperationalError:
    error = sqlite3.OperationalError(text)
    error.sqlite_errorcode = code
    return OperationalError("SELECT 1", {}, error)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (of_sqlite(sqlite3.SQLITE_BUSY, "database is locked"), "Another process"),
        (of_sqlite(sqlite3.SQLITE_BUSY_SNAPSHOT, "database is locked"), "Another process"),
        (of_sqlite(sqlite3.SQLITE_FULL, "database or disk is full"), "make room"),
        (of_sqlite(sqlite3.SQLITE_ERROR, "no such table: nodes"), "palimpsest upgrade"),
        (OperationalError("", {}, psycopg.errors.DeadlockDetected("deadlock detected")), "another one"),
        (ProgrammingError("", {}, psycopg.errors.UndefinedTable("no")), "palimpsest upgrade"),
        (OperationalError("", {}, psycopg.OperationalError("connection refused")), "can be reached"),
        (OperationalError("", {}, Exception("gone"), connection_invalidated=True), "can be reached"),
        (asyncpg.exceptions.InvalidCatalogNameError("no database"), "no such database"),
        (asyncpg.exceptions.InvalidPasswordError("no"), "user and password"),
        (asyncpg.exceptions.TooManyConnectionsError("no"), "no more connections: raise its max_connections"),
        (asyncpg.exceptions.DiskFullError("no"), "make room"),
        (asyncpg.exceptions.OutOfMemoryError("no"), "no memory left"),
        (asyncpg.exceptions.ConfigurationLimitExceededError("no"), "no connections, memory or disk"),
        (asyncpg.exceptions.ReadOnlySQLTransactionError("no"), "read-only"),
        (asyncpg.exceptions.ObjectNotInPrerequisiteStateError("not accepting connections"), "takes no connections"),
        (DBAPIError(None, None, asyncpg.exceptions.InternalServerError("no tenant")), "can be reached"),
        (asyncpg.exceptions.InvalidSQLStatementNameError("no such statement"), "statement_cache_size=0"),
        (asyncpg.exceptions.DuplicatePreparedStatementError("exists"), "statement_cache_size=0"),
        (asyncpg.exceptions.InterfaceError("connection is closed"), "can be reached"),
        (asyncpg.exceptions.InternalClientError("another operation is in progress"), "can be reached"),
        (
            AsyncAdapt_asyncpg_dbapi.InternalClientError("another operation"),  # type: ignore[no-untyped-call]
            "can be reached",
        ),
        (ConnectionRefusedError(111, "Connection refused"), "can be reached"),
        (TimeoutError(), "can be reached"),
        (PoolTimeout("QueuePool limit"), "in use"),
    ],
)
def test_a_database_that_cannot_be_used_is_told_with_what_to_do(error: Exception, told: str) -> None:
    with pytest.raises(StoreUnavailable, match=told) as failed, translated():
        raise error
    assert failed.value.__cause__ is error


@pytest.fixture
def _nothing_was_logged_just_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.database._logged", {})


@pytest.mark.usefixtures("_nothing_was_logged_just_now")
@pytest.mark.parametrize(
    "error",
    [
        of_sqlite(sqlite3.SQLITE_CANTOPEN, "unable to open /srv/secret.db"),
        OperationalError("", {}, psycopg.OperationalError("no way to 10.0.0.7\nsecret: more")),
        OperationalError("", {}, Exception("10.0.0.7 is gone"), connection_invalidated=True),
        asyncpg.exceptions.InvalidPasswordError("10.0.0.7 refuses the user"),
        ConnectionRefusedError(111, "Connect call failed ('10.0.0.7', 5432)"),
        PoolTimeout("QueuePool limit for 10.0.0.7"),
    ],
)
def test_what_the_driver_said_is_for_the_log_alone(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    failure = unavailable(error)
    assert failure is not None
    assert not re.search(r"10\.0\.0\.7|/srv|5432|secret", failure.message)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("palimpsest.store", "WARNING")
    assert re.search(r"10\.0\.0\.7|/srv/secret\.db", record.getMessage())
    assert "more" not in record.getMessage()


@pytest.mark.usefixtures("_nothing_was_logged_just_now")
def test_a_driver_that_says_nothing_is_logged_by_its_kind(caplog: pytest.LogCaptureFixture) -> None:
    assert unavailable(TimeoutError()) is not None
    assert "TimeoutError: no more is known" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        of_sqlite(sqlite3.SQLITE_ERROR, 'near "SELEC": syntax error'),
        IntegrityError("", {}, sqlite3.IntegrityError("nodes is append-only")),
        ProgrammingError("", {}, psycopg.errors.SyntaxError("no")),
        DBAPIError("SELECT 1", {}, asyncpg.exceptions.InternalServerError("invalid memory alloc request size")),
        asyncpg.exceptions.InterfaceError("the server expects 1 argument"),
        ValueError("other"),
    ],
)
def test_an_error_of_this_program_stays_one(error: Exception) -> None:
    assert unavailable(error) is None
    with pytest.raises(type(error)), translated():
        raise error


def test_only_what_another_transaction_caused_is_tried_again() -> None:
    assert is_worth_another_try(OperationalError("", {}, psycopg.errors.DeadlockDetected()))
    assert is_worth_another_try(OperationalError("", {}, psycopg.errors.SerializationFailure()))
    assert not is_worth_another_try(OperationalError("", {}, psycopg.errors.AdminShutdown()))
    assert not is_worth_another_try(ValueError())

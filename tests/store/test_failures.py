from __future__ import annotations

import re
import sqlite3

import asyncpg.exceptions
import psycopg
import pytest
from sqlalchemy.exc import IntegrityError, OperationalError, ProgrammingError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from proxy.errors import StoreUnavailable
from proxy.store.database import is_worth_another_try, translated, unavailable


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
        (asyncpg.exceptions.TooManyConnectionsError("no"), "no connections"),
        (asyncpg.exceptions.ReadOnlySQLTransactionError("no"), "read-only"),
        (asyncpg.exceptions.InterfaceError("connection is closed"), "can be reached"),
        (ConnectionRefusedError(111, "Connection refused"), "can be reached"),
        (TimeoutError(), "can be reached"),
        (PoolTimeout("QueuePool limit"), "in use"),
    ],
)
def test_a_database_that_cannot_be_used_is_told_with_what_to_do(error: Exception, told: str) -> None:
    with pytest.raises(StoreUnavailable, match=told) as failed, translated():
        raise error
    assert failed.value.__cause__ is error


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
def test_what_the_driver_said_is_for_the_log_alone(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    failure = unavailable(error)
    assert failure is not None
    assert not re.search(r"10\.0\.0\.7|/srv|5432|secret", failure.message)
    (record,) = caplog.records
    assert (record.name, record.levelname) == ("palimpsest.store", "WARNING")
    assert re.search(r"10\.0\.0\.7|/srv/secret\.db", record.getMessage())
    assert "more" not in record.getMessage()


def test_a_driver_that_says_nothing_is_logged_by_its_kind(caplog: pytest.LogCaptureFixture) -> None:
    assert unavailable(TimeoutError()) is not None
    assert "TimeoutError: no more is known" in caplog.text


@pytest.mark.parametrize(
    "error",
    [
        of_sqlite(sqlite3.SQLITE_ERROR, 'near "SELEC": syntax error'),
        IntegrityError("", {}, sqlite3.IntegrityError("nodes is append-only")),
        ProgrammingError("", {}, psycopg.errors.SyntaxError("no")),
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

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.errors import ConfigurationError
from proxy.store.address import PostgresServer, SqliteFile, address_of


@pytest.mark.parametrize("driver", ["sqlite", "sqlite+aiosqlite", "sqlite+pysqlite"])
def test_any_sqlite_driver_names_the_same_file(driver: str) -> None:
    assert address_of(f"{driver}:///palimpsest.db") == SqliteFile(Path("palimpsest.db"))
    assert address_of(f"{driver}:////var/lib/palimpsest.db") == SqliteFile(Path("/var/lib/palimpsest.db"))


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


@pytest.mark.parametrize(
    ("url", "told"),
    [
        ("palimpsest.db", "no database URL"),
        ("", "no database URL"),
        ("postgresql://me:secret@host:port/db", "no database URL"),
        ("mysql://me:secret@host/db", "'mysql', which is not supported"),
        ("postgresql+psycopg2://me:secret@host/db", "which is not supported"),
        ("sqlite://", "must name a SQLite file"),
        ("sqlite:///:memory:", "must name a SQLite file"),
        ("sqlite:///file:x?mode=memory", "takes none"),
        ("sqlite://palimpsest.db", "must name a SQLite file"),
        ("sqlite:///a.db?timeout=5", "options"),
        ("postgresql://me:secret@host/db?statement_cache_size=none", "must be a number"),
    ],
)
def test_what_is_not_supported_is_refused_without_showing_the_password(url: str, told: str) -> None:
    with pytest.raises(ConfigurationError, match=told) as refused:
        address_of(url)
    assert "secret" not in refused.value.message

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

import pytest
from pydantic import TypeAdapter, ValidationError

from proxy.config import StoreUrl
from proxy.errors import ConfigurationError
from proxy.store.database import PostgresServer, SqliteFile, address_of


@pytest.mark.parametrize("driver", ["sqlite", "sqlite+aiosqlite", "sqlite+pysqlite"])
def test_any_sqlite_driver_names_the_same_file(driver: str) -> None:
    assert address_of(f"{driver}:///palimpsest.db") == SqliteFile(path=Path("palimpsest.db"))
    assert address_of(f"{driver}:////var/lib/palimpsest.db") == SqliteFile(
        path=Path("/var/lib/palimpsest.db")
    )


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
]


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
def test_a_driver_that_is_not_installed_is_named_with_its_extra(
    scheme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "psycopg", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'palimpsest\[psycopg\]'"):
        address_of(f"{scheme}://host/db")
    assert isinstance(address_of("postgresql://host/db"), PostgresServer)


def test_the_extra_that_is_named_is_there() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert [name.partition("[")[0] for name in project["optional-dependencies"]["psycopg"]] == ["psycopg"]

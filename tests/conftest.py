"""What tests of more than one floor need."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Generator
from pathlib import Path

import pytest

from proxy.store.migrate import upgrade
from proxy.store.schema import METADATA
from proxy.store.store import Store
from tests.support import postgres


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres_server() -> Generator[str]:
    """URL of a PostgreSQL server."""
    with postgres.server() as url:
        yield url


@pytest.fixture
def empty_postgres(postgres_server: str) -> Generator[str]:
    """URL of a PostgreSQL database without tables."""
    with postgres.database(postgres_server) as url:
        yield url


@pytest.fixture(scope="session")
def _migrated_postgres(postgres_server: str) -> Generator[str]:
    with postgres.database(postgres_server) as url:
        asyncio.run(upgrade(url))
        yield url


@pytest.fixture(params=["sqlite", "postgres"])
def store_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of an empty store: each test runs on SQLite and on PostgreSQL."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'palimpsest.db'}"
    url: str = request.getfixturevalue("_migrated_postgres")
    postgres.execute(url, f"TRUNCATE {', '.join(METADATA.tables)}")
    return url


@pytest.fixture
async def store(store_url: str) -> AsyncGenerator[Store]:
    """An open, empty store."""
    opened = await Store.open(store_url)
    yield opened
    await opened.close()

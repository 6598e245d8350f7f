"""Other tests of the store, repeated on tables that `examples/postgresql/partition.sql` partitioned."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Generator

import psycopg
import pytest

from proxy.store import METADATA, Store
from tests.conftest import ROOT
from tests.store import test_batches, test_cuts, test_evidence, test_placement, test_sessions, test_settling
from tests.support import postgres

pytestmark = pytest.mark.anyio

_MODULES = (test_batches, test_cuts, test_evidence, test_placement, test_sessions, test_settling)
globals().update({name: test for module in _MODULES for name, test in vars(module).items() if name.startswith("test_")})


@pytest.fixture(scope="module")
def partitioned(postgres_server: str, postgres_template: str) -> Generator[str]:
    with postgres.database(postgres_server, postgres_template) as url:
        postgres.execute(url, (ROOT / "examples" / "postgresql" / "partition.sql").read_text("utf-8"))
        yield url


@pytest.fixture
def store_url(partitioned: str) -> str:
    postgres.execute(partitioned, "; ".join(str(table.delete()) for table in reversed(METADATA.sorted_tables)))
    return partitioned


@pytest.fixture
async def store(store_url: str) -> AsyncGenerator[Store]:
    opened = await Store.open(store_url, migrate=False)  # its tables are there
    yield opened
    await opened.close()


def test_the_large_tables_are_partitioned(partitioned: str) -> None:
    with psycopg.connect(partitioned) as connection:
        found = connection.execute("SELECT relname FROM pg_class WHERE relkind = 'p'").fetchall()
        triggers = connection.execute("SELECT tgrelid::regclass::text FROM pg_trigger WHERE tgparentid = 0").fetchall()
    assert {name for (name,) in found} == {"bodies", "nodes", "exchanges", "evidence", "cuts"}
    assert {"bodies", "nodes"} <= {name for (name,) in triggers}

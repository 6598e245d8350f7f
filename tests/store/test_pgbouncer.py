"""The store behind PgBouncer in transaction mode, in which each transaction may use another server connection.

Runs only if `pgbouncer` is installed.
"""

from __future__ import annotations

import asyncio
import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import AsyncGenerator, Generator
from contextlib import closing
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import psycopg
import pytest
from sqlalchemy import make_url

from proxy.store import METADATA, Store, upgrade
from tests.store import test_batches, test_begin, test_circuit, test_cuts, test_evidence, test_settling
from tests.support import postgres

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(shutil.which("pgbouncer") is None, reason="pgbouncer is not installed"),
]

_MODULES = (test_batches, test_begin, test_circuit, test_cuts, test_evidence, test_settling)
globals().update({name: test for module in _MODULES for name, test in vars(module).items() if name.startswith("test_")})

_SETTINGS = """
[databases]
{database} = host={host} port={port} dbname={database} user={user}
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = {listen}
unix_socket_dir =
auth_type = any
pool_mode = transaction
server_round_robin = 1
default_pool_size = 6
min_pool_size = 6
ignore_startup_parameters = extra_float_digits
"""


@pytest.fixture(scope="module")
def pooled(postgres_server: str, tmp_path_factory: pytest.TempPathFactory) -> Generator[str]:
    """URL of a migrated store through PgBouncer."""
    folder = tmp_path_factory.mktemp("pgbouncer")
    with postgres.database(postgres_server) as direct, closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        listen = free.getsockname()[1]
        free.close()
        url = make_url(direct)
        asked = parse_qs(urlsplit(direct).query)
        settings = folder / "pgbouncer.ini"
        settings.write_text(
            _SETTINGS.format(
                database=url.database,
                host=asked["host"][0] if "host" in asked else url.host,
                port=url.port or 5432,
                user=url.username or getpass.getuser(),
                listen=listen,
            )
        )
        # PgBouncer refuses to run as root. The server's user may open the server's socket.
        owner = Path(asked["host"][0]).owner() if "host" in asked else "nobody"
        command = ["pgbouncer", *(["-u", owner] if os.getuid() == 0 else []), str(settings)]
        for place in (folder, *folder.parents[:3]):
            place.chmod(place.stat().st_mode | 0o555)
        with (folder / "log").open("wb") as log:
            pooler = subprocess.Popen(command, stderr=log)  # noqa: S603 - our own
        try:
            plain = f"postgresql://{url.username or 'postgres'}@127.0.0.1:{listen}/{url.database}"
            _wait_for(plain, pooler, folder / "log")
            asyncio.run(upgrade(f"{plain}?statement_cache_size=0"))
            yield plain
        finally:
            pooler.terminate()
            pooler.wait()


def _wait_for(url: str, pooler: subprocess.Popen[bytes], log: Path) -> None:
    for _ in range(100):
        assert pooler.poll() is None, log.read_text()
        try:
            psycopg.connect(url, connect_timeout=2).close()
        except psycopg.OperationalError:
            time.sleep(0.1)
        else:
            return
    raise AssertionError("it does not serve")


@pytest.fixture(params=["asyncpg", "psycopg"])
def store_url(request: pytest.FixtureRequest, pooled: str) -> str:
    postgres.execute(pooled, "; ".join(str(table.delete()) for table in reversed(METADATA.sorted_tables)))
    return pooled.replace("postgresql", f"postgresql+{request.param}", 1) + "?statement_cache_size=0"


@pytest.fixture
async def store(store_url: str) -> AsyncGenerator[Store]:
    opened = await Store.open(store_url, migrate=False)  # its tables are there
    yield opened
    await opened.close()


def test_two_transactions_have_two_connections_of_the_server(pooled: str) -> None:
    with psycopg.connect(pooled, autocommit=True) as connection:
        connection.prepare_threshold = None
        found = {connection.execute("SELECT pg_backend_pid()").fetchone() for _ in range(6)}
    assert len(found) > 1

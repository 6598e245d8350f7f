"""Empty SQLite stores. All migrations run once per process, and the resulting file is copied."""

from __future__ import annotations

import asyncio
import atexit
import shutil
import tempfile
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import cast

from sqlalchemy import NullPool, create_engine

from proxy.store import upgrade
from proxy.store.database import SqliteFile, StoreConnection, address_of
from proxy.store.sqlite import sqlite_engine


def empty_store(file: Path) -> str:
    """Return the URL of a store in `file`. If the file does not exist, it is created as an empty store."""
    if not file.exists():
        shutil.copy(_template(), file)
    return f"sqlite:///{file}"


@contextmanager
def another_process(url: str) -> Generator[StoreConnection]:
    """Yield a connection like that of another process. Its transaction is committed at the end of the block."""
    address = address_of(url)
    if isinstance(address, SqliteFile):
        engine = sqlite_engine(address.path)
    else:
        engine = create_engine(address.url.set(drivername="postgresql+psycopg"), poolclass=NullPool)
    with engine.begin() as connection:
        yield cast("StoreConnection", connection)


@cache
def _template() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="palimpsest-test-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    file = folder / "palimpsest.db"
    with ThreadPoolExecutor(1) as thread:  # the caller may be in an event loop
        thread.submit(lambda: asyncio.run(upgrade(f"sqlite:///{file}"))).result()
    assert list(folder.iterdir()) == [file]  # there is no journal with data of its own
    return file

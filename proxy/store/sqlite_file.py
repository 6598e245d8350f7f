"""The file of an SQLite database: made, and connected to. It knows no table."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from sqlalchemy import Connection, Engine, NullPool, create_engine, event

from proxy.errors import StoreUnavailable
from proxy.store.failures import translated

BUSY_SECONDS: Final = 15
"""How long to wait for another process's lock."""
CHECKPOINT_PAGES: Final = 4_000
"""Of the write-ahead log, 16 MB: at that size a COMMIT also copies it into the file, and takes milliseconds.
SQLite's own 1,000 pages come four times as often, for half the time."""
_STATEMENTS: Final = 256
"""Prepared statements that a connection keeps; there are about a hundred."""


def create_file(path: Path) -> None:
    """Make the file, readable and writable by its owner alone, and put it into WAL mode.

    SQLite gives the files it puts beside it (`-wal`, `-shm`) the same mode. One that is there stays as it is.

    Raises:
        StoreUnavailable: it cannot be made.
    """
    if not path.parent.is_dir():
        raise StoreUnavailable(
            f"The store cannot be used. The folder {str(path.parent)!r} of its file does not exist: "
            "make it, or name another one in store.url."
        )
    try:
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
    except OSError as why:
        raise StoreUnavailable(
            f"The store cannot be used. Its file {str(path)!r} cannot be opened: {why.strerror}."
        ) from why
    with translated(), closing(connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")


def sqlite_engine(path: Path, begin: str) -> Engine:
    """Return an engine on the file whose transactions start with the statement `begin`."""
    engine = create_engine("sqlite://", creator=partial(connect, path), poolclass=NullPool)

    @event.listens_for(engine, "begin")
    def _begin(connection: Connection) -> None:  # pyright: ignore[reportUnusedFunction]  # the event calls it
        connection.exec_driver_sql(begin)

    return engine


def connect(path: Path) -> sqlite3.Connection:
    """Connect without the module's own transactions, which begin too late."""
    connection = sqlite3.connect(
        path,
        timeout=BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
        cached_statements=_STATEMENTS,
    )
    connection.execute("PRAGMA synchronous=FULL")  # what was committed survives a loss of power
    connection.execute("PRAGMA secure_delete=ON")  # a deleted session is gone from the file
    connection.execute(f"PRAGMA wal_autocheckpoint={CHECKPOINT_PAGES}")
    return connection


@contextmanager
def transaction(raw: sqlite3.Connection, begin: str) -> Generator[None]:
    """Make one transaction of what is done meanwhile, which starts with the statement `begin`."""
    raw.execute(begin)
    try:
        yield
        raw.execute("COMMIT")
    except BaseException:
        roll_back(raw)
        raise


def roll_back(raw: sqlite3.Connection) -> None:
    """Take back the transaction, if there is one."""
    if raw.in_transaction:  # SQLite itself takes everything back where the disk is full or fails
        with suppress(sqlite3.Error):  # what went wrong before is what counts
            raw.execute("ROLLBACK")


def is_locked(why: sqlite3.Error) -> bool:
    """Tell whether it means that another process holds the file's lock."""
    return why.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY

from __future__ import annotations

import sqlite3
import stat
from contextlib import closing
from pathlib import Path

import pytest
from sqlalchemy import text

from proxy.errors import StoreUnavailable
from proxy.store.sqlite_file import connect, create_file, is_locked, roll_back, sqlite_engine, transaction


def test_a_file_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    path = tmp_path / "palimpsest.db"
    create_file(path)
    path.chmod(0o640)
    create_file(path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match=r"folder '.*/none' of its file does not exist"):
        create_file(tmp_path / "none" / "palimpsest.db")


def test_a_folder_in_place_of_the_file_is_told(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="cannot be opened: Is a directory"):
        create_file(tmp_path)


def test_a_file_that_is_no_database_is_told(tmp_path: Path) -> None:
    file = tmp_path / "palimpsest.db"
    file.write_text("no database " * 100)
    with pytest.raises(StoreUnavailable, match="no SQLite database"):
        create_file(file)


def test_a_transaction_is_kept_or_taken_back_as_a_whole(tmp_path: Path) -> None:
    create_file(tmp_path / "palimpsest.db")
    with closing(connect(tmp_path / "palimpsest.db")) as connection:
        with transaction(connection, "BEGIN IMMEDIATE"):
            connection.execute("CREATE TABLE names (name TEXT)")

        def fail() -> None:
            with transaction(connection, "BEGIN"):
                connection.execute("INSERT INTO names VALUES ('half')")
                raise LookupError("no")

        with pytest.raises(LookupError, match="no"):
            fail()
        assert not connection.in_transaction
        assert connection.execute("SELECT * FROM names").fetchall() == []
        roll_back(connection)  # nothing happens where there is none


def test_anothers_lock_is_told_from_other_errors(tmp_path: Path) -> None:
    path = tmp_path / "palimpsest.db"
    create_file(path)
    with closing(connect(path)) as one, closing(connect(path)) as other:
        other.execute("PRAGMA busy_timeout=0")
        with transaction(one, "BEGIN IMMEDIATE"), pytest.raises(sqlite3.OperationalError) as locked:
            other.execute("BEGIN IMMEDIATE")
        with pytest.raises(sqlite3.OperationalError) as missing:
            other.execute("SELECT * FROM names")
    assert is_locked(locked.value)
    assert not is_locked(missing.value)


def test_an_engines_transactions_begin_as_they_are_told(tmp_path: Path) -> None:
    path = tmp_path / "palimpsest.db"
    create_file(path)
    engine = sqlite_engine(path, "BEGIN IMMEDIATE")
    with closing(connect(path)) as other, engine.connect() as connection:
        connection.execute(text("SELECT 1"))
        other.execute("PRAGMA busy_timeout=0")
        with pytest.raises(sqlite3.OperationalError, match="locked"):
            other.execute("BEGIN IMMEDIATE")
    engine.dispose()

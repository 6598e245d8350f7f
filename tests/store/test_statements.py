from __future__ import annotations

import gc
import sqlite3
import threading
from collections.abc import Generator
from contextlib import closing
from datetime import UTC, datetime

import pytest
from sqlalchemy import (
    Boolean,
    Column,
    DateTime,
    Integer,
    MetaData,
    Table,
    Text,
    bindparam,
    insert,
    literal_column,
    select,
    text,
    union_all,
    update,
)
from sqlalchemy.schema import CreateTable

from proxy.store import sqlite as statements
from proxy.store.sqlite import SqliteConnection

THINGS = Table(
    "things", MetaData(), Column("id", Integer, primary_key=True), Column("name", Text), Column("on", Boolean)
)


@pytest.fixture
def connection() -> Generator[SqliteConnection]:
    with closing(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False)) as raw:
        raw.execute("CREATE TABLE things (id INTEGER PRIMARY KEY, name TEXT, 'on' BOOLEAN)")
        yield SqliteConnection(raw)


def test_many_rows_go_in_at_once_and_none_is_nothing(connection: SqliteConnection) -> None:
    new = insert(THINGS)
    assert connection.execute(new, [{"id": n, "name": f"{n}", "on": n > 1} for n in (1, 2, 3)]).all() == []
    assert connection.execute(new, []).all() == []
    assert connection.execute(select(THINGS)).all() == [(1, "1", False), (2, "2", True), (3, "3", True)]


def test_null_is_neither_true_nor_false(connection: SqliteConnection) -> None:
    connection.execute(insert(THINGS), {"id": 1, "name": None, "on": None})
    row = connection.execute(select(THINGS)).one_or_none()
    assert row.on is None
    assert row.name is None


def test_an_insert_has_a_text_for_each_set_of_columns(connection: SqliteConnection) -> None:
    new = insert(THINGS)
    connection.execute(new, {"id": 1, "name": "a"})
    connection.execute(new, {"id": 2, "on": True})
    assert connection.execute(select(THINGS)).all() == [(1, "a", None), (2, None, True)]


def test_a_statement_is_compiled_once(connection: SqliteConnection, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[object] = []
    compile_ = statements._Compiled

    def counting(statement: select, columns: list[str]) -> object:  # type: ignore[valid-type]
        compiled.append(statement)
        return compile_(statement, columns)

    monkeypatch.setattr(statements, "_Compiled", counting)
    several = select(THINGS.c.name).where(THINGS.c.id.in_(bindparam("ids", expanding=True)))
    for size in range(9):
        assert connection.execute(several, {"ids": list(range(size))}).all() == []
    assert compiled == [several]
    (form,) = statements._CACHE[id(several)].by_names.values()
    assert sorted(form.texts) == [(0,), (1,), (2,), (4,), (8,)]


def test_a_statement_made_for_one_call_leaves_nothing_behind(connection: SqliteConnection) -> None:
    gc.collect()
    before = len(statements._CACHE)
    for number in range(20):
        connection.execute(select(THINGS).where(THINGS.c.id == number)).all()
    gc.collect()
    assert len(statements._CACHE) == before


def test_threads_that_meet_at_a_new_statement_all_get_its_rows(connection: SqliteConnection) -> None:
    new = select(THINGS.c.id, THINGS.c.on).where(THINGS.c.id > bindparam("least"))
    connection.execute(insert(THINGS), {"id": 1, "on": False})
    start, found = threading.Barrier(4), list[object]()

    def read() -> None:
        start.wait(10)
        found.append(connection.execute(new, {"least": 0}).one_or_none())

    threads = [threading.Thread(target=read) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert found == [(1, False)] * 4


def test_columns_without_a_name_of_their_own_are_read_by_place(connection: SqliteConnection) -> None:
    row = connection.execute(select(literal_column("1"), literal_column("2 + 3"))).one_or_none()
    assert tuple(row) == (1, 5)


def test_several_lists_in_one_statement_keep_apart(connection: SqliteConnection) -> None:
    connection.execute(insert(THINGS), [{"id": n, "name": "ab"[n % 2], "on": None} for n in range(6)])
    both = (
        select(THINGS.c.id)
        .where(THINGS.c.id.in_(bindparam("ids", expanding=True)), THINGS.c.id < bindparam("below"))
        .where(THINGS.c.name.in_(bindparam("names", expanding=True)))
        .order_by(THINGS.c.id)
    )
    assert connection.execute(both, {"ids": [0, 1, 2, 5], "below": 5, "names": ["a"]}).scalars() == [0, 2]
    assert connection.execute(both, {"ids": [1, 3, 4], "below": 9, "names": ["b", "a", "c"]}).scalars() == [
        1,
        3,
        4,
    ]


def test_values_that_the_statement_itself_lists_are_bound_too(connection: SqliteConnection) -> None:
    connection.execute(insert(THINGS), [{"id": n, "name": "x", "on": None} for n in range(4)])
    assert connection.execute(select(THINGS.c.id).where(THINGS.c.id.in_([1, 3, 7]))).scalars() == [1, 3]


def test_text_and_unions_are_statements_too(connection: SqliteConnection) -> None:
    assert connection.execute(text("SELECT :a || '?' AS said"), {"a": "why"}).one_or_none().said == "why?"
    connection.execute(insert(THINGS), {"id": 1, "on": True})
    twice = union_all(select(THINGS.c.on), select(THINGS.c.on))
    assert connection.execute(twice).scalars() == [True, True]


def test_what_sqlite_refuses_is_its_own_error(connection: SqliteConnection) -> None:
    with pytest.raises(sqlite3.OperationalError, match="no such table"):
        connection.execute(text("SELECT 1 FROM nowhere"))
    connection.execute(insert(THINGS), {"id": 1})
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute(insert(THINGS), {"id": 1})


def test_what_cannot_be_run_here_is_refused(connection: SqliteConnection) -> None:
    when = Column("at", DateTime)
    with pytest.raises(TypeError, match="DateTime"):
        connection.execute(select(THINGS.c.id).where(when > datetime.now(UTC)))
    with pytest.raises(TypeError, match="reads or writes rows"):
        connection.execute(CreateTable(THINGS))
    change = update(THINGS).where(THINGS.c.id.in_(bindparam("ids", expanding=True)))
    with pytest.raises(TypeError, match="one list at a time"):
        connection.execute(change, [{"name": "a", "ids": [1]}, {"name": "b", "ids": [2]}])
    connection.execute(change, [{"name": "a", "ids": [1, 2, 3]}])

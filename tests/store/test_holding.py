"""Writing for several units at once: nobody misses anything, and the tables become what they would."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sqlalchemy import Column, Integer, MetaData, Table, Text, bindparam, delete, select, text, update
from sqlalchemy.dialects import sqlite

from proxy.store.connection import Connection
from proxy.store.holding import HoldingConnection
from proxy.store.statements import SqliteConnection
from tests.trimming.histories import TRIED

META = MetaData()
SAID, STATE = (
    Table(
        name,
        META,
        Column("session", Text, primary_key=True),
        Column("name", Text, primary_key=True),
        Column("worth", Integer),
    )
    for name in ("said", "state")
)
NEW = {table: sqlite.insert(table).on_conflict_do_nothing() for table in (SAID, STATE)}
MADE = sqlite.insert(STATE).on_conflict_do_nothing().returning(STATE.c.name)
CHANGE = {
    table: update(table).where(
        table.c.session == bindparam("the_session"), table.c.name == bindparam("which")
    )
    for table in (SAID, STATE)
}
OF_ONE = {
    table: select(table.c.name, table.c.worth)
    .where(table.c.session == bindparam("key"))
    .order_by(table.c.name)
    for table in (SAID, STATE)
}


@pytest.fixture
def raw() -> Generator[sqlite3.Connection]:
    with opened() as raw:
        yield raw


def opened() -> closing[sqlite3.Connection]:
    raw = sqlite3.connect(":memory:", isolation_level=None)
    for name in ("said", "state"):
        raw.execute(
            f"CREATE TABLE {name} (session TEXT, name TEXT, worth INTEGER, PRIMARY KEY (session, name))"
        )
    return closing(raw)


@pytest.fixture
def connection(raw: sqlite3.Connection) -> HoldingConnection:
    return HoldingConnection(raw)


def row(session: str, name: str, worth: int | None = None) -> dict[str, Any]:
    return {"session": session, "name": name, "worth": worth}


def stored(raw: sqlite3.Connection) -> list[list[tuple[Any, ...]]]:
    plain = SqliteConnection(raw)
    return [plain.execute(select(table).order_by(*table.c)).all() for table in (SAID, STATE)]


def test_it_writes_at_the_end_and_one_table_after_the_other(
    connection: HoldingConnection, raw: sqlite3.Connection
) -> None:
    ran: list[str] = []
    for session in ("a", "b"):
        assert connection.execute(NEW[SAID], [row(session, "1"), row(session, "2")]).all() == []
        connection.execute(NEW[STATE], row(session, "1"))
        connection.execute(CHANGE[STATE], {"worth": 3, "the_session": session, "which": "1"})
    assert stored(raw) == [[], []]
    raw.set_trace_callback(ran.append)
    connection.write()
    raw.set_trace_callback(None)
    assert [statement.split()[:3] for statement in ran if not statement.startswith("--")] == [
        *[["INSERT", "INTO", "said"]] * 4,
        *[["INSERT", "INTO", "state"]] * 2,
        *[["UPDATE", "state", "SET"]] * 2,
    ]
    assert stored(raw)[1] == [("a", "1", 3), ("b", "1", 3)]
    connection.write()
    connection.execute(NEW[SAID], row("c", "1"))
    connection.forget()
    connection.write()
    assert len(stored(raw)[0]) == 4


@pytest.mark.parametrize(
    ("statement", "asked", "sees"),
    [
        (OF_ONE[SAID], {"key": "a"}, True),
        (OF_ONE[SAID], {"key": "b"}, False),
        (MADE, row("a", "2"), True),
        (MADE, row("b", "2"), False),
        (select(SAID.c.name), None, True),
        (text("SELECT count(*) FROM said"), {}, True),
        (delete(SAID).where(SAID.c.session == "b"), None, True),
        (select(SAID.c.name).where(SAID.c.session == bindparam("whose")), {"whose": "b"}, True),
        (NEW[SAID], [row("b", "1"), row("c", "1")], True),
    ],
)
def test_what_might_miss_it_finds_it_written(
    connection: HoldingConnection, raw: sqlite3.Connection, statement: Any, asked: Any, *, sees: bool
) -> None:
    connection.execute(NEW[SAID], row("a", "1"))
    connection.execute(statement, asked)
    assert (("a", "1", None) in stored(raw)[0]) is sees


def test_what_is_not_there_is_executed_with_nothing(connection: HoldingConnection) -> None:
    assert connection.execute(NEW[SAID], []).all() == []
    assert connection.execute(select(SAID)).all() == []


def test_what_is_wrong_with_a_row_is_told_when_it_is_written(connection: HoldingConnection) -> None:
    connection.execute(NEW[SAID], row("a", "1", worth=2**70))
    with pytest.raises(OverflowError):
        connection.write()
    connection.write()


def _insert(table: Table, session: str, name: str, worth: int) -> Callable[[Connection], Any]:
    return lambda connection: connection.execute(NEW[table], row(session, name, worth)).all()


def _change(table: Table, session: str, name: str, worth: int) -> Callable[[Connection], Any]:
    asked = {"worth": worth, "the_session": session, "which": name}
    return lambda connection: connection.execute(CHANGE[table], asked).all()


def _look(table: Table, session: str, name: str, worth: int) -> Callable[[Connection], Any]:
    return lambda connection: connection.execute(OF_ONE[table], {"key": session}).all()


STEPS = st.builds(
    lambda step, *given: step(*given),
    st.sampled_from([_insert, _change, _look]),
    st.sampled_from([SAID, STATE]),
    st.sampled_from("ab"),
    st.sampled_from("12"),
    st.integers(0, 9),
)


@TRIED
@given(st.lists(STEPS, max_size=12))
def test_in_any_order_all_is_seen_and_stored_as_if_nothing_were_held(
    steps: list[Callable[[Connection], Any]],
) -> None:
    with opened() as one, opened() as other:
        holding, plain = HoldingConnection(one), SqliteConnection(other)
        assert [step(holding) for step in steps] == [step(plain) for step in steps]
        holding.write()
        assert stored(one) == stored(other)

"""What units of work may expect of a connection, on every database."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from functools import partial
from typing import Any

import pytest
from sqlalchemy import bindparam, delete, func, insert, select, true, update
from sqlalchemy.exc import MultipleResultsFound

from proxy.store.database import Connection, Database
from proxy.store.schema import NODES, SECRETS, insert_into
from proxy.store.store import Store

pytestmark = pytest.mark.anyio

NAMES = select(SECRETS.c.name).order_by(SECRETS.c.name)
SOME = select(SECRETS.c.name).where(SECRETS.c.name.in_(bindparam("names", expanding=True)))
OTHERS = select(SECRETS.c.name).where(SECRETS.c.name.not_in(bindparam("names", expanding=True)))


@pytest.fixture
async def database(store_url: str) -> AsyncGenerator[Database]:
    store = await Store.open(store_url)
    yield store._database
    await store.close()


def put(connection: Connection, *names: str) -> None:
    connection.execute(insert(SECRETS), [{"name": name, "value": f"<{name}>"} for name in names])


async def test_a_row_is_read_by_place_by_name_and_as_a_whole(database: Database) -> None:
    await database.write(lambda connection: put(connection, "a"))
    one = select(SECRETS.c.value, SECRETS.c.name.label("called"), func.length(SECRETS.c.name))

    def read(connection: Connection) -> tuple[Any, ...]:
        (row,) = connection.execute(one)
        value, name, length = row
        return value, name, length, row.value, row.called, list(row._asdict().items())[:2], len(row)

    assert await database.read(read) == ("<a>", "a", 1, "<a>", "a", [("value", "<a>"), ("called", "a")], 3)


async def test_each_way_of_taking_rows(database: Database) -> None:
    await database.write(lambda connection: put(connection, "a", "b"))
    of_name = select(SECRETS).where(SECRETS.c.name == bindparam("asked"))

    def read(connection: Connection) -> list[Any]:
        run = connection.execute
        with pytest.raises(MultipleResultsFound):
            run(NAMES).one_or_none()
        with pytest.raises(MultipleResultsFound):
            run(NAMES).scalar_one_or_none()
        found = run(of_name, {"asked": "a"}).one_or_none()
        return [
            [row.name for row in run(NAMES)],
            [row.name for row in run(NAMES).all()],
            list(run(NAMES).scalars()),
            None if found is None else found.value,
            run(of_name, {"asked": "c"}).one_or_none(),
            run(of_name, {"asked": "c"}).all(),
            run(of_name, {"asked": "b"}).scalar_one_or_none(),
            run(of_name, {"asked": "c"}).scalar_one_or_none(),
        ]

    names = ["a", "b"]
    assert await database.read(read) == [names, names, names, "<a>", None, [], "b", None]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 64, 500])
async def test_a_list_of_any_length_is_asked_for(database: Database, count: int) -> None:
    asked = [f"n{number:03}" for number in range(count)]
    await database.write(lambda connection: put(connection, "n000", "n001", "n004", "other"))

    def read(connection: Connection, statement: Any) -> set[str]:
        return set(connection.execute(statement, {"names": asked}).scalars())

    stored = {"n000", "n001", "n004", "other"}
    assert await database.read(partial(read, statement=SOME)) == stored & set(asked)
    assert await database.read(partial(read, statement=OTHERS)) == stored - set(asked)


async def test_names_of_any_characters_are_found(database: Database) -> None:
    strange = ["", "'", '"', "\\", "?", ":names", "%s", "[1]", "\u2028", "\U0001f600", "\x01", " a ", "{}"]
    await database.write(lambda connection: put(connection, *strange, "other"))

    def read(connection: Connection) -> set[str]:
        return set(connection.execute(SOME, {"names": strange}).scalars())

    assert await database.read(read) == set(strange)


async def test_what_is_true_or_false_stays_so(database: Database) -> None:
    row = {
        **dict.fromkeys(("session", "node", "parent", "body", "source"), "x"),
        **dict.fromkeys(("depth", "round", "tokens_total", "tokens", "created_at"), 1),
    }
    own = set(NODES.c.keys()) - row.keys() - {"partial"}
    rows = [
        row
        | {"node": name, "partial": name == "b"}
        | {column: None for column in own if NODES.c[column].nullable}
        for name in ("a", "b")
    ]
    both = select(NODES.c.node, NODES.c.partial).order_by(NODES.c.node)

    def flags(connection: Connection) -> list[Any]:
        connection.execute(insert(NODES), rows)
        torn = connection.execute(both.where(NODES.c.partial == true())).scalars()
        return [*(row.partial for row in connection.execute(both)), *torn]

    assert [(type(flag), flag) for flag in await database.write(flags)] == [
        (bool, False),
        (bool, True),
        (str, "b"),
    ]


async def test_one_update_sets_what_each_call_names(database: Database) -> None:
    change = update(SECRETS).where(SECRETS.c.name == bindparam("the_name"))

    def work(connection: Connection) -> list[str]:
        put(connection, "a", "b")
        connection.execute(change, {"the_name": "a", "value": "new"})
        connection.execute(change, {"value": "renamed", "name": "c", "the_name": "b"})
        return [
            f"{row.name}: {row.value}" for row in connection.execute(select(SECRETS).order_by(SECRETS.c.name))
        ]

    assert await database.write(work) == ["a: new", "c: renamed"]


async def test_an_insert_tells_what_it_made(database: Database) -> None:
    def make(connection: Connection) -> Any:
        new = insert_into(connection.dialect.name, SECRETS).on_conflict_do_nothing().returning(SECRETS.c.name)
        return connection.execute(new, {"name": "a", "value": "1"}).scalar_one_or_none()

    assert [await database.write(make), await database.write(make)] == ["a", None]


async def test_a_statement_without_parameters_and_one_with_values_of_its_own(database: Database) -> None:
    def work(connection: Connection) -> list[str]:
        put(connection, "a", "b", "c")
        connection.execute(delete(SECRETS).where(SECRETS.c.name == "b"))
        page = NAMES.where(SECRETS.c.name > bindparam("after")).limit(1)
        return [*connection.execute(NAMES).scalars(), *connection.execute(page, {"after": "a"}).scalars()]

    assert await database.write(work) == ["a", "c", "c"]


async def test_a_value_that_is_missing_is_no_failure_of_the_database(database: Database) -> None:
    with pytest.raises(Exception, match="asked") as failed:
        await database.read(
            lambda connection: connection.execute(NAMES.where(SECRETS.c.name == bindparam("asked"))).all()
        )
    assert type(failed.value).__name__ in {"KeyError", "StatementError"}

from __future__ import annotations

import sqlite3
from functools import partial

import pytest
from sqlalchemy import Table, func, select, text, update
from sqlalchemy.exc import DBAPIError

from proxy.store.database import StoreConnection
from proxy.store.schema import (
    BODIES,
    HIDDEN,
    INSTRUCTIONS,
    KEY_COSTS,
    METADATA,
    NODES,
    OF_A_SESSION,
    ROLLUPS,
    SECRETS,
    SUMMARIES,
    insert_new,
)
from proxy.store.store import Store
from tests.support import asides
from tests.support.asides import reply, say, summary
from tests.support.talk import Talk, message

pytestmark = pytest.mark.anyio


def test_every_table_of_a_session_begins_its_key_with_the_session() -> None:
    assert {*OF_A_SESSION, ROLLUPS, KEY_COSTS, SECRETS} == set(METADATA.tables.values())
    for table in OF_A_SESSION:
        assert next(iter(table.primary_key.columns)).name == "session"
        assert not any(index.unique for index in table.indexes)  # it could not be kept across servers


@pytest.mark.parametrize(
    ("table", "values"),
    [
        (BODIES, {"text": "{}"}),
        (NODES, {"partial": True}),
        (INSTRUCTIONS, {"tokens": 0}),
        (HIDDEN, {"reply": None}),
        (SUMMARIES, {"text": "other"}),
    ],
    ids=lambda value: value.name if isinstance(value, Table) else None,
)
async def test_the_log_cannot_be_changed_only_deleted(store: Store, table: Table, values: dict[str, object]) -> None:
    talk = Talk(store=store)
    asked = await talk.begin(instructions=(message("system", "be brief"),))
    await talk.settle(asked)
    settled = await say(talk, "hello", reply("hi", asides.HIDDEN))
    assert await store.keep_summary(talk.key, summary("a", settled.head, 2))

    def change(connection: StoreConnection) -> None:
        connection.execute(update(table).values(values))

    def count(connection: StoreConnection) -> int | None:
        found: int | None = connection.execute(select(func.count()).select_from(table)).scalar_one_or_none()
        return found

    with pytest.raises((DBAPIError, sqlite3.Error), match="append-only"):
        await store._database.write(change)
    assert await store._database.read(count)
    assert await store.delete(talk.key)
    assert await store._database.read(count) == 0


async def test_what_is_there_already_stays(store: Store) -> None:
    rows = [{"name": "a", "value": "01"}, {"name": "b", "value": "02"}]
    await store._database.write(partial(insert_new, table=SECRETS, rows=rows[:1]))
    await store._database.write(partial(insert_new, table=SECRETS, rows=[{"name": "a", "value": "ff"}, rows[1]]))
    await store._database.write(partial(insert_new, table=SECRETS, rows=[]))

    def stored(connection: StoreConnection) -> list[tuple[str, str]]:
        found = connection.execute(text("SELECT name, value FROM secrets ORDER BY name"))
        return [(row.name, row.value) for row in found]

    assert await store._database.read(stored) == [("a", "01"), ("b", "02")]

"""Exchanges that are written together give the same rows as exchanges written one by one."""

from __future__ import annotations

from functools import partial
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import select

from proxy.conversation import ROOT
from proxy.store import Opening, Settlement, Status, Store, session_key
from proxy.store.database import StoreConnection
from proxy.store.exchanges import write_exchanges
from proxy.store.schema import OF_A_SESSION
from tests.support.talk import body, opening, settlement

pytestmark = pytest.mark.anyio

SESSIONS = ("s0", "s1", "s2")


def rows_of(connection: StoreConnection, tenant: str) -> dict[str, list[dict[str, Any]]]:
    """Return every row of the tenant's sessions, without the values that depend on the tenant's name."""
    found: dict[str, list[dict[str, Any]]] = {}
    for table in OF_A_SESSION:
        rows: list[dict[str, Any]] = []
        for session in SESSIONS:
            key = session_key(tenant, session)
            for row in connection.execute(select(table).where(table.c.session == key)):
                of_tenant = {"tenant", "recorded", "piece"}
                values = {name: value for name, value in row._asdict().items() if name not in of_tenant}
                rows.append(values | {"session": session})
        found[table.name] = sorted(rows, key=str)
    return found


async def conversation(store: Store, tenant: str, random: Random) -> list[Opening | Settlement]:
    """Run conversations one exchange at a time; return the writes in their order."""
    items: list[Opening | Settlement] = []
    pending: list[tuple[Opening, Settlement]] = []

    async def write(item: Opening | Settlement) -> None:
        items.append(item)
        await store._database.start(item)

    for number in range(40):
        if pending and random.random() < 0.5:
            await write(pending.pop(random.randrange(len(pending)))[1])
            continue
        session = random.choice(SESSIONS)
        found = await store.session(tenant, session)
        base = found.head if found is not None and random.random() < 0.8 else ROOT
        asked = body("user", random.choice(["go on", f"question {number}"]))
        names: dict[str, Any] = {"tenant": tenant, "session": session, "base": base}
        names["kind"] = random.choice(["append", "append", "resend"])
        exchange = f"exc_{number:08d}"
        begun = opening(exchange, asked, digest=asked.message.text, created_at=1_000 + number, **names)
        replies = () if random.random() < 0.1 else (body("assistant", f"answer {number}"),)
        at_head = names["kind"] == "append" and random.random() < 0.7
        ended = settlement(exchange, asked, replies=replies, at_head=at_head, settled_at=2_000 + number, **names)
        await write(begun)
        pending.append((begun, ended))
    return items


@pytest.mark.parametrize("seed", range(6))
async def test_what_is_written_together_is_what_it_is_one_by_one(store: Store, seed: int) -> None:
    random = Random(seed)  # noqa: S311 - a test
    items = await conversation(store, "one", random)
    left = [replace(item, tenant="many") for item in items]
    while left:
        count = random.randrange(1, 12)
        some, left = left[:count], left[count:]
        await store._database.write(partial(write_exchanges, items=some))
    one = await store._database.read(lambda connection: rows_of(connection, "one"))
    many = await store._database.read(lambda connection: rows_of(connection, "many"))
    assert many == one
    assert Status.COMPLETE.value in {row["status"] for row in one["exchanges"]}
    assert {row["status"] for row in one["pending"]} == {Status.PENDING.value}


async def test_a_hundred_exchanges_that_begin_and_end_at_once_are_all_there(store: Store) -> None:
    items: list[Opening | Settlement] = []
    for number in range(100):
        asked, names = body("user", f"question {number}"), {"session": f"s{number % 70}", "kind": "append"}
        items.append(opening(f"exc_{number:08d}", asked, digest=str(number), **names))
        items.append(settlement(f"exc_{number:08d}", asked, replies=(body("assistant", f"answer {number}"),), **names))
    results = await store._database.write(partial(write_exchanges, items=items))
    assert results[::2] == [None] * 100
    for number in range(100):
        session = await store.session("tenant", f"s{number % 70}")
        assert session is not None
        nodes = {row.node for row in await store.path(session.key, session.head)}
        assert {*results[2 * number + 1].nodes, *results[2 * number + 1].replies} <= nodes

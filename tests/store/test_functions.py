"""PostgreSQL's own functions write what `write_exchanges` writes, and leave what they cannot to it."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace
from sqlalchemy import select

from proxy.store import Opening, Settled, Settlement, Status, Store, session_key
from proxy.store.database import StoreConnection
from proxy.store.exchanges import write_exchanges
from proxy.store.schema import NODES
from proxy.trimming import Cut
from tests.store.test_batches import conversation, rows_of
from tests.support import postgres
from tests.support.talk import body, message, opening, settlement

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["asyncpg", "psycopg", "pooled"])
def url(request: pytest.FixtureRequest, _migrated_postgres: str) -> str:
    """URL of an empty store on PostgreSQL, by each driver, and as behind a pool that shares connections."""
    postgres.execute(_migrated_postgres, "TRUNCATE " + ", ".join(["pending", "leases", "forms", "hidden", "summaries"]))
    postgres.execute(_migrated_postgres, "TRUNCATE sessions, instructions, bodies, nodes, cuts, exchanges, secrets")
    if request.param == "pooled":
        return _migrated_postgres + ("&" if "?" in _migrated_postgres else "?") + "statement_cache_size=0"
    return _migrated_postgres.replace("postgresql", f"postgresql+{request.param}", 1)


@pytest.fixture
async def store(url: str) -> AsyncGenerator[Store]:
    opened = await Store.open(url)
    yield opened
    await opened.close()


@pytest.fixture
def alone(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[list[Opening | Settlement]]:
    """Return what the functions left, as it comes."""
    left: list[list[Opening | Settlement]] = []
    writer = store._database._writer  # type: ignore[attr-defined]
    transact: Callable[[Any], Awaitable[list[Any]]] = writer._transact

    async def noting(items: Any) -> list[Any]:
        left.append(list(items))
        return await transact(items)

    monkeypatch.setattr(writer, "_transact", noting)
    return left


def cut(position: int) -> Cut:
    return Cut(position=position, policy="default", version="v1", changes=(), tokens=3, messages=1, tool_calls=0)


async def exchange(store: Store, number: int, session: str, **changes: Any) -> Settled:
    """Have one exchange begun and settled at the root, unless `changes` say otherwise."""
    asked, names = body("user", f"question {number}"), {"session": session, "kind": "resend"}
    name = f"exc_{number:08d}"
    began = store.begin(opening(name, asked, digest=str(number), **names))
    replies = (body("assistant", f"answer {number}"),)
    ended = settlement(name, asked, replies=replies, at_head=False, **names)
    return await store.settle(replace(ended, **changes), began)


@pytest.mark.parametrize("seed", range(4))
async def test_they_write_what_is_written_without_them(store: Store, alone: list[Any], seed: int) -> None:
    random = Random(seed)  # noqa: S311 - a test

    def varied(item: Opening | Settlement) -> Opening | Settlement:
        """Give it what a plain one may have."""
        if isinstance(item, Opening):
            brief = (message("system", random.choice(["be brief", "be kind"])),)
            tools = random.choice([None, b'[{"a":1}]'])
            return replace(item, instructions=random.choice([None, brief]), instructions_tokens=3, tools=tools)
        return replace(
            item,
            cost=random.choice([None, 0.25]),
            scale=random.choice([None, 1.5]),
            cut=cut(random.randrange(5)) if item.replies and random.random() < 0.4 else None,
            kind=random.choice([item.kind, item.kind, "side"]),
            moves_head=random.random() < 0.8,
            agent=random.choice([None, "a"]),
            vouched=random.choice([0, 1]),
        )

    items = [varied(item) for item in await conversation(store, "none", random)]
    one = [replace(item, tenant="one") for item in items]
    alone.clear()
    for item in one:
        await store._database.start(write_exchanges, item)
    assert len(alone) < len(items) / 2
    for item in items:
        await store._database.write(
            lambda connection, item=item: write_exchanges(connection, [replace(item, tenant="other")])
        )
    first = await store._database.read(lambda connection: rows_of(connection, "one"))
    assert first == await store._database.read(lambda connection: rows_of(connection, "other"))
    recorded = select(NODES.c.node, NODES.c.recorded).order_by(NODES.c.node)

    def of_tenant(connection: StoreConnection, tenant: str) -> list[tuple[str, bool]]:
        keys = [session_key(tenant, session) for session in ("s0", "s1", "s2")]
        found = connection.execute(recorded.where(NODES.c.session.in_(keys)))
        return [(row.node, row.recorded == tenant) for row in found]

    read = store._database.read
    assert await read(lambda c: of_tenant(c, "one")) == await read(lambda c: of_tenant(c, "other"))
    assert {row["status"] for row in first["exchanges"]} >= {Status.COMPLETE.value, Status.PENDING.value}
    assert len(first["pending"]) == sum(row["status"] == Status.PENDING.value for row in first["exchanges"])

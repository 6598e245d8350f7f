"""A store of the layout before the compact one is converted, even if the conversion is interrupted."""

from __future__ import annotations

import asyncio
import gzip
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine, NullPool, create_engine, inspect, make_url, text

from proxy.errors import StoreUnavailable
from proxy.store import Store, migrate, upgrade
from proxy.store.convert import OLD_TABLES
from proxy.store.packing import decode_session
from proxy.store.rollups import StatsQuery
from tests.support import postgres
from tests.support.forked import Forked, run_program
from tests.support.served import LONG_RUN

pytestmark = pytest.mark.anyio

OLD = Path(__file__).parents[1] / "data" / "old_store.json.gz"
"""Rows of a store of revision 7, by table, and that version's exports of its sessions."""

_DIES = """
import asyncio, os, sys
from proxy.store import convert, migrate

left = [int(sys.argv[2])]

def dying(work):
    def run(*given, **named):
        left[0] -= 1
        if left[0] <= 0:
            os._exit(9)
        return work(*given, **named)
    return run

convert.insert_into = dying(convert.insert_into)
convert._digests = dying(convert._digests)
convert.delete = dying(convert.delete)
migrate._convert_step = dying(migrate._convert_step)
migrate._alembic = dying(migrate._alembic)
migrate._STEP_SECONDS = 0
asyncio.run(migrate.upgrade(sys.argv[1]))
"""
"""A program that converts a store, and dies at a given step."""


@pytest.fixture(scope="module")
def old_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A SQLite store of the old layout."""
    file = tmp_path_factory.mktemp("old") / "palimpsest.db"
    fill(f"sqlite:///{file}")
    return file


@pytest.fixture(scope="module")
def old_database(postgres_server: str) -> Iterator[str]:
    """Name of a PostgreSQL database of the old layout."""
    with postgres.database(postgres_server) as found:
        fill(found)
        yield str(make_url(found).database)


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """URL of a store of the old layout, one for each test."""
    if request.param == "sqlite":
        file = shutil.copy(request.getfixturevalue("old_file"), tmp_path)
        yield f"sqlite:///{file}"
        return
    server, like = (request.getfixturevalue(name) for name in ("postgres_server", "old_database"))
    with postgres.database(server, like) as copy:
        yield copy


def fill(empty: str) -> None:
    """Create the tables of the old layout in an empty store, and fill them."""
    asyncio.run(upgrade(empty, "0007"))
    plain = make_url(empty)
    if plain.get_backend_name() != "sqlite":
        plain = plain.set(drivername="postgresql+psycopg")
    engine = create_engine(plain)
    with engine.begin() as connection:
        for table, rows in old()["tables"].items():
            flags = {c["name"] for c in inspect(connection).get_columns(table) if str(c["type"]) == "BOOLEAN"}
            for row in rows:
                values = {name: bool(value) if name in flags else value for name, value in row.items()}
                columns = ", ".join(f'"{name}"' for name in values)
                places = ", ".join(f":{name}" for name in values)
                connection.execute(text(f"INSERT INTO {table} ({columns}) VALUES ({places})"), values)  # noqa: S608
    engine.dispose()


def old() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(gzip.decompress(OLD.read_bytes()))
    return found


async def exports(url: str) -> dict[str, list[Any]]:
    """Return the export of each session, by its id and dialect."""
    store = await Store.open(url)
    try:
        await store.ready()
        rows, _ = await store.sessions(None, limit=100)
        return {f"{row.id} {row.dialect}": [record async for record in store.export(row.key)] for row in rows}
    finally:
        await store.close()


def engine_of(url: str) -> Engine:
    plain = make_url(url)
    is_sqlite = plain.get_backend_name() == "sqlite"
    return create_engine(plain if is_sqlite else plain.set(drivername="postgresql+psycopg"), poolclass=NullPool)


def tables(url: str) -> set[str]:
    engine = engine_of(url)
    try:
        return set(inspect(engine).get_table_names())
    finally:
        engine.dispose()


async def test_every_session_equals_itself_by_export(url: str) -> None:
    told: list[tuple[int, int]] = []
    await upgrade(url, progress=lambda done, total: told.append((done, total)))
    count = len(old()["exports"])
    assert told[0] == (0, count)
    assert told[-1] == (count, count)
    assert await exports(url) == old()["exports"]
    assert not {f"old_{name}" for name in OLD_TABLES} & tables(url)


_STEPS = [2, 5, 9, 14, 20, 33, 47, 60]
_DYING = [(kind, step) for kind in ("sqlite", "postgres") for step in _STEPS] if LONG_RUN else []
_DYING += [] if LONG_RUN else [("sqlite", 2), ("postgres", 9), ("sqlite", 20), ("postgres", 47)]


@pytest.mark.parametrize(("url", "step"), _DYING, indirect=["url"])
def test_one_that_is_killed_goes_on(url: str, step: int) -> None:
    for after, codes in ((step, {9}), (2 * step, {0, 9})):
        with Forked(run_program, _DIES, url, str(after)) as process:
            assert process.wait(60) in codes
    assert asyncio.run(exports(url)) == old()["exports"]  # opening it finishes the conversion


async def test_two_at_once_convert_it_once(url: str) -> None:
    await asyncio.gather(upgrade(url), upgrade(url), exports(url))
    assert await exports(url) == old()["exports"]


async def test_a_large_one_is_converted_by_the_command_alone(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.store.MOST_BYTES", 1000)
    with pytest.raises(StoreUnavailable, match=r"MB of disk besides.*palimpsest upgrade"):
        await Store.open(url)
    assert "old_nodes" not in tables(url)  # an older version can still use it
    await upgrade(url, "0013")
    with pytest.raises(StoreUnavailable, match="palimpsest upgrade"):
        await Store.open(url)
    store = await Store.open(url, migrate=False)
    with pytest.raises(StoreUnavailable, match="palimpsest upgrade"):
        await store.ready()
    await store.close()
    await upgrade(url)
    assert await exports(url) == old()["exports"]


async def test_a_copy_that_differs_is_not_kept(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.convert._Layouts._convert_cuts", lambda _layouts, _key: None)
    with pytest.raises(StoreUnavailable, match="differs in its records of kind cut"):
        await upgrade(url)
    monkeypatch.undo()
    assert await exports(url) == old()["exports"]


async def test_it_can_be_taken_back(url: str) -> None:
    await upgrade(url)
    await migrate.downgrade(url, "0007")
    engine = engine_of(url)
    with engine.connect() as connection:
        for table, rows in old()["tables"].items():
            found = [dict(row) for row in connection.execute(text(f"SELECT * FROM {table}")).mappings()]  # noqa: S608
            assert _sorted(found) == _sorted(rows), table
    engine.dispose()
    await upgrade(url)
    assert await exports(url) == old()["exports"]


async def test_replies_and_forms_move_to_other_rows_and_back(url: str) -> None:
    await upgrade(url)
    assert ("forms" in tables(url), await exports(url)) == (False, old()["exports"])
    await migrate.downgrade(url, "0017")
    assert "forms" in tables(url)
    assert await exports(url) == old()["exports"]
    assert "forms" not in tables(url)


def _sorted(rows: Sequence[dict[str, Any]]) -> list[str]:
    return sorted(
        json.dumps({name: int(v) if isinstance(v, bool) else v for name, v in row.items()}, sort_keys=True)
        for row in rows
    )


async def test_sums_stay_and_are_of_the_same_sessions(url: str) -> None:
    await upgrade(url, "0012")
    before = sums(url)
    sessions = old()["tables"]["sessions"]
    assert {session for session, _ in before["session_rollups"]} == {row["session"] for row in sessions}
    functions = settling(url)
    await upgrade(url)
    after = sums(url)
    assert after["rollups"] == before["rollups"]
    named = [(decode_session(session), values) for session, values in after["session_rollups"]]
    assert sorted(named) == before["session_rollups"]
    store = await Store.open(url)
    query = StatsQuery(since=0, until=10_000_000, group="session")
    rows = (await store.stats_and_total(query))[0]
    assert {row.group for row in rows} == {row["id"] for row in sessions}
    assert (await store.stats_and_total(query))[1].sums["requests"] == sum(row.sums["requests"] for row in rows)
    await store.close()
    assert settling(url) != functions or url.startswith("sqlite")
    await migrate.downgrade(url, "0012")
    assert sums(url) == before
    assert settling(url) == functions


def sums(url: str) -> dict[str, list[Any]]:
    """Return the rows of both tables of sums; those by session begin with the session."""
    with engine_of(url).connect() as connection:
        return {
            "rollups": sorted(tuple(row) for row in connection.execute(text("SELECT * FROM rollups"))),
            "session_rollups": sorted(
                (row[0], tuple(row[1:])) for row in connection.execute(text("SELECT * FROM session_rollups"))
            ),
        }


def settling(url: str) -> list[str]:
    """Return the source of PostgreSQL's functions."""
    if url.startswith("sqlite"):
        return []
    found = text(
        "SELECT pg_get_functiondef(oid) FROM pg_proc "
        "WHERE proname IN ('palimpsest_settle', 'palimpsest_begin') ORDER BY proname"
    )
    with engine_of(url).connect() as connection:
        return list(connection.execute(found).scalars())


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)  # the free disk space of a server is unknown
async def test_a_sqlite_store_needs_room(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.store.migrate._PART_NEEDED", 1e12)
    with pytest.raises(StoreUnavailable, match="not free"):
        await upgrade(url)

from __future__ import annotations

import asyncio
import logging
import sqlite3
import subprocess
import sys
import warnings
from collections.abc import Callable, Generator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, TypeVar
from uuid import uuid4

import orjson
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, create_engine, inspect, make_url, select, text
from sqlalchemy.exc import DBAPIError, ProgrammingError

from proxy.conversation import ROOT, body_of, content_hash, content_key, names_under
from proxy.dialects.chat.message import ChatMessage
from proxy.errors import ConfigurationError, StoreUnavailable
from proxy.store import Status, Store
from proxy.store.migrate import REVISION, config, current, downgrade, upgrade
from proxy.store.packing import RECEIPTS, RECORDS, unpack
from proxy.store.schema import METADATA, NODES
from tests.support import postgres
from tests.support.forked import Forked, run_program
from tests.support.talk import Talk, body

Answer = TypeVar("Answer")

OLD_EVIDENCE = "AND hashbyteaextended(e.session, 0) = hashbyteaextended(f.session, 0))"
NEW_EVIDENCE = """
                AND hashtextextended(encode(e.session, 'hex'), 0) = hashtextextended(encode(f.session, 'hex'), 0))"""

pytestmark = pytest.mark.anyio


@pytest.fixture(params=["sqlite", "postgres"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """URL of a database without tables."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'palimpsest.db'}"
    found: str = request.getfixturevalue("empty_postgres")
    return found


def executing(statement: str) -> Callable[[Connection], None]:
    def execute(connection: Connection) -> None:
        connection.execute(text(statement))
        connection.commit()

    return execute


def tables(connection: Connection) -> set[str]:
    return set(inspect(connection).get_table_names()) - {"alembic_version"}


def differences(connection: Connection) -> list[object]:
    def is_here(thing: Any, *_: object) -> bool:
        """Tell whether an index exists on this database."""
        only = getattr(thing, "_ddl_if", None)
        return only is None or only.dialect == connection.dialect.name

    opts = {"compare_server_default": True, "include_object": is_here}
    context = MigrationContext.configure(connection, opts=opts)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="autogenerate skipping")  # of an index that SQLite has not
        return list(compare_metadata(context, METADATA))


def ask(url: str, question: Callable[[Connection], Answer]) -> Answer:
    """Query a database directly, without the store."""
    plain = make_url(url)
    engine = create_engine(
        plain.set(drivername="postgresql+psycopg") if plain.get_backend_name() != "sqlite" else plain
    )
    try:
        with engine.connect() as connection:
            return question(connection)
    finally:
        engine.dispose()


async def test_up_down_and_up_again(url: str) -> None:
    await upgrade(url)
    assert ask(url, current) == REVISION
    assert ask(url, tables) == set(METADATA.tables)
    await upgrade(url)  # a second time changes nothing
    await downgrade(url, "base")
    assert ask(url, current) is None
    assert ask(url, tables) == set()
    await upgrade(url)
    assert ask(url, tables) == set(METADATA.tables)


def test_the_program_names_the_newest_migration() -> None:
    assert ScriptDirectory.from_config(config()).get_current_head() == REVISION


async def test_tables_that_are_up_to_date_need_no_alembic(url: str) -> None:
    await upgrade(url)
    run = "import asyncio, sys; from proxy.store.migrate import upgrade; asyncio.run(upgrade(sys.argv[1])); "
    run += "print({'alembic', 'mako'} & set(sys.modules))"
    told = subprocess.check_output([sys.executable, "-c", run, url], text=True)  # noqa: ASYNC221, S603 - our own
    assert told == "set()\n"


async def test_the_migrations_make_the_tables_that_the_program_knows(url: str) -> None:
    await upgrade(url)
    assert ask(url, differences) == []


async def test_an_older_server_of_postgresql_can_have_the_tables() -> None:
    with postgres.server(version=16) as server, postgres.database(server) as url:
        await upgrade(url)
        assert ask(url, differences) == []
        await downgrade(url, "base")


_OF_VERSION_18 = """
    DROP INDEX ix_nodes_content;
    CREATE INDEX ix_nodes_content ON nodes (hashbyteaextended(content, hashbyteaextended(session, 0)));
    DROP INDEX ix_evidence_piece_session;
    CREATE INDEX ix_evidence_piece_session ON evidence (piece, hashbyteaextended(session, 0));
    UPDATE alembic_version SET version_num = '0021'
"""
"""Turns the tables into those of an earlier migration 17, with functions that only PostgreSQL 18 has."""
_SETTLES = "SELECT pg_get_functiondef('palimpsest_settle(text[], bytea[])'::regprocedure)"
_INDEXES = "SELECT indexdef FROM pg_indexes WHERE indexname IN ('ix_nodes_content', 'ix_evidence_piece_session')"


async def test_what_only_one_version_of_postgresql_can_have_is_made_anew(empty_postgres: str) -> None:
    def remake(connection: Connection) -> None:
        for statement in _OF_VERSION_18.split(";"):
            connection.exec_driver_sql(statement)
        settles: str = connection.exec_driver_sql(_SETTLES).scalar_one()
        old = settles.replace(NEW_EVIDENCE, " " + OLD_EVIDENCE)
        assert old != settles
        connection.exec_driver_sql(old)
        connection.commit()

    def told(connection: Connection) -> list[str]:
        texts = [*connection.exec_driver_sql(_INDEXES).scalars(), connection.exec_driver_sql(_SETTLES).scalar_one()]
        return [text for text in texts if "hashbytea" in text]

    await upgrade(empty_postgres)
    try:
        ask(empty_postgres, remake)
    except ProgrammingError:
        pytest.skip("this server has no such functions")
    assert len(ask(empty_postgres, told)) == 3
    await upgrade(empty_postgres)
    assert ask(empty_postgres, told) == []
    assert ask(empty_postgres, differences) == []


_AS_BEFORE = """
    INSERT INTO exchanges SELECT * FROM pending;
    CREATE TABLE ids AS SELECT session, id FROM pending;
    DROP TABLE pending;
    CREATE TABLE pending (session {bytes} NOT NULL, id {bytes} NOT NULL,
                          CONSTRAINT pk_pending PRIMARY KEY (session, id));
    INSERT INTO pending SELECT session, id FROM ids;
    DROP TABLE ids;
    DROP INDEX ix_exchanges_session_digest;
    CREATE INDEX ix_exchanges_session_digest_created_at ON exchanges (session, digest, created_at);
    CREATE INDEX ix_nodes_recorded ON nodes (recorded, node);
    UPDATE alembic_version SET version_num = '0014'
"""
"""Turns the tables into those of an earlier migration 13, from before exchanges were inserted once."""


async def test_exchanges_under_way_move_to_a_table_of_their_own(url: str) -> None:
    store = await Store.open(url)
    talk = Talk(store=store)
    await talk.say("one", "1")
    under_way = await talk.begin(body("user", "two"))
    before = [record async for record in store.export(talk.key)]
    await store.close()
    await downgrade(url, "0015")
    statements = _AS_BEFORE.format(bytes="BLOB" if url.startswith("sqlite") else "BYTEA").split(";")

    def change(connection: Connection) -> None:
        for statement in statements:
            connection.execute(text(statement))
        connection.commit()

    ask(url, change)
    store = await Store.open(url)
    talk = Talk(store=store)
    assert ask(url, differences) == []
    assert [record async for record in store.export(talk.key)] == before
    assert await store.interrupt_pending(9_000) == 1
    row = await store.exchange(under_way)
    assert row is not None
    assert row.status is Status.INTERRUPTED
    await store.close()


async def test_receipts_are_packed_as_older_versions_read_them_before_those_run(url: str) -> None:
    store = await Store.open(url)
    talk = Talk(store=store)
    parameters = {"temperature": 0.5, "model": "gpt-4o", "user": "gpt-4o", "metadata": {"of": 'a "gpt-4o"'}}
    asked = body("user", "one")
    receipt = {"plan": [], "edits": [], "upstream_model": "gpt-4o"}
    await talk.begin(asked, model="gpt-4o", parameters=parameters)  # it stays under way
    exchange = await talk.begin(asked, model="gpt-4o", parameters=parameters)
    await talk.settle(exchange, asked, replies=(body("assistant", "1"),), receipt=receipt)
    row = await store.exchange(exchange)
    assert row is not None
    assert list(row.parameters.items()) == list(parameters.items())
    before = [record async for record in store.export(talk.key)]
    assert [record["parameters"] for record in before if record["record"] == "exchange"] == [parameters] * 2
    await store.close()

    def stored(connection: Connection) -> list[tuple[bytes, bytes]]:
        both = "SELECT parameters, receipt FROM exchanges UNION ALL SELECT parameters, receipt FROM pending"
        return [(bytes(row[0]), bytes(row[1])) for row in connection.execute(text(both))]

    assert {row[0][0] for row in ask(url, stored)} == {RECEIPTS}
    await downgrade(url, "0019")
    rows = ask(url, stored)
    assert {value[0] for row in rows for value in row} <= {0, RECORDS}
    assert [orjson.loads(unpack(row[0])) for row in rows] == [parameters] * 2
    store = await Store.open(url)
    assert [record async for record in store.export(talk.key)] == before
    await store.close()


async def test_two_that_start_at_once_migrate_once(url: str, tmp_path: Path) -> None:
    run = "import asyncio, sys; from proxy.store.migrate import upgrade; sys.stderr = open(sys.argv[2], 'w'); "
    run += "asyncio.run(upgrade(sys.argv[1]))"
    said = [tmp_path / "first.txt", tmp_path / "second.txt"]
    with ExitStack() as stack:
        processes = [stack.enter_context(Forked(run_program, run, url, str(file))) for file in said]
        await asyncio.gather(upgrade(url), upgrade(url))
        assert [process.wait(60) for process in processes] == [0, 0]
    assert [file.read_text() for file in said] == ["", ""]
    assert ask(url, current) == REVISION


async def test_logging_is_left_alone(tmp_path: Path) -> None:
    before = list(logging.root.handlers), logging.root.level, logging.root.manager.disable
    ours = logging.getLogger("palimpsest.test")
    await upgrade(f"sqlite:///{tmp_path / 'palimpsest.db'}")
    assert (list(logging.root.handlers), logging.root.level, logging.root.manager.disable) == before
    assert not ours.disabled


async def test_tables_of_a_newer_version_are_told(tmp_path: Path) -> None:
    file = tmp_path / "palimpsest.db"
    await upgrade(f"sqlite:///{file}")
    with closing(sqlite3.connect(file)) as connection, connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(StoreUnavailable, match=r"9999.*newer version"):
        await upgrade(f"sqlite:///{file}")


async def test_a_migration_that_fails_says_so_and_leaves_everything_as_it_was(
    url: str, caplog: pytest.LogCaptureFixture
) -> None:
    ask(url, executing("CREATE TABLE nodes (mine TEXT)"))
    with pytest.raises(StoreUnavailable, match=r"cannot be migrated.*another program.*Nothing is lost"):
        await upgrade(url)
    assert ask(url, tables) == {"nodes"}
    assert "already exists" in caplog.text
    ask(url, executing("DROP TABLE nodes"))
    await upgrade(url)


async def test_a_migration_without_rights_says_which(empty_postgres: str) -> None:
    role = f"weak_{make_url(empty_postgres).database}"
    postgres.execute(empty_postgres, f'CREATE ROLE "{role}" LOGIN', "REVOKE CREATE ON SCHEMA public FROM PUBLIC")
    try:
        with pytest.raises(StoreUnavailable, match=r"cannot be migrated.*must own"):
            await upgrade(make_url(empty_postgres).set(username=role).render_as_string(hide_password=False))
    finally:
        postgres.execute(empty_postgres, f'DROP ROLE "{role}"')


@contextmanager
def encoded(server: str, encoding: str) -> Generator[str]:
    """Create a database with an encoding, and drop it afterwards."""
    name = f"encoded_{uuid4().hex[:12]}"
    made = f"CREATE DATABASE {name} TEMPLATE template0 ENCODING '{encoding}' LC_COLLATE 'C' LC_CTYPE 'C'"
    postgres.execute(server, made)
    try:
        yield make_url(server).set(database=name).render_as_string(hide_password=False)
    finally:
        postgres.execute(server, f"DROP DATABASE {name} WITH (FORCE)")


async def test_a_database_that_lacks_characters_is_refused(postgres_server: str) -> None:
    with encoded(postgres_server, "LATIN1") as url:
        with pytest.raises(StoreUnavailable, match=r"is LATIN1.*'UTF8'"):
            await upgrade(url)
        assert ask(url, tables) == set()


@pytest.mark.parametrize("driver", ["postgresql", "postgresql+psycopg"])
async def test_a_database_that_takes_any_bytes_takes_any_name(postgres_server: str, driver: str) -> None:
    with encoded(postgres_server, "SQL_ASCII") as url:
        store = await Store.open(make_url(url).set(drivername=driver).render_as_string(hide_password=False))
        await Talk(store=store, tenant="租户", session="会话").say("数据库", "😀")
        assert [row.id for row in await store.find("会话")] == ["会话"]
        await store.close()


async def test_what_is_no_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError):
        await upgrade("mysql://host/db")
    with pytest.raises(StoreUnavailable, match="does not exist"):
        await upgrade(f"sqlite:///{tmp_path / 'none' / 'palimpsest.db'}")


def test_a_folder_with_a_percent_sign_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "100%"
    folder.mkdir()
    monkeypatch.setattr("proxy.store.migrate._FOLDER", folder)
    assert config().get_main_option("script_location") == str(folder)


async def test_conversations_of_the_first_tables_are_found_as_new_ones_are(url: str) -> None:
    """Revision 2: messages by what they say, replies by whose they are."""
    await upgrade(url, "0001")
    said = [("user", "hi", "client"), ("assistant", "Hello!", "upstream"), ("assistant", "made up", "client")]
    messages = [ChatMessage.of({"role": role, "content": text}) for role, text, _ in said]
    names = names_under(ROOT, map(content_hash, messages))

    def fill(connection: Connection) -> None:
        connection.execute(
            text("INSERT INTO sessions VALUES ('s', 'team', 'i', 1, 1, :head, NULL, 'first', 3, 1, 9, 1, 9, 0)"),
            {"head": names[-1]},
        )
        for depth, (name, message, (_, _, source)) in enumerate(zip(names, messages, said, strict=True), 1):
            connection.execute(
                text("INSERT INTO bodies VALUES ('s', :body, 3, :text)"),
                {"body": body_of(message), "text": message.raw.decode()},
            )
            connection.execute(
                text(
                    "INSERT INTO nodes VALUES ('s', :node, :parent, :depth, 1, 3, :body, 3, :source, "
                    "false, 'e', NULL, NULL, NULL, 1)"
                ),
                {
                    "node": name,
                    "parent": ([ROOT, *names])[depth - 1],
                    "depth": depth,
                    "body": body_of(message),
                    "source": source,
                },
            )
        connection.commit()

    ask(url, fill)
    await upgrade(url)
    told = select(NODES.c.content, NODES.c.recorded).order_by(NODES.c.depth)
    rows = ask(url, lambda c: c.execute(told).all())
    assert [tuple(row) for row in rows] == [
        (content_key(content_hash(message)), recorded)
        for message, recorded in zip(messages, ("team", "team", None), strict=True)
    ]
    with pytest.raises(DBAPIError, match="append-only"):
        ask(url, lambda c: c.execute(text("UPDATE nodes SET content = 'x'")))
    await downgrade(url, "0001")
    assert ask(url, current) == "0001"


async def test_sessions_of_the_third_tables_have_nothing_beside_their_messages(url: str) -> None:
    """Revision 4: counts that tell so, for sessions that a version before it makes meanwhile too."""
    await upgrade(url, "0003")
    row = text(
        "INSERT INTO sessions (session, tenant, id, created_at, updated_at, head, arrival, messages, rounds, "
        "tokens, requests, tokens_sent, tokens_saved, scale) "
        "VALUES (:session, 'team', 'i', 1, 1, '', 'first', 0, 0, 0, 0, 0, 0, 1.5)"
    )

    def make(session: str) -> Callable[[Connection], None]:
        def run(connection: Connection) -> None:
            connection.execute(row, {"session": session})
            connection.commit()

        return run

    ask(url, make("before"))
    await upgrade(url, "0007")
    ask(url, make("meanwhile"))
    await upgrade(url)
    rows = ask(
        url,
        lambda c: c.execute(text("SELECT scale, hidden, summaries, cost, calls FROM sessions ORDER BY session")).all(),
    )
    assert [tuple(row) for row in rows] == [(1.5, 0, 0, None, None)] * 2
    await downgrade(url, "0003")
    later = {"hidden", "summaries", "leases", "pending", "evidence", "provider_ids", "rollups", "session_rollups"}
    later |= {"key_costs"}
    assert ask(url, tables) == set(METADATA.tables) - later | {"forms"}
    assert ask(url, lambda c: c.execute(text("SELECT count(*) FROM sessions")).scalar_one()) == 2
    await upgrade(url)
    assert ask(url, differences) == []

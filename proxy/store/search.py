"""The full-text index of messages (`store.search: index`).

It is filled from stored messages a little later, so that requests do not wait for it. Only searches depend on it. Its
tables are created on demand and are not part of the migrations. A trigger deletes the index rows of a deleted session.

Texts are split into words here, in the same way for both databases: runs of letters and digits, and each pair of
adjacent characters in Chinese, Japanese and Korean. The index finds candidates by whole words and their beginnings. The
caller then checks the text of each candidate.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache
from typing import Any, Final

from msgspec import Struct
from sqlalchemy import (
    BigInteger,
    Column,
    Connection,
    Insert,
    MetaData,
    Select,
    Table,
    Text,
    TextClause,
    bindparam,
    delete,
    func,
    select,
    text,
)

from proxy.store.database import Row, StoreConnection
from proxy.store.packing import HASH_NAME, SESSION_NAME
from proxy.store.records import NodeRow
from proxy.store.schema import NODES, SESSIONS, insert_into, put
from proxy.store.sessions import IS_THERE
from proxy.store.tree import depths_of, rows_of

MOST: Final = 2000
"""Most messages that the index returns. If more match, the newest sessions have enough of them."""
AT_ONCE: Final = 50  # messages or sessions of one read
_LONGEST: Final = 64  # most characters of a word; the rest is cut off
_ROOM: Final = 900_000  # most bytes of a message's words; PostgreSQL's limit is a megabyte
_PAIRED: Final = (
    "\u3005-\u3007\u3041-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9f\U00020000-\U000323af"
)
"""Characters of scripts without spaces between words, and Korean."""
_RUN: Final = re.compile(rf"([{_PAIRED}]+)|([^\W_{_PAIRED}]+)")

_OWN: Final = MetaData()
_TEXTS: Final = Table(
    "search_texts",
    _OWN,
    Column("session", SESSION_NAME, primary_key=True),
    Column("node", HASH_NAME, primary_key=True),
    Column("terms", Text, nullable=False),  # a tsvector on PostgreSQL
)
_MARKS: Final = Table(
    "search_marks",
    _OWN,
    Column("session", SESSION_NAME, primary_key=True),
    Column("mark", BigInteger, nullable=False),  # value of `_STATE` when all of the session had been indexed
)
_PURGE: Final = ""  # stored as x'7e'
"""Session name of a special mark: the index still has words of deleted messages."""

_SQLITE: Final[Sequence[str]] = (
    """
    CREATE TABLE IF NOT EXISTS search_texts (
        id INTEGER PRIMARY KEY, session BLOB NOT NULL, node BLOB NOT NULL, terms TEXT NOT NULL)
    """,
    "CREATE UNIQUE INDEX IF NOT EXISTS ix_search_texts ON search_texts (session, node)",
    "CREATE TABLE IF NOT EXISTS search_marks (session BLOB PRIMARY KEY, mark BIGINT NOT NULL) WITHOUT ROWID",
    """
    CREATE VIRTUAL TABLE IF NOT EXISTS search_index USING fts5(
        terms, content='search_texts', content_rowid='id', detail='none', tokenize='ascii')
    """,
    """
    CREATE TRIGGER IF NOT EXISTS search_added AFTER INSERT ON search_texts BEGIN
        INSERT INTO search_index (rowid, terms) VALUES (new.id, new.terms);
    END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS search_removed AFTER DELETE ON search_texts BEGIN
        INSERT INTO search_index (search_index, rowid, terms) VALUES ('delete', old.id, old.terms);
        INSERT OR REPLACE INTO search_marks VALUES (x'7e', 0);
    END
    """,
    """
    CREATE TRIGGER IF NOT EXISTS search_gone AFTER DELETE ON sessions BEGIN
        DELETE FROM search_texts WHERE session = old.session;
        DELETE FROM search_marks WHERE session = old.session;
    END
    """,
)
_POSTGRES: Final[Sequence[str]] = (
    "CREATE TABLE search_texts (session BYTEA, node BYTEA, terms TSVECTOR NOT NULL, PRIMARY KEY (session, node))",
    "CREATE INDEX ix_search_texts_terms ON search_texts USING gin (terms)",
    "CREATE TABLE search_marks (session BYTEA PRIMARY KEY, mark BIGINT NOT NULL)",
    """
    CREATE FUNCTION palimpsest_search_gone() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        DELETE FROM search_texts WHERE session = old.session;
        DELETE FROM search_marks WHERE session = old.session;
        RETURN NULL;
    END $$
    """,
    "CREATE TRIGGER search_gone AFTER DELETE ON sessions FOR EACH ROW EXECUTE FUNCTION palimpsest_search_gone()",
)
_UNDONE: Final = {
    "sqlite": (
        "DROP TRIGGER IF EXISTS search_gone",
        "DROP TABLE IF EXISTS search_index",
        "DROP TABLE IF EXISTS search_texts",
        "DROP TABLE IF EXISTS search_marks",
    ),
    "postgresql": (
        "DROP FUNCTION IF EXISTS palimpsest_search_gone() CASCADE",
        "DROP TABLE IF EXISTS search_texts, search_marks",
    ),
}
_THERE: Final = "SELECT to_regclass('search_marks') IS NOT NULL"

_STATE: Final = SESSIONS.c.updated_at + SESSIONS.c.requests  # neither ever decreases
_DUE: Final = (
    select(SESSIONS.c.session, _STATE.label("state"))
    .outerjoin(_MARKS, _MARKS.c.session == SESSIONS.c.session)
    .where(_MARKS.c.mark.is_distinct_from(_STATE), IS_THERE)
    .order_by(SESSIONS.c.updated_at.desc())
    .limit(AT_ONCE)
)
_MISSING: Final = (
    select(NODES.c.node)
    .outerjoin(_TEXTS, (_TEXTS.c.session == NODES.c.session) & (_TEXTS.c.node == NODES.c.node))
    .where(
        NODES.c.session == bindparam("key"),
        NODES.c.node > bindparam("after", type_=NODES.c.node.type),
        _TEXTS.c.node.is_(None),
    )
    .order_by(NODES.c.node)
    .limit(AT_ONCE)
)
_LOCKED: Final[Select[Any]] = (
    select(SESSIONS.c.session)
    .where(SESSIONS.c.session == bindparam("key"), IS_THERE)
    .with_for_update(read=True, key_share=True)
)
_FOUND: Final = {
    "sqlite": "search_index JOIN search_texts t ON t.id = search_index.rowid JOIN sessions s ON s.session = t.session "
    "WHERE search_index MATCH :asked",
    "postgresql": "search_texts t JOIN sessions s ON s.session = t.session WHERE t.terms @@ CAST(:asked AS tsquery)",
}


def make_index(connection: Connection) -> None:
    """Create the tables, if they do not exist."""
    if connection.dialect.name == "sqlite":
        statements = _SQLITE
    else:
        statements = () if connection.exec_driver_sql(_THERE).scalar() else _POSTGRES
    for statement in statements:
        connection.exec_driver_sql(statement)


def drop_index(connection: Connection) -> None:
    """Drop the tables, if they exist."""
    for statement in _UNDONE[connection.dialect.name]:
        connection.exec_driver_sql(statement)


# ------------------------------------------------------------------------------------------------------ words


def terms_of(said: str) -> str:
    """Return the words of a text, each once, separated by spaces."""
    terms: dict[str, None] = {}
    for paired, run in _RUN.findall(said.casefold()):
        if run:
            terms[run[:_LONGEST]] = None
        else:  # and the last character alone, so that every character begins a word
            terms |= dict.fromkeys([paired[place : place + 2] for place in range(len(paired))])
    found = " ".join(terms)
    if len(found) * 4 > _ROOM and len(found.encode()) > _ROOM:
        found = found.encode()[:_ROOM].decode("utf-8", "ignore").rpartition(" ")[0]
    return found


def question_of(words: Sequence[str], dialect: str) -> str | None:
    """Return the index query for messages with all of these words, or None if one has neither letter nor digit."""
    whole: dict[str, None] = {}
    beginnings: dict[str, None] = {}
    for word in words:
        runs = _RUN.findall(word.casefold())
        if not runs:
            return None
        for number, (paired, run) in enumerate(runs, start=1):
            if len(paired) > 1:
                whole |= dict.fromkeys([paired[place : place + 2] for place in range(len(paired) - 1)])
            elif paired or (number == len(runs) and len(run) <= _LONGEST):
                beginnings[paired or run] = None
            else:
                whole[run[:_LONGEST]] = None
    if dialect == "sqlite":
        return " ".join([*(f'"{term}"' for term in whole), *(f'"{term}" *' for term in beginnings)])
    return " & ".join([*(f"'{term}'" for term in whole), *(f"'{term}':*" for term in beginnings)])


# ------------------------------------------------------------------------------------------------------- fill


def due(connection: StoreConnection) -> Sequence[Row]:
    """Return `session` and `state` of some sessions that changed since they were indexed, the newest first."""
    return connection.execute(_DUE).all()


def missing(connection: StoreConnection, key: str, after: str) -> list[NodeRow]:
    """Return some messages of a session that are not indexed, sorted by name, with names greater than `after`."""
    names = list(connection.execute(_MISSING, {"key": key, "after": after}).scalars())
    return rows_of(connection, key, names) if names else []


def add(connection: StoreConnection, key: str, terms: Sequence[tuple[str, str]], state: int | None) -> None:
    """Add messages, as (node, words), to the index. A `state` marks the session as indexed up to that state."""
    if connection.execute(_LOCKED, {"key": key}).one_or_none() is None:  # the session was deleted meanwhile
        return
    there = depths_of(connection, key, [node for node, _ in terms])
    if len(there) < len(terms):  # deleted and created again meanwhile
        return
    for node, words in terms:
        connection.execute(_adding(connection.dialect.name), {"session": key, "node": node, "words": words})
    if state is not None:
        put(connection, _MARKS, [{"session": key, "mark": state}])


@cache
def _adding(dialect: str) -> Insert:
    words: Any = bindparam("words", type_=Text())
    if dialect == "postgresql":
        words = func.array_to_tsvector(func.string_to_array(words, " "))
    values: dict[str, Any] = {"session": bindparam("session"), "node": bindparam("node"), "terms": words}
    return insert_into(dialect, _TEXTS).values(values).on_conflict_do_nothing()


_IS_MADE: Final = text("SELECT 1 FROM sqlite_master WHERE name = 'search_texts'")
_SOME: Final = select(_TEXTS.c.node).where(_TEXTS.c.session == bindparam("key")).limit(AT_ONCE)
_REMOVE: Final = (
    delete(_TEXTS).where(_TEXTS.c.session == bindparam("key"), _TEXTS.c.node.in_(_SOME)).returning(_TEXTS.c.node)
)


def remove_some(connection: StoreConnection, key: str) -> bool:
    """Remove some messages of a session that is being deleted from SQLite's index; return False once none is left.

    The trigger would remove all of them in one transaction.
    """
    if connection.execute(_IS_MADE).one_or_none() is None:
        return False
    return bool(connection.execute(_REMOVE, {"key": key}).all())


_MERGE: Final = text("INSERT INTO search_index (search_index, rank) VALUES ('merge', :pages)")
_CHANGES: Final = text("SELECT total_changes()")
_PAGES: Final = 200  # pages that one step merges


def purge(connection: StoreConnection) -> bool:
    """Remove words of deleted messages from SQLite's index, one step per call; return False once none is left."""
    if connection.dialect.name != "sqlite":
        return False
    row = connection.execute(select(_MARKS.c.mark).where(_MARKS.c.session == _PURGE)).one_or_none()
    if row is None:
        return False
    before: int = connection.execute(_CHANGES).scalar_one_or_none()
    connection.execute(_MERGE, {"pages": _PAGES if row.mark else -_PAGES})  # negative: start merging the whole index
    if row.mark and connection.execute(_CHANGES).scalar_one_or_none() - before < 2:
        connection.execute(delete(_MARKS).where(_MARKS.c.session == _PURGE))
        return False
    put(connection, _MARKS, [{"session": _PURGE, "mark": 1}])
    return True


# ------------------------------------------------------------------------------------------------------- find


class FoundTexts(Struct, frozen=True, kw_only=True):
    """Messages of a session that may match a search."""

    key: str
    updated_at: int
    nodes: tuple[str, ...]


def find(connection: StoreConnection, asked: str, tenant: str | None) -> list[FoundTexts] | None:
    """Return the messages that match an index query, the newest session first; None if they are more than `MOST`."""
    values = {"asked": asked, "most": MOST + 1} | ({} if tenant is None else {"tenant": tenant})
    rows = connection.execute(_finding(connection.dialect.name, of_one=tenant is not None), values).all()
    if len(rows) > MOST:
        return None
    nodes: dict[tuple[int, str], list[str]] = {}
    for row in rows:
        nodes.setdefault((row.updated_at, row.session), []).append(row.node)
    newest = sorted(nodes.items(), reverse=True)
    return [FoundTexts(key=key, updated_at=at, nodes=tuple(names)) for (at, key), names in newest]


@cache
def _finding(dialect: str, *, of_one: bool) -> Any:
    where = " AND s.tenant = :tenant" if of_one else ""
    found: TextClause = text(f"SELECT t.session, t.node, s.updated_at FROM {_FOUND[dialect]}{where} LIMIT :most")  # noqa: S608 - our own
    found = found.bindparams(bindparam("asked", type_=Text()), bindparam("most", type_=BigInteger()))
    if of_one:
        found = found.bindparams(bindparam("tenant", type_=Text()))
    return found.columns(session=SESSION_NAME, node=HASH_NAME, updated_at=BigInteger())

"""The tables in SQLAlchemy Core. The migrations create them; a test compares the two.

Every table of a session has a primary key that begins with `session`, the internal name of the session
(`records.session_key`), so that the tables can be distributed by session without a change. For the same reason there
are no other unique constraints: names are made so that they are unique where they must be. There are no foreign keys:
every writer to a session holds the lock on its row in `sessions`.

Times are milliseconds since 1970. JSON is text, never JSONB, which reorders keys. Names and long texts are stored as
bytes, which the column types encode and decode (`packing`). `bodies`, `hidden`, `instructions`, `nodes` and `summaries`
are append-only: triggers, which the migrations create, refuse an UPDATE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, Final

from msgspec.structs import fields
from sqlalchemy import (
    ARRAY,
    BigInteger,
    Boolean,
    Column,
    ColumnElement,
    Computed,
    Float,
    FromClause,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    bindparam,
    func,
    literal_column,
    select,
    text,
)
from sqlalchemy.dialects import postgresql, sqlite

from proxy.store.database import StoreConnection
from proxy.store.packing import (
    EXCHANGE_NAME,
    HASH_NAME,
    HASH_NAMES,
    PACKED_RECEIPT,
    PACKED_RECORD,
    PACKED_TEXT,
    SESSION_NAME,
    encoder_of,
)
from proxy.store.records import ExchangeFigures

METADATA: Final = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

ORDERED: Final = Text().with_variant(Text(collation="C"), "postgresql")
"""Texts that are compared byte by byte, whatever the database's collation."""


def _columns(kind: Any, *names: str, nullable: bool = False, primary_key: bool = False) -> Iterator[Column[Any]]:
    """Yield columns of one type."""
    for name in names:
        yield Column(name, kind, nullable=nullable, primary_key=primary_key)


def _keys(kind: Any, *names: str) -> Iterator[Column[Any]]:
    """Yield the columns of a primary key, which begins with the session."""
    yield from _columns(SESSION_NAME, "session", primary_key=True)
    yield from _columns(kind, *names, primary_key=True)


PERIOD_MS: Final = 600_000
"""Length of a period. Sessions are sorted by the period of their last change, then by its time."""

SESSIONS: Final = Table(
    "sessions",
    METADATA,  # in the order of the fields of `SessionRow`
    *_keys(HASH_NAME),
    *_columns(Text, "tenant", "id"),
    *_columns(BigInteger, "created_at", "updated_at"),
    *_columns(HASH_NAME, "head"),
    *_columns(HASH_NAME, "instructions", nullable=True),
    *_columns(Text, "arrival", nullable=True),
    *_columns(Integer, "messages", "rounds"),
    *_columns(BigInteger, "tokens"),
    *_columns(Integer, "requests"),
    *_columns(BigInteger, "tokens_sent", "tokens_saved"),
    *_columns(Text, "model", nullable=True),
    *_columns(HASH_NAME, "tools", nullable=True),
    *_columns(Float, "scale", nullable=True),
    Column("hidden", Integer, nullable=False, server_default=text("0")),
    Column("summaries", Integer, nullable=False, server_default=text("0")),
    *_columns(Float, "cost", nullable=True),
    *_columns(Text, "calls", nullable=True),  # a JSON array of names; NULL if there are none
    Column("dialect", Text, nullable=False, server_default=text("'chat'")),
    # Indexed instead of `updated_at`: if one indexed value changes, PostgreSQL updates every index of the row.
    Column("period", BigInteger, Computed(f"updated_at / {PERIOD_MS}", persisted=True)),  # virtual in SQLite
    # (tenant, id, dialect) is unique, because `session` is computed from the three.
    Index(None, "id", "tenant"),
    Index(None, "tenant", "period"),
    Index(None, "period"),
)
"""One row for each session: its head, and the sums that a list of sessions shows."""

INSTRUCTIONS: Final = Table(
    "instructions",
    METADATA,
    *_keys(HASH_NAME, "version"),
    *_columns(PACKED_TEXT, "messages"),  # a JSON array of the messages' own texts
    *_columns(Integer, "tokens"),
    *_columns(BigInteger, "created_at"),
)
"""The versions of the instructions that lead requests. Append-only."""

BODIES: Final = Table(
    "bodies", METADATA, *_keys(HASH_NAME, "body"), *_columns(Integer, "tokens"), *_columns(PACKED_TEXT, "text")
)
"""The texts that clients send: messages (JSON objects) and `tools` (JSON arrays), once per session. Append-only."""


def session_place(session: ColumnElement[Any]) -> ColumnElement[int]:
    """Return a hash of a session's name for indexes of PostgreSQL, half as long as the name."""
    return _hash(session, literal_column("0"))


def content_place(content: ColumnElement[Any], session: ColumnElement[Any]) -> ColumnElement[int]:
    """Return the hash by which an index of PostgreSQL finds the nodes of a session with a content."""
    return _hash(content, session_place(session))


def _hash(name: ColumnElement[Any], seed: ColumnElement[Any]) -> ColumnElement[int]:
    """Return a 64-bit hash of some bytes. PostgreSQL before 18 can hash text only, so they are converted to digits."""
    return func.hashtextextended(func.encode(name, literal_column("'hex'")), seed, type_=BigInteger)


NODES: Final = Table(
    "nodes",
    METADATA,
    *_keys(HASH_NAME, "node"),
    *_columns(HASH_NAME, "parent", "body"),
    *_columns(Integer, "depth", "round", "tokens"),
    *_columns(BigInteger, "tokens_total", "created_at"),
    *_columns(Text, "source"),
    *_columns(Boolean, "partial"),
    *_columns(EXCHANGE_NAME, "exchange", nullable=True),
    *_columns(Text, "agent", "policy", nullable=True),
    *_columns(PACKED_TEXT, "arrival", nullable=True),  # changes, as `cuts` encodes them, at position 0
    *_columns(HASH_NAME, "content", nullable=True),  # `content_key` of the message
    # The tenant, if every assistant message up to this node came from upstream. Exports include it.
    *_columns(Text, "recorded", nullable=True),
    # The text of a reply, which is stored together with its node; NULL if the text is in `bodies`.
    *_columns(PACKED_TEXT, "text", nullable=True),
    Index(None, "session", "content").ddl_if(dialect="sqlite"),
)
"""The tree of messages. Append-only."""

Index("ix_nodes_content", content_place(NODES.c.content, NODES.c.session)).ddl_if(dialect="postgresql")

HIDDEN: Final = Table(
    "hidden",
    METADATA,
    *_keys(HASH_NAME, "node"),
    *_columns(PACKED_TEXT, "before", "after"),  # JSON arrays of the messages' own texts, as strings
    *_columns(PACKED_TEXT, "reply", nullable=True),  # the text of a message
    *_columns(EXCHANGE_NAME, "exchange", nullable=True),
    *_columns(Integer, "tokens"),
    *_columns(BigInteger, "created_at"),
)
"""The parts of replies that the client was not shown. Append-only."""

SUMMARIES: Final = Table(
    "summaries",
    METADATA,
    *_keys(ORDERED, "id"),
    *_columns(HASH_NAME, "node", "tip"),
    *_columns(ORDERED, "recipe", "status"),
    *_columns(ORDERED, "predecessor", nullable=True),
    *_columns(Integer, "until", "generation", "tokens", "covered_messages", "covered_tokens"),
    *_columns(Text, "reason", "model"),
    *_columns(PACKED_TEXT, "text", "state"),  # `state` and `usage` are JSON objects
    *_columns(PACKED_RECORD, "usage", nullable=True),
    *_columns(EXCHANGE_NAME, "exchange", nullable=True),
    *_columns(Boolean, "asked"),
    *_columns(Float, "cost", nullable=True),
    *_columns(BigInteger, "created_at"),
    Index(None, "session", "recipe", "status", "until", "created_at", "id"),
    Index(None, "session", "recipe", "created_at", "id"),
)
"""Summaries made by a model, and the attempts to make them. Append-only."""

LEASES: Final = Table(
    "leases", METADATA, *_keys(Text, "name"), *_columns(Text, "holder"), *_columns(BigInteger, "expires_at")
)
"""Leases on tasks that only one worker at a time may do for a session: the task, the holder, and the expiry."""

CUTS: Final = Table(
    "cuts",
    METADATA,
    *_keys(HASH_NAME, "node"),
    *_columns(Text, "policy", "agent", primary_key=True),  # `agent` is "" if none is named
    *_columns(Integer, "position", "tokens", "messages", "tool_calls"),
    *_columns(Text, "version"),
    # `changes` as `cuts` encodes them, packed. If `base` names a node, they are packed against the changes of its cut.
    *_columns(LargeBinary, "changes"),
    *_columns(HASH_NAME, "base", nullable=True),
    *_columns(EXCHANGE_NAME, "exchange", nullable=True),
    *_columns(BigInteger, "created_at"),
    Index(None, "session", "policy", "agent", "position", "node"),
)
"""The cuts: up to where, and how, views were trimmed. Rows never change."""


def _of_an_exchange() -> Iterator[Column[Any]]:
    yield from _keys(EXCHANGE_NAME, "id")
    yield from _columns(BigInteger, "created_at", "tokens_before", "tokens_sent")
    yield from _columns(BigInteger, "settled_at", nullable=True)
    yield from _columns(HASH_NAME, "base", "digest")
    yield from _columns(Text, "status", "kind", "model", "policy", "policy_version")
    yield from _columns(Text, "agent", nullable=True)
    yield from _columns(Boolean, "stream")
    yield from _columns(PACKED_RECEIPT, "parameters", "receipt")  # JSON objects
    yield from _columns(HASH_NAMES, "messages", "nodes", "replies")
    yield from _columns(HASH_NAME, "tools", "instructions", "cut_node", nullable=True)
    yield from _columns(HASH_NAME, "idempotency", nullable=True)  # hash of the client's key for this request
    # The texts of stored messages that this request sent back in another form: see `tree.encode_forms`.
    yield from _columns(LargeBinary, "forms", nullable=True)


REPEATABLE: Final = text("kind IN ('append', 'first') OR idempotency IS NOT NULL")
"""Condition of the index by digest, which detects repeated requests. A query must use the same SQL."""

EXCHANGES: Final = Table(
    "exchanges",
    METADATA,
    *_of_an_exchange(),
    Index(None, "id"),
    Index(None, "session", "digest", sqlite_where=REPEATABLE, postgresql_where=REPEATABLE),
)
"""Settled requests and how they ended. A row is inserted when its exchange ends, not earlier: PostgreSQL would store an
updated row twice, and update its indexes."""

PENDING: Final = Table("pending", METADATA, *_of_an_exchange(), sqlite_with_rowid=False)
"""Requests in progress: incomplete rows of `exchanges`."""

_COUNTS: Final[tuple[str, ...]] = tuple([figure.name for figure in fields(ExchangeFigures) if figure.type is int])
_AMOUNTS: Final[tuple[str, ...]] = tuple([figure.name for figure in fields(ExchangeFigures) if figure.type is float])
SUMS: Final = _COUNTS + _AMOUNTS
"""The columns of rollups that are summed; `records.ExchangeFigures` describes them."""


def _sums() -> Iterator[Column[Any]]:
    yield from _columns(BigInteger, *_COUNTS)
    yield from _columns(Float, *_AMOUNTS)


ROLLUPS: Final = Table(
    "rollups",
    METADATA,
    *_columns(BigInteger, "hour", primary_key=True),  # since 1970
    # Processes that add to the same row would wait for each other, so each usually has a row of its own.
    *_columns(Integer, "slot", primary_key=True),
    *_columns(Text, "tenant", "dialect", "model", "policy", "kind", "status", "miss", primary_key=True),
    *_sums(),
    sqlite_with_rowid=False,
)
"""Sums over settled exchanges, by hour. Not a table of a session: the sums stay when sessions are deleted."""

HAS_FAILED: Final = text("status IN ('failed', 'interrupted', 'partial') AND kind <> 'summary'")
"""Condition of the index of failed or interrupted requests (`records.FAILURES`). A query must use the same SQL."""

SESSION_ROLLUPS: Final = Table(
    "session_rollups",
    METADATA,
    *_keys(BigInteger, "hour"),
    *_columns(Text, "model", "policy", "kind", "status", primary_key=True),
    *_sums(),
    Index(None, "session", sqlite_where=HAS_FAILED, postgresql_where=HAS_FAILED),
    sqlite_with_rowid=False,
)
"""The same sums by session, for the cost and the number of sessions."""
PROVIDER_IDS: Final = Table(
    "provider_ids",
    METADATA,
    *_keys(BigInteger, "piece"),  # a number made of tenant, dialect and id
    *_columns(HASH_NAME, "node"),
    Index(None, "piece"),
    sqlite_with_rowid=False,
)
"""Ids of responses and items that a provider keeps, each with the node of the reply, or "" if it has no node."""
EVIDENCE: Final = Table(
    "evidence",
    METADATA,
    *_keys(BigInteger, "piece"),
    Index(None, "piece").ddl_if(dialect="sqlite"),
    Index(None, "session").ddl_if(dialect="postgresql"),
    sqlite_with_rowid=False,
)
"""Evidence that identifies a reply when a client without a session id sends it back; see `conversation.evidence`.

On PostgreSQL the table has no primary key but two smaller indexes, so an insert must check whether the row exists.
"""
Index("ix_evidence_piece_session", EVIDENCE.c.piece, session_place(EVIDENCE.c.session)).ddl_if(dialect="postgresql")

KEY_COSTS: Final = Table(
    "key_costs",
    METADATA,
    *_columns(Text, "tenant", "name", primary_key=True),
    *_columns(BigInteger, "day", primary_key=True),  # since 1970
    *_columns(Float, "dollars"),
    sqlite_with_rowid=False,
)
"""Dollars spent by day with each named key that has a budget. Not a table of a session."""

SECRETS: Final = Table("secrets", METADATA, *_columns(Text, "name", primary_key=True), *_columns(Text, "value"))
"""Secrets that all workers share, in hexadecimal digits. Not a table of a session."""

OF_A_SESSION: Final = (
    *(table for table in METADATA.tables.values() if "session" in table.c and table is not SESSIONS),
    SESSIONS,
)
"""Every table with rows of a session, `sessions` last."""


def matching(table: FromClause, *names: str) -> list[ColumnElement[bool]]:
    """Return the conditions of a WHERE: the session is `key`, and each named column equals its parameter."""
    asked = [table.c[name] == bindparam(name, type_=table.c[name].type) for name in names]
    return [table.c.session == bindparam("key"), *asked]


def insert_new(connection: StoreConnection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert `rows`. Rows whose primary key exists already are left unchanged."""
    if rows:
        # Passing a single row by itself is faster than a sequence of one.
        connection.execute(_insert_new(connection.dialect.name, table), rows[0] if len(rows) == 1 else rows)


def insert_many_new(connection: StoreConnection, table: Table, rows: Sequence[dict[str, Any]]) -> None:
    """Insert hundreds of rows as `insert_new` does. On PostgreSQL, one array per column takes a third of the time."""
    if connection.dialect.name != "postgresql" or not rows:
        insert_new(connection, table, rows)
        return
    statement, encoders = _insert_arrays(table, tuple(rows[0]))
    values = {name: [row[name] for row in rows] for name in rows[0]}
    for name, encode in encoders.items():
        values[name] = [None if value is None else encode(value) for value in values[name]]
    connection.execute(statement, values)


@cache
def _insert_arrays(table: Table, names: tuple[str, ...]) -> tuple[postgresql.Insert, dict[str, Callable[[str], bytes]]]:
    """Return an INSERT from one array for each of these columns, and the encoders of the columns' values."""
    columns = [table.c[name] for name in names]
    encoders = {each.name: encode for each in columns if (encode := encoder_of(each.type)) is not None}
    kinds = [LargeBinary() if each.name in encoders else each.type for each in columns]
    arrays = [bindparam(each.name, type_=ARRAY(kind)) for each, kind in zip(columns, kinds, strict=True)]
    new = func.unnest(*arrays).table_valued(*names, name="new").render_derived()
    return postgresql.insert(table).from_select(names, select(*new.c)).on_conflict_do_nothing(), encoders


def put(connection: StoreConnection, table: Table, rows: Sequence[dict[str, Any]], *, adds: bool = False) -> None:
    """Insert `rows`. If a primary key exists already, replace the other values of its row, or add to them (`adds`)."""
    if rows:
        connection.execute(_put(connection.dialect.name, table, adds), rows[0] if len(rows) == 1 else rows)


def insert_into(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return the dialect's own INSERT, which supports ON CONFLICT."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


@cache
def _insert_new(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    # Cached, because building a statement costs more than executing it.
    return insert_into(dialect, table).on_conflict_do_nothing()


@cache
def _put(dialect: str, table: Table, adds: bool) -> postgresql.Insert | sqlite.Insert:
    insert = insert_into(dialect, table)
    new = insert.excluded
    values = {each.name: each + new[each.name] if adds else new[each.name] for each in table.c if not each.primary_key}
    return insert.on_conflict_do_update(index_elements=list(table.primary_key), set_=values)

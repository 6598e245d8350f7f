"""Moves sessions from the tables of the old layout, which held plain text, into those of this version.

Migration 13 puts the old tables aside, as `old_…`. A session is moved in one transaction: copied, compared by its
export, and deleted from the old tables. So whoever is killed goes on at the next start, and any number of processes may
do it at once. Migration 14 drops the old tables.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final, cast

import orjson
from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Connection,
    Float,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    delete,
    func,
    select,
    tuple_,
)
from sqlalchemy.types import TypeEngine

from proxy.conversation import ROOT
from proxy.errors import StoreUnavailable
from proxy.store.cuts import changes_of, pack_changes
from proxy.store.database import Rows, StoreConnection
from proxy.store.packing import (
    EXCHANGE_NAME,
    HASH_NAME,
    HASH_NAMES,
    PACKED_RECORD,
    PACKED_TEXT,
    SESSION_NAME,
    TEXTS,
    StoredAsBytes,
    is_against,
    pack,
    pack_against,
    unpack,
)
from proxy.store.records import Status
from proxy.store.schema import METADATA, ORDERED, insert_new

# ------------------------------------------------------------------------------------- the tables of migration 13

_SUMS: Final = (
    *("requests", "tokens_before", "tokens_sent", "tokens_input", "tokens_cached", "tokens_written", "tokens_output"),
    *("tokens_missed", "tokens_unique", "trims", "edits", "warnings", "recalls", "summaries", "priced"),
)
_AMOUNTS: Final = (
    *("cost", "cost_saved", "cost_cache_saved", "cost_missed", "cost_recalls", "cost_summaries"),
    *("added_ms", "upstream_ms"),
)


def _columns(kind: Any, *names: str, nullable: bool = False, primary_key: bool = False) -> list[Column[Any]]:
    return [Column(name, kind, nullable=nullable, primary_key=primary_key) for name in names]


def _keys(kind: Any, *names: str) -> list[Column[Any]]:
    return _columns(SESSION_NAME, "session", primary_key=True) + _columns(kind, *names, primary_key=True)


def _of_an_exchange() -> list[Column[Any]]:
    return [
        *_keys(EXCHANGE_NAME, "id"),
        *_columns(BigInteger, "created_at", "tokens_before", "tokens_sent"),
        *_columns(BigInteger, "settled_at", nullable=True),
        *_columns(HASH_NAME, "base", "digest"),
        *_columns(Text, "status", "kind", "model", "policy", "policy_version"),
        *_columns(Text, "agent", nullable=True),
        *_columns(Boolean, "stream"),
        *_columns(PACKED_RECORD, "parameters", "receipt"),
        *_columns(HASH_NAMES, "messages", "nodes", "replies"),
        *_columns(HASH_NAME, "tools", "instructions", "cut_node", "idempotency", nullable=True),
    ]


_COMPACT: Final = MetaData(naming_convention=METADATA.naming_convention)
_SESSIONS: Final = Table(
    "sessions",
    _COMPACT,
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
    *_columns(Integer, "hidden", "summaries"),
    *_columns(Float, "cost", nullable=True),
    *_columns(Text, "calls", nullable=True),
    *_columns(Text, "dialect"),
)
_SESSION_ROLLUPS: Final = Table(
    "session_rollups",
    _COMPACT,
    *_keys(BigInteger, "hour"),
    *_columns(Text, "model", "policy", "kind", "status", primary_key=True),
    *_columns(BigInteger, *_SUMS),
    *_columns(Float, *_AMOUNTS),
)
_INSTRUCTIONS: Final = Table(
    "instructions",
    _COMPACT,
    *_keys(HASH_NAME, "version"),
    *_columns(PACKED_TEXT, "messages"),
    *_columns(Integer, "tokens"),
    *_columns(BigInteger, "created_at"),
)
_BODIES: Final = Table(
    "bodies", _COMPACT, *_keys(HASH_NAME, "body"), *_columns(Integer, "tokens"), *_columns(PACKED_TEXT, "text")
)
_NODES: Final = Table(
    "nodes",
    _COMPACT,
    *_keys(HASH_NAME, "node"),
    *_columns(HASH_NAME, "parent", "body"),
    *_columns(Integer, "depth", "round", "tokens"),
    *_columns(BigInteger, "tokens_total", "created_at"),
    *_columns(Text, "source"),
    *_columns(Boolean, "partial"),
    *_columns(EXCHANGE_NAME, "exchange", nullable=True),
    *_columns(Text, "agent", "policy", nullable=True),
    *_columns(PACKED_TEXT, "arrival", nullable=True),
    *_columns(HASH_NAME, "content", nullable=True),
    *_columns(Text, "recorded", nullable=True),
)
_EXCHANGES: Final = Table("exchanges", _COMPACT, *_of_an_exchange())
_EVIDENCE: Final = Table("evidence", _COMPACT, *_keys(BigInteger, "piece"))
_PENDING: Final = Table("pending", _COMPACT, *_of_an_exchange())
_CUTS: Final = Table(
    "cuts",
    _COMPACT,
    *_keys(HASH_NAME, "node"),
    *_columns(Text, "policy", "agent", primary_key=True),
    *_columns(Integer, "position", "tokens", "messages", "tool_calls"),
    *_columns(Text, "version"),
    *_columns(LargeBinary, "changes"),
    *_columns(HASH_NAME, "base", nullable=True),
    *_columns(EXCHANGE_NAME, "exchange", nullable=True),
    *_columns(BigInteger, "created_at"),
)
_PROVIDER_IDS: Final = Table("provider_ids", _COMPACT, *_keys(BigInteger, "piece"), *_columns(HASH_NAME, "node"))
_FORMS: Final = Table(
    "forms",
    _COMPACT,
    *_keys(HASH_NAME, "node", "body"),
    *_columns(EXCHANGE_NAME, "exchange"),
    *_columns(LargeBinary, "text"),
)
_HIDDEN: Final = Table(
    "hidden",
    _COMPACT,
    *_keys(HASH_NAME, "node"),
    *_columns(PACKED_TEXT, "before", "after"),
    *_columns(PACKED_TEXT, "reply", nullable=True),
    *_columns(EXCHANGE_NAME, "exchange", nullable=True),
    *_columns(Integer, "tokens"),
    *_columns(BigInteger, "created_at"),
)
_SUMMARIES: Final = Table(
    "summaries",
    _COMPACT,
    *_keys(ORDERED, "id"),
    *_columns(HASH_NAME, "node", "tip"),
    *_columns(ORDERED, "recipe", "status"),
    *_columns(ORDERED, "predecessor", nullable=True),
    *_columns(Integer, "until", "generation", "tokens", "covered_messages", "covered_tokens"),
    *_columns(Text, "reason", "model"),
    *_columns(PACKED_TEXT, "text", "state"),
    *_columns(PACKED_RECORD, "usage", nullable=True),
    *_columns(EXCHANGE_NAME, "exchange", nullable=True),
    *_columns(Boolean, "asked"),
    *_columns(Float, "cost", nullable=True),
    *_columns(BigInteger, "created_at"),
)
_LEASES: Final = Table(
    "leases", _COMPACT, *_keys(Text, "name"), *_columns(Text, "holder"), *_columns(BigInteger, "expires_at")
)
_TABLES: Final = tuple(_COMPACT.tables.values())
"""Every table that a session has rows in, its own row first."""

OLD_TABLES: Final = tuple(table.name for table in _TABLES)
_SINCE: Final = {
    "cuts": {"base"},
    "forms": {"text"},
    "pending": {column.name for column in _PENDING.columns} - {"session", "id"},
}
"""Columns that the old tables do not have."""
_ARRAYS: Final = frozenset({column.name for column in _EXCHANGES.columns if column.type is HASH_NAMES})
_AT_ONCE: Final = 500  # rows of one reading
_CHANGED: Final = frozenset({_BODIES, _CUTS, _EXCHANGES, _FORMS, _PENDING})
_COPIED_AS_IT_IS: Final = tuple(table for table in _TABLES if table not in _CHANGED)


def _old_type(kind: TypeEngine[Any], *, is_key: bool) -> TypeEngine[Any]:
    if not isinstance(kind, StoredAsBytes | LargeBinary):
        return kind
    return ORDERED if is_key else Text()


def _old_tables() -> dict[str, Table]:
    """Return the old tables by the names of the new ones."""
    aside = MetaData(naming_convention=METADATA.naming_convention)
    tables: dict[str, Table] = {}
    for table in _TABLES:
        columns = [
            Column(
                column.name,
                _old_type(column.type, is_key=column.primary_key),
                nullable=column.nullable,
                primary_key=column.primary_key,
            )
            for column in table.columns
            if column.name not in _SINCE.get(table.name, ())
        ]
        tables[table.name] = Table(f"old_{table.name}", aside, *columns)
    return tables


_OLD: Final = _old_tables()
_LEFT: Final = select(func.count()).select_from(_OLD["sessions"])
_NEXT: Final = select(_OLD["sessions"].c.session).order_by(_OLD["sessions"].c.session).limit(1)


# ----------------------------------------------------------------------------------------------------- forward


def left(connection: StoreConnection | Connection) -> int:
    """Return how many sessions are still in the old tables."""
    return int(connection.execute(_LEFT).scalar_one_or_none() or 0)


def convert_some(connection: StoreConnection, seconds: float) -> int:
    """Move sessions for about so long, at least one if there is one; return how many."""
    deadline, count = time.monotonic() + seconds, 0
    while count == 0 or time.monotonic() < deadline:
        key: str | None = connection.execute(_NEXT).scalar_one_or_none()
        if key is None:
            break
        _convert(connection, key)
        count += 1
    return count


def _convert(connection: StoreConnection, key: str) -> None:
    """Move a session; raises `StoreUnavailable`, and changes nothing, where the copy would differ."""
    for table in _COPIED_AS_IT_IS:
        for rows in _pages(connection, _OLD[table.name], key):
            insert_new(connection, table, rows)
    for rows in _pages(connection, _OLD["exchanges"], key):
        insert_new(connection, _PENDING, [row for row in rows if row["status"] == Status.PENDING.value])
        insert_new(connection, _EXCHANGES, [row for row in rows if row["status"] != Status.PENDING.value])
    _convert_texts(connection, key)
    _convert_cuts(connection, key)
    before, after = _digests(_old_records(connection, key)), _digests(_records(connection, key))
    if before != after:
        kinds = ", ".join(sorted(kind for kind in before | after if before.get(kind) != after.get(kind)))
        raise StoreUnavailable(
            f"The store cannot be migrated: the copy of session {key} differs in its records of kind {kinds}. "
            "Nothing of it was changed: keep the file, and report this."
        )
    for table in reversed(_TABLES):
        old = _OLD[table.name]
        connection.execute(delete(old).where(old.c.session == key))


def _convert_texts(connection: StoreConnection, key: str) -> None:
    """Move texts; those that stand for stored messages in another form go to their forms."""
    named: set[str] = set()
    bodies: dict[str, str] = {}  # of nodes
    for rows in _pages(connection, _OLD["nodes"], key):
        bodies |= {row["node"]: row["body"] for row in rows}
    named |= set(bodies.values())
    for rows in _pages(connection, _OLD["exchanges"], key):
        for row in rows:
            named |= {row["tools"], *orjson.loads(row["messages"])}
    old_bodies, text = _OLD["bodies"], _OLD["bodies"].c.text
    formed: set[str] = set()
    for rows in _pages(connection, _OLD["forms"], key):
        wanted = [row["body"] for row in rows] + [bodies[row["node"]] for row in rows if row["node"] in bodies]
        found = select(old_bodies.c.body, text).where(old_bodies.c.session == key, old_bodies.c.body.in_(wanted))
        texts: dict[str, str] = {row.body: row.text for row in connection.execute(found)}
        for row in rows:
            said, form = texts.get(bodies.get(row["node"], "")), texts[row["body"]]
            row["text"] = pack(form, TEXTS) if said is None else pack_against(said, form, TEXTS)
            formed.add(row["body"])
        insert_new(connection, _FORMS, rows)
    for rows in _pages(connection, old_bodies, key):
        kept = [row for row in rows if row["tokens"] or row["body"] in named or row["body"] not in formed]
        insert_new(connection, _BODIES, kept)


def _convert_cuts(connection: StoreConnection, key: str) -> None:
    """Move cuts, each as what differs from the one before it on its branch."""
    old = _OLD["cuts"]
    places = select(old.c.node, old.c.policy, old.c.agent).where(old.c.session == key)
    cuts = [tuple(row) for row in connection.execute(places.order_by(old.c.position, old.c.node))]
    parents: dict[str, str] = {}
    if cuts:
        for rows in _pages(connection, _OLD["nodes"], key):
            parents |= {row["node"]: row["parent"] for row in rows}
    moved: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for node, policy, agent in cuts:
        there, before = moved[policy, agent], parents.get(node, ROOT)
        while before != ROOT and before not in there:
            before = parents.get(before, ROOT)
        found = select(old).where(old.c.session == key, old.c.node == node)
        found = found.where(old.c.policy == policy, old.c.agent == agent)
        (row,) = [each._asdict() for each in connection.execute(found)]
        packed, base = pack_changes(connection, key, policy, agent, row["changes"], before or None)
        insert_new(connection, _CUTS, [_plain(row) | {"changes": packed, "base": base}])
        there.add(node)


def _pages(connection: StoreConnection | Connection, table: Table, key: str) -> Iterator[list[dict[str, Any]]]:
    """Give the rows of a session, some at a time."""
    order = list(table.primary_key.columns)
    found, after = select(table).where(table.c.session == key).order_by(*order).limit(_AT_ONCE), None
    while True:
        page = found if after is None else found.where(tuple_(*order) > after)
        read: Rows = cast("StoreConnection", connection).execute(page)
        rows = [_plain(row._asdict()) for row in read]
        if rows:
            yield rows
        if len(rows) < _AT_ONCE:
            return
        after = tuple(rows[-1][column.name] for column in order)


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in row.items()}


# ------------------------------------------------------------------------------------------------ what is compared


def _old_records(connection: StoreConnection, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the old rows of a session, each with the name of its table."""
    for name, table in _OLD.items():
        for rows in _pages(connection, table, key) if name != "pending" else ():  # all are among the exchanges
            for row in rows:
                yield name, row


def _records(connection: StoreConnection, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give the same of the new ones."""
    for table in _TABLES:
        for rows in _pages(connection, table, key):
            for row in rows:
                if table is _CUTS:
                    _unpack_cut(connection, key, row)
                elif table is _FORMS:
                    text = _form_text(connection, key, row)
                    if not _has_body(connection, _BODIES, row):
                        yield "bodies", {"session": key, "body": row["body"], "tokens": 0, "text": text}
                    del row["text"]
                yield "exchanges" if table is _PENDING else table.name, row


def _digests(records: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, list[bytes]]:
    """Return what tells records apart, by kind and in no order."""
    found: defaultdict[str, set[bytes]] = defaultdict(set)
    for kind, row in records:
        arrays = _ARRAYS if kind == "exchanges" else ()
        told = {name: orjson.loads(value) if name in arrays else value for name, value in row.items()}
        text = orjson.dumps(told, option=orjson.OPT_SORT_KEYS)
        found[kind].add(blake2b(text, digest_size=16).digest())
    return {kind: sorted(digests) for kind, digests in found.items()}


# -------------------------------------------------------------------------------------------------------- back


def make_old_tables(connection: Connection) -> None:
    """Make the old tables, without rows."""
    for table in _OLD.values():
        table.create(connection)


def copy_back(connection: Connection) -> None:
    """Copy every session into the old tables."""
    made: Callable[..., Any] = connection.execute
    keys = [row.session for row in connection.execute(select(_SESSIONS.c.session))]
    for key in keys:
        for table in _TABLES:
            old = _OLD[table.name]
            for rows in _pages(connection, table, key):
                if table is _CUTS:
                    for row in rows:
                        _unpack_cut(connection, key, row)
                elif table is _FORMS:
                    _give_back_texts(connection, key, rows)
                elif table is _PENDING and rows:
                    made(_OLD["exchanges"].insert(), rows)
                    rows = [{name: row[name] for name in ("session", "id")} for row in rows]  # noqa: PLW2901
                if rows:
                    made(old.insert(), rows)


def _unpack_cut(connection: StoreConnection | Connection, key: str, row: dict[str, Any]) -> None:
    found = select(_CUTS).where(_CUTS.c.session == key, _CUTS.c.node == row["node"])
    found = found.where(_CUTS.c.policy == row["policy"], _CUTS.c.agent == row["agent"])
    reading = cast("StoreConnection", connection)
    row["changes"] = changes_of(reading, key, reading.execute(found).one_or_none())
    del row["base"]


def _give_back_texts(connection: Connection, key: str, rows: list[dict[str, Any]]) -> None:
    old, reading = _OLD["bodies"], cast("StoreConnection", connection)
    for row in rows:
        if not _has_body(reading, old, row):
            text = _form_text(reading, key, row)
            reading.execute(old.insert(), [{"session": key, "body": row["body"], "tokens": 0, "text": text}])
        del row["text"]


def _has_body(connection: StoreConnection, bodies: Table, row: Mapping[str, Any]) -> bool:
    found = select(bodies.c.body).where(bodies.c.session == row["session"], bodies.c.body == row["body"])
    return connection.execute(found).one_or_none() is not None


def _form_text(connection: StoreConnection, key: str, row: Mapping[str, Any]) -> str:
    said: str | None = None
    if is_against(row["text"]):
        found = select(_BODIES.c.text).join(
            _NODES, (_NODES.c.session == _BODIES.c.session) & (_NODES.c.body == _BODIES.c.body)
        )
        found = found.where(_NODES.c.session == key, _NODES.c.node == row["node"])
        said = connection.execute(found).scalar_one_or_none()
    return unpack(row["text"], said)

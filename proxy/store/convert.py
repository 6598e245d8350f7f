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
from sqlalchemy import Column, Connection, LargeBinary, MetaData, Table, Text, delete, func, select, tuple_
from sqlalchemy.types import TypeEngine

from proxy.conversation import ROOT
from proxy.errors import StoreUnavailable
from proxy.store import archive
from proxy.store.cuts import changes_of, pack_changes
from proxy.store.database import Rows, StoreConnection
from proxy.store.packing import TEXTS, StoredAsBytes, pack, pack_against
from proxy.store.records import Status
from proxy.store.schema import (
    BODIES,
    CUTS,
    EXCHANGES,
    FORMS,
    METADATA,
    OF_A_SESSION,
    ORDERED,
    PENDING,
    SESSIONS,
    insert_new,
)
from proxy.store.tree import form_text

OLD_TABLES: Final = tuple(table.name for table in reversed(OF_A_SESSION))
_SINCE: Final = {
    "cuts": {"base"},
    "forms": {"text"},
    "pending": {column.name for column in PENDING.columns} - {"session", "id"},
}
"""Columns that the old tables do not have."""
_AT_ONCE: Final = 500  # rows of one reading
_CHANGED: Final = frozenset({BODIES, CUTS, EXCHANGES, FORMS, PENDING})
_COPIED_AS_IT_IS: Final = tuple(table for table in reversed(OF_A_SESSION) if table not in _CHANGED)


def _old_type(kind: TypeEngine[Any], *, is_key: bool) -> TypeEngine[Any]:
    if not isinstance(kind, StoredAsBytes | LargeBinary):
        return kind
    return ORDERED if is_key else Text()


def _old_tables() -> dict[str, Table]:
    """Return the old tables by the names of the new ones."""
    aside = MetaData(naming_convention=METADATA.naming_convention)
    tables: dict[str, Table] = {}
    for table in reversed(OF_A_SESSION):
        columns = [
            Column(
                column.name,
                _old_type(column.type, is_key=column.primary_key),
                nullable=column.nullable,
                primary_key=column.primary_key,
            )
            for column in table.columns
            if column.name not in _SINCE.get(table.name, ()) and column.computed is None
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
        insert_new(connection, PENDING, [row for row in rows if row["status"] == Status.PENDING.value])
        insert_new(connection, EXCHANGES, [row for row in rows if row["status"] != Status.PENDING.value])
    _convert_texts(connection, key)
    _convert_cuts(connection, key)
    before, after = _digests(_old_records(connection, key)), _digests(_records(connection, key))
    if before != after:
        kinds = ", ".join(sorted(kind for kind in before | after if before.get(kind) != after.get(kind)))
        raise StoreUnavailable(
            f"The store cannot be migrated: the copy of session {key} differs in its records of kind {kinds}. "
            "Nothing of it was changed: keep the file, and report this."
        )
    for table in OF_A_SESSION:
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
        insert_new(connection, FORMS, rows)
    for rows in _pages(connection, old_bodies, key):
        kept = [row for row in rows if row["tokens"] or row["body"] in named or row["body"] not in formed]
        insert_new(connection, BODIES, kept)


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
        insert_new(connection, CUTS, [_plain(row) | {"changes": packed, "base": base}])
        there.add(node)


def _pages(connection: StoreConnection | Connection, table: Table, key: str) -> Iterator[list[dict[str, Any]]]:
    """Give the rows of a session, some at a time."""
    order = list(table.primary_key.columns)
    columns = [column for column in table.columns if column.computed is None]
    found, after = select(*columns).where(table.c.session == key).order_by(*order).limit(_AT_ONCE), None
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


def _old_records(connection: StoreConnection, key: str) -> Iterator[dict[str, Any]]:
    """Give what an export of the session had, and its rows that no export has."""
    yield from _rest(connection, _OLD, key)
    for kind in archive.KINDS:
        for rows in _pages(connection, _OLD[kind.table.name], key):
            for row in rows:
                if kind.only is None or row["status"] == archive.READY:
                    del row["session"]
                    yield archive.record_of(kind, row)


def _records(connection: StoreConnection, key: str) -> Iterator[dict[str, Any]]:
    yield from _rest(connection, METADATA.tables, key)
    for kind in archive.KINDS:
        after: tuple[Any, ...] | None = None
        while records := archive.page(connection, key, kind, after):
            yield from records
            after = tuple(records[-1][column] for column in kind.order)


def _rest(connection: StoreConnection, tables: Mapping[str, Table], key: str) -> Iterator[dict[str, Any]]:
    for name in ("sessions", "leases", "summaries", "evidence", "provider_ids", "session_rollups"):
        for rows in _pages(connection, tables[name], key):
            for row in rows:
                yield row | {"record": name}


def _digests(records: Iterable[Mapping[str, Any]]) -> dict[str, list[bytes]]:
    """Return what tells records apart, by kind and in no order."""
    found: defaultdict[str, list[bytes]] = defaultdict(list)
    for record in records:
        text = orjson.dumps(record, option=orjson.OPT_SORT_KEYS)
        found[record["record"]].append(blake2b(text, digest_size=16).digest())
    return {kind: sorted(digests) for kind, digests in found.items()}


# -------------------------------------------------------------------------------------------------------- back


def make_old_tables(connection: Connection) -> None:
    """Make the old tables, without rows."""
    for table in _OLD.values():
        table.create(connection)


def copy_back(connection: Connection) -> None:
    """Copy every session into the old tables."""
    made: Callable[..., Any] = connection.execute
    keys = [row.session for row in connection.execute(select(SESSIONS.c.session))]
    for key in keys:
        for table in reversed(OF_A_SESSION):
            old = _OLD[table.name]
            for rows in _pages(connection, table, key):
                if table is CUTS:
                    _unpack_cuts(connection, key, rows)
                elif table is FORMS:
                    _give_back_texts(connection, key, rows)
                elif table is PENDING and rows:
                    made(_OLD["exchanges"].insert(), rows)
                    rows = [{name: row[name] for name in ("session", "id")} for row in rows]  # noqa: PLW2901
                if rows:
                    made(old.insert(), rows)


def _unpack_cuts(connection: Any, key: str, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        found = select(CUTS).where(CUTS.c.session == key, CUTS.c.node == row["node"])
        found = found.where(CUTS.c.policy == row["policy"], CUTS.c.agent == row["agent"])
        row["changes"] = changes_of(connection, key, connection.execute(found).one_or_none())
        del row["base"]


def _give_back_texts(connection: Any, key: str, rows: list[dict[str, Any]]) -> None:
    old = _OLD["bodies"]
    for row in rows:
        there = select(old.c.body).where(old.c.session == key, old.c.body == row["body"])
        form = connection.execute(
            select(FORMS).where(FORMS.c.session == key, FORMS.c.node == row["node"], FORMS.c.body == row["body"])
        ).one_or_none()
        if connection.execute(there).one_or_none() is None:
            body = {"session": key, "body": row["body"], "tokens": 0, "text": form_text(connection, key, form)}
            connection.execute(old.insert(), [body])
        del row["text"]

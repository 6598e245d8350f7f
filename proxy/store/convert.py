"""Moves sessions from the tables of the old layout, which held plain text, to those of the current layout.

Migration 13 renames the old tables to `old_…`. Each session is moved in one transaction: it is copied, the copy is
compared with the original, and the original is deleted. A conversion that was interrupted therefore continues at the
next start, and any number of processes may convert at the same time. Migration 14 drops the old tables.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Any, Final, cast

import orjson
from sqlalchemy import (
    Column,
    Connection,
    Inspector,
    LargeBinary,
    MetaData,
    Table,
    Text,
    delete,
    event,
    select,
    text,
    tuple_,
)

from proxy.conversation import ROOT
from proxy.errors import StoreUnavailable
from proxy.store.cuts import changes_of, pack_changes
from proxy.store.database import Rows, StoreConnection
from proxy.store.packing import (
    EXCHANGE_NAME,
    HASH_NAME,
    HASH_NAMES,
    SESSION_NAME,
    TEXTS,
    StoredAsBytes,
    is_against,
    pack,
    pack_against,
    unpack,
)
from proxy.store.records import Status
from proxy.store.schema import METADATA, ORDERED, insert_into

# ------------------------------------------------------------------------------------- the tables of migration 13

OLD_TABLES: Final = (
    *("sessions", "session_rollups", "instructions", "bodies", "nodes", "exchanges", "evidence", "pending", "cuts"),
    *("provider_ids", "forms", "hidden", "summaries", "leases"),
)
"""Every table with rows of a session, `sessions` first."""
_SINCE: Final = {"cuts": {"base"}, "forms": {"text"}}
"""Columns that the old tables do not have. The old `pending` has only the columns in `_NAMES_ALONE`."""
_NAMES_ALONE: Final = ("session", "id")
_FORMS: Final = {"session": SESSION_NAME, "node": HASH_NAME, "body": HASH_NAME, "exchange": EXCHANGE_NAME}
"""The packed columns of `forms`, which a later migration drops. Those of the other tables are as in `schema`."""
_ARRAYS: Final = frozenset(each.name for each in METADATA.tables["exchanges"].columns if each.type is HASH_NAMES)
_CHANGED: Final = frozenset({"bodies", "cuts", "exchanges", "forms", "pending"})
_AT_ONCE: Final = 500  # rows of one read
_LEFT: Final = text("SELECT count(*) FROM old_sessions")
_NEXT: Final = text("SELECT session FROM old_sessions ORDER BY session LIMIT 1")


def _reflected(connection: StoreConnection | Connection, names: Iterable[str]) -> dict[str, Table]:
    """Reflect tables from the database. Packed columns of the new layout get their types."""
    found = MetaData()

    @event.listens_for(found, "column_reflect")
    def _type(_: Inspector, table: Table, column: Any) -> None:  # pyright: ignore[reportUnusedFunction]  # the event calls it
        known = METADATA.tables.get(table.name)
        types = _FORMS if table.name == "forms" else {} if known is None else {each.name: each.type for each in known.c}
        if isinstance(kind := types.get(column["name"]), StoredAsBytes):
            column["type"] = kind

    found.reflect(cast("Connection", connection), only=list(names))
    return dict(found.tables)


# ----------------------------------------------------------------------------------------------------- forward


def left(connection: StoreConnection | Connection) -> int:
    """Return how many sessions are still in the old tables."""
    return int(connection.execute(_LEFT).scalar_one_or_none() or 0)


def convert_some(connection: StoreConnection, seconds: float) -> int:
    """Move sessions for about `seconds`, but at least one if any is left; return how many."""
    deadline, count = time.monotonic() + seconds, 0
    layouts = _Layouts(connection)
    while count == 0 or time.monotonic() < deadline:
        key: str | None = connection.execute(_NEXT).scalar_one_or_none()
        if key is None:
            break
        layouts.convert(key)
        count += 1
    return count


class _Layouts:
    """The tables of both layouts, by their names in the new one."""

    def __init__(self, connection: StoreConnection | Connection) -> None:
        self._connection = cast("StoreConnection", connection)
        self._new = _reflected(connection, OLD_TABLES)
        aside = _reflected(connection, [f"old_{name}" for name in OLD_TABLES])
        self._old = {name: aside[f"old_{name}"] for name in OLD_TABLES}

    def convert(self, key: str) -> None:
        """Move a session. If the copy differs, raise `StoreUnavailable`; the transaction must then be rolled back."""
        for name in OLD_TABLES:
            for rows in () if name in _CHANGED else self._pages(self._old[name], key):
                self._insert(name, rows)
        for rows in self._pages(self._old["exchanges"], key):
            self._insert("pending", [row for row in rows if row["status"] == Status.PENDING.value])
            self._insert("exchanges", [row for row in rows if row["status"] != Status.PENDING.value])
        self._convert_texts(key)
        self._convert_cuts(key)
        before, after = _digests(self._old_records(key)), _digests(self._records(key))
        if before != after:
            kinds = ", ".join(sorted(kind for kind in before | after if before.get(kind) != after.get(kind)))
            raise StoreUnavailable(
                f"The store cannot be migrated: the copy of session {key} differs in its records of kind {kinds}. "
                "Nothing of it was changed: keep the file, and report this."
            )
        for name in reversed(OLD_TABLES):
            old = self._old[name]
            self._connection.execute(delete(old).where(old.c.session == key))

    def copy_back(self) -> None:
        """Copy every session into the old tables."""
        for key in list(self._connection.execute(select(self._new["sessions"].c.session)).scalars()):
            for name in OLD_TABLES:
                for rows in self._pages(self._new[name], key):
                    if name == "cuts":
                        for row in rows:
                            self._unpack_cut(key, row)
                    elif name == "forms":
                        self._give_back_texts(key, rows)
                    elif name == "pending":
                        self._connection.execute(self._old["exchanges"].insert(), rows)
                        rows = [{column: row[column] for column in _NAMES_ALONE} for row in rows]  # noqa: PLW2901
                    self._connection.execute(self._old[name].insert(), rows)

    def _insert(self, name: str, rows: list[dict[str, Any]]) -> None:
        if rows:
            made = insert_into(self._connection.dialect.name, self._new[name]).on_conflict_do_nothing()
            self._connection.execute(made, rows)

    def _convert_texts(self, key: str) -> None:
        """Move texts. A text that is another form of a stored message goes to `forms`."""
        bodies: dict[str, str] = {}  # body name by node
        for rows in self._pages(self._old["nodes"], key):
            bodies |= {row["node"]: row["body"] for row in rows}
        named: set[str] = set(bodies.values())
        for rows in self._pages(self._old["exchanges"], key):
            for row in rows:
                named |= {row["tools"], *orjson.loads(row["messages"])}
        old = self._old["bodies"].c
        formed: set[str] = set()
        for rows in self._pages(self._old["forms"], key):
            wanted = [row["body"] for row in rows] + [bodies[row["node"]] for row in rows if row["node"] in bodies]
            found = select(old.body, old.text).where(old.session == key, old.body.in_(wanted))
            texts: dict[str, str] = {row.body: row.text for row in self._connection.execute(found)}
            for row in rows:
                said, form = texts.get(bodies.get(row["node"], "")), texts[row["body"]]
                row["text"] = pack(form, TEXTS) if said is None else pack_against(said, form, TEXTS)
                formed.add(row["body"])
            self._insert("forms", rows)
        for rows in self._pages(self._old["bodies"], key):
            self._insert(
                "bodies", [row for row in rows if row["tokens"] or row["body"] in named or row["body"] not in formed]
            )

    def _convert_cuts(self, key: str) -> None:
        """Move cuts. Each is stored as the difference from the previous one on its branch."""
        old = self._old["cuts"].c
        places = select(old.node, old.policy, old.agent).where(old.session == key)
        cuts = [tuple(row) for row in self._connection.execute(places.order_by(old.position, old.node))]
        parents: dict[str, str] = {}
        for rows in self._pages(self._old["nodes"], key) if cuts else ():
            parents |= {row["node"]: row["parent"] for row in rows}
        moved: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
        for node, policy, agent in cuts:
            there, before = moved[policy, agent], parents.get(node, ROOT)
            while before != ROOT and before not in there:
                before = parents.get(before, ROOT)
            row = _plain(self._cut(self._old["cuts"], key, node, policy, agent)._asdict())
            packed, base = pack_changes(self._connection, key, policy, agent, row["changes"], before or None)
            self._insert("cuts", [row | {"changes": packed, "base": base}])
            there.add(node)

    def _cut(self, cuts: Table, key: str, node: str, policy: str, agent: str) -> Any:
        found = select(cuts).where(cuts.c.session == key, cuts.c.node == node)
        found = found.where(cuts.c.policy == policy, cuts.c.agent == agent)
        return self._connection.execute(found).one_or_none()

    def _pages(self, table: Table, key: str) -> Iterator[list[dict[str, Any]]]:
        """Yield the rows of a session in pages."""
        order = list(table.primary_key.columns)
        found, after = select(table).where(table.c.session == key).order_by(*order).limit(_AT_ONCE), None
        while True:
            page: Rows = self._connection.execute(found if after is None else found.where(tuple_(*order) > after))
            rows = [_plain(row._asdict()) for row in page]
            if rows:
                yield rows
            if len(rows) < _AT_ONCE:
                return
            after = tuple(rows[-1][column.name] for column in order)

    # ------------------------------------------------------------------------------------------ compare

    def _old_records(self, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the old rows of a session, each with the name of its table."""
        for name, table in self._old.items():
            for rows in self._pages(table, key) if name != "pending" else ():  # the old `exchanges` has them too
                for row in rows:
                    yield name, row

    def _records(self, key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the new rows of a session, converted back to the old layout, each with the name of its table."""
        for name, table in self._new.items():
            for rows in self._pages(table, key):
                for row in rows:
                    if name == "cuts":
                        self._unpack_cut(key, row)
                    elif name == "forms":
                        text = self._form_text(key, row)
                        if not self._has_body(self._new["bodies"], row):
                            yield "bodies", {"session": key, "body": row["body"], "tokens": 0, "text": text}
                        del row["text"]
                    yield "exchanges" if name == "pending" else name, row

    def _unpack_cut(self, key: str, row: dict[str, Any]) -> None:
        found = self._cut(self._new["cuts"], key, row["node"], row["policy"], row["agent"])
        row["changes"] = changes_of(self._connection, key, found)
        del row["base"]

    def _give_back_texts(self, key: str, rows: list[dict[str, Any]]) -> None:
        old = self._old["bodies"]
        for row in rows:
            if not self._has_body(old, row):
                text = self._form_text(key, row)
                made = {"session": key, "body": row["body"], "tokens": 0, "text": text}
                self._connection.execute(old.insert(), [made])
            del row["text"]

    def _has_body(self, bodies: Table, row: Mapping[str, Any]) -> bool:
        found = select(bodies.c.body).where(bodies.c.session == row["session"], bodies.c.body == row["body"])
        return self._connection.execute(found).one_or_none() is not None

    def _form_text(self, key: str, row: Mapping[str, Any]) -> str:
        said: str | None = None
        if is_against(row["text"]):
            bodies, nodes = self._new["bodies"].c, self._new["nodes"].c
            found = select(bodies.text).where(bodies.session == key, bodies.body == nodes.body)
            found = found.where(nodes.session == key, nodes.node == row["node"])
            said = self._connection.execute(found).scalar_one_or_none()
        return unpack(row["text"], said)


def _plain(row: Mapping[str, Any]) -> dict[str, Any]:
    return {str(name): value for name, value in row.items()}


def _digests(records: Iterable[tuple[str, Mapping[str, Any]]]) -> dict[str, list[bytes]]:
    """Return the sorted digests of the records of each kind, for comparison."""
    found: defaultdict[str, set[bytes]] = defaultdict(set)
    for kind, row in records:
        arrays = _ARRAYS if kind == "exchanges" else ()
        told = {name: orjson.loads(value) if name in arrays else value for name, value in row.items()}
        text = orjson.dumps(told, option=orjson.OPT_SORT_KEYS)
        found[kind].add(blake2b(text, digest_size=16).digest())
    return {kind: sorted(digests) for kind, digests in found.items()}


# -------------------------------------------------------------------------------------------------------- back


def make_old_tables(connection: Connection) -> None:
    """Create the empty tables of the old layout, in which names and texts are plain."""
    aside = MetaData(naming_convention=METADATA.naming_convention)
    for name, table in _reflected(connection, OLD_TABLES).items():
        columns = [
            Column(each.name, _old_type(each), nullable=each.nullable, primary_key=each.primary_key)
            for each in table.columns
            if each.name not in _SINCE.get(name, ()) and (name != "pending" or each.name in _NAMES_ALONE)
        ]
        Table(f"old_{name}", aside, *columns).create(connection)


def _old_type(column: Column[Any]) -> Any:
    if not isinstance(column.type, StoredAsBytes | LargeBinary):
        return column.type
    return ORDERED if column.primary_key else Text()


def copy_back(connection: Connection) -> None:
    """Copy every session into the old tables."""
    _Layouts(connection).copy_back()

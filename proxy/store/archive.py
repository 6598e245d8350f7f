"""A session as records, to be taken away: everything that is kept of it but attempts at summaries.

Each record is an object with `record`, its kind, and the columns of a row; JSON in a column is JSON in
the record. A text is given as `data` where writing that as compact JSON makes the very same text,
else as `text`, a string. What is named is read after what names it: the session may go on
meanwhile, and still nothing that is named is missing. It does not read records: `loading` does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from functools import partial
from typing import Any, Final

import orjson
from msgspec import Struct
from sqlalchemy import ColumnElement, Table, select, tuple_

from proxy.dialects import JsonObject
from proxy.errors import NotFound
from proxy.store.database import Connection, Database, Row
from proxy.store.records import SummaryStatus
from proxy.store.schema import (
    BODIES,
    CUTS,
    EXCHANGES,
    FORMS,
    HIDDEN,
    INSTRUCTIONS,
    NODES,
    SESSIONS,
    SUMMARIES,
)

FORMAT: Final = 1
"""Version of the records, said by the first of them."""
_AT_ONCE: Final = 100
"""Rows of one reading, so that a long session need not fit into memory."""


class _Kind(Struct, frozen=True, kw_only=True):
    """How the rows of a table become records."""

    name: str
    table: Table
    order: tuple[str, ...]
    """Columns that together tell its rows apart."""
    json: tuple[str, ...] = ()
    """Columns that hold JSON."""
    text: str | None = None
    """The column whose text must be kept to the byte."""
    only: ColumnElement[bool] | None = None
    """Which of its rows; None: all of them."""


_KINDS: Final = (
    _Kind(
        name="exchange",
        table=EXCHANGES,
        order=("created_at", "id"),
        json=("parameters", "messages", "nodes", "replies", "receipt"),
    ),
    _Kind(name="cut", table=CUTS, order=("position", "node", "policy", "agent"), json=("changes",)),
    _Kind(name="form", table=FORMS, order=("node", "body")),
    _Kind(name="hidden", table=HIDDEN, order=("node",), json=("before", "after")),
    _Kind(  # by time: the one that another was made from comes first
        name="summary",
        table=SUMMARIES,
        order=("created_at", "id"),
        json=("state", "usage"),
        only=SUMMARIES.c.status == SummaryStatus.READY.value,
    ),
    _Kind(name="instructions", table=INSTRUCTIONS, order=("created_at", "version"), text="messages"),
    _Kind(
        name="node", table=NODES, order=("depth", "node"), json=("arrival",)
    ),  # by depth: parents before children
    _Kind(name="body", table=BODIES, order=("body",), text="text"),
)
"""In the order of reading."""


async def export_session(database: Database, key: str) -> AsyncIterator[JsonObject]:
    """Give the records of a session, that of the session itself first.

    Raises:
        NotFound: there is no such session.
        StoreUnavailable: the database cannot be used.
    """
    first = await database.read(partial(_session, key=key))
    if first is None:
        raise NotFound("There is no such session.")
    yield first
    for kind in _KINDS:
        after: tuple[Any, ...] | None = None
        while True:
            records = await database.read(partial(_page, key=key, kind=kind, after=after))
            for record in records:
                yield record
            if len(records) < _AT_ONCE:
                break
            after = tuple(records[-1][column] for column in kind.order)


def _session(connection: Connection, key: str) -> JsonObject | None:
    row = connection.execute(select(SESSIONS).where(SESSIONS.c.session == key)).one_or_none()
    if row is None:
        return None
    columns = {name: value for name, value in _columns(row) if name != "session"}
    return {"record": "session", "format": FORMAT} | columns


def _page(connection: Connection, key: str, kind: _Kind, after: tuple[Any, ...] | None) -> list[JsonObject]:
    table = kind.table
    order = [table.c[name] for name in kind.order]
    found = select(table).where(table.c.session == key).order_by(*order).limit(_AT_ONCE)
    if kind.only is not None:
        found = found.where(kind.only)
    if after is not None:
        found = found.where(tuple_(*order) > after)
    return [_record(kind, row) for row in connection.execute(found)]


def _record(kind: _Kind, row: Row) -> JsonObject:
    record: JsonObject = {"record": kind.name}
    for name, value in _columns(row):
        if name == kind.text:
            record |= _content(value)
        elif name in kind.json and value is not None:
            record[name] = orjson.loads(value)
        elif name != "session":
            record[name] = value
    return record


def _columns(row: Row) -> Iterator[tuple[str, Any]]:
    for name, value in row._asdict().items():
        # SQLAlchemy's names are more than text, and orjson takes nothing more for a key.
        yield str(name), value


def _content(text: str) -> JsonObject:
    """Return a text so that it reads well, where that loses nothing."""
    data = orjson.loads(text)
    return {"data": data} if orjson.dumps(data) == text.encode() else {"text": text}

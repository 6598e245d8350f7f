"""The rows of exchanges: found, listed, and given up where their process is gone."""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain
from typing import Final

import orjson
from sqlalchemy import bindparam, literal_column, select, tuple_, update

from proxy.store.cursor import Cursor
from proxy.store.database import Connection, Row
from proxy.store.records import ExchangeRow, Status
from proxy.store.schema import EXCHANGES, SESSIONS

_ALL: Final = select(EXCHANGES, SESSIONS.c.tenant, SESSIONS.c.id.label("session_id")).join(
    SESSIONS, SESSIONS.c.session == EXCHANGES.c.session
)
_BY_ID: Final = _ALL.where(EXCHANGES.c.id == bindparam("exchange")).limit(1)
_OF_SESSION: Final = _ALL.where(EXCHANGES.c.session == bindparam("key")).order_by(
    EXCHANGES.c.created_at.desc(), EXCHANGES.c.id.desc()
)

_PENDING: Final = (
    select(EXCHANGES.c.session, EXCHANGES.c.id)
    # Word for word as the index of those that are pending has it.
    .where(EXCHANGES.c.status == literal_column(f"'{Status.PENDING.value}'"))
    # Those that someone is settling or deleting just now are theirs: waiting for them could block both.
    .with_for_update(skip_locked=True)
)
_PENDING_OF: Final = _PENDING.where(EXCHANGES.c.id.endswith(bindparam("mark")))
_INTERRUPT: Final = (
    update(EXCHANGES)
    .where(EXCHANGES.c.session == bindparam("key"), EXCHANGES.c.id == bindparam("exchange"))
    .values(status=Status.INTERRUPTED.value, settled_at=bindparam("at"))
)


def exchange_of(connection: Connection, exchange: str) -> ExchangeRow | None:
    """Return an exchange by its id."""
    row = connection.execute(_BY_ID, {"exchange": exchange}).one_or_none()
    return None if row is None else _exchange(row)


def exchanges_page(
    connection: Connection, key: str, limit: int, after: Cursor | None
) -> tuple[list[ExchangeRow], str | None]:
    """Return up to `limit` exchanges of a session, newest first, and the cursor of the next ones."""
    found = _OF_SESSION.limit(limit + 1)
    if after is not None:
        found = found.where(tuple_(EXCHANGES.c.created_at, EXCHANGES.c.id) < (after.time, after.name))
    rows = [_exchange(row) for row in connection.execute(found, {"key": key})]
    if len(rows) <= limit:
        return rows, None
    last = rows[limit - 1]
    return rows[:limit], str(Cursor(time=last.created_at, name=last.id))


def interrupt_pending(connection: Connection, at: int, marks: Collection[str] | None = None) -> int:
    """Settle every pending exchange as interrupted; return how many there were.

    With `marks`, only those whose id ends with one of them: a process ends its ids with a mark of its own,
    so that those of a dead one can be told from those of its siblings. One whose worker lives after all is
    settled by it later, and that counts.
    """
    left = (
        connection.execute(_PENDING)
        if marks is None
        else chain.from_iterable(connection.execute(_PENDING_OF, {"mark": mark}) for mark in marks)
    )
    found = [{"key": row.session, "exchange": row.id, "at": at} for row in left]
    if found:
        connection.execute(_INTERRUPT, found)
    return len(found)


def _exchange(row: Row) -> ExchangeRow:
    return ExchangeRow(
        id=row.id,
        session_key=row.session,
        tenant=row.tenant,
        session=row.session_id,
        created_at=row.created_at,
        settled_at=row.settled_at,
        status=Status(row.status),
        kind=row.kind,
        base=row.base,
        digest=row.digest,
        model=row.model,
        agent=row.agent,
        policy=row.policy,
        policy_version=row.policy_version,
        stream=row.stream,
        parameters=orjson.loads(row.parameters),
        tools=row.tools,
        instructions=row.instructions,
        messages=tuple(orjson.loads(row.messages)),
        nodes=tuple(orjson.loads(row.nodes)),
        replies=tuple(orjson.loads(row.replies)),
        cut_node=row.cut_node,
        tokens_before=row.tokens_before,
        tokens_sent=row.tokens_sent,
        receipt=orjson.loads(row.receipt),
    )

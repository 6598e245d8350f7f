"""Summaries by a model, and the leases to make them.

A summary belongs to a branch. Two nodes identify the branch: the last message that the summary covers, and the end of
the branch when it was made. An append reads only the messages that are still sent; one of the two nodes is nearly
always among them.
"""

from __future__ import annotations

from collections.abc import Collection
from functools import cache
from typing import Any, Final

import msgspec
import orjson
from sqlalchemy import ColumnElement, Select, bindparam, delete, or_, select, tuple_, update
from sqlalchemy.sql.dml import ReturningInsert

from proxy.store.cuts import encode_data
from proxy.store.database import Row, StoreConnection
from proxy.store.packing import sanitize
from proxy.store.records import ExchangeFigures, SummaryRow, SummaryStatus
from proxy.store.rollups import add_figures, sums_of
from proxy.store.schema import LEASES, SESSIONS, SUMMARIES, insert_into, insert_new, matching
from proxy.store.sessions import locked_session

_AT_ONCE: Final = 64  # summaries per query. The first query nearly always finds the one wanted.

_ALL: Final = (
    select(SUMMARIES).where(*matching(SUMMARIES)).order_by(SUMMARIES.c.created_at.desc(), SUMMARIES.c.id.desc())
)
_ONE: Final = select(SUMMARIES).where(*matching(SUMMARIES, "id"))
_IS_READY: Final = SUMMARIES.c.status == SummaryStatus.READY.value
_STANDS: Final = select(SUMMARIES.c.id).where(*matching(SUMMARIES, "recipe", "until", "node"), _IS_READY).limit(1)
_STANDS_ASKED: Final = _STANDS.where(SUMMARIES.c.asked)
_BOOK: Final = update(SESSIONS).where(SESSIONS.c.session == bindparam("the_session"))


def _places(*order: str, only: tuple[ColumnElement[bool], ...] = ()) -> tuple[Select[Any], Select[Any]]:
    """Return two queries for the nodes of summaries, in descending `order`: the first page, and the next one."""
    columns = [SUMMARIES.c[name] for name in order]
    first = (
        select(SUMMARIES.c.node, SUMMARIES.c.tip, *columns)
        .where(*matching(SUMMARIES, "recipe"), *only)
        .order_by(*(column.desc() for column in columns))
        .limit(_AT_ONCE)
    )
    last = [bindparam(f"last_{column.name}", type_=column.type) for column in columns]
    return first, first.where(tuple_(*columns) < tuple_(*last))


_READY: Final = _places("until", "created_at", "id", only=(_IS_READY,))  # the one that covers most comes first
_TRIED: Final = _places("created_at", "id")  # newest first


def keep_summary(connection: StoreConnection, key: str, row: SummaryRow, policy: str | None = "") -> bool:
    """Store a summary, or the attempt at one, and add its cost to the session; return whether it is kept.

    If a summary with this id is stored, it stays, and nothing is booked again. Of two ready summaries with the same
    recipe and the same messages, the first is kept: the worker of the second had lost its lease.
    """
    session = locked_session(connection, key)
    if session is None:
        return False
    if connection.execute(_ONE, {"key": key, "id": row.id}).one_or_none() is not None:
        return True
    # A ready summary of the same messages makes this one redundant. If this one was asked for, only another one that
    # was asked for does: those are used sooner.
    asked = {"key": key, "recipe": row.recipe, "until": row.until, "node": row.node}
    standing = connection.execute(_STANDS_ASKED if row.asked else _STANDS, asked).one_or_none()
    is_kept = row.status is not SummaryStatus.READY or standing is None
    booked: dict[str, Any] = {}
    if is_kept:
        add_summaries(connection, key, [row])
        booked["summaries"] = session.summaries + 1
    if row.cost is not None:
        booked["cost"] = (session.cost or 0.0) + row.cost
    if booked:
        connection.execute(_BOOK, booked | {"the_session": key})
    if policy is None:
        return is_kept
    attempt = ExchangeFigures(model=row.model, policy=policy, requests=0, summaries=1, cost_summaries=row.cost or 0.0)
    counted = sums_of(
        attempt,
        session=key,
        tenant=session.tenant,
        dialect=session.dialect,
        kind="summary",
        status=row.status.value,
        exchange=row.id,
        at=row.created_at,
    )
    add_figures(connection, [counted])
    return is_kept


def add_summaries(connection: StoreConnection, key: str, rows: Collection[SummaryRow]) -> None:
    """Store summaries. Their texts are sanitized: a model may write characters that a database cannot store."""
    own = [
        msgspec.structs.asdict(row)
        | {
            "session": key,
            "status": row.status.value,
            "reason": sanitize(row.reason),
            "model": sanitize(row.model),
            "text": sanitize(row.text),
            "state": encode_data(row.state),
            "usage": None if row.usage is None else encode_data(row.usage),
        }
        for row in rows
    ]
    insert_new(connection, SUMMARIES, own)


def summary_rows(connection: StoreConnection, key: str) -> list[SummaryRow]:
    """Return all summaries of the session, failed attempts included, newest first."""
    return [_summary(row) for row in connection.execute(_ALL, {"key": key})]


def ready_summary_on(
    connection: StoreConnection, key: str, branch: Collection[str], recipe: str
) -> tuple[SummaryRow | None, SummaryRow | None]:
    """Return the ready summary that covers most of a branch, and the newest attempt; None if none."""
    nodes = frozenset(branch)
    attempt = _first_on(connection, key, nodes, recipe, _TRIED)
    ready = None if attempt is None else _first_on(connection, key, nodes, recipe, _READY, attempt)
    return ready, attempt


def _first_on(
    connection: StoreConnection,
    key: str,
    nodes: frozenset[str],
    recipe: str,
    places: tuple[Select[Any], Select[Any]],
    known: SummaryRow | None = None,
) -> SummaryRow | None:
    """Return the first summary with a node on the branch. If that is `known`, it is not read again."""
    first, following = places
    asked = {"key": key, "recipe": recipe}
    found = connection.execute(first, asked).all()
    while found:
        for row in found:
            if row.node in nodes or row.tip in nodes:
                if known is not None and row.id == known.id:
                    return known
                whole = connection.execute(_ONE, {"key": key, "id": row.id}).one_or_none()
                return None if whole is None else _summary(whole)
        last = {f"last_{name}": value for name, value in found[-1]._asdict().items()}
        found = connection.execute(following, asked | last).all()
    return None


def _summary(row: Row) -> SummaryRow:
    values = row._asdict()
    del values["session"]
    values["status"] = SummaryStatus(row.status)
    values["state"] = orjson.loads(row.state)
    values["usage"] = None if row.usage is None else orjson.loads(row.usage)
    return SummaryRow(**values)


# ----------------------------------------------------------------------------------------------------- leases

_RELEASE: Final = delete(LEASES).where(
    *matching(LEASES), LEASES.c.name == bindparam("lease"), LEASES.c.holder == bindparam("by")
)


def take_lease(connection: StoreConnection, key: str, name: str, holder: str, at: int, until: int) -> bool:
    """Take or extend a lease; see `Store.lease`."""
    if locked_session(connection, key) is None:
        return False
    values = {"session": key, "name": name, "holder": holder, "expires_at": until, "at": at}
    taken = connection.execute(_take(connection.dialect.name), values)
    return taken.scalar_one_or_none() is not None


def release_lease(connection: StoreConnection, key: str, name: str, holder: str) -> None:
    """Release a lease. Does nothing if another holder has it."""
    connection.execute(_RELEASE, {"key": key, "lease": name, "by": holder})


@cache
def _take(dialect: str) -> ReturningInsert[tuple[str]]:
    insert = insert_into(dialect, LEASES)
    theirs = insert.excluded
    return insert.on_conflict_do_update(
        index_elements=[LEASES.c.session, LEASES.c.name],
        set_={"holder": theirs.holder, "expires_at": theirs.expires_at},
        where=or_(
            LEASES.c.expires_at <= bindparam("at", type_=LEASES.c.expires_at.type), LEASES.c.holder == theirs.holder
        ),
    ).returning(LEASES.c.holder)

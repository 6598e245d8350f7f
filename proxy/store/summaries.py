"""Summaries by a model, and who may make one.

A summary belongs to a branch. Two of its nodes tell which: the last that it covers, and the end of the branch on which
it was made. An append reads the messages that are still sent, and one of the two is nearly always among those.
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

_AT_ONCE: Final = 64  # summaries looked at in one question. The first nearly always holds the one wanted.

_ALL: Final = (
    select(SUMMARIES).where(*matching(SUMMARIES)).order_by(SUMMARIES.c.created_at.desc(), SUMMARIES.c.id.desc())
)
_ONE: Final = select(SUMMARIES).where(*matching(SUMMARIES, "id"))
_IS_READY: Final = SUMMARIES.c.status == SummaryStatus.READY.value
_STANDS: Final = select(SUMMARIES.c.id).where(*matching(SUMMARIES, "recipe", "until", "node"), _IS_READY).limit(1)
_STANDS_ASKED: Final = _STANDS.where(SUMMARIES.c.asked)
_BOOK: Final = update(SESSIONS).where(SESSIONS.c.session == bindparam("the_session"))


def _places(*order: str, only: tuple[ColumnElement[bool], ...] = ()) -> tuple[Select[Any], Select[Any]]:
    """Return what reads the places of summaries, those first that are greatest by `order`: first and next."""
    columns = [SUMMARIES.c[name] for name in order]
    first = (
        select(SUMMARIES.c.node, SUMMARIES.c.tip, *columns)
        .where(*matching(SUMMARIES, "recipe"), *only)
        .order_by(*(column.desc() for column in columns))
        .limit(_AT_ONCE)
    )
    last = [bindparam(f"last_{column.name}", type_=column.type) for column in columns]
    return first, first.where(tuple_(*columns) < tuple_(*last))


_READY: Final = _places("until", "created_at", "id", only=(_IS_READY,))  # the one that covers most first
_TRIED: Final = _places("created_at", "id")  # the newest first


def keep_summary(connection: StoreConnection, key: str, row: SummaryRow, policy: str | None = "") -> bool:
    """Keep a summary, or the attempt at one, and book its cost with the session; return whether it is kept.

    One that is there already, by its id, stays, and nothing is booked again. Of two that are ready, have one recipe and
    cover the same messages, the first is kept: who made the second had lost the lease meanwhile.
    """
    session = locked_session(connection, key)
    if session is None:
        return False
    if connection.execute(_ONE, {"key": key, "id": row.id}).one_or_none() is not None:
        return True
    # One that covers the same messages already, and is used as soon, stands in the way.
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
    """Store summaries as they are, but for what no text holds: a model may write anything."""
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
    """Return every summary of the session, and every attempt at one, newest first."""
    return [_summary(row) for row in connection.execute(_ALL, {"key": key})]


def ready_summary_on(
    connection: StoreConnection, key: str, branch: Collection[str], recipe: str
) -> tuple[SummaryRow | None, SummaryRow | None]:
    """Return the ready summary that covers most of a branch, and the one that was tried last; None if none."""
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
    """Return the first one whose place is on the branch; `known` is not read again."""
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
    """Take a lease, or prolong it; see `Store.lease`."""
    if locked_session(connection, key) is None:
        return False
    values = {"session": key, "name": name, "holder": holder, "expires_at": until, "at": at}
    taken = connection.execute(_take(connection.dialect.name), values)
    return taken.scalar_one_or_none() is not None


def release_lease(connection: StoreConnection, key: str, name: str, holder: str) -> None:
    """Give a lease back; nothing happens where somebody else has it."""
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

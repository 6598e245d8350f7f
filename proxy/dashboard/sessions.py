"""The list of sessions, and two sessions compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, Literal, TypeAlias

from msgspec import Struct

from proxy.dashboard.render import Page
from proxy.pipeline import session_document
from proxy.store import SessionRow, Store

Sort: TypeAlias = Literal["newest", "largest", "dearest", "saved"]
SORTS: Final = {"newest": "newest", "largest": "largest", "dearest": "most expensive", "saved": "most saved"}
_COLUMNS: Final = (
    *("id", "tenant", "model", "created_at", "updated_at", "requests", "messages", "rounds"),
    *("tokens", "tokens_sent", "tokens_saved", "cost"),
)


class SessionsQuery(Struct, frozen=True, kw_only=True):
    """Which sessions are wanted."""

    tenant: str | None  # None: everybody's
    sort: Sort = "newest"
    after: str | None = None
    limit: int = 50


async def read_sessions(store: Store, asked: SessionsQuery) -> tuple[list[SessionRow], str | None]:
    """Return the sessions that are asked for, and where the next page begins."""
    return await store.sessions(asked.tenant, limit=asked.limit, after=asked.after)


def sessions_page(
    asked: SessionsQuery, rows: Sequence[SessionRow], following: str | None, *, admin: bool, deleted: str = ""
) -> Page:
    """Return the list of sessions."""
    shown = [_line(row) for row in rows]
    data = {
        "sessions": shown,
        "next": following,
        "asked": {"sort": asked.sort, "tenant": asked.tenant if admin else None, "limit": asked.limit},
        "sorts": SORTS,
        "first": asked.after is None,
        "deleted": deleted or None,
    }
    return Page(template="sessions.html", title="Sessions", data=data, columns=_COLUMNS, rows=shown)


def _line(row: SessionRow) -> dict[str, Any]:
    return session_document(row) | {"model": row.model, "dialect": row.dialect}


def compare_page(one: SessionRow, other: SessionRow, common: int) -> Page:
    """Return two sessions beside each other; `common` is the number of messages that they begin with alike."""
    pair = [_line(one), _line(other)]
    names = ("requests", "messages", "rounds", "tokens", "tokens_sent", "tokens_saved", "cost")
    rows = [{"figure": name, "one": pair[0][name], "other": pair[1][name]} for name in names]
    data = {"pair": pair, "common": common, "figures": rows}
    return Page(template="compare.html", title="Two sessions", data=data, columns=("figure", "one", "other"), rows=rows)


async def common_messages(store: Store, one: SessionRow, other: SessionRow) -> int:
    """Return how many messages two sessions begin with alike: a message's name says all that came before it."""
    if not one.head or not other.head:
        return 0
    first = await store.lineage(one.key, [one.head])
    second = await store.lineage(other.key, [other.head])
    low, high = 0, min(first.depth(one.head), second.depth(other.head))
    while low < high:  # they are alike up to a place, and nowhere behind it
        middle = (low + high + 1) // 2
        alike = first.node_at(one.head, middle - 1) == second.node_at(other.head, middle - 1)
        low, high = (middle, high) if alike else (low, middle - 1)
    return low

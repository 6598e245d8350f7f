"""The list of sessions, and the comparison of two sessions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from msgspec import Struct

from proxy.dashboard.render import Page
from proxy.pipeline import session_document
from proxy.pipeline.inspection import search_texts
from proxy.pipeline.statistics import sessions_asked
from proxy.store import ListedSession, SessionListQuery, SessionRow, Store

_SECONDS: Final = 0.6  # time limit of a text search, so that the page loads within a second
SORTS: Final = {"newest": "newest", "largest": "largest", "dearest": "most expensive", "saved": "most saved"}
_COLUMNS: Final = (
    *("id", "tenant", "model", "created_at", "updated_at", "requests", "messages", "rounds"),
    *("tokens", "tokens_sent", "tokens_saved", "cost", "cost_saved"),
)
_FOUND: Final = ("session", "tenant", "dialect", "node", "exchange", "role", "created_at", "snippet")


class SessionFilter(Struct, frozen=True, kw_only=True):
    """The filters of a search for sessions, as typed. An empty field does not filter."""

    q: str  # a part of the id
    text: str  # words that a message must hold
    model: str
    agent: str
    since: str
    min_tokens: int
    tenant: str
    owner: str | None  # the tenant whose sessions are listed; None: all tenants
    failed: bool = False  # whether to list only sessions with requests that failed or broke off

    def query(self, now: datetime, sort: str, *, limit: int, after: str | None) -> SessionListQuery:
        """Return the query for the store."""
        return sessions_asked(
            now,
            sort,
            since=self.since or None,
            tenant=self.owner,
            model=self.model or None,
            name=self.q or None,
            agent=self.agent or None,
            min_tokens=self.min_tokens,
            failed=self.failed,
            limit=limit,
            after=after,
        )


async def sessions_page(store: Store, query: SessionListQuery, asked: SessionFilter, deleted: str = "") -> Page:
    """Return the list of sessions, or of messages that contain a text. `deleted` is the id of a deleted session."""
    listed: Sequence[ListedSession] = ()
    found: Mapping[str, Any] | None = None  # result of a text search, in the format of `GET /search`
    if asked.text:
        found = await search_texts(
            store, asked.text, query.tenant, limit=query.limit, after=query.after, seconds=_SECONDS
        )
        following = found["next"]
    else:
        listed, following = await store.listed(query)
    shown = [_line(each.row, each.cost_saved) for each in listed]
    names = [name for name in SessionFilter.__struct_fields__ if name != "owner"]
    data = {
        "sessions": shown,
        "found": found,
        "next": following,
        "asked": {name: getattr(asked, name) or "" for name in names} | {"sort": query.sort, "deleted": deleted},
        "sorts": SORTS,
        "first": query.after is None,
    }
    columns, rows = (_COLUMNS, shown) if found is None else (_FOUND, found["data"])
    return Page(template="sessions.html", title="Sessions", data=data, columns=columns, rows=rows)


def _line(row: SessionRow, saved: float | None = None) -> dict[str, Any]:
    return session_document(row, (), saved) | {"model": row.model, "dialect": row.dialect}


def compare_page(one: ListedSession, other: ListedSession, common: int) -> Page:
    """Return two sessions side by side. `common` is the number of equal messages at their beginning."""
    pair = [_line(each.row, each.cost_saved) for each in (one, other)]
    names = ("requests", "messages", "rounds", "tokens", "tokens_sent", "tokens_saved", "cost", "cost_saved")
    rows = [{"figure": name, "one": pair[0][name], "other": pair[1][name]} for name in names]
    data = {"pair": pair, "common": common, "figures": rows}
    return Page(template="compare.html", title="Two sessions", data=data, columns=("figure", "one", "other"), rows=rows)


async def common_messages(store: Store, one: SessionRow, other: SessionRow) -> int:
    """Return the number of equal messages at the beginning of two sessions."""
    if not one.head or not other.head:
        return 0
    first = await store.lineage(one.key, [one.head])
    second = await store.lineage(other.key, [other.head])
    return first.common(one.head, second, other.head)

"""Queries for statistics (time ranges, groups), and their results as JSON documents."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from typing import Any, Final, get_args

from proxy.errors import InvalidRequest
from proxy.store import HOUR, HOURLY, SUMS, Group, SessionListQuery, Sort, StatsQuery, StatsRow, Store

GROUPS: Final[tuple[Group, ...]] = get_args(Group)
SORTS: Final[tuple[Sort, ...]] = get_args(Sort)
_AGO: Final = re.compile(r"([0-9]{1,6})([hdw])")
_UNITS: Final = {"h": 1, "d": 24, "w": 168}
_HOUR_SECONDS: Final = HOUR // 1000


def group_of(text: str) -> Group:
    """Return the group with this name. Raises `InvalidRequest` if there is none."""
    if text not in GROUPS:
        raise InvalidRequest(f"group can be: {', '.join(GROUPS)}.", param="group")
    return text


def moment_of(text: str, param: str, now: datetime) -> datetime:
    """Parse a time (`2026-11-01`, `2026-11-01T10:00Z`) or a time ago (`24h`, `7d`, `2w`).

    Raises `InvalidRequest` for other texts and for years before 1970.
    """
    ago = _AGO.fullmatch(text)
    try:
        if ago is not None:
            return now - timedelta(hours=int(ago[1]) * _UNITS[ago[2]])
        moment = datetime.fromisoformat(text)
        moment = moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
    except (ValueError, OverflowError):
        moment = None
    if moment is None or moment.year < 1970:
        raise InvalidRequest(
            f"{param} can be a date (2026-11-01), a time (2026-11-01T10:00Z) or a time ago (24h, 7d, 2w).", param=param
        )
    return moment


def stats_query(
    now: datetime, *, group: str, since: str | None = None, until: str | None = None, **more: Any
) -> StatsQuery:
    """Return a query for sums; `more` are the other fields of the query.

    The default of `since` is the beginning, and of `until` now. Times are rounded outwards to whole hours, and those
    older than about a month to whole days.
    """
    first = 0 if since is None else _hour_of(moment_of(since, "since", now))
    if first < _hour_of(now) - HOURLY:  # the sums of a day may be merged into its first hour
        first -= first % 24
    end = now if until is None else moment_of(until, "until", now) - timedelta(microseconds=1)
    last = _hour_of(end) + 1
    if last <= first:
        raise InvalidRequest("until must be later than since.", param="until")
    query = StatsQuery(since=first, until=last, group=group_of(group), **more)
    if query.session is not None and query.group == "miss":
        others = ", ".join([each for each in GROUPS if each != query.group])
        raise InvalidRequest(f"Of one session, group can be: {others}. Its receipts have cache_miss.", param="group")
    return query


def sessions_asked(
    now: datetime, sort: str = "newest", *, since: str | None = None, until: str | None = None, **more: Any
) -> SessionListQuery:
    """Return a query for sessions; `more` are the other fields of the query."""
    if sort not in SORTS:
        raise InvalidRequest(f"sort can be: {', '.join(SORTS)}.", param="sort")
    first = None if since is None else int(moment_of(since, "since", now).timestamp() * 1000)
    last = None if until is None else int(moment_of(until, "until", now).timestamp() * 1000)
    if first is not None and last is not None and last <= first:
        raise InvalidRequest("until must be later than since.", param="until")
    return SessionListQuery(sort=sort, since=first, until=last, **more)


async def statistics(store: Store, query: StatsQuery) -> dict[str, Any]:
    """Return the figures of each group, and the total."""
    rows, total = await store.stats_and_total(query)
    return {
        "group": query.group,
        "since": _hour(query.since) if query.since else None,
        "until": _hour(query.until),
        "data": [figures_document(row) for row in rows],
        "total": figures_document(total),
    }


def figures_document(row: StatsRow) -> dict[str, Any]:
    """Return the sums of a group, and figures derived from them. `priced` is the number of requests with known cost."""
    sums = row.sums
    requests = sums["requests"]
    told: dict[str, Any] = {"group": row.group}
    if row.tenant is not None and row.group != "total":
        told["tenant"] = row.tenant
    told |= {"requests": requests, "sessions": row.sessions}
    told |= {name: sums[name] for name in SUMS if name != "requests"}
    told["tokens_saved"] = sums["tokens_before"] - sums["tokens_sent"]
    told["cost_untrimmed"] = sums["cost"] + sums["cost_saved"]
    told["cost_saved_net"] = sums["cost_saved"] - sums["cost_summaries"]
    for name in ("added_ms", "upstream_ms"):
        told[f"{name}_mean"] = round(sums[name] / requests, 3) if requests else None
    return told


def _hour_of(moment: datetime) -> int:
    return int(moment.timestamp()) // _HOUR_SECONDS


def _hour(hour: int) -> str:
    return f"{datetime.fromtimestamp(hour * _HOUR_SECONDS, UTC):%Y-%m-%dT%H:%M:%SZ}"

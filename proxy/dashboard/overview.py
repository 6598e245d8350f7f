"""The overview: what was paid, what would have been paid, and the sources of the difference.

Every figure is a sum of `proxy.pipeline.statistics`, as in `GET /stats`. Only shares and totals are computed here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from proxy.dashboard.render import Page
from proxy.errors import InvalidRequest
from proxy.pipeline.statistics import figures_document, group_of, statistics, stats_query
from proxy.store import FAILURES, StatsQuery, Store

RANGES: Final = {"24h": "24 hours", "7d": "7 days", "30d": "30 days", "90d": "90 days", "all": "all time"}
GROUPS: Final = ("day", "hour", "model", "policy", "tenant", "kind", "status", "dialect")
_TABLES: Final = ("model", "policy", "tenant")
_TIMED: Final = frozenset({"day", "hour"})
_BY_HOUR: Final = 72  # ranges up to so many hours are drawn by the hour, longer ones by the day
_MOST_POINTS: Final = 2_000
_ENOUGH: Final = 30  # with fewer sessions, a difference between policies may be chance
_ROWS: Final = 20  # most rows of a table
COLUMNS: Final = (
    *("group", "requests", "sessions", "priced", "tokens_before", "tokens_sent", "tokens_saved", "tokens_unique"),
    *("tokens_input", "tokens_cached", "tokens_output", "cost", "cost_untrimmed", "cost_saved", "cost_saved_net"),
    *("cost_recalls", "cost_summaries", "cost_cache_saved", "cost_missed", "trims", "warnings", "recalls"),
    *("added_ms_mean", "upstream_ms_mean"),
)


class RangeQuery(Struct, frozen=True, kw_only=True):
    """The range and the filters of a form. An empty field does not filter."""

    since: str = "7d"  # or `all`
    until: str = ""
    group: str = "day"
    policy: str = ""
    model: str = ""
    tenant: str | None = None  # None: all tenants

    def within(self, group: str, now: datetime) -> StatsQuery:
        """Return the query for the sums by `group`."""
        return stats_query(
            now,
            group=group,
            since=None if self.since == "all" else self.since,
            until=self.until or None,
            tenant=self.tenant,
            policy=self.policy or None,
            model=self.model or None,
        )


class OverviewData(Struct, frozen=True, kw_only=True):
    """The sums of the page, in the format of `GET /stats`."""

    asked: RangeQuery
    table: Sequence[Mapping[str, Any]]  # by the requested group
    times: Mapping[str, Any]  # by day or by hour, and in total
    groups: Mapping[str, Sequence[Mapping[str, Any]]]
    statuses: Sequence[Mapping[str, Any]]


async def read_overview(store: Store, asked: RangeQuery, *, admin: bool) -> OverviewData:
    """Read the sums of a range."""
    if asked.group not in GROUPS:
        raise InvalidRequest(f"group can be: {', '.join(GROUPS)}.", param="group")
    now = datetime.now(UTC)
    query = asked.within("day", now)
    times = replace(query, group="hour" if query.until - query.since <= _BY_HOUR else "day")
    names = [name for name in _TABLES if admin or name != "tenant"]
    groups = list(dict.fromkeys([*names, "status", *({asked.group} - _TIMED)]))
    timed = [times]
    if asked.group in _TIMED - {times.group}:  # the table is by hour and the chart by day, or the other way round
        timed.append(replace(query, group=group_of(asked.group)))
    by, told = await asyncio.gather(
        store.stats_by(query, [group_of(each) for each in groups]),
        asyncio.gather(*[statistics(store, each) for each in timed]),
    )
    sums: dict[str, list[dict[str, Any]]] = {name: [figures_document(row) for row in rows] for name, rows in by.items()}
    for each in told:
        sums[each["group"]] = each["data"]
    return OverviewData(
        asked=asked,
        table=sums[asked.group],
        times=told[0],
        groups={name: sums[name] for name in names},
        statuses=sums["status"],
    )


def overview_page(found: OverviewData, *, admin: bool) -> Page:
    """Return the overview page."""
    total, times = found.times["total"], found.times["data"]
    asked = found.asked
    by_status = {row["group"]: row["requests"] for row in found.statuses}
    data = {
        "asked": {"since": asked.since, "until": asked.until, "group": asked.group}
        | {"model": asked.model, "policy": asked.policy, "tenant": asked.tenant if admin else None},
        "ranges": RANGES,
        "since": found.times["since"] or (times[0]["group"] if times else None),
        "until": found.times["until"],
        "total": total,
        "paid": total["cost"] + total["cost_summaries"],
        "gross": total["cost_saved"] + total["cost_recalls"],
        "net": total["cost_saved_net"],
        "errors": sum([count for status, count in by_status.items() if status in FAILURES]),
        "statuses": by_status,
        "times": times,
        "groups": {name: [_line(name, row) for row in rows[:_ROWS]] for name, rows in found.groups.items()},
        "left_out": {name: max(0, len(rows) - _ROWS) for name, rows in found.groups.items()},
        "charts": _charts(found.times),
        "enough": _ENOUGH,
    }
    return Page(template="overview.html", title="Overview", data=data, columns=COLUMNS, rows=found.table)


def _line(name: str, row: Mapping[str, Any]) -> dict[str, Any]:
    few = name == "policy" and row["sessions"] < _ENOUGH
    return {**row, "paid": row["cost"] + row["cost_summaries"], "few": few}


def _charts(times: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the charts of dollars and tokens by day or by hour. Days and hours without requests are zero."""
    rows, group = times["data"], times["group"]
    if not rows:
        return None
    step = timedelta(hours=1) if group == "hour" else timedelta(days=1)
    known = {_moment(row["group"]): row for row in rows}
    at, end = min(known), _moment(times["until"])
    if times["since"] is not None:
        at = _moment(times["since"])
        at = at if group == "hour" else at.replace(hour=0)
    count = -((at - end) // step)
    moments = [at + number * step for number in range(max(count - _MOST_POINTS, 0), count)]  # the newest
    shown = [known.get(moment) for moment in moments]

    def values(name: str) -> list[float]:
        return [0 if row is None else row[name] for row in shown]

    paid = [cost + summaries for cost, summaries in zip(values("cost"), values("cost_summaries"), strict=True)]
    net, cumulated = 0.0, list[float]()
    for saved in values("cost_saved_net"):
        net += saved
        cumulated.append(round(net, 6))
    x = [int(moment.timestamp()) for moment in moments]
    dollars = [
        {"label": "would have paid", "values": values("cost_untrimmed"), "colour": 1},
        {"label": "paid", "values": paid, "colour": 2, "fill": True},
        {"label": "cumulated net saving (right axis)", "values": cumulated, "colour": 3, "scale": "net", "dash": True},
    ]
    tokens = [
        {"label": "before trimming", "values": values("tokens_before"), "colour": 1},
        {"label": "sent", "values": values("tokens_sent"), "colour": 2, "fill": True},
        {"label": "read from the provider's cache", "values": values("tokens_cached"), "colour": 3, "fill": True},
    ]
    shared = {"x": x, "time": True, "label": group}
    return {
        "dollars": {**shared, "series": dollars, "units": {"y": "dollars", "net": "dollars"}},
        "tokens": {**shared, "series": tokens, "units": {"y": "tokens"}},
    }


def _moment(text: str) -> datetime:
    moment = datetime.fromisoformat(text)
    return moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)

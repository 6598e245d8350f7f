"""The figures of the overview and of the page about the cache: those of `/stats`, and what the pages make of them."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import orjson
import pytest

from proxy.dashboard.cache import ENOUGH, CacheData, DeclaredTool, Inventory, cache_page
from proxy.dashboard.overview import OverviewData, RangeQuery, overview_page
from proxy.dashboard.render import _TEMPLATES
from proxy.dashboard.text import dollars, milliseconds, number, percent, short
from proxy.store import SUMS, sessions
from tests.support.server import Proxy
from tests.support.waiting import until


def complete(ask: Callable[[], Any], part: str) -> Any:
    """Ask until everything was looked at: that is done for a second at most, which a busy machine may need more of."""
    found: list[Any] = []

    def is_complete() -> bool:
        found.append(ask())
        return bool(found[-1][part]["complete"])

    until(is_complete, "all is looked at")
    return found[-1]


def test_the_overview_says_what_the_statistics_say(filled: Proxy) -> None:
    shown = filled.client.get("/ui.json?since=all").json()
    stats = filled.client.get("/stats").json()
    assert shown["total"] == stats["total"]
    assert shown["times"] == stats["data"]
    for group in ("model", "policy"):
        listed = filled.client.get(f"/stats?group={group}").json()["data"]
        assert [(each["group"], each["cost"]) for each in shown["groups"][group]] == [
            (each["group"], each["cost"]) for each in listed
        ]
    total = shown["total"]
    assert shown["net"] == pytest.approx(shown["gross"] - total["cost_recalls"] - total["cost_summaries"])
    assert shown["paid"] + shown["net"] == pytest.approx(total["cost_untrimmed"])
    receipts = filled.exchanges("warehouse")
    assert total["cost_saved"] >= sum(each["cost_saved"] or 0 for each in receipts) > 0


def test_the_sessions_list_says_what_a_session_saved(filled: Proxy) -> None:
    listed = filled.client.get("/ui/sessions.json?sort=saved").json()["sessions"]
    assert listed[0]["id"] == "warehouse"
    saved = sum(each["cost_saved"] or 0 for each in filled.exchanges("warehouse"))
    assert listed[0]["cost_saved"] == pytest.approx(saved)
    assert filled.client.get("/ui/sessions/warehouse.json").json()["session"]["cost_saved"] == pytest.approx(saved)


def test_sessions_are_found_by_id_text_model_and_agent(filled: Proxy, monkeypatch: pytest.MonkeyPatch) -> None:
    def ids(query: str) -> set[str]:
        return {each["id"] for each in filled.client.get(f"/ui/sessions.json?{query}").json()["sessions"]}

    assert ids("q=DESK") == {"desk-0", "desk-1", "desk-2"}
    assert ids("q=%25") == set()
    assert ids("agent=clerk") == {"desk-0"}
    assert ids("model=nobody") == set()
    assert "warehouse" in ids("min_tokens=5000")
    assert "desk-0" not in ids("min_tokens=5000")
    assert filled.chat("refused", "hello", model="fault:500").status_code == 500
    for few in (2_000, 1):  # they are looked up by their names, or it is looked for them
        monkeypatch.setattr(sessions, "_FEW", few)
        assert ids("failed=true") == {"refused"}
    assert 'href="/ui/sessions?failed=true&amp;since=7d"' in filled.client.get("/ui").text
    found = complete(lambda: filled.client.get("/ui/sessions.json?text=Question+2").json()["found"], "searched")
    assert {each["session"] for each in found["data"]} == {"desk-2"}


def test_the_cache_page_tells_causes_and_tools(filled: Proxy) -> None:
    shown = complete(lambda: filled.client.get("/ui/cache.json?since=all").json(), "inventory")
    assert sum(each["requests"] for each in shown["misses"]) == shown["total"]["requests"]
    assert "trim" in {each["cause"] for each in shown["misses"]}
    tools = {each["name"]: each for each in shown["tools"]}
    assert set(tools) == {"read_shelf", "move_parcel", "print_label"}
    assert (tools["read_shelf"]["calls"], tools["read_shelf"]["called_in"]) == (16 + 5, 2)
    assert tools["move_parcel"]["calls"] == 0
    assert tools["move_parcel"]["tokens"] > 20
    assert not tools["move_parcel"]["removable"]  # two sessions tell little


def stats(group: str, *rows: dict[str, Any]) -> dict[str, Any]:
    """Return what the statistics say of these groups."""
    nothing: dict[str, Any] = dict.fromkeys(SUMS, 0) | {
        "tokens_saved": 0,
        "cost_untrimmed": 0,
        "cost_saved_net": 0,
        "sessions": 1,
    }
    nothing |= {"added_ms_mean": 1.0, "upstream_ms_mean": 1.0}
    data = [nothing | row for row in rows]
    total = nothing | {name: sum(row[name] for row in data) for name in nothing} | {"group": "total"}
    return {
        "group": group,
        "since": "2026-11-01T00:00:00Z",
        "until": "2026-11-08T00:00:00Z",
        "data": data,
        "total": total,
    }


def overview(*, since: str = "2026-11-01T00:00:00Z", until: str = "2026-11-08T00:00:00Z", **row: Any) -> dict[str, Any]:
    row = {"requests": 10, "cost": 2.0, **row}
    found = OverviewData(
        asked=RangeQuery(),
        table=[],
        times=stats("day", {"group": "2026-11-03", **row}) | {"since": since, "until": until},
        groups={"policy": stats("policy", {"group": "one", **row}, {"group": "two", **row})["data"]},
        statuses=stats("status", {"group": "complete", "requests": 8}, {"group": "failed", "requests": 2})["data"],
    )
    page = overview_page(found, admin=False)
    shown = {
        "title": "",
        "path": "/ui",
        "address": "/ui",
        "theme": "auto",
        "csrf": "",
        "open": True,
        "has_admin": False,
    }
    shown |= {"reader": {"admin": False, "tenant": "default", "signed_in": False}}
    orjson.dumps(page.data)  # it can be written as JSON
    return page.data | {"html": _TEMPLATES.get_template(page.template).render(shown | page.data)}


def test_a_net_loss_is_shown_as_one() -> None:
    shown = overview(cost_saved=0.5, cost_summaries=0.7, cost_saved_net=-0.2, cost_untrimmed=2.5)
    assert shown["net"] == -0.2
    assert "trimming cost more than it saved" in shown["html"]
    assert "−$0.200" in shown["html"]
    assert 'class="figure negative"' in shown["html"]
    assert shown["errors"] == 2


def test_days_without_requests_count_as_nothing_and_the_net_saving_adds_up() -> None:
    shown = overview(cost_saved=1.0, cost_saved_net=1.0, cost_untrimmed=3.0)
    chart = shown["charts"]["dollars"]
    assert len(chart["x"]) == 7
    assert [each["label"] for each in chart["series"]][2].startswith("cumulated net saving")
    assert chart["series"][2]["scale"] != chart["series"][1].get("scale", "y")
    assert chart["series"][2]["values"] == [0, 0, 1, 1, 1, 1, 1]
    assert "differences between such policies may be chance" in shown["html"]


def test_of_very_many_days_the_newest_are_drawn() -> None:
    chart = overview(since="1999-01-01T00:00:00Z", cost_saved=1.0, cost_saved_net=1.0)["charts"]["dollars"]
    assert len(chart["x"]) == 2000
    assert chart["series"][2]["values"][-7:] == [0, 0, 1, 1, 1, 1, 1]
    begun = time.thread_time()
    assert len(overview(until="9999-12-31T00:00:00Z")["charts"]["dollars"]["x"]) == 2000
    assert time.thread_time() - begun < 0.1  # the others are not even counted one by one


def test_a_tool_is_called_removable_only_after_enough_sessions() -> None:
    def advice(sessions: int, calls: int) -> bool:
        use = DeclaredTool(
            name="t", tokens=50, sessions=sessions, requests=100, calls=calls, tokens_sent=5_000, cost=0.1
        )
        inventory = Inventory(tools=(use,), sessions=sessions, complete=True)
        found = CacheData(asked=RangeQuery(), misses=stats("miss"), models=stats("model"), inventory=inventory)
        removable: bool = cache_page(found, admin=False).data["tools"][0]["removable"]
        return removable

    assert advice(ENOUGH, 0)
    assert not advice(ENOUGH - 1, 0)
    assert not advice(ENOUGH, 1)


def test_numbers_are_written_for_people() -> None:
    assert [number(None), number(1234567), number(-5)] == ["–", "1,234,567", "−5"]
    assert [short(950), short(1_234), short(7_800_000), short(-2e9)] == [
        "950",
        "1.23\u202fk",
        "7.8\u202fM",
        "−2\u202fB",
    ]
    assert [dollars(value) for value in (0, 12.3, -1.5, 0.042, 0.00011)] == [
        "$0.00",
        "$12.30",
        "−$1.50",
        "$0.042",
        "$0.00011",
    ]
    assert [percent(1, 8), percent(1, 0), percent(None, 1)] == ["12.5\u202f%", "–", "–"]
    assert [milliseconds(3.14159), milliseconds(4_560)] == ["3.14\u202fms", "4.56\u202fs"]

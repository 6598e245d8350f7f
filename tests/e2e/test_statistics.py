"""Requests, costs and savings: `/stats`, `/metrics` and the receipts agree, on every worker."""

from __future__ import annotations

import re
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.metered import PRICES, Metered
from tests.support.served import SECONDS, Served, config_file
from tests.support.tongues import TONGUES
from tests.support.upstream import Upstream
from tests.support.waiting import until

DOLLARS = {"input": 2.0, "cached_read": 0.5, "output": 8.0}
SECTIONS: dict[str, Any] = {
    "models": [{"match": ["*"], "context_window": 128_000, "prices": DOLLARS}],
    "policies": {
        "lean": {"trigger": {"tokens": 6_000}, "target": {"tokens": 3_000}, "edits": [{"type": "drop_oldest"}]}
    },
}
LEAD = {"role": "system", "content": "You are S. " + "rule " * 1_500}


def converse(base: str, session: str, turns: int, *, policy: str | None = None) -> None:
    """Run a conversation that is resent at every turn, each request over a new connection."""
    history = [LEAD]
    headers = {"x-session-id": session} | ({} if policy is None else {"x-context-policy": policy})
    for turn in range(turns):
        history.append({"role": "user", "content": f"question {turn} of {session} " + "word " * 500})
        with httpx.Client(base_url=base, trust_env=False, timeout=SECONDS) as client:
            answer = client.post("/v1/chat/completions", json={"model": "echo", "messages": history}, headers=headers)
        assert answer.status_code == 200, answer.text
        history.append(answer.json()["choices"][0]["message"])


def get(base: str, path: str, **query: Any) -> Any:
    answer = httpx.get(f"{base}{path}", params=query, trust_env=False, timeout=SECONDS)
    assert answer.status_code == 200, answer.text
    return answer.json()


def metrics(base: str) -> dict[str, float]:
    text = httpx.get(f"{base}/metrics", trust_env=False, timeout=SECONDS).text
    return {name: float(value) for name, value in re.findall(r"^(palimpsest\S+) (\S+)$", text, re.MULTILINE)}


def by_hand(usage: dict[str, Any]) -> float:
    cached: int = usage["prompt_tokens_details"]["cached_tokens"]
    fresh: int = usage["prompt_tokens"] - cached
    written: int = usage["completion_tokens"]
    return (fresh * 2.0 + cached * 0.5 + written * 8.0) / 1_000_000


def test_receipts_stats_and_metrics_agree_and_four_workers_count_once(
    tmp_path: Path, upstream: Upstream, store_url: str
) -> None:
    config = config_file(tmp_path, upstream, store_url, **SECTIONS)
    with Served(config, "--workers", "4").wait() as served:
        names = [f"s{number}" for number in range(6)]
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(lambda name: converse(served.url, name, 8), names))
        receipts = [row for name in names for row in get(served.url, f"/sessions/{name}/exchanges")["data"]]
        assert len(receipts) == 48
        for row in receipts:
            assert row["cost"] == pytest.approx(by_hand(row["usage"]))
        paid = sum(row["cost"] for row in receipts)
        saved = sum(row["cost_saved"] for row in receipts)
        assert saved > 0
        for group in ("day", "model", "policy", "tenant", "session", "kind"):
            told = get(served.url, "/stats", group=group)
            for figures in (
                told["total"],
                {
                    name: sum(row[name] for row in told["data"])
                    for name in told["total"]
                    if name not in {"group", "added_ms_mean", "upstream_ms_mean"}
                },
            ):
                assert figures["requests"] == 48
                assert figures["cost"] == pytest.approx(paid)
                assert figures["cost_saved"] == pytest.approx(saved)
                assert figures["tokens_before"] == sum(row["tokens_before"] for row in receipts)
                assert figures["tokens_sent"] == sum(row["tokens_sent"] for row in receipts)
                assert figures["tokens_input"] == sum(row["usage"]["prompt_tokens"] for row in receipts)
            assert told["total"]["sessions"] == 6
        found = metrics(served.url)
        requests = {name: value for name, value in found.items() if name.startswith("palimpsest_requests_total{")}
        assert sum(requests.values()) == 48
        assert found['palimpsest_dollars_total{state="paid"}'] == pytest.approx(paid)
        assert found['palimpsest_dollars_total{state="saved"}'] == pytest.approx(saved)
        assert found['palimpsest_tokens_total{state="sent"}'] == sum(row["tokens_sent"] for row in receipts)
        assert found["palimpsest_added_seconds_count"] == found["palimpsest_upstream_seconds_count"] == 48
        assert found["palimpsest_open_exchanges"] == found["palimpsest_store_queue"] == 0


def test_what_is_saved_is_what_the_same_session_costs_untrimmed(
    tmp_path: Path, upstream: Upstream, store_url: str
) -> None:
    config = config_file(tmp_path, upstream, store_url, **SECTIONS, tokens={"method": "tiktoken"})
    with Served(config).wait() as served:
        converse(served.url, "trimmed-1", 14)
        converse(served.url, "as-it-is1", 14, policy="off")
        told = {row["group"]: row for row in get(served.url, "/stats", group="session")["data"]}
        trimmed, whole = told["trimmed-1"], told["as-it-is1"]
        assert whole["cost_saved"] == 0
        assert trimmed["cost_untrimmed"] == pytest.approx(whole["cost"], rel=0.03)
        assert trimmed["cost"] < whole["cost"]


POLICY: dict[str, Any] = {
    "trigger": {"tokens": 3000},
    "target": {"tokens": 2000},
    "keep": {"rounds": 1, "spans": 2},
    "edits": [
        {"type": "summarize", "mode": "model", "keep_rounds": 1, "min_messages": 4, "min_new_messages": 2},
        {"type": "drop_oldest"},
    ],
}
DIALECTS = ("chat", "responses", "messages")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}


def say(base: str, path: str, session: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    sent = {"x-session-id": session, **headers}
    return httpx.post(f"{base}{path}", json=body, headers=sent, trust_env=False, timeout=SECONDS)


def talk(base: str, dialect: str, session: str, turns: int) -> None:
    """Run a conversation in one of the three APIs. Each request resends the history, over a new connection.

    Every other answer is a stream.
    """
    tongue, history = TONGUES[dialect], list[Any]()
    for turn in range(turns):
        text = f"Parcel {turn} of {session}: it should go to another shelf before the evening. " * 18
        history.append({"role": "user", "content": text + ("look it up" if turn % 4 == 3 else "")})
        body: dict[str, Any] = {"model": "m", "stream": turn % 2 == 1}
        if dialect == "chat":
            body |= {"messages": history, "tools": [TOOL]}
            body |= {"stream_options": {"include_usage": True}} if body["stream"] else {}
        elif dialect == "responses":
            body |= {"input": history}
        else:
            body |= {"max_tokens": 100, "messages": history, "system": "You keep a depot."}
        answer = say(base, tongue.path, session, body, **tongue.headers)
        assert answer.status_code == 200, answer.text
        if dialect == "chat":  # whatever the proxy looked up in between
            history.append({"role": "assistant", "content": "The parcel was moved to the other shelf."})
        else:
            history += tongue.reply(answer.content, stream=body["stream"])


def test_the_bill_of_three_dialects_with_summaries_and_recalls_is_what_all_figures_say(
    tmp_path: Path, store_url: str
) -> None:
    """All sums equal those of the provider's own bill, and each request counts once."""
    sections: dict[str, Any] = {
        "models": [{"match": ["*"], "context_window": 128_000, "prices": PRICES}],
        "policies": {"default": POLICY},
        "virtual_tools": {"recall_context": True},
        "summarizer": {"background": False},
    }
    with Metered() as provider:
        sections["upstream"] = {"anthropic_base_url": provider.base_url}
        config = config_file(tmp_path, provider, store_url, **sections)
        with Served(config, "--workers", "4").wait() as served:
            names = [(dialect, f"{dialect}-{number}") for dialect in DIALECTS for number in range(2)]
            with ThreadPoolExecutor(5) as pool:
                list(pool.map(lambda each: talk(served.url, each[0], each[1], 14), names))
            check_bills(served.url, provider, dict.fromkeys(DIALECTS, 14 * 2))


def check_bills(base: str, provider: Metered, asked: dict[str, int]) -> None:
    """Check that receipts, statistics, overview and metrics equal the provider's bill."""
    bills, requests = provider.bills, sum(asked.values())
    receipts: list[Any] = []
    for dialect in DIALECTS:
        for number in range(2):
            name = f"{dialect}-{number}"
            receipts += get(base, f"/sessions/{name}/exchanges", limit=200)["data"]
    assert len(receipts) == requests
    by_dialect = {row["group"]: row for row in get(base, "/stats", group="dialect")["data"]}
    total = get(base, "/stats")["total"]
    assert total["summaries"] == bills["summaries"].requests > 0
    assert total["recalls"] == bills["chat"].requests - asked["chat"] > 0
    assert total["cost_summaries"] == pytest.approx(bills["summaries"].dollars)
    assert total["cost_saved_net"] == pytest.approx(total["cost_saved"] - total["cost_summaries"])
    (policy,) = get(base, "/stats", group="policy")["data"]  # it includes the summaries
    assert (policy["group"], policy["cost_saved_net"]) == ("default", pytest.approx(total["cost_saved_net"]))
    for dialect in DIALECTS:
        bill, row = bills[dialect], by_dialect[dialect]
        assert row["requests"] == row["priced"] == asked[dialect]
        assert row["tokens_input"] == bill.input
        assert row["tokens_cached"] == bill.cached > 0
        assert row["tokens_written"] == bill.written
        assert row["tokens_output"] == bill.output
        assert row["cost"] == pytest.approx(bill.dollars)
        assert row["trims"] > 0
    sums = {name: sum(row[name] or 0 for row in receipts) for name in ("cost", "cost_saved", "tokens_before")}
    sums["tokens_sent"] = sum(row["tokens_sent"] for row in receipts)
    for name, value in sums.items():
        assert total[name] == pytest.approx(value), name
    assert total["trims"] == sum(row["cut"] is not None and row["cut"]["moved"] for row in receipts)
    assert total["warnings"] == sum(len(row["warnings"]) for row in receipts)
    assert total["edits"] == sum(len(row["edits"]) for row in receipts)
    shown = get(base, "/ui.json", since="all")
    assert shown["total"] == pytest.approx(total)  # a database may add in any order
    assert shown["paid"] == pytest.approx(sum(bill.dollars for bill in bills.values()))
    assert shown["net"] == pytest.approx(shown["gross"] - total["cost_recalls"] - total["cost_summaries"])
    assert shown["paid"] + shown["net"] == pytest.approx(total["cost_untrimmed"])
    check_metrics(base, total, asked)


def check_metrics(base: str, total: dict[str, Any], asked: dict[str, int]) -> None:
    """Check that the metrics equal the statistics."""
    found = metrics(base)

    def metric(name: str, **labels: str) -> float:
        wanted = [f'{key}="{value}"' for key, value in labels.items()]
        return sum(
            value
            for key, value in found.items()
            if key.partition("{")[0] == name and all(each in key for each in wanted)
        )

    for dialect in DIALECTS:
        assert metric("palimpsest_requests_total", dialect=dialect) == asked[dialect]
    for state, name in (("before", "before"), ("sent", "sent"), ("cached", "cached"), ("written", "written")):
        assert metric("palimpsest_tokens_total", state=state) == total[f"tokens_{name}"]
    dollars = {"paid": "cost", "would_have_paid": "cost_untrimmed", "saved": "cost_saved"}
    dollars |= {"cache_saved": "cost_cache_saved", "summaries": "cost_summaries"}
    for state, name in dollars.items():
        assert metric("palimpsest_dollars_total", state=state) == pytest.approx(total[name]), state
    for name in ("trims", "warnings", "recalls", "edits", "summaries"):
        assert metric(f"palimpsest_{name}_total") == total[name], name
    misses = {row["group"]: row["requests"] for row in get(base, "/stats", group="miss")["data"] if row["group"]}
    for cause, number in misses.items():
        assert metric("palimpsest_cache_misses_total", cause=cause) == number
    assert metric("palimpsest_summaries_total", status="ready") == total["summaries"]
    assert metric("palimpsest_open_exchanges") == metric("palimpsest_store_queue") == 0
    assert metric("palimpsest_fail_open_total") == metric("palimpsest_spooled_total") == 0


def test_what_failed_broke_off_or_was_left_counts_once_in_all_figures(
    tmp_path: Path, upstream: Upstream, store_url: str
) -> None:
    """In three APIs with four workers: receipts, statistics, the overview and the metrics agree."""
    config = config_file(tmp_path, upstream, store_url, **SECTIONS)
    asks = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
    faults = ("echo", "fault:500", "fault:429", "fault:drop-before", "fault:drop", "fault:no-done", "fault:error-event")

    def ask(each: tuple[str, str, int]) -> None:
        dialect, fault, number = each
        turn = [{"role": "user", "content": f"question {number} " + "word " * 20}]
        body: dict[str, Any] = {"model": fault, "stream": number % 2 == 1}
        body |= {"input": turn} if dialect == "responses" else {"messages": turn}
        body |= {"max_tokens": 50} if dialect == "messages" else {}
        with suppress(httpx.HTTPError):  # its answer breaks off
            say(served.url, asks[dialect], f"{dialect}-{fault}-{number}", body, **{"anthropic-version": "2023-06-01"})

    def leave(dialect: str) -> None:
        turn = [{"role": "user", "content": "a long answer"}]
        body: dict[str, Any] = {"model": "long:50+chunkdelay:50", "stream": True}
        body |= {"input": turn} if dialect == "responses" else {"messages": turn, "max_tokens": 50}
        with (
            httpx.Client(trust_env=False, timeout=SECONDS) as client,
            client.stream(
                "POST", served.url + asks[dialect], json=body, headers={"x-session-id": f"{dialect}-left"}
            ) as answer,
        ):
            next(answer.iter_bytes())

    with Served(config, "--workers", "4").wait() as served:
        every = [(dialect, fault, number) for dialect in asks for fault in faults for number in range(2)]
        with ThreadPoolExecutor(5) as pool:
            list(pool.map(ask, every))
            list(pool.map(leave, asks))
        names = [f"{dialect}-{fault}-{number}" for dialect, fault, number in every] + [f"{each}-left" for each in asks]

        def receipts() -> list[Any]:
            answers = [
                httpx.get(f"{served.url}/sessions/{name}/exchanges", trust_env=False, timeout=SECONDS) for name in names
            ]
            return [row for answer in answers if answer.status_code == 200 for row in answer.json()["data"]]

        until(lambda: len(receipts()) == len(names), "all have ended", SECONDS)
        until(lambda: metrics(served.url)["palimpsest_open_exchanges"] == 0, "all are counted", SECONDS)
        rows = receipts()
        assert {row["status"] for row in rows} >= {"complete", "failed", "partial"}
        by_status = Counter(row["status"] for row in rows)
        told = get(served.url, "/stats", group="status")
        assert {row["group"]: row["requests"] for row in told["data"]} == by_status
        for name in ("cost", "tokens_before", "tokens_sent"):
            assert told["total"][name] == pytest.approx(sum(row[name] or 0 for row in rows)), name
        assert told["total"]["priced"] == sum(row["cost"] is not None for row in rows)
        page = get(served.url, "/ui.json", since="all")
        assert page["statuses"] == by_status
        assert page["errors"] == sum(by_status[each] for each in ("failed", "partial", "interrupted"))
        counted: Counter[str] = Counter()
        for name, value in metrics(served.url).items():
            if found := re.match(r'palimpsest_requests_total\{.*status="(\w+)"', name):
                counted[found[1]] += int(value)
        assert +counted == by_status

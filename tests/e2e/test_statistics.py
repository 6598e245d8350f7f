"""What was asked, paid and saved: `/stats`, `/metrics` and the receipts say the same, whatever worker is asked."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.served import SECONDS, Served, config_file
from tests.support.upstream import Upstream

DOLLARS = {"input": 2.0, "cached_read": 0.5, "output": 8.0}
SECTIONS: dict[str, Any] = {
    "models": [{"match": ["*"], "context_window": 128_000, "prices": DOLLARS}],
    "policies": {
        "lean": {"trigger": {"tokens": 6_000}, "target": {"tokens": 3_000}, "edits": [{"type": "drop_oldest"}]}
    },
}
LEAD = {"role": "system", "content": "You are S. " + "rule " * 1_500}


def converse(base: str, session: str, turns: int, *, policy: str | None = None) -> None:
    """Hold a conversation that is sent whole at every turn, each request over a connection of its own."""
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

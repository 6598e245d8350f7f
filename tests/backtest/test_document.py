from __future__ import annotations

import json

import orjson
import pytest

from proxy.backtest.baselines import baseline
from proxy.backtest.comparison import Backtest
from proxy.backtest.document import as_data
from proxy.backtest.price import standard_classes
from tests.backtest.histories import COUNTER, agent, history, reply, user


def test_everything_is_there_and_nothing_is_rounded() -> None:
    test = Backtest([baseline("baseline:mask")], standard_classes(), COUNTER)
    outcome = test.run([history(agent(8), "long"), history([user("a"), reply("b")], "short")])
    data = json.loads(orjson.dumps(as_data(outcome)))
    assert [each["name"] for each in data["strategies"]] == ["baseline:none", "baseline:mask"]
    assert [each["name"] for each in data["prices"]] == [each.name for each in outcome.classes]
    assert data["prices"][0]["block"] == 128
    assert data["prices"][3] == {
        "name": "read 0.1, write 1.25",
        "dollars": {"input": 1.0, "cached_read": 0.1, "cache_write": 1.25, "output": 4.0, "steps": []},
        "matching": "breakpoints",
        "block": None,
        "minimum": 1024,
        "lifetime": 300.0,
    }
    assert len(data["totals"]) == 2 * 5
    assert len(data["sessions"]) == 2 * 2 * 5
    for total in data["totals"]:
        parts = [
            each
            for each in data["sessions"]
            if (each["strategy"], each["prices"]) == (total["strategy"], total["prices"])
        ]
        for name in ("requests", "tokens_sent", "tokens_untrimmed", "tokens_read", "tokens_written", "moves"):
            assert total[name] == sum(each[name] for each in parts)
        assert total["input_dollars"] == pytest.approx(sum(each["input_dollars"] for each in parts))
        assert total["dollars"] == pytest.approx(total["input_dollars"] + total["output_dollars"])
        assert total["dearest"]["ratio"] == max(each["ratio"] for each in parts)
        sources = total["tokens_read"] + total["tokens_written"] + total["tokens_uncached"]
        assert sources == total["tokens_sent"]
    assert data["recall_means"] == "presence is necessary, not sufficient"
    assert set(data["totals"][0]["recall"]) == {"every", "pinned", "near", "far", "tool_only"}
    assert set(data["totals"][0]["recall"]["far"]) >= {
        "grounded",
        "present",
        "recall",
        "bound_recall",
        "whole_calls",
    }


def test_without_recall_it_is_null() -> None:
    data = as_data(Backtest([], standard_classes(), COUNTER, recall=False).run([history(agent(1))]))
    assert data["totals"][0]["recall"] is None

from __future__ import annotations

import json
from html.parser import HTMLParser
from pathlib import Path

import orjson
import pytest

from proxy.backtest.comparison import Backtest, BacktestResult
from proxy.backtest.cost import PriceClass, price_class, standard_classes
from proxy.backtest.histories import read_file
from proxy.backtest.replay import PolicyStrategy, baseline
from proxy.backtest.report import (
    ReportTable,
    as_data,
    headlines,
    main_prices,
    page,
    percent,
    report_tables,
    session_tables,
)
from proxy.trimming import Policy
from tests.backtest.histories import COUNTER, agent, history, reply, user

TALK = Path(__file__).parents[1] / "data" / "trajectories" / "tau-airline-t46-r3.json"

# ------------------------------------------------------------------------------------ tables


@pytest.fixture(scope="module")
def outcome() -> BacktestResult:
    test = Backtest([baseline("baseline:mask")], standard_classes(), COUNTER)
    return test.run([history(agent(8), "long"), history([user("a"), reply("b")], "short")])


def titled(outcome: BacktestResult, words: str) -> ReportTable:
    (found,) = (sheet for sheet in report_tables(outcome) if words in sheet.title)
    return found


def test_a_line_says_first_what_a_policy_costs_and_keeps() -> None:
    dropping = {"trigger": {"messages": 4}, "edits": [{"type": "keep_rounds", "last": 1}]}
    policies = {"all": Policy(), "little": Policy.model_validate(dropping)}
    strategies = [PolicyStrategy(name=name, policy=policy) for name, policy in policies.items()]
    test = Backtest([*strategies, baseline("baseline:mask")], standard_classes(), COUNTER)
    few = list(headlines(test.run(read_file(TALK))))
    assert few[0] == (
        "all: 100 % of the input cost at read 0.1, 100 % of the far values that later calls used was still there."
    )
    assert [line.partition(":")[0] for line in few] == ["all", "little"]
    many = list(headlines(test.run([history(agent(3 + at), f"s{at}") for at in range(6)])))
    assert "100 % (100 to 100) of the input cost" in many[0]
    without = Backtest(strategies, standard_classes(), COUNTER, recall=False).run([history(agent(3), "one")])
    assert next(iter(headlines(without))) == "all: 100 % of the input cost at read 0.1."
    assert not list(headlines(test.run([history([reply("b")], "no request")])))


def test_sessions_in_which_nothing_is_counted_do_not_widen_the_interval() -> None:
    assert percent([(3, 4)] * 6 + [(0, 0)] * 6) == "75 % (75 to 75)"
    assert percent([(3, 4)] * 4 + [(0, 0)] * 6) == "75 %"
    assert percent([]) == "0 %"


def test_every_table_is_whole(outcome: BacktestResult) -> None:
    names = [name for name, *_ in titled(outcome, "Dollars").rows]
    assert names == ["baseline:none", "baseline:mask"]
    for sheet in (*report_tables(outcome), *session_tables(outcome, [each.name for each in outcome.classes])):
        assert all(len(row) == len(sheet.columns) for row in sheet.rows)
        assert all(cell for row in sheet.rows for cell in row)
        assert len(sheet.rows) == 2


def test_what_was_sent_is_in_figures(outcome: BacktestResult) -> None:
    mask = outcome.strategies[-1].figures
    row = titled(outcome, "What was sent").rows[1]
    assert row[1:3] == ("10", f"{mask.sent:,}")
    assert row[3] == f"{mask.sent / mask.untrimmed:.0%}"


def test_dollars_stand_beside_those_of_no_trimming(outcome: BacktestResult) -> None:
    for title, value in (("Dollars for input", "1.00"), ("with output", "1.00")):
        none, _ = titled(outcome, title).rows
        assert all(cell.endswith(f" {value}") for cell in none[1:])
    compared = [each for each in outcome.strategies if each.strategy == "baseline:mask"]
    cells = titled(outcome, "Dollars for input").rows[1][1:]
    assert [float(cell.split()[1]) for cell in cells] == [round(each.ratio or 0, 2) for each in compared]
    highest = titled(outcome, "most expensive").rows[1][1:]
    assert [float(cell) for cell in highest] == [round(each.highest_ratio or 0, 2) for each in compared]


def test_every_figure_of_recall_says_what_it_does_not_mean(outcome: BacktestResult) -> None:
    sheet = titled(outcome, "later tool calls")
    assert "Presence is necessary, not sufficient" in sheet.note
    assert sheet.rows[0][0] == "baseline:none"


def test_without_recall_there_is_no_such_table() -> None:
    blind = Backtest([], [price_class(0.1)], COUNTER, recall=False).run([history(agent(2))])
    assert not any("later tool calls" in sheet.title for sheet in report_tables(blind))


def test_a_line_for_each_session(outcome: BacktestResult) -> None:
    (sheet,) = session_tables(outcome, ["read 0.25"])
    assert sheet.columns == ("session", "requests", "largest", "dollars", "baseline:mask")
    assert [row[0] for row in sheet.rows] == ["long", "short"]
    assert sheet.rows[1][-1] == "1.00"
    assert "read 0.25" in sheet.title


def test_the_most_common_prices_are_the_usual_ones(outcome: BacktestResult) -> None:
    assert main_prices(outcome) == "read 0.1"
    silent = price_class(0.3)
    mine = PriceClass(name="mine", dollars=silent.dollars, prices=silent.prices)
    assert main_prices(Backtest([], [mine], COUNTER, recall=False).run([history(agent(1))])) == "mine"


def test_what_is_not_known_is_a_dash() -> None:
    free = price_class(0.1, dollars=0)
    found = Backtest([], [free], COUNTER).run([history([user("a"), reply("b")])])
    assert titled(found, "Dollars for input").rows == (("baseline:none", "0.0000 -"),)
    assert titled(found, "with output").rows == (("baseline:none", "-"),)
    assert titled(found, "later tool calls").rows[0][1:] == (*["-"] * 9, "0", "-")


# -------------------------------------------------------------------------------------- HTML


HOSTILE = "</style><script>alert('1')</script>&\"<img src=x onerror=y>"
SHEETS = [
    ReportTable(title=HOSTILE, columns=("", HOSTILE), rows=((HOSTILE, "1"), ("会话", HOSTILE)), note=HOSTILE),
    ReportTable(title="plain", columns=("name", "a", "b"), rows=(("x", "1", "2"),)),
]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.cells: list[str] = []
        self.addresses: list[str | None] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value for name, value in attrs if name in {"src", "href", "onerror"}]
        if tag in {"td", "th"}:
            self.cells.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] in {"td", "th"} and data.strip():
            self.cells[-1] += data


def read(text: str) -> _Reader:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    return reader


def test_every_text_is_escaped_and_nothing_is_loaded() -> None:
    reader = read(page(HOSTILE, [HOSTILE], SHEETS))
    assert not {"script", "img", "link", "iframe"} & set(reader.tags)
    assert reader.addresses == []
    assert reader.cells == ["", HOSTILE, HOSTILE, "1", "会话", HOSTILE, "name", "a", "b", "x", "1", "2"]


def test_the_html_is_one_whole_page() -> None:
    text = page("Backtest", ["a line"], SHEETS)
    assert text.startswith("<!doctype html>\n<html lang=")
    assert text.endswith("</html>\n")
    assert [read(text).tags.count(tag) for tag in ("h1", "h2", "table", "tbody")] == [1, 2, 2, 2]
    assert "<p>a line</p>" in text


# -------------------------------------------------------------------------------------- JSON


def test_json_has_every_figure_unrounded() -> None:
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
        assert total["most_expensive"]["ratio"] == max(each["ratio"] for each in parts)
        sources = total["tokens_read"] + total["tokens_written"] + total["tokens_uncached"]
        assert sources == total["tokens_sent"]
    assert data["recall_means"] == "presence is necessary, not sufficient"
    assert set(data["totals"][0]["recall"]) == {"every", "pinned", "near", "far", "tool_only", "key", "chance"}
    assert set(data["totals"][0]["recall"]["far"]) >= {"grounded", "present", "recall", "bound_recall", "whole_calls"}


def test_json_has_null_for_recall_that_was_not_measured() -> None:
    data = as_data(Backtest([], standard_classes(), COUNTER, recall=False).run([history(agent(1))]))
    assert data["totals"][0]["recall"] is None

from __future__ import annotations

import pytest

from proxy.backtest.baselines import baseline
from proxy.backtest.comparison import Backtest
from proxy.backtest.figures import Outcome
from proxy.backtest.price import PriceClass, price_class, standard_classes
from proxy.backtest.sheets import Sheet, session_sheets, sheets, usual
from tests.backtest.histories import COUNTER, agent, history, reply, user


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    test = Backtest([baseline("baseline:mask")], standard_classes(), COUNTER)
    return test.run([history(agent(8), "long"), history([user("a"), reply("b")], "short")])


def titled(outcome: Outcome, words: str) -> Sheet:
    (found,) = (sheet for sheet in sheets(outcome) if words in sheet.title)
    return found


def test_every_table_is_whole(outcome: Outcome) -> None:
    names = [name for name, *_ in titled(outcome, "Dollars").rows]
    assert names == ["baseline:none", "baseline:mask"]
    for sheet in (*sheets(outcome), *session_sheets(outcome, [each.name for each in outcome.classes])):
        assert all(len(row) == len(sheet.columns) for row in sheet.rows)
        assert all(cell for row in sheet.rows for cell in row)
        assert len(sheet.rows) == 2


def test_what_was_sent_is_in_figures(outcome: Outcome) -> None:
    mask = outcome.compared[-1].figures
    row = titled(outcome, "What was sent").rows[1]
    assert row[1:3] == ("10", f"{mask.sent:,}")
    assert row[3] == f"{mask.sent / mask.untrimmed:.0%}"


def test_dollars_stand_beside_those_of_no_trimming(outcome: Outcome) -> None:
    for title, value in (("Dollars for input", "1.00"), ("with output", "1.00")):
        none, _ = titled(outcome, title).rows
        assert all(cell.endswith(f" {value}") for cell in none[1:])
    compared = [each for each in outcome.compared if each.strategy == "baseline:mask"]
    cells = titled(outcome, "Dollars for input").rows[1][1:]
    assert [float(cell.split()[1]) for cell in cells] == [round(each.ratio or 0, 2) for each in compared]
    dearest = titled(outcome, "dearest").rows[1][1:]
    assert [float(cell) for cell in dearest] == [round(each.dearest or 0, 2) for each in compared]


def test_every_figure_of_recall_says_what_it_does_not_mean(outcome: Outcome) -> None:
    sheet = titled(outcome, "later tool calls")
    assert "Presence is necessary, not sufficient" in sheet.note
    assert sheet.rows[0][0] == "baseline:none"


def test_without_recall_there_is_no_such_table() -> None:
    blind = Backtest([], [price_class(0.1)], COUNTER, recall=False).run([history(agent(2))])
    assert not any("later tool calls" in sheet.title for sheet in sheets(blind))


def test_a_line_for_each_session(outcome: Outcome) -> None:
    (sheet,) = session_sheets(outcome, ["read 0.25"])
    assert sheet.columns == ("session", "requests", "largest", "dollars", "baseline:mask")
    assert [row[0] for row in sheet.rows] == ["long", "short"]
    assert sheet.rows[1][-1] == "1.00"
    assert "read 0.25" in sheet.title


def test_the_most_common_prices_are_the_usual_ones(outcome: Outcome) -> None:
    assert usual(outcome) == "read 0.1"
    silent = price_class(0.3)
    mine = PriceClass(name="mine", dollars=silent.dollars, prices=silent.prices)
    assert usual(Backtest([], [mine], COUNTER, recall=False).run([history(agent(1))])) == "mine"


def test_what_is_not_known_is_a_dash() -> None:
    free = price_class(0.1, dollars=0)
    found = Backtest([], [free], COUNTER).run([history([user("a"), reply("b")])])
    assert titled(found, "Dollars for input").rows == (("baseline:none", "0.0000 -"),)
    assert titled(found, "with output").rows == (("baseline:none", "-"),)
    assert titled(found, "later tool calls").rows[0][1:-1] == ("-",) * 6

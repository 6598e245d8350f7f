from __future__ import annotations

import pytest

from proxy.backtest.cache import NOTHING, Use
from proxy.backtest.figures import Figures, Spent, ratio, summed
from proxy.backtest.recall import Counts, RecallCounts


def test_what_was_spent_adds_up() -> None:
    both = Spent(Use(1, 2, 3), 0.5, 0.25) + Spent(Use(10, 20, 30), 1.5, 0.75)
    assert both == Spent(Use(11, 22, 33), 2.0, 1.0)
    assert both.total == 3.0


def test_output_without_a_price_has_no_sum() -> None:
    assert Spent(NOTHING, 1.0, None).total is None
    assert (Spent(NOTHING, 1.0, None) + Spent(NOTHING, 1.0, 1.0)).output is None
    assert (Spent(NOTHING, 1.0, 1.0) + Spent(NOTHING, 1.0, None)).total is None


def test_figures_add_up_and_the_largest_stays() -> None:
    recall = RecallCounts(far=Counts(grounded=4, present=3))
    one = Figures(1, 2, 300, 200, 150, 7, 1, 20, Spent(Use(plain=200), 1.0, 1.0), recall, {"odd": 2})
    two = Figures(1, 3, 400, 400, 100, 9, 0, 30, Spent(Use(read=400), 0.5, 1.0), recall, {"odd": 1, "new": 1})
    both = one + two
    assert both == Figures(
        *(2, 5, 700, 600, 150, 9, 1, 50, Spent(Use(400, 0, 200), 1.5, 2.0)),
        RecallCounts(far=Counts(grounded=8, present=6)),
        {"odd": 3, "new": 1},
    )
    assert summed([one, two]) == both
    assert summed([]) == Figures()


def test_recall_that_nobody_looked_for_stays_unknown() -> None:
    seen = Figures(recall=RecallCounts(far=Counts(grounded=1)))
    assert (Figures() + Figures()).recall is None
    assert (Figures() + seen).recall == seen.recall
    assert (seen + Figures()).recall == seen.recall


def test_a_ratio_is_of_input_alone() -> None:
    assert ratio(Spent(NOTHING, 1.0, 9.0), Spent(NOTHING, 4.0, 9.0)) == pytest.approx(0.25)
    assert ratio(Spent(NOTHING, 1.0), Spent()) is None

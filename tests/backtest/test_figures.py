from __future__ import annotations

import pytest

from proxy.backtest.cache import NOTHING, Use
from proxy.backtest.figures import Figures, Spent, ratio, summed
from proxy.backtest.recall import Counts, RecallCounts


def test_what_was_spent_adds_up() -> None:
    both = Spent(use=Use(read=1, written=2, plain=3), input=0.5, output=0.25) + Spent(
        use=Use(read=10, written=20, plain=30), input=1.5, output=0.75
    )
    assert both == Spent(use=Use(read=11, written=22, plain=33), input=2.0, output=1.0)
    assert both.total == 3.0


def test_output_without_a_price_has_no_sum() -> None:
    assert Spent(use=NOTHING, input=1.0, output=None).total is None
    assert (
        Spent(use=NOTHING, input=1.0, output=None) + Spent(use=NOTHING, input=1.0, output=1.0)
    ).output is None
    assert (
        Spent(use=NOTHING, input=1.0, output=1.0) + Spent(use=NOTHING, input=1.0, output=None)
    ).total is None


def test_figures_add_up_and_the_largest_stays() -> None:
    recall = RecallCounts(far=Counts(grounded=4, present=3))
    one = Figures(
        sessions=1,
        requests=2,
        untrimmed=300,
        sent=200,
        largest=150,
        most_messages=7,
        moves=1,
        output=20,
        spent=Spent(use=Use(plain=200), input=1.0, output=1.0),
        recall=recall,
        warnings={"odd": 2},
    )
    two = Figures(
        sessions=1,
        requests=3,
        untrimmed=400,
        sent=400,
        largest=100,
        most_messages=9,
        moves=0,
        output=30,
        spent=Spent(use=Use(read=400), input=0.5, output=1.0),
        recall=recall,
        warnings={"odd": 1, "new": 1},
    )
    both = one + two
    assert both == Figures(
        *(
            2,
            5,
            700,
            600,
            150,
            9,
            1,
            50,
            Spent(use=Use(read=400, written=0, plain=200), input=1.5, output=2.0),
        ),
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
    assert ratio(
        Spent(use=NOTHING, input=1.0, output=9.0), Spent(use=NOTHING, input=4.0, output=9.0)
    ) == pytest.approx(0.25)
    assert ratio(Spent(use=NOTHING, input=1.0), Spent()) is None

from __future__ import annotations

import pytest

from proxy.trimming.model import Prices, Step

FLAT = Prices(read=0.1, write=1.0, output=5.0, lifetime=300.0, minimum=1024)


def test_without_steps_every_request_costs_the_same() -> None:
    assert FLAT.factor(0) == FLAT.factor(10_000_000) == 1.0


@pytest.mark.parametrize(
    ("tokens", "factor"), [(0, 1.0), (128_000, 1.0), (128_001, 2.0), (272_000, 2.0), (272_001, 3.5)]
)
def test_a_step_holds_for_what_is_above_it(tokens: int, factor: float) -> None:
    prices = Prices(
        read=0.1,
        write=1.0,
        output=5.0,
        lifetime=300.0,
        minimum=1024,
        steps=(Step(above=128_000, factor=2.0), Step(above=272_000, factor=3.5)),
    )
    assert prices.factor(tokens) == factor


def test_who_does_not_say_where_prices_come_from_has_assumed_them() -> None:
    assert FLAT.source == "assumed"

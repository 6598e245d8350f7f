from __future__ import annotations

import pytest

from proxy.backtest.cache import Rule, Use
from proxy.backtest.price import PriceClass, class_of, price_class, standard_classes
from proxy.config import ModelRule
from proxy.models import Catalogue, Dollars, DollarStep

USE = Use(read=600_000, written=300_000, plain=100_000)
"""A request of a million tokens."""


@pytest.mark.parametrize(
    ("read", "write", "dollars"),
    [
        (0.5, 1.0, 0.7),  # 0.6 * 0.5 + 0.3 * 1 + 0.1
        (0.25, 1.0, 0.55),
        (0.1, 1.0, 0.46),
        (0.1, 1.25, 0.535),  # 0.6 * 0.1 + 0.3 * 1.25 + 0.1
        (0.05, 1.25, 0.505),
    ],
)
def test_what_a_request_costs_in_each_class(read: float, write: float, dollars: float) -> None:
    assert price_class(read, write).input_dollars(USE) == pytest.approx(dollars)
    assert price_class(read, write, dollars=3).input_dollars(USE) == pytest.approx(3 * dollars)


def test_output_is_priced_apart() -> None:
    assert price_class(0.1, dollars=2, output=5).output_dollars(USE, 100_000) == pytest.approx(1.0)
    silent = PriceClass(
        name="m", dollars=Dollars(input=1, cached_read=1, cache_write=1), prices=price_class(0.1).prices
    )
    assert silent.output_dollars(USE, 100_000) is None


def test_the_five_classes_are_the_same_for_policies_and_for_the_bill() -> None:
    classes = standard_classes(2.5)
    assert [each.name for each in classes] == [
        *("read 0.5", "read 0.25", "read 0.1", "read 0.1, write 1.25", "read 0.05, write 1.25")
    ]
    for each in classes:
        assert each.dollars.input == 2.5
        assert each.dollars.cached_read == pytest.approx(each.prices.read * 2.5)
        assert each.dollars.cache_write == pytest.approx(each.prices.write * 2.5)
        assert each.matching == ("blocks" if each.prices.write == 1 else "breakpoints")


@pytest.mark.parametrize(("taken", "explicit"), [("anthropic", True), ("openai", True), ("none", False)])
def test_marks_are_explicit_where_the_model_takes_them(taken: str, explicit: bool) -> None:
    cache = {"matching": "breakpoints", "breakpoints": taken}
    rule = ModelRule.model_validate({"match": ["mine"], "prices": {"input": 2}, "cache": cache})
    found = class_of("mine", Catalogue((rule,)).facts("mine", None))
    assert found is not None
    assert found.rule(timed=False).explicit is explicit


def test_without_a_clock_nothing_is_forgotten() -> None:
    each = price_class(0.1, 1.25)
    assert each.rule(timed=True) == Rule(matching="breakpoints", block=128, minimum=1024, lifetime=300)
    assert each.rule(timed=False) == Rule(matching="breakpoints", block=128, minimum=1024, lifetime=None)


def test_a_step_counts_for_the_whole_request() -> None:
    dollars = Dollars(
        input=1,
        cached_read=0.1,
        cache_write=1,
        output=4,
        steps=(
            DollarStep(above=500_000, dollars=Dollars(input=2, cached_read=0.2, cache_write=2, output=6)),
        ),
    )
    each = PriceClass(name="m", dollars=dollars, prices=price_class(0.1).prices)
    assert each.input_dollars(Use(plain=500_000)) == pytest.approx(0.5)
    assert each.input_dollars(Use(plain=600_000)) == pytest.approx(1.2)
    assert each.output_dollars(Use(plain=600_000), 1_000_000) == pytest.approx(6)


def test_a_model_brings_its_prices_and_its_cache() -> None:
    rule = ModelRule.model_validate(
        {
            "match": ["mine"],
            "prices": {"input": 2, "cached_read": 0.5, "cache_write": 3, "output": 8},
            "cache": {"matching": "breakpoints", "minimum": 2048, "lifetime": 60},
        }
    )
    catalogue = Catalogue((rule,))
    found = class_of("mine", catalogue.facts("mine", None))
    assert found is not None
    assert found.name == "mine"
    assert found.input_dollars(USE) == pytest.approx(0.6 * 0.5 + 0.3 * 3 + 0.1 * 2)
    assert found.rule(timed=True) == Rule(
        matching="breakpoints", block=found.block, minimum=2048, lifetime=60, explicit=False
    )
    assert class_of("nobody-knows", catalogue.facts("nobody-knows", None)) is None

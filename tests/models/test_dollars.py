from __future__ import annotations

from typing import Any

import pytest

from proxy.models.dollars import Dollars, DollarStep, cost

SIMPLE = Dollars(input=2.0, cached_read=0.2, cache_write=2.5, output=10.0)
STEPPED = Dollars(
    input=1.0,
    cached_read=0.1,
    cache_write=1.0,
    output=4.0,
    steps=(
        DollarStep(above=1000, dollars=Dollars(input=2.0, cached_read=0.2, cache_write=2.0, output=6.0)),
        DollarStep(above=5000, dollars=Dollars(input=3.0, cached_read=0.3, cache_write=3.0, output=8.0)),
    ),
)


def in_millionths(usage: dict[str, Any], dollars: Dollars = SIMPLE) -> float:
    spent = cost(usage, dollars)
    assert spent is not None
    return round(spent * 1_000_000, 9)


def test_input_and_output() -> None:
    assert in_millionths({"prompt_tokens": 100, "completion_tokens": 10}) == 100 * 2 + 10 * 10


@pytest.mark.parametrize(
    "reported",
    [
        {"prompt_tokens_details": {"cached_tokens": 60}},
        {"cache_read_input_tokens": 60},
        {"prompt_cache_hit_tokens": 60, "prompt_cache_miss_tokens": 40},
        {"cached_tokens": 60},
        {"prompt_tokens_details": {"cached_tokens": 60}, "prompt_cache_hit_tokens": 60},
        {"prompt_tokens_details": {"cached_tokens": 0}, "prompt_cache_hit_tokens": 60},
        {"prompt_tokens_details": None, "cached_tokens": 60},
    ],
)
def test_cached_tokens_are_part_of_the_prompt_wherever_they_are_told(reported: dict[str, Any]) -> None:
    assert in_millionths({"prompt_tokens": 100, **reported}) == pytest.approx(40 * 2 + 60 * 0.2)


@pytest.mark.parametrize(
    "reported",
    [
        {"prompt_tokens_details": {"cached_tokens": 60, "cache_write_tokens": 30}},
        {"prompt_tokens_details": {"cached_tokens": 60, "cache_creation_tokens": 30}},
        {"cache_read_input_tokens": 60, "cache_creation_input_tokens": 30},
    ],
)
def test_written_tokens_have_a_price_of_their_own(reported: dict[str, Any]) -> None:
    assert in_millionths({"prompt_tokens": 100, **reported}) == pytest.approx(10 * 2 + 60 * 0.2 + 30 * 2.5)


def test_more_cached_tokens_than_prompt_tokens_are_counted_apart_from_them() -> None:
    usage = {"prompt_tokens": 10, "cache_read_input_tokens": 900, "cache_creation_input_tokens": 200}
    assert in_millionths(usage) == pytest.approx(10 * 2 + 900 * 0.2 + 200 * 2.5)
    # And they all count for the step.
    assert in_millionths(usage, STEPPED) == pytest.approx(10 * 2 + 900 * 0.2 + 200 * 2)


@pytest.mark.parametrize(
    ("tokens", "price", "output"), [(1000, 1.0, 4.0), (1001, 2.0, 6.0), (5000, 2.0, 6.0), (5001, 3.0, 8.0)]
)
def test_a_step_holds_for_the_whole_request(tokens: int, price: float, output: float) -> None:
    usage = {"prompt_tokens": tokens, "completion_tokens": 10}
    assert in_millionths(usage, STEPPED) == pytest.approx(tokens * price + 10 * output)


def test_reasoning_is_part_of_the_output_unless_the_sum_says_otherwise() -> None:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 50,
        "completion_tokens_details": {"reasoning_tokens": 40},
    }
    assert in_millionths({**usage, "total_tokens": 150}) == 100 * 2 + 50 * 10
    assert in_millionths({**usage, "total_tokens": 190}) == 100 * 2 + 90 * 10
    assert in_millionths(usage) == 100 * 2 + 50 * 10


@pytest.mark.parametrize(
    "usage",
    [
        None,
        {},
        {"completion_tokens": 5},
        {"prompt_tokens": None},
        {"prompt_tokens": "100"},
        {"prompt_tokens": 1.5},
        {"prompt_tokens": True},
        {"prompt_tokens": -1},
    ],
)
def test_without_a_number_of_prompt_tokens_nothing_is_told(usage: dict[str, Any] | None) -> None:
    assert cost(usage, SIMPLE) is None


@pytest.mark.parametrize("details", [None, 7, "many", [], {}, {"cached_tokens": "60"}, {"cached_tokens": -5}])
def test_details_that_are_none_are_passed_over(details: Any) -> None:
    assert in_millionths({"prompt_tokens": 100, "prompt_tokens_details": details}) == 200


def test_without_a_price_nothing_is_told() -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    assert cost(usage, None) is None
    silent = Dollars(input=1.0, cached_read=1.0, cache_write=1.0)
    assert cost(usage, silent) is None
    assert in_millionths({"prompt_tokens": 100, "completion_tokens": 0}, silent) == 100


def test_what_is_free_costs_nothing() -> None:
    assert (
        cost(
            {"prompt_tokens": 100, "completion_tokens": 10},
            Dollars(input=0.0, cached_read=0.0, cache_write=0.0, output=0.0),
        )
        == 0.0
    )

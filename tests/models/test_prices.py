from __future__ import annotations

import socket
import subprocess
import sys
from datetime import UTC, datetime, time
from decimal import Decimal
from typing import Any

import pytest
from genai_prices.types import (
    ClauseContains,
    ClauseStartsWith,
    ConditionalPrice,
    ModelInfo,
    ModelPrice,
    Provider,
    Tier,
    TieredPrices,
    TimeOfDateConstraint,
)

from proxy.models import prices as module
from proxy.models.prices import Dollars, DollarStep, Published, cost, load, published

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


def model(name: str, *, window: int | None = None, **prices: str | TieredPrices) -> ModelInfo:
    return ModelInfo(
        id=name,
        match=ClauseStartsWith(name),
        context_window=window,
        prices=ModelPrice(**{key: Decimal(p) if isinstance(p, str) else p for key, p in prices.items()}),
    )


def tiered(base: str, *tiers: tuple[int, str]) -> TieredPrices:
    return TieredPrices(Decimal(base), [Tier(start, Decimal(price)) for start, price in tiers])


NIGHT = ModelInfo(
    id="owl",
    match=ClauseStartsWith("owl"),
    prices=[
        ConditionalPrice(prices=ModelPrice(input_mtok=Decimal(4))),
        ConditionalPrice(TimeOfDateConstraint(time(22), time(6)), prices=ModelPrice(input_mtok=Decimal(1))),
    ],
)
MAKER = Provider(
    id="maker",
    name="Maker",
    api_pattern=r"https://api\.maker\.example",
    model_match=ClauseStartsWith("big"),
    models=[
        model("big-1", window=1000, input_mtok="2", cache_read_mtok="0.5", output_mtok="8"),
        model("big-2", input_mtok="3", output_mtok="6"),
    ],
)
SHOP = Provider(
    id="shop",
    name="Shop",
    api_pattern=r"https://shop\.example",
    fallback_model_providers=["maker"],
    models=[
        model("maker/big-1", input_mtok="9", output_mtok="9"),
        model(
            "stairs",
            input_mtok=tiered("1", (1000, "2"), (9000, "4")),
            cache_read_mtok=tiered("0.1", (1000, "0.2")),
            cache_write_mtok="1.25",
            output_mtok=tiered("5", (1000, "7")),
        ),
        model("kept-for-money", input_mtok="1", cache_read_mtok="0.1", cache_write_mtok="0.08"),
        model("sound", audio_hours="3"),
        model("stepped-output", input_mtok="1", output_mtok=tiered("5", (500, "6"))),
        NIGHT,
    ],
)
# Two makers may claim a name; the one who has the model is meant.
CLAIMS = Provider(id="claims", name="Claims", api_pattern="https://claims", model_match=ClauseContains("big"))


@pytest.fixture
def _a_small_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "load", lambda: [CLAIMS, MAKER, SHOP])


small = pytest.mark.usefixtures("_a_small_list")


def found(name: str, base_url: str | None = None, moment: datetime = NOON) -> Published:
    listed = published(name, base_url, moment)
    assert listed is not None
    return listed


@small
def test_at_a_known_address_only_that_providers_prices_count() -> None:
    theirs = found("maker/big-1", "https://shop.example/v1").dollars
    assert theirs is not None
    assert theirs.input == 9
    assert published("big-3", "https://api.maker.example/v1", NOON) is None
    assert published("stairs", "https://api.maker.example/v1", NOON) is None


@small
def test_a_reseller_has_the_prices_of_the_maker() -> None:
    assert found("big-2", "https://shop.example/v1").dollars == Dollars(input=3, cached_read=3, cache_write=3, output=6)


@small
@pytest.mark.parametrize("name", ["big-1", "BIG-1", "big-1-20260101", "maker/big-1", "gateway/maker/big-1", "x/big-1"])
@pytest.mark.parametrize("base_url", [None, "http://127.0.0.1:4000/v1"])
def test_at_an_unknown_address_the_maker_is_found_by_the_name(name: str, base_url: str | None) -> None:
    assert found(name, base_url) == Published(
        context_window=1000, dollars=Dollars(input=2, cached_read=0.5, cache_write=2, output=8), caches=True
    )


@small
@pytest.mark.parametrize("name", ["", "/", "maker/", "stairs", "small", "maker/small", "nobody/stairs"])
def test_a_model_that_is_not_listed_is_unknown(name: str) -> None:
    assert published(name, None, NOON) is None


@small
def test_a_step_has_all_prices_that_hold_above_it() -> None:
    assert found("shop/stairs") == Published(
        context_window=None,
        dollars=Dollars(
            input=1.0,
            cached_read=0.1,
            cache_write=1.25,
            output=5.0,
            steps=(
                DollarStep(above=1000, dollars=Dollars(input=2.0, cached_read=0.2, cache_write=2.0, output=7.0)),
                DollarStep(above=9000, dollars=Dollars(input=4.0, cached_read=0.2, cache_write=4.0, output=7.0)),
            ),
        ),
        caches=True,
    )


@small
def test_a_step_of_the_output_price_alone_is_a_step() -> None:
    dollars = found("shop/stepped-output").dollars
    assert dollars == Dollars(
        input=1,
        cached_read=1,
        cache_write=1,
        output=5,
        steps=(DollarStep(above=500, dollars=Dollars(input=1, cached_read=1, cache_write=1, output=6)),),
    )


@small
def test_writing_costs_at_least_the_input() -> None:
    dollars = found("shop/kept-for-money").dollars
    assert dollars == Dollars(input=1, cached_read=0.1, cache_write=1, output=None)


@small
def test_a_model_without_a_price_for_tokens_has_no_dollars() -> None:
    assert found("shop/sound") == Published(context_window=None, dollars=None, caches=False)


@small
@pytest.mark.parametrize(("hour", "price"), [(12, 4), (23, 1), (3, 1), (7, 4)])
def test_a_price_may_depend_on_the_hour(hour: int, price: float) -> None:
    dollars = found("shop/owl", moment=NOON.replace(hour=hour)).dollars
    assert dollars is not None
    assert dollars.input == price


def test_reading_the_list_uses_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert {"openai", "anthropic", "google", "deepseek"} <= {provider.id for provider in load()}


def test_unknown_names_take_no_memory() -> None:
    from genai_prices.data_snapshot import get_snapshot  # noqa: PLC0415 - it shows that the look-up is not used

    before = len(get_snapshot()._provider_misses), len(get_snapshot()._lookup_cache)
    for number in range(5):
        assert published(f"nobody-knows-{number}", None, NOON) is None
    assert before == (len(get_snapshot()._provider_misses), len(get_snapshot()._lookup_cache))


def test_importing_the_catalogue_does_not_read_the_list() -> None:
    program = (
        "import sys; import proxy.server.app, proxy.__main__, proxy.models.catalogue; "
        "proxy.models.catalogue.Catalogue(); print('genai_prices' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)  # noqa: S603 - our own
    assert run.stdout.split() == ["False"]


# --------------------------------------------------------------------- the cost of an exchange


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


def test_input_and_output_are_paid() -> None:
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
def test_cached_tokens_are_found_in_every_place_where_providers_report_them(reported: dict[str, Any]) -> None:
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


def test_more_cached_tokens_than_prompt_tokens_are_added_to_them() -> None:
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
    usage = {"prompt_tokens": 100, "completion_tokens": 50, "completion_tokens_details": {"reasoning_tokens": 40}}
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
        {"prompt_tokens": 2**63},
    ],
)
def test_the_cost_is_unknown_without_a_number_of_prompt_tokens(usage: dict[str, Any] | None) -> None:
    assert cost(usage, SIMPLE) is None


@pytest.mark.parametrize(
    "details", [None, 7, "many", [], {}, {"cached_tokens": "60"}, {"cached_tokens": -5}, {"cached_tokens": 2**62}]
)
def test_malformed_details_are_ignored(details: Any) -> None:
    assert in_millionths({"prompt_tokens": 100, "prompt_tokens_details": details}) == 200


def test_the_cost_is_unknown_without_a_price() -> None:
    usage = {"prompt_tokens": 100, "completion_tokens": 10}
    assert cost(usage, None) is None
    silent = Dollars(input=1.0, cached_read=1.0, cache_write=1.0)
    assert cost(usage, silent) is None
    assert in_millionths({"prompt_tokens": 100, "completion_tokens": 0}, silent) == 100


def test_writing_to_a_cache_for_an_hour_costs_twice_the_input() -> None:
    usage = {
        "prompt_tokens": 100,
        "completion_tokens": 0,
        "prompt_tokens_details": {"cache_write_tokens": 60},
        "cache_creation": {"ephemeral_5m_input_tokens": 20, "ephemeral_1h_input_tokens": 40},
    }
    assert in_millionths(usage, SIMPLE) == 40 * 2 + 20 * 2.5 + 40 * 4
    free = Dollars(input=2.0, cached_read=0.2, cache_write=2.0, output=10.0)
    assert in_millionths(usage, free) == 200


def test_a_free_model_costs_nothing() -> None:
    assert (
        cost(
            {"prompt_tokens": 100, "completion_tokens": 10},
            Dollars(input=0.0, cached_read=0.0, cache_write=0.0, output=0.0),
        )
        == 0.0
    )

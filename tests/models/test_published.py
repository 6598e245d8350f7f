from __future__ import annotations

import socket
import subprocess
import sys
from datetime import UTC, datetime, time
from decimal import Decimal

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

from proxy.models import published as module
from proxy.models.dollars import Dollars, DollarStep
from proxy.models.published import Published, load, published

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
def test_a_known_address_decides_whose_list_counts() -> None:
    theirs = found("maker/big-1", "https://shop.example/v1").dollars
    assert theirs is not None
    assert theirs.input == 9
    assert published("big-3", "https://api.maker.example/v1", NOON) is None
    assert published("stairs", "https://api.maker.example/v1", NOON) is None


@small
def test_who_sells_the_models_of_another_has_his_prices() -> None:
    assert found("big-2", "https://shop.example/v1").dollars == Dollars(
        input=3, cached_read=3, cache_write=3, output=6
    )


@small
@pytest.mark.parametrize(
    "name", ["big-1", "BIG-1", "big-1-20260101", "maker/big-1", "gateway/maker/big-1", "x/big-1"]
)
@pytest.mark.parametrize("base_url", [None, "http://127.0.0.1:4000/v1"])
def test_elsewhere_the_maker_is_found_by_the_name(name: str, base_url: str | None) -> None:
    assert found(name, base_url) == Published(
        context_window=1000, dollars=Dollars(input=2, cached_read=0.5, cache_write=2, output=8), caches=True
    )


@small
@pytest.mark.parametrize("name", ["", "/", "maker/", "stairs", "small", "maker/small", "nobody/stairs"])
def test_what_is_not_listed_is_not_known(name: str) -> None:
    assert published(name, None, NOON) is None


@small
def test_steps_hold_all_prices_above_them() -> None:
    assert found("shop/stairs") == Published(
        context_window=None,
        dollars=Dollars(
            input=1.0,
            cached_read=0.1,
            cache_write=1.25,
            output=5.0,
            steps=(
                DollarStep(
                    above=1000, dollars=Dollars(input=2.0, cached_read=0.2, cache_write=2.0, output=7.0)
                ),
                DollarStep(
                    above=9000, dollars=Dollars(input=4.0, cached_read=0.2, cache_write=4.0, output=7.0)
                ),
            ),
        ),
        caches=True,
    )


@small
def test_a_step_of_the_output_alone_is_one_too() -> None:
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
def test_a_model_without_a_price_for_tokens() -> None:
    assert found("shop/sound") == Published(context_window=None, dollars=None, caches=False)


@small
@pytest.mark.parametrize(("hour", "price"), [(12, 4), (23, 1), (3, 1), (7, 4)])
def test_a_price_may_depend_on_the_hour(hour: int, price: float) -> None:
    dollars = found("shop/owl", moment=NOON.replace(hour=hour)).dollars
    assert dollars is not None
    assert dollars.input == price


def test_the_list_itself_is_read_without_network(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("something asked the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert {"openai", "anthropic", "google", "deepseek"} <= {provider.id for provider in load()}


def test_nothing_is_remembered_of_names_that_are_not_known() -> None:
    from genai_prices.data_snapshot import get_snapshot  # noqa: PLC0415 - it shows that the look-up is not used

    before = len(get_snapshot()._provider_misses), len(get_snapshot()._lookup_cache)
    for number in range(5):
        assert published(f"nobody-knows-{number}", None, NOON) is None
    assert before == (len(get_snapshot()._provider_misses), len(get_snapshot()._lookup_cache))


def test_the_list_is_not_read_before_it_is_asked_for() -> None:
    program = (
        "import sys; import proxy.server.app, proxy.__main__, proxy.models.catalogue; "
        "proxy.models.catalogue.Catalogue(); print('genai_prices' in sys.modules)"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)  # noqa: S603 - our own
    assert run.stdout.split() == ["False"]

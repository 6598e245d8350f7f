"""What is open while the process serves, and what is known of models and their tokens."""

from __future__ import annotations

import sqlite3
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proxy.config import ModelPrices, ModelRule, Settings
from proxy.dialects.chat import CHAT
from proxy.dialects.chat.message import ChatMessage
from proxy.errors import StoreUnavailable
from proxy.models import Catalogue, ModelFacts
from proxy.pipeline import open_services
from proxy.pipeline.services import Knowledge
from proxy.tokens import Calibration, TokenCounter
from proxy.trimming import PlanningContext
from tests.support.stores import empty_store

SYSTEM = ChatMessage.of({"role": "system", "content": "You are terse."})
USER = ChatMessage.of({"role": "user", "content": "Good morning, how are you today?"})
TOOLS = b'[{"type":"function","function":{"name":"look","parameters":{"type":"object"}}}]'
RULE = ModelRule(match=("mine*",), context_window=4096, prices=ModelPrices(input=2, cached_read=0.5))


def _destination(model: str, dialect: str) -> SimpleNamespace:
    del model, dialect
    return SimpleNamespace(base_url="http://127.0.0.1:9/v1")


def knowledge(calibration: Calibration | None = None, *rules: ModelRule) -> Knowledge:
    upstream: Any = SimpleNamespace(destination=_destination)
    return Knowledge(TokenCounter("estimate"), Catalogue(rules), upstream, calibration, lambda: 100.5)


def known_of(told: Knowledge, model: str = "m", **more: Any) -> PlanningContext:
    given: dict[str, Any] = {"fixed": 0, "agent": None, "updated_at": None, **more}
    return told.planning(model, told.facts(model, CHAT), **given)


def test_planning_knows_what_the_operator_configured_for_a_model() -> None:
    known = known_of(knowledge(None, RULE), "mine-1", fixed=7, agent="boss", updated_at=90_000)
    assert (known.fixed_tokens, known.context_window, known.agent) == (7, 4096, "boss")
    assert known.prices is not None
    assert (known.prices.read, known.prices.source) == (0.25, "configured")
    assert known.idle == 10.5
    assert known.count(USER) == TokenCounter("estimate").message(USER, "mine-1") > 0


def test_a_model_without_a_rule_has_no_window_and_assumed_prices() -> None:
    known = known_of(knowledge(None, RULE), "other")
    assert (known.context_window, known.idle) == (None, None)
    assert known.prices is not None
    assert known.prices.source == "assumed"


def test_a_clock_that_was_set_back_gives_no_negative_idle_time() -> None:
    assert known_of(knowledge(), updated_at=200_000).idle == 0


def test_the_time_is_in_milliseconds() -> None:
    assert knowledge().now == 100_500


def test_it_is_learnt_how_much_a_cache_serves() -> None:
    told = knowledge(None, RULE)
    there = told.facts("mine-1", CHAT).base_url

    def served() -> float:
        prices = known_of(told, "mine-1").prices
        assert prices is not None
        return prices.served

    told.learn("mine-1", None, 0, None)  # nothing is reported: nothing is learnt
    told.learn("mine-1", None, 0, None, base_url=there, read=9000, missed=100)
    assert served() == 1
    for _ in range(50):
        told.learn("mine-1", None, 0, None, base_url=there, read=0, missed=9000)
    assert served() == 0
    assert known_of(told, "mine-2").prices != known_of(told, "mine-1").prices
    for _ in range(7):
        told.learn("mine-1", None, 0, None, base_url=there, read=9000)
    assert served() == 0.5


def test_what_is_learnt_of_a_cache_holds_for_its_address_only() -> None:
    told = knowledge(None, RULE)
    here, there = (told.facts_at("mine-1", f"http://127.0.0.1:{port}/v1") for port in (9, 10))
    for _ in range(50):
        told.learn("mine-1", None, 0, None, base_url=here.base_url, missed=9000)

    def served(facts: ModelFacts) -> float:
        prices = told.planning("mine-1", facts, fixed=0, agent=None, updated_at=None).prices
        assert prices is not None
        return prices.served

    assert (served(here), served(there)) == (0, 1)


@pytest.mark.anyio
async def test_a_vocabulary_is_built_when_a_model_needs_it_and_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[str, bool]] = []

    def load(name: str) -> None:
        built.append((name, threading.current_thread() is threading.main_thread()))

    monkeypatch.setattr("proxy.tokens.vocabulary._load", load)
    upstream: Any = None
    told = Knowledge(TokenCounter(), Catalogue(), upstream, None)
    for model in ("gpt-4o", "gpt-5", "gpt-4", "gpt-4o"):
        await told.can_count(model)
    assert built == [("o200k_base", False), ("cl100k_base", False)]


@pytest.mark.anyio
async def test_opening_builds_no_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proxy.tokens.vocabulary._load", lambda name: pytest.fail(f"{name} was built"))
    store = {"url": empty_store(tmp_path / "s.db"), "spool": str(tmp_path / "spool")}
    async with open_services(Settings(store=store)) as services:  # type: ignore[arg-type]  # pydantic reads it
        assert not services.counter.is_built("gpt-4o")


def test_instructions_and_tools_are_counted_once_each() -> None:
    known, counter = knowledge(), TokenCounter("estimate")
    assert known.fixed_tokens((), None, "m") == 0
    lead, tools = known.fixed_tokens((SYSTEM,), None, "m"), known.fixed_tokens((), TOOLS, "m")
    assert (lead, tools) == (counter.message(SYSTEM, "m"), counter.json(TOOLS, "m"))
    assert known.fixed_tokens((SYSTEM, SYSTEM), TOOLS, "m") == 2 * lead + tools


def test_a_session_learns_the_scale_of_upstreams_counting() -> None:
    known = knowledge(Calibration())
    first = known.learn("m", None, 1_000, 1_300)
    assert first == 1.3
    assert known_of(known, scale=first).scale == 1.3
    second = known.learn("m", first, 1_000, 1_000)
    assert second == pytest.approx(1.24)
    assert known_of(known, scale=1.23456).scale == 1.23
    assert known_of(known).scale == 1.0


@pytest.mark.parametrize("reported", [None, "1300", True, 1300.0, {"tokens": 1300}])
def test_a_reported_value_that_is_no_integer_is_ignored(reported: object) -> None:
    known = knowledge(Calibration())
    assert known.learn("m", None, 1_000, reported) is None
    assert known.learn("m", 1.1, 1_000, reported) == 1.1


def test_without_calibration_nothing_is_learnt() -> None:
    known = knowledge()
    assert known.learn("m", None, 1_000, 1_300) is None
    assert known_of(known, scale=1.3).scale == 1.0


def test_a_new_catalogue_applies_at_once() -> None:
    known = knowledge()
    known.catalogue = Catalogue((RULE,))
    assert known.facts("mine-1", CHAT).context_window == 4096


# ------------------------------------------------------------------------------------------ opening


def settings_at(path: Path, **store: object) -> Settings:
    return Settings.model_validate(
        {
            "store": {"url": f"sqlite:///{path}", "spool": str(path.parent / "spool"), **store},
            "tokens": {"method": "estimate", "calibrate": False},
        }
    )


@pytest.mark.anyio
async def test_services_are_open_and_closed_at_the_end(tmp_path: Path) -> None:
    async with open_services(settings_at(tmp_path / "s.db")) as services:
        await services.store.ready()
        assert services.knowledge.counter is services.counter
        assert services.counter.text("four words are here", "m") > 0
    with pytest.raises(StoreUnavailable):
        await services.store.ready()


@pytest.mark.anyio
async def test_a_start_does_not_wait_again_for_a_store_that_is_away(tmp_path: Path) -> None:
    settings, away = settings_at(tmp_path / "s.db"), StoreUnavailable("The store cannot be used. It is a test.")
    async with open_services(settings) as services:
        await services.outage.secret("a", 0)  # from now on it can start without the store
    with closing(sqlite3.connect(tmp_path / "s.db", isolation_level=None)) as holder:
        holder.execute("BEGIN EXCLUSIVE")
        async with open_services(settings, away=away) as services:
            assert services.store.circuit.down is away
            holder.execute("ROLLBACK")
            assert await services.store.circuit.closes(10)
            await services.store.ready()


@pytest.mark.anyio
async def test_a_store_of_another_version_is_not_opened(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="palimpsest upgrade"):
        async with open_services(settings_at(tmp_path / "s.db", migrate=False)):
            pass

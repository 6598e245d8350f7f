from __future__ import annotations

from typing import Any

import pytest

from proxy.config import Settings
from proxy.models import catalogue as module
from proxy.models.catalogue import Catalogue, ModelFacts, cache_rules
from proxy.models.prices import Dollars, DollarStep, Published
from proxy.trimming import Prices, Step

HERE = "http://127.0.0.1:4000/v1"
OPENAI = "https://api.openai.com/v1"
NOVEMBER_2026 = 1_793_534_400.0
"""Prices are listed with the dates from which they hold."""


def catalogue(*rules: dict[str, Any]) -> Catalogue:
    return Catalogue(Settings.model_validate({"models": list(rules)}).models, clock=lambda: NOVEMBER_2026)


@pytest.mark.parametrize(
    ("model", "base_url", "window"),
    [
        ("gpt-4o", OPENAI, 128_000),
        ("gpt-4o-mini-2024-07-18", None, 128_000),
        ("openai/gpt-4.1", "https://openrouter.ai/api/v1", 1_000_000),
        ("gpt-5", "https://me.openai.azure.com/openai/v1", 400_000),
        ("o3", OPENAI, 200_000),
        ("gpt-5.6-sol", OPENAI, 1_000_000),
        ("claude-sonnet-4-5", None, 200_000),
        ("anthropic/claude-opus-4.5", "https://openrouter.ai/api/v1", 200_000),
        ("deepseek-chat", "https://api.deepseek.com/v1", 64_000),
        ("gemini-2.5-flash", "https://generativelanguage.googleapis.com/v1beta/openai", 1_000_000),
        ("grok-4-0709", "https://api.x.ai/v1", 256_000),
        ("kimi-k2-0905-preview", "https://api.moonshot.ai/v1", 250_000),
        ("mistral-large-2512", "https://api.mistral.ai/v1", 250_000),
    ],
)
def test_well_known_models_have_windows_and_prices(model: str, base_url: str | None, window: int) -> None:
    facts = catalogue().facts(model, base_url)
    assert facts.context_window is not None
    assert facts.context_window >= window
    assert facts.prices.source == "known"
    assert 0 < facts.prices.read < 1 <= facts.prices.write <= 1.25
    assert facts.prices.output > 1
    assert facts.dollars is not None
    assert 0 < facts.dollars.cached_read < facts.dollars.input
    assert facts.prices.read == pytest.approx(facts.dollars.cached_read / facts.dollars.input, abs=1e-6)


def test_a_model_that_caches_by_itself_writes_for_free() -> None:
    facts = catalogue().facts("gpt-4o", OPENAI)
    assert facts.prices == Prices(read=0.5, write=1.0, output=4.0, lifetime=300.0, minimum=1024, source="known")
    assert (facts.matching, facts.block, facts.breakpoints) == ("blocks", 128, "none")


def test_a_model_that_caches_at_breakpoints_pays_for_writing() -> None:
    facts = catalogue().facts("gpt-5.6-sol", OPENAI)
    assert (facts.prices.read, facts.prices.write, facts.prices.lifetime) == (0.1, 1.25, 1800)
    assert (facts.matching, facts.breakpoints) == ("breakpoints", "openai")
    claude = catalogue().facts("anthropic/claude-sonnet-4.5", "https://openrouter.ai/api/v1")
    assert (claude.prices.read, claude.prices.write, claude.prices.lifetime) == (0.1, 1.25, 300)
    assert (claude.matching, claude.breakpoints) == ("breakpoints", "anthropic")


def test_a_price_step_multiplies_the_price_above_it() -> None:
    prices = catalogue().facts("claude-sonnet-4-5", None).prices
    assert prices.steps == (Step(above=200_000, factor=2.0),)
    assert (prices.factor(200_000), prices.factor(200_001)) == (1.0, 2.0)


def test_without_a_cache_cached_tokens_cost_the_same_as_others() -> None:
    here = catalogue().facts("claude-sonnet-4-5", "https://api.anthropic.com/v1")
    assert (here.prices.read, here.prices.write, here.breakpoints) == (1.0, 1.0, "none")
    old = catalogue().facts("claude-2", None)
    assert (old.prices.read, old.prices.write, old.breakpoints) == (1.0, 1.0, "none")


def test_an_unknown_model_has_common_facts() -> None:
    assert catalogue().facts("my-model", OPENAI) == ModelFacts(
        context_window=None,
        prices=Prices(read=0.1, write=1.0, output=4.0, lifetime=300.0, minimum=1024, source="assumed"),
        dollars=None,
        matching="blocks",
        block=128,
        breakpoints="none",
        base_url=OPENAI,
    )


def test_a_model_of_which_only_the_cache_is_known() -> None:
    facts = catalogue().facts("gpt-9.9-unheard-of", None)
    assert (facts.prices.source, facts.dollars, facts.breakpoints) == ("assumed", None, "openai")
    assert (facts.prices.read, facts.prices.write, facts.prices.lifetime) == (0.1, 1.25, 1800)


RULE = {
    "match": ["gpt-4o*", "mine"],
    "context_window": 32_768,
    "prices": {"input": 0.5, "cached_read": 0.05, "cache_write": 0.6, "output": 2},
    "cache": {"matching": "breakpoints", "minimum": 7, "lifetime": 60, "breakpoints": "anthropic", "key": False},
}


@pytest.mark.parametrize("model", ["gpt-4o", "gpt-4o-mini", "mine"])
def test_the_operators_settings_come_first(model: str) -> None:
    assert catalogue(RULE).facts(model, OPENAI) == ModelFacts(
        context_window=32_768,
        prices=Prices(read=0.1, write=1.2, output=4.0, lifetime=60.0, minimum=7, source="configured"),
        dollars=Dollars(input=0.5, cached_read=0.05, cache_write=0.6, output=2),
        matching="breakpoints",
        block=128,
        breakpoints="anthropic",
        base_url=OPENAI,
    )


@pytest.mark.parametrize(
    ("base_url", "taken"),
    [
        (OPENAI, True),
        ("https://mine.openai.azure.com/openai/v1", True),
        ("https://notopenai.com/v1", False),
        ("http://127.0.0.1:8000/v1", False),
    ],
)
def test_only_openai_and_azure_hosts_accept_a_cache_key_unless_set(base_url: str, taken: bool) -> None:
    assert catalogue().facts("gpt-4o", base_url).takes_key is taken
    assert catalogue({"match": ["*"], "cache": {"key": True}}).facts("gpt-4o", base_url).takes_key


def test_a_rule_does_not_change_other_models() -> None:
    assert catalogue(RULE).facts("gpt-5", OPENAI) == catalogue().facts("gpt-5", OPENAI)
    assert catalogue(RULE).facts("GPT-4o", OPENAI) == catalogue().facts("GPT-4o", OPENAI)


@pytest.mark.parametrize("key", ["context_window", "prices", "cache"])
def test_facts_that_a_rule_leaves_out_stay_as_published(key: str) -> None:
    known = catalogue().facts("gpt-4o", OPENAI)
    facts = catalogue({"match": ["gpt-4o"], key: RULE[key]}).facts("gpt-4o", OPENAI)
    assert (facts.context_window == known.context_window) is (key != "context_window")
    assert (facts.dollars == known.dollars) is (key != "prices")
    assert (facts.prices.lifetime == known.prices.lifetime) is (key != "cache")
    assert (facts.prices.source == "configured") is (key == "prices")


def test_a_rule_may_change_one_setting_of_the_cache() -> None:
    facts = catalogue({"match": ["*"], "cache": {"breakpoints": "none"}}).facts("gpt-5.6-sol", OPENAI)
    assert (facts.breakpoints, facts.matching, facts.prices.lifetime) == ("none", "breakpoints", 1800)


def test_a_setting_for_the_cache_means_that_there_is_one() -> None:
    there = "https://api.anthropic.com/v1"
    cache = {"matching": "breakpoints", "breakpoints": "anthropic"}
    facts = catalogue({"match": ["claude*"], "cache": cache}).facts("claude-sonnet-4-5", there)
    assert (facts.prices.read, facts.prices.write, facts.breakpoints) == (0.1, 1.25, "anthropic")


def test_only_the_first_rule_that_fits_counts() -> None:
    found = catalogue(
        {"match": ["a*"], "context_window": 1}, {"match": ["ab"], "context_window": 2, "prices": {"input": 1}}
    ).facts("ab", None)
    assert (found.context_window, found.dollars) == (1, None)


def test_prices_that_a_rule_leaves_out_equal_the_input_price() -> None:
    facts = catalogue({"match": ["a"], "prices": {"input": 2}}).facts("a", None)
    assert facts.dollars == Dollars(input=2, cached_read=2, cache_write=2, output=None)
    assert facts.prices == Prices(read=1.0, write=1.0, output=4.0, lifetime=300.0, minimum=1024, source="configured")


def test_a_rule_may_have_price_steps() -> None:
    steps = [{"above": 1000, "input": 4}, {"above": 2000, "input": 8, "cached_read": 1, "cache_write": 9, "output": 10}]
    rule = {"match": ["a"], "prices": {"input": 2, "cached_read": 0.5, "output": 3, "steps": steps}}
    facts = catalogue(rule).facts("a", None)
    assert facts.dollars == Dollars(
        input=2,
        cached_read=0.5,
        cache_write=2,
        output=3,
        steps=(
            DollarStep(above=1000, dollars=Dollars(input=4, cached_read=1, cache_write=4, output=6)),
            DollarStep(above=2000, dollars=Dollars(input=8, cached_read=1, cache_write=9, output=10)),
        ),
    )
    assert facts.prices.steps == (Step(above=1000, factor=2.0), Step(above=2000, factor=4.0))


def test_a_free_model_has_common_relative_prices() -> None:
    facts = catalogue({"match": ["a"], "prices": {"input": 0, "output": 0}}).facts("a", None)
    assert facts.dollars == Dollars(input=0, cached_read=0, cache_write=0, output=0)
    assert facts.prices == Prices(read=0.1, write=1.0, output=4.0, lifetime=300.0, minimum=1024, source="assumed")


FALLBACK = {**RULE, "match": ["*"], "fallback": True}


def test_a_fallback_applies_to_an_unknown_model() -> None:
    facts = catalogue(FALLBACK).facts("my-model", None)
    assert facts.context_window == 32_768
    assert facts.prices == Prices(read=0.1, write=1.2, output=4.0, lifetime=60.0, minimum=7, source="assumed")
    assert facts.dollars == Dollars(input=0.5, cached_read=0.05, cache_write=0.6, output=2)
    assert (facts.matching, facts.breakpoints) == ("breakpoints", "anthropic")


def test_a_fallback_does_not_apply_to_a_known_model() -> None:
    assert catalogue(FALLBACK).facts("gpt-4o", OPENAI) == catalogue().facts("gpt-4o", OPENAI)


def test_a_rule_comes_before_a_fallback() -> None:
    mine = {"match": ["my-model"], "prices": {"input": 1}, "cache": {"lifetime": 5}}
    facts = catalogue(FALLBACK, mine).facts("my-model", None)
    assert (facts.prices.source, facts.prices.read, facts.prices.lifetime) == ("configured", 1.0, 5)
    assert (facts.context_window, facts.prices.minimum) == (32_768, 7)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the names that are looked up, as they come to be."""
    names: list[str] = []

    def look_up(model: str, *_: object) -> Published | None:
        names.append(model)
        return None

    monkeypatch.setattr(module, "published", look_up)
    return names


def test_answers_are_kept_for_a_quarter_of_an_hour(asked: list[str]) -> None:
    now = [900_000.0]
    facts = Catalogue(clock=lambda: now[0]).facts
    for now[0] in (900_000.0, 900_000.0, 900_899.0):
        facts("a", None)
    assert asked == ["a"]
    facts("a", OPENAI)
    now[0] = 900_900.0
    facts("a", None)
    assert asked == ["a"] * 3


def test_long_names_are_cut_before_they_are_looked_up(asked: list[str]) -> None:
    facts = catalogue().facts
    facts("a" * 10_000_000, None)
    facts("a" * 10_000_001, None)
    assert asked == ["a" * 256]


def test_warming_reads_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    monkeypatch.setattr(module, "load", lambda: calls.append(1))
    catalogue().warm()
    assert calls == [1]


# ---------------------------------------------------------------- the table of providers' caches


@pytest.mark.parametrize(
    "model", ["gpt-4o", "gpt-4.1-mini", "gpt-5", "gpt-5.5", "openai/gpt-5.4-nano", "o3", "o4-mini", "ft:gpt-4o:me"]
)
def test_older_openai_models_cache_blocks(model: str) -> None:
    rules = cache_rules(model, "https://api.openai.com/v1")
    assert rules is not None
    assert (rules.matching, rules.block, rules.minimum) == ("blocks", 128, 1024)
    assert (rules.lifetime, rules.breakpoints) == (300, "none")


@pytest.mark.parametrize(
    "model", ["gpt-5.6", "gpt-5.6-sol", "openai/gpt-5.10", "gpt-6", "GPT-6.1-terra", "global.openai.gpt-7", "gpt-10-x"]
)
@pytest.mark.parametrize("base_url", [None, HERE, "https://api.openai.com/v1", "https://openrouter.ai/api/v1"])
def test_openai_models_from_5_6_on_cache_at_breakpoints(model: str, base_url: str | None) -> None:
    rules = cache_rules(model, base_url)
    assert rules is not None
    assert (rules.matching, rules.breakpoints) == ("breakpoints", "openai")
    assert (rules.minimum, rules.lifetime) == (1024, 1800)


@pytest.mark.parametrize(
    "model", ["gpt-35-turbo", "gpt-41", "gpt-54-mini", "gpt-4", "gpt-3.5-turbo-16k", "gpt-oss-120b"]
)
def test_names_that_look_like_later_models_cache_blocks(model: str) -> None:
    rules = cache_rules(model, None)
    assert rules is not None
    assert rules.matching == "blocks"


@pytest.mark.parametrize(
    "host",
    ["api.githubcopilot.com", "bedrock-runtime.eu-west-1.amazonaws.com", "me.openai.azure.com", "me.azure-api.net"],
)
def test_no_marks_are_sent_to_hosts_that_do_not_document_them(host: str) -> None:
    rules = cache_rules("gpt-5.6-sol", f"https://{host}/v1")
    assert rules is not None
    assert (rules.matching, rules.breakpoints, rules.lifetime) == ("breakpoints", "none", 1800)


@pytest.mark.parametrize(
    ("model", "minimum"),
    [
        ("claude-sonnet-4-5", 1024),
        ("anthropic/claude-sonnet-4.6", 1024),
        ("us.anthropic.claude-opus-4-1-20250805-v1:0", 1024),
        ("claude-opus-4-8", 1024),
        ("claude-opus-4-5-20251101", 4096),
        ("anthropic/claude-opus-4.6", 4096),
        ("claude-3-haiku-20240307", 2048),
        ("claude-3-5-haiku-latest", 2048),
        ("anthropic/claude-3.5-haiku", 2048),
        ("claude-haiku-4-5", 4096),
        ("claude-opus-5", 512),
        ("claude-fable-5", 512),
    ],
)
def test_claude_behind_a_gateway_caches_at_marks(model: str, minimum: int) -> None:
    rules = cache_rules(model, HERE)
    assert rules is not None
    assert rules.cached
    assert (rules.matching, rules.breakpoints) == ("breakpoints", "anthropic")
    assert (rules.minimum, rules.lifetime) == (minimum, 300)


def test_anthropics_own_endpoint_for_openais_clients_caches_nothing() -> None:
    rules = cache_rules("claude-sonnet-4-5", "https://api.anthropic.com/v1")
    assert rules is not None
    assert (rules.cached, rules.breakpoints) == (False, "none")
    native = cache_rules("claude-sonnet-4-5", "https://api.anthropic.com/v1/messages")
    assert native is not None
    assert (native.cached, native.breakpoints) == (True, "anthropic")
    # Only the host itself is meant.
    other = cache_rules("claude-sonnet-4-5", "https://api.anthropic.com.example.org/v1")
    assert other is not None
    assert other.cached


def test_a_model_of_any_name_caches_at_marks_behind_the_messages_api() -> None:
    rules = cache_rules("house-model", "http://127.0.0.1:4000/v1/messages")
    assert rules is not None
    assert (rules.matching, rules.breakpoints) == ("breakpoints", "anthropic")
    assert cache_rules("house-model", "http://127.0.0.1:4000/v1") is None
    known = cache_rules("deepseek-chat", "https://api.deepseek.com/anthropic/v1/messages")
    assert known is not None
    assert known.breakpoints == "none"


@pytest.mark.parametrize(
    ("model", "base_url", "block", "minimum", "lifetime"),
    [
        ("deepseek-chat", "https://api.deepseek.com/v1", 64, 64, 7200),
        ("deepseek/deepseek-v4-pro", None, 64, 64, 7200),
        ("gemini-2.5-pro", None, 128, 2048, 300),
        ("google/gemini-flash-latest", None, 128, 2048, 300),
        ("gemini-3.5-flash", None, 128, 4096, 300),
        ("gemini-4-argon", HERE, 128, 4096, 300),
        ("kimi-k3", None, 256, 256, 300),
        ("llama-3.3-70b-versatile", "https://api.groq.com/openai/v1", 128, 1024, 7200),
        ("openai/gpt-oss-120b", "https://api.groq.com/openai/v1", 128, 1024, 7200),
    ],
)
def test_other_models_cache_blocks_of_their_own_size(
    model: str, base_url: str | None, block: int, minimum: int, lifetime: float
) -> None:
    rules = cache_rules(model, base_url)
    assert rules is not None
    assert (rules.matching, rules.breakpoints) == ("blocks", "none")
    assert (rules.block, rules.minimum, rules.lifetime) == (block, minimum, lifetime)


@pytest.mark.parametrize("model", ["", "my-model", "llama3", "foo3", "egpt-6"])
def test_an_unknown_model_has_no_cache_rules(model: str) -> None:
    assert cache_rules(model, HERE) is None

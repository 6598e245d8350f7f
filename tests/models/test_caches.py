from __future__ import annotations

import pytest

from proxy.models.caches import cache_rules

HERE = "http://127.0.0.1:4000/v1"


@pytest.mark.parametrize(
    "model",
    ["gpt-4o", "gpt-4.1-mini", "gpt-5", "gpt-5.5", "openai/gpt-5.4-nano", "o3", "o4-mini", "ft:gpt-4o:me"],
)
def test_openai_before_breakpoints(model: str) -> None:
    rules = cache_rules(model, "https://api.openai.com/v1")
    assert rules is not None
    assert (rules.matching, rules.block, rules.minimum) == ("blocks", 128, 1024)
    assert (rules.lifetime, rules.breakpoints) == (300, "none")


@pytest.mark.parametrize(
    "model",
    [
        "gpt-5.6",
        "gpt-5.6-sol",
        "openai/gpt-5.10",
        "gpt-6",
        "GPT-6.1-terra",
        "global.openai.gpt-7",
        "gpt-10-x",
    ],
)
@pytest.mark.parametrize(
    "base_url", [None, HERE, "https://api.openai.com/v1", "https://openrouter.ai/api/v1"]
)
def test_openai_since_breakpoints(model: str, base_url: str | None) -> None:
    rules = cache_rules(model, base_url)
    assert rules is not None
    assert (rules.matching, rules.breakpoints) == ("breakpoints", "openai")
    assert (rules.minimum, rules.lifetime) == (1024, 1800)


@pytest.mark.parametrize(
    "model", ["gpt-35-turbo", "gpt-41", "gpt-54-mini", "gpt-4", "gpt-3.5-turbo-16k", "gpt-oss-120b"]
)
def test_names_that_only_look_later(model: str) -> None:
    rules = cache_rules(model, None)
    assert rules is not None
    assert rules.matching == "blocks"


@pytest.mark.parametrize(
    "host",
    [
        "api.githubcopilot.com",
        "bedrock-runtime.eu-west-1.amazonaws.com",
        "me.openai.azure.com",
        "me.azure-api.net",
    ],
)
def test_marks_are_not_sent_where_nobody_says_that_they_are_taken(host: str) -> None:
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
def test_claude_behind_a_gateway(model: str, minimum: int) -> None:
    rules = cache_rules(model, HERE)
    assert rules is not None
    assert rules.cached
    assert (rules.matching, rules.breakpoints) == ("breakpoints", "anthropic")
    assert (rules.minimum, rules.lifetime) == (minimum, 300)


def test_anthropics_own_endpoint_for_openais_clients_caches_nothing() -> None:
    rules = cache_rules("claude-sonnet-4-5", "https://api.anthropic.com/v1")
    assert rules is not None
    assert (rules.cached, rules.breakpoints) == (False, "none")
    # Only the host itself is meant.
    other = cache_rules("claude-sonnet-4-5", "https://api.anthropic.com.example.org/v1")
    assert other is not None
    assert other.cached


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
def test_others_that_cache_by_themselves(
    model: str, base_url: str | None, block: int, minimum: int, lifetime: float
) -> None:
    rules = cache_rules(model, base_url)
    assert rules is not None
    assert (rules.matching, rules.breakpoints) == ("blocks", "none")
    assert (rules.block, rules.minimum, rules.lifetime) == (block, minimum, lifetime)


@pytest.mark.parametrize("model", ["", "my-model", "llama3", "foo3", "egpt-6"])
def test_what_is_not_known(model: str) -> None:
    assert cache_rules(model, HERE) is None

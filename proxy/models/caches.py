"""How providers cache what they were sent: a table by model and host.

Providers do not tell it in their answers. It is taken from their documentation, as of November 2026:

    OpenAI       before GPT-5.6 prefixes of at least 1,024 tokens in steps of 128, kept for 5 to 10
                 minutes; since then only up to breakpoints, one of them at the newest message, kept for 30
    Anthropic    only up to `cache_control` marks, kept for 5 minutes; the shortest prefix depends on the
                 model. Its own endpoint for OpenAI's clients caches nothing; gateways to it pass marks on
    Google       prefixes of at least 2,048 tokens (since Gemini 3: 4,096), for how long is not said
    DeepSeek     prefixes, kept for hours
    Groq         prefixes, kept for 2 hours
    Moonshot     prefixes in steps of 256 (as others have measured), kept for 5 minutes

It knows no prices.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from msgspec import Struct
from msgspec.structs import replace

from proxy.config import Breakpoints, Matching


class CacheRules(Struct, frozen=True, kw_only=True):
    """How a model's provider caches."""

    matching: Matching = "blocks"
    """`blocks`: the longest common prefix counts, in whole blocks; `breakpoints`: only up to marks."""
    block: int = 128
    """Tokens of a block."""
    minimum: int = 1024
    """Tokens of the shortest prefix that is cached."""
    lifetime: float = 300.0
    """Seconds without a request after which it is gone."""
    breakpoints: Breakpoints = "none"
    """Which explicit marks the model takes."""
    cached: bool = True
    """Whether anything is cached at all."""
    key: bool = False
    """Whether requests may name the cache they belong to (`prompt_cache_key`); others may refuse that."""


COMMON: Final = CacheRules()
"""What is taken where nothing is known: OpenAI's older rules, which most providers follow."""

_LATER_GPT: Final = r"(?<![a-z])gpt-(5\.([6-9]|\d\d)|[6-9]|1\d)(?!\d)"
"""GPT-5.6 and later. Names like gpt-35-turbo and gpt-41 are deployments of older ones."""
_HALF_AN_HOUR: Final = 1800.0
_TWO_HOURS: Final = 7200.0


def _marked(minimum: int = 1024) -> CacheRules:
    return CacheRules(matching="breakpoints", minimum=minimum, breakpoints="anthropic")


_TABLE: Final = tuple(
    (re.compile(host), re.compile(model), rules)
    for host, model, rules in (
        (r"^api\.anthropic\.com$", "", CacheRules(cached=False)),
        ("", r"claude-3.*haiku", _marked(2048)),
        ("", r"claude.*haiku|claude-opus-4[-.][567]", _marked(4096)),
        ("", r"claude-(opus|fable|mythos)-5", _marked(512)),
        ("", r"claude", _marked()),
        # Not known to take OpenAI's marks; the breakpoint at the newest message needs none.
        (
            r"(\.|^)(githubcopilot\.com|amazonaws\.com|azure\.com|azure-api\.net)$",
            _LATER_GPT,
            CacheRules(matching="breakpoints", lifetime=_HALF_AN_HOUR),
        ),
        ("", _LATER_GPT, CacheRules(matching="breakpoints", lifetime=_HALF_AN_HOUR, breakpoints="openai")),
        (r"^api\.groq\.com$", "", CacheRules(lifetime=_TWO_HOURS)),
        ("", r"(?<![a-z])(gpt-|chatgpt-|o[134](?![a-z0-9]))", CacheRules()),
        ("", r"deepseek", CacheRules(block=64, minimum=64, lifetime=_TWO_HOURS)),
        ("", r"gemini-(2|[a-z])", CacheRules(minimum=2048)),
        ("", r"gemini", CacheRules(minimum=4096)),
        ("", r"kimi|moonshot", CacheRules(block=256, minimum=256)),
    )
)
"""Host, model and rules; both patterns are searched for, in lower case, and the first that fits is taken."""


_KEYED: Final = re.compile(r"(\.|^)(openai\.com|openai\.azure\.com)$")
"""Hosts that take a `prompt_cache_key`."""


def cache_rules(model: str, base_url: str | None) -> CacheRules | None:
    """Return how `model` is cached at `base_url`; None where nothing is known.

    Args:
        model: its name as requests give it, with or without its maker's (`anthropic/claude-…`).
        base_url: the address of the provider's API; None where it is not known.
    """
    name = model.lower()
    host = (urlsplit(base_url).hostname or "") if base_url is not None else ""
    fitting = (rules for hosts, models, rules in _TABLE if hosts.search(host) and models.search(name))
    rules = next(fitting, None)
    return replace(rules, key=True) if rules is not None and _KEYED.search(host) else rules

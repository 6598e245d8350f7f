"""Random policies of every edit that there is, for sessions of any size; the same seed gives the same ones.

A policy that contradicts itself, which no file can hold, is thrown away and another one made.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any, Final

from pydantic import ValidationError

from proxy.trimming.edits import TOOL_OUTPUT_TYPES
from proxy.trimming.model import Prices, Step
from proxy.trimming.policy import Policy

Settings = dict[str, Any]

PRICES: Final = (
    None,
    Prices(read=0.5, write=1.0, output=4.0, lifetime=300.0, minimum=1024, source="known"),
    Prices(read=0.1, write=1.25, output=5.0, lifetime=300.0, minimum=1024, source="known"),
    Prices(read=0.05, write=1.25, output=5.0, lifetime=3600.0, minimum=0, source="configured"),
    Prices(
        read=0.25,
        write=1.0,
        output=8.0,
        lifetime=60.0,
        minimum=128,
        steps=(Step(above=3000, factor=2.0),),
        source="known",
    ),
    Prices(read=1.0, write=1.0, output=4.0, lifetime=0.0, minimum=0, source="configured"),
)
"""Prices of several kinds: none known, dear and cheap reading, dear writing, a step, no cache at all."""


def chances(seed: str) -> Random:
    """Return what makes the same choices whenever it is given the same seed."""
    return Random(seed)  # noqa: S311 - nothing here is a secret


def _calls(chance: Random, _: int) -> Settings:
    return {
        "last": chance.randint(0, 5),
        "scope": chance.choice(["history", "all"]),
        "exclude_tools": chance.choice([[], ["search"]]),
    }


def _cleared(chance: Random, size: int) -> Settings:
    inputs = chance.random() < 0.4
    return {
        "keep": chance.randint(0, 5),
        "at_least": chance.choice([0, 0, size // 20]),
        "exclude_tools": chance.choice([[], ["search"]]),
        "clear_inputs": inputs,
        "clear_texts": chance.random() < 0.4,
        "fold_calls": inputs and chance.random() < 0.6,
        "digest_chars": chance.choice([0, 60, 300]),
    }


def _truncated(chance: Random, _: int) -> Settings:
    return {
        "max_lines": chance.choice([1, 5, 40, 400]),
        "max_bytes": chance.choice([20, 300, 2000]),
        "direction": chance.choice(["head", "tail", "head_tail"]),
    }


def _compacted(chance: Random, _: int) -> Settings:
    methods = ["minify", "table", "preview", "log", "noise"]
    return {
        "over_tokens": chance.choice([0, 40, 200]),
        "keep_items": chance.randint(1, 3),
        "max_string": chance.choice([10, 200]),
        "methods": chance.choice([methods, methods[:2], [chance.choice(methods)]]),
    }


def _window(chance: Random, size: int) -> Settings:
    limit = {"tokens": chance.randint(1, size)} if chance.random() < 0.5 else {"ratio": 0.6}
    return {**limit, "on_overflow": chance.choice(["skip", "stop"])}


def _summed(chance: Random, size: int) -> Settings:
    return {
        "mode": chance.choice(["statistics", "model"]),
        "soft": chance.choice([0.3, 0.8]),
        "upper": chance.choice([None, None, size // 3 + 1]),
        "lower": chance.choice([None, size // 4 + 1]),
        "min_messages": chance.choice([0, 5, 20]),
        "min_new_messages": chance.choice([0, 4, 10]),
        "growth_ratio": chance.choice([0, 0.5]),
        "keep_rounds": chance.randint(0, 4),
        "max_tokens": chance.choice([60, 1500]),
        "role": chance.choice(["auto", "system", "user", "merge"]),
    }


def _dropped(chance: Random, size: int) -> Settings:
    return {"target": {"tokens": size // 3 + 1}} if chance.random() < 0.3 else {}


SETTINGS: Final[dict[str, Callable[[Random, int], Settings]]] = {
    "keep_tool_calls": _calls,
    "clear_tool_results": _cleared,
    "truncate_tool_output": _truncated,
    "compact_tool_output": _compacted,
    "deduplicate_results": lambda _, __: {},
    "digest_agent_calls": lambda chance, _: {"keep": chance.randint(1, 4)},
    "drop_internal": lambda _, __: {},
    "evict_images": lambda chance, _: {"keep": chance.randint(0, 2)},
    "keep_rounds": lambda chance, _: {"last": chance.randint(0, 4)},
    "recent_window": _window,
    "summarize": _summed,
    "drop_oldest": _dropped,
}
"""What an edit of each type may be set to, for a session of so many tokens."""


def edit(chance: Random, kind: str, size: int) -> Settings:
    """Return an edit of this type with random settings."""
    when: Settings = {}
    if chance.random() < 0.2:
        sizes: list[Settings] = [{"tokens": size // 4 + 1}, {"messages": 6}, {"tool_calls": 2}]
        when = chance.choice([{"cost": "auto"}, *sizes])
    return {"type": kind, **SETTINGS[kind](chance, size), **({"when": when} if when else {})}


def trigger(chance: Random, size: int) -> Settings:
    """Return when a session of `size` tokens is trimmed."""
    kinds: list[Settings] = [
        {"tokens": chance.randint(1, size)},
        {"tokens": chance.randint(size // 8 + 1, size // 2 + 1)},
        {"ratio": chance.choice([0.1, 0.3, 0.6])},
        {"messages": chance.randint(1, 30)},
        {"tool_calls": chance.randint(1, 10)},
        {"idle_seconds": chance.choice(["auto", 100])},
        {"cost": "auto"},
        {"cost": "auto"},
        {"every_request": True},
    ]
    chosen = chance.choice(kinds)
    return {**chosen, **chance.choice(kinds)} if chance.random() < 0.2 else chosen


def settings(chance: Random, kinds: list[str], size: int) -> Settings:
    """Return the keys of a policy with edits of these types, for a session of `size` tokens."""
    keys: Settings = {
        "trigger": trigger(chance, size),
        "keep": {"rounds": chance.randint(0, 2), "spans": chance.randint(0, 4), "first_user": chance.random() < 0.3},
        "pin": [{"regex": r"(?i)\bnever\b"}] if chance.random() < 0.3 else [],
        "edits": [edit(chance, kind, size) for kind in kinds],
    }
    if chance.random() < 0.6:
        keys["target"] = {"tokens": chance.randint(1, size)}
    if chance.random() < 0.4:
        arriving = chance.sample(TOOL_OUTPUT_TYPES, chance.randint(1, len(TOOL_OUTPUT_TYPES)))
        keys["on_arrival"] = [edit(chance, kind, size) for kind in arriving]
    return keys


def policy(chance: Random, size: int, kinds: list[str] | None = None) -> Policy:
    """Return a policy for sessions of `size` tokens, with edits of these types or of random ones."""
    while True:
        some = kinds or chance.choices(list(SETTINGS), k=chance.randint(1, 5))
        try:
            return Policy.model_validate(settings(chance, some, size))
        except ValidationError:  # edits that contradict each other, or lack a target
            continue

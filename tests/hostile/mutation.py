"""Damages JSON and text but keeps most of the structure, so that it passes the first checks.

    {"model": "m", "messages": [{"role": "user"}]}   ->   {"model": "m", "messages": [{"role": {"a": []}}]}

Everything comes from one `Random`, so that a case can be reproduced from its seed.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from random import Random
from typing import Any, Final

_VALUES: Final[tuple[Any, ...]] = (
    None,
    True,
    0,
    -1,
    1.5,
    10**400,
    1e308,
    "",
    " ",
    "\0",
    "\ud800",
    "\u202eabc",
    "\u2028",
    "\x1b[31m",
    "<script>",
    "a" * 5000,
    "汉" * 3000,
    "{}",
    "../..",
    [],
    {},
    [[]],
    [None],
    {"": None},
    {"role": "system"},
    {"type": "text"},
    {"type": "text", "text": 7},
)
_DEEP: Final = "@deep@"  # placeholder for a deeply nested value, replaced in the text
_LEVELS: Final = (5, 130, 800, 5000)
_NAMES: Final = ("", "role", "content", "tool_calls", "id", "type", "name", "arguments", "text", "input", "stream")
_BYTES: Final = (b"\0", b"\xff", b"\xed\xa0\x80", b"\xc0\xae", b"\\", b'"', b"{", b"]", b"\r\n", b"\\u")


def mutated(random: Random, value: Any, times: int | None = None) -> Any:
    """Return a copy of a JSON value with a few of its parts replaced, removed, doubled, moved or nested."""
    changed = copy.deepcopy(value)
    for _ in range(random.choice((1, 1, 2, 4)) if times is None else times):
        holders = list(_holders(changed))
        if not holders:
            return copy.deepcopy(random.choice(_VALUES))
        _change(random, *random.choice(holders), [holder[key] for holder, key in holders])
    return changed


def _holders(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every place in a value as (container, key or index)."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        yield value, key
        yield from _holders(value[key])


def _change(random: Random, holder: Any, key: Any, parts: list[Any]) -> None:
    kind = random.randrange(7)
    if kind == 0:
        holder[key] = copy.deepcopy(random.choice(_VALUES))
    elif kind == 1:
        del holder[key]
    elif kind == 2 and isinstance(holder, list):
        holder[key:key] = [copy.deepcopy(holder[key]) for _ in range(random.choice((1, 1, 50)))]
    elif kind == 3:
        holder[key] = copy.deepcopy(random.choice(parts))
    elif kind == 4:
        holder[key] = random.choice(([holder[key]], {"a": holder[key]}, _DEEP))
    elif kind == 5 and isinstance(holder, dict):
        holder[random.choice(_NAMES)] = holder.pop(key)
    elif kind == 6 and isinstance(holder[key], str):
        holder[key] = str(mutated_bytes(random, holder[key].encode("utf-8", "surrogatepass")), "utf-8", "replace")
    else:
        holder[key] = str(holder[key]) if not isinstance(holder[key], str) else [holder[key]]


def as_json(random: Random, value: Any) -> bytes:
    """Return a value as JSON text, sometimes with a fault in the text itself."""
    text = json.dumps(value, ensure_ascii=random.random() < 0.5, indent=random.choice((None, None, 1)))
    levels = random.choice(_LEVELS)
    text = text.replace(f'"{_DEEP}"', "[" * levels + "]" * levels)
    data = text.encode("utf-8", "surrogatepass")
    return mutated_bytes(random, data) if random.random() < 0.15 else data


def mutated_bytes(random: Random, data: bytes) -> bytes:
    """Return bytes with a few of them replaced, removed, added, doubled, or cut off."""
    for _ in range(random.choice((1, 1, 3))):
        at = random.randrange(len(data) + 1)
        end = min(len(data), at + random.choice((0, 1, 1, 7, 40)))
        put = random.choice((b"", random.choice(_BYTES), bytes([random.randrange(256)]), data[at:end] * 2))
        data = data[:at] + put + data[end:] if random.random() < 0.9 else data[:at]
    return data

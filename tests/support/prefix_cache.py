"""A provider's prompt cache, reckoned from the requests that reached it: what of each it held already.

It matches as OpenAI's does: blocks of 128 tokens, at least 1024, a fourth of the bytes being tokens. It
knows no proxy.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import orjson

BYTES = 4
"""Of one token."""
BLOCK = 128
"""Tokens."""
LEAST = 1024
"""Tokens of the shortest prefix that is found again."""


def cached_and_all(bodies: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """Return of all requests together, in their order, the tokens that were cached and the tokens sent."""
    held: set[bytes] = set()
    cached = total = 0
    for body in bodies:
        text = orjson.dumps([body.get("tools"), body["messages"]])
        total += len(text) // BYTES
        digest, found, running, step = blake2b(digest_size=16), 0, True, BLOCK * BYTES
        for start in range(0, len(text) - step + 1, step):
            digest.update(text[start : start + step])
            name = digest.digest()
            running = running and name in held
            found += running
            held.add(name)
        cached += found * BLOCK if found * BLOCK >= LEAST else 0
    return cached, total

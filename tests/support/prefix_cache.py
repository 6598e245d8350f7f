"""Simulates a provider's prompt cache: which part of each request it already held, from the earlier requests.

It matches like OpenAI's cache: in blocks of 128 tokens, at least 1024. Tokens are a quarter of the bytes. It does
not depend on the proxy.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from typing import Any

import orjson

BYTES = 4
"""Bytes of a token."""
BLOCK = 128
"""Tokens of a block."""
LEAST = 1024
"""Tokens of the shortest prefix that is cached."""


def cached_and_all(bodies: Iterable[dict[str, Any]]) -> tuple[int, int]:
    """Return the cached tokens and the sent tokens, both summed over all requests in their order."""
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

"""Which tools the newest reply of a branch calls: kept with the session, so that each request knows it.

It knows names alone, not what they mean.
"""

from __future__ import annotations

from typing import Final

import orjson

from proxy.dialects import Message
from proxy.store.database import Connection
from proxy.store.plain import sanitize
from proxy.store.tree import path_to

_NEAR: Final = 64
"""Messages among which the reply is looked for, from the end upwards."""


def calls_of(reply: Message, *, partial: bool) -> tuple[str, ...]:
    """Return the names of the tools that a reply calls, each once; of a `partial` one, whole calls count."""
    whole = reply.without_unfinished_calls() if partial else reply
    return tuple(dict.fromkeys([sanitize(call.name) for call in whole.calls]))


def calls_at(connection: Connection, key: str, end: str, depth: int) -> tuple[str, ...]:
    """Return the names of the tools that the last message of a branch calls, results after it not counted.

    The branch ends at the node `end`, which has this `depth`.
    """
    for row in reversed(path_to(connection, key, end, below=depth - _NEAR)):
        if row.message.role != "tool":
            return calls_of(row.message, partial=row.partial)
    return ()


def encode_calls(names: tuple[str, ...]) -> str | None:
    """Return names as their column has them."""
    return orjson.dumps(names).decode() if names else None


def decode_calls(text: str | None) -> tuple[str, ...]:
    """Return the names that a column has."""
    return () if text is None else tuple(orjson.loads(text))

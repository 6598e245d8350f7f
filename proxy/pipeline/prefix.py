"""A cache of the last long request of each session, so that the next one is not parsed from its first byte.

SDKs resend a conversation byte for byte and append to its end. Messages within the common bytes are reused; only what
comes after them is parsed and hashed. Bytes are compared for equality, so the cache cannot be stale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

from cachetools import LRUCache
from msgspec import Struct

from proxy.dialects import Message, Request
from proxy.dialects.generations import scaled
from proxy.pipeline.background import compute
from proxy.pipeline.context import ClientRequest
from proxy.store import Mark
from proxy.trimming import Entry, PlannedStart

Key: TypeAlias = tuple[str, str, str, bytes]
"""Dialect, tenant, and the session header with its value. Tenants never share an entry."""

_ROOM: Final = 64 * 1024 * 1024  # approximate bytes that a process keeps on a small machine
_MESSAGE_BYTES: Final = 600  # approximate bytes kept for a message beside its text


class KnownRequest(Struct, frozen=True, kw_only=True):
    """A request, and what was derived from it."""

    request: Request
    names: Sequence[str]  # the nodes of its messages as a chain under the root
    contents: Sequence[bytes]  # their content hashes
    marks: tuple[Mark, ...] = ()  # the stored records of its first messages, if they were resent
    entries: tuple[Entry, ...] = ()  # one for each of `marks`
    planned: PlannedStart | None = None  # the part of its plan that the next request can reuse, if any


class KnownPrefixes:
    """The last long request of each session. Evicts the least recently used."""

    def __init__(self, names: Sequence[str], room: int | None = None) -> None:
        """Keep about `room` bytes; None scales the default to the machine's memory.

        `names` are the headers that may name a session. The first one that a request has counts.
        """
        self._names: Final = [name.lower().encode() for name in names]
        self._known: Final[LRUCache[Key, KnownRequest]] = LRUCache(
            scaled(_ROOM) if room is None else room, getsizeof=_size_of
        )

    def key_of(self, call: ClientRequest) -> Key | None:
        """Return the key of the request's session, or None if no header names one."""
        sent = dict(reversed(call.headers))
        for name in self._names:
            if value := sent.get(name):
                return call.dialect.name, call.tenant, name.decode(), value
        return None

    def find(self, key: Key) -> KnownRequest | None:
        """Return the request that is kept under `key`, if any."""
        return self._known.get(key)

    async def keep(self, key: Key, known: KnownRequest, *, parsed: int = 0) -> None:
        """Keep a request in place of the one before it, without its parsed values.

        `parsed` is the position of the first message that may have parsed values.
        """
        if _size_of(known) <= self._known.maxsize:
            self._known[key] = known
            request = known.request
            size = len(request.raw) - request.ends[len(request.instructions) + parsed]
            await compute(size, _forget, request.messages[parsed:])


def _forget(messages: Sequence[Message]) -> None:
    for message in messages:
        message.forget()


def _size_of(known: KnownRequest) -> int:
    request = known.request
    sent = request.joined.size if request.joined is not None else 0
    return len(request.raw) + sent + _MESSAGE_BYTES * len(request.messages)

"""How the last long request of each session began, so that the next one is not read again from its first byte.

SDKs resend a conversation byte for byte and add to its end. What stands in the common bytes is taken over, message
by message; only what comes after is parsed and hashed. The bytes are equal or they are not: nothing can be stale.
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
"""Dialect, tenant, and the header that names the session with its value: nobody else's request is ever met."""

_ROOM: Final = 64 * 1024 * 1024  # bytes that a process keeps on a small machine, about
_MESSAGE_BYTES: Final = 600  # what is kept of a message beside its text, about


class KnownRequest(Struct, frozen=True, kw_only=True):
    """A request, and what follows from it."""

    request: Request
    names: Sequence[str]  # the nodes of its messages in a row under the root
    contents: Sequence[bytes]  # their content hashes
    marks: tuple[Mark, ...] = ()  # what is stored of its first messages, if they were resent
    entries: tuple[Entry, ...] = ()  # one for each of `marks`
    planned: PlannedStart | None = None  # what its plan says of the next request's; None where it says nothing


class KnownPrefixes:
    """The last long request of each session; those that were not asked for the longest go first."""

    def __init__(self, names: Sequence[str], room: int | None = None) -> None:
        """Keep about `room` bytes; None: as many as there is memory for.

        `names` are those of the headers that name a session, the first one counts.
        """
        self._names: Final = [name.lower().encode() for name in names]
        self._known: Final[LRUCache[Key, KnownRequest]] = LRUCache(
            scaled(_ROOM) if room is None else room, getsizeof=_size_of
        )

    def key_of(self, call: ClientRequest) -> Key | None:
        """Return where the request before this one is kept; None where no header names a session."""
        sent = dict(reversed(call.headers))
        for name in self._names:
            if value := sent.get(name):
                return call.dialect.name, call.tenant, name.decode(), value
        return None

    def find(self, key: Key) -> KnownRequest | None:
        """Return the request that is kept there."""
        return self._known.get(key)

    async def keep(self, key: Key, known: KnownRequest, *, parsed: int = 0) -> None:
        """Keep a request in the place of the one before it, without what was parsed for it.

        `parsed` is the position of the first of its messages that may have been.
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

"""Answers to calls of the proxy's own tools: the text of a tool result, whatever happens.

What is wrong with a call, and what went wrong with the store, is said to the model in words: it can do
something else then.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import Final

import anyio
import anyio.to_thread
from msgspec import Struct

from proxy.conversation import body_of
from proxy.dialects import Call, Message
from proxy.errors import InvalidRequest, NotFound, StoreUnavailable
from proxy.recall.render import NOTHING_MORE, copied, findings, name_in, original, pattern_of, ref_of, span_of
from proxy.recall.search import search
from proxy.recall.tools import COMPRESS, RECALL, Asked, read_asked
from proxy.store import Store
from proxy.trimming import Entry

UNAVAILABLE: Final = (
    "The earlier conversation cannot be read just now. Go on with what you have, or try once more later."
)
"""What is said where the store cannot be read, or not in time."""
FAILED: Final = "This did not work, for a reason that is not yours. Go on without it."
NO_COMPRESSION: Final = "No summary can be made here. Go on without one."

_PASSAGES: Final = 8
"""Messages that a search tells of."""
_MOST_MESSAGES: Final = 50_000
"""Messages that are searched, the newest ones."""
_MOST_BYTES: Final = 32 * 1024 * 1024
"""Bytes of messages that are searched."""
_PORTION: Final = 2_000
"""Messages that are read from the store at once."""
_SEARCHES: Final = 2
"""Searches at one time; others wait, so that what they hold in memory is bounded."""
_SECONDS: Final = 20.0

_LOG: Final = logging.getLogger("palimpsest.recall")

Compress = Callable[[], Awaitable[str]]
"""Sees to it that a summary is made; returns what the model is told of that."""


class Branch(Struct, frozen=True, kw_only=True):
    """The stored messages up to a node, and those that come with the request and are no nodes yet."""

    key: str
    """The session's internal name; nothing of any other is read."""
    tip: str
    """The last stored node of the branch; `ROOT` where there is none."""
    depth: int
    """How many messages lead to it, itself included."""
    fresh: tuple[Message, ...] = ()
    """The messages after it, as they arrived."""
    whole: frozenset[int] = frozenset()
    """Positions of the messages that the model was sent as they are: there is no need to find these."""

    @property
    def messages(self) -> int:
        """How many messages it has."""
        return self.depth + len(self.fresh)


def sent_whole(entries: Iterable[Entry], view: Iterable[Message]) -> frozenset[int]:
    """Return the positions of those entries that stand as they are in the view that was made of them."""
    # By what they are, not by what they say: a view has the very messages that were not changed.
    sent = set(map(id, view))
    return frozenset([entry.position for entry in entries if id(entry.message) in sent])


class Recall:
    """Reads sessions again for the models that ask. One for the life of the process."""

    def __init__(
        self,
        store: Store,
        *,
        seconds: float = _SECONDS,
        most_messages: int = _MOST_MESSAGES,
        most_bytes: int = _MOST_BYTES,
    ) -> None:
        """Read from `store`; an answer takes at most `seconds`, a search reads at most so much."""
        self._store = store
        self._seconds = seconds
        self._most_messages = most_messages
        self._most_bytes = most_bytes
        self._searching = anyio.Semaphore(_SEARCHES)

    async def answer(self, branch: Branch, arguments: str) -> str:
        """Return the answer to a call of `recall_context` with these arguments."""
        try:
            asked = read_asked(arguments)
            with anyio.fail_after(self._seconds):
                return await (self._original(branch, asked) if asked.ref else self._found(branch, asked))
        except (InvalidRequest, NotFound) as why:
            return why.message
        except (StoreUnavailable, TimeoutError):
            return UNAVAILABLE

    async def _original(self, branch: Branch, asked: Asked) -> str:
        name = name_in(copied(asked.ref))
        if name is None:
            raise InvalidRequest(
                f"{asked.ref[:100]!r} is no ref: they look like ref_0123456789abcdef. Copy one from the "
                'conversation, or search with "query".'
            )
        span = span_of(asked.lines) if asked.lines else slice(None)
        pattern = pattern_of(asked.grep) if asked.grep else None
        found = _among(branch.fresh, name) or await self._store.body(branch.key, name)
        if found is None:
            raise NotFound(
                f'There is nothing under {ref_of(name)} in this conversation. Search with "query" for what '
                f"it was about. {NOTHING_MORE}"
            )
        body, message = found
        return await anyio.to_thread.run_sync(partial(original, ref_of(body), message, span, pattern))

    async def _found(self, branch: Branch, asked: Asked) -> str:
        async with self._searching:
            messages, refs = await self._messages(branch)
            first = branch.messages - len(messages)
            whole = frozenset(position - first for position in branch.whole)
            notes = ["lines and grep go with a ref, and were not used."] if asked.lines or asked.grep else []

            def work() -> str:
                found = search(messages, asked.query, _PASSAGES, whole)
                return findings(notes, found, messages, refs, branch.messages)

            return await anyio.to_thread.run_sync(work)

    async def _messages(self, branch: Branch) -> tuple[list[Message], list[str]]:
        """Return the messages of the branch, or as many of the newest as are searched, each with its ref."""
        newest = [(body_of(message), message) for message in reversed(branch.fresh)]
        size = sum([len(message.raw) for _, message in newest])
        node, depth = branch.tip, branch.depth
        while depth > 0 and len(newest) < self._most_messages and size < self._most_bytes:
            rows = await self._store.path(branch.key, node, below=max(0, depth - _PORTION))
            if not rows:
                break
            newest += [(row.body, row.message) for row in reversed(rows)]
            size += sum([len(row.message.raw) for row in rows])
            node, depth = rows[0].parent, rows[0].depth - 1
        newest = newest[: self._most_messages][::-1]
        return [message for _, message in newest], [ref_of(body) for body, _ in newest]


class OwnTools:
    """The tools that one request was offered, and who answers their calls."""

    def __init__(
        self, names: Collection[str], recall: Recall, branch: Branch, compress: Compress | None = None
    ) -> None:
        """Answer calls of these names about `branch`; `compress` starts a summary, where one can be made."""
        self.names = frozenset(names)
        self._recall = recall
        self._branch = branch
        self._compress = compress

    async def answer(self, call: Call) -> str:
        """Return the text of the tool result; it is never empty, and nothing is raised."""
        try:
            if call.name == RECALL:
                return await self._recall.answer(self._branch, call.arguments)
            if call.name == COMPRESS and self._compress is not None:
                return await self._compress()
        except Exception:  # noqa: BLE001 - the request goes on, whatever is wrong with a tool of ours
            _LOG.exception("a call of %s failed", call.name)
            return FAILED
        return NO_COMPRESSION


def _among(messages: Collection[Message], name: str) -> tuple[str, Message] | None:
    """Return the first of these messages whose text has a name that begins so."""
    named = ((body_of(message), message) for message in messages)
    return next((found for found in named if found[0].startswith(name)), None)

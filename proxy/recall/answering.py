"""The proxy's own tools: when they are offered, how a call's arguments are parsed, and how a call is answered.

A wrong argument or a failing store becomes a text for the model, so that it can continue in another way.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Iterable
from functools import partial
from typing import Final

import anyio
import anyio.to_thread
import orjson
from msgspec import Struct

from proxy.config import VirtualToolSettings
from proxy.conversation import body_of
from proxy.dialects import Call, Message, ToolDefinition
from proxy.dialects.jsontext import is_array, is_object
from proxy.errors import InvalidRequest, NotFound, StoreUnavailable
from proxy.recall.render import NOTHING_MORE, copied, findings, name_in, original, pattern_of, ref_of, referred, span_of
from proxy.recall.search import search
from proxy.store import Store
from proxy.trimming import Entry

RECALL: Final = "recall_context"
COMPRESS: Final = "compress_chat_history"
ALLOWED: Final = (
    'Give recall_context a JSON object with either "ref" (such as "ref_0123456789abcdef", as it stands in '
    'the conversation; beside it "lines", such as "10-20", or "grep", a regular expression), or "query" '
    "(words, names or ids to look for)."
)
_RECALL: Final = ToolDefinition(
    name=RECALL,
    description=(
        "Read again what was shortened or left out of this conversation. Give either `ref`, to get the "
        "original of something that is marked with a ref, or `query`, to search the whole conversation; "
        "the answer has excerpts with their refs."
    ),
    parameters=(
        ("ref", "A ref as it stands in the conversation, such as ref_0123456789abcdef. {unset} to search."),
        ("query", "Words, names or ids to look for. {unset} where you give a ref."),
        ("lines", "With a ref: only these lines, such as 10-20. {unset} for all."),
        ("grep", "With a ref: only lines that match this regular expression (RE2). {unset} for all."),
    ),
)
_COMPRESS: Final = ToolDefinition(
    name=COMPRESS,
    description=(
        "Ask for the older part of this conversation to be replaced by a summary. Call it when much lies "
        "behind that is not needed word for word any more, such as at the end of a part of the task. It "
        "takes effect with a later request."
    ),
    parameters=(("reason", "Why now, in a few words."),),
)

UNAVAILABLE: Final = (
    "The earlier conversation cannot be read just now. Go on with what you have, or try once more later."
)
"""The answer if the store fails or takes too long."""
FAILED: Final = "This did not work, for a reason that is not yours. Go on without it."
NO_COMPRESSION: Final = "No summary can be made here. Go on without one."

_PASSAGES: Final = 8  # messages in the answer to a search
_MOST_MESSAGES: Final = 50_000  # at most so many messages are searched, the newest ones
_MOST_BYTES: Final = 32 * 1024 * 1024  # reading stops when so many bytes of messages were read
_PORTION: Final = 2_000  # messages that are read from the store at once
_SEARCHES: Final = 2  # concurrent searches; this bounds their memory
_SECONDS: Final = 20.0  # time limit of an answer

_LOG: Final = logging.getLogger("palimpsest.recall")

Compress = Callable[[], Awaitable[str]]  # requests a summary; returns the answer for the model


def offered(
    settings: VirtualToolSettings, *, has_tools: bool, stateless: bool = False, off: bool = False
) -> tuple[ToolDefinition, ...]:
    """Return the tools to offer with a request.

    There are none if nothing is stored (`stateless`) or trimmed (`off`), or if the client offers no tools while
    `only_with_tools` is on.
    """
    if stateless or off or (settings.only_with_tools and not has_tools):
        return ()
    recall, compress = settings.recall_context, settings.compress_chat_history
    return ((_RECALL,) if recall else ()) + ((_COMPRESS,) if compress else ())


def definitions(names: Collection[str]) -> tuple[ToolDefinition, ...]:
    """Return the tools with these names."""
    return tuple([tool for tool in (_RECALL, _COMPRESS) if tool.name in names])


# ------------------------------------------------------------------------------------ arguments


class Asked(Struct, frozen=True, kw_only=True):
    """The arguments of `recall_context`: either `ref` or `query`. Missing ones are empty."""

    ref: str
    query: str
    lines: str  # `a-b`; not checked here
    grep: str


def read_asked(arguments: str) -> Asked:
    """Parse the arguments of a call; raise `InvalidRequest` with a message for the model if they are wrong.

    `lines` may also be a number (one line), or a list of the first and the last line.
    """
    try:
        data = orjson.loads(arguments)
    except orjson.JSONDecodeError as why:
        raise InvalidRequest(f"The arguments are not valid JSON. {ALLOWED}") from why
    if not is_object(data):
        raise InvalidRequest(f"The arguments are not a JSON object. {ALLOWED}")
    lines = data.get("lines")
    numbers = lines if is_array(lines) else [lines]
    if 1 <= len(numbers) <= 2 and all(type(number) is int for number in numbers):
        data["lines"] = f"{numbers[0]}-{numbers[-1]}"
    given: dict[str, str] = {}
    for name in Asked.__struct_fields__:
        value = data.get(name)
        if value is not None and not isinstance(value, str):
            raise InvalidRequest(f'"{name}" must be a string. {ALLOWED}')
        given[name] = (value or "") if name == "grep" else (value or "").strip()
    if bool(given["ref"]) == bool(given["query"]):
        both = 'Both "ref" and "query" were given' if given["ref"] else 'Neither "ref" nor "query" was given'
        raise InvalidRequest(f"{both}. {ALLOWED}")
    text = "".join(given["lines"].split())
    return Asked(**given | {"lines": f"{text}-{text}" if text.isdecimal() else text})


# ------------------------------------------------------------------------------------ answers


class RecallBranch(Struct, frozen=True, kw_only=True):
    """The branch to read: the stored messages up to a node, and the request's own messages that have no node yet."""

    key: str  # the session's internal name; no other session is read
    tip: str  # the last stored node of the branch; `ROOT` if there is none
    depth: int  # number of messages up to `tip`
    fresh: tuple[Message, ...] = ()  # the messages after `tip`, as they arrived
    whole: frozenset[int] = frozenset()  # positions of messages in the view that are unchanged; a search skips them

    @property
    def messages(self) -> int:
        """The total number of messages."""
        return self.depth + len(self.fresh)


def sent_whole(entries: Iterable[Entry], view: Iterable[Message]) -> frozenset[int]:
    """Return the positions of the entries that a view holds unchanged."""
    sent = set(map(id, view))  # a view holds the very same objects for unchanged messages
    return frozenset([entry.position for entry in entries if id(entry.message) in sent])


class Recall:
    """Answers calls of `recall_context`. One instance per process."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._searching = anyio.Semaphore(_SEARCHES)

    async def answer(self, branch: RecallBranch, arguments: str) -> str:
        """Return the answer to a call with these arguments."""
        try:
            asked = read_asked(arguments)
            with anyio.fail_after(_SECONDS):
                return await (self._original(branch, asked) if asked.ref else self._search(branch, asked))
        except (InvalidRequest, NotFound) as why:
            return why.message
        except (StoreUnavailable, TimeoutError):
            return UNAVAILABLE

    async def _original(self, branch: RecallBranch, asked: Asked) -> str:
        name = name_in(copied(asked.ref))
        if name is None:
            raise InvalidRequest(
                f"{asked.ref[:100]!r} is not a ref. A ref looks like ref_0123456789abcdef. Copy one from the "
                'conversation, or search with "query".'
            )
        span = span_of(asked.lines) if asked.lines else slice(None)
        pattern = pattern_of(asked.grep) if asked.grep else None
        fresh = ((body_of(message), message) for message in branch.fresh)
        found = next((each for each in fresh if each[0].startswith(name)), None)
        found = found or await self._store.body(branch.key, name)
        if found is None:
            raise NotFound(
                f'There is nothing under {ref_of(name)} in this conversation. Search with "query" for what '
                f"it was about. {NOTHING_MORE}"
            )
        body, message = found
        part = referred(copied(asked.ref), message) or message
        return await anyio.to_thread.run_sync(partial(original, ref_of(body), part, span, pattern))

    async def _search(self, branch: RecallBranch, asked: Asked) -> str:
        async with self._searching:
            messages, refs = await self._newest(branch)
            first = branch.messages - len(messages)
            whole = frozenset([position - first for position in branch.whole])
            notes = ["lines and grep go with a ref, and were not used."] if asked.lines or asked.grep else []

            def work() -> str:
                return findings(notes, search(messages, asked.query, _PASSAGES, whole), messages, refs, first)

            return await anyio.to_thread.run_sync(work)

    async def _newest(self, branch: RecallBranch) -> tuple[list[Message], list[str]]:
        """Return the messages to search, which are the newest of the branch, and their refs."""
        newest = [(body_of(message), message) for message in reversed(branch.fresh)]
        size = sum([len(message.raw) for _, message in newest])
        node, depth = branch.tip, branch.depth
        while depth > 0 and len(newest) < _MOST_MESSAGES and size < _MOST_BYTES:
            rows = await self._store.path(branch.key, node, below=max(0, depth - _PORTION))
            if not rows:
                break
            newest += [(row.body, row.message) for row in reversed(rows)]
            size += sum([len(row.message.raw) for row in rows])
            node, depth = rows[0].parent, rows[0].depth - 1
        newest = newest[:_MOST_MESSAGES][::-1]
        return [message for _, message in newest], [ref_of(body) for body, _ in newest]


class OwnTools:
    """The proxy's tools that were offered with one request."""

    def __init__(
        self, names: Collection[str], recall: Recall, branch: RecallBranch, compress: Compress | None = None
    ) -> None:
        self.names = frozenset(names)
        self._recall = recall
        self._branch = branch
        self._compress = compress

    async def answer(self, call: Call) -> str:
        """Return the text of the tool result. It is never empty. Raises nothing."""
        try:
            if call.name == RECALL:
                return await self._recall.answer(self._branch, call.arguments)
            if call.name == COMPRESS and self._compress is not None:
                return await self._compress()
        except Exception:  # noqa: BLE001 - an error in a tool of ours must not end the request
            _LOG.exception("a call of %s failed", call.name)
            return FAILED
        return NO_COMPRESSION

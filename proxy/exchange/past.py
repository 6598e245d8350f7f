"""What the log knows of a request: where it belongs, and the messages that trimming plans with.

It reads the store and decides nothing itself: `history.reconcile` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from proxy.errors import Conflict
from proxy.exchange.background import compute
from proxy.history.nodes import ROOT, body_id, chain
from proxy.history.reconcile import Arrival, Incoming, Kind, Last, Log, Mode, reconcile
from proxy.history.results import place_of_results
from proxy.settings.model import ReasoningMode
from proxy.store.records import Body, ExchangeRow, NodeRow, SessionRow, Source, Status, session_key
from proxy.store.store import Store
from proxy.tokens.counter import TokenCounter
from proxy.trimming.plan import Entry
from proxy.wire.completion import without_unfinished_calls
from proxy.wire.messages import OWN_FIELDS, JsonObject, Message
from proxy.wire.request import ChatRequest
from proxy.wire.shapes import is_object

REF_PREFIX: Final = "ref_"
_REF_DIGITS: Final = 16

_RESPONSE_ONLY: Final = ("refusal", "annotations", "audio", "function_call", "tool_calls", "content")
"""Fields that a reply carries as null or empty, and that a request has only with a value."""
_SENT_BACK_BESIDE_CALLS: Final = ("reasoning_content", "reasoning")
"""Reasoning that providers want back where it led to tool calls, and refuse or ignore elsewhere."""
_REASONING: Final = (*_SENT_BACK_BESIDE_CALLS, "reasoning_details", "thinking_blocks")


@dataclass(frozen=True, slots=True)
class Past:
    """A request in its place in the log."""

    session: SessionRow | None
    """The session before this request; None where there is none."""
    arrival: Arrival
    digest: str
    """Names what the request says, so that its repetition can be known."""
    entries: tuple[Entry, ...]
    """The log of the branch with the request's new messages at its end."""
    nodes: tuple[str, ...]
    """The nodes of the stored part of `entries`, oldest first."""
    fresh: tuple[Body, ...]
    """The messages that are new, as they arrived."""
    instructions: tuple[Message, ...]
    """The instructions to send: the request's own, or the newest stored ones where an append has none."""
    forms: tuple[tuple[str, Message], ...] = field(default=())
    """(node, form) where the client sent a stored message in another form."""

    @property
    def size(self) -> int:
        """Bytes of all entries: what planning is in proportion to."""
        return sum(len(entry.message.raw) for entry in self.entries)


class Memory:
    """Reads the log for one request after another."""

    def __init__(self, store: Store, counter: TokenCounter, reasoning: ReasoningMode) -> None:
        """Read from `store`; count what is new with `counter`."""
        self._store = store
        self._counter = counter
        self._reasoning: ReasoningMode = reasoning

    async def past_of(
        self, request: ChatRequest, *, tenant: str, session: str, mode: Mode, retried: bool
    ) -> Past:
        """Find the request's place in the log of the session.

        Raises:
            StoreUnavailable: the log cannot be read.
        """
        key = session_key(tenant, session)
        size = len(request.raw)
        names = await compute(size, lambda: chain(ROOT, request.messages))
        incoming = Incoming(
            names, any(message.role == "assistant" for message in request.messages), retried, mode
        )
        session_row = await self._store.session(tenant, session)
        arrival = reconcile(incoming, await self._log(session_row, incoming))
        rows = await self._store.path(key, arrival.base)
        if arrival.at_head:
            arrival, rows = _at_their_calls(arrival, rows, request.messages)
        fresh = await compute(size, lambda: self._bodies(request.messages[arrival.fresh :], request.model))
        if arrival.composed:
            stored = sum(len(row.message.raw) for row in rows)
            past = await compute(stored, lambda: self.branch(rows, request.model))
        elif len(rows) == arrival.fresh:
            past = tuple(map(_entry_of_sent, request.messages, rows))
        else:
            raise Conflict("The session was deleted while this request was on its way. Send it again.")
        instructions = request.instructions
        if arrival.composed and not instructions:
            latest = await self._store.instructions(key)
            instructions = latest.messages if latest is not None else ()
        return Past(
            session=session_row,
            arrival=arrival,
            digest=incoming.digest,
            entries=past + tuple(_entry_of_new(body) for body in fresh),
            nodes=tuple(row.node for row in rows),
            fresh=fresh,
            instructions=instructions,
            forms=() if arrival.composed else _other_forms(request.messages, rows),
        )

    async def without_log(self, request: ChatRequest) -> Past:
        """Return the request as if it stood alone: nothing is read, nothing is known."""
        fresh = await compute(len(request.raw), lambda: self._bodies(request.messages, request.model))
        return Past(
            session=None,
            arrival=Arrival(Kind.FIRST, ROOT, 0),
            digest=ROOT,
            entries=tuple(_entry_of_new(body) for body in fresh),
            nodes=(),
            fresh=fresh,
            instructions=request.instructions,
        )

    def branch(self, rows: Sequence[NodeRow], model: str) -> tuple[Entry, ...]:
        """Return a stored branch as it would be sent to `model` by an append."""
        return tuple(self._entry_of_stored(row, model) for row in rows)

    async def _log(self, row: SessionRow | None, incoming: Incoming) -> Log:
        if row is None:
            return Log()
        last = await self._last(row.key, incoming)
        return Log(
            head=row.head,
            arrival=row.arrival,
            known=await self._store.known(row.key, incoming.names),
            last=None
            if last is None
            else Last(
                last.digest,
                last.kind,
                last.base,
                complete=last.status is Status.COMPLETE,
                pending=last.status is Status.PENDING,
                replies=last.replies,
            ),
        )

    async def _last(self, key: str, incoming: Incoming) -> ExchangeRow | None:
        """Return the request that this one may repeat: an announced retry may come after others."""
        if incoming.retried:
            same = await self._store.last_request(key, incoming.digest)
            if same is not None:
                return same
        return await self._store.last_exchange(key)

    def _bodies(self, messages: Sequence[Message], model: str) -> tuple[Body, ...]:
        return tuple(Body(message, self._counter.message(message, model)) for message in messages)

    def _entry_of_stored(self, row: NodeRow, model: str) -> Entry:
        """Return a stored message in the form in which a request has it."""
        message = row.message
        if row.source is Source.UPSTREAM:
            message = request_form(message, self._reasoning, partial=row.partial)
        message = message.without(*OWN_FIELDS)
        tokens = row.tokens if message is row.message else self._counter.message(message, model)
        return Entry(message, tokens, ref_of(row.body), row.arrival)


def _at_their_calls(
    arrival: Arrival, rows: list[NodeRow], messages: Sequence[Message]
) -> tuple[Arrival, list[NodeRow]]:
    """Return where appended results belong, with the branch up to there; all else stays where it is."""
    place = place_of_results([row.message for row in rows], messages)
    if place is None:
        return arrival, rows
    return replace(arrival, base=rows[place - 1].node, at_head=False), rows[:place]


def ref_of(body: str) -> str:
    """Return the name under which a stored text is read again, from its `body_id`."""
    return REF_PREFIX + body[:_REF_DIGITS]


def request_form(message: Message, reasoning: ReasoningMode, *, partial: bool) -> Message:
    """Return a reply as a request carries it.

    Response-only nulls go; reasoning stays where its provider wants it back (`auto`: beside tool
    calls, and in the forms that exist only to be sent back); a reply that broke off loses the
    calls that are not whole.
    """
    data = message.data
    changed: JsonObject = without_unfinished_calls(data) if partial else data
    dropped: set[str] = {name for name in _RESPONSE_ONLY if name in changed and not changed[name]}
    has_calls = bool(changed.get("tool_calls"))
    if "content" in dropped and (changed["content"] == "" or has_calls or changed.get("function_call")):
        dropped.discard("content")  # an empty string, or null beside calls, is what the API itself shows
    if "annotations" in changed:
        dropped.add("annotations")
    if reasoning == "drop":
        dropped.update(name for name in _REASONING if name in changed)
    elif reasoning == "auto" and not has_calls:
        dropped.update(name for name in _SENT_BACK_BESIDE_CALLS if name in changed)
    audio = changed.get("audio")
    if is_object(audio) and set(audio) - {"id"} and "id" in audio:
        changed = {**changed, "audio": {"id": audio["id"]}}
    if changed is data:
        return message.without(*dropped) if dropped else message
    return Message.of({name: value for name, value in changed.items() if name not in dropped})


def _entry_of_sent(message: Message, row: NodeRow) -> Entry:
    """Return a stored message as the client sent it this time."""
    sent = message.without(*OWN_FIELDS)
    return Entry(sent, row.tokens, ref_of(row.body), row.arrival)


def _entry_of_new(body: Body) -> Entry:
    return Entry(body.message.without(*OWN_FIELDS), body.tokens, ref_of(body_id(body.message.raw)))


def _other_forms(messages: Sequence[Message], rows: Sequence[NodeRow]) -> tuple[tuple[str, Message], ...]:
    """Return the stored messages whose content the client sent in other words than those stored."""
    pairs = zip(messages, rows, strict=False)
    return tuple(
        (row.node, message)
        for message, row in pairs
        if message.raw != row.message.raw and message.data != row.message.data
    )

"""What the log knows of a request: where it belongs, and the messages that trimming plans with.

It reads the store and decides nothing itself: `history.reconcile` does.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from proxy.config import ReasoningMode
from proxy.conversation import (
    ROOT,
    Arrival,
    Incoming,
    Kind,
    Manner,
    body_id,
    body_of,
    chain,
    content_hash,
    version_of,
)
from proxy.dialects import JsonObject, Message
from proxy.dialects.chat.message import ChatMessage, without_unfinished_calls
from proxy.dialects.chat.request import ChatRequest
from proxy.dialects.jsontext import is_object
from proxy.pipeline.asking import RequestContext
from proxy.pipeline.background import COUNTING, compute
from proxy.pipeline.forms import Variants
from proxy.recall import ref_of
from proxy.store import (
    Body,
    HistoryQuery,
    HistorySnapshot,
    Mark,
    NodeRow,
    Source,
    StandingCut,
    Store,
    SummaryRow,
    session_key,
)
from proxy.tokens import TokenCounter
from proxy.trimming import Change, Entry, Hidden

_MARK_WORK: Final = 1024
"""What it takes to make an entry of a message that the client sent again, in bytes that are read once."""

_NOTHING: Final[Mapping[str, Hidden]] = {}

WAITING: Final = "open_calls"
"""What stands in a receipt for the edit that left a block of open calls out."""

_RESPONSE_ONLY: Final = ("refusal", "annotations", "audio", "function_call", "tool_calls", "content")
"""Fields that a reply carries as null or empty, and that a request has only with a value."""
_SENT_BACK_BESIDE_CALLS: Final = ("reasoning_content", "reasoning")
"""Reasoning that providers want back where it led to tool calls, and refuse or ignore elsewhere."""
_REASONING: Final = (*_SENT_BACK_BESIDE_CALLS, "reasoning_details", "thinking_blocks")


class History(Struct, frozen=True, kw_only=True):
    """A request in its place in the log."""

    id: str | None
    """The session's id; None where the request is served without one."""
    arrival: Arrival
    digest: str
    """Names what the request says, so that its repetition can be known."""
    entries: tuple[Entry, ...]
    """The log of the branch with the request's new messages at its end; of an append, without what the
    standing cut dropped."""
    nodes: tuple[str, ...]
    """The nodes of the stored part of `entries`, oldest first."""
    fresh: tuple[Body, ...]
    """The messages that are new, as they arrived."""
    instructions: tuple[Message, ...]
    """The instructions to send: the request's own, or the newest stored ones where an append has none."""
    size: int
    """Bytes of all entries at least: what planning is in proportion to. See `_size_of`."""
    forms: tuple[tuple[str, Message], ...] = ()
    """(node, form) where the client sent a stored message in another form."""
    standing: StandingCut | None = None
    """The newest cut of the branch."""
    borrowed: bool = False
    """Whether that cut is one that another request has just made at the same place, and may not be stored."""
    start: int = 0
    """Position in the branch of the first message that the request speaks of."""
    updated_at: int | None = None
    """When the session's last exchange ended, in milliseconds since 1970; None where there was none."""
    scale: float | None = None
    """How many tokens the upstream counts for one that is counted here; None where that was not learnt."""
    prepared: SummaryRow | None = None
    """The newest summary by a model that lies on the branch and that the policy may use."""
    attempt: SummaryRow | None = None
    """The last attempt at one, whatever came of it."""
    carried: tuple[str, ...] = ()
    """The nodes at the end of `nodes` that stand elsewhere in the store, and have their places here from now
    on: see `Recollection.carried`."""
    vouched: int = 0
    """How many of `fresh`, from the first on, are known from a conversation with the same beginning."""

    @property
    def fork(self) -> int | None:
        """Position of the first message that is new; None where there is none, or none before it."""
        known = len(self.nodes)
        return self.entries[known].position if 0 < known < len(self.entries) else None


class HistoryLoader:
    """Reads the log for one request after another."""

    def __init__(self, store: Store, counter: TokenCounter, reasoning: ReasoningMode) -> None:
        """Read from `store`; count what is new with `counter`."""
        self._store = store
        self._counter = counter
        self._reasoning: ReasoningMode = reasoning
        self._forms = Variants()

    async def incoming(self, request: ChatRequest, asking: RequestContext) -> Incoming:
        """Return the request as far as its place depends on it."""
        return await compute(len(request.raw), _incoming, request, asking)

    async def past_of(
        self, request: ChatRequest, incoming: Incoming, session: str, asking: RequestContext
    ) -> History:
        """Find the request's place in the log of the session.

        Raises:
            Conflict: the session was deleted meanwhile.
            StoreUnavailable: the log cannot be read.
        """
        found = await self._store.recall(
            HistoryQuery(
                tenant=asking.tenant,
                session=session,
                incoming=incoming,
                messages=request.messages,
                policy=asking.policy,
                agent=asking.agent,
                idempotency=asking.idempotency,
                whole=asking.whole,
                instructed=bool(request.instructions),
                recipe=asking.recipe,
            )
        )
        work = _work_of(request, found)
        return await compute(work, self._put_together, request, incoming, asking, session, found)

    def _put_together(
        self,
        request: ChatRequest,
        incoming: Incoming,
        asking: RequestContext,
        session: str,
        found: HistorySnapshot,
    ) -> History:
        arrival = found.arrival
        fresh = self._bodies(request.messages[arrival.fresh :], request.model)
        forms: tuple[tuple[str, Message], ...] = ()
        if arrival.composed:
            past = self.branch(found.rows, request.model, found.hidden, agent=asking.agent, new=fresh)
            nodes = tuple([row.node for row in found.rows])
        else:
            past = _entries_of_sent(request.messages, found.marks, found.hidden)
            nodes = tuple([mark.node for mark in found.marks])
            key = session_key(asking.tenant, session)
            forms = tuple(self._forms.new(key, request.messages, found.marks))
        return History(
            id=session,
            arrival=arrival,
            digest=incoming.digest,
            entries=past + _entries_of_new(fresh, found.depth),
            nodes=nodes,
            fresh=fresh,
            instructions=request.instructions or found.instructions,
            size=_size_of(request, found.rows),
            forms=forms,
            standing=found.cut,
            start=found.start,
            updated_at=found.updated_at,
            scale=found.scale if found.model == request.model else None,
            prepared=found.prepared,
            attempt=found.attempt,
            carried=found.carried,
        )

    async def past_of_unnamed(
        self, request: ChatRequest, incoming: Incoming, asking: RequestContext
    ) -> History:
        """Find the session that the request goes on with, though it names none, and its place there.

        That is the one session of the tenant that has the last reply which the client sends, with every reply
        before it, as recorded from upstream; a new one where there is none. Where several conversations have
        the same beginning, nobody knows which of them it is: it becomes one of its own.
        """
        vouched = 0
        if incoming.replies:
            last = incoming.replies[-1]
            found = await self._store.recorded(asking.tenant, incoming.names[last])
            if len(found) == 1:
                return await self.past_of(request, incoming, found[0], asking)
            vouched = last + 1 if found else 0
        past = await self.past_of(request, incoming, f"ses_{secrets.token_hex(16)}", asking)
        return replace(past, vouched=vouched)

    async def without_log(self, request: ChatRequest) -> History:
        """Return the request as if it stood alone: nothing is read, nothing is known."""
        size = _size_of(request)
        fresh = await compute(COUNTING * size, self._bodies, request.messages, request.model)
        return History(
            id=None,
            arrival=Arrival(kind=Kind.FIRST, base=ROOT, fresh=0),
            digest=ROOT,
            entries=_entries_of_new(fresh, 0),
            nodes=(),
            fresh=fresh,
            instructions=request.instructions,
            size=size,
        )

    def branch(
        self,
        rows: Sequence[NodeRow],
        model: str,
        hidden: Mapping[str, Hidden] = _NOTHING,
        *,
        agent: str | None = None,
        new: Sequence[Body] = (),
    ) -> tuple[Entry, ...]:
        """Return a stored branch as it would be sent to `model` by an append.

        `hidden` has, by node, what the client was not shown. `agent` is who asks, and `new` what it brings.
        """
        entries = tuple([self._entry_of_stored(row, model, hidden.get(row.node)) for row in rows])
        return entries if agent is None else _without_waiting(entries, rows, new, agent)

    def _bodies(self, messages: Sequence[Message], model: str) -> tuple[Body, ...]:
        counts = self._counter.messages(messages, model)
        return tuple(
            [Body(message=message, tokens=count) for message, count in zip(messages, counts, strict=True)]
        )

    def _entry_of_stored(self, row: NodeRow, model: str, hidden: Hidden | None) -> Entry:
        """Return a stored message in the form in which a request has it."""
        message = row.message
        if row.source is Source.UPSTREAM:
            message = request_form(message, self._reasoning, partial=row.partial)
        agent, is_internal = _own(message)
        message = message.without_own_fields()
        tokens = row.tokens if message is row.message else self._counter.message(message, model)
        position = row.depth - 1
        return Entry(
            message=message,
            tokens=tokens,
            ref=ref_of(row.body),
            position=position,
            arrival=row.arrival,
            agent=agent,
            is_internal=is_internal,
            hidden=hidden,
        )


def _size_of(request: ChatRequest, rows: Sequence[NodeRow] = ()) -> int:
    """Return the bytes of the messages of a request, at least, and of the stored ones in `rows`.

    With the messages it counts what else the request has beside instructions and tools. As a rule that is
    little; where it is much (`response_format`, `functions`), work goes to a thread sooner, and that is all.
    """
    beside = size_of(request.instructions) + len(request.tools or b"")
    return len(request.raw) - beside + size_of([row.message for row in rows])


def _work_of(request: ChatRequest, found: HistorySnapshot) -> int:
    """Return how much work it is to put a past together, as `compute` measures it."""
    work = COUNTING * size_of(request.messages[found.arrival.fresh :]) + _MARK_WORK * len(found.marks)
    return work + size_of([row.message for row in found.rows]) if found.rows else work


def size_of(messages: Iterable[Message]) -> int:
    """Return the bytes of these messages."""
    return sum([len(message.raw) for message in messages])


def _incoming(request: ChatRequest, asking: RequestContext) -> Incoming:
    messages = request.messages
    replies = [position for position, message in enumerate(messages) if message.role == "assistant"]
    answers = bool(messages) and messages[0].answers is not None
    # What answers calls, or names its agent, belongs to the conversation, however it asks.
    asks_freely = asking.agent is None and not replies and not answers
    return Incoming(
        names=chain(ROOT, messages),
        contents=list(map(content_hash, messages)),
        replies=replies,
        retried=asking.retried,
        mode=asking.mode,
        answers=answers,
        manner=_manner(request) if asks_freely else None,
    )


def _manner(request: ChatRequest) -> Manner:
    return Manner(
        instructions=version_of(request.instructions) if request.instructions else None,
        tools=body_id(request.tools) if request.tools is not None else None,
        model=request.model,
    )


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
    return ChatMessage.of({name: value for name, value in changed.items() if name not in dropped})


def _without_waiting(
    entries: tuple[Entry, ...], rows: Sequence[NodeRow], new: Sequence[Body], agent: str
) -> tuple[Entry, ...]:
    """Leave out of a view the calls of other agents that wait for all their results.

    The block goes to the end of the log with the first result. Until then it says nothing to `agent`, and a
    text that stood in for a result would have to be taken back.
    """
    messages = [row.message for row in rows] + [body.message for body in new[:1]]
    waiting = {
        place
        for place, (row, after) in enumerate(zip(rows, messages[1:], strict=False))  # if any comes after
        if row.agent not in {None, agent} and after.role != "tool" and row.message.calls
    }
    return tuple([_left_out(entry) if place in waiting else entry for place, entry in enumerate(entries)])


def _left_out(entry: Entry) -> Entry:
    """Return a message that nothing is sent for, this time."""
    change = Change(
        position=entry.position,
        edit=WAITING,
        reason="another agent waits for the results",
        message=None,
        tokens_before=entry.tokens,
        tokens_after=0,
    )
    return replace(entry, arrival=(change,))


def _entries_of_sent(
    messages: Sequence[Message], marks: Sequence[Mark], hidden: Mapping[str, Hidden]
) -> tuple[Entry, ...]:
    """Return stored messages as the client sent them; `hidden` has, by node, what it was not shown."""
    return tuple(
        [
            _entry_of_sent(message, mark, hidden.get(mark.node))
            if hidden or message.own_fields
            else Entry(
                message=message,
                tokens=mark.tokens,
                ref=ref_of(mark.body),
                position=mark.depth - 1,
                arrival=mark.arrival,
            )  # nearly always
            for message, mark in zip(messages, marks, strict=False)
        ]
    )


def _entry_of_sent(message: Message, mark: Mark, hidden: Hidden | None) -> Entry:
    """Return a stored message as the client sent it this time."""
    agent, is_internal = _own(message)
    return Entry(
        message=message.without_own_fields(),
        tokens=mark.tokens,
        ref=ref_of(mark.body),
        position=mark.depth - 1,
        arrival=mark.arrival,
        agent=agent,
        is_internal=is_internal,
        hidden=hidden,
    )


def _entries_of_new(bodies: Iterable[Body], start: int) -> tuple[Entry, ...]:
    """Return new messages as entries of a log that has `start` messages before them."""
    entries: list[Entry] = []
    for position, body in enumerate(bodies, start):
        agent, is_internal = _own(body.message)
        entries.append(
            Entry(
                message=body.message.without_own_fields(),
                tokens=body.tokens,
                ref=ref_of(body_of(body.message)),
                position=position,
                agent=agent,
                is_internal=is_internal,
            )
        )
    return tuple(entries)


def _own(message: Message) -> tuple[str | None, bool]:
    """Return who said a message, and whether it is internal, by the fields of ours that it has."""
    if not message.own_fields:
        return None, False
    agent = message.data.get("agent")
    return agent if isinstance(agent, str) else None, message.data.get("is_internal") is True

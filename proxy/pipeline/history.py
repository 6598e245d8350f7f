"""Loads the stored history that a request belongs to, as the entries that trimming plans with.

The store finds the request's place by the rules of `conversation.reconcile`, and reads the records there.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from cachetools import FIFOCache
from msgspec import Struct
from msgspec.structs import replace

from proxy.conversation import ROOT, Arrival, Incoming, Kind, Manner, Mode, body_id, body_of, fingerprints, version_of
from proxy.dialects import Dialect, Message, ReasoningMode, Request
from proxy.errors import NotFound, StoreUnavailable
from proxy.pipeline.background import COUNTING, OFF_LOOP_BYTES, compute
from proxy.pipeline.context import Charge, RequestContext
from proxy.pipeline.prefix import KnownRequest
from proxy.recall import REF_DIGITS, REF_PREFIX, ref_of
from proxy.store import (
    Body,
    Doubt,
    HistoryQuery,
    HistorySnapshot,
    Inferred,
    Mark,
    NodeRow,
    ProviderState,
    Room,
    Source,
    StandingCut,
    Store,
    SummaryRow,
    UnnamedRequest,
    is_withheld,
    require_content,
    session_key,
)
from proxy.tokens import TokenCounter
from proxy.trimming import Change, Entry, Hidden, without_reasoning

_MARK_WORK: Final = 1024  # work to make an entry of a resent message, in bytes to parse (see `compute`)
_VARIANTS: Final = 20_000  # limit of remembered variants per process: about 8 MB
WAITING: Final = "open_calls"  # the receipt's name of the rule that leaves out open calls of other agents

_SESSIONS: Final = 10_000  # limit of remembered sessions per process: about 5 MB
_REPLIES: Final = 30_000  # limit of remembered replies of unnamed sessions per process: about 9 MB
_UNKNOWN: Final = (None, ROOT)
_RESENDING: Final = frozenset({Kind.RESEND, Kind.REWIND, Kind.WINDOWED, Kind.FOREIGN})


class Unplaced(Struct, frozen=True, kw_only=True):
    """The data that places a request in the history later, when the store can be used again."""

    incoming: Incoming
    infers: bool  # whether its session must be inferred, by its last reply or by `state`
    room: Room  # reserved in the spool
    state: str = ""  # the id of the provider's state that it continues from


class FirstRequest(Struct, frozen=True, kw_only=True):
    """Identifies a first request without a session id.

    A question beside it, for a title say, has other instructions.
    """

    tenant: str
    dialect: str
    digest: str
    instructions: str | None  # version of the instructions
    tools: str | None  # name of the tools' text


class History(Struct, frozen=True, kw_only=True):
    """A request at its place in the history."""

    id: str | None  # the session's id; None if the request is served without a session
    arrival: Arrival
    composed: bool  # whether the history comes from the store: the client sent only what is new
    digest: str  # identifies all messages of the request, so that a repetition is recognised
    entries: tuple[Entry, ...]
    """The branch, with the request's new messages at its end. For an append, without what the cut dropped."""
    nodes: tuple[str, ...]  # the nodes of the stored part of `entries`, oldest first
    fresh: tuple[Body, ...]  # the new messages, as they arrived
    instructions: tuple[Message, ...]
    """The instructions to send: the request's own, or the newest stored ones for an append without any."""
    size: int  # bytes of all entries, at least; planning time is proportional to it
    variants: tuple[tuple[str, Message], ...] = ()
    """(node, message) for each stored message that the client resent with a different text."""
    standing: StandingCut | None = None  # the newest cut of the branch
    borrowed: bool = False
    """Whether `standing` was just made by another request at the same place, and may not be stored yet."""
    start: int = 0  # position in the branch of the first message that the request includes
    updated_at: int | None = None
    """When the session's last exchange ended, in milliseconds since 1970; None for a new session."""
    scale: float | None = None  # tokens that the upstream counts for one counted here; None if not learnt yet
    ready_summary: SummaryRow | None = None
    """The newest summary by a model on this branch that the policy may use."""
    attempt: SummaryRow | None = None  # the last attempt at a summary, successful or not
    carried: tuple[str, ...] = ()  # the nodes at the end of `nodes` that get new places; see `HistorySnapshot.carried`
    known: KnownRequest | None = None  # what the session's next request can reuse; None for a short request
    doubt: Doubt | None = None  # the session that the request resembles but was not joined to
    heard: tuple[int, Hidden] | None = None
    """Messages of other agents since the last request, sent before one of `fresh`: that one's index, the messages."""
    owed: tuple[Message, ...] = ()
    """Messages that are sent before the request's own, because the provider lacks them.

    They belong to the reply that the provider continues from, and the client did not see them: the results of the
    proxy's own tools, for example.
    """
    relayed: tuple[int, ...] = ()
    """Indexes into `fresh` of known replies of the upstream, from a conversation with the same beginning."""
    unplaced: Unplaced | None = None  # set if the store could not be asked; the request then stands alone
    began_with: FirstRequest | None = None  # the first request of a session that the client does not name

    @property
    def placed_in(self) -> str | None:
        """The session's id, if it is known already."""
        return None if self.unplaced is not None and self.unplaced.infers else self.id

    @property
    def fork(self) -> int | None:
        """Position of the first new message; None if there is no new message, or no stored one before it."""
        known = len(self.nodes)
        return self.entries[known].position if 0 < known < len(self.entries) else None


class HistoryLoader:
    """Finds the place of each request in its history. One for the life of the process."""

    def __init__(self, store: Store, counter: TokenCounter, reasoning: ReasoningMode, *, expands: bool = False) -> None:
        """Read from `store`; count new messages with `counter`.

        `expands`: the proxy replaces a provider's state by the stored history.
        """
        self.expands = expands
        self._store = store
        self._counter = counter
        self._reasoning: ReasoningMode = reasoning
        self._variants: FIFOCache[tuple[str, str], bool] = FIFOCache(_VARIANTS)
        self._offering = threading.Lock()  # `_put_together` may run in several threads
        self._usage: FIFOCache[str, tuple[Kind, str]] = FIFOCache(_SESSIONS)
        """By session, the kind and the first node of its last request; tells whether the session resends."""
        self._replies: FIFOCache[tuple[str, str, str], str] = FIFOCache(_REPLIES)
        """The session of a reply by tenant, dialect and node, for clients that name no session."""
        self._unanswered: FIFOCache[FirstRequest, str] = FIFOCache(_SESSIONS)
        """The session of a first request without an id that got no reply."""

    async def load(
        self, request: Request, context: RequestContext, *, whole: bool = False, known: KnownRequest | None = None
    ) -> History:
        """Find the request's session, and the request's place in it.

        `whole`: also read the messages that a cut dropped. `known` is the session's previous request, which shares its
        first `request.known` messages with this one.

        A request that names no session joins the session of the tenant that its replies came from; see
        `store.evidence`. If no session can be determined, the request begins a new one. A first request that got no
        reply and is sent again continues the session that it began in this process.
        """
        size = request.new_bytes if known is not None else len(request.raw)
        masker = self._store.masker
        kept = request if masker is None else await compute(COUNTING * size, masker.request, request)
        incoming = await compute(size, _incoming, kept, context, known)
        if request.state:
            return await self._of_provider(request, incoming, context, whole=whole)
        if context.session is not None:
            return await self._load(request, incoming, context.session, context, whole=whole, known=known)
        found = Inferred()
        speaks = bool(incoming.replies) or incoming.answers
        if speaks or len(kept.messages) > 1:
            found = await self._store.infer(
                UnnamedRequest(
                    tenant=context.tenant,
                    dialect=context.dialect.name,
                    messages=kept.messages,
                    names=incoming.names,
                    contents=incoming.contents,
                    instructions=version_of(kept.instructions) if kept.instructions else None,
                )
            )
            if found.session is not None:
                if not speaks:  # it brings the whole history even so
                    incoming = replace(incoming, mode=Mode.FULL)
                return await self._load(request, incoming, found.session, context, whole=whole)
        first = _first_request(incoming, context)
        begun = self._unanswered.pop(first, None) if first is not None else None
        made = await self._load(request, incoming, begun, context, whole=whole) if begun is not None else None
        if made is None or made.arrival.kind is not Kind.FIRST:  # the client goes on with that session by its id
            made = await self._load(request, incoming, f"ses_{secrets.token_hex(16)}", context, whole=whole)
        return replace(made, relayed=found.relayed, doubt=found.doubt, began_with=first)

    async def check_owned(self, tenant: str, dialect: Dialect, names: Sequence[str]) -> None:
        """Raise `NotFound` for the id of a stored item at the provider that this tenant did not get from the proxy.

        If tenants share a key, the provider itself cannot tell which tenant an item belongs to.
        """
        for name in await self._store.foreign_ids(tenant, dialect.name, names):
            code = dialect.requests.unknown_state
            raise NotFound(f"'{name}' not found: it came with no reply of yours.", param="id", code=code)

    async def resolved(self, request: Request, context: RequestContext) -> Request:
        """Return the request with items in place of their ids, as far as the tenant got them from the proxy.

        The request is returned unchanged if the store masks texts or is away.
        """
        dialect = context.dialect
        resolve = dialect.requests.resolved
        if resolve is None or self._store.masker is not None:
            return request
        try:
            rows = await self._store.replies_with(context.tenant, dialect.name, request.pointers)
        except StoreUnavailable:
            return request
        if rows:
            context.charge(size_of([row.message for row in rows]), len(rows))
        rows = [row for row in rows if not is_withheld(row.message)]  # stored under another store.content
        replies = [row.message.as_request(self._reasoning, partial=row.partial) for row in rows]
        return await compute(size_of(replies), resolve, request, replies)

    async def _of_provider(
        self, request: Request, incoming: Incoming, context: RequestContext, *, whole: bool
    ) -> History:
        """Find the place of a request that continues from a state held by the provider.

        A conversation without a reply through the proxy is left to the provider, because the client may have put
        something there. Raises `NotFound` for a response that the proxy should expand but whose reply it did not see.
        """
        place = await self._store.provider_place(context.tenant, context.dialect.name, request.state)
        fields = context.dialect.requests.state_fields
        expands, field = self.expands and bool(fields), next(iter(fields), "")
        if expands and (place is None or not place.node):
            if request.field(field) == request.state:
                why = "" if place is None else " Its output did not come here: fetch it, or send the whole history."
                raise NotFound(
                    f"Previous response with id '{request.state}' not found.{why}",
                    param=field,
                    code="previous_response_not_found",
                )
            expands = False
        # An expanded request uses the session where the state is stored, whatever session the client names.
        if place is not None and (expands or context.session in {None, place.session}):
            session, state = place.session, ProviderState(node=place.node, expands=expands, begun=place.begun)
        else:
            session, state = context.session or f"ses_{secrets.token_hex(16)}", ProviderState(node=None)
        return await self._load(request, incoming, session, context, whole=whole, state=state)

    async def without_store(self, request: Request) -> History:
        """Return a history of the request alone. Nothing is read from the store."""
        size = _size_of(request)
        fresh = await compute(COUNTING * size, self._bodies, request.messages, request.model)
        return History(
            id=None,
            arrival=Arrival(kind=Kind.FIRST, base=ROOT, known=0),
            composed=False,
            digest=ROOT,
            entries=_new_entries(fresh, 0),
            nodes=(),
            fresh=fresh,
            instructions=request.instructions,
            size=size,
        )

    def is_full(self, request: Request, context: RequestContext) -> bool:
        """Tell whether a request certainly brings its whole history, or continues from a state held by the provider."""
        if request.state:
            return not (self.expands and context.dialect.requests.state_fields)
        if context.mode is Mode.APPEND:
            return False
        if request.replies or context.session is None or context.mode is Mode.FULL:
            return True
        kind, first = self._usage.get(session_key(context.tenant, context.session, context.dialect.name), _UNKNOWN)
        if kind is Kind.FIRST and request.messages:  # is it the session's first request again?
            masker = self._store.masker
            opening = request.messages[:1] if masker is None else masker.messages(request.messages[:1])
            return fingerprints(ROOT, opening)[0][0] == first
        return kind in _RESENDING

    async def unplaced(self, request: Request, context: RequestContext, room: Room) -> History:
        """Return a history of the request alone, to be placed later. `is_full` must hold for the request."""
        alone = await self.without_store(request)
        masker = self._store.masker
        kept = request if masker is None else await compute(COUNTING * len(request.raw), masker.request, request)
        incoming = await compute(len(request.raw), _incoming, kept, context)
        session, infers = context.session, False
        kind = Kind.RESEND if incoming.replies else Kind.FIRST
        if request.state:
            infers, kind = session is None, Kind.PROVIDER_STATE
        elif session is None and (incoming.replies or incoming.answers):
            if incoming.replies:
                reply = incoming.names[incoming.replies[-1]]
                session = self._replies.get((context.tenant, context.dialect.name, reply))
            infers = session is None
        return replace(
            alone,
            id=session or f"ses_{secrets.token_hex(16)}",
            arrival=replace(alone.arrival, kind=kind),
            digest=incoming.digest,
            unplaced=Unplaced(incoming=incoming, infers=infers, room=room, state=request.state),
        )

    def remember(self, context: RequestContext, session: str, replies: Iterable[str]) -> None:
        """Remember the session of replies to a request that named none."""
        for reply in replies:
            self._replies[context.tenant, context.dialect.name, reply] = session

    def remember_unanswered(self, history: History) -> None:
        """Remember the session that a first request without an id began, because the request may be sent again."""
        if history.began_with is not None and history.id is not None and history.arrival.kind is Kind.FIRST:
            self._unanswered[history.began_with] = history.id

    def branch(
        self,
        rows: Sequence[NodeRow],
        model: str,
        hidden: Mapping[str, Hidden],
        *,
        agent: str | None = None,
        new: Sequence[Body] = (),
        trims: bool,
    ) -> tuple[Entry, ...]:
        """Return a stored branch as an append would send it to `model`.

        `hidden` holds, by node, what the client was not shown. `agent` is the agent that asks, and `new` are its new
        messages. `trims` says whether a policy trims the view.
        """
        foreign = self._of_other_agents(rows, agent, new) if trims else frozenset[str]()
        entries = tuple(
            [self._stored_entry(row, model, hidden.get(row.node), bare=row.node in foreign) for row in rows]
        )
        return entries if agent is None else _without_waiting(entries, rows, new, agent)

    @staticmethod
    def _of_other_agents(rows: Sequence[NodeRow], agent: str | None, new: Sequence[Body]) -> frozenset[str]:
        """Return the nodes of other agents before the current turn.

        Each agent has its own trims, so the reasoning of others is not valid behind this agent's view. In the current
        turn it may be required.
        """
        if all([row.agent == agent for row in rows]):
            return frozenset()
        turn = len(rows)
        if not any([body.message.begins_turn for body in new]):
            turn = next((at for at in range(len(rows) - 1, -1, -1) if rows[at].message.begins_turn), 0)
        return frozenset([row.node for row in rows[:turn] if row.agent != agent])

    async def _load(
        self,
        request: Request,
        incoming: Incoming,
        session: str,
        context: RequestContext,
        *,
        whole: bool,
        known: KnownRequest | None = None,
        state: ProviderState | None = None,
    ) -> History:
        context = context.in_session(session)
        policy, masker = context.policy, self._store.masker
        snapshot = await self._store.recall(
            HistoryQuery(
                dialect=context.dialect.name,
                tenant=context.tenant,
                session=session,
                incoming=incoming,
                messages=request.messages if masker is None else masker.messages(request.messages),
                policy=context.policy_name if policy is not None else None,
                agent=context.agent,
                idempotency=context.idempotency,
                whole=whole,
                merging=policy is not None and policy.agents == "merge",
                instructed=bool(request.instructions),
                recipe=policy.summarizing.recipe if policy is not None else None,
                state=state,
            )
        )
        if snapshot.names:
            incoming = replace(incoming, names=snapshot.names)
        made = _made_before(request, snapshot, known)
        work = _MARK_WORK * (len(snapshot.marks) - len(made))
        if COUNTING * len(request.raw) > OFF_LOOP_BYTES:
            work += COUNTING * size_of(request.messages[snapshot.arrival.known :])
        if snapshot.rows:
            size = size_of([row.message for row in snapshot.rows])
            context.charge(size, len(snapshot.rows))
            work += size
        return await compute(work, self._put_together, request, incoming, context, session, snapshot, made)

    def _put_together(
        self,
        request: Request,
        incoming: Incoming,
        context: RequestContext,
        session: str,
        snapshot: HistorySnapshot,
        made: tuple[Entry, ...],
    ) -> History:
        """Return the history. `made` are its first entries, if they are known from the previous request."""
        arrival, model, masker = snapshot.arrival, request.model, self._store.masker
        brought = fresh = self._bodies(request.messages[arrival.known :], model)
        if masker is not None:
            fresh = tuple([replace(body, message=masker.message(body.message)) for body in brought])
        variants: tuple[tuple[str, Message], ...] = ()
        composed = arrival.kind is Kind.APPEND or arrival.expanded
        if composed and snapshot.rows:
            require_content([row.message for row in snapshot.rows])
        key = session_key(context.tenant, session, context.dialect.name)
        if arrival.kind is not Kind.SIDE:
            with self._offering:
                self._usage[key] = (arrival.kind, incoming.names[0] if incoming.names else ROOT)
        if composed:
            trims = context.policy is not None and context.policy.mode == "trim"
            known = self.branch(snapshot.rows, model, snapshot.hidden, agent=context.agent, new=fresh, trims=trims)
            nodes = tuple([row.node for row in snapshot.rows])
        else:
            own, count = request.has_own_fields, len(made)
            messages, marks = request.messages[count:], snapshot.marks[count:]  # earlier variants were offered already
            known = made + _resent_entries(messages, marks, snapshot.hidden, own_fields=own)
            nodes = tuple([mark.node for mark in snapshot.marks] if snapshot.start else incoming.names[: arrival.known])
            variants = self._new_variants(key, messages if masker is None else masker.messages(messages), marks)
        new = _new_entries(brought, snapshot.depth, fresh)
        heard = self._heard(snapshot, fresh, model) if snapshot.others else None
        if heard is not None:
            new = tuple([replace(e, hidden=heard[1]) if number == heard[0] else e for number, e in enumerate(new)])
        return History(
            id=session,
            arrival=arrival,
            composed=composed,
            digest=incoming.names[-1] if incoming.names else ROOT,
            entries=known + new,
            nodes=nodes,
            fresh=fresh,
            instructions=_expanded(request, snapshot)
            if arrival.expanded
            else request.instructions or snapshot.instructions,
            size=_size_of(request, snapshot.rows),
            variants=variants,
            standing=snapshot.cut,
            start=snapshot.start,
            updated_at=snapshot.updated_at,
            scale=snapshot.scale if snapshot.model == model else None,
            ready_summary=snapshot.ready_summary,
            attempt=snapshot.attempt,
            carried=snapshot.carried,
            heard=heard,
            owed=snapshot.owed,
            known=_known_of(request, incoming, snapshot, known) if request.ends else None,
        )

    def _new_variants(
        self, session: str, messages: Sequence[Message], marks: Sequence[Mark]
    ) -> tuple[tuple[str, Message], ...]:
        """Return (node, message) for each resent message whose text differs from the stored one, once each.

        Clients re-serialize replies, and resend them every turn. The cache is bounded. A variant that it evicted is
        offered to the store again, which is idempotent.
        """
        new: list[tuple[str, Message]] = []
        for message, mark in zip(messages, marks, strict=False):
            facts = message.facts
            body = facts.body if facts is not None and facts.body is not None else body_of(message)
            if body == mark.body:
                continue
            key = (session + mark.node, body)
            with self._offering:
                is_new = key not in self._variants
                if is_new:
                    self._variants[key] = True
            if is_new:
                new.append((mark.node, message))
        return tuple(new)

    def _heard(self, snapshot: HistorySnapshot, fresh: Sequence[Body], model: str) -> tuple[int, Hidden] | None:
        """Return what other agents said since, and the index of the new message that it is sent before.

        That message is the newest one of a user. Nothing may stand between calls and their results, so what is said
        in between waits for the next question.
        """
        turns = [number for number, body in enumerate(fresh) if body.message.begins_turn]
        told = {message.raw for hidden in snapshot.hidden.values() for message in hidden.before}
        said = [as_said(row) for row in snapshot.others if row.message.text.strip()]
        new = tuple([message for message in said if message.raw not in told])
        if not turns or not new:
            return None
        tokens = sum(self._counter.messages(new, model))
        return turns[-1], Hidden(before=new, reply=None, after=(), tokens=tokens)

    def _bodies(self, messages: Sequence[Message], model: str) -> tuple[Body, ...]:
        counts = self._counter.messages(messages, model)
        return tuple([Body(message=message, tokens=tokens) for message, tokens in zip(messages, counts, strict=True)])

    def _stored_entry(self, row: NodeRow, model: str, hidden: Hidden | None, *, bare: bool = False) -> Entry:
        """Return a stored message in the form of a request; `bare`: without its reasoning."""
        message = row.message
        if row.source is Source.UPSTREAM:
            message = message.as_request(self._reasoning, partial=row.partial)
        sent = message.without_own_fields()
        if bare:
            messages, beside = without_reasoning((sent,), {} if hidden is None else {0: hidden}, (0,))
            sent, hidden = messages[0] or sent, beside.get(0)
        return Entry(
            message=sent,
            tokens=row.tokens if sent is row.message else self._counter.message(sent, model),
            ref=ref_of(row.body),
            position=row.depth - 1,
            arrival=row.arrival,
            agent=message.agent,
            is_internal=message.is_internal,
            hidden=hidden,
        )


def as_said(row: NodeRow) -> Message:
    """Return another agent's reply in the form that the asking agent gets: a user message between tags of its name."""
    agent = "".join([letter for letter in row.agent or "" if letter not in "<>"])
    return row.message.dialect.spoken("user", f"<{agent}>{row.message.text.strip()}</{agent}>")


def size_of(messages: Iterable[Message]) -> int:
    """Return the size of the messages in bytes."""
    size = 0
    for message in messages:
        size += len(message.raw)
    return size


async def read_in_portions(store: Store, key: str, end: str, charge: Charge) -> list[NodeRow]:
    """Return the branch that ends at a node, oldest first; empty if the node does not exist.

    It is read in portions, and `charge` is called for each. So `charge` can refuse a long branch before all of it is
    in memory.
    """
    rows: list[NodeRow] = []
    nodes = (await store.lineage(key, [end])).nodes(end) if end else ()
    async for some in store.portions(key, nodes):
        charge(size_of([row.message for row in some]), len(some))
        rows += some
    return rows


def _size_of(request: Request, rows: Sequence[NodeRow] = ()) -> int:
    """Return the bytes of the request's messages and of those in `rows`. Most other fields of the request count too."""
    beside = size_of(request.instructions) + len(request.tools or b"")
    return len(request.raw) - beside + (size_of([row.message for row in rows]) if rows else 0)


def _incoming(request: Request, context: RequestContext, known: KnownRequest | None = None) -> Incoming:
    """Return the parts of the request that decide its place in the history; see `HistoryLoader.load`."""
    messages = request.messages
    replies = request.replies
    answers = not replies and bool(messages) and messages[0].answers is not None
    manner = None
    # A request that answers calls or names its agent belongs to the conversation, however it asks.
    if context.agent is None and not replies and not answers:
        manner = Manner(
            instructions=version_of(request.instructions) if request.instructions else None,
            tools=body_id(request.tools) if request.tools is not None else None,
            model=request.model,
        )
    if known is not None and (count := request.known):
        more_names, more_contents = fingerprints(known.names[count - 1], messages[count:])
        names, contents = [*known.names[:count], *more_names], [*known.contents[:count], *more_contents]
    else:
        names, contents = fingerprints(ROOT, messages)
    return Incoming(
        names=names,
        contents=contents,
        replies=replies,
        retried=context.retried,
        mode=context.mode,
        answers=answers,
        manner=manner,
    )


def _first_request(incoming: Incoming, context: RequestContext) -> FirstRequest | None:
    """Return the identity of a first request without an id, by which a repetition is recognised.

    Returns None for a named agent, because two agents may say the same.
    """
    manner = incoming.manner
    if context.agent is not None or not incoming.names:
        return None
    return FirstRequest(
        tenant=context.tenant,
        dialect=context.dialect.name,
        digest=incoming.digest,
        instructions=manner.instructions if manner is not None else None,
        tools=manner.tools if manner is not None else None,
    )


def _expanded(request: Request, snapshot: HistorySnapshot) -> tuple[Message, ...]:
    """Return the instructions to send in place of a provider's state: the stored ones, then the request's own.

    Instructions in fields come only from the request, and lead.
    """
    fields = [message for message in request.instructions if message.is_field]
    items = [message for message in snapshot.instructions if not message.is_field]
    return (*fields, *items, *[message for message in request.instructions if not message.is_field])


def _known_of(
    request: Request, incoming: Incoming, snapshot: HistorySnapshot, entries: tuple[Entry, ...]
) -> KnownRequest:
    """Return what the session's next request can reuse; `entries` are those of the stored messages."""
    plain = bool(snapshot.marks) and not snapshot.hidden and not request.has_own_fields
    return KnownRequest(
        request=request,
        names=incoming.names,
        contents=incoming.contents,
        marks=tuple(snapshot.marks) if plain else (),
        entries=entries if plain else (),
    )


def _made_before(request: Request, snapshot: HistorySnapshot, known: KnownRequest | None) -> tuple[Entry, ...]:
    """Return the entries of the previous request that this one can reuse: same messages, same marks."""
    if known is None or snapshot.hidden or request.has_own_fields:
        return ()
    count = min(request.known, len(known.marks), len(snapshot.marks))
    return known.entries[:count] if known.marks[:count] == snapshot.marks[:count] else ()


def _resent_entries(
    messages: Sequence[Message], marks: Sequence[Mark], hidden: Mapping[str, Hidden], *, own_fields: bool
) -> tuple[Entry, ...]:
    """Return stored messages as the client sent them; `hidden` holds, by node, what the client was not shown.

    `own_fields` says whether any message may have fields of ours.
    """
    pairs = zip(messages, marks, strict=False)
    if hidden or own_fields:
        return tuple(
            [
                _entry(message, mark.tokens, mark.body, mark.depth - 1, mark.arrival, hidden.get(mark.node))
                for message, mark in pairs
            ]
        )
    return tuple(
        [
            Entry(
                message=message,
                tokens=mark.tokens,
                ref=REF_PREFIX + mark.body[:REF_DIGITS],
                position=mark.depth - 1,
                arrival=mark.arrival,
            )
            for message, mark in pairs
        ]
    )


def _new_entries(bodies: Sequence[Body], start: int, stored: Sequence[Body] = ()) -> tuple[Entry, ...]:
    """Return new messages as entries of a history with `start` messages before them.

    `stored` are the same messages in their stored form, if that may differ (masking).
    """
    entries: list[Entry] = []
    for position, (body, kept) in enumerate(zip(bodies, stored or bodies, strict=True), start):
        facts = kept.message.facts
        name = facts.body if facts is not None and facts.body is not None else body_of(kept.message)
        entries.append(_entry(body.message, body.tokens, name, position))
    return tuple(entries)


def beside_hidden(message: Message, hidden: Hidden) -> tuple[Message, Hidden]:
    """Return a reply as its client sends it, and its hidden rounds with the form of the reply that is sent after them.

    A client that assembles a reply from the events of a stream has everything of these rounds but the calls.
    """
    alone = message.with_paired_reasoning()
    if hidden.reply is not None or not hidden.before:
        return alone, hidden
    rest = message.behind_rounds(hidden.before)
    return alone, hidden if rest == alone else replace(hidden, reply=rest)


def _entry(
    message: Message,
    tokens: int,
    body: str,
    position: int,
    arrival: tuple[Change, ...] | None = None,
    hidden: Hidden | None = None,
) -> Entry:
    """Return a message from the client as an entry for trimming."""
    own_fields = message.facts is None or message.facts.has_own_fields
    if hidden is not None:
        message, hidden = beside_hidden(message, hidden)
    return Entry(
        message=message.without_own_fields() if own_fields else message,
        tokens=tokens,
        ref=REF_PREFIX + body[:REF_DIGITS],
        position=position,
        arrival=arrival,
        agent=message.agent if own_fields else None,
        is_internal=own_fields and message.is_internal,
        hidden=hidden,
    )


def _without_waiting(
    entries: tuple[Entry, ...], rows: Sequence[NodeRow], new: Sequence[Body], agent: str
) -> tuple[Entry, ...]:
    """Leave out the blocks of other agents whose calls have no result yet.

    Such a block moves to the end of the history with its first result. Until then it says nothing to `agent`, and a
    placeholder for its result would have to be taken back.
    """
    messages = [row.message for row in rows] + [body.message for body in new[:1]]
    shown = list(entries)
    for place, (row, after) in enumerate(zip(rows, messages[1:], strict=False)):  # only where one follows
        if row.agent not in {None, agent} and not after.is_result and row.message.calls:
            change = Change(
                position=entries[place].position,
                edit=WAITING,
                reason="another agent waits for the results",
                message=None,
                tokens_before=entries[place].tokens,
                tokens_after=0,
            )
            shown[place] = replace(entries[place], arrival=(change,))
    return tuple(shown)

"""A request in its place in the stored history, with the messages that trimming plans with.

The store finds the place, by the rules of `conversation.reconcile`, and reads what is known of it.
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

_MARK_WORK: Final = 1024  # work of making an entry of a resent message, in bytes read once (see `compute`)
_VARIANTS: Final = 20_000  # variants that one process remembers at most: some 8 MB
WAITING: Final = "open_calls"  # names, in a receipt, the rule that leaves out open calls of other agents

_SESSIONS: Final = 10_000  # sessions that one process remembers at most: some 5 MB
_REPLIES: Final = 30_000  # replies of sessions without a name that one process remembers at most: some 9 MB
_UNKNOWN: Final = (None, ROOT)
_RESENDING: Final = frozenset({Kind.RESEND, Kind.REWIND, Kind.WINDOWED, Kind.FOREIGN})


class Unplaced(Struct, frozen=True, kw_only=True):
    """What gives a request its place in the history later, when the store can be used."""

    incoming: Incoming
    infers: bool  # whether its session is to be found out by its last reply, or by `state`
    room: Room  # in the spool
    state: str = ""  # the id of what the provider holds, from which it goes on


class FirstRequest(Struct, frozen=True, kw_only=True):
    """What a first request without an id says. A question beside it, for a title say, has other instructions."""

    tenant: str
    dialect: str
    digest: str
    instructions: str | None  # their version
    tools: str | None  # the name of all of them


class History(Struct, frozen=True, kw_only=True):
    """A request in its place in the history."""

    id: str | None  # the session's id; None where the request is served without one
    arrival: Arrival
    composed: bool  # whether it comes from the store: the client sent only what is new
    digest: str  # names all that the request says, so that its repetition is recognised
    entries: tuple[Entry, ...]
    """The branch with the request's new messages at its end; of an append, without what the cut dropped."""
    nodes: tuple[str, ...]  # the nodes of the stored part of `entries`, oldest first
    fresh: tuple[Body, ...]  # the new messages, as they arrived
    instructions: tuple[Message, ...]
    """The instructions to send: the request's own, or the newest stored ones where an append has none."""
    size: int  # bytes of all entries, at least: planning takes time in proportion
    variants: tuple[tuple[str, Message], ...] = ()
    """(node, message) where the client sent a stored message with another text."""
    standing: StandingCut | None = None  # the newest cut of the branch
    borrowed: bool = False
    """Whether that cut was just made by another request at the same place, and may not be stored yet."""
    start: int = 0  # position in the branch of the first message that the request speaks of
    updated_at: int | None = None
    """When the session's last exchange ended, in milliseconds since 1970; None for a new session."""
    scale: float | None = None  # tokens that the upstream counts for one counted here; None where that was not learnt
    ready_summary: SummaryRow | None = None
    """The newest summary by a model that lies on the branch and that the policy may use."""
    attempt: SummaryRow | None = None  # the last attempt at a summary, whatever came of it
    carried: tuple[str, ...] = ()  # the nodes at the end of `nodes` that get new places: see `HistorySnapshot.carried`
    known: KnownRequest | None = None  # what the next request of the session need not read again; None for a short one
    doubt: Doubt | None = None  # the session that it resembles and was not taken for a part of
    heard: tuple[int, Hidden] | None = None
    """What other agents said since, to be sent before one of `fresh`: its number, and the messages."""
    owed: tuple[Message, ...] = ()
    """What the client was not shown of the reply from which the provider goes on, and the provider lacks, such as the
    results of the proxy's own tools: it is sent before the request's messages."""
    relayed: tuple[int, ...] = ()
    """Which of `fresh` are known as replies of upstream, from a conversation with the same beginning."""
    unplaced: Unplaced | None = None  # set where the store could not be asked: the request stands alone
    began_with: FirstRequest | None = None  # what began a session that the client does not name

    @property
    def placed_in(self) -> str | None:
        """The session, if it is known by now."""
        return None if self.unplaced is not None and self.unplaced.infers else self.id

    @property
    def fork(self) -> int | None:
        """Position of the first new message; None where there is none, or none before it."""
        known = len(self.nodes)
        return self.entries[known].position if 0 < known < len(self.entries) else None


class HistoryLoader:
    """Finds the place of one request after another. One for the life of the process."""

    def __init__(self, store: Store, counter: TokenCounter, reasoning: ReasoningMode, *, expands: bool = False) -> None:
        """Read from `store`; count new messages with `counter`. `expands`: a provider's state comes from the store."""
        self.expands = expands
        self._store = store
        self._counter = counter
        self._reasoning: ReasoningMode = reasoning
        self._variants: FIFOCache[tuple[str, str], bool] = FIFOCache(_VARIANTS)
        self._offering = threading.Lock()  # `_put_together` may run in several threads
        self._usage: FIFOCache[str, tuple[Kind, str]] = FIFOCache(_SESSIONS)
        """By session, how it was asked last, and its first message then: whether it resends its history."""
        self._replies: FIFOCache[tuple[str, str, str], str] = FIFOCache(_REPLIES)
        """By tenant, dialect and node of a reply, the session that has it, where the client names none."""
        self._unanswered: FIFOCache[FirstRequest, str] = FIFOCache(_SESSIONS)
        """By a first request without an id, its session, where no reply came."""

    async def load(
        self, request: Request, context: RequestContext, *, whole: bool = False, known: KnownRequest | None = None
    ) -> History:
        """Find the request's session, and its place there. `whole`: read the messages that a cut dropped, too.

        `known` is the request before, with which this one has its first `request.known` messages in common.

        A request that names no session goes on with the session of the tenant that its replies came from: see
        `store.evidence`. Where nobody knows which is meant, it becomes a new session;
        a first request that got no reply, asked again, goes on with the one that it began in this process.
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
                if not speaks:  # it brings the whole history all the same
                    incoming = replace(incoming, mode=Mode.FULL)
                return await self._load(request, incoming, found.session, context, whole=whole)
        first = _first_request(incoming, context)
        begun = self._unanswered.pop(first, None) if first is not None else None
        made = await self._load(request, incoming, begun, context, whole=whole) if begun is not None else None
        if made is None or made.arrival.kind is not Kind.FIRST:  # its client goes on there, by its id
            made = await self._load(request, incoming, f"ses_{secrets.token_hex(16)}", context, whole=whole)
        return replace(made, relayed=found.relayed, doubt=found.doubt, began_with=first)

    async def check_owned(self, tenant: str, dialect: Dialect, names: Sequence[str]) -> None:
        """Raise `NotFound` for an id of something that the provider keeps and the tenant did not get here.

        With a key that tenants share the provider itself cannot tell whose it is.
        """
        for name in await self._store.foreign_ids(tenant, dialect.name, names):
            code = dialect.requests.unknown_state
            raise NotFound(f"'{name}' not found: it came with no reply of yours.", param="id", code=code)

    async def resolved(self, request: Request, context: RequestContext) -> Request:
        """Return a request with the items that it names by their ids, as far as the tenant got them here.

        Where the store masks texts or is away, it stays as it is.
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
        """Find the place of a request that goes on from what the provider holds.

        A conversation of which no reply came here yet is the provider's: its client may have put something there.
        Raises `NotFound` for a response whose reply did not come here, where the proxy is to expand it.
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
        # What is to be sent is stored at its place, whatever session the client names.
        if place is not None and (expands or context.session in {None, place.session}):
            session, state = place.session, ProviderState(node=place.node, expands=expands, begun=place.begun)
        else:
            session, state = context.session or f"ses_{secrets.token_hex(16)}", ProviderState(node=None)
        return await self._load(request, incoming, session, context, whole=whole, state=state)

    async def without_store(self, request: Request) -> History:
        """Return the request as if it stood alone: nothing is read, nothing is known."""
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
        """Tell whether a request surely brings its whole history, or goes on from what the provider holds of it."""
        if request.state:
            return not (self.expands and context.dialect.requests.state_fields)
        if context.mode is Mode.APPEND:
            return False
        if request.replies or context.session is None or context.mode is Mode.FULL:
            return True
        kind, first = self._usage.get(session_key(context.tenant, context.session, context.dialect.name), _UNKNOWN)
        if kind is Kind.FIRST and request.messages:  # the first request of a session, once more
            masker = self._store.masker
            opening = request.messages[:1] if masker is None else masker.messages(request.messages[:1])
            return fingerprints(ROOT, opening)[0][0] == first
        return kind in _RESENDING

    async def unplaced(self, request: Request, context: RequestContext, room: Room) -> History:
        """Return a request for which `is_full` holds as if it stood alone; its place is found later."""
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
        """Remember the session that a first request without an id began: it may be asked again."""
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

        `hidden` has, by node, what the client was not shown. `agent` is who asks, and `new` what it brings; `trims`
        tells whether a policy trims what it is sent.
        """
        foreign = self._of_other_agents(rows, agent, new) if trims else frozenset[str]()
        entries = tuple(
            [self._stored_entry(row, model, hidden.get(row.node), bare=row.node in foreign) for row in rows]
        )
        return entries if agent is None else _without_waiting(entries, rows, new, agent)

    @staticmethod
    def _of_other_agents(rows: Sequence[NodeRow], agent: str | None, new: Sequence[Body]) -> frozenset[str]:
        """Return the nodes that other agents said before the current turn.

        Each agent has trims of its own, so their reasoning is not valid behind the view that this one is sent. In the
        current turn it may be required.
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
        """Return the history; `made` are the first of its entries, as far as they are there."""
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
            messages, marks = request.messages[count:], snapshot.marks[count:]  # those before were offered, too
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
        """Return (node, message) for each resent message whose text is not the stored one, once each.

        Clients write replies in their own way, and send them back at every turn. The memory is bounded: a
        variant that is forgotten is offered to the store again, which changes nothing.
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
        """Return what other agents said since, and before which new message it is sent: the newest of a user.

        Between calls and their results nothing may stand: what is said meanwhile waits for the next question.
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
        """Return a stored message in the form in which a request carries it; `bare`: without its reasoning."""
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
    """Return a reply of another agent as the one that asks hears it: with the name of who said it."""
    agent = "".join([letter for letter in row.agent or "" if letter not in "<>"])
    return row.message.dialect.spoken("user", f"<{agent}>{row.message.text.strip()}</{agent}>")


def size_of(messages: Iterable[Message]) -> int:
    """Return the bytes of messages."""
    size = 0
    for message in messages:
        size += len(message.raw)
    return size


async def read_in_portions(store: Store, key: str, end: str, charge: Charge) -> list[NodeRow]:
    """Return the branch that ends at a node, oldest first; empty where it is not there.

    It is read in portions, and `charge` is told of each: it may refuse before all of a long one is in memory.
    """
    rows: list[NodeRow] = []
    nodes = (await store.lineage(key, [end])).nodes(end) if end else ()
    async for some in store.portions(key, nodes):
        charge(size_of([row.message for row in some]), len(some))
        rows += some
    return rows


def _size_of(request: Request, rows: Sequence[NodeRow] = ()) -> int:
    """Return the bytes of the request's messages, at least (other fields count too), and of those in `rows`."""
    beside = size_of(request.instructions) + len(request.tools or b"")
    return len(request.raw) - beside + (size_of([row.message for row in rows]) if rows else 0)


def _incoming(request: Request, context: RequestContext, known: KnownRequest | None = None) -> Incoming:
    """Return the request as far as its place in the history depends on it; see `HistoryLoader.load`."""
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
    """Return a request without an id as it is known when it is asked again; None for one of a named agent.

    Two agents may say the same.
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
    """Return the instructions to send in the place of a provider's state: those stored go before the request's own."""
    fields = [message for message in request.instructions if message.is_field]
    items = [message for message in snapshot.instructions if not message.is_field]
    return (*fields, *items, *[message for message in request.instructions if not message.is_field])


def _known_of(
    request: Request, incoming: Incoming, snapshot: HistorySnapshot, entries: tuple[Entry, ...]
) -> KnownRequest:
    """Return what the next request of the session need not read again; `entries` are those of stored messages."""
    plain = bool(snapshot.marks) and not snapshot.hidden and not request.has_own_fields
    return KnownRequest(
        request=request,
        names=incoming.names,
        contents=incoming.contents,
        marks=tuple(snapshot.marks) if plain else (),
        entries=entries if plain else (),
    )


def _made_before(request: Request, snapshot: HistorySnapshot, known: KnownRequest | None) -> tuple[Entry, ...]:
    """Return the entries of the request before that are those of this one: of the same messages and marks."""
    if known is None or snapshot.hidden or request.has_own_fields:
        return ()
    count = min(request.known, len(known.marks), len(snapshot.marks))
    return known.entries[:count] if known.marks[:count] == snapshot.marks[:count] else ()


def _resent_entries(
    messages: Sequence[Message], marks: Sequence[Mark], hidden: Mapping[str, Hidden], *, own_fields: bool
) -> tuple[Entry, ...]:
    """Return stored messages as the client sent them; `hidden` has, by node, what it was not shown.

    `own_fields` tells whether any of the messages may have fields of ours.
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
    """Return new messages as entries of a history that has `start` messages before them.

    `stored` are the same messages as they are stored, where that may be in other words.
    """
    entries: list[Entry] = []
    for position, (body, kept) in enumerate(zip(bodies, stored or bodies, strict=True), start):
        facts = kept.message.facts
        name = facts.body if facts is not None and facts.body is not None else body_of(kept.message)
        entries.append(_entry(body.message, body.tokens, name, position))
    return tuple(entries)


def beside_hidden(message: Message, hidden: Hidden) -> tuple[Message, Hidden]:
    """Return a reply as its client sends it, and what is sent in its place as long as hidden rounds are.

    A client that puts a reply together from the events of a stream has of these rounds all but the calls.
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
    """Return a message that the client sent as trimming sees it."""
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
    """Leave out of a view the calls of other agents that wait for all their results.

    Such a block moves to the end of the history with its first result. Until then it says nothing to `agent`,
    and a text that stood in for a result would have to be taken back.
    """
    messages = [row.message for row in rows] + [body.message for body in new[:1]]
    shown = list(entries)
    for place, (row, after) in enumerate(zip(rows, messages[1:], strict=False)):  # if any comes after
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

"""One exchange under way, and what the store is told of it at its beginning and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final

import orjson
from msgspec import Struct
from msgspec.structs import asdict, replace

from proxy.dialects import Message
from proxy.dialects.chat.request import ChatRequest
from proxy.dialects.chat.roles import Shape
from proxy.dialects.reader import sound
from proxy.models import ModelFacts
from proxy.pipeline.asking import RequestContext
from proxy.pipeline.past import History
from proxy.pipeline.receipt import PlanReport, receipt_of, wanted_told
from proxy.pipeline.relay import Outcome
from proxy.store import Body, Kept, Opening, Reply, Settlement, SummaryRow
from proxy.tokens import TokenCounter
from proxy.trimming import Cut, Entry, Hidden, PlanningContext, Policy, SummaryRequest, outside_gaps

Headers = Sequence[tuple[bytes, bytes]]

_NO_PARAMETERS: Final = frozenset({"messages", "tools"})
"""Fields of a request that are stored in places of their own."""


class Call(Struct, frozen=True, kw_only=True):
    """A client's request for a chat completion, as it came in."""

    tenant: str
    headers: Headers
    query: bytes
    """The query string, without its question mark."""
    body: bytes


class ExchangeContext(Struct, kw_only=True):
    """One exchange under way."""

    call: Call
    request: ChatRequest
    past: History
    ticket: PlanReport
    asking: RequestContext
    known: PlanningContext
    """What its plan was made with."""
    facts: ModelFacts
    """What is known of the model that it asks."""
    started: float
    """`time.monotonic()` at its arrival."""
    stored: bool
    """Whether it belongs to a session; a stateless one leaves nothing behind."""
    policy: Policy | None = None
    """What decides; None where trimming is bypassed."""
    own: tuple[str, ...] = ()
    """Names of the proxy's own tools that are offered with it."""
    tools: bytes | None = None
    """The JSON text of the tools that are offered, the proxy's own included; None without any."""
    finishing: Entry | None = None
    """The reply that finished the task, where nothing came after it: then it is the answer."""
    waited: str | None = None
    """Why there is no summary, though it waited for one; empty where there is, None where it did not wait."""
    hindered: str = ""
    """Why the summary that is wanted is not even begun; empty where it is, or none is wanted."""
    compaction: SummaryRequest | SummaryRow | None = None
    """The summary that the model asked for, or the one that is there and was not used yet."""
    rounds: tuple[Message, ...] = ()
    """What is sent after the view: calls of the proxy's own tools in this exchange, with their results."""
    began: asyncio.Future[None] | None = None
    """Done when its opening is stored."""
    shapes: frozenset[Shape] = frozenset()
    """The order of roles that its body is put in."""
    sent_bytes: int = 0
    """Bytes of the body that was sent last."""
    settled: bool = False
    scale: float | None = None
    """What upstream's usage taught about its counting; None where it taught nothing."""
    timings: dict[str, float] = {}
    """Milliseconds from its arrival, by event."""

    def mark(self, event: str) -> None:
        """Note when something happened."""
        self.timings[event] = round((time.monotonic() - self.started) * 1000, 2)


def opening_of(turn: ExchangeContext, now: int, counter: TokenCounter) -> Opening:
    """Return what is stored of a request before its answer is here; `now` is in milliseconds since 1970."""
    request, past, call = turn.request, turn.past, turn.call
    lead, fields = request.instructions, request.fields
    return Opening(  # by place: to look so many names up takes ten times as long
        tenant=call.tenant,
        session=turn.ticket.session or "",
        exchange=turn.ticket.exchange,
        created_at=now,
        kind=past.arrival.kind,
        base=past.arrival.base,
        messages=past.fresh,
        instructions=lead or None,
        instructions_tokens=sum(counter.messages(lead, request.model)) if lead else 0,
        digest=past.digest,
        model=request.model,
        agent=turn.asking.agent,
        policy=turn.ticket.plan.policy,
        policy_version=turn.ticket.plan.version,
        stream=request.stream,
        parameters={name: orjson.loads(fields[name]) for name in fields if name not in _NO_PARAMETERS},
        tools=request.tools,
        idempotency=turn.asking.idempotency,
        forms=past.forms,
    )


def settlement_of(
    turn: ExchangeContext, outcome: Outcome, now: int, counter: TokenCounter, cost: float | None = None
) -> Settlement:
    """Return how the exchange ended, for the store.

    `now` is in milliseconds since 1970, `cost` in dollars, None where it is not known.
    """
    past, ticket = turn.past, turn.ticket
    planned, arrival = ticket.plan, past.arrival
    model, hidden = turn.request.model, outcome.hidden
    moved = planned.cut if planned.moved or past.borrowed else None
    receipt = receipt_of(ticket, past.standing)
    receipt |= {
        "usage": outcome.usage,
        "finish_reasons": list(outcome.finish_reasons),
        "upstream_model": outcome.model,
        "upstream_status": outcome.upstream_status,
        "error": outcome.error,
        "cost": cost,
        "finished": turn.finishing is not None,
        "summarizer": wanted_told(planned.wanted, past.attempt, turn.waited or turn.hindered),
        "own_calls": [asdict(call) for call in outcome.answered],
        "timings": turn.timings,
    }
    return Settlement(  # by place, as above
        tenant=turn.call.tenant,
        session=ticket.session or "",
        exchange=ticket.exchange,
        settled_at=now,
        status=outcome.status,
        kind=arrival.kind,
        base=arrival.base,
        at_head=arrival.at_head,
        moves_head=arrival.moves_head,
        messages=past.fresh,
        arrivals=planned.decided[len(past.nodes) :],
        policy_version=planned.version,
        agent=turn.asking.agent,
        replies=tuple(
            [_reply(message, partial, hidden, model, counter) for message, partial in outcome.replies]
        ),
        cut=moved,
        tokens_before=ticket.tokens_before,
        tokens_sent=ticket.tokens_sent,
        receipt=sound(receipt),  # usage and errors are a stranger's words
        kept=_kept(past, moved) if moved is not None else None,
        vouched=past.vouched,
        scale=turn.scale,
        finished=turn.finishing is not None,
        cost=cost,
        carried=past.carried,
    )


def _reply(
    message: Message, partial: bool, hidden: Hidden | None, model: str, counter: TokenCounter
) -> Reply:
    """Return a reply as it is stored, with what the client was not shown."""
    tokens = counter.message(message, model)
    if hidden is not None:
        added = sum(counter.messages([*hidden.before, *hidden.after], model))
        if hidden.reply is not None:
            added += counter.message(hidden.reply, model) - tokens
        hidden = replace(hidden, tokens=added)
    return Reply(body=Body(message=message, tokens=tokens), partial=partial, hidden=hidden)


def _kept(past: History, cut: Cut) -> Kept | None:
    """Return what the cut left; None where the request did not speak of the whole log before it."""
    if past.start:
        return None
    before = [item for item in enumerate(past.entries) if item[1].position < cut.position]
    places = outside_gaps(before, cut.gaps, lambda item: item[1].position)
    stored = len(past.nodes)
    return Kept(
        nodes=tuple(past.nodes[place] for place, _ in places if place < stored),
        messages=tuple(place - stored for place, _ in places if place >= stored),
    )

"""One exchange under way, and what the store is told of it at its beginning and its end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import orjson

from proxy.exchange.past import Asking, Past
from proxy.exchange.receipt import Ticket, receipt_of
from proxy.exchange.relay import Outcome
from proxy.store.records import Body, Kept, Opening, Reply, Settlement
from proxy.tokens.counter import TokenCounter
from proxy.trimming.gaps import standing
from proxy.trimming.plan import Cut, Known
from proxy.trimming.policy import Policy
from proxy.wire.reader import sound
from proxy.wire.request import ChatRequest

Headers = Sequence[tuple[bytes, bytes]]


@dataclass(frozen=True, slots=True)
class Call:
    """A client's request for a chat completion, as it came in."""

    tenant: str
    headers: Headers
    query: bytes
    """The query string, without its question mark."""
    body: bytes


@dataclass(slots=True)
class Turn:
    """One exchange under way."""

    call: Call
    request: ChatRequest
    past: Past
    ticket: Ticket
    asking: Asking
    known: Known
    """What its plan was made with."""
    started: float
    """`time.monotonic()` at its arrival."""
    stored: bool
    """Whether it belongs to a session; a stateless one leaves nothing behind."""
    policy: Policy | None = None
    """What decides; None where trimming is bypassed."""
    began: asyncio.Task[None] | None = None
    """The task that stores its opening."""
    sent_bytes: int = 0
    """Bytes of the body that was sent last."""
    settled: bool = False
    scale: float | None = None
    """What upstream's usage taught about its counting; None where it taught nothing."""
    timings: dict[str, float] = field(default_factory=dict[str, float])
    """Milliseconds from its arrival, by event."""

    def mark(self, event: str) -> None:
        """Note when something happened."""
        self.timings[event] = round((time.monotonic() - self.started) * 1000, 2)


def opening_of(turn: Turn, now: int, counter: TokenCounter) -> Opening:
    """Return what is stored of a request before its answer is here; `now` is in milliseconds since 1970."""
    request, past, call = turn.request, turn.past, turn.call
    parameters = [name for name in request.fields if name not in {"messages", "tools"}]
    return Opening(
        tenant=call.tenant,
        session=turn.ticket.session or "",
        exchange=turn.ticket.exchange,
        created_at=now,
        kind=past.arrival.kind,
        base=past.arrival.base,
        messages=past.fresh,
        instructions=request.instructions or None,
        instructions_tokens=sum(counter.message(message, request.model) for message in request.instructions),
        digest=past.digest,
        model=request.model,
        agent=turn.asking.agent,
        policy=turn.ticket.plan.policy,
        policy_version=turn.ticket.plan.version,
        stream=request.stream,
        parameters={name: orjson.loads(request.fields[name]) for name in parameters},
        tools=request.tools,
        idempotency=turn.asking.idempotency,
        forms=past.forms,
    )


def settlement_of(
    turn: Turn, outcome: Outcome, now: int, counter: TokenCounter, cost: float | None = None
) -> Settlement:
    """Return how the exchange ended, for the store.

    `now` is in milliseconds since 1970, `cost` in dollars, None where it is not known.
    """
    past, ticket = turn.past, turn.ticket
    planned = ticket.plan
    replies = tuple(
        Reply(Body(message, counter.message(message, turn.request.model)), partial)
        for message, partial in outcome.replies
    )
    receipt = receipt_of(ticket, past.standing) | {
        "usage": outcome.usage,
        "finish_reasons": list(outcome.finish_reasons),
        "upstream_model": outcome.model,
        "upstream_status": outcome.upstream_status,
        "error": outcome.error,
        "cost": cost,
        "timings": turn.timings,
    }
    return Settlement(
        tenant=turn.call.tenant,
        session=ticket.session or "",
        exchange=ticket.exchange,
        settled_at=now,
        status=outcome.status,
        kind=past.arrival.kind,
        base=past.arrival.base,
        at_head=past.arrival.at_head,
        moves_head=past.arrival.moves_head,
        messages=past.fresh,
        arrivals=planned.decided[len(past.nodes) :],
        policy_version=planned.version,
        agent=turn.asking.agent,
        replies=replies,
        cut=planned.cut if planned.moved else None,
        tokens_before=ticket.tokens_before,
        tokens_sent=ticket.tokens_sent,
        kept=_kept(past, planned.cut) if planned.cut is not None and planned.moved else None,
        vouched=past.vouched,
        scale=turn.scale,
        receipt=sound(receipt),  # usage and errors are a stranger's words
    )


def _kept(past: Past, cut: Cut) -> Kept | None:
    """Return what the cut left; None where the request did not speak of the whole log before it."""
    if past.start:
        return None
    places = standing(list(enumerate(past.entries)), cut.gaps, lambda item: item[1].position)
    stored = len(past.nodes)
    return Kept(
        nodes=tuple(past.nodes[place] for place, _ in places if place < stored),
        messages=tuple(place - stored for place, _ in places if place >= stored),
    )

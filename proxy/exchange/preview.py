"""What would be sent of a session now: a plan without a request. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from proxy.errors import InvalidRequest
from proxy.exchange.background import COUNTING, compute
from proxy.exchange.knowledge import Knowledge
from proxy.exchange.past import Memory, size_of
from proxy.exchange.receipt import gap_messages, plan_lines
from proxy.history.reconcile import Kind
from proxy.settings.policies import OFF, Policies
from proxy.store.records import ExchangeRow, SessionRow
from proxy.store.store import Store
from proxy.trimming.engine import bypass, plan
from proxy.trimming.plan import Known, Plan
from proxy.trimming.view import merged
from proxy.wire.messages import Message

_RECENT: Final = 20
"""Exchanges among which one that was answered is looked for."""


async def last_answered(session: SessionRow, store: Store) -> ExchangeRow | None:
    """Return the newest exchange of the conversation that was answered; else the newest; None without any."""
    recent, _ = await store.exchanges(session.key, limit=_RECENT)
    answered = (row for row in recent if row.replies and row.kind != Kind.SIDE)
    return next(answered, recent[0] if recent else None)


async def preview(
    session: SessionRow,
    policy: str | None,
    policies: Policies,
    store: Store,
    knowledge: Knowledge,
    memory: Memory,
) -> dict[str, Any]:
    """Return `{messages, plan, tokens_before, tokens_sent, policy, cut, warnings}` for the head's branch.

    The model, the tools and the agent are those of the newest request that was answered; `policy` names
    one, or `off`, and None means the one that would be chosen.

    Raises:
        InvalidRequest: there is no policy of that name.
    """
    last = await last_answered(session, store)
    model = last.model if last is not None else ""
    agent = last.agent if last is not None else None
    tools = (
        await store.tools(session.key, last.tools) if last is not None and last.tools is not None else None
    )
    rows = await store.path(session.key, session.head)
    instructions = await store.instructions(session.key)
    stored = instructions.messages if instructions is not None else ()
    lead = tuple(message.without_own_fields() for message in stored)
    fixed = await compute(
        COUNTING * (len(tools or b"") + size_of(lead)), lambda: knowledge.fixed_tokens(lead, tools, model)
    )
    scale = session.scale if session.model == model else None
    known = knowledge.known(model, fixed=fixed, agent=agent, updated_at=session.updated_at, scale=scale)
    if policy == OFF:
        name, chosen = OFF, None
    else:
        try:
            name, chosen = policies.select(session.tenant, model, policy)
        except InvalidRequest as why:  # here it is a parameter that names it, not the header
            raise InvalidRequest(why.message, param="policy", code=why.code) from why
    nodes = tuple(row.node for row in rows)
    standing = await store.cut(session.key, nodes, name, agent) if nodes and chosen is not None else None

    def shown() -> dict[str, Any]:
        entries = memory.branch(rows, model)
        cut = standing.cut if standing is not None else None
        if chosen is None:
            planned = bypass(entries, known, composed=True)
        else:
            planned = plan(entries, chosen, name, known, cut, composed=True)
        tokens = [entry.tokens for entry in entries]
        return _shown(planned, known, model, lead, nodes, tokens)

    return await compute(sum(len(row.message.raw) for row in rows), shown)


def _shown(
    planned: Plan,
    known: Known,
    model: str,
    lead: Sequence[Message],
    nodes: Sequence[str],
    tokens: Sequence[int],
) -> dict[str, Any]:
    """Return a plan for a reader; `nodes` and `tokens` are those of the whole branch."""
    node_at = nodes.__getitem__
    if planned.summary is not None and planned.summary.role == "merge":
        lead = merged(lead, planned.summary)
    return {
        "policy": planned.policy,
        "model": model,
        "messages": [orjson.Fragment(message.raw) for message in (*lead, *planned.view)],
        "plan": gap_messages(planned.earlier, node_at, tokens) + plan_lines(planned.changes, node_at),
        "cut": None
        if planned.cut is None
        else {"position": planned.cut.position, "moved": planned.moved, "fired": planned.fired},
        "tokens_before": round(planned.tokens_before * known.scale),
        "tokens_sent": round(planned.tokens_sent * known.scale),
        "warnings": list(planned.warnings),
    }

"""What would be sent of a session now: a plan without a request. Changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson

from proxy.errors import InvalidRequest
from proxy.exchange.background import compute
from proxy.exchange.past import Memory
from proxy.exchange.receipt import gap_messages, plan_lines
from proxy.history.reconcile import Kind
from proxy.settings.model import Settings
from proxy.settings.policies import OFF, select_policy
from proxy.store.records import SessionRow
from proxy.store.store import Store
from proxy.tokens.counter import TokenCounter
from proxy.trimming.engine import bypass, plan
from proxy.trimming.plan import Known, Plan
from proxy.wire.messages import Message

_RECENT: Final = 20
"""Exchanges among which one that was answered is looked for."""


async def preview(
    session: SessionRow,
    policy: str | None,
    settings: Settings,
    store: Store,
    counter: TokenCounter,
    memory: Memory,
) -> dict[str, Any]:
    """Return `{messages, plan, tokens_before, tokens_sent, policy, cut, warnings}` for the head's branch.

    The model, the tools and the agent are those of the newest request that was answered; `policy` names
    one, or `off`, and None means the one that would be chosen.

    Raises:
        InvalidRequest: there is no policy of that name.
    """
    recent, _ = await store.exchanges(session.key, limit=_RECENT)
    answered = (row for row in recent if row.replies and row.kind != Kind.SIDE)
    last = next(answered, recent[0] if recent else None)
    model = last.model if last is not None else ""
    agent = last.agent if last is not None else None
    tools = (
        await store.tools(session.key, last.tools) if last is not None and last.tools is not None else None
    )
    rows = await store.path(session.key, session.head)
    instructions = await store.instructions(session.key)
    stored = instructions.messages if instructions is not None else ()
    lead = tuple(message.without_own_fields() for message in stored)
    fixed = sum(counter.message(message, model) for message in lead)
    fixed += counter.json(tools, model) if tools is not None else 0
    known = Known(count=lambda message: counter.message(message, model), fixed_tokens=fixed, agent=agent)
    if policy == OFF:
        name, chosen = OFF, None
    else:
        try:
            name, chosen = select_policy(settings.policies, session.tenant, model, policy)
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
        return _shown(planned, model, lead, nodes, tokens)

    return await compute(sum(len(row.message.raw) for row in rows), shown)


def _shown(
    planned: Plan, model: str, lead: Sequence[Message], nodes: Sequence[str], tokens: Sequence[int]
) -> dict[str, Any]:
    """Return a plan for a reader; `nodes` and `tokens` are those of the whole branch."""
    node_at = nodes.__getitem__
    return {
        "policy": planned.policy,
        "model": model,
        "messages": [orjson.Fragment(message.raw) for message in (*lead, *planned.view)],
        "plan": gap_messages(planned.earlier, node_at, tokens) + plan_lines(planned.changes, node_at),
        "cut": None
        if planned.cut is None
        else {"position": planned.cut.position, "moved": planned.moved, "fired": planned.fired},
        "tokens_before": planned.tokens_before,
        "tokens_sent": planned.tokens_sent,
        "warnings": list(planned.warnings),
    }

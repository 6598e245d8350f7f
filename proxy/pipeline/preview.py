"""What would be sent of a session now: a plan without a request. Changes nothing."""

from __future__ import annotations

from typing import Any

import orjson

from proxy.dialects.chat.message import ChatMessage
from proxy.pipeline.background import compute
from proxy.pipeline.present import Present
from proxy.pipeline.receipt import gap_messages, plan_lines
from proxy.trimming import bypass, merged, plan


async def preview(now: Present) -> dict[str, Any]:
    """Return `{messages, plan, tokens_before, tokens_sent, policy, model, cut, warnings}`."""
    return await compute(now.size, lambda: _shown(now))


def _shown(now: Present) -> dict[str, Any]:
    known = now.known
    if now.policy is None:
        planned = bypass(now.entries, known, composed=True)
    else:
        cut = now.standing.cut if now.standing is not None else None
        planned = plan(now.entries, now.policy, now.policy_name, known, cut, composed=True)
    lead = now.instructions
    if planned.summary is not None and planned.summary.role == "merge":
        lead = merged(lead, planned.summary, ChatMessage.dialect)
    tokens = [entry.tokens for entry in now.entries]

    def node_at(position: int) -> str:
        return now.rows[position].node

    return {
        "policy": planned.policy,
        "model": now.model,
        "messages": [orjson.Fragment(message.raw) for message in (*lead, *planned.view)],
        "plan": gap_messages(planned.earlier, node_at, tokens) + plan_lines(planned.changes, node_at),
        "cut": None
        if planned.cut is None
        else {"position": planned.cut.position, "moved": planned.moved, "fired": planned.fired},
        "tokens_before": round(planned.tokens_before * known.scale),
        "tokens_sent": round(planned.tokens_sent * known.scale),
        "warnings": list(planned.warnings),
    }

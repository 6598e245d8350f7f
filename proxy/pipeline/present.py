"""A session as it stands now: its branch as it would be planned with, without a request.

It reads the store and changes nothing.
"""

from __future__ import annotations

from typing import Final

from msgspec import Struct
from msgspec.structs import replace

from proxy.config import OFF, Policies
from proxy.conversation import Kind
from proxy.dialects import Message
from proxy.errors import InvalidRequest
from proxy.pipeline.background import COUNTING, compute
from proxy.pipeline.means import AppServices
from proxy.pipeline.past import size_of
from proxy.pipeline.summing import prepared_of
from proxy.store import ExchangeRow, NodeRow, SessionRow, StandingCut, Store, SummaryRow
from proxy.trimming import Entry, PlanningContext, Policy

_RECENT: Final = 20
"""Exchanges among which one that was answered is looked for."""


class Present(Struct, frozen=True, kw_only=True):
    """All that a plan is made of."""

    policy_name: str
    policy: Policy | None
    """None where trimming is switched off."""
    model: str
    """The model of the newest request that was answered; empty without one."""
    agent: str | None
    rows: tuple[NodeRow, ...]
    """The branch of the head, oldest first."""
    entries: tuple[Entry, ...]
    """The same as trimming sees it."""
    instructions: tuple[Message, ...]
    known: PlanningContext
    standing: StandingCut | None
    prepared: SummaryRow | None
    """The ready summary that covers most of it, and that the policy may use."""

    @property
    def size(self) -> int:
        """Bytes of all messages."""
        return size_of(row.message for row in self.rows)


async def last_answered(session: SessionRow, store: Store) -> ExchangeRow | None:
    """Return the newest exchange of the conversation that was answered; else the newest; None without any."""
    recent, _ = await store.exchanges(session.key, limit=_RECENT)
    answered = (row for row in recent if row.replies and row.kind != Kind.SIDE)
    return next(answered, recent[0] if recent else None)


async def present(session: SessionRow, policy: str | None, policies: Policies, means: AppServices) -> Present:
    """Return how the branch of the head stands.

    The model, the tools and the agent are those of the newest request that was answered; `policy` names one,
    or `off`, and None means the one that would be chosen.

    Raises:
        InvalidRequest: there is no policy of that name.
    """
    store, knowledge = means.store, means.knowledge
    last = await last_answered(session, store)
    model = last.model if last is not None else ""
    agent = last.agent if last is not None else None
    name, chosen = _chosen(session, model, policy, policies)
    tools = (
        await store.tools(session.key, last.tools) if last is not None and last.tools is not None else None
    )
    rows = await store.path(session.key, session.head)
    stored = await store.instructions(session.key)
    lead = tuple(message.without_own_fields() for message in stored.messages) if stored is not None else ()
    fixed = await compute(
        COUNTING * (len(tools or b"") + size_of(lead)), lambda: knowledge.fixed_tokens(lead, tools, model)
    )
    scale = session.scale if session.model == model else None
    facts = knowledge.facts(model)
    known = knowledge.known(
        model, facts, fixed=fixed, agent=agent, updated_at=session.updated_at, scale=scale
    )
    nodes = [row.node for row in rows]
    standing, ready = None, None
    if nodes and chosen is not None:
        standing = await store.cut(session.key, nodes, name, agent)
        if session.summaries:
            ready, _ = await store.prepared(session.key, nodes, chosen.summarizing.recipe)
            known = replace(known, prepared=prepared_of(ready))
    hidden = await store.hidden(session, nodes)
    entries = await compute(
        size_of(row.message for row in rows), lambda: means.memory.branch(rows, model, hidden, agent=agent)
    )
    return Present(
        policy_name=name,
        policy=chosen,
        model=model,
        agent=agent,
        rows=tuple(rows),
        entries=entries,
        instructions=lead,
        known=known,
        standing=standing,
        prepared=ready,
    )


def _chosen(
    session: SessionRow, model: str, policy: str | None, policies: Policies
) -> tuple[str, Policy | None]:
    if policy == OFF:
        return OFF, None
    try:
        return policies.select(session.tenant, model, policy)
    except InvalidRequest as why:  # here it is a parameter that names it, not the header
        raise InvalidRequest(why.message, param="policy", code=why.code) from why

"""A session without a request: its current view, a summary on demand, its JSON documents and its export."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from datetime import UTC, datetime
from io import BytesIO
from typing import Any, Final, cast

import msgspec
import orjson
from msgspec import Struct
from msgspec.structs import replace

from proxy.config import OFF, Policies
from proxy.conversation import Kind
from proxy.dialects import Dialect, JsonObject, Message, dialect_named
from proxy.errors import InvalidRequest, StoreUnavailable, UpstreamError
from proxy.pipeline.background import COUNTING, TRIMMING, compute
from proxy.pipeline.context import Charge, free_of_charge
from proxy.pipeline.history import read_in_portions, size_of
from proxy.pipeline.prepare import as_requested, has_target, ready_summary_of, unused
from proxy.pipeline.receipt import gap_messages, plan_lines
from proxy.pipeline.services import AppServices
from proxy.recall import definitions
from proxy.store import ExchangeRow, NodeRow, SessionRow, StandingCut, Store, SummaryRow, SummaryStatus, require_content
from proxy.summaries import KEPT_LATER, Caller, Given, Work
from proxy.trimming import Entry, PlanningContext, Policy, Summary, bypass, compaction, merged, plan

DEFAULT_TENANT: Final = "default"  # the tenant of every request if authentication is off
_RECENT: Final = 20  # number of newest exchanges that are searched for an answered one


class SessionView(Struct, frozen=True, kw_only=True):
    """The current state of a session: everything that a plan is made from."""

    dialect: Dialect
    policy_name: str
    policy: Policy | None  # None if trimming is off
    model: str  # the model of the newest answered request, else the session's own, else empty
    agent: str | None
    rows: tuple[NodeRow, ...]  # the branch of the head, oldest first
    entries: tuple[Entry, ...]  # the same branch as entries for trimming
    instructions: tuple[Message, ...]
    known: PlanningContext
    removed_tokens: int  # tokens of the tools that are left out
    standing: StandingCut | None
    ready_summary: SummaryRow | None  # of the ready summaries that the policy may use, the one that covers the most

    @property
    def size(self) -> int:
        """Bytes of all messages."""
        return size_of(row.message for row in self.rows)


async def last_answered(session: SessionRow, store: Store) -> ExchangeRow | None:
    """Return the newest answered exchange of the conversation, or the newest exchange, or None if there is none.

    Only the newest exchanges are searched; side requests do not count as answered.
    """
    recent, _ = await store.exchanges(session.key, limit=_RECENT)
    answered = (row for row in recent if row.replies and row.kind != Kind.SIDE)
    return next(answered, recent[0] if recent else None)


async def tools_sent(
    row: ExchangeRow, dialect: Dialect, store: Store, *, off: bool = False, untrimmed: bool = False
) -> bytes | None:
    """Return the tools that an exchange sent: the client's without those left out, and the proxy's own.

    With `off`, return the client's only. With `untrimmed`, include those that were left out.
    """
    tools = await store.tools(row.session_key, row.tools) if row.tools is not None else None
    if off:
        return tools
    if tools is not None and not untrimmed and (removed := row.receipt.get("removed_tools")):
        left = [text for name, text in dialect.requests.declared(tools) if name not in removed]
        tools = msgspec.json.encode(left)
    if own := row.receipt.get("own_tools"):
        tools = dialect.requests.add_tools(tools, definitions(own)).tools
    return tools


async def session_view(
    session: SessionRow,
    policy: str | None,
    policies: Policies,
    services: AppServices,
    charge: Charge = free_of_charge,
    *,
    rows: Sequence[NodeRow] | None = None,
) -> SessionView:
    """Return the current state of the head's branch.

    The model, the tools and the agent are those of the newest answered request. A forked or imported session has none
    before its first use; then the session's own model and tools serve. `policy` is a policy's name or `off`; None means
    the policy that a request would get. `charge` is called like that of a request. `rows` is the branch, if it was read
    already.
    """
    store, knowledge = services.store, services.knowledge
    last = await last_answered(session, store)
    model = last.model if last is not None else session.model or ""
    agent = last.agent if last is not None else None
    name, chosen = _chosen(session, model, policy, policies)
    dialect = dialect_named(session.dialect)
    untrimmed: bytes | None = None
    if last is not None:
        tools = await tools_sent(last, dialect, store, off=chosen is None)
        if chosen is not None and last.receipt.get("removed_tools"):
            untrimmed = await tools_sent(last, dialect, store, untrimmed=True)
    else:
        tools = await store.tools(session.key, session.tools) if session.tools is not None else None
    if rows is None:
        rows = await read_in_portions(store, session.key, session.head, charge)
    require_content([row.message for row in rows])
    stored = await store.instructions(session.key)
    lead = tuple(message.without_own_fields() for message in stored.messages) if stored is not None else ()
    await knowledge.can_count(model)
    fixed = await compute(COUNTING * (len(tools or b"") + size_of(lead)), knowledge.fixed_tokens, lead, tools, model)
    removed = 0
    if untrimmed is not None:
        removed = await compute(COUNTING * len(untrimmed), knowledge.fixed_tokens, lead, untrimmed, model) - fixed
    scale = session.scale if session.model == model else None
    facts = knowledge.facts(model, dialect)
    known = knowledge.planning(model, facts, fixed=fixed, agent=agent, updated_at=session.updated_at, scale=scale)
    nodes = [row.node for row in rows]
    standing, ready = None, None
    if nodes and chosen is not None:
        standing = await store.cut(session.key, nodes, name, agent)
        if session.summaries:
            ready, _ = await store.ready_summary(session.key, nodes, chosen.summarizing.recipe)
            known = replace(known, ready_summary=ready_summary_of(ready))
    hidden = await store.hidden(session, nodes)
    trims = chosen is not None and chosen.mode == "trim"
    size, branch = size_of(row.message for row in rows), services.loader.branch
    entries = await compute(size, branch, rows, model, hidden, agent=agent, trims=trims)
    return SessionView(
        dialect=dialect,
        policy_name=name,
        policy=chosen,
        model=model,
        agent=agent,
        rows=tuple(rows),
        entries=entries,
        instructions=lead,
        known=known,
        removed_tokens=removed,
        standing=standing,
        ready_summary=ready,
    )


def _chosen(session: SessionRow, model: str, policy: str | None, policies: Policies) -> tuple[str, Policy | None]:
    if policy == OFF:
        return OFF, None
    try:
        return policies.select(session.tenant, model, policy, session.id)
    except InvalidRequest as why:  # here a parameter names the policy, not the header
        raise InvalidRequest(why.message, param="policy", code=why.code) from why


async def preview(now: SessionView) -> dict[str, Any]:
    """Return `{messages, plan, tokens_before, tokens_sent, policy, model, cut, warnings}`."""
    return await compute(now.size, _preview, now)


def _preview(now: SessionView) -> dict[str, Any]:
    known = now.known
    if now.policy is None:
        planned = bypass(now.entries, known, composed=True)
    else:
        cut = now.standing.cut if now.standing is not None else None
        planned = plan(now.entries, now.policy, now.policy_name, known, cut, composed=True)
    lead = now.instructions
    if planned.summary is not None and planned.summary.role == "merge":
        lead = merged(lead, planned.summary, now.dialect)
    tokens = [entry.tokens for entry in now.entries]

    def node_at(position: int) -> str:
        return now.rows[position].node

    return {
        "policy": planned.policy,
        "model": now.model,
        "messages": [orjson.Fragment(raw) for message in (*lead, *planned.view) for raw in message.listed],
        "plan": gap_messages(planned.earlier, node_at, tokens) + plan_lines(planned.changes, node_at),
        "cut": None
        if planned.cut is None
        else {"position": planned.cut.position, "moved": planned.trimmed, "fired": planned.fired},
        "tokens_before": round((planned.tokens_before + now.removed_tokens) * known.scale),
        "tokens_sent": round(planned.tokens_sent * known.scale),
        "warnings": list(planned.warnings),
    }


async def compact(
    session: SessionRow, now: SessionView, policy: Policy, caller: Caller, services: AppServices, *, patience: float
) -> SummaryRow | None:
    """Summarise everything that may be summarised. Return the summary, or None if there is nothing to summarise.

    After `patience` seconds the work continues in the background. Raises `UpstreamError` if no summary was made, and
    `StoreUnavailable` if one was made but can only be stored later.
    """
    cut = now.standing.cut if now.standing is not None else None
    wanted = await compute(TRIMMING * now.size, compaction, now.entries, policy, now.known, cut)
    if wanted is None:
        ready = unused(now.ready_summary, cut)
        if ready is None or ready.asked:
            return ready
        row = as_requested(ready, services.knowledge.now)  # made in the background, and not used yet
        await services.store.keep_summary(session.key, row, None)
        return row
    nodes = tuple([row.node for row in now.rows])
    attempt = await services.summaries.make(
        Work(
            key=session.key,
            session=session.id,
            tip=session.head,
            wanted=wanted,
            edit=policy.summarizing,
            model=now.model,
            caller=caller,
            policy=now.policy_name,
            asked=True,
            has_target=has_target(policy),
            given=Given(messages=tuple([row.message for row in now.rows]), nodes=nodes),
        ),
        patience,
    )
    if attempt.row is None or attempt.row.status is not SummaryStatus.READY:
        if attempt.reason == KEPT_LATER:
            raise StoreUnavailable(
                "The store cannot be used. A summary was made, and is kept once it can be: ask again."
            )
        reason = attempt.reason.removesuffix(".")
        raise UpstreamError(f"No summary was made: {reason}. The session is as it was.", code="summary_failed")
    return attempt.row


# ------------------------------------------------- JSON documents for the HTTP API and the command line


def session_document(
    row: SessionRow, finishing: Collection[str] = (), cost_saved: float | None = None
) -> dict[str, Any]:
    """Return a session as a JSON document.

    `finishing` are the tools that finish a task; `cost_saved` is what trimming saved, in dollars.
    """
    return {
        "id": row.id,
        "tenant": row.tenant,
        "dialect": row.dialect,
        "created_at": timestamp(row.created_at),
        "updated_at": timestamp(row.updated_at),
        "messages": row.messages,
        "rounds": row.rounds,
        "tokens": row.tokens,
        "requests": row.requests,
        "tokens_sent": row.tokens_sent,
        "tokens_saved": row.tokens_saved,
        "cost": row.cost,
        "cost_saved": cost_saved,
        "head": row.head or None,
        "finished": any(name in finishing for name in row.calls),
    }


def summary_document(made: SummaryRow | Summary, created_at: int) -> dict[str, Any]:
    """Return a summary as a JSON document: one written by a model (`SummaryRow`), or one that a cut uses."""
    tokens, original = made.tokens, made.covered_tokens
    told = {
        "summary": made.text,
        "summarized_until": made.until,
        "summary_tokens": tokens,
        "created_at": timestamp(created_at),
        "message_count": made.covered_messages,
        "original_tokens": original,
        "compression_rate": round(tokens / original, 3) if original else None,
        "kind": made.kind if isinstance(made, Summary) else "model",
        "model": made.model,
        "generation": made.generation,
    }
    if isinstance(made, SummaryRow):
        told |= {"id": made.id, "predecessor": made.predecessor, "usage": made.usage, "cost": made.cost}
    return told


def timestamp(milliseconds: int) -> str:
    """Return a stored time as ISO 8601 in UTC."""
    moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


async def write_lines(records: AsyncIterator[JsonObject]) -> AsyncIterator[bytes]:
    """Yield each record as one line of JSON."""
    async for record in records:
        yield orjson.dumps(record) + b"\n"


def read_lines(lines: bytes) -> list[JsonObject]:
    """Parse JSON Lines. Raises `InvalidRequest` for a line that is not a JSON object."""
    if not lines.strip():
        raise InvalidRequest("There is nothing to import. Send what export wrote, JSON Lines.")
    records: list[JsonObject] = []
    for number, line in enumerate(BytesIO(lines.rstrip()), start=1):  # one by one, so that other threads get their turn
        try:
            record: Any = orjson.loads(line.removesuffix(b"\n"))
        except orjson.JSONDecodeError as why:
            raise InvalidRequest(f"Line {number} is not JSON: {why}. Send what export wrote.") from why
        if not isinstance(record, dict):
            raise InvalidRequest(f"Line {number} is no JSON object. Send what export wrote.")
        records.append(cast("JsonObject", record))
    return records


def session_id_of(records: list[JsonObject]) -> str:
    """Return the id of the session that the records belong to."""
    name = records[0].get("id")
    if not isinstance(name, str) or not name:
        raise InvalidRequest("The first line does not name a session. Send what export wrote, from its first line on.")
    return name

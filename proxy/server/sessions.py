"""The stored sessions: to list, read, explain, export, import and delete."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import orjson
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from proxy.errors import InvalidRequest, NotFound
from proxy.pipeline import compute, last_answered, preview, session_view, valid_id
from proxy.recall import REF_PREFIX, chosen, name_in, pattern_of, ref_of, span_of
from proxy.server import jsonl
from proxy.server.connection import bounded
from proxy.server.deps import (
    After,
    CallerDependency,
    FoundSession,
    Limit,
    OpenServices,
    Tenant,
    json_response,
    tenant_of,
)
from proxy.server.display import display_of
from proxy.server.gate import DEFAULT_TENANT
from proxy.store import NodeRow, SessionRow, SummaryRow, SummaryStatus
from proxy.trimming import Summary

router = APIRouter(tags=["sessions"])


@router.get("/sessions")
async def list_sessions(
    services: OpenServices,
    caller: CallerDependency,
    limit: Limit = 50,
    after: After = None,
    tenant: Tenant = None,
) -> Response:
    """Return the sessions, the one used last first."""
    owner = tenant_of(caller, tenant)
    rows, cursor = await services.store.sessions(owner, limit=limit, after=after)
    finishing = services.settings.finish.tools
    return json_response({"data": [summary_of(row, finishing) for row in rows], "next": cursor})


@router.get("/sessions/{session}")
async def show_session(found: FoundSession, services: OpenServices) -> Response:
    """Return one session with its newest instructions and its branches."""
    instructions = await services.store.instructions(found.key)
    branches = await services.store.branches(found.key)
    last = await last_answered(found, services.store)
    made = await services.store.summaries(found.key, found.head, last.policy, last.agent) if last else []
    tried = await services.store.summary_rows(found.key) if found.summaries else []
    return json_response(
        summary_of(found, services.settings.finish.tools)
        | {
            "instructions": [orjson.Fragment(m.raw) for m in instructions.messages] if instructions else [],
            "branches": [
                {
                    "head": branch.head,
                    "depth": branch.depth,
                    "messages": branch.depth,
                    "updated_at": timestamp(branch.updated_at),
                }
                for branch in branches
            ],
            "summaries": [summary_told(row) for row in _different(tried)]
            + [statistics_told(summary, at) for summary, at in made if summary.kind == "statistics"],
            "summarizer": summarizer_told(tried),
        }
    )


@router.get("/sessions/{session}/messages")
async def list_messages(
    found: FoundSession,
    services: OpenServices,
    branch: Annotated[str | None, Query(description="A node: the branch that ends there.")] = None,
    channel: Annotated[
        Literal["display"] | None, Query(description="display: clean text and sender, for people.")
    ] = None,
    meta: Annotated[bool, Query(description="With what is known of each message.")] = False,
    limit: Annotated[int | None, Query(ge=1, le=1000, description="So many at most; else all.")] = None,
    after: After = None,
) -> Response:
    """Return the messages of a branch, that of the head unless another is named, each as it arrived.

    With `limit`, `next` is the node after which the next ones stand.
    """
    rows = await services.store.path(found.key, found.head if branch is None else branch)
    if branch is not None and not rows:
        raise NotFound(f"There is no node {branch!r} in this session.", param="branch")
    rows, following = _paged(rows, limit, after)

    def told() -> Response:
        data: list[Any]
        if channel is not None:
            data = display_of(rows)
        else:
            data = [node_of(row) if meta else orjson.Fragment(row.message.raw) for row in rows]
        return json_response({"data": data} | ({} if limit is None else {"next": following}))

    return await compute(sum(len(row.message.raw) for row in rows), told)


@router.get("/sessions/{session}/context")
async def show_context(
    found: FoundSession,
    services: OpenServices,
    policy: Annotated[str | None, Query(description="Name of a policy, or off.")] = None,
) -> Response:
    """Return what would be sent now, and why. Nothing is sent, and nothing changes."""
    now = await session_view(found, policy, services.policies, services.means)
    return json_response(await preview(now))


@router.get("/sessions/{session}/refs/{ref}")
async def show_ref(
    found: FoundSession,
    services: OpenServices,
    ref: str,
    lines: Annotated[str | None, Query(description="a-b: these lines of its text, the first is 1.")] = None,
    grep: Annotated[
        str | None, Query(description="Only lines that match this regular expression (RE2).")
    ] = None,
) -> Response:
    """Return the original of something trimmed."""
    prefix = name_in(ref)
    body = await services.store.body(found.key, prefix) if prefix is not None else None
    if body is None:
        raise NotFound(
            f"There is no {ref!r} in this session. A ref looks like {REF_PREFIX}0123456789abcdef.",
            param="ref",
        )
    name, message = body
    span = span_of(lines) if lines is not None else slice(None)
    pattern = pattern_of(grep) if grep is not None else None
    text = message.text
    shown = await compute(len(message.raw), lambda: chosen(text, span, pattern))
    return json_response(
        {
            "ref": ref_of(name),
            "role": message.role,
            "tool_call_id": message.answers,
            "bytes": len(text.encode("utf-8", "surrogatepass")),
            "lines": text.count("\n") + 1,
            "text": "\n".join(line for _, line in shown),
            "numbers": [number for number, _ in shown] if grep is not None else None,
            "message": orjson.Fragment(message.raw),
        }
    )


@router.get("/sessions/{session}/export")
async def export_session(found: FoundSession, services: OpenServices) -> Response:
    """Return the whole session as JSON Lines, which import reads."""
    return StreamingResponse(
        jsonl.written(services.store.export(found.key)), media_type="application/x-ndjson"
    )


@router.post("/sessions/import")
async def import_session(
    request: Request,
    services: OpenServices,
    caller: CallerDependency,
    session: Annotated[
        str | None, Query(alias="as", description="Id for the session, instead of its own.")
    ] = None,
    tenant: Tenant = None,
) -> Response:
    """Store an exported session. The id must be free."""
    owner = tenant_of(caller, tenant)
    if owner is None and services.settings.auth.mode != "none":
        raise InvalidRequest("Name the tenant that the session is for with ?tenant=.", param="tenant")
    announced = request.headers.get("content-length", "").encode("latin-1")
    lines = await bounded(request.stream(), announced, services.settings.server.max_body_bytes)
    records = await compute(len(lines), lambda: jsonl.read(lines))
    name = valid_id(session or jsonl.session_named(records), "as")
    row = await services.store.load(owner or DEFAULT_TENANT, name, records)
    return json_response(summary_of(row), 201)


@router.delete("/sessions/{session}")
async def delete_session(found: FoundSession, services: OpenServices) -> Response:
    """Delete a session with everything that belongs to it, for good."""
    await services.store.delete(found.key)
    return json_response({"id": found.id, "deleted": True})


def summary_of(row: SessionRow, finishing: Collection[str] = ()) -> dict[str, Any]:
    """Return a session for a list; `finishing` are the tools that finish a task."""
    return {
        "id": row.id,
        "tenant": row.tenant,
        "created_at": timestamp(row.created_at),
        "updated_at": timestamp(row.updated_at),
        "messages": row.messages,
        "rounds": row.rounds,
        "tokens": row.tokens,
        "requests": row.requests,
        "tokens_sent": row.tokens_sent,
        "tokens_saved": row.tokens_saved,
        "cost": row.cost,
        "cost_saved": None,
        "head": row.head or None,
        "finished": any(name in finishing for name in row.calls),
    }


def summary_told(row: SummaryRow) -> dict[str, Any]:
    """Return a summary by a model for a reader."""
    return {
        "summary": row.text,
        "summarized_until": row.until,
        "summary_tokens": row.tokens,
        "created_at": timestamp(row.created_at),
        "message_count": row.covered_messages,
        "original_tokens": row.covered_tokens,
        "compression_rate": _rate(row.tokens, row.covered_tokens),
        "kind": "model",
        "model": row.model,
        "generation": row.generation,
        "id": row.id,
        "predecessor": row.predecessor,
        "usage": row.usage,
        "cost": row.cost,
    }


def statistics_told(summary: Summary, made_at: int) -> dict[str, Any]:
    """Return a summary of statistics for a reader; `made_at` is in milliseconds since 1970."""
    return {
        "summary": summary.text,
        "summarized_until": summary.until,
        "summary_tokens": summary.tokens,
        "created_at": timestamp(made_at),
        "message_count": summary.covered_messages,
        "original_tokens": summary.covered_tokens,
        "compression_rate": _rate(summary.tokens, summary.covered_tokens),
        "kind": summary.kind,
        "model": summary.model,
        "generation": summary.generation,
    }


def summarizer_told(tried: Sequence[SummaryRow]) -> dict[str, Any]:
    """Return what summaries by a model came to, the newest first: how they ended and what they cost."""
    spent = [row.cost for row in tried if row.cost is not None]
    used: dict[str, int] = {"prompt_tokens": 0, "completion_tokens": 0}
    for row in tried:
        for name in used:
            tokens = (row.usage or {}).get(name)
            used[name] += tokens if isinstance(tokens, int) else 0
    last = tried[0] if tried else None
    return {
        **{status.value: sum(row.status is status for row in tried) for status in SummaryStatus},
        **used,
        "cost": sum(spent) if spent else None,
        "last": None
        if last is None
        else {
            "status": last.status.value,
            "reason": last.reason,
            "created_at": timestamp(last.created_at),
            "model": last.model,
        },
    }


def _different(tried: Iterable[SummaryRow]) -> list[SummaryRow]:
    """Return the summaries that are ready; of one that was made and then asked for, the one that was made."""
    rows = {(row.node, row.text): row for row in tried if row.status is SummaryStatus.READY}
    return list(rows.values())


def _rate(left: int, original: int) -> float | None:
    """Return the part of the tokens that is left."""
    return round(left / original, 3) if original else None


def node_of(row: NodeRow) -> dict[str, Any]:
    """Return a message with what is known of it."""
    return {
        "node": row.node,
        "parent": row.parent or None,
        "depth": row.depth,
        "tokens": row.tokens,
        "source": row.source,
        "partial": row.partial,
        "agent": row.agent,
        "exchange": row.exchange,
        "created_at": timestamp(row.created_at),
        "message": orjson.Fragment(row.message.raw),
    }


def timestamp(milliseconds: int) -> str:
    """Return a stored time as ISO 8601 in UTC."""
    moment = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _paged(rows: list[NodeRow], limit: int | None, after: str | None) -> tuple[list[NodeRow], str | None]:
    """Return up to `limit` messages that follow the node `after`, and the node of the last if more follow.

    Raises:
        InvalidRequest: there is no such node on the branch.
    """
    if after is not None:
        place = next((number for number, row in enumerate(rows, 1) if row.node == after), None)
        if place is None:
            raise InvalidRequest(f"after is {after!r}, which is no node of this branch.", param="after")
        rows = rows[place:]
    if limit is None or len(rows) <= limit:
        return rows, None
    return rows[:limit], rows[limit - 1].node

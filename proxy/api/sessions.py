"""The stored sessions: to list, read, explain, export, import and delete."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Annotated, Any, Final

import orjson
import re2  # type: ignore[import-untyped]  # the package ships no types
from fastapi import APIRouter, Query, Request, Response
from fastapi.responses import StreamingResponse

from proxy.api import jsonl
from proxy.api.connection import bounded
from proxy.api.deps import After, Asking, FoundSession, Limit, OpenServices, Tenant, json_response, tenant_of
from proxy.api.gate import DEFAULT_TENANT
from proxy.errors import InvalidRequest, NotFound
from proxy.exchange.background import compute
from proxy.exchange.identity import valid_id
from proxy.exchange.past import REF_PREFIX
from proxy.exchange.preview import last_answered, preview
from proxy.store.records import NodeRow, SessionRow
from proxy.trimming.plan import Summary

router = APIRouter(tags=["sessions"])

_RE2: Final[Any] = re2
_REF: Final = re.compile(r"(?:ref_)?([0-9a-f]{12,40})")
_LINES: Final = re.compile(r"([0-9]{1,9})-([0-9]{1,9})")


@router.get("/sessions")
async def list_sessions(
    services: OpenServices, caller: Asking, limit: Limit = 50, after: After = None, tenant: Tenant = None
) -> Response:
    """Return the sessions, the one used last first."""
    owner = tenant_of(caller, tenant)
    rows, cursor = await services.store.sessions(owner, limit=limit, after=after)
    return json_response({"data": [summary_of(row) for row in rows], "next": cursor})


@router.get("/sessions/{session}")
async def show_session(found: FoundSession, services: OpenServices) -> Response:
    """Return one session with its newest instructions and its branches."""
    instructions = await services.store.instructions(found.key)
    branches = await services.store.branches(found.key)
    last = await last_answered(found, services.store)
    made = await services.store.summaries(found.key, found.head, last.policy, last.agent) if last else []
    return json_response(
        summary_of(found)
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
            "summaries": [summary_told(summary, at) for summary, at in made],
        }
    )


@router.get("/sessions/{session}/messages")
async def list_messages(
    found: FoundSession,
    services: OpenServices,
    branch: Annotated[str | None, Query(description="A node: the branch that ends there.")] = None,
    channel: Annotated[str | None, Query(description="Not there yet.")] = None,
    meta: Annotated[bool, Query(description="With what is known of each message.")] = False,
) -> Response:
    """Return the messages of a branch, that of the head unless another is named, each as it arrived."""
    if channel is not None:
        raise InvalidRequest("There are no channels yet: leave `channel` out.", param="channel")
    rows = await services.store.path(found.key, found.head if branch is None else branch)
    if branch is not None and not rows:
        raise NotFound(f"There is no node {branch!r} in this session.", param="branch")
    return await compute(
        sum(len(row.message.raw) for row in rows),
        lambda: json_response(
            {"data": [node_of(row) if meta else orjson.Fragment(row.message.raw) for row in rows]}
        ),
    )


@router.get("/sessions/{session}/context")
async def show_context(
    found: FoundSession,
    services: OpenServices,
    policy: Annotated[str | None, Query(description="Name of a policy, or off.")] = None,
) -> Response:
    """Return what would be sent now, and why. Nothing is sent, and nothing changes."""
    shown = await preview(
        found, policy, services.policies, services.store, services.knowledge, services.memory
    )
    return json_response(shown)


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
    match = _REF.fullmatch(ref)
    body = await services.store.body(found.key, match[1]) if match else None
    if body is None:
        raise NotFound(
            f"There is no {ref!r} in this session. A ref looks like {REF_PREFIX}0123456789abcdef.",
            param="ref",
        )
    name, message = body
    span = _span(lines) if lines is not None else slice(None)
    pattern = _compiled(grep) if grep is not None else None
    text = message.text
    chosen = await compute(len(message.raw), lambda: _chosen(text, span, pattern))
    return json_response(
        {
            "ref": REF_PREFIX + name[:16],
            "role": message.role,
            "tool_call_id": message.answers,
            "bytes": len(text.encode("utf-8", "surrogatepass")),
            "lines": text.count("\n") + 1,
            "text": "\n".join(line for _, line in chosen),
            "numbers": [number for number, _ in chosen] if grep is not None else None,
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
    caller: Asking,
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


def summary_of(row: SessionRow) -> dict[str, Any]:
    """Return a session for a list."""
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
        "cost": None,
        "cost_saved": None,
        "head": row.head or None,
        "finished": False,
    }


def summary_told(summary: Summary, made_at: int) -> dict[str, Any]:
    """Return a summary for a reader; `made_at` is in milliseconds since 1970."""
    original = summary.covered_tokens
    return {
        "summary": summary.text,
        "summarized_until": summary.until,
        "summary_tokens": summary.tokens,
        "created_at": timestamp(made_at),
        "message_count": summary.covered_messages,
        "original_tokens": original,
        # The part of them that is left.
        "compression_rate": round(summary.tokens / original, 3) if original else None,
        "kind": summary.kind,
        "model": None,  # no model makes one yet
        "generation": summary.generation,
    }


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


def _span(lines: str) -> slice:
    """Return which lines `a-b` means.

    Raises:
        InvalidRequest: it is no range of lines.
    """
    match = _LINES.fullmatch(lines)
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise InvalidRequest(
            f"lines is {lines!r}. Send the first and the last line, counted from 1, such as lines=10-20.",
            param="lines",
        )
    return slice(int(match[1]) - 1, int(match[2]))


def _chosen(text: str, span: slice, pattern: Any | None) -> list[tuple[int, str]]:
    """Return (number, line) for the lines of `span` in which `pattern` is found."""
    lines = list(enumerate(text.split("\n"), start=1))[span]
    return lines if pattern is None else [line for line in lines if pattern.search(line[1])]


def _compiled(pattern: str) -> Any:
    """Return the compiled pattern. RE2 is told not to write to stderr on its own.

    Raises:
        InvalidRequest: it is none.
    """
    options = _RE2.Options()
    options.log_errors = False
    try:
        return _RE2.compile(pattern, options)
    except _RE2.error as why:
        raise InvalidRequest(
            f"grep is no regular expression that RE2 knows: {why.args[0].decode()}.", param="grep"
        ) from why

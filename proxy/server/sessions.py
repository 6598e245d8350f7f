"""The sessions API: list, read, explain, compact, fork, export, import and delete stored sessions; their exchanges."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final, Literal
from urllib.parse import unquote

import orjson
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec.structs import replace
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from proxy.dialects import Message
from proxy.dialects.jsontext import count_of
from proxy.errors import InvalidRequest, NotFound
from proxy.pipeline import (
    DEFAULT_TENANT,
    compact,
    compute,
    erase_tenant,
    last_answered,
    preview,
    read_lines,
    session_document,
    session_id_of,
    session_view,
    summary_document,
    timestamp,
    valid_id,
    valid_tenant,
    write_lines,
)
from proxy.pipeline.background import OFF_LOOP_BYTES
from proxy.pipeline.history import size_of
from proxy.pipeline.inspection import Past, as_listed, exchange_view, past_of, receipt_document, view_document
from proxy.pipeline.statistics import sessions_asked
from proxy.recall import REF_PREFIX, chosen, name_in, pattern_of, ref_of, referred, span_of
from proxy.server.dependencies import (
    AUTHENTICATED,
    After,
    CallerDependency,
    DialectName,
    FoundSession,
    Limit,
    Memory,
    OpenServices,
    Services,
    Tenant,
    json_response,
    tenant_of,
)
from proxy.server.endpoint import bounded
from proxy.server.limits import BodyLimits, Reservation
from proxy.store import AT_FIRST, ExchangeRow, NodeRow, SessionListQuery, SessionRow, Store, SummaryRow, SummaryStatus
from proxy.summaries import Caller
from proxy.trimming import BUILT_IN, broadcast_of

router = APIRouter(tags=["sessions"], dependencies=AUTHENTICATED)

_TRIES: Final = 3  # answers of the summarizer to wait for: one may be rejected, and a long history needs several
_MOST_BYTES: Final = 65_536
_SHOWN: Final = frozenset({"user", "assistant"})
_TYPED: Final = re.compile(r"\s*+<(?P<opening>[^<>:：\n]{1,100}[:：][^\S\n]{0,20}+(?P<agent>[^<>\s][^<>\n]{0,99}))>")
_UNTYPED: Final = re.compile(r"\s*+<(?P<opening>(?P<agent>[^<>:：\n]{1,100}))>")
_CLOSING: Final = re.compile(r"</([^<>\n]{1,210})>\s*\Z")
_PATTERNS: Final = tuple(BUILT_IN)


async def sessions_query(
    sort: Annotated[str, Query(description="Order: `newest`, `largest`, `dearest` or `saved`.")] = "newest",
    since: Annotated[
        str | None, Query(description="Only sessions used since: `2026-11-01`, `2026-11-01T10:00Z` or `7d`.")
    ] = None,
    until: Annotated[str | None, Query(description="Only sessions used before, written like `since`.")] = None,
    min_tokens: Annotated[int, Query(ge=0, le=2**62)] = 0,
    model: Annotated[str | None, Query(description="Only sessions whose last request used this model.")] = None,
    limit: Limit = 50,
    after: After = None,
) -> SessionListQuery:
    """Return the query for the requested sessions."""
    return sessions_asked(
        datetime.now(UTC), sort, since=since, until=until, min_tokens=min_tokens, model=model, limit=limit, after=after
    )


@router.get("/sessions")
async def list_sessions(
    services: OpenServices,
    caller: CallerDependency,
    asked: Annotated[SessionListQuery, Depends(sessions_query)],
    tenant: Tenant = None,
) -> Response:
    """Return the sessions, by default the most recently used first."""
    rows, cursor = await services.app.store.listed(replace(asked, tenant=tenant_of(caller, tenant)))
    finishing = services.settings.finish.tools
    return json_response(
        {"data": [session_document(each.row, finishing, each.cost_saved) for each in rows], "next": cursor}
    )


@router.get("/sessions/{session}")
async def show_session(found: FoundSession, services: OpenServices, memory: Memory) -> Response:
    """Return one session with its newest instructions and its branches."""
    instructions = await services.app.store.instructions(found.key)
    lead = instructions.messages if instructions is not None else ()
    memory.add_stored(size_of(lead), len(lead))
    told = await _told(found, lead, services)
    return await compute(size_of(lead), json_response, told)


async def _told(found: SessionRow, instructions: Sequence[Message], services: Services) -> dict[str, Any]:
    """Return the document of one session."""
    listed, _ = await services.app.store.listed(SessionListQuery(key=found.key))
    branches = await services.app.store.branches(found.key)
    last = await last_answered(found, services.app.store)
    made = await services.app.store.summaries(found.key, found.head, last.policy, last.agent) if last else []
    tried = await services.app.store.summary_rows(found.key) if found.summaries else []
    # Rows with the same node and text are one summary. The oldest wins, which is the one that was made.
    ready = {(row.node, row.text): row for row in tried if row.status is SummaryStatus.READY}
    return session_document(found, services.settings.finish.tools, listed[0].cost_saved if listed else None) | {
        "instructions": [orjson.Fragment(raw) for message in instructions for raw in message.listed],
        "branches": [
            {"head": at.head, "depth": at.depth, "messages": at.depth, "updated_at": timestamp(at.updated_at)}
            for at in branches
        ],
        "summaries": [summary_document(row, row.created_at) for row in ready.values()]
        + [summary_document(summary, at) for summary, at in made if summary.kind == "statistics"],
        "summarizer": summarizer_told(tried),
    }


@router.get("/sessions/{session}/messages")
async def list_messages(
    found: FoundSession,
    services: OpenServices,
    branch: Annotated[str | None, Query(description="Node at the end of the branch. Defaults to the head.")] = None,
    channel: Annotated[
        Literal["display"] | None, Query(description="`display` returns clean text and sender, for people.")
    ] = None,
    meta: Annotated[bool, Query(description="Whether to include the metadata of each message.")] = False,
    limit: Annotated[
        int | None, Query(ge=1, le=1000, description="Maximum number of messages. Defaults to all.")
    ] = None,
    after: After = None,
) -> Response:
    """Return the messages of a branch, each as it arrived. Defaults to the branch of the head.

    With `limit`, pass `next` as `after` to get the next page.
    """
    end = found.head if branch is None else branch
    nodes: Sequence[str] = (await services.app.store.lineage(found.key, [end])).nodes(end)
    if branch is not None and not nodes:
        raise NotFound(f"There is no node {branch!r} in this session.", param="branch")
    nodes, following = _paged(nodes, limit, after)

    def told(rows: Sequence[NodeRow]) -> bytes:
        data: list[Any]
        if channel is not None:
            data = display_of(rows)
        else:
            listed = [(row, raw) for row in rows for raw in row.message.listed]
            data = [node_of(row, raw) if meta else orjson.Fragment(raw) for row, raw in listed]
        return orjson.dumps(data)[1:-1]

    portions = services.app.store.portions(found.key, nodes)
    closing = b"]" if limit is None else b'],"next":' + orjson.dumps(following)
    body = _in_parts(portions, told, b'{"data":[', closing + b"}")
    if len(nodes) > AT_FIRST:
        return StreamingResponse(body, media_type="application/json")
    return Response(b"".join([part async for part in body]), media_type="application/json")


@router.get("/sessions/{session}/context")
async def show_context(
    found: FoundSession,
    services: OpenServices,
    memory: Memory,
    policy: Annotated[str | None, Query(description="Name of a policy, or `off`.")] = None,
) -> Response:
    """Return what would be sent upstream now, and why. Nothing is sent, and nothing changes."""
    now = await session_view(found, policy, services.policies, services.app, memory.add_stored)
    told = await preview(now)
    return await compute(now.size, json_response, told)


@router.get("/sessions/{session}/refs/{ref}")
async def show_ref(
    found: FoundSession,
    services: OpenServices,
    memory: Memory,
    ref: str,
    lines: Annotated[str | None, Query(description="Lines to return, such as `10-20`. The first line is 1.")] = None,
    grep: Annotated[str | None, Query(description="Only lines that match this regular expression (RE2).")] = None,
) -> Response:
    """Return the original of trimmed content."""
    prefix = name_in(ref)
    body = await services.app.store.body(found.key, prefix) if prefix is not None else None
    size = len(body[1].raw) if body is not None else 0
    memory.add_stored(size, 1)
    part = await compute(size, referred, ref, body[1]) if body is not None else None
    if body is None or part is None:
        raise NotFound(
            f"There is no {ref!r} in this session. A ref looks like {REF_PREFIX}0123456789abcdef.", param="ref"
        )
    span = span_of(lines) if lines is not None else slice(None)
    pattern = pattern_of(grep) if grep is not None else None
    name, message = body
    named = ref_of(name) + ref[len(ref.partition("-")[0]) :]
    return await compute(size, lambda: json_response(_original(named, message, part, span, pattern)))


def _original(ref: str, message: Message, part: Message, span: slice, pattern: Any | None) -> dict[str, Any]:
    text = part.text
    lines = chosen(text, span, pattern)
    return {
        "ref": ref,
        "role": message.role,
        "tool_call_id": part.answers,
        "bytes": len(text.encode("utf-8", "surrogatepass")),
        "lines": text.count("\n") + 1,
        "text": "\n".join([line for _, line in lines]),
        "numbers": None if pattern is None else [number for number, _ in lines],
        "message": as_listed(message),
    }


@router.get("/sessions/{session}/export")
async def export_session(found: FoundSession, services: OpenServices) -> Response:
    """Return the whole session as JSON Lines, which `POST /sessions/import` reads."""
    return StreamingResponse(write_lines(services.app.store.export(found.key)), media_type="application/x-ndjson")


@router.post("/sessions/import")
async def import_session(
    request: Request,
    services: OpenServices,
    caller: CallerDependency,
    session: Annotated[
        str | None, Query(alias="as", description="Id for the session, instead of the exported one.")
    ] = None,
    tenant: Tenant = None,
) -> Response:
    """Store an exported session. Its id must be free."""
    owner = tenant_of(caller, tenant)
    if owner is None and services.settings.auth.mode != "none":
        raise InvalidRequest("Name the tenant that the session is for with ?tenant=.", param="tenant")
    if services.settings.store.content == "none":
        raise InvalidRequest("An import holds content, and none is stored (store.content: none).")
    announced = request.headers.get("content-length", "").encode("latin-1")
    server = services.settings.server
    with Reservation(services.budget) as memory:
        lines = await bounded(request.stream(), announced, server.max_body_bytes, memory)
        if await compute(len(lines), count_of, lines, b"\n") > server.max_messages:
            raise InvalidRequest(
                f"The import has more than {server.max_messages} lines. Raise server.max_messages.",
                code="too_many_messages",
            )
        await compute(len(lines), BodyLimits.of(server).check, lines)
        memory.add(0, await compute(len(lines), count_of, lines, b"{"))
        records = await compute(len(lines), lambda: read_lines(lines))
        if (masker := services.app.store.masker) is not None:
            await compute(len(lines), masker.check, records)
        name = valid_id(session or session_id_of(records), "as")
        row = await services.app.store.load(
            valid_tenant(DEFAULT_TENANT if owner is None else owner, "tenant"), name, records
        )
    return json_response(session_document(row), 201)


@router.delete("/sessions/{session}")
async def delete_session(found: FoundSession, services: OpenServices, dialect: DialectName = None) -> Response:
    """Delete a session and all its data, permanently. Without `dialect`, it is deleted in each dialect that has it."""
    await services.app.store.delete_named(found.tenant, found.id, dialect)
    return json_response({"id": found.id, "deleted": True})


@router.delete("/tenants/{tenant}")
async def delete_tenant(tenant: str, services: OpenServices, caller: CallerDependency) -> Response:
    """Delete everything that is stored for a tenant, permanently. For the administrator and the tenant itself."""
    owner = tenant_of(caller, unquote(tenant)) or unquote(tenant)
    number = await erase_tenant(services.app.store, services.app.store.spool, owner)
    return json_response({"tenant": owner, "deleted": number})


class Fork(BaseModel):
    """The body of a request to fork a session."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    as_id: Annotated[str, Field(alias="as", min_length=1)]
    at: Annotated[str, Field(min_length=1)] | None = None
    """Last node of the shared history. Defaults to the session's head."""


@router.post("/sessions/{session}/compact")
async def compact_session(
    request: Request,
    found: FoundSession,
    services: OpenServices,
    caller: CallerDependency,
    policy: Annotated[str | None, Query(description="Name of the policy whose settings to use.")] = None,
) -> Response:
    """Summarize now what can be summarized. The next request uses the summary."""
    with Reservation(services.budget) as memory:
        now = await session_view(found, policy, services.policies, services.app, memory.add_stored)
        if now.policy is None:
            raise InvalidRequest("Nothing is summed up under 'off'. Name a policy.", param="policy")
        # The administrator's key is not a provider's key and must not go upstream.
        sent = [(name, value) for name, value in request.scope["headers"] if not caller.admin]
        row = await compact(
            found,
            now,
            now.policy,
            Caller(tenant=found.tenant, key=caller.key, headers=tuple(sent), dialect=found.dialect),
            services.app,
            patience=_TRIES * services.settings.summarizer.timeout,
        )
    if row is None:
        return json_response({"summary": None, "reason": "there is nothing to sum up yet"})
    return json_response(summary_document(row, row.created_at), 201)


@router.post("/sessions/{session}/fork")
async def fork_session(request: Request, found: FoundSession, services: OpenServices) -> Response:
    """Create a session that shares the history of this one up to a node."""
    announced = request.headers.get("content-length", "").encode("latin-1")
    body = await bounded(request.stream(), announced, _MOST_BYTES)
    try:
        fork = Fork.model_validate_json(body)
    except ValidationError as why:
        first = why.errors(include_url=False)[0]
        param = ".".join(map(str, first["loc"])) or None
        raise InvalidRequest(
            f'{param or "The body"}: {first["msg"]}. Send {{"as": "NEW-ID", "at": "NODE"}}; without "at" it '
            "is where the session stands.",
            param=param,
        ) from why
    name = valid_id(fork.as_id, "as")
    row = await services.app.store.fork(found.tenant, found.key, fork.at or found.head, name)
    return json_response(session_document(row, services.settings.finish.tools), 201)


def summarizer_told(tried: Sequence[SummaryRow]) -> dict[str, Any]:
    """Return totals over the summaries by a model: how many ended in which status, tokens, cost, and the last one.

    `tried` is ordered newest first.
    """
    spent = [row.cost for row in tried if row.cost is not None]
    told: dict[str, Any] = {status.value: sum(row.status is status for row in tried) for status in SummaryStatus}
    for name in ("prompt_tokens", "completion_tokens"):
        counts = [(row.usage or {}).get(name) for row in tried]
        told[name] = sum(count for count in counts if isinstance(count, int))
    told |= {"cost": sum(spent) if spent else None, "last": None}
    for last in tried[:1]:
        created = timestamp(last.created_at)
        told["last"] = {"status": last.status.value, "reason": last.reason, "created_at": created, "model": last.model}
    return told


def node_of(row: NodeRow, raw: bytes) -> dict[str, Any]:
    """Return a message with its metadata. `raw` is one of the messages that the API lists for the node."""
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
        "message": orjson.Fragment(raw),
    }


async def _in_parts(
    portions: AsyncIterator[list[NodeRow]], told: Callable[[list[NodeRow]], bytes], opening: bytes, closing: bytes
) -> AsyncIterator[bytes]:
    """Yield a JSON list between `opening` and `closing`, one portion at a time."""
    lead = opening
    async for rows in portions:
        part = await compute(sum(len(row.message.raw) for row in rows), told, rows)
        if part:
            yield lead
            yield part
            lead = b","
    yield closing if lead == b"," else opening + closing


def _paged(nodes: Sequence[str], limit: int | None, after: str | None) -> tuple[Sequence[str], str | None]:
    """Return up to `limit` nodes after the node `after`, and the last returned node if more follow (else None)."""
    if after is not None:
        if after not in nodes:
            raise InvalidRequest(f"after is {after!r}, which is no node of this branch.", param="after")
        nodes = nodes[nodes.index(after) + 1 :]
    if limit is None or len(nodes) <= limit:
        return nodes, None
    return nodes[:limit], nodes[limit - 1]


def shown(message: Message, agent: str | None = None) -> dict[str, str] | None:
    """Return a message for display, `{sender, text}`, or None if it is not meant for people.

    The sender is the agent or user named in the message, else `agent`, else the role.
    """
    data, role = message.data, _shown_role(message)
    if role not in _SHOWN or data.get("is_internal") is True:
        return None
    text, wrapped = _unwrapped(message.beside if message.is_result else message.display_text)
    if not text.strip():
        return None
    named = (wrapped, data.get("agent"), data.get("name"), agent if role == "assistant" else None)
    return {"sender": next((name for name in named if isinstance(name, str) and name), role), "text": text}


def _shown_role(message: Message) -> str:
    """Return the displayed role of a message. Text beside tool results counts as the user's."""
    return "user" if message.is_result and message.beside else message.role


def display_of(rows: Iterable[NodeRow]) -> list[dict[str, Any]]:
    """Return the messages of a branch for display: `{node, role, sender, text}`, oldest first."""
    return [
        {"node": row.node, "role": _shown_role(row.message), **line}
        for row in rows
        if (line := shown(row.message, row.agent)) is not None
    ]


def _unwrapped(text: str) -> tuple[str, str | None]:
    """Return a text without the tag that attributes it to another agent, and that agent's name (or None).

    `<Type: Name> …` is such a tag, with or without a closing tag. `<Name> …` is one if the text reports a tool call.
    `<Name>…</Name>` around the whole text is one if the name does not look like markup.
    """
    found = _TYPED.match(text)
    if found is None and (untyped := _UNTYPED.match(text)) is not None:
        tells_of_a_call = broadcast_of(text, _PATTERNS, None) is not None
        found = untyped if tells_of_a_call or _is_wrapped(text, untyped["agent"].strip()) else None
    if found is None:
        return text, None
    rest = text[found.end() :]
    closing = _CLOSING.search(rest)
    if closing is not None and closing[1].strip() == found["opening"].strip():
        rest = rest[: closing.start()]
    return rest.strip(), found["agent"].strip()


def _is_wrapped(text: str, agent: str) -> bool:
    """Tell whether a text stands in a pair of tags with an agent's name. Lower-case names are taken for markup."""
    closing = _CLOSING.search(text)
    is_name = any(letter.isupper() or not letter.isascii() for letter in agent)
    return is_name and closing is not None and closing[1].strip() == agent


# ---------------------------------------------------------------------------------------------------------- exchanges

_AT_ONCE: Final = 50  # exchanges per batch: the data that their receipts refer to is read together


@router.get("/sessions/{session}/exchanges")
async def list_exchanges(
    found: FoundSession, services: OpenServices, limit: Limit = 50, after: After = None
) -> Response:
    """Return the session's exchanges, newest first."""
    rows, cursor = await services.app.store.exchanges(found.key, limit=limit, after=after)
    first = await past_of(rows[:_AT_ONCE], services.app.store)
    if len(rows) <= _AT_ONCE and first.size < OFF_LOOP_BYTES:
        return json_response({"data": [receipt_document(row, first) for row in rows], "next": cursor})
    body = _receipts(rows, first, services.app.store, b'],"next":' + orjson.dumps(cursor) + b"}")
    return StreamingResponse(body, media_type="application/json")


async def _receipts(rows: Sequence[ExchangeRow], past: Past, store: Store, closing: bytes) -> AsyncIterator[bytes]:
    """Yield receipts one by one, since each may refer to all messages. `past` is the data of the first batch."""
    lead = b'{"data":['
    for start in range(0, len(rows), _AT_ONCE):
        some = rows[start : start + _AT_ONCE]
        if start:
            past = await past_of(some, store)
        for row in some:
            yield lead + await compute(past.size // len(some), _receipt, row, past)
            lead = b","
    yield closing


def _receipt(row: ExchangeRow, past: Past) -> bytes:
    return orjson.dumps(receipt_document(row, past))


@router.get("/exchanges/{exchange}")
async def show_exchange(exchange: str, services: OpenServices, caller: CallerDependency) -> Response:
    """Return one exchange."""
    row = await services.app.store.exchange(unquote(exchange))
    if row is None or not (caller.admin or caller.tenant == row.tenant):
        raise NotFound(f"There is no exchange {unquote(exchange)!r}.", param="exchange")
    past = await past_of([row], services.app.store)
    return Response(await compute(past.size, _receipt, row, past), media_type="application/json")


@router.get("/exchanges/{exchange}/view")
async def show_view(
    exchange: str,
    services: OpenServices,
    caller: CallerDependency,
    memory: Memory,
    diff: Annotated[
        bool, Query(description="Whether to show each message of the history beside what was sent of it.")
    ] = False,
) -> Response:
    """Return what an exchange sent upstream."""
    row = await services.app.store.exchange(unquote(exchange))
    session = await services.app.store.session_at(row.session_key) if row is not None else None
    if row is None or session is None or not (caller.admin or caller.tenant == row.tenant):
        raise NotFound(f"There is no exchange {unquote(exchange)!r}.", param="exchange")
    view = await exchange_view(row, session, services.app, memory.add_stored)
    size = sum([len(entry.message.raw) for entry in view.entries])
    return await compute(size, lambda: json_response(view_document(row, view, diff=diff)))

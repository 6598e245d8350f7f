"""The exchanges API: receipts of what was asked, what was sent and why, and how it ended."""

from __future__ import annotations

from typing import Annotated, Final
from urllib.parse import unquote

from fastapi import APIRouter, Query, Response

from proxy.errors import NotFound
from proxy.pipeline import compute
from proxy.pipeline.inspection import exchange_view, past_of, receipt_document, view_document
from proxy.server.dependencies import (
    AUTHENTICATED,
    After,
    CallerDependency,
    FoundSession,
    Limit,
    OpenServices,
    json_response,
)

_LINE_BYTES: Final = 256  # about what a line of a plan is long

router = APIRouter(tags=["exchanges"], dependencies=AUTHENTICATED)


@router.get("/sessions/{session}/exchanges")
async def list_exchanges(
    found: FoundSession, services: OpenServices, limit: Limit = 50, after: After = None
) -> Response:
    """Return the session's exchanges, the newest first."""
    rows, cursor = await services.app.store.exchanges(found.key, limit=limit, after=after)
    past = await past_of(rows, services.app.store)
    return await compute(
        past.lines * _LINE_BYTES,
        lambda: json_response({"data": [receipt_document(row, past) for row in rows], "next": cursor}),
    )


@router.get("/exchanges/{exchange}")
async def show_exchange(exchange: str, services: OpenServices, caller: CallerDependency) -> Response:
    """Return one exchange."""
    row = await services.app.store.exchange(unquote(exchange))
    if row is None or not (caller.admin or caller.tenant == row.tenant):
        raise NotFound(f"There is no exchange {unquote(exchange)!r}.", param="exchange")
    past = await past_of([row], services.app.store)
    return await compute(past.lines * _LINE_BYTES, lambda: json_response(receipt_document(row, past)))


@router.get("/exchanges/{exchange}/view")
async def show_view(
    exchange: str,
    services: OpenServices,
    caller: CallerDependency,
    diff: Annotated[bool, Query(description="With each message of the history beside what was sent of it.")] = False,
) -> Response:
    """Return what was sent upstream."""
    row = await services.app.store.exchange(unquote(exchange))
    session = await services.app.store.session_at(row.session_key) if row is not None else None
    if row is None or session is None or not (caller.admin or caller.tenant == row.tenant):
        raise NotFound(f"There is no exchange {unquote(exchange)!r}.", param="exchange")
    view = await exchange_view(row, session, services.app)
    size = sum([len(entry.message.raw) for entry in view.entries])
    return await compute(size, lambda: json_response(view_document(row, view, diff=diff)))

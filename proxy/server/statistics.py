"""The statistics API: what was asked, sent, paid and saved."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Query, Response

from proxy.pipeline.inspection import search_texts
from proxy.pipeline.statistics import statistics, stats_query
from proxy.server.dependencies import (
    AUTHENTICATED,
    After,
    CallerDependency,
    DialectName,
    Limit,
    OpenServices,
    Tenant,
    found_session,
    json_response,
    tenant_of,
)

router = APIRouter(tags=["statistics"], dependencies=AUTHENTICATED)


@router.get("/stats")
async def show_stats(  # noqa: PLR0913 - parameters of the query
    *,
    services: OpenServices,
    caller: CallerDependency,
    since: Annotated[str | None, Query(description="2026-11-01, 2026-11-01T10:00Z, or 7d.")] = None,
    until: Annotated[str | None, Query(description="As `since`; without it, now.")] = None,
    group: Annotated[str, Query(description="day, hour, model, policy, tenant, session, kind, …")] = "day",
    policy: Annotated[str | None, Query(description="Only this policy.")] = None,
    model: Annotated[str | None, Query(description="Only this model.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    session: Annotated[str | None, Query(description="Only this session.")] = None,
    tenant: Tenant = None,
    dialect: DialectName = None,
) -> Response:
    """Return sums over the exchanges of a time, by group and in total."""
    owner, key, store = tenant_of(caller, tenant), None, services.app.store
    if session is not None:
        key = (await found_session(store, session, owner, dialect)).key
    query = stats_query(
        datetime.now(UTC),
        group=group,
        since=since,
        until=until,
        tenant=owner,
        policy=policy,
        model=model,
        session=key,
        limit=limit,
    )
    return json_response(await statistics(store, query))


@router.get("/search")
async def search(
    services: OpenServices,
    caller: CallerDependency,
    q: Annotated[str, Query(description="Words, all of which a message must hold.", max_length=1000)] = "",
    limit: Limit = 50,
    after: After = None,
    tenant: Tenant = None,
) -> Response:
    """Return messages that hold some words, those of the newest sessions first."""
    owner = tenant_of(caller, tenant)
    return json_response(await search_texts(services.app.store, q, owner, limit=limit, after=after))

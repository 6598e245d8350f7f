"""Operations: the root, liveness, readiness, metrics, the cache of token counts, statistics and search."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final

import anyio.to_thread
from fastapi import APIRouter, Depends, Query, Request, Response
from msgspec.structs import asdict

from proxy.errors import Forbidden, NotFound, Stopping
from proxy.pipeline.inspection import search_texts
from proxy.pipeline.statistics import statistics, stats_query
from proxy.server.authentication import Identity
from proxy.server.dependencies import (
    AUTHENTICATED,
    After,
    CallerDependency,
    DialectName,
    Limit,
    OpenServices,
    Services,
    Tenant,
    check_query,
    found_session,
    json_response,
    tenant_of,
)

router = APIRouter(tags=["operations"])
_OPEN: Final = (Depends(check_query),)


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
async def root(request: Request, services: OpenServices) -> Response:
    """List the endpoints. A browser is redirected to the dashboard."""
    dashboard = "/ui" if services.settings.dashboard.enabled else None
    if dashboard is not None and "text/html" in request.headers.get("accept", ""):
        return Response(status_code=303, headers={"location": dashboard})
    places = {"chat_completions": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
    return json_response({"name": "palimpsest", "dashboard": dashboard, "sessions": "/sessions", **places})


@router.head("/healthz", dependencies=_OPEN, include_in_schema=False)
@router.get("/healthz", dependencies=_OPEN)
async def healthz() -> Response:
    """Report that the process is up."""
    return json_response({"status": "ok"})


@router.head("/readyz", dependencies=_OPEN, include_in_schema=False)
@router.get("/readyz", dependencies=_OPEN)
async def readyz(services: OpenServices) -> Response:
    """Report whether the store can be written and read. Returns 503 if it cannot.

    `degraded`: requests that contain their whole history are still served, and stored later.
    """
    if services.stopping.is_set():
        raise Stopping("The proxy stops.")
    why = await services.app.store.health()
    if why is None:
        return json_response({"status": "ready"})
    return json_response({"status": "degraded" if services.app.outage.forwards else "unavailable"} | why.body(), 503)


@router.get("/tokens/cache", dependencies=AUTHENTICATED)
async def show_cache(services: OpenServices, caller: CallerDependency) -> Response:
    """Return how many messages this process has counted and cached, and the sum of their tokens.

    `calibration` holds, for each model, how many tokens the upstream counts for one counted here. Only for the
    administrator: a tenant could infer from these figures what its neighbours send.
    """
    _check_sees_everything(caller, services)
    counts = asdict(services.app.counter.cached)
    return json_response(counts | {"calibration": services.app.counter.calibration.snapshot()})


@router.delete("/tokens/cache", dependencies=AUTHENTICATED)
async def clear_cache(services: OpenServices, caller: CallerDependency) -> Response:
    """Clear the cache of token counts. Messages are counted again when they next arrive. Only for the administrator."""
    _check_sees_everything(caller, services)
    services.app.counter.clear()
    return json_response(asdict(services.app.counter.cached))


@router.get("/metrics", dependencies=AUTHENTICATED)
async def show_metrics(services: OpenServices, caller: CallerDependency) -> Response:
    """Return the metrics of all workers for Prometheus. Only for the administrator."""
    _check_sees_everything(caller, services, "see the metrics")
    if not services.settings.telemetry.metrics:
        raise NotFound("Metrics are switched off: set telemetry.metrics to true.")
    text = await anyio.to_thread.run_sync(services.app.counts.exposition)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


def _check_sees_everything(caller: Identity, services: Services, what: str = "see or clear the cache") -> None:
    if not caller.admin and services.settings.auth.mode != "none":
        raise Forbidden(f"Only the admin key may {what}, which all tenants share.")


# --------------------------------------------------------------------------------------------------------- statistics


@router.get("/stats", dependencies=AUTHENTICATED)
async def show_stats(  # noqa: PLR0913 - parameters of the query
    *,
    services: OpenServices,
    caller: CallerDependency,
    since: Annotated[
        str | None, Query(description="Start of the range: `2026-11-01`, `2026-11-01T10:00Z` or `7d`.")
    ] = None,
    until: Annotated[str | None, Query(description="End of the range, written like `since`. Defaults to now.")] = None,
    group: Annotated[
        str,
        Query(
            description="What to group by: day, hour, model, policy, tenant, session, kind, status, dialect or miss."
        ),
    ] = "day",
    policy: Annotated[str | None, Query(description="Only this policy.")] = None,
    model: Annotated[str | None, Query(description="Only this model.")] = None,
    limit: Annotated[int, Query(ge=1, le=10_000)] = 1000,
    session: Annotated[str | None, Query(description="Only this session.")] = None,
    tenant: Tenant = None,
    dialect: DialectName = None,
) -> Response:
    """Return sums over the exchanges in a range of time, by group and in total."""
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


@router.get("/search", dependencies=AUTHENTICATED)
async def search(
    services: OpenServices,
    caller: CallerDependency,
    q: Annotated[str, Query(description="Words to find. A message must contain all of them.", max_length=1000)] = "",
    limit: Limit = 50,
    after: After = None,
    tenant: Tenant = None,
) -> Response:
    """Return messages that contain all the words, newest sessions first."""
    owner = tenant_of(caller, tenant)
    return json_response(await search_texts(services.app.store, q, owner, limit=limit, after=after))

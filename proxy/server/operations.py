"""Liveness, readiness, and the cache of token counts."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Response
from msgspec.structs import asdict

from proxy.errors import Forbidden
from proxy.server.authentication import Identity
from proxy.server.dependencies import CallerDependency, OpenServices, Services, check_query, json_response

router = APIRouter(tags=["operations"], dependencies=[Depends(check_query)])


@router.get("/healthz")
async def healthz() -> Response:
    """Say that the process serves."""
    return json_response({"status": "ok"})


@router.get("/readyz")
async def readyz(services: OpenServices) -> Response:
    """Say whether the store can be used and its tables are those of this version; 503 where not."""
    await services.app.store.ready()
    return json_response({"status": "ready"})


@router.get("/tokens/cache")
async def show_cache(services: OpenServices, caller: CallerDependency) -> Response:
    """Return how many messages this process has counted and remembers, and the sum of their tokens.

    Whoever may see all tenants also gets `calibration`: by model, how many tokens the upstream counts for
    one of ours. To others it would tell which models their neighbours use.
    """
    counts = asdict(services.app.counter.cached)
    if _sees_everything(caller, services):
        counts["calibration"] = services.app.counter.calibration.snapshot()
    return json_response(counts)


@router.delete("/tokens/cache")
async def clear_cache(services: OpenServices, caller: CallerDependency) -> Response:
    """Forget them: they are counted again when they come. For the administrator."""
    if not _sees_everything(caller, services):
        raise Forbidden("Only the admin key may clear the cache, which all tenants share.")
    services.app.counter.clear()
    return json_response(asdict(services.app.counter.cached))


def _sees_everything(caller: Identity, services: Services) -> bool:
    return caller.admin or services.settings.auth.mode == "none"

"""What this process remembers of token counts, to look at and to forget."""

from __future__ import annotations

from dataclasses import asdict

from fastapi import APIRouter, Response

from proxy.api.deps import Asking, OpenServices, json_response
from proxy.errors import Forbidden

router = APIRouter(tags=["tokens"])


@router.get("/tokens/cache")
async def show_cache(services: OpenServices, _: Asking) -> Response:
    """Return how many messages this process has counted and remembers, and the sum of their tokens."""
    return json_response(asdict(services.counter.cached))


@router.delete("/tokens/cache")
async def clear_cache(services: OpenServices, caller: Asking) -> Response:
    """Forget them: they are counted again when they come. For the administrator."""
    if not caller.admin and services.settings.auth.mode != "none":
        raise Forbidden("Only the admin key may clear the cache, which all tenants share.")
    services.counter.clear()
    return json_response(asdict(services.counter.cached))

"""Liveness and readiness. Open to everybody who may call the proxy at all."""

from __future__ import annotations

from fastapi import APIRouter, Response

from proxy.server.deps import OpenServices, json_response

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz() -> Response:
    """Say that the process serves."""
    return json_response({"status": "ok"})


@router.get("/readyz")
async def readyz(services: OpenServices) -> Response:
    """Say whether the store can be used and its tables are those of this version; 503 where not."""
    await services.store.ready()
    return json_response({"status": "ready"})

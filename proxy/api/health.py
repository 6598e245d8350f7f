"""Liveness and readiness. Open to everybody who may call the proxy at all."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from proxy.api.deps import OpenServices, json_response

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def healthz(request: Request, services: OpenServices) -> Response:
    """Say that the process serves."""
    services.gate.check_host(request.headers.get("host", "").encode("latin-1"))
    return json_response({"status": "ok"})


@router.get("/readyz")
async def readyz(request: Request, services: OpenServices) -> Response:
    """Say whether the store can be used and its tables are those of this version; 503 where not."""
    services.gate.check_host(request.headers.get("host", "").encode("latin-1"))
    await services.store.ready()
    return json_response({"status": "ready"})

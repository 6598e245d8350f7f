"""Shared dependencies of the routes: open services, the caller, the session in the path, checked parameters."""

from __future__ import annotations

import logging
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any, Final
from urllib.parse import unquote, urlencode

import orjson
from fastapi import Depends, Query, Request, Response
from fastapi.dependencies.models import Dependant
from fastapi.responses import StreamingResponse
from fastapi.routing import APIRoute
from msgspec import Struct

from proxy.config import Policies, Reload, Settings
from proxy.dialects import DIALECTS
from proxy.errors import Forbidden, InvalidRequest, NotFound
from proxy.pipeline import AppServices
from proxy.server.authentication import Authenticator, Identity
from proxy.server.budgets import Budgets
from proxy.server.limits import PIECE_BYTES, MemoryBudget, Reservation
from proxy.store import SessionRow, Store

_AUDIT: Final = logging.getLogger("palimpsest.audit")
DOTTED: Final = {".": ".\x7f", "..": "..\x7f"}
"""How the session ids `.` and `..` are written in paths, since clients resolve dots. No id holds a control character,
so the written forms are unambiguous."""
_DOTS: Final = {written: name for name, written in DOTTED.items()}
_NAMING: Final = frozenset({"tenant", "session", "a", "b", "exchange"})  # parameters that identify the requested data


class Services(Struct, frozen=True, kw_only=True):
    """Everything that is open while the process serves."""

    settings: Settings
    app: AppServices
    authenticator: Authenticator
    policies: Policies
    budget: MemoryBudget
    budgets: Budgets
    reload: Reload | None  # None: the settings never change
    stopping: threading.Event  # set once the process begins to stop

    @property
    def in_force(self) -> Settings:
        """The current settings, with the changes since the start."""
        return self.settings if self.reload is None else self.reload.settings


def services_of(request: Request) -> Services:
    """Return the open services."""
    services: Services = request.app.state.services
    return services


# Dependencies are coroutines. FastAPI would run a plain function in the thread pool, where even `/healthz` would queue
# behind computations.


async def open_services_of(request: Request) -> Services:
    """Return the open services, as a dependency."""
    return services_of(request)


async def caller_of(request: Request) -> Identity:
    """Return the caller. Raises what `Authenticator.admit` raises."""
    sent = request.scope["headers"]
    first = dict(reversed(sent))
    authenticator = services_of(request).authenticator
    caller = authenticator.admit(first, request.method, sent)
    if caller.admin:
        _AUDIT.info("the administrator asks: %s", audited(request))
    if b"content-length" in first or b"transfer-encoding" in first:
        authenticator.check_content_type(first)
    return caller


def audited(request: Request) -> str:
    """Return a request as the audit log shows it: path and identifying query parameters, but no search words."""
    named = [(name, value) for name, value in request.query_params.multi_items() if name in _NAMING]
    path = f"{request.method} {request.scope['path']}"
    return f"{path}?{urlencode(named)}" if named else path


async def check_query(request: Request) -> None:
    """Raise `InvalidRequest` for a query parameter that the route does not know."""
    route = request.scope.get("route")
    if not request.query_params or not isinstance(route, APIRoute):
        return
    allowed = sorted(_query_names(route.dependant))
    for name in request.query_params:
        if name not in allowed:
            known = f"It can be: {', '.join(allowed)}." if allowed else "This call takes none."
            raise InvalidRequest(f"Unknown query parameter {name!r}. {known}", param=name)


def _query_names(dependant: Dependant) -> set[str]:
    names = {field.alias for field in dependant.query_params}
    return names.union(*[_query_names(dependency) for dependency in dependant.dependencies])


AUTHENTICATED: Final = (Depends(caller_of), Depends(check_query))
"""Checked before a route's own parameters: first the caller, then unknown query parameters."""
OpenServices = Annotated[Services, Depends(open_services_of)]
CallerDependency = Annotated[Identity, Depends(caller_of)]
Tenant = Annotated[str | None, Query(description="Tenant that owns the sessions. For requests with the admin key.")]
DialectName = Annotated[
    str | None,
    Query(alias="dialect", description="`chat`, `responses` or `messages`, if several sessions have this id."),
]
Limit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[str | None, Query(description="`next` of the previous page.")]


def tenant_of(caller: Identity, tenant: str | None) -> str | None:
    """Return the tenant whose sessions are requested, or None for all. Only the administrator may name another."""
    if caller.admin:
        return tenant
    if tenant is not None and tenant != caller.tenant:
        raise Forbidden("Only the admin key may name a tenant.")
    return caller.tenant


async def session_of(
    session: str, services: OpenServices, caller: CallerDependency, tenant: Tenant = None, dialect: DialectName = None
) -> SessionRow:
    """Return the session that the path names. Raises `NotFound` if there is none that the caller may see."""
    name = unquote(session)
    return await found_session(services.app.store, _DOTS.get(name, name), tenant_of(caller, tenant), dialect)


async def found_session(store: Store, name: str, owner: str | None, dialect: str | None) -> SessionRow:
    """Return the session with this id. Raises `NotFound` without one, `InvalidRequest` if several tenants have one.

    If one tenant has the id in several dialects, the first is returned; Chat Completions comes first.
    """
    if dialect is not None and dialect not in DIALECTS:
        raise InvalidRequest(f"`dialect` is {' or '.join(DIALECTS)}, not {dialect!r}.", param="dialect")
    if owner is not None and dialect is None:
        row = await store.session(owner, name)
        rows = [] if row is None else [row]
    else:
        rows = await store.find(name, owner, dialect)
    if not rows:
        raise NotFound(f"There is no session {name!r}. GET /sessions lists them.", param="session")
    if len(tenants := {row.tenant for row in rows}) > 1:
        raise InvalidRequest(f"{len(tenants)} tenants have a session {name!r}. Name one with ?tenant=.", param="tenant")
    return rows[0]


FoundSession = Annotated[SessionRow, Depends(session_of)]


async def memory_of(services: OpenServices) -> AsyncIterator[Reservation]:
    """Yield a reservation of memory that lasts until the client has received the response."""
    with Reservation(services.budget) as memory:
        yield memory


Memory = Annotated[Reservation, Depends(memory_of)]


def json_response(data: Mapping[str, Any], status: int = 200) -> Response:
    """Return a JSON response. Messages in `data` are `orjson.Fragment`s, so their bytes stay unchanged."""
    body = orjson.dumps(data)
    if len(body) <= PIECE_BYTES:
        return Response(body, status, media_type="application/json")
    return StreamingResponse(_pieces(body), status, {"content-length": str(len(body))}, media_type="application/json")


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """Yield a long body in pieces, at the client's pace: bytes buffered in the transport would not be accounted for."""
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]

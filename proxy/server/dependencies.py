"""What the routes share: open services, the caller, the session in the path, checked parameters."""

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
"""What stands for these session ids in a path, where clients resolve dots. No id holds a control character."""
_DOTS: Final = {written: name for name, written in DOTTED.items()}
_NAMING: Final = frozenset({"tenant", "session", "a", "b", "exchange"})  # parameters that name whose data is asked for


class Services(Struct, frozen=True, kw_only=True):
    """Everything that is open while the process serves."""

    settings: Settings
    app: AppServices
    authenticator: Authenticator
    policies: Policies
    budget: MemoryBudget
    budgets: Budgets
    reload: Reload | None  # None: the settings are those of the start
    stopping: threading.Event  # set once the process stops

    @property
    def in_force(self) -> Settings:
        """The settings with what was changed since the start."""
        return self.settings if self.reload is None else self.reload.settings


def services_of(request: Request) -> Services:
    """Return the open services."""
    services: Services = request.app.state.services
    return services


# Dependencies are coroutines: FastAPI runs a plain function in one of the few threads, where it waits behind whatever
# is computed there, and `/healthz` with it.


async def open_services_of(request: Request) -> Services:
    """Return the open services, as a dependency."""
    return services_of(request)


async def caller_of(request: Request) -> Identity:
    """Return who asks; raises what `Authenticator.admit` raises."""
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
    """Return what the audit says of a request: its path, and whose data its query names; not what is searched."""
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
"""What is checked before a route's own parameters: first who asks, then what else the query holds."""
OpenServices = Annotated[Services, Depends(open_services_of)]
CallerDependency = Annotated[Identity, Depends(caller_of)]
Tenant = Annotated[str | None, Query(description="With the admin key: whose sessions.")]
DialectName = Annotated[
    str | None, Query(alias="dialect", description="chat, responses or messages, where several sessions have the id.")
]
Limit = Annotated[int, Query(ge=1, le=1000)]
After = Annotated[str | None, Query(description="The `next` of the page before.")]


def tenant_of(caller: Identity, tenant: str | None) -> str | None:
    """Return whose sessions are meant; None for everybody's. Only the administrator may mean others'."""
    if caller.admin:
        return tenant
    if tenant is not None and tenant != caller.tenant:
        raise Forbidden("Only the admin key may name a tenant.")
    return caller.tenant


async def session_of(
    session: str, services: OpenServices, caller: CallerDependency, tenant: Tenant = None, dialect: DialectName = None
) -> SessionRow:
    """Return the session that the path names, if the caller may see it; else raise `NotFound`."""
    name = unquote(session)
    return await found_session(services.app.store, _DOTS.get(name, name), tenant_of(caller, tenant), dialect)


async def found_session(store: Store, name: str, owner: str | None, dialect: str | None) -> SessionRow:
    """Return the session of this id; raise `NotFound` if there is none, `InvalidRequest` if several tenants have it.

    Of one tenant's in several dialects it is the first, Chat Completions before the others.
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
    """Give a reservation that lasts until the response is sent, at the client's pace."""
    with Reservation(services.budget) as memory:
        yield memory


Memory = Annotated[Reservation, Depends(memory_of)]


def json_response(data: Mapping[str, Any], status: int = 200) -> Response:
    """Return a JSON response; messages in it are `orjson.Fragment`s, so that they keep their bytes."""
    body = orjson.dumps(data)
    if len(body) <= PIECE_BYTES:
        return Response(body, status, media_type="application/json")
    return StreamingResponse(_pieces(body), status, {"content-length": str(len(body))}, media_type="application/json")


async def _pieces(body: bytes) -> AsyncIterator[bytes]:
    """Yield a long body at the client's pace: what waits in the transport counts nowhere."""
    for start in range(0, len(body), PIECE_BYTES):
        yield body[start : start + PIECE_BYTES]

"""The routes of the dashboard. Each page is available as HTML, JSON or CSV."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Annotated, Any, Final
from urllib.parse import unquote, urlencode, urlsplit

from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from msgspec.structs import replace

from proxy.config import OFF, policy_of
from proxy.dashboard.access import (
    THEMES,
    AnyVisitor,
    Form,
    PageRoute,
    Reader,
    context_of,
    new_cookie,
    reader_of,
    rendered,
    set_session,
    set_theme,
)
from proxy.dashboard.cache import cache_page, read_cache
from proxy.dashboard.overview import RangeQuery, overview_page, read_overview
from proxy.dashboard.policies import lab_page, policies_page
from proxy.dashboard.render import form_of, html, static_response
from proxy.dashboard.session import message_page, read_message, read_session, session_page
from proxy.dashboard.sessions import SessionFilter, common_messages, compare_page, sessions_page
from proxy.errors import InvalidRequest, NotFound, Unauthenticated
from proxy.pipeline import compute, write_lines
from proxy.server.authentication import Identity
from proxy.server.dependencies import Memory, OpenServices, Tenant, check_query, found_session, session_of, tenant_of
from proxy.server.limits import Reservation
from proxy.store import ListedSession, SessionListQuery, SessionRow

router = APIRouter(prefix="/ui", tags=["dashboard"], route_class=PageRoute, include_in_schema=False)

_CHECKED: Final = [Depends(reader_of), Depends(check_query)]
_ENDINGS: Final = ("", ".json", ".csv")
PageLimit = Annotated[int, Query(ge=1, le=200)]
_MOST_ROWS: Final = 100  # most rows of a list in HTML, since ids may be long
Endpoint = Callable[..., Any]


def _page(path: str) -> Callable[[Endpoint], Endpoint]:
    """Register a page under its path, and under the same path with `.json` and `.csv`."""

    def register(endpoint: Endpoint) -> Endpoint:
        for ending in _ENDINGS:
            router.add_api_route(path + ending, endpoint, methods=["GET"], dependencies=_CHECKED)
        return endpoint

    return register


async def _session_in_path(
    request: Request,
    session: str,
    services: OpenServices,
    reader: Reader,
    tenant: Tenant = None,
    dialect: Annotated[str, Query(description="Dialect of the session, if it is not `chat`.")] = "",
) -> SessionRow:
    """Return the session that the path names. The ending (`.json`, `.csv`) is not part of the name."""
    return await session_of(session.removesuffix(f".{form_of(request)}"), services, reader, tenant, dialect or None)


PathSession = Annotated[SessionRow, Depends(_session_in_path)]


# ------------------------------------------------------------------------------------------- signing in, appearance


@router.get("/static/{name}")
async def static(name: str, v: str = "") -> Response:  # noqa: ARG001 - the version makes the address new
    """Return a static file of the pages."""
    return static_response(name)


@router.get("/login")
async def show_login(
    request: Request, visitor: AnyVisitor, target: Annotated[str, Query(alias="next")] = "/ui"
) -> Response:
    """Show the sign-in form."""
    del visitor  # needed as a dependency only: it gets a cookie, to which the form is bound
    return html("login.html", await context_of(request, "Sign in") | {"next": _own_path(target), "message": None})


@router.post("/login")
async def login(request: Request, services: OpenServices, visitor: AnyVisitor, form: Form) -> Response:
    """Sign in with a key. A cookie remembers the identity."""
    key, target = form.get("key", "").strip(), _own_path(form.get("next", "/ui"))
    authenticator = services.authenticator
    try:
        host = request.headers.get("host", "").encode("latin-1")
        identity = authenticator.admit({b"authorization": f"Bearer {key}".encode(), b"host": host})
        if not key or (services.settings.auth.mode == "none" and not identity.admin):
            raise Unauthenticated("This key is not known here.")
    except Unauthenticated:
        context = await context_of(request, "Sign in")
        return html("login.html", context | {"next": target, "message": "This key is not known here."}, 401)
    response = Response(status_code=303, headers={"location": target})
    set_session(request, response, new_cookie(authenticator.fingerprint(identity, key)), visitor.secret)
    return response


@router.post("/logout")
async def logout(request: Request, visitor: AnyVisitor, form: Form) -> Response:
    """Sign out."""
    del form  # it was checked
    response = Response(status_code=303, headers={"location": "/ui/login"})
    set_session(request, response, new_cookie(), visitor.secret)
    return response


@router.post("/theme")
async def choose_theme(request: Request, form: Form) -> Response:
    """Remember the chosen theme."""
    theme = form.get("theme", "")
    if theme not in THEMES:
        raise InvalidRequest(f"theme must be one of {', '.join(THEMES)}.", param="theme")
    response = Response(status_code=303, headers={"location": _own_path(form.get("next", "/ui"))})
    set_theme(request, response, theme)
    return response


def _own_path(target: str) -> str:
    """Return the target of a redirect if it is a path of the dashboard, else the overview."""
    parts = urlsplit(target)
    is_ours = not parts.scheme and not parts.netloc and (parts.path == "/ui" or parts.path.startswith("/ui/"))
    return target if is_ours and target.isascii() and target.isprintable() and "\\" not in target else "/ui"


# ------------------------------------------------------------------------------------------------ figures of a time


async def range_query(
    reader: Reader,
    since: Annotated[
        str, Query(description="Start of the range: `2026-11-01`, `2026-11-01T10:00Z`, `7d` or `all`.")
    ] = "7d",
    until: Annotated[str, Query(description="End of the range, written like `since`. Defaults to now.")] = "",
    model: Annotated[str, Query(description="Only this model.")] = "",
    policy: Annotated[str, Query(description="Only this policy.")] = "",
    tenant: Tenant = None,
) -> RangeQuery:
    """Return the requested range and filters."""
    owner = tenant_of(reader, tenant or None)
    return RangeQuery(since=since or "7d", until=until, model=model, policy=policy, tenant=owner)


AskedRange = Annotated[RangeQuery, Depends(range_query)]


@_page("")
async def overview(
    request: Request,
    services: OpenServices,
    reader: Reader,
    asked: AskedRange,
    group: Annotated[str, Query(description="What the table of `.csv` is grouped by.")] = "day",
) -> Response:
    """Show what was spent and saved."""
    found = await read_overview(services.app.store, replace(asked, group=group), admin=reader.admin)
    return await rendered(request, overview_page(found, admin=reader.admin))


@_page("/cache")
async def cache(request: Request, services: OpenServices, reader: Reader, asked: AskedRange) -> Response:
    """Show why the provider's cache missed, and which tools are called."""
    found = await read_cache(services.app, asked)
    return await rendered(request, cache_page(found, admin=reader.admin))


# --------------------------------------------------------------------------------------------------------- sessions


async def session_filter(
    reader: Reader,
    q: Annotated[str, Query(description="Part of the session id.", max_length=200)] = "",
    text: Annotated[str, Query(description="Words that a message must contain.", max_length=1000)] = "",
    model: Annotated[str, Query(description="Model of the last request.")] = "",
    agent: Annotated[str, Query(description="Agent that spoke in the session.")] = "",
    since: Annotated[
        str, Query(description="Only sessions used since: `2026-11-01`, `2026-11-01T10:00Z` or `7d`.")
    ] = "",
    min_tokens: Annotated[int, Query(ge=0, le=2**62)] = 0,
    tenant: Tenant = None,
) -> SessionFilter:
    """Return the filters of a search for sessions."""
    owner = tenant_of(reader, tenant or None)
    return SessionFilter(
        q=q.strip(),
        text=text.strip(),
        model=model,
        agent=agent,
        since=since,
        min_tokens=min_tokens,
        tenant=tenant or "",
        owner=owner,
    )


@_page("/sessions")
async def sessions(
    request: Request,
    services: OpenServices,
    asked: Annotated[SessionFilter, Depends(session_filter)],
    sort: str = "newest",
    limit: PageLimit = 50,
    after: Annotated[str, Query(description="`next` of the previous page.")] = "",
    failed: Annotated[bool, Query(description="Only sessions with requests that failed or broke off.")] = False,
    deleted: Annotated[str, Query(description="Id of a session that was just deleted.")] = "",
) -> Response:
    """List the sessions, or the messages that contain a text."""
    asked = replace(asked, failed=failed)
    most = _MOST_ROWS if form_of(request) == "html" else limit
    query = asked.query(datetime.now(UTC), sort, limit=min(limit, most), after=after or None)
    return await rendered(request, await sessions_page(services.app.store, query, asked, deleted))


@_page("/compare")
async def compare(
    request: Request,
    services: OpenServices,
    reader: Reader,
    a: Annotated[str, Query(description="Id of a session.")],
    b: Annotated[str, Query(description="Id of another session.")],
    tenant: Tenant = None,
) -> Response:
    """Compare two sessions."""
    one, other = [await _named(name, services, reader, tenant) for name in (a, b)]
    store = services.app.store
    common, listed = await common_messages(store, one, other), list[ListedSession]()
    for each in (one, other):
        listed += (await store.listed(SessionListQuery(key=each.key)))[0]
    if len(listed) < len((one, other)):  # deleted in the meantime
        raise NotFound("One of the sessions is not there any more.")
    return await rendered(request, compare_page(listed[0], listed[1], common))


async def _named(name: str, services: OpenServices, reader: Identity, tenant: str | None) -> SessionRow:
    store, owner = services.app.store, tenant_of(reader, tenant or None)
    try:
        return await found_session(store, name, owner, None)
    except NotFound:  # forms percent-encode a name with invisible characters
        return await found_session(store, unquote(name), owner, None)


@router.get("/sessions/{session}", dependencies=_CHECKED)
async def show_session(
    request: Request,
    found: PathSession,
    services: OpenServices,
    memory: Memory,
    number: Annotated[int | None, Query(alias="request", description="Number of a request.")] = None,
    exchange: Annotated[str | None, Query(description="Id of a request.")] = None,
    start: Annotated[int | None, Query(ge=0, description="Position of the first message to show.")] = None,
) -> Response:
    """Show one session."""
    charge = memory.add_stored
    data = await read_session(services.app, found, charge, request=number, exchange=exchange, start=start)
    return await rendered(request, await compute(data.size, session_page, data))


@router.get("/sessions/{session}/messages/{node}", dependencies=_CHECKED)
async def show_message(
    request: Request,
    found: PathSession,
    node: str,
    services: OpenServices,
    memory: Memory,
    exchange: Annotated[str | None, Query(description="Id of the request that sent it.")] = None,
) -> Response:
    """Show one message in full, and what was sent in its place."""
    name = node.removesuffix(f".{form_of(request)}")
    row, sent = await read_message(services.app, found, name, exchange or None, memory.add_stored)
    return await rendered(request, await compute(len(row.message.raw), message_page, found, row, sent, exchange))


@router.get("/sessions/{session}/export", dependencies=_CHECKED)
async def export(found: PathSession, services: OpenServices) -> Response:
    """Return a session as JSON Lines, which an import reads."""
    headers = {"content-disposition": 'attachment; filename="session.jsonl"'}
    lines = write_lines(services.app.store.export(found.key))
    return StreamingResponse(lines, media_type="application/x-ndjson", headers=headers)


@router.get("/sessions/{session}/delete", dependencies=_CHECKED)
async def ask_delete(request: Request, found: PathSession) -> Response:
    """Ask for confirmation before a session is deleted."""
    told = {"id": found.id, "tenant": found.tenant, "dialect": found.dialect, "messages": found.messages}
    return html("delete.html", await context_of(request, "Delete a session") | {"session": told})


@router.post("/sessions/{session}/delete", dependencies=_CHECKED)
async def delete(found: PathSession, services: OpenServices, form: Form) -> Response:
    """Delete a session permanently."""
    del form  # it was checked
    await services.app.store.delete(found.key)
    return Response(status_code=303, headers={"location": f"/ui/sessions?{urlencode({'deleted': found.id})}"})


# --------------------------------------------------------------------------------------------------------- policies


@_page("/policies")
async def policies(
    request: Request, services: OpenServices, reader: Reader, session: str = "", tenant: str = ""
) -> Response:
    """Show the active configuration. `session` and `tenant` prefill the lab."""
    return await rendered(request, await policies_page(services, reader, {"session": session, "tenant": tenant}))


@_page("/policies/lab")
async def lab(
    request: Request,
    services: OpenServices,
    reader: Reader,
    memory: Memory,
    session: str,
    policy: str = OFF,
    tenant: Tenant = None,
) -> Response:
    """Try a policy of the configuration on a session."""
    asked = {"session": session, "policy": policy, "tenant": tenant or ""}
    return await _try(request, services, reader, memory, asked)


@router.post("/policies/lab", dependencies=_CHECKED)
async def try_typed(request: Request, services: OpenServices, reader: Reader, memory: Memory, form: Form) -> Response:
    """Try a policy that was typed in, or one of the configuration. Mistakes are shown beside the input."""
    try:
        return await _try(request, services, reader, memory, form)
    except (InvalidRequest, NotFound) as why:
        page = await policies_page(services, reader, _lab(form))
        told = page.data | {"problem": why.message}
        return html(page.template, await context_of(request, page.title) | told, why.status)


async def _try(
    request: Request, services: OpenServices, reader: Identity, memory: Reservation, asked: dict[str, str]
) -> Response:
    page = await policies_page(services, reader, _lab(asked))
    found = await _named(asked.get("session", "").strip(), services, reader, asked.get("tenant"))
    typed = policy_of(asked["typed"], services.policies.current) if asked.get("typed", "").strip() else None
    name = asked.get("policy") or OFF
    if typed is None and name not in page.data["lab"]["names"]:
        raise NotFound(f"There is no policy {name!r}. Choose one of {', '.join(page.data['lab']['names'])}.")
    return await rendered(request, await lab_page(page, found, name, typed, services, memory.add_stored))


def _lab(asked: Mapping[str, str]) -> dict[str, str]:
    """Return the values for the form of the lab. Browsers send CR LF line ends, which become LF."""
    return {name: asked.get(name, "").replace("\r\n", "\n") for name in ("session", "policy", "typed", "tenant")}


# ------------------------------------------------------------------------------------------------------ all the rest


@router.get("/", dependencies=_CHECKED)
async def overview_with_slash() -> Response:
    """Redirect to the overview."""
    return Response(status_code=308, headers={"location": "/ui"})


@router.get("/{path:path}", dependencies=_CHECKED)
async def nothing(path: str) -> Response:
    """Return 404 with a list of the pages."""
    raise NotFound(f"There is no page {path!r}. There are /ui, /ui/sessions, /ui/cache and /ui/policies.")

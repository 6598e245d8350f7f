"""Access to the dashboard: sign-in, the session cookie, the CSRF token; errors as pages; security headers.

The cookie is signed, not stored, so any worker can check it. It holds the fingerprint of the key. The key is looked up
at every request, so the session ends when the key is removed. Visitors who have not signed in get a cookie without a
fingerprint, to which forms are bound.
"""

from __future__ import annotations

import hmac
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from hashlib import sha256
from typing import Annotated, Any, Final
from urllib.parse import parse_qs, quote, urlencode

from fastapi import Depends, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from msgspec import Struct
from msgspec.structs import replace

from proxy.dashboard.render import Page, as_csv, as_json, form_of, html
from proxy.errors import Forbidden, InvalidRequest, PalimpsestError, Unauthenticated
from proxy.server.authentication import Identity
from proxy.server.dependencies import audited, services_of
from proxy.server.endpoint import bounded

_AUDIT: Final = logging.getLogger("palimpsest.audit")
_COOKIE: Final = "palimpsest_session"
_THEME: Final = "palimpsest_theme"
THEMES: Final = ("auto", "light", "dark")
_SECRET: Final = "dashboard-cookies"  # noqa: S105 - the name of a secret
_LIFETIME: Final = 12 * 3600  # seconds
_CREDENTIALS: Final = (b"authorization", b"x-api-key", b"api-key")
_TITLES: Final = {401: "Not signed in", 403: "Not allowed", 404: "Not found"}  # titles of errors by status
_MOST_BYTES: Final = 262_144  # largest form
_SECURITY: Final = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}


class Cookie(Struct, frozen=True, kw_only=True):
    """The content of the session cookie."""

    fingerprint: str  # of the key that signed in; empty before sign-in
    expires: int  # seconds since 1970
    nonce: str  # the CSRF token is derived from it


class Visitor(Struct, frozen=True, kw_only=True):
    """The visitor of a page."""

    identity: Identity | None  # None: sign-in is required and has not happened
    cookie: Cookie
    secret: bytes
    fresh: bool = False  # whether the cookie is new and must be set
    by_key: bool = False  # whether the request itself holds the key, which pages of other sites cannot send

    @property
    def csrf(self) -> str:
        """The CSRF token that every form must contain."""
        return _signed(self.secret, f"csrf:{self.cookie.nonce}")

    @property
    def signed_in(self) -> bool:
        """Whether the visitor has signed in with a key and can sign out."""
        return bool(self.cookie.fingerprint)


def _signed(secret: bytes, text: str) -> str:
    return hmac.new(secret, text.encode(), sha256).hexdigest()


def _written(cookie: Cookie, secret: bytes) -> str:
    text = f"{cookie.fingerprint}.{cookie.expires}.{cookie.nonce}"
    return f"{text}.{_signed(secret, text)}"


def _read(value: str, secret: bytes) -> Cookie | None:
    """Parse a cookie. Returns None if its signature is invalid or it has expired."""
    text, _, signature = value.rpartition(".")
    if not value.isascii() or not hmac.compare_digest(signature, _signed(secret, text)):
        return None
    fingerprint, expires, nonce = text.split(".")
    if int(expires) < time.time():
        return None
    return Cookie(fingerprint=fingerprint, expires=int(expires), nonce=nonce)


def new_cookie(fingerprint: str = "") -> Cookie:
    """Return a cookie for the key with this fingerprint, or one for an anonymous visitor."""
    return Cookie(fingerprint=fingerprint, expires=int(time.time()) + _LIFETIME, nonce=secrets.token_hex(16))


async def visitor_of(request: Request) -> Visitor:
    """Return the visitor. A key in the request takes precedence over the cookie."""
    if (known := getattr(request.state, "visitor", None)) is not None:
        found: Visitor = known
        return found
    services = services_of(request)
    sent = request.scope["headers"]
    first = dict(reversed(sent))
    secret = await services.app.store.secret(_SECRET)
    authenticator = services.authenticator
    cookie = _read(request.cookies.get(_COOKIE, ""), secret)
    visitor = Visitor(identity=None, cookie=cookie or new_cookie(), secret=secret, fresh=cookie is None)
    if any(name in first for name in _CREDENTIALS):
        identity = authenticator.admit(first, request.method, sent)
        visitor = replace(visitor, identity=identity, by_key=True, fresh=False)
    elif cookie is not None and cookie.fingerprint:
        visitor = replace(visitor, identity=authenticator.recognise(cookie.fingerprint))
    if visitor.identity is None and services.settings.auth.mode == "none":
        visitor = replace(visitor, identity=authenticator.admit(first, request.method, sent))
    if visitor.identity is not None and visitor.identity.admin:
        _AUDIT.info("the administrator asks: %s", audited(request))
    request.state.visitor = visitor
    return visitor


async def reader_of(visitor: Annotated[Visitor, Depends(visitor_of)]) -> Identity:
    """Return the identity of the visitor. Raises `Unauthenticated` if sign-in is required and has not happened."""
    if visitor.identity is None:
        raise Unauthenticated("Sign in at /ui/login, or send a key as 'Authorization: Bearer KEY'.")
    return visitor.identity


AnyVisitor = Annotated[Visitor, Depends(visitor_of)]
Reader = Annotated[Identity, Depends(reader_of)]


async def form_fields(request: Request) -> dict[str, str]:
    """Return the fields of a form. Raises `Forbidden` unless its CSRF token shows that the dashboard sent it."""
    visitor = await visitor_of(request)
    announced = request.headers.get("content-length", "").encode("latin-1")
    body = await bounded(request.stream(), announced, _MOST_BYTES)
    try:
        fields = parse_qs(body.decode(), keep_blank_values=True, max_num_fields=100)
    except ValueError as why:
        raise InvalidRequest("The form cannot be read. Send application/x-www-form-urlencoded.") from why
    given = {name: values[-1] for name, values in fields.items()}
    token = given.pop("csrf", request.headers.get("x-csrf-token", ""))
    if not visitor.by_key and (visitor.fresh or not hmac.compare_digest(token.encode(), visitor.csrf.encode())):
        raise Forbidden("This form is not from this session, or is too old. Load the page again.", code="csrf")
    return given


Form = Annotated[dict[str, str], Depends(form_fields)]


def set_session(request: Request, response: Response, cookie: Cookie, secret: bytes) -> None:
    """Set the session cookie."""
    _set(request, response, _COOKIE, _written(cookie, secret), _LIFETIME)


def set_theme(request: Request, response: Response, theme: str) -> None:
    """Set the cookie with the theme."""
    _set(request, response, _THEME, theme, 365 * 24 * 3600)


def _set(request: Request, response: Response, name: str, value: str, seconds: int) -> None:
    response.set_cookie(
        name, value, max_age=seconds, path="/ui", httponly=True, samesite="strict", secure=request.url.scheme == "https"
    )


async def rendered(request: Request, page: Page) -> Response:
    """Return a page in the format that the path names: HTML, `.json` or `.csv`."""
    match form_of(request):
        case "json":
            return as_json(page)
        case "csv":
            response = as_csv(page)
            if (after := page.data.get("next")) is not None:
                query = urlencode({**request.query_params, "after": after})
                response.headers["link"] = f'<{request.url.path}?{query}>; rel="next"'
            return response
        case _:
            return html(page.template, await context_of(request, page.title) | page.data)


async def context_of(request: Request, title: str) -> dict[str, Any]:
    """Return the variables that every template gets."""
    return _context(request, title, await visitor_of(request))


def _context(request: Request, title: str, visitor: Visitor | None) -> dict[str, Any]:
    theme = request.cookies.get(_THEME, "auto")
    identity = None if visitor is None else visitor.identity
    return {
        "title": title,
        "path": request.url.path,
        "address": _address_of(request),
        "theme": theme if theme in THEMES else "auto",
        "csrf": "" if visitor is None else visitor.csrf,
        "reader": None
        if visitor is None or identity is None
        else {"admin": identity.admin, "tenant": identity.tenant, "signed_in": visitor.signed_in},
        "open": services_of(request).settings.auth.mode == "none",
        "has_admin": services_of(request).in_force.auth.admin_key is not None,
    }


def _address_of(request: Request) -> str:
    return str(request.url.path) + (f"?{request.url.query}" if request.url.query else "")


class PageRoute(APIRoute):
    """A route of the dashboard: errors become pages, and every response gets security headers."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return the handler of a request."""
        handle = super().get_route_handler()

        async def answer(request: Request) -> Response:
            try:
                response = await handle(request)
            except (PalimpsestError, RequestValidationError) as why:
                response = await _refused(request, why)
            visitor: Visitor | None = getattr(request.state, "visitor", None)
            if visitor is not None and visitor.fresh and "set-cookie" not in response.headers:
                set_session(request, response, visitor.cookie, visitor.secret)
            response.headers.update(_SECURITY)
            response.headers.setdefault("cache-control", "no-store")
            return response

        return answer


async def _refused(request: Request, why: PalimpsestError | RequestValidationError) -> Response:
    """Return an error as a page, or a redirect to sign-in. For `.json` and `.csv` the error is raised instead."""
    if form_of(request) != "html":
        raise why
    if isinstance(why, Unauthenticated) and request.method == "GET":
        target = f"/ui/login?next={quote(_address_of(request), safe='')}"
        if "hx-request" in request.headers:
            return Response(status_code=204, headers={"hx-redirect": target})
        return Response(status_code=303, headers={"location": target})
    if isinstance(why, RequestValidationError):
        first = why.errors()[0]
        why = InvalidRequest(f"{first['loc'][-1]}: {first['msg']}", param=str(first["loc"][-1]))
    title = _TITLES.get(why.status, "Not possible")
    try:
        context = await context_of(request, title)
    except PalimpsestError:  # the store is unavailable, or the key is wrong: the visitor is unknown
        context = _context(request, title, None)
    return html("error.html", context | {"message": why.message, "status": why.status}, why.status)

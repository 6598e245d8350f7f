"""Every other path under `/v1/`: relayed to the upstream and back, unchanged, piece by piece as bytes arrive.

If the proxy uses its own key, only the resources under `upstream.passthrough` are forwarded, because files and stored
completions behind that key belong to all tenants.
"""

from __future__ import annotations

from collections.abc import AsyncIterable
from typing import Final
from unicodedata import category, normalize
from urllib.parse import unquote_to_bytes

import msgspec
from msgspec import Struct

from proxy.dialects import dialect_named
from proxy.errors import ClientLeft, Forbidden, NotFound, PalimpsestError, StoreUnavailable, UpgradeRefused
from proxy.pipeline import LateReply, compute, headers
from proxy.server.authentication import Identity
from proxy.server.dependencies import Services
from proxy.server.endpoint import ClientConnection
from proxy.server.limits import BodyLimits, Reservation, forget_way
from proxy.upstream import Answer, Destination

_AMBIGUOUS: Final = (b"/", b"\\", b"\0", b";", b"%")
"""What a decoded segment must not hold; otherwise the upstream could read a different path than was checked."""
_CONTROL: Final = frozenset({"Cc", "Cf"})  # control and invisible characters
_NO_WEBSOCKETS: Final = "WebSockets are not served here. Send requests by HTTP, with `stream: true` for events."
_RESPONSES: Final = b"/responses/"
_ABOUT_INPUT: Final = frozenset({b"/responses/compact", b"/responses/input_tokens"})
"""Paths for POST whose body is an input with a model. The path names no response."""
_FETCHES: Final = frozenset({("GET", b""), ("POST", b"cancel")})
"""Method, and path after the id, of requests that may return the reply of a background response."""
_ON_RESPONSES: Final = frozenset({"GET", "HEAD", "DELETE", "POST"})
_API: Final = dialect_named("responses")


class _Body(Struct, frozen=True, kw_only=True):
    """The part of a forwarded body that is read."""

    model: str = ""


_MESSAGES: Final = b"/messages/"
_COUNT: Final = b"/messages/count_tokens"  # changes and spends nothing, so it is allowed with any key
_VERSION: Final = b"anthropic-version"  # a header of every request to Anthropic, on all paths
_NOT_MODIFIED: Final = 304
_PREFLIGHT: Final = b"access-control-request-method"
_SHARED_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "POST"})
"""Methods allowed with a shared key. No tenant may delete or replace what belongs to all."""


class Passthrough:
    """Relays requests that the proxy does not handle itself. One per process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._app = services.app
        self._upstream = services.app.upstream
        self._limits = BodyLimits.of(services.settings.server)
        self._limit = services.settings.server.max_body_bytes
        self._own_headers = frozenset(name.lower().encode() for name in services.settings.sessions.headers)
        self._allowed = frozenset(services.settings.upstream.passthrough)

    async def serve(self, connection: ClientConnection, path: bytes) -> None:
        """Relay one request. `path` is the quoted path after `/v1`."""
        try:
            with Reservation(self._services.budget) as memory:
                await self._serve(connection, path, memory)
        except ClientLeft as why:
            forget_way(why)
        except PalimpsestError as why:
            forget_way(why)
            await connection.fail(why)

    async def _serve(self, connection: ClientConnection, path: bytes, memory: Reservation) -> None:
        if connection.first.get(b"upgrade", b"").lower() == b"websocket":
            raise UpgradeRefused(_NO_WEBSOCKETS)
        anthropic = path.startswith(_MESSAGES) or (_VERSION in connection.first and not path.startswith(_RESPONSES))
        base = self._upstream.anthropic if anthropic else self._upstream.base
        if connection.method == "OPTIONS" and _PREFLIGHT in connection.first and base.forwards_credentials:
            # A preflight request: a browser asks whether a page may send a key. It carries no key itself.
            self._services.authenticator.check_host(connection.first.get(b"host"))
            await connection.serve(self._relay(connection, path, base), self._app.background)
            return
        caller = self._services.authenticator.admit(connection.first, connection.method, connection.headers)
        if caller.admin:
            raise Forbidden("The admin key does not go upstream. Use a tenant's key.")
        if path == _COUNT and connection.method == "POST":
            await connection.serve(self._count(connection, path, memory), self._app.background)
            return
        body: bytes | None = None
        if path.startswith(_RESPONSES) and self._upstream.has_routes:
            if connection.method == "POST" and path in _ABOUT_INPUT:
                body = await connection.body(self._limit, memory)
                base = self._upstream.destination(await compute(len(body), _model_in, body), _API.name)
            else:
                base = await self._of_response(path, caller.tenant) or base
        if not base.forwards_credentials:
            if connection.method == "POST" and self._services.budgets.in_force:  # it may cost money
                await self._services.budgets.admit(caller)
            if path.startswith(_RESPONSES):
                body = await self._check_owner(connection, path, caller.tenant, memory, body)
            else:
                self._check(connection.method, path)
        late = await self._late(connection, path, base, caller) if path.startswith(_RESPONSES) else None
        await connection.serve(self._relay(connection, path, base, body, late), self._app.background)

    async def _of_response(self, path: bytes, tenant: str) -> Destination | None:
        """Return the destination that made the response in the path, or None if it is unknown."""
        try:
            exchange = await self._app.store.exchange_with(tenant, _API.name, _response_in(path)[0])
        except StoreUnavailable:
            return None
        return None if exchange is None else self._upstream.destination(exchange.model, _API.name)

    async def _late(
        self, connection: ClientConnection, path: bytes, base: Destination, caller: Identity
    ) -> LateReply | None:
        """Return a `LateReply` if the request fetches the reply of an unfinished exchange, else None."""
        name, rest = _response_in(path)
        if (connection.method, rest) not in _FETCHES:
            return None
        try:
            exchange = await self._app.store.unfinished(caller.tenant, _API.name, name)
        except StoreUnavailable:  # the client gets the reply anyway; it is not recorded
            exchange = None
        if exchange is None:
            return None
        return LateReply(
            services=self._app,
            dialect=_API,
            exchange=exchange,
            destination=base,
            headers=connection.headers,
            query=connection.query,
            key=caller.key,
        )

    async def _check_owner(
        self, connection: ClientConnection, path: bytes, tenant: str, memory: Reservation, body: bytes | None
    ) -> bytes | None:
        """Raise `NotFound` if a response is not the tenant's. Returns the body if it had to be read.

        All tenants share one key, so the provider would show the responses of every tenant.
        """
        names = [_response_in(path)[0]]
        segments = path.removeprefix(_RESPONSES).split(b"/")
        odd = any(is_odd(unquote_to_bytes(segment)) or not segment for segment in segments)
        if connection.method == "POST" and path in _ABOUT_INPUT:
            body = await connection.body(self._limit, memory) if body is None else body
            await compute(len(body), self._limits.check, body)
            memory.add(0, body.count(b"{"))
            names = list(_API.requests.parse(body).references)
        elif odd or connection.method not in _ON_RESPONSES:
            raise NotFound(f"There is no {connection.method} {path.decode('latin-1')} here.", code="unknown_url")
        await self._app.loader.check_owned(tenant, _API, names)
        return body

    def _check(self, method: str, path: bytes) -> None:
        segments = [unquote_to_bytes(segment) for segment in path.split(b"/")[1:]]
        odd = any(is_odd(segment) for segment in segments)
        plain = b"/".join(segments).decode("utf-8", "replace") + "/"
        if (
            odd
            or method not in _SHARED_METHODS
            or not any(plain.startswith(f"{allowed}/") for allowed in self._allowed)
        ):
            listed = ", ".join(sorted(self._allowed)) or "nothing"
            raise Forbidden(
                "With the proxy's own upstream key only these resources under /v1/ are passed on: "
                f"{listed} (upstream.passthrough), chat/completions, responses and messages.",
                code="passthrough_not_allowed",
            )

    async def _count(self, connection: ClientConnection, path: bytes, memory: Reservation) -> None:
        """Forward a token count to the destination of its model, where the request itself would go."""
        body = await connection.body(self._limit, memory)
        model = await compute(len(body), _model_in, body)
        await self._relay(connection, path, self._upstream.destination(model, "messages"), body)

    async def _relay(
        self,
        connection: ClientConnection,
        path: bytes,
        base: Destination,
        read: bytes | None = None,
        late: LateReply | None = None,
    ) -> None:
        drop = self._own_headers if late is None else self._own_headers | {b"accept-encoding"}
        sent = headers.to_upstream(connection.headers, drop_credentials=not base.forwards_credentials, extra_drop=drop)
        length = connection.first.get(b"content-length")
        body: bytes | AsyncIterable[bytes] = connection.pieces() if read is None else read
        if read is None and length is not None and length != b"0":
            sent.append((b"content-length", length))
        elif read is None and connection.first.get(b"transfer-encoding") is None:
            body = b"".join([piece async for piece in connection.pieces()])
        target = path + (b"?" + connection.query if connection.query and base.forwards_query else b"")
        answer = await self._upstream.ask(base, connection.method, target.decode("latin-1"), sent, body)
        try:
            await (_return(answer, connection) if late is None else late.relay(answer, connection))
        finally:
            await answer.aclose()


def _response_in(path: bytes) -> tuple[str, bytes]:
    """Return the id of the response in a path, and the rest of the path."""
    name, _, rest = path.removeprefix(_RESPONSES).partition(b"/")
    return unquote_to_bytes(name).decode("latin-1"), rest.rstrip(b"/")


def is_odd(segment: bytes) -> bool:
    """Return whether the upstream could interpret a decoded path segment differently.

    For example, some servers drop spaces and control characters around dots, or treat full-width dots as dots.
    """
    if any(mark in segment for mark in _AMBIGUOUS):
        return True
    try:
        text = normalize("NFKC", segment.decode())
    except UnicodeDecodeError:
        return True
    if any(category(character) in _CONTROL for character in text) or "/" in text or "\\" in text:
        return True
    return text != "" and not text.strip(" .")


def _model_in(body: bytes) -> str:
    """Return the model that a body names, or an empty text."""
    try:
        return msgspec.json.decode(body, type=_Body).model
    except (msgspec.DecodeError, RecursionError):
        return ""


async def _return(answer: Answer, connection: ClientConnection) -> None:
    """Relay the answer as it arrives. If it breaks off, the client's connection is broken too, as the only signal."""
    back = headers.to_client(answer.headers)
    # A 304 may have a Content-Length without a body; uvicorn would wait for that body.
    if (length := answer.header(b"content-length")) is not None and answer.status != _NOT_MODIFIED:
        back.append((b"content-length", length))
    await connection.start(answer.status, back)
    try:
        async for chunk in answer.chunks():
            await connection.write(chunk)
    except PalimpsestError:
        return
    await connection.end()

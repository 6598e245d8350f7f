"""Every other path under `/v1/`: to the upstream and back, untouched, both ways as it comes.

With a key of the proxy's own only the listed resources are passed on: files and stored completions
behind that key belong to all tenants.
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
"""What no decoded segment may hold, or upstream could read another path than was checked."""
_CONTROL: Final = frozenset({"Cc", "Cf"})  # control and invisible characters
_NO_WEBSOCKETS: Final = "WebSockets are not served here. Send requests by HTTP, with `stream: true` for events."
_RESPONSES: Final = b"/responses/"
_ABOUT_INPUT: Final = frozenset({b"/responses/compact", b"/responses/input_tokens"})
"""What is asked of an input by POST: the body names the model, and no part of the path a response."""
_FETCHES: Final = frozenset({("GET", b""), ("POST", b"cancel")})
"""By which methods, and what behind its id, a response is asked for that may have been made in the background."""
_ON_RESPONSES: Final = frozenset({"GET", "HEAD", "DELETE", "POST"})
_API: Final = dialect_named("responses")


class _Body(Struct, frozen=True, kw_only=True):
    """What is read of a body that is passed on."""

    model: str = ""


_MESSAGES: Final = b"/messages/"
_COUNT: Final = b"/messages/count_tokens"  # it spends and changes nothing: any key may be used for it
_VERSION: Final = b"anthropic-version"  # the header that every request to Anthropic has, whatever its path
_NOT_MODIFIED: Final = 304
_PREFLIGHT: Final = b"access-control-request-method"
_SHARED_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS", "POST"})
"""What a shared key may be used for: nobody deletes or replaces what belongs to all."""


class Passthrough:
    """Relays requests that are none of ours. One for the life of the process."""

    def __init__(self, services: Services) -> None:
        self._services = services
        self._app = services.app
        self._upstream = services.app.upstream
        self._limits = BodyLimits.of(services.settings.server)
        self._limit = services.settings.server.max_body_bytes
        self._own_headers = frozenset(name.lower().encode() for name in services.settings.sessions.headers)
        self._allowed = frozenset(services.settings.upstream.passthrough)

    async def serve(self, connection: ClientConnection, path: bytes) -> None:
        """Relay one request; `path` is what followed `/v1`, as it was quoted."""
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
            # A browser asks whether a page may send a key, and sends none itself.
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
            if connection.method == "POST" and self._services.budgets.in_force:  # it may cost the key's owner something
                await self._services.budgets.admit(caller)
            if path.startswith(_RESPONSES):
                body = await self._check_owner(connection, path, caller.tenant, memory, body)
            else:
                self._check(connection.method, path)
        late = await self._late(connection, path, base, caller) if path.startswith(_RESPONSES) else None
        await connection.serve(self._relay(connection, path, base, body, late), self._app.background)

    async def _of_response(self, path: bytes, tenant: str) -> Destination | None:
        """Return where the response was made that a path names; None where that is not known."""
        try:
            exchange = await self._app.store.exchange_with(tenant, _API.name, _response_in(path)[0])
        except StoreUnavailable:
            return None
        return None if exchange is None else self._upstream.destination(exchange.model, _API.name)

    async def _late(
        self, connection: ClientConnection, path: bytes, base: Destination, caller: Identity
    ) -> LateReply | None:
        """Return what fetches the reply of an exchange that waits for it; None for any other request."""
        name, rest = _response_in(path)
        if (connection.method, rest) not in _FETCHES:
            return None
        try:
            exchange = await self._app.store.unfinished(caller.tenant, _API.name, name)
        except StoreUnavailable:  # the client gets the reply all the same
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
        """Raise `NotFound` for a response that is none of the tenant's; return the body where it had to be read.

        The provider sees one key of all tenants, and would show everybody's.
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
        """Have tokens counted where the request itself would go: its model tells."""
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
    """Return the id of the response that a path names, and what follows it."""
    name, _, rest = path.removeprefix(_RESPONSES).partition(b"/")
    return unquote_to_bytes(name).decode("latin-1"), rest.rstrip(b"/")


def is_odd(segment: bytes) -> bool:
    """Return whether upstream could read a decoded segment of a path in another way than it stands there.

    Some servers drop spaces and control characters around dots, or read wide dots as dots.
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
    """Return the model that a body names; empty where it names none."""
    try:
        return msgspec.json.decode(body, type=_Body).model
    except (msgspec.DecodeError, RecursionError):
        return ""


async def _return(answer: Answer, connection: ClientConnection) -> None:
    """Relay the answer as it comes. If it breaks, so does the connection: nothing else can say so."""
    back = headers.to_client(answer.headers)
    # A 304 may say how long the body is that it does not have; uvicorn would wait for it.
    if (length := answer.header(b"content-length")) is not None and answer.status != _NOT_MODIFIED:
        back.append((b"content-length", length))
    await connection.start(answer.status, back)
    try:
        async for chunk in answer.chunks():
            await connection.write(chunk)
    except PalimpsestError:
        return
    await connection.end()

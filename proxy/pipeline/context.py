"""One request as the client sent it, and the context that its headers give."""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias
from unicodedata import category

from msgspec import Struct
from msgspec.structs import replace

from proxy.config import OFF, Policies, SessionSettings, checked_name
from proxy.conversation import Mode
from proxy.dialects import Dialect, Request
from proxy.errors import InvalidRequest, PalimpsestError
from proxy.pipeline import headers
from proxy.summaries import Caller
from proxy.trimming import Policy

if TYPE_CHECKING:  # importing it at runtime would load OpenTelemetry
    from proxy.telemetry.tracing import Trace

MAX_ID_BYTES: Final = 512  # longest session id, in bytes of UTF-8
_REFUSED: Final = frozenset({"Cc", "Cs"})
_POSITIVE: Final = re.compile("0*[1-9][0-9]*")

_RETRY_COUNT: Final = b"x-stainless-retry-count"
_MODE: Final = headers.SESSION_MODE.encode()

Headers = Sequence[tuple[bytes, bytes]]


class Client(Protocol):
    """The client's side of one HTTP exchange. Its methods do nothing once the client has left."""

    async def start(self, status: int, headers: Headers) -> None:
        """Send the status and the headers."""

    async def write(self, data: bytes) -> None:
        """Send a piece of the body."""

    async def end(self, data: bytes = b"") -> None:
        """Send the last piece of the body."""

    async def fail(self, error: PalimpsestError, headers: Headers = ()) -> None:
        """Report an error: as a response, or as the last event of a stream that has begun."""


Charge: TypeAlias = Callable[[int, int], None]
"""Called with the bytes and the number of stored messages that are read for a request; raises if memory is short."""


def free_of_charge(size: int, messages: int) -> None:
    """Accept any number of stored messages."""


class ClientRequest(Struct, frozen=True, kw_only=True):
    """A client's request as it arrived."""

    dialect: Dialect  # the API that the client speaks
    tenant: str
    headers: Headers
    query: bytes  # the query string, without its question mark
    body: bytes
    key: str | None = None  # the name of the client's key; None if it has no name
    trace: Trace | None = None  # its OpenTelemetry trace; None if tracing is off
    admit: Callable[[int, int], Awaitable[None]] | None = None
    """Called once for a long body, before it is parsed; raises if the body holds too much.

    Its arguments describe the beginning of the body that was admitted before: number of messages, number of bytes.
    """
    charge: Charge = free_of_charge

    @property
    def caller(self) -> Caller:
        """The caller that a summary is made for."""
        headers, dialect = tuple(self.headers), self.dialect.name
        return Caller(tenant=self.tenant, key=self.key, headers=headers, query=self.query, dialect=dialect)


class RequestContext(Struct, frozen=True, kw_only=True):
    """How a request asks, apart from its messages: session, policy, mode, agent."""

    dialect: Dialect
    tenant: str
    policy_name: str  # name of the policy in force; `off` if trimming is bypassed
    policy: Policy | None  # None if trimming is bypassed
    session: str | None = None  # the session id that the client sent; None without one
    mode: Mode = Mode.AUTO
    retried: bool = False  # whether the client announces a retry
    idempotency: str | None = None  # hash of the `Idempotency-Key`; None without one
    agent: str | None = None  # the name of the agent that asks, if several share a session
    charge: Charge = free_of_charge
    select: Callable[[str], tuple[str, Policy]] | None = None
    """Returns a session's policy name and policy. None if the policy above does not depend on the session."""

    @property
    def observes(self) -> bool:
        """Whether trims are only recorded, and everything is sent."""
        return self.policy is not None and self.policy.mode == "observe"

    def in_session(self, session: str | None) -> RequestContext:
        """Return the context with the policy of this session; unchanged if `session` is None."""
        if self.select is None or session is None:
            return self
        name, policy = self.select(session)
        return replace(self, policy_name=name, policy=policy, select=None)


def read_context(
    call: ClientRequest, request: Request, sessions: SessionSettings, policies: Policies
) -> RequestContext:
    """Read the headers of a request. Raises `InvalidRequest` for a value that is not allowed."""
    sent = headers.first_values(call.headers)
    name, policy, select = OFF, None, None
    asked = _header(sent, headers.CONTEXT_POLICY)
    session = _session_of(sent, request, sessions)
    if asked != OFF:
        known = _session_name(session, request) if policies.has_shares else ""
        name, policy = policies.select(call.tenant, request.model, asked, known)
        if asked is None and session is None and policies.has_shares:  # the session comes from the store
            select = partial(policies.select, call.tenant, request.model, None)
    retries = sent.get(_RETRY_COUNT)
    key = _header(sent, "Idempotency-Key")
    agent = _header(sent, headers.AGENT_NAME)
    if agent is None and request.has_own_fields:  # the last instructions' agent, else the newest message's
        named = [message.agent for message in (*request.messages[-1:], *request.instructions)]
        agent = next((name for name in reversed(named) if name is not None), None)
    return RequestContext(
        dialect=call.dialect,
        tenant=call.tenant,
        policy_name=name,
        policy=policy,
        session=session,
        mode=_mode_of(sent) if _MODE in sent else Mode.AUTO,
        retried=retries is not None and _POSITIVE.fullmatch(retries.decode("latin-1")) is not None,
        idempotency=blake2b(key.encode(), digest_size=16).hexdigest() if key else None,
        agent=agent,
        charge=call.charge,
        select=select,
    )


def valid_id(value: str, param: str) -> str:
    """Return a session id unchanged. Raises `InvalidRequest` if it is empty, too long, or holds control characters."""
    if 0 < len(value) <= MAX_ID_BYTES and value.isascii() and value.isprintable():
        return value
    if not value:
        problem = "is empty. Send one with a character at least."
    elif len(value.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
        problem = f"is longer than {MAX_ID_BYTES} bytes. Send a shorter one."
    elif any(category(character) in _REFUSED for character in value):
        problem = "holds control characters or lone surrogates. Send one without."
    else:
        return value
    raise InvalidRequest(f"The session id {problem}", param=param, code="invalid_id")


def valid_tenant(value: str, param: str) -> str:
    """Return a tenant's name unchanged. Raises `InvalidRequest` if the name is not allowed."""
    try:
        return checked_name(value)
    except ValueError as why:
        raise InvalidRequest(f"The tenant {value!r} cannot be: {why}.", param=param) from None


def _header(sent: Mapping[bytes, bytes], name: str) -> str | None:
    """Return a header, percent-decoded, or None if it is missing or empty."""
    raw = sent.get(name.lower().encode())
    return headers.decode_value(raw, name) if raw else None


def _session_of(sent: Mapping[bytes, bytes], request: Request, settings: SessionSettings) -> str | None:
    """Return the session id, or None if the request names no session."""
    for name in settings.headers:
        value = _header(sent, name)
        if value:
            return valid_id(value, name)
    for path in settings.body_fields:
        value = request.field(path) or request.field(f"{path}.id")  # `conversation` may be an object
        if value:
            return valid_id(value, path)
    if settings.missing == "reject":
        name = settings.headers[0] if settings.headers else "X-Session-ID"
        raise InvalidRequest(f"No session id. Send one in the header {name}.", param=name, code="session_missing")
    return None


def _session_name(session: str | None, request: Request) -> str:
    """Return the session's id. Without one, return a hash of the first message in its place."""
    if session is not None or not request.messages:
        return session or ""
    return blake2b(request.messages[0].raw, digest_size=16).hexdigest()


def _mode_of(sent: Mapping[bytes, bytes]) -> Mode:
    value = _header(sent, headers.SESSION_MODE)
    if value is None:
        return Mode.AUTO
    try:
        return Mode(value.strip().lower())
    except ValueError as why:
        raise InvalidRequest(
            f"X-Session-Mode is {value!r}. It can be: auto, append, full.", param="X-Session-Mode"
        ) from why

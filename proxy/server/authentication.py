"""Authentication: identifies the caller as a tenant or the administrator.

Without authentication every caller is the same tenant, and `Host` must be a name of this machine; otherwise a web page
could read histories by DNS rebinding. Requests from pages of other origins that change or spend something are refused.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from typing import Final

from msgspec import Struct

from proxy.config import KEY_HASH, AuthSettings
from proxy.errors import Forbidden, InvalidRequest, Unauthenticated
from proxy.pipeline import DEFAULT_TENANT

_KEYS: Final = (b"authorization", b"x-api-key", b"api-key")  # where clients send their key
_SINGLE: Final = (*_KEYS, b"host")
_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})  # they change and spend nothing
_JSON: Final = b"application/json"
_OWN_KEY: Final = "t_"  # prefix of the names of tenants with a provider's key of their own (`passthrough`)
_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Identity(Struct, frozen=True, kw_only=True):
    """Who sent a request."""

    tenant: str  # the owner of the sessions that the caller sees; empty for the administrator, who sees all sessions
    admin: bool = False
    key: str | None = None  # the name of the key, if it has one


_EVERYBODY: Final = Identity(tenant=DEFAULT_TENANT)


class Authenticator:
    """Identifies callers. One per process."""

    def __init__(self, settings: AuthSettings, secret: bytes, allowed_origins: Collection[str] = ()) -> None:
        """Read the keys. `secret` is used to derive a tenant's name from a client's own key.

        `allowed_origins` are other origins whose web pages may use a proxy without authentication.
        """
        self._origins = frozenset(origin.encode() for origin in allowed_origins)
        self._secret = secret
        self._mode: Final = settings.mode  # a changed mode needs a restart
        self.take(settings)

    def take(self, settings: AuthSettings) -> None:
        """Use the keys of these settings from the next request on."""
        self._tenants = {
            _stored(key.key.get_secret_value()): Identity(tenant=key.tenant, key=key.name) for key in settings.keys
        }
        self._fingerprints = {self._fingerprint(digest): caller for digest, caller in self._tenants.items()}
        admin = settings.admin_key
        self._admin = None if admin is None else _stored(admin.get_secret_value())

    def admit(
        self, headers: Mapping[bytes, bytes], method: str = "GET", sent: Sequence[tuple[bytes, bytes]] = ()
    ) -> Identity:
        """Return the caller of a request. Raises `Unauthenticated`, `Forbidden` or `InvalidRequest`.

        `headers` holds the first value of each header by lower-case name; `sent` holds all headers. A repeated
        credential is refused, because the next server might read the other one.
        """
        if len(sent) > len(headers):
            _check_single([name for name, _ in sent])
        self.check_host(headers.get(b"host"))
        if self._mode == "none" and method not in _SAFE_METHODS:
            self._check_origin(headers)
        if self._mode == "none" and self._admin is None:
            return _EVERYBODY
        token = _credential(headers)
        if token and self._admin is not None and hmac.compare_digest(_digest(token), self._admin):
            return Identity(tenant="", admin=True)
        if self._mode == "none":
            return _EVERYBODY
        if not token:
            raise Unauthenticated("No API key. Send one as 'Authorization: Bearer KEY'.")
        if self._mode == "passthrough":
            return Identity(tenant=_OWN_KEY + hmac.new(self._secret, token.encode(), hashlib.sha256).hexdigest()[:32])
        caller = self._tenants.get(_digest(token))
        if caller is None:
            raise Unauthenticated("This API key is not known here. Use one that the proxy's operator issued.")
        return caller

    def fingerprint(self, identity: Identity, token: str) -> str:
        """Return a fingerprint for cookies, from which `recognise` finds the caller. It does not reveal the key."""
        if self._mode == "passthrough" and not identity.admin:
            return identity.tenant
        return self._fingerprint(_digest(token))

    def recognise(self, fingerprint: str) -> Identity | None:
        """Return the caller with this fingerprint, or None if its key is no longer accepted."""
        if self._mode == "passthrough" and fingerprint.startswith(_OWN_KEY):
            return Identity(tenant=fingerprint)
        if self._admin is not None and hmac.compare_digest(fingerprint, self._fingerprint(self._admin)):
            return Identity(tenant="", admin=True)
        return self._fingerprints.get(fingerprint) if self._mode == "keys" else None

    def _fingerprint(self, digest: bytes) -> str:
        return hmac.new(self._secret, b"fingerprint:" + digest, hashlib.sha256).hexdigest()

    def check_host(self, host: bytes | None) -> None:
        """Raise `Forbidden` if authentication is off and `Host` is not a name of this machine."""
        if self._mode == "none" and not _is_local(host or b""):
            raise Forbidden(
                "Without authentication this proxy answers only as localhost, 127.0.0.1 or [::1]. "
                "Call it by one of these names, or set auth.mode.",
                code="host_not_allowed",
            )

    def _check_origin(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `Forbidden` if a web page of another origin sent the request: its reader did not ask for it."""
        origin = headers.get(b"origin")
        if origin is None and headers.get(b"sec-fetch-site") != b"cross-site":
            return
        host = headers.get(b"host", b"").lower()  # the proxy's own name, as the client knows it
        if origin is not None and (
            origin in self._origins or origin.lower() in {b"http://" + host, b"https://" + host}
        ):
            return
        raise Forbidden(
            "Without authentication this proxy takes nothing from web pages of other origins. "
            "List the origin under server.allowed_origins, or set auth.mode.",
            code="origin_not_allowed",
        )

    def check_content_type(self, headers: Mapping[bytes, bytes]) -> None:
        """Raise `InvalidRequest` if authentication is off and a body is not JSON.

        Web pages may send other types to any server without a preflight request.
        """
        kind = headers.get(b"content-type")
        if kind is None or kind == _JSON or self._mode != "none":
            return
        if b"json" not in kind.partition(b";")[0].lower():
            raise InvalidRequest(
                "The Content-Type is not JSON. Send application/json.", param="Content-Type", code="content_type"
            )


def _check_single(names: Sequence[bytes]) -> None:
    """Raise `InvalidRequest` if `Host` or a header with a credential is repeated."""
    for name in _SINGLE:
        if names.count(name) > 1:
            shown = name.decode().title()
            raise InvalidRequest(f"The header {shown} stands there more than once. Send one.", param=shown)


@lru_cache(maxsize=64)
def _is_local(host: bytes) -> bool:
    """Return whether a `Host`, with or without a port, is a name of this machine."""
    text = host.decode("latin-1")
    name, _, port = text.rpartition(":")
    return (name if name and port.isdigit() else text).lower() in _LOCAL_NAMES


def _credential(headers: Mapping[bytes, bytes]) -> str:
    """Return the key of a request, or an empty text. Raises `Unauthenticated` if two keys differ."""
    found = {token for name in _KEYS if (value := headers.get(name)) and (token := _token(value))}
    if len(found) > 1:
        raise Unauthenticated("The headers Authorization, x-api-key and api-key hold different keys. Send one of them.")
    return next(iter(found), "")


def _token(authorization: bytes) -> str:
    """Return the bearer token. A header without a scheme is the token itself."""
    scheme, _, token = authorization.decode("latin-1").strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else authorization.decode("latin-1").strip()


def _stored(key: str) -> bytes:
    """Return the digest of a configured key. The configuration may hold the key itself or its hash."""
    return bytes.fromhex(key.removeprefix(KEY_HASH)) if key.startswith(KEY_HASH) else _digest(key)


def _digest(key: str) -> bytes:
    """Return the SHA-256 of a key. Looking it up leaks nothing about the key by its timing."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()

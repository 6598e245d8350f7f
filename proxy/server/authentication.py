"""Authentication: who the caller is, a tenant or the administrator.

Without authentication every caller is the same tenant, and `Host` must be a name of this machine: otherwise a
web page could read histories by DNS rebinding.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from msgspec import Struct

from proxy.config import AuthSettings
from proxy.errors import Forbidden, Unauthenticated
from proxy.pipeline import DEFAULT_TENANT

_LOCAL_NAMES: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


class Identity(Struct, frozen=True, kw_only=True):
    """Who sent a request."""

    tenant: str  # the owner of the sessions that the caller sees; empty for the administrator, who sees all
    admin: bool = False


_EVERYBODY: Final = Identity(tenant=DEFAULT_TENANT)


class Authenticator:
    """Identifies callers. One for the life of the process."""

    def __init__(self, settings: AuthSettings, secret: bytes) -> None:
        """Read the keys; `secret` turns a client's own key into the name of its tenant."""
        self._mode = settings.mode
        self._secret = secret
        self._tenants = {_digest(key.key.get_secret_value()): key.tenant for key in settings.keys}
        admin = settings.admin_key
        self._admin = None if admin is None else _digest(admin.get_secret_value())

    def admit(self, headers: Mapping[bytes, bytes]) -> Identity:
        """Return the caller; `headers` holds the first value of each header by its lower-case name."""
        self.check_host(headers.get(b"host"))
        if self._mode == "none" and self._admin is None:
            return _EVERYBODY
        token = _token(headers.get(b"authorization", b""))
        if token and self._admin is not None and hmac.compare_digest(_digest(token), self._admin):
            return Identity(tenant="", admin=True)
        if self._mode == "none":
            return _EVERYBODY
        if not token:
            raise Unauthenticated("No API key. Send one as 'Authorization: Bearer KEY'.")
        if self._mode == "passthrough":
            return Identity(tenant="t_" + hmac.new(self._secret, token.encode(), hashlib.sha256).hexdigest()[:32])
        tenant = self._tenants.get(_digest(token))
        if tenant is None:
            raise Unauthenticated("This API key is not known here. Use one that the proxy's operator issued.")
        return Identity(tenant=tenant)

    def check_host(self, host: bytes | None) -> None:
        """Raise `Forbidden` if there is no authentication and `Host` is not a name of this machine."""
        if self._mode == "none" and not _is_local(host or b""):
            raise Forbidden(
                "Without authentication this proxy answers only as localhost, 127.0.0.1 or [::1]. "
                "Call it by one of these names, or set auth.mode.",
                code="host_not_allowed",
            )


@lru_cache(maxsize=64)
def _is_local(host: bytes) -> bool:
    """Return whether a `Host`, with a port or without, is a name of this machine."""
    text = host.decode("latin-1")
    name, _, port = text.rpartition(":")
    return (name if name and port.isdigit() else text).lower() in _LOCAL_NAMES


def _token(authorization: bytes) -> str:
    """Return the bearer token; a header without a scheme is the token itself."""
    scheme, _, token = authorization.decode("latin-1").strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else authorization.decode("latin-1").strip()


def _digest(key: str) -> bytes:
    """Return a digest of a key: looking it up takes equally long for every wrong key."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()

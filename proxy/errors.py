"""Every error that this project raises on purpose, each knowing its HTTP status and OpenAI shape.

    PalimpsestError
    ├── RequestError            the client's request cannot be served as it is (4xx)
    │   ├── InvalidRequest      400  malformed, or of the wrong type
    │   ├── Unauthenticated     401  no credential, or one that nobody holds
    │   ├── Forbidden           403  a known caller may not do this
    │   ├── NotFound            404  no such session, exchange, reference or route
    │   ├── Conflict            409  it exists already
    │   └── TooLarge            413  over a configured limit
    ├── UpstreamError           the provider gave no answer
    │   ├── UpstreamUnreachable 502  no connection, or it broke before an answer
    │   ├── UpstreamBusy        503  every connection of the pool is taken
    │   └── UpstreamTimeout     504  no answer in time
    ├── InternalError           500  a mistake of this project's own
    ├── StoreUnavailable        503  the database cannot be read or written
    └── ConfigurationError      stops the start (exit code 2)

One handler turns a `PalimpsestError` into a response; nothing else formats errors.
"""

from __future__ import annotations

from typing import Any, ClassVar


class PalimpsestError(Exception):
    """The base: a message that says what to do, and where it belongs in OpenAI's error object."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape: `{"error": {message, type, param, code}}`."""
        return {
            "error": {
                "message": self.message,
                "type": self.type,
                "param": self.param,
                "code": self.code,
            }
        }


class RequestError(PalimpsestError):
    """The client's request cannot be served as it is."""

    status = 400
    type = "invalid_request_error"


class InvalidRequest(RequestError):
    """The request is malformed, or a value in it has the wrong type."""


class Unauthenticated(RequestError):
    """No credential came with the request, or one that nobody holds."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(RequestError):
    """The caller is known, or needs no name, but may not do this."""

    status = 403
    type = "permission_error"


class NotFound(RequestError):
    """There is no such thing, or it belongs to another tenant, which looks the same."""

    status = 404
    default_code = "not_found"


class Conflict(RequestError):
    """What should be made exists already."""

    status = 409
    default_code = "conflict"


class TooLarge(RequestError):
    """The request is over a configured limit."""

    status = 413
    default_code = "request_too_large"


class UpstreamError(PalimpsestError):
    """The provider gave no answer that could be relayed."""

    status = 502
    type = "upstream_error"


class UpstreamUnreachable(UpstreamError):
    """No connection could be made, or it broke before there was an answer."""

    default_code = "upstream_unreachable"


class UpstreamBusy(UpstreamError):
    """Every connection of the pool is in use."""

    status = 503
    default_code = "upstream_busy"


class UpstreamTimeout(UpstreamError):
    """The provider did not answer in time."""

    status = 504
    default_code = "upstream_timeout"


class InternalError(PalimpsestError):
    """A mistake of this project's own; the log says more."""

    default_code = "internal_error"


class StoreUnavailable(PalimpsestError):
    """The database cannot be read or written; nothing was acknowledged."""

    status = 503
    type = "server_error"
    default_code = "store_unavailable"


class ConfigurationError(PalimpsestError):
    """The configuration is wrong: the message names file, line, path and what was allowed."""

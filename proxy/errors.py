"""Every error of the proxy, each with its HTTP status and its body in OpenAI's shape.

    PalimpsestError
      + RequestError               the client must change its request
        · InvalidRequest      400  it is malformed, or a value has the wrong type
        · Unauthenticated     401  the credential is missing or unknown
        · Forbidden           403  the caller lacks permission
        · NotFound            404  there is no such session, exchange, reference or route
        · Conflict            409  the session exists already
        · TimedOut            408  the request did not arrive in time
        · TooLarge            413  the request exceeds a configured limit
        · LineTooLong         414  the request line exceeds the limit
        · UpgradeRefused      426  the request asks for another protocol
        · OverBudget          429  the tenant or the key has used up its budget
        · HeadersTooLarge     431  the headers or the trailers exceed a limit
      + UpstreamError         502  the provider did not answer
        · UpstreamUnreachable 502  no connection, or it broke before the answer was complete
        · UpstreamBusy        503  all connections are in use
        · UpstreamTimeout     504  no connection or no answer in time
      · InternalError         500  a bug in this project
      · Overloaded            503  no memory or no connection is left for the request
      · Stopping              503  the process is shutting down
      · StoreUnavailable      503  the database cannot be read or written
      · ConfigurationError         stops the start (exit code 2)
      · ClientLeft                 the client closed its connection; nothing can be sent
      · NoAnswer                   the summarizer gave no usable answer; no summary is made

A message says what is wrong and what to do. `PalimpsestError.body` is the only place that formats errors.
"""

from __future__ import annotations

from math import ceil
from typing import Any, ClassVar


class PalimpsestError(Exception):
    """The base class. The message is shown to the client."""

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None
    retry_after: int | None = None  # seconds after which the client may try again

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code if code is not None else self.default_code

    def body(self) -> dict[str, Any]:
        """Return the error in OpenAI's shape: `{"error": {message, type, param, code}}`."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


class RequestError(PalimpsestError):
    """The request cannot be served as it is."""

    status = 400
    type = "invalid_request_error"


class InvalidRequest(RequestError):
    """The request is malformed, or a value in it has the wrong type."""


class Unauthenticated(RequestError):
    """The credential is missing or unknown."""

    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(RequestError):
    """The caller lacks permission."""

    status = 403
    type = "permission_error"


class NotFound(RequestError):
    """The resource does not exist, or belongs to another tenant; the answer is the same."""

    status = 404
    default_code = "not_found"


class Conflict(RequestError):
    """The resource exists already."""

    status = 409
    default_code = "conflict"


class TooLarge(RequestError):
    """The request exceeds a configured limit."""

    status = 413
    default_code = "request_too_large"


class TimedOut(RequestError):
    """The request did not arrive in time."""

    status = 408
    default_code = "request_timeout"


class LineTooLong(RequestError):
    """The request line exceeds the limit."""

    status = 414
    default_code = "uri_too_long"


class UpgradeRefused(RequestError):
    """The request asks for a protocol that is not served."""

    status = 426
    default_code = "upgrade_refused"


class HeadersTooLarge(RequestError):
    """The headers or the trailers exceed a limit."""

    status = 431
    default_code = "headers_too_large"


class OverBudget(RequestError):
    """The tenant or the key has used up its budget. The message says how much was used."""

    status = 429
    type = "rate_limit_error"
    default_code = "budget_exceeded"

    def __init__(self, message: str, *, wait: float = 1) -> None:
        """`wait`: seconds until the budget has room again."""
        super().__init__(message)
        self.retry_after = max(1, ceil(wait))


class UpstreamError(PalimpsestError):
    """The provider did not answer, or its answer was incomplete."""

    status = 502


class UpstreamUnreachable(UpstreamError):
    """No connection could be made, or it broke before the answer was complete."""

    default_code = "upstream_unreachable"


class UpstreamBusy(UpstreamError):
    """All connections to the provider are in use."""

    status = 503
    default_code = "upstream_busy"


class UpstreamTimeout(UpstreamError):
    """The provider could not be reached or did not answer in time."""

    status = 504
    default_code = "upstream_timeout"


class InternalError(PalimpsestError):
    """A bug in this project. The log has the details."""

    default_code = "internal_error"


class Overloaded(PalimpsestError):
    """No memory or no connection is left for the request."""

    status = 503
    default_code = "overloaded"
    retry_after = 1


class Stopping(PalimpsestError):
    """The process is shutting down before the answer was complete."""

    status = 503
    default_code = "stopping"
    retry_after = 1


class StoreUnavailable(PalimpsestError):
    """The database cannot be read or written. Nothing was acknowledged."""

    status = 503
    type = "server_error"
    default_code = "store_unavailable"
    retry_after = 1


class ConfigurationError(PalimpsestError):
    """The configuration is invalid. The message names the file, the line, the setting and the allowed values."""


class ClientLeft(PalimpsestError):
    """The client closed its connection before its request was complete. No answer can be sent."""


class NoAnswer(PalimpsestError):
    """The summarizer gave no usable answer. The message quotes nothing of the conversation."""

    def __init__(
        self, message: str, *, wait: float | None = None, too_long: bool = False, window: int | None = None
    ) -> None:
        super().__init__(message)
        self.wait = wait  # seconds from the `Retry-After` of the summarizer's answer
        self.too_long = too_long  # whether the request was too long for the model
        self.window = window  # the model's context window in tokens, if the error names it

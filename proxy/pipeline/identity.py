"""Which session a request names: in a header, else in a field of the body."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from unicodedata import category

from proxy.config import SessionSettings
from proxy.dialects import headers
from proxy.dialects.chat.request import ChatRequest, read_field
from proxy.errors import InvalidRequest

MAX_ID_BYTES: Final = 512
"""Longest session id, in bytes of UTF-8."""

_REFUSED: Final = frozenset({"Cc", "Cs"})


def session_of(sent: Mapping[bytes, bytes], request: ChatRequest, settings: SessionSettings) -> str | None:
    """Return the session's id; None where the request names none. `sent` are the headers' `first_values`.

    Raises:
        InvalidRequest: the id is too long or holds control characters, or there is none and
            `sessions.missing` is `reject`.
    """
    for name in settings.headers:
        value = header_of(sent, name)
        if value:
            return valid_id(value, name)
    for path in settings.body_fields:
        value = read_field(request, path)
        if value:
            return valid_id(value, path)
    if settings.missing == "reject":
        name = settings.headers[0] if settings.headers else "X-Session-ID"
        raise InvalidRequest(
            f"No session id. Send one in the header {name}.", param=name, code="session_missing"
        )
    return None


def header_of(sent: Mapping[bytes, bytes], name: str) -> str | None:
    """Return a header of `first_values`, percent-decoded; None where it was not sent, or is empty.

    Raises:
        InvalidRequest: it is no UTF-8 or holds control characters.
    """
    raw = sent.get(name.lower().encode())
    return headers.decode_value(raw, name) if raw else None


def valid_id(value: str, param: str) -> str:
    """Return the id as it is.

    Raises:
        InvalidRequest: it is too long, or holds control characters.
    """
    if len(value) <= MAX_ID_BYTES and value.isascii() and value.isprintable():
        return value
    if len(value.encode("utf-8", "surrogatepass")) > MAX_ID_BYTES:
        raise InvalidRequest(
            f"The session id is longer than {MAX_ID_BYTES} bytes. Send a shorter one.",
            param=param,
            code="invalid_id",
        )
    if any(category(character) in _REFUSED for character in value):
        raise InvalidRequest(
            "The session id holds control characters or lone surrogates. Send one without.",
            param=param,
            code="invalid_id",
        )
    return value

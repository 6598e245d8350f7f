"""Headers: our own names, which headers may pass in which direction, what may be a key, how a value is encoded."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final
from unicodedata import category
from urllib.parse import unquote_to_bytes

from proxy.errors import InvalidRequest

# What a request may carry; the response says session and policy too.
SESSION_ID: Final = "x-session-id"
SESSION_MODE: Final = "x-session-mode"
CONTEXT_POLICY: Final = "x-context-policy"
AGENT_NAME: Final = "x-agent-name"

# What a response carries besides: how the request relates to its session; sizes if nothing were trimmed, and as sent;
# edits that changed something.
EXCHANGE_ID: Final = "x-exchange-id"
CONTEXT_KIND: Final = "x-context-kind"
CONTEXT_TOKENS_BEFORE: Final = "x-context-tokens-before"
CONTEXT_TOKENS_SENT: Final = "x-context-tokens-sent"
CONTEXT_MESSAGES_BEFORE: Final = "x-context-messages-before"
CONTEXT_MESSAGES_SENT: Final = "x-context-messages-sent"
CONTEXT_EDITS: Final = "x-context-edits"
CONTEXT_WARNING: Final = "x-context-warning"

_OWN: Final = frozenset({AGENT_NAME.encode(), EXCHANGE_ID.encode()})
_OWN_PREFIXES: Final = (b"x-session-", b"x-context-")

_HOP_BY_HOP: Final = frozenset(
    b"connection keep-alive proxy-authenticate proxy-authorization proxy-connection te trailer "
    b"transfer-encoding upgrade".split()
)
"""RFC 9110, section 7.6.1: these concern one connection, not the message."""

_NOT_UPSTREAM: Final = _HOP_BY_HOP | _OWN | {b"host", b"content-length", b"expect"}
_NOT_TO_CLIENT: Final = _HOP_BY_HOP | _OWN | {b"content-length"}

_UNSAFE: Final = re.compile(rb"[^!-$&-~]")  # what is no visible ASCII, and the percent sign
_LITERAL: Final = re.compile(rb"[!-$&-~ ]*")  # what stands for itself
_ESCAPE: Final = re.compile(rb"%([0-9A-Fa-f]{2})")
_CREDENTIALS: Final = frozenset(
    {b"authorization", b"api-key", b"x-api-key", b"x-goog-api-key", b"x-auth-token", b"cookie"}
)
"""Where providers of compatible APIs look for a key."""
_KEY_PARAMETER: Final = re.compile(rb"key|token|secret|^(code|sig)$", re.IGNORECASE)
"""Names of query parameters in which they do."""
_STEERING: Final = frozenset(
    b"openai-organization openai-project x-http-method x-http-method-override x-method-override "
    b"x-original-url x-rewrite-url".split()
)
"""What says on whose account, or by which path, a request is served: not a client's to say of a shared key."""


def to_upstream(
    headers: Iterable[tuple[bytes, bytes]], *, drop_credentials: bool = False, extra_drop: Collection[bytes] = ()
) -> list[tuple[bytes, bytes]]:
    """Return the headers of a client's request that go upstream: order, repetitions and bytes as they are.

    Not among them: those of one connection, ours, `Host`, `Content-Length`, `Expect`, those in `extra_drop`
    (lower case), and with `drop_credentials` whatever may be a key of the client's or
    steers how a key is used.
    """
    return _passing(headers, _NOT_UPSTREAM.union(extra_drop, _CREDENTIALS | _STEERING if drop_credentials else ()))


def credentials(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the values of a client's headers that may be a key."""
    return [value for name, value in headers if name.lower() in _CREDENTIALS]


def query_credentials(query: bytes) -> list[bytes]:
    """Return the values of a query string that may be a key, each as it was sent and as it is read."""
    found: list[bytes] = []
    for parameter in query.split(b"&"):
        name, _, value = parameter.partition(b"=")
        if _KEY_PARAMETER.search(unquote_to_bytes(name)):
            found += [value, unquote_to_bytes(value)]
    return found


def to_client(
    headers: Iterable[tuple[bytes, bytes]], *, extra_drop: Collection[bytes] = ()
) -> list[tuple[bytes, bytes]]:
    """Return the headers of upstream's response that go to the client: order and bytes as they are.

    Not among them: those of one connection, ours, `Content-Length`, and those in `extra_drop` (lower case).
    """
    return _passing(headers, _NOT_TO_CLIENT.union(extra_drop))


def first_values(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the first value of each header by its lower-case name, without spaces around it."""
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        values.setdefault(name.lower(), value.strip(b" \t"))
    return values


def encode_value(text: str) -> bytes:
    """Return `text` as a header value: UTF-8, percent-encoded where it is no visible ASCII or `%`.

    An id of plain letters, digits and signs stays as it is. A lone surrogate is no text and becomes U+FFFD.
    """
    if text.isascii():
        raw = text.encode()
    else:
        raw = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
    return _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], raw)


def decode_value(raw: bytes, name: str) -> str:
    """Return the text of the value of the header `name`, percent-decoded; the inverse of `encode_value`.

    A percent sign without two hexadecimal digits stands for itself; UTF-8 may stand unencoded. Other bytes,
    and control characters, raise `InvalidRequest`.
    """
    if _LITERAL.fullmatch(raw):
        return raw.decode()
    try:
        text = _ESCAPE.sub(lambda match: bytes.fromhex(match[1].decode()), raw).decode()
    except UnicodeDecodeError as why:
        raise InvalidRequest(
            f"The header {name} is not UTF-8. Percent-encode the UTF-8 bytes of what is not ASCII.",
            param=name,
            code="invalid_header",
        ) from why
    if any(category(character) == "Cc" for character in text):
        raise InvalidRequest(
            f"The header {name} holds control characters. Send it without.", param=name, code="invalid_header"
        )
    return text


def _passing(headers: Iterable[tuple[bytes, bytes]], dropped: frozenset[bytes]) -> list[tuple[bytes, bytes]]:
    """Return the headers that are not among `dropped`, nor ours, nor named in `Connection`."""
    passing: list[tuple[bytes, bytes]] = []
    named: set[bytes] = set()
    for pair in headers:
        lower = pair[0].lower()
        if lower == b"connection":
            named.update([token.strip().lower() for token in pair[1].split(b",")])
        elif lower not in dropped and not lower.startswith(_OWN_PREFIXES):
            passing.append(pair)
    return [pair for pair in passing if pair[0].lower() not in named] if named else passing

"""Headers: the proxy's own names, which headers pass in which direction, which may hold a key, and value encoding."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final
from unicodedata import category
from urllib.parse import unquote_to_bytes

from proxy.errors import InvalidRequest

# Request headers. The response also carries session and policy.
SESSION_ID: Final = "x-session-id"
SESSION_MODE: Final = "x-session-mode"
CONTEXT_POLICY: Final = "x-context-policy"
AGENT_NAME: Final = "x-agent-name"

# Response headers: how the request relates to its session, sizes before trimming and as sent, edits that changed
# something.
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
"""Hop-by-hop headers (RFC 9110, section 7.6.1): they concern one connection, not the message."""

_NOT_UPSTREAM: Final = _HOP_BY_HOP | _OWN | {b"host", b"content-length", b"expect"}
_NOT_TO_CLIENT: Final = _HOP_BY_HOP | _OWN | {b"content-length"}

_UNSAFE: Final = re.compile(rb"[^!-$&-~]")  # everything but visible ASCII, and the percent sign
_LITERAL: Final = re.compile(rb"[!-$&-~ ]*")  # bytes that need no decoding
_ESCAPE: Final = re.compile(rb"%([0-9A-Fa-f]{2})")
_CREDENTIALS: Final = frozenset(
    {b"authorization", b"api-key", b"x-api-key", b"x-goog-api-key", b"x-auth-token", b"cookie"}
)
"""Headers in which providers of compatible APIs look for a key."""
_KEY_PARAMETER: Final = re.compile(rb"key|token|secret|^(code|sig)$", re.IGNORECASE)
"""Query parameters in which they look for a key."""
_STEERING: Final = frozenset(
    b"openai-organization openai-project x-http-method x-http-method-override x-method-override "
    b"x-original-url x-rewrite-url".split()
)
"""Headers that select the account or the path of a request. A client must not set them for a shared key."""


def to_upstream(
    headers: Iterable[tuple[bytes, bytes]], *, drop_credentials: bool = False, extra_drop: Collection[bytes] = ()
) -> list[tuple[bytes, bytes]]:
    """Return the headers of a client's request that go upstream, with order, repetitions and bytes unchanged.

    Dropped are hop-by-hop headers, the proxy's own, `Host`, `Content-Length`, `Expect`, and those in `extra_drop`
    (lower case). `drop_credentials` also drops headers that may hold a key or that select how a key is used.
    """
    return _passing(headers, _NOT_UPSTREAM.union(extra_drop, _CREDENTIALS | _STEERING if drop_credentials else ()))


def credentials(headers: Iterable[tuple[bytes, bytes]]) -> list[bytes]:
    """Return the values of those headers of a client that may hold a key."""
    return [value for name, value in headers if name.lower() in _CREDENTIALS]


def query_credentials(query: bytes) -> list[bytes]:
    """Return the values of a query string that may be a key, each as sent and percent-decoded."""
    found: list[bytes] = []
    for parameter in query.split(b"&"):
        name, _, value = parameter.partition(b"=")
        if _KEY_PARAMETER.search(unquote_to_bytes(name)):
            found += [value, unquote_to_bytes(value)]
    return found


def to_client(
    headers: Iterable[tuple[bytes, bytes]], *, extra_drop: Collection[bytes] = ()
) -> list[tuple[bytes, bytes]]:
    """Return the headers of the upstream's response that go to the client, with order and bytes unchanged.

    Dropped are hop-by-hop headers, the proxy's own, `Content-Length`, and those in `extra_drop` (lower case).
    """
    return _passing(headers, _NOT_TO_CLIENT.union(extra_drop))


def first_values(headers: Iterable[tuple[bytes, bytes]]) -> dict[bytes, bytes]:
    """Return the first value of each header by its lower-case name, stripped."""
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        values.setdefault(name.lower(), value.strip(b" \t"))
    return values


def encode_value(text: str) -> bytes:
    """Return `text` as a header value: UTF-8, with `%` and everything but visible ASCII percent-encoded.

    An id of ASCII letters, digits and signs stays unchanged. A lone surrogate becomes U+FFFD.
    """
    if text.isascii():
        raw = text.encode()
    else:
        raw = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace").encode()
    return _UNSAFE.sub(lambda match: b"%%%02X" % match[0][0], raw)


def decode_value(raw: bytes, name: str) -> str:
    """Return the value of the header `name`, percent-decoded; the inverse of `encode_value`.

    A percent sign without two hexadecimal digits is literal, and UTF-8 may be unencoded. Raises `InvalidRequest` for
    other bytes and for control characters.
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
    """Return the headers that are not in `dropped`, not the proxy's own, and not named in `Connection`."""
    passing: list[tuple[bytes, bytes]] = []
    named: set[bytes] = set()
    for pair in headers:
        lower = pair[0].lower()
        if lower == b"connection":
            named.update([token.strip().lower() for token in pair[1].split(b",")])
        elif lower not in dropped and not lower.startswith(_OWN_PREFIXES):
            passing.append(pair)
    return [pair for pair in passing if pair[0].lower() not in named] if named else passing

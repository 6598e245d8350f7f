"""Kinds of values that several sections share: keys, addresses, header names, paths into a body.

Messages never repeat a value: a key may stand in the wrong place. Nothing here knows a section.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated, Final, TypeAlias
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr, StringConstraints
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A `token` of RFC 9110, section 5.6.2."""
_VISIBLE: Final = re.compile(r"[!-~]+")
_FIELD_PATH: Final = re.compile(r"[^.\s]+(\.[^.\s]+)*")
_RESOURCE: Final = re.compile(r"[A-Za-z0-9_-]+")
_NUMBER: Final = re.compile(r"[0-9]{1,9}")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_STORES: Final = (
    "the store is sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE "
    "(or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE)"
)

POSTGRES_DRIVERS: Final = {
    "postgres": "asyncpg",
    "postgresql": "asyncpg",
    "postgresql+asyncpg": "asyncpg",
    "postgresql+psycopg": "psycopg",
    "postgresql+psycopg_async": "psycopg",
}
"""The driver that is used, by how the URL of a PostgreSQL store begins."""
STATEMENT_CACHE: Final = "statement_cache_size"
"""The option of a PostgreSQL store's URL that is ours: a number, 0 behind a pooler."""


def is_loopback(host: str) -> bool:
    """Tell whether only programs on this machine can reach a server that listens on `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ip_address(host.removeprefix("[").removesuffix("]")).is_loopback
    except ValueError:
        return False


def _key(secret: SecretStr) -> SecretStr:
    if not _VISIBLE.fullmatch(secret.get_secret_value()):
        raise ValueError("a key is one or more visible ASCII characters, without spaces or line ends")
    return secret


def _base_url(url: str) -> str:
    """Return the address without a slash at its end, so that `/chat/completions` can follow it."""
    if not _VISIBLE.fullmatch(url):
        raise ValueError("an address has only visible ASCII characters")
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname:
        raise ValueError("an address begins with http:// or https:// and names a host")
    if parts.username is not None or parts.password is not None:
        raise ValueError("an address holds no user name or password: put the key under api_key")
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise ValueError("an address holds no query and no fragment")
    if parts.port == 0:
        raise ValueError("port 0 cannot be called")
    path = url.rstrip("/")
    if path.endswith("/chat/completions"):
        raise ValueError("leave out /chat/completions: the address is what stands before it")
    return path


def store_url(url: str) -> str:
    """Return the URL of a store if it is one: this rule is the settings' and the store's own.

    Raises:
        ValueError: it is none; the message says what can be, and never shows the URL: it may hold a password.
    """
    if _CONTROL.search(url):
        raise ValueError("a database URL has no control characters")
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ValueError(f"this is no database URL; {_STORES}") from None
    if parsed.get_backend_name() == "sqlite":
        if parsed.query:
            raise ValueError("a SQLite file takes no options: leave out the question mark and what follows")
        if parsed.host or not parsed.database or parsed.database.startswith((":memory:", "file:")):
            raise ValueError(
                "a SQLite file is named after three slashes (four for an absolute path): "
                "sqlite:///palimpsest.db; a database in memory cannot be shared by reader and writer"
            )
    elif parsed.drivername not in POSTGRES_DRIVERS:
        raise ValueError(f"this database or driver is not supported; {_STORES}")
    else:
        size = parsed.query.get(STATEMENT_CACHE, "0")
        if not (isinstance(size, str) and _NUMBER.fullmatch(size)):
            raise ValueError(f"{STATEMENT_CACHE} is a number; 0 switches prepared statements off")
    return url


def _header_name(name: str) -> str:
    if not _HEADER_NAME.fullmatch(name):
        raise ValueError("this cannot be the name of an HTTP header")
    if name.lower() in {"authorization", "proxy-authorization", "cookie"}:
        raise ValueError("this header holds a credential; session ids are stored and shown")
    return name


def _field_path(path: str) -> str:
    if not _FIELD_PATH.fullmatch(path):
        raise ValueError(
            "a field of the request's body is named with dots between levels: metadata.session_id"
        )
    if path.partition(".")[0] in {"messages", "model", "tools", "stream", "stream_options"}:
        raise ValueError("this field has a meaning of its own and cannot hold a session id")
    return path


def _resource(name: str) -> str:
    if not _RESOURCE.fullmatch(name):
        raise ValueError("this is what follows /v1/, up to the next slash: models")
    return name


def _name(name: str) -> str:
    if not name.strip() or name != name.strip() or _CONTROL.search(name):
        raise ValueError("a name has at least one character, no control characters, no spaces at its ends")
    return name


def _policy_name(name: str) -> str:
    if name.lower() == "off":
        raise ValueError("'off' is reserved: as X-Context-Policy it means that nothing is trimmed")
    if name == "built-in":
        raise ValueError("'built-in' is reserved: it is the policy that serves what no other one matches")
    return _name(name)


Key: TypeAlias = Annotated[SecretStr, AfterValidator(_key)]
"""A credential, fit for an HTTP header; it is never printed."""
BaseUrl: TypeAlias = Annotated[str, AfterValidator(_base_url)]
"""The address of a provider's API: http or https, no slash at its end."""
StoreUrl: TypeAlias = Annotated[str, AfterValidator(store_url)]
"""The address of a database, as SQLAlchemy writes it. It may hold a password."""
HeaderName: TypeAlias = Annotated[str, AfterValidator(_header_name)]
"""Name of an HTTP header that holds no credential."""
FieldPath: TypeAlias = Annotated[str, AfterValidator(_field_path)]
"""A field of the request's body, with dots between levels."""
Resource: TypeAlias = Annotated[str, AfterValidator(_resource)]
"""What follows `/v1/` in a path, up to the next slash."""
Name: TypeAlias = Annotated[str, AfterValidator(_name)]
"""A name that can be shown and percent-encoded."""
PolicyName: TypeAlias = Annotated[str, AfterValidator(_policy_name)]
"""The name of a policy: what `X-Context-Policy` may say, never `off` nor that of the built-in one."""
Pattern: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
"""A name with wildcards: `*`, `?`, `[a-z]`."""
Seconds: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
"""A duration in seconds."""

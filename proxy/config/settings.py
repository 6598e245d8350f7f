"""The settings: one frozen pydantic model for each section of the configuration file.

The docstring under a field is its description in the JSON Schema, so it is written for operators. The model of a
section checks rules within the section; `Settings` checks rules across sections. Error messages never repeat a value,
because it may be a misplaced key.
"""

from __future__ import annotations

import re
import ssl
from collections.abc import Iterator, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Final, Literal, TypeAlias, cast
from urllib.parse import SplitResult, urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict
from sqlalchemy import URL, make_url
from sqlalchemy.exc import ArgumentError

from proxy.config import policies as inheritance
from proxy.trimming import Natural, Policy, Positive, contradiction
from proxy.trimming.settings import NO_TRUTH_VALUE, checked

# ------------------------------------------------------------------------------ kinds of values

_HEADER_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")
"""A `token` of RFC 9110, section 5.6.2."""
_VISIBLE: Final = re.compile(r"[!-~]+")
_ORIGIN: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s/?#]+")
_FIELD_PATH: Final = re.compile(r"[^.\s]+(\.[^.\s]+)*")
_RESOURCE: Final = re.compile(r"[A-Za-z0-9_-]+")
_NUMBER: Final = re.compile(r"[0-9]{1,9}")
_CONTROL: Final = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")
_STORES: Final = (
    "write sqlite:///FILE or postgresql://USER:PASSWORD@HOST/DATABASE "
    "(or postgresql+psycopg://USER:PASSWORD@HOST/DATABASE)"
)

POSTGRES_DRIVERS: Final = {
    "postgres": "asyncpg",
    "postgresql": "asyncpg",
    "postgresql+asyncpg": "asyncpg",
    "postgresql+psycopg": "psycopg",
    "postgresql+psycopg_async": "psycopg",
}
"""The driver in use, by the scheme of a PostgreSQL store's URL."""
KEY_HASH: Final = "sha256:"
"""Prefix of a key that is given as its hash."""
_HASH: Final = re.compile(r"sha256:[0-9a-f]{64}")
SHORTEST_KEY: Final = 16  # least characters of a client's key
_LAST_PORT: Final = 65535
_HTTP_PORT: Final = 80
_EVERY_ADDRESS: Final = frozenset({"0.0.0.0", "::"})  # noqa: S104 - compared with, not listened on
STATEMENT_CACHE: Final = "statement_cache_size"
"""An option of the proxy itself in the URL of a PostgreSQL store: a number, 0 behind a connection pooler."""
CONNECT_TIMEOUT: Final = "connect_timeout"
SSL_MODES: Final = ("disable", "allow", "prefer", "require", "verify-ca", "verify-full")
LIBPQ_OPTIONS: Final = frozenset(
    {
        *("application_name", "options", "sslcert", "sslcrl", "sslkey", "sslnegotiation", "sslpassword", "sslrootcert"),
        *("ssl_min_protocol_version", "ssl_max_protocol_version"),
    }
)
"""Options that asyncpg accepts only in its own URL, not as arguments."""
_ASYNCPG_OPTIONS: Final = LIBPQ_OPTIONS | {
    *("host", "port", "user", "password", "passfile", "service", "servicefile", "target_session_attrs"),
    *("ssl", "sslmode", "krbsrvname", "gsslib", CONNECT_TIMEOUT, STATEMENT_CACHE, "prepared_statement_cache_size"),
}


def is_loopback(host: str) -> bool:
    """Tell whether a server that listens on `host` can be reached from this machine only."""
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


def _long_enough(secret: SecretStr) -> SecretStr:
    text = secret.get_secret_value()
    if text.startswith(KEY_HASH) and not _HASH.fullmatch(text):
        raise ValueError(f"after {KEY_HASH} come 64 hexadecimal digits, as `palimpsest key new` prints them")
    if len(text) < SHORTEST_KEY:
        raise ValueError(f"a key of clients has at least {SHORTEST_KEY} characters: shorter ones can be guessed")
    return secret


def _fits(pattern: re.Pattern[str], problem: str) -> AfterValidator:
    """Return a validator that checks a text against a pattern."""

    def check(text: str) -> str:
        if not pattern.fullmatch(text):
            raise ValueError(problem)
        return text

    return AfterValidator(check)


def _parts_of(url: str) -> SplitResult:
    if not _VISIBLE.fullmatch(url):
        raise ValueError("an address has only visible ASCII characters")
    parts = urlsplit(url)
    if parts.scheme not in {"http", "https"} or not parts.hostname or "\\" in parts.netloc:
        raise ValueError("an address begins with http:// or https:// and names a host")
    try:
        port = parts.port
    except ValueError:  # the original message shows the port's text, which may be a password
        port = 0
    if port == 0:
        raise ValueError(f"the port of an address is a number from 1 to {_LAST_PORT}")
    return parts


def _base_url(url: str) -> str:
    """Return the address without a trailing slash, so that `/chat/completions` can be appended."""
    parts = _parts_of(url)
    if parts.username is not None or parts.password is not None:
        raise ValueError("an address has no user name or password: put the key under api_key")
    if parts.query or parts.fragment or "?" in url or "#" in url:
        raise ValueError("an address has no query and no fragment")
    path = url.rstrip("/")
    if path.endswith("/chat/completions"):
        raise ValueError("leave out /chat/completions: the address is the part before it")
    return path


def _proxy_url(url: str) -> str:
    """Return the address of an HTTP proxy. It may contain a user name and a password."""
    parts = _parts_of(url)
    if parts.path not in {"", "/"} or parts.query or parts.fragment:
        raise ValueError("a proxy has no path: http://USER:PASSWORD@HOST:PORT")
    return url


def _certificates(path: Path) -> Path:
    """Return the path of a file with certificates. Raises `ValueError` if it cannot be read."""
    try:
        ssl.create_default_context(cafile=path)
    except OSError as why:
        raise ValueError(f"no certificates (PEM) can be read there: {why.strerror or why}") from None
    return path


def _check_ports(parsed: URL) -> None:
    """Raise `ValueError` if the hosts and ports in a PostgreSQL URL do not fit. A URL may name several of them."""
    try:
        _, found = parsed.set(drivername="postgresql+asyncpg").get_dialect()().create_connect_args(parsed)
    except (ArgumentError, ValueError):
        raise ValueError("the hosts and ports do not fit: host=a,b&port=5432,5433") from None
    given: Any = found.get("port", [])
    ports = cast("list[int]", given if isinstance(given, list) else [given])
    if not all(0 < port <= _LAST_PORT for port in ports):
        raise ValueError("the port of a database is a number from 1 to 65535")


def store_url(url: str) -> str:
    """Return the URL of a store if it is valid, else raise `ValueError`. The message never shows the URL."""
    if _CONTROL.search(url):
        raise ValueError("a database URL has no control characters")
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise ValueError(f"this is no database URL: {_STORES}") from None
    if parsed.get_backend_name() == "sqlite":
        if parsed.query:
            raise ValueError("a SQLite file takes no options: leave out the question mark and the rest")
        if parsed.host or not parsed.database or parsed.database.startswith((":memory:", "file:")):
            raise ValueError(
                "a SQLite file is named after three slashes (four for an absolute path): "
                "sqlite:///palimpsest.db. A database in memory is not supported"
            )
    elif parsed.drivername not in POSTGRES_DRIVERS:
        raise ValueError(f"this database or driver is not supported: {_STORES}")
    else:
        _check_ports(parsed)
        _check_options(parsed)
    return url


def _check_options(parsed: URL) -> None:
    """Raise `ValueError` if the options in the query of a PostgreSQL URL are invalid."""
    query = parsed.query
    size, seconds = query.get(STATEMENT_CACHE, "0"), query.get(CONNECT_TIMEOUT, "0")
    if not (isinstance(size, str) and _NUMBER.fullmatch(size)):
        raise ValueError(f"{STATEMENT_CACHE} is a number; 0 switches prepared statements off")
    if not (isinstance(seconds, str) and _NUMBER.fullmatch(seconds)):
        raise ValueError(f"{CONNECT_TIMEOUT} is a number of seconds")
    if query.get("sslmode", "prefer") not in SSL_MODES:
        raise ValueError(f"sslmode can be: {', '.join(SSL_MODES)}")
    if POSTGRES_DRIVERS[parsed.drivername] == "asyncpg" and not _ASYNCPG_OPTIONS.issuperset(query):
        raise ValueError(
            f"an option is unknown to asyncpg, which takes {', '.join(sorted(_ASYNCPG_OPTIONS))}. "
            "postgresql+psycopg://… takes all of libpq's"
        )


def _header_name(name: str) -> str:
    if name.lower() in {"authorization", "proxy-authorization", "cookie"}:
        raise ValueError("this header holds a credential, and session ids are stored and shown")
    return name


def _field_path(path: str) -> str:
    if path.partition(".")[0] in {"messages", "model", "tools", "stream", "stream_options"}:
        raise ValueError("this field has a meaning of its own and cannot hold a session id")
    return path


def checked_name(name: str) -> str:
    """Return the name of a tenant, a key or a policy. Raises `ValueError` if it is invalid."""
    if not name.strip() or name != name.strip() or _CONTROL.search(name):
        raise ValueError("a name has at least one character, no control characters, no spaces at its ends")
    return name


def _policy_name(name: str) -> str:
    if name.lower() == inheritance.OFF:
        raise ValueError("'off' is reserved: the header `X-Context-Policy: off` switches trimming off")
    if name == inheritance.BUILT_IN_NAME:
        raise ValueError("'built-in' is reserved for the built-in policy")
    return checked_name(name)


Key: TypeAlias = Annotated[SecretStr, AfterValidator(_key)]
"""A credential that fits into an HTTP header. It is never printed."""
BaseUrl: TypeAlias = Annotated[str, AfterValidator(_base_url)]
"""The address of a provider's API: http or https, without a trailing slash."""
ProxyUrl: TypeAlias = Annotated[str, AfterValidator(_proxy_url)]
"""The address of an HTTP proxy. It may hold a password."""
Certificates: TypeAlias = Annotated[Path, AfterValidator(_certificates)]
"""A file of certificates in PEM."""
StoreUrl: TypeAlias = Annotated[str, AfterValidator(store_url)]
"""The address of a database in SQLAlchemy's form. It may hold a password."""
HeaderName: TypeAlias = Annotated[
    str, _fits(_HEADER_NAME, "this is not a valid name of an HTTP header"), AfterValidator(_header_name)
]
FieldPath: TypeAlias = Annotated[
    str,
    _fits(_FIELD_PATH, "write the field of the body with dots between levels: metadata.session_id"),
    AfterValidator(_field_path),
]
Resource: TypeAlias = Annotated[
    str, _fits(_RESOURCE, "write the part of the path after /v1/, up to the next slash: models")
]
Name: TypeAlias = Annotated[str, AfterValidator(checked_name)]
PolicyName: TypeAlias = Annotated[str, AfterValidator(_policy_name)]
ClientKey: TypeAlias = Annotated[Key, AfterValidator(_long_enough)]
Origin: TypeAlias = Annotated[
    str,
    _fits(_ORIGIN, "an origin is a scheme, a host and perhaps a port: https://app.example"),
    AfterValidator(str.lower),
]
Pattern: TypeAlias = Annotated[str, StringConstraints(min_length=1)]
"""A name with wildcards: `*`, `?`, `[a-z]`."""
Text: TypeAlias = Annotated[str, Field(min_length=1)]
Amount: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False), NO_TRUTH_VALUE]
Seconds: TypeAlias = Amount
Count: TypeAlias = Annotated[int, Field(ge=1), NO_TRUTH_VALUE]
Price: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False), NO_TRUTH_VALUE]
"""Dollars per million tokens."""

ReasoningMode: TypeAlias = Literal["auto", "keep", "drop"]
TokenMethod: TypeAlias = Literal["tiktoken", "estimate"]
Matching: TypeAlias = Literal["blocks", "breakpoints"]
Breakpoints: TypeAlias = Literal["openai", "anthropic", "none"]


# ------------------------------------------------------------------------------------- sections


class _Section(BaseModel):
    """The base of all sections: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ServerSettings(_Section):
    """Where the proxy listens, and the limits for requests."""

    host: Text = "127.0.0.1"
    """Address to listen on. Any address other than loopback requires authentication."""
    port: Annotated[int, Field(ge=0, le=65535), NO_TRUTH_VALUE] = 8080
    """TCP port to listen on. 0 picks any free port."""
    workers: Annotated[int, Field(ge=1, le=256), NO_TRUTH_VALUE] = 1
    """Number of worker processes. They share the port and the store."""
    max_body_bytes: Count = 67_108_864
    """Maximum size of a request body, in bytes. A larger body is refused with 413."""
    max_messages: Count = 100_000
    """Maximum number of messages in a request, or of lines in an import. More are refused with 400."""
    max_json_values: Count = 2_000_000
    """Maximum number of JSON values in a request. More are refused with 400."""
    max_memory: Count | None = None
    """Memory for all request bodies in progress, in bytes, split evenly among the workers. Beyond it, requests get 503.
    Defaults to half of the memory of the machine or the container."""
    max_connections_per_address: Natural = 0
    """Maximum number of connections from one address to one worker. 0 means no limit."""
    drain_timeout: Natural = 30
    """Seconds that running responses may take after a stop signal. Then they end with an error."""
    allowed_origins: tuple[Origin, ...] = ()
    """Origins whose web pages may use the proxy when it has no authentication, such as `https://app.example`."""


class Route(_Section):
    """Another upstream for some models. The client's own key is never sent there."""

    models: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Model names, with wildcards, such as `deepseek-*`."""
    base_url: BaseUrl
    """Address of this provider's API."""
    api_key: Key | None = None
    """Key for this provider. If unset, requests carry no key: the client's key is never sent here."""


class UpstreamSettings(_Section):
    """The provider behind the proxy."""

    base_url: BaseUrl = "https://api.openai.com/v1"
    """Address of the provider's API. It replaces the client's `/v1`."""
    api_key: Key | None = None
    """The proxy's own key. If unset, the client's `Authorization` header is forwarded."""
    anthropic_base_url: BaseUrl = "https://api.anthropic.com/v1"
    """Address of the provider for `/v1/messages`, the Messages API."""
    anthropic_api_key: Key | None = None
    """The proxy's own key for `anthropic_base_url`. If unset, the client's key is forwarded. `api_key` is never sent
    there."""
    connect_timeout: Seconds = 10.0
    """Seconds to wait for a connection."""
    read_timeout: Seconds = 600.0
    """Seconds to wait for the next bytes of a response."""
    max_connections: Count = 1000
    """Maximum number of connections at a time. A request beyond it waits for up to `connect_timeout`."""
    include_usage: Literal["auto", "never"] = "auto"
    """`auto` requests token usage in streams. `never` leaves the request as the client sent it."""
    reasoning: ReasoningMode = "auto"
    """Which stored reasoning is sent back. `auto`: only reasoning that led to tool calls. `keep`: all. `drop`: none."""
    ca: Certificates | None = None
    """PEM file of the certificate authorities to trust, instead of the system's."""
    proxy: ProxyUrl | None = Field(default=None, repr=False)
    """HTTP proxy for requests to every upstream: `http://USER:PASSWORD@HOST:PORT`. Defaults to what `HTTPS_PROXY` and
    `NO_PROXY` say."""
    passthrough: tuple[Resource, ...] = ("models", "embeddings")
    """Resources under `/v1` that clients may use with the shared `api_key`. With their own key, they may use all."""
    routes: tuple[Route, ...] = ()
    """Other upstreams, by model. The first match is used."""


class StoreSettings(_Section):
    """Where histories are stored."""

    url: StoreUrl = Field(default="sqlite+aiosqlite:///palimpsest.db", repr=False)
    """Database URL: a SQLite file or a PostgreSQL database."""
    migrate: bool = True
    """Whether `serve` migrates the database tables at startup."""
    mask: tuple[Annotated[Text, AfterValidator(checked)], ...] = ()
    """Patterns to mask before text is stored: RE2 regular expressions or names of presets. The presets are `openai`,
    `anthropic`, `aws`, `github`, `google`, `slack`, `stripe`, `jwt` and `pem`; `keys` stands for all of them."""
    content: Literal["full", "none"] = "full"
    """`full` stores everything. `none` stores ids, counts and receipts, but no text. Clients must then send their whole
    history, and edits that shorten messages decide anew at each request."""
    search: Literal["scan", "index"] = "scan"
    """How text is searched. `scan` reads the newest sessions for a second. `index` uses a full-text index of the
    database, which finds whole words and beginnings of words."""
    on_failure: Literal["forward", "reject"] = "forward"
    """What to do while the database is unavailable. `forward` serves requests that contain their whole history, and
    stores them later. `reject` refuses requests with 503."""
    spool: Text = "palimpsest-spool"
    """Local directory for data that waits for the database."""
    spool_max_bytes: Count = 1_073_741_824
    """Maximum size of the spool, in bytes. Beyond it, requests get 503."""


class AuthKey(_Section):
    """A key that clients may use."""

    key: ClientKey
    """The client's API key, or its hash: `sha256:` and 64 hexadecimal digits (`palimpsest key new`)."""
    tenant: Name
    """The tenant that the key belongs to. A tenant may have several keys."""
    name: Name | None = None
    """Name of the key, by which `budgets` refer to it."""


class AuthSettings(_Section):
    """Who may use the proxy."""

    mode: Literal["none", "passthrough", "keys"] = "none"
    """`none`: no authentication. `passthrough`: each provider key is a tenant. `keys`: only the keys listed in
    `keys`."""
    keys: tuple[AuthKey, ...] = ()
    """The accepted keys, for `mode: keys`."""
    admin_key: ClientKey | None = None
    """Key with access to all tenants' sessions over the HTTP API. If unset, nobody has such access."""

    @model_validator(mode="after")
    def _keys_are_given_and_differ(self) -> AuthSettings:
        if self.mode == "keys" and not self.keys:
            raise ValueError("mode 'keys' needs at least one entry under auth.keys: {key: …, tenant: …}")
        first: dict[str, int] = {}
        for place, entry in enumerate(self.keys):
            earlier = first.setdefault(entry.key.get_secret_value(), place)
            if earlier != place:
                raise contradiction(f"auth.keys[{earlier}] has the same key", "keys", place, "key")
        if self.admin_key is not None and self.admin_key.get_secret_value() in first:
            raise contradiction("the admin key must not be a tenant's key too", "admin_key")
        return self


class SessionSettings(_Section):
    """How a request names its session."""

    headers: tuple[HeaderName, ...] = ("X-Session-ID",)
    """Headers that may contain the session id. The first one present is used."""
    body_fields: tuple[FieldPath, ...] = ()
    """Body fields that may contain the session id, such as `metadata.session_id`. They are removed before sending,
    except for those that mean something to a provider: `metadata.user_id`, `prompt_cache_key`, `conversation`."""
    missing: Literal["infer", "stateless", "reject"] = "infer"
    """What to do without a session id. `infer` recognises the session by its earlier replies, or starts a new one.
    `stateless` stores nothing. `reject` answers with 400."""
    on_disconnect: Literal["cancel", "finish"] = "cancel"
    """What to do when the client disconnects early. `cancel` ends the upstream request. `finish` completes it and
    stores the reply."""


class ResponsesSettings(_Section):
    """Requests to `/v1/responses` that refer to an earlier response."""

    state: Literal["upstream", "proxy"] = "upstream"
    """Who adds the earlier conversation if a request has `previous_response_id` or `conversation`. `upstream` forwards
    the field unchanged. `proxy` removes it and sends the stored conversation, trimmed."""


class TokenSettings(_Section):
    """How tokens are counted."""

    method: TokenMethod = "tiktoken"
    """`tiktoken` counts with OpenAI's vocabularies. `estimate` counts by character classes."""
    calibrate: bool = True
    """Whether to scale the counts of each session to the usage that the upstream reports."""


class SummarizerSettings(_Section):
    """The model that writes summaries, for `summarize` with `mode: model` and for compaction on request."""

    model: Text | None = None
    """Name of the model. Defaults to the session's own model."""
    base_url: BaseUrl | None = None
    """Address of the model's API. If unset, summary requests go where the session's requests go, with its key."""
    api_key: Key | None = None
    """Key for `base_url`. If unset, requests there carry no key: the client's key is never sent there."""
    timeout: Seconds = 60.0
    """Seconds to wait for one response."""
    background: bool = True
    """Whether to write summaries in the background. With `false`, the request that moves the cut waits for the
    summary."""


class RetentionSettings(_Section):
    """How long sessions are kept."""

    days: Amount | None = None
    """Days without use after which a session is deleted. If unset, no session is deleted for its age."""
    max_sessions: Count | None = None
    """Maximum number of sessions. Beyond it, the least recently used are deleted."""


class Budget(_Section):
    """What a tenant or a key may use. Beyond it, requests get 429."""

    tenant: Name | None = None
    """The tenant. Without authentication, its name is `default`."""
    key: Name | None = None
    """The `name` of one of `auth.keys`, instead of a tenant."""
    dollars_per_day: Amount | None = None
    """Dollars per day, from midnight to midnight UTC."""
    dollars_per_month: Amount | None = None
    """Dollars per calendar month, in UTC."""
    requests_per_minute: Count | None = None
    """Requests in any 60 seconds."""
    tokens_per_minute: Count | None = None
    """Tokens of prompts and replies in any 60 seconds, as the upstream reports them."""

    @model_validator(mode="after")
    def _limits_somebody(self) -> Budget:
        if (self.tenant is None) == (self.key is None):
            raise contradiction("a budget is one tenant's, or one key's: set tenant, or key", "tenant")
        limits = (self.dollars_per_day, self.dollars_per_month, self.requests_per_minute, self.tokens_per_minute)
        if all(limit is None for limit in limits):
            raise contradiction("this budget limits nothing: set requests_per_minute, or another limit", "tenant")
        return self


class FinishSettings(_Section):
    """Tools that end a task."""

    tools: tuple[Text, ...] = ()
    """Names of the tools. A request whose history ends with a call of one is answered from the store."""


class VirtualToolSettings(_Section):
    """Tools that the proxy offers to the model and answers itself."""

    recall_context: bool = False
    """Whether the model may read trimmed content again."""
    compress_chat_history: bool = False
    """Whether the model may request a summary of the history."""
    only_with_tools: bool = True
    """Whether to offer them only if the client itself offers tools."""


class CacheSettings(_Section):
    """What the proxy does for the provider's prompt cache."""

    key: Literal["none", "session"] = "none"
    """`none` adds no key. `session` adds a `prompt_cache_key`, an HMAC of the session, if the client sends none."""
    breakpoints: Literal["auto", "never"] = "auto"
    """`auto` marks the end of the stable prefix, for models that accept marks. In a request to the Messages API that is
    trimmed or continues its session, it also marks the newest message. `never` adds no marks."""


class PriceStep(_Section):
    """Different prices for requests with more input. They apply to the whole request."""

    above: Positive
    """Number of input tokens, cached ones included, above which the step applies."""
    input: Price
    """Price of input, in dollars per million tokens."""
    cached_read: Price | None = None
    """Price of input read from the cache. If unset, it rises in proportion to `input`."""
    cache_write: Price | None = None
    """Price of input written to the cache. If unset, it rises in proportion to `input`."""
    output: Price | None = None
    """Price of output. If unset, it rises in proportion to `input`."""


class ModelPrices(_Section):
    """What a model costs. Replaces all known prices of the model."""

    input: Price
    """Price of input, in dollars per million tokens."""
    cached_read: Price | None = None
    """Price of input read from the provider's cache. Defaults to `input`."""
    cache_write: Price | None = None
    """Price of input written to the cache. Defaults to `input`."""
    output: Price | None = None
    """Price of output. If unset, the cost of an exchange is not reported."""
    steps: tuple[PriceStep, ...] = ()
    """Different prices above a number of input tokens, in ascending order."""

    @model_validator(mode="after")
    def _steps_rise(self) -> ModelPrices:
        if self.steps and self.input == 0:
            raise contradiction("a model without a price has no steps: set input", "input")
        for place in range(1, len(self.steps)):
            if self.steps[place].above <= self.steps[place - 1].above:
                raise contradiction("this must be larger than in the step before it", "steps", place, "above")
        return self


class ModelCache(_Section):
    """How a model's provider caches. A setting that is left out keeps its known value."""

    matching: Matching | None = None
    """How a cached prefix is found. `blocks`: the longest common prefix. `breakpoints`: only a prefix that ends at a
    mark."""
    block: Positive | None = None
    """Tokens per block, for `matching: blocks`. Only whole blocks of a prefix count."""
    minimum: Natural | None = None
    """Length of the shortest prefix that is cached, in tokens."""
    lifetime: Seconds | None = None
    """Seconds without a request after which the cache is cold."""
    breakpoints: Breakpoints | None = None
    """Marks that the model accepts: `openai` (`prompt_cache_breakpoint`), `anthropic` (`cache_control`) or `none`."""
    key: bool | None = None
    """Whether the provider accepts `prompt_cache_key`. One that does not may refuse the request."""


class ModelRule(_Section):
    """Facts about some models. A setting that is left out keeps its known value."""

    match: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Model names as the client sends them, with wildcards. One match is enough."""
    fallback: bool = False
    """Whether the rule applies only to models that are otherwise unknown. Its prices count as assumed."""
    context_window: Positive | None = None
    """Maximum tokens of a request and its reply together."""
    prices: ModelPrices | None = None
    """What the models cost, in dollars per million tokens."""
    cache: ModelCache | None = None
    """How the models' provider caches."""


class DashboardSettings(_Section):
    """The dashboard at `/ui`."""

    enabled: bool = True
    """Whether to serve the dashboard."""


class TelemetrySettings(_Section):
    """Logs and metrics."""

    metrics: bool = True
    """Whether to serve `/metrics` for Prometheus."""
    otlp_endpoint: BaseUrl | None = None
    """Address of an OpenTelemetry collector for traces and metrics (OTLP over HTTP), such as `http://localhost:4318`.
    Needs `pip install 'palimpsest[otel]'`. `OTEL_…` environment variables set the rest."""
    log_format: Literal["text", "json"] = "text"
    """`text` is for people. `json` is for machines: one object per line."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Lowest level to log."""


class Settings(BaseSettings):
    """All settings."""

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        env_prefix="PALIMPSEST_",
        env_nested_delimiter="__",
        env_ignore_empty=True,
        title="Palimpsest's configuration",
    )

    server: ServerSettings = ServerSettings()
    upstream: UpstreamSettings = UpstreamSettings()
    store: StoreSettings = StoreSettings()
    auth: AuthSettings = AuthSettings()
    sessions: SessionSettings = SessionSettings()
    responses: ResponsesSettings = ResponsesSettings()
    tokens: TokenSettings = TokenSettings()
    summarizer: SummarizerSettings = SummarizerSettings()
    """The model that writes summaries."""
    retention: RetentionSettings = RetentionSettings()
    budgets: Annotated[tuple[Budget, ...], Field(max_length=64)] = ()
    """Limits for tenants and keys."""
    finish: FinishSettings = FinishSettings()
    virtual_tools: VirtualToolSettings = VirtualToolSettings()
    cache: CacheSettings = CacheSettings()
    models: tuple[ModelRule, ...] = ()
    """Facts about models, in addition to those that the package knows. The first match is used."""
    policies: dict[PolicyName, Policy] = {}
    """Policies by name: when and how to trim. The first policy that matches a request is used."""
    dashboard: DashboardSettings = DashboardSettings()
    telemetry: TelemetrySettings = TelemetrySettings()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature is pydantic-settings'
        init_settings: PydanticBaseSettingsSource,
        *_: Any,
        **__: Any,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Use constructor arguments only: `source` merges all sources and tracks where each value comes from."""
        return (init_settings,)

    @field_validator("policies", mode="before")
    @classmethod
    def _policies_extend(cls, written: Any) -> Any:
        if not isinstance(written, Mapping):
            return written
        policies = cast("Mapping[str, Any]", written)
        mistakes = [
            InitErrorDetails(type=contradiction(problem), loc=(name, inheritance.KEY), input=None)
            for name, problem in inheritance.problems(policies)
        ]
        if mistakes:
            raise ValidationError.from_exception_data(cls.__name__, mistakes)
        return {name: inheritance.extended(name, policies) for name in policies}

    @model_validator(mode="after")
    def _sections_agree(self) -> Settings:
        if self.auth.mode == "none" and not is_loopback(self.server.host):
            raise contradiction(
                "without authentication the proxy listens on this machine only: set auth.mode to 'keys' or "
                "'passthrough', or server.host to 127.0.0.1",
                "server",
                "host",
            )
        for name in ("api_key", "anthropic_api_key"):
            if self.auth.mode == "passthrough" and getattr(self.upstream, name) is not None:
                raise contradiction(
                    f"auth.mode 'passthrough' forwards each client's own key: remove upstream.{name}, "
                    "or set auth.mode to 'keys'",
                    "upstream",
                    name,
                )
        if self.store.content == "none":
            self._needs_no_content()
        return self

    def own_addresses(self) -> Iterator[tuple[str | int, ...]]:
        """Yield the settings whose address is the proxy's own, which would forward requests to itself endlessly."""
        named: list[tuple[str | None, tuple[str | int, ...]]] = [
            (self.upstream.base_url, ("upstream", "base_url")),
            (self.upstream.anthropic_base_url, ("upstream", "anthropic_base_url")),
            (self.summarizer.base_url, ("summarizer", "base_url")),
        ]
        named += [
            (route.base_url, ("upstream", "routes", place, "base_url"))
            for place, route in enumerate(self.upstream.routes)
        ]
        listening = self.server.host.lower()
        here = is_loopback(listening) or listening in _EVERY_ADDRESS
        for address, path in named:
            parts = urlsplit(address or "")
            host = parts.hostname or ""
            if (parts.scheme, parts.port or _HTTP_PORT) != ("http", self.server.port):
                continue
            if host == listening or (here and is_loopback(host)):
                yield path

    def _needs_no_content(self) -> None:
        """Raise an error if a setting needs content that `store.content: none` does not store."""
        tools = self.virtual_tools
        uses: list[tuple[bool, tuple[str | int, ...]]] = [
            (tools.recall_context, ("virtual_tools", "recall_context")),
            (tools.compress_chat_history, ("virtual_tools", "compress_chat_history")),
            (bool(self.finish.tools), ("finish", "tools")),
            (self.responses.state == "proxy", ("responses", "state")),
            (self.store.search == "index", ("store", "search")),
        ]
        for name, policy in self.policies.items():
            uses.append((policy.agents == "merge", ("policies", name, "agents")))
            uses += [
                (edit.type == "summarize", ("policies", name, "edits", place))
                for place, edit in enumerate(policy.edits)
            ]
        for is_used, path in uses:
            if is_used:
                raise contradiction("this needs texts that are stored: remove it, or store.content: none", *path)

"""The settings, as they stand in the configuration file: one frozen model for each section.

The text under a field is its description in the JSON Schema, so it is written for operators. What
concerns one section alone is checked by its model, what concerns two by `Settings`. Nothing here
reads a file or the environment: `load` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import InitErrorDetails
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from proxy.config import inheritance
from proxy.config.policies import BUILT_INS
from proxy.config.values import (
    BaseUrl,
    FieldPath,
    HeaderName,
    Key,
    Name,
    Pattern,
    PolicyName,
    Resource,
    Seconds,
    StoreUrl,
    is_loopback,
)
from proxy.trimming import Natural, Policy, Positive, contradiction

UsageMode: TypeAlias = Literal["auto", "never"]
ReasoningMode: TypeAlias = Literal["auto", "keep", "drop"]
AuthMode: TypeAlias = Literal["none", "passthrough", "keys"]
MissingSession: TypeAlias = Literal["infer", "stateless", "reject"]
OnDisconnect: TypeAlias = Literal["cancel", "finish"]
TokenMethod: TypeAlias = Literal["tiktoken", "estimate"]
Matching: TypeAlias = Literal["blocks", "breakpoints"]
Breakpoints: TypeAlias = Literal["openai", "anthropic", "none"]
CacheKey: TypeAlias = Literal["none", "session"]
CacheMarks: TypeAlias = Literal["auto", "never"]
LogFormat: TypeAlias = Literal["text", "json"]
LogLevel: TypeAlias = Literal["debug", "info", "warning", "error"]


class _Section(BaseModel):
    """What all sections share: they never change, and an unknown key is a mistake."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class ServerSettings(_Section):
    """Where the proxy listens."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on. Another one than this machine's own needs authentication."""
    port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """TCP port; 0 takes any free one."""
    workers: Annotated[int, Field(ge=1, le=256)] = 1
    """Number of processes that share the port and the store."""
    max_body_bytes: Annotated[int, Field(ge=1)] = 67_108_864
    """Largest request body that is accepted, in bytes."""


class Route(_Section):
    """Another upstream for some models; nothing that may be a key of the client's is sent there."""

    models: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Names of models, with wildcards: `deepseek-*`."""
    base_url: BaseUrl
    """Address of this provider's API."""
    api_key: Key | None = None
    """Key sent to this provider. Without one the request goes without: the client's is never sent here."""


class UpstreamSettings(_Section):
    """The provider behind the proxy."""

    base_url: BaseUrl = "https://api.openai.com/v1"
    """Address that takes the place of the client's `/v1`."""
    api_key: Key | None = None
    """The proxy's own key. Without one the client's `Authorization` is forwarded."""
    connect_timeout: Seconds = 10.0
    """Seconds to wait for a connection."""
    read_timeout: Seconds = 600.0
    """Seconds to wait for the next bytes of an answer."""
    max_connections: Annotated[int, Field(ge=1)] = 1000
    """Largest number of connections at one time; a request beyond it waits for `connect_timeout`."""
    include_usage: UsageMode = "auto"
    """`auto` asks streams for their usage; `never` leaves the request as the client wrote it."""
    reasoning: ReasoningMode = "auto"
    """Whether stored reasoning goes back: `auto` where it led to tool calls, `keep` always, `drop` never."""
    passthrough: tuple[Resource, ...] = ("models", "embeddings")
    """Resources below /v1 that may be reached with a shared `api_key`; with the client's own key all may."""
    routes: tuple[Route, ...] = ()
    """Other upstreams by model; the first that matches is taken."""


class StoreSettings(_Section):
    """Where histories are kept."""

    url: StoreUrl = Field(default="sqlite+aiosqlite:///palimpsest.db", repr=False)
    """Address of the database: a SQLite file or a PostgreSQL database."""
    migrate: bool = True
    """Whether `serve` brings the database's tables up to date first."""
    on_failure: Literal["reject"] = "reject"
    """What happens while the database cannot be reached: requests are refused with 503."""


class AuthKey(_Section):
    """One key that the proxy has issued."""

    key: Key
    """What the client sends as its API key."""
    tenant: Name
    """Whose sessions it opens. Several keys may belong to one tenant."""


class AuthSettings(_Section):
    """Who may use the proxy."""

    mode: AuthMode = "none"
    """`none`: whoever reaches it. `passthrough`: each provider key is a tenant. `keys`: the keys below."""
    keys: tuple[AuthKey, ...] = ()
    """The keys that are accepted with `mode: keys`."""
    admin_key: Key | None = None
    """Opens all tenants' sessions over the HTTP API. Without one nobody can."""

    @model_validator(mode="after")
    def _keys_are_there_and_differ(self) -> AuthSettings:
        if self.mode == "keys" and not self.keys:
            raise ValueError("mode 'keys' needs at least one entry under auth.keys: {key: …, tenant: …}")
        first: dict[str, int] = {}
        for place, entry in enumerate(self.keys):
            earlier = first.setdefault(entry.key.get_secret_value(), place)
            if earlier != place:
                raise contradiction(f"auth.keys[{earlier}] has this key already", "keys", place, "key")
        if self.admin_key is not None and self.admin_key.get_secret_value() in first:
            raise contradiction("the admin key must not be a tenant's key too", "admin_key")
        return self


class SessionSettings(_Section):
    """How a request names its session."""

    headers: tuple[HeaderName, ...] = ("X-Session-ID",)
    """Headers that may hold the session id; the first that is there is taken."""
    body_fields: tuple[FieldPath, ...] = ()
    """Fields of the body that may hold it (`metadata.session_id`); they are taken out before sending."""
    missing: MissingSession = "infer"
    """Without an id: `infer` finds the session by the replies that are sent, or begins a new one,
    `stateless` stores nothing, `reject` answers with 400."""
    on_disconnect: OnDisconnect = "cancel"
    """When the client leaves before the end: `cancel` the upstream's answer, or `finish` and store it."""


class TokenSettings(_Section):
    """How tokens are counted."""

    method: TokenMethod = "tiktoken"
    """`tiktoken` counts with the vocabularies of OpenAI's models, `estimate` by classes of characters."""
    calibrate: bool = True
    """Whether counts are scaled, session by session, to what the upstream says that it counted."""


class SummarizerSettings(_Section):
    """The model that writes summaries (`summarize` with `mode: model`, and compaction that is asked for)."""

    model: Annotated[str, Field(min_length=1)] | None = None
    """Its name. Without one, the model that the session asks."""
    base_url: BaseUrl | None = None
    """Address of its provider's API. Without one, where the session's requests go, with their own key."""
    api_key: Key | None = None
    """Key sent there. With an address and no key it goes without: the client's is never sent there."""
    timeout: Seconds = 60.0
    """Seconds that one answer of it may take."""
    background: bool = True
    """Whether summaries are made beside the requests. `false`: a request whose cut moves waits for one."""


class FinishSettings(_Section):
    """Tools that end a task."""

    tools: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    """Names of tools: a history that ends with such a call is answered from the store."""


class VirtualToolSettings(_Section):
    """Tools that the proxy offers to the model and answers itself."""

    recall_context: bool = False
    """Whether the model may read again what was trimmed."""
    compress_chat_history: bool = False
    """Whether the model may ask for a summary of what lies behind."""
    only_with_tools: bool = True
    """Whether they are offered only where the client offers tools itself."""


class CacheSettings(_Section):
    """What the proxy does for the provider's prompt cache."""

    key: CacheKey = "none"
    """`session` sends a `prompt_cache_key`, an HMAC of the session, where the client sends none."""
    breakpoints: CacheMarks = "auto"
    """`auto` marks the end of what will not change, for models that take marks; `never` leaves it out."""


def _no_truth_value(value: object) -> object:
    """Refuse true and false, which Python would count as 1 and 0."""
    if isinstance(value, bool):
        raise ValueError("a number is needed here, not true or false")  # noqa: TRY004 - pydantic takes a ValueError
    return value


Price: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False), BeforeValidator(_no_truth_value)]
"""Dollars per million tokens."""


class PriceStep(_Section):
    """Other prices for requests with more input; the whole request then costs them."""

    above: Positive
    """Input tokens, cached ones included, up to which the step does not hold."""
    input: Price
    """Input, in dollars per million tokens."""
    cached_read: Price | None = None
    """Input read from the cache. Without it, it rises as `input` does."""
    cache_write: Price | None = None
    """Input written to the cache. Without it, it rises as `input` does."""
    output: Price | None = None
    """Output. Without it, it rises as `input` does."""


class ModelPrices(_Section):
    """What a model costs; it takes the place of all that is known of its prices."""

    input: Price
    """Input, in dollars per million tokens."""
    cached_read: Price | None = None
    """Input read from the provider's cache. Without it, it costs what other input costs."""
    cache_write: Price | None = None
    """Input written to the cache. Without it, it costs what other input costs."""
    output: Price | None = None
    """Output. Without it, what an exchange cost is not told."""
    steps: tuple[PriceStep, ...] = ()
    """Other prices above some number of input tokens, in rising order."""

    @model_validator(mode="after")
    def _steps_rise(self) -> ModelPrices:
        if self.steps and self.input == 0:
            raise contradiction("what costs nothing has no steps: set input", "input")
        for place in range(1, len(self.steps)):
            if self.steps[place].above <= self.steps[place - 1].above:
                raise contradiction("this must be above that of the step before it", "steps", place, "above")
        return self


class ModelCache(_Section):
    """How a model's provider caches; what is left out stays as it is known."""

    matching: Matching | None = None
    """`blocks`: the longest common prefix is found again; `breakpoints`: only what ends at a mark."""
    block: Positive | None = None
    """With `blocks`: tokens of one; a prefix counts in whole ones."""
    minimum: Natural | None = None
    """Tokens of the shortest prefix that is cached."""
    lifetime: Seconds | None = None
    """Seconds without a request after which the cache is cold."""
    breakpoints: Breakpoints | None = None
    """Marks that it takes: `openai` (`prompt_cache_breakpoint`), `anthropic` (`cache_control`) or `none`."""
    key: bool | None = None
    """Whether it takes `prompt_cache_key`; one that does not may refuse the request."""


class ModelRule(_Section):
    """What the operator knows of some models; what is left out stays as it is known."""

    match: Annotated[tuple[Pattern, ...], Field(min_length=1)]
    """Names of models as the client asks for them, with wildcards; one that fits is enough."""
    fallback: bool = False
    """Only for what is not known otherwise. Prices from here count as assumed, and receipts say so."""
    context_window: Positive | None = None
    """Tokens that a request and its reply may have together."""
    prices: ModelPrices | None = None
    """What it costs, in dollars per million tokens."""
    cache: ModelCache | None = None
    """How its provider caches."""


class TelemetrySettings(_Section):
    """What the proxy tells about itself."""

    log_format: LogFormat = "text"
    """`text` for people, `json` for machines: one object a line."""
    log_level: LogLevel = "info"
    """The least important messages that are logged."""


class Settings(BaseSettings):
    """Everything that can be configured."""

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
    """Where the proxy listens."""
    upstream: UpstreamSettings = UpstreamSettings()
    """The provider behind the proxy."""
    store: StoreSettings = StoreSettings()
    """Where histories are kept."""
    auth: AuthSettings = AuthSettings()
    """Who may use the proxy."""
    sessions: SessionSettings = SessionSettings()
    """How a request names its session."""
    tokens: TokenSettings = TokenSettings()
    """How tokens are counted."""
    summarizer: SummarizerSettings = SummarizerSettings()
    """The model that writes summaries."""
    finish: FinishSettings = FinishSettings()
    """Tools that end a task."""
    virtual_tools: VirtualToolSettings = VirtualToolSettings()
    """Tools that the proxy offers to the model and answers itself."""
    cache: CacheSettings = CacheSettings()
    """What the proxy does for the provider's prompt cache."""
    models: tuple[ModelRule, ...] = ()
    """What is known of models beside what the package knows; the first that matches is taken."""
    policies: dict[PolicyName, Policy] = {}
    """What is trimmed, by name; the first policy that matches a request serves it."""
    telemetry: TelemetrySettings = TelemetrySettings()
    """What the proxy tells about itself."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature is pydantic-settings'
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003 - as above
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take values from the caller alone: `load` merges the sources and knows where each comes from."""
        return (init_settings,)

    @field_validator("policies", mode="before")
    @classmethod
    def _policies_extend(cls, written: Any) -> Any:
        """Lay each policy over the one that it extends."""
        if not isinstance(written, Mapping):
            return written
        policies = cast("Mapping[str, Any]", written)
        mistakes = [
            InitErrorDetails(type=contradiction(what), loc=(name, inheritance.KEY), input=None)
            for name, what in inheritance.problems(policies, BUILT_INS)
        ]
        if mistakes:
            raise ValidationError.from_exception_data(cls.__name__, mistakes)
        return inheritance.extended(policies, BUILT_INS)

    @model_validator(mode="after")
    def _sections_agree(self) -> Settings:
        if self.auth.mode == "none" and not is_loopback(self.server.host):
            raise contradiction(
                "without authentication only this machine may be listened on: set auth.mode to 'keys' or "
                "'passthrough', or server.host to 127.0.0.1",
                "server",
                "host",
            )
        if self.auth.mode == "passthrough" and self.upstream.api_key is not None:
            raise contradiction(
                "auth.mode 'passthrough' forwards each client's own key: remove upstream.api_key, "
                "or set auth.mode to 'keys'",
                "upstream",
                "api_key",
            )
        return self

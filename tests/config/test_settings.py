"""The models of the settings and the kinds of values in them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel, SecretStr, TypeAdapter, ValidationError

from proxy.config import settings as values
from proxy.config.settings import Settings
from proxy.trimming import Policy

KEY = "key-of-anne-0123"


def test_the_defaults_are_those_of_the_contract() -> None:
    given = Settings().model_dump(mode="json")
    assert given == {
        "server": {
            "host": "127.0.0.1",
            "port": 8080,
            "workers": 1,
            "max_body_bytes": 67108864,
            "max_messages": 100000,
            "max_json_values": 2000000,
            "max_memory": None,
            "max_connections_per_address": 0,
            "drain_timeout": 30,
            "allowed_origins": [],
        },
        "upstream": {
            "base_url": "https://api.openai.com/v1",
            "api_key": None,
            "anthropic_base_url": "https://api.anthropic.com/v1",
            "anthropic_api_key": None,
            "connect_timeout": 10,
            "read_timeout": 600,
            "max_connections": 1000,
            "ca": None,
            "proxy": None,
            "include_usage": "auto",
            "reasoning": "auto",
            "passthrough": ["models", "embeddings"],
            "routes": [],
        },
        "store": {
            "url": "sqlite+aiosqlite:///palimpsest.db",
            "migrate": True,
            "mask": [],
            "content": "full",
            "search": "scan",
            "on_failure": "forward",
            "spool": "palimpsest-spool",
            "spool_max_bytes": 1073741824,
        },
        "auth": {"mode": "none", "keys": [], "admin_key": None},
        "sessions": {"headers": ["X-Session-ID"], "body_fields": [], "missing": "infer", "on_disconnect": "cancel"},
        "responses": {"state": "upstream"},
        "tokens": {"method": "tiktoken", "calibrate": True},
        "summarizer": {"model": None, "base_url": None, "api_key": None, "timeout": 60, "background": True},
        "retention": {"days": None, "max_sessions": None},
        "budgets": [],
        "finish": {"tools": []},
        "virtual_tools": {"recall_context": False, "compress_chat_history": False, "only_with_tools": True},
        "cache": {"key": "none", "breakpoints": "auto"},
        "models": [],
        "policies": {},
        "dashboard": {"enabled": True},
        "telemetry": {"metrics": True, "otlp_endpoint": None, "log_format": "text", "log_level": "info"},
    }


def test_settings_do_not_read_the_environment_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALIMPSEST_SERVER__PORT", "1")
    assert Settings().server.port == 8080


def _priced(*steps: dict[str, float], price: float = 1) -> dict[str, Any]:
    return {"models": [{"match": ["a"], "prices": {"input": price, "steps": list(steps)}}]}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"server": {"workers": 0}}, "greater than or equal to 1"),
        ({"server": {"port": 65536}}, "less than or equal to 65535"),
        ({"store": {"on_failure": "ignore"}}, "'forward' or 'reject'"),
        ({"auth": {"mode": "keys"}}, "needs at least one entry"),
        (
            {
                "auth": {
                    "mode": "keys",
                    "keys": [{"key": "key-of-anne-0123", "tenant": "a"}, {"key": "key-of-anne-0123", "tenant": "b"}],
                }
            },
            "auth.keys[0] has the same key",
        ),
        (
            {"auth": {"keys": [{"key": "key-of-anne-0123", "tenant": "a"}], "admin_key": "key-of-anne-0123"}},
            "must not be a tenant's key",
        ),
        ({"auth": {"mode": "passthrough"}, "upstream": {"api_key": "k"}}, "remove upstream.api_key"),
        ({"server": {"host": "0.0.0.0"}}, "without authentication the proxy listens on this machine only"),
        ({"policies": {"off": {}}}, "reserved"),
        ({"models": [{}]}, "Field required"),
        ({"models": [{"match": []}]}, "at least 1 item"),
        ({"models": [{"match": ["a"], "context_window": 0}]}, "greater than 0"),
        ({"models": [{"match": ["a"], "prices": {"output": 1}}]}, "Field required"),
        ({"models": [{"match": ["a"], "prices": {"input": -1}}]}, "greater than or equal to 0"),
        ({"models": [{"match": ["a"], "prices": {"input": float("nan")}}]}, "finite number"),
        ({"models": [{"match": ["a"], "prices": {"input": True}}]}, "not true or false"),
        ({"models": [{"match": ["a"], "cache": {"lifetime": True}}]}, "not true or false"),
        ({"server": {"port": True}}, "not true or false"),
        ({"server": {"workers": True}}, "not true or false"),
        ({"server": {"drain_timeout": False}}, "not true or false"),
        ({"upstream": {"max_connections": True}}, "not true or false"),
        ({"retention": {"days": True}}, "not true or false"),
        ({"budgets": [{"tenant": "a", "dollars_per_day": True}]}, "not true or false"),
        ({"policies": {"a": {"share": True}}}, "not true or false"),
        ({"models": [{"match": ["a"], "cache": {"lifetime": 0}}]}, "greater than 0"),
        ({"models": [{"match": ["a"], "cache": {"breakpoints": "all"}}]}, "'openai', 'anthropic' or 'none'"),
        (_priced({"above": 9, "input": 2}, {"above": 9, "input": 3}), "larger than in the step before it"),
        (_priced({"above": 9, "input": 2}, price=0), "a model without a price has no steps"),
        ({"spool": {}}, "Extra inputs"),
        ({"summarizer": {"timeout": 0}}, "greater than 0"),
        ({"finish": {"tools": [""]}}, "at least 1 character"),
        ({"cache": {"key": "tenant"}}, "'none' or 'session'"),
        ({"cache": {"breakpoints": "often"}}, "'auto' or 'never'"),
    ],
)
def test_contradictions_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        Settings.model_validate(given)
    assert words in refusal.value.errors()[0]["msg"]


@pytest.mark.parametrize("mode", ["passthrough", "keys"])
def test_with_authentication_the_proxy_may_listen_on_any_address(mode: str) -> None:
    keys = [{"key": KEY, "tenant": "a"}, {"key": "key-of-bert-0123", "tenant": "a"}]
    settings = Settings.model_validate({"server": {"host": "::"}, "auth": {"mode": mode, "keys": keys}})
    assert settings.server.host == "::"


@pytest.mark.parametrize(
    ("given", "own"),
    [
        ({"upstream": {"base_url": "http://localhost:8080/v1"}}, ("upstream", "base_url")),
        ({"upstream": {"anthropic_base_url": "http://[::1]:8080"}}, ("upstream", "anthropic_base_url")),
        ({"server": {"port": 80}, "summarizer": {"base_url": "http://127.0.0.1/v1"}}, ("summarizer", "base_url")),
        (
            {"upstream": {"routes": [{"models": ["a"], "base_url": "http://127.0.0.1:8080"}]}},
            ("upstream", "routes", 0, "base_url"),
        ),
        (
            {"server": {"host": "10.0.0.1"}, "upstream": {"base_url": "http://10.0.0.1:8080/v1"}},
            ("upstream", "base_url"),
        ),
        (
            {"server": {"host": "0.0.0.0"}, "upstream": {"base_url": "http://localhost:8080/v1"}},
            ("upstream", "base_url"),
        ),
        ({"upstream": {"base_url": "http://127.0.0.1:11434/v1"}}, None),
        ({"upstream": {"base_url": "https://127.0.0.1:8080/v1"}}, None),
        ({"upstream": {"base_url": "http://models:8080/v1"}}, None),
        ({"server": {"host": "10.0.0.1"}, "upstream": {"base_url": "http://127.0.0.1:8080/v1"}}, None),
    ],
)
def test_a_provider_on_this_machine_is_told_from_the_proxy(
    given: dict[str, Any], own: tuple[str | int, ...] | None
) -> None:
    settings = Settings.model_validate({"auth": {"mode": "passthrough"}, **given})
    assert list(settings.own_addresses()) == ([] if own is None else [own])


def test_settings_are_frozen() -> None:
    settings = Settings()
    with pytest.raises(ValidationError, match="frozen"):
        settings.server.port = 1  # type: ignore[misc]  # that is what is shown


def test_secrets_are_not_printed() -> None:
    settings = Settings.model_validate(
        {
            "upstream": {
                "api_key": "hush-1",
                "routes": [{"models": ["a"], "base_url": "http://a", "api_key": "hush-2"}],
            },
            "auth": {
                "mode": "keys",
                "keys": [{"key": "hush-hush-hush-3", "tenant": "a"}],
                "admin_key": "hush-hush-hush-4",
            },
            "store": {"url": "postgresql://me:hush-5@host/db"},
        }
    )
    assert settings.upstream.api_key == SecretStr("hush-1")
    assert "hush" not in repr(settings)
    assert "hush" not in str(settings)


def _models(model: type[BaseModel], seen: set[type[BaseModel]]) -> Iterator[type[BaseModel]]:
    """Yield every model of the configuration file, from its fields' types."""
    if model in seen:
        return
    seen.add(model)
    yield model
    for field in model.model_fields.values():
        waiting = [field.annotation]
        while waiting:
            kind = waiting.pop()
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                yield from _models(kind, seen)
            else:
                waiting += getattr(kind, "__args__", ())


MODELS = list(_models(Settings, set()))


def test_the_list_of_models_includes_policies() -> None:
    assert Policy in MODELS
    assert len(MODELS) > 12


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_each_model_is_frozen_refuses_unknown_keys_and_describes_its_fields(model: type[BaseModel]) -> None:
    assert model.model_config.get("frozen")
    assert model.model_config.get("extra") == "forbid"
    fields = model.model_fields.items()  # a section has the description of its own model
    undescribed = [name for name, field in fields if not (field.description or _is_described(field.annotation))]
    assert undescribed in ([], ["type"])


def _is_described(annotation: object) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel) and bool(annotation.__doc__)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "LOCALHOST", "::1", "[::1]"])
def test_loopback_addresses(host: str) -> None:
    assert values.is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "[::]", "10.0.0.1", "example.org", "", "localhost.evil.test"])
def test_addresses_that_are_not_loopback(host: str) -> None:
    assert not values.is_loopback(host)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("https://api.example/v1", "https://api.example/v1"),
        ("https://api.example/v1/", "https://api.example/v1"),
        ("http://127.0.0.1:8000//", "http://127.0.0.1:8000"),
        ("http://[::1]:8000/a", "http://[::1]:8000/a"),
    ],
)
def test_a_base_url_loses_its_trailing_slash(given: str, kept: str) -> None:
    assert TypeAdapter(values.BaseUrl).validate_python(given) == kept


@pytest.mark.parametrize(
    ("kind", "wrong", "cure"),
    [
        (values.BaseUrl, "api.example/v1", "http:// or https://"),
        (values.BaseUrl, "ftp://api.example", "http:// or https://"),
        (values.BaseUrl, "https://", "names a host"),
        (values.BaseUrl, "https://api.example/v 1", "visible ASCII"),
        (values.BaseUrl, "https://me:secret@api.example", "api_key"),
        (values.BaseUrl, "https://api.example/?a=1", "no query"),
        (values.BaseUrl, "https://api.example/v1#", "no query"),
        (values.BaseUrl, "https://api.example:0/", "from 1 to 65535"),
        (values.BaseUrl, "https://api.example:99999/", "from 1 to 65535"),
        (values.BaseUrl, "https://api.example/v1/chat/completions", "leave out /chat/completions"),
        (values.Certificates, "/there/is/none.pem", "No such file"),
        (values.Certificates, __file__, "no certificates (PEM)"),
        (values.BaseUrl, "http://user:pass-secret", "the port of an address is a number"),
        (values.BaseUrl, "http://host\\x/v1", "names a host"),
        (values.ProxyUrl, "http://user:pass@host:99999", "from 1 to 65535"),
        (values.StoreUrl, "mysql://host/db", "sqlite:///FILE or postgresql://"),
        (values.StoreUrl, "postgresql+psycopg2://host/db", "sqlite:///FILE or postgresql://"),
        (values.StoreUrl, "sqlite", "sqlite:///FILE or postgresql://"),
        (values.StoreUrl, "sqlite:///:memory:", "after three slashes"),
        (values.StoreUrl, "sqlite:///a?x=1", "no options"),
        (values.Key, "", "visible ASCII"),
        (values.Key, "a b", "visible ASCII"),
        (values.Key, "a\r\nX-Evil: 1", "visible ASCII"),
        (values.HeaderName, "X Session", "name of an HTTP header"),
        (values.HeaderName, "Authorization", "credential"),
        (values.FieldPath, "metadata..id", "dots between levels"),
        (values.FieldPath, "messages.id", "meaning of its own"),
        (values.Resource, "/models", "up to the next slash"),
        (values.Resource, "..", "up to the next slash"),
        (values.Name, " ", "at least one character"),
        (values.Name, "a\nb", "no control characters"),
        (values.PolicyName, "Off", "reserved"),
        (values.Seconds, 0, "greater than 0"),
        (values.Seconds, float("inf"), "finite"),
        (values.Pattern, "", "at least 1 character"),
    ],
)
def test_an_invalid_value_is_refused_with_a_hint(kind: Any, wrong: object, cure: str) -> None:
    with pytest.raises(ValidationError) as refusal:
        TypeAdapter(kind).validate_python(wrong)
    assert cure in refusal.value.errors()[0]["msg"]


@pytest.mark.parametrize(
    ("kind", "right"),
    [
        (values.StoreUrl, "sqlite:///a.db"),
        (values.StoreUrl, "sqlite+pysqlite:////tmp/a.db"),
        (values.StoreUrl, "postgres://u:p@h/d"),
        (values.StoreUrl, "postgresql+asyncpg://h/d"),
        (values.StoreUrl, "postgresql+psycopg://h/d"),
        (values.StoreUrl, "postgresql+psycopg_async://h/d"),
        (values.FieldPath, "metadata.session_id"),
        (values.PolicyName, "对话"),
        (values.Name, "team a"),
    ],
)
def test_a_valid_value_is_kept(kind: Any, right: str) -> None:
    assert TypeAdapter(kind).validate_python(right) == right

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from proxy.config import values


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "LOCALHOST", "::1", "[::1]"])
def test_only_this_machine_reaches_a_loopback_address(host: str) -> None:
    assert values.is_loopback(host)


@pytest.mark.parametrize(
    "host", ["0.0.0.0", "::", "[::]", "10.0.0.1", "example.org", "", "localhost.evil.test"]
)
def test_other_addresses_are_not_loopback(host: str) -> None:
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
def test_a_base_url_has_no_slash_at_its_end(given: str, kept: str) -> None:
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
        (values.BaseUrl, "https://api.example:0/", "port 0"),
        (values.BaseUrl, "https://api.example:99999/", "ort out of range"),
        (values.BaseUrl, "https://api.example/v1/chat/completions", "leave out /chat/completions"),
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
def test_what_cannot_be_is_refused_and_says_what_can(kind: Any, wrong: object, cure: str) -> None:
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
def test_what_can_be_is_kept_as_it_is(kind: Any, right: str) -> None:
    assert TypeAdapter(kind).validate_python(right) == right

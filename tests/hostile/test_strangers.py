"""Unauthorized access by web pages, other local programs, and crafted paths."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from proxy.config import Settings
from tests.e2e.conftest import Serve
from tests.support.raw_socket import request, sent
from tests.support.server import Proxy
from tests.support.upstream import Upstream

ANNE, ADMIN = "key-of-anne-0123", "key-of-the-admin"
ASKED: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "a"}]}
FRIEND = "https://app.example"


@pytest.fixture(scope="module")
def open_proxy(serve: Serve) -> Proxy:
    return serve(server={"allowed_origins": [FRIEND]})


@pytest.fixture(scope="module")
def keys(serve: Serve) -> Proxy:
    auth = {"mode": "keys", "keys": [{"key": ANNE, "tenant": "anne"}], "admin_key": ADMIN}
    return serve(auth=auth, upstream={"api_key": "sk-shared"})


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


FOREIGN = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://localhost:1"},
    {"sec-fetch-site": "cross-site"},
    {"origin": "https://evil.example", "sec-fetch-site": "same-origin"},
]


@pytest.mark.parametrize("headers", FOREIGN)
def test_a_foreign_page_spends_and_changes_nothing(
    open_proxy: Proxy, upstream: Upstream, session: str, headers: Mapping[str, str]
) -> None:
    open_proxy.chat(session, "a")
    asked = len(upstream.log)
    tries = [
        ("POST", "/v1/chat/completions"),
        ("POST", "/chat/completions"),
        ("POST", "/v1/embeddings"),
        ("DELETE", "/v1/files/a"),
        ("POST", f"/sessions/{session}/compact"),
        ("POST", f"/sessions/{session}/fork"),
        ("POST", "/sessions/import"),
        ("DELETE", f"/sessions/{session}"),
        ("DELETE", "/tokens/cache"),
    ]
    for method, path in tries:
        answer = open_proxy.client.request(method, path, json=ASKED, headers=headers)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "origin_not_allowed"), path
    assert len(upstream.log) == asked
    assert len(open_proxy.messages(session)) == 2


def test_pages_of_the_proxy_itself_and_of_listed_origins_may(open_proxy: Proxy) -> None:
    for origin in (open_proxy.url, FRIEND):
        headers = {"origin": origin, "sec-fetch-site": "same-origin" if origin != FRIEND else "cross-site"}
        assert open_proxy.client.post("/v1/chat/completions", json=ASKED, headers=headers).status_code == 200


def test_with_keys_an_origin_says_nothing(keys: Proxy) -> None:
    headers = bearer(ANNE) | {"origin": "https://evil.example", "content-type": "text/plain"}
    assert keys.client.post("/v1/chat/completions", json=ASKED, headers=headers).status_code == 200


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=a"])
def test_a_body_of_a_form_is_refused(open_proxy: Proxy, session: str, kind: str) -> None:
    open_proxy.chat(session, "a")
    for path in ("/v1/chat/completions", f"/sessions/{session}/fork", "/sessions/import"):
        answer = open_proxy.client.post(path, content=b"{}", headers={"content-type": kind})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "Content-Type"), path


STEERING = {
    "OpenAI-Organization": "org",
    "OpenAI-Project": "project",
    "X-HTTP-Method-Override": "DELETE",
    "X-Original-URL": "/v1/files",
    "X-Rewrite-URL": "/v1/files",
}


def test_with_a_shared_key_nothing_steers_the_upstream(keys: Proxy, upstream: Upstream) -> None:
    keys.client.post("/v1/chat/completions", json=ASKED, headers=bearer(ANNE) | STEERING)
    keys.client.get("/v1/models", headers=bearer(ANNE) | STEERING)
    assert len(upstream.log) == 2
    for received in upstream.log:
        names = {name.lower() for name, _ in received.headers}
        assert not {name.lower().encode() for name in STEERING} & names


ODD = [
    "..%20",
    ".%09.",
    "%c0%ae%c0%ae",
    "%c0%ae",
    ".%20.",
    "..%00",
    "%ef%bc%8e%ef%bc%8e",
    "..%0d",
    "%2e%2e",
    "...",
    "a%0ab",
    "%7f",
    "..%e2%80%8b",
]


@pytest.mark.parametrize("segment", ODD)
def test_with_a_shared_key_odd_paths_are_refused(keys: Proxy, upstream: Upstream, segment: str) -> None:
    key = b"Authorization: Bearer " + ANNE.encode()
    status, _, _ = sent(keys.port, request(b"GET", f"/v1/models/{segment}/files".encode(), b"", key))
    assert (status, upstream.log) == (403, [])


@pytest.mark.parametrize("segment", ["gpt-4o", "ft:gpt-4o:org::id", "a.b", "%C3%BC", "a%20b", ".hidden"])
def test_ordinary_paths_pass(keys: Proxy, upstream: Upstream, segment: str) -> None:
    key = b"Authorization: Bearer " + ANNE.encode()
    assert sent(keys.port, request(b"GET", f"/v1/models/{segment}".encode(), b"", key))[0] == 200
    assert len(upstream.log) == 1


@pytest.mark.parametrize(
    "path", ["/sessions?x=1", "/sessions?limit=a", "/sessions/a?x=1", "/exchanges/a?x=1", "/tokens/cache?x=1"]
)
def test_who_asks_is_checked_before_what_is_asked(keys: Proxy, path: str) -> None:
    def status(headers: dict[str, str]) -> int:
        found: httpx.Response = httpx.get(keys.url + path, headers=headers, trust_env=False)
        return found.status_code

    assert (status({}), status(bearer("x" * 16)), status(bearer(ADMIN))) == (401, 401, 400)


def test_health_needs_no_key(keys: Proxy) -> None:
    for path, status in (("/healthz", 200), ("/readyz", 200), ("/healthz?x=1", 400)):
        assert httpx.get(keys.url + path, trust_env=False).status_code == status


def test_figures_of_the_whole_process_are_the_administrators(keys: Proxy) -> None:
    assert keys.client.get("/tokens/cache", headers=bearer(ANNE)).status_code == 403
    assert keys.client.get("/tokens/cache", headers=bearer(ADMIN)).status_code == 200


@pytest.mark.parametrize("auth", [{"keys": [{"key": "a" * 15, "tenant": "t"}]}, {"admin_key": "a" * 15}])
def test_a_key_that_can_be_guessed_stops_the_start(auth: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="at least 16 characters"):
        Settings.model_validate({"auth": auth})

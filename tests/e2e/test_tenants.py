"""Tenants are isolated from each other, and keys are sent only where they belong."""

from __future__ import annotations

import http.client
from typing import Any

import httpx
import pytest

from tests.e2e.conftest import Serve
from tests.support.server import Proxy
from tests.support.upstream import Upstream

ANNE, BERT, ADMIN, SHARED = "the-first-key-of-anne", "the-only-key-of-bert", "the-key-of-the-admin", "provider-key"
KEYS = [
    {"key": ANNE, "tenant": "anne"},
    {"key": "the-second-key-of-anne", "tenant": "anne"},
    {"key": BERT, "tenant": "bert"},
]


@pytest.fixture(scope="module", params=["keys", "passthrough"])
def proxy(request: pytest.FixtureRequest, serve: Serve) -> Proxy:
    if request.param == "keys":
        auth = {"mode": "keys", "keys": KEYS, "admin_key": ADMIN}
        return serve(auth=auth, upstream={"api_key": SHARED})
    return serve(auth={"mode": "passthrough", "admin_key": ADMIN})


@pytest.fixture(scope="module")
def shared(serve: Serve) -> Proxy:
    return serve(auth={"mode": "keys", "keys": KEYS, "admin_key": ADMIN}, upstream={"api_key": SHARED})


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def ask(proxy: Proxy, key: str, session: str, text: str) -> str:
    answer = proxy.chat(session, text, headers=bearer(key))
    assert answer.status_code == 200, answer.text
    return str(answer.headers["x-exchange-id"])


def read(proxy: Proxy, key: str, path: str) -> httpx.Response:
    return proxy.client.get(path, headers=bearer(key))


def test_the_same_name_is_two_sessions(proxy: Proxy, upstream: Upstream, session: str) -> None:
    hers, his = ask(proxy, ANNE, session, "anne says"), ask(proxy, BERT, session, "bert says")
    assert [m["content"] for m in upstream.last.messages] == ["bert says"]
    owners = set()
    for key, mine, other, own, foreign in ((ANNE, "anne", "bert", hers, his), (BERT, "bert", "anne", his, hers)):
        for path in ("", "/messages", "/messages?meta=true", "/context", "/exchanges", "/export"):
            answer = read(proxy, key, f"/sessions/{session}{path}")
            assert answer.status_code == 200
            assert f"{other} says" not in answer.text
            assert foreign not in answer.text
            if path not in {"", "/exchanges"}:
                assert f"{mine} says" in answer.text
        listed = [row for row in read(proxy, key, "/sessions").json()["data"] if row["id"] == session]
        assert len(listed) == 1
        owners.add(listed[0]["tenant"])
        assert read(proxy, key, f"/exchanges/{own}").status_code == 200
        assert read(proxy, key, f"/exchanges/{foreign}").status_code == 404
    assert len(owners) == 2
    assert not owners & {ANNE, BERT}  # a tenant's name does not contain its key


def test_what_is_one_tenants_is_not_there_for_the_other(proxy: Proxy, session: str) -> None:
    exchange = ask(proxy, ANNE, session, "a secret")
    meta = read(proxy, ANNE, f"/sessions/{session}/messages?meta=true").json()["data"]
    bodies = read(proxy, ANNE, f"/sessions/{session}/export").text
    assert "a secret" in bodies
    paths = ["", "/messages", "/context", "/exchanges", "/export", "/refs/ref_0123456789abcdef"]
    paths.append(f"/messages?branch={meta[0]['node']}")
    for path in paths:
        assert read(proxy, BERT, f"/sessions/{session}{path}").status_code == 404
    assert read(proxy, BERT, f"/exchanges/{exchange}").status_code == 404
    assert proxy.client.delete(f"/sessions/{session}", headers=bearer(BERT)).status_code == 404
    assert all(row["id"] != session for row in read(proxy, BERT, "/sessions").json()["data"])
    owner = read(proxy, ADMIN, f"/sessions/{session}").json()["tenant"]
    for path in (f"/sessions?tenant={owner}", f"/sessions/{session}?tenant={owner}"):
        assert read(proxy, BERT, path).status_code == 403
    # All of it still exists.
    assert len(read(proxy, ANNE, f"/sessions/{session}/messages").json()["data"]) == 2


def test_deleting_and_importing_touch_ones_own(proxy: Proxy, session: str) -> None:
    ask(proxy, ANNE, session, "anne says")
    ask(proxy, BERT, session, "bert says")
    exported = read(proxy, ANNE, f"/sessions/{session}/export").content
    assert proxy.client.delete(f"/sessions/{session}", headers=bearer(ANNE)).json()["deleted"] is True
    assert read(proxy, ANNE, f"/sessions/{session}").status_code == 404
    assert read(proxy, BERT, f"/sessions/{session}/messages").json()["data"][0]["content"] == "bert says"

    taken = proxy.client.post("/sessions/import", content=exported, headers=bearer(BERT))
    assert taken.status_code == 409, taken.text
    kept = proxy.client.post(f"/sessions/import?as={session}-2", content=exported, headers=bearer(BERT))
    assert kept.status_code == 201, kept.text
    assert read(proxy, BERT, f"/sessions/{session}-2/messages").json()["data"][0]["content"] == "anne says"
    assert read(proxy, ANNE, f"/sessions/{session}-2").status_code == 404
    back = proxy.client.post("/sessions/import", content=exported, headers=bearer(ANNE))
    assert back.status_code == 201
    assert read(proxy, ANNE, f"/sessions/{session}/messages").json()["data"][1]["content"] == "echo: anne says"


def test_the_administrator_sees_all(proxy: Proxy, session: str) -> None:
    exchange = ask(proxy, ANNE, session, "anne says")
    assert read(proxy, ADMIN, f"/sessions/{session}/messages").json()["data"][0]["content"] == "anne says"
    assert read(proxy, ADMIN, f"/exchanges/{exchange}").status_code == 200
    ask(proxy, BERT, session, "bert says")
    both = [row["tenant"] for row in read(proxy, ADMIN, "/sessions").json()["data"] if row["id"] == session]
    assert len(set(both)) == 2
    assert read(proxy, ADMIN, f"/sessions/{session}").status_code == 400
    texts = {
        read(proxy, ADMIN, f"/sessions/{session}/messages?tenant={tenant}").json()["data"][0]["content"]
        for tenant in both
    }
    assert texts == {"anne says", "bert says"}


def test_the_administrator_asks_no_model(proxy: Proxy, upstream: Upstream, session: str) -> None:
    assert proxy.chat(session, "a", headers=bearer(ADMIN)).status_code == 403
    assert read(proxy, ADMIN, "/v1/models").status_code == 403
    assert upstream.log == []


@pytest.mark.parametrize("path", ["/sessions", "/sessions/x/messages", "/exchanges/x", "/v1/models", "/v1/files"])
def test_nobody_gets_nothing(proxy: Proxy, upstream: Upstream, path: str) -> None:
    with httpx.Client(base_url=proxy.url, trust_env=False) as nobody:
        answers = [nobody.get(path), nobody.post("/v1/chat/completions", json={"model": "echo", "messages": []})]
    for answer in answers:
        assert answer.status_code == 401
        assert answer.json()["error"]["code"] == "invalid_api_key"
    assert upstream.log == []


def test_health_needs_no_key(proxy: Proxy) -> None:
    with httpx.Client(base_url=proxy.url, trust_env=False) as nobody:
        assert nobody.get("/healthz").json() == {"status": "ok"}
        assert nobody.get("/readyz").json() == {"status": "ready"}


def test_keys_of_ours_never_leave(shared: Proxy, upstream: Upstream, session: str) -> None:
    ask(shared, ANNE, session, "a")
    read(shared, BERT, "/v1/models")
    shared.client.post("/v1/embeddings", json={}, headers=bearer(ANNE))
    assert len(upstream.log) == 3
    for request in upstream.log:
        assert request.header("authorization") == f"Bearer {SHARED}"
        assert not any(key in str(request.headers) for key in (ANNE, BERT, ADMIN))
        assert ANNE.encode() not in request.body


def test_without_a_key_of_its_own_the_proxys_keys_still_stay(serve: Serve, upstream: Upstream, session: str) -> None:
    proxy = serve(auth={"mode": "keys", "keys": KEYS})
    ask(proxy, ANNE, session, "a")
    assert upstream.last.header("authorization") is None


def test_a_clients_key_goes_to_the_base_and_to_no_route(serve: Serve, upstream: Upstream, session: str) -> None:
    base = upstream.base_url
    routes = [
        {"models": ["routed+keyed*"], "base_url": f"{base}/../v1", "api_key": "route-key"},
        {"models": ["routed*"], "base_url": base},
    ]
    proxy = serve(auth={"mode": "passthrough"}, upstream={"routes": routes[1:]})
    proxy.chat(session, "a", "routed", headers=bearer(ANNE))
    assert upstream.last.header("authorization") is None
    proxy.chat(session, "b", "echo", headers=bearer(ANNE))
    assert upstream.last.header("authorization") == f"Bearer {ANNE}"
    keyed = serve(auth={"mode": "passthrough"}, upstream={"routes": [{**routes[0], "base_url": base}]})
    keyed.chat(session, "a", "routed+keyed", headers=bearer(ANNE))
    assert upstream.last.header("authorization") == "Bearer route-key"


def test_keys_of_one_tenant_open_the_same_sessions(shared: Proxy, session: str) -> None:
    ask(shared, ANNE, session, "a")
    assert read(shared, "the-second-key-of-anne", f"/sessions/{session}/messages").json()["data"][0]["content"] == "a"
    assert read(shared, "unknown", "/sessions").status_code == 401


REFUSED = [
    *("/v1/files", "/v1/models/../files", "/v1/models/%2e%2e/files", "/v1/models%2F..%2Ffiles", "/v1/./files"),
    *("/v1/models/..%5cfiles", "/v1/%6dodels/..%2ffiles", "/v1/modelsx", "/v1//files", "/v1/chat/completions/x"),
    *("/v1/MODELS", "/v1/models/%00", "/v1/responses", "/v1/models/..", "/v1/models/%252e%252e/../files"),
]


@pytest.mark.parametrize("target", REFUSED)
def test_a_shared_key_reaches_only_what_is_listed(shared: Proxy, upstream: Upstream, target: str) -> None:
    status, body = plain_get(shared.port, target, bearer(ANNE))
    assert (status, b"passthrough_not_allowed" in body) == (403, True), body
    assert upstream.log == []


@pytest.mark.parametrize(
    "target", ["/v1/models", "/v1/models/", "/v1/models/gpt%2D5?x=..", "/v1/%6Dodels", "/v1/embeddings"]
)
def test_what_is_listed_is_reached(shared: Proxy, upstream: Upstream, target: str) -> None:
    assert plain_get(shared.port, target, bearer(ANNE))[0] == 200
    assert upstream.last.target == target.partition("?")[0]


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.evil.example", "10.0.0.1", ""]
)
@pytest.mark.parametrize("path", ["/sessions", "/healthz", "/v1/models", "/v1/chat/completions"])
def test_a_foreign_name_is_refused_without_authentication(
    open_proxy: Proxy, upstream: Upstream, host: str, path: str
) -> None:
    status, body = plain_get(open_proxy.port, path, {"host": host})
    assert (status, b"host_not_allowed" in body) == (403, True), body
    assert upstream.log == []


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]", "[::1]:8080", "localhost:8080"])
def test_names_of_this_machine_are_accepted(open_proxy: Proxy, host: str) -> None:
    assert plain_get(open_proxy.port, "/sessions", {"host": host})[0] == 200


def test_with_authentication_any_name_will_do(shared: Proxy) -> None:
    assert plain_get(shared.port, "/sessions", {"host": "proxy.example", **bearer(ANNE)})[0] == 200


@pytest.fixture(scope="module")
def open_proxy(serve: Serve) -> Proxy:
    return serve()


def plain_get(port: int, target: str, headers: dict[str, Any]) -> tuple[int, bytes]:
    """Request a target exactly as written; most HTTP clients would normalize it."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.putrequest("GET", target, skip_host="host" in headers, skip_accept_encoding=True)
        for name, value in headers.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()

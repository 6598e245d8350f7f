"""Who may read the dashboard, and who may act on it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import quote

import httpx
import pytest

from tests.dashboard.conftest import ADMIN, TEAM_A, TEAM_B
from tests.e2e.conftest import Serve
from tests.support.server import Proxy

PAGES = ("/ui", "/ui/cache", "/ui/sessions", "/ui/sessions/alpha", "/ui/compare?a=alpha&b=alpha", "/ui/policies")


@contextmanager
def visitor(proxy: Proxy, key: str | None = None) -> Iterator[httpx.Client]:
    """Open a browser without scripts, signed in where a key is given."""
    with httpx.Client(base_url=proxy.url, trust_env=False) as client:
        if key is not None:
            token = csrf(client.get("/ui/login"))
            answer = client.post("/ui/login", data={"key": key, "csrf": token, "next": "/ui/sessions"})
            assert (answer.status_code, answer.headers["location"]) == (303, "/ui/sessions")
        yield client


def csrf(answer: httpx.Response) -> str:
    found = re.search(r'name="csrf" value="([0-9a-f]{64})"', answer.text)
    assert found is not None
    return found[1]


@pytest.fixture
def stranger(guarded: Proxy) -> Iterator[httpx.Client]:
    with visitor(guarded) as client:
        yield client


@pytest.fixture
def team_a(guarded: Proxy) -> Iterator[httpx.Client]:
    with visitor(guarded, TEAM_A) as client:
        yield client


@pytest.fixture
def admin(guarded: Proxy) -> Iterator[httpx.Client]:
    with visitor(guarded, ADMIN) as client:
        yield client


@pytest.mark.parametrize("path", PAGES)
def test_a_stranger_is_asked_to_sign_in(stranger: httpx.Client, path: str) -> None:
    answer = stranger.get(path)
    assert answer.status_code == 303
    assert answer.headers["location"] == f"/ui/login?next={quote(path, safe='')}"
    bare, _, query = path.partition("?")
    for ending in (".json", ".csv"):
        refused = stranger.get(f"{bare}{ending}?{query}")
        assert refused.status_code == 401
        assert refused.json()["error"]["type"] == "authentication_error"


def test_a_wrong_key_is_refused_and_not_repeated(stranger: httpx.Client) -> None:
    token = csrf(stranger.get("/ui/login"))
    answer = stranger.post("/ui/login", data={"key": "wrong-key-0123456789", "csrf": token})
    assert answer.status_code == 401
    assert "This key is not known here." in answer.text
    assert "wrong-key" not in answer.text


def test_the_cookie_cannot_be_read_by_scripts_or_sent_by_other_sites(team_a: httpx.Client, guarded: Proxy) -> None:
    with visitor(guarded) as client:
        token = csrf(client.get("/ui/login"))
        cookie = client.post("/ui/login", data={"key": TEAM_A, "csrf": token}).headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "SameSite=strict" in cookie
    assert "Path=/ui" in cookie
    assert TEAM_A not in cookie
    assert team_a.get("/ui/sessions").status_code == 200


@pytest.mark.parametrize("change", ["signature", "expiry", "fingerprint", "nonsense", "admin"])
def test_a_forged_cookie_counts_for_nothing(guarded: Proxy, team_a: httpx.Client, change: str) -> None:
    fingerprint, expires, nonce, signature = team_a.cookies["palimpsest_session"].split(".")
    forged = {
        "signature": f"{fingerprint}.{expires}.{nonce}.{'0' * 64}",
        "expiry": f"{fingerprint}.{int(expires) + 9}.{nonce}.{signature}",
        "fingerprint": f"{'0' * 64}.{expires}.{nonce}.{signature}",
        "nonsense": "é.x.y",
        "admin": f"admin.{expires}.{nonce}.{signature}",
    }[change]
    headers = {b"cookie": f"palimpsest_session={forged}".encode()}
    assert httpx.get(f"{guarded.url}/ui/sessions", headers=headers, trust_env=False).status_code == 303
    assert httpx.get(f"{guarded.url}/ui/sessions.json", headers=headers, trust_env=False).status_code == 401


def test_a_tenant_sees_its_own_sessions_and_no_others(team_a: httpx.Client) -> None:
    listed = team_a.get("/ui/sessions.json").json()["sessions"]
    assert {(each["tenant"], each["id"]) for each in listed} == {("team-a", "alpha"), ("team-a", "shared")}
    for path in ("", ".json", ".csv", "/export", "/delete"):
        assert team_a.get(f"/ui/sessions/beta{path}").status_code == 404
        assert team_a.get(f"/ui/sessions/alpha{path}?tenant=team-b").status_code == 403
    assert team_a.get("/ui/sessions.json?tenant=team-b").status_code == 403
    assert team_a.get("/ui/compare?a=alpha&b=beta").status_code == 404
    assert team_a.get("/ui/policies/lab?session=beta").status_code == 404
    assert "ours, says alpha" in team_a.get("/ui/sessions/shared").text


def test_another_tenants_exchange_and_message_are_not_there(team_a: httpx.Client, admin: httpx.Client) -> None:
    theirs = admin.get("/ui/sessions/beta.json").json()
    exchange, node = theirs["chosen"]["id"], theirs["messages"][0]["node"]
    assert team_a.get(f"/ui/sessions/alpha?exchange={exchange}").status_code == 404
    assert team_a.get(f"/ui/sessions/alpha/messages/{node}").status_code == 404
    own = team_a.get("/ui/sessions/alpha.json").json()["messages"][0]["node"]
    assert team_a.get(f"/ui/sessions/alpha/messages/{own}?exchange={exchange}").status_code == 404


def test_a_tenant_sees_neither_the_settings_nor_whom_else_a_policy_serves(
    team_a: httpx.Client, admin: httpx.Client
) -> None:
    assert team_a.get("/ui/policies.json").json()["settings"] is None
    assert "team-b" not in team_a.get("/ui/policies").text
    settings = admin.get("/ui/policies.json").json()["settings"]
    assert "admin_key" in settings
    for key in (TEAM_A, TEAM_B, ADMIN):
        assert key not in settings


def test_the_administrator_sees_all_tenants(admin: httpx.Client) -> None:
    listed = admin.get("/ui/sessions.json").json()["sessions"]
    assert {each["tenant"] for each in listed} == {"team-a", "team-b"}
    assert len(admin.get("/ui/sessions.json?tenant=team-b").json()["sessions"]) == 2
    assert "Name one with ?tenant=" in admin.get("/ui/sessions/shared").text
    assert admin.get("/ui/sessions/shared?tenant=team-b").status_code == 200


def test_a_key_in_the_request_works_as_it_does_for_the_api(guarded: Proxy) -> None:
    headers = {"authorization": f"Bearer {TEAM_B}"}
    answer = httpx.get(f"{guarded.url}/ui/sessions.json", headers=headers, trust_env=False)
    assert {each["id"] for each in answer.json()["sessions"]} == {"beta", "shared"}
    assert "set-cookie" not in answer.headers


@pytest.mark.parametrize("token", [None, "", "0" * 64])
@pytest.mark.parametrize("action", ["/ui/sessions/alpha/delete", "/ui/theme", "/ui/logout", "/ui/policies/lab"])
def test_an_action_without_its_token_is_refused(team_a: httpx.Client, action: str, token: str | None) -> None:
    fields = {"session": "alpha", "theme": "dark", **({} if token is None else {"csrf": token})}
    assert team_a.post(action, data=fields).status_code == 403
    assert team_a.get("/ui/sessions/alpha").status_code == 200


def test_a_token_of_another_session_is_refused(team_a: httpx.Client, guarded: Proxy) -> None:
    with visitor(guarded, TEAM_A) as other:
        token = csrf(other.get("/ui/sessions"))
    assert team_a.post("/ui/sessions/alpha/delete", data={"csrf": token}).status_code == 403


def test_an_action_of_who_is_not_signed_in_any_more_leads_to_signing_in(stranger: httpx.Client) -> None:
    answer = stranger.post("/ui/sessions/alpha/delete", data={"csrf": csrf(stranger.get("/ui/login"))})
    assert answer.status_code == 401
    assert "<title>Not signed in · Palimpsest</title>" in answer.text
    assert 'href="/ui/login"' in answer.text


def test_signing_out_ends_the_session(guarded: Proxy) -> None:
    with visitor(guarded, TEAM_A) as client:
        answer = client.post("/ui/logout", data={"csrf": csrf(client.get("/ui/sessions"))})
        assert answer.status_code == 303
        assert client.get("/ui/sessions").status_code == 303


@pytest.mark.parametrize("target", ["https://evil.example/ui", "//evil.example/ui", "/v1/models", "/ui\\@evil", "/uix"])
def test_signing_in_leads_nowhere_else(guarded: Proxy, target: str) -> None:
    with visitor(guarded) as client:
        page = client.get(f"/ui/login?next={quote(target)}")
        answer = client.post("/ui/login", data={"key": TEAM_A, "csrf": csrf(page), "next": target})
        assert answer.headers["location"] == "/ui"


def test_a_session_ends_with_its_key(serve: Serve) -> None:
    def settings(key: str) -> dict[str, object]:
        return {"mode": "keys", "keys": [{"key": key, "tenant": "team-a"}]}

    with visitor(serve(auth=settings(TEAM_A)), TEAM_A) as client:
        cookie = client.cookies["palimpsest_session"]
    url = serve(auth=settings(TEAM_B)).url
    assert httpx.get(f"{url}/ui/sessions", cookies={"palimpsest_session": cookie}, trust_env=False).status_code == 303


def test_with_a_key_of_its_own_a_client_sees_what_it_sent(serve: Serve) -> None:
    proxy = serve(auth={"mode": "passthrough"})
    assert proxy.chat("mine", "hello").status_code == 200
    with visitor(proxy, "sk-test") as own, visitor(proxy, "sk-other") as other:
        assert [each["id"] for each in own.get("/ui/sessions.json").json()["sessions"]] == ["mine"]
        assert other.get("/ui/sessions.json").json()["sessions"] == []


def test_it_can_be_switched_off(serve: Serve) -> None:
    proxy = serve(dashboard={"enabled": False})
    assert [proxy.client.get(path).status_code for path in ("/ui", "/ui/sessions", "/ui/login")] == [404, 404, 404]
    assert proxy.client.get("/sessions").status_code == 200

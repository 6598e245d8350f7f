"""Which request goes where, and that whatever goes wrong is said in OpenAI's shape."""

from __future__ import annotations

import http.client
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from proxy.cli.serving import server_config
from proxy.config import RetentionSettings, Settings
from proxy.errors import StoreUnavailable
from proxy.server.app import Application, _again, _delete
from proxy.server.endpoint import DialectEndpoint
from proxy.store import Store
from tests.e2e.conftest import Serve, _direct, provider, serve, session, upstream
from tests.support.server import Proxy
from tests.support.stores import empty_store
from tests.support.upstream import Upstream

__all__ = ["_direct", "provider", "serve", "session", "upstream"]

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def proxy(serve: Serve) -> Proxy:
    return serve()


def error_of(answer: httpx.Response) -> dict[str, Any]:
    error: dict[str, Any] = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


@pytest.mark.parametrize("path", ["/nothing", "/sessions/", "/sessions/s/", "/docs", "/chat/completions", "//"])
def test_a_path_that_is_none(proxy: Proxy, path: str) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port)
    with closing(connection):
        for host, status, code in (("localhost", 404, b"unknown_url"), ("evil.example", 403, b"host_not_allowed")):
            connection.request("GET", path, headers={"host": host})
            answer = connection.getresponse()
            assert code in answer.read()
            assert (answer.status, answer.getheader("location")) == (status, None)


def test_an_answer_that_breaks_off_is_no_bug(
    proxy: Proxy, session: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    proxy.chat(session, "hello")

    async def broken(_: Store, __: str) -> AsyncIterator[dict[str, Any]]:
        yield {"record": "session"}
        raise StoreUnavailable("The store is away.")

    monkeypatch.setattr(Store, "export", broken)
    with pytest.raises(httpx.RemoteProtocolError):
        proxy.client.get(f"/sessions/{session}/export")
    told = [record.getMessage() for record in caplog.records if record.name == "palimpsest.app"]
    assert told == [f"the answer to /sessions/{session}/export broke off: The store is away."]


@pytest.mark.parametrize("host", ["[::1", "[", "a b", "x" * 300])
def test_a_host_that_is_none(serve: Serve, host: str) -> None:
    proxy = serve(auth={"mode": "passthrough"})
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port)
    for path, status in (("/nothing", 404), ("/sessions", 200)):
        connection.request("GET", path, headers={"host": host, "authorization": "Bearer k"})
        answer = connection.getresponse()
        assert answer.read()
        assert answer.status == status
    connection.close()


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("POST", "/sessions", "GET"), ("PATCH", "/sessions/s/messages", "GET"), ("HEAD", "/sessions", "GET")],
)
def test_a_method_that_is_none(proxy: Proxy, method: str, path: str, allowed: str) -> None:
    answer = proxy.client.request(method, path)
    assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
    if method != "HEAD":
        assert error_of(answer)["code"] == "unknown_url"


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/chat/completions", "messages"), ("/v1/messages", "messages"), ("/v1/responses", "input")]
)
def test_a_slash_at_the_end_of_a_path_changes_nothing(
    proxy: Proxy, upstream: Upstream, session: str, path: str, field: str
) -> None:
    body = {"model": "m", "max_tokens": 9, field: [{"role": "user", "content": "hello"}]}
    answer = proxy.client.post(f"{path}/", json=body, headers={"x-session-id": session})
    assert (answer.headers["x-context-kind"], upstream.last.target) == ("first", path)


@pytest.mark.parametrize("path", ["/v1/v1/messages", "/v1/v1/chat/completions", "/anthropic/v1/messages"])
def test_a_base_url_with_too_much_is_refused_and_told_the_paths(proxy: Proxy, upstream: Upstream, path: str) -> None:
    answer = proxy.client.post(path, json={}, headers={"anthropic-version": "2023-06-01"})
    assert (answer.status_code, error_of(answer)["code"]) == (404, "unknown_url")
    assert "messages at /v1/messages (clients of Anthropic's API add /v1" in error_of(answer)["message"]
    assert upstream.log == []


@pytest.mark.parametrize(
    ("path", "param"),
    [
        ("/sessions?limit=x", "limit"),
        ("/sessions?limit=1001", "limit"),
        ("/sessions/s/exchanges?limit=-1", "limit"),
        ("/sessions/s/messages?meta=maybe", "meta"),
    ],
)
def test_a_parameter_that_cannot_be_read_is_a_400(proxy: Proxy, path: str, param: str) -> None:
    proxy.chat("s", "a")
    answer = proxy.client.get(path)
    error = error_of(answer)
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", param)


def test_a_mistake_of_ours_is_said_without_its_words(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, session: str
) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("inner words")

    monkeypatch.setattr(Store, "listed", fail)
    monkeypatch.setattr(DialectEndpoint, "_call", fail)
    for answer in (proxy.client.get("/sessions"), proxy.chat(session, "a")):
        error = error_of(answer)
        assert (answer.status_code, error["type"], error["code"]) == (500, "server_error", "internal_error")
        assert "inner words" not in answer.text
    monkeypatch.undo()
    assert proxy.client.get("/sessions").status_code == 200


def test_a_store_that_fails_is_a_503(proxy: Proxy, monkeypatch: pytest.MonkeyPatch, session: str) -> None:
    async def fail(*_: Any, **__: Any) -> Any:
        raise StoreUnavailable("The store cannot be used.")

    monkeypatch.setattr(Store, "listed", fail)
    monkeypatch.setattr(Store, "recall", fail)
    for answer in (proxy.client.get("/sessions"), proxy.chat(session, "a")):
        assert (answer.status_code, error_of(answer)["code"]) == (503, "store_unavailable")


def test_two_applications_do_not_meet(serve: Serve, proxy: Proxy, session: str) -> None:
    other = serve()
    proxy.chat(session, "a")
    assert other.client.get(f"/sessions/{session}").status_code == 404
    assert len(proxy.messages(session)) == 2


async def _called(app: Application, scope: dict[str, Any], *messages: dict[str, Any]) -> list[dict[str, Any]]:
    """Call the application with these messages; return what it sends."""
    waiting, sent = list(messages), []

    async def receive() -> dict[str, Any]:
        return waiting.pop(0)

    async def send(message: Any) -> None:
        sent.append(message)

    await app(scope, receive, send)
    return sent


async def test_it_opens_nothing_before_it_starts_and_closes_all(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    settings = Settings(
        store={"url": f"sqlite:///{file}"},  # type: ignore[arg-type]  # pydantic reads it
        tokens={"method": "estimate"},  # type: ignore[arg-type]  # pydantic reads it
    )
    app = Application(settings)
    server_config(settings)
    assert not file.exists()
    begin, end = {"type": "lifespan.startup"}, {"type": "lifespan.shutdown"}
    for _ in range(2):
        sent = await _called(app, {"type": "lifespan", "state": {}}, begin, end)
        assert [message["type"] for message in sent] == ["lifespan.startup.complete", "lifespan.shutdown.complete"]
    assert not file.with_name("s.db-wal").exists()


async def test_it_does_not_start_on_tables_of_another_version(tmp_path: Path) -> None:
    file = tmp_path / "s.db"
    settings = Settings(store={"url": empty_store(file)}, tokens={"method": "estimate"})  # type: ignore[arg-type]  # pydantic reads them
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '9999'")
    connection.close()
    for migrate in (True, False):
        changed = settings.model_copy(update={"store": settings.store.model_copy(update={"migrate": migrate})})
        with pytest.raises(StoreUnavailable, match="9999"):
            await _called(Application(changed), {"type": "lifespan", "state": {}}, {"type": "lifespan.startup"})


async def test_what_was_under_way_is_marked_at_the_start(serve: Serve, upstream: Upstream, session: str) -> None:
    proxy = serve()
    proxy.chat(session, "a")
    file = proxy.settings.store.url.removeprefix("sqlite:///")
    with sqlite3.connect(file) as connection:
        connection.execute("UPDATE exchanges SET status = 'pending'")
        connection.execute("INSERT INTO pending SELECT * FROM exchanges")
        connection.execute("DELETE FROM exchanges")
    connection.close()
    with Proxy(proxy.settings) as again:
        assert [row["status"] for row in again.exchanges(session)] == ["interrupted"]


async def test_work_beside_the_requests_that_fails_is_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    tried: list[int] = []
    done = anyio.Event()

    async def work() -> None:
        tried.append(1)
        if len(tried) == 1:
            raise RuntimeError("a mistake")
        done.set()

    async with anyio.create_task_group() as group:
        group.start_soon(_again, work, "statistics", 0.01)
        await done.wait()
        group.cancel_scope.cancel()
    assert "statistics: failed, and is tried again" in caplog.text


async def test_sessions_may_be_kept_longer_than_time_has_lasted(tmp_path: Path) -> None:
    store = await Store.open(empty_store(tmp_path / "s.db"), migrate=False)
    try:
        await _delete(store, RetentionSettings(days=1e14, max_sessions=10**20))
    finally:
        await store.close()

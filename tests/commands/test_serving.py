"""`serve`: what it says, and why it does not start. That it serves: tests/e2e/test_command_line.py."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from proxy.commands import serving
from proxy.commands.serving import server_config
from proxy.settings.model import Settings
from proxy.trimming.policy import Policy
from tests.commands.conftest import Run


@pytest.fixture(autouse=True)
def log_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "set_up_logging", lambda *_: None)


@pytest.mark.parametrize(
    ("host", "address"),
    [
        ("127.0.0.1", "http://127.0.0.1:8081"),
        ("localhost", "http://localhost:8081"),
        ("::1", "http://[::1]:8081"),
    ],
)
def test_the_greeting_can_be_copied(host: str, address: str) -> None:
    settings = Settings(
        server={"host": host, "port": 8081},  # type: ignore[arg-type]  # pydantic reads it
        policies={"lean": Policy(), "rest": Policy()},
    )
    said = serving._greeting(settings)
    assert f"{address} -> https://api.openai.com/v1" in said
    assert f"OPENAI_BASE_URL={address}/v1 " in said
    assert f"curl {address}/sessions" in said
    assert "lean, rest" in said
    assert "built-in default" in serving._greeting(Settings())


def test_the_greeting_holds_no_secret() -> None:
    settings = Settings(
        upstream={"api_key": "sk-secret"},  # type: ignore[arg-type]  # pydantic reads it
        auth={"mode": "keys", "keys": [{"key": "hush", "tenant": "t"}], "admin_key": "root-key"},  # type: ignore[arg-type]  # pydantic reads it
    )
    assert not any(secret in serving._greeting(settings) for secret in ("sk-secret", "hush", "root-key"))


def test_the_server_adds_no_headers_and_ends_in_time() -> None:
    config = server_config(Settings(server={"port": 81}), port=82)  # type: ignore[arg-type]  # pydantic reads it
    assert (config.host, config.port, config.lifespan, config.access_log) == ("127.0.0.1", 82, "on", False)
    assert (config.server_header, config.date_header) == (False, False)
    assert config.timeout_graceful_shutdown == serving.GRACE_SECONDS


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("store: {url: 'mysql://x/y'}", 2, "store.url"),
        ("store: {url: 'sqlite:////no/such/folder/s.db'}", 1, "/no/such/folder"),
        ("store: {url: 'postgresql://x@127.0.0.1:1/y'}", 1, "server runs"),
        ("store: {url: 'sqlite:///fresh.db', migrate: false}", 1, "palimpsest upgrade"),
        ("store: {url: 'sqlite:///newer.db'}", 1, "9999"),
        ("store: {url: 'sqlite:///newer.db', migrate: false}", 1, "9999"),
        ("store: {url: 'sqlite:///garbage.db'}", 1, "no SQLite database"),
    ],
)
def test_a_store_that_cannot_be_used_stops_the_start(
    run: Run, config: Path, text: str, code: int, said: str
) -> None:
    config.with_name("garbage.db").write_bytes(b"garbage" * 200)
    connection = sqlite3.connect(config.with_name("newer.db"))
    with connection:
        connection.execute("CREATE TABLE alembic_version (version_num TEXT)")
        connection.execute("INSERT INTO alembic_version VALUES ('9999')")
    connection.close()
    config.write_text(text)
    found, out, errors = run("serve", "--port", "0")
    assert (found, out) == (code, "")
    assert said in errors
    assert "Traceback" not in errors
    assert "use it:" not in errors


@pytest.mark.parametrize(
    "arguments", [["--port", "70000"], ["--port", "-1"], ["--workers", "0"], ["--host", "0.0.0.0"], ["extra"]]
)
def test_used_wrongly(run: Run, config: Path, arguments: list[str]) -> None:
    code, out, errors = run("serve", *arguments)
    assert (code, out) == (2, "")
    assert errors.strip()
    assert not config.with_name("sessions.db").exists()

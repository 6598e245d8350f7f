"""`serve`: what it says, and why it does not start. That it serves: tests/e2e/test_command_line.py."""

from __future__ import annotations

import socket
import sqlite3
from pathlib import Path

import pytest
import typer

from proxy.cli import serving
from proxy.cli.serving import server_config
from proxy.config import Settings
from proxy.trimming import Policy
from tests.cli.conftest import Run


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


def test_the_greeting_names_the_port_that_was_free() -> None:
    settings = Settings(server={"port": 0})  # type: ignore[arg-type]  # pydantic reads it
    assert "OPENAI_BASE_URL=http://127.0.0.1:4321/v1 " in serving._greeting(settings, 4321)


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


def test_a_name_with_several_addresses_gets_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    tcp = (socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP, "")
    found = [(*tcp, ("127.0.0.1", 0)), (*tcp, ("127.0.0.1", 0)), (*tcp, ("0.0.0.0", 0))]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    bound = serving._bound("both", 0)
    try:
        (first, port), (second, other) = (one.getsockname() for one in bound)
        assert (first, second, port == other != 0) == ("127.0.0.1", "0.0.0.0", True)
    finally:
        for one in bound:
            one.close()


def test_a_name_without_an_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    with pytest.raises(typer.Exit) as end:
        serving._bound("nowhere", 80)
    assert end.value.exit_code == 1
    assert capsys.readouterr().err == "Cannot listen on nowhere:80: name or service not known.\n"


def test_two_that_bound_one_port_do_not_both_serve(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(
        store={"url": f"sqlite:///{tmp_path / 's.db'}"},  # type: ignore[arg-type]  # pydantic reads it
        tokens={"method": "estimate"},  # type: ignore[arg-type]  # pydantic reads it
    )
    told: list[str] = []
    (ours,) = serving._bound("127.0.0.1", 0)
    (theirs,) = serving._bound("127.0.0.1", ours.getsockname()[1])
    with ours, theirs:
        theirs.listen()
        server = serving._Server(server_config(settings), lambda: told.append("serves"))
        with pytest.raises(SystemExit) as end:
            server.run([ours])
    assert (end.value.code, told) == (3, [])
    assert "address already in use" in caplog.text
    assert not (tmp_path / "s.db").exists()  # nothing was opened


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

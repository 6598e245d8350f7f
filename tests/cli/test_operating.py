"""`doctor`: what it looks at, and what it says of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from tests.cli.conftest import Run


class Refuses(BaseHTTPRequestHandler):
    """A provider that wants a key."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


@pytest.fixture
def provider() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Refuses) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_the_doctor_finds_what_is_well(run: Run, config: Path, provider: str) -> None:
    base = f"{{base_url: '{provider}', anthropic_base_url: '{provider}/anthropic'}}"
    config.write_text(config.read_text() + f"upstream: {base}\npolicies: {{lean: {{}}}}\n")
    code, out, _ = run("doctor", "--json")
    found = [(each["check"], each["ok"]) for each in json.loads(out)]
    names = ["configuration", "store", "spool", "upstream", "upstream", "authentication"]
    assert (code, found) == (0, [(name, True) for name in names])
    for arguments, words in [
        ((), ("config.yaml; policies: lean", "is not there yet", f"{provider} answers (HTTP 401")),
        (("--config", config), (f"{config}; policies: lean",)),
    ]:
        code, out, _ = run("doctor", *arguments)
        assert code == 0
        assert all(word in out for word in words)
    assert not config.with_name("sessions.db").exists()


def test_the_doctor_finds_what_is_not(run: Run, config: Path, provider: str) -> None:
    config.with_name("sessions.db").write_bytes(b"no database" * 1000)
    gone = "http://127.0.0.1:1/v1"
    config.write_text(config.read_text() + f"upstream: {{base_url: '{provider}', anthropic_base_url: '{gone}'}}\n")
    code, out, _ = run("doctor")
    lines = [line.split(": ")[0] for line in out.splitlines() if line.startswith("FAILED")]
    assert (code, lines) == (1, ["FAILED  store", "FAILED  upstream"])
    assert f"{gone} cannot be reached" in out


def test_the_doctor_finds_folders_that_cannot_be_used(run: Run, config: Path, provider: str) -> None:
    base = f"upstream: {{base_url: '{provider}', anthropic_base_url: '{provider}'}}\n"
    config.write_text(f"{base}store: {{url: 'sqlite:///nowhere/sessions.db', spool: {config}/spool}}\n")
    code, out, _ = run("doctor")
    assert code == 1
    assert f"FAILED  store: the folder {config.parent / 'nowhere'} does not exist" in out
    assert f"FAILED  spool: {config} is no folder" in out
    assert sorted(config.parent.iterdir()) == [config]


def test_a_default_that_cannot_be_reached_is_no_failure_beside_a_provider_that_is_named(
    run: Run, config: Path, provider: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", "http://127.0.0.1:1")  # neither default can be reached
    before = config.read_text()
    config.write_text(f"{before}upstream: {{base_url: '{provider}'}}\n")
    code, out, _ = run("doctor")
    assert code == 0
    assert "ok      upstream: https://api.anthropic.com/v1 cannot be reached" in out
    for named in ("upstream: {anthropic_api_key: sk-ant-0123}\n", ""):
        config.write_text(before + named)
        code, out, _ = run("doctor")
        assert (code, "FAILED  upstream: https://api.anthropic.com/v1" in out) == (1, True)
    assert "FAILED  upstream: https://api.openai.com/v1" in out


def test_the_doctor_takes_the_way_of_requests(run: Run, config: Path, provider: str) -> None:
    """The proxy on the way answers, though nothing of the other name exists."""
    away = "http://nowhere.invalid/v1"
    way = f"{{base_url: '{away}', anthropic_base_url: '{away}', proxy: '{provider.removesuffix('/v1')}'}}"
    config.write_text(config.read_text() + f"upstream: {way}\n")
    code, out, _ = run("doctor")
    assert code == 0
    assert f"{away} answers" in out

"""`python -m proxy`, as operators run it."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.command import run_command
from tests.support.served import SECONDS, Served
from tests.support.upstream import Upstream
from tests.support.waiting import until

BROKEN = {
    "an unknown section": ("server:\n  port: 1\nsever: {}\n", 3, "server"),
    "an unknown key": ("server:\n  prot: 8080\n", 2, "port"),
    "a text for a number": ("server:\n  port: eighty\n", 2, "whole number"),
    "a number out of range": ("# a comment\n\nserver: {port: 70000}\n", 3, "65535"),
    "a key that stands twice": ("store:\n  migrate: true\n  migrate: false\n", 3, "migrate"),
    "no YAML": ("server: {port: 1\nstore: [\n", None, ""),
    "an unknown edit": (
        "policies:\n  a:\n    trigger: {tokens: 9}\n    edits:\n      - {type: drop_oldset}\n",
        5,
        "drop_oldest",
    ),
    "an edit without the target it needs": (
        "policies:\n  a:\n    trigger: {tokens: 9}\n    edits:\n      - type: drop_oldest\n",
        None,
        "target",
    ),
    "a target above the trigger": (
        "policies:\n  a:\n    edits: [type: drop_oldest]\n    trigger: {tokens: 9}\n    target: {tokens: 99}",
        None,
        "target.tokens",
    ),
    "an edit that may not stand there": (
        "policies:\n  a:\n    on_arrival:\n      - type: keep_tool_calls\n",
        4,
        "truncate_tool_output",
    ),
    "a pattern that is none": ("policies:\n  a:\n    pin:\n      - regex: '(a'\n", 4, "RE2"),
    "an address for everybody and no key": ("server:\n  host: 0.0.0.0\n", 2, "auth.mode"),
    "keys and no key": ("auth:\n  mode: keys\n", None, "auth.keys"),
    "a policy named off": (
        "policies:\n  'off':\n    trigger: {tokens: 9}\n    edits: [{type: keep_tool_calls}]\n",
        None,
        "reserved",
    ),
    "a list": ("- a\n", 1, "mapping"),
}


@pytest.fixture
def config(tmp_path: Path, upstream: Upstream) -> Path:
    file = tmp_path / "config.yaml"
    store = tmp_path / "sessions.db"
    file.write_text(
        f"upstream: {{base_url: '{upstream.base_url}'}}\nstore: {{url: 'sqlite:///{store}'}}\n"
        "tokens: {method: estimate}\n"
    )
    return file


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Any:
    """Run a command in this process, which is faster than starting one; return exit code, output and errors."""

    def command(*arguments: str | Path) -> tuple[int, str, str]:
        return run_command(monkeypatch, capfdbinary, *arguments)

    return command


@contextmanager
def serving(config: Path) -> Iterator[tuple[Served, httpx.Client]]:
    """Serve in a child process, which is always ended afterwards."""
    with (
        Served(config, "--port", "0", new_interpreter=True).wait() as served,
        httpx.Client(base_url=served.url, trust_env=False, timeout=SECONDS) as client,
    ):
        assert client.get("/readyz").status_code == 200
        yield served, client


def ask(client: httpx.Client, session: str, text: str, model: str = "echo", **given: Any) -> httpx.Response:
    body = {"model": model, "messages": [{"role": "user", "content": text}], **given}
    return client.post("/v1/chat/completions", json=body, headers={"x-session-id": session})


@pytest.mark.parametrize("what", BROKEN)
def test_check_names_the_line_of_a_mistake(run: Any, tmp_path: Path, what: str) -> None:
    text, line, said = BROKEN[what]
    file = tmp_path / "wrong.yaml"
    file.write_text(text)
    code, out, errors = run("check", "--config", file)
    assert (code, out) == (2, "")
    place = re.search(r"wrong\.yaml:(\d+)", errors)
    assert place is not None, errors
    assert line is None or int(place[1]) == line, errors
    assert said in errors
    assert "Traceback" not in errors


def test_check_json_lists_the_errors(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("server: {port: x, host: 1}\n")
    code, out, _ = run("check", "--config", file, "--json")
    told = json.loads(out)
    assert (code, told["valid"], len(told["errors"])) == (2, False, 2)


def test_check_shows_no_secret(run: Any, tmp_path: Path) -> None:
    file = tmp_path / "wrong.yaml"
    file.write_text("auth: {mode: keys, keys: [{key: 'hush hush', tenat: 1}], admin_key: [hidden-key]}\n")
    code, out, errors = run("check", "--config", file)
    assert code == 2
    assert "hush" not in out + errors
    assert "hidden" not in out + errors


def test_check_accepts_a_valid_file(run: Any, config: Path) -> None:
    code, out, _ = run("check", "--config", config)
    assert (code, "valid" in out) == (0, True)


def test_check_of_a_missing_file(run: Any, tmp_path: Path) -> None:
    code, _, errors = run("check", "--config", tmp_path / "none.yaml")
    assert (code, "none.yaml" in errors) == (2, True)


def test_schema_describes_the_file(run: Any) -> None:
    code, out, _ = run("schema")
    schema = json.loads(out)
    assert code == 0
    assert {"server", "upstream", "store", "auth", "sessions", "policies"} <= set(schema["properties"])


@pytest.mark.parametrize(
    "command", [["serve", "--host", "0.0.0.0"], ["serve", "--port", "x"], ["nonsense"], ["sessions", "show"]]
)
def test_wrong_usage_is_exit_2(run: Any, config: Path, monkeypatch: pytest.MonkeyPatch, command: list[str]) -> None:
    monkeypatch.chdir(config.parent)
    code, out, errors = run(*command)
    assert (code, out) == (2, "")
    assert errors.strip()


def test_sessions_from_the_command_line(run: Any, config: Path, tmp_path: Path, upstream: Upstream) -> None:
    with serving(config) as (served, client):
        ask(client, "two", "hello")
        ask(client, "two", "again", "tool:weather")
        expected = client.get("/sessions/two/messages").json()["data"]
        # Commands read the store while the server runs.
        code, out, _ = run("sessions", "list", "--config", config, "--json")
        assert code == 0
        assert {row["id"]: row["messages"] for row in json.loads(out)}["two"] == 4
        assert served.stop() == 0, served.log
        assert "Traceback" not in served.log
    code, out, _ = run("sessions", "list", "--config", config)
    assert (code, "two" in out) == (0, True)
    code, out, _ = run("sessions", "show", "two", "--config", config, "--json")
    assert (code, json.loads(out)["data"]) == (0, expected)
    code, out, _ = run("sessions", "show", "two", "--config", config)
    assert (code, "again" in out, "weather" in out) == (0, True, True)

    file = tmp_path / "two.jsonl"
    assert run("sessions", "export", "two", "--config", config, "--out", file)[0] == 0
    code, out, _ = run("sessions", "export", "two", "--config", config)
    assert (code, out) == (0, file.read_text())
    assert run("sessions", "import", file, "--config", config)[0] == 2  # it exists
    assert run("sessions", "import", file, "--config", config, "--as", "three")[0] == 0
    assert json.loads(run("sessions", "show", "three", "--config", config, "--json")[1])["data"] == expected
    assert run("sessions", "delete", "two", "--config", config)[0] == 0
    assert run("sessions", "show", "two", "--config", config)[0] == 2
    assert run("sessions", "import", file, "--config", config)[0] == 0
    assert json.loads(run("sessions", "show", "two", "--config", config, "--json")[1])["data"] == expected
    broken = tmp_path / "broken.jsonl"
    broken.write_text(file.read_text().replace("again", "changed"))
    code, _, errors = run("sessions", "import", broken, "--config", config, "--as", "four")
    assert (code, "Traceback" in errors) == (2, False)
    assert run("sessions", "show", "four", "--config", config)[0] == 2


def test_upgrade_and_downgrade(run: Any, config: Path) -> None:
    assert run("upgrade", "--config", config)[0] == 0
    assert run("downgrade", "base", "--config", config)[0] == 0
    assert run("upgrade", "--config", config)[0] == 0
    assert run("sessions", "list", "--config", config, "--json")[:2] == (0, "[]\n")


def test_serve_on_a_taken_port(config: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        with Served(config, "--port", str(holder.getsockname()[1])) as served:
            assert served.process.wait(SECONDS) == 1
    assert "Traceback" not in served.log
    assert "address already in use" in served.log


def test_serve_with_a_store_in_a_missing_folder(config: Path) -> None:
    config.write_text("store: {url: 'sqlite:////no/such/folder/sessions.db'}\n")
    with Served(config, "--port", "0") as served:
        assert served.process.wait(SECONDS) == 1
    assert "Traceback" not in served.log
    assert "/no/such/folder" in served.log


def test_a_pending_exchange_is_interrupted_after_a_kill(config: Path, upstream: Upstream) -> None:
    with serving(config) as (served, client):
        ask(client, "s", "first")

        def cut_off() -> None:
            with pytest.raises(httpx.TransportError):
                ask(client, "s", "second", "long:10+gate", stream=True)

        thread = threading.Thread(target=cut_off)
        thread.start()
        until(lambda: len(upstream.log) == 2, "the provider is asked")
        until(lambda: _statuses(client) == ["complete", "pending"], "it is stored")
        served.kill()
        thread.join()
    with serving(config) as (_, client):
        assert _statuses(client) == ["complete", "interrupted"]
        assert [m["content"] for m in client.get("/sessions/s/messages").json()["data"]] == ["first", "echo: first"]
        assert ask(client, "s", "second").status_code == 200
        assert [m["content"] for m in client.get("/sessions/s/messages").json()["data"]][2:] == [
            *("second", "echo: second")
        ]


def _statuses(client: httpx.Client) -> list[str]:
    rows = client.get("/sessions/s/exchanges").json()["data"]
    return [row["status"] for row in rows][::-1]

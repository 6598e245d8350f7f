"""A configuration that changes while the proxy runs. tests/config/test_reload.py has the refused changes."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.support.command import run_command
from tests.support.served import SECONDS, Served, config_file
from tests.support.stores import empty_store
from tests.support.upstream import Upstream
from tests.support.waiting import until

SMALL: dict[str, Any] = {
    "trigger": {"messages": 2},
    "target": {"tokens": 1},
    "keep": {"rounds": 0},
    "edits": [{"type": "drop_oldest"}],
}
TALK = [{"role": role, "content": f"{role} says"} for role in ("user", "assistant", "user")]


@pytest.fixture
def config(tmp_path: Path, upstream: Upstream) -> Path:
    return config_file(tmp_path, upstream, empty_store(tmp_path / "palimpsest.db"), policies={"whole": {}})


BY_WINDOW: dict[str, Any] = {**SMALL, "trigger": {"ratio": 0.5}}


def changed(config: Path, **policies: Any) -> bytes:
    """Return the configuration with other policies."""
    return orjson.dumps({**orjson.loads(config.read_bytes()), "policies": policies})


def ask(served: Served) -> tuple[str, str]:
    """Send a request over a new connection, without a session; return the policy, and the messages sent."""
    body = {"model": "echo", "messages": TALK}
    with httpx.Client(base_url=served.url, trust_env=False, timeout=SECONDS) as client:
        answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.headers["x-context-policy"], answer.headers["x-context-messages-sent"]


def hang_up(served: Served, workers: int) -> None:
    """Send SIGHUP, which makes every worker reload the configuration and stops nothing."""
    served.process.send_signal(signal.SIGHUP)
    until(lambda: served.log.count("changed: nothing") == workers, "each reads it again", SECONDS)


def test_a_changed_policy_serves_the_next_request_and_a_broken_file_does_not(
    config: Path, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    with Served(config).wait() as served:
        hang_up(served, workers=1)
        assert ask(served) == ("whole", "3")
        config.write_bytes(changed(config, small=SMALL))
        until(lambda: ask(served) == ("small", "1"), "the changed policy serves", SECONDS)

        good = config.read_bytes()
        config.write_bytes(changed(config, small={**SMALL, "target": {"tokens": 0}}))
        until(lambda: "stays in force" in served.log, "the broken file is refused", SECONDS)
        code, _, lines = run_command(monkeypatch, capfdbinary, "check", "--config", config)
        assert code == 2
        assert all(f"configuration refused: {line}\n" in served.log for line in lines.splitlines())
        assert ask(served) == ("small", "1")

        new = config.with_name("new.yaml")
        new.write_bytes(changed(config, whole={}, small=SMALL))
        new.replace(config)
        until(lambda: ask(served) == ("whole", "3"), "the file that took its place serves", SECONDS)

        config.write_bytes(changed(config, by_window=BY_WINDOW))
        until(lambda: ask(served) == ("by_window", "3"), "the window is large, or not known", SECONDS)
        models = [{"match": ["echo"], "context_window": 10}]
        config.write_bytes(orjson.dumps({**orjson.loads(config.read_bytes()), "models": models}))
        until(lambda: ask(served) == ("by_window", "1"), "the window is small", SECONDS)

        assert not _is_quiet(served)
        other = {**orjson.loads(good), "server": {"port": 1}, "telemetry": {"log_level": "warning"}}
        config.write_bytes(orjson.dumps(other))
        until(lambda: ask(served) == ("small", "1"), "what can change changes", SECONDS)
        until(lambda: "needs a restart: server.port" in served.log, "what cannot is named", SECONDS)
        assert _is_quiet(served)
        assert served.stop() == 0
        assert "Traceback" not in served.log


def test_every_worker_follows_the_file_and_so_does_a_replacement(config: Path) -> None:
    with Served(config, "--workers", "2").wait() as served:
        hang_up(served, workers=2)
        assert ask(served) == ("whole", "3")
        config.write_bytes(changed(config, small=SMALL))
        until(lambda: served.log.count("again; changed: policies") == 2, "both read it", SECONDS)
        assert {ask(served) for _ in range(20)} == {("small", "1")}
        for process in served.workers:
            os.kill(process, signal.SIGKILL)
        until(lambda: len(served.workers) == 4, "others take their places", SECONDS)
        until(lambda: served.log.count("again; changed: policies") == 4, "they read it before they serve", SECONDS)
        assert {ask(served) for _ in range(20)} == {("small", "1")}


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what a process ignores is seen in /proc")
@pytest.mark.parametrize("workers", ["1", "2"])
def test_a_reload_during_the_start_ends_nothing(config: Path, workers: str) -> None:
    with Served(config, "--workers", workers, new_interpreter=True) as served:
        process = served.process

        def ignored() -> bool:  # the bit of signal 1 in what `proc` says
            status = Path(f"/proc/{process.pid}/status").read_text()
            return bool(int(status.partition("SigIgn:")[2].split()[0], 16) & 1)

        until(ignored, "it has begun", SECONDS)
        for _ in range(20):
            process.send_signal(signal.SIGHUP)
            time.sleep(0.05)
        assert ask(served.wait()) == ("whole", "3")
        assert served.stop() == 0


def test_a_key_that_was_taken_away_opens_no_replacement(tmp_path: Path, upstream: Upstream) -> None:
    secret = tmp_path / "key"
    secret.write_text("the-first-key-of-all")
    auth = {"mode": "keys", "keys": [{"key_file": str(secret), "tenant": "a"}]}
    store = empty_store(tmp_path / "palimpsest.db")
    config = config_file(tmp_path, upstream, store, auth=auth, upstream={"api_key": "sk-of-the-provider"})
    with Served(config, "--workers", "2").wait() as served:
        assert _listed(served, "the-first-key-of-all") == 200
        secret.write_text("the-second-key-of-all")
        served.process.send_signal(signal.SIGHUP)
        until(lambda: served.log.count("again; changed: auth.keys") == 2, "both read it", SECONDS)
        for process in served.workers:
            os.kill(process, signal.SIGKILL)
        until(lambda: served.log.count("again; changed: auth.keys") == 4, "they read it before they serve", SECONDS)
        assert _listed(served, "the-first-key-of-all") == 401
        assert _listed(served, "the-second-key-of-all") == 200


def test_a_worker_that_starts_while_the_file_has_mistakes_takes_what_the_others_have(
    tmp_path: Path, upstream: Upstream
) -> None:
    first, second = "the-first-key-of-all", "the-second-key-of-all"

    def auth(*keys: str) -> dict[str, Any]:
        return {"mode": "keys", "keys": [{"key": key, "tenant": "a"} for key in keys]}

    store, provider = empty_store(tmp_path / "palimpsest.db"), {"api_key": "sk-of-the-provider"}
    config = config_file(tmp_path, upstream, store, auth=auth(first, second), upstream=provider)
    with Served(config, "--workers", "2").wait() as served:
        config_file(tmp_path, upstream, store, auth=auth(second), upstream=provider)
        until(lambda: served.log.count("again; changed: auth.keys") == 2, "both read it", SECONDS)
        config.write_text("auth: [")
        until(lambda: served.log.count("stays in force") == 2, "both refuse it", SECONDS)
        for process in served.workers:
            os.kill(process, signal.SIGKILL)
        until(lambda: len(served.workers) == 4, "others take their places", SECONDS)
        until(lambda: served.log.count("again; changed: auth.keys") == 4, "they know it before they serve", SECONDS)
        assert {_listed(served, first) for _ in range(20)} == {401}
        assert _listed(served, second) == 200
        config_file(tmp_path, upstream, store, auth=auth(first), upstream=provider)
        until(lambda: served.log.count("again; changed: auth.keys") == 6, "both read it", SECONDS)
        assert {_listed(served, second) for _ in range(20)} == {401}


def _listed(served: Served, key: str) -> int:
    with httpx.Client(base_url=served.url, trust_env=False, timeout=SECONDS) as client:
        return client.get("/sessions", headers={"authorization": f"Bearer {key}"}).status_code


def _is_quiet(served: Served) -> bool:
    before = served.log
    ask(served)
    return served.log == before

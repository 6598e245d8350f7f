"""The file that changes while a process serves. Through the front door: tests/e2e/test_reload.py."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import anyio
import anyio.to_thread
import pytest

from proxy.config.reload import AcceptedFile, Reload, hears_hangup
from proxy.config.settings import Settings
from proxy.config.source import ConfigSource, Loaded
from tests.support.waiting import until

pytestmark = pytest.mark.anyio

SECONDS = 60
FIRST = "policies: {a: {keep: {rounds: 1}}}\n"
SECOND = "policies: {a: {keep: {rounds: 2}}}\n"
BROKEN = "policies: {a: {keep: {rounds: two}}}\n"


@pytest.fixture(autouse=True)
def log_of_the_configuration(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("configuration", "audit"):
        caplog.set_level(logging.INFO, f"palimpsest.{name}")


class _Process:
    """What takes settings while it runs: as an application does, and nothing else of one."""

    def __init__(self, loaded: Loaded) -> None:
        self.policies = loaded.settings.policies
        self.taken: list[str] = []
        self.reload = Reload(loaded, {"policies": self._policies, "telemetry.log_level": self._level})

    def _policies(self, settings: Settings) -> None:
        self.policies = settings.policies
        self.taken.append("policies")

    def _level(self, settings: Settings) -> None:
        self.taken.append(settings.telemetry.log_level)

    @property
    def rounds(self) -> int:
        return self.policies["a"].keep.rounds


@asynccontextmanager
async def following(path: Path | None = None, **overrides: Any) -> AsyncIterator[_Process]:
    process = _Process(ConfigSource(path=path, overrides=overrides).read())
    async with process.reload.running():
        yield process


async def becomes(true: Callable[[], object], what: str) -> None:
    await anyio.to_thread.run_sync(until, true, what, SECONDS)


def config(text: str, name: str = "config.yaml") -> Path:
    file = Path(name)
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return file


def link(name: str, target: str) -> None:
    """Make a link, or exchange one in one step."""
    made = Path("..made")
    made.symlink_to(target)
    made.replace(name)


async def test_a_changed_file_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    file = config(FIRST)
    async with following() as process:
        file.write_text(SECOND)
        await becomes(lambda: process.rounds == 2, "the policy changes")
    assert "configuration read again; changed: policies" in caplog.messages
    assert process.taken == ["policies"]


async def test_an_atomic_replacement_is_taken() -> None:
    file = config(FIRST, "named.yaml")
    async with following(file) as process:
        for rounds in (2, 3):
            config(f"policies: {{a: {{keep: {{rounds: {rounds}}}}}}}\n", "new.yaml").replace(file)
            await becomes(lambda rounds=rounds: process.rounds == rounds, "the policy changes")  # type: ignore[misc]  # a lambda's default


async def test_the_links_of_a_mounted_config_map_are_followed() -> None:
    config(FIRST, "..1/config.yaml")
    link("..data", "..1")
    link("config.yaml", "..data/config.yaml")
    async with following() as process:
        config(SECOND, "..2/config.yaml")
        link("..data", "..2")
        shutil.rmtree("..1")
        await becomes(lambda: process.rounds == 2, "the policy changes")


async def test_a_file_that_comes_later_is_taken() -> None:
    async with following() as process:
        assert process.policies == {}
        config(FIRST)
        await becomes(lambda: process.policies, "the policy is there")


async def test_a_change_before_the_start_is_taken_first() -> None:
    file = config(FIRST)
    process = _Process(ConfigSource(path=file).read())
    file.write_text(SECOND)
    async with process.reload.running():
        assert process.rounds == 2


async def test_an_invalid_file_is_refused_with_the_lines_of_check(caplog: pytest.LogCaptureFixture) -> None:
    file = config(FIRST)
    async with following() as process:
        file.write_text(BROKEN)
        await becomes(lambda: "stays in force" in caplog.text, "it is refused")
        assert process.rounds == 1
        refused = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
        assert refused == [
            (
                "configuration refused: config.yaml:1: policies.a.keep.rounds: "
                "a whole number is expected here (got 'two')"
            ),
            "the previous configuration stays in force",
        ]
        file.write_text(SECOND)
        await becomes(lambda: process.rounds == 2, "the mended file is taken")


@pytest.mark.parametrize("text", ["", "  \n"])
async def test_an_emptied_file_is_refused(text: str, caplog: pytest.LogCaptureFixture) -> None:
    process = _Process(ConfigSource().parse(FIRST.encode()))
    config(text)
    await process.reload.look()
    assert process.rounds == 1
    assert "config.yaml: the file is empty" in caplog.text


@pytest.mark.parametrize(
    ("path", "said"), [(None, "the file does not exist any more"), (Path("named.yaml"), "there is no such file")]
)
async def test_a_deleted_file_is_refused(path: Path | None, said: str, caplog: pytest.LogCaptureFixture) -> None:
    file = config(FIRST, str(path or "config.yaml"))
    process = _Process(ConfigSource(path=path).read())
    file.unlink()
    for _ in range(2):
        await process.reload.look()
    assert process.rounds == 1
    assert caplog.text.count(f"{file}: {said}") == 1
    file.write_text(SECOND)
    await process.reload.look()
    assert process.rounds == 2


async def test_a_file_that_was_empty_at_the_start_may_not_become_empty_again(caplog: pytest.LogCaptureFixture) -> None:
    config("")
    process = _Process(ConfigSource().read())
    config("# nothing\n")
    await process.reload.look()
    config("")
    await process.reload.look()
    assert process.policies == {}
    assert "refused" in caplog.text  # what was written there may have been more than a comment


async def test_settings_that_need_a_restart_are_named_and_stay(caplog: pytest.LogCaptureFixture) -> None:
    file = config(FIRST)
    process = _Process(ConfigSource().read())
    file.write_text(
        "server: {port: 1}\n"
        "upstream: {api_key: hush}\n"
        "auth: {mode: keys, keys: [{key: secret-secret-secret, tenant: a}]}\n"
        "telemetry: {log_level: debug, log_format: json}\n" + SECOND
    )
    await process.reload.look()
    assert process.taken == ["policies", "debug"]
    assert caplog.messages == [
        "configuration read again; changed: policies, telemetry.log_level",
        (
            "changed in the configuration, and needs a restart: server.port, upstream.api_key, auth.mode, "
            "auth.keys, telemetry.log_format"
        ),
    ]
    assert not any(secret in caplog.text for secret in ("hush", "secret"))
    caplog.clear()
    file.write_text(SECOND + "telemetry: {log_level: debug}\n")
    await process.reload.look()
    assert caplog.messages == ["configuration read again; changed: nothing"]


async def test_environment_and_command_line_still_win(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PALIMPSEST_POLICIES__A__KEEP__SPANS", "7")
    file = config(FIRST)
    process = _Process(ConfigSource(overrides={"telemetry": {"log_level": "error"}}).read())
    file.write_text(SECOND + "telemetry: {log_level: debug}\n")
    await process.reload.look()
    assert (process.rounds, process.policies["a"].keep.spans) == (2, 7)
    assert process.taken == ["policies"]


async def test_the_order_of_policies_is_a_change() -> None:
    file = config("policies: {a: {}, b: {}}")
    process = _Process(ConfigSource().read())
    file.write_text("policies: {b: {}, a: {}}")
    await process.reload.look()
    assert list(process.policies) == ["b", "a"]


async def test_warnings_are_logged_at_a_reload(caplog: pytest.LogCaptureFixture) -> None:
    process = _Process(ConfigSource().read())
    edits = "edits: [{type: keep_tool_calls}]"
    config(f"policies: {{a: {{trigger: {{every_request: true, tokens: 9}}, {edits}}}}}")
    await process.reload.look()
    assert "config.yaml:1: policies.a.trigger.tokens: beside every_request" in caplog.messages[0]


async def test_an_internal_error_does_not_stop_the_reload(caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: Settings) -> None:
        raise ZeroDivisionError

    file = config(FIRST)
    follows = Reload(ConfigSource().read(), {"policies": fail})
    file.write_text(SECOND)
    await follows.look()
    assert "a mistake of the proxy's own" in caplog.text


async def test_a_circle_of_links_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    config(FIRST)
    async with following() as process:
        link("other.yaml", "config.yaml")
        link("config.yaml", "other.yaml")
        await becomes(lambda: "stays in force" in caplog.text, "it is refused")
        config(SECOND, "new.yaml").replace("config.yaml")
        await becomes(lambda: process.rounds == 2, "the policy changes")


@pytest.mark.parametrize("absolute", [False, True])
async def test_a_link_into_another_folder_is_followed(tmp_path: Path, absolute: bool) -> None:
    config(FIRST, "elsewhere/real.yaml")
    link("config.yaml", f"{tmp_path if absolute else '.'}/elsewhere/real.yaml")
    async with following() as process:
        config(SECOND, "elsewhere/real.yaml")
        await becomes(lambda: process.rounds == 2, "the policy changes")


async def test_a_change_with_an_equal_time_is_found() -> None:
    """As on file systems whose times are coarse."""
    file = config(FIRST)
    times = file.stat()
    async with following() as process:
        file.write_text(SECOND)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        await becomes(lambda: process.rounds == 2, "the policy changes")


async def test_sighup_reads_the_configuration_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: False)
    before = signal.getsignal(signal.SIGHUP)
    config(FIRST)
    async with following():
        assert signal.getsignal(signal.SIGHUP) != before  # or it would end the tests
        os.kill(os.getpid(), signal.SIGHUP)
        await becomes(lambda: "changed: nothing" in caplog.text, "it reads again")
    assert signal.getsignal(signal.SIGHUP) == before


def test_a_file_that_is_too_long_is_kept_for_nobody() -> None:
    kept = AcceptedFile()
    assert kept.content() == b""
    for content, found in ((b"a: 1", b"a: 1"), (b"b", b"b"), (bytes(2 << 20), b"")):
        kept.keep(content)
        assert kept.content() == found


def test_sighup_counts_in_the_main_thread_without_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bool] = []
    for on_terminal in (False, True):
        monkeypatch.setattr(os, "isatty", lambda _, on_terminal=on_terminal: on_terminal)
        heard.append(hears_hangup())
    monkeypatch.setattr(os, "isatty", lambda _: False)
    thread = threading.Thread(target=lambda: heard.append(hears_hangup()))
    thread.start()
    thread.join()
    monkeypatch.delattr(signal, "SIGHUP")
    heard.append(hears_hangup())
    assert heard == [True, False, False, False]

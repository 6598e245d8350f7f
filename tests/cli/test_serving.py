"""`serve`: what it prints, why it does not start, and its workers. That it serves: tests/e2e."""

from __future__ import annotations

import errno
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import pytest
import typer

from proxy.cli import serving
from proxy.cli.serving import Workers, pause_after, server_config
from proxy.config import ConfigSource, Loaded, Settings
from proxy.dialects.generations import SharedRoom
from proxy.server.app import Worker
from proxy.trimming import Policy
from tests.cli.conftest import Run
from tests.support.served import environment
from tests.support.stores import empty_store

# The tests have threads; the proxy has none when it forks, as a test below says.
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.fixture(autouse=True)
def _room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let what a server sets for its process hold for one test."""
    monkeypatch.setattr(SharedRoom, "factor", SharedRoom.factor)


@pytest.fixture(autouse=True)
def log_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "set_up_logging", lambda *_: None)


@pytest.mark.parametrize(
    ("host", "address"),
    [("127.0.0.1", "http://127.0.0.1:8081"), ("localhost", "http://localhost:8081"), ("::1", "http://[::1]:8081")],
)
def test_the_addresses_of_the_banner_can_be_copied(host: str, address: str) -> None:
    settings = Settings(
        server={"host": host, "port": 8081},  # type: ignore[arg-type]  # pydantic reads it
        policies={"lean": Policy(), "rest": Policy()},
    )
    said = serving._banner(settings)
    assert f"{address} -> https://api.openai.com/v1" in said
    assert f"OPENAI_BASE_URL={address}/v1 " in said
    assert f"ANTHROPIC_BASE_URL={address}," in said
    assert f"{address}/ui, or curl {address}/sessions" in said
    assert "lean, rest" in said
    assert "`policies: {default: {}}`" not in said
    default = serving._banner(Settings())
    assert "built-in default: clears old tool results once that saves money" in default
    assert "`policies: {default: {}}` switches it off" in default


def test_the_banner_names_the_real_port() -> None:
    settings = Settings(server={"port": 0})  # type: ignore[arg-type]  # pydantic reads it
    assert "OPENAI_BASE_URL=http://127.0.0.1:4321/v1 " in serving._banner(settings, 4321)


def test_the_banner_says_where_a_key_belongs() -> None:
    auth = {"mode": "keys", "keys": [{"key": "hush-hush-hush-hush", "tenant": "a"}]}
    settings = Settings(auth=auth)  # type: ignore[arg-type]  # pydantic reads it
    said = serving._banner(settings)
    assert 'curl -H "Authorization: Bearer $YOUR_KEY" http://127.0.0.1:8080/sessions' in said


def test_the_banner_shows_no_secret() -> None:
    settings = Settings(
        upstream={"api_key": "sk-secret"},  # type: ignore[arg-type]  # pydantic reads it
        auth={
            "mode": "keys",
            "keys": [{"key": "hush-hush-hush-hush", "tenant": "t"}],
            "admin_key": "root-key-root-key",
        },  # type: ignore[arg-type]  # pydantic reads it
    )
    assert not any(secret in serving._banner(settings) for secret in ("sk-secret", "hush", "root-key"))


def test_the_server_adds_no_headers_and_has_a_grace_period() -> None:
    config = server_config(Settings(server={"port": 81}), port=82)  # type: ignore[arg-type]  # pydantic reads it
    assert (config.host, config.port, config.lifespan, config.access_log) == ("127.0.0.1", 82, "on", False)
    assert (config.server_header, config.date_header) == (False, False)
    assert config.timeout_graceful_shutdown == 30 + serving.GRACE_SECONDS


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


def test_a_host_without_an_address_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nobody(*_: object, **__: object) -> None:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nobody)
    with pytest.raises(typer.Exit) as end:
        serving._bound("nowhere", 80)
    assert end.value.exit_code == 1
    assert capsys.readouterr().err == "Cannot listen on nowhere:80: name or service not known.\n"


def test_a_host_that_can_have_no_address_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(typer.Exit) as end:
        serving._bound("ä" * 70, 80)
    assert end.value.exit_code == 1
    assert capsys.readouterr().err == f"Cannot listen on {'ä' * 70}:80: this is no name of a host.\n"


def test_two_proxies_cannot_serve_on_one_port(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    settings = Settings(
        store={"url": f"sqlite:///{tmp_path / 's.db'}"},  # type: ignore[arg-type]  # pydantic reads it
        tokens={"method": "estimate"},  # type: ignore[arg-type]  # pydantic reads it
    )
    told: list[str] = []
    (ours,) = serving._bound("127.0.0.1", 0)
    (theirs,) = serving._bound("127.0.0.1", ours.getsockname()[1])
    with ours, theirs:
        theirs.listen()
        server = serving._Server(server_config(settings), 1, lambda: told.append("serves"))
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
def test_a_store_that_cannot_be_used_stops_the_start(run: Run, config: Path, text: str, code: int, said: str) -> None:
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
def test_wrong_options_of_serve(run: Run, config: Path, arguments: list[str]) -> None:
    code, out, errors = run("serve", *arguments)
    assert (code, out) == (2, "")
    assert errors.strip()
    assert not config.with_name("sessions.db").exists()


PATIENCE = 60


@pytest.fixture
def listening() -> Any:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def _cannot_start(_sockets: list[socket.socket], _worker: Worker, _serves: Callable[[], None]) -> None:
    raise SystemExit(3)


def _ends_once(folder: Path, sockets: list[socket.socket], worker: Worker, serves: Callable[[], None]) -> None:
    """Serve; the first ends at once, the second notes whom it follows and has the parent told to stop."""
    serves()
    if not worker.ended:
        folder.joinpath("first").write_text(worker.mark)
        raise SystemExit(1)
    folder.joinpath("second").write_text(f"{worker.ended} {sockets[0].getsockname()}")
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(PATIENCE)  # until it is told to end, which is at once


def _hears(folder: Path, _sockets: list[socket.socket], _worker: Worker, serves: Callable[[], None]) -> None:
    """Have the parent told of a hang-up, wait until it is handed on, and have the parent told to stop."""
    heard: list[int] = []  # an event would wait for its own lock, if the signal comes while it is looked at
    signal.signal(signal.SIGHUP, lambda number, _: heard.append(number))
    serves()
    while not heard:
        os.kill(os.getppid(), signal.SIGHUP)
        time.sleep(0.05)
    folder.joinpath("heard").touch()
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(PATIENCE)  # until it is told to end, which is at once


def _deaf(_sockets: list[socket.socket], _worker: Worker, serves: Callable[[], None]) -> None:
    """Serve, have the parent told twice to stop, and do not listen to it."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    serves()
    os.kill(os.getppid(), signal.SIGINT)
    while True:
        time.sleep(0.05)
        os.kill(os.getppid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("failures", "pause"), [(0, 0.0), (1, 0.0), (2, 0.5), (3, 1.0), (4, 2.0), (20, 30.0), (10_000, 30.0)]
)
def test_a_worker_that_keeps_failing_is_replaced_ever_later(failures: int, pause: float) -> None:
    assert pause_after(failures) == pause


def test_a_worker_that_cannot_start_stops_the_start(listening: socket.socket) -> None:
    told: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    assert not Workers(1, _cannot_start, (), [listening], PATIENCE).run(lambda: told.append("ready"))
    assert told == []
    assert listening.fileno() == -1
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("forks", [True, False])
def test_a_replacement_gets_the_mark_of_its_predecessor(
    listening: socket.socket, tmp_path: Path, *, forks: bool
) -> None:
    told: list[str] = []
    address = listening.getsockname()
    crew = Workers(1, _ends_once, (tmp_path,), [listening], PATIENCE, forks=forks)
    assert crew.run(lambda: told.append("ready"))
    assert told == ["ready"]
    mark = tmp_path.joinpath("first").read_text()
    assert tmp_path.joinpath("second").read_text() == f"({mark!r},) {address}"


@pytest.mark.parametrize("forks", [True, False])
def test_sighup_is_passed_on_to_the_workers(
    listening: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, forks: bool
) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: False)  # on a terminal it would end the tests
    before = signal.getsignal(signal.SIGHUP)
    assert Workers(1, _hears, (tmp_path,), [listening], PATIENCE, forks=forks).run(lambda: None)
    assert tmp_path.joinpath("heard").exists()
    assert signal.getsignal(signal.SIGHUP) is before


def test_a_worker_in_a_new_interpreter_remembers_as_much_as_one_that_was_forked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(SharedRoom, "factor", 1)
    monkeypatch.setattr(serving, "_Server", MagicMock())
    settings = Settings(server={"max_memory": 16 << 30, "workers": 2})  # type: ignore[arg-type]  # pydantic reads it
    loaded = Loaded(source=ConfigSource(), content=None, settings=settings)
    serving._work(loaded, None, [], Worker(mark="0123abcd"), lambda: None)
    assert SharedRoom.factor == 4


def test_a_second_signal_kills_the_workers(listening: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    assert Workers(1, _deaf, (), [listening], 10 * PATIENCE).run(lambda: None)
    assert "did not end in time and was killed" in caplog.text


def test_a_process_that_cannot_be_started_is_tried_again(
    listening: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    start = BaseProcess.start
    started: list[BaseProcess] = []

    def no_room_for_the_second(process: BaseProcess) -> None:
        started.append(process)
        if len(started) == 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        start(process)

    monkeypatch.setattr(BaseProcess, "start", no_room_for_the_second)
    assert Workers(1, _ends_once, (tmp_path,), [listening], PATIENCE).run(lambda: None)
    assert len(started) == 3
    assert "a worker could not be started (Resource temporarily unavailable)" in caplog.text
    assert tmp_path.joinpath("second").exists()


LOOKS = """
import gc, json, os, sys, threading
from proxy.__main__ import main
from proxy.cli import serving
from proxy.tokens import vocabulary

def look(crew, ready):
    links = [os.readlink(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
             if os.path.exists(f"/proc/self/fd/{number}")]
    print(json.dumps({
        "threads": [threading.active_count(), len(os.listdir("/proc/self/task"))],
        "sockets": sum(link.startswith("socket:") for link in links),
        "polls": [link for link in links if "event" in link],
        "files": [link for link in links if ".db" in link],
        "frozen": gc.get_freeze_count() > 100_000,
        "vocabularies": vocabulary._load.cache_info().currsize,
        "forks": crew._processes.get_start_method(),
    }))
    return True

serving.Workers.run = look
sys.argv = ["palimpsest", "serve", "--port", "0", "--workers", "2"]
main()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="it looks at /proc")
@pytest.mark.parametrize("kind", ["sqlite", "postgres"])
def test_workers_are_forked_with_one_thread_and_no_connections(
    kind: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = empty_store(tmp_path / "s.db") if kind == "sqlite" else request.getfixturevalue("_migrated_postgres")
    config = tmp_path / "config.yaml"
    config.write_text(f"store: {{url: '{url}'}}")
    command = [sys.executable, "-c", LOOKS]
    told = json.loads(subprocess.check_output(command, cwd=tmp_path, env=environment()))  # noqa: S603 - our own
    assert told == {
        "threads": [1, 1],
        "sockets": 1,  # the one that listens
        "polls": [],
        "files": [],
        "frozen": True,
        "vocabularies": 2,
        "forks": "fork",
    }


FILES = """
import resource, sys
from proxy.__main__ import main
from proxy.cli import serving

def look(*_):
    print(*resource.getrlimit(resource.RLIMIT_NOFILE))
    return True

most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv.pop(1)), min(most, int(sys.argv.pop(1)))))
serving._serve_alone = look
main()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="it has no such limit")
@pytest.mark.parametrize(
    ("soft", "hard", "told"), [(256, 4_096, "4096 4096"), (512, 512, "512 512"), (256, 10**9, None)]
)
def test_as_many_files_may_be_open_as_the_system_allows(config: Path, soft: int, hard: int, told: str | None) -> None:
    command = [sys.executable, "-c", FILES, str(soft), str(hard), "serve", "--config", str(config), "--port", "0"]
    said = subprocess.check_output(command, cwd=config.parent, env=environment(), text=True).strip()  # noqa: S603 - our own
    assert said == told if told else int(said.split()[0]) > soft


def test_one_process_loads_nothing_in_advance(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def serve_alone(*_: object) -> bool:
        return True

    monkeypatch.setattr(serving, "_load_for_all", lambda _: pytest.fail("it is for several workers"))
    monkeypatch.setattr(serving, "_serve_alone", serve_alone)
    serving.serve(config, port=0)

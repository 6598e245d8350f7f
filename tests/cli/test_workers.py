"""The processes themselves, with work that is no server. That they serve: tests/e2e/test_workers.py."""

from __future__ import annotations

import errno
import os
import signal
import socket
import threading
import time
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

import pytest

from proxy.cli.workers import Told, Workers, pause_after
from proxy.server.app import Worker

PATIENCE = 60


@pytest.fixture
def listening() -> Any:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield bound


def _cannot_start(_sockets: list[socket.socket], _worker: Worker, _serves: Told) -> None:
    raise SystemExit(3)


def _ends_once(folder: Path, sockets: list[socket.socket], worker: Worker, serves: Told) -> None:
    """Serve; the first ends at once, the second notes whom it follows and has the parent told to stop."""
    serves()
    if not worker.ended:
        folder.joinpath("first").write_text(worker.mark)
        raise SystemExit(1)
    folder.joinpath("second").write_text(f"{worker.ended} {sockets[0].getsockname()}")
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(PATIENCE)  # until it is told to end, which is at once


def _hears(folder: Path, _sockets: list[socket.socket], _worker: Worker, serves: Told) -> None:
    """Have the parent told of a hang-up, wait until it is handed on, and have the parent told to stop."""
    heard = threading.Event()
    signal.signal(signal.SIGHUP, lambda *_: heard.set())
    serves()
    while not heard.wait(0.05):
        os.kill(os.getppid(), signal.SIGHUP)
    folder.joinpath("heard").touch()
    os.kill(os.getppid(), signal.SIGTERM)
    time.sleep(PATIENCE)  # until it is told to end, which is at once


def _deaf(_sockets: list[socket.socket], _worker: Worker, serves: Told) -> None:
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
def test_who_ends_early_again_and_again_is_replaced_ever_later(failures: int, pause: float) -> None:
    assert pause_after(failures) == pause


def test_a_worker_that_cannot_start_stops_the_start(listening: socket.socket) -> None:
    told: list[str] = []
    before = signal.getsignal(signal.SIGTERM)
    assert not Workers(1, _cannot_start, (), [listening], PATIENCE).run(lambda: told.append("ready"))
    assert told == []
    assert listening.fileno() == -1
    assert signal.getsignal(signal.SIGTERM) is before


def test_who_follows_is_told_whom_and_a_signal_ends_it(listening: socket.socket, tmp_path: Path) -> None:
    told: list[str] = []
    address = listening.getsockname()
    assert Workers(1, _ends_once, (tmp_path,), [listening], PATIENCE).run(lambda: told.append("ready"))
    assert told == ["ready"]
    mark = tmp_path.joinpath("first").read_text()
    assert tmp_path.joinpath("second").read_text() == f"({mark!r},) {address}"


def test_a_hangup_is_handed_on(
    listening: socket.socket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: False)  # on a terminal it would end the tests
    before = signal.getsignal(signal.SIGHUP)
    assert Workers(1, _hears, (tmp_path,), [listening], PATIENCE).run(lambda: None)
    assert tmp_path.joinpath("heard").exists()
    assert signal.getsignal(signal.SIGHUP) is before


def test_a_second_signal_does_not_wait(listening: socket.socket, caplog: pytest.LogCaptureFixture) -> None:
    assert Workers(1, _deaf, (), [listening], 10 * PATIENCE).run(lambda: None)
    assert "had to be killed" in caplog.text


def test_where_there_is_no_room_for_a_process_the_others_go_on(
    listening: socket.socket,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    start = SpawnProcess.start
    started: list[SpawnProcess] = []

    def no_room_for_the_second(process: SpawnProcess) -> None:
        started.append(process)
        if len(started) == 2:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        start(process)

    monkeypatch.setattr(SpawnProcess, "start", no_room_for_the_second)
    assert Workers(1, _ends_once, (tmp_path,), [listening], PATIENCE).run(lambda: None)
    assert len(started) == 3
    assert "no worker could be started (Resource temporarily unavailable)" in caplog.text
    assert tmp_path.joinpath("second").exists()

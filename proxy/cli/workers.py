"""Several processes that share one port: started, watched, replaced, ended together.

The parent serves nothing. It holds the listening sockets and the processes, and three rules:

- A worker is a new interpreter ("spawn", on every system): it gets its arguments pickled and shares no
  memory. It says once that it serves; if one ends before, at the start of all, the start has failed.
- A worker that ends later is replaced, at once the first time and after growing pauses where that
  does not help. The one in its place is told the marks of those it follows, whose work it gives up.
- A signal to stop goes to all; a second one ends them at once. A worker whose parent is gone, however
  it went, stops by itself. SIGHUP is handed on to those that serve, who know what to do with it.

It knows nothing of HTTP, the store or the settings: what a worker does is a function.
"""

from __future__ import annotations

import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.context import SpawnProcess
from typing import Any, Final, TypeAlias

from proxy.config import hears_hangup
from proxy.server.app import Worker

Work: TypeAlias = Callable[..., None]
"""What a worker does: called with the given arguments, the sockets, its `Worker`, and its `Told`."""

_LOG: Final = logging.getLogger("palimpsest.workers")
_STOPPING: Final = (signal.SIGTERM, signal.SIGINT)
_SERVES: Final = b"serves"
_STEADY_SECONDS: Final = 10.0
"""A worker that lived this long did not fail because of how it was started."""
_LAST_SECONDS: Final = 60.0
"""How long a worker without a parent may take to end in order."""
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0


@dataclass(frozen=True, slots=True)
class Told:
    """A worker's way to say that it serves; comes to it pickled."""

    connection: socket.socket

    def __call__(self) -> None:
        """Say it."""
        with suppress(OSError):  # the parent is gone: `_follow_parent` sees to that
            self.connection.sendall(_SERVES)


@dataclass(slots=True)
class _Place:
    """One of the N, and who fills it."""

    process: SpawnProcess | None = None
    mark: str = ""
    heard: socket.socket | None = None
    """Where the worker says that it serves; None once it did, or cannot any more."""
    serves: bool = False
    started: float = 0.0
    due: float = 0.0
    """When the next one is to start, where there is none."""
    failures: int = 0
    """How many in a row did not live long."""
    ended: list[str] = field(default_factory=list[str])
    """Marks of those who ended here and whose work nobody has given up yet."""


class Workers:
    """N processes that do the same work on the same sockets."""

    def __init__(
        self, count: int, work: Work, arguments: Sequence[Any], sockets: list[socket.socket], patience: float
    ) -> None:
        """Start nothing yet. `patience`: seconds that a worker may take to end before it is killed."""
        self._work = work
        self._arguments = tuple(arguments)
        self._sockets = sockets
        self._patience = patience
        self._places = [_Place() for _ in range(count)]
        self._serving = False
        self._spawn = get_context("spawn")

    def run(self, ready: Callable[[], None]) -> bool:
        """Keep the workers going until a signal comes; call `ready` once all of them serve.

        Returns whether they were told to stop; False where one could not start. Either way none is left.
        """
        with _signals() as (noted, hangups, bell):
            try:
                for place in self._places:
                    self._start(place)
                while not noted:
                    wait([bell, *self._news()], self._next_start())
                    _silence(bell)
                    if hangups:
                        hangups.clear()
                        self._hand_on()
                    if not self._look(ready):
                        return False
                return True
            finally:
                self._end(noted, bell)

    # ----------------------------------------------------------------------------------- watching

    def _start(self, place: _Place) -> None:
        place.mark = secrets.token_hex(4)
        place.heard, says = socket.socketpair()
        worker = Worker(mark=place.mark, ended=tuple(place.ended))
        place.process = self._spawn.Process(
            target=_run,
            args=(self._work, (*self._arguments, self._sockets, worker, Told(connection=says))),
            daemon=True,
        )
        # Blocked until the worker ignores it: a new interpreter would end with a trace.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            place.process.start()
        except OSError:
            place.process = None
            place.heard.close()
            place.heard = None
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            says.close()
        place.started = time.monotonic()

    def _replace(self, place: _Place) -> None:
        """Start another worker in a place; later, where the machine has no room for a process just now."""
        try:
            self._start(place)
        except OSError as why:
            place.failures += 1
            pause = max(pause_after(place.failures), _FIRST_PAUSE)
            place.due = time.monotonic() + pause
            _LOG.error("no worker could be started (%s): again in %g s", why.strerror or why, pause)

    def _news(self) -> list[int | socket.socket]:
        """Return what becomes readable when a worker has said something or has ended."""
        news: list[int | socket.socket] = []
        for place in self._places:
            if place.process is not None:
                news.append(place.process.sentinel)
            if place.heard is not None:
                news.append(place.heard)
        return news

    def _next_start(self) -> float | None:
        """Return for how many seconds there is nothing to start; None where nobody is missing."""
        due = [place.due for place in self._places if place.process is None]
        return max(0.0, min(due) - time.monotonic()) if due else None

    def _look(self, ready: Callable[[], None]) -> bool:
        """Deal with all that happened; tell whether it can go on."""
        for place in self._places:
            # Asked first: who has ended by then has said all that it had to say.
            ended = (
                place.process if place.process is not None and place.process.exitcode is not None else None
            )
            if place.heard is not None and wait([place.heard], 0):
                self._hear(place)
            if ended is not None:
                if not self._serving and not place.serves:
                    _LOG.error("a worker (process %s) did not start: nothing is served", ended.pid)
                    return False
                self._bury(place, ended)
            if place.process is None and place.due <= time.monotonic():
                self._replace(place)
        if not self._serving and all(place.serves for place in self._places):
            self._serving = True
            ready()
        return True

    def _hand_on(self) -> None:
        """Send the signal that came here to those that serve; one that is starting reads all anew anyway."""
        for place in self._places:
            if place.process is not None and place.process.pid is not None and place.serves:
                with suppress(ProcessLookupError):
                    os.kill(place.process.pid, signal.SIGHUP)

    def _hear(self, place: _Place) -> None:
        heard, place.heard = place.heard, None
        if heard is None:
            return
        with heard:
            place.serves = bool(heard.recv(len(_SERVES)))
        if place.serves:
            place.ended.clear()  # it has given up their work before it served

    def _bury(self, place: _Place, process: SpawnProcess) -> None:
        """Note that a worker ended, and when another is to take its place."""
        process.join()
        now = time.monotonic()
        steady = now - place.started >= _STEADY_SECONDS
        place.failures = 0 if steady else place.failures + 1
        pause = pause_after(place.failures)
        _LOG.warning(
            "a worker (process %s) ended with %s: another one takes its place%s",
            process.pid,
            process.exitcode,
            f" in {pause:g} s" if pause else "",
        )
        if place.heard is not None:
            place.heard.close()
            place.heard = None
        place.ended.append(place.mark)
        process.close()
        place.process, place.due, place.serves = None, now + pause, False

    # ------------------------------------------------------------------------------------- ending

    def _end(self, noted: list[int], bell: socket.socket) -> None:
        """End every worker: in order first, by force where one does not listen."""
        for listening in self._sockets:
            listening.close()  # once the workers have closed theirs, who connects is refused
        running = [place.process for place in self._places if place.process is not None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + self._patience
        # Asked anew each time and once only: who ends between two looks would be waited for in vain.
        while alive := [process for process in running if process.exitcode is None]:
            if time.monotonic() >= deadline or len(noted) > 1:  # whoever asks twice does not want to wait
                break
            wait([bell, *(process.sentinel for process in alive)], max(0.0, deadline - time.monotonic()))
            _silence(bell)
        for process in alive:
            _LOG.error("a worker (process %s) had to be killed: it did not end in time", process.pid)
            process.kill()
        for process in running:
            process.join()
        for place in self._places:
            if place.heard is not None:  # it ended, or was ended, before what it said was read
                place.heard.close()
                place.heard = None


def pause_after(failures: int) -> float:
    """Return how many seconds to wait before a worker is replaced that was the n-th in a row to end early."""
    return 0.0 if failures < 2 else min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(failures - 2, 10))


def _run(work: Work, arguments: tuple[Any, ...]) -> None:
    """Be a worker."""
    signal.signal(signal.SIGTERM, _leave)
    # Ctrl-C goes to every process of the terminal: the parent alone answers it, and tells each worker once.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_follow_parent, name="palimpsest-parent", daemon=True).start()
    work(*arguments)


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def _follow_parent() -> None:
    """Stop this process once its parent is gone, by whatever way."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_SECONDS)
        os._exit(1)  # it does not listen, and nobody else will see to it


@contextmanager
def _signals() -> Generator[tuple[list[int], list[int], socket.socket]]:
    """Note the signals to stop, and those to hand on, instead of being stopped.

    The socket becomes readable when one comes.
    """
    noted: list[int] = []
    hangups: list[int] = []
    bell, rings = socket.socketpair()
    bell.setblocking(False)
    rings.setblocking(False)
    before = {number: signal.signal(number, lambda got, _: noted.append(got)) for number in _STOPPING}
    if hears_hangup():
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda got, _: hangups.append(got))
    woken = signal.set_wakeup_fd(rings.fileno(), warn_on_full_buffer=False)
    try:
        yield noted, hangups, bell
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        bell.close()
        rings.close()


def _silence(bell: socket.socket) -> None:
    with suppress(BlockingIOError):
        bell.recv(4096)

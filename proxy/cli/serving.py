"""`serve`: runs the proxy, in this process or in several workers that share its port.

With workers, the parent serves nothing. It holds the listening sockets and watches the processes:

- A worker is forked from the parent, which has loaded what all need; what nobody writes to is in memory once. The
  parent has one thread, no event loop and no connections. Where fork is not safe (macOS), a worker is a new
  interpreter ("spawn").
- A worker reports once that it serves. If it ends before that, at the first start, it is tried again twice; then the
  start has failed.
- A worker that ends later is replaced: at once the first time, after growing pauses if that does not help.
  The new one gets the marks of its predecessors and gives up their pending exchanges.
- A signal to stop goes to all workers, and a second one kills them. A worker whose parent is gone stops.
  SIGHUP is passed on to the workers.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Annotated, Any, Final, TypeAlias, cast

import typer
import uvicorn
from uvicorn.config import STARTUP_FAILURE

from proxy import __version__
from proxy.cli.commands import Config
from proxy.config import AcceptedFile, ConfigSource, Loaded, Settings, hears_hangup
from proxy.dialects.generations import SharedRoom
from proxy.errors import StoreUnavailable
from proxy.models import Catalogue
from proxy.pipeline import can_serve_without, warn_of_others
from proxy.server.app import Application, Worker, give_up_pending
from proxy.server.budgets import budget_memory
from proxy.server.limits import limited_http, room_of
from proxy.store import CAN_FORK, Store, WriterProcess, fork_writer, set_up_process
from proxy.telemetry import Meters, set_up_logging, shared_memory, tracing_class
from proxy.tokens import TokenCounter

GRACE_SECONDS: Final = 5  # how long those may take to end that `server.drain_timeout` has cut off
KEEP_ALIVE_SECONDS: Final = 75
"""Longer than the usual clients keep an idle connection, so that they close it and not the server."""
_LAST_CALL_SECONDS: Final = GRACE_SECONDS - 1  # how long their clients may take to hear of it
_PATIENCE_SECONDS: Final = GRACE_SECONDS + 20  # how long a worker may take to end after the time for its answers
_START_TRIES: Final = 3  # processes that may end in one place before they serve, when all start
_STEADY_SECONDS: Final = 2.0  # a worker that lived this long did not fail because of its start
_MOST_ENDED: Final = 100  # processes of one place whose exchanges are looked for
_LAST_SECONDS: Final = 60.0  # how long a worker without a parent may take to end
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0
_MOST_FILES: Final = (65_536, 10_240)  # open files that are asked for; macOS refuses more than the second
_PARENT_SECONDS: Final = 0.5  # time between two looks at whether the parent is there
_STOPPING: Final = (signal.SIGTERM, signal.SIGINT)

Work: TypeAlias = Callable[..., None]
"""What a worker does. Its arguments: those given, the sockets, its `Worker`, and a function to call once it serves."""

_LOG: Final = logging.getLogger("palimpsest.serving")


def serve(
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of processes.")] = None,
) -> None:
    """Run the proxy. The store is migrated first, unless `store.migrate` is false."""
    given = {"host": host, "port": port, "workers": workers}
    loaded = ConfigSource(path=config, overrides={"server": given}, serves=True).read()
    settings = loaded.settings
    set_up_logging(settings.telemetry.log_format, settings.telemetry.log_level)
    for line in loaded.warnings:
        _LOG.warning("%s", line)
    if settings.telemetry.otlp_endpoint is not None:
        tracing_class()  # what is missing is said before anything begins
    SharedRoom.factor = room_of(settings.server)
    _allow_files()
    several = settings.server.workers > 1
    # The port comes first: a second proxy, started by mistake, must not touch the store of the first.
    sockets = _bound(settings.server.host, settings.server.port)
    try:
        away = asyncio.run(_prepare_store(settings, gives_up=several))
        warn_of_others(settings)
        show_banner = partial(_show, settings, sockets[0].getsockname()[1])
        if several:
            if CAN_FORK:
                _load_for_all(settings)
            patience = settings.server.drain_timeout + _PATIENCE_SECONDS
            crew = Workers(settings.server.workers, _work, (loaded, away), sockets, patience)
            succeeded = crew.run(show_banner)
        else:
            # Several share the processors already.
            writer = fork_writer(settings.store.url, sockets, uvicorn.Config("", log_config=None).get_loop_factory())
            try:
                succeeded = _serve_alone(loaded, sockets, show_banner, writer, away)
            finally:
                if writer is not None:
                    writer.end()
    finally:
        for listening in sockets:
            listening.close()
    if not succeeded:
        raise typer.Exit(1)


def server_config(
    settings: Settings,
    worker: Worker | None = None,
    loaded: Loaded | None = None,
    writer: WriterProcess | None = None,
    away: StoreUnavailable | None = None,
    **changes: Any,
) -> uvicorn.Config:
    """Return the configuration of uvicorn for an application that follows the file of `loaded`."""
    chosen: dict[str, Any] = {
        "host": settings.server.host,
        "port": settings.server.port,
        "http": limited_http(settings.server),
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        # The upstream's own Date and Server headers are passed on.
        "server_header": False,
        "date_header": False,
        "proxy_headers": False,  # the client's address is not used
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": settings.server.drain_timeout + GRACE_SECONDS,
    }
    return uvicorn.Config(Application(settings, worker, loaded, writer, away), **(chosen | changes))


def _allow_files() -> None:
    """Let this process and its workers open as many files as the system allows.

    An answer under way takes two. The usual limit of 1,024, or of 256, is for programs that use `select`.
    """
    if os.name != "posix":
        return
    import resource  # noqa: PLC0415 - it is not everywhere

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in _MOST_FILES:
        wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return


def _load_for_all(settings: Settings) -> None:
    """Load what every worker needs, so that those that are forked share it."""
    TokenCounter(settings.tokens.method).warm()
    Catalogue().warm()
    config = server_config(settings)  # uvicorn imports its parts when they are asked for
    config.load()
    config.get_loop_factory()
    gc.collect()
    gc.freeze()  # a collection writes to each object that it looks at, and a page that is written to is shared no more


class _Server(uvicorn.Server):
    """uvicorn's server with a callback once it serves."""

    def __init__(
        self, config: uvicorn.Config, drain_timeout: float, serves: Callable[[], None], *, is_worker: bool = False
    ) -> None:
        super().__init__(config)
        self._drain_timeout = drain_timeout
        self._serves = serves
        self._is_worker = is_worker

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen and open the application."""
        try:
            for bound in sockets or ():
                bound.listen(self.config.backlog)  # uvloop would not report a failure
        except OSError as why:  # two proxies that start at once may both have bound the port
            _LOG.error("%s", _cannot_listen(self.config.host, self.config.port, why))
            sys.exit(STARTUP_FAILURE)
        await super().startup(sockets)
        if self.started:
            # The garbage collector skips objects that stay for good: scanning them delays requests.
            gc.collect()
            gc.freeze()
            set_up_process()
            self._serves()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop, and at a second signal end at once.

        A worker leaves Ctrl-C, and what a second signal means, to its parent. systemd signals every process, and the
        parent signals its workers too.
        """
        if self._is_worker and (sig == signal.SIGINT or self.should_exit):
            return
        if self.should_exit:
            os._exit(1)  # what was acknowledged is durable
        self._application.stop()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running answers end; cut off those that take too long; then close the application."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._drain_timeout, self._application.cut_off)
        loop.call_later(self._drain_timeout + _LAST_CALL_SECONDS, self._break_off)
        await super().shutdown(sockets)

    def _break_off(self) -> None:
        """Close what is open still, to clients that do not read their answer, or do not send their whole request."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    @property
    def _application(self) -> Application:
        return cast("Application", self.config.app)


def _serve_alone(
    loaded: Loaded,
    sockets: list[socket.socket],
    serves: Callable[[], None],
    writer: WriterProcess | None,
    away: StoreUnavailable | None,
) -> bool:
    """Serve in this process until a signal to stop; return False if it could not start. `away` as `_work` has it."""
    # uvicorn shuts down and then raises the signal again. That is not a failure.
    signal.signal(signal.SIGTERM, _exit)
    config = server_config(loaded.settings, loaded=loaded, writer=writer, away=away)
    server = _Server(config, loaded.settings.server.drain_timeout, serves)
    try:
        server.run(sockets)
    except KeyboardInterrupt:
        pass
    except SystemExit as why:  # from uvicorn if it could not start, or from `_exit`
        return not why.code
    return server.started


def _work(
    loaded: Loaded,
    away: StoreUnavailable | None,
    sockets: list[socket.socket],
    worker: Worker,
    serves: Callable[[], None],
) -> None:
    """Serve as one of several workers. `away`: why the store could not be used; None where it is migrated already."""
    settings = loaded.settings
    set_up_logging(settings.telemetry.log_format, settings.telemetry.log_level)
    SharedRoom.factor = room_of(settings.server)  # a new interpreter does not know it
    if away is None:
        settings = settings.model_copy(update={"store": settings.store.model_copy(update={"migrate": False})})
    # One that takes the place of another starts later: the store may be back.
    config = server_config(settings, worker, loaded, away=None if worker.ended else away)
    _Server(config, settings.server.drain_timeout, serves, is_worker=True).run(sockets)


def _bound(host: str, port: int) -> list[socket.socket]:
    """Return sockets bound to every address of `host`; port 0 takes a free port. Exits if there is none."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            bound = socket.socket(family, kind, protocol)
            sockets.append(bound)
            if os.name == "posix":  # elsewhere it would let two processes listen on one port
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # All addresses of a name share one free port.
            taken = sockets[0].getsockname()[1] if len(sockets) > 1 else port
            bound.bind((address[0], taken, *address[2:]))
    except (OSError, UnicodeError) as why:  # a name that cannot be one is a UnicodeError
        for bound in sockets:
            bound.close()
        typer.echo(_cannot_listen(host, port, why), err=True)
        raise typer.Exit(1) from why
    return sockets


def _cannot_listen(host: str, port: int, why: OSError | UnicodeError) -> str:
    reason = "this is no name of a host" if isinstance(why, UnicodeError) else why.strerror or str(why)
    told = f"Cannot listen on {host}:{port}: {reason.lower()}."
    if isinstance(why, OSError) and why.errno == errno.EADDRINUSE:
        told += " Another program, maybe another proxy, listens there: stop it, or name a free port with --port."
    return told


async def _prepare_store(settings: Settings, *, gives_up: bool) -> StoreUnavailable | None:
    """Migrate and check the store, and give up exchanges that earlier processes left pending if `gives_up`.

    Return why the store cannot be used, where requests can be served without it.
    """
    try:
        async with await Store.open(settings.store.url, migrate=settings.store.migrate) as store:
            await store.ready()
            if gives_up:
                await give_up_pending(store)
    except StoreUnavailable as why:
        if not can_serve_without(settings):
            raise
        _LOG.error("starting without the store: %s", why)
        return StoreUnavailable(why.message)  # it goes to other processes
    return None


def _show(settings: Settings, port: int) -> None:
    """Say where the proxy listens: as text, or in lines of the log where machines read that."""
    banner = _banner(settings, port)
    if settings.telemetry.log_format == "text":
        with suppress(OSError):  # a log that cannot be written, on a full disk, must not end the proxy
            typer.echo(banner, err=True)
        return
    for line in banner.splitlines():
        _LOG.info("%s", line.strip())


def _banner(settings: Settings, port: int | None = None) -> str:
    """Return the text that `serve` prints; `port` is the real one if the setting is 0."""
    host = settings.server.host
    address = f"http://{f'[{host}]' if ':' in host else host}:{port or settings.server.port}"
    policies = ", ".join(settings.policies) or (
        "built-in default: clears old tool results once that saves money; `policies: {default: {}}` switches it off"
    )
    key = "" if settings.auth.mode == "none" else '-H "Authorization: Bearer $YOUR_KEY" '
    return (
        f"palimpsest {__version__}: {address} -> {settings.upstream.base_url}\n"
        f"  policies: {policies}\n"
        f"  use it:   OPENAI_BASE_URL={address}/v1 or ANTHROPIC_BASE_URL={address}, and the header X-Session-ID: NAME\n"
        f"  look in:  {f'{address}/ui, or ' if settings.dashboard.enabled else ''}curl {key}{address}/sessions"
    )


@dataclass
class _Place:
    """The place of one worker, and the process in it, if any."""

    number: int = 0
    process: BaseProcess | None = None
    mark: str = ""
    report: socket.socket | None = None  # where the worker reports that it serves; None once it has, or cannot any more
    serves: bool = False
    started: float = 0.0
    due: float = 0.0  # when the next process starts, if there is none
    failures: int = 0  # how many processes in a row did not live long
    ended: list[str] = field(default_factory=list[str])
    """Marks of the processes that were there before: each worker gives up what they left pending, again and again. One
    that ends before it could, since the store was away, leaves that to the next."""

    def close_report(self) -> None:
        """Stop waiting for the report."""
        if self.report is not None:
            self.report.close()
            self.report = None


class Workers:
    """Several processes that do the same work on the same sockets."""

    def __init__(
        self,
        count: int,
        work: Work,
        arguments: Sequence[Any],
        sockets: list[socket.socket],
        patience: float,
        *,
        forks: bool = CAN_FORK,
    ) -> None:
        """Start nothing yet. `patience`: seconds that a worker may take to end before it is killed."""
        self._work = work
        self._arguments = tuple(arguments)
        self._sockets = sockets
        self._patience = patience
        self._places = [_Place(number=number) for number in range(count)]
        self._serving = False
        self._processes = get_context("fork") if forks else get_context("spawn")
        # A new interpreter counts alone.
        self._counting = shared_memory(count) if forks else None
        self._budgets = budget_memory(count) if forks else None
        self._accepted = AcceptedFile() if forks else None

    def run(self, ready: Callable[[], None]) -> bool:
        """Run the workers until a signal to stop; return False if one could not start, else True.

        `ready` is called once all of them serve. All have ended when this returns.
        """
        with _signals() as (stops, hangups, bell):
            try:
                for place in self._places:
                    self._start(place)
                while not stops:
                    due = [place.due for place in self._places if place.process is None]
                    processes = [place.process.sentinel for place in self._places if place.process is not None]
                    reports = [place.report for place in self._places if place.report is not None]
                    wait([bell, *processes, *reports], max(0.0, min(due) - time.monotonic()) if due else None)
                    _silence(bell)
                    if hangups:
                        hangups.clear()
                        self._pass_on_hangup()
                    if not self._check(ready):
                        return False
                return True
            finally:
                self._end(stops, bell)

    def _start(self, place: _Place) -> None:
        place.mark = secrets.token_hex(4)
        place.report, says = socket.socketpair()
        counts = None if self._counting is None else Meters(self._counting, place.number)
        worker = Worker(
            mark=place.mark,
            ended=tuple(place.ended),
            counts=counts,
            accepted=self._accepted,
            budgets=self._budgets,
            number=place.number,
        )
        given = (self._work, self._arguments, self._sockets, worker, says)
        place.process = self._processes.Process(target=_run, args=given, daemon=True)
        # Signals wait until the worker has handlers of its own: those of a forked one are the parent's at first, and a
        # new interpreter would print a traceback.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _STOPPING)
        try:
            place.process.start()
        except OSError:
            place.process = None
            place.close_report()
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            says.close()
        place.started = time.monotonic()

    def _check(self, ready: Callable[[], None]) -> bool:
        """Handle reports and ends, and start what is due; return False if the first start failed."""
        for place in self._places:
            # The exit code is read first: a worker that has ended by then has reported all it will.
            ended = place.process is not None and place.process.exitcode is not None
            if place.report is not None and wait([place.report], 0):
                place.serves = bool(place.report.recv(1))
                place.close_report()
            if ended and place.process is not None:
                if not self._serving and not place.serves and place.failures + 1 >= _START_TRIES:
                    _LOG.error("a worker (process %s) did not start", place.process.pid)
                    return False
                self._bury(place, place.process)
            if place.process is None and place.due <= time.monotonic():
                try:
                    self._start(place)
                except OSError as why:  # the system has no room for a process just now
                    place.failures += 1
                    pause = max(pause_after(place.failures), _FIRST_PAUSE)
                    place.due = time.monotonic() + pause
                    _LOG.error("a worker could not be started (%s): next try in %g s", why.strerror or why, pause)
        if not self._serving and all(place.serves for place in self._places):
            self._serving = True
            ready()
        return True

    def _pass_on_hangup(self) -> None:
        """Send SIGHUP to the workers that serve. One that is starting reads the configuration anyway."""
        for place in self._places:
            if place.process is not None and place.process.pid is not None and place.serves:
                with suppress(ProcessLookupError):
                    os.kill(place.process.pid, signal.SIGHUP)

    def _bury(self, place: _Place, process: BaseProcess) -> None:
        process.join()
        now = time.monotonic()
        place.failures = 0 if now - place.started >= _STEADY_SECONDS else place.failures + 1
        pause = pause_after(place.failures)
        after = f" in {pause:g} s" if pause else ""
        _LOG.warning("a worker (process %s) ended with %s and is replaced%s", process.pid, process.exitcode, after)
        place.close_report()
        place.ended = [*place.ended, place.mark][-_MOST_ENDED:]
        process.close()
        place.process, place.due, place.serves = None, now + pause, False

    def _end(self, stops: list[int], bell: socket.socket) -> None:
        """End all workers: by a signal first, by force if they do not end in time."""
        for listening in self._sockets:
            listening.close()  # once the workers have closed theirs, connections are refused
        running = [place.process for place in self._places if place.process is not None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + self._patience
        while alive := [process for process in running if process.exitcode is None]:
            if time.monotonic() >= deadline or len(stops) > 1:
                break
            wait([bell, *(process.sentinel for process in alive)], max(0.0, deadline - time.monotonic()))
            _silence(bell)
        for process in alive:
            _LOG.error("a worker (process %s) did not end in time and was killed", process.pid)
            process.kill()
        for process in running:
            process.join()
        for place in self._places:
            place.close_report()


def pause_after(failures: int) -> float:
    """Return the seconds to wait before the next process after so many that did not live long."""
    return 0.0 if failures < 2 else min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(failures - 2, 10))


def _run(
    work: Work, arguments: tuple[Any, ...], sockets: list[socket.socket], worker: Worker, says: socket.socket
) -> None:
    signal.set_wakeup_fd(-1)  # the parent's, where this process was forked
    if hears_hangup():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the application hears it
    signal.signal(signal.SIGTERM, _exit)
    # Ctrl-C reaches every process of the terminal. The parent alone handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    threading.Thread(target=_end_with_parent, name="palimpsest-parent", daemon=True).start()

    def serves() -> None:
        with suppress(OSError):  # the parent is gone, and `_end_with_parent` ends this process
            says.sendall(b"1")

    work(*arguments, sockets, worker, serves)


def _exit(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def _end_with_parent() -> None:
    """Stop this process once its parent is gone."""
    parent = parent_process()
    if parent is not None:
        # `parent.join()` waits for a pipe to close, and siblings that were forked later hold it open.
        while os.getppid() == parent.pid:
            time.sleep(_PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_SECONDS)
        os._exit(1)  # the signal did not end it


@contextmanager
def _signals() -> Generator[tuple[list[int], list[int], socket.socket]]:
    """Collect signals to stop, and SIGHUP. The socket becomes readable when a signal comes."""
    stops: list[int] = []
    hangups: list[int] = []
    bell, rings = socket.socketpair()
    bell.setblocking(False)
    rings.setblocking(False)
    before = {number: signal.signal(number, lambda got, _: stops.append(got)) for number in _STOPPING}
    if hears_hangup():
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, lambda got, _: hangups.append(got))
    woken = signal.set_wakeup_fd(rings.fileno(), warn_on_full_buffer=False)
    try:
        yield stops, hangups, bell
    finally:
        signal.set_wakeup_fd(woken)
        for number, handler in before.items():
            signal.signal(number, handler)
        bell.close()
        rings.close()


def _silence(bell: socket.socket) -> None:
    with suppress(BlockingIOError):
        bell.recv(4096)

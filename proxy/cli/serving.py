"""`serve`: runs the proxy, in this process or in several workers that share its port.

With workers, the parent serves no requests. It holds the listening sockets and supervises the processes:

- A worker is forked from the parent, which has loaded the common data, so that unmodified memory is shared. The parent
  has one thread, no event loop and no connections. Where fork is not safe (macOS), a worker is a new interpreter
  ("spawn").
- A worker reports once that it serves. If it ends before that at the first start, it is started again up to two times;
  then the start has failed.
- A worker that ends later is replaced: at once the first time, then with exponential backoff. The new worker gets the
  marks of its predecessors and marks their pending exchanges as interrupted.
- A stop signal goes to all workers, and a second one kills them. A worker whose parent has ended stops. SIGHUP is
  passed on to the workers.
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

GRACE_SECONDS: Final = 5  # how long requests that are cancelled after `server.drain_timeout` may take to end
KEEP_ALIVE_SECONDS: Final = 75
"""Longer than usual clients keep an idle connection, so that the client closes it, not the server."""
_LAST_CALL_SECONDS: Final = GRACE_SECONDS - 1  # how long clients of cancelled requests may take to receive the error
_PATIENCE_SECONDS: Final = GRACE_SECONDS + 20  # how long a worker may take to end, in addition to the drain timeout
_START_TRIES: Final = 3  # attempts to start a worker at the first start
_STEADY_SECONDS: Final = 2.0  # a worker that lived this long did not fail at its start
_MOST_ENDED: Final = 100  # most predecessors of a worker whose pending exchanges it marks as interrupted
_LAST_SECONDS: Final = 60.0  # how long a worker may take to end after its parent has ended
_FIRST_PAUSE: Final = 0.5
_LONGEST_PAUSE: Final = 30.0
_MOST_FILES: Final = (65_536, 10_240)  # limits of open files to request, in this order; macOS refuses the first
_PARENT_SECONDS: Final = 0.5  # interval of checking that the parent is alive
_STOPPING: Final = (signal.SIGTERM, signal.SIGINT)

Work: TypeAlias = Callable[..., None]
"""The main function of a worker. Arguments: the given ones, the sockets, its `Worker`, and a callback for when it
serves."""

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
        tracing_class()  # reports a missing package before anything starts
    SharedRoom.factor = room_of(settings.server)
    _allow_files()
    several = settings.server.workers > 1
    # Bind the port first: a second proxy that was started by mistake must not touch the store of the first one.
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
            # A separate writer process is of use here only; several workers already use all processors.
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
    """Return uvicorn's configuration for an application that watches the file of `loaded`."""
    chosen: dict[str, Any] = {
        "host": settings.server.host,
        "port": settings.server.port,
        "http": limited_http(settings.server),
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        # The upstream's own Date and Server headers are relayed.
        "server_header": False,
        "date_header": False,
        "proxy_headers": False,  # the client's address is not used
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": settings.server.drain_timeout + GRACE_SECONDS,
    }
    return uvicorn.Config(Application(settings, worker, loaded, writer, away), **(chosen | changes))


def _allow_files() -> None:
    """Raise the limit of open files for this process and its workers, as far as the system allows.

    Each answer in progress needs two files. The usual limit of 1,024 or 256 is meant for programs that use `select`.
    """
    if os.name != "posix":
        return
    import resource  # noqa: PLC0415 - not available on all systems

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for most in _MOST_FILES:
        wanted = most if hard == resource.RLIM_INFINITY else min(most, hard)
        if soft == resource.RLIM_INFINITY or soft >= wanted:
            return
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            return


def _load_for_all(settings: Settings) -> None:
    """Load what every worker needs, so that forked workers share the memory."""
    TokenCounter(settings.tokens.method).warm()
    Catalogue().warm()
    config = server_config(settings)  # `load` and `get_loop_factory` import uvicorn's parts
    config.load()
    config.get_loop_factory()
    gc.collect()
    gc.freeze()  # a collection writes to every object that it visits, which would unshare its memory page


class _Server(uvicorn.Server):
    """uvicorn's server with a callback for when it serves."""

    def __init__(
        self, config: uvicorn.Config, drain_timeout: float, serves: Callable[[], None], *, is_worker: bool = False
    ) -> None:
        super().__init__(config)
        self._drain_timeout = drain_timeout
        self._serves = serves
        self._is_worker = is_worker

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen, and open the application."""
        try:
            for bound in sockets or ():
                bound.listen(self.config.backlog)  # done here, because uvloop would not report a failure
        except OSError as why:  # two proxies that start at the same time may both have bound the port
            _LOG.error("%s", _cannot_listen(self.config.host, self.config.port, why))
            sys.exit(STARTUP_FAILURE)
        await super().startup(sockets)
        if self.started:
            # Exclude permanent objects from garbage collection, since scanning them delays requests.
            gc.collect()
            gc.freeze()
            set_up_process()
            self._serves()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop gracefully. A second signal ends the process at once.

        A worker ignores Ctrl-C and second signals, which its parent handles: systemd signals every process, and the
        parent signals its workers too, so a worker may get one stop twice.
        """
        if self._is_worker and (sig == signal.SIGINT or self.should_exit):
            return
        if self.should_exit:
            os._exit(1)  # safe, because acknowledged data is durable
        self._application.stop()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let running answers end, cancel those that take longer than the drain timeout, then close the application."""
        loop = asyncio.get_running_loop()
        loop.call_later(self._drain_timeout, self._application.cut_off)
        loop.call_later(self._drain_timeout + _LAST_CALL_SECONDS, self._break_off)
        await super().shutdown(sockets)

    def _break_off(self) -> None:
        """Abort the remaining connections, of clients that do not read their answer or do not finish their request."""
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
    """Serve in this process until a stop signal. Returns False if it could not start. For `away` see `_work`."""
    # After its shutdown uvicorn raises the signal again, which is not a failure.
    signal.signal(signal.SIGTERM, _exit)
    config = server_config(loaded.settings, loaded=loaded, writer=writer, away=away)
    server = _Server(config, loaded.settings.server.drain_timeout, serves)
    try:
        server.run(sockets)
    except KeyboardInterrupt:
        pass
    except SystemExit as why:  # raised by uvicorn if it could not start, or by `_exit`
        return not why.code
    return server.started


def _work(
    loaded: Loaded,
    away: StoreUnavailable | None,
    sockets: list[socket.socket],
    worker: Worker,
    serves: Callable[[], None],
) -> None:
    """Serve as one of several workers. `away` is why the store could not be used, or None if it is migrated already."""
    settings = loaded.settings
    set_up_logging(settings.telemetry.log_format, settings.telemetry.log_level)
    SharedRoom.factor = room_of(settings.server)  # a spawned interpreter has not set it yet
    if away is None:
        settings = settings.model_copy(update={"store": settings.store.model_copy(update={"migrate": False})})
    # A replacement starts later, when the store may be back.
    config = server_config(settings, worker, loaded, away=None if worker.ended else away)
    _Server(config, settings.server.drain_timeout, serves, is_worker=True).run(sockets)


def _bound(host: str, port: int) -> list[socket.socket]:
    """Return sockets bound to every address of `host`. Port 0 takes a free port. Exits with 1 if binding fails."""
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            bound = socket.socket(family, kind, protocol)
            sockets.append(bound)
            if os.name == "posix":  # on Windows this option would let two processes listen on one port
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # With port 0, all addresses of a name use the port of the first.
            taken = sockets[0].getsockname()[1] if len(sockets) > 1 else port
            bound.bind((address[0], taken, *address[2:]))
    except (OSError, UnicodeError) as why:  # UnicodeError: the host name is invalid
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
    """Migrate and check the store. With `gives_up`, mark exchanges that earlier processes left pending as interrupted.

    Returns None on success. If the store is unavailable, returns the error if the proxy can serve without the store,
    else raises it.
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
        return StoreUnavailable(why.message)  # a new error without traceback, since it is sent to other processes
    return None


def _show(settings: Settings, port: int) -> None:
    """Print where the proxy listens: as text, or as log lines if the log format is JSON."""
    banner = _banner(settings, port)
    if settings.telemetry.log_format == "text":
        with suppress(OSError):  # an output that cannot be written (full disk) must not end the proxy
            typer.echo(banner, err=True)
        return
    for line in banner.splitlines():
        _LOG.info("%s", line.strip())


def _banner(settings: Settings, port: int | None = None) -> str:
    """Return the text that `serve` prints. `port` is the actual port if the setting is 0."""
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
    """The slot of one worker, and its process, if any."""

    number: int = 0
    process: BaseProcess | None = None
    mark: str = ""
    report: socket.socket | None = None  # receives the report that the worker serves; None after the report or the end
    serves: bool = False
    started: float = 0.0
    due: float = 0.0  # when the next process starts, if there is none
    failures: int = 0  # number of processes in a row that ended early
    ended: list[str] = field(default_factory=list[str])
    """The marks of all earlier processes in this slot. Each worker repeatedly marks their pending exchanges as
    interrupted. The list keeps all of them, because a predecessor may have ended before it could do so, while the store
    was unavailable."""

    def close_report(self) -> None:
        """Stop waiting for the report."""
        if self.report is not None:
            self.report.close()
            self.report = None


class Workers:
    """A pool of processes that do the same work on the same sockets."""

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
        """Start nothing yet. `patience` is how many seconds a worker may take to end before it is killed."""
        self._work = work
        self._arguments = tuple(arguments)
        self._sockets = sockets
        self._patience = patience
        self._places = [_Place(number=number) for number in range(count)]
        self._serving = False
        self._processes = get_context("fork") if forks else get_context("spawn")
        # Spawned interpreters cannot share this memory: each counts alone.
        self._counting = shared_memory(count) if forks else None
        self._budgets = budget_memory(count) if forks else None
        self._accepted = AcceptedFile() if forks else None

    def run(self, ready: Callable[[], None]) -> bool:
        """Run the workers until a stop signal. Returns False if one could not start, else True.

        `ready` is called once all of them serve. All processes have ended when this returns.
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
        # Block signals until the worker has its own handlers: a forked process starts with the parent's handlers, and a
        # spawned interpreter would print a traceback.
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
        """Handle reports and ended processes, and start those that are due. Returns False if the first start failed."""
        for place in self._places:
            # Read the exit code before the report: an ended worker reports nothing more after that.
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
                except OSError as why:  # the system cannot create another process at the moment
                    place.failures += 1
                    pause = max(pause_after(place.failures), _FIRST_PAUSE)
                    place.due = time.monotonic() + pause
                    _LOG.error("a worker could not be started (%s): next try in %g s", why.strerror or why, pause)
        if not self._serving and all(place.serves for place in self._places):
            self._serving = True
            ready()
        return True

    def _pass_on_hangup(self) -> None:
        """Send SIGHUP to the serving workers. A worker that is starting reads the configuration anyway."""
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
        """Stop all workers: with SIGTERM first, and kill those that do not end in time."""
        for listening in self._sockets:
            listening.close()  # once the workers close their copies too, connections are refused
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
    """Return the seconds to wait before the next start, after so many processes in a row that ended early."""
    return 0.0 if failures < 2 else min(_LONGEST_PAUSE, _FIRST_PAUSE * 2.0 ** min(failures - 2, 10))


def _run(
    work: Work, arguments: tuple[Any, ...], sockets: list[socket.socket], worker: Worker, says: socket.socket
) -> None:
    signal.set_wakeup_fd(-1)  # a forked process inherits the parent's
    if hears_hangup():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)  # until the application handles it
    signal.signal(signal.SIGTERM, _exit)
    # Ctrl-C reaches every process of the terminal. The parent alone handles it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOPPING)
    threading.Thread(target=_end_with_parent, name="palimpsest-parent", daemon=True).start()

    def serves() -> None:
        with suppress(OSError):  # raised if the parent has ended; `_end_with_parent` then ends this process
            says.sendall(b"1")

    work(*arguments, sockets, worker, serves)


def _exit(_number: int, _frame: object) -> None:
    raise SystemExit(0)


def _end_with_parent() -> None:
    """Stop this process once its parent has ended."""
    parent = parent_process()
    if parent is not None:
        # Not `parent.join()`: it waits for a pipe to close, which siblings that were forked later keep open.
        while os.getppid() == parent.pid:
            time.sleep(_PARENT_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_LAST_SECONDS)
        os._exit(1)  # the signal did not end the process in time


@contextmanager
def _signals() -> Generator[tuple[list[int], list[int], socket.socket]]:
    """Collect stop signals and SIGHUP in two lists. The yielded socket becomes readable when a signal arrives."""
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

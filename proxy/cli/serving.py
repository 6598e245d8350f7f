"""`serve`: runs the proxy."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Annotated, Any, Final

import typer
import uvicorn
from uvicorn.config import STARTUP_FAILURE

from proxy import __version__
from proxy.cli.gathering import GatheringProtocol
from proxy.cli.options import Config
from proxy.cli.workers import Told, Workers
from proxy.config import Loaded, Settings, Source
from proxy.server.app import Application, Worker, give_up_pending
from proxy.store import Store
from proxy.telemetry import set_up_logging

GRACE_SECONDS: Final = 30
"""How long running streams may go on when the server is told to stop; uvicorn alone would wait for ever."""
KEEP_ALIVE_SECONDS: Final = 75
"""Longer than the pools of the usual clients keep an idle connection, so that they close it, not we."""
_COLLECT_AFTER: Final = (10_000, 20, 20)
"""New objects before a collection, and collections before an older generation is looked through: a request
with thousands of messages makes tens of thousands of objects, and none of them in circles."""
_PATIENCE_SECONDS: Final = GRACE_SECONDS + 20
"""How long a worker may take to end: the streams, then the store."""

_LOG: Final = logging.getLogger("palimpsest.serving")


def serve(
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of processes.")] = None,
) -> None:
    """Run the proxy. The store is migrated first, unless `store.migrate` is false."""
    given = {"host": host, "port": port, "workers": workers}
    loaded = Source(path=config, overrides={"server": given}).read()
    settings = loaded.settings
    set_up_logging(settings.telemetry.log_format, settings.telemetry.log_level)
    for line in loaded.warnings:
        _LOG.warning("%s", line)
    several = settings.server.workers > 1
    # The port comes first: a second proxy that is started by mistake must not touch the store of the first.
    sockets = _bound(settings.server.host, settings.server.port)
    try:
        asyncio.run(_prepare(settings, gives_up=several))
        greet = partial(typer.echo, _greeting(settings, sockets[0].getsockname()[1]), err=True)
        serve_it = _serve_together if several else _serve_alone
        fine = serve_it(loaded, sockets, greet)
    finally:
        for listening in sockets:
            listening.close()
    if not fine:
        raise typer.Exit(1)


def server_config(
    settings: Settings, worker: Worker | None = None, loaded: Loaded | None = None, **changes: Any
) -> uvicorn.Config:
    """Return how uvicorn is to serve an application made from `settings`, following what it `loaded`."""
    chosen: dict[str, Any] = {
        "host": settings.server.host,
        "port": settings.server.port,
        "http": GatheringProtocol,
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        # The upstream's own Date and Server come through.
        "server_header": False,
        "proxy_headers": False,  # nobody here asks for the client's address
        "date_header": False,
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": GRACE_SECONDS,
    }
    return uvicorn.Config(Application(settings, worker, loaded), **(chosen | changes))


class _Server(uvicorn.Server):
    """uvicorn's server, which says when it serves."""

    def __init__(self, config: uvicorn.Config, serves: Callable[[], None]) -> None:
        super().__init__(config)
        self._serves = serves

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen and open the application."""
        try:
            for bound in sockets or ():
                bound.listen(self.config.backlog)  # uvloop would not say that it could not
        except OSError as why:  # two that are started at once can both have bound the port
            _LOG.error("%s", _cannot_listen(self.config.host, self.config.port, why))
            sys.exit(STARTUP_FAILURE)
        await super().startup(sockets)
        if self.started:
            _spare_the_collector()
            self._serves()


class _WorkersServer(_Server):
    """The server of one of several."""

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop, unless it was Ctrl-C: the parent hears it too, and a second signal would cut streams off."""
        if sig != signal.SIGINT:
            super().handle_exit(sig, frame)


def _spare_the_collector() -> None:
    """Let the garbage collector pass over what stays for ever: looking through it holds up requests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def _serve_alone(loaded: Loaded, sockets: list[socket.socket], serves: Callable[[], None]) -> bool:
    """Serve in this process until it is told to stop; return False where it could not start."""
    # uvicorn stops in order, and then raises the signal once more that told it to: that is no failure.
    signal.signal(signal.SIGTERM, _stop)
    server = _Server(server_config(loaded.settings, loaded=loaded), serves)
    try:
        server.run(sockets)
    except KeyboardInterrupt:
        pass
    except SystemExit as why:  # uvicorn's way to say that it could not start, or ours to stop
        return not why.code
    return server.started


def _serve_together(loaded: Loaded, sockets: list[socket.socket], serves: Callable[[], None]) -> bool:
    """Serve in processes of their own until told to stop; return False where one could not start."""
    crew = Workers(loaded.settings.server.workers, _work, (loaded,), sockets, _PATIENCE_SECONDS)
    return crew.run(serves)


def _work(loaded: Loaded, sockets: list[socket.socket], worker: Worker, serves: Told) -> None:
    """Serve as one of several; the store is migrated already."""
    settings = loaded.settings
    set_up_logging(settings.telemetry.log_format, settings.telemetry.log_level)
    migrated = settings.model_copy(update={"store": settings.store.model_copy(update={"migrate": False})})
    _WorkersServer(server_config(migrated, worker, loaded), serves).run(sockets)


def _bound(host: str, port: int) -> list[socket.socket]:
    """Return sockets bound to every address of `host`, which nobody listens on; port 0 takes a free one.

    Raises:
        typer.Exit: there is none, or someone listens there; what and why was said.
    """
    sockets: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, kind, protocol, _, address in dict.fromkeys(found):
            bound = socket.socket(family, kind, protocol)
            sockets.append(bound)
            if os.name == "posix":  # elsewhere it would let two listen on one port
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                bound.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            # Where a name has several addresses, one free port serves all of them.
            taken = sockets[0].getsockname()[1] if len(sockets) > 1 else port
            bound.bind((address[0], taken, *address[2:]))
    except OSError as why:
        for bound in sockets:
            bound.close()
        typer.echo(_cannot_listen(host, port, why), err=True)
        raise typer.Exit(1) from why
    return sockets


def _cannot_listen(host: str, port: int, why: OSError) -> str:
    return f"Cannot listen on {host}:{port}: {(why.strerror or str(why)).lower()}."


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


async def _prepare(settings: Settings, *, gives_up: bool) -> None:
    """Migrate the store and see that it can be used, so that what is wrong with it is said before serving.

    With `gives_up`, what earlier processes left under way is given up here, once for all workers.
    """
    store = await Store.open(settings.store.url, migrate=settings.store.migrate)
    try:
        await store.ready()
        if gives_up:
            await give_up_pending(store)
    finally:
        await store.close()


def _greeting(settings: Settings, port: int | None = None) -> str:
    """Return what the operator needs next; `port` where the one in the settings is 0."""
    host = settings.server.host
    address = f"http://{f'[{host}]' if ':' in host else host}:{port or settings.server.port}"
    policies = ", ".join(settings.policies) or "built-in default (sends everything)"
    return (
        f"palimpsest {__version__}: {address} -> {settings.upstream.base_url}\n"
        f"  policies: {policies}\n"
        f"  use it:   OPENAI_BASE_URL={address}/v1 and the header X-Session-ID: NAME\n"
        f"  look in:  curl {address}/sessions"
    )

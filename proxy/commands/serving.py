"""`serve`: runs the proxy."""

from __future__ import annotations

import asyncio
import signal
from types import FrameType
from typing import Annotated, Any, Final

import typer
import uvicorn

from proxy import __version__
from proxy.app import Application
from proxy.commands.options import Config
from proxy.settings.load import load
from proxy.settings.model import Settings
from proxy.store.store import Store
from proxy.telemetry.log import set_up_logging

GRACE_SECONDS: Final = 30
"""How long running streams may go on when the server is told to stop; uvicorn alone would wait for ever."""
KEEP_ALIVE_SECONDS: Final = 75
"""Longer than the pools of the usual clients keep an idle connection, so that they close it, not we."""


def serve(
    config: Config = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(help="Port to listen on.")] = None,
    workers: Annotated[int | None, typer.Option(help="Number of processes.")] = None,
) -> None:
    """Run the proxy. The store is migrated first, unless `store.migrate` is false."""
    given = {"host": host, "port": port, "workers": workers}
    settings = load(config, {"server": {name: value for name, value in given.items() if value is not None}})
    set_up_logging(settings.telemetry.log_format, settings.telemetry.log_level)
    asyncio.run(_prepare(settings))
    typer.echo(_greeting(settings), err=True)
    # uvicorn stops in order, and then raises the signal once more that told it to: that is no failure.
    signal.signal(signal.SIGTERM, _stop)
    server = uvicorn.Server(server_config(settings))
    try:
        server.run()
    except KeyboardInterrupt:
        pass
    except SystemExit as why:  # uvicorn's way to say that it could not start, or ours to stop
        raise typer.Exit(1 if why.code else 0) from why
    if not server.started:
        raise typer.Exit(1)


def server_config(settings: Settings, **changes: Any) -> uvicorn.Config:
    """Return how uvicorn is to serve an application made from `settings`."""
    chosen: dict[str, Any] = {
        "host": settings.server.host,
        "port": settings.server.port,
        "ws": "none",
        "lifespan": "on",
        "log_config": None,
        "access_log": False,
        # The upstream's own Date and Server come through.
        "server_header": False,
        "date_header": False,
        "timeout_keep_alive": KEEP_ALIVE_SECONDS,
        "timeout_graceful_shutdown": GRACE_SECONDS,
    }
    return uvicorn.Config(Application(settings), **(chosen | changes))


def _stop(_number: int, _frame: FrameType | None) -> None:
    raise SystemExit(0)


async def _prepare(settings: Settings) -> None:
    """Migrate the store and see that it can be used, so that what is wrong with it is said before serving."""
    store = await Store.open(settings.store.url, migrate=settings.store.migrate)
    try:
        await store.ready()
    finally:
        await store.close()


def _greeting(settings: Settings) -> str:
    host = settings.server.host
    address = f"http://{f'[{host}]' if ':' in host else host}:{settings.server.port}"
    policies = ", ".join(settings.policies) or "built-in default (sends everything)"
    return (
        f"palimpsest {__version__}: {address} -> {settings.upstream.base_url}\n"
        f"  policies: {policies}\n"
        f"  use it:   OPENAI_BASE_URL={address}/v1 and the header X-Session-ID: NAME\n"
        f"  look in:  curl {address}/sessions"
    )

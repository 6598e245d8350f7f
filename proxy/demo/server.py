"""An ASGI application on a port of its own, while it is needed.

It runs in a thread with an event loop of its own, as it would in a process of its own: what one
server does never waits for another one in the same loop, and signals stay with the main thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator
from contextlib import contextmanager, suppress
from typing import Any, Final

import uvicorn

from proxy.errors import PalimpsestError

_START_SECONDS: Final = 30.0


def plain_config(application: Any) -> uvicorn.Config:
    """Return how uvicorn is to serve an application that needs nothing opened or closed."""
    return uvicorn.Config(application, lifespan="off", ws="none", log_config=None, access_log=False)


@contextmanager
def serving(config: uvicorn.Config) -> Generator[str]:
    """Serve on this machine, on a free port, and yield the address: `http://127.0.0.1:PORT`.

    Raises:
        PalimpsestError: the server did not start.
    """
    config.host, config.port = "127.0.0.1", 0
    server = uvicorn.Server(config)
    thread = threading.Thread(target=_run, args=(server,), name="demo-server", daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{_port(server, thread)}"
    finally:
        server.should_exit = True
        thread.join()


def _run(server: uvicorn.Server) -> None:
    """Serve until told to stop. uvicorn ends a start that fails by leaving the program: here, the thread."""
    with suppress(SystemExit):
        server.run()


def _port(server: uvicorn.Server, thread: threading.Thread) -> int:
    """Wait until the server listens and return where."""
    deadline = time.monotonic() + _START_SECONDS
    while not server.started:
        if not thread.is_alive() or time.monotonic() > deadline:
            raise PalimpsestError("A server of the demonstration did not start; what it logged says why.")
        time.sleep(0.01)
    port: int = server.servers[0].sockets[0].getsockname()[1]
    return port

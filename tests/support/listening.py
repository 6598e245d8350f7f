"""A uvicorn server in a thread, on a free port."""

from __future__ import annotations

import socket
import threading
import time
from typing import Self

import uvicorn

START_SECONDS = 30
STOP_SECONDS = 30


class Listening:
    """A server that listens during a `with` block."""

    def __init__(self, config: uvicorn.Config) -> None:
        self._server = uvicorn.Server(config)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._socket.bind(("127.0.0.1", 0))
        self.port: int = self._socket.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name=f"server-{self.port}")

    def _run(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except BaseException as why:  # noqa: BLE001 - said by `__enter__`, in the test's own thread
            self._failure = why

    def __enter__(self) -> Self:
        self._thread.start()
        deadline = time.monotonic() + START_SECONDS
        while not self._server.started:
            if self._failure is not None or not self._thread.is_alive() or time.monotonic() > deadline:
                raise RuntimeError("the server did not start") from self._failure
            time.sleep(0.005)
        return self

    def __exit__(self, *problem: object) -> None:
        self._server.should_exit = True
        self._thread.join(STOP_SECONDS)
        self._socket.close()
        if self._thread.is_alive():
            raise RuntimeError("the server did not stop")

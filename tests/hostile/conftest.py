"""Attacks run against the stand-in provider of the end-to-end tests, or against one with answers that a test sets."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.e2e.conftest import _direct, provider, serve, session, upstream
from tests.support.served import Served, config_file
from tests.support.stores import empty_store

__all__ = ["_direct", "provider", "serve", "session", "upstream"]

MEGABYTE = 1_048_576


class Answering:
    """An upstream that answers every request with the same bytes and closes."""

    def __init__(self) -> None:
        self.head = b""
        self.pieces: list[bytes] = []
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{self.socket.getsockname()[1]}/v1"
        self.thread = threading.Thread(target=self.serve, daemon=True)

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.socket.accept()
                with connection, suppress(OSError):
                    connection.settimeout(10)
                    connection.recv(MEGABYTE)
                    connection.sendall(b"HTTP/1.1 200 OK\r\n" + self.head + b"Connection: close\r\n\r\n")
                    for piece in self.pieces:
                        connection.sendall(piece)


@pytest.fixture(scope="session")
def answering(_direct: None) -> Iterator[Answering]:
    found = Answering()
    found.thread.start()
    yield found
    found.socket.shutdown(socket.SHUT_RDWR)
    found.socket.close()
    found.thread.join(10)


@pytest.fixture(scope="session")
def served(answering: Answering, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A proxy in its own process, so that its memory can be measured."""
    folder = tmp_path_factory.mktemp("served")
    config = config_file(folder, answering, empty_store(folder / "p.db"), server={"max_memory": 800 * MEGABYTE})
    with Served(config) as process:
        yield process.wait()

"""A client that writes bytes to a socket, for requests that no HTTP library would send."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Self

import orjson

PATIENCE = 60.0


class RawClient:
    """One connection."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.socket.close()

    def flood(self, begin: bytes, piece: bytes, most: int) -> int:
        """Send `begin`, then `piece` repeatedly, until refused or `most` bytes are sent; return the bytes sent."""
        sent = 0
        self.socket.settimeout(0.2)
        try:
            self.socket.sendall(begin)
            while sent < most and not self.has_answer():
                self.socket.sendall(piece)
                sent += len(piece)
        except OSError:
            pass
        self.socket.settimeout(PATIENCE)
        return sent

    def has_answer(self) -> bool:
        """Tell whether data has arrived, or the server has closed the connection."""
        waits = self.socket.gettimeout()
        self.socket.setblocking(False)
        try:
            return self.socket.recv(1, socket.MSG_PEEK) is not None
        except BlockingIOError:
            return False
        except ConnectionError:
            return True
        finally:
            self.socket.settimeout(waits)

    def answer(self) -> tuple[int, dict[str, str], bytes]:
        """Read until the server closes; return status, headers and body. The status is 0 if nothing came."""
        data = b""
        with suppress(OSError):
            while piece := self.socket.recv(65_536):
                data += piece
        head, _, body = data.partition(b"\r\n\r\n")
        line, *fields = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (field.partition(":") for field in fields)}
        return int(line.split(" ")[1]) if line else 0, headers, body

    def refusal(self) -> tuple[int, str]:
        """Read until the server closes; return the status and the code of the error."""
        status, headers, body = self.answer()
        assert headers.get("connection") == "close", (status, headers, body)
        return status, orjson.loads(body)["error"]["code"]


def request(method: bytes, path: bytes, body: bytes = b"", *headers: bytes) -> bytes:
    """Return a request with `Connection: close`."""
    lines = [method + b" " + path + b" HTTP/1.1", b"Host: localhost", b"Connection: close", *headers]
    if body and not any(line.lower().startswith(b"transfer-encoding") for line in headers):
        lines.append(b"Content-Length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body])


def chat(body: bytes, *headers: bytes) -> bytes:
    """Return a request for a chat completion."""
    return request(b"POST", b"/v1/chat/completions", body, b"Content-Type: application/json", *headers)


def sent(port: int, data: bytes) -> tuple[int, dict[str, str], bytes]:
    """Send bytes on a new connection and return the answer."""
    with RawClient(port) as client:
        with suppress(OSError):
            client.socket.sendall(data)
        return client.answer()


def seconds_of(port: int, path: bytes = b"/healthz") -> float:
    """Return how long a request takes, while others may be running."""
    begun = time.monotonic()
    assert sent(port, request(b"GET", path))[0] == 200
    return time.monotonic() - begun

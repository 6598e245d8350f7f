"""A minimal provider: a server in a thread that records requests and sends the answers that a subclass returns."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self

import orjson
from msgspec import Struct

JSON = "application/json"
EVENTS = "text/event-stream"


class Asked(Struct, frozen=True, kw_only=True):
    """A received request."""

    method: str
    path: str  # with its query
    headers: dict[str, str]  # by lower-case name
    body: Any  # the parsed JSON; None without a body
    raw: bytes  # the body's bytes


class Told(Struct, frozen=True, kw_only=True):
    """The answer to a request."""

    status: int = 200
    kind: str = JSON
    body: bytes


class PlainProvider:
    """Listens during a `with` block; a subclass defines the answers."""

    def __init__(self) -> None:
        self.got: list[Asked] = []
        """Every request, in the order of arrival."""
        provider = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _serve(self) -> None:
                length = int(self.headers.get("content-length") or 0)
                raw = self.rfile.read(length)
                body: Any = orjson.loads(raw) if raw else None
                headers = {name.lower(): value for name, value in self.headers.items()}
                asked = Asked(method=self.command, path=self.path, headers=headers, body=body, raw=raw)
                provider.got.append(asked)
                told = provider.answer(asked)
                self.send_response(told.status)
                self.send_header("content-type", told.kind)
                self.send_header("content-length", str(len(told.body)))
                self.end_headers()
                self.wfile.write(told.body)

            do_POST = do_GET = do_DELETE = _serve  # noqa: N815 - names of the base's

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.base_url = f"http://127.0.0.1:{self._server.server_port}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))

    def answer(self, asked: Asked) -> Told:
        """Return the answer to a request."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

"""A provider that answers recorded requests with the recorded bytes, one after another."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, Self

import uvicorn

from tests.support.listening import Listening
from tests.support.received import Received
from tests.support.recorded import Exchange

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Tape:
    """The answers that are left, and the requests that were received."""

    def __init__(self) -> None:
        self.received: list[Received] = []
        """Every request since `play`."""
        self._exchanges: deque[Exchange] = deque()
        config = uvicorn.Config(self, ws="none", lifespan="off", log_config=None, access_log=False)
        self._listening = Listening(config)
        self.base_url = f"{self._listening.url}/v1"

    def __enter__(self) -> Self:
        self._listening.__enter__()
        return self

    def __exit__(self, *problem: object) -> None:
        self._listening.__exit__(*problem)

    def play(self, exchanges: Sequence[Exchange]) -> None:
        """Answer the next requests with the answers of these exchanges, and any further request with 500."""
        self._exchanges = deque(exchanges)
        self.received = []

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        received = Received(scope)
        async for _ in received.pieces(receive):
            pass
        self.received.append(received)
        status, kind, answer = 500, b"application/json", b'{"error": {"message": "the tape is at its end"}}'
        if self._exchanges:
            exchange = self._exchanges.popleft()
            status, answer = 200, exchange.response
            kind = b"text/event-stream; charset=utf-8" if exchange.streams else kind
        await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", kind)]})
        await send({"type": "http.response.body", "body": answer})

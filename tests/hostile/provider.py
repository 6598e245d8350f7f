"""An upstream that misbehaves in every way. The `model` of a request selects how.

A function per model writes the answer. Other models get the dialect's normal answer.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Final, Self, TypeAlias

import orjson

from tests.hostile.seeds import DIALECTS, Seeds

Does: TypeAlias = Callable[[asyncio.StreamWriter, Seeds, bool], Awaitable[None]]
"""Writes an answer, given the dialect's seeds and whether a stream was requested."""

JSON: Final = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
EVENTS: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
LAST: Final = b"Connection: close\r\n\r\n"


class HostileProvider:
    """Runs in its own thread. `does` has the function for each model."""

    def __init__(self, does: dict[str, Does]) -> None:
        self.does = does
        self.asked = 0  # received requests
        self.port = 0
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stops = asyncio.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), daemon=True)

    @property
    def base_url(self) -> str:
        """The value of `upstream.base_url` for this provider."""
        return f"http://127.0.0.1:{self.port}/v1"

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(self, *problem: object) -> None:
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._stops.set)
        self._thread.join(10)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._answer, "127.0.0.1", 0, limit=1 << 26, backlog=2048)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stops.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError, asyncio.IncompleteReadError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0] or b"0")
                body = await reader.readexactly(length)
                self.asked += 1
                path = head.split(b" ", 2)[1].partition(b"?")[0].decode()
                seeds = next((seeds for seeds in DIALECTS.values() if seeds.path == path), DIALECTS["chat"])
                asked = orjson.loads(body)
                does = self.does.get(asked["model"], plain)
                await does(writer, seeds, asked.get("stream") is True)
                await writer.drain()
        writer.close()


async def plain(writer: asyncio.StreamWriter, seeds: Seeds, stream: bool) -> None:
    """Answer as a provider does; the connection stays open."""
    if stream:
        events = seeds.streamed([(name, orjson.dumps(data)) for name, data in seeds.events])
        writer.write(EVENTS + b"Content-Length: %d\r\n\r\n" % len(events) + events)
        return
    body = orjson.dumps(seeds.answer)
    writer.write(JSON + b"Content-Length: %d\r\n\r\n" % len(body) + body)

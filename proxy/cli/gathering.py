"""How the server writes to its clients: what it writes in one turn of the event loop goes out by one call.

uvicorn writes the head of an answer and its body by two calls, and each one takes longer than much of the
work for the answer. It knows nothing of HTTP.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_AT_ONCE: Final = 65_536
"""Bytes that are written at once: putting so much together costs as much as a call."""


class Gathering:
    """A transport that waits with what is written until the event loop has nothing else to do at once."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        """Write to `transport`, which `loop` serves."""
        self._transport = transport
        self._loop = loop
        self._parts: list[bytes] = []

    def write(self, data: bytes) -> None:
        """Write, a little later."""
        if not self._parts:
            if len(data) >= _AT_ONCE:
                self._transport.write(data)
                return
            self._loop.call_soon(self._flush)
        self._parts.append(data)
        if len(data) >= _AT_ONCE:
            self._flush()

    def close(self) -> None:
        """Write what waits, and close."""
        self._flush()
        self._transport.close()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        """Let another protocol go on, after what waits."""
        self._flush()
        self._transport.set_protocol(protocol)

    def _flush(self) -> None:
        parts, self._parts = self._parts, []
        if parts and not self._transport.is_closing():
            self._transport.write(parts[0] if len(parts) == 1 else b"".join(parts))

    def __getattr__(self, name: str) -> Any:
        """Be the transport in all else."""
        return getattr(self._transport, name)


class GatheringProtocol(HttpToolsProtocol):
    """uvicorn's, on a transport that gathers."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """Take over a connection."""
        super().connection_made(cast("asyncio.Transport", Gathering(transport, self.loop)))

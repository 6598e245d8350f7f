"""One request as it reached the stand-in provider, byte for byte."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import orjson

from tests.support.tongues import BY_PATH


class Received:
    """A request in the stand-in's log."""

    def __init__(self, scope: MutableMapping[str, Any]) -> None:
        self.method: str = scope["method"]
        self.target: str = scope["raw_path"].decode("latin-1")
        """The path, still percent-encoded."""
        self.path: str = scope["path"]
        self.query: str = scope["query_string"].decode("latin-1")
        self.headers: list[tuple[str, str]] = [
            (name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"]
        ]
        self.body = b""
        self.refused: str | None = None
        """Why the stand-in refused it as invalid, if it did."""
        self.dropped_reasoning = self.kept_reasoning = 0
        """Numbers of reasoning blocks that came back after a changed prefix, and after an unchanged one."""

    async def pieces(self, receive: Callable[[], Awaitable[MutableMapping[str, Any]]]) -> AsyncIterator[bytes]:
        """Yield the pieces of the body as they arrive, and keep them."""
        more = True
        while more:
            message = await receive()
            more = message["type"] == "http.request" and message.get("more_body", False)
            piece: bytes = message.get("body", b"")
            self.body += piece
            yield piece

    def header(self, name: str) -> str | None:
        """Return the only header with this lower-case name, or None if there is none."""
        values = [value for key, value in self.headers if key == name]
        assert len(values) < 2, f"{name} came {len(values)} times"
        return values[0] if values else None

    @property
    def names(self) -> set[str]:
        """The names of its headers."""
        return {name for name, _ in self.headers}

    @property
    def json(self) -> Any:
        """The body, parsed."""
        return orjson.loads(self.body)

    @property
    def chat(self) -> list[dict[str, Any]]:
        """The conversation, translated from its API to chat messages."""
        return BY_PATH[self.path].chat(self.json)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The messages of a chat completion."""
        messages: list[dict[str, Any]] = self.json["messages"]
        return messages

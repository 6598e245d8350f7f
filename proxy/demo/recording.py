"""The recorded conversation: what was asked, what was answered, and where it comes from.

It knows the file and the order of things in it. It does not know who plays which part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Final

import orjson

from proxy.dialects import JsonObject

_FILE: Final = "airline.json"


@dataclass(frozen=True, slots=True)
class Request:
    """One request that the recorded client made."""

    turn: int
    """Number of the user's turn that it belongs to, the first is 1."""
    position: int
    """Where its reply stands in the conversation: it sent every message before that one."""


@dataclass(frozen=True, slots=True)
class Recording:
    """A conversation as chat messages, ending with a reply."""

    id: str
    source: str
    license: str
    tools: tuple[JsonObject, ...]
    """The tools that the client offered with every request."""
    messages: tuple[JsonObject, ...]
    """Every message in order, the system prompt first."""

    @classmethod
    def load(cls) -> Recording:
        """Return the recording that comes with the package; what followed its last reply is left out."""
        return cls.of(orjson.loads((files("proxy.demo") / "data" / _FILE).read_bytes()))

    @classmethod
    def of(cls, data: JsonObject) -> Recording:
        """Return a recording from `{id, source, license, tools, messages}`."""
        messages: list[JsonObject] = data["messages"]
        while messages and messages[-1]["role"] != "assistant":
            messages = messages[:-1]
        return cls(data["id"], data["source"], data["license"], tuple(data["tools"] or ()), tuple(messages))

    @property
    def replies(self) -> tuple[JsonObject, ...]:
        """What the model answered, in order."""
        return tuple(message for message in self.messages if message["role"] == "assistant")

    @property
    def log(self) -> tuple[JsonObject, ...]:
        """The messages without the instructions that lead them: what a store has of it."""
        first = next(
            i for i, message in enumerate(self.messages) if message["role"] not in {"system", "developer"}
        )
        return self.messages[first:]

    def requests(self) -> Iterator[Request]:
        """Yield the requests in order: one for each reply."""
        turn = 0
        for position, message in enumerate(self.messages):
            if message["role"] == "user":
                turn += 1
            elif message["role"] == "assistant":
                yield Request(turn=turn, position=position)


def same_message(one: JsonObject, other: JsonObject) -> bool:
    """Tell whether two messages say the same; a field that is null or missing says nothing."""
    return _said(one) == _said(other)


def _said(message: JsonObject) -> dict[str, Any]:
    return {name: value for name, value in message.items() if value is not None}

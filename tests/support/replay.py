"""Replays a recorded conversation through the proxy: what a client sends, and what must be true afterwards.

Each reply of the recording becomes one request, which the provider answers with exactly that reply. A
client resends the whole history or appends what is new. This module does not depend on servers or stores.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

Message = dict[str, Any]

INSTRUCTIONS = ("system", "developer")
STREAMED = ("role", "content", "reasoning_content", "tool_calls")
"""The fields of a reply that the deltas of a stream can carry."""


@dataclass(frozen=True)
class ExchangeContext:
    """One request and the reply that answers it."""

    messages: list[Message]
    reply: Message


@dataclass(frozen=True)
class Recording:
    """A recorded conversation."""

    name: str
    messages: list[Message]
    tools: list[Any] = field(default_factory=list)

    @classmethod
    def read(cls, path: Path) -> Recording:
        """Read a file `{messages, tools, …}`."""
        data = json.loads(path.read_text())
        return cls(path.stem, data["messages"], data.get("tools") or [])

    def streamable(self) -> Recording:
        """Return a copy whose replies have only the fields that a stream can carry."""
        return Recording(name=self.name, messages=[_streamable(message) for message in self.messages], tools=self.tools)

    @property
    def lead(self) -> int:
        """The number of leading instructions."""
        roles = [message["role"] for message in self.messages]
        return next((place for place, role in enumerate(roles) if role not in INSTRUCTIONS), len(roles))

    @property
    def replies(self) -> list[int]:
        """The positions of the replies: every assistant message that has a message before it."""
        places = range(self.lead + 1, len(self.messages))
        return [place for place in places if self.messages[place]["role"] == "assistant"]

    @property
    def appendable(self) -> bool:
        """Whether each reply is followed by a new message, which is not an instruction."""
        return all(
            self.messages[place + 1]["role"] not in {"assistant", *INSTRUCTIONS}
            for place in self.replies
            if place + 1 < len(self.messages)
        )

    def turns(self, *, append: bool) -> Iterator[ExchangeContext]:
        """Yield the requests in order. Messages after the last reply get an invented reply."""
        start = 0
        for place in self.replies:
            yield ExchangeContext(messages=self.messages[start:place], reply=self.messages[place])
            start = place + 1 if append else 0
        if self.messages[-1]["role"] != "assistant":
            yield ExchangeContext(messages=self.messages[start:], reply={"role": "assistant", "content": "(the end)"})


def difference(stored: Sequence[Message], recording: Recording) -> str | None:
    """Describe how the stored messages differ from the recording; return None if they are equal."""
    expected = recording.messages[recording.lead :]
    if expected and expected[-1]["role"] != "assistant":
        expected = [*expected, {"role": "assistant", "content": "(the end)"}]
    if len(stored) != len(expected):
        return f"{len(stored)} messages are stored, {len(expected)} were said"
    for place, (one, other) in enumerate(zip(stored, expected, strict=True)):
        if _told(one) != _told(other):
            return f"message {place}: {json.dumps(one)[:300]} is not {json.dumps(other)[:300]}"
    return None


def raw_messages(body: bytes) -> list[bytes]:
    """Return the messages of a request, each as its bytes."""
    return [bytes(raw) for raw in msgspec.json.decode(body, type=_Body).messages]


def unsteady(requests: Sequence[bytes], receipts: Sequence[Mapping[str, Any]]) -> str | None:
    """Describe the first request that does not extend the previous one although the cut stayed, or return None."""
    before: list[bytes] = []
    for number, (body, receipt) in enumerate(zip(requests, receipts, strict=True)):
        messages = raw_messages(body)
        moved = receipt["cut"] is not None and receipt["cut"]["moved"]
        if not moved and messages[: len(before)] != before:
            place = next(i for i, raw in enumerate(before) if messages[i : i + 1] != [raw])
            return f"request {number} does not go on from the one before at message {place}"
        before = messages
    return None


class _Body(msgspec.Struct):
    messages: list[msgspec.Raw]


def _streamable(message: Message) -> Message:
    if message["role"] != "assistant":
        return message
    kept = {name: message[name] for name in STREAMED if name in message}
    if isinstance(kept.get("content"), list):
        kept["content"] = "".join(part.get("text", "") for part in kept["content"])
    return kept


def _told(message: Message) -> Message:
    """Return a message without its empty fields."""
    return {name: value for name, value in message.items() if value}

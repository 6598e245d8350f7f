"""A recorded conversation, asked again through the proxy: what a client sends, and what must hold.

Each reply of the recording becomes one request, which the provider answers with that very reply. A
client resends the whole past or appends what is new. It knows neither servers nor stores.
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
"""The fields of a reply that the deltas of a stream have a place for."""


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
        """Return it with replies that hold nothing but what a stream can carry."""
        return Recording(name=self.name, messages=[_streamable(message) for message in self.messages], tools=self.tools)

    @property
    def lead(self) -> int:
        """The number of instructions before everything else."""
        roles = [message["role"] for message in self.messages]
        return next((place for place, role in enumerate(roles) if role not in INSTRUCTIONS), len(roles))

    @property
    def replies(self) -> list[int]:
        """The places of the replies: every assistant message that something precedes."""
        places = range(self.lead + 1, len(self.messages))
        return [place for place in places if self.messages[place]["role"] == "assistant"]

    @property
    def appendable(self) -> bool:
        """Whether each reply is followed by something new to send, and not by new instructions."""
        return all(
            self.messages[place + 1]["role"] not in {"assistant", *INSTRUCTIONS}
            for place in self.replies
            if place + 1 < len(self.messages)
        )

    def turns(self, *, append: bool) -> Iterator[ExchangeContext]:
        """Yield the requests in order; after what follows the last reply, one reply is made up."""
        start = 0
        for place in self.replies:
            yield ExchangeContext(messages=self.messages[start:place], reply=self.messages[place])
            start = place + 1 if append else 0
        if self.messages[-1]["role"] != "assistant":
            yield ExchangeContext(messages=self.messages[start:], reply={"role": "assistant", "content": "(the end)"})


def difference(stored: Sequence[Message], recording: Recording) -> str | None:
    """Say how the stored log differs from the recording; None where it does not."""
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
    """Say which request does not begin with all of the one before, though the cut stood; None where none."""
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
    """Return what a message says, without what is empty in it."""
    return {name: value for name, value in message.items() if value}

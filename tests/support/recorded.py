"""What an SDK sent and received, byte for byte, as recorded by tests/sdks/record.py.

A file is JSON Lines in LZMA: first `{name, packages}`, then one `{headers, request, response}` for each
exchange. Every request repeats the whole history, which compresses to almost nothing.
"""

from __future__ import annotations

import json
import lzma
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tests.support.tongues import CHAT, MESSAGES, RESPONSES, Tongue

DATA = Path(__file__).parents[1] / "data" / "sdks"

SUFFIX = ".jsonl.xz"

INSTRUCTIONS = ("system", "developer")

Message = dict[str, Any]


@dataclass(frozen=True)
class Exchange:
    """One request and its answer."""

    headers: list[tuple[str, str]]
    """The request headers that the SDK determines."""
    request: bytes
    response: bytes

    @property
    def body(self) -> dict[str, Any]:
        """The request, parsed."""
        body: dict[str, Any] = json.loads(self.request)
        return body

    @property
    def streams(self) -> bool:
        """Whether the answer is a stream of events."""
        return bool(self.body.get("stream"))

    @property
    def tongue(self) -> Tongue:
        """Its API."""
        if "input" in self.body:
            return RESPONSES
        return MESSAGES if any(name == "anthropic-version" for name, _ in self.headers) else CHAT

    @property
    def history(self) -> list[Message]:
        """The messages of the request without the instructions before them."""
        messages: list[Message] = self.body["messages"]
        roles = [message["role"] for message in messages]
        lead = next((place for place, role in enumerate(roles) if role not in INSTRUCTIONS), len(roles))
        return messages[lead:]

    @property
    def reply(self) -> Message:
        """The message of the answer; for a stream it is assembled from the deltas."""
        if not self.streams:
            message: Message = json.loads(self.response)["choices"][0]["message"]
            return message
        lines = self.response.decode().split("\n\n")
        chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line not in {"", "data: [DONE]"}]
        return _joined([choice["delta"] for chunk in chunks for choice in chunk["choices"]])


@dataclass(frozen=True)
class Recorded:
    """A conversation that an SDK held."""

    name: str
    packages: list[str]
    """The SDK and its dependencies, with their versions."""
    exchanges: list[Exchange]

    @classmethod
    def read(cls, path: Path) -> Recorded:
        """Read a file that `write` wrote."""
        head, *lines = (json.loads(line) for line in lzma.decompress(path.read_bytes()).splitlines())
        exchanges = [
            Exchange(
                headers=[(name, value) for name, value in line["headers"]],
                request=line["request"].encode(),
                response=line["response"].encode(),
            )
            for line in lines
        ]
        return cls(head["name"], head["packages"], exchanges)

    def write(self, path: Path) -> int:
        """Write it to a file; return the file's size in bytes."""
        lines: list[dict[str, Any]] = [{"name": self.name, "packages": self.packages}]
        lines += [
            {"headers": exchange.headers, "request": exchange.request.decode(), "response": exchange.response.decode()}
            for exchange in self.exchanges
        ]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        return path.write_bytes(lzma.compress(text.encode(), preset=9))

    def beginning(self, exchanges: int) -> Recorded:
        """Return a recording of the first exchanges only."""
        return replace(self, exchanges=self.exchanges[:exchanges])

    @property
    def conversation(self) -> list[Message]:
        """All messages, each once: replies as received, and the others as they were first sent."""
        said: list[Message] = []
        for exchange in self.exchanges:
            said += exchange.history[len(said) :]
            said.append(exchange.reply)
        return said


def told(message: Message) -> Message:
    """Return the content of a message in a normal form, without empty fields."""
    text = message.get("content") or ""
    if isinstance(text, list):
        text = "".join(part["text"] for part in text)
    calls = [
        (made["id"], made["function"]["name"], json.loads(made["function"]["arguments"]))
        for made in message.get("tool_calls") or ()
    ]
    return {"role": message["role"], "text": text, "calls": calls, "answers": message.get("tool_call_id")}


def _joined(deltas: list[dict[str, Any]]) -> Message:
    message: Message = {"role": "assistant", "content": None}
    calls: dict[int, Any] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
            if delta.get(name) is not None:
                message[name] = (message.get(name) or "") + delta[name]
        for piece in delta.get("tool_calls") or ():
            made = calls.setdefault(piece["index"], {"type": "function", "function": {"arguments": ""}})
            made.update({name: piece[name] for name in ("id",) if name in piece})
            made["function"]["name"] = piece["function"].get("name") or made["function"]["name"]
            made["function"]["arguments"] += piece["function"]["arguments"]
    return {**message, "tool_calls": list(calls.values())} if calls else message

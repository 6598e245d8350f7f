"""Histories in a notation that reads as a dialogue, one line for each message.

    user hello                          a user message
    assistant looking | a search, b add an assistant message with the calls a and b of two tools
    assistant | search()                the same with a call of the older form
    tool a sunny                        the result of call a
    function search sunny               the result of a call of the older form

An assistant without text has null for content. A message costs ten tokens and one for each letter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.trimming.model import Entry, PlanningContext

MESSAGE_TOKENS = 10


def message(line: str) -> Message:
    """Return the message that a line stands for."""
    role, _, rest = line.partition(" ")
    if role == "assistant":
        return ChatMessage.of(_assistant(rest))
    if role == "tool":
        answers, _, text = rest.partition(" ")
        return ChatMessage.of({"role": role, "tool_call_id": answers, "content": text})
    if role == "function":
        name, _, text = rest.partition(" ")
        return ChatMessage.of({"role": role, "name": name, "content": text})
    return ChatMessage.of({"role": role, "content": rest})


def _assistant(rest: str) -> dict[str, Any]:
    text, _, calls = (part.strip() for part in rest.partition("|"))
    data: dict[str, Any] = {"role": "assistant", "content": text or None}
    for call in filter(None, (each.strip() for each in calls.split(","))):
        if call.endswith("()"):
            data["function_call"] = {"name": call.removesuffix("()"), "arguments": "{}"}
        else:
            identity, _, name = call.partition(" ")
            item = {"id": identity, "type": "function", "function": {"name": name, "arguments": "{}"}}
            data.setdefault("tool_calls", []).append(item)
    return data


def messages(lines: Iterable[str]) -> list[Message]:
    """Return the messages that lines stand for."""
    return [message(line) for line in lines]


def line(given: Message) -> str:
    """Return the line that stands for a message."""
    data = given.data
    if given.role == "assistant":
        calls = [f"{call.id} {call.name}" for call in given.calls if not call.legacy]
        if isinstance(data.get("function_call"), dict):
            calls.append(f"{data['function_call']['name']}()")
        return " ".join(["assistant", *([given.text] if given.text else []), *(["|"] if calls else [])]) + (
            " " + ", ".join(calls) if calls else ""
        )
    key = {"tool": "tool_call_id", "function": "name"}.get(given.role)
    return " ".join([given.role, *([data[key]] if key else []), given.text])


def lines(given: Iterable[Message]) -> list[str]:
    """Return the lines that stand for messages."""
    return [line(each) for each in given]


def count(given: Message) -> int:
    """Return the tokens of a message: ten, and one for each letter."""
    return MESSAGE_TOKENS + len(given.text)


def entries(given: Sequence[Message]) -> list[Entry]:
    """Return messages as trimming sees them, none of them sent before."""
    return [
        Entry(message=each, tokens=count(each), ref=f"ref_{position}", position=position)
        for position, each in enumerate(given)
    ]


def log(*given: str) -> list[Entry]:
    """Return the log that lines stand for."""
    return entries(messages(given))


DIALECT = ChatMessage.dialect
KNOWN = PlanningContext(count=count)

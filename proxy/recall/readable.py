"""What a message says, as text that can be shown, cut into lines and searched.

Its text comes as it is; calls, images and other parts follow as lines that say what they are. Fields of the
proxy's own are not among it. It does not know why a message is read again.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from proxy.dialects.chat.messages import JsonObject, Message
from proxy.dialects.shapes import is_array, is_object
from proxy.dialects.writer import write

_ADDRESS: Final = 200
"""Characters of an address, a name or a type that are told at most."""
_SCHEME: Final = 16
"""Characters in which an address has its scheme; what has none is the thing itself, as base64."""
_HELD: Final = ("url", "data", "file_data", "file_id")
"""Members under which a part may hold what it is about."""
_ROLES: Final = {
    "user": "what the user said",
    "assistant": "what the assistant said",
    "tool": "the result of a tool",
    "function": "the result of a function",
    "system": "a system message",
    "developer": "a developer message",
}


def readable(message: Message) -> str:
    """Return what a message says. Its own text comes first, so that its lines have the same numbers."""
    text = message.text
    more = list(_more(message))
    return "\n".join([text, *more] if text else more)


def described(message: Message, tool: str = "") -> str:
    """Return in words what a message is; `tool` is the name of the tool whose result it is, where known."""
    role = message.role
    named = tool or message.data.get("name")
    if role == "tool" and isinstance(named, str) and named:
        return f"the result of the tool {_cut(named)}"
    agent = message.data.get("agent")
    told = _ROLES.get(role, f"a message of {_cut(role)}" if role else "a message")
    return f"{told} (agent {_cut(agent)})" if isinstance(agent, str) and agent else told


def _more(message: Message) -> Iterator[str]:
    """Say what a message holds beside its text, a line for each thing."""
    data = message.data
    refusal = data.get("refusal")
    if isinstance(refusal, str) and refusal:
        yield refusal
    content = data.get("content")
    if is_array(content):
        for part in content:
            told = _part(part)
            if told:
                yield told
    for call in message.calls:
        yield f"[call of {_cut(call.name)}: {call.arguments}]"
    called = data.get("function_call")
    if is_object(called):
        yield f"[call of {_cut(str(called.get('name', '')))}: {called.get('arguments', '')}]"


def _part(part: Any) -> str:
    """Say what a part that is not text is; empty for texts."""
    if not is_object(part):
        return f"[{write(part).decode()}]"
    kind = part.get("type")
    if kind == "text" or isinstance(part.get("text"), str):
        return ""
    if isinstance(part.get("refusal"), str):
        return str(part["refusal"])
    named = _cut(kind) if isinstance(kind, str) and kind else "part"
    inner: Any = part.get(named) or part.get("source") or part
    return f"[{named}: {_held(inner)}; only text can be shown here]"


def _held(inner: Any) -> str:
    """Say what is known of an image, a file or a sound: type and size, or its address."""
    kind: Any = None
    held: Any = inner
    if is_object(inner):
        members: JsonObject = inner
        kind = members.get("media_type") or members.get("format") or members.get("filename")
        held = next((members[name] for name in _HELD if isinstance(members.get(name), str)), None)
    if not isinstance(held, str):
        return "no address"
    head, comma, data = held.partition(",")
    if head.startswith("data:") and comma:
        kind, held = head.removeprefix("data:").partition(";")[0], data
    elif "://" in head[:_SCHEME]:
        return _cut(held)
    told = _cut(kind) if isinstance(kind, str) and kind else "unknown type"
    return f"{told}, {len(held.rstrip('=')) * 3 // 4} bytes"


def _cut(text: str) -> str:
    """Return a name on one line, cut where it is very long."""
    line = " ".join(text[: 2 * _ADDRESS].split())
    return line if len(line) <= _ADDRESS else f"{line[:_ADDRESS]}…"

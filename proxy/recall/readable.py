"""What a message says, as text that can be shown, cut into lines and searched.

Its text comes as it is; calls, images and other parts follow as lines that say what they are. Fields of the
proxy's own are not among it. It does not know why a message is read again.
"""

from __future__ import annotations

from typing import Final

from proxy.dialects import Message

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


def described(message: Message, tool: str = "") -> str:
    """Return in words what a message is; `tool` is the name of the tool whose result it is, where known."""
    role = message.role
    named = tool or message.name
    if role == "tool" and named:
        return f"the result of the tool {_cut(named)}"
    agent = message.agent
    told = _ROLES.get(role, f"a message of {_cut(role)}" if role else "a message")
    return f"{told} (agent {_cut(agent)})" if agent else told


def _cut(text: str) -> str:
    """Return a name on one line, cut where it is very long."""
    line = " ".join(text[: 2 * _ADDRESS].split())
    return line if len(line) <= _ADDRESS else f"{line[:_ADDRESS]}…"

"""What a person is shown of a conversation: clean text and who said it.

The other channel is what a model is sent: messages as they arrived. Internal messages, tool output and calls
are for models alone. It reads stored messages and decides nothing about what is sent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from proxy.dialects import Message
from proxy.store import NodeRow
from proxy.trimming import BUILT_IN, broadcast_of

_SHOWN: Final = frozenset({"user", "assistant"})
_TYPED: Final = re.compile(
    r"\s*+<(?P<opening>[^<>:：\n]{1,100}[:：][^\S\n]{0,20}+(?P<agent>[^<>\s][^<>\n]{0,99}))>"
)
_UNTYPED: Final = re.compile(r"\s*+<(?P<opening>(?P<agent>[^<>:：\n]{1,100}))>")
_CLOSING: Final = re.compile(r"</([^<>\n]{1,210})>\s*\Z")
_PATTERNS: Final = tuple(BUILT_IN)


class Shown(NamedTuple):
    """A message as a person is shown it."""

    sender: str
    """Name of the agent or of the user that said it; its role where nobody is named."""
    text: str


def shown(message: Message, agent: str | None = None) -> Shown | None:
    """Return a message as it is shown; None where it is not for people.

    `agent` is who it was said by, where the message does not tell.
    """
    data = message.data
    if message.role not in _SHOWN or data.get("is_internal") is True:
        return None
    text, wrapped = _unwrapped(message.text)
    if not text.strip():
        return None
    named = (wrapped, data.get("agent"), data.get("name"), agent if message.role == "assistant" else None)
    sender = next((name for name in named if isinstance(name, str) and name), message.role)
    return Shown(sender=sender, text=text)


def display_of(rows: Iterable[NodeRow]) -> list[dict[str, Any]]:
    """Return the messages of a branch for a person: `{node, role, sender, text}`, oldest first."""
    lines: list[dict[str, Any]] = []
    for row in rows:
        line = shown(row.message, row.agent)
        if line is not None:
            lines.append(
                {"node": row.node, "role": row.message.role, "sender": line.sender, "text": line.text}
            )
    return lines


def _unwrapped(text: str) -> tuple[str, str | None]:
    """Return a text without the mark in which another agent's words are wrapped, and that agent's name.

    `<Type: Name> …` is such a mark, with or without its closing one. `<Name> …` is one only before what tells
    of a tool that was called: else it may be markup.
    """
    found = _TYPED.match(text)
    if found is None and broadcast_of(text, _PATTERNS, None) is not None:
        found = _UNTYPED.match(text)
    if found is None:
        return text, None
    rest = text[found.end() :]
    closing = _CLOSING.search(rest)
    if closing is not None and closing[1].strip() == found["opening"].strip():
        rest = rest[: closing.start()]
    return rest.strip(), found["agent"].strip()

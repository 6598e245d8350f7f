"""Orders of roles that some servers insist on, and messages brought into them.

    one_system   one system message, and it is the first message (templates of Qwen)
    alternate    users and assistants take turns, after at most one system message (templates of Mistral,
                 Gemma; DeepSeek's reasoner, Anthropic, Perplexity)

The API itself knows no such rule, so that nobody is asked to keep one before a server has refused: what it
said is read here. A text stays whole, and is sent in another message. It does not know who asks again.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any, Final, Literal, TypeAlias

from proxy.dialects import JsonObject, Message
from proxy.dialects.chat.message import INSTRUCTION_ROLES
from proxy.dialects.chat.overflow import words_of
from proxy.dialects.jsontext import is_array

RoleOrder: TypeAlias = Literal["alternate", "one_system"]

_STATUSES: Final = frozenset({400, 422, 500})
"""Statuses that come with such a refusal; 500 of servers that take a template's error for their own."""

_ALTERNATE: Final = re.compile(
    r"roles (?:must|should|need to) (?:alternate|be alternating)"
    r"|(?:must|should|requests) alternate (?:with|between) \W?(?:user|assistant)"
    r"|(?:successive|consecutive) (?:user|assistant)\b"
    r"|multiple \W{0,2}(?:user|assistant)\W{0,2} (?:roles|messages) in a row"
    r"|unexpected role \W?(user|assistant)\W? after role \W?\1\b"
)
_ONE_SYSTEM: Final = re.compile(
    r"system (?:message|prompt|role)s? (?:must|should|can only|may only|has to|needs to) (?:be|come|appear) "
    r"(?:at the (?:beginning|start)|(?:the )?(?:very )?first)"
    r"|system messages? (?:is|are) only (?:allowed|supported|valid) "
    r"(?:at the (?:beginning|start)|(?:as )?(?:the )?first)"
    r"|unexpected role \W?(?:system|developer)\W? after role"
    r"|(?:only|at most|more than|exactly) one system (?:message|prompt)"
    r"|(?:multiple|several) system (?:messages|prompts)"
)


def demanded_order(status: int, body: bytes) -> RoleOrder | None:
    """Return the order that an error answer asks for; None where it says something else. Never raises."""
    if status not in _STATUSES:
        return None
    said = words_of(body)
    if any(_ONE_SYSTEM.search(text) for text in said):
        return "one_system"
    return "alternate" if any(_ALTERNATE.search(text) for text in said) else None


def reordered(messages: Sequence[Message], order: RoleOrder) -> tuple[Message, ...]:
    """Return messages in the order that a server asks for.

    A second system message breaks the turns too, and the words of a template do not tell which it was.
    """
    one = one_system(messages)
    return merged_users(one) if order == "alternate" else one


def merged_users(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages with user messages that stand side by side put together, texts a blank line apart.

    The fields of the first one stay; of the others the content.
    """
    merged: list[Message] = []
    for message in messages:
        if merged and message.role == "user" == merged[-1].role:
            merged[-1] = _together([merged[-1], message])
        else:
            merged.append(message)
    return tuple(merged)


def one_system(messages: Sequence[Message]) -> tuple[Message, ...]:
    """Return the messages with all instructions in one message, which is the first, in their order."""
    instructions = [message for message in messages if message.role in INSTRUCTION_ROLES]
    if not instructions:
        return tuple(messages)
    others = [message for message in messages if message.role not in INSTRUCTION_ROLES]
    return (_together(instructions), *others)


def _together(messages: Sequence[Message]) -> Message:
    """Return the first of the messages with the contents of all; the very same where it is alone."""
    first, *more = messages
    return first.replacing("content", _joined([each.data.get("content") for each in messages])) if more else first


def _joined(contents: Sequence[Any]) -> str | list[Any]:
    """Return contents as one: as a text where all are texts, else as parts."""
    texts = [each for each in contents if isinstance(each, str)]
    if len(texts) == len(contents):
        return "\n\n".join(filter(None, texts))
    return [part for each in contents for part in _parts(each)]


def _parts(content: Any) -> Iterable[Any]:
    """Return a content as parts."""
    if is_array(content):
        return content
    part: JsonObject = {"type": "text", "text": content}
    return [part] if isinstance(content, str) and content else []

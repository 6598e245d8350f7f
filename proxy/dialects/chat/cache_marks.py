"""Explicit cache breakpoints: marks at the ends of prefixes that a provider is to keep.

For models whose cache matches at breakpoints alone. A mark stands on a content part. What providers take,
as of November 2026:

    openai      `prompt_cache_breakpoint: {"mode": "explicit"}` on text, image, audio and file parts of
                system, developer, user and tool messages, not of assistant messages. A request writes four
                breakpoints, of which the one at the newest message is OpenAI's own (GPT-5.6 and later).
    anthropic   `cache_control: {"type": "ephemeral"}`, which gateways in OpenAI's dialect hand on to Claude,
                from text parts of any message (OpenRouter, LiteLLM). Claude refuses a mark on a text that
                says nothing, and a fifth one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

import orjson

from proxy.dialects import MarkKind, Message
from proxy.dialects.cache_marks import CacheMark, marked_at, marked_ends, marked_inside
from proxy.dialects.chat.canonical import CACHE_MARKS
from proxy.dialects.jsontext import as_array, as_object, as_text, is_array, is_object

_OF_MARKS: Final = (*(name.encode() for name in CACHE_MARKS), rb"\u00")
"""What JSON text with a mark holds: its name, or a name in which ASCII is escaped."""
_CACHE_FIELDS: Final = frozenset({"cache_control", "prompt_cache_options"})
"""Fields of a request in which a client decides about the cache itself."""


class _Rules(CacheMark, frozen=True, kw_only=True):
    """One kind of mark, and where it may stand. OpenAI puts one more at the newest message itself."""

    roles: frozenset[str]
    parts: frozenset[str]  # types of content parts


_RULES: Final[Mapping[MarkKind, _Rules]] = {
    "openai": _Rules(
        name="prompt_cache_breakpoint",
        value=b'{"mode":"explicit"}',
        most=3,
        roles=frozenset({"system", "developer", "user", "tool"}),
        parts=frozenset({"text", "image_url", "input_audio", "file"}),
    ),
    "anthropic": _Rules(
        name="cache_control",
        value=b'{"type":"ephemeral"}',
        most=4,
        roles=frozenset({"system", "developer", "user", "assistant", "tool"}),
        parts=frozenset({"text"}),
    ),
}


def marked(messages: Sequence[Message], places: Collection[int], kind: MarkKind) -> tuple[Message, ...]:
    """Return the messages with marks at the ends of those at `places`; see `marked_ends`.

    Messages that hold a mark already, whoever's it is, are returned as they are, all of them.
    """
    if not places or any(map(_marks_in, messages)):
        return tuple(messages)
    rules = _RULES[kind]

    def with_end(message: Message) -> Message | None:
        if message.role not in rules.roles:
            return None
        return marked_at(message, rules.name, rules.value, lambda part: _takes_mark(part, rules))

    return marked_ends(messages, places, rules.most, lambda _: 0, with_end)


def broken(messages: Sequence[Message], place: int, at: int, kind: MarkKind) -> tuple[Message, ...]:
    """Return the messages with a mark in the one at `place`, after so many characters; see `marked_inside`."""
    timed = any(b'"ttl"' in message.raw and _marks_in(message) for message in messages)
    if timed or messages[place].role not in _RULES[kind].roles:
        return tuple(messages)
    return marked_inside(messages, place, at, _RULES[kind], _marks_in)


def decides_itself(fields: Mapping[str, bytes]) -> bool:
    """Tell whether a client says in these fields of a request, each JSON text, what is to be cached."""
    if any(fields.get(name, b"null") != b"null" for name in _CACHE_FIELDS):
        return True
    tools = fields.get("tools", b"")
    return _may_be_marked(tools) and any(map(_is_marked, as_array(orjson.loads(tools))))


def _marks_in(message: Message) -> int:
    """Return how many marks a message has: itself, its content parts and its calls."""
    if not _may_be_marked(message.raw):
        return 0
    content, calls = message.data.get("content"), message.data.get("tool_calls")
    parts = content if is_array(content) else [content]
    return sum(map(_is_marked, [message.data, *parts, *as_array(calls)]))


def _may_be_marked(text: bytes) -> bool:
    return any(piece in text for piece in _OF_MARKS)


def _is_marked(item: Any) -> bool:
    """Tell whether an object holds a mark, or one level deeper: {"type": "function", "function": {…}}."""
    levels = [item, *item.values()] if is_object(item) else []
    return any(is_object(level) and level.get(name) is not None for level in levels for name in CACHE_MARKS)


def _takes_mark(part: Any, rules: _Rules) -> bool:
    """Tell whether a part is of a kind that can be marked; a blank text never is."""
    kind = as_text(as_object(part).get("type"))
    return kind in rules.parts and (kind != "text" or bool(as_text(part.get("text")).strip()))

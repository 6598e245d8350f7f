"""Explicit cache breakpoints: marks at the ends of prefixes that a provider should cache.

For models whose cache matches at breakpoints only. A mark stands on a content part. What providers accept, as of
November 2026:

    openai      `prompt_cache_breakpoint: {"mode": "explicit"}` on text, image, audio and file parts of system,
                developer, user and tool messages, not of assistant messages. A request writes four breakpoints.
                OpenAI itself puts one of them at the newest message (GPT-5.6 and later).
    anthropic   `cache_control: {"type": "ephemeral"}` on text parts of any message. Gateways with OpenAI's API pass
                it on to Claude (OpenRouter, LiteLLM). Claude refuses a mark on a blank text, and a fifth mark.
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
"""JSON text with a mark holds one of these: the name of a mark, or an escaped ASCII character."""
_CACHE_FIELDS: Final = frozenset({"cache_control", "prompt_cache_options"})
"""Fields of a request by which a client controls caching itself."""


class _Rules(CacheMark, frozen=True, kw_only=True):
    """One kind of mark, and where it may stand. OpenAI itself puts one more at the newest message, not counted here."""

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

    If any message already holds a mark of any kind, all messages are returned unchanged.
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
    """Return the messages with a mark in the one at `place`, after `at` characters; see `marked_inside`."""
    timed = any(b'"ttl"' in message.raw and _marks_in(message) for message in messages)
    if timed or messages[place].role not in _RULES[kind].roles:
        return tuple(messages)
    return marked_inside(messages, place, at, _RULES[kind], _marks_in)


def decides_itself(fields: Mapping[str, bytes]) -> bool:
    """Tell whether the client controls caching itself, given the fields of its request as JSON text."""
    if any(fields.get(name, b"null") != b"null" for name in _CACHE_FIELDS):
        return True
    tools = fields.get("tools", b"")
    return _may_be_marked(tools) and any(map(_is_marked, as_array(orjson.loads(tools))))


def _marks_in(message: Message) -> int:
    """Return the number of marks in a message: on itself, its content parts and its calls."""
    if not _may_be_marked(message.raw):
        return 0
    content, calls = message.data.get("content"), message.data.get("tool_calls")
    parts = content if is_array(content) else [content]
    return sum(map(_is_marked, [message.data, *parts, *as_array(calls)]))


def _may_be_marked(text: bytes) -> bool:
    return any(piece in text for piece in _OF_MARKS)


def _is_marked(item: Any) -> bool:
    """Tell whether an object holds a mark itself or one level deeper: {"type": "function", "function": {…}}."""
    levels = [item, *item.values()] if is_object(item) else []
    return any(is_object(level) and level.get(name) is not None for level in levels for name in CACHE_MARKS)


def _takes_mark(part: Any, rules: _Rules) -> bool:
    """Tell whether a part can have a mark. A blank text cannot."""
    kind = as_text(as_object(part).get("type"))
    return kind in rules.parts and (kind != "text" or bool(as_text(part.get("text")).strip()))

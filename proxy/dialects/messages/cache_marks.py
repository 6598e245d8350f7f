"""Cache breakpoints of the Messages API: `cache_control` on blocks of tools, system prompt and messages.

A request has at most four in total. The proxy adds its own only if the client leaves room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, cast

from proxy.dialects import MarkKind, Message
from proxy.dialects.cache_marks import CacheMark, marked_ends, marked_inside
from proxy.dialects.jsontext import is_array, is_object, read
from proxy.dialects.messages.message import HEADER, MARK, MessagesMessage

MOST_MARKS: Final = 4
EPHEMERAL: Final = b'{"type":"ephemeral"}'
_MARK: Final = CacheMark(name=MARK, value=EPHEMERAL, most=MOST_MARKS)
_OPAQUE: Final = frozenset({MARK, "input", "input_schema"})  # members whose content cannot hold marks


def marked(messages: Sequence[Message], places: Collection[int], kind: MarkKind) -> tuple[Message, ...]:
    """Return the messages with marks at the ends of those at `places`; see `marked_ends`."""
    if kind != "anthropic":  # another provider's model behind this API
        return tuple(messages)
    sent = cast("Sequence[MessagesMessage]", messages)
    return marked_ends(sent, places, MOST_MARKS, _count, lambda message: message.with_mark(EPHEMERAL))


def broken(messages: Sequence[Message], place: int, at: int, kind: MarkKind) -> tuple[Message, ...]:
    """Return the messages with a mark in the one at `place`, after `at` characters; see `marked_inside`.

    Text that Anthropic reads as a header is not split.
    """
    timed = any(b'"ttl"' in message.raw for message in messages)  # Claude requires marks that live longer to come first
    first = "".join(messages[place].texts[:1])
    if kind != "anthropic" or timed or (first.startswith(HEADER) and at <= len(first)):
        return tuple(messages)
    return marked_inside(cast("Sequence[MessagesMessage]", messages), place, at, _MARK, _count)


def decides_itself(fields: Mapping[str, bytes]) -> bool:
    """Tell whether the client lets the provider place the breakpoints, or has marked its tools."""
    return marks_beside(fields) > 0


def _count(message: MessagesMessage) -> int:
    return marks_in(message.data) if message.has_marks else 0


def marks_beside(fields: Mapping[str, bytes]) -> int:
    """Return the number of cache marks on a request's tools and on the request itself."""
    tools = fields.get("tools", b"null")
    return (fields.get(MARK, b"null") != b"null") + (marks_in(read(tools)) if MARK.encode() in tools else 0)


def marks_in(value: Any) -> int:
    """Return the number of cache marks in a parsed value."""
    if is_object(value):
        inner = sum(marks_in(each) for name, each in value.items() if name not in _OPAQUE)
        return inner + (value.get(MARK) is not None)
    return sum(map(marks_in, value)) if is_array(value) else 0

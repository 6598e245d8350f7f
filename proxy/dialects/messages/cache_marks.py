"""Cache breakpoints of the Messages API: `cache_control` on blocks of tools, system prompt and messages.

A request has at most four, wherever they stand. The proxy puts its own only where the client leaves room.
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
_OPAQUE: Final = frozenset({MARK, "input", "input_schema"})  # members in which no mark is one


def marked(messages: Sequence[Message], places: Collection[int], kind: MarkKind) -> tuple[Message, ...]:
    """Return the messages with marks at the ends of those at `places`; see `marked_ends`."""
    if kind != "anthropic":  # another provider's model behind this API
        return tuple(messages)
    sent = cast("Sequence[MessagesMessage]", messages)
    return marked_ends(sent, places, MOST_MARKS, _count, lambda message: message.with_mark(EPHEMERAL))


def broken(messages: Sequence[Message], place: int, at: int, kind: MarkKind) -> tuple[Message, ...]:
    """Return the messages with a mark in the one at `place`, after so many characters; see `marked_inside`.

    What Anthropic reads as a header is not split.
    """
    timed = any(b'"ttl"' in message.raw for message in messages)  # marks that live longer come first, or Claude refuses
    first = "".join(messages[place].texts[:1])
    if kind != "anthropic" or timed or (first.startswith(HEADER) and at <= len(first)):
        return tuple(messages)
    return marked_inside(cast("Sequence[MessagesMessage]", messages), place, at, _MARK, _count)


def decides_itself(fields: Mapping[str, bytes]) -> bool:
    """Tell whether a client has the provider place the breakpoints, or has marked its tools."""
    return marks_beside(fields) > 0


def _count(message: MessagesMessage) -> int:
    return marks_in(message.data) if message.has_marks else 0


def marks_beside(fields: Mapping[str, bytes]) -> int:
    """Return how many cache marks a request has on its tools, and for itself."""
    tools = fields.get("tools", b"null")
    return (fields.get(MARK, b"null") != b"null") + (marks_in(read(tools)) if MARK.encode() in tools else 0)


def marks_in(value: Any) -> int:
    """Return how many cache marks a parsed value holds."""
    if is_object(value):
        inner = sum(marks_in(each) for name, each in value.items() if name not in _OPAQUE)
        return inner + (value.get(MARK) is not None)
    return sum(map(marks_in, value)) if is_array(value) else 0

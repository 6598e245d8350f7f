"""Cache breakpoints of the Messages API: `cache_control` on blocks of tools, system prompt and messages.

A request has at most four, wherever they stand. The proxy puts its own only where the client leaves room.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final, cast

from proxy.dialects import MarkKind, Message
from proxy.dialects.jsontext import RawFields, is_array, is_object, read, with_break, with_field
from proxy.dialects.messages.message import HEADER, MARK, MessagesMessage

MOST_MARKS: Final = 4
EPHEMERAL: Final = b'{"type":"ephemeral"}'
_OPAQUE: Final = frozenset({MARK, "input", "input_schema"})  # members in which no mark is one


def marked(messages: Sequence[Message], places: Collection[int], kind: MarkKind) -> tuple[Message, ...]:
    """Return the messages with marks at the ends of those at `places`, the last ones where there is no room for all.

    Marks of the client's stay. Where a message takes none, the nearest one before it that does is marked.
    """
    sent = list(cast("Sequence[MessagesMessage]", messages))
    if kind != "anthropic":  # another provider's model behind this API
        return tuple(sent)
    room = MOST_MARKS - sum(map(_count, sent))
    wanted = False
    for at in range(len(sent) - 1, -1, -1):
        if room <= 0:
            break
        message = sent[at]
        wanted = wanted or at in places
        if not wanted:
            continue
        if _count(message):
            wanted = False
        elif (new := message.with_mark(EPHEMERAL)) is not None:
            sent[at], wanted = new, False
            room -= 1
    return tuple(sent)


def broken(messages: Sequence[Message], place: int, at: int, kind: MarkKind) -> tuple[Message, ...]:
    """Return the messages with a mark in the one at `place`, after so many characters; as they are without room.

    What Anthropic reads as a header is not split.
    """
    sent = list(messages)
    counts = [_count(message) for message in cast("Sequence[MessagesMessage]", sent)]
    timed = any(b'"ttl"' in message.raw for message in sent)  # marks that live longer come first, or Claude refuses
    if kind == "anthropic" and not timed and not _is_in_header(sent[place].texts, at):
        fields = RawFields(sent[place].raw)
        content = with_break(fields.get("content", b"null"), at, MARK, EPHEMERAL)
        if content is not None:
            made = MessagesMessage(with_field(sent[place].raw, fields, "content", content))
            if sum(counts) - counts[place] + _count(made) <= MOST_MARKS:
                sent[place] = made
    return tuple(sent)


def _is_in_header(texts: Sequence[str], at: int) -> bool:
    first = texts[0] if texts else ""
    return first.startswith(HEADER) and at <= len(first)


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

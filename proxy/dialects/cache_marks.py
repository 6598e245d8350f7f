"""Shared by the dialects that have cache marks: putting a mark at the end of messages, or inside one.

Only the content that gets a mark changes. Every other byte stays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

from msgspec import Struct

from proxy.dialects.base import Message
from proxy.dialects.jsontext import ITEMS, RawFields, is_array, read, with_break, with_field

Marked = TypeVar("Marked", bound=Message)


class CacheMark(Struct, frozen=True, kw_only=True):
    """A cache mark, and the maximum number of them in a request."""

    name: str
    value: bytes
    most: int


def marked_at(message: Marked, name: str, value: bytes, takes: Callable[[Any], bool]) -> Marked | None:
    """Return the message with a mark on the last part of its content that can have one; None if none can.

    `takes` tells whether a part can have a mark. A content that is a string becomes one part.
    """
    fields = RawFields(message.raw)
    content = fields.get("content", b"null")
    said = read(content)
    if isinstance(said, str) and said.strip():
        made = b'[{"type":"text","text":%b,"%b":%b}]' % (content, name.encode(), value)
    else:
        places = [at for at, part in enumerate(said) if takes(part)] if is_array(said) else []
        if not places:
            return None
        *before, part = map(bytes, ITEMS.decode(content)[: places[-1] + 1])
        at = 1
        for each in before:
            at = content.index(each, at) + len(each)
        at = content.index(part, at)
        made = content[:at] + with_field(part, RawFields(part), name, value) + content[at + len(part) :]
    return type(message)(with_field(message.raw, fields, "content", made))


def marked_ends(
    messages: Sequence[Marked],
    places: Collection[int],
    most: int,
    marks_in: Callable[[Marked], int],
    with_end: Callable[[Marked], Marked | None],
) -> tuple[Message, ...]:
    """Return the messages with marks at the ends of those at `places`.

    Existing marks stay. If a message takes no mark, the nearest earlier one that does is marked instead. If there would
    be more than `most` marks, the last messages get theirs, because they end the longest prefixes.
    """
    sent, counts = list(messages), [marks_in(message) for message in messages]
    room, wanted = most - sum(counts), False
    for at in range(len(sent) - 1, -1, -1):
        if room <= 0:
            break
        wanted = wanted or at in places
        if wanted and counts[at]:
            wanted = False
        elif wanted and (new := with_end(sent[at])) is not None:
            sent[at], wanted = new, False
            room -= 1
    return tuple(sent)


def marked_inside(
    messages: Sequence[Marked], place: int, at: int, mark: CacheMark, marks_in: Callable[[Marked], int]
) -> tuple[Message, ...]:
    """Return the messages with a mark in the one at `place`, after `at` characters; unchanged if there is no room."""
    sent, message = list(messages), messages[place]
    fields = RawFields(message.raw)
    content = with_break(fields.get("content", b"null"), at, mark.name, mark.value)
    if content is not None:
        made = type(message)(with_field(message.raw, fields, "content", content))
        others = sum([marks_in(other) for number, other in enumerate(sent) if number != place])
        if others + marks_in(made) <= mark.most:
            sent[place] = made
    return tuple(sent)

"""Texts of a session: of messages and tools, each once, and the versions of its instructions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
from sqlalchemy import bindparam, select

from proxy.conversation import array_of, body_id, body_of
from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.store.database import Connection
from proxy.store.records import Body, InstructionsRow
from proxy.store.schema import BODIES, INSTRUCTIONS, SESSIONS, insert_new

_RAW_LIST: Final = msgspec.json.Decoder(list[msgspec.Raw])
_PREFIX: Final = re.compile(r"[0-9a-f]{12,40}", re.ASCII)
_BEYOND_HEX: Final = "g"

_TEXT: Final = select(BODIES.c.text).where(
    BODIES.c.session == bindparam("key"), BODIES.c.body == bindparam("body")
)
_BY_PREFIX: Final = (
    select(BODIES.c.body, BODIES.c.text)
    .where(
        BODIES.c.session == bindparam("key"),
        BODIES.c.body >= bindparam("from"),
        BODIES.c.body < bindparam("to"),
    )
    .limit(2)
)
_NEWEST: Final = (
    select(INSTRUCTIONS)
    .join(SESSIONS, SESSIONS.c.session == INSTRUCTIONS.c.session)
    .where(INSTRUCTIONS.c.session == bindparam("key"), INSTRUCTIONS.c.version == SESSIONS.c.instructions)
)
_VERSION: Final = select(INSTRUCTIONS).where(
    INSTRUCTIONS.c.session == bindparam("key"), INSTRUCTIONS.c.version == bindparam("version")
)


def add_bodies(connection: Connection, key: str, bodies: Mapping[str, Body]) -> None:
    """Store messages by the names of their texts; those that are there stay as they are."""
    insert_new(
        connection, BODIES, [_row(key, name, body.message.raw, body.tokens) for name, body in bodies.items()]
    )


def named_bodies(bodies: Iterable[Body]) -> dict[str, Body]:
    """Return messages by the names of their texts, each once."""
    return {body_of(body.message): body for body in bodies}


def add_tools(connection: Connection, key: str, tools: bytes) -> str:
    """Store the text of `tools`; return its name."""
    name = body_id(tools)
    insert_new(connection, BODIES, [_row(key, name, tools, 0)])
    return name


def tools_of(connection: Connection, key: str, body: str) -> bytes | None:
    """Return the text of tools with this name."""
    text: str | None = connection.execute(_TEXT, {"key": key, "body": body}).scalar_one_or_none()
    return text.encode() if text is not None and not is_message(text.encode()) else None


def message_of(connection: Connection, key: str, prefix: str) -> tuple[str, Message] | None:
    """Return name and message of the text whose name begins so; None where there is none, or several."""
    if not _PREFIX.fullmatch(prefix):
        return None
    rows = connection.execute(_BY_PREFIX, {"key": key, "from": prefix, "to": prefix + _BEYOND_HEX}).all()
    if len(rows) != 1 or not is_message(rows[0].text.encode()):
        return None
    return rows[0].body, ChatMessage(rows[0].text.encode())


def add_instructions(
    connection: Connection,
    key: str,
    messages: Sequence[Message],
    tokens: int,
    at: int,
    *,
    there: str | None = None,
) -> str:
    """Store a version of the instructions; return its name, the same for the same messages.

    `there` is one that is known to be stored.
    """
    text = array_of(messages)
    version = body_id(text)
    if version == there:
        return version
    row = {"session": key, "version": version, "messages": text.decode(), "tokens": tokens, "created_at": at}
    insert_new(connection, INSTRUCTIONS, [row])
    return version


def instructions_of(connection: Connection, key: str, version: str | None) -> InstructionsRow | None:
    """Return a version of the instructions, or the newest where `version` is None."""
    if version is None:
        row = connection.execute(_NEWEST, {"key": key}).one_or_none()
    else:
        row = connection.execute(_VERSION, {"key": key, "version": version}).one_or_none()
    if row is None:
        return None
    return InstructionsRow(
        version=row.version, messages=messages_in(row.messages), tokens=row.tokens, created_at=row.created_at
    )


def messages_in(text: str) -> tuple[Message, ...]:
    """Return the messages of a JSON array, each with its own text."""
    return tuple(ChatMessage(bytes(raw)) for raw in _RAW_LIST.decode(text))


def is_message(raw: bytes) -> bool:
    """Tell the text of a message, an object, from that of tools, an array."""
    return raw.lstrip(b" \t\r\n").startswith(b"{")


def _row(key: str, name: str, raw: bytes, tokens: int) -> dict[str, Any]:
    return {"session": key, "body": name, "tokens": tokens, "text": raw.decode()}

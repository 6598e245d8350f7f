"""What the client was not shown of replies: kept with the reply's node, and never changed, as that is not.

Texts are kept to the byte. It knows nothing of who called what, and why.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import msgspec
import orjson
from sqlalchemy import bindparam, select

from proxy.dialects import Message
from proxy.dialects.chat.message import ChatMessage
from proxy.store.amounts import Amount, Time
from proxy.store.database import Connection, Row
from proxy.store.schema import HIDDEN, NODES, insert_new
from proxy.store.texts import is_message
from proxy.store.tree import in_parts
from proxy.trimming import Hidden

_OF_SESSION: Final = HIDDEN.c.session == bindparam("key")
_NODES: Final = select(HIDDEN.c.node).where(_OF_SESSION)
_ROWS: Final = select(HIDDEN.c.node, HIDDEN.c.before, HIDDEN.c.reply, HIDDEN.c.after, HIDDEN.c.tokens).where(
    _OF_SESSION, HIDDEN.c.node.in_(bindparam("nodes", expanding=True))
)
_MADE: Final = select(NODES.c.node).where(
    NODES.c.session == bindparam("key"),
    NODES.c.node.in_(bindparam("nodes", expanding=True)),
    NODES.c.exchange == bindparam("exchange"),
)


class HiddenRecord(msgspec.Struct, frozen=True, tag_field="record", tag="hidden", kw_only=True):
    """A row as an export has it."""

    node: str
    before: tuple[str, ...]
    reply: str | None
    after: tuple[str, ...]
    tokens: Amount
    created_at: Time

    def read(self) -> Hidden:
        """Return what it says.

        Raises:
            ValueError: a text in it is no message.
        """
        reply = None if self.reply is None else _checked(self.reply)
        return Hidden(
            before=tuple(map(_checked, self.before)),
            reply=reply,
            after=tuple(map(_checked, self.after)),
            tokens=self.tokens,
        )


def keep_hidden(
    connection: Connection, key: str, replies: Mapping[str, Hidden], *, exchange: str, at: int
) -> int:
    """Keep what the client was not shown of some replies, by node; return of how many.

    A node that another exchange made stays what it was: views that hold it already must not change.
    """
    if not replies:
        return 0
    made = connection.execute(_MADE, {"key": key, "nodes": list(replies), "exchange": exchange}).scalars()
    return add_hidden(connection, key, [(node, replies[node], at) for node in made], exchange=exchange)


def add_hidden(
    connection: Connection, key: str, rows: Iterable[tuple[str, Hidden, int]], *, exchange: str | None
) -> int:
    """Store (node, what was hidden, when) of nodes that have nothing yet; return how many they are."""
    new = [_row(key, node, hidden, exchange, at) for node, hidden, at in rows]
    insert_new(connection, HIDDEN, new)
    return len(new)


def hidden_at(connection: Connection, key: str, nodes: Collection[str], total: int) -> dict[str, Hidden]:
    """Return what the client was not shown of those of `nodes` where there is something.

    `total` is how many such nodes the session has: if they are fewer than `nodes`, theirs are the names that
    are looked through.
    """
    wanted: Sequence[str] = list(nodes)
    if total < len(wanted):
        among = frozenset(nodes)
        wanted = [node for node in connection.execute(_NODES, {"key": key}).scalars() if node in among]
    return {
        row.node: _hidden(row)
        for some in in_parts(wanted)
        for row in connection.execute(_ROWS, {"key": key, "nodes": some})
    }


def _row(key: str, node: str, hidden: Hidden, exchange: str | None, at: int) -> dict[str, Any]:
    return {
        "session": key,
        "node": node,
        "exchange": exchange,
        "before": _texts(hidden.before),
        "reply": None if hidden.reply is None else hidden.reply.raw.decode(),
        "after": _texts(hidden.after),
        "tokens": hidden.tokens,
        "created_at": at,
    }


def _hidden(row: Row) -> Hidden:
    reply = None if row.reply is None else ChatMessage(row.reply.encode())
    return Hidden(before=_messages(row.before), reply=reply, after=_messages(row.after), tokens=row.tokens)


def _texts(messages: Iterable[Message]) -> str:
    return orjson.dumps([message.raw.decode() for message in messages]).decode()


def _messages(texts: str) -> tuple[Message, ...]:
    return tuple([ChatMessage(text.encode()) for text in orjson.loads(texts)])


def _checked(text: str) -> Message:
    orjson.loads(text)
    raw = text.encode()
    if not is_message(raw):
        raise ValueError("what was hidden of the reply is no message")
    return ChatMessage(raw)

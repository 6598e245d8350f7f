"""How a session and an exchange stand at the moment at which the exchange settles."""

from __future__ import annotations

from typing import Final, NamedTuple

from sqlalchemy import bindparam, select

from proxy.store.connection import Connection
from proxy.store.records import SessionRow
from proxy.store.schema import EXCHANGES, SESSIONS
from proxy.store.sessions import locked_session, session_in


class State(NamedTuple):
    """An exchange as far as its settling depends on it: the columns of `_STATE`."""

    status: str
    created_at: int
    digest: str
    nodes: str
    replies: str
    messages: str
    instructions: str | None
    model: str
    tools: str | None


_STATE: Final = select(
    EXCHANGES.c.status,
    EXCHANGES.c.created_at,
    EXCHANGES.c.digest,
    EXCHANGES.c.nodes,
    EXCHANGES.c.replies,
    EXCHANGES.c.messages,
    EXCHANGES.c.instructions,
    EXCHANGES.c.model,
    EXCHANGES.c.tools,
).where(EXCHANGES.c.session == bindparam("key"), EXCHANGES.c.id == bindparam("exchange"))

_BOTH: Final = (
    select(SESSIONS, *_STATE.selected_columns)
    .join_from(SESSIONS, EXCHANGES, EXCHANGES.c.session == SESSIONS.c.session)
    .where(SESSIONS.c.session == bindparam("key"), EXCHANGES.c.id == bindparam("exchange"))
)
"""Both at once, where the one writer holds all. PostgreSQL would not read a row anew that is joined to one
whose lock it had to wait for."""


def standing(connection: Connection, key: str, exchange: str) -> tuple[SessionRow | None, State | None]:
    """Return the session, which is locked from now on, and how the exchange stands."""
    asked = {"key": key, "exchange": exchange}
    if connection.dialect.name == "sqlite":
        row = connection.execute(_BOTH, asked).one_or_none()
        return (None, None) if row is None else (session_in(row), State(*row[-len(State._fields) :]))
    session = locked_session(connection, key)
    row = connection.execute(_STATE, asked).one_or_none()
    return session, None if row is None else State(*row)

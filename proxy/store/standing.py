"""How a session and an exchange stand at the moment at which the exchange settles."""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from sqlalchemy import and_, bindparam, select

from proxy.conversation import node_id
from proxy.store.database import Connection
from proxy.store.records import SessionRow, Settlement, session_key
from proxy.store.schema import EXCHANGES, NODES, SESSIONS
from proxy.store.sessions import locked_session, session_in
from proxy.store.tree import Place


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

_BASE: Final = NODES.alias("base")
_FIRST: Final = NODES.alias("first")
_BASE_COLUMNS: Final = tuple(_BASE.c[name] for name in ("depth", "round", "tokens_total", "recorded"))
_ALL: Final = (
    select(SESSIONS, *_STATE.selected_columns, *_BASE_COLUMNS, _FIRST.c.node)
    .outerjoin_from(
        SESSIONS,
        EXCHANGES,
        and_(EXCHANGES.c.session == SESSIONS.c.session, EXCHANGES.c.id == bindparam("exchange")),
    )
    .outerjoin(_BASE, and_(_BASE.c.session == SESSIONS.c.session, _BASE.c.node == bindparam("base")))
    .outerjoin(_FIRST, and_(_FIRST.c.session == SESSIONS.c.session, _FIRST.c.node == bindparam("first")))
    .where(SESSIONS.c.session == bindparam("key"))
)
"""All at once, where the one writer holds all. PostgreSQL would not read a row anew that is joined to one
whose lock it had to wait for."""
_STATE_FROM: Final = len(SESSIONS.columns)
_BASE_FROM: Final = _STATE_FROM + len(State._fields)


class Standing(NamedTuple):
    """How things stand."""

    session: SessionRow | None
    """The session, which is locked from now on; None where there is none."""
    state: State | None
    """The exchange; None where it is not stored."""
    under: Place | None = None
    """Where the node stands under which its messages belong, if it is known that the first of them does not
    stand there yet."""


def standing(connection: Connection, settlement: Settlement) -> Standing:
    """Return how a session and an exchange that is to be settled stand."""
    key, base = session_key(settlement.tenant, settlement.session), settlement.base
    asked: dict[str, Any] = {"key": key, "exchange": settlement.exchange}
    if connection.dialect.name != "sqlite":
        session = locked_session(connection, key)
        row = connection.execute(_STATE, asked).one_or_none()
        return Standing(session=session, state=None if row is None else State(*row))
    messages = settlement.messages
    asked["base"] = base
    asked["first"] = node_id(base, messages[0].message) if messages else None
    row = connection.execute(_ALL, asked).one_or_none()
    if row is None:
        return Standing(session=None, state=None)
    state = row[_STATE_FROM:_BASE_FROM]
    depth, rounds, tokens, recorded, first = row[_BASE_FROM:]
    under = None
    if messages and depth is not None and first is None:
        under = Place(node=base, depth=depth, round=rounds, tokens_total=tokens, recorded=recorded)
    return Standing(session=session_in(row), state=None if state[0] is None else State(*state), under=under)

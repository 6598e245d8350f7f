"""A session made of another one's history up to some node, to go on from there by itself.

What stands for the history is copied: the messages with what was decided on their arrival and what the
client was not shown of them, cuts, ready summaries, the newest instructions. What tells of requests is not:
exchanges, and forms in which clients sent messages back. The fork has cost nothing yet, and whatever was
known of how its conversation asks holds for the other one: the first request is taken for what it says,
by appending or by resending.

A request without an id that goes on with the common part belongs to the session in which its replies came
from upstream, as before the fork; one that goes on with what was said in the fork belongs to the fork.

A long history is copied in portions, each a transaction of its own, from the root on, so that other writers
get their turns. The session's row is there from the first one, so the id is taken; a process that is
killed meanwhile leaves a session without a head, which can be deleted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import cache, partial
from typing import Any, Final

from msgspec import Struct
from sqlalchemy import ColumnElement, Select, Subquery, Table, bindparam, func, null, select, true, update
from sqlalchemy.dialects import postgresql, sqlite

from proxy.conversation import ROOT
from proxy.errors import Conflict, NotFound
from proxy.store.calls import calls_at, encode_calls
from proxy.store.database import Connection, Database
from proxy.store.plain import is_plain, require_plain
from proxy.store.records import FORKED, Mark, SessionRow, SummaryStatus, session_key
from proxy.store.schema import (
    BODIES,
    CUTS,
    HIDDEN,
    INSTRUCTIONS,
    NAME,
    NODES,
    SESSIONS,
    SUMMARIES,
    insert_into,
)
from proxy.store.sessions import create_session, delete_session, locked_session, session_of
from proxy.store.tree import marks_to, places_of

PORTION: Final = 250
"""Messages of one transaction."""

_SOURCE: Final = bindparam("source", type_=NAME)
_COPY: Final = bindparam("copy", type_=NAME)
_FINISH: Final = update(SESSIONS).where(SESSIONS.c.session == bindparam("the_session"))
_HIDDEN_THERE: Final = select(func.count()).where(HIDDEN.c.session == bindparam("key"))
_SUMMARIES_THERE: Final = select(func.count()).where(SUMMARIES.c.session == bindparam("key"))


class _Fork(Struct, frozen=True, kw_only=True):
    """What is made of what."""

    source: SessionRow
    tenant: str
    id: str
    end: str
    """The node up to which the history is copied."""
    at: int

    @property
    def key(self) -> str:
        return session_key(self.tenant, self.id)


async def fork_session(database: Database, tenant: str, source_key: str, node: str, as_id: str) -> SessionRow:
    """Make the session `as_id` of the history of `source_key` up to `node`, and return it.

    Raises:
        NotFound: the tenant has no such session, or it has no such node.
        Conflict: there is a session with this id, or it was deleted while it was made.
        InvalidRequest: the id cannot be stored.
    """
    require_plain(session=as_id)
    source, branch = await database.read(partial(_read, tenant=tenant, key=source_key, node=node))
    fork = _Fork(source=source, tenant=tenant, id=as_id, end=node, at=int(time.time() * 1000))
    portions = [branch[start : start + PORTION] for start in range(0, len(branch), PORTION)]
    last = len(portions) - 1
    try:
        first = partial(_begin, fork=fork, portion=portions[0], finish=last == 0)
        made = await database.write(first, again=False)  # it would find the session there
        for number, portion in enumerate(portions[1:], 1):
            made = await database.write(partial(_go_on, fork=fork, portion=portion, finish=number == last))
    except Conflict:
        raise  # what is there is not ours
    except BaseException:
        await database.write(partial(_give_up, fork=fork))
        raise
    return made


def _read(connection: Connection, tenant: str, key: str, node: str) -> tuple[SessionRow, list[Mark]]:
    source = session_of(connection, key)
    if source is None or source.tenant != tenant:
        raise NotFound("There is no such session.")
    branch = marks_to(connection, key, node) if node != ROOT and is_plain(node) else []
    if not branch:
        raise NotFound(f"There is no node {node!r} in this session.")
    return source, branch


def _begin(connection: Connection, fork: _Fork, portion: Sequence[Mark], *, finish: bool) -> SessionRow:
    """Make the session, and copy the first portion."""
    if not create_session(connection, fork.key, fork.tenant, fork.id, fork.at):
        raise Conflict(f"There is a session {fork.id!r} already: delete it first, or fork under another id.")
    return _go_on(connection, fork, portion, finish=finish)


def _go_on(connection: Connection, fork: _Fork, portion: Sequence[Mark], *, finish: bool) -> SessionRow:
    """Copy a portion; with `finish` it is the last one."""
    made = locked_session(connection, fork.key)
    if made is None or made.created_at != fork.at:
        raise Conflict(f"The session {fork.id!r} was deleted while it was made.")
    nodes = [mark.node for mark in portion]
    bodies = list({mark.body for mark in portion})
    _copy(connection, fork, BODIES, bodies)
    for table in (NODES, HIDDEN, CUTS, SUMMARIES):
        _copy(connection, fork, table, nodes)
    if not (_are_there(connection, fork, NODES, nodes) and _are_there(connection, fork, BODIES, bodies)):
        raise NotFound("There is no such session: it was deleted while its history was copied.")
    return _finish(connection, fork) if finish else made


def _finish(connection: Connection, fork: _Fork) -> SessionRow:
    """Let the session stand at the end of the history."""
    source = fork.source
    if source.instructions is not None:
        _copy(connection, fork, INSTRUCTIONS, [source.instructions])
    if source.tools is not None:
        _copy(connection, fork, BODIES, [source.tools])
    place = places_of(connection, fork.key, [fork.end])[fork.end]
    values = {
        "head": place.node,
        "messages": place.depth,
        "rounds": place.round,
        "tokens": place.tokens_total,
        "instructions": source.instructions,
        "arrival": FORKED,
        "model": source.model,
        "tools": source.tools,
        "scale": source.scale,
        "hidden": connection.execute(_HIDDEN_THERE, {"key": fork.key}).scalar_one_or_none(),
        "summaries": connection.execute(_SUMMARIES_THERE, {"key": fork.key}).scalar_one_or_none(),
        "calls": encode_calls(calls_at(connection, fork.key, fork.end, place.depth)),
    }
    connection.execute(_FINISH, values | {"the_session": fork.key})
    made = session_of(connection, fork.key)
    if made is None:
        raise AssertionError("the session is locked in this transaction")
    return made


def _give_up(connection: Connection, fork: _Fork) -> None:
    """Delete what was copied, unless it is somebody else's by now."""
    made = locked_session(connection, fork.key)
    if made is not None and made.created_at == fork.at and made.head == ROOT:
        delete_session(connection, fork.key)


def _copy(connection: Connection, fork: _Fork, table: Table, names: Sequence[str]) -> None:
    """Copy the rows of the session that have one of these names; those that are there stay."""
    asked = {"source": fork.source.key, "copy": fork.key, "names": names}
    if table is SUMMARIES:
        asked["end"] = fork.end
    connection.execute(_copying(connection.dialect.name, table), asked)


def _are_there(connection: Connection, fork: _Fork, table: Table, names: Sequence[str]) -> bool:
    """Tell whether the fork has all of these rows."""
    asked = {"source": fork.key, "names": names}
    count = connection.execute(_counting(connection.dialect.name, table), asked).scalar_one_or_none()
    return bool(count == len(names))


@cache
def _copying(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    columns = [column.name for column in table.c]
    rows = _named(dialect, table)
    found = select(*(_copied(table, rows, name) for name in columns)).select_from(rows)
    # SQLite needs some condition here: else it takes ON for the beginning of a join.
    found = found.where(rows.c.status == SummaryStatus.READY.value if table is SUMMARIES else true())
    return insert_into(dialect, table).from_select(columns, found).on_conflict_do_nothing()


@cache
def _counting(dialect: str, table: Table) -> Select[int]:
    return select(func.count()).select_from(_named(dialect, table))


def _named(dialect: str, table: Table) -> Subquery:
    """Return the rows of a session that have one of some names."""
    name = table.c[{BODIES: "body", INSTRUCTIONS: "version"}.get(table, "node")]
    of_session = select(table).where(table.c.session == _SOURCE)
    if dialect != "postgresql" or table in {CUTS, SUMMARIES}:
        return of_session.where(name.in_(bindparam("names", expanding=True))).subquery()
    # Left to itself it reads the whole session for each portion, where it takes a session to be short. So it
    # is told to look each name up by the primary key.
    names = select(func.unnest(bindparam("names", type_=postgresql.ARRAY(NAME))).label("name")).subquery()
    row = of_session.where(name == names.c.name).limit(1).lateral()
    return select(*row.c).select_from(names).join(row, true()).subquery()


def _copied(table: Table, rows: Subquery, name: str) -> ColumnElement[Any]:
    """Return what a copy has in a column: what the original has, unless that is another session's."""
    if name == "session":
        return _COPY
    if name == "exchange" or (table is SUMMARIES and name in {"usage", "cost"}):
        return null()
    if table is SUMMARIES and name == "tip":
        # Any end of a branch that the summary is of serves; the one it was made on need not be copied.
        return bindparam("end", type_=NAME)
    return rows.c[name]

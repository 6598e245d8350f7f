"""A session from the records of another store's: its log, made anew of what `reading` has checked."""

from __future__ import annotations

from sqlalchemy import update

from proxy.errors import Conflict
from proxy.store.calls import calls_at, encode_calls
from proxy.store.cuts import keep_cut
from proxy.store.database import Connection
from proxy.store.hidden import add_hidden
from proxy.store.plain import require_plain
from proxy.store.reading import Archive
from proxy.store.records import SessionRow, session_key
from proxy.store.schema import INSTRUCTIONS, SESSIONS, insert_new
from proxy.store.sessions import create_session, session_of
from proxy.store.summaries import add_summaries
from proxy.store.texts import add_bodies, named_bodies
from proxy.store.tree import plant


def load(connection: Connection, tenant: str, session: str, archive: Archive) -> SessionRow:
    """Make a session of an archive.

    Raises:
        Conflict: there is a session with this id.
        InvalidRequest: the id cannot be stored.
    """
    require_plain(tenant=tenant, session=session)
    key, said = session_key(tenant, session), archive.session
    if not create_session(connection, key, tenant, session, said.created_at):
        raise Conflict(
            f"There is a session {session!r} already: delete it first, or import under another id."
        )
    add_bodies(connection, key, named_bodies(sprout.body for _, _, sprout in archive.nodes))
    insert_new(connection, INSTRUCTIONS, [{"session": key} | row for row in archive.instructions.values()])
    places = {place.node: place for place in plant(connection, key, archive.nodes)}
    for record, cut in archive.cuts:
        keep_cut(
            connection,
            key,
            record.node,
            record.agent,
            cut.cut,
            exchange=None,
            at=record.created_at,
            kept=cut.kept,
        )
    hidden = [(node, *what) for node, what in archive.hidden.items()]
    add_hidden(connection, key, hidden, exchange=None)
    add_summaries(connection, key, archive.summaries.values())
    head = places.get(said.head)
    values = {
        "updated_at": said.updated_at,
        "head": said.head,
        "instructions": said.instructions,
        "arrival": said.arrival,
        "model": said.model,
        "tools": said.tools,
        "messages": head.depth if head else 0,
        "rounds": head.round if head else 0,
        "tokens": head.tokens_total if head else 0,
        "hidden": len(archive.hidden),
        "summaries": len(archive.summaries),
        "calls": encode_calls(calls_at(connection, key, head.node, head.depth)) if head else None,
    }
    connection.execute(update(SESSIONS).where(SESSIONS.c.session == key).values(values))
    made = session_of(connection, key)
    if made is None:
        raise AssertionError("the session was made in this transaction")
    return made

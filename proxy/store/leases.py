"""Leases: who alone may do something for a session just now. Each function is a unit of work.

A lease that is not given back ends by itself, so that the end of its holder blocks nothing for long. It
keeps nobody from anything: whoever worked under one that has expired meanwhile must still be harmless.
"""

from __future__ import annotations

from functools import cache
from typing import Final

from sqlalchemy import bindparam, delete, or_
from sqlalchemy.sql.dml import ReturningInsert

from proxy.store.database import Connection
from proxy.store.schema import LEASES, insert_into
from proxy.store.sessions import locked_session

_RELEASE: Final = delete(LEASES).where(
    LEASES.c.session == bindparam("key"),
    LEASES.c.name == bindparam("lease"),
    LEASES.c.holder == bindparam("by"),
)


def take_lease(connection: Connection, key: str, name: str, holder: str, at: int, until: int) -> bool:
    """Take a lease, or prolong it, if nobody else has it at the time `at`; return whether `holder` has it.

    False where there is no such session.
    """
    if locked_session(connection, key) is None:
        return False
    values = {"session": key, "name": name, "holder": holder, "expires_at": until, "at": at}
    taken = connection.execute(_take(connection.dialect.name), values)
    return taken.scalar_one_or_none() is not None


def release_lease(connection: Connection, key: str, name: str, holder: str) -> None:
    """Give a lease back; nothing happens where somebody else has it."""
    connection.execute(_RELEASE, {"key": key, "lease": name, "by": holder})


@cache
def _take(dialect: str) -> ReturningInsert[tuple[str]]:
    insert = insert_into(dialect, LEASES)
    theirs = insert.excluded
    return insert.on_conflict_do_update(
        index_elements=[LEASES.c.session, LEASES.c.name],
        set_={"holder": theirs.holder, "expires_at": theirs.expires_at},
        where=or_(
            LEASES.c.expires_at <= bindparam("at", type_=LEASES.c.expires_at.type),
            LEASES.c.holder == theirs.holder,
        ),
    ).returning(LEASES.c.holder)

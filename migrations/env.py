"""Runs migrations on the connection that `proxy.store.migrate` hands over, in its transaction.

It connects to nothing itself and leaves logging alone: `palimpsest upgrade` and `palimpsest downgrade`
are the ways in. To write a new migration:

    alembic -c migrations/alembic.ini revision -m "what it does"
"""

from __future__ import annotations

from alembic import context
from sqlalchemy import Connection

from proxy.store import METADATA

connection = context.config.attributes.get("connection")
if not isinstance(connection, Connection):
    raise TypeError("run migrations with `palimpsest upgrade` or `palimpsest downgrade`")

context.configure(
    connection=connection,
    target_metadata=METADATA,
    # SQLite cannot alter most of a table: Alembic makes a new one and moves the rows.
    render_as_batch=connection.dialect.name == "sqlite",
)
with context.begin_transaction():
    context.run_migrations()

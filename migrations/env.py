"""Runs migrations on the connection that `proxy.store.migrate` hands over, in its transaction.

It opens no connection itself and does not configure logging. Run migrations with `palimpsest upgrade` and
`palimpsest downgrade`. To write a new migration:

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
    # SQLite supports few changes to a table. For the others Alembic makes a new table and moves the rows.
    render_as_batch=connection.dialect.name == "sqlite",
)
with context.begin_transaction():
    context.run_migrations()

"""Indexes take less, which were a third of what PostgreSQL kept on disk.

- `sessions.period`: the ten minutes in which a session was last changed. The indexes have it in place of the time, so
  that most changes of a session enter nothing into any index;
- exchanges are found by time by their ids, which begin with it: the primary key does;
- PostgreSQL finds nodes by what they say by a number;
- PostgreSQL keeps less statistics of names, and none of what is packed.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_BEFORE: Final = {
    "ix_sessions_tenant_updated_at_session": ("sessions", ["tenant", "updated_at", "session"]),
    "ix_sessions_updated_at_session": ("sessions", ["updated_at", "session"]),
    "ix_exchanges_session_created_at": ("exchanges", ["session", "created_at"]),
}
_AFTER: Final = {
    "ix_sessions_tenant_period": ("sessions", ["tenant", "period"]),
    "ix_sessions_period": ("sessions", ["period"]),
}
_CONTENT: Final = "ix_nodes_session_content"
_CONTENT_PLACE: Final = "hashbyteaextended(content, hashbyteaextended(session, 0))"
_PERIOD: Final = "ALTER TABLE sessions ADD COLUMN period BIGINT GENERATED ALWAYS AS (updated_at / 600000) "

_PACKED: Final = {
    "bodies": ("text",),
    "cuts": ("changes",),
    "exchanges": ("parameters", "receipt", "messages", "nodes", "replies"),
    "forms": ("text",),
    "hidden": ("before", "reply", "after"),
    "instructions": ("messages",),
    "nodes": ("arrival",),
    "pending": ("parameters", "receipt", "messages", "nodes", "replies"),
    "summaries": ("text", "state", "usage"),
}
_NAMES: Final = {
    "bodies": ("session", "body"),
    "cuts": ("session", "node", "base", "exchange"),
    "evidence": ("session",),
    "exchanges": ("session", "id", "base", "digest", "tools", "instructions", "cut_node", "idempotency"),
    "forms": ("session", "node", "body", "exchange"),
    "nodes": ("session", "node", "parent", "body", "exchange", "content"),
    "pending": ("session", "id", "base", "digest", "tools", "instructions", "cut_node", "idempotency"),
    "sessions": ("session", "head", "instructions", "tools"),
}


def upgrade() -> None:
    """Make the smaller ones."""
    for name in _BEFORE:
        op.drop_index(name)
    op.execute(_PERIOD + ("STORED" if _is_postgres() else "VIRTUAL"))
    for name, (table, columns) in _AFTER.items():
        op.create_index(name, table, columns)
    if _is_postgres():
        op.drop_index(_CONTENT)
        op.create_index("ix_nodes_content", "nodes", [sa.text(_CONTENT_PLACE)])
        op.execute("ALTER TABLE sessions SET (fillfactor = 50)")  # a row that changes finds place where it was
        _keep_statistics(names=10, packed=0)


def downgrade() -> None:
    """Make the larger ones."""
    for name in _AFTER:
        op.drop_index(name)
    op.execute("ALTER TABLE sessions DROP COLUMN period")
    for name, (table, columns) in _BEFORE.items():
        op.create_index(name, table, columns)
    if _is_postgres():
        op.drop_index("ix_nodes_content")
        op.create_index(_CONTENT, "nodes", ["session", "content"])
        op.execute("ALTER TABLE sessions RESET (fillfactor)")
        _keep_statistics(names=-1, packed=-1)


def _is_postgres() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def _keep_statistics(*, names: int, packed: int) -> None:
    """Have PostgreSQL keep so many values of a column; -1: as many as it does of all."""
    for columns_of, most in ((_NAMES, names), (_PACKED, packed)):
        for table, columns in columns_of.items():
            kept = ", ".join(f"ALTER COLUMN {column} SET STATISTICS {most}" for column in columns)
            op.execute(f"ALTER TABLE {table} {kept}")

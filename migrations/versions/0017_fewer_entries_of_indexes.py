"""Smaller indexes: they were a third of PostgreSQL's disk use.

- `sessions.period`: the ten-minute period in which a session was last changed. The indexes use it instead of the time,
  so that most changes of a session add no index entry;
- exchanges are found by time with the primary key, since their ids begin with the time;
- PostgreSQL finds nodes by a 64-bit hash of their content;
- `evidence` has two smaller indexes instead of a primary key in PostgreSQL. `palimpsest_settle` checks for duplicates;
- PostgreSQL keeps fewer statistics of hashes and ids, and none of packed values.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0017"
down_revision = "0016"
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
_SESSION_PLACE: Final = "hashtextextended(encode(session, 'hex'), 0)"  # before PostgreSQL 18, bytes have no hash
_CONTENT_PLACE: Final = f"hashtextextended(encode(content, 'hex'), {_SESSION_PLACE})"
_PERIOD: Final = "ALTER TABLE sessions ADD COLUMN period BIGINT GENERATED ALWAYS AS (updated_at / 600000) "

_ALL_EVIDENCE: Final = """
            SELECT f.session, n.piece
            FROM fit f CROSS JOIN LATERAL json_populate_recordset(NULL::evidence, f.evidence) AS n
            ON CONFLICT DO NOTHING
"""
_NEW_EVIDENCE: Final = """
            SELECT f.session, n.piece
            FROM fit f CROSS JOIN LATERAL json_populate_recordset(NULL::evidence, f.evidence) AS n
            WHERE NOT EXISTS (
                SELECT FROM evidence e
                WHERE e.piece = n.piece
                AND hashtextextended(encode(e.session, 'hex'), 0) = hashtextextended(encode(f.session, 'hex'), 0))
"""
_FUNCTION: Final = "SELECT pg_get_functiondef('palimpsest_settle(text[], bytea[])'::regprocedure)"
_PRIMARY_KEY: Final = "SELECT conname FROM pg_constraint WHERE conrelid = 'evidence'::regclass AND contype = 'p'"

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
    """Replace the indexes with the smaller ones."""
    for name in _BEFORE:
        op.drop_index(name, if_exists=True)  # on partitioned tables they have other names
    op.execute(_PERIOD + ("STORED" if _is_postgres() else "VIRTUAL"))
    for name, (table, columns) in _AFTER.items():
        op.create_index(name, table, columns)
    if _is_postgres():
        op.drop_index("ix_nodes_session_content", if_exists=True)
        op.create_index("ix_nodes_content", "nodes", [sa.text(_CONTENT_PLACE)])
        key = op.get_bind().execute(sa.text(_PRIMARY_KEY)).scalar_one()
        op.execute(f"ALTER TABLE evidence DROP CONSTRAINT {key}")
        _identify_evidence("FULL")
        op.drop_index("ix_evidence_piece", if_exists=True)
        op.create_index("ix_evidence_piece_session", "evidence", ["piece", sa.text(_SESSION_PLACE)])
        op.create_index("ix_evidence_session", "evidence", ["session"])
        _change_function(_ALL_EVIDENCE, _NEW_EVIDENCE)
        op.execute("ALTER TABLE sessions SET (fillfactor = 50)")  # free space: a changed row stays on its page
        if not _is_partitioned("bodies"):
            op.execute("ALTER TABLE bodies SET (toast_tuple_target = 8160)")  # keep rows that fit on a page whole
        _keep_statistics(names=10, packed=0)


def downgrade() -> None:
    """Restore the larger indexes."""
    for name in _AFTER:
        op.drop_index(name)
    op.execute("ALTER TABLE sessions DROP COLUMN period")
    for name, (table, columns) in _BEFORE.items():
        op.create_index(name, table, columns)
    if _is_postgres():
        op.drop_index("ix_nodes_content")
        op.create_index("ix_nodes_session_content", "nodes", ["session", "content"])
        for name in ("ix_evidence_piece_session", "ix_evidence_session"):
            op.drop_index(name)
        op.execute("ALTER TABLE evidence ADD CONSTRAINT pk_evidence PRIMARY KEY (session, piece)")
        _identify_evidence("DEFAULT")
        op.create_index("ix_evidence_piece", "evidence", ["piece"])
        _change_function(_NEW_EVIDENCE, _ALL_EVIDENCE)
        op.execute("ALTER TABLE sessions RESET (fillfactor)")
        if not _is_partitioned("bodies"):
            op.execute("ALTER TABLE bodies RESET (toast_tuple_target)")
        _keep_statistics(names=-1, packed=-1)


def _identify_evidence(by: str) -> None:
    """Set the replica identity of `evidence` and of each of its partitions."""
    parts = sa.text("SELECT relid::regclass::text FROM pg_partition_tree('evidence') WHERE level > 0")
    for table in ["evidence", *op.get_bind().execute(parts).scalars()]:
        op.execute(f"ALTER TABLE {table} REPLICA IDENTITY {by}")


def _change_function(before: str, after: str) -> None:
    text: str = op.get_bind().execute(sa.text(_FUNCTION)).scalar_one()
    if text.count(before) != 1:
        raise RuntimeError(f"palimpsest_settle is not as this migration expects it: {before!r}")
    op.get_bind().exec_driver_sql(text.replace(before, after))


def _is_postgres() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def _is_partitioned(table: str) -> bool:
    asked = sa.text("SELECT relkind = 'p' FROM pg_class WHERE oid = to_regclass(:name)")
    return bool(op.get_bind().execute(asked, {"name": table}).scalar_one())


def _keep_statistics(*, names: int, packed: int) -> None:
    """Set the statistics target of the columns of hashes and ids, and of packed columns; -1 is the default."""
    for columns_of, most in ((_NAMES, names), (_PACKED, packed)):
        for table, columns in columns_of.items():
            kept = ", ".join(f"ALTER COLUMN {column} SET STATISTICS {most}" for column in columns)
            op.execute(f"ALTER TABLE {table} {kept}")

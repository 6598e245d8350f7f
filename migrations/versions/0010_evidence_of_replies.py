"""Evidence that recognizes a reply when a client that names no session sends it back.

- `evidence`: hashes of a reply's place, of its ids and of its text (`proxy.conversation.evidence`). Replies that are
  already stored get only their places, which are enough to find a conversation that continues;
- `palimpsest_settle` (PostgreSQL) writes the evidence with the reply.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0008"
branch_labels = None
depends_on = None

_AT_ONCE: Final = 1000

_FUNCTION: Final = "SELECT pg_get_functiondef('palimpsest_settle(text[], text[])'::regprocedure)"
_PATCHES: Final = (
    ("new_nodes json, cut json)", "new_nodes json, cut json, evidence json)"),
    (
        "), done AS (",
        """), witnessed AS (
            INSERT INTO evidence (session, piece)
            SELECT f.session, n.piece
            FROM fit f CROSS JOIN LATERAL json_populate_recordset(NULL::evidence, f.evidence) AS n
            ON CONFLICT DO NOTHING
        ), done AS (""",
    ),
)
"""Replacements in the text of the function, in whichever version it exists: (old, new)."""


def upgrade() -> None:
    """Create the table, and fill it from the replies that came through the proxy."""
    name = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    evidence = op.create_table(
        "evidence",
        sa.Column("session", name, nullable=False),
        sa.Column("piece", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("session", "piece", name=op.f("pk_evidence")),
        sqlite_with_rowid=False,
    )
    replies = sa.text(
        "SELECT n.session, n.node, s.tenant, s.dialect FROM nodes n JOIN sessions s ON s.session = n.session "
        "WHERE n.source = 'upstream' AND n.exchange IS NOT NULL"
    )
    rows: list[dict[str, Any]] = []
    for session, node, tenant, dialect in op.get_bind().execute(replies).all():
        rows.append({"session": session, "piece": _place(tenant, dialect, node)})
        if len(rows) == _AT_ONCE:
            op.bulk_insert(evidence, rows)
            rows = []
    if rows:
        op.bulk_insert(evidence, rows)
    op.create_index("ix_evidence_piece", "evidence", ["piece"])
    _change_function([(before, after) for before, after in _PATCHES])


def downgrade() -> None:
    """Drop the table, and restore the function."""
    _change_function([(after, before) for before, after in _PATCHES])
    op.drop_table("evidence")


def _place(tenant: str, dialect: str, node: str) -> int:
    named = f"{tenant}\x00{dialect}\x00place\x00{node}".encode("utf-8", "surrogatepass")
    digest = blake2b(named, digest_size=8, person=b"palimpsest-evid").digest()
    return int.from_bytes(digest, "big", signed=True)


def _change_function(patches: list[tuple[str, str]]) -> None:
    connection = op.get_bind()
    if connection.dialect.name != "postgresql":
        return
    text: str = connection.execute(sa.text(_FUNCTION)).scalar_one()
    for before, after in patches:
        if text.count(before) != 1:
            raise RuntimeError(f"palimpsest_settle is not as this migration expects it: {before!r}")
        text = text.replace(before, after)
    connection.exec_driver_sql(text)

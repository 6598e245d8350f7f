"""Ids that providers keep state under: those of responses and of their items, with the session that received them.

- `provider_ids`: a hash of tenant, dialect and id, with the node of the reply.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    name = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    op.create_table(
        "provider_ids",
        sa.Column("session", name, nullable=False),
        sa.Column("piece", sa.BigInteger, nullable=False),
        sa.Column("node", name, nullable=False),
        sa.PrimaryKeyConstraint("session", "piece", name=op.f("pk_provider_ids")),
        sqlite_with_rowid=False,
    )
    op.create_index("ix_provider_ids_piece", "provider_ids", ["piece"])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("provider_ids")

"""`key_costs`: dollars spent per day with each named key that has a budget."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "key_costs",
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("day", sa.BigInteger(), nullable=False),
        sa.Column("dollars", sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint("tenant", "name", "day", name=op.f("pk_key_costs")),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("key_costs")

"""Drops the tables of the old layout, after every session was moved out of them."""

from __future__ import annotations

from alembic import op

from proxy.store.convert import OLD_TABLES, left, make_old_tables

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drop the old tables."""
    if left(op.get_bind()):
        raise RuntimeError("sessions of the old layout are left: run `palimpsest upgrade`")
    for table in OLD_TABLES:
        op.drop_table(f"old_{table}")


def downgrade() -> None:
    """Create the old tables again, without rows."""
    make_old_tables(op.get_bind())

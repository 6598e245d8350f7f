"""Drops the index of nodes by parent.

Only the list of a session's branches used it, and that reads all nodes of the session anyway. Each new message
added an entry to it: a tenth of what a small request writes. With half a million messages, upgrade and downgrade
take less than a second. A process of an older version that still runs lists branches without the index: slower,
but correctly.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drop the index."""
    op.drop_index(op.f("ix_nodes_session_parent"), table_name="nodes")


def downgrade() -> None:
    """Create the index again."""
    op.create_index(op.f("ix_nodes_session_parent"), "nodes", ["session", "parent"])

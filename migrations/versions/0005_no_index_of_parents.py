"""One index less: of the nodes by their parents.

Only the list of a session's branches asked it, which looks at all nodes of the session anyway; each new
message had to be entered into it, which was a tenth of what a small request writes. Half a million messages
take less than a second, up or down. A process of an older version that still runs lists branches without
it, which is slow and not wrong.
"""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Drop it."""
    op.drop_index(op.f("ix_nodes_session_parent"), table_name="nodes")


def downgrade() -> None:
    """Make it again."""
    op.create_index(op.f("ix_nodes_session_parent"), "nodes", ["session", "parent"])

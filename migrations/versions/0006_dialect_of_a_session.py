"""The API that a session speaks.

- `sessions.dialect`: the name of the API. All existing sessions speak Chat Completions.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column."""
    op.add_column("sessions", sa.Column("dialect", sa.Text(), nullable=False, server_default=sa.text("'chat'")))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("sessions", "dialect")

"""What the upstream counts for a session's tokens: kept with the session, so that every process judges alike.

- `sessions.scale`: how many tokens the upstream counts for one that is counted here, learnt from its usage.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column: nothing is learnt yet."""
    op.add_column("sessions", sa.Column("scale", sa.Float()))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("sessions", "scale")

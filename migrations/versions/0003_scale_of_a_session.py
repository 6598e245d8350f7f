"""The scale between the upstream's token counts and ours is stored per session, so that all processes share it.

- `sessions.scale`: how many tokens the upstream counts for one token counted here, learnt from its usage.
"""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column, empty: nothing has been learnt yet."""
    op.add_column("sessions", sa.Column("scale", sa.Float()))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("sessions", "scale")

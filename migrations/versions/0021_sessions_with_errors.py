"""An index finds the sessions with errors, even if they are few among many."""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_INDEX: Final = "ix_session_rollups_session"
_FAILED: Final = sa.text("status IN ('failed', 'interrupted', 'partial') AND kind <> 'summary'")


def upgrade() -> None:
    """Create the index."""
    op.create_index(_INDEX, "session_rollups", ["session"], sqlite_where=_FAILED, postgresql_where=_FAILED)


def downgrade() -> None:
    """Drop the index."""
    op.drop_index(_INDEX)

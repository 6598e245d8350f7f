"""Indexes that work on every supported PostgreSQL: 0017 once used a function that only version 18 has.

Newer stores already have these indexes. A downgrade changes nothing.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

_SESSION_PLACE: Final = "hashtextextended(encode(session, 'hex'), 0)"
_CONTENT_PLACE: Final = f"hashtextextended(encode(content, 'hex'), {_SESSION_PLACE})"
_FUNCTION: Final = "SELECT pg_get_functiondef('palimpsest_settle(text[], bytea[])'::regprocedure)"
_BEFORE: Final = """
                WHERE e.piece = n.piece AND hashbyteaextended(e.session, 0) = hashbyteaextended(f.session, 0))
"""
_AFTER: Final = """
                WHERE e.piece = n.piece
                AND hashtextextended(encode(e.session, 'hex'), 0) = hashtextextended(encode(f.session, 'hex'), 0))
"""


def upgrade() -> None:
    """Recreate the indexes if they use the function of version 18."""
    if op.get_bind().dialect.name != "postgresql":
        return
    text: str = op.get_bind().execute(sa.text(_FUNCTION)).scalar_one()
    if _BEFORE not in text:
        return
    op.drop_index("ix_nodes_content", if_exists=True)  # on a partitioned table it may have another name
    op.create_index("ix_nodes_content", "nodes", [sa.text(_CONTENT_PLACE)])
    op.drop_index("ix_evidence_piece_session", if_exists=True)
    op.create_index("ix_evidence_piece_session", "evidence", ["piece", sa.text(_SESSION_PLACE)])
    op.get_bind().exec_driver_sql(text.replace(_BEFORE, _AFTER))


def downgrade() -> None:
    """Do nothing."""

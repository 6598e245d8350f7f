"""Updates stores that ran an earlier version of migration 13 to the tables that it creates now.

Since then an exchange is inserted once: into `pending`, and into `exchanges` when it ends.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Change the tables, unless migration 13 already created them in their new form."""
    connection = op.get_bind()
    if "kind" in {column["name"] for column in sa.inspect(connection).get_columns("pending")}:
        return
    compact = _compact()
    op.drop_index("ix_nodes_recorded")
    op.drop_index("ix_exchanges_session_digest_created_at")
    op.drop_table("pending")
    compact.make_pending()
    names = ", ".join(column.name for column in compact.of_an_exchange())
    op.execute(f"INSERT INTO pending ({names}) SELECT {names} FROM exchanges WHERE status = 'pending'")  # noqa: S608
    op.execute("DELETE FROM exchanges WHERE status = 'pending'")
    compact.make_indexes(["ix_exchanges_session_digest"])
    if connection.dialect.name == "postgresql":
        op.execute("ALTER TABLE exchanges RESET (fillfactor)")
        compact.tune_postgres()


def downgrade() -> None:
    """Do nothing: migration 13 creates these tables."""


def _compact() -> Any:
    path = Path(__file__).with_name("0013_compact_tables.py")
    spec = importlib.util.spec_from_file_location("palimpsest_0013", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be read")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

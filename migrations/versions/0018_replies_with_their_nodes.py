"""A reply's text is stored in the row of its node. Its own row in `bodies` needed an index entry.

Existing texts stay where they are: the text of a node without one is in `bodies`. PostgreSQL keeps rows that fit on a
page whole.
"""

from __future__ import annotations

from typing import Final

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_FUNCTION: Final = "SELECT pg_get_functiondef('palimpsest_settle(text[], bytea[])'::regprocedure)"
_PATCHES: Final = (
    ("policy, arrival, content, recorded)", "policy, arrival, content, recorded, text)"),
    ("ELSE f.recorded END\n            FROM fit f", "ELSE f.recorded END, n.text\n            FROM fit f"),
)
_WHOLE: Final = ("nodes", "cuts")
_BACK: Final = """
INSERT INTO bodies (session, body, tokens, text)
SELECT session, body, tokens, text FROM nodes WHERE text IS NOT NULL
ON CONFLICT DO NOTHING
"""


def upgrade() -> None:
    """Add the column for the texts."""
    op.add_column("nodes", sa.Column("text", sa.LargeBinary()))
    if _is_postgres():
        op.execute("ALTER TABLE nodes ALTER COLUMN text SET STORAGE EXTERNAL")
        op.execute("ALTER TABLE nodes ALTER COLUMN text SET STATISTICS 0")
        for table in filter(_is_plain, _WHOLE):
            op.execute(f"ALTER TABLE {table} SET (toast_tuple_target = 8160)")
        _change_function(_PATCHES)


def downgrade() -> None:
    """Move the texts back to `bodies`."""
    op.execute(_BACK)
    op.drop_column("nodes", "text")
    if _is_postgres():
        for table in filter(_is_plain, _WHOLE):
            op.execute(f"ALTER TABLE {table} RESET (toast_tuple_target)")
        _change_function([(after, before) for before, after in _PATCHES])


def _change_function(patches: list[tuple[str, str]] | tuple[tuple[str, str], ...]) -> None:
    text: str = op.get_bind().execute(sa.text(_FUNCTION)).scalar_one()
    for before, after in patches:
        if text.count(before) != 1:
            raise RuntimeError(f"palimpsest_settle is not as this migration expects it: {before!r}")
        text = text.replace(before, after)
    op.get_bind().exec_driver_sql(text)


def _is_postgres() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def _is_plain(table: str) -> bool:
    """Tell whether a table is not partitioned."""
    asked = sa.text("SELECT relkind = 'r' FROM pg_class WHERE oid = to_regclass(:name)")
    return bool(op.get_bind().execute(asked, {"name": table}).scalar_one())

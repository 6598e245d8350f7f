"""Receipts, parameters and the index of pending exchanges take less space.

- receipts and parameters are packed with their own dictionary, and contain the model only once. Stored values stay as
  they are: each value says how it is packed. Older versions cannot read the new ones, so a downgrade repacks them;
- in the index of `pending`, PostgreSQL reuses the space of exchanges that ended. Before, it grew until a vacuum.
"""

from __future__ import annotations

from typing import Any, Final

import orjson
import sqlalchemy as sa
from alembic import op

from proxy.store.packing import RECORDS, pack, unpack

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_MODEL: Final = "\x01"  # stands for the model in parameters
_TABLES: Final = [
    sa.table(
        name,
        sa.column("model", sa.Text()),
        *(sa.column(column, sa.LargeBinary()) for column in ("session", "id", "parameters", "receipt")),
    )
    for name in ("exchanges", "pending")
]
_FUNCTION: Final = "SELECT pg_get_functiondef('palimpsest_begin(text, text, text, text, text, bytea[])'::regprocedure)"
_HELD: Final = "ORDER BY s.session FOR KEY SHARE SKIP LOCKED\n    );\n"
_SEEN: Final = """\
    -- An entry of a deleted row is marked by who meets it, and a full page drops those before it is split. Nobody else
    -- would meet those of exchanges that ended.
    PERFORM p.id FROM pending p WHERE p.session = ANY (held);
"""


def upgrade() -> None:
    """Make `palimpsest_begin` read the index, so that dead entries are reused. Stored rows do not change."""
    _change_function(_HELD, _HELD + _SEEN)


def downgrade() -> None:
    """Repack receipts and parameters in the old way, one session at a time."""
    _change_function(_HELD + _SEEN, _HELD)
    connection = op.get_bind()
    for table in _TABLES:
        there = sa.and_(table.c.session == sa.bindparam("of"), table.c.id == sa.bindparam("named"))
        values: dict[str, Any] = {name: sa.bindparam(f"new_{name}") for name in ("parameters", "receipt")}
        for session in connection.execute(sa.select(table.c.session).distinct()).scalars().all():
            rows = connection.execute(sa.select(table).where(table.c.session == session)).all()
            connection.execute(sa.update(table).where(there).values(**values), [_before(row) for row in rows])


def _before(row: Any) -> dict[str, Any]:
    parameters = unpack(row.parameters).replace(_MODEL, orjson.dumps(row.model).decode())
    return {
        "of": row.session,
        "named": row.id,
        "new_parameters": pack(parameters, RECORDS),
        "new_receipt": pack(unpack(row.receipt), RECORDS),
    }


def _change_function(before: str, after: str) -> None:
    connection = op.get_bind()
    if connection.dialect.name == "postgresql":
        text: str = connection.execute(sa.text(_FUNCTION)).scalar_one()
        if text.count(before) != 1:
            raise RuntimeError(f"palimpsest_begin is not as this migration expects it: {before!r}")
        connection.exec_driver_sql(text.replace(before, after))

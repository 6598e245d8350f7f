"""Variant texts of stored messages are stored in the rows of the exchanges that brought them, not in their own table.

The primary key of that table was session, node and text: nearly as large as the rest of the row. `exchanges.forms` is a
MessagePack array of [node, hash of the text, packed text].
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any, Final

import msgspec
import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_BOTH: Final = ("exchanges", "pending")
_BEGIN: Final = "palimpsest_begin(text, text, text, text, text, bytea[])"
_SETTLE: Final = "palimpsest_settle(text[], bytea[])"
_PATCHES: Final = {
    _BEGIN: (
        (
            """IS DISTINCT FROM n.said
        );
        INSERT INTO forms (session, node, body, exchange, text)
            SELECT n.session, n.node, n.body, n.exchange, n.text
            FROM json_to_recordset(new_forms::json)
                AS n (session bytea, node bytea, body bytea, exchange bytea, text bytea)
            WHERE n.session = ANY (held) AND (unlike IS NULL OR n.exchange <> ALL (unlike))
            ON CONFLICT DO NOTHING;
""",
            "IS DISTINCT FROM n.said\n        );\n",
        ),
        ("replies, tools, instructions, idempotency)", "replies, tools, instructions, idempotency, forms)"),
        ("f.instructions, f.idempotency\n", "f.instructions, f.idempotency, f.forms\n"),
    ),
    _SETTLE: (
        ("e.idempotency,\n", "e.idempotency, e.forms,\n"),
        ("instructions, cut_node, idempotency)", "instructions, cut_node, idempotency, forms)"),
        ("f.cut_node, f.idempotency\n", "f.cut_node, f.idempotency, f.forms\n"),
    ),
}
_OLD: Final = sa.Table(
    "forms",
    sa.MetaData(),
    *(sa.Column(name, sa.LargeBinary(), primary_key=True) for name in ("session", "node", "body")),
    *(sa.Column(name, sa.LargeBinary(), nullable=False) for name in ("exchange", "text")),
    sqlite_with_rowid=False,
)
_NEW: Final = [
    sa.table(name, *(sa.column(column, sa.LargeBinary()) for column in ("session", "id", "forms"))) for name in _BOTH
]


def upgrade() -> None:
    """Move the texts, one session at a time."""
    for table in _BOTH:
        op.add_column(table, sa.Column("forms", sa.LargeBinary()))
    connection = op.get_bind()
    for session in connection.execute(sa.select(_OLD.c.session).distinct()).scalars().all():
        _move(connection, session)
    op.drop_table("forms")
    if _is_postgres():
        for table in _BOTH:
            op.execute(f"ALTER TABLE {table} ALTER COLUMN forms SET STORAGE EXTERNAL")
            op.execute(f"ALTER TABLE {table} ALTER COLUMN forms SET STATISTICS 0")
        _change_functions(back=False)


def _move(connection: sa.Connection, session: bytes) -> None:
    """Move the texts of a session."""
    found = sa.select(_OLD).where(_OLD.c.session == session).order_by(_OLD.c.node, _OLD.c.body)
    brought: defaultdict[bytes, list[tuple[bytes, bytes, bytes]]] = defaultdict(list)
    for row in connection.execute(found):
        brought[row.exchange].append((row.node, row.body, row.text))
    rows = [{"exchange": exchange, "packed": msgspec.msgpack.encode(forms)} for exchange, forms in brought.items()]
    moved = 0
    for table in _NEW:
        there = sa.and_(table.c.session == session, table.c.id == sa.bindparam("exchange"))
        connection.execute(sa.update(table).where(there).values(forms=sa.bindparam("packed")), rows)
        counted = sa.select(sa.func.count()).select_from(table)
        moved += connection.execute(counted.where(table.c.session == session, table.c.forms.is_not(None))).scalar_one()
    if moved != len(rows):
        raise RuntimeError(f"of {len(rows)} exchanges of session {session.hex()} {moved} are stored")


def downgrade() -> None:
    """Move them back."""
    connection = op.get_bind()
    _OLD.create(connection)
    if _is_postgres():
        op.execute("ALTER TABLE forms RENAME CONSTRAINT forms_pkey TO pk_forms")
        op.execute("ALTER TABLE forms ALTER COLUMN text SET STORAGE EXTERNAL")
        _change_functions(back=True)
    for table in _NEW:
        found = sa.select(table).where(table.c.forms.is_not(None)).order_by(table.c.session, table.c.id)
        for row in connection.execute(found).all():
            _give_back(connection, row)
    for name in _BOTH:
        op.drop_column(name, "forms")


def _give_back(connection: sa.Connection, row: Any) -> None:
    for node, body, text in msgspec.msgpack.decode(row.forms):
        there = sa.select(_OLD.c.body).where(_OLD.c.session == row.session, _OLD.c.node == node, _OLD.c.body == body)
        if connection.execute(there).one_or_none() is None:
            values = {"session": row.session, "node": node, "body": body, "exchange": row.id, "text": text}
            connection.execute(_OLD.insert(), values)


def _change_functions(*, back: bool) -> None:
    for function, patches in _PATCHES.items():
        asked = sa.text("SELECT pg_get_functiondef(CAST(:function AS regprocedure))")
        text: str = op.get_bind().execute(asked, {"function": function}).scalar_one()
        for pair in patches:
            before, after = reversed(pair) if back else pair
            if text.count(before) != 1:
                raise RuntimeError(f"{function} is not as this migration expects it: {before!r}")
            text = text.replace(before, after)
        op.get_bind().exec_driver_sql(text)


def _is_postgres() -> bool:
    return op.get_bind().dialect.name == "postgresql"

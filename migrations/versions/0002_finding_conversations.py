"""Columns that find a conversation without its beginning or its id, and the settings of its latest request.

- `nodes.content`: identifies a message by its content, at any position (for clients that drop their oldest messages);
- `nodes.recorded`: the tenant, if every assistant message up to the node came from upstream (for clients that
  name no session);
- `sessions.model`, `sessions.tools`: the model and tools of the conversation (a side request has others);
- `exchanges.idempotency`: the idempotency key of a request, which announces a retry;
- the index on `exchanges.digest` now includes the time. Without it the newest exchange was searched among all.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from alembic import op

# The only import from the program. Node ids are computed with these functions, so they can never change.
from proxy.conversation import content_hash, content_key
from proxy.dialects.chat.message import ChatMessage

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_AT_ONCE: Final = 500


def upgrade() -> None:
    """Add the columns, fill those of `nodes`, and index them."""
    op.add_column("sessions", sa.Column("model", sa.Text()))
    op.add_column("sessions", sa.Column("tools", _name()))
    op.add_column("exchanges", sa.Column("idempotency", _name()))
    op.drop_index(op.f("ix_exchanges_session_digest"), "exchanges")
    op.create_index(
        op.f("ix_exchanges_session_digest_created_at_id"), "exchanges", ["session", "digest", "created_at", "id"]
    )
    op.add_column("nodes", sa.Column("content", _name()))
    op.add_column("nodes", sa.Column("recorded", sa.Text()))
    _allow_updates()
    connection = op.get_bind()
    for session, tenant in connection.execute(sa.text("SELECT session, tenant FROM sessions")).all():
        _fill(connection, session, tenant)
    _refuse_updates()
    op.create_index(op.f("ix_nodes_session_content"), "nodes", ["session", "content"])
    op.create_index(
        "ix_nodes_recorded",
        "nodes",
        ["recorded", "node"],
        sqlite_where=sa.text("source = 'upstream' AND recorded IS NOT NULL"),
        postgresql_where=sa.text("source = 'upstream' AND recorded IS NOT NULL"),
    )


def downgrade() -> None:
    """Drop the columns."""
    op.drop_index("ix_nodes_recorded", "nodes")
    op.drop_index(op.f("ix_nodes_session_content"), "nodes")
    op.drop_index(op.f("ix_exchanges_session_digest_created_at_id"), "exchanges")
    op.create_index(op.f("ix_exchanges_session_digest"), "exchanges", ["session", "digest"])
    for table, name in (
        ("nodes", "recorded"),
        ("nodes", "content"),
        ("exchanges", "idempotency"),
        ("sessions", "tools"),
        ("sessions", "model"),
    ):
        op.drop_column(table, name)


def _fill(connection: sa.Connection, session: str, tenant: str) -> None:
    """Fill the new columns for the nodes of a session."""
    rows = connection.execute(
        sa.text(
            # An imported node keeps its original source, but it did not pass through this proxy: it has no exchange.
            "SELECT n.node, n.parent, n.source = 'upstream' AND n.exchange IS NOT NULL, b.text FROM nodes n "
            "JOIN bodies b ON b.session = n.session AND b.body = n.body "
            "WHERE n.session = :session ORDER BY n.depth"
        ),
        {"session": session},
    ).all()
    recorded: dict[str, str | None] = {"": tenant}
    found: list[dict[str, Any]] = []
    for node, parent, answered, text in rows:
        message = ChatMessage(text.encode())
        kept = recorded.get(parent) if message.role != "assistant" or answered else None
        recorded[node] = kept
        found.append(
            {"session": session, "node": node, "content": content_key(content_hash(message)), "recorded": kept}
        )
    change = sa.text(
        "UPDATE nodes SET content = :content, recorded = :recorded WHERE session = :session AND node = :node"
    )
    for start in range(0, len(found), _AT_ONCE):
        connection.execute(change, found[start : start + _AT_ONCE])


def _allow_updates() -> None:
    postgres = op.get_bind().dialect.name == "postgresql"
    op.execute("DROP TRIGGER nodes_append_only" + (" ON nodes" if postgres else ""))


def _refuse_updates() -> None:
    if op.get_bind().dialect.name == "postgresql":
        op.execute(
            "CREATE TRIGGER nodes_append_only BEFORE UPDATE ON nodes "
            "FOR EACH ROW EXECUTE FUNCTION palimpsest_refuse_update()"
        )
    else:
        op.execute(
            "CREATE TRIGGER nodes_append_only BEFORE UPDATE ON nodes "
            "BEGIN SELECT RAISE(ABORT, 'nodes is append-only'); END"
        )


def _name() -> sa.types.TypeEngine[str]:
    """Return the type of hexadecimal hashes and ids, compared byte by byte."""
    return sa.Text().with_variant(sa.Text(collation="C"), "postgresql")

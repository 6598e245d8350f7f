"""The first tables, and the triggers that keep the log append-only.

The tables are written out here and not taken from the program, because the program changes and this file does not.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_APPEND_ONLY: Final = ("bodies", "instructions", "nodes")


def upgrade() -> None:
    """Create the tables and the triggers."""
    op.create_table(
        "sessions",
        _name("session"),
        _text("tenant"),
        _text("id"),
        _long("created_at"),
        _long("updated_at"),
        _name("head"),
        _name("instructions", nullable=True),
        _text("arrival", nullable=True),
        _number("messages"),
        _number("rounds"),
        _long("tokens"),
        _number("requests"),
        _long("tokens_sent"),
        _long("tokens_saved"),
        sa.PrimaryKeyConstraint("session", name=op.f("pk_sessions")),
    )
    op.create_index(op.f("ix_sessions_id_tenant"), "sessions", ["id", "tenant"])
    op.create_index(op.f("ix_sessions_tenant_updated_at_session"), "sessions", ["tenant", "updated_at", "session"])
    op.create_index(op.f("ix_sessions_updated_at_session"), "sessions", ["updated_at", "session"])

    op.create_table(
        "instructions",
        _name("session"),
        _name("version"),
        _text("messages"),
        _number("tokens"),
        _long("created_at"),
        sa.PrimaryKeyConstraint("session", "version", name=op.f("pk_instructions")),
    )

    op.create_table(
        "bodies",
        _name("session"),
        _name("body"),
        _number("tokens"),
        _text("text"),
        sa.PrimaryKeyConstraint("session", "body", name=op.f("pk_bodies")),
    )

    op.create_table(
        "nodes",
        _name("session"),
        _name("node"),
        _name("parent"),
        _number("depth"),
        _number("round"),
        _long("tokens_total"),
        _name("body"),
        _number("tokens"),
        _text("source"),
        sa.Column("partial", sa.Boolean(), nullable=False),
        _text("exchange", nullable=True),
        _text("agent", nullable=True),
        _text("policy", nullable=True),
        _text("arrival", nullable=True),
        _long("created_at"),
        sa.PrimaryKeyConstraint("session", "node", name=op.f("pk_nodes")),
    )
    op.create_index(op.f("ix_nodes_session_parent"), "nodes", ["session", "parent"])

    op.create_table(
        "cuts",
        _name("session"),
        _name("node"),
        _text("policy"),
        _text("agent"),
        _text("version"),
        _number("position"),
        _number("tokens"),
        _number("messages"),
        _number("tool_calls"),
        _text("exchange", nullable=True),
        _long("created_at"),
        _text("changes"),
        sa.PrimaryKeyConstraint("session", "node", "policy", "agent", name=op.f("pk_cuts")),
    )
    op.create_index(
        op.f("ix_cuts_session_policy_agent_position_node"), "cuts", ["session", "policy", "agent", "position", "node"]
    )

    op.create_table(
        "exchanges",
        _name("session"),
        _name("id"),
        _long("created_at"),
        sa.Column("settled_at", sa.BigInteger(), nullable=True),
        _text("status"),
        _text("kind"),
        _name("base"),
        _text("digest"),
        _text("model"),
        _text("agent", nullable=True),
        _text("policy"),
        _text("policy_version"),
        sa.Column("stream", sa.Boolean(), nullable=False),
        _text("parameters"),
        _name("tools", nullable=True),
        _name("instructions", nullable=True),
        _text("messages"),
        _text("nodes"),
        _text("replies"),
        _name("cut_node", nullable=True),
        _long("tokens_before"),
        _long("tokens_sent"),
        _text("receipt"),
        sa.PrimaryKeyConstraint("session", "id", name=op.f("pk_exchanges")),
    )
    op.create_index(op.f("ix_exchanges_id"), "exchanges", ["id"])
    op.create_index(op.f("ix_exchanges_session_created_at_id"), "exchanges", ["session", "created_at", "id"])
    op.create_index(op.f("ix_exchanges_session_digest"), "exchanges", ["session", "digest"])
    op.create_index(
        "ix_exchanges_pending",
        "exchanges",
        ["session", "id"],
        sqlite_where=sa.text("status = 'pending'"),
        postgresql_where=sa.text("status = 'pending'"),
    )

    op.create_table(
        "forms",
        _name("session"),
        _name("node"),
        _name("body"),
        _text("exchange"),
        sa.PrimaryKeyConstraint("session", "node", "body", name=op.f("pk_forms")),
    )

    op.create_table("secrets", _text("name"), _text("value"), sa.PrimaryKeyConstraint("name", name=op.f("pk_secrets")))

    _refuse_updates()


def downgrade() -> None:
    """Drop the tables, which drops their triggers too."""
    for table in ("secrets", "forms", "exchanges", "cuts", "nodes", "bodies", "instructions", "sessions"):
        op.drop_table(table)
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION palimpsest_refuse_update()")


def _refuse_updates() -> None:
    """Refuse updates only: rows can still be deleted, so that a session can be deleted permanently."""
    postgres = op.get_bind().dialect.name == "postgresql"
    if postgres:
        op.execute(
            "CREATE FUNCTION palimpsest_refuse_update() RETURNS trigger LANGUAGE plpgsql AS "
            "$$ BEGIN RAISE EXCEPTION '% is append-only', TG_TABLE_NAME; END $$"
        )
    for table in _APPEND_ONLY:
        if postgres:
            op.execute(
                f"CREATE TRIGGER {table}_append_only BEFORE UPDATE ON {table} "
                "FOR EACH ROW EXECUTE FUNCTION palimpsest_refuse_update()"
            )
        else:
            op.execute(
                f"CREATE TRIGGER {table}_append_only BEFORE UPDATE ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )


def _name(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    """Return a column for hexadecimal names and ids, compared byte by byte."""
    kind = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    return sa.Column(name, kind, nullable=nullable)


def _text(name: str, *, nullable: bool = False) -> sa.Column[Any]:
    return sa.Column(name, sa.Text(), nullable=nullable)


def _number(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.Integer(), nullable=False)


def _long(name: str) -> sa.Column[Any]:
    return sa.Column(name, sa.BigInteger(), nullable=False)

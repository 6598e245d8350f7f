"""Summaries by a model, hidden rounds of replies, and leases.

- `summaries`: every summary by a model, and every failed attempt at one; append-only;
- `hidden`: tool rounds that the proxy answered itself and clients did not see, by their reply; append-only;
- `leases`: work that only one worker at a time may do for a session;
- `sessions.hidden`, `sessions.summaries`: how many there are, so that a session without any reads none. They
  have a default, because an older version that still runs inserts sessions without them;
- `sessions.cost`, `sessions.calls`: the session's cost so far, and the tools that its newest reply calls.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_APPEND_ONLY: Final = ("hidden", "summaries")


def upgrade() -> None:
    """Create the tables and add the columns."""
    op.create_table(
        "hidden",
        _name("session"),
        _name("node"),
        _text("exchange", nullable=True),
        _text("before"),
        _text("reply", nullable=True),
        _text("after"),
        _number("tokens"),
        _long("created_at"),
        sa.PrimaryKeyConstraint("session", "node", name=op.f("pk_hidden")),
    )
    op.create_table(
        "summaries",
        _name("session"),
        _name("id"),
        _name("node"),
        _name("tip"),
        _name("recipe"),
        _number("until"),
        _number("generation"),
        _name("status"),
        _text("reason"),
        _text("model"),
        _text("text"),
        _text("state"),
        _number("tokens"),
        _number("covered_messages"),
        _number("covered_tokens"),
        _name("predecessor", nullable=True),
        sa.Column("asked", sa.Boolean(), nullable=False),
        _text("usage", nullable=True),
        sa.Column("cost", sa.Float()),
        _text("exchange", nullable=True),
        _long("created_at"),
        sa.PrimaryKeyConstraint("session", "id", name=op.f("pk_summaries")),
    )
    op.create_index(
        op.f("ix_summaries_session_recipe_status_until_created_at_id"),
        "summaries",
        ["session", "recipe", "status", "until", "created_at", "id"],
    )
    op.create_index(
        op.f("ix_summaries_session_recipe_created_at_id"), "summaries", ["session", "recipe", "created_at", "id"]
    )
    op.create_table(
        "leases",
        _name("session"),
        _text("name"),
        _text("holder"),
        _long("expires_at"),
        sa.PrimaryKeyConstraint("session", "name", name=op.f("pk_leases")),
    )
    for name in ("hidden", "summaries"):
        count = sa.Column(name, sa.Integer(), server_default=sa.text("0"), nullable=False)
        op.add_column("sessions", count)
    op.add_column("sessions", sa.Column("cost", sa.Float()))
    op.add_column("sessions", sa.Column("calls", sa.Text()))
    _refuse_updates()


def downgrade() -> None:
    """Drop the columns and the tables, which drops their triggers too."""
    for name in ("calls", "cost", "summaries", "hidden"):
        op.drop_column("sessions", name)
    for table in ("leases", "summaries", "hidden"):
        op.drop_table(table)


def _refuse_updates() -> None:
    """Refuse updates only: rows can still be deleted, so that a session can be deleted permanently."""
    postgres = op.get_bind().dialect.name == "postgresql"
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

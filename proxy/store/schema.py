"""The tables, as SQLAlchemy Core sees them. The migrations make them; a test compares the two.

Every table of a session has a primary key that begins with `session`, the internal name of the session
(`records.session_key`), so that the tables can be distributed by it without a change. For the same reason no other
constraint is unique: what must be unique holds by how names are made. There are no foreign keys: whoever writes to a
session holds the lock on its row in `sessions`.

Times are milliseconds since 1970. JSON is text, never JSONB, which reorders keys. `bodies`, `hidden`, `instructions`,
`nodes` and `summaries` are append-only: the migrations set triggers that refuse an UPDATE.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final

from sqlalchemy import BigInteger, Boolean, Column, Float, Index, Integer, MetaData, Table, Text, text
from sqlalchemy.dialects import postgresql, sqlite

from proxy.store.database import Connection

METADATA: Final = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

NAME: Final = Text().with_variant(Text(collation="C"), "postgresql")
"""Hexadecimal names and ids: compared byte by byte, whatever the language of the database."""


def _session() -> Column[Any]:
    return Column("session", NAME, primary_key=True)


SESSIONS: Final = Table(
    "sessions",
    METADATA,
    _session(),
    Column("tenant", Text, nullable=False),
    Column("id", Text, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("updated_at", BigInteger, nullable=False),
    Column("head", NAME, nullable=False),
    Column("instructions", NAME),
    Column("arrival", Text),
    Column("messages", Integer, nullable=False),
    Column("rounds", Integer, nullable=False),
    Column("tokens", BigInteger, nullable=False),
    Column("requests", Integer, nullable=False),
    Column("tokens_sent", BigInteger, nullable=False),
    Column("tokens_saved", BigInteger, nullable=False),
    Column("model", Text),
    Column("tools", NAME),
    Column("scale", Float),
    Column("hidden", Integer, nullable=False, server_default=text("0")),
    Column("summaries", Integer, nullable=False, server_default=text("0")),
    Column("cost", Float),
    Column("calls", Text),  # a JSON array of names; NULL where there are none
    # (tenant, id) is unique because `session` is computed from the two.
    Index(None, "id", "tenant"),
    Index(None, "tenant", "updated_at", "session"),
    Index(None, "updated_at", "session"),
)
"""One row for each session: where it stands, and sums that a list shows."""

INSTRUCTIONS: Final = Table(
    "instructions",
    METADATA,
    _session(),
    Column("version", NAME, primary_key=True),
    Column("messages", Text, nullable=False),  # a JSON array of the messages' own texts
    Column("tokens", Integer, nullable=False),
    Column("created_at", BigInteger, nullable=False),
)
"""The versions of what leads the requests. Append-only."""

BODIES: Final = Table(
    "bodies",
    METADATA,
    _session(),
    Column("body", NAME, primary_key=True),
    Column("tokens", Integer, nullable=False),
    Column("text", Text, nullable=False),
)
"""Texts of messages (JSON objects) and of `tools` (JSON arrays), once per session. Append-only."""

NODES: Final = Table(
    "nodes",
    METADATA,
    _session(),
    Column("node", NAME, primary_key=True),
    Column("parent", NAME, nullable=False),
    Column("depth", Integer, nullable=False),
    Column("round", Integer, nullable=False),
    Column("tokens_total", BigInteger, nullable=False),
    Column("body", NAME, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("source", Text, nullable=False),
    Column("partial", Boolean, nullable=False),
    Column("exchange", Text),
    Column("agent", Text),
    Column("policy", Text),
    Column("arrival", Text),  # changes, as `encoding` writes them, at position 0
    Column("created_at", BigInteger, nullable=False),
    Column("content", NAME),  # `nodes.content_key` of what it says
    Column("recorded", Text),  # the tenant, where every assistant message up to here came from upstream
    Index(None, "session", "content"),
    Index(
        "ix_nodes_recorded",
        "recorded",
        "node",
        sqlite_where=text("source = 'upstream' AND recorded IS NOT NULL"),
        postgresql_where=text("source = 'upstream' AND recorded IS NOT NULL"),
    ),
)
"""The tree of messages. Append-only."""

HIDDEN: Final = Table(
    "hidden",
    METADATA,
    _session(),
    Column("node", NAME, primary_key=True),
    Column("exchange", Text),
    Column("before", Text, nullable=False),  # a JSON array of the messages' own texts, as strings; so is `after`
    Column("reply", Text),  # the text of a message
    Column("after", Text, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("created_at", BigInteger, nullable=False),
)
"""What the client was not shown of replies. Append-only."""

SUMMARIES: Final = Table(
    "summaries",
    METADATA,
    _session(),
    Column("id", NAME, primary_key=True),
    Column("node", NAME, nullable=False),
    Column("tip", NAME, nullable=False),
    Column("recipe", NAME, nullable=False),
    Column("until", Integer, nullable=False),
    Column("generation", Integer, nullable=False),
    Column("status", NAME, nullable=False),
    Column("reason", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("text", Text, nullable=False),
    Column("state", Text, nullable=False),  # a JSON object
    Column("tokens", Integer, nullable=False),
    Column("covered_messages", Integer, nullable=False),
    Column("covered_tokens", Integer, nullable=False),
    Column("predecessor", NAME),
    Column("asked", Boolean, nullable=False),
    Column("usage", Text),  # a JSON object
    Column("cost", Float),
    Column("exchange", Text),
    Column("created_at", BigInteger, nullable=False),
    Index(None, "session", "recipe", "status", "until", "created_at", "id"),
    Index(None, "session", "recipe", "created_at", "id"),
)
"""Summaries by a model, and the attempts at them. Append-only."""

LEASES: Final = Table(
    "leases",
    METADATA,
    _session(),
    Column("name", Text, primary_key=True),
    Column("holder", Text, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
)
"""What only one worker at a time may do for a session, who does it, and until when at most."""

CUTS: Final = Table(
    "cuts",
    METADATA,
    _session(),
    Column("node", NAME, primary_key=True),
    Column("policy", Text, primary_key=True),
    Column("agent", Text, primary_key=True),  # "" where no agent is named
    Column("version", Text, nullable=False),
    Column("position", Integer, nullable=False),
    Column("tokens", Integer, nullable=False),
    Column("messages", Integer, nullable=False),
    Column("tool_calls", Integer, nullable=False),
    Column("exchange", Text),
    Column("created_at", BigInteger, nullable=False),
    Column("changes", Text, nullable=False),  # as `encoding` writes them
    Index(None, "session", "policy", "agent", "position", "node"),
)
"""Where views were trimmed up to, and how; never changed once made."""

EXCHANGES: Final = Table(
    "exchanges",
    METADATA,
    _session(),
    Column("id", NAME, primary_key=True),
    Column("created_at", BigInteger, nullable=False),
    Column("settled_at", BigInteger),
    Column("status", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("base", NAME, nullable=False),
    Column("digest", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("agent", Text),
    Column("policy", Text, nullable=False),
    Column("policy_version", Text, nullable=False),
    Column("stream", Boolean, nullable=False),
    Column("parameters", Text, nullable=False),  # a JSON object
    Column("tools", NAME),
    Column("instructions", NAME),
    Column("messages", Text, nullable=False),  # JSON arrays of names, as the next two
    Column("nodes", Text, nullable=False),
    Column("replies", Text, nullable=False),
    Column("cut_node", NAME),
    Column("tokens_before", BigInteger, nullable=False),
    Column("tokens_sent", BigInteger, nullable=False),
    Column("receipt", Text, nullable=False),  # a JSON object
    Column("idempotency", NAME),  # hash of the client's key for this request
    Index(None, "id"),
    Index(None, "session", "created_at", "id"),
    Index(None, "session", "digest", "created_at", "id"),
    Index(
        "ix_exchanges_pending",
        "session",
        "id",
        sqlite_where=text("status = 'pending'"),
        postgresql_where=text("status = 'pending'"),
    ),
)
"""Requests and how they ended."""

FORMS: Final = Table(
    "forms",
    METADATA,
    _session(),
    Column("node", NAME, primary_key=True),
    Column("body", NAME, primary_key=True),
    Column("exchange", Text, nullable=False),
)
"""Other texts of stored messages, as clients sent them back, each with the exchange that did first."""

SECRETS: Final = Table(
    "secrets",
    METADATA,
    Column("name", Text, primary_key=True),
    Column("value", Text, nullable=False),  # hexadecimal
)
"""What all workers must share and nobody else may know. Of no session."""

OF_A_SESSION: Final = (LEASES, SUMMARIES, HIDDEN, FORMS, CUTS, EXCHANGES, NODES, BODIES, INSTRUCTIONS, SESSIONS)
"""Every table that a session has rows in, its own row last."""


def insert_new(connection: Connection, table: Table, rows: list[dict[str, Any]]) -> None:
    """Insert `rows`; those whose primary key is there already are left as they are."""
    if rows:
        # One is told from several faster here than there.
        connection.execute(_insert_new(connection.dialect.name, table), rows[0] if len(rows) == 1 else rows)


def insert_into(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    """Return an INSERT of the dialect's own kind, which knows ON CONFLICT."""
    return postgresql.insert(table) if dialect == "postgresql" else sqlite.insert(table)


@cache
def _insert_new(dialect: str, table: Table) -> postgresql.Insert | sqlite.Insert:
    # Making a statement costs more than running it: each is made once.
    return insert_into(dialect, table).on_conflict_do_nothing()

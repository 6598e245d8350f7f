"""Sums over exchanges, for statistics.

- `rollups`: sums by hour, tenant, dialect, model, policy, kind, status and reason of a cache miss at the provider;
- `session_rollups`: the same by session;
- `palimpsest_settle` (PostgreSQL) adds the exchanges that it settles to both.

Exchanges settled before this migration are added from their receipts, which hold the cost but not the savings.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_COUNTS: Final = (
    *("requests", "tokens_before", "tokens_sent", "tokens_input", "tokens_cached", "tokens_written", "tokens_output"),
    *("tokens_missed", "tokens_unique", "trims", "edits", "warnings", "recalls", "summaries", "priced"),
)
_AMOUNTS: Final = (
    *("cost", "cost_saved", "cost_cache_saved", "cost_missed", "cost_recalls", "cost_summaries"),
    *("added_ms", "upstream_ms"),
)
_SUMS: Final = _COUNTS + _AMOUNTS
_ROLLUP_KEYS: Final = ("hour", "slot", "tenant", "dialect", "model", "policy", "kind", "status", "miss")
_SESSION_KEYS: Final = ("session", "hour", "model", "policy", "kind", "status")

_FUNCTION: Final = """
CREATE OR REPLACE FUNCTION palimpsest_settle(waves text[], keys text[])
RETURNS TABLE (exchange text, stands_at text) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
-- Settles the exchanges of which everything holds that their rows take for granted; returns them, each with the head of
-- its session. A wave has one exchange of a session at most, and sees what the waves before it did.
DECLARE
    held text[];
    wave text;
BEGIN
    PERFORM set_config('lock_timeout', '2s', true);
    -- By a statement of its own: what follows sees what others did up to here.
    held := ARRAY (
        SELECT s.session FROM sessions s WHERE s.session = ANY (keys) ORDER BY s.session FOR NO KEY UPDATE SKIP LOCKED
    );
    FOREACH wave IN ARRAY waves LOOP
        RETURN QUERY
        WITH fit AS MATERIALIZED (
            SELECT x.*, s.tenant, e.model, e.tools, e.instructions, e.base AS planned,
                   coalesce(b.depth, 0) AS depth, coalesce(b.round, 0) AS round,
                   coalesce(b.tokens_total, 0) AS tokens_total,
                   CASE WHEN x.base = '' THEN s.tenant ELSE b.recorded END AS recorded,
                   -- A cut that lies before the new messages is kept for all that go on from their base.
                   CASE WHEN x.cut IS NULL THEN NULL
                        WHEN (x.cut ->> 'position')::int > coalesce(b.depth, 0) THEN x.cut ->> 'node'
                        ELSE nullif(x.base, '') END AS cut_node
            FROM json_to_recordset(wave::json) AS x (
                session text, id text, answered boolean, base text, follows_head boolean, first_node text,
                asked text, status text, settled_at bigint, tokens_before bigint, tokens_sent bigint, receipt text,
                cost float8, nodes text, replies text, head text, messages int, rounds int, tokens bigint, calls text,
                scale float8, requests int, tokens_saved bigint, arrival text,{column} new_bodies json,
                new_nodes json, cut json)
            CROSS JOIN LATERAL (
                SELECT * FROM sessions s WHERE s.session = x.session AND s.session = ANY (held) LIMIT 1
            ) s
            JOIN LATERAL (
                SELECT e.id, e.session, e.status, e.messages, e.base, e.model, e.tools, e.instructions
                FROM exchanges e
                WHERE (e.session, e.id) >= (x.session, x.id) ORDER BY e.session, e.id LIMIT 1
            ) e ON e.session = x.session AND e.id = x.id
            LEFT JOIN LATERAL (
                SELECT n.session, n.node, n.depth, n.round, n.tokens_total, n.recorded FROM nodes n
                WHERE (n.session, n.node) >= (x.session, x.base) ORDER BY n.session, n.node LIMIT 1
            ) b ON b.session = x.session AND b.node = x.base
            LEFT JOIN LATERAL (
                SELECT n.session, n.node FROM nodes n
                WHERE (n.session, n.node) >= (x.session, x.first_node) ORDER BY n.session, n.node LIMIT 1
            ) first ON first.session = x.session AND first.node = x.first_node
            WHERE e.status IN ('pending', 'interrupted')
              AND (NOT x.answered OR (
                  e.messages = x.asked AND (x.base = '' OR b.node IS NOT NULL)
                  AND (NOT x.follows_head OR s.head = x.base) AND first.node IS NULL))
        ), said AS (
            INSERT INTO bodies (session, body, tokens, text)
            SELECT f.session, n.body, n.tokens, n.text
            FROM fit f CROSS JOIN LATERAL json_populate_recordset(NULL::bodies, f.new_bodies) AS n
            ON CONFLICT DO NOTHING
        ), grown AS (
            INSERT INTO nodes (session, node, parent, body, depth, round, tokens, tokens_total, created_at, source,
                               partial, exchange, agent, policy, arrival, content, recorded)
            SELECT f.session, n.node, n.parent, n.body, f.depth + n.depth, f.round + n.round, n.tokens,
                   f.tokens_total + n.tokens_total, n.created_at, n.source, n.partial, n.exchange, n.agent, n.policy,
                   n.arrival, n.content, CASE WHEN n.recorded IS NULL THEN NULL ELSE f.recorded END
            FROM fit f CROSS JOIN LATERAL json_populate_recordset(NULL::nodes, f.new_nodes) AS n
            ON CONFLICT DO NOTHING
        ), trimmed AS (
            INSERT INTO cuts (session, node, policy, agent, position, tokens, messages, tool_calls, version, changes,
                              exchange, created_at)
            SELECT f.session, f.cut_node, n.policy, n.agent, n.position, n.tokens, n.messages, n.tool_calls, n.version,
                   n.changes, n.exchange, n.created_at
            FROM fit f CROSS JOIN LATERAL json_populate_record(NULL::cuts, f.cut) AS n
            WHERE f.cut_node IS NOT NULL
            ON CONFLICT DO NOTHING
        ), closed AS (
            -- They are there: a conflict finds them by their key. What is not set stays.
            INSERT INTO exchanges AS e (session, id, created_at, tokens_before, tokens_sent, settled_at, base, status,
                                        kind, digest, model, policy, policy_version, stream, parameters, receipt,
                                        messages, nodes, replies, cut_node)
            SELECT f.session, f.id, 0, f.tokens_before, f.tokens_sent, f.settled_at,
                   CASE WHEN f.answered THEN f.base ELSE f.planned END, f.status, '', '', '', '', '', false, '',
                   f.receipt, '', coalesce(f.nodes, '[]'), coalesce(f.replies, '[]'), f.cut_node
            FROM fit f
            ON CONFLICT (session, id) DO UPDATE
            SET status = excluded.status, settled_at = excluded.settled_at, tokens_before = excluded.tokens_before,
                tokens_sent = excluded.tokens_sent, receipt = excluded.receipt, base = excluded.base,
                nodes = excluded.nodes, replies = excluded.replies, cut_node = excluded.cut_node
        ), done AS (
            DELETE FROM pending p USING fit f WHERE p.session = f.session AND p.id = f.id
        ), moved AS (
            UPDATE sessions s
            SET updated_at = greatest(s.updated_at, f.settled_at),
                cost = CASE WHEN f.cost IS NULL THEN s.cost ELSE coalesce(s.cost, 0) + f.cost END,
                requests = s.requests + coalesce(f.requests, 0),
                tokens_sent = s.tokens_sent + CASE WHEN f.answered THEN f.tokens_sent ELSE 0 END,
                tokens_saved = s.tokens_saved + coalesce(f.tokens_saved, 0),
                arrival = coalesce(f.arrival, s.arrival),
                head = coalesce(f.head, s.head),
                messages = CASE WHEN f.head IS NULL THEN s.messages ELSE f.depth + f.messages END,
                rounds = CASE WHEN f.head IS NULL THEN s.rounds ELSE f.round + f.rounds END,
                tokens = CASE WHEN f.head IS NULL THEN s.tokens ELSE f.tokens_total + f.tokens END,
                instructions = CASE WHEN f.head IS NULL THEN s.instructions
                                    ELSE coalesce(f.instructions, s.instructions) END,
                model = CASE WHEN f.head IS NULL THEN s.model ELSE f.model END,
                tools = CASE WHEN f.head IS NULL THEN s.tools ELSE f.tools END,
                scale = CASE WHEN f.head IS NULL THEN s.scale ELSE coalesce(f.scale, s.scale) END,
                calls = CASE WHEN f.head IS NULL THEN s.calls ELSE f.calls END
            FROM fit f WHERE s.session = f.session
            RETURNING s.session, s.head
        ){counts}
        SELECT f.id, m.head FROM fit f JOIN moved m ON m.session = f.session;
    END LOOP;
END $$
"""
"""The function of migration 7, with placeholders for the counting."""


def _adding(table: str, keys: tuple[str, ...]) -> str:
    """Return the SQL that adds the figures of `fit` to the rows of a table, in the order of the key."""
    own = {"tenant": "f.tenant", "status": "f.status", "session": "f.session"}
    values = [*(own.get(name, f"n.{name}") for name in keys), *(f"sum(n.{name})" for name in _SUMS)]
    places = ", ".join(map(str, range(1, len(keys) + 1)))
    return f"""
            INSERT INTO {table} AS r ({", ".join((*keys, *_SUMS))})
            SELECT {", ".join(values)}
            FROM fit f CROSS JOIN LATERAL json_populate_record(NULL::rollups, f.figures) AS n
            WHERE n.hour IS NOT NULL
            GROUP BY {places} ORDER BY {places}
            ON CONFLICT ({", ".join(keys)}) DO UPDATE
            SET {", ".join(f"{name} = r.{name} + excluded.{name}" for name in _SUMS)}"""  # noqa: S608 - of our own names


def _function(*, counts: bool) -> str:
    if not counts:
        return _FUNCTION.format(column="", counts="")
    added = f""", counted AS ({_adding("rollups", _ROLLUP_KEYS)}
        ), counted_by_session AS ({_adding("session_rollups", _SESSION_KEYS)}
        )"""
    return _FUNCTION.format(column=" figures json,", counts=added)


def upgrade() -> None:
    """Create the tables, replace the function, and add up the existing exchanges."""
    op.create_table(
        "rollups",
        sa.Column("hour", sa.BigInteger(), nullable=False),
        sa.Column("slot", sa.Integer(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in _ROLLUP_KEYS[2:]),
        *_sums(),
        sa.PrimaryKeyConstraint(*_ROLLUP_KEYS, name=op.f("pk_rollups")),
        sqlite_with_rowid=False,
    )
    session = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    op.create_table(
        "session_rollups",
        sa.Column("session", session, nullable=False),
        sa.Column("hour", sa.BigInteger(), nullable=False),
        *(sa.Column(name, sa.Text(), nullable=False) for name in _SESSION_KEYS[2:]),
        *_sums(),
        sa.PrimaryKeyConstraint(*_SESSION_KEYS, name=op.f("pk_session_rollups")),
        sqlite_with_rowid=False,
    )
    for table, keys in (("rollups", _ROLLUP_KEYS), ("session_rollups", _SESSION_KEYS)):
        op.execute(_backfill(table, keys))
    if op.get_bind().dialect.name == "postgresql":
        for table in ("rollups", "session_rollups"):
            op.execute(f"ALTER TABLE {table} SET (fillfactor = 50)")  # free space: a row that grows stays on its page
        op.get_bind().exec_driver_sql(_function(counts=True))


def downgrade() -> None:
    """Drop the tables, and make the function count nothing."""
    if op.get_bind().dialect.name == "postgresql":
        op.get_bind().exec_driver_sql(_function(counts=False))
    op.drop_table("session_rollups")
    op.drop_table("rollups")


def _sums() -> list[sa.Column[Any]]:
    return [
        *(sa.Column(name, sa.BigInteger(), nullable=False) for name in _COUNTS),
        *(sa.Column(name, sa.Float(), nullable=False) for name in _AMOUNTS),
    ]


def _backfill(table: str, keys: tuple[str, ...]) -> str:
    """Return the SQL that adds up the settled exchanges."""
    is_postgres = op.get_bind().dialect.name == "postgresql"

    def receipt(*path: str) -> str:
        if is_postgres:
            return f"(e.receipt::json #>> '{{{','.join(path)}}}')::float8"
        return f"json_extract(e.receipt, '$.{'.'.join(path)}')"

    known = {
        "hour": "coalesce(e.settled_at, e.created_at) / 3600000",
        "slot": "0",
        "tenant": "s.tenant",
        "dialect": "s.dialect",
        "miss": "''",
        "requests": "count(*)",
        "tokens_before": "sum(e.tokens_before)",
        "tokens_sent": "sum(e.tokens_sent)",
        "tokens_input": f"coalesce(sum({receipt('usage', 'prompt_tokens')}), 0)",
        "tokens_cached": f"coalesce(sum({receipt('usage', 'prompt_tokens_details', 'cached_tokens')}), 0)",
        "tokens_output": f"coalesce(sum({receipt('usage', 'completion_tokens')}), 0)",
        "cost": f"coalesce(sum({receipt('cost')}), 0)",
        "priced": f"count({receipt('cost')})",
    }
    values = [known.get(name, "0" if name in _SUMS else f"e.{name}") for name in (*keys, *_SUMS)]
    places = ", ".join(map(str, range(1, len(keys) + 1)))
    return (
        f"INSERT INTO {table} ({', '.join((*keys, *_SUMS))}) SELECT {', '.join(values)} "  # noqa: S608 - of our own names
        "FROM exchanges e JOIN sessions s ON s.session = e.session "
        f"WHERE e.status NOT IN ('pending', 'interrupted') GROUP BY {places}"
    )

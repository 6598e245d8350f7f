"""PostgreSQL writes many exchanges with one statement, and settles them without touching an index.

- `pending`: the exchanges that are not settled. It replaces a partial index of `exchanges`, which depended on `status`:
  each settlement therefore added new entries to every index of the table;
- free space in the pages of `exchanges` (PostgreSQL), so that a settled row stays on the page where it was begun;
- `palimpsest_begin` and `palimpsest_settle` (PostgreSQL): they write the exchanges of many callers and return those
  that they wrote. They skip an exchange whose assumptions no longer hold. `store/functions.py` makes the rows.

If a process of an older version begins an exchange after this migration, it has no row in `pending`: should it never be
settled, it is not found.
"""

from __future__ import annotations

from typing import Any, Final

import sqlalchemy as sa
from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_IS_PENDING: Final = sa.text("status = 'pending'")

# PostgreSQL keeps a function's query plan while the tables grow, and on empty tables every index looks equally good. So
# each row is looked up by its primary key alone: with LATERAL and LIMIT, ordered by the key if the table has other
# indexes, and with every kind of plan that reads more turned off.
_BEGIN: Final = """
CREATE FUNCTION palimpsest_begin(
    new_sessions text, new_instructions text, new_bodies text, new_forms text, new_exchanges text, keys text[]
) RETURNS SETOF text LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
-- Begins the exchanges whose sessions nobody holds; returns their ids.
DECLARE
    held text[];
BEGIN
    -- Nothing is acknowledged by a beginning: what follows from it is durable no later than it is.
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM set_config('lock_timeout', '2s', true);
    INSERT INTO sessions (session, tenant, id, dialect, created_at, updated_at, head, messages, rounds, tokens,
                          requests, tokens_sent, tokens_saved)
        SELECT n.session, n.tenant, n.id, n.dialect, n.created_at, n.created_at, '', 0, 0, 0, 0, 0, 0
        FROM json_to_recordset(new_sessions::json)
            AS n (session text, tenant text, id text, dialect text, created_at bigint)
        -- One that is there is not tried: that would wait for who deletes it.
        WHERE NOT EXISTS (SELECT FROM sessions s WHERE s.session = n.session)
        ON CONFLICT DO NOTHING;
    held := ARRAY (
        SELECT s.session FROM sessions s WHERE s.session = ANY (keys) ORDER BY s.session FOR KEY SHARE SKIP LOCKED
    );
    IF new_instructions IS NOT NULL THEN
        INSERT INTO instructions (session, version, messages, tokens, created_at)
            SELECT n.session, n.version, n.messages, n.tokens, n.created_at
            FROM json_to_recordset(new_instructions::json)
                AS n (session text, version text, messages text, tokens int, created_at bigint)
            WHERE n.session = ANY (held)
            ON CONFLICT DO NOTHING;
    END IF;
    IF new_bodies IS NOT NULL THEN
        INSERT INTO bodies (session, body, tokens, text)
            SELECT n.session, n.body, n.tokens, n.text
            FROM json_to_recordset(new_bodies::json) AS n (session text, body text, tokens int, text text)
            WHERE n.session = ANY (held)
            ON CONFLICT DO NOTHING;
    END IF;
    IF new_forms IS NOT NULL THEN
        INSERT INTO forms (session, node, body, exchange)
            SELECT n.session, n.node, n.body, n.exchange
            FROM json_to_recordset(new_forms::json) AS n (session text, node text, body text, exchange text)
            WHERE n.session = ANY (held)
            ON CONFLICT DO NOTHING;
    END IF;
    RETURN QUERY
        WITH fit AS MATERIALIZED (
            SELECT n.*
            FROM json_populate_recordset(NULL::exchanges, new_exchanges::json) AS n
            LEFT JOIN LATERAL (
                SELECT i.version FROM instructions i WHERE i.session = n.session AND i.version = n.instructions LIMIT 1
            ) i ON true
            LEFT JOIN LATERAL (
                SELECT b.body FROM bodies b WHERE b.session = n.session AND b.body = n.tools LIMIT 1
            ) b ON true
            WHERE n.session = ANY (held)
              -- Texts that are known to be stored are left out of the call.
              AND i.version IS NOT DISTINCT FROM n.instructions AND b.body IS NOT DISTINCT FROM n.tools
        ), made AS (
            INSERT INTO exchanges (session, id, created_at, tokens_before, tokens_sent, base, status, kind, digest,
                                   model, policy, policy_version, agent, stream, parameters, receipt, messages, nodes,
                                   replies, tools, instructions, idempotency)
            SELECT f.session, f.id, f.created_at, 0, 0, f.base, 'pending', f.kind, f.digest, f.model, f.policy,
                   f.policy_version, f.agent, f.stream, f.parameters, '{}', f.messages, '[]', '[]', f.tools,
                   f.instructions, f.idempotency
            FROM fit f
            ON CONFLICT DO NOTHING
            RETURNING exchanges.session, exchanges.id
        ), noted AS (
            INSERT INTO pending (session, id) SELECT m.session, m.id FROM made m ON CONFLICT DO NOTHING
        )
        SELECT f.id FROM fit f;
END $$
"""

_SETTLE: Final = """
CREATE FUNCTION palimpsest_settle(waves text[], keys text[])
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
                scale float8, requests int, tokens_saved bigint, arrival text, new_bodies json,
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
        )
        SELECT f.id, m.head FROM fit f JOIN moved m ON m.session = f.session;
    END LOOP;
END $$
"""


def upgrade() -> None:
    """Create and fill `pending`; create the functions."""
    op.create_table(
        "pending",
        _name("session"),
        _name("id"),
        sa.PrimaryKeyConstraint("session", "id", name=op.f("pk_pending")),
        sqlite_with_rowid=False,
    )
    op.execute("INSERT INTO pending (session, id) SELECT session, id FROM exchanges WHERE status = 'pending'")
    op.drop_index("ix_exchanges_pending", "exchanges")
    if op.get_bind().dialect.name == "postgresql":
        op.execute("ALTER TABLE exchanges SET (fillfactor = 30)")
        for function in (_BEGIN, _SETTLE):
            op.get_bind().exec_driver_sql(function)


def downgrade() -> None:
    """Drop the functions and `pending`; create the index again."""
    if op.get_bind().dialect.name == "postgresql":
        op.execute("DROP FUNCTION palimpsest_settle, palimpsest_begin")
        op.execute("ALTER TABLE exchanges RESET (fillfactor)")
    op.create_index(
        "ix_exchanges_pending", "exchanges", ["session", "id"], sqlite_where=_IS_PENDING, postgresql_where=_IS_PENDING
    )
    op.drop_table("pending")


def _name(name: str) -> sa.Column[Any]:
    """Return a column for hexadecimal hashes and ids, compared byte by byte."""
    kind = sa.Text().with_variant(sa.Text(collation="C"), "postgresql")
    return sa.Column(name, kind, nullable=False)

"""The compact tables: hashes, ids and long texts as bytes. `proxy/store/packing.py` packs the texts.

- hashes and ids are bytes instead of hexadecimal digits;
- texts, receipts and cuts are compressed with the shipped dictionaries; each value says how it is packed;
- `cuts.base`: a cut is stored as a difference from the cut at that node. Every sixteenth is stored whole;
- `forms.text`: a form is stored as a difference from its message, no longer in `bodies`;
- `pending` holds whole exchanges, which move to `exchanges` when they end. A row of `exchanges` never changes;
- `nodes.recorded` has no index: sessions are found by `evidence`;
- the index of `exchanges` by time ends with the time. The index by digest has only the exchanges whose retries are
  recognized by their digest. The functions of PostgreSQL take bytes.

The tables of the old layout stay beside the new ones, as `old_…`. `proxy/store/convert.py` moves the sessions, and the
next migration drops the old tables. So a conversion that was killed can continue.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any, Final

import sqlalchemy as sa
from alembic import op

from proxy.store.convert import OLD_TABLES, copy_back

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None

_APPEND_ONLY: Final = ("bodies", "hidden", "instructions", "nodes", "summaries")
_NEW_INDEXES: Final = {
    "ix_sessions_id_tenant": ("sessions", ["id", "tenant"]),
    "ix_sessions_tenant_updated_at_session": ("sessions", ["tenant", "updated_at", "session"]),
    "ix_sessions_updated_at_session": ("sessions", ["updated_at", "session"]),
    "ix_nodes_session_content": ("nodes", ["session", "content"]),
    "ix_summaries_session_recipe_status_until_created_at_id": (
        "summaries",
        ["session", "recipe", "status", "until", "created_at", "id"],
    ),
    "ix_summaries_session_recipe_created_at_id": ("summaries", ["session", "recipe", "created_at", "id"]),
    "ix_cuts_session_policy_agent_position_node": ("cuts", ["session", "policy", "agent", "position", "node"]),
    "ix_exchanges_id": ("exchanges", ["id"]),
    "ix_evidence_piece": ("evidence", ["piece"]),
    "ix_provider_ids_piece": ("provider_ids", ["piece"]),
    "ix_exchanges_session_created_at": ("exchanges", ["session", "created_at"]),
    "ix_exchanges_session_digest": ("exchanges", ["session", "digest"]),
}
_CHANGED: Final = ("ix_exchanges_session_created_at", "ix_exchanges_session_digest")
_OLD_INDEXES: Final = {name: of for name, of in _NEW_INDEXES.items() if name not in _CHANGED} | {
    "ix_nodes_recorded": ("nodes", ["recorded", "node"]),
    "ix_exchanges_session_created_at_id": ("exchanges", ["session", "created_at", "id"]),
    "ix_exchanges_session_digest_created_at_id": ("exchanges", ["session", "digest", "created_at", "id"]),
}
_ONLY: Final = {
    "ix_nodes_recorded": sa.text("source = 'upstream' AND recorded IS NOT NULL"),
    "ix_exchanges_session_digest": sa.text("kind IN ('append', 'first') OR idempotency IS NOT NULL"),
}
"""Conditions of the partial indexes."""

_PACKED: Final = {
    "bodies": ["text"],
    "cuts": ["changes"],
    "exchanges": ["parameters", "receipt"],
    "forms": ["text"],
    "hidden": ["before", "reply", "after"],
    "instructions": ["messages"],
    "summaries": ["text", "state", "usage"],
}

# The comment in 0007 on these functions applies here too.
_BEGIN: Final = """
CREATE FUNCTION palimpsest_begin(
    new_sessions text, new_instructions text, new_bodies text, new_forms text, new_exchanges text, keys bytea[]
) RETURNS SETOF bytea LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
-- Begins the exchanges whose sessions nobody holds; returns their ids.
DECLARE
    held bytea[];
    unlike bytea[];
BEGIN
    -- Nothing is acknowledged by a beginning: what follows from it is durable no later than it is.
    PERFORM set_config('synchronous_commit', 'off', true);
    PERFORM set_config('lock_timeout', '2s', true);
    INSERT INTO sessions (session, tenant, id, dialect, created_at, updated_at, head, messages, rounds, tokens,
                          requests, tokens_sent, tokens_saved)
        SELECT n.session, n.tenant, n.id, n.dialect, n.created_at, n.created_at, '', 0, 0, 0, 0, 0, 0
        FROM json_to_recordset(new_sessions::json)
            AS n (session bytea, tenant text, id text, dialect text, created_at bigint)
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
                AS n (session bytea, version bytea, messages bytea, tokens int, created_at bigint)
            WHERE n.session = ANY (held)
            ON CONFLICT DO NOTHING;
    END IF;
    IF new_bodies IS NOT NULL THEN
        INSERT INTO bodies (session, body, tokens, text)
            SELECT n.session, n.body, n.tokens, n.text
            FROM json_to_recordset(new_bodies::json) AS n (session bytea, body bytea, tokens int, text bytea)
            WHERE n.session = ANY (held)
            ON CONFLICT DO NOTHING;
    END IF;
    IF new_forms IS NOT NULL THEN
        -- A text that is packed against that of a message needs the very message that was taken for it.
        unlike := ARRAY (
            SELECT n.exchange
            FROM json_to_recordset(new_forms::json) AS n (session bytea, node bytea, exchange bytea, said bytea)
            LEFT JOIN LATERAL (
                SELECT o.body FROM nodes o WHERE o.session = n.session AND o.node = n.node LIMIT 1
            ) o ON true
            WHERE n.said IS NOT NULL AND o.body IS DISTINCT FROM n.said
        );
        INSERT INTO forms (session, node, body, exchange, text)
            SELECT n.session, n.node, n.body, n.exchange, n.text
            FROM json_to_recordset(new_forms::json)
                AS n (session bytea, node bytea, body bytea, exchange bytea, text bytea)
            WHERE n.session = ANY (held) AND (unlike IS NULL OR n.exchange <> ALL (unlike))
            ON CONFLICT DO NOTHING;
    END IF;
    RETURN QUERY
        WITH fit AS MATERIALIZED (
            SELECT n.*
            FROM json_populate_recordset(NULL::pending, new_exchanges::json) AS n
            LEFT JOIN LATERAL (
                SELECT i.version FROM instructions i WHERE i.session = n.session AND i.version = n.instructions LIMIT 1
            ) i ON true
            LEFT JOIN LATERAL (
                SELECT b.body FROM bodies b WHERE b.session = n.session AND b.body = n.tools LIMIT 1
            ) b ON true
            WHERE n.session = ANY (held) AND (unlike IS NULL OR n.id <> ALL (unlike))
              -- Texts that are known to be stored are left out of the call.
              AND i.version IS NOT DISTINCT FROM n.instructions AND b.body IS NOT DISTINCT FROM n.tools
        ), made AS (
            INSERT INTO pending (session, id, created_at, tokens_before, tokens_sent, base, status, kind, digest,
                                 model, policy, policy_version, agent, stream, parameters, receipt, messages, nodes,
                                 replies, tools, instructions, idempotency)
            SELECT f.session, f.id, f.created_at, 0, 0, f.base, 'pending', f.kind, f.digest, f.model, f.policy,
                   f.policy_version, f.agent, f.stream, f.parameters, f.receipt, f.messages, '', '', f.tools,
                   f.instructions, f.idempotency
            FROM fit f
            -- One that is settled may be begun once more.
            WHERE NOT EXISTS (SELECT FROM exchanges e WHERE e.session = f.session AND e.id = f.id)
            ON CONFLICT DO NOTHING
        )
        SELECT f.id FROM fit f;
END $$
"""

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

_SETTLE: Final = """
CREATE FUNCTION palimpsest_settle(waves text[], keys bytea[])
RETURNS TABLE (exchange bytea, stands_at bytea) LANGUAGE plpgsql
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
SET enable_sort = off SET jit = off SET plan_cache_mode = force_generic_plan
AS $$
-- Settles the exchanges of which everything holds that their rows take for granted; returns them, each with the head of
-- its session. A wave has one exchange of a session at most, and sees what the waves before it did.
DECLARE
    held bytea[];
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
            SELECT x.*, s.tenant, e.created_at, e.kind, e.digest, e.model, e.policy, e.policy_version, e.agent,
                   e.stream, e.parameters, e.messages AS brought, e.tools, e.instructions, e.idempotency,
                   e.base AS planned, coalesce(b.depth, 0) AS depth, coalesce(b.round, 0) AS round,
                   coalesce(b.tokens_total, 0) AS tokens_total,
                   CASE WHEN x.base = '' THEN s.tenant ELSE b.recorded END AS recorded,
                   -- A cut that lies before the new messages is kept for all that go on from their base.
                   CASE WHEN x.cut IS NULL THEN NULL
                        WHEN (x.cut ->> 'position')::int > coalesce(b.depth, 0) THEN (x.cut ->> 'node')::bytea
                        ELSE nullif(x.base, '') END AS cut_node
            FROM json_to_recordset(wave::json) AS x (
                session bytea, id bytea, answered boolean, base bytea, follows_head boolean, first_node bytea,
                asked bytea, status text, settled_at bigint, tokens_before bigint, tokens_sent bigint, receipt bytea,
                cost float8, nodes bytea, replies bytea, head bytea, messages int, rounds int, tokens bigint,
                calls text, scale float8, requests int, tokens_saved bigint, arrival text, figures json,
                new_bodies json, new_nodes json, cut json, cut_follows bytea, evidence json)
            CROSS JOIN LATERAL (
                SELECT * FROM sessions s WHERE s.session = x.session AND s.session = ANY (held) LIMIT 1
            ) s
            JOIN LATERAL (
                SELECT * FROM pending p
                WHERE (p.session, p.id) >= (x.session, x.id) ORDER BY p.session, p.id LIMIT 1
            ) e ON e.session = x.session AND e.id = x.id
            LEFT JOIN LATERAL (
                SELECT n.session, n.node, n.depth, n.round, n.tokens_total, n.recorded FROM nodes n
                WHERE (n.session, n.node) >= (x.session, x.base) ORDER BY n.session, n.node LIMIT 1
            ) b ON b.session = x.session AND b.node = x.base
            LEFT JOIN LATERAL (
                SELECT n.session, n.node FROM nodes n
                WHERE (n.session, n.node) >= (x.session, x.first_node) ORDER BY n.session, n.node LIMIT 1
            ) first ON first.session = x.session AND first.node = x.first_node
            WHERE NOT x.answered OR (
                e.messages = x.asked AND (x.base = '' OR b.node IS NOT NULL)
                AND (NOT x.follows_head OR s.head = x.base) AND first.node IS NULL
                -- A cut that is packed against another one needs the very cut that was taken for it.
                AND (x.cut_follows IS NULL OR EXISTS (
                    SELECT FROM cuts c
                    WHERE c.session = x.session AND c.node = (x.cut ->> 'base')::bytea
                      AND c.policy = x.cut ->> 'policy' AND c.agent = x.cut ->> 'agent'
                      AND c.exchange = x.cut_follows)))
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
                              base, exchange, created_at)
            SELECT f.session, f.cut_node, n.policy, n.agent, n.position, n.tokens, n.messages, n.tool_calls, n.version,
                   n.changes, n.base, n.exchange, n.created_at
            FROM fit f CROSS JOIN LATERAL json_populate_record(NULL::cuts, f.cut) AS n
            WHERE f.cut_node IS NOT NULL
            ON CONFLICT DO NOTHING
        ), closed AS (
            INSERT INTO exchanges (session, id, created_at, tokens_before, tokens_sent, settled_at, base, digest,
                                   status, kind, model, policy, policy_version, agent, stream, parameters, receipt,
                                   messages, nodes, replies, tools, instructions, cut_node, idempotency)
            SELECT f.session, f.id, f.created_at, f.tokens_before, f.tokens_sent, f.settled_at,
                   CASE WHEN f.answered THEN f.base ELSE f.planned END, f.digest, f.status, f.kind, f.model, f.policy,
                   f.policy_version, f.agent, f.stream, f.parameters, f.receipt, f.brought, coalesce(f.nodes, ''),
                   coalesce(f.replies, ''), f.tools, f.instructions, f.cut_node, f.idempotency
            FROM fit f
            ON CONFLICT DO NOTHING
        ), witnessed AS (
            INSERT INTO evidence (session, piece)
            SELECT f.session, n.piece
            FROM fit f CROSS JOIN LATERAL json_populate_recordset(NULL::evidence, f.evidence) AS n
            ON CONFLICT DO NOTHING
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
        ), counted AS ({counted}
        ), counted_by_session AS ({counted_by_session}
        )
        SELECT f.id, m.head FROM fit f JOIN moved m ON m.session = f.session;
    END LOOP;
END $$
"""


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


def upgrade() -> None:
    """Rename the old tables, and create the new ones."""
    for name in _OLD_INDEXES:
        op.drop_index(name)
    for table in OLD_TABLES:
        _rename(table, f"old_{table}")
    _make_tables()
    _make_indexes(_NEW_INDEXES)
    _refuse_updates()
    if _is_postgres():
        tune_postgres()


def tune_postgres() -> None:
    """Set the storage parameters of the new tables, and create the functions of PostgreSQL."""
    op.execute("ALTER TABLE session_rollups SET (fillfactor = 80)")  # free space: a row that grows stays on its page
    op.execute("ALTER TABLE rollups SET (fillfactor = 80)")
    for table, columns in _PACKED.items():
        for column in columns:  # packed values do not compress further
            op.execute(f"ALTER TABLE {table} ALTER COLUMN {column} SET STORAGE EXTERNAL")
    op.execute("DROP FUNCTION palimpsest_settle, palimpsest_begin")
    by_session = _adding("session_rollups", _SESSION_KEYS)
    settle = _SETTLE.format(counted=_adding("rollups", _ROLLUP_KEYS), counted_by_session=by_session)
    for function in (_BEGIN, settle):
        op.get_bind().exec_driver_sql(function)


def downgrade() -> None:
    """Move converted sessions back to the old tables."""
    for name in _NEW_INDEXES:
        op.drop_index(name)
    copy_back(op.get_bind())
    for table in OLD_TABLES:
        op.drop_table(table)
        _rename(f"old_{table}", table)
    _make_indexes(_OLD_INDEXES)
    _refuse_updates()
    if _is_postgres():
        op.execute("ALTER TABLE exchanges SET (fillfactor = 30)")
        op.execute("ALTER TABLE session_rollups SET (fillfactor = 50)")
        op.execute("ALTER TABLE rollups SET (fillfactor = 50)")
        op.execute("DROP FUNCTION palimpsest_settle, palimpsest_begin")
        for function in _functions_before():
            op.get_bind().exec_driver_sql(function)


def _is_postgres() -> bool:
    return op.get_bind().dialect.name == "postgresql"


def _rename(table: str, name: str) -> None:
    """Rename a table with its primary key; drop its append-only trigger."""
    if table in _APPEND_ONLY:
        op.execute(f"DROP TRIGGER {table}_append_only" + (f" ON {table}" if _is_postgres() else ""))
    op.rename_table(table, name)
    if _is_postgres():
        op.execute(f"ALTER TABLE {name} RENAME CONSTRAINT pk_{table} TO pk_{name}")


def make_indexes(names: list[str]) -> None:
    """Create the named indexes."""
    _make_indexes({name: _NEW_INDEXES[name] for name in names})


def _make_indexes(indexes: dict[str, tuple[str, list[str]]]) -> None:
    for name, (table, columns) in indexes.items():
        only = _ONLY.get(name)
        op.create_index(name, table, columns, sqlite_where=only, postgresql_where=only)


def _refuse_updates() -> None:
    for table in _APPEND_ONLY:
        if _is_postgres():
            op.execute(
                f"CREATE TRIGGER {table}_append_only BEFORE UPDATE ON {table} "
                "FOR EACH ROW EXECUTE FUNCTION palimpsest_refuse_update()"
            )
        else:
            op.execute(
                f"CREATE TRIGGER {table}_append_only BEFORE UPDATE ON {table} "
                f"BEGIN SELECT RAISE(ABORT, '{table} is append-only'); END"
            )


def _functions_before() -> tuple[str, str]:
    """Return the functions that take text: those of migrations 7 and 8, with the changes of migration 10."""
    seventh, eighth, tenth = (
        _migration(name)
        for name in ("0007_postgresql_writes_in_batches", "0008_statistics", "0010_evidence_of_replies")
    )
    settle: str = eighth._function(counts=True)  # noqa: SLF001 - it is done, and does not change
    for before, after in tenth._PATCHES:  # noqa: SLF001
        settle = settle.replace(before, after)
    return seventh._BEGIN, settle  # noqa: SLF001


def _migration(name: str) -> Any:
    path = Path(__file__).with_name(f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"palimpsest_{name}", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} cannot be read")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _make_tables() -> None:
    _table(
        "sessions",
        ["session"],
        *_bytes("session"),
        *_texts("tenant", "id"),
        *_longs("created_at", "updated_at"),
        *_bytes("head"),
        *_bytes("instructions", nullable=True),
        *_texts("arrival", nullable=True),
        *_numbers("messages", "rounds"),
        *_longs("tokens"),
        *_numbers("requests"),
        *_longs("tokens_sent", "tokens_saved"),
        *_texts("model", nullable=True),
        *_bytes("tools", nullable=True),
        sa.Column("scale", sa.Float()),
        sa.Column("hidden", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("summaries", sa.Integer(), server_default=sa.text("0"), nullable=False),
        sa.Column("cost", sa.Float()),
        *_texts("calls", nullable=True),
        sa.Column("dialect", sa.Text(), server_default=sa.text("'chat'"), nullable=False),
    )
    _table(
        "instructions",
        ["session", "version"],
        *_bytes("session", "version", "messages"),
        *_numbers("tokens"),
        *_longs("created_at"),
    )
    _table("bodies", ["session", "body"], *_bytes("session", "body"), *_numbers("tokens"), *_bytes("text"))
    _table(
        "nodes",
        ["session", "node"],
        *_bytes("session", "node", "parent", "body"),
        *_numbers("depth", "round", "tokens"),
        *_longs("tokens_total", "created_at"),
        *_texts("source"),
        sa.Column("partial", sa.Boolean(), nullable=False),
        *_bytes("exchange", nullable=True),
        *_texts("agent", "policy", nullable=True),
        *_bytes("arrival", "content", nullable=True),
        *_texts("recorded", nullable=True),
    )
    _table(
        "hidden",
        ["session", "node"],
        *_bytes("session", "node", "before", "after"),
        *_bytes("reply", "exchange", nullable=True),
        *_numbers("tokens"),
        *_longs("created_at"),
    )
    _table(
        "summaries",
        ["session", "id"],
        *_bytes("session"),
        *_ordered("id"),
        *_bytes("node", "tip"),
        *_ordered("recipe", "status"),
        *_ordered("predecessor", nullable=True),
        *_numbers("until", "generation", "tokens", "covered_messages", "covered_tokens"),
        *_texts("reason", "model"),
        *_bytes("text", "state"),
        *_bytes("usage", "exchange", nullable=True),
        sa.Column("asked", sa.Boolean(), nullable=False),
        sa.Column("cost", sa.Float()),
        *_longs("created_at"),
    )
    _table("leases", ["session", "name"], *_bytes("session"), *_texts("name", "holder"), *_longs("expires_at"))
    _table(
        "cuts",
        ["session", "node", "policy", "agent"],
        *_bytes("session", "node"),
        *_texts("policy", "agent"),
        *_numbers("position", "tokens", "messages", "tool_calls"),
        *_texts("version"),
        *_bytes("changes"),
        *_bytes("base", "exchange", nullable=True),
        *_longs("created_at"),
    )
    _table("exchanges", ["session", "id"], *of_an_exchange())
    _table("evidence", ["session", "piece"], *_bytes("session"), *_longs("piece"), sqlite_with_rowid=False)
    _table(
        "provider_ids",
        ["session", "piece"],
        *_bytes("session"),
        *_longs("piece"),
        *_bytes("node"),
        sqlite_with_rowid=False,
    )
    make_pending()
    _table(
        "forms",
        ["session", "node", "body"],
        *_bytes("session", "node", "body", "exchange", "text"),
        sqlite_with_rowid=False,
    )
    _table(
        "session_rollups",
        list(_SESSION_KEYS),
        *_bytes("session"),
        *_longs("hour"),
        *_texts(*_SESSION_KEYS[2:]),
        *_longs(*_COUNTS),
        *_columns(sa.Float(), _AMOUNTS, nullable=False),
        sqlite_with_rowid=False,
    )


def make_pending() -> None:
    """Create the table of pending exchanges."""
    _table("pending", ["session", "id"], *of_an_exchange(), sqlite_with_rowid=False)


def of_an_exchange() -> list[sa.Column[Any]]:
    """Return the columns of an exchange."""
    return [
        *_bytes("session", "id"),
        *_longs("created_at", "tokens_before", "tokens_sent"),
        sa.Column("settled_at", sa.BigInteger()),
        *_bytes("base", "digest"),
        *_texts("status", "kind", "model", "policy", "policy_version"),
        *_texts("agent", nullable=True),
        sa.Column("stream", sa.Boolean(), nullable=False),
        *_bytes("parameters", "receipt", "messages", "nodes", "replies"),
        *_bytes("tools", "instructions", "cut_node", "idempotency", nullable=True),
    ]


def _table(name: str, key: list[str], *columns: sa.Column[Any], **options: Any) -> None:
    op.create_table(name, *columns, sa.PrimaryKeyConstraint(*key, name=op.f(f"pk_{name}")), **options)


def _columns(kind: Any, names: tuple[str, ...], *, nullable: bool) -> list[sa.Column[Any]]:
    return [sa.Column(name, kind, nullable=nullable) for name in names]


def _bytes(*names: str, nullable: bool = False) -> list[sa.Column[Any]]:
    return _columns(sa.LargeBinary(), names, nullable=nullable)


def _texts(*names: str, nullable: bool = False) -> list[sa.Column[Any]]:
    return _columns(sa.Text(), names, nullable=nullable)


def _ordered(*names: str, nullable: bool = False) -> list[sa.Column[Any]]:
    """Return columns for texts that are compared byte by byte."""
    return _columns(sa.Text().with_variant(sa.Text(collation="C"), "postgresql"), names, nullable=nullable)


def _numbers(*names: str) -> list[sa.Column[Any]]:
    return _columns(sa.Integer(), names, nullable=False)


def _longs(*names: str) -> list[sa.Column[Any]]:
    return _columns(sa.BigInteger(), names, nullable=False)

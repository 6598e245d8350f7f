-- Distributes the tables by session on Citus. Not tested.
SELECT create_distributed_table(name, 'session', colocate_with => 'none') FROM (VALUES ('sessions')) AS t (name);
SELECT create_distributed_table(name, 'session', colocate_with => 'sessions') FROM unnest(ARRAY[
  'bodies', 'cuts', 'evidence', 'exchanges', 'hidden', 'instructions', 'leases', 'nodes', 'pending',
  'provider_ids', 'session_rollups', 'summaries']) AS name;
SELECT create_reference_table('rollups'), create_reference_table('secrets');
-- The functions palimpsest_begin and palimpsest_settle write several sessions in one statement and lock rows, which
-- Citus restricts across nodes: what they cannot do is written session by session, slower.

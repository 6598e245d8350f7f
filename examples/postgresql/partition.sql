-- Splits the large tables by a hash of the session. Run it while no proxy runs.
DO $$
DECLARE name text; number int;
BEGIN
  FOREACH name IN ARRAY ARRAY['bodies', 'nodes', 'exchanges', 'evidence', 'cuts'] LOOP
    EXECUTE format('ALTER TABLE %I RENAME TO plain_%s', name, name);
    EXECUTE format('CREATE TABLE %I (LIKE plain_%s INCLUDING ALL) PARTITION BY HASH (session)', name, name);
    FOR number IN 0..15 LOOP
      EXECUTE format('CREATE TABLE %s_%s PARTITION OF %I FOR VALUES WITH (MODULUS 16, REMAINDER %s)',
                     name, number, name, number);
      IF name = 'evidence' THEN
        EXECUTE format('ALTER TABLE %s_%s REPLICA IDENTITY FULL', name, number);
      END IF;
    END LOOP;
    EXECUTE format('INSERT INTO %I SELECT * FROM plain_%s', name, name);
    EXECUTE format('DROP TABLE plain_%s', name);
  END LOOP;
  FOREACH name IN ARRAY ARRAY['bodies', 'nodes'] LOOP
    EXECUTE format('CREATE TRIGGER %s_append_only BEFORE UPDATE ON %I
                    FOR EACH ROW EXECUTE FUNCTION palimpsest_refuse_update()', name, name);
  END LOOP;
END $$;

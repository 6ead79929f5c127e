-- The leased-tasks table and what keeps it fast and honest.
-- The placeholder in braces is the quoted schema name.  Words: published, leased, acknowledged,
-- released, expired, dead-lettered (README, "A message's life").

-- Which migrations have been applied; read by schema_state.
CREATE TABLE {schema}.migrations (
    version integer PRIMARY KEY,
    applied_at timestamptz NOT NULL DEFAULT now()
);

CREATE TABLE {schema}.tasks (
    -- Order of publication within a priority; claim returns rows in it, every
    -- settling statement (acknowledge, renew, release, dead_letter) finds its rows by it.
    task_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    -- The queue; claim, promote, purge, queue_size and next_look filter by it.
    task_name text NOT NULL,
    -- 0..255, higher first; written by publish.
    priority smallint NOT NULL DEFAULT 0 CHECK (priority BETWEEN 0 AND 255),
    -- Ascending delivery order, so that claim can compare (rank, task_id) as one row.
    rank smallint NOT NULL GENERATED ALWAYS AS ((255 - priority)::smallint) STORED,
    -- NULL: ready.  Else held until then; promote sets it to NULL when due.
    available_at timestamptz,
    -- For people and monitoring: how long a message has been waiting.
    published_at timestamptz NOT NULL DEFAULT now(),
    -- Deliveries that count against max_attempts: a graceful release takes one back.
    attempts integer NOT NULL DEFAULT 0,
    -- Grows with every claim and never shrinks: with task_id it is the fence
    -- that acknowledge, renew, release and dead_letter must show.
    deliveries integer NOT NULL DEFAULT 0,
    -- Who holds the lease and until when by this server's clock; set by claim,
    -- moved by renew, cleared by release.  In no index, so that all three are HOT updates.
    lease_worker_id text,
    lease_expiration timestamptz,
    -- JSON in ASCII (headers, properties, content type): text and not jsonb,
    -- since \u0000 and lone surrogates must survive.
    envelope text NOT NULL,
    -- The body, byte for byte.
    payload bytea NOT NULL,
    CONSTRAINT lease_is_whole CHECK ((lease_worker_id IS NULL) = (lease_expiration IS NULL))
) WITH (
    -- Room for the claim's and the renewals' new row versions on the same page.
    fillfactor = 60,
    -- A queue turns over its whole content many times a minute: vacuum early, without pauses.
    autovacuum_vacuum_scale_factor = 0.01,
    autovacuum_vacuum_threshold = 500,
    autovacuum_vacuum_insert_scale_factor = 0.05,
    autovacuum_analyze_scale_factor = 0.05,
    autovacuum_vacuum_cost_delay = 0
);

-- Serves claim, take, purge and queue_size: the ready rows of one queue in delivery order.
CREATE INDEX tasks_ready ON {schema}.tasks (task_name, rank, task_id) WHERE available_at IS NULL;

-- Serves promote, next_look and purge: rows held until a time, soonest first.
CREATE INDEX tasks_due ON {schema}.tasks (task_name, available_at) WHERE available_at IS NOT NULL;

-- Messages taken out of circulation, with the reason; written by dead_letter.
CREATE TABLE {schema}.dead_letters (
    -- Of its own: task ids may be restarted.
    dead_letter_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    task_id bigint NOT NULL,
    task_name text NOT NULL,
    priority smallint NOT NULL,
    published_at timestamptz NOT NULL,
    attempts integer NOT NULL,
    -- The last holder of the lease.
    worker_id text,
    reason text NOT NULL,
    dead_at timestamptz NOT NULL DEFAULT now(),
    envelope text NOT NULL,
    payload bytea NOT NULL
);

-- The NOTIFY channel of a queue: hashed, since LISTEN cuts names at 63 bytes and
-- NOTIFY refuses longer ones.  kombu_pgnotify.store.channel_of computes the same.
CREATE FUNCTION {schema}.channel_of(in_schema text, queue text) RETURNS text
    LANGUAGE sql STABLE STRICT PARALLEL SAFE
    RETURN 'pgnotify_' || pg_catalog.left(pg_catalog.encode(pg_catalog.sha224(
        pg_catalog.convert_to(in_schema || '.' || queue, 'UTF8')), 'hex'), 40);

-- Announces a row written or released by somebody else than the transport (psql, a
-- trigger, another language, an application's own transaction); the transport
-- announces after its commit and silences these triggers with kombu_pgnotify.quiet.
-- NOTIFY folds equal announcements of one transaction into one.
-- The quotes around the body have a name that no schema may contain (options.py holds that).
CREATE FUNCTION {schema}.announce() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp AS $kombu_pgnotify$
BEGIN
    PERFORM pg_notify({schema}.channel_of(TG_TABLE_SCHEMA, NEW.task_name), TG_ARGV[0]);
    RETURN NULL;
END $kombu_pgnotify$;

CREATE TRIGGER announce_published AFTER INSERT ON {schema}.tasks
    FOR EACH ROW
    WHEN (pg_catalog.current_setting('kombu_pgnotify.quiet', true) IS DISTINCT FROM 'on')
    EXECUTE FUNCTION {schema}.announce('published');

CREATE TRIGGER announce_released AFTER UPDATE OF lease_expiration, available_at ON {schema}.tasks
    FOR EACH ROW
    WHEN (NEW.lease_expiration IS NULL AND NEW.available_at IS NULL
          AND (OLD.lease_expiration IS NOT NULL OR OLD.available_at IS NOT NULL)
          AND pg_catalog.current_setting('kombu_pgnotify.quiet', true) IS DISTINCT FROM 'on')
    EXECUTE FUNCTION {schema}.announce('released');

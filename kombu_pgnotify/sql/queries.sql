-- Every statement kombu_pgnotify runs while it works.  {schema} is the quoted
-- schema name; $1, $2 … are parameters.
--
-- Two settings hold for one statement only, so that nothing depends on the
-- session (a pooler may hand it to somebody else): kombu_pgnotify.quiet silences the
-- table's triggers, since the transport announces after its commit; and
-- synchronous_commit is off wherever losing the last instant costs only a redelivery.

-- name: ping
-- Proves that the server answers.
SELECT 1;

-- name: schema_state
-- Says what server this is and how far the schema $1 has been migrated.
SELECT current_setting('server_version_num')::int AS server_version,
       pg_is_in_recovery() AS in_recovery,
       current_user::text AS role_name,
       EXISTS (SELECT FROM pg_namespace WHERE nspname = $1) AS has_schema,
       EXISTS (SELECT FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace
               WHERE n.nspname = $1 AND c.relname = 'migrations') AS has_tables;

-- name: schema_version
-- Reads the newest migration that has been applied.
SELECT coalesce(max(version), 0) FROM {schema}.migrations;

-- name: publish
-- Writes one message ($3: not before this time, $6: synchronous_commit) and returns its id.
INSERT INTO {schema}.tasks (task_name, priority, available_at, envelope, payload)
SELECT $1, $2::smallint, CASE WHEN $3::timestamptz > now() THEN $3::timestamptz END, $4, $5::bytea
FROM (SELECT set_config('kombu_pgnotify.quiet', 'on', true),
             set_config('synchronous_commit', $6, true)) AS settings
RETURNING task_id;

-- name: announce
-- Tells the listeners of channel $1 what happened ($2: published or released).
SELECT pg_notify($1, $2);

-- name: claim
-- Leases up to $5 ready or expired messages of queue $1 to worker $6 for $7 seconds,
-- walking the ranges (rank, task_id) > ($2, $3) up to rank $4 in turn.
-- The comparison is written as one row and ordered by both columns: with a plain
-- "rank = x AND task_id > y" the planner may walk the primary key instead.
WITH picked AS MATERIALIZED (
    SELECT candidate.task_id
    FROM (SELECT set_config('synchronous_commit', 'off', true)) AS settings
    CROSS JOIN unnest($2::smallint[], $3::bigint[], $4::smallint[])
        WITH ORDINALITY AS range (after_rank, after_id, last_rank, place)
    CROSS JOIN LATERAL (
        SELECT task_id
        FROM {schema}.tasks
        WHERE task_name = $1 AND available_at IS NULL
          AND (rank, task_id) > (range.after_rank, range.after_id) AND rank <= range.last_rank
          AND (lease_expiration IS NULL OR lease_expiration < now())
        ORDER BY rank, task_id
        LIMIT $5::int
        FOR UPDATE SKIP LOCKED
    ) AS candidate
    LIMIT $5::int
)
UPDATE {schema}.tasks
SET lease_worker_id = $6,
    lease_expiration = now() + make_interval(secs => $7::float8),
    -- Neither number may overflow, whatever somebody has written there.
    deliveries = CASE WHEN deliveries < 2147483647 THEN deliveries + 1 ELSE 1 END,
    attempts = least(attempts, 2147483646) + 1
WHERE task_id = ANY (ARRAY(SELECT task_id FROM picked))
RETURNING task_id, deliveries, attempts, rank, envelope, payload;

-- name: take
-- Deletes and returns up to $5 messages in claim's order, for consumers that do not acknowledge.
WITH picked AS MATERIALIZED (
    SELECT candidate.task_id
    FROM (SELECT set_config('synchronous_commit', 'off', true)) AS settings
    CROSS JOIN unnest($2::smallint[], $3::bigint[], $4::smallint[])
        WITH ORDINALITY AS range (after_rank, after_id, last_rank, place)
    CROSS JOIN LATERAL (
        SELECT task_id
        FROM {schema}.tasks
        WHERE task_name = $1 AND available_at IS NULL
          AND (rank, task_id) > (range.after_rank, range.after_id) AND rank <= range.last_rank
          AND (lease_expiration IS NULL OR lease_expiration < now())
        ORDER BY rank, task_id
        LIMIT $5::int
        FOR UPDATE SKIP LOCKED
    ) AS candidate
    LIMIT $5::int
)
DELETE FROM {schema}.tasks
WHERE task_id = ANY (ARRAY(SELECT task_id FROM picked))
RETURNING task_id, least(deliveries, 2147483646) + 1, least(attempts, 2147483646) + 1, rank, envelope, payload;

-- name: acknowledge
-- Deletes the messages $1 whose delivery $2 is still the latest, locking in id order
-- so that two workers never wait for each other.
WITH held AS MATERIALIZED (
    SELECT t.task_id
    FROM (SELECT set_config('synchronous_commit', 'off', true)) AS settings
    CROSS JOIN unnest($1::bigint[], $2::int[]) AS settled (task_id, delivery)
    JOIN {schema}.tasks AS t ON t.task_id = settled.task_id AND t.deliveries = settled.delivery
    ORDER BY t.task_id
    FOR UPDATE OF t
)
DELETE FROM {schema}.tasks
WHERE task_id = ANY (ARRAY(SELECT task_id FROM held))
RETURNING task_id;

-- name: renew
-- Extends the leases $1 (deliveries $2) by $3 seconds from now, as long as nobody else got them.
WITH held AS MATERIALIZED (
    SELECT t.task_id
    FROM (SELECT set_config('synchronous_commit', 'off', true)) AS settings
    CROSS JOIN unnest($1::bigint[], $2::int[]) AS settled (task_id, delivery)
    JOIN {schema}.tasks AS t ON t.task_id = settled.task_id AND t.deliveries = settled.delivery
    WHERE t.lease_expiration IS NOT NULL
    ORDER BY t.task_id
    FOR UPDATE OF t
)
UPDATE {schema}.tasks
SET lease_expiration = now() + make_interval(secs => $3::float8)
WHERE task_id = ANY (ARRAY(SELECT task_id FROM held))
RETURNING task_id;

-- name: release
-- Clears the leases $1 (deliveries $2) and takes $3 attempts back (1: never started, 0: it was).
WITH held AS MATERIALIZED (
    SELECT t.task_id
    FROM (SELECT set_config('synchronous_commit', 'off', true),
                 set_config('kombu_pgnotify.quiet', 'on', true)) AS settings
    CROSS JOIN unnest($1::bigint[], $2::int[]) AS settled (task_id, delivery)
    JOIN {schema}.tasks AS t ON t.task_id = settled.task_id AND t.deliveries = settled.delivery
    WHERE t.lease_expiration IS NOT NULL
    ORDER BY t.task_id
    FOR UPDATE OF t
)
UPDATE {schema}.tasks
SET lease_worker_id = NULL, lease_expiration = NULL, attempts = greatest(attempts - $3::int, 0)
WHERE task_id = ANY (ARRAY(SELECT task_id FROM held))
RETURNING task_id;

-- name: dead_letter
-- Moves the messages $1 (deliveries $2) out of circulation and keeps them with the reason $3.
WITH held AS MATERIALIZED (
    SELECT t.task_id
    FROM unnest($1::bigint[], $2::int[]) AS settled (task_id, delivery)
    JOIN {schema}.tasks AS t ON t.task_id = settled.task_id AND t.deliveries = settled.delivery
    ORDER BY t.task_id
    FOR UPDATE OF t
), removed AS (
    DELETE FROM {schema}.tasks
    WHERE task_id = ANY (ARRAY(SELECT task_id FROM held))
    RETURNING *
)
INSERT INTO {schema}.dead_letters
    (task_id, task_name, priority, published_at, attempts, worker_id, reason, envelope, payload)
SELECT task_id, task_name, priority, published_at, attempts, lease_worker_id, $3, envelope, payload
FROM removed
RETURNING task_id;

-- name: promote
-- Makes up to $2 held messages of queue $1 whose time has come ready, and counts them.
WITH due AS MATERIALIZED (
    SELECT task_id
    FROM {schema}.tasks
    WHERE task_name = $1 AND available_at IS NOT NULL AND available_at <= now()
    ORDER BY available_at
    LIMIT $2::int
    FOR UPDATE SKIP LOCKED
), promoted AS (
    UPDATE {schema}.tasks
    SET available_at = NULL
    WHERE task_id = ANY (ARRAY(SELECT task_id FROM due))
      AND set_config('synchronous_commit', 'off', true) IS NOT NULL
      AND set_config('kombu_pgnotify.quiet', 'on', true) IS NOT NULL
    RETURNING task_id
)
SELECT count(*) FROM promoted;

-- name: next_look
-- Says in how many seconds queue $1 may have something for an idle consumer although
-- nobody announces it: the soonest held message, the first lease to expire (of the
-- first thousand leased: the poll covers the rest).
-- Bounded to a day either way: times may be infinite, and differences of those may not.
SELECT CASE WHEN soonest IS NOT NULL THEN extract(epoch FROM
           greatest(least(soonest, clock_timestamp() + interval '1 day'),
                    clock_timestamp() - interval '1 day') - clock_timestamp())::float8 END
FROM (SELECT least(
    (SELECT available_at
     FROM {schema}.tasks
     WHERE task_name = $1 AND available_at IS NOT NULL
     ORDER BY available_at
     LIMIT 1),
    (SELECT min(lease_expiration)
     FROM (SELECT lease_expiration
           FROM {schema}.tasks
           WHERE task_name = $1 AND available_at IS NULL AND (rank, task_id) > (-1, 0)
           ORDER BY rank, task_id
           LIMIT 1000) AS leased)
) AS soonest
    -- Keeps the planner from looking twice.
    OFFSET 0) AS looked;

-- name: queue_size
-- Counts the messages of queue $1 that a consumer could have or will have when their time
-- comes: not the leased ones.  Stops counting at $2.
SELECT count(*)
FROM (
    (SELECT FROM {schema}.tasks
     WHERE task_name = $1 AND available_at IS NULL AND (rank, task_id) > (-1, 0)
       AND (lease_expiration IS NULL OR lease_expiration < now())
     ORDER BY rank, task_id
     LIMIT $2::bigint)
    UNION ALL
    (SELECT FROM {schema}.tasks
     WHERE task_name = $1 AND available_at IS NOT NULL
       AND (lease_expiration IS NULL OR lease_expiration < now())
     ORDER BY available_at
     LIMIT $2::bigint)
    LIMIT $2::bigint
) AS waiting;

-- name: purge
-- Deletes up to $2 messages of queue $1 that nobody holds, and counts them.
WITH free AS MATERIALIZED (
    SELECT task_id
    FROM (
        SELECT task_id
        FROM (SELECT task_id
              FROM {schema}.tasks
              WHERE task_name = $1 AND available_at IS NULL AND (rank, task_id) > (-1, 0)
                AND (lease_expiration IS NULL OR lease_expiration < now())
              ORDER BY rank, task_id
              LIMIT $2::int
              FOR UPDATE SKIP LOCKED) AS ready
        UNION ALL
        SELECT task_id
        FROM (SELECT task_id
              FROM {schema}.tasks
              WHERE task_name = $1 AND available_at IS NOT NULL
                AND (lease_expiration IS NULL OR lease_expiration < now())
              ORDER BY available_at
              LIMIT $2::int
              FOR UPDATE SKIP LOCKED) AS held
    ) AS candidate
    LIMIT $2::int
), purged AS (
    DELETE FROM {schema}.tasks
    WHERE task_id = ANY (ARRAY(SELECT task_id FROM free))
    RETURNING task_id
)
SELECT count(*) FROM purged;

-- name: listening
-- Lists the channels this session listens on, to check that the LISTENs are in force.
SELECT coalesce(array_to_string(ARRAY(SELECT pg_listening_channels()), ' '), '');

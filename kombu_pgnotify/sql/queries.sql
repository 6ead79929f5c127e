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
-- Writes one message ($3: not before this time, $4: not after so many seconds, $5: the lowest
-- priority first, $6: synchronous_commit) and returns its id and its queue's x-max-length.
-- Unless $9 (persistent) it goes nowhere if nobody has declared the queue, as AMQP has it: a reply
-- to somebody who has gone.
INSERT INTO {schema}.tasks (task_name, priority, available_at, expires_at, envelope, payload)
SELECT $1, CASE WHEN $5::boolean THEN 255 - $2::smallint
                ELSE least($2::smallint, coalesce(q.max_priority, 255)) END,
       CASE WHEN $3::timestamptz > now() THEN $3::timestamptz END,
       least(now() + make_interval(secs => $4::float8),
             greatest($3::timestamptz, now()) + make_interval(secs => q.message_ttl)),
       $7, $8::bytea
FROM (SELECT set_config('kombu_pgnotify.quiet', 'on', true),
             set_config('synchronous_commit', $6, true)) AS settings
LEFT JOIN {schema}.queues AS q ON q.queue_name = $1
WHERE $9::boolean OR q.queue_name IS NOT NULL
RETURNING task_id, (SELECT max_length FROM {schema}.queues WHERE queue_name = $1);

-- name: publish_many
-- Writes messages for the default exchange, in order: parallel arrays of publish's $1, $2, $3, $4,
-- $7, $8 and $9; $5 and $6 hold for all.  Returns the queues that have an x-max-length.
WITH written AS (
    INSERT INTO {schema}.tasks (task_name, priority, available_at, expires_at, envelope, payload)
    SELECT m.queue, CASE WHEN $5::boolean THEN 255 - m.priority
                         ELSE least(m.priority, coalesce(q.max_priority, 255)) END,
           CASE WHEN m.due > now() THEN m.due END,
           least(now() + make_interval(secs => m.ttl),
                 greatest(m.due, now()) + make_interval(secs => q.message_ttl)),
           m.envelope, m.payload
    FROM (SELECT set_config('kombu_pgnotify.quiet', 'on', true),
                 set_config('synchronous_commit', $6, true)) AS settings
    CROSS JOIN unnest($1::text[], $2::smallint[], $3::timestamptz[], $4::float8[], $7::text[],
                      $8::bytea[], $9::boolean[]) WITH ORDINALITY
        AS m (queue, priority, due, ttl, envelope, payload, persistent, place)
    LEFT JOIN {schema}.queues AS q ON q.queue_name = m.queue
    WHERE m.persistent OR q.queue_name IS NOT NULL
    ORDER BY m.place
    RETURNING task_name
)
SELECT DISTINCT queue_name FROM written JOIN {schema}.queues ON queue_name = task_name
WHERE max_length IS NOT NULL;

-- name: publish_routed
-- Writes one message into every queue that exchange $1 has for routing key $2, but for live
-- queues: theirs goes on channel $11 within this transaction ($10: the message as text, NULL if it
-- is too big, then a row that the NOTIFY names; $12: its number within the transaction).
-- $3 to $9 as publish's $2 to $8.
-- A live queue is named by its binding key; one that may go live and had not when this
-- statement looked is excepted, since it has got a row.
WITH settings AS MATERIALIZED (
    SELECT set_config('kombu_pgnotify.quiet', 'on', true), set_config('synchronous_commit', $7, true)
), matched AS MATERIALIZED (
    SELECT q.queue_name, q.live, q.max_priority, q.message_ttl, q.max_length, r.binding_key,
           q.exclusive AND NOT q.live AS excepted
    FROM settings CROSS JOIN {schema}.route($1, $2) AS r
    -- One by one: they are few, and the planner must not read all queues instead.
    CROSS JOIN LATERAL (SELECT * FROM {schema}.queues AS q
                        WHERE q.queue_name = r.queue_name OFFSET 0) AS q
), heading AS MATERIALIZED (
    SELECT pg_catalog.json_build_object(
               'keys', pg_catalog.json_agg(DISTINCT binding_key) FILTER (WHERE live),
               'not', coalesce(pg_catalog.json_agg(DISTINCT queue_name) FILTER (WHERE excepted), '[]'),
               'ttl', $5::float8,
               -- NOTIFY folds equal payloads of one transaction into one.
               'n', $12::int)::text AS line
    FROM matched
    HAVING bool_or(live)
       -- Else there are too many keys for a NOTIFY, and live queues get rows too.
       AND octet_length(pg_catalog.json_agg(DISTINCT binding_key)::text || pg_catalog.json_agg(DISTINCT queue_name)::text) < 7000
), written AS (
    INSERT INTO {schema}.tasks (task_name, priority, available_at, expires_at, exchange_name,
                                routing_key, envelope, payload)
    SELECT DISTINCT ON (queue_name)
           queue_name, CASE WHEN $6::boolean THEN 255 - $3::smallint
                            ELSE least($3::smallint, coalesce(max_priority, 255)) END,
           CASE WHEN $4::timestamptz > now() THEN $4::timestamptz END,
           least(now() + make_interval(secs => $5::float8),
                 greatest($4::timestamptz, now()) + make_interval(secs => message_ttl)),
           $1, $2, $8, $9::bytea
    FROM matched
    WHERE NOT live OR NOT EXISTS (SELECT FROM heading)
    ORDER BY queue_name
    RETURNING task_name
), spilled AS (
    INSERT INTO {schema}.broadcasts (envelope, payload)
    SELECT $8, $9::bytea
    FROM heading
    -- A NOTIFY takes less than 8000 bytes.
    WHERE $10::text IS NULL OR octet_length(line) + octet_length($10::text) > 7990
    RETURNING broadcast_id
), told AS (
    SELECT pg_notify($11, line || E'\n' || coalesce((SELECT '#' || broadcast_id::text FROM spilled), $10))
    FROM heading
)
SELECT coalesce((SELECT pg_catalog.json_agg(task_name) FROM written), '[]')::text AS queues,
       coalesce((SELECT pg_catalog.json_agg(DISTINCT queue_name) FROM matched WHERE max_length IS NOT NULL),
                '[]')::text AS limited,
       (SELECT count(*) FROM told) AS live,
       EXISTS (SELECT FROM {schema}.exchanges AS e
               WHERE e.exchange_name = $1 AND e.durable AND e.exchange_type = 'direct'
                 AND NOT EXISTS (SELECT FROM {schema}.bindings AS b
                                 WHERE b.exchange_name = $1)) AS unbound;

-- name: broadcast
-- Reads a message for live queues that was too big for its NOTIFY.
SELECT envelope, payload FROM {schema}.broadcasts WHERE broadcast_id = $1;

-- name: announce
-- Tells the listeners of channel $1 what happened ($2: published or released).
SELECT pg_notify($1, $2);

-- name: announce_published
-- Tells listeners of channel $1 ($2: published) if anybody waits.  Who waits shares the lock $3 for this
-- channel, or $4 for any, and has one of $7 seats, a lock of its own that comes after $3, unless all were
-- taken.  Up to $5 of those with a seat are named by it, beginning with seat $6; if there are none, or
-- $5 is 0, all are meant.  It runs after the commit of what was published: who waits later looks later,
-- and finds it.
SELECT pg_notify($1, $2 || told.whom)
FROM (
    SELECT coalesce(
        CASE WHEN $5::int > 0 THEN ' ' || nullif(pg_catalog.array_to_string(ARRAY(
            SELECT seat
            FROM (SELECT ($6::int + n) % $7::int AS seat
                  FROM pg_catalog.generate_series(0, $7::int - 1) AS n OFFSET 0) AS seats
            WHERE NOT pg_try_advisory_xact_lock_shared($3::bigint + 1 + seat)
            LIMIT $5::int), ','), '') END,
        -- It may be another publisher who has locked $3, to look as we do.
        CASE WHEN EXISTS (
            SELECT
            FROM (SELECT (classid::bigint << 32) | objid::bigint AS key
                  FROM pg_catalog.pg_locks
                  WHERE locktype = 'advisory' AND objsubid = 1 AND mode = 'ShareLock' AND granted
                    AND database = (SELECT oid FROM pg_catalog.pg_database
                                    WHERE datname = current_database())) AS shared
            WHERE key IN ($3::bigint, $4::bigint)) THEN '' END) AS whom
    FROM (SELECT WHERE NOT (pg_try_advisory_xact_lock($3::bigint)
                            AND pg_try_advisory_xact_lock($4::bigint)) OFFSET 0) AS somebody
    OFFSET 0
) AS told
WHERE told.whom IS NOT NULL;

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
SET former_worker_id = coalesce(lease_worker_id, former_worker_id),
    lease_worker_id = $6,
    lease_expiration = now() + make_interval(secs => $7::float8),
    -- Neither number may overflow, whatever somebody has written there.
    deliveries = CASE WHEN deliveries < 2147483647 THEN deliveries + 1 ELSE 1 END,
    attempts = least(attempts, 2147483646) + 1
WHERE task_id = ANY (ARRAY(SELECT task_id FROM picked))
RETURNING task_id, deliveries, attempts, rank, envelope, payload,
          coalesce(expires_at <= now(), false),
          CASE WHEN deaths IS NOT NULL THEN pg_catalog.json_build_object(
              'exchange', exchange_name, 'routing_key', routing_key, 'deaths', deaths)::text END,
          extract(epoch FROM published_at)::float8;

-- name: take
-- Deletes and returns up to $5 messages in claim's order, for consumers that do not acknowledge;
-- what has outlived its time is left to sweep_messages.
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
          AND (expires_at IS NULL OR expires_at > now())
        ORDER BY rank, task_id
        LIMIT $5::int
        FOR UPDATE SKIP LOCKED
    ) AS candidate
    LIMIT $5::int
)
DELETE FROM {schema}.tasks
WHERE task_id = ANY (ARRAY(SELECT task_id FROM picked))
RETURNING task_id, least(deliveries, 2147483646) + 1, least(attempts, 2147483646) + 1, rank,
          envelope, payload, false,
          CASE WHEN deaths IS NOT NULL THEN pg_catalog.json_build_object(
              'exchange', exchange_name, 'routing_key', routing_key, 'deaths', deaths)::text END;

-- name: acknowledge
-- Deletes the messages $1, in id order so that two workers never wait for each other, whose delivery
-- $2 (to worker $3, if given) is still the latest.
WITH held AS MATERIALIZED (
    SELECT held.task_id
    FROM (SELECT set_config('synchronous_commit', 'off', true)) AS settings
    CROSS JOIN unnest($1::bigint[], $2::int[]) AS settled (task_id, delivery)
    -- One by one: however small the table was when this was planned, it is not to be read whole.
    CROSS JOIN LATERAL (
        SELECT task_id FROM {schema}.tasks
        WHERE task_id = settled.task_id AND deliveries = settled.delivery
          AND ($3::text IS NULL OR lease_worker_id = $3)
        FOR UPDATE) AS held
)
DELETE FROM {schema}.tasks
WHERE task_id = ANY (ARRAY(SELECT task_id FROM held))
RETURNING task_id;

-- name: acknowledge_again
-- Deletes the messages $1 once more that worker $3 has acknowledged (deliveries $2): a crash of the
-- server may have undone that, or the claim too.  Not those that somebody else has got meanwhile, nor
-- others than those published at $4 (epoch): a server that has lost the last instants, or a replica
-- that takes over, gives the same numbers to other messages.
WITH undone AS MATERIALIZED (
    SELECT undone.task_id
    FROM unnest($1::bigint[], $2::int[], $4::float8[]) AS settled (task_id, delivery, published)
    CROSS JOIN LATERAL (
        SELECT task_id FROM {schema}.tasks
        WHERE task_id = settled.task_id AND deliveries <= settled.delivery
          AND (lease_worker_id IS NULL OR lease_worker_id = $3)
          AND extract(epoch FROM published_at)::float8 = settled.published
        FOR UPDATE) AS undone
)
DELETE FROM {schema}.tasks
WHERE task_id = ANY (ARRAY(SELECT task_id FROM undone))
RETURNING task_id;

-- name: disown
-- Releases what worker $2 has leased from queue $1 besides the messages $3, and counts it: a
-- claim whose answer never came.  Looks at the first $4 of the queue: leases are at its head.
WITH unknown AS MATERIALIZED (
    SELECT task_id
    FROM {schema}.tasks
    WHERE lease_worker_id = $2 AND task_id <> ALL ($3::bigint[])
      AND task_id = ANY (ARRAY(
          SELECT task_id
          FROM {schema}.tasks
          WHERE task_name = $1 AND available_at IS NULL AND (rank, task_id) > (-1, 0)
          ORDER BY rank, task_id
          LIMIT $4::int))
    ORDER BY task_id
    FOR UPDATE SKIP LOCKED
), released AS (
    UPDATE {schema}.tasks
    SET lease_worker_id = NULL, lease_expiration = NULL, attempts = greatest(attempts - 1, 0)
    WHERE task_id = ANY (ARRAY(SELECT task_id FROM unknown))
      AND set_config('kombu_pgnotify.quiet', 'on', true) IS NOT NULL
    RETURNING task_id
)
SELECT count(*) FROM released;

-- name: renew
-- Extends the leases $1 (deliveries $2, of worker $3, if given) by $4 seconds from now, as long as
-- nobody else got them.  Passes over those that somebody has locked (see still_held): all the others
-- would run out meanwhile.
WITH held AS MATERIALIZED (
    SELECT held.task_id
    FROM (SELECT set_config('synchronous_commit', 'off', true)) AS settings
    CROSS JOIN unnest($1::bigint[], $2::int[]) AS settled (task_id, delivery)
    CROSS JOIN LATERAL (
        SELECT task_id FROM {schema}.tasks
        WHERE task_id = settled.task_id AND deliveries = settled.delivery
          AND lease_expiration IS NOT NULL AND ($3::text IS NULL OR lease_worker_id = $3)
        FOR UPDATE SKIP LOCKED) AS held
)
UPDATE {schema}.tasks
SET lease_expiration = now() + make_interval(secs => $4::float8)
WHERE task_id = ANY (ARRAY(SELECT task_id FROM held))
RETURNING task_id;

-- name: still_held
-- Returns which of the messages $1 are still leased to worker $3 (if given) by deliveries $2.
SELECT held.task_id
FROM unnest($1::bigint[], $2::int[]) AS settled (task_id, delivery)
CROSS JOIN LATERAL (
    SELECT task_id FROM {schema}.tasks
    WHERE task_id = settled.task_id AND deliveries = settled.delivery
      AND lease_expiration IS NOT NULL AND ($3::text IS NULL OR lease_worker_id = $3)
    OFFSET 0) AS held;

-- name: release
-- Clears the leases $1 (deliveries $2, of worker $3, if given) and takes $4 attempts back (1: never
-- started, 0: it was).
WITH held AS MATERIALIZED (
    SELECT held.task_id
    FROM (SELECT set_config('synchronous_commit', 'off', true),
                 set_config('kombu_pgnotify.quiet', 'on', true)) AS settings
    CROSS JOIN unnest($1::bigint[], $2::int[]) AS settled (task_id, delivery)
    CROSS JOIN LATERAL (
        SELECT task_id FROM {schema}.tasks
        WHERE task_id = settled.task_id AND deliveries = settled.delivery
          AND lease_expiration IS NOT NULL AND ($3::text IS NULL OR lease_worker_id = $3)
        FOR UPDATE) AS held
)
UPDATE {schema}.tasks
SET former_worker_id = CASE WHEN $4::int = 0 THEN lease_worker_id ELSE former_worker_id END,
    lease_worker_id = NULL, lease_expiration = NULL,
    attempts = greatest(attempts - $4::int, 0)
WHERE task_id = ANY (ARRAY(SELECT task_id FROM held))
RETURNING task_id;

-- name: bury
-- Takes the messages $1 (deliveries $2, to worker $3, if given) out of circulation for the reason
-- $4, and keeps them in dead_letters if $5 says so and their queue has no dead letter exchange.  Returns the ids
-- of those whose fence held, and the queues that got something.
SELECT buried, moved_to, limited
FROM (SELECT set_config('kombu_pgnotify.quiet', 'on', true)) AS settings
CROSS JOIN LATERAL {schema}.bury(ARRAY(
    SELECT held.task_id
    FROM unnest($1::bigint[], $2::int[]) AS settled (task_id, delivery)
    CROSS JOIN LATERAL (
        SELECT task_id FROM {schema}.tasks
        WHERE task_id = settled.task_id AND deliveries = settled.delivery
          AND ($3::text IS NULL OR lease_worker_id = $3)
        FOR UPDATE) AS held
), $4, $5::boolean);

-- name: keep
-- Takes the messages $1 (deliveries $2, to worker $3, if given) into dead_letters for the reason $4,
-- wherever their queues would send them.
WITH held AS MATERIALIZED (
    SELECT held.task_id
    FROM unnest($1::bigint[], $2::int[]) AS settled (task_id, delivery)
    CROSS JOIN LATERAL (
        SELECT task_id FROM {schema}.tasks
        WHERE task_id = settled.task_id AND deliveries = settled.delivery
          AND ($3::text IS NULL OR lease_worker_id = $3)
        FOR UPDATE) AS held
), removed AS (
    DELETE FROM {schema}.tasks AS t
    WHERE task_id = ANY (ARRAY(SELECT task_id FROM held))
    RETURNING t.*
), kept AS (
    INSERT INTO {schema}.dead_letters (task_id, task_name, priority, published_at, attempts,
                                       worker_id, reason, envelope, payload)
    SELECT task_id, task_name, priority, published_at, attempts, lease_worker_id, $4,
           envelope, payload
    FROM removed
)
SELECT task_id FROM removed;

-- name: trim_turn
-- Lets one at a time trim queue $1 of schema $2: before the statement that looks how much there is.
SELECT pg_advisory_xact_lock(pg_catalog.hashtextextended($2 || '.' || $1, 0));

-- name: trim
-- Takes what queue $1 has beyond its x-max-length from its head, for the reason maxlen.
SELECT buried, moved_to, limited
FROM (SELECT set_config('kombu_pgnotify.quiet', 'on', true)) AS settings
CROSS JOIN LATERAL {schema}.bury(ARRAY(
    SELECT task_id
    FROM {schema}.tasks
    WHERE task_name = $1 AND available_at IS NULL AND (rank, task_id) > (-1, 0)
      AND (lease_expiration IS NULL OR lease_expiration < now())
    ORDER BY rank, task_id
    LIMIT (SELECT greatest(0, count(*) - (SELECT max_length FROM {schema}.queues
                                          WHERE queue_name = $1))
           FROM {schema}.tasks
           WHERE task_name = $1 AND available_at IS NULL AND (rank, task_id) > (-1, 0)
             AND (lease_expiration IS NULL OR lease_expiration < now()))
    FOR UPDATE SKIP LOCKED
), 'maxlen', false);

-- name: sweep_messages
-- Takes up to $1 messages that have outlived their time out of circulation.
SELECT buried, moved_to, limited
FROM (SELECT set_config('kombu_pgnotify.quiet', 'on', true)) AS settings
CROSS JOIN LATERAL {schema}.bury(ARRAY(
    SELECT task_id
    FROM {schema}.tasks
    WHERE expires_at <= now() AND (lease_expiration IS NULL OR lease_expiration < now())
    ORDER BY expires_at
    LIMIT $1::int
    FOR UPDATE SKIP LOCKED
), 'expired', false);

-- name: expired_messages
-- Lists up to $1 messages that have outlived their time, with the number of their latest delivery.
SELECT task_id, deliveries
FROM {schema}.tasks
WHERE expires_at <= now() AND (lease_expiration IS NULL OR lease_expiration < now())
ORDER BY expires_at
LIMIT $1::int;

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
       AND (expires_at IS NULL OR expires_at > now())
     ORDER BY rank, task_id
     LIMIT $2::bigint)
    UNION ALL
    (SELECT FROM {schema}.tasks
     WHERE task_name = $1 AND available_at IS NOT NULL
       AND (lease_expiration IS NULL OR lease_expiration < now())
       AND (expires_at IS NULL OR expires_at > now())
     ORDER BY available_at
     LIMIT $2::bigint)
    LIMIT $2::bigint
) AS waiting;

-- name: purge
-- Deletes up to $2 messages of queue $1 that nobody holds, and counts them; with $3 only if
-- the queue has expired.
WITH expired AS MATERIALIZED (
    -- Locked, so that nobody uses it again meanwhile.
    SELECT FROM {schema}.queues WHERE $3::boolean AND queue_name = $1 AND expires_at < now()
    FOR NO KEY UPDATE
), free AS MATERIALIZED (
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
    WHERE NOT $3::boolean OR EXISTS (SELECT FROM expired)
    LIMIT $2::int
), purged AS (
    DELETE FROM {schema}.tasks
    WHERE task_id = ANY (ARRAY(SELECT task_id FROM free))
    RETURNING task_id
)
SELECT count(*) FROM purged;

-- name: listening
-- Lists the channels this session listens on and counts its locks (see announce_published), to check
-- that they are in force, and tells whether the server is read-only now: then nobody notifies there
-- any more.  Looking at the notify queue is what frees it: once it has been full nothing else does,
-- although all have read it.
SELECT coalesce(pg_catalog.array_to_string(ARRAY(SELECT pg_listening_channels()), ' '), ''),
       (SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND locktype = 'advisory'),
       current_setting('transaction_read_only')::boolean, pg_notification_queue_usage();

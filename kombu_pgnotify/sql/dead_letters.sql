-- What people do with dead letters.  As in queries.sql, {schema} is the quoted schema name.

-- name: dead_letters
-- Lists up to $2 dead letters of queue $1 (NULL: of all), the latest first.
SELECT dead_letter_id, task_name, attempts, coalesce(worker_id, ''), reason,
       date_trunc('second', published_at)::text, date_trunc('second', dead_at)::text, envelope
FROM {schema}.dead_letters
WHERE $1::text IS NULL OR task_name = $1
ORDER BY dead_letter_id DESC
LIMIT $2::int;

-- name: newest_dead_letter
-- Returns the id of the newest dead letter: what dies later is not meant.
SELECT coalesce(max(dead_letter_id), 0) FROM {schema}.dead_letters;

-- name: clear_dead_letters
-- Deletes up to $4 dead letters (of queue $1 and with the ids $2, NULL: any) up to the id $3, and
-- with $5 puts them back to the end of their queues as new messages; counts them by queue.
WITH cleared AS (
    DELETE FROM {schema}.dead_letters
    WHERE dead_letter_id = ANY (ARRAY(
        SELECT dead_letter_id FROM {schema}.dead_letters
        WHERE ($1::text IS NULL OR task_name = $1)
          AND ($2::bigint[] IS NULL OR dead_letter_id = ANY ($2::bigint[]))
          AND dead_letter_id <= $3::bigint
        ORDER BY dead_letter_id
        LIMIT $4::int
        FOR UPDATE SKIP LOCKED))
    RETURNING *
), written AS (
    INSERT INTO {schema}.tasks (task_name, priority, expires_at, envelope, payload)
    SELECT c.task_name, c.priority, now() + make_interval(secs => q.message_ttl), c.envelope, c.payload
    FROM (SELECT set_config('kombu_pgnotify.quiet', 'on', true)) AS settings
    CROSS JOIN cleared AS c
    LEFT JOIN {schema}.queues AS q ON q.queue_name = c.task_name
    WHERE $5::boolean
    ORDER BY c.dead_letter_id
)
SELECT task_name, count(*) FROM cleared GROUP BY task_name;

-- name: sweep_dead_letters
-- Deletes those of the $2 oldest dead letters that are older than $1 seconds, and counts them.
WITH deleted AS (
    DELETE FROM {schema}.dead_letters
    WHERE dead_at < now() - make_interval(secs => $1::float8)
      -- Their ids are in the order of their deaths, and have an index.
      AND dead_letter_id = ANY (ARRAY(
          SELECT dead_letter_id FROM {schema}.dead_letters ORDER BY dead_letter_id LIMIT $2::int))
    RETURNING 1
)
SELECT count(*) FROM deleted;

-- What people do with dead letters.  As in queries.sql, {schema} is the quoted schema name.

-- name: dead_letters
-- Lists up to $2 dead letters of queue $1 (NULL: of all), the latest first; $3: the ids, NULL: any.
SELECT dead_letter_id, task_name, attempts, coalesce(worker_id, ''), reason,
       date_trunc('second', published_at)::text, date_trunc('second', dead_at)::text, envelope
FROM {schema}.dead_letters
WHERE ($1::text IS NULL OR task_name = $1)
  AND ($3::bigint[] IS NULL OR dead_letter_id = ANY ($3::bigint[]))
ORDER BY dead_letter_id DESC
LIMIT $2::int;

-- name: requeue_dead_letters
-- Puts up to $3 dead letters (of queue $1 and with the ids $2, NULL: any) back to the end of their
-- queues as new messages; returns how many, and the queues.
WITH raised AS (
    DELETE FROM {schema}.dead_letters
    WHERE dead_letter_id = ANY (ARRAY(
        SELECT dead_letter_id FROM {schema}.dead_letters
        WHERE ($1::text IS NULL OR task_name = $1)
          AND ($2::bigint[] IS NULL OR dead_letter_id = ANY ($2::bigint[]))
        ORDER BY dead_letter_id
        LIMIT $3::int
        FOR UPDATE SKIP LOCKED))
    RETURNING *
), written AS (
    INSERT INTO {schema}.tasks (task_name, priority, expires_at, envelope, payload)
    SELECT r.task_name, r.priority, now() + make_interval(secs => q.message_ttl), r.envelope, r.payload
    FROM (SELECT set_config('kombu_pgnotify.quiet', 'on', true)) AS settings
    CROSS JOIN raised AS r
    LEFT JOIN {schema}.queues AS q ON q.queue_name = r.task_name
    ORDER BY r.dead_letter_id
    RETURNING task_name
)
SELECT task_name, count(*) FROM written GROUP BY task_name;

-- name: delete_dead_letters
-- Deletes up to $3 dead letters (of queue $1 and with the ids $2, NULL: any) and counts them.
WITH deleted AS (
    DELETE FROM {schema}.dead_letters
    WHERE dead_letter_id = ANY (ARRAY(
        SELECT dead_letter_id FROM {schema}.dead_letters
        WHERE ($1::text IS NULL OR task_name = $1)
          AND ($2::bigint[] IS NULL OR dead_letter_id = ANY ($2::bigint[]))
        ORDER BY dead_letter_id
        LIMIT $3::int
        FOR UPDATE SKIP LOCKED))
    RETURNING 1
)
SELECT count(*) FROM deleted;

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

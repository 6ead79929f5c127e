-- Statements about exchanges, queues and bindings, and about keeping them in order.

-- name: declare_exchange
-- Declares exchange $1 of type $2 ($3: durable); the last declaration wins, and what it replaced is
-- returned.
WITH before AS MATERIALIZED (
    SELECT exchange_type, durable FROM {schema}.exchanges WHERE exchange_name = $1
), declared AS (
    INSERT INTO {schema}.exchanges AS e (exchange_name, exchange_type, durable)
    VALUES ($1, $2, $3::boolean)
    ON CONFLICT (exchange_name) DO UPDATE
    SET exchange_type = excluded.exchange_type, durable = excluded.durable
    WHERE (e.exchange_type, e.durable) IS DISTINCT FROM (excluded.exchange_type, excluded.durable)
    RETURNING 1
)
SELECT exchange_type
FROM before
WHERE exchange_type <> $2 AND EXISTS (SELECT FROM declared);

-- name: exchange_type
-- Looks up what type exchange $1 has.
SELECT exchange_type FROM {schema}.exchanges WHERE exchange_name = $1;

-- name: exchanges
-- Lists the exchanges.
SELECT exchange_name FROM {schema}.exchanges ORDER BY exchange_name;

-- name: lock_exchange
-- Keeps others from binding to exchange $1: before the statement that looks what is bound to it,
-- and that leaves alone an exchange that is declared only between the two.
SELECT set_config('kombu_pgnotify.locked', 'on', true)
FROM (SELECT FROM {schema}.exchanges WHERE exchange_name = $1 FOR UPDATE) AS locked;

-- name: delete_exchange
-- Deletes exchange $1 with its bindings; with $2 only if it has none.  Returns the live queues
-- that were bound to it: they get rows until their consumers have learnt of that.
WITH bound AS MATERIALIZED (
    SELECT DISTINCT queue_name FROM {schema}.bindings WHERE exchange_name = $1
), deleted AS (
    DELETE FROM {schema}.exchanges
    WHERE exchange_name = $1 AND NOT ($2::boolean AND EXISTS (SELECT FROM bound))
      AND current_setting('kombu_pgnotify.locked', true) = 'on'
    RETURNING 1
), told AS (
    UPDATE {schema}.queues AS q SET live = false, binding_version = binding_version + 1
    FROM (SELECT queue_name, live AS was_live FROM {schema}.queues
          WHERE queue_name IN (SELECT queue_name FROM bound) AND EXISTS (SELECT FROM deleted)
          ORDER BY queue_name FOR NO KEY UPDATE) AS locked
    WHERE q.queue_name = locked.queue_name
    RETURNING q.queue_name, was_live
)
SELECT queue_name FROM told WHERE was_live;

-- name: declare_queue
-- Declares queue $1; the last declaration wins.  Returns what it changed: the arguments it
-- replaced, and whether the queue was live.
-- One consumer's own does not wait for the disk: should the server crash, it declares it again.
WITH settings AS MATERIALIZED (
    SELECT set_config('synchronous_commit',
                      CASE WHEN $3::boolean THEN 'off'
                           ELSE current_setting('synchronous_commit') END, true)
), before AS MATERIALIZED (
    SELECT q.arguments, q.live FROM settings CROSS JOIN {schema}.queues AS q
    WHERE q.queue_name = $1
), declared AS (
    INSERT INTO {schema}.queues AS q
        (queue_name, durable, exclusive, auto_delete, arguments, message_ttl, expires,
         max_priority, max_length, dead_letter_exchange, dead_letter_routing_key, name_prefix,
         declared_by, expires_at)
    SELECT $1, $2::boolean, $3::boolean, $4::boolean, $5, $6::float8, $7::float8, $8::smallint,
           $9::bigint, $10, $11, $12, $13, now() + make_interval(secs => $7::float8)
    FROM settings
    ON CONFLICT (queue_name) DO UPDATE
    SET durable = excluded.durable, exclusive = excluded.exclusive,
        auto_delete = excluded.auto_delete, arguments = excluded.arguments,
        message_ttl = excluded.message_ttl, expires = excluded.expires,
        max_priority = excluded.max_priority, max_length = excluded.max_length,
        dead_letter_exchange = excluded.dead_letter_exchange,
        dead_letter_routing_key = excluded.dead_letter_routing_key,
        name_prefix = excluded.name_prefix, declared_by = excluded.declared_by,
        expires_at = excluded.expires_at,
        -- Until its consumer listens (again) it gets rows.
        live = false
    -- A declaration that changes nothing writes nothing.
    WHERE excluded.exclusive OR q.expires_at IS NOT NULL OR excluded.expires IS NOT NULL
       OR (q.durable, q.exclusive, q.auto_delete, q.arguments)
          IS DISTINCT FROM (excluded.durable, excluded.exclusive, excluded.auto_delete,
                            excluded.arguments)
    RETURNING 1
)
SELECT arguments, live FROM before WHERE EXISTS (SELECT FROM declared);

-- name: has_queue
-- Says whether queue $1 was declared, or holds messages all the same.
SELECT EXISTS (SELECT FROM {schema}.queues WHERE queue_name = $1)
    -- Not EXISTS, for which the planner drops the order and may read the whole table.
    OR (SELECT true FROM {schema}.tasks
        WHERE task_name = $1 AND available_at IS NULL AND (rank, task_id) > (-1, 0)
        ORDER BY rank, task_id LIMIT 1) IS NOT NULL
    OR (SELECT true FROM {schema}.tasks
        WHERE task_name = $1 AND available_at IS NOT NULL
        ORDER BY available_at LIMIT 1) IS NOT NULL;

-- name: delete_queue
-- Forgets queue $1 and its bindings.
DELETE FROM {schema}.queues
WHERE queue_name = $1
  AND set_config('synchronous_commit',
                 CASE WHEN exclusive THEN 'off' ELSE current_setting('synchronous_commit') END,
                 true) IS NOT NULL;

-- name: bind
-- Binds queue $1 to exchange $2 by the routing key $3 (as a pattern: $4); it gets rows until its
-- consumer listens to that exchange too.  Says which of the two is missing, if any, and whether
-- the queue was live.
WITH found AS MATERIALIZED (
    -- The exchange before the queue, as delete_exchange locks them.
    SELECT FROM {schema}.exchanges WHERE exchange_name = $2 FOR KEY SHARE
), locked AS MATERIALIZED (
    SELECT live, exclusive FROM {schema}.queues
    WHERE queue_name = $1 AND (SELECT count(*) FROM found) >= 0
    FOR NO KEY UPDATE
), present AS MATERIALIZED (
    SELECT EXISTS (SELECT FROM locked) AS queue, EXISTS (SELECT FROM found) AS exchange,
           -- As declare_queue: without waiting for the disk where it is one consumer's own.
           set_config('synchronous_commit',
                      coalesce((SELECT 'off' FROM locked WHERE exclusive),
                               current_setting('synchronous_commit')), true) AS settings
), bound AS (
    INSERT INTO {schema}.bindings (queue_name, exchange_name, routing_key, pattern)
    SELECT $1, $2, $3, $4 FROM present WHERE queue AND exchange
    ON CONFLICT DO NOTHING
    RETURNING 1
), silenced AS (
    UPDATE {schema}.queues SET live = false, binding_version = binding_version + 1
    WHERE queue_name = $1 AND EXISTS (SELECT FROM bound)
    RETURNING 1
)
SELECT queue, exchange,
       EXISTS (SELECT FROM silenced) AND coalesce((SELECT live FROM locked), false)
FROM present;

-- name: unbind
-- Removes the binding of queue $1 to exchange $2 by the routing key $3; says whether it was live.
WITH locked AS MATERIALIZED (
    SELECT live FROM {schema}.queues WHERE queue_name = $1 FOR NO KEY UPDATE
), unbound AS (
    DELETE FROM {schema}.bindings
    WHERE queue_name = $1 AND exchange_name = $2 AND routing_key = $3
      -- The queue before its bindings, as whoever deletes it locks them.
      AND EXISTS (SELECT FROM locked)
    RETURNING 1
), silenced AS (
    UPDATE {schema}.queues SET live = false, binding_version = binding_version + 1
    WHERE queue_name = $1 AND EXISTS (SELECT FROM unbound)
    RETURNING 1
)
SELECT EXISTS (SELECT FROM silenced) AND coalesce((SELECT live FROM locked), false);

-- name: list_bindings
-- Lists every binding.
SELECT queue_name, exchange_name, routing_key
FROM {schema}.bindings
ORDER BY exchange_name, routing_key, queue_name;

-- name: bindings_of
-- Says by what a queue may hear directly, if it is one consumer's own and passing: its bindings,
-- the exchanges' types, and how long its messages last.
SELECT b.exchange_name, b.routing_key, e.exchange_type, q.message_ttl, q.binding_version
FROM {schema}.queues AS q
JOIN {schema}.bindings AS b ON b.queue_name = q.queue_name
JOIN {schema}.exchanges AS e ON e.exchange_name = b.exchange_name
WHERE q.queue_name = $1 AND q.exclusive AND q.auto_delete AND NOT q.durable;

-- name: go_live
-- From now on exchanges tell queue $1 directly, if its bindings are still those of version $2.
-- Counting them would not do (after waiting for whoever binds, only the row is read anew).
UPDATE {schema}.queues
SET live = true
WHERE queue_name = $1 AND exclusive AND auto_delete AND NOT durable AND binding_version = $2::bigint
RETURNING 1;

-- name: end_live
-- From now on exchanges write rows for queue $1 again: its consumer has stopped listening.
UPDATE {schema}.queues SET live = false WHERE queue_name = $1 AND live;

-- name: touch
-- Notes that the queues $1 are in use: puts off their expiry, and gives those that go with their
-- last consumer one, of $2 seconds.  Returns which there are, how long they last unused, how many
-- bindings they have, and how often those were changed.
UPDATE {schema}.queues
SET expires_at = now() + make_interval(
        secs => least(expires, CASE WHEN auto_delete THEN $2::float8 END))
WHERE queue_name = ANY (ARRAY(
    SELECT queue_name
    FROM (SELECT set_config('synchronous_commit', 'off', true)) AS settings
    CROSS JOIN {schema}.queues
    WHERE queue_name = ANY ($1::text[]) AND (expires IS NOT NULL OR auto_delete)
    -- In one order, so that two who use the same queues never wait for each other.
    ORDER BY queue_name
    FOR NO KEY UPDATE OF queues))
RETURNING queue_name, least(expires, CASE WHEN auto_delete THEN $2::float8 END),
          (SELECT count(*) FROM {schema}.bindings AS b WHERE b.queue_name = queues.queue_name),
          binding_version;

-- name: abandon
-- The last consumer of queue $1 here has gone: if it was its own and nobody has declared the queue
-- anew ($2), the queue goes too, with what is in it.
WITH gone AS (
    DELETE FROM {schema}.queues
    WHERE queue_name = $1 AND declared_by = $2 AND exclusive AND auto_delete
    RETURNING queue_name
)
DELETE FROM {schema}.tasks
WHERE EXISTS (SELECT FROM gone)
  AND set_config('synchronous_commit', 'off', true) IS NOT NULL
  AND task_id = ANY (ARRAY(
    (SELECT task_id FROM {schema}.tasks
     WHERE task_name = $1 AND available_at IS NULL AND (rank, task_id) > (-1, 0)
     ORDER BY rank, task_id)
    UNION ALL
    (SELECT task_id FROM {schema}.tasks
     WHERE task_name = $1 AND available_at IS NOT NULL
     ORDER BY available_at)));

-- name: claim_chore
-- Takes on the sweep for everybody, unless somebody did in the last $1 seconds or is at it.
UPDATE {schema}.chores
SET done_at = clock_timestamp()
WHERE chore = 'sweep'
  AND chore = ANY (ARRAY(
      SELECT chore FROM {schema}.chores
      WHERE chore = 'sweep' AND done_at < clock_timestamp() - make_interval(secs => $1::float8)
      FOR UPDATE SKIP LOCKED))
RETURNING 1;

-- name: expired_queues
-- Lists up to $1 queues that nobody has used for as long as they last.
SELECT queue_name FROM {schema}.queues WHERE expires_at < now() ORDER BY expires_at LIMIT $1::int;

-- name: sweep_queue
-- Deletes queue $1, unless somebody uses it again or still holds one of its messages.
DELETE FROM {schema}.queues
WHERE queue_name = $1 AND expires_at < now()
  -- As in has_queue.
  AND (SELECT true FROM {schema}.tasks
       WHERE task_name = $1 AND available_at IS NULL AND (rank, task_id) > (-1, 0)
       ORDER BY rank, task_id LIMIT 1) IS NULL
  AND (SELECT true FROM {schema}.tasks
       WHERE task_name = $1 AND available_at IS NOT NULL
       ORDER BY available_at LIMIT 1) IS NULL;

-- name: sweep_broadcasts
-- Deletes the messages for live queues that have been there for $1 seconds.
DELETE FROM {schema}.broadcasts WHERE published_at < now() - make_interval(secs => $1::float8);

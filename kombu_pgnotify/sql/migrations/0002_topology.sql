-- Exchanges, queues and bindings, shared by all processes; what a queue's arguments
-- (x-message-ttl, x-expires, x-max-length, x-dead-letter-exchange ...) mean for its messages;
-- messages too big for a NOTIFY.

-- An exchange: read by route, written by declare_exchange and delete_exchange.
CREATE TABLE {schema}.exchanges (
    exchange_name text PRIMARY KEY,
    exchange_type text NOT NULL CHECK (exchange_type IN ('direct', 'topic', 'fanout')),
    -- A persistent message to a durable direct exchange that nothing is bound to is an error
    -- (publish_routed).
    durable boolean NOT NULL
);

-- Those that AMQP 0-9-1 predeclares and kombu uses.
INSERT INTO {schema}.exchanges (exchange_name, exchange_type, durable)
VALUES ('amq.direct', 'direct', true), ('amq.topic', 'topic', true), ('amq.fanout', 'fanout', true);

-- A declared queue.  Publishing to a name that nobody has declared works too.  The CHECKs here and
-- below: a row by hand must not make statements fail that serve others too (bury, publish_many).
CREATE TABLE {schema}.queues (
    queue_name text PRIMARY KEY,
    durable boolean NOT NULL,
    -- One consumer's own; with auto_delete and not durable it may go live.
    exclusive boolean NOT NULL,
    -- Goes with its last consumer (touch, abandon).
    auto_delete boolean NOT NULL,
    -- As declared, JSON, for people; what they mean is in the columns below.
    arguments text NOT NULL,
    -- x-message-ttl in seconds; publish, publish_routed, publish_many and bury add it.
    message_ttl float8 CHECK (message_ttl BETWEEN 0 AND 1e10),
    -- x-expires in seconds; touch adds it while the queue is in use.
    expires float8 CHECK (expires > 0 AND expires <= 1e10),
    -- x-max-priority; publish cuts off above it.
    max_priority smallint CHECK (max_priority BETWEEN 0 AND 255),
    -- x-max-length; trim drops beyond it.
    max_length bigint CHECK (max_length >= 0),
    -- x-dead-letter-exchange and -routing-key; bury sends there.
    dead_letter_exchange text,
    dead_letter_routing_key text,
    -- What the names of its application begin with; bury has it for routing keys that are names.
    name_prefix text NOT NULL DEFAULT '',
    -- When sweep_queues may delete it; NULL: never.  In no index, so that touch is a HOT update.
    expires_at timestamptz,
    -- Its consumer listens: what an exchange has for it travels as NOTIFY and not as a row
    -- (go_live, publish_routed).
    live boolean NOT NULL DEFAULT false,
    -- Grows with every binding made or removed: go_live must show the one its consumer knows.
    binding_version bigint NOT NULL DEFAULT 0,
    -- Who declared it last: abandon spares a newer declaration.
    declared_by text NOT NULL
) WITH (fillfactor = 70, autovacuum_vacuum_scale_factor = 0.1, autovacuum_vacuum_threshold = 200);

-- The primary key serves direct routing, delete_exchange and list_bindings.
CREATE TABLE {schema}.bindings (
    exchange_name text NOT NULL REFERENCES {schema}.exchanges ON DELETE CASCADE,
    routing_key text NOT NULL,
    queue_name text NOT NULL REFERENCES {schema}.queues ON DELETE CASCADE,
    -- The routing key as a regular expression over '.word.word...', for topic exchanges (route).
    pattern text NOT NULL CHECK ((''::text ~ pattern) IS NOT NULL),
    PRIMARY KEY (exchange_name, routing_key, queue_name)
);

-- Serves bindings_of and the deletion of a queue.
CREATE INDEX bindings_queue ON {schema}.bindings (queue_name);

-- Messages for live queues that are too big for a NOTIFY, which names them; written by
-- publish_routed, read by broadcast, deleted by sweep_broadcasts.
CREATE TABLE {schema}.broadcasts (
    broadcast_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    published_at timestamptz NOT NULL DEFAULT now(),
    envelope text NOT NULL,
    payload bytea NOT NULL
);

-- What one worker at a time does for all, and when it was done last (claim_chore).
CREATE TABLE {schema}.chores (
    chore text PRIMARY KEY,
    done_at timestamptz NOT NULL DEFAULT '-infinity'
);
INSERT INTO {schema}.chores (chore) VALUES ('sweep');

ALTER TABLE {schema}.tasks
    -- The holder before the present one: a message that has worn out its attempts is somebody's who
    -- only finds that out, and the dead letter names who had it before (claim, release, bury).
    ADD COLUMN former_worker_id text,
    -- From then on nobody gets it; NULL: never.  claim, take, queue_size and sweep_messages.
    ADD COLUMN expires_at timestamptz,
    -- How it came here, if not by the default exchange; bury sends it on with that.
    ADD COLUMN exchange_name text,
    ADD COLUMN routing_key text,
    -- Where it was dead-lettered before, newest first: the header x-death of AMQP.
    ADD COLUMN deaths jsonb
        -- Somebody's INSERT must not hold up the burial of others.
        CHECK (jsonb_typeof(deaths) = 'array'
               AND NOT jsonb_path_exists(deaths, '$[*] ? (@.type() != "object" || @.count.type() != "number" || @.count > 1000000000 || @.count.floor() != @.count)', silent => true));

-- Serves sweep_messages.
CREATE INDEX tasks_expiring ON {schema}.tasks (expires_at) WHERE expires_at IS NOT NULL;

-- The queues that a message with this routing key goes to, and by which binding: direct by the
-- same key, fanout in any case, topic by pattern ('*' is one word, '#' any number of words).
CREATE FUNCTION {schema}.route(exchange text, key text)
    RETURNS TABLE (queue_name text, binding_key text)
    LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT b.queue_name, b.routing_key
    FROM {schema}.exchanges AS e JOIN {schema}.bindings AS b ON b.exchange_name = e.exchange_name
    WHERE e.exchange_name = exchange AND e.exchange_type = 'direct' AND b.routing_key = key
    UNION ALL
    SELECT b.queue_name, b.routing_key
    FROM {schema}.exchanges AS e JOIN {schema}.bindings AS b ON b.exchange_name = e.exchange_name
    WHERE e.exchange_name = exchange AND e.exchange_type = 'fanout'
    UNION ALL
    SELECT b.queue_name, b.routing_key
    FROM {schema}.exchanges AS e JOIN {schema}.bindings AS b ON b.exchange_name = e.exchange_name
    WHERE e.exchange_name = exchange AND e.exchange_type = 'topic'
      AND (CASE WHEN key = '' THEN '' ELSE '.' || key END) ~ b.pattern;
END;

-- The x-death list of a message that died once more.
CREATE FUNCTION {schema}.died(deaths jsonb, queue text, reason text, exchange text, key text)
    RETURNS jsonb
    LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT jsonb_build_array(jsonb_build_object(
               'queue', queue, 'reason', reason, 'exchange', exchange,
               'routing-keys', jsonb_build_array(key),
               'time', extract(epoch FROM now())::bigint,
               'count', 1 + coalesce(max((d ->> 'count')::bigint)
                                     FILTER (WHERE d ->> 'queue' = queue AND d ->> 'reason' = reason), 0)))
           || coalesce(jsonb_agg(d ORDER BY place)
                       FILTER (WHERE d ->> 'queue' <> queue OR d ->> 'reason' <> reason), '[]'::jsonb)
    FROM jsonb_array_elements(coalesce(deaths, '[]'::jsonb)) WITH ORDINALITY AS earlier (d, place);
END;

-- Takes the messages out of their queues: to the queue's dead letter exchange if it has one, else
-- into dead_letters if they are to be kept, else to nowhere.  A message that would come round to
-- a queue without having been rejected since it was there is dropped, as RabbitMQ does.
-- Returns the queues that got something, for the announcement after the commit, and whether
-- they have an x-max-length, for trim.
CREATE FUNCTION {schema}.bury(ids bigint[], why text, keep boolean)
    RETURNS TABLE (buried bigint, moved_to text, limited boolean)
    LANGUAGE sql VOLATILE
BEGIN ATOMIC
    WITH removed AS (
        DELETE FROM {schema}.tasks AS t WHERE t.task_id = ANY (ids) RETURNING t.*
    ), grave AS MATERIALIZED (
        SELECT r.*, q.dead_letter_exchange AS dlx, q.name_prefix,
               coalesce(q.dead_letter_routing_key, came.by_key) AS dlk,
               {schema}.died(r.deaths, r.task_name, why, coalesce(r.exchange_name, ''),
                             came.by_key) AS all_deaths
        FROM removed AS r
        -- One by one: a plan made while there were few queues must not read all.
        LEFT JOIN LATERAL (SELECT * FROM {schema}.queues AS q
                           WHERE q.queue_name = r.task_name OFFSET 0) AS q ON true
        CROSS JOIN LATERAL (
            -- By the default exchange: the queue's name, as its application knows it.
            SELECT coalesce(r.routing_key, substr(r.task_name, length(coalesce(q.name_prefix, '')) + 1))
        ) AS came (by_key)
    ), target AS MATERIALIZED (
        SELECT DISTINCT g.task_id, t.queue_name
        FROM grave AS g CROSS JOIN LATERAL (
            SELECT routed.queue_name FROM {schema}.route(g.dlx, g.dlk) AS routed
            UNION ALL
            -- A longer name fits into no index: there is no such queue.
            SELECT g.name_prefix || g.dlk
            WHERE g.dlx = '' AND octet_length(g.name_prefix || g.dlk) <= 2000
        ) AS t
        WHERE NOT EXISTS (
            SELECT FROM jsonb_array_elements(g.all_deaths) WITH ORDINALITY AS earlier (d, place)
            WHERE d ->> 'queue' = t.queue_name
              AND NOT EXISTS (
                  SELECT FROM jsonb_array_elements(g.all_deaths) WITH ORDINALITY AS since (d, place)
                  WHERE since.d ->> 'reason' = 'rejected' AND since.place <= earlier.place))
    ), moved AS (
        INSERT INTO {schema}.tasks
            (task_name, priority, expires_at, exchange_name, routing_key, deaths, envelope, payload)
        SELECT t.queue_name, least(g.priority, coalesce(q.max_priority, 255)),
               now() + make_interval(secs => q.message_ttl), g.dlx, g.dlk, g.all_deaths,
               g.envelope, g.payload
        FROM target AS t
        JOIN grave AS g ON g.task_id = t.task_id
        LEFT JOIN LATERAL (SELECT * FROM {schema}.queues AS q
                           WHERE q.queue_name = t.queue_name OFFSET 0) AS q ON true
        ORDER BY t.task_id
        RETURNING task_name
    ), kept AS (
        INSERT INTO {schema}.dead_letters (task_id, task_name, priority, published_at, attempts,
                                           worker_id, reason, envelope, payload)
        -- The delivery that shows that the attempts are used up is none.
        SELECT task_id, task_name, priority, published_at,
               attempts - (why = 'attempts used up')::int,
               CASE WHEN why = 'attempts used up' THEN former_worker_id ELSE lease_worker_id END,
               why, envelope, payload
        FROM grave
        WHERE keep AND dlx IS NULL
        ORDER BY task_id
    )
    SELECT task_id, NULL::text, false FROM grave
    UNION ALL
    SELECT DISTINCT NULL::bigint, task_name,
           EXISTS (SELECT FROM {schema}.queues
                   WHERE queue_name = task_name AND max_length IS NOT NULL)
    FROM moved;
END;

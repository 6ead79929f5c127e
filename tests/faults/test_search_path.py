"""Nobody who may create functions somewhere has them run by our statements.

PostgreSQL looks into pg_catalog first, and yet takes a function or an operator of another schema
where its argument types fit better: that of ``public``, for most roles. So whoever may create
there could plant ``json_agg(text)``, and have it run by every worker with that worker's rights.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from fix_postgres import Server
from helpers import wait_until
from kombu import Connection, Exchange, Queue

from kombu_pgnotify import schema, sql as our_sql
from kombu_pgnotify.store import channel_of

Sql = Callable[..., list[tuple[Any, ...]]]

#: Types of the columns, parameters and values that our statements have.
TYPES = (
    "text smallint integer bigint float8 boolean timestamptz interval json jsonb text[] bigint[]"
)

#: Overloads of every name that our SQL uses, for one and two arguments of each type, and for three
#: as set_config has them; what the catalog has itself already is not in its way.
PLANT = """
DO $$
DECLARE
    n text; a text; b text; back text; total int := 0;
BEGIN
    SET LOCAL check_function_bodies = off;
    FOR n, back IN
        SELECT proname, CASE WHEN min(prorettype::regtype::text) LIKE 'any%' THEN 'text'
                             ELSE min(prorettype::regtype::text) END
        FROM pg_proc
        WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'f' AND proname = ANY (:names)
        GROUP BY proname
    LOOP
        FOREACH a IN ARRAY :types LOOP
            EXECUTE format('CREATE FUNCTION public.%I(secs %s) RETURNS %s LANGUAGE sql AS %L',
                           n, a, back, 'SELECT NULL');
            FOREACH b IN ARRAY :types LOOP
                EXECUTE format('CREATE FUNCTION public.%I(%s, %s) RETURNS %s LANGUAGE sql AS %L',
                               n, a, b, back, 'SELECT NULL');
            END LOOP;
        END LOOP;
    END LOOP;
    FOREACH a IN ARRAY ARRAY['text', 'varchar', 'name'] LOOP
        FOREACH b IN ARRAY ARRAY['text', 'varchar', 'name', 'boolean', 'integer'] LOOP
            EXECUTE format('CREATE FUNCTION public.set_config(%s, %s, boolean) RETURNS text'
                           ' LANGUAGE sql AS %L', a, b, 'SELECT NULL');
        END LOOP;
    END LOOP;
    FOREACH a IN ARRAY :types LOOP
        EXECUTE format('CREATE FUNCTION public.step(text, %s) RETURNS text LANGUAGE sql AS %L',
                       a, 'SELECT NULL');
        FOR n IN SELECT DISTINCT proname FROM pg_proc
                 WHERE pronamespace = 'pg_catalog'::regnamespace AND prokind = 'a'
                   AND proname = ANY (:names)
        LOOP
            EXECUTE format('CREATE AGGREGATE public.%I(%s) (sfunc = public.step, stype = text)',
                           n, a);
        END LOOP;
        FOREACH b IN ARRAY :types LOOP
            EXECUTE format('CREATE FUNCTION public.truth(%s, %s) RETURNS boolean'
                           ' LANGUAGE sql AS %L', a, b, 'SELECT NULL');
            EXECUTE format('CREATE FUNCTION public.words(%s, %s) RETURNS text'
                           ' LANGUAGE sql AS %L', a, b, 'SELECT NULL');
            FOR n IN SELECT DISTINCT oprname FROM pg_operator WHERE oprname = ANY (:operators) LOOP
                EXECUTE format('CREATE OPERATOR public.%s (leftarg = %s, rightarg = %s,'
                               ' function = public.%s)', n, a, b,
                               CASE WHEN n ~ '[=<>~]' AND n !~ '->' THEN 'truth' ELSE 'words' END);
            END LOOP;
        END LOOP;
    END LOOP;
END $$
"""

#: What depends on something planted, besides what was planted with it.
CAUGHT = """
SELECT pg_describe_object(d.classid, d.objid, d.objsubid),
       pg_describe_object(d.refclassid, d.refobjid, 0)
FROM pg_depend AS d
LEFT JOIN pg_proc AS p ON d.refclassid = 'pg_proc'::regclass AND p.oid = d.refobjid
LEFT JOIN pg_operator AS o ON d.refclassid = 'pg_operator'::regclass AND o.oid = d.refobjid
WHERE 'public'::regnamespace IN (p.pronamespace, o.oprnamespace)
  AND NOT EXISTS (SELECT FROM pg_proc
                  WHERE d.classid = 'pg_proc'::regclass AND oid = d.objid
                    AND pronamespace = 'public'::regnamespace)
  AND NOT EXISTS (SELECT FROM pg_operator
                  WHERE d.classid = 'pg_operator'::regclass AND oid = d.objid
                    AND oprnamespace = 'public'::regnamespace)
ORDER BY 1, 2
"""


def all_sql() -> str:
    texts = [statement.sql.decode() for statement in our_sql.statements("pgnotify").values()]
    return "\n".join([*texts, schema.script("pgnotify")])


def literal(values: Any) -> str:
    return "ARRAY[" + ", ".join(f"'{value}'" for value in sorted(values)) + "]"


@pytest.fixture
def planted(sql: Sql) -> None:
    """Overloads of every function and operator that we use, in the schema ``public``."""
    text = re.sub(r"--.*", "", all_sql())
    names = set(re.findall(r"\b([a-z_0-9]+)\(", text))
    operators = set(re.findall(r"(?<=\s)[-+*/<>=~|]+(?=\s)", text))
    assert {"now", "json_agg", "hashtextextended"} <= names
    assert {"||", "->>", "=", "<"} <= operators
    plant = PLANT.replace(":names", literal(names)).replace(":types", literal(TYPES.split()))
    sql(plant.replace(":operators", literal(operators)))


def probe(sql: Sql, name: str, text: str) -> None:
    """Make a function of a statement: what it uses can then be asked for."""
    sql(f"PREPARE {name} AS {text}")
    ((types,),) = sql(
        "SELECT array_to_string(parameter_types, ', ') FROM pg_prepared_statements WHERE name = %s",
        name,
    )
    sql(f"DEALLOCATE {name}")
    sql(f"CREATE FUNCTION probe.{name}({types}) RETURNS void LANGUAGE sql BEGIN ATOMIC {text}; END")


def test_no_statement_uses_what_somebody_has_planted(
    planted: None, connect: Callable[..., Connection], sql: Sql
) -> None:
    connect()
    sql("CREATE SCHEMA probe")
    sql("SET search_path = public")
    broken = {}
    for name, statement in our_sql.statements("pgnotify").items():
        try:
            probe(sql, name, statement.sql.decode())
        except psycopg.Error as error:
            broken[name] = str(error)
    sql("RESET search_path")
    assert (broken, sql(CAUGHT)) == ({}, [])


def test_functions_that_take_anything_are_named_with_their_schema(sql: Sql) -> None:
    """For them somebody's own with the very types of a call is always the better one."""
    greedy = sql(
        "SELECT DISTINCT proname FROM pg_proc WHERE provariadic = '\"any\"'::regtype"
        " AND pronamespace = 'pg_catalog'::regnamespace"
    )
    assert ("json_build_object",) in greedy
    calls = re.compile(r"(?<![.\w])(" + "|".join(name for (name,) in greedy) + r")\(")
    found = {
        name: calls.findall(statement.sql.decode())
        for name, statement in our_sql.statements("pgnotify").items()
    }
    assert {name: names for name, names in found.items() if names} == {}


def test_nothing_planted_before_the_schema_gets_into_it(
    planted: None, connect: Callable[..., Connection], sql: Sql
) -> None:
    """Neither where the first connect creates it, nor where a DBA applies what `sql` prints."""
    connect(schema="made")
    sql(schema.script("applied"))
    assert sql(CAUGHT) == []
    assert sql("SHOW search_path") == [('"$user", public',)], "the DBA's session is as it was"


# -- real attacks

#: Each notes that it ran, and by whose rights, then does what it stands for.
ATTACK = """
CREATE TABLE {place}.caught (what text, who text DEFAULT current_user);
GRANT INSERT ON {place}.caught TO PUBLIC;
CREATE FUNCTION {place}.note(what text) RETURNS void LANGUAGE sql
    AS 'INSERT INTO {place}.caught (what) VALUES ($1)';
"""

#: Signature, what it returns and how to get that from the real one.
BETTER = [
    ("hashtextextended(text, integer)", "bigint", "pg_catalog.hashtextextended($1, $2)"),
    ("array_to_string(text[], text)", "text", "pg_catalog.array_to_string($1, $2)"),
    (
        "json_build_object(text, text, text, text, text, jsonb)",
        "json",
        "pg_catalog.json_build_object($1, $2, $3, $4, $5, $6)",
    ),
    (
        "json_build_object(text, json, text, json, text, float8, text, integer)",
        "json",
        "pg_catalog.json_build_object($1, $2, $3, $4, $5, $6, $7, $8)",
    ),
    (
        f"jsonb_build_object({'text, ' * 7}jsonb, text, bigint, text, bigint)",
        "jsonb",
        "pg_catalog.jsonb_build_object($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
    ),
    ("jsonb_build_array(text)", "jsonb", "pg_catalog.jsonb_build_array($1)"),
    ("jsonb_build_array(jsonb)", "jsonb", "pg_catalog.jsonb_build_array($1)"),
    ("joined(text, bigint)", "text", "pg_catalog.textcat($1, $2::text)"),
]

#: The same signatures as in pg_catalog: they count only before it.
SAME = [
    ("now()", "timestamptz", "pg_catalog.now()"),
    ("clock_timestamp()", "timestamptz", "pg_catalog.clock_timestamp()"),
    ("pg_notify(text, text)", "void", ""),
    ("set_config(text, text, boolean)", "text", "pg_catalog.set_config($1, $2, $3)"),
    ("current_setting(text, boolean)", "text", "pg_catalog.current_setting($1, $2)"),
    ("make_interval(secs float8)", "interval", "pg_catalog.make_interval(secs => $1)"),
    ("least(float8, float8)", "float8", "LEAST($1, $2)"),
    ("pg_advisory_xact_lock(bigint)", "void", ""),
    ("octet_length(text)", "integer", "pg_catalog.octet_length($1)"),
    ("unnest(text[])", "SETOF text", ""),
    ("same(text, text)", "boolean", "pg_catalog.texteq($1, $2)"),
    ("less(text, text)", "boolean", "pg_catalog.text_lt($1, $2)"),
]

OPERATORS = """
CREATE OPERATOR {place}.|| (leftarg = text, rightarg = bigint, function = {place}.joined);
CREATE FUNCTION {place}.step(json, text) RETURNS json LANGUAGE plpgsql AS $$
BEGIN
    PERFORM {place}.note('json_agg');
    RETURN (coalesce($1, '[]')::jsonb || to_jsonb($2))::json;
END $$;
CREATE AGGREGATE {place}.json_agg(text) (sfunc = {place}.step, stype = json);
"""

SAME_OPERATORS = """
CREATE OPERATOR {place}.= (leftarg = text, rightarg = text, function = {place}.same);
CREATE OPERATOR {place}.< (leftarg = text, rightarg = text, function = {place}.less);
CREATE TABLE {place}.tasks (LIKE pg_catalog.pg_class);
CREATE TABLE {place}.queues (LIKE pg_catalog.pg_class);
CREATE TABLE {place}.pg_class (LIKE pg_catalog.pg_class);
CREATE TABLE {place}.pg_namespace (LIKE pg_catalog.pg_namespace);
GRANT SELECT, INSERT ON {place}.tasks, {place}.queues, {place}.pg_class, {place}.pg_namespace
    TO PUBLIC;
"""


def attack(place: str, functions: list[tuple[str, str, str]], more: str) -> str:
    parts = [ATTACK]
    for signature, returns, value in functions:
        result = "RETURN" if returns.startswith(("void", "SETOF")) else f"RETURN {value}"
        what = signature.partition("(")[0]
        parts.append(
            f"CREATE FUNCTION {{place}}.{signature} RETURNS {returns} LANGUAGE plpgsql AS $$"
            f" BEGIN PERFORM {{place}}.note('{what}'); {result}; END $$;"
        )
    return "\n".join([*parts, more]).replace("{place}", place)


@pytest.fixture
def make_role(server: Server, database_name: str) -> Iterator[Callable[[str], str]]:
    """A function that makes a role with a right on this test's database or a schema of it."""
    made = []

    def make(right: str) -> str:
        name = f"role_{uuid.uuid4().hex[:8]}"
        server.run_sql(f"CREATE ROLE {name} LOGIN")
        made.append(name)
        server.run_sql(f"GRANT {right} TO {name}", database_name)
        return name

    yield make
    server.drop_database(database_name)
    for name in made:
        server.run_sql(f"DROP ROLE {name}")


@pytest.fixture
def attacker(
    server: Server, database_name: str, make_role: Callable[[str], str]
) -> Callable[[str, str], None]:
    """A function that runs a script as somebody who may create in a schema, and no more."""

    def run(place: str, script: str) -> None:
        server.run_sql(f"CREATE SCHEMA IF NOT EXISTS {place}", database_name)
        server.run_sql(f"GRANT USAGE ON SCHEMA {place} TO PUBLIC", database_name)
        name = make_role(f"CREATE ON SCHEMA {place}")
        url = server.url(database_name, user=name)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute(script.encode())

    return run


def work_hard(connection: Connection) -> None:
    """Go through every statement that routes, buries, trims, claims and tells."""
    channel = connection.default_channel
    Queue("topic", Exchange("news", "topic"), "#", queue_arguments={"x-max-length": 2})(
        channel
    ).declare()
    Queue("grave")(channel).declare()
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": "grave"}
    Queue("sick", queue_arguments=arguments)(channel).declare()
    calls = Exchange("calls", "fanout", durable=False)
    ears = Queue("ears", calls, exclusive=True, auto_delete=True, durable=False)
    heard: list[Any] = []
    connection.Consumer(ears, no_ack=True, on_message=heard.append).consume()
    producer = connection.Producer()
    for n in range(4):
        producer.publish(n, routing_key="topic")
        producer.publish(n, exchange="news", routing_key="a.b")
    assert channel.queue_declare("topic", passive=True).message_count == 2
    producer.publish("sick", routing_key="sick", priority=3)
    channel.basic_get("sick").reject()
    dead = channel.basic_get("grave")
    assert dead.headers["x-first-death-queue"] == "sick"
    dead.ack()
    channel.basic_get("topic").reject(requeue=True)

    def told() -> bool:
        for body in ("short", "long" * 5000):
            producer.publish(body, exchange="calls", delivery_mode=1)
        try:
            connection.drain_events(timeout=0.05)
        except TimeoutError:
            pass
        live = [message for message in heard if message.delivery_tag == "0.0"]
        return len({len(message.body) for message in live}) == 2

    wait_until(told)


@pytest.mark.parametrize(
    "first", [False, True], ids=["the usual path", "a schema that comes first"]
)
def test_nobody_elses_functions_run_with_our_rights(
    first: bool,
    attacker: Callable[[str, str], None],
    make_role: Callable[[str], str],
    server: Server,
    database_name: str,
    connect: Callable[..., Connection],
    sql: Sql,
) -> None:
    place = "crowd" if first else "public"
    functions, more = BETTER, OPERATORS
    if first:
        functions, more = BETTER + SAME, OPERATORS + SAME_OPERATORS
    attacker(place, attack(place, functions, more))
    victim = make_role(f"CREATE ON DATABASE {database_name}")
    if first:
        server.run_sql(f"ALTER ROLE {victim} SET search_path = {place}, pg_catalog")
    url = server.url(database_name, scheme="pgnotify", user=victim)
    connection = connect(url, health_check_interval=0.1)
    work_hard(connection)
    connection.default_channel.queue_delete("topic")
    assert sql(f"SELECT what, who, count(*) FROM {place}.caught GROUP BY what, who") == []


def test_triggers_run_nobody_elses_functions_in_somebodys_session(
    attacker: Callable[[str, str], None],
    connect: Callable[..., Connection],
    database: str,
    sql: Sql,
) -> None:
    connect()
    attacker("crowd", attack("crowd", BETTER + SAME, OPERATORS + SAME_OPERATORS))
    with psycopg.connect(database, autocommit=True) as psql:
        psql.execute("SET search_path = crowd, pg_catalog, public")
        psql.execute("CREATE TEMP TABLE tasks (task_name text)")
        psql.execute("CREATE TEMP TABLE exchanges (exchange_name text)")
        psql.execute(
            "CREATE FUNCTION pg_temp.pg_notify(text, text) RETURNS void AS '' LANGUAGE sql"
        )
        psql.execute(
            "INSERT INTO pgnotify.tasks (task_name, envelope, payload, lease_worker_id,"
            " lease_expiration, deaths)"
            " VALUES ('box', '{}', '', 'me', 'infinity', '[{\"count\": 1}]')"
        )
        psql.execute("UPDATE pgnotify.tasks SET lease_worker_id = NULL, lease_expiration = NULL")
        psql.execute("TABLE pgnotify.tasks")
        moved = psql.execute(
            "SELECT buried"
            " FROM pgnotify.bury(ARRAY(SELECT task_id FROM pgnotify.tasks), 'why', true)"
        )
        assert len(moved.fetchall()) == 1
        psql.execute("SELECT * FROM pgnotify.route('amq.topic', 'a.b')")
    assert sql("SELECT reason FROM pgnotify.dead_letters") == [("why",)]
    assert sql("SELECT what, who FROM crowd.caught") == []
    with psycopg.connect(database, autocommit=True) as listener:
        listener.execute(f'LISTEN "{channel_of("pgnotify", "box")}"')
        sql("SET search_path = crowd, pg_catalog")
        sql("INSERT INTO pgnotify.tasks (task_name, envelope, payload) VALUES ('box', '{}', '')")
        (notice,) = listener.notifies(timeout=20, stop_after=1)
        assert notice.payload == "published"
    assert sql("SELECT what, who FROM crowd.caught") == []

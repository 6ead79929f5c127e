"""Names inject no SQL, and rights that the README does not give are needed nowhere."""

from __future__ import annotations

import re
import subprocess
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fix_postgres import Server
from helpers import wait_until
from kombu import Connection, Exchange, Queue
from psycopg import sql as quoting

from kombu_pgnotify.__main__ import main
from kombu_pgnotify.errors import ConfigurationError

Sql = Callable[..., list[tuple[Any, ...]]]

NASTY = [
    'x"; DROP TABLE public.victim; --',
    "x'; DROP TABLE public.victim; --",
    "x\n; DROP TABLE public.victim; \\q",
    'a.b."c".',
    "größe 😀 \N{ROMAN NUMERAL EIGHT}",
    "100%s %(x)s %%",
    "{schema} {0} {",
    "$1 $$ $kombu$ $kombu_pgnotify",
    "\\' \\\" \\x00 :name :'name'",
    "/* -- */ E'",
    "UPPER select",
    '"',
]
#: As long as a name may be in PostgreSQL, in characters of one byte and of two.
FULL = ["s" * 63, "ß" * 31]


def goes_round(connection: Connection, name: str) -> None:
    """Declare, publish, route, tell, bury, claim and list things of that name."""
    channel = connection.default_channel
    exchange = Exchange(f"{name} x", "topic")
    arguments = {"x-dead-letter-exchange": "", "x-dead-letter-routing-key": f"{name} grave"}
    Queue(name, exchange, f"{name}.#", queue_arguments={**arguments, "x-max-length": 5})(
        channel
    ).declare()
    Queue(f"{name} grave")(channel).declare()
    assert (name, f"{name} x", f"{name}.#") in channel.list_bindings()
    got: list[Any] = []
    connection.Consumer(
        Queue(name), auto_declare=False, on_message=lambda m: (got.append(m), m.reject())
    ).consume()
    producer = connection.Producer()
    producer.publish("one", routing_key=name)
    producer.publish("two", exchange=f"{name} x", routing_key=f"{name}.{name}")
    while len(got) < 2:
        connection.drain_events(timeout=20)
    assert [message.payload for message in got] == ["one", "two"]
    buried = wait_until(lambda: channel.basic_get(f"{name} grave"))
    assert buried.headers["x-first-death-queue"] == name
    assert buried.headers["x-death"][0]["queue"] == name
    buried.ack()
    assert channel.queue_purge(f"{name} grave") == 1
    channel.queue_unbind(name, f"{name} x", f"{name}.#")
    channel.exchange_delete(f"{name} x")
    for queue in (name, f"{name} grave"):
        channel.queue_delete(queue)


@pytest.fixture
def victim(sql: Sql) -> Iterator[None]:
    """A table that is still there afterwards."""
    sql("CREATE TABLE public.victim ()")
    yield
    assert sql("SELECT to_regclass('public.victim') IS NOT NULL") == [(True,)]


def schemas(sql: Sql) -> set[str]:
    found = sql("SELECT nspname FROM pg_namespace WHERE nspname !~ '^pg_|^information_schema$'")
    return {name for (name,) in found} - {"public"}


@pytest.mark.parametrize("name", NASTY)
def test_a_queue_an_exchange_and_a_key_may_have_any_name(
    name: str, victim: None, connect: Callable[..., Connection], sql: Sql
) -> None:
    goes_round(connect(), name)
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)]
    assert sql("SELECT count(*) FROM pgnotify.queues") == [(0,)]
    goes_round(connect(queue_name_prefix=name), "box")


@pytest.mark.parametrize("name", [*NASTY, *FULL])
def test_a_schema_may_have_any_name(
    name: str, victim: None, connect: Callable[..., Connection], sql: Sql
) -> None:
    goes_round(connect(schema=name), "box")
    assert schemas(sql) == {name}


@pytest.mark.parametrize("name", ["s" * 64, "ß" * 32, "pg_x", "a\0b", "", "x$kombu_pgnotify$y"])
def test_a_schema_name_that_cannot_be_is_refused(name: str, broker_url: str) -> None:
    connection = Connection(broker_url, transport_options={"schema": name})
    with connection, pytest.raises(ConfigurationError, match="'schema'"):
        connection.connect()


@pytest.mark.parametrize("name", [*NASTY, *FULL])
def test_what_the_command_prints_can_be_applied_whatever_the_schema_is_called(
    name: str,
    victim: None,
    connect: Callable[..., Connection],
    database: str,
    sql: Sql,
    server: Server,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["sql", f"--schema={name}"]) == 0
    script = capsys.readouterr().out
    psql = server.embedded.bindir / "psql" if server.owned else None
    if psql is not None and psql.is_file():
        command = [str(psql), "-X", "-q", "-v", "ON_ERROR_STOP=1", "-v", "name=1", database]
        done = subprocess.run(
            command, input=script, capture_output=True, encoding="utf-8", check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
    else:
        sql(script)
    assert schemas(sql) == {name}
    goes_round(connect(schema=name, create_schema=False), "box")
    assert main(["upgrade", database, f"--schema={name}"]) == 0
    assert schemas(sql) == {name}


@pytest.fixture(params=NASTY)
def nasty_database(request: pytest.FixtureRequest, server: Server) -> Iterator[str]:
    """The URL of a database of such a name, as a role of such a name."""
    name = f"{request.param} {server.create_database()}"
    identifier = quoting.Identifier(name).as_string()
    server.run_sql(f"CREATE DATABASE {identifier} TEMPLATE template0")
    server.run_sql(f"CREATE ROLE {identifier} LOGIN")
    try:
        yield name
    finally:
        server.run_sql(f"DROP DATABASE {identifier} WITH (FORCE)")
        server.run_sql(f"DROP ROLE {identifier}")
        server.drop_database(name[-21:])


def test_a_database_and_a_role_may_have_any_name(
    nasty_database: str, server: Server, connect: Callable[..., Connection]
) -> None:
    """And the remedy that an error names can be applied."""
    name = nasty_database
    server.run_sql("CREATE TABLE public.victim ()", name)
    owner, role = (server.url(name, scheme="pgnotify", user=user) for user in ("postgres", name))
    with connect(owner) as connection:
        goes_round(connection, "box")
        connection.transport.broker.close()
    with pytest.raises(ConfigurationError) as error:
        connect(role)
    server.run_sql("GRANT" + str(error.value).partition("GRANT")[2], name)
    connect(role).close()
    assert server.run_sql("SELECT count(*) FROM public.victim", name) == [(0,)]


# -- the README's rights, for all that happens between a producer and a worker

README = Path(__file__).parents[2] / "README.rst"


@pytest.fixture
def roles(
    server: Server, database_name: str, connect: Callable[..., Connection], sql: Sql
) -> Iterator[dict[str, str]]:
    """URLs of roles with the rights of the README, by its names for them."""
    text = README.read_text(encoding="utf-8").partition("\nRights\n")[2]
    block = re.search(r"code-block:: sql\n\n((?:    .*\n|\n)+)", text)
    assert block is not None
    names = {who: f"{who}_{uuid.uuid4().hex[:8]}" for who in ("producer", "worker", "monitor")}
    for name in names.values():
        server.run_sql(f"CREATE ROLE {name} LOGIN")
    with connect():
        sql(re.sub(rf"\b({'|'.join(names)})\b", lambda match: names[match[0]], block[1]))
    urls = {who: server.url(database_name, scheme="pgnotify", user=names[who]) for who in names}
    yield urls
    server.drop_database(database_name)
    for name in names.values():
        server.run_sql(f"DROP ROLE {name}")


def test_the_rights_suffice_for_live_queues_dead_letters_and_the_sweep(
    roles: dict[str, str],
    connect: Callable[..., Connection],
    sql: Sql,
    caplog: pytest.LogCaptureFixture,
) -> None:
    worker, producer = connect(roles["worker"]), connect(roles["producer"])
    channel = worker.default_channel
    calls = Exchange("calls", "fanout", durable=False)
    ears = Queue("ears", calls, exclusive=True, auto_delete=True, durable=False)
    heard: list[str] = []
    consumer = worker.Consumer(ears, no_ack=True, on_message=lambda m: heard.append(m.payload))
    consumer.consume()
    letters = {"x-dead-letter-exchange": "letters", "x-message-ttl": 60_000}
    Queue("box", queue_arguments=letters)(channel).declare()
    Queue("short", queue_arguments={**letters, "x-max-length": 2})(channel).declare()
    Queue("grave", Exchange("letters", "topic"), "#")(channel).declare()
    publisher = producer.Producer(auto_declare=False)

    def is_live() -> bool:
        with pytest.raises(TimeoutError):
            worker.drain_events(timeout=0.05)
        return sql("SELECT live FROM pgnotify.queues WHERE queue_name = 'ears'") == [(True,)]

    wait_until(is_live)
    for body in ("short", "long" * 5000):
        publisher.publish(body, exchange="calls", delivery_mode=1)
    while len(heard) < 2:
        worker.drain_events(timeout=20)
    # Rejected; dropped from the head, which only a worker may; too old.
    publisher.publish("rejected", routing_key="box")
    channel.basic_get("box").reject()
    for body in ("first", "second", "third"):
        worker.Producer(auto_declare=False).publish(body, routing_key="short")
    publisher.publish("old", routing_key="box", expiration=0.01)
    sql("UPDATE pgnotify.tasks SET expires_at = now() WHERE task_name IN ('box', 'short')")
    worker.transport.broker.housekeeper.sweep()
    reasons = []
    while (message := channel.basic_get("grave", no_ack=True)) is not None:
        reasons.append(message.headers["x-first-death-reason"])
    assert sorted(reasons) == ["expired", "expired", "expired", "maxlen", "rejected"]
    consumer.cancel()
    wait_until(lambda: sql("SELECT FROM pgnotify.queues WHERE queue_name = 'ears'") == [])
    sql("UPDATE pgnotify.broadcasts SET published_at = '-infinity'")
    worker.transport.broker.housekeeper.sweep()
    assert sql("SELECT count(*) FROM pgnotify.broadcasts") == [(0,)]
    channel.queue_delete("box")
    assert "right is missing" not in caplog.text

"""The schema is made once, by whoever may; whoever may not is told what to do."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from fix_postgres import Server
from fix_proxy import Proxy
from helpers import wait_until
from psycopg import sql as pg

from kombu_pgnotify import schema as schema_module
from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claims import Ranges
from kombu_pgnotify.embedded import HOST, free_port
from kombu_pgnotify.errors import ConfigurationError, DatabaseUnavailable
from kombu_pgnotify.messages import Fence, Outgoing, channel_of, lock_of

MakeBroker = Callable[..., Broker]
Sql = Callable[..., list[tuple[Any, ...]]]

SECRET = "Sesame-7291"

SCRAM = {"hba": ["host all sesame 127.0.0.1/32 scram-sha-256"]}

CREATING_PROGRAM = """
import sys
from kombu_pgnotify import options, urls
from kombu_pgnotify.broker import Broker
from kombu_pgnotify.messages import Outgoing

broker = Broker(options.build(urls.parse(sys.argv[1], options.NAMES), {}))
print("waiting", flush=True)
sys.stdin.readline()
broker.database.acquire()
print(broker.store.publish("queue", Outgoing("{}", b"")))
broker.close()
"""


# -- created once


def test_many_that_create_it_at_once_never_fail(make_broker: MakeBroker, sql: Sql) -> None:
    brokers = [make_broker(acquire=False) for _ in range(8)]
    start = threading.Barrier(8)

    def create(broker: Broker) -> None:
        start.wait()
        broker.database.acquire()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(create, brokers))
    versions = [(version,) for version in range(1, schema_module.VERSION + 1)]
    assert sql("SELECT version FROM pgnotify.migrations ORDER BY 1") == versions


def test_processes_that_create_it_at_once_never_fail(database: str, sql: Sql) -> None:
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", CREATING_PROGRAM, database],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for _ in range(2)
    ]  # fmt: skip
    for process in processes:
        assert process.stdout is not None
        assert process.stdout.readline() == "waiting\n"
    outputs = [process.communicate("go\n", timeout=30)[0].strip() for process in processes]
    assert sorted(outputs) == ["1", "2"]
    assert [process.returncode for process in processes] == [0, 0]


def test_creating_again_changes_nothing(make_broker: MakeBroker, sql: Sql) -> None:
    make_broker().store.publish("queue", Outgoing("{}", b""))
    before = sql("SELECT oid FROM pg_class ORDER BY 1")
    assert make_broker().store.size("queue") == 1
    assert sql("SELECT oid FROM pg_class ORDER BY 1") == before


def test_nothing_happens_before_the_first_use(make_broker: MakeBroker, sql: Sql) -> None:
    make_broker(acquire=False)
    assert sql("SELECT count(*) FROM pg_namespace WHERE nspname = 'pgnotify'") == [(0,)]


def test_a_schema_that_vanishes_under_way_is_made_anew_at_the_next_connect(
    broker: Broker, sql: Sql
) -> None:
    sql("DROP SCHEMA pgnotify CASCADE")
    with pytest.raises(DatabaseUnavailable, match="pgnotify"):
        broker.store.publish("queue", Outgoing("{}", b""))
    broker.database.acquire()
    assert broker.store.publish("queue", Outgoing("{}", b"")) == 1


def test_the_script_for_a_dba_makes_the_same_schema(make_broker: MakeBroker, sql: Sql) -> None:
    def everything(schema: str) -> list[tuple[Any, ...]]:
        return sql(
            "SELECT c.relname, c.relkind, a.attname, format_type(a.atttypid, a.atttypmod)"
            " FROM pg_class c LEFT JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0"
            " WHERE c.relnamespace = %s::regnamespace ORDER BY 1, 3",
            schema,
        )

    sql(schema_module.script("by_hand"))
    make_broker(schema="by_us")
    assert everything("by_hand") == everything("by_us")
    broker = make_broker(schema="by_hand", create_schema=False)
    assert broker.store.publish("queue", Outgoing("{}", b"")) == 1


# -- rights


def test_a_role_that_may_not_create_is_told_who_may(
    make_broker: MakeBroker, role_url: str, role: str
) -> None:
    with pytest.raises(ConfigurationError) as error:
        make_broker(role_url)
    text = str(error.value)
    assert role in text
    assert "'pgnotify'" in text
    assert "GRANT CREATE ON DATABASE" in text


def test_a_role_with_a_schema_of_its_own_needs_no_right_on_the_database(
    make_broker: MakeBroker, role_url: str, role: str, sql: Sql
) -> None:
    sql(f"CREATE SCHEMA pgnotify AUTHORIZATION {role}")
    assert make_broker(role_url).store.publish("queue", Outgoing("{}", b"")) == 1


def test_an_empty_database_with_create_schema_off_says_what_to_run(
    make_broker: MakeBroker, sql: Sql
) -> None:
    with pytest.raises(ConfigurationError) as error:
        make_broker(create_schema=False)
    text = str(error.value)
    assert "python -m kombu_pgnotify upgrade" in text
    assert "create_schema" in text
    assert "'pgnotify'" in text
    assert sql("SELECT count(*) FROM pg_namespace WHERE nspname = 'pgnotify'") == [(0,)]


def test_a_schema_of_a_newer_version_is_left_alone(make_broker: MakeBroker, sql: Sql) -> None:
    make_broker()
    sql("INSERT INTO pgnotify.migrations VALUES (99)")
    with pytest.raises(ConfigurationError, match="version 99") as error:
        make_broker()
    assert "install the newer kombu_pgnotify" in str(error.value)


def test_a_failed_migration_leaves_nothing_behind(
    make_broker: MakeBroker, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = schema_module._migration
    monkeypatch.setattr(schema_module, "_migration", lambda *a: good(*a) + "; SELECT 1 / 0")
    with pytest.raises(Exception, match="division by zero"):
        make_broker()
    assert sql("SELECT count(*) FROM pg_namespace WHERE nspname = 'pgnotify'") == [(0,)]
    monkeypatch.undo()
    make_broker()


# -- names

ODD_NAMES = [
    'we"ird', "with space", "100%", "{schema}", "größe", "x" * 63, "ü" * 31 + "x", "a.b", "a'b",
    "a;b--c", "SELECT", "$1", "a$$b", "back\\slash", "new\nline", "Upper", "😀", "%s",
    "a$announce$b",
]  # fmt: skip


@pytest.mark.parametrize("name", ODD_NAMES)
def test_a_schema_may_have_any_name(
    name: str, make_broker: MakeBroker, database: str, everything: Ranges
) -> None:
    broker = make_broker(schema=name)
    store = broker.store
    tasks = pg.SQL("{}.tasks").format(pg.Identifier(name))
    with (
        psycopg.connect(database, autocommit=True) as listening,
        psycopg.connect(database, autocommit=True) as other,
    ):
        channel = channel_of(name, "queue")
        listening.execute(pg.SQL("LISTEN {}").format(pg.Identifier(channel)))
        listening.execute("SELECT pg_advisory_lock_shared(%s)", (lock_of(channel),))

        def heard() -> list[str]:
            heard = listening.notifies(timeout=5, stop_after=1)
            # Behind it stands to whom it is said.
            return [notify.payload.partition(" ")[0] for notify in heard]

        store.publish("queue", Outgoing("{}", b"ours"))
        assert heard() == ["published"]
        insert = "INSERT INTO {} (task_name, envelope, payload) VALUES ('queue', '{{}}', 'sql')"
        other.execute(pg.SQL(insert).format(tasks))
        assert heard() == ["published"]
        rows = store.claim("queue", everything, 10, "me")
        assert [row.payload for row in rows] == [b"ours", b"sql"]
        release = "UPDATE {} SET lease_worker_id = NULL, lease_expiration = NULL"
        other.execute(pg.SQL(release).format(tasks))
        assert heard() == ["released"]
    fences = [Fence(row.task_id, row.delivery) for row in store.claim("queue", everything, 10, "")]
    assert store.dead_letter(fences[:1], "why") == {1}
    assert store.acknowledge(fences) == {2}
    # The second process finds it.
    assert make_broker(schema=name, create_schema=False).store.size("queue") == 0


def test_schemas_are_namespaces(make_broker: MakeBroker) -> None:
    one, two = make_broker(schema="one").store, make_broker(schema="two").store
    one.publish("queue", Outgoing("{}", b""))
    assert (one.size("queue"), two.size("queue")) == (1, 0)


# -- servers


def test_a_server_that_is_too_old_is_named(
    make_broker: MakeBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schema_module, "OLDEST_SERVER", 990000)
    with pytest.raises(ConfigurationError, match=r"PostgreSQL \d+ is too old"):
        make_broker()


def test_a_standby_is_unavailable_until_it_is_promoted(
    own_server: Server, make_broker: MakeBroker
) -> None:
    (own_server.embedded.folder / "data" / "standby.signal").touch()
    own_server.restart("fast")
    with pytest.raises(DatabaseUnavailable, match="cannot serve us"):
        make_broker(own_server.url())
    anyway = own_server.url() + "?target_session_attrs=any"
    with pytest.raises(DatabaseUnavailable, match="standby") as error:
        make_broker(anyway)
    assert "name all hosts" in str(error.value)
    own_server.run_sql("SELECT pg_promote()")
    broker = make_broker(own_server.url())
    assert broker.store.publish("queue", Outgoing("{}", b"")) == 1
    broker.close()


def test_a_role_that_is_read_only_is_unavailable(
    make_broker: MakeBroker, role: str, role_url: str, sql: Sql
) -> None:
    sql(f"ALTER ROLE {role} SET default_transaction_read_only = on")
    with pytest.raises(DatabaseUnavailable, match="read-only"):
        make_broker(role_url)


def test_the_second_host_serves_when_the_first_is_down(
    server: Server, database_name: str, make_broker: MakeBroker
) -> None:
    host, port = server.address
    place = f"{HOST}:{free_port()},{host}:{port}"
    url = server.url(database_name).replace(f"{host}:{port}", place)
    assert make_broker(url).store.publish("queue", Outgoing("{}", b"")) == 1


def test_an_unreachable_server_is_one_sentence_that_names_it(
    server: Server, make_broker: MakeBroker
) -> None:
    port = free_port()
    with pytest.raises(DatabaseUnavailable) as error:
        make_broker(server.url("some_db", user="me", password=SECRET, address=(HOST, port)))
    text = str(error.value)
    assert f"{HOST}:{port}" in text
    assert "some_db" in text
    assert "\n" not in text
    assert_hidden(error.value)


def test_an_unknown_host_is_unavailable_and_named(make_broker: MakeBroker) -> None:
    with pytest.raises(DatabaseUnavailable, match=r"no-such-host\.invalid"):
        make_broker("postgresql://no-such-host.invalid/db")


def test_a_socket_folder_without_a_server_is_named(make_broker: MakeBroker, tmp_path: Any) -> None:
    with pytest.raises(DatabaseUnavailable) as error:
        make_broker(f"postgresql:///db?host={tmp_path}")
    assert str(tmp_path) in str(error.value)


def test_a_server_that_never_answers_fails_within_connect_timeout(
    proxy: Proxy, database_name: str, make_broker: MakeBroker
) -> None:
    proxy.freeze()
    started = time.monotonic()
    with pytest.raises(DatabaseUnavailable, match=str(proxy.port)):
        make_broker(proxy.url(database_name), connect_timeout=2)
    assert time.monotonic() - started < 4
    proxy.thaw()


# -- logins


def assert_hidden(error: BaseException) -> None:
    """The password is in nothing that a log could show of the error."""
    text = "".join(traceback.format_exception(error))
    chain: BaseException | None = error
    while chain is not None:
        text += str(chain) + repr(chain)
        chain = chain.__cause__ or chain.__context__
    assert SECRET not in text


@pytest.mark.parametrize("own_server", [SCRAM], indirect=True)
def test_a_wrong_password_is_a_configuration_error_and_not_shown(
    own_server: Server, make_broker: MakeBroker
) -> None:
    own_server.run_sql("CREATE ROLE sesame LOGIN SUPERUSER PASSWORD 'right-one'")
    with pytest.raises(ConfigurationError, match="refuses the login") as error:
        make_broker(own_server.url(user="sesame", password=SECRET))
    assert "'sesame'" in str(error.value)
    assert_hidden(error.value)

    with pytest.raises(ConfigurationError, match="refuses the login") as error:
        make_broker(own_server.url(user="sesame"), password_source=lambda: SECRET)
    assert_hidden(error.value)

    with pytest.raises(ConfigurationError, match="no password supplied"):
        make_broker(own_server.url(user="sesame"))

    # Once it has worked, a refusal may be a password just being changed: try again.
    right = own_server.url(user="sesame", password="right-one")
    broker = make_broker(right)
    own_server.run_sql(f"ALTER ROLE sesame PASSWORD '{SECRET}'")
    own_server.run_sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'sesame'"
    )

    def unavailable() -> bool:
        # A connection that is not yet seen to be gone fails in another way.
        try:
            broker.store.size("queue")
        except DatabaseUnavailable as exc:
            return "password authentication failed" in str(exc)
        return False

    wait_until(unavailable)
    broker.close()


@pytest.mark.parametrize("own_server", [SCRAM], indirect=True)
@pytest.mark.parametrize("password", ["a@b:c/d", "p#%+ ?&=", "pä§ß密", 'it\'s "quoted" \\', " "])
def test_an_odd_password_opens_the_door(
    own_server: Server, make_broker: MakeBroker, password: str
) -> None:
    with psycopg.connect(own_server.url()) as connection:
        statement = pg.SQL("CREATE ROLE sesame LOGIN SUPERUSER PASSWORD {}")
        connection.execute(statement.format(pg.Literal(password)))
    make_broker(own_server.url(user="sesame", password=password)).close()
    make_broker(own_server.url(user="sesame"), password_source=lambda: password).close()


def test_a_password_that_cannot_be_encoded_is_not_shown(
    server: Server, make_broker: MakeBroker
) -> None:
    with pytest.raises((ConfigurationError, DatabaseUnavailable)) as error:
        make_broker(server.url(), password_source=lambda: SECRET + "\udc80")
    assert SECRET not in str(error.value)


def test_a_source_of_passwords_that_fails_is_an_error_of_ours(
    server: Server, make_broker: MakeBroker
) -> None:
    def broken() -> str:
        raise OSError("the vault does not answer")

    with pytest.raises(DatabaseUnavailable, match="vault does not answer"):
        make_broker(server.url(), password_source=broken)


def test_a_source_of_passwords_is_asked_at_each_connect(
    broker: Broker, make_broker: MakeBroker
) -> None:
    asked: list[int] = []

    def source() -> str:
        asked.append(1)
        return SECRET

    other = make_broker(password_source=source)
    before = len(asked)
    assert before >= 1
    other.database.open().close()
    assert len(asked) == before + 1


def test_a_missing_database_is_a_configuration_error_that_names_it(
    server: Server, make_broker: MakeBroker
) -> None:
    with pytest.raises(ConfigurationError, match="no_such_db"):
        make_broker(server.url("no_such_db"))


def test_a_missing_role_is_a_configuration_error_that_names_it(
    server: Server, database_name: str, make_broker: MakeBroker
) -> None:
    with pytest.raises(ConfigurationError, match="no_such_role"):
        make_broker(server.url(database_name, user="no_such_role"))


def test_ssl_where_the_server_has_none_is_a_configuration_error(
    database: str, make_broker: MakeBroker
) -> None:
    with pytest.raises(ConfigurationError, match="SSL"):
        make_broker(database + "?sslmode=require")


def test_a_missing_service_is_a_configuration_error(make_broker: MakeBroker) -> None:
    with pytest.raises(ConfigurationError, match="no_such_service"):
        make_broker("postgresql:///?service=no_such_service")


def test_parameters_of_the_url_reach_the_server(database: str, make_broker: MakeBroker) -> None:
    broker = make_broker(
        database
        + "?application_name=mine&options=-c%20statement_timeout%3D1234%20-c%20work_mem%3D99kB"
    )
    session = broker.database.open()
    try:
        shown = session.script(
            "SELECT current_setting('application_name') || ' ' || current_setting('work_mem')"
            " || ' ' || current_setting('statement_timeout')"
        )
    finally:
        session.close()
    assert shown == [(b"mine 99kB 1234ms",)]

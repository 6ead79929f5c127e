"""Connections: made without I/O, shared by a process, inherited by forks, lost, and closed."""

from __future__ import annotations

import json
import logging
import pickle
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psutil
import psycopg
import pytest
from fix_postgres import Server
from helpers import wait_until
from kombu import Connection, Message, pools
from kombu.exceptions import OperationalError

from kombu_pgnotify import database as database_module
from kombu_pgnotify.errors import ConfigurationError, DatabaseUnavailable
from kombu_pgnotify.transport import Transport

Connect = Callable[..., Connection]
Send = Callable[..., None]
Sql = Callable[..., list[tuple[Any, ...]]]
Rows = Callable[[], tuple[int, int, int]]
RunScript = Callable[..., str]

#: Where no server listens.
NOWHERE = "pgnotify://nobody@127.0.0.1:1/nothing"

#: Retry at once.
EAGER = {"interval_start": 0, "interval_step": 0, "interval_max": 0}

#: Our sessions of this process and of others, the LISTEN connection included.
OUR_SESSIONS = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'kombu_pgnotify%' ORDER BY pid"
)


@pytest.fixture
def sessions(sql: Sql) -> Callable[[], int]:
    """A function that counts our connections to this test's database."""
    return lambda: len(sql(OUR_SESSIONS))


# -- made without I/O


class Unprintable(Connection):
    """A Connection that must not be shown, since that would make another transport."""

    def __repr__(self) -> str:
        raise AssertionError("printed")


def test_a_transport_is_made_without_io_threads_or_printing(
    broker_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("I/O")

    threads = threading.enumerate()
    with monkeypatch.context() as blocked:
        blocked.setattr(psycopg, "connect", refuse)
        blocked.setattr(socket, "socketpair", refuse)
        blocked.setattr(socket.socket, "connect", refuse)
        connection = Unprintable(broker_url)
        for _ in range(10):
            transport = connection.create_transport()
            assert transport.driver_type == "pgnotify"
        assert connection.as_uri()
        assert connection.info()["transport"] == "pgnotify"
        assert not connection.connected
        connection.close()
    assert threading.enumerate() == threads


def test_asking_whether_it_is_connected_costs_no_query(
    connection: Connection, statements: list[Any]
) -> None:
    statements.clear()
    for _ in range(10):
        assert connection.connected
        assert connection.default_channel
        assert connection.connection
    assert statements == []


def test_what_others_ask_of_the_transport(connection: Connection) -> None:
    transport = connection.transport
    # Celery has special cases for 'sql' and 'redis', and pokes a channel's `client`.
    assert transport.driver_type == "pgnotify"
    assert transport.can_parse_url is True
    assert transport.implements.asynchronous is True
    assert not connection.supports_heartbeats
    assert connection.get_heartbeat_interval() == 0
    connection.heartbeat_check()
    assert transport.driver_version() == psycopg.__version__
    assert transport.qos_semantics_matches_spec(connection.connection)
    assert not {"client", "subclient"} & set(vars(connection.default_channel))
    assert connection.transport.recoverable_connection_errors == connection.connection_errors


# -- one pool for all, and nothing left


def test_all_connections_of_a_process_share_two_to_the_server(
    connect: Connect, inbox: Any, queue: str, sessions: Callable[[], int], drain_all: Any
) -> None:
    publishers = [connect() for _ in range(5)]
    for connection in publishers:
        connection.Producer().publish("x", routing_key=queue, serializer="json")
    assert sessions() == 1
    consumers = [connect() for _ in range(5)]
    boxes = [inbox(connection, queue, "other") for connection in consumers]
    drain_all(consumers[0])
    wait_until(lambda: sessions() == 2)
    for connection in consumers[1:]:
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.05)
    assert sum(len(box.messages) for box in boxes) == 5
    assert sessions() == 2


def test_after_closing_no_connection_thread_or_file_descriptor_is_left(
    connect: Connect,
    inbox: Any,
    queue: str,
    sessions: Callable[[], int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from kombu_pgnotify import housekeeper, keeper

    # The threads end by themselves, but take their time: ten seconds and twelve.
    monkeypatch.setattr(keeper, "IDLE_ROUNDS", 0)
    monkeypatch.setattr(housekeeper, "IDLE_ROUNDS", 0)
    monkeypatch.setattr(housekeeper, "ROUND", 0.2)
    process = psutil.Process()

    def ours() -> list[str]:
        return [t.name for t in threading.enumerate() if t.name.startswith("pgnotify-")]

    def open_and_close() -> None:
        connections = [connect() for _ in range(3)]
        for connection in connections:
            got = inbox(connection.channel(), queue)
            connection.Producer().publish("x", routing_key=queue, serializer="json")
            connection.drain_events(timeout=10)
            assert got.messages
        assert ours()
        for connection in connections:
            connection.close()
        wait_until(lambda: sessions() == 0)
        wait_until(lambda: not ours())

    open_and_close()
    before = process.num_fds()
    for _ in range(3):
        open_and_close()
    assert process.num_fds() <= before


def test_closing_twice_and_after_a_collect_is_no_error(
    connect: Connect, sessions: Callable[[], int]
) -> None:
    first, second = connect(), connect()
    first.collect()
    first.close()
    first.close()
    second.close()
    second.collect()
    second.close()
    wait_until(lambda: sessions() == 0)


def test_a_closed_connection_can_be_used_again(connect: Connect, queue: str) -> None:
    connection = connect()
    connection.close()
    connection.connect()
    connection.Producer().publish("again", routing_key=queue, serializer="json")
    assert connection.default_channel.basic_get(queue, no_ack=True).payload == "again"


def test_clones_and_pickles_mean_the_same_broker(
    connect: Connect, queue: str, sessions: Callable[[], int]
) -> None:
    connection = connect(visibility_timeout=33)
    copies = [connection.clone(), pickle.loads(pickle.dumps(connection))]
    for copy in copies:
        assert copy.as_uri(include_password=True) == connection.as_uri(include_password=True)
        copy.Producer().publish("x", routing_key=queue, serializer="json")
        assert copy.transport.broker is connection.transport.broker
    assert sessions() == 1
    for copy in copies:
        copy.close()


def test_kombus_pools(broker_url: str, queue: str, wait_rows: Any, connect: Connect) -> None:
    connect()
    connection = Connection(broker_url)
    group = pools.producers[connection]
    try:
        with ThreadPoolExecutor(8) as threads:

            def publish(n: int) -> None:
                with group.acquire(block=True) as producer:
                    producer.publish(n, routing_key=queue, serializer="json")

            list(threads.map(publish, range(40)))
        wait_rows(40, 0)
    finally:
        pools.reset()
        connection.close()


# -- collect in the same process


def test_collect_keeps_what_is_worked_on_and_releases_what_was_dropped(
    connect: Connect,
    inbox: Any,
    send: Send,
    queue: str,
    drain_all: Any,
    rows: Rows,
    wait_rows: Any,
) -> None:
    send(*range(4))
    connection = connect()
    got = inbox(connection, queue)
    drain_all(connection)
    working = got.messages[2]
    connection.collect(1)
    assert rows() == (4, 4, 0)
    got.messages.clear()
    wait_rows(4, 1)
    working.ack()
    wait_rows(3, 0)


def test_a_long_job_keeps_its_lease_after_its_connection_was_collected(
    connect: Connect, inbox: Any, send: Send, queue: str, sql: Sql
) -> None:
    send("job")
    connection = connect(visibility_timeout=0.6)
    got = inbox(connection, queue)
    connection.drain_events(timeout=10)
    connection.collect(1)
    lease = "SELECT lease_expiration FROM pgnotify.tasks"
    for _ in range(3):
        before = sql(lease)
        wait_until(lambda: sql(lease) > before, 10, "the lease is not renewed")  # noqa: B023
    got.messages[0].ack()
    assert sql(lease) == []


# -- forks

FORK = """
    import gc, json, os, sys
    import psycopg, kombu_pgnotify
    from kombu_pgnotify import housekeeper
    housekeeper.ROUND = 3600  # once at the start, and not meanwhile
    from kombu import Connection, Consumer, Queue
    from kombu_pgnotify.session import Session

    url, how = sys.argv[1:]
    connection = Connection(url, transport_options={"visibility_timeout": 3})
    connection.connect()
    for n in range(4):
        connection.Producer().publish(n, routing_key="q", serializer="json")
    got = []
    channel = connection.channel()
    consumer = Consumer(
        channel, [Queue("q")], accept=["json"], prefetch_count=2, on_message=got.append
    )
    consumer.consume()
    while len(got) < 2:
        connection.drain_events(timeout=20)

    def look(sql):
        with psycopg.connect(url.replace("pgnotify", "postgresql", 1)) as other:
            return other.execute(sql).fetchall()

    SESSIONS = (
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'kombu_pgnotify%' ORDER BY pid"
    )
    LEASES = "SELECT task_id FROM pgnotify.tasks WHERE lease_worker_id IS NOT NULL"
    while True:
        # A thread opens the one that LISTENs; a third may need another moment.
        before = look(SESSIONS), look(LEASES)
        if len(before[0]) == 2:
            break
    assert len(before[1]) == 2, before
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            calls = []
            run, send, abort = Session.run, Session.send, Session.abort
            Session.run = lambda self, *c, **k: (calls.append(c), run(self, *c, **k))[1]
            Session.send = lambda self, *c: (calls.append(c), send(self, *c))[1]
            Session.abort = lambda self: (calls.append("abort"), abort(self))[1]
            if how == "collect":
                connection.collect(0.1)
                connection.close()
            elif how == "close":
                channel.close()
                connection.close()
            elif how == "settle":
                got[0].ack()
                got[1].requeue()
            elif how == "drop":
                del connection, channel, consumer
                got.clear()
                gc.collect()
            if how in ("collect", "close", "settle", "drop"):
                assert not calls, calls
            if how == "publish":
                connection.Producer().publish("child", routing_key="q2", serializer="json")
            if how == "own":
                with Connection(url) as mine:
                    mine.Producer().publish("child", routing_key="q2", serializer="json")
            if how == "exit":
                sys.exit(0)
            code = 0
        except SystemExit:
            # Interpreter exit, with everything that is registered for it.
            raise
        except BaseException:
            import traceback
            traceback.print_exc()
        finally:
            if how != "exit":
                os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0
    while (look(SESSIONS), look(LEASES)) != before:
        pass  # the same as soon as a third has gone again; never, if the child has closed one
    # The parent goes on with what it had.
    for message in got:
        message.ack()
    got.clear()
    while len(got) < 2:
        connection.drain_events(timeout=20)
    assert [message.payload for message in got] == [2, 3]
    for message in got:
        message.ack()
    assert connection.default_channel.queue_declare("q", passive=True).message_count == 0
    print(connection.default_channel.queue_declare("q2").message_count)
    connection.close()
"""


@pytest.mark.parametrize("how", ["collect", "close", "settle", "drop", "exit", "publish", "own"])
def test_a_forked_child_touches_nothing_of_its_parents(
    database: str, run_script: RunScript, how: str
) -> None:
    published = run_script(FORK, how)
    assert int(published) == (1 if how in ("publish", "own") else 0)


# -- errors and retries


def test_a_dead_port_is_a_connection_error_after_the_retries(connect: Connect) -> None:
    connection = connect(NOWHERE, lazy=True)
    attempts: list[Exception] = []
    with pytest.raises(OperationalError):
        connection.ensure_connection(
            errback=lambda exc, interval: attempts.append(exc),
            max_retries=2,
            interval_start=0,
            interval_step=0,
        )
    assert len(attempts) == 2
    assert all(isinstance(exc, connection.connection_errors) for exc in attempts)
    with pytest.raises(connection.connection_errors):
        connection.connect()


@pytest.mark.parametrize("options", [{"visibility_timout": 1}, {"max_batch": "many"}])
def test_a_wrong_option_is_told_at_once_and_not_retried(
    connect: Connect, options: dict[str, Any]
) -> None:
    connection = connect(lazy=True, **options)
    attempts: list[Exception] = []
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        connection.ensure_connection(errback=lambda exc, interval: attempts.append(exc))
    assert attempts == []
    assert not issubclass(ConfigurationError, Transport.connection_errors)
    assert not issubclass(ConfigurationError, Transport.channel_errors)


def test_failover_to_the_next_url(
    connect: Connect, server: Server, database_name: str, queue: str
) -> None:
    live = server.url(database_name, scheme="pgnotify", address=server.address).partition("?")[0]
    connection = connect(f"{NOWHERE};{live}", lazy=True)
    connection.ensure_connection(max_retries=3, interval_start=0, interval_step=0)
    # Now kombu has taken the URL apart.
    assert "://" not in connection.hostname
    assert database_name in connection.as_uri()
    connection.Producer().publish("x", routing_key=queue, serializer="json")
    assert connection.default_channel.basic_get(queue).payload == "x"


def test_publishing_with_retry_survives_an_outage_and_publishes_once(
    proxied: Connect, proxy: Any, queue: str, rows: Rows
) -> None:
    connection = proxied()
    errors: list[Exception] = []

    def errback(exc: Exception, interval: float) -> None:
        errors.append(exc)
        proxy.accept()

    proxy.refuse()
    proxy.cut()
    policy = {"errback": errback, "max_retries": 5, **EAGER}
    connection.Producer().publish(
        "x", routing_key=queue, serializer="json", retry=True, retry_policy=policy
    )
    assert len(errors) == 1
    assert rows() == (1, 0, 0)


def test_publishing_over_a_connection_cut_while_it_was_idle_needs_no_retry(
    proxied: Connect, proxy: Any, queue: str, rows: Rows
) -> None:
    connection = proxied()
    producer = connection.Producer()
    for n in range(3):
        producer.publish(n, routing_key=queue, serializer="json")
        proxy.cut()
    producer.publish(3, routing_key=queue, serializer="json")
    assert rows() == (4, 0, 0)


def test_autoretry(proxied: Connect, proxy: Any, queue: str) -> None:
    connection = proxied()
    connection.Producer().publish("x", routing_key=queue, serializer="json")
    errors: list[Exception] = []

    def errback(exc: Exception, interval: float) -> None:
        errors.append(exc)
        proxy.accept()

    def get(*, channel: Any) -> Any:
        return channel.basic_get(queue).payload

    retrying = connection.autoretry(get, errback=errback, max_retries=5, **EAGER)
    proxy.refuse()
    proxy.cut()
    found, channel = retrying()
    assert found == "x"
    assert errors
    assert channel.connection is connection.transport


def test_a_frozen_server_is_a_connection_error_and_no_hang(
    proxied: Connect,
    proxy: Any,
    inbox: Any,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(database_module, "GRACE", 0.2)
    connection = proxied(
        statement_timeout=0.5, polling_interval=0.1, connect_timeout=2, outage_tolerance=0.5
    )
    inbox(connection, queue)
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.2)
    proxy.freeze()
    with pytest.raises(DatabaseUnavailable):
        while True:
            try:
                connection.drain_events(timeout=0.1)
            except TimeoutError:
                continue
    with pytest.raises(connection.connection_errors):
        connection.Producer().publish("x", routing_key=queue)
    # Closing must not hang either, and must not raise.
    connection.collect(1)
    connection.close()
    proxy.thaw()


def test_a_connection_closed_during_an_outage_is_closed_without_an_error(
    proxied: Connect,
    proxy: Any,
    inbox: Any,
    send: Send,
    queue: str,
    wait_rows: Any,
) -> None:
    send(1, 2)
    connection = proxied()
    inbox(connection, queue)
    connection.drain_events(timeout=10)
    proxy.refuse()
    proxy.cut()
    connection.close()
    proxy.accept()
    # The keeper's thread tells the server as soon as it can be reached.
    wait_rows(2, 0)


@pytest.mark.parametrize(
    ("verb", "left"), [("ack", (0, 0, 0)), ("reject", (0, 0, 1)), ("requeue", (1, 0, 0))]
)
def test_what_is_settled_during_an_outage_is_told_afterwards_and_once(
    proxied: Connect,
    proxy: Any,
    inbox: Any,
    send: Send,
    queue: str,
    rows: Rows,
    wait_rows: Any,
    caplog: pytest.LogCaptureFixture,
    verb: str,
    left: tuple[int, int, int],
) -> None:
    caplog.set_level(logging.WARNING, "kombu_pgnotify")
    send("x")
    connection = proxied()
    got = inbox(connection, queue)
    connection.drain_events(timeout=10)
    proxy.refuse()
    proxy.cut()
    getattr(got.messages[0], verb)()
    assert rows() == (1, 1, 0)
    proxy.accept()
    wait_rows(*left)
    keeper = connection.transport.broker.keeper
    wait_until(lambda: not keeper.pending)
    assert not keeper.held
    # Told twice, the second time would have found it gone.
    assert "lease.lost" not in caplog.text


# -- threads


def test_acks_of_many_threads_at_once_all_arrive(
    connect: Connect,
    inbox: Any,
    send: Send,
    queue: str,
    drain: Any,
    wait_rows: Any,
    sessions: Callable[[], int],
    statements: list[tuple[str, ...]],
) -> None:
    count, threads = 400, 16
    send(*range(count))
    connection = connect()
    got = inbox(connection, queue)
    drain(connection, lambda: len(got.messages) == count)
    statements.clear()
    start = threading.Barrier(threads)

    def settle(messages: list[Message]) -> None:
        start.wait(20)
        for message in messages:
            message.ack()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(settle, [got.messages[n::threads] for n in range(threads)]))
    wait_rows(0, 0)
    # Those that come together share round trips, and connections.
    assert len([calls for calls in statements if "acknowledge" in calls]) < count
    assert sessions() <= 3


def test_many_threads_publish_over_one_connection_one_after_the_other(
    connection: Connection, queue: str, rows: Rows
) -> None:
    lock = threading.Lock()
    producer = connection.Producer()

    def publish(n: int) -> None:
        with lock:
            producer.publish(n, routing_key=queue, serializer="json")

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(publish, range(80)))
    assert rows() == (80, 0, 0)


# -- the end of a process

EXIT = """
    import atexit, sys, threading

    def survivors():
        print([t.name for t in threading.enumerate() if t.name.startswith("pgnotify-listener")])

    # Registered first, so it runs last.
    atexit.register(survivors)
    import kombu_pgnotify
    from kombu import Connection, Consumer, Queue

    url, how = sys.argv[1:]
    connection = Connection(url)
    connection.connect()
    for n in range(5):
        connection.Producer().publish(n, routing_key="q", serializer="json")
    got = []
    consumer = Consumer(connection, [Queue("q")], accept=["json"], on_message=got.append)
    consumer.consume()
    while len(got) < 3:
        connection.drain_events(timeout=20)
    if how == "error":
        sys.excepthook = lambda *args: None
    if how != "end":
        sys.exit(0)
"""


@pytest.mark.parametrize("how", ["end", "sys.exit"])
def test_a_process_that_ends_without_closing_releases_its_leases_at_once(
    database: str, run_script: RunScript, rows: Rows, sessions: Callable[[], int], how: str
) -> None:
    output = run_script(EXIT, how)
    assert rows() == (5, 0, 0)
    wait_until(lambda: sessions() == 0)
    # It was told to end, and did.
    assert output.strip() == "[]"


STORM = """
    import json, signal, sys
    import kombu_pgnotify
    from kombu import Connection, Consumer, Queue

    url, count = sys.argv[1], int(sys.argv[2])
    connection = Connection(url)
    connection.connect()
    for n in range(count):
        connection.Producer().publish(n, routing_key="q", serializer="json")
    got, cancelled = [], [0]

    def work(message):
        got.append(message.payload)
        message.ack()

    consumers = [
        Consumer(connection.channel(), [Queue("q")], accept=["json"], on_message=work,
                 prefetch_count=20)
        for _ in range(2)
    ]

    def handler(number, frame):
        cancelled[0] += 1
        for consumer in consumers:
            consumer.cancel()

    signal.signal(signal.SIGALRM, handler)
    turn = 0
    while len(set(got)) < count:
        for consumer in consumers:
            consumer.consume()
        struck = cancelled[0]
        while struck == cancelled[0]:
            turn += 1
            # One signal, wherever it strikes: in the claim, the wait, the delivery, the ack.
            signal.setitimer(signal.ITIMER_REAL, 0.0002 + turn % 23 * 0.00013)
            try:
                connection.drain_events(timeout=0.01)
            except TimeoutError:
                pass
            signal.setitimer(signal.ITIMER_REAL, 0)
    connection.close()
    print(json.dumps([len(got), len(set(got)), cancelled[0]]))
"""


def test_a_storm_of_signals_that_cancel_neither_hangs_nor_loses_anything(
    database: str, run_script: RunScript, wait_rows: Any
) -> None:
    count = 600
    received, different, cancelled = json.loads(run_script(STORM, str(count), timeout=60))
    assert different == count
    assert received == count
    assert cancelled > 10
    wait_rows(0, 0)

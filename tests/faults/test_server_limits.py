"""A server that is up and refuses all the same: connections, locks, disk, notify queue."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from fix_loops import (
    OURS,
    PATIENCE,
    Consume,
    Publish,
    Sql,
    counts,
    elapsed,
    terminate,
    wait_counts,
)
from fix_postgres import Server
from helpers import wait_until
from kombu import Connection, Consumer, Exchange, Queue

from kombu_pgnotify.embedded import EmbeddedPostgresError, binaries_version, find_binaries
from kombu_pgnotify.errors import DatabaseUnavailable, StatementFailed

LEASE = 3.0  # seconds, where a lease's end matters
FEW_CONNECTIONS = {"max_connections": "12", "superuser_reserved_connections": "0"}


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kombu_pgnotify")


# -- connections


class Crowd:
    """Takes all connections that a server has left."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._connections: list[psycopg.Connection[Any]] = []

    def come(self) -> None:
        with pytest.raises(psycopg.OperationalError, match="too many clients"):
            while True:
                self._connections.append(psycopg.connect(self._server.url()))

    def go(self) -> None:
        for connection in self._connections:
            connection.close()
        self._connections.clear()


@pytest.fixture
def crowd(own_server: Server) -> Iterator[Crowd]:
    made = Crowd(own_server)
    yield made
    made.go()


@pytest.mark.parametrize("own_server", [{"settings": FEW_CONNECTIONS}], indirect=True)
def test_a_server_without_a_free_connection_says_so_and_is_waited_for(
    own_server: Server, crowd: Crowd, consume: Consume, publisher: Publish, sql: Sql
) -> None:
    url = own_server.url(scheme="pgnotify")
    running = consume(url, "running", ack=False, visibility_timeout=20)
    publisher(url, "running").publish("a long task")
    running.wait_bodies("a long task")
    loop, publisher_ = consume(url), publisher(url)
    while sql(f"SELECT 1 FROM pg_stat_activity WHERE {OURS}"):
        terminate(sql)
        crowd.come()
    with pytest.raises(DatabaseUnavailable, match="too many clients"):
        publisher(url, application_name="kombu_pgnotify late").connection.connect()
    running.messages[0].ack()
    timer = threading.Timer(1, crowd.go)
    timer.start()
    publisher_.publish("held up")
    timer.join()
    loop.wait_bodies("held up")
    wait_counts(sql, 0, 0)
    assert "too many clients" in " ".join(map(str, publisher_.errors))
    assert running.bodies == ["a long task"]


# -- locks


@pytest.mark.parametrize("limit", ["statement timeout", "lock timeout"])
def test_a_table_locked_by_somebody_holds_up_and_loses_nothing(
    consume: Consume,
    publisher: Publish,
    broker_url: str,
    database: str,
    sql: Sql,
    limit: str,
) -> None:
    options: dict[str, Any] = {"visibility_timeout": 20}
    if limit == "lock timeout":
        broker_url += "?options=-c%20lock_timeout%3D300"
    else:
        options["statement_timeout"] = 0.3
    running = consume(broker_url, "running", ack=False, **options)
    publisher(broker_url, "running", **options).publish("a long task")
    running.wait_bodies("a long task")
    loop = consume(broker_url, **{**options, "polling_interval": 0.1})
    publisher_ = publisher(broker_url, **options)
    publisher_.publish("before")
    loop.wait_bodies("before")
    publishing = threading.Thread(target=publisher_.publish, args=("held up",))
    with psycopg.connect(database) as other:
        other.execute("LOCK TABLE pgnotify.tasks IN ACCESS EXCLUSIVE MODE")
        with pytest.raises(DatabaseUnavailable, match=limit):
            publisher_.publish("refused", retry=False)
        # An acknowledgement does not wait for longer either; the keeper sees to it.
        assert elapsed(running.messages[0].ack) < 10
        publishing.start()
        wait_until(lambda: len(publisher_.errors) >= 3, PATIENCE)
        other.rollback()
    publishing.join(PATIENCE)
    loop.wait_bodies("before", "held up")
    wait_counts(sql, 0, 0)
    assert running.bodies == ["a long task"]


def test_a_lock_that_lasts_is_told_once_in_a_while_and_then_to_the_consumer(
    consume: Consume,
    publisher: Publish,
    broker_url: str,
    database: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server answers, only not what consumers ask for: that is an outage too."""
    options = {"polling_interval": 0.05, "statement_timeout": 0.1, "outage_tolerance": 1.5}
    loop = consume(broker_url, **options)
    with psycopg.connect(database) as other:
        other.execute("LOCK TABLE pgnotify.tasks IN ACCESS EXCLUSIVE MODE")
        loop.wait(lambda: loop.losses, "the consumer was never told")
        told = [record for record in caplog.records if record.msg.startswith("consumption.")]
        assert len(told) <= 3
        assert "statement timeout" in str(loop.losses[0])
        other.rollback()
    publisher(broker_url).publish("afterwards")
    loop.wait_bodies("afterwards")


def test_a_row_locked_by_somebody_costs_no_other_lease(
    consume: Consume, publisher: Publish, broker_url: str, database: str, sql: Sql
) -> None:
    options = {"visibility_timeout": LEASE, "statement_timeout": 2 * LEASE}
    loop = consume(broker_url, ack=False, **options)
    publisher(broker_url).publish(*range(5))
    loop.wait_bodies(*range(5))
    renewed = "SELECT min(lease_expiration) FROM pgnotify.tasks WHERE task_id <> 3"
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM pgnotify.tasks WHERE task_id = 3 FOR UPDATE")
        first = sql(renewed)[0][0]
        # Twice, so that it was not a renewal from before the lock.
        for _ in range(2):
            before = sql(renewed)
            wait_until(lambda: sql(renewed) > before, PATIENCE, "not renewed")  # noqa: B023
            assert sql("SELECT clock_timestamp() < %s", before[0][0]) == [(True,)], first
    for message in loop.messages:
        message.ack()
    wait_counts(sql, 0, 0)
    assert loop.bodies == list(range(5))


def test_a_deadlock_with_somebody_delays_a_settlement_and_no_more(
    consume: Consume,
    publisher: Publish,
    broker_url: str,
    database: str,
    sql: Sql,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = f"{broker_url}?options=-c%20deadlock_timeout%3D400"
    loop = consume(url, ack=False, application_name="kombu_pgnotify victim")
    publisher(broker_url).publish("first", "second")
    loop.wait_bodies("first", "second")
    requeuing = threading.Thread(target=loop.messages[0].channel.basic_recover, args=(True,))
    waiting = f"SELECT 1 FROM pg_stat_activity WHERE {OURS} AND wait_event_type = 'Lock'"
    lock = "SELECT FROM pgnotify.tasks WHERE task_id = %s FOR UPDATE"
    with psycopg.connect(database, options="-c deadlock_timeout=60s") as other:
        other.execute(lock, [2])
        requeuing.start()
        wait_until(lambda: sql(waiting), PATIENCE)
        # It has the first and waits for the second; with this there is a circle.
        other.execute(lock, [1])
        requeuing.join(PATIENCE)
        assert counts(sql) == (2, 2)
        assert "deadlock detected" in caplog.text
    loop.wait(lambda: len(loop.bodies) >= 4, "they were not requeued")
    for message in loop.messages[2:]:
        message.ack()
    wait_counts(sql, 0, 0)
    assert loop.bodies == ["first", "second"] * 2
    assert loop.losses == []


# -- the disk


class Disk:
    """What the messages are written to, and how it gets full."""

    def __init__(self, server: Server, sql: Sql, kind: str) -> None:
        self._server, self._sql, self._kind = server, sql, kind
        self._folder = server.embedded.folder / "small"

    def prepare(self) -> None:
        if self._kind != "file system":
            return
        self._folder.mkdir()
        uid = self._server.embedded.folder.stat().st_uid
        self._mount(f"size=2m,uid={uid},mode=700", "-t", "tmpfs", "none")
        self._sql(f"CREATE TABLESPACE small LOCATION '{self._folder}'")
        self._sql("ALTER TABLE pgnotify.tasks SET TABLESPACE small")

    def fill(self, publish: Callable[[Any], None]) -> str:
        """Make it full; return the complaint of who wrote at last."""
        if self._kind == "trigger":
            self._sql(
                "CREATE FUNCTION full_disk() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
                " RAISE EXCEPTION 'No space left on device' USING ERRCODE = '53100'; END $$"
            )
            self._sql(
                "CREATE TRIGGER full_disk BEFORE INSERT ON pgnotify.tasks"
                " EXECUTE FUNCTION full_disk()"
            )
        with pytest.raises(DatabaseUnavailable, match="No space left") as refused:
            for _ in range(500):
                # Not to be compressed.
                publish(os.urandom(25_000).hex())
        return str(refused.value)

    def free(self) -> None:
        if self._kind == "trigger":
            self._sql("DROP TRIGGER full_disk ON pgnotify.tasks")
        else:
            self._mount("remount,size=64m")

    def remove(self) -> None:
        if self._folder.exists():
            # Lazily, since the server still has files open.
            subprocess.run(["umount", "-l", str(self._folder)], check=False, capture_output=True)

    def _mount(self, options: str, *more: str) -> None:
        command = ["mount", "-o", options, *more, str(self._folder)]
        if subprocess.run(command, check=False, capture_output=True).returncode:
            pytest.skip("may not mount a small file system")


@pytest.fixture(params=["file system", "trigger"])
def disk(request: pytest.FixtureRequest, own_server: Server, sql: Sql) -> Iterator[Disk]:
    """A disk that is really full, where that can be had, and what a full one says."""
    made = Disk(own_server, sql, request.param)
    yield made
    made.remove()


def test_a_full_disk_stops_publishing_and_not_consuming(
    own_server: Server, disk: Disk, consume: Consume, publisher: Publish, sql: Sql
) -> None:
    url = own_server.url(scheme="pgnotify")
    publisher_ = publisher(url)
    publisher_.publish(*range(30))
    disk.prepare()
    big = publisher(url, "big")
    disk.fill(lambda body: big.publish(body, retry=False))
    loop = consume(url, polling_interval=1)
    loop.wait_bodies(*range(30))
    count = "SELECT count(*) FROM pgnotify.tasks WHERE task_name = 'queue'"
    wait_until(lambda: sql(count) == [(0,)], PATIENCE, "not all were acknowledged")
    timer = threading.Timer(1, disk.free)
    timer.start()
    publisher(url, "late").publish(os.urandom(25_000).hex())
    timer.join()
    publisher_.publish("afterwards")
    loop.wait(lambda: "afterwards" in loop.bodies)
    assert sql("SELECT count(*) FROM pgnotify.tasks WHERE task_name = 'late'") == [(1,)]


# -- the queue of notifications


def _queue_can_be_small() -> bool:
    with contextlib.suppress(EmbeddedPostgresError):
        return int(binaries_version(find_binaries()).partition(".")[0] or 0) >= 17
    return False


small_notify_queue = pytest.mark.skipif(
    not _queue_can_be_small(), reason="max_notify_queue_pages came with PostgreSQL 17"
)
small_queue = pytest.mark.parametrize(
    "own_server", [{"settings": {"max_notify_queue_pages": "64"}}], indirect=True
)


class NotifyQueue:
    """The server's queue of notifications, kept full by a session that does not read them."""

    def __init__(self, server: Server) -> None:
        self._sleeper = psycopg.connect(server.url())
        self._writer = psycopg.connect(server.url(), autocommit=True)

    def fill(self) -> None:
        self._sleeper.execute("LISTEN something")
        self._sleeper.commit()
        self._sleeper.execute("SELECT 1")
        with pytest.raises(psycopg.errors.ProgramLimitExceeded, match="NOTIFY queue"):
            while True:
                self._writer.execute("SELECT pg_notify('anything', repeat('x', 7900))")

    def drain(self) -> None:
        self._sleeper.rollback()
        # Not that it has become free by that: see below.

    def is_full(self) -> bool:
        with contextlib.suppress(psycopg.errors.ProgramLimitExceeded):
            self._writer.execute("SELECT pg_notify('anything', '')")
            return False
        return True

    def close(self) -> None:
        self._sleeper.close()
        self._writer.close()


@pytest.fixture
def notify_queue(own_server: Server) -> Iterator[NotifyQueue]:
    made = NotifyQueue(own_server)
    yield made
    made.close()


@small_notify_queue
@small_queue
def test_what_cannot_be_announced_is_published_all_the_same(
    own_server: Server,
    notify_queue: NotifyQueue,
    consume: Consume,
    publisher: Publish,
    sql: Sql,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url = own_server.url(scheme="pgnotify")
    loop, publisher_ = consume(url, polling_interval=0.5, health_check_interval=0.3), publisher(url)
    publisher_.publish("before")
    loop.wait_bodies("before")
    notify_queue.fill()
    publisher_.publish(*range(3))
    producer = publisher_.connection.Producer()
    with producer.batch():
        for n in range(3, 6):
            producer.publish(n, routing_key="queue", serializer="json")
    loop.wait(lambda: set(range(6)) <= set(loop.bodies), "the poll did not find it")
    wait_counts(sql, 0, 0)
    assert "announce.failed" in caplog.text
    assert publisher_.errors == []
    wait_until(lambda: "notify_queue usage" in caplog.text, PATIENCE, "nobody was told why")
    notify_queue.drain()
    # PostgreSQL itself would keep it full until somebody asks how full it is.
    wait_until(lambda: not notify_queue.is_full(), PATIENCE, "the notify queue stays full")
    publisher_.publish("afterwards")
    loop.wait(lambda: "afterwards" in loop.bodies)
    assert Counter(loop.bodies) == Counter(["before", *range(6), "afterwards"])


@small_notify_queue
@small_queue
def test_what_only_a_notification_can_carry_is_refused_and_accepted_afterwards(
    own_server: Server, notify_queue: NotifyQueue, brokers_closed: None
) -> None:
    """A message for a live queue is in no row."""
    url = own_server.url(scheme="pgnotify")
    exchange = Exchange("news", type="fanout")
    own = Queue("own", exchange, exclusive=True, auto_delete=True, durable=False)
    got: list[Any] = []
    options = {"health_check_interval": 0.3}
    with Connection(url, transport_options=options) as connection, Connection(url) as other:
        consumer = Consumer(
            connection.channel(), [own], no_ack=True, accept=["json"], on_message=got.append
        )
        consumer.consume()
        live = "SELECT 1 FROM pgnotify.queues WHERE queue_name = 'own' AND live"

        def drain(until: Callable[[], Any]) -> None:
            def look() -> Any:
                with contextlib.suppress(TimeoutError):
                    connection.drain_events(timeout=0.05)
                return until()

            wait_until(look, PATIENCE)

        drain(lambda: own_server.run_sql(live))
        producer = other.Producer(exchange=exchange, auto_declare=False)
        notify_queue.fill()
        with pytest.raises((DatabaseUnavailable, StatementFailed), match="NOTIFY queue"):
            producer.publish("refused", serializer="json")
        notify_queue.drain()
        drain(lambda: not notify_queue.is_full())
        producer.publish("accepted", serializer="json")
        drain(lambda: got)
    assert [message.payload for message in got] == ["accepted"]

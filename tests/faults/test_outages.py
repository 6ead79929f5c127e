"""Each way to lose the server, alone: what is published meanwhile comes, and comes once."""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fix_cluster import Cluster
from fix_loops import (
    LISTENER,
    PATIENCE,
    Consume,
    Loop,
    Publish,
    Publisher,
    Sql,
    counts,
    elapsed,
    terminate,
    wait_counts,
)
from fix_postgres import Server
from fix_proxy import Proxy
from fix_worker import CeleryWorker
from helpers import wait_until

from kombu_pgnotify import database as database_module

#: Options that make a frozen network be noticed soon (with GRACE as in `frozen`).
IMPATIENT = {"statement_timeout": 0.5, "connect_timeout": 2, "health_check_interval": 0.4}
LEASE = 3.0  # seconds, where a lease's end matters


@pytest.fixture(autouse=True)
def warnings(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "kombu_pgnotify")


# -- connections that the server ends


def test_after_its_backend_was_killed_the_listener_listens_again(
    consume: Consume, publisher: Publish, broker_url: str, sql: Sql
) -> None:
    loop = consume(broker_url)
    publish = publisher(broker_url).publish
    for n in range(3):
        killed = terminate(sql, LISTENER)
        publish(f"deaf-{n}")
        # Found although nobody heard of it, as soon as LISTEN is in force again.
        loop.wait(lambda: f"deaf-{n}" in loop.bodies)  # noqa: B023
        wait_until(lambda: loop.broker.listener._heard)
        assert len(killed) == 1
        # The poll is an hour away: these come by their announcements.
        for m in range(3):
            publish(f"heard-{n}-{m}")
            loop.wait(lambda: f"heard-{n}-{m}" in loop.bodies)  # noqa: B023
    assert set(Counter(loop.bodies).values()) == {1}
    wait_counts(sql, 0, 0)
    assert loop.losses == []


def test_a_listener_killed_again_and_again_under_traffic_misses_nothing(
    consume: Consume, publisher: Publish, broker_url: str, sql: Sql
) -> None:
    loop = consume(broker_url)
    publish = publisher(broker_url).publish
    for n in range(150):
        if n % 15 == 0:
            terminate(sql, LISTENER)
        publish(n)
    loop.wait_bodies(*range(150))
    wait_counts(sql, 0, 0)


def test_all_connections_killed_again_and_again_lose_and_repeat_nothing(
    consume: Consume, publisher: Publish, broker_url: str, sql: Sql
) -> None:
    running = consume(broker_url, "running", ack=False, visibility_timeout=LEASE)
    publisher(broker_url, "running").publish("a long task")
    running.wait_bodies("a long task")
    loop = consume(broker_url)
    publisher_ = publisher(broker_url)
    for n in range(60):
        if n % 10 == 0:
            terminate(sql)
        publisher_.publish(n)
    _wait_all_once(loop, publisher_, range(60))
    # The task runs on under its lease, and its acknowledgement counts.
    wait_counts(sql, 1, 1)
    running.messages[0].ack()
    wait_counts(sql, 0, 0)
    assert running.bodies == ["a long task"]


def _wait_all_once(loop: Loop, publisher: Publisher, bodies: Any) -> None:
    """Wait until all bodies have come, each as often as it was written."""
    loop.wait(lambda: set(bodies) <= set(loop.bodies), "not all came")
    again = {body for body, count in Counter(loop.bodies).items() if count > 1}
    assert again <= publisher.doubtful, f"{again} came twice, {publisher.doubtful} may"


# -- a server that restarts


def _restart_often(server: Server, mode: str) -> None:
    """Five times within some three seconds."""
    for _ in range(5):
        server.restart(mode)
        time.sleep(0.45)


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_server_restarted_five_times_loses_and_repeats_nothing(
    own_server: Server, consume: Consume, publisher: Publish, sql: Sql, mode: str
) -> None:
    url = own_server.url(scheme="pgnotify")
    running = consume(url, "running", ack=False)
    publisher(url, "running").publish("a long task")
    running.wait_bodies("a long task")
    loop, publisher_ = consume(url), publisher(url)
    restarting = threading.Thread(target=_restart_often, args=(own_server, mode))
    restarting.start()
    published = 0
    while restarting.is_alive() or published < 50:
        publisher_.publish(published)
        published += 1
    restarting.join()
    _wait_all_once(loop, publisher_, range(published))
    wait_counts(sql, 1, 1)
    running.messages[0].ack()
    wait_counts(sql, 0, 0)
    assert running.bodies == ["a long task"]
    # Announcements are heard again.
    publisher_.publish("afterwards")
    loop.wait(lambda: "afterwards" in loop.bodies)


@pytest.mark.parametrize("own_server", [{"settings": {"wal_writer_delay": "10s"}}], indirect=True)
@pytest.mark.parametrize("when", ["while it is away", "afterwards"])
def test_a_message_whose_claim_a_crashed_server_has_forgotten_comes_once(
    own_server: Server, consume: Consume, publisher: Publish, sql: Sql, when: str
) -> None:
    """A claim does not wait for the disk, so the message is free again after the crash."""
    url = own_server.url(scheme="pgnotify")
    publisher_ = publisher(url)
    loop = consume(url, ack=False)
    publisher_.publish("task")
    loop.wait_bodies("task")
    own_server.embedded._end_process("immediate")
    if when == "while it is away":
        loop.messages[0].ack()
    own_server.embedded._launch()
    publisher_.publish("afterwards")
    loop.wait(lambda: "afterwards" in loop.bodies)
    for message in list(loop.messages):
        if not message.acknowledged:
            message.ack()
    wait_counts(sql, 0, 0)
    assert loop.bodies == ["task", "afterwards"]


@pytest.fixture
def recorded_apart(
    own_server: Server,
    database: str,
    database_name: str,
    celery_worker: Callable[..., CeleryWorker],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Cluster]:
    """A broker on a server that may be restarted, whose tasks record on another one."""
    own_server.run_sql(f"CREATE DATABASE {database_name}")
    url = own_server.url(database_name, scheme="pgnotify")
    made = Cluster(database, url, celery_worker, monkeypatch)
    yield made
    made.close()


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_worker_outlives_a_server_restarted_five_times(
    recorded_apart: Cluster, own_server: Server, database_name: str, pool: str
) -> None:
    cluster, tasks = recorded_apart, recorded_apart.tasks
    worker = cluster.worker(pool)
    tasks.wait_for_gate.delay("running", "open")
    cluster.wait_happened("started", {"running"})
    labels = {f"task-{n}" for n in range(10)}
    for label in sorted(labels):
        tasks.record_late.delay(label)
    _restart_often(own_server, "fast")
    tasks.record_late.delay("afterwards")
    cluster.wait_happened("done", labels | {"afterwards"})
    cluster.open_gate("open")
    cluster.wait_happened("done", {"running"})
    left = lambda: own_server.run_sql("SELECT 1 FROM pgnotify.tasks", database_name)  # noqa: E731
    wait_until(lambda: not left(), PATIENCE, "not all were acknowledged")
    assert worker.returncode is None
    assert cluster.happened("done") == dict.fromkeys(labels | {"running", "afterwards"}, 1)


# -- a network that swallows packets


@pytest.fixture
def frozen(
    proxy: Proxy, monkeypatch: pytest.MonkeyPatch, brokers_closed: None
) -> Iterator[Callable[[], None]]:
    """A function that freezes the proxy, which thaws in the end."""
    monkeypatch.setattr(database_module, "GRACE", 0.3)
    yield proxy.freeze
    proxy.thaw()


def test_a_network_frozen_while_all_is_idle_is_noticed_and_nothing_missed(
    consume: Consume,
    publisher: Publish,
    frozen: Callable[[], None],
    proxy: Proxy,
    broker_url: str,
    database_name: str,
    sql: Sql,
    caplog: pytest.LogCaptureFixture,
) -> None:
    loop = consume(proxy.url(database_name, scheme="pgnotify"), **IMPATIENT)
    publish = publisher(broker_url).publish
    publish("before")
    loop.wait_bodies("before")
    frozen()
    publish("meanwhile")
    # health_check_interval and statement_timeout, both and the grace well below two seconds.
    wait_until(lambda: "listener.lost" in caplog.text, 10, "the listener never noticed")
    assert loop.bodies == ["before"]
    proxy.thaw()
    loop.wait_bodies("before", "meanwhile")
    wait_until(lambda: loop.broker.listener._heard, PATIENCE)
    publish("afterwards")
    loop.wait_bodies("before", "meanwhile", "afterwards")
    wait_counts(sql, 0, 0)


def test_publishing_into_a_frozen_network_fails_in_time_and_works_afterwards(
    consume: Consume,
    publisher: Publish,
    frozen: Callable[[], None],
    proxy: Proxy,
    database_name: str,
    sql: Sql,
) -> None:
    url = proxy.url(database_name, scheme="pgnotify")
    loop, publisher_ = consume(url, **IMPATIENT), publisher(url, **IMPATIENT)
    publisher_.publish("before")
    frozen()

    def publish() -> None:
        with pytest.raises(publisher_.connection.connection_errors, match=r"no answer|timeout"):
            publisher_.publish("lost", retry=False)

    # Patience is 0.8 s; the rest is for a slow machine.
    assert elapsed(publish) < 10
    timer = threading.Timer(1, proxy.thaw)
    timer.start()
    publisher_.publish("held up")
    timer.join()
    loop.wait(lambda: "held up" in loop.bodies)
    # Nobody knows whether what got no answer was written; what came was taken for done.
    wait_counts(sql, 0, 0)
    assert set(loop.bodies) <= {"before", "lost", "held up"}
    assert Counter(loop.bodies)["before"] == 1


@pytest.mark.parametrize("long", [False, True], ids=["shorter than a lease", "longer"])
def test_a_task_that_runs_while_the_network_is_frozen(
    consume: Consume,
    publisher: Publish,
    frozen: Callable[[], None],
    proxy: Proxy,
    broker_url: str,
    database_name: str,
    sql: Sql,
    caplog: pytest.LogCaptureFixture,
    long: bool,
) -> None:
    url = proxy.url(database_name, scheme="pgnotify")
    cut_off = consume(url, ack=False, visibility_timeout=LEASE, **IMPATIENT)
    publisher(broker_url).publish("task")
    cut_off.wait_bodies("task")
    renewed = "SELECT lease_expiration FROM pgnotify.tasks"
    before = sql(renewed)
    wait_until(lambda: sql(renewed) > before, PATIENCE, "the lease is not renewed")
    frozen()
    other = consume(broker_url, ack=False, visibility_timeout=LEASE)
    if long:
        other.wait_bodies("task")
    proxy.thaw()
    if long:
        # It is the other's now: our acknowledgement must not take it away.
        cut_off.messages[0].ack()
        wait_until(lambda: "lease.lost" in caplog.text, PATIENCE, "the loss was not told")
        wait_counts(sql, 1, 1)
        other.messages[0].ack()
    else:
        before = sql(renewed)
        wait_until(lambda: sql(renewed) > before, PATIENCE, "the lease is not renewed again")
        cut_off.messages[0].ack()
    wait_counts(sql, 0, 0)
    assert cut_off.bodies == ["task"]
    assert other.bodies == (["task"] if long else [])


def test_messages_whose_claim_got_no_answer_come_once(
    consume: Consume,
    publisher: Publish,
    frozen: Callable[[], None],
    proxy: Proxy,
    broker_url: str,
    database_name: str,
    sql: Sql,
) -> None:
    """The server carries out a claim, and its answer is swallowed."""
    url = proxy.url(database_name, scheme="pgnotify")
    loop = consume(url, visibility_timeout=LEASE, **{**IMPATIENT, "polling_interval": 0.05})
    publish = publisher(broker_url).publish
    for n in range(4):
        frozen()
        publish(*range(10 * n, 10 * n + 10))
        # Whatever the loop was at, it has noticed; or it waits for a connection already.
        wait_until(lambda: loop.losses or loop.refusals or proxy.connections > 2, 10)
        proxy.thaw()
        loop.wait_bodies(*range(10 * n + 10))
    wait_counts(sql, 0, 0)
    assert counts(sql) == (0, 0)

"""Outages, short ones that Celery never hears of and long ones: leases survive them all.

What was running goes on and is acknowledged by its old tag; what Celery drops, since it reconnects,
is free at once: a lease would last ten minutes in most tests.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
from fix_cluster import Cluster
from fix_proxy import Proxy
from fix_worker import CeleryWorker
from helpers import wait_until

LONG = 600  # seconds; only a test that fails would wait that long
NOTICED = "Connection to broker lost"
CONNECTED = "MainProcess] Connected to pgnotify"
HEARTBEAT = 1  # seconds
# Greetings that cannot be sent are tried again without an end, and nothing else is done.
LONELY = ["--without-heartbeat", "--without-gossip", "--without-mingle"]
INTERRUPTED, RESUMED = "consumption.interrupted", "consumption.resumed"
LEASES = "SELECT min(lease_expiration) FROM pgnotify.tasks"


class Network:
    """The network between one worker and the server."""

    def __init__(self, cluster: Cluster, proxy: Proxy, database_name: str) -> None:
        self._cluster, self._proxy = cluster, proxy
        self._url = proxy.url(database_name, scheme="pgnotify")

    def worker(self, pool: str = "prefork", **kwargs: Any) -> CeleryWorker:
        """Start the worker whose network it is."""
        direct, self._cluster.broker_url = self._cluster.broker_url, self._url
        try:
            return self._cluster.worker(pool, **kwargs)
        finally:
            self._cluster.broker_url = direct

    def down(self) -> None:
        self._proxy.refuse()
        self._proxy.cut()

    def up(self) -> None:
        self._proxy.accept()


@pytest.fixture
def network(cluster: Cluster, proxy: Proxy, database_name: str) -> Network:
    """The network between a worker started with it and the server."""
    return Network(cluster, proxy, database_name)


def _use(cluster: Cluster, **options: Any) -> None:
    # Without heartbeats an idle worker looks for a signal only when it polls.
    cluster.use(**{"visibility_timeout": LONG, "polling_interval": 1, **options})


def _wait_logged(worker: CeleryWorker, text: str, times: int) -> None:
    wait_until(lambda: worker.log().count(text) >= times, 30, worker.log)


def _other(cluster: Cluster) -> CeleryWorker:
    """A worker with a network of its own, and room for all there is."""
    return cluster.worker("threads", concurrency=16, config={"worker_prefetch_multiplier": 1})


# -- short outages


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_a_short_outage_drops_nothing_and_keeps_the_leases(
    cluster: Cluster, network: Network, pool: str
) -> None:
    # A lease is renewed after a second, and lives through an outage of almost two.
    cluster.use(visibility_timeout=3)
    labels = cluster.fill(6)
    config = {"worker_prefetch_multiplier": 3}
    worker = network.worker(pool, concurrency=2, config=config, args=LONELY)
    cluster.wait_started(2)
    cluster.wait_queued(6, 6)
    other = _other(cluster)
    for n in range(2):
        network.down()
        _wait_logged(worker, INTERRUPTED, n + 1)
        network.up()
        _wait_logged(worker, RESUMED, n + 1)
        # Until all of it was renewed, so that it is longer than the first lease in the end.
        (limit,) = cluster.sql("SELECT clock_timestamp() + interval '3 s'")[0]
        wait_until(lambda limit=limit: cluster.sql(LEASES)[0][0] > limit)
    # Nobody else has anything: it was neither dropped nor did a lease run out.
    assert len(cluster.happened("started")) == 2
    cluster.open_gate("open")
    cluster.wait_happened("done", labels)
    cluster.wait_queued(0, 0)
    worker.stop()
    other.stop()
    assert cluster.happened("started") == dict.fromkeys(labels, 1)
    assert cluster.happened("done") == dict.fromkeys(labels, 1)
    assert NOTICED not in worker.log()
    assert "lease." not in worker.log()


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_what_was_prefetched_is_carried_out_during_an_outage(
    cluster: Cluster, network: Network, pool: str
) -> None:
    _use(cluster)
    config = {"worker_prefetch_multiplier": 6}
    worker = network.worker(pool, concurrency=1, config=config, args=LONELY)
    cluster.tasks.wait_for_gate.delay("first", "open")
    cluster.wait_started(1)
    labels = {f"early-{n}" for n in range(3)} | {f"late-{n}" for n in range(2)}
    for label in sorted(labels):
        task = cluster.tasks.record if label.startswith("early") else cluster.tasks.record_late
        task.delay(label)
    cluster.wait_queued(6, 6)
    network.down()
    _wait_logged(worker, INTERRUPTED, 1)
    cluster.open_gate("open")
    cluster.wait_happened("done", labels)
    # Acknowledged, and nobody can be told yet.
    assert cluster.queued() == (6, 6)
    network.up()
    cluster.wait_queued(0, 0)
    assert worker.stop() == 0
    assert cluster.happened("done") == dict.fromkeys(labels | {"first"}, 1)
    assert "lease." not in worker.log()


# -- long ones


@pytest.mark.parametrize(
    ("pool", "slots", "prefetch"),
    [
        ("prefork", 2, 3),
        ("threads", 2, 3),
        ("solo", 1, 6),
        # Its main greenlet waits for a free slot, and notices nothing meanwhile.
        ("gevent", 8, 1),
    ],
)
def test_a_long_outage_frees_what_celery_drops_and_repeats_nothing(
    cluster: Cluster, network: Network, pool: str, slots: int, prefetch: int
) -> None:
    _use(cluster, outage_tolerance=0.5)
    labels = cluster.fill(6)
    config = {"worker_prefetch_multiplier": prefetch}
    worker = network.worker(pool, concurrency=slots, config=config, args=LONELY)
    running = cluster.wait_started(min(slots, 6))
    if pool != "solo":
        cluster.wait_queued(6, 6)
    other = _other(cluster)
    for n in range(2 if pool == "prefork" else 1):
        network.down()
        if pool == "solo":
            # It notices between two tasks.
            cluster.open_gate("open")
        _wait_logged(worker, NOTICED, n + 1)
        network.up()
        _wait_logged(worker, CONNECTED, n + 2)
    if pool != "solo":
        # What was dropped is the other's at once; what runs is still held, and so is what threads
        # are going to run.
        started = cluster.wait_started(2 if pool == "threads" else 6)
        cluster.wait_queued(6, 6)
        assert running <= started
        cluster.open_gate("open")
    cluster.wait_happened("done", labels)
    cluster.wait_queued(0, 0)
    other.stop()
    cluster.tasks.record.delay("afterwards")
    cluster.wait_happened("done", {"afterwards"})
    assert worker.stop() == 0
    assert cluster.happened("started") == dict.fromkeys(labels, 1)
    assert cluster.happened("done") == dict.fromkeys(labels | {"afterwards"}, 1)
    assert "lease.lost" not in worker.log()


def test_celery_cancels_late_tasks_at_a_long_outage_and_others_have_them_at_once(
    cluster: Cluster, network: Network
) -> None:
    _use(cluster, outage_tolerance=0.5)
    config = {"worker_cancel_long_running_tasks_on_connection_loss": True}
    worker = network.worker(concurrency=2, config=config, args=LONELY)
    cluster.tasks.wait_for_gate.delay("late", "open")
    cluster.tasks.wait_for_gate_early.delay("early", "open")
    cluster.wait_started(2)
    cluster.wait_queued(1, 1)
    other = _other(cluster)
    network.down()
    _wait_logged(worker, NOTICED, 1)
    network.up()
    wait_until(lambda: cluster.happened("started") == {"late": 2, "early": 1}, 30, worker.log)
    cluster.open_gate("open")
    cluster.wait_happened("done", {"late", "early"})
    cluster.wait_queued(0, 0)
    worker.stop()
    other.stop()
    assert cluster.happened("done") == {"late": 1, "early": 1}
    assert "lease.lost" not in worker.log()


def test_a_late_task_whose_process_was_killed_during_an_outage_is_anothers_at_once(
    cluster: Cluster, network: Network
) -> None:
    _use(cluster)
    config = {"task_reject_on_worker_lost": True, "worker_prefetch_multiplier": 1}
    worker = network.worker(concurrency=1, config=config, args=LONELY)
    cluster.tasks.wait_for_gate.delay("late", "open")
    cluster.wait_started(1)
    other = _other(cluster)
    network.down()
    _wait_logged(worker, INTERRUPTED, 1)
    ((pid,),) = cluster.sql("SELECT pid FROM executions")
    os.kill(pid, signal.SIGKILL)
    worker.wait_log("WorkerLostError")
    assert cluster.queued() == (1, 1)
    network.up()
    wait_until(lambda: cluster.happened("started") == {"late": 2}, 30, worker.log)
    # A started one counts, so that a task that kills its process does not do so for ever.
    assert cluster.sql("SELECT attempts FROM pgnotify.tasks") == [(2,)]
    cluster.open_gate("open")
    cluster.wait_queued(0, 0)
    worker.stop()
    other.stop()
    assert cluster.happened("done") == {"late": 1}
    assert "lease." not in worker.log()


# -- Celery gives up


def test_a_worker_that_gives_up_reconnecting_ends_and_its_tasks_come_back(
    cluster: Cluster, network: Network
) -> None:
    cluster.use(visibility_timeout=4, outage_tolerance=0.2)
    config = {"broker_connection_max_retries": 1, "worker_prefetch_multiplier": 3}
    worker = network.worker(concurrency=1, config=config, args=LONELY)
    labels = cluster.fill(3)
    running = cluster.wait_started(1)
    cluster.wait_queued(3, 3)
    network.down()
    _wait_logged(worker, NOTICED, 1)
    # The last one is waited for, as in any warm shutdown.
    cluster.open_gate("open")
    assert worker.wait() != 0
    other = _other(cluster)
    cluster.wait_happened("done", labels)
    cluster.wait_queued(0, 0)
    other.stop()
    # Its ack could not be told.
    done = cluster.happened("done")
    assert {label for label in done if done[label] > 1} <= running


def test_a_worker_that_must_not_reconnect_ends_its_tasks_and_acknowledges_them(
    cluster: Cluster, network: Network
) -> None:
    _use(cluster, outage_tolerance=0.2)
    config = {"broker_connection_retry": False, "worker_prefetch_multiplier": 3}
    worker = network.worker(concurrency=1, config=config, args=LONELY)
    cluster.fill(3)
    running = cluster.wait_started(1)
    cluster.wait_queued(3, 3)
    network.down()
    worker.wait_log("Shutting down")
    network.up()
    # The rest is free while the first one still works.
    cluster.wait_queued(3, 1)
    cluster.open_gate("open")
    assert worker.wait() == 1
    assert cluster.queued() == (2, 0)
    assert set(cluster.happened("done")) == running
    assert "lease.lost" not in worker.log()


# A worker with gevent waits for a free place itself, and takes nothing meanwhile.
@pytest.mark.parametrize(("pool", "concurrency"), [("prefork", 2), ("threads", 2), ("gevent", 4)])
def test_events_that_cannot_be_sent_stop_neither_tasks_nor_a_shutdown(
    cluster: Cluster, network: Network, pool: str, concurrency: int
) -> None:
    """Celery would send a heartbeat again without an end, in the worker's event loop."""
    cluster.use(visibility_timeout=LONG)
    worker = network.worker(
        pool,
        concurrency=concurrency,
        config={"worker_prefetch_multiplier": 2},
        args=["-E", f"--heartbeat-interval={HEARTBEAT}"],
    )
    labels = {f"task-{n}" for n in range(4)}
    for label in sorted(labels):
        cluster.tasks.wait_for_gate.delay(label, "open")
    wait_until(lambda: len(cluster.happened("started")) == concurrency)
    cluster.wait_queued(4, 4)
    network.down()
    worker.wait_log(INTERRUPTED)
    # Nobody sees a heartbeat that is not sent.
    time.sleep(2 * HEARTBEAT)
    cluster.open_gate("open")
    cluster.wait_happened("done", labels)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    network.up()
    assert cluster.happened("started") == dict.fromkeys(labels, 1)

"""Warm, soft, cold and remote shutdowns: what had not started is free at once, what runs is kept.

A lease would last ten minutes here, and nobody polls sooner: who gets a task before was told that
it was given back.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fix_cluster import Cluster
from fix_proxy import Proxy
from fix_worker import CeleryWorker
from helpers import wait_until

LONG = 600  # seconds; only a test that fails would wait that long
WARM = "Warm shutdown"
ENDS_WITHIN = 50.0  # seconds; billiard itself may take 32

LEFT = r"SELECT substring(envelope FROM 'task-\d+') FROM pgnotify.tasks"
RENEWED = """
SELECT 1 FROM pgnotify.tasks WHERE envelope LIKE '%%wait_for_gate%%' AND lease_expiration > %s
"""


def _use(cluster: Cluster, **options: Any) -> None:
    cluster.use(**{"visibility_timeout": LONG, "polling_interval": LONG, **options})


def _leased_by(cluster: Cluster, worker: CeleryWorker) -> int:
    return cluster.sql(
        "SELECT count(*) FROM pgnotify.tasks WHERE split_part(lease_worker_id, ':', 2) = %s",
        str(worker.pid),
    )[0][0]  # type: ignore[no-any-return]


def _complaints(worker: CeleryWorker) -> list[str]:
    """Lines of the log that nobody wants to see after a shutdown in good order."""
    bad = ("Traceback", "ERROR", "CRITICAL", "WARNING/MainProcess] settle.", "lease.lost")
    return [line for line in worker.log().splitlines() if any(word in line for word in bad)]


def _end(worker: CeleryWorker, how: str) -> None:
    """Begin a cold shutdown."""
    if how == "ctrl-c twice":
        worker.signal(signal.SIGINT)
        worker.wait_log(WARM)
        worker.signal(signal.SIGINT)
    else:
        worker.signal(signal.SIGQUIT if how == "SIGQUIT" else signal.SIGTERM)


# -- warm


@pytest.mark.parametrize(
    ("pool", "how"),
    [
        ("prefork", "remote"),
        ("threads", "remote"),
        ("solo", "SIGTERM"),
        ("gevent", "remote"),
        ("eventlet", "SIGTERM"),
    ],
)
def test_a_warm_shutdown_ends_what_runs_and_gives_the_rest_to_others(
    cluster: Cluster, pool: str, how: str
) -> None:
    _use(cluster, eta_in_broker=False)
    worker = cluster.worker(pool, concurrency=2, config={"worker_prefetch_multiplier": 4})
    cluster.tasks.wait_for_gate.apply_async(("scheduled", "open"), countdown=LONG)
    cluster.wait_queued(1, 1)
    labels = cluster.fill()
    cluster.wait_started(1 if pool == "solo" else 2)
    other = cluster.worker("threads", concurrency=16, config={"worker_prefetch_multiplier": 1})
    cluster.wait_queued(9, 9)
    if how == "remote":
        cluster.tasks.app.control.shutdown(destination=[worker.name])
    else:
        worker.signal(signal.SIGTERM)
        worker.wait_log(WARM)
    if pool in ("prefork", "threads"):
        # The other one has what had not started while the first still works.
        cluster.wait_started(7)
        assert worker.returncode is None
    # All others listen between two tasks only.
    cluster.open_gate("open")
    cluster.wait_happened("done", labels)
    assert worker.wait() == 0
    # What waits for its time has a new holder, and a holder only.
    wait_until(lambda: cluster.queued() == (1, 1) and not _leased_by(cluster, worker))
    other.stop()
    cluster.wait_queued(1, 0)
    assert cluster.happened("done") == dict.fromkeys(labels, 1)
    assert cluster.happened("started") == dict.fromkeys(labels, 1)
    assert _complaints(worker) == []


# -- cold


@pytest.mark.parametrize("how", ["SIGQUIT", "ctrl-c twice", "REMAP_SIGTERM"])
def test_a_cold_shutdown_gives_back_late_tasks_running_or_not(cluster: Cluster, how: str) -> None:
    _use(cluster, eta_in_broker=False)
    env = {"REMAP_SIGTERM": "SIGQUIT"} if how == "REMAP_SIGTERM" else {}
    worker = cluster.worker(concurrency=3, config={"worker_prefetch_multiplier": 4}, env=env)
    cluster.tasks.wait_for_gate.apply_async(("scheduled", "open"), countdown=LONG)
    cluster.tasks.sleep.delay("early", LONG)
    cluster.wait_started(1)
    labels = cluster.fill()
    running = cluster.wait_started(3) - {"early"}
    # The early one is acknowledged: what happens to it now is Celery's affair.
    cluster.wait_queued(9, 9)
    other = cluster.worker("threads", concurrency=16, config={"worker_prefetch_multiplier": 1})
    _end(worker, how)
    # All by the other, whom nobody but the first can have told.
    again = dict.fromkeys(labels, 1) | dict.fromkeys(running, 2) | {"early": 1}
    wait_until(lambda: cluster.happened("started") == again, 20, worker.log)
    wait_until(lambda: _leased_by(cluster, worker) == 0)
    assert worker.wait() == 0
    cluster.open_gate("open")
    cluster.wait_happened("done", labels)
    other.stop()
    cluster.wait_queued(1, 0)
    assert cluster.happened("done") == dict.fromkeys(labels, 1)
    assert cluster.happened("started") == again
    assert _complaints(worker) == []


@pytest.mark.parametrize("pool", ["threads", "solo", "gevent"])
def test_a_cold_shutdown_of_a_pool_that_cannot_be_stopped_gives_back_what_had_not_started(
    cluster: Cluster, pool: str
) -> None:
    # Celery raises in its signal handler.  A solo worker's task fails of that; a greenlet is
    # killed, which Celery takes for success; threads are waited for.
    _use(cluster)
    worker = cluster.worker(pool, concurrency=2, config={"worker_prefetch_multiplier": 4})
    labels = cluster.fill()
    running = cluster.wait_started(1 if pool == "solo" else 2)
    if pool == "threads":
        # Else it may strike while the worker writes its log, which swallows what Celery raises.
        wait_until(lambda: worker.log().count("] received") == len(labels), 20, worker.log)
    worker.signal(signal.SIGQUIT)
    if pool == "threads":
        worker.wait_log("Unrecoverable error")
        # A thread that ends its task takes the next one until the pool has been told to stop.
        worker.wait_log("lease.forsaken")
        assert worker.returncode is None
        cluster.open_gate("open")
    worker.wait()
    assert cluster.queued() == (len(labels - running), 0)
    assert set(cluster.happened("done")) == (running if pool == "threads" else set())
    assert "lease.lost" not in worker.log()


# -- soft


def test_a_soft_shutdown_keeps_its_leases_until_the_end(cluster: Cluster) -> None:
    # The worker's main thread sleeps four times as long as a lease lasts.
    cluster.use(visibility_timeout=1)
    config = {"worker_prefetch_multiplier": 2, "worker_soft_shutdown_timeout": 4}
    worker = cluster.worker(concurrency=2, config=config)
    cluster.tasks.wait_for_gate.delay("short", "short")
    cluster.tasks.wait_for_gate.delay("long", "long")
    cluster.wait_started(2)
    cluster.tasks.wait_for_gate.delay("waiting", "long")
    cluster.wait_queued(3, 3)
    other = cluster.worker("threads", concurrency=4, config={"worker_prefetch_multiplier": 1})
    worker.signal(signal.SIGQUIT)
    worker.wait_log("Initiating Soft Shutdown")
    cluster.open_gate("short")
    cluster.wait_happened("done", {"short"})
    wait_until(lambda: cluster.happened("started") == {"short": 1, "waiting": 1, "long": 2}, 20)
    assert worker.wait() == 0
    cluster.open_gate("long")
    cluster.wait_happened("done", {"long", "waiting"})
    cluster.wait_queued(0, 0)
    other.stop()
    assert cluster.happened("done") == {"short": 1, "waiting": 1, "long": 1}
    assert _complaints(worker) == []


def test_a_soft_shutdown_of_an_idle_worker_gives_back_what_waits_for_its_time(
    cluster: Cluster,
) -> None:
    _use(cluster, eta_in_broker=False)
    config = {"worker_soft_shutdown_timeout": 1, "worker_enable_soft_shutdown_on_idle": True}
    worker = cluster.worker(config=config)
    cluster.tasks.record.apply_async(("scheduled",), countdown=LONG)
    cluster.wait_queued(1, 1)
    worker.signal(signal.SIGQUIT)
    worker.wait_log("Initiating Soft Shutdown")
    assert worker.wait() == 0
    assert cluster.queued() == (1, 0)
    assert _complaints(worker) == []


def test_a_second_sigquit_during_a_soft_shutdown_and_a_third_one_lose_nothing(
    cluster: Cluster,
) -> None:
    _use(cluster)
    config = {"worker_prefetch_multiplier": 4, "worker_soft_shutdown_timeout": LONG}
    worker = cluster.worker(concurrency=2, config=config)
    labels = cluster.fill()
    cluster.wait_started(2)
    cluster.wait_queued(8, 8)
    worker.signal(signal.SIGQUIT)
    worker.wait_log("Initiating Soft Shutdown")
    worker.signal(signal.SIGQUIT)
    worker.wait_log("Waiting gracefully for cold shutdown")
    # Now the handler raises, wherever it strikes.
    worker.signal(signal.SIGQUIT)
    worker.wait()
    assert cluster.queued() == (len(labels), 0)
    assert "lease.lost" not in worker.log()


# -- in the middle of a claim


@pytest.mark.parametrize(
    ("pool", "number"),
    [
        ("prefork", signal.SIGTERM),
        ("prefork", signal.SIGQUIT),
        ("threads", signal.SIGTERM),
        ("gevent", signal.SIGTERM),
    ],
)
def test_a_task_whose_claim_was_under_way_at_the_signal_does_not_run_twice(
    cluster: Cluster, proxy: Proxy, database_name: str, pool: str, number: signal.Signals
) -> None:
    _use(cluster)
    worker = _behind(cluster, proxy.url(database_name, scheme="pgnotify"), pool, {})
    cluster.tasks.record.delay("first")
    cluster.wait_happened("done", {"first"})
    cluster.wait_queued(0, 0)
    proxy.delay(0.3)
    cluster.tasks.record_late.delay("claimed")
    # It has the lease, and will know in 0.3 seconds.
    cluster.wait_queued(1, 1)
    worker.signal(number)
    assert worker.wait(ENDS_WITHIN) == 0
    left, leased = cluster.queued()
    assert leased == 0
    # Either carried out or given back.
    assert cluster.happened("done")["claimed"] + left == 1
    assert _complaints(worker) == []


def test_a_soft_shutdown_that_interrupts_a_claim_goes_on_renewing_leases(
    cluster: Cluster, proxy: Proxy, database_name: str
) -> None:
    cluster.use(visibility_timeout=2)
    config = {"worker_soft_shutdown_timeout": LONG}
    worker = _behind(cluster, proxy.url(database_name, scheme="pgnotify"), "prefork", config)
    cluster.tasks.wait_for_gate.delay("long", "open")
    cluster.wait_started(1)
    with _stream(cluster):
        # Now its main thread waits for the answer to a claim almost all the time.
        proxy.delay(0.1)
        wait_until(lambda: len(cluster.happened("done")) >= 3)
        worker.signal(signal.SIGQUIT)
        worker.wait_log("Initiating Soft Shutdown")
        proxy.delay(0)
        # From here on the main thread sleeps in its signal handler.
        (limit,) = cluster.sql("SELECT clock_timestamp() + interval '6 s'")[0]
        wait_until(lambda: cluster.sql(RENEWED, limit), 10, "the lease is not renewed any more")


@pytest.mark.parametrize(
    ("number", "pools"),
    [(signal.SIGTERM, ["solo", "threads"]), (signal.SIGQUIT, ["threads"])],
)
def test_a_storm_of_signals_in_the_middle_of_claims_hangs_no_worker(
    cluster: Cluster,
    proxy: Proxy,
    database_name: str,
    number: signal.Signals,
    pools: list[str],
) -> None:
    _use(cluster)
    dice = random.Random()
    url, config = proxy.url(database_name, scheme="pgnotify"), {"worker_prefetch_multiplier": 1}
    workers = [_behind(cluster, url, pool, config, wait=False) for pool in pools * 3]
    for worker in workers:
        worker.wait_log("ready.")
    with _stream(cluster) as labels:
        wait_until(cluster.happened)
        # From now on each spends its time waiting for an answer.
        proxy.delay(0.02)
        for worker in workers:
            time.sleep(dice.uniform(0, 0.15))
            worker.signal(number)
        codes = [worker.wait(ENDS_WITHIN) for worker in workers]
    assert cluster.queued()[1] == 0
    left = {label for (label,) in cluster.sql(LEFT)}
    done = cluster.happened("done")
    assert set(done) | left == labels
    if number == signal.SIGTERM:
        assert codes == [0] * len(workers)
        assert done == dict.fromkeys(labels - left, 1)
    for worker in workers:
        assert "lease.lost" not in worker.log()


def _behind(
    cluster: Cluster, url: str, pool: str, config: dict[str, Any], **kwargs: Any
) -> CeleryWorker:
    """Start a worker that reaches the server by another URL than the producer."""
    direct, cluster.broker_url = cluster.broker_url, url
    try:
        return cluster.worker(pool, config=config, args=["--without-mingle"], **kwargs)
    finally:
        cluster.broker_url = direct


@contextlib.contextmanager
def _stream(cluster: Cluster) -> Iterator[set[str]]:
    """Publish short tasks all the time; gives their labels, complete at the end."""
    labels: set[str] = set()
    ended = threading.Event()

    def publish() -> None:
        while not ended.is_set():
            label = f"task-{len(labels)}"
            cluster.tasks.record_late.delay(label)
            labels.add(label)

    producer = threading.Thread(target=publish)
    producer.start()
    try:
        yield labels
    finally:
        ended.set()
        producer.join()

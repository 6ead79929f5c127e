"""However a worker ends, no task is lost, and none runs twice without a crash."""

from __future__ import annotations

import signal
import sys

import pytest
from fix_cluster import POOLS, Cluster
from fix_postgres import Server
from helpers import wait_until


def test_sigkill_redelivers_everything_the_worker_held(cluster: Cluster) -> None:
    cluster.use(visibility_timeout=3)
    worker = cluster.worker("prefork", concurrency=8, config={"worker_prefetch_multiplier": 1})
    labels = {f"held-{n}" for n in range(8)}
    for label in sorted(labels):
        cluster.tasks.wait_for_gate.delay(label, "open")
    cluster.wait_happened("started", labels)
    other = cluster.worker("prefork", concurrency=8, config={"worker_prefetch_multiplier": 1})
    worker.kill()
    (killed_at,) = cluster.sql("SELECT clock_timestamp()")[0]
    wait_until(lambda: cluster.happened("started") == dict.fromkeys(labels, 2), 20)
    cluster.open_gate("open")
    cluster.wait_happened("done", labels)
    cluster.wait_queued(0, 0)
    other.stop()
    assert cluster.happened("done") == dict.fromkeys(labels, 1)
    (last,) = cluster.sql("SELECT max(at) FROM executions WHERE event = 'started'")[0]
    sys.stdout.write(
        f"last of 8 redelivered {(last - killed_at).total_seconds():.2f} s after SIGKILL\n"
    )


@pytest.mark.parametrize("pool", ["prefork", "threads"])
def test_warm_shutdown_frees_what_has_not_started(cluster: Cluster, pool: str) -> None:
    config = {"worker_prefetch_multiplier": 10}
    worker = cluster.worker(pool, concurrency=2, config=config)
    labels = {f"task-{n}" for n in range(20)}
    for label in sorted(labels):
        cluster.tasks.wait_for_gate.delay(label, "open")
    cluster.wait_queued(20, 20)
    wait_until(lambda: len(cluster.happened("started")) == 2)
    first = set(cluster.happened("started"))
    worker.signal(signal.SIGTERM)
    # All but the running ones are free although the worker has not ended.
    cluster.wait_queued(20, 2 if pool == "prefork" else 3, timeout=20)
    assert worker.returncode is None
    other = cluster.worker("threads", concurrency=18, config={"worker_prefetch_multiplier": 1})
    wait_until(lambda: len(cluster.happened("started")) >= 19)
    cluster.open_gate("open")
    cluster.wait_happened("done", labels)
    assert worker.wait() == 0
    cluster.wait_queued(0, 0)
    other.stop()
    assert cluster.happened("started") == dict.fromkeys(labels, 1)
    assert first <= set(cluster.happened("done"))


@pytest.mark.parametrize("pool", POOLS)
def test_lost_connections_neither_lose_nor_repeat_tasks(cluster: Cluster, pool: str) -> None:
    cluster.use(visibility_timeout=5)
    worker = cluster.worker(pool, concurrency=2, config={"worker_prefetch_multiplier": 4})
    if pool == "solo":
        labels = {f"task-{n}" for n in range(8)}
        for label in sorted(labels):
            cluster.tasks.sleep_late.delay(label, 0.5)
        wait_until(lambda: len(cluster.happened("started")) >= 2)
    else:
        labels = {f"task-{n}" for n in range(12)}
        for label in sorted(labels):
            cluster.tasks.wait_for_gate.delay(label, "open")
        wait_until(lambda: len(cluster.happened("started")) == 2)
    for _ in range(3):
        _terminate_connections(cluster)
        wait_until(lambda: _connections(cluster), 30)
    cluster.open_gate("open")
    cluster.wait_happened("done", labels)
    cluster.wait_queued(0, 0)
    cluster.tasks.record.delay("afterwards")
    cluster.wait_happened("done", {"afterwards"})
    worker.stop()
    assert cluster.happened("done") == dict.fromkeys(labels | {"afterwards"}, 1)


@pytest.mark.parametrize("pool", ["prefork", "solo", "gevent"])
def test_a_server_restart_is_survived(own_cluster: Cluster, own_server: Server, pool: str) -> None:
    worker = own_cluster.worker(pool)
    for n in range(5):
        own_cluster.tasks.record.delay(f"before-{n}")
    own_cluster.wait_happened("done", {f"before-{n}" for n in range(5)})
    own_cluster.wait_queued(0, 0)
    own_cluster.disconnect()
    own_server.restart("fast")
    for n in range(5):
        own_cluster.tasks.record.delay(f"after-{n}")
    own_cluster.wait_happened("done", {f"after-{n}" for n in range(5)})
    own_cluster.wait_queued(0, 0)
    worker.stop()
    assert set(own_cluster.happened().values()) == {1}


def _connections(cluster: Cluster) -> list[tuple[int]]:
    return cluster.sql(  # type: ignore[return-value]
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'kombu_pgnotify@%%'"
    )


def _terminate_connections(cluster: Cluster) -> None:
    cluster.sql(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE 'kombu_pgnotify@%%'"
    )

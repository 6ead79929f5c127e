"""Every pool runs every kind of task once, and leaves nothing behind."""

from __future__ import annotations

import pytest
from fix_cluster import POOLS, Cluster
from helpers import wait_until

TASKS = 500


def _send(cluster: Cluster) -> dict[str, int]:
    """Send a mixture; return how often each label must be executed."""
    tasks, expected = cluster.tasks, {}
    kinds = [
        lambda label: tasks.record.delay(label),
        lambda label: tasks.record_late.delay(label),
        lambda label: tasks.with_result.delay(label),
        lambda label: tasks.fail.delay(label),
        lambda label: tasks.record.apply_async((label,), countdown=0.5),
        lambda label: tasks.record.apply_async((label,), priority=9),
        lambda label: tasks.record.apply_async((label,), expires=300),
        lambda label: tasks.record_late.apply_async((label,), countdown=0.2, priority=3),
        lambda label: tasks.retry_once.delay(label),
        lambda label: tasks.reject.delay(label, True),
    ]
    twice = {len(kinds) - 2, len(kinds) - 1}
    for n in range(TASKS):
        kind = n % len(kinds)
        label = f"task-{kind}-{n}"
        kinds[kind](label)
        expected[label] = 2 if kind in twice else 1
    return expected


@pytest.mark.parametrize("pool", POOLS)
def test_500_tasks_of_every_kind_run_exactly_once(cluster: Cluster, pool: str) -> None:
    worker = cluster.worker(pool, concurrency=4)
    expected = _send(cluster)
    cluster.wait_happened("%", set(expected), timeout=100)
    # Rejected for good the second time: kept apart, not in the tasks table.
    cluster.wait_queued(0, 0, timeout=60)
    assert worker.stop() == 0
    assert dict(cluster.happened()) == expected
    dead = cluster.sql("SELECT reason, count(*) FROM pgnotify.dead_letters GROUP BY 1")
    assert dead == [("rejected", TASKS // 10)]


@pytest.mark.parametrize("pool", POOLS)
def test_a_task_three_times_as_long_as_its_lease_runs_once(cluster: Cluster, pool: str) -> None:
    cluster.use(visibility_timeout=1)
    workers = [cluster.worker(pool, concurrency=1) for _ in range(2)]
    cluster.tasks.sleep_late.delay("long", 3)
    cluster.wait_happened("done", {"long"})
    cluster.wait_queued(0, 0)
    for worker in workers:
        worker.stop()
    assert cluster.happened("started") == {"long": 1}


@pytest.mark.parametrize("eta_in_broker", [True, False])
def test_tasks_with_a_countdown_wait_in_the_table(cluster: Cluster, eta_in_broker: bool) -> None:
    cluster.use(eta_in_broker=eta_in_broker)
    cluster.worker("solo")
    cluster.tasks.record.apply_async(("later",), countdown=3600)
    cluster.tasks.record.apply_async(("soon",), countdown=1)
    cluster.wait_happened("done", {"soon"})
    # In the broker: held, by nobody.  Not in the broker: leased by the worker that waits.
    cluster.wait_queued(1, 0 if eta_in_broker else 1)
    assert "later" not in cluster.happened()


def test_tasks_sent_by_tasks_use_the_childs_own_connections(cluster: Cluster) -> None:
    worker = cluster.worker("prefork", args=["--max-tasks-per-child", "1"])
    before = _backends_of(cluster, worker.pid)
    for n in range(10):
        cluster.tasks.publish_more.delay(f"parent-{n}", 3)
    labels = {f"parent-{n}" for n in range(10)}
    labels |= {f"parent-{n}-{m}" for n in range(10) for m in range(3)}
    cluster.wait_happened("done", labels)
    cluster.wait_queued(0, 0)
    # Forty children later the parent still has the LISTEN connection it started with.  (The other
    # may be another one: of two that were in use at the same moment one is closed.)
    wait_until(lambda: len(_backends_of(cluster, worker.pid)) <= 2)
    assert set(_backends_of(cluster, worker.pid)) & set(before)
    assert "lease." not in worker.log()
    assert set(cluster.happened().values()) == {1}


def test_an_idle_worker_holds_two_connections(cluster: Cluster) -> None:
    worker = cluster.worker("prefork", concurrency=4, args=["-E"])
    cluster.tasks.record.delay("first")
    cluster.wait_happened("done", {"first"})
    cluster.wait_queued(0, 0)
    assert len(_backends_of(cluster, None)) - len(_own(cluster)) <= 2, worker.log()


def _own(cluster: Cluster) -> list[int]:
    """Backends of the test process's own producer."""
    import os

    return _backends_of(cluster, os.getpid())


def _backends_of(cluster: Cluster, pid: int | None) -> list[int]:
    """Return the server's processes for connections of ours, of one client process or all."""
    rows = cluster.sql(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE %s ORDER BY pid",
        f"kombu_pgnotify@%:{'%' if pid is None else pid}",
    )
    return [row[0] for row in rows]

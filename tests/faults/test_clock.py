"""A machine whose clock is wrong by an hour: leases and due times go by the database's."""

from __future__ import annotations

import os
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from fix_cluster import Cluster
from fix_loops import PATIENCE, Consume, Publish, Sql, wait_counts
from helpers import wait_until

LEASE = 3.0  # seconds
HOUR = 3600.0
LEASES = (
    "SELECT lease_expiration BETWEEN clock_timestamp() AND clock_timestamp() + interval '3 s',"
    " lease_expiration FROM pgnotify.tasks WHERE lease_expiration IS NOT NULL"
)

#: A folder with a sitecustomize.py, for PYTHONPATH.
WRONG_CLOCK = Path(__file__).with_name("wrong_clock")
wrong_by = pytest.mark.parametrize("seconds", [HOUR, -HOUR], ids=["ahead", "behind"])


@wrong_by
def test_a_consumer_whose_clock_is_wrong_holds_and_waits_by_the_databases(
    consume: Consume,
    publisher: Publish,
    broker_url: str,
    sql: Sql,
    monkeypatch: pytest.MonkeyPatch,
    seconds: float,
) -> None:
    right = time.time
    monkeypatch.setattr(time, "time", lambda: right() + seconds)
    running = consume(broker_url, "running", ack=False, visibility_timeout=LEASE)
    other = consume(
        broker_url, "running", ack=False, visibility_timeout=LEASE, application_name="other"
    )
    loop = consume(broker_url)
    publisher(broker_url, "running").publish("a long task")
    wait_until(lambda: running.bodies + other.bodies, PATIENCE)
    eta = datetime.fromtimestamp(right(), timezone.utc) + timedelta(seconds=1)
    publish = publisher(broker_url).publish
    publish("due", headers={"task": "t", "eta": eta.isoformat()})
    publish("kept", expiration=60)
    loop.wait(lambda: "due" in loop.bodies)
    assert right() >= eta.timestamp()
    for _ in range(2):
        before = sql(LEASES)
        assert [fits for fits, _ in before] == [True]
        wait_until(lambda: sql(LEASES) > before, PATIENCE, "not renewed")  # noqa: B023
    assert running.bodies + other.bodies == ["a long task"]
    (running.messages + other.messages)[0].ack()
    wait_counts(sql, 0, 0)
    assert loop.bodies == ["kept", "due"]


def faked(seconds: float) -> dict[str, str]:
    """Return the environment in which a process's clock is wrong."""
    path = os.pathsep.join([str(WRONG_CLOCK), os.environ.get("PYTHONPATH", "")])
    return {"PYTHONPATH": path, "TEST_CLOCK_WRONG_BY": f"{seconds:g}"}


@wrong_by
def test_a_worker_whose_clock_is_wrong_keeps_its_leases_and_takes_nobody_elses(
    cluster: Cluster, seconds: float
) -> None:
    cluster.use(visibility_timeout=LEASE)
    tasks, config = cluster.tasks, {"worker_prefetch_multiplier": 1}
    wrong = cluster.worker("prefork", env=faked(seconds), config=config)
    tasks.wait_for_gate.delay("its own", "open")
    cluster.wait_happened("started", {"its own"})
    right = cluster.worker("threads", config=config)
    labels = {f"task-{n}" for n in range(10)}
    for label in sorted(labels):
        tasks.wait_for_gate.delay(label, "open")
    lease = f"{LEASES} AND envelope LIKE '%%wait_for_gate%%' ORDER BY task_id"
    for _ in range(2):
        before = cluster.sql(lease)
        assert all(fits for fits, _ in before)
        wait_until(lambda: cluster.sql(lease)[0][1] > before[0][1], PATIENCE, "not renewed")  # noqa: B023
    cluster.open_gate("open")
    cluster.wait_happened("done", labels | {"its own"})
    cluster.wait_queued(0, 0)
    assert cluster.happened("started") == dict.fromkeys(labels | {"its own"}, 1)
    assert wrong.returncode is None
    assert right.returncode is None


def test_a_worker_whose_clock_is_ahead_starts_no_task_before_its_time(cluster: Cluster) -> None:
    """One whose clock is behind gets it in time too; then Celery waits by that clock."""
    cluster.worker("threads", env=faked(HOUR))
    (due,) = cluster.sql("SELECT clock_timestamp() + interval '1 s'")[0]
    cluster.tasks.record.apply_async(("due",), eta=due)
    cluster.wait_happened("done", {"due"}, 10)
    assert cluster.sql("SELECT min(at) >= %s FROM executions", due) == [(True,)]

"""NOTIFY wakes workers, and nothing depends on it."""

from __future__ import annotations

import psycopg
from fix_cluster import Cluster
from helpers import wait_until
from kombu import Connection

from kombu_pgnotify.messages import channel_of

BACKLOG = 10_000


def test_a_backlog_is_consumed_without_any_notify(cluster: Cluster) -> None:
    cluster.use(notify=False)
    labels = BACKLOG
    with Connection(cluster.broker_url, transport_options={"notify": False}) as connection:
        connection.connect()
    # Celery's own messages, copied in the table: publishing ten thousand takes a minute.
    cluster.tasks.noop_message = cluster.tasks.record.delay("template")
    cluster.sql("SET kombu_pgnotify.quiet = 'on'")
    cluster.sql(
        "INSERT INTO pgnotify.tasks (task_name, envelope, payload)"
        " SELECT task_name, envelope, payload FROM pgnotify.tasks, generate_series(2, %s)",
        labels,
    )
    assert cluster.queued() == (BACKLOG, 0)
    with psycopg.connect(cluster.database, autocommit=True) as ear:
        ear.execute(f'LISTEN "{channel_of("pgnotify", "celery")}"'.encode())
        cluster.use()  # the worker listens, and nobody notifies
        cluster.worker("threads", concurrency=4)
        wait_until(lambda: cluster.queued()[0] == 0, 110)
        wait_until(lambda: sum(cluster.happened().values()) == BACKLOG, 60)
        assert list(ear.notifies(timeout=0)) == []


def test_everything_works_with_notify_switched_off(cluster: Cluster) -> None:
    cluster.use(notify=False, polling_interval=0.2)
    worker = cluster.worker("prefork")
    labels = {f"task-{n}" for n in range(20)}
    for label in sorted(labels):
        cluster.tasks.record.apply_async((label,), countdown=0.1 if label.endswith("7") else None)
    cluster.wait_happened("done", labels)
    cluster.wait_queued(0, 0)
    listening = cluster.sql(
        "SELECT query FROM pg_stat_activity WHERE datname = current_database()"
        " AND query LIKE 'LISTEN %%'"
    )
    assert listening == []
    worker.stop()


def test_rows_written_by_somebody_else_wake_the_worker(cluster: Cluster) -> None:
    # The poll is an hour away: only the table's trigger can wake the worker.
    cluster.use(polling_interval=3600)
    worker = cluster.worker("solo")
    cluster.tasks.record.delay("template")
    cluster.wait_happened("done", {"template"})
    cluster.wait_queued(0, 0)
    envelope, payload = _message(cluster, "by-hand")
    cluster.sql(
        "INSERT INTO pgnotify.tasks (task_name, envelope, payload) VALUES ('celery', %s, %s)",
        envelope,
        payload,
    )
    cluster.wait_happened("done", {"by-hand"})
    worker.stop()


def _message(cluster: Cluster, label: str) -> tuple[str, bytes]:
    """Return a message as Celery would publish it, by way of a queue nobody consumes."""
    cluster.tasks.record.apply_async((label,), queue="parked")
    return cluster.sql("SELECT envelope, payload FROM pgnotify.tasks WHERE task_name = 'parked'")[0]  # type: ignore[return-value]

"""Rows that somebody wrote badly, and servers in odd states, end no worker."""

from __future__ import annotations

import pytest
from fix_cluster import Cluster
from helpers import wait_until

#: Sends the parked message once more, with a column set to a value.
COPY = (
    "INSERT INTO pgnotify.tasks (task_name, envelope, payload, {})"
    " SELECT 'celery', envelope, payload, {} FROM pgnotify.tasks WHERE task_name = 'parked'"
)


def _park(cluster: Cluster, label: str) -> None:
    """Publish a message where nobody consumes it."""
    cluster.tasks.record.apply_async((label,), queue="parked")


def test_numbers_at_their_limit_do_not_stop_the_queue(cluster: Cluster) -> None:
    worker = cluster.worker("solo")
    _park(cluster, "limit")
    for column in ("deliveries", "attempts"):
        cluster.sql(COPY.format(column, 2147483647))
    wait_until(lambda: cluster.happened("done")["limit"] == 2)
    cluster.wait_queued(1, 0)
    assert worker.returncode is None


def test_infinite_times_do_not_stop_the_queue(cluster: Cluster) -> None:
    worker = cluster.worker("solo")
    _park(cluster, "time")
    cluster.sql(COPY.format("available_at", "'infinity'"))
    cluster.sql(COPY.format("available_at", "'-infinity'"))
    cluster.wait_happened("done", {"time"})
    cluster.tasks.record.apply_async(("later",), countdown=1)
    cluster.wait_happened("done", {"later"})
    assert worker.returncode is None
    assert cluster.happened("done")["time"] == 1


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_what_celery_raises_at_becomes_a_dead_letter(cluster: Cluster, pool: str) -> None:
    worker = cluster.worker(pool)
    _park(cluster, "poison")
    for body in ("", "[1]", "5"):
        cluster.sql(
            "INSERT INTO pgnotify.tasks (task_name, envelope, payload)"
            " SELECT 'celery', envelope, convert_to(%s, 'UTF8') FROM pgnotify.tasks"
            " WHERE task_name = 'parked'",
            body,
        )
    cluster.sql(
        "UPDATE pgnotify.tasks SET task_name = 'celery', envelope ="
        ' replace(envelope, \'"task": "tests.celery.app.record"\', \'"task": [1]\')'
        " WHERE task_name = 'parked'"
    )
    cluster.tasks.record.delay("afterwards")
    cluster.wait_happened("done", {"afterwards"})
    cluster.wait_queued(0, 0)
    dead = cluster.sql(
        "SELECT DISTINCT split_part(reason, ':', 1), attempts, worker_id IS NOT NULL"
        " FROM pgnotify.dead_letters"
    )
    assert dead == [("no task", 1, True)]
    assert worker.returncode is None


def test_an_event_that_celery_raises_at_ends_no_worker(cluster: Cluster) -> None:
    workers = [cluster.worker("solo", args=["-E"]) for _ in range(2)]
    with cluster.tasks.app.connection_for_write() as connection:
        producer = connection.Producer(serializer="json")
        for body in ([1], None, 5, {}):
            producer.publish(body, exchange="celeryev", routing_key="worker.heartbeat")
    for worker in workers:
        worker.wait_log("message.no_task")
        assert cluster.inspect(worker).ping() == {worker.name: {"ok": "pong"}}


def test_restarted_ids_do_not_collide_with_dead_letters(cluster: Cluster) -> None:
    worker = cluster.worker("solo")
    for n in range(2):
        cluster.tasks.reject.delay(f"dead-{n}", False)
        cluster.wait_queued(0, 0)
        wait_until(lambda n=n: len(cluster.sql("SELECT 1 FROM pgnotify.dead_letters")) == n + 1)  # type: ignore[misc]
        cluster.sql("TRUNCATE pgnotify.tasks RESTART IDENTITY")
    assert worker.returncode is None


def test_a_changed_table_and_a_forgotten_statement_are_survived(cluster: Cluster) -> None:
    worker = cluster.worker("solo")
    cluster.tasks.record.delay("before")
    cluster.wait_happened("done", {"before"})
    cluster.wait_queued(0, 0)
    # The server refuses to change what this function depends on; these tasks do without it.
    cluster.sql("DROP FUNCTION pgnotify.bury")
    cluster.sql("ALTER TABLE pgnotify.tasks ALTER COLUMN envelope TYPE varchar")
    cluster.tasks.record.delay("after")
    cluster.wait_happened("done", {"after"})
    cluster.wait_queued(0, 0)
    assert worker.returncode is None


def test_a_schema_dropped_under_a_running_worker_is_made_again(cluster: Cluster) -> None:
    worker = cluster.worker("solo")
    cluster.tasks.record.delay("before")
    cluster.wait_happened("done", {"before"})
    cluster.sql("DROP SCHEMA pgnotify CASCADE")
    cluster.tasks.record.delay("after")
    cluster.wait_happened("done", {"after"})
    assert worker.returncode is None

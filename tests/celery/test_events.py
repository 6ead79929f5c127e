"""Events: what workers tell each other and everybody who listens."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fix_cluster import POOLS, Cluster
from fix_worker import CeleryWorker
from helpers import wait_until

#: Queues that workers and listeners have for themselves.
OWN_QUEUES = (
    "SELECT queue_name FROM pgnotify.queues WHERE queue_name ~ '(pidbox$|^celeryev)'"
    " ORDER BY queue_name"
)


#: Whether all who listen to events are told them directly by now.
LIVE = "SELECT bool_and(live) FROM pgnotify.queues WHERE queue_name ~ '^celeryev'"


class Ear:
    """A receiver of events, as monitors have it."""

    def __init__(self, connection: Any) -> None:
        self.events: list[dict[str, Any]] = []
        self._connection = connection

    def of(self, task_id: str) -> list[str]:
        """Return the types of a task's events."""
        return [event["type"] for event in self.events if event.get("uuid") == task_id]

    def wait(self, condition: Callable[[], Any]) -> None:
        """Listen until the condition holds."""

        def listened() -> Any:
            try:
                self._connection.drain_events(timeout=0.1)
            except TimeoutError:
                pass
            return condition()

        wait_until(listened, 60, lambda: f"heard: {Counter(e['type'] for e in self.events)}")


@contextmanager
def listening(cluster: Cluster) -> Iterator[Ear]:
    """Listen to all events of a broker from now on."""
    app = cluster.tasks.app
    with ExitStack() as stack:
        connection = stack.enter_context(app.connection())
        receiver = app.events.Receiver(connection)
        clone, _, _ = stack.enter_context(receiver.consumer_context(wakeup=False))
        ear = Ear(clone)
        receiver.handlers["*"] = ear.events.append
        yield ear


@pytest.mark.parametrize("pool", POOLS)
def test_a_tasks_life_is_told(cluster: Cluster, pool: str) -> None:
    cluster.worker(pool, args=["-E"])
    cluster.tasks.app.conf.task_send_sent_event = True
    with listening(cluster) as ear:
        good, bad = cluster.tasks.with_result.delay("good"), cluster.tasks.fail.delay("bad")
        life = ["task-received", "task-sent", "task-started"]
        ear.wait(lambda: sorted(ear.of(good.id)) == [*life, "task-succeeded"])
        ear.wait(lambda: sorted(ear.of(bad.id)) == ["task-failed", *life])
        ear.wait(lambda: "worker-heartbeat" in {event["type"] for event in ear.events})
    (failed,) = [event for event in ear.events if event["type"] == "task-failed"]
    assert failed["exception"] == "ValueError('bad')"


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_events_bigger_than_a_notification_come_whole_and_once(cluster: Cluster, pool: str) -> None:
    cluster.worker(pool, concurrency=4, args=["-E"])
    words = [f"{n} {'x' * 20_000}" for n in range(30)]
    with listening(cluster) as ear:
        # What is told before goes in rows, and nothing was too big for a notification.
        ear.wait(lambda: cluster.sql(LIVE) == [(True,)])
        ids = [cluster.tasks.fail.delay(word).id for word in words]
        ear.wait(lambda: Counter(e["type"] for e in ear.events)["task-failed"] >= len(ids))
        # They are kept for a minute, for slower listeners.
        assert cluster.sql("SELECT count(*) > 0 FROM pgnotify.broadcasts") == [(True,)]
    told = {event["uuid"]: event for event in ear.events if event["type"] == "task-failed"}
    assert [told[task_id]["exception"] for task_id in ids] == [f"ValueError({w!r})" for w in words]
    seen = Counter((event["uuid"], event["type"]) for event in ear.events if "uuid" in event)
    kinds = ("task-received", "task-started", "task-failed")
    assert seen == {(task_id, kind): 1 for task_id in ids for kind in kinds}


def test_several_listeners_hear_the_same_and_leave_nothing_behind(cluster: Cluster) -> None:
    worker = cluster.worker("solo", args=["-E"])
    before = cluster.sql(OWN_QUEUES)
    with listening(cluster) as one, listening(cluster) as two:
        task = cluster.tasks.record.delay("heard by both")
        for ear in (one, two):
            ear.wait(lambda ear=ear: "task-succeeded" in ear.of(task.id))  # type: ignore[misc]
        assert len(cluster.sql(OWN_QUEUES)) == len(before) + 2
    wait_until(lambda: cluster.sql(OWN_QUEUES) == before)
    assert worker.returncode is None


def test_task_events_are_switched_on_and_off(cluster: Cluster) -> None:
    worker = cluster.worker("threads")
    with listening(cluster) as ear:
        assert cluster.tell("enable_events", worker) == [{"ok": "task events enabled"}]
        loud = cluster.tasks.record.delay("loud")
        ear.wait(lambda: "task-succeeded" in ear.of(loud.id))
        assert cluster.tell("disable_events", worker) == [{"ok": "task events disabled"}]
        quiet = cluster.tasks.record.delay("quiet")
        cluster.wait_happened("done", {"quiet"})
        cluster.wait_queued(0, 0)
        cluster.tell("enable_events", worker)
        again = cluster.tasks.record.delay("again")
        ear.wait(lambda: "task-succeeded" in ear.of(again.id))
    assert ear.of(quiet.id) == []


def test_the_events_command_dumps_them(cluster: Cluster, tmp_path: Path) -> None:
    cluster.worker("solo", args=["-E"])
    command = [sys.executable, "-m", "celery", "-A", "tests.celery.app", "events", "--dump"]
    dump = CeleryWorker("dump", command, cluster.env(), tmp_path / "dump.log")
    try:
        dump.wait_log("heartbeat:")
        task = cluster.tasks.record.delay("dumped")
        dump.wait_log(f"tests.celery.app.record({task.id}) args=('dumped',)")
        dump.wait_log("task succeeded")
    finally:
        dump.kill()


# -- between workers


def test_a_worker_that_starts_later_learns_what_was_revoked(cluster: Cluster) -> None:
    first = cluster.worker("solo")
    ids = [f"revoked-{n:04}" for n in range(500)]
    cluster.tell("revoke", first, task_id=ids)
    second = cluster.worker("solo")
    second.wait_log("mingle: sync with 1 nodes")
    revoked = cluster.inspect(second).revoked()[second.name]
    assert set(ids) <= set(revoked)


def test_workers_see_each_other_come_and_go(cluster: Cluster) -> None:
    workers = [cluster.worker("solo", args=["-l", "DEBUG"], wait=False) for _ in range(3)]
    for worker in workers:
        for other in workers:
            if other is not worker:
                worker.wait_log(f"{other.name} joined the party")
    workers[0].stop()
    for worker in workers[1:]:
        worker.wait_log(f"{workers[0].name} left")


def test_the_queues_of_a_killed_worker_vanish(cluster: Cluster) -> None:
    config = {"control_queue_expires": 2, "event_queue_expires": 2}
    worker, survivor = (cluster.worker("solo", args=["-E"], config=config) for _ in range(2))
    before = {name for (name,) in cluster.sql(OWN_QUEUES)}
    assert len([name for name in before if name.startswith("celeryev")]) == 2
    worker.kill()
    wait_until(lambda: len(cluster.sql(OWN_QUEUES)) == 2, 60)
    after = {name for (name,) in cluster.sql(OWN_QUEUES)}
    assert after < before
    assert f"{survivor.name}.celery.pidbox" in after
    bound = cluster.sql("SELECT DISTINCT queue_name FROM pgnotify.bindings")
    assert {name for (name,) in bound} == after | {"celery"}

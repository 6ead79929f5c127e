"""Remote control: every command reaches the workers it is meant for, and is answered."""

from __future__ import annotations

import json
from typing import Any

import psutil
import pytest
from celery import Celery
from fix_cluster import POOLS, Cluster
from fix_worker import CeleryWorker
from helpers import wait_until

APP = "tests.celery.app"

#: Ends a worker's connections.
TERMINATE = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
    " WHERE application_name LIKE 'kombu_pgnotify@%%:{}'"
)


@pytest.fixture(scope="module")
def worker(shared_cluster: Cluster) -> CeleryWorker:
    """A worker with two processes, each taking one task at a time."""
    return shared_cluster.worker(
        config={"worker_prefetch_multiplier": 1, "worker_pool_restarts": True}
    )


def start(cluster: Cluster, count: int, pool: str, **kwargs: Any) -> list[CeleryWorker]:
    """Start workers side by side."""
    workers = [cluster.worker(pool, wait=False, **kwargs) for _ in range(count)]
    for worker in workers:
        worker.wait_log("ready.")
    return workers


# -- inspect


@pytest.mark.parametrize("pool", POOLS)
def test_a_worker_of_any_pool_answers_and_obeys(cluster: Cluster, pool: str) -> None:
    cluster.use(eta_in_broker=False)
    worker = cluster.worker(pool, concurrency=1, config={"worker_prefetch_multiplier": 4})
    tasks, inspect = cluster.tasks, cluster.inspect(worker)

    def ask(command: str, *args: Any) -> Any:
        answers = getattr(inspect, command)(*args)
        assert answers is not None, f"nobody answers {command}"
        assert set(answers) == {worker.name}
        return answers[worker.name]

    assert ask("ping") == {"ok": "pong"}
    assert APP + ".record" in ask("registered")
    assert ask("stats")["broker"]["transport"] == "pgnotify"
    assert ask("conf")["task_ignore_result"] is True
    assert "pgnotify" in ask("report")["ok"]
    tasks.app.control.revoke("no-such-task")
    wait_until(lambda: "no-such-task" in ask("revoked"))
    later = tasks.record.apply_async(("later",), countdown=3600)
    wait_until(lambda: [item["request"]["id"] for item in ask("scheduled")] == [later.id])
    assert "ok" in cluster.tell("add_consumer", worker, queue="more")[0]
    tasks.record.apply_async(("more",), queue="more")
    cluster.wait_happened("done", {"more"})
    assert {queue["name"] for queue in ask("active_queues")} == {"celery", "more"}
    if pool != "solo":
        # That one answers between its tasks only.
        busy = tasks.wait_for_gate.delay("busy", "gate")
        cluster.wait_happened("started", {"busy"})
        waiting = tasks.record.delay("waiting")
        wait_until(lambda: [task["id"] for task in ask("active")] == [busy.id])
        wait_until(lambda: waiting.id in {task["id"] for task in ask("reserved")})
        assert ask("query_task", busy.id)[busy.id][0] == "active"
        cluster.open_gate("gate")
        cluster.wait_happened("done", {"busy", "waiting"})
    tasks.app.control.shutdown(destination=[worker.name])
    assert worker.wait() == 0


def test_answers_bigger_than_a_notification_arrive(cluster: Cluster) -> None:
    # Twenty for each of them.
    workers = start(cluster, 2, "threads", config={"worker_prefetch_multiplier": 10})
    for n in range(40):
        cluster.tasks.wait_for_gate.delay(f"{n} {'x' * 500}", "gate")
    cluster.wait_queued(40, 40)
    reserved = cluster.inspect(*workers).reserved()
    assert set(reserved) == {worker.name for worker in workers}
    for tasks in reserved.values():
        assert len(json.dumps(tasks)) > 8000
    # So does a question that is.
    ids = [f"{n:036}" for n in range(300)]
    answers = cluster.tell("revoke", *workers, task_id=ids)
    assert all("flagged as revoked" in answer["ok"] for answer in answers)
    cluster.open_gate("gate")
    cluster.wait_queued(0, 0)


def test_commands_go_to_all_or_to_those_that_are_named(cluster: Cluster) -> None:
    workers = start(cluster, 3, "solo")
    names = {worker.name for worker in workers}
    control = cluster.tasks.app.control
    for limit in range(1, 4):
        assert len(control.ping(timeout=30, limit=limit)) == limit
    assert set(cluster.inspect(*workers).ping()) == names
    assert set(cluster.inspect(workers[1]).ping()) == {workers[1].name}
    found = control.inspect(pattern="worker[13]@*", matcher="glob", limit=2, timeout=30).ping()
    assert set(found) == {workers[0].name, workers[2].name}
    # Shut down one.
    control.shutdown(destination=[workers[1].name])
    assert workers[1].wait() == 0
    assert set(cluster.inspect(workers[0], workers[2]).ping()) == names - {workers[1].name}


def test_six_workers_answer_while_all_are_busy(cluster: Cluster) -> None:
    workers = start(cluster, 6, "threads", concurrency=1)
    labels = {f"task-{n}" for n in range(6)}
    for label in sorted(labels):
        cluster.tasks.wait_for_gate.delay(label, "gate")
    wait_until(lambda: cluster.queued() == (6, 6))
    for _ in range(5):
        assert len(cluster.inspect(*workers).ping()) == 6
    cluster.open_gate("gate")
    cluster.wait_happened("done", labels)


@pytest.mark.parametrize("pool", ["prefork", "gevent"])
def test_workers_answer_again_after_losing_their_connections_and_queues(
    cluster: Cluster, pool: str
) -> None:
    worker = cluster.worker(pool)
    ping = cluster.tasks.app.control.inspect(destination=[worker.name], timeout=2).ping
    for loss in (
        TERMINATE.format(worker.pid),
        "DELETE FROM pgnotify.queues",
    ):
        assert ping()
        cluster.sql(loss)
        wait_until(ping, 30, worker.log)
    cluster.tasks.record.delay("afterwards")
    cluster.wait_happened("done", {"afterwards"})


def test_applications_with_prefixes_of_their_own_share_a_schema(cluster: Cluster) -> None:
    workers = {}
    for prefix in ("one.", "two."):
        cluster.use(queue_name_prefix=prefix)
        workers[prefix] = cluster.worker("solo", wait=False)
    for prefix, worker in workers.items():
        worker.wait_log("ready.")
        app = Celery("client", broker=cluster.broker_url)
        app.conf.broker_transport_options = {"queue_name_prefix": prefix}
        assert app.control.ping(limit=1, timeout=30) == [{worker.name: {"ok": "pong"}}]
        assert app.control.ping(timeout=0.5) == [{worker.name: {"ok": "pong"}}]
        for n in range(5):
            app.send_task(f"{APP}.record", (f"{prefix}{n}",))
        app.close()
    wait_until(lambda: sum(cluster.happened().values()) == 10)
    pids = cluster.sql("SELECT DISTINCT left(label, 4), pid FROM executions ORDER BY 1")
    assert pids == [(prefix, worker.pid) for prefix, worker in workers.items()]
    assert "mingle: all alone" in workers["two."].log()


# -- control


def test_a_revoked_task_does_not_run(shared_cluster: Cluster, worker: CeleryWorker) -> None:
    tasks = shared_cluster.tasks
    held = tasks.record.apply_async(("revoked",), countdown=1)
    held.revoke()
    worker.wait_log(f"Tasks flagged as revoked: {held.id}")
    worker.wait_log(f"Discarding revoked task: {APP}.record[{held.id}]")
    assert "revoked" not in shared_cluster.happened()


def test_a_running_task_is_terminated_and_not_run_again(
    shared_cluster: Cluster, worker: CeleryWorker
) -> None:
    endless = shared_cluster.tasks.wait_for_gate.delay("terminated", "never")
    shared_cluster.wait_happened("started", {"terminated"})
    shared_cluster.tell("revoke", worker, task_id=endless.id, terminate=True, signal="KILL")
    shared_cluster.wait_queued(0, 0)
    assert shared_cluster.happened("started")["terminated"] == 1


def test_running_tasks_are_terminated_by_their_stamps(
    shared_cluster: Cluster, worker: CeleryWorker
) -> None:
    task = shared_cluster.tasks.wait_for_gate.s("stamped", "never")
    task.stamp(batch="b-1")
    task.apply_async()
    shared_cluster.wait_happened("started", {"stamped"})
    answers = shared_cluster.tell(
        "revoke_by_stamped_headers", worker, headers={"batch": ["b-1"]}, terminate=True
    )
    assert "revoked" in answers[0]["ok"]
    shared_cluster.wait_queued(0, 0)


def test_limits_of_rate_and_time_are_set(cluster: Cluster) -> None:
    worker, record = cluster.worker("solo"), cluster.tasks.record
    limits = {"task_name": record.name, "soft": 30, "hard": 60}
    assert cluster.tell("time_limit", worker, **limits) == [{"ok": "time limits set successfully"}]
    limit = {"task_name": record.name, "rate_limit": "1/h"}
    answer = [{"ok": "new rate limit set successfully"}]
    assert cluster.tell("rate_limit", worker, **limit) == answer
    for label in ("first", "second"):
        record.delay(label)
    cluster.wait_happened("done", {"first"})
    # The second waits in the worker.
    cluster.wait_queued(1, 1)
    cluster.tasks.sleep.delay("no limit", 0)
    cluster.wait_happened("done", {"no limit"})
    assert "second" not in cluster.happened()
    unknown = {"task_name": "none", "rate_limit": "1/s"}
    assert cluster.tell("rate_limit", worker, **unknown) == [{"error": "unknown task"}]


def test_a_task_that_takes_too_long_is_ended_and_not_run_again(
    shared_cluster: Cluster, worker: CeleryWorker
) -> None:
    shared_cluster.tasks.wait_for_gate.apply_async(("too long", "never"), time_limit=0.5)
    worker.wait_log("Hard time limit (0.5s) exceeded")
    shared_cluster.wait_queued(0, 0)
    assert shared_cluster.happened("started")["too long"] == 1


def test_queues_are_added_and_cancelled(shared_cluster: Cluster, worker: CeleryWorker) -> None:
    tell, record = shared_cluster.tell, shared_cluster.tasks.record
    record.apply_async(("added",), queue="more")
    assert "ok" in tell("add_consumer", worker, queue="more")[0]
    shared_cluster.wait_happened("done", {"added"})
    names = {queue["name"] for queue in shared_cluster.inspect(worker).active_queues()[worker.name]}
    assert names == {"celery", "more"}
    assert tell("cancel_consumer", worker, queue="more") == [
        {"ok": "no longer consuming from more"}
    ]
    record.apply_async(("cancelled",), queue="more")
    record.delay("goes on")
    shared_cluster.wait_happened("done", {"goes on"})
    shared_cluster.wait_queued(1, 0)
    assert "cancelled" not in shared_cluster.happened()
    assert "Purged 1 message from 1" in shared_cluster.run("purge", "-f", "-Q", "more")
    shared_cluster.wait_queued(0, 0)


def test_the_pool_grows_shrinks_and_restarts(shared_cluster: Cluster, worker: CeleryWorker) -> None:
    tell = shared_cluster.tell
    children = psutil.Process(worker.pid).children
    before = {child.pid for child in children()}
    assert tell("pool_grow", worker, n=1) == [{"ok": "pool will grow"}]
    wait_until(lambda: len(children()) == 3)
    assert tell("pool_shrink", worker, n=1) == [{"ok": "pool will shrink"}]
    wait_until(lambda: len(children()) == 2)
    assert tell("pool_restart", worker) == [{"ok": "reload started"}]

    def each_is_new() -> bool:
        # An idle process looks at the order to restart only once it has run another task.
        shared_cluster.tasks.record.delay("during the restart")
        return not before & {child.pid for child in children()}

    wait_until(each_is_new, 90)
    shared_cluster.tasks.record.delay("after the restart")
    shared_cluster.wait_happened("done", {"after the restart"})


def test_the_pool_is_scaled(cluster: Cluster) -> None:
    worker = cluster.worker("prefork", args=["--autoscale", "2,1"])
    children = psutil.Process(worker.pid).children
    assert cluster.tell("autoscale", worker, max=3, min=3) == [{"ok": "autoscale now max=3 min=3"}]
    wait_until(lambda: len(children()) == 3)


def test_a_command_that_fails_is_answered_and_the_next_ones_too(
    shared_cluster: Cluster, worker: CeleryWorker
) -> None:
    tell = shared_cluster.tell
    for _ in range(3):
        (answer,) = tell("time_limit", worker, no_such_argument=1)
        assert "error" in answer
    assert shared_cluster.inspect(worker).ping() == {worker.name: {"ok": "pong"}}


# -- commands


def test_status_lists_the_workers(cluster: Cluster) -> None:
    names = [worker.name for worker in start(cluster, 2, "solo")]
    shown = cluster.run("status", "-t", "30", "-d", ",".join(names))
    assert "2 nodes online" in shown
    for name in names:
        assert f"{name}: OK" in shown


def test_bindings_are_listed(cluster: Cluster) -> None:
    listed = cluster.run("list", "bindings").splitlines()
    assert [line.split() for line in listed[2:]] == [["celery", "celery", "celery"]]


AMQP_SHELL = """
exchange.declare news topic
queue.bind box news a.#
queue.declare box true
basic.get box true
queue.purge box
queue.delete box
exchange.delete news false
queue.declare box true
exchange.declare news topic true
"""


def test_the_amqp_shell(cluster: Cluster) -> None:
    cluster.run("amqp", "queue.declare", "box")
    for label in ("got", "purged", "purged too"):
        cluster.tasks.record.apply_async((label,), queue="box")
    shown = cluster.run("amqp", "repl", stdin=AMQP_SHELL.lstrip())
    assert "queue:box messages:3 consumers:0\nOK\n" in shown
    assert "'routing_key': 'box'" in shown
    assert "OK\n2 messages deleted.\nOK\n0 messages deleted.\nOK\nOK\n" in shown
    # It reconnects after an error, and queue and exchange are gone.
    assert shown.count("-> connected.") == 3


def test_the_amqp_shell_publishes_text(cluster: Cluster) -> None:
    cluster.run("amqp", "queue.declare", "box")
    cluster.run("amqp", "basic.publish", "hello", "", "box")
    assert "hello" in cluster.run("amqp", "basic.get", "box", "true")

"""What Celery's users do: results, workflows, serializers, broadcasts, beat and the rest."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from celery import Celery, chain, chord, group
from celery.utils.nodenames import worker_direct
from fix_cluster import Cluster
from fix_worker import CeleryWorker
from helpers import wait_until
from kombu import Queue
from kombu.common import Broadcast

# Other tests' applications have tasks of the same names.
pytestmark = pytest.mark.filterwarnings("ignore:Task name")

APP = "tests.celery.app"

#: Seconds that a result may take.
PATIENCE = 60

#: Understood by the workers and clients below.
FORMATS = [name for name in ("json", "pickle", "yaml", "msgpack") if importlib.util.find_spec(name)]


# -- results


@pytest.fixture(scope="module")
def rpc(shared_cluster: Cluster) -> Cluster:
    """A broker that carries results too, with a worker."""
    shared_cluster.worker("prefork", config={"result_backend": "rpc://", "accept_content": FORMATS})
    return shared_cluster


@pytest.fixture
def make_client(rpc: Cluster) -> Iterator[Callable[..., Celery]]:
    """A function that makes a client, whose results are forgotten three seconds after it."""
    made: list[Celery] = []

    def make(**config: Any) -> Celery:
        client = Celery(f"client-{len(made)}", broker=rpc.broker_url, backend="rpc://")
        client.conf.update(result_expires=3, **config)
        made.append(client)
        return client

    yield make
    for client in made:
        with suppress(AttributeError):  # it has consumed nothing
            client.backend.result_consumer.stop()
        client.close()


@pytest.fixture
def client(make_client: Callable[..., Celery]) -> Celery:
    return make_client()


def test_results_come_by_rpc(client: Celery) -> None:
    def add(x: Any, y: Any) -> Any:
        return client.signature(f"{APP}.add", (x, y))

    results = [add(n, n).delay() for n in range(50)]
    assert [result.get(PATIENCE) for result in reversed(results)] == list(range(98, -1, -2))
    assert group(add(n, 1) for n in range(20)).apply_async().get(PATIENCE) == list(range(1, 21))
    last = client.signature(f"{APP}.add", (3,))
    assert chain(add(1, 2), last).apply_async().get(PATIENCE) == 6
    assert add("x" * 100_000, "y").delay().get(PATIENCE) == "x" * 100_000 + "y"
    with pytest.raises(ValueError):
        client.send_task(f"{APP}.fail", ("raised",), ignore_result=False).get(PATIENCE)


def test_clients_get_their_own_results_and_leave_nothing_behind(
    rpc: Cluster, make_client: Callable[..., Celery]
) -> None:
    clients = [make_client() for _ in range(2)]
    results = [client.send_task(f"{APP}.add", (n, 1)) for n in range(10) for client in clients]
    assert [result.get(PATIENCE) for result in results] == [n + 1 for n in range(10) for _ in "ab"]
    for client in clients:
        client.backend.result_consumer.stop()
        # One more each, that nobody fetches.
        client.send_task(f"{APP}.record", (client.main,), ignore_result=False)
    rpc.wait_happened("done", {client.main for client in clients})
    names = [client.thread_oid for client in clients]
    left = (
        "SELECT (SELECT count(*) FROM pgnotify.queues WHERE queue_name = ANY (%s)),"
        " (SELECT count(*) FROM pgnotify.tasks WHERE task_name = ANY (%s))"
    )
    wait_until(lambda: rpc.sql(left, names, names) == [(0, 0)], PATIENCE)


@pytest.mark.parametrize("protocol", [1, 2])
def test_tasks_of_any_format_and_compression_run(
    make_client: Callable[..., Celery], protocol: int
) -> None:
    client, results = make_client(task_protocol=protocol), {}
    for serializer in FORMATS:
        for compression in (None, "zlib", "bzip2"):
            results[serializer, compression] = client.send_task(
                f"{APP}.add",
                (["ü", 1, None], ["😀" * 1000]),
                serializer=serializer,
                compression=compression,
            )
    found = {kind: result.get(PATIENCE) for kind, result in results.items()}
    assert found == {kind: ["ü", 1, None, "😀" * 1000] for kind in results}


def test_stamps_and_routing_keys_arrive(client: Celery) -> None:
    task = client.signature(f"{APP}.arguments", (1,), {"key": "value"})
    task.stamp(batch="b-1")
    found = task.apply_async().get(PATIENCE)
    assert found[:3] == [[1], {"key": "value"}, "celery"]
    assert found[3]["batch"] in ("b-1", ["b-1"])


def test_chords_and_replacements(cluster: Cluster, tmp_path: Path) -> None:
    backend = f"file://{tmp_path}"
    cluster.tasks.app.conf.result_backend = backend
    cluster.worker("threads", concurrency=4, config={"result_backend": backend})
    tasks = cluster.tasks
    header = [tasks.add.s(n, n) for n in range(10)]
    plain, chained = chord(header)(tasks.total.s()), chord(header)(tasks.total.s() | tasks.add.s(1))
    assert plain.get(PATIENCE) == 90
    assert chained.get(PATIENCE) == 91
    assert tasks.add_by_another.delay(1, 2).get(PATIENCE) == 3
    cluster.wait_queued(0, 0)


# -- who runs what


def test_a_broadcast_task_runs_once_on_each_worker(cluster: Cluster) -> None:
    workers = [
        cluster.worker("solo", env={cluster.tasks.BROADCAST: "everywhere"}, wait=False)
        for _ in range(3)
    ]
    for worker in workers:
        worker.wait_log("ready.")
    # Of such a queue a producer declares nothing.
    cluster.tasks.app.conf.task_queues = [Queue("celery"), Broadcast("everywhere")]
    for n in range(5):
        cluster.tasks.record.apply_async((f"task-{n}",), queue="everywhere")
    cluster.tasks.record.delay("once")
    wait_until(lambda: sum(cluster.happened().values()) >= 16)
    cluster.wait_queued(0, 0)
    assert cluster.happened() == {"once": 1, **{f"task-{n}": 3 for n in range(5)}}
    pids = cluster.sql("SELECT label, count(DISTINCT pid) FROM executions GROUP BY label")
    assert dict(pids) == cluster.happened()


def test_a_task_for_one_worker_runs_there(cluster: Cluster) -> None:
    config = {"worker_direct": True}
    workers = [cluster.worker("solo", config=config, wait=False) for _ in range(2)]
    for worker in workers:
        worker.wait_log("ready.")
    for worker in workers * 5:
        cluster.tasks.record.apply_async((worker.name,), queue=worker_direct(worker.name))
    wait_until(lambda: sum(cluster.happened().values()) == 10)
    pids = cluster.sql("SELECT DISTINCT label, pid FROM executions")
    assert sorted(pids) == sorted((worker.name, worker.pid) for worker in workers)


@pytest.mark.parametrize("pool", ["prefork", "threads", "gevent"])
def test_without_prefetch_a_worker_takes_no_more_than_it_can_start(
    cluster: Cluster, pool: str
) -> None:
    cluster.use(disable_prefetch=True)
    cluster.worker(pool, concurrency=2)
    for n in range(3):
        cluster.tasks.wait_for_gate.delay(f"task-{n}", f"gate-{n}")
    wait_until(lambda: len(cluster.happened("started")) == 2)
    cluster.wait_queued(3, 2)
    cluster.open_gate("gate-0")
    cluster.wait_happened("started", {"task-2"})
    labels = {f"short-{n}" for n in range(10)}
    for label in sorted(labels):
        cluster.tasks.record.delay(label)
    cluster.wait_queued(12, 2)
    # Another worker has all that the first one cannot start.
    cluster.worker("solo")
    cluster.wait_happened("done", labels)
    for n in (1, 2):
        cluster.open_gate(f"gate-{n}")
    cluster.wait_queued(0, 0)
    assert set(cluster.happened("done").values()) == {1}


@pytest.mark.parametrize("pool", ["threads", "gevent"])
def test_without_prefetch_the_next_task_starts_when_one_has_ended(
    cluster: Cluster, pool: str
) -> None:
    cluster.use(disable_prefetch=True, polling_interval=3600)
    cluster.worker(pool, concurrency=1, args=["--without-heartbeat", "--without-gossip"])
    labels = {f"task-{n}" for n in range(20)}
    for label in sorted(labels):
        cluster.tasks.sleep.delay(label, 0.05)
    cluster.wait_happened("done", labels, timeout=20)


def test_a_task_that_was_revoked_while_the_broker_held_it_does_not_run(cluster: Cluster) -> None:
    worker = cluster.worker("solo")
    held = cluster.tasks.record.apply_async(("revoked",), countdown=2)
    cluster.wait_queued(1, 0)
    held.revoke()
    worker.wait_log(f"Discarding revoked task: {APP}.record[{held.id}]")
    cluster.wait_queued(0, 0)
    assert cluster.happened() == {}


# -- commands


def test_beat_sends_periodic_tasks(cluster: Cluster, tmp_path: Path) -> None:
    tick = {"task": f"{APP}.record", "schedule": 0.2, "args": ["tick"]}
    command = [sys.executable, "-m", "celery", "-A", APP, "beat", "--pidfile="]
    command += ["-s", str(tmp_path / "schedule")]
    env = cluster.env(beat_schedule={"tick": tick}, beat_max_loop_interval=0.2)
    beat = CeleryWorker("beat", command, env, tmp_path / "beat.log")
    try:
        cluster.worker("solo")
        wait_until(lambda: cluster.happened("done")["tick"] >= 3)
    finally:
        beat.kill()


@pytest.fixture
def multi(cluster: Cluster, tmp_path: Path) -> Iterator[Any]:
    """A function that runs `celery multi`; its workers end with the test."""

    def run(command: str) -> str:
        return cluster.run(
            "multi", command, "one", "two", "-P", "solo", "-A", APP,
            f"--pidfile={tmp_path}/%n.pid", f"--logfile={tmp_path}/%n.log", "-l", "INFO",
        )  # fmt: skip

    yield run
    for file in tmp_path.glob("*.pid"):
        with suppress(OSError, ValueError):
            os.kill(int(file.read_text()), 9)


def test_multi_starts_and_stops_workers(cluster: Cluster, multi: Any, tmp_path: Path) -> None:
    multi("start")
    logs = [tmp_path / "one.log", tmp_path / "two.log"]
    wait_until(lambda: all(log.exists() and "ready." in log.read_text() for log in logs), 60)
    labels = {f"task-{n}" for n in range(4)}
    for label in sorted(labels):
        cluster.tasks.record.delay(label)
    cluster.wait_happened("done", labels)
    multi("stopwait")
    assert not list(tmp_path.glob("*.pid"))

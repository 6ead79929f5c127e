"""Envelopes, events and commands of every wrong shape end no Celery worker, and lose no other."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from fix_cluster import Cluster
from fix_worker import CeleryWorker
from helpers import wait_until

POOLS = ("prefork", "gevent")
SURROGATE = "\ud800"
VALUES = [None, 5, -1.5, "", "x", SURROGATE, "\0", [1], {"a": 1}, True, 10**30]
HEADERS = (
    "task id eta expires timelimit retries group root_id parent_id shadow origin lang argsrepr"
    " kwargsrepr ignore_result stamps stamped_headers replaced_task_nesting meth group_index"
    " compression"
).split()
PROPERTIES = (
    "correlation_id reply_to delivery_mode delivery_info priority body_encoding content_type"
    " content_encoding expiration message_id"
).split()
BODIES = [
    b"", b"5", b"null", b'"x"', b"{}", b"[1]", b"[1, 2, 3]", b"[[], [], {}]", b"[[], {}, []]",
    b"[[], {}, {}, 4]", b'[["x"], {}, {"callbacks": 5}]', b'[["x"], {}, {"chain": [1]}]',
    b'[["x"], {}, {"chord": [1], "errbacks": {}}]', b"{", b"\xff\xfe", b"[[], {}, null]",
    b'{"args": 5, "kwargs": []}', b'[["\\ud800"], {}, {}]', b'[["\\u0000"], {}, {}]', b"NaN",
    b"[" * 100_000,
]  # fmt: skip
CONTENT = [
    ("application/x-unknown", "utf-8"), (5, "utf-8"), (None, None), ([1], {"a": 1}),
    ("application/json", "x"), ("application/json", 5), ("application/json", "binary"),
    ("application/x-python-serialize", "binary"), ("application/x-yaml", "utf-8"),
    ("application/data", "binary"), ("", ""), (SURROGATE, SURROGATE),
]  # fmt: skip

Message = tuple[str, dict[str, Any], bytes]


def malformed(envelope: dict[str, Any], payload: bytes) -> Iterator[Message]:
    """Make of a good task one message after the other with something wrong about it."""

    def changed(part: str, name: str, value: Any) -> Message:
        other = copy.deepcopy(envelope)
        other[part][name] = value
        return f"{part} {name}={value!r}", other, payload

    for name in HEADERS:
        yield from (changed("headers", name, value) for value in VALUES)
    for name in PROPERTIES:
        yield from (changed("properties", name, value) for value in VALUES)
    for method in ("gzip", "bzip2", "lzma", "zstd", "x"):
        yield changed("headers", "compression", method)
    for limit in ([1, 2, 3], ["a", "b"], [None, "x"], [[1], {}], [-1, -1], [10**400, 0]):
        yield changed("headers", "timelimit", limit)
    for time in ("2020-01-01", "9999-12-31T23:59:59-23:59", "0001-01-01T00:00:00+23:59"):
        yield changed("headers", "expires", time)
    for body in BODIES:
        yield f"body {body[:30]!r}", envelope, body
        # Celery's first protocol has no headers.
        yield f"body of protocol 1 {body[:30]!r}", {**envelope, "headers": {}}, body
    for kind, encoding in CONTENT:
        other = {**envelope, "content-type": kind, "content-encoding": encoding}
        yield f"content {kind!r} {encoding!r}", other, payload
    for task in ([1], {}, "x", SURROGATE):
        first = {"task": task, "id": "1", "args": 5, "kwargs": 5, "eta": [1], "expires": {}}
        body = json.dumps(first).encode()
        yield f"protocol 1 {task!r}", {**envelope, "headers": {}}, body


@pytest.fixture(scope="module")
def workers(shared_cluster: Cluster) -> dict[str, CeleryWorker]:
    """One worker of each pool, with a queue of its own."""
    found = {pool: shared_cluster.worker(pool, args=["-Q", pool], wait=False) for pool in POOLS}
    for worker in found.values():
        worker.wait_log("ready.")
    return found


@pytest.fixture(scope="module")
def good_task(shared_cluster: Cluster) -> tuple[dict[str, Any], bytes]:
    """A task as it is in the table."""
    shared_cluster.tasks.record.apply_async(("bad",), queue="parked")
    ((envelope, payload),) = shared_cluster.sql(
        "DELETE FROM pgnotify.tasks WHERE task_name = 'parked' RETURNING envelope, payload"
    )
    return json.loads(envelope), bytes(payload)


@pytest.mark.parametrize("pool", POOLS)
def test_no_task_of_a_wrong_shape_ends_a_worker_or_holds_up_another(
    pool: str,
    shared_cluster: Cluster,
    workers: dict[str, CeleryWorker],
    good_task: tuple[dict[str, Any], bytes],
) -> None:
    cluster, worker = shared_cluster, workers[pool]
    labels, names = set(), {}
    for n, (name, envelope, payload) in enumerate(malformed(*good_task)):
        ((task_id,),) = cluster.sql(
            "INSERT INTO pgnotify.tasks (task_name, envelope, payload) VALUES (%s, %s, %s)"
            " RETURNING task_id",
            pool,
            json.dumps(envelope),
            payload,
        )
        names[task_id] = name
        if n % 5 == 0:
            label = f"{pool}-{n}"
            cluster.tasks.record.apply_async((label,), queue=pool)
            labels.add(label)

    def left() -> list[str]:
        rows = cluster.sql("SELECT task_id FROM pgnotify.tasks WHERE task_name = %s", pool)
        return [names.get(task_id, "good") for (task_id,) in rows]

    def done_or_dead() -> bool:
        return not left() or worker.returncode is not None

    wait_until(done_or_dead, 30, lambda: f"left: {left()}")
    assert worker.returncode is None, f"left: {left()}"
    # Celery acknowledges a task before it runs it.
    cluster.wait_happened("done", labels)
    happened = cluster.happened("done")
    assert {label: happened[label] for label in labels} == dict.fromkeys(labels, 1)
    reasons = cluster.sql(
        "SELECT DISTINCT split_part(reason, ':', 1) FROM pgnotify.dead_letters"
        " WHERE task_name = %s",
        pool,
    )
    assert set(reasons) == {("no task",), ("unreadable",), ("rejected",)}
    assert worker.returncode is None


COMMANDS = [
    b"", b"5", b"[1]", b"{}", b"null", b'{"method": 5}', b'{"method": [1], "arguments": 5}',
    b'{"method": "unknown", "reply_to": 5}', b'{"method": "ping", "arguments": [1]}',
    b'{"method": "ping", "destination": 5}', b'{"method": "rate_limit", "arguments": {"x": 1}}',
    b'{"method": "ping", "reply_to": {"exchange": [1], "routing_key": {}}, "ticket": {}}',
    b'{"method": "ping", "pattern": "(((", "matcher": "regex"}', b"\xff", b"[" * 5000,
]  # fmt: skip
EVENTS = [
    b"", b"5", b"[1]", b"[[1]]", b"{}", b"null", b'{"type": 5}', b'{"type": "worker-online"}',
    b'{"type": "worker-heartbeat", "hostname": [1], "timestamp": "x", "clock": {}}',
    b'{"type": "worker-elect", "id": [1], "clock": "x", "topic": 5, "action": {}}', b"\xff",
    b'[{"type": "worker-heartbeat", "hostname": "x@y", "timestamp": null, "clock": 1}, 5]',
]  # fmt: skip


def test_no_command_and_no_event_of_a_wrong_shape_ends_a_worker(
    shared_cluster: Cluster, workers: dict[str, CeleryWorker]
) -> None:
    cluster = shared_cluster
    with cluster.tasks.app.connection_for_write() as connection:
        producer = connection.Producer(auto_declare=False)
        for kind, encoding in [("application/json", "utf-8"), ("text/x", "x"), ("", "")]:
            how = {"content_type": kind, "content_encoding": encoding, "delivery_mode": 1}
            for body in COMMANDS:
                producer.publish(body, exchange="celery.pidbox", headers={"clock": "x"}, **how)
                producer.publish(body, exchange="celery.pidbox", **how)
            for body in EVENTS:
                for key in ("worker.heartbeat", "worker.elect", "task.multi", ""):
                    producer.publish(body, exchange="celeryev", routing_key=key, **how)
    for worker in workers.values():
        # Celery starts its mailbox anew after each of these, and what was in it is gone.
        control = cluster.tasks.app.control.inspect([worker.name], timeout=1)
        assert wait_until(control.ping) == {worker.name: {"ok": "pong"}}
        label = f"{worker.name} works"
        (queue,) = cluster.inspect(worker).active_queues()[worker.name]
        cluster.tasks.record.apply_async((label,), queue=queue["name"])
        cluster.wait_happened("done", {label})
        assert worker.returncode is None

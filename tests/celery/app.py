"""The Celery application of the tests' workers and producers.

Its tasks write what happens to them into the table `executions` of the broker's database, on
connections of their own, so that a test can count executions whatever the broker does.
"""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import psycopg
from celery import Celery, Task
from celery.exceptions import Reject
from kombu import Queue
from kombu.common import Broadcast

RECORD_URL = "PGNOTIFY_TEST_RECORD_URL"  # postgresql:// URL of the tables below
OPTIONS = "PGNOTIFY_TEST_OPTIONS"  # JSON: broker_transport_options
CONFIG = "PGNOTIFY_TEST_CONFIG"  # JSON: more of Celery's configuration
BROADCAST = "PGNOTIFY_TEST_BROADCAST"  # an exchange whose messages go to every worker
GATE_POLL = 0.02  # seconds between two looks at a gate

TABLES = """
CREATE TABLE executions (
    label text NOT NULL,
    event text NOT NULL,
    pid integer NOT NULL,
    thread bigint NOT NULL,
    at timestamptz NOT NULL DEFAULT clock_timestamp()
);
CREATE TABLE gates (name text PRIMARY KEY);
"""

app = Celery("tests")
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options=json.loads(os.environ.get(OPTIONS, "{}")),
    task_ignore_result=True,
    worker_hijack_root_logger=False,
    **json.loads(os.environ.get(CONFIG, "{}")),
)
if exchange := os.environ.get(BROADCAST):
    app.conf.task_queues = [Queue("celery"), Broadcast(exchange)]


_kept = threading.local()


def _connection() -> psycopg.Connection[Any]:
    """Return this thread's own connection; a pool child makes its own."""
    kept = getattr(_kept, "connection", None)
    if kept is None or _kept.pid != os.getpid() or kept.closed:
        _kept.connection = psycopg.connect(os.environ[RECORD_URL], autocommit=True)
        _kept.pid = os.getpid()
    return _kept.connection  # type: ignore[no-any-return]


def _run(sql: bytes, params: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    try:
        cursor = _connection().execute(sql, params)
    except psycopg.OperationalError:
        # The server was restarted, which some tests are about.
        _connection().close()
        cursor = _connection().execute(sql, params)
    return cursor.fetchall() if cursor.description else []


def note(label: str, event: str) -> None:
    """Record that something happened to a task."""
    _run(
        b"INSERT INTO executions (label, event, pid, thread) VALUES (%s, %s, %s, %s)",
        (label, event, os.getpid(), threading.get_ident()),
    )


@app.task
def record(label: str) -> None:
    """Run and be seen."""
    note(label, "done")


@app.task(acks_late=True)
def record_late(label: str) -> None:
    """Run, be seen, then be acknowledged."""
    note(label, "done")


@app.task(ignore_result=False)
def with_result(label: str) -> str:
    """Run although nobody keeps the result."""
    note(label, "done")
    return label


@app.task(bind=True, max_retries=3)
def retry_once(self: Task, label: str) -> None:
    """Fail the first time."""
    note(label, f"try {self.request.retries}")
    if not self.request.retries:
        raise self.retry(countdown=0.1)


@app.task
def fail(label: str) -> None:
    """Raise."""
    note(label, "done")
    raise ValueError(label)


@app.task(acks_late=True)
def reject(label: str, requeue: bool) -> None:
    """Reject: requeued the first time, for good the second."""
    again = _run(b"SELECT 1 FROM executions WHERE label = %s", (label,))
    note(label, "rejected")
    raise Reject("on purpose", requeue=requeue and not again)


@app.task
def sleep(label: str, seconds: float) -> None:
    """Take some time."""
    note(label, "started")
    time.sleep(seconds)
    note(label, "done")


@app.task(acks_late=True)
def sleep_late(label: str, seconds: float) -> None:
    """Take some time, then be acknowledged."""
    note(label, "started")
    time.sleep(seconds)
    note(label, "done")


@app.task(acks_late=True)
def wait_for_gate(label: str, gate: str) -> None:
    """Take until the test opens the gate."""
    note(label, "started")
    while not _run(b"SELECT 1 FROM gates WHERE name = %s", (gate,)):
        time.sleep(GATE_POLL)
    note(label, "done")


@app.task
def wait_for_gate_early(label: str, gate: str) -> None:
    """Do so, acknowledged before."""
    wait_for_gate.run(label, gate)


@app.task(bind=True)
def redelivered(self: Task, label: str) -> None:
    """Record whether the broker says that this is not the first time."""
    note(label, f"redelivered {bool(self.request.delivery_info.get('redelivered'))}")


@app.task
def publish_more(label: str, count: int) -> None:
    """Publish from inside a task, on a pool child's own connection."""
    note(label, "done")
    for n in range(count):
        record.delay(f"{label}-{n}")


@app.task(ignore_result=False)
def add(x: Any, y: Any) -> Any:
    """Return a result."""
    return x + y


@app.task(ignore_result=False)
def total(numbers: list[Any]) -> Any:
    """Sum up."""
    return sum(numbers)


@app.task(bind=True, ignore_result=False)
def add_by_another(self: Task, x: int, y: int) -> Any:
    """Let another task take this one's place."""
    raise self.replace(add.s(x, y))


@app.task(bind=True, ignore_result=False)
def arguments(self: Task, *args: Any, **kwargs: Any) -> list[Any]:
    """Return what has arrived, and how."""
    return [list(args), kwargs, self.request.delivery_info["routing_key"], self.request.stamps]

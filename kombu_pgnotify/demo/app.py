"""The demo's Celery application, loaded by its workers and by the demo that sends them tasks."""

from __future__ import annotations

import os
import time
from functools import cache
from typing import Any

from celery import Celery

from kombu_pgnotify.broker import Broker
from kombu_pgnotify.session import Session
from kombu_pgnotify.sql import Statement, quote_identifier

#: Environment variables that tell a worker, a process of its own, where the demo takes place.
URL_VARIABLE = "PGNOTIFY_DEMO_URL"
SCHEMA_VARIABLE = "PGNOTIFY_DEMO_SCHEMA"

#: Seconds, instead of 60, so that nobody waits long for the lease of the killed worker to end.
VISIBILITY_TIMEOUT = 5

app = Celery("kombu_pgnotify.demo")
app.conf.update(
    # Acknowledge when a task is done: that is what brings it back if its worker dies.
    task_acks_late=True,
    # Do not lease more than is being worked on, so that the table shows who is busy.
    worker_prefetch_multiplier=1,
    task_ignore_result=True,
)


def configure(url: str, schema: str) -> None:
    """Say where the broker is."""
    app.conf.broker_url = url
    app.conf.broker_transport_options = {
        "schema": schema,
        "visibility_timeout": VISIBILITY_TIMEOUT,
    }


if URL_VARIABLE in os.environ:
    configure(os.environ[URL_VARIABLE], os.environ[SCHEMA_VARIABLE])


@app.task(bind=True)  # type: ignore[untyped-decorator]
def add(self: Any, x: int, y: int) -> None:
    """Report a sum."""
    report(self.request, "started")
    report(self.request, "finished", str(x + y))


@app.task(bind=True)  # type: ignore[untyped-decorator]
def work(self: Any, seconds: float) -> None:
    """Take some time."""
    report(self.request, "started")
    time.sleep(seconds)
    report(self.request, "finished")


def broker() -> Broker:
    """Return this process's broker, the one that Celery uses too."""
    found: Broker = app.connection_for_write().transport.broker
    return found


def report(request: Any, event: str, detail: str = "") -> None:
    """Write what a task does into the demo's own table, with the time at which it did it."""
    pid, at = os.getpid(), time.monotonic()  # the monotonic clock is the machine's, not ours
    params = (request.id, event, detail, request.hostname, pid, at)
    _session(pid).run((_report_statement(), params))


@cache
def _session(pid: int) -> Session:
    """Return a connection for reports; each process of the worker needs its own."""
    return broker().database.open()


@cache
def _report_statement() -> Statement:
    # The transaction does not wait for the disk: the tasks table is what matters.
    text = (
        "INSERT INTO {schema}.demo_log (celery_id, event, detail, worker, pid, at) "
        "SELECT $1, $2, $3, $4, $5::int, $6::float8 "
        "FROM (SELECT set_config('synchronous_commit', 'off', true)) AS settings"
    )
    schema = quote_identifier(broker().options.schema)
    return Statement("demo_report", text.replace("{schema}", schema).encode())

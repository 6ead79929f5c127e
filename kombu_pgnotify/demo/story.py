"""The demo itself: sets the stage, goes through the steps, leaves nothing behind."""

from __future__ import annotations

import atexit
import os
import statistics
import tempfile
import time
import uuid
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import celery
from kombu.exceptions import OperationalError

from kombu_pgnotify.embedded import EmbeddedPostgres, EmbeddedPostgresError
from kombu_pgnotify.errors import PgnotifyError

from .app import (
    SCHEMA_VARIABLE,
    URL_VARIABLE,
    VISIBILITY_TIMEOUT,
    add,
    app,
    broker,
    configure,
    work,
)
from .board import Board, Counts, Event
from .show import Screen, Show
from .signals import Signals
from .worker import COMMAND, CONCURRENCY, Worker

T = TypeVar("T")

#: Seconds for anything that takes a moment; a worker on a busy machine takes several.
PATIENCE = 60.0

#: Seconds between two looks at the database.
POLL_INTERVAL = 0.01

#: Tasks sent one by one to measure how soon a worker wakes up.
SAMPLES = 50

#: Tasks sent at once, and seconds each of them takes.
BURST = 200
BURST_SECONDS = 0.04

#: Seconds of the task whose worker is killed.
LONG_SECONDS = 2

#: Lets only those in who may enter the folder of the socket: us, on a machine of many.
HBA = ("host all all all reject",)


class DemoFailed(Exception):
    """Something did not happen; the text says what, for people."""


def run(url: str | None) -> int:
    """Run the demo on the server at `url`, or on one of its own; return the exit code."""
    screen, signals = Screen(), Signals()
    signals.install()
    begun = time.monotonic()
    demo = Demo(screen, signals)
    try:
        demo.play(url)
    except KeyboardInterrupt:
        screen.error("Interrupted. Everything is stopped and removed.")
        return 130
    except (DemoFailed, PgnotifyError, EmbeddedPostgresError, OperationalError) as exc:
        screen.error(f"The demo failed: {exc}")
        if demo.last_log:
            screen.error(f"The worker's log ends with:\n{demo.last_log}")
        return 1
    screen.line("")
    screen.line(f"Everything is stopped and removed, after {time.monotonic() - begun:.0f} s.")
    return 0


class Demo:
    """One performance. Whatever it starts is put on a stack that is unwound in any case."""

    def __init__(self, screen: Screen, signals: Signals) -> None:
        self.last_log = ""
        self._screen, self._signals = screen, signals
        self._stack = ExitStack()
        self._workers: list[Worker] = []
        self._folder = Path()
        self._board: Board

    def play(self, url: str | None) -> None:
        """Go through all the steps.

        Raises:
            DemoFailed, PgnotifyError, EmbeddedPostgresError, OperationalError: it failed.
        """
        atexit.register(self._stack.close)  # should a signal get through before `finally`
        try:
            self._set_up(url)
            first = self._start_worker()
            self._run_a_task(first)
            self._measure_wake_up(first)
            self._fill_and_empty(first)
            self._kill_and_take_over(first)
            self._invite()
        except Exception:
            self.last_log = self._workers[-1].log_tail() if self._workers else ""
            raise
        finally:
            with self._signals.held():
                self._stack.close()

    def _set_up(self, url: str | None) -> None:
        """Provide a server and a schema, and tell this process and the workers about them."""
        self._screen.step("PostgreSQL" if url is None else "Your PostgreSQL")
        with self._signals.held():
            folder = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="pgnotify-demo-"))
            self._folder = Path(folder)
            if url is None:
                _configure(self._start_postgres(), "pgnotify")
            else:
                _configure(url, f"pgnotify_demo_{uuid.uuid4().hex[:12]}")
                self._screen.line(broker().options.target.describe())
                self._screen.line(f"in the schema {broker().options.schema}, until the end")
            self._board = Board(broker())
            self._stack.callback(self._board.close)
            if url is not None:
                self._stack.callback(self._drop_schema)
            self._stack.callback(app.close)
            self._board.open()

    def _start_postgres(self) -> str:
        begun, postgres = time.monotonic(), EmbeddedPostgres(hba=HBA)
        with self._screen.busy("Starting PostgreSQL ..."):
            self._stack.enter_context(postgres)
        # Meant for other servers; PGHOSTADDR would even lead us to one.
        for name in [name for name in os.environ if name.startswith("PG") and "_" not in name]:
            del os.environ[name]
        took = time.monotonic() - begun
        self._screen.line(f"PostgreSQL {postgres.version}, started in {took:.1f} s")
        self._screen.line(f"temporary, in {postgres.folder}; only this account can connect")
        return postgres.url(scheme="pgnotify", unix=True)

    def _drop_schema(self) -> None:
        try:
            self._board.drop()
        except PgnotifyError as exc:
            schema = broker().options.schema
            raise DemoFailed(f"DROP SCHEMA {schema} CASCADE is left to you, since {exc}") from exc

    def _start_worker(self) -> Worker:
        name = f"worker{len(self._workers) + 1}"
        begun = time.monotonic()
        if not self._workers:
            self._screen.step("Celery")
            self._screen.line("$ " + " ".join(COMMAND), "bold")
        with self._signals.held():
            worker = Worker(name, self._folder)
            self._workers.append(worker)
            self._stack.callback(worker.stop)
        with self._screen.busy(f"Starting {name} ..."):
            self._wait(lambda: worker.ready, worker, f"{name} to be ready")
        took = time.monotonic() - begun
        self._screen.line(f"{name}: Celery {celery.__version__}, ready after {took:.1f} s")
        return worker

    def _run_a_task(self, worker: Worker) -> None:
        self._screen.step("A task")
        self._screen.line("add.delay(2, 3)")
        end = self._finished(add.delay(2, 3).id, worker)
        self._screen.line(f"{end.worker}, process {end.pid}: {end.detail}", "green")

    def _measure_wake_up(self, worker: Worker) -> None:
        """Send single tasks to an idle worker; its clock is ours, as it runs on this machine."""
        self._screen.step(f"How soon an idle worker wakes up: {SAMPLES} tasks, one after another")
        delays = []
        with self._screen.busy("Measuring ..."):
            for _ in range(SAMPLES):
                self._wait(lambda: self._board.counts().empty, worker, "the table to be empty")
                sent_at = time.monotonic()
                celery_id = work.delay(0).id
                self._finished(celery_id, worker)
                delays.append(self._board.events(celery_id)[0].at - sent_at)
        median, slowest = (f"{1000 * value:.1f} ms" for value in _median_and_max(delays))
        self._screen.line(
            f"from delay() to the first line of the task: median {median}, slowest {slowest}",
            "green",
        )

    def _fill_and_empty(self, worker: Worker) -> None:
        self._screen.step(f"The queue is a table: {BURST} tasks of {1000 * BURST_SECONDS:.0f} ms")
        self._screen.line(f"{broker().options.schema}.tasks, counted as it fills and empties:")
        before = self._board.counts().finished
        with self._screen.table(BURST) as show:
            for n in range(BURST):
                work.delay(BURST_SECONDS)
                if n % CONCURRENCY == 0:
                    self._look(before, show)

            def emptied() -> bool:
                counts = self._look(before, show)
                return counts.empty and counts.finished >= BURST

            self._wait(emptied, worker, f"all {BURST} tasks to finish")

    def _look(self, before: int, show: Show) -> Counts:
        """Read the tables and show what is there."""
        counts = self._board.counts()
        counts = counts._replace(finished=counts.finished - before)
        show(counts)
        return counts

    def _kill_and_take_over(self, first: Worker) -> None:
        self._screen.step(f"kill -9 in the middle of a task, with leases of {VISIBILITY_TIMEOUT} s")
        celery_id = work.delay(LONG_SECONDS).id
        start = self._wait(lambda: self._board.events(celery_id), first, "the task to start")[0]
        self._screen.line(f"{start.worker} has started a task of {LONG_SECONDS} s")
        first.kill()
        killed_at = time.monotonic()
        leases = self._board.leases()
        if not leases or len(self._board.events(celery_id)) != 1:
            raise DemoFailed("the task was over before its worker could be killed")
        self._screen.line(f"kill -9: {first.name} and all its processes are dead", "red")
        self._screen.line(f"the task is still in the table, leased for {leases[0]:.1f} s more")
        second = self._start_worker()
        with self._screen.busy("Waiting for the lease to end ..."):
            again = self._wait(
                lambda: self._board.events(celery_id)[1:], second, "the task to be taken over"
            )[0]
        self._screen.line(
            f"{again.worker} has started the task {again.at - killed_at:.1f} s after the kill"
        )
        end = self._finished(celery_id, second)
        self._screen.line(f"{end.worker} has finished it: nothing is lost", "green")

    def _invite(self) -> None:
        self._screen.step("With a database of your own")
        self._screen.line('broker_url = "pgnotify://user:password@host/database"   # your settings')
        self._screen.line("$ celery -A proj worker", "bold")
        self._screen.line("Tasks with acks_late=True survive kill -9, like the ones you have seen.")

    def _finished(self, celery_id: str, worker: Worker) -> Event:
        """Wait until the task has reported its end and is gone from the table."""

        def last_event() -> Event | None:
            events = self._board.events(celery_id)
            over = events and events[-1].event == "finished" and self._board.counts().empty
            return events[-1] if over else None

        return self._wait(last_event, worker, "a task to finish")

    def _wait(self, condition: Callable[[], T | None], worker: Worker, what: str) -> T:
        """Wait until the condition gives something true and return that."""
        deadline = time.monotonic() + PATIENCE
        while True:
            self._signals.check()
            if result := condition():
                return result
            if worker.returncode is not None:
                code = worker.returncode
                raise DemoFailed(f"{worker.name} ended (exit code {code}), waiting for {what}.")
            if time.monotonic() > deadline:
                raise DemoFailed(f"{PATIENCE:.0f} seconds were not enough for {what}.")
            time.sleep(POLL_INTERVAL)


def _configure(url: str, schema: str) -> None:
    """Tell the application and, through the environment, the workers where the broker is."""
    # Celery would prefer CELERY_BROKER_URL and the like to what its application says.
    for name in [name for name in os.environ if name.startswith("CELERY_")]:
        del os.environ[name]
    os.environ |= {URL_VARIABLE: url, SCHEMA_VARIABLE: schema}
    configure(url, schema)


def _median_and_max(values: list[float]) -> tuple[float, float]:
    return statistics.median(values), max(values)

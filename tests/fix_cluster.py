"""What tests of real workers share: a producer, the record of executions, the tasks table."""

from __future__ import annotations

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import psycopg
import pytest
from fix_postgres import Server
from fix_worker import REPOSITORY, CeleryWorker, celery_worker as _celery_worker
from helpers import wait_until

from kombu_pgnotify import broker as brokers

APP = Path(__file__).with_name("celery") / "app.py"
COMMAND_TIMEOUT = 60.0  # seconds; importing Celery on a busy machine takes several
REPLY_TIMEOUT = 30.0  # seconds; who knows how many answers come does not wait that long
POOLS = ["prefork", "threads", "solo", "gevent", "eventlet"]


class Cluster:
    """One broker: workers, a producer, and what happened to the tasks."""

    def __init__(
        self,
        database: str,
        broker_url: str,
        start: Callable[..., CeleryWorker],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.database = database
        self.broker_url = broker_url
        self._start = start
        self._connection: psycopg.Connection[Any] | None = None
        self.tasks = _load_app(monkeypatch, database)
        self.sql(self.tasks.TABLES)
        self.options: dict[str, Any] = {}
        self.tasks.app.conf.broker_url = broker_url

    def use(self, **options: Any) -> None:
        """Set transport options, for the producer and for workers started from now on."""
        self.options = options
        self.tasks.app.conf.broker_transport_options = dict(options)

    def worker(self, pool: str = "prefork", **kwargs: Any) -> CeleryWorker:
        """Start a worker and wait until it consumes."""
        env = {**self.env(**kwargs.pop("config", {})), **kwargs.pop("env", {})}
        return self._start(pool=pool, env=env, broker_url=self.broker_url, **kwargs)

    def run(self, *command: str, stdin: str = "") -> str:
        """Run a `celery` command to its end and return what it has written."""
        done = subprocess.run(
            [sys.executable, "-m", "celery", "-A", "tests.celery.app", *command],
            cwd=REPOSITORY,
            env=self.env(),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def env(self, **config: Any) -> dict[str, str]:
        """Return the environment of a `celery` command, for this broker."""
        return {
            **os.environ,
            "CELERY_BROKER_URL": self.broker_url,
            "PYTHONUNBUFFERED": "1",
            self.tasks.RECORD_URL: self.database,
            self.tasks.OPTIONS: json.dumps(self.options),
            self.tasks.CONFIG: json.dumps(config),
        }

    def inspect(self, *workers: CeleryWorker) -> Any:
        """Return Celery's Inspect of these workers: it waits until each has answered."""
        names = [worker.name for worker in workers]
        return self.tasks.app.control.inspect(destination=names, timeout=REPLY_TIMEOUT)

    def tell(self, command: str, *workers: CeleryWorker, **arguments: Any) -> list[Any]:
        """Send a control command to these workers and return their answers, in order."""
        names = [worker.name for worker in workers]
        answers = self.tasks.app.control.broadcast(
            command, arguments, destination=names, reply=True, timeout=REPLY_TIMEOUT
        )
        found = {name: answer for part in answers for name, answer in part.items()}
        return [found.get(name) for name in names]

    def sql(self, sql: str, *params: Any) -> list[tuple[Any, ...]]:
        """Run SQL on the test's own connection."""
        if self._connection is None or self._connection.closed:
            self._connection = psycopg.connect(self.database, autocommit=True)
        cursor = self._connection.execute(sql.encode(), params or None)
        return cursor.fetchall() if cursor.description else []

    def happened(self, event: str = "%") -> Counter[str]:
        """Count executions by label, of events like `event`."""
        rows = self.sql("SELECT label FROM executions WHERE event LIKE %s", event)
        return Counter(label for (label,) in rows)

    def wait_happened(self, event: str, labels: set[str], timeout: float = 60) -> None:
        """Wait until the event has happened to each label."""
        wait_until(
            lambda: labels <= set(self.happened(event)),
            timeout,
            lambda: f"{event} did not happen to {sorted(labels - set(self.happened(event)))[:20]}",
        )

    def fill(self, count: int = 8) -> set[str]:
        """Publish late tasks that wait for the gate `open`; return their labels."""
        labels = {f"late-{n}" for n in range(count)}
        for label in sorted(labels):
            self.tasks.wait_for_gate.delay(label, "open")
        return labels

    def wait_started(self, count: int) -> set[str]:
        """Wait until so many tasks have started, and return them."""
        wait_until(lambda: len(self.happened("started")) >= count, 30)
        return set(self.happened("started"))

    def open_gate(self, name: str) -> None:
        """Let the tasks that wait for the gate end."""
        self.sql("INSERT INTO gates VALUES (%s)", name)

    def queued(self) -> tuple[int, int]:
        """Return how many messages are in the table, and how many of them are leased."""
        exists = self.sql("SELECT to_regclass('pgnotify.tasks')")[0][0]
        if exists is None:
            return 0, 0
        return self.sql("SELECT count(*), count(lease_worker_id) FROM pgnotify.tasks")[0]  # type: ignore[return-value]

    def wait_queued(self, total: int, leased: int, timeout: float = 30) -> None:
        """Wait until the table holds so many messages, so many of them leased."""
        wait_until(
            lambda: self.queued() == (total, leased),
            timeout,
            lambda: f"{self.queued()} messages and leases, not {(total, leased)}",
        )

    def disconnect(self) -> None:
        """Close the test's own connection, since its server is about to go."""
        if self._connection is not None:
            self._connection.close()

    def close(self) -> None:
        """Close what the test itself has opened, threads included."""
        self.tasks.app.close()
        self.disconnect()
        name = self.database.rpartition("/")[2]
        for options, broker in list(brokers._brokers.items()):
            if options.target.params.get("dbname") == name:
                del brokers._brokers[options]
                broker.close()


def _load_app(monkeypatch: pytest.MonkeyPatch, database: str) -> ModuleType:
    """Import the application anew, so that each test has its own."""
    monkeypatch.delenv("PGNOTIFY_TEST_OPTIONS", raising=False)
    monkeypatch.setenv("PGNOTIFY_TEST_RECORD_URL", database)
    spec = importlib.util.spec_from_file_location("tests.celery.app", APP)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def cluster(
    database: str,
    broker_url: str,
    celery_worker: Callable[..., CeleryWorker],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Cluster]:
    """A broker of this test alone."""
    made = Cluster(database, broker_url, celery_worker, monkeypatch)
    yield made
    made.close()


@pytest.fixture(scope="module")
def shared_cluster(
    request: pytest.FixtureRequest, server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Cluster]:
    """A broker for all tests of a module, whose workers end with the last of them."""
    name = server.create_database()
    url, folder = server.url(name), tmp_path_factory.mktemp("shared")
    start_workers = contextmanager(inspect.unwrap(_celery_worker))
    with pytest.MonkeyPatch.context() as monkeypatch, start_workers(request, folder) as start:
        made = Cluster(url, server.url(name, scheme="pgnotify"), start, monkeypatch)
        yield made
        made.close()
    server.drop_database(name)


@pytest.fixture
def own_cluster(
    own_server: Server,
    celery_worker: Callable[..., CeleryWorker],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Cluster]:
    """A broker on a server of this test alone, which may be restarted."""
    name = own_server.create_database()
    url = own_server.url(name)
    made = Cluster(url, own_server.url(name, scheme="pgnotify"), celery_worker, monkeypatch)
    yield made
    made.close()

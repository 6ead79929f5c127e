"""The stage: a server, proxies before it, workers of several pools and producers."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil
from chaos_records import FOLDER, ROLE
from fix_postgres import Server
from fix_proxy import Proxy
from fix_worker import READY, CeleryWorker

from kombu_pgnotify.embedded import EmbeddedPostgres

HERE = Path(__file__).parent
DATABASE = "chaos"
PRODUCERS = 3
#: Pools and how many tasks each runs at once.
POOLS = {"prefork": 2, "threads": 4, "solo": 1, "gevent": 8}
STOP_TIMEOUT = 40.0  # seconds; the longest task takes eight
OURS = "application_name LIKE 'kombu_pgnotify@%'"


class Worker:
    """A place for a worker: its process may be replaced, each is an incarnation of it."""

    def __init__(self, name: str, proxy: Proxy, stage: Stage) -> None:
        self.name = name
        self.slots = POOLS[name]
        self.proxy = proxy
        self.incarnation = 0
        self.files_at_start = 0
        self._stage = stage
        self._process: CeleryWorker | None = None

    @property
    def instance(self) -> str:
        """The incarnation, as it calls itself in the records."""
        return f"{self.name}.{self.incarnation}"

    @property
    def process(self) -> CeleryWorker:
        assert self._process is not None
        return self._process

    def start(self) -> None:
        """Start the next incarnation; :meth:`wait_ready` waits until it consumes."""
        self.incarnation += 1
        command = [sys.executable, "-m", "celery", "-A", "chaos_app", "worker"]
        command += [
            "-n",
            f"{self.name}@chaos",
            "-P",
            self.name,
            "-c",
            str(self.slots),
            "-l",
            "INFO",
        ]
        env = self._stage.environment(self.instance, self.proxy)
        log = self._stage.folder / "logs" / f"{self.instance}.log"
        self._process = CeleryWorker(self.name, command, env, log)

    def wait_ready(self) -> None:
        self.process.wait_log(READY)
        self.files_at_start = self.open_files()

    def open_files(self) -> int:
        """How many file descriptors the worker's parent process has open."""
        with contextlib.suppress(psutil.Error):
            return int(psutil.Process(self.process.pid).num_fds())
        return 0

    def children(self) -> list[int]:
        """The processes of the pool, if it is one of processes."""
        with contextlib.suppress(psutil.Error):
            return [child.pid for child in psutil.Process(self.process.pid).children()]
        return []

    def signal_all(self, number: int) -> None:
        """Signal the worker and its pool's processes, as for a machine that stands still."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def stop(self) -> str:
        """Shut down warmly; return what was wrong with that, or nothing."""
        try:
            code = self.process.stop(STOP_TIMEOUT)
        except AssertionError:
            self.process.kill()
            return f"{self.instance} did not end within {STOP_TIMEOUT:g} s after SIGTERM"
        return f"{self.instance} ended with {code}" if code else ""

    def kill(self) -> None:
        """Kill whatever is left of it."""
        if self._process is not None:
            # Before the process is waited for: its number could be somebody else's afterwards.
            self.signal_all(signal.SIGCONT)
            self._process.kill()


class Stage:
    """Everything that is started, and how it is ended."""

    def __init__(self, lease: float, rate: float, seed: int) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="chaos-"))
        for name in ("logs", "records"):
            (self.folder / name).mkdir()
        self.lease, self._rate, self._seed = lease, rate, seed
        self._stack = contextlib.ExitStack()
        self.workers: list[Worker] = []
        self.proxies: list[Proxy] = []
        self._producers: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *error: object) -> None:
        self.end_processes()
        self._stack.close()

    def start(self) -> None:
        """Start the server and the workers, and wait until all consume."""
        # With fsync: the server will crash, and shall lose only what it may.
        embedded = self._stack.enter_context(EmbeddedPostgres())
        self.server = Server(embedded.url(), embedded)
        self.server.run_sql(f"CREATE DATABASE {DATABASE}")
        self.workers = [Worker(name, self._proxy(), self) for name in POOLS]
        self._producers_proxy = self._proxy()
        for worker in self.workers:
            worker.start()
        for worker in self.workers:
            worker.wait_ready()

    def start_producers(self) -> None:
        names = [worker.name for worker in self.workers]
        for number in range(1, PRODUCERS + 1):
            command = [sys.executable, str(HERE / "chaos_producer.py")]
            command += [f"{self._seed}-{number}", str(self._rate / PRODUCERS), *names]
            env = self.environment(f"producer{number}", self._producers_proxy)
            with open(self.folder / "logs" / f"producer{number}.log", "ab") as log:
                process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
            self._producers.append(process)

    def stop_producers(self) -> list[str]:
        """Let the producers end; return what was wrong with that."""
        complaints = []
        for producer in self._producers:
            producer.send_signal(signal.SIGTERM)
        for number, producer in enumerate(self._producers, 1):
            try:
                if code := producer.wait(STOP_TIMEOUT):
                    complaints.append(f"producer{number} ended with {code}")
            except subprocess.TimeoutExpired:
                complaints.append(f"producer{number} did not end within {STOP_TIMEOUT:g} s")
                producer.kill()
                producer.wait(STOP_TIMEOUT)
        return complaints

    def environment(self, role: str, proxy: Proxy | None) -> dict[str, str]:
        """The environment of a process of ours."""
        port = proxy.port if proxy else self.server.address[1]
        url = self.server.url(DATABASE, scheme="pgnotify", address=("127.0.0.1", port))
        options = {"visibility_timeout": self.lease, "statement_timeout": 2}
        return {
            **os.environ,
            "CELERY_BROKER_URL": url,
            "CHAOS_OPTIONS": json.dumps(options),
            FOLDER: str(self.folder / "records"),
            ROLE: role,
            "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
            "PYTHONUNBUFFERED": "1",
            # Killed workers leave temporary folders behind.
            "TMPDIR": str(self.folder),
        }

    def sql(self, sql: str) -> list[tuple[Any, ...]]:
        """Run a statement past the proxies."""
        return self.server.run_sql(sql, DATABASE)

    def messages(self) -> tuple[int, int, int]:
        """How many messages there are, how many are leased, and how many were given up."""
        return self.sql(  # type: ignore[return-value]
            "SELECT count(*), count(lease_worker_id),"
            " (SELECT count(*) FROM pgnotify.dead_letters) FROM pgnotify.tasks"
        )[0]

    def topology(self) -> Counter[str]:
        """The queues and bindings, without the parts of their names that are never the same."""
        rows = self.sql(
            "SELECT 'queue ' || queue_name FROM pgnotify.queues UNION ALL"
            " SELECT concat_ws(' ', 'binding', exchange_name, routing_key, queue_name)"
            " FROM pgnotify.bindings"
        )
        return Counter(re.sub(r"[0-9a-f]{8}-[0-9a-f-]{27}", "…", name) for (name,) in rows)

    def connections(self) -> list[str]:
        """The connections of ours that the server has."""
        rows = self.sql(
            f"SELECT application_name, pid, backend_start, query FROM pg_stat_activity WHERE {OURS}"
        )
        return [" ".join(map(str, row)) for row in rows]

    def processes(self) -> list[psutil.Process]:
        """Every process of ours that still runs, a killed worker's orphans too."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(FOLDER) == str(self.folder / "records"):
                    found.append(process)
        return [process for process in found if process.pid != os.getpid()]

    def end_processes(self) -> None:
        """Kill what still runs."""
        for worker in self.workers:
            worker.kill()
        for producer in self._producers:
            producer.kill()
            producer.wait(STOP_TIMEOUT)
        for orphan in self.processes():
            with contextlib.suppress(psutil.Error):
                orphan.kill()

    def _proxy(self) -> Proxy:
        proxy = Proxy(self.server)
        proxy.start()
        self._stack.callback(proxy.stop)
        self.proxies.append(proxy)
        return proxy


def our_threads() -> list[str]:
    """The names of the broker's threads in this process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("pgnotify")]


def wait_for(condition: Any, seconds: float) -> bool:
    """Wait until a condition holds; False if it does not come true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True

"""How soon a Celery worker works again after a fault: on PostgreSQL and, side by side, on Redis.

    python benchmarks/recovery.py            # 5 to 10 minutes; starts both servers itself

Each fault hits a worker with four threads that is just running two long tasks (acks_late) and has
prefetched others; the worker reaches its broker through a TCP proxy.  Reported are the seconds
from the end of the fault until a task that was sent at that moment has run, and how many tasks
had run twice by the end.  Needs the extra `test`, and `redis-server` with `pip install redis`.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
from celery import Celery

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests"))

from fix_proxy import Proxy  # noqa: E402  (the tests' own, not installed)

from kombu_pgnotify.embedded import EmbeddedPostgres, free_port  # noqa: E402

HOST = "127.0.0.1"

#: Where the tasks write a line for each of their runs, in the environment of the worker.
RECORD = "RECOVERY_RECORD"
BROKER = "RECOVERY_BROKER"

#: Seconds after which another worker gets what a dead one held, for both brokers.
VISIBILITY_TIMEOUT = 5

#: Seconds that the long tasks take: longer than any fault.
LONG = 9.0

#: Seconds to wait for a task before it counts as never run: kombu's Redis transport looks for
#: what dead workers held every 100 s.
PATIENCE = 150.0

COMMAND = "-A recovery worker -P threads -c 4 -l INFO --without-heartbeat".split()

app = Celery("recovery", broker=os.environ.get(BROKER, "memory://"))
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options={"visibility_timeout": VISIBILITY_TIMEOUT},
    task_acks_late=True,
    task_ignore_result=True,
    worker_prefetch_multiplier=2,
)


@app.task(name="recovery.run")
def run(label: str, seconds: float = 0.0) -> None:
    """Record the start, and last so long."""
    with open(os.environ[RECORD], "a", encoding="utf-8") as record:
        record.write(f"{label}\n")
    time.sleep(seconds)


class Postgres:
    """A PostgreSQL of our own."""

    name, scheme = "pgnotify", "pgnotify"

    def __init__(self) -> None:
        self._server = EmbeddedPostgres()
        self._server.start()
        self.address = HOST, self._server.port

    def url(self, port: int) -> str:
        """Return the broker's URL on that port."""
        return f"pgnotify://postgres@{HOST}:{port}/postgres"

    def drop_connections(self) -> None:
        """End all connections."""
        with psycopg.connect(f"postgresql://postgres@{HOST}:{self.address[1]}/postgres") as link:
            link.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE application_name LIKE 'kombu_pgnotify%'"
            )

    def restart(self) -> None:
        """Restart the server."""
        self._server.restart("fast")

    def stop(self) -> None:
        """Stop it for good."""
        self._server.stop()


class Redis:
    """A Redis of our own that keeps its data."""

    name, scheme = "redis", "redis"

    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="recovery-redis-")
        self.address = HOST, free_port()
        self._start()

    def _start(self) -> None:
        port = str(self.address[1])
        command = ["redis-server", "--port", port, "--dir", self._folder, "--appendonly", "yes"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        wait_for(self._answers, "redis-server")

    def _client(self) -> Any:
        import redis

        return redis.Redis(*self.address)

    def _answers(self) -> bool:
        try:
            return bool(self._client().ping())
        except OSError:
            return False
        except Exception as exc:
            return "ConnectionError" not in type(exc).__name__ and "Loading" not in str(exc)

    def url(self, port: int) -> str:
        """Return the broker's URL on that port."""
        return f"redis://{HOST}:{port}/0"

    def drop_connections(self) -> None:
        """End all connections."""
        self._client().client_kill_filter(_type="normal", skipme=True)
        self._client().client_kill_filter(_type="pubsub", skipme=True)

    def restart(self) -> None:
        """Restart the server."""
        self._process.send_signal(signal.SIGTERM)
        self._process.wait()
        self._start()

    def stop(self) -> None:
        """Stop it for good."""
        self._process.kill()
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def wait_for(condition: Callable[[], Any], what: str, timeout: float = PATIENCE) -> float:
    """Wait for the condition; return the seconds it took."""
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > timeout:
            raise TimeoutError(f"{what}: not within {timeout:g} s")
        time.sleep(0.005)
    return time.monotonic() - began


def away(proxy: Proxy, seconds: float) -> None:
    """The server cannot be reached for a while."""
    proxy.refuse()
    proxy.cut()
    time.sleep(seconds)
    proxy.accept()


def frozen(proxy: Proxy, seconds: float) -> None:
    """The network swallows everything for a while."""
    proxy.freeze()
    time.sleep(seconds)
    proxy.thaw()


#: What happens, by its name: called with the server, the proxy and the worker.
FAULTS: dict[str, Callable[[Any, Proxy, subprocess.Popen[bytes]], None]] = {
    "all connections ended": lambda server, proxy, worker: server.drop_connections(),
    "server restarted": lambda server, proxy, worker: server.restart(),
    "unreachable for 1 s": lambda server, proxy, worker: away(proxy, 1),
    "unreachable for 4 s": lambda server, proxy, worker: away(proxy, 4),
    "frozen for 3 s": lambda server, proxy, worker: frozen(proxy, 3),
    "worker killed": lambda server, proxy, worker: os.killpg(worker.pid, signal.SIGKILL),
}


class Trial:
    """One fault, one worker, one record."""

    def __init__(self, server: Any, proxy: Proxy, folder: Path) -> None:
        self._server, self._proxy = server, proxy
        self._record = folder / "record"
        self._record.touch()
        self._queue = f"recovery-{time.monotonic_ns()}"
        self._folder = folder
        self._producer = Celery("producer", broker=server.url(server.address[1]))
        self._producer.conf.broker_transport_options = app.conf.broker_transport_options

    def runs(self) -> Counter[str]:
        """Return how often each task has been started."""
        return Counter(self._record.read_text("utf-8").split())

    def send(self, label: str, seconds: float = 0.0) -> None:
        """Send a task by a connection that the fault does not hit."""
        args, queue = (label, seconds), self._queue
        self._producer.send_task("recovery.run", args, queue=queue, retry=True)

    @contextmanager
    def worker(self) -> Iterator[subprocess.Popen[bytes]]:
        """A worker that is ready."""
        log = self._folder / "log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "celery", *COMMAND, "-Q", self._queue],
                cwd=HERE,
                env={
                    **os.environ,
                    BROKER: self._server.url(self._proxy.port),
                    RECORD: str(self._record),
                },
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        try:
            wait_for(lambda: b"ready." in log.read_bytes(), "the worker")
            yield process
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()

    def measure(self, fault: str) -> tuple[float, int]:
        """Return the seconds until a new task has run, and how many have run twice."""
        with self.worker() as worker:
            for n in range(2):
                self.send(f"long-{n}", LONG)
            wait_for(lambda: len(self.runs()) == 2, "the long tasks")
            FAULTS[fault](self._server, self._proxy, worker)
            if fault == "worker killed":
                return self._killed()
            self.send("probe")
            seconds = wait_for(lambda: self.runs()["probe"], "the probe")
            time.sleep(LONG + VISIBILITY_TIMEOUT)
            # A sign that all that was to come has come.
            self.send("last")
            wait_for(lambda: self.runs()["last"], "the last one")
            return seconds, sum(count > 1 for count in self.runs().values())

    def _killed(self) -> tuple[float, int]:
        """What the dead worker held is run again by another: how soon?"""
        killed = time.monotonic()
        with self.worker():
            wait_for(lambda: self.runs()["long-0"] > 1 and self.runs()["long-1"] > 1, "the rest")
            return time.monotonic() - killed, 0


def main() -> None:
    """Measure each fault on each broker in turn and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--fault", choices=FAULTS, action="append")
    given = parser.parse_args()
    servers: list[Any] = [Postgres()]
    if shutil.which("redis-server") and importlib.util.find_spec("redis"):
        servers.append(Redis())
    found: dict[tuple[str, str], list[tuple[float, int]]] = {}
    try:
        for _ in range(given.repeats):
            for fault in given.fault or FAULTS:
                for server in servers:
                    found.setdefault((fault, server.name), []).append(once(server, fault))
    finally:
        for server in servers:
            server.stop()
    print(
        f"{'fault':24}"
        + "".join(f"{server.name + ': median, slowest, twice':>36}" for server in servers)
    )
    for fault in given.fault or FAULTS:
        line = f"{fault:24}"
        for server in servers:
            seconds = [each[0] for each in found[fault, server.name]]
            twice = sum(each[1] for each in found[fault, server.name])
            middle, worst = statistics.median(seconds), max(seconds)
            line += f"{f'{middle:.2f} s  {worst:.2f} s  {twice}':>36}"
        print(line)


def once(server: Any, fault: str) -> tuple[float, int]:
    """Measure one fault on one broker."""
    proxy = Proxy(server)
    proxy.start()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return Trial(server, proxy, Path(folder)).measure(fault)
    except TimeoutError as exc:
        print(f"{server.name}, {fault}: {exc}", file=sys.stderr)
        return PATIENCE, 0
    finally:
        proxy.stop()


if __name__ == "__main__":
    main()

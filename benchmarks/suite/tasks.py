"""The Celery application of the benchmarks, and the counts its workers leave in a folder."""

from __future__ import annotations

import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from celery import Celery

from .context import FOLDER, OPTIONS, QUEUE, URL

#: Celery's default.
PREFETCH_MULTIPLIER = 4

#: In the environment of a worker.
MULTIPLIER = "BENCH_MULTIPLIER"
GATE = "BENCH_GATE"

#: Seconds between two looks whether the gate is open.
GATE_POLL = 0.001

app = Celery("bench", broker=URL)
app.conf.update(
    broker_connection_retry_on_startup=True,
    broker_transport_options=OPTIONS,
    task_default_queue=QUEUE,
    task_ignore_result=True,
    task_store_errors_even_if_ignored=False,
    worker_hijack_root_logger=False,
    worker_prefetch_multiplier=int(os.environ.get(MULTIPLIER, PREFETCH_MULTIPLIER)),
)


class Tally(NamedTuple):
    """What all workers have done: times are nanoseconds of CLOCK_MONOTONIC, the same for all."""

    tasks: int
    first_start: int
    last_end: int

    @property
    def rate(self) -> float:
        """Tasks a second between the first start and the last end."""
        return (self.tasks - 1) / ((self.last_end - self.first_start) / 1e9)


class Counter:
    """Counts this process's tasks in a file that is mapped into memory: no call per task."""

    layout = struct.Struct("qqq")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pid = 0
        self._tally = Tally(0, 0, 0)
        self._map: mmap.mmap

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what happens within."""
        started = time.monotonic_ns()
        yield
        with self._lock:
            if self._pid != os.getpid():
                self._begin(started)
            tasks, first, _ = self._tally
            self._tally = Tally(tasks + 1, first, time.monotonic_ns())
            self.layout.pack_into(self._map, 0, *self._tally)

    def _begin(self, started: int) -> None:
        """Start at nothing, in a file of this process's own."""
        with open(FOLDER / f"count.{os.getpid()}", "w+b") as file:
            file.truncate(self.layout.size)
            file.flush()
            self._map = mmap.mmap(file.fileno(), self.layout.size)
        self._pid, self._tally = os.getpid(), Tally(0, started, 0)


def tally() -> Tally:
    """Add up what all workers have counted."""
    found = [Tally(*Counter.layout.unpack(data)) for data in _count_files()]
    found = [each for each in found if each.tasks]
    if not found:
        return Tally(0, 0, 0)
    return Tally(
        sum(each.tasks for each in found),
        min(each.first_start for each in found),
        max(each.last_end for each in found),
    )


def _count_files() -> Iterator[bytes]:
    for path in FOLDER.glob("count.*"):
        data = path.read_bytes()
        if len(data) == Counter.layout.size:
            yield data


def latencies() -> list[float]:
    """Return the milliseconds from each publish to the start of its task, in order of arrival."""
    found = []
    for path in FOLDER.glob("latency.*"):
        found += [int(line) / 1e6 for line in path.read_text("ascii").split()]
    return found


_counter = Counter()
_passed_gate = False


def _pass_gate() -> None:
    """Wait, before this process's first task, until all workers are here (see `open_gate`)."""
    global _passed_gate
    if not _passed_gate and os.environ.get(GATE):
        (FOLDER / f"waiting.{os.getpid()}").touch()
        while not (FOLDER / "gate").exists():
            time.sleep(GATE_POLL)
    _passed_gate = True


def at_gate() -> int:
    """Return how many workers wait at the gate."""
    return len(list(FOLDER.glob("waiting.*")))


def open_gate() -> None:
    """Let all workers begin."""
    (FOLDER / "gate").touch()


@app.task(name="bench.noop")
def noop() -> None:
    """Nothing but be counted."""
    with _counter.counted():
        pass


@app.task(name="bench.nap")
def nap(seconds: float) -> None:
    """Sleep, which is not the worker's work."""
    _pass_gate()
    with _counter.counted():
        time.sleep(seconds)


@app.task(name="bench.stamp")
def stamp(published: int) -> None:
    """Note how long it took to come here."""
    latency = time.monotonic_ns() - published
    with open(FOLDER / f"latency.{os.getpid()}", "a", encoding="ascii") as file:
        file.write(f"{latency}\n")


def empty_task_queue() -> None:
    """Declare the tasks' queue and remove what is in it."""
    with app.connection_for_write() as connection:
        queue = app.amqp.queues[QUEUE](connection.default_channel)
        queue.declare()
        queue.purge()


def send(count: int, task: Callable[..., Any], *args: Any) -> None:
    """Send a task so many times, one by one."""
    for _ in range(count):
        task(args)


def send_in_batches(count: int, task: Any, *args: Any, size: int = 500) -> None:
    """Send a task so many times, as fast as can be."""
    with app.producer_pool.acquire(block=True) as producer, producer.batch(max_size=size):
        for _ in range(count):
            task.apply_async(args, producer=producer)

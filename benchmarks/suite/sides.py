"""Measures for any broker: publishing, consuming, Celery's tasks, waking up, idling."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import psutil
from kombu.messaging import Consumer

from .context import PREFETCH, WARM_UP, Figures, connect, durable_queue, empty_queue, publish
from .tasks import empty_task_queue, latencies, noop, send, stamp, tally
from .workers import Worker

#: Seconds between two tasks for an idle worker, at random.
PAUSES = (0.03, 0.13)

#: Seconds until a worker that has just started has come to rest.
REST = 3.0


class Stopwatch:
    """Measures the time of a `with` block, and this process's part of it."""

    def __enter__(self) -> Stopwatch:
        self._cpu, self._began = time.process_time(), time.perf_counter()
        return self

    def __exit__(self, *error: object) -> None:
        self.seconds = time.perf_counter() - self._began
        self.cpu = time.process_time() - self._cpu

    def figures(self, count: int) -> Figures:
        """Return the rate, and the microseconds of this process's CPU for each."""
        return {"rate": count / self.seconds, "client_cpu_us": self.cpu / count * 1e6}


def publish_one_by_one(count: int) -> Figures:
    """Durable messages by a kombu producer."""
    with connect() as connection:
        empty_queue(connection)
        producer = connection.Producer(serializer="json")
        for _ in range(WARM_UP):
            publish(producer)
        with Stopwatch() as watch:
            for _ in range(count):
                publish(producer)
        empty_queue(connection)
    return watch.figures(count)


def send_tasks(count: int) -> Figures:
    """Celery's apply_async()."""
    empty_task_queue()
    send(WARM_UP, noop.apply_async)
    with Stopwatch() as watch:
        send(count, noop.apply_async)
    empty_task_queue()
    return watch.figures(count)


def consume(count: int) -> Figures:
    """Consume and acknowledge each message, in a drain_events() loop."""
    got = 0

    def received(body: Any, message: Any) -> None:
        nonlocal got
        got += 1
        message.ack()

    with connect() as connection:
        empty_queue(connection)
        producer = connection.Producer(serializer="json")
        for _ in range(count):
            publish(producer)
        channel = connection.channel()
        consumer = Consumer(
            channel, queues=[durable_queue()], callbacks=[received], accept=["json"]
        )
        consumer.qos(prefetch_count=PREFETCH)
        with Stopwatch() as watch:
            consumer.consume()
            while got < count:
                connection.drain_events(timeout=10)
        consumer.cancel()
    return watch.figures(count)


def run_tasks(count: int, pool: str, concurrency: int, multiplier: int) -> Figures:
    """A worker runs tasks that do nothing and were queued before it started."""
    empty_task_queue()
    send(count, noop.apply_async)
    with Worker(pool, concurrency, multiplier) as worker:
        worker.wait_until(lambda: tally().tasks >= count)
    return {"rate": tally().rate, "tasks": tally().tasks}


def wake_up(count: int) -> Figures:
    """From apply_async() to the start of the task, for an idle worker."""
    empty_task_queue()
    with Worker() as worker:
        stamp.apply_async((time.monotonic_ns(),))
        worker.wait_until(latencies)
        pauses = random.Random(1)
        for _ in range(count):
            time.sleep(pauses.uniform(*PAUSES))
            stamp.apply_async((time.monotonic_ns(),))
        worker.wait_until(lambda: len(latencies()) > count, 30)
    found = sorted(latencies()[1:])
    last = len(found) - 1
    return {
        "p50_ms": found[last // 2],
        "p95_ms": found[round(last * 0.95)],
        "max_ms": found[last],
    }


def idle(seconds: float) -> Figures:
    """What a worker costs that has nothing to do and sends no events."""
    empty_task_queue()
    with Worker() as worker:
        stamp.apply_async((time.monotonic_ns(),))
        worker.wait_until(latencies)
        time.sleep(REST)
        process = psutil.Process(worker.pid)
        before, main_before = _threads(worker.pid), process.num_ctx_switches().voluntary
        time.sleep(seconds)
        after, main_after = _threads(worker.pid), process.num_ctx_switches().voluntary
        links = [link for link in process.net_connections("inet") if link.status == "ESTABLISHED"]
    return {
        # By TCP: those of a Unix socket cannot be told from the worker's own.
        **({"connections": len(links)} if links else {}),
        "cpu_percent": (after[0] - before[0]) / 1e9 / seconds * 100,
        "wakeups": (after[1] - before[1]) / seconds,
        "main_thread_wakeups": (main_after - main_before) / seconds,
        "threads": after[2],
    }


def _threads(pid: int) -> tuple[int, int, int]:
    """Return the nanoseconds on a CPU, the voluntary switches and the number of all threads.

    psutil knows only the main thread's switches, and times to the hundredth of a second.
    """
    nanoseconds = switches = 0
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    for thread in threads:
        nanoseconds += int((thread / "schedstat").read_text("ascii").split()[0])
        for line in (thread / "status").read_text("ascii", "replace").splitlines():
            if line.startswith("voluntary_ctxt_switches:"):
                switches += int(line.split()[1])
    return nanoseconds, switches, len(threads)

"""What more workers bring, and what a worker needs after many tasks."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from itertools import pairwise

import psutil

from .context import Figures
from .tasks import at_gate, empty_task_queue, nap, noop, open_gate, send_in_batches, tally
from .workers import Worker

#: Seconds of a task: it waits for something, as tasks do.
NAP = 0.001


def many_workers(workers: int, count: int) -> Figures:
    """So many solo workers, which begin together with tasks of 1 ms queued before."""
    empty_task_queue()
    send_in_batches(count, nap, NAP)
    with ExitStack() as stack:
        names = [f"w{number}" for number in range(workers)]
        started = [stack.enter_context(Worker(name=name, gated=True)) for name in names]
        started[0].wait_until(lambda: at_gate() == workers)
        open_gate()
        started[0].wait_until(lambda: tally().tasks >= count)
        found = tally()
    return {"rate": found.rate, "tasks": found.tasks}


def memory_after(counts: list[int]) -> Figures:
    """Megabytes of a worker with eight threads when it has done so many tasks."""
    empty_task_queue()
    found: Figures = {}
    with Worker("threads", 8) as worker:
        process = psutil.Process(worker.pid)
        for before, count in pairwise([0, *counts]):
            send_in_batches(count - before, noop)
            worker.wait_until(partial(_all_done, count), 600)
            found[f"mb_after_{count}"] = process.memory_info().rss / 2**20
    found["growth"] = found[f"mb_after_{counts[-1]}"] / found[f"mb_after_{counts[0]}"]
    return found


def _all_done(count: int) -> bool:
    return tally().tasks >= count

"""A producer, as a process: publishes tasks of all kinds until it is told to stop (SIGTERM)."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
from typing import Any

from chaos_app import app, directly_to, early, late, publish, relay
from chaos_records import ROLE


def choose(rng: random.Random, workers: list[str]) -> tuple[Any, float, dict[str, Any]]:
    """Choose a task, how long it takes and how it is published."""
    task, seconds = rng.choice([early, late]), rng.uniform(0, 0.03)
    options: dict[str, Any] = {}
    kind = rng.random()
    if kind < 0.1:
        # Beyond the lease as well as within.
        seconds = rng.uniform(1, 8)
    elif kind < 0.2:
        options = {"countdown": rng.uniform(0.5, 8)}
    elif kind < 0.28:
        task = relay
    elif kind < 0.45:
        options = dict(directly_to(rng.choice(workers)))
    return task, seconds, options


def main(seed: str, rate: float, workers: list[str]) -> None:
    """Publish about `rate` tasks a second."""
    rng, stop = random.Random(seed), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    number = 0
    while not stop.wait(rng.expovariate(rate)):
        number += 1
        task, seconds, options = choose(rng, workers)
        publish(task, f"{os.environ[ROLE]}-{number}", seconds, **options)
    app.close()


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), sys.argv[3:])

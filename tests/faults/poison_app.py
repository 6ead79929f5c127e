"""The tests' Celery application with tasks that kill what runs them."""

from __future__ import annotations

import os
import signal

from tests.celery.app import app, note


@app.task(acks_late=True, reject_on_worker_lost=True)
def kill_process(label: str) -> None:
    """Kill the pool process that runs this."""
    note(label, "started")
    os.kill(os.getpid(), signal.SIGKILL)


@app.task(acks_late=True)
def kill_worker(label: str) -> None:
    """Kill the worker with all its processes, as a machine that loses power."""
    note(label, "started")
    os.killpg(os.getpgrp(), signal.SIGKILL)

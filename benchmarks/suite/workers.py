"""Starting a Celery worker of the benchmarks' application, waiting for it, and ending it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

import psutil

from .context import FOLDER
from .tasks import GATE, MULTIPLIER, PREFETCH_MULTIPLIER

#: Seconds until a worker that was told to stop is killed.
STOP_PATIENCE = 15.0

#: Seconds between two looks at what a worker has done.
POLL = 0.1

#: No events and no other workers to greet: what is measured is tasks.
QUIET = ("--without-gossip", "--without-mingle", "--without-heartbeat")


class Worker:
    """A worker while the `with` block lasts."""

    def __init__(
        self,
        pool: str = "solo",
        concurrency: int = 1,
        multiplier: int = PREFETCH_MULTIPLIER,
        *,
        name: str = "one",
        gated: bool = False,
    ) -> None:
        self._log = FOLDER / f"worker-{name}.log"
        env = {**os.environ, MULTIPLIER: str(multiplier), GATE: "1" if gated else ""}
        # A container is often root.
        env["C_FORCE_ROOT"] = "1"
        command = [sys.executable, "-m", "celery", "-A", f"{__package__}.tasks", "worker"]
        command += ["-P", pool, "-c", str(concurrency), "-l", "ERROR", "-n", f"{name}@bench"]
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                [*command, *QUIET],
                cwd=Path(__file__).resolve().parent.parent,
                env=env,
                stdout=log,
                stderr=log,
            )
        self.pid = self._process.pid

    def wait_until(self, condition: Callable[[], object], timeout: float = 180.0) -> None:
        """Wait for a condition; raise if the worker dies or it takes too long."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self._process.poll() is not None or time.monotonic() > deadline:
                state = "is alive" if self._process.poll() is None else "has died"
                words = self._log.read_text("utf-8", "replace")[-400:]
                raise TimeoutError(f"the worker {state}, and not done after {timeout:g} s: {words}")
            time.sleep(POLL)

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(STOP_PATIENCE)
        except subprocess.TimeoutExpired:
            process = psutil.Process(self.pid)
            for each in (*process.children(recursive=True), process):
                each.kill()
            self._process.wait()

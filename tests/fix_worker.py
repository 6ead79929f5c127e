"""Real Celery workers, each a process with children of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from helpers import wait_until

REPOSITORY = Path(__file__).parents[1]
READY = "ready."  # what Celery logs, at level INFO, when it consumes
READY_TIMEOUT = 60.0  # seconds; importing Celery on a busy machine takes several
STOP_TIMEOUT = 30.0  # seconds; a warm shutdown waits for the running tasks
LOG_TAIL = 8000  # characters of the log in a failure message


class CeleryWorker:
    """A running `celery worker` command; `name` is its node name, for inspect and control."""

    def __init__(self, name: str, command: Sequence[str], env: Mapping[str, str], log: Path):
        self.name = name
        self.log_path = log
        with open(log, "ab") as output:
            self._process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # a process group, to be killed as a whole
            )

    @property
    def pid(self) -> int:
        """The process id of the parent process."""
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.poll()

    def log(self) -> str:
        """What the worker has written so far."""
        return self.log_path.read_text("utf-8", errors="replace")

    def wait_log(self, text: str, timeout: float = READY_TIMEOUT) -> None:
        """Wait until the worker has logged the text; fail at once if it dies without."""

        def logged_or_dead() -> bool:
            dead = self.returncode is not None  # first, so that the log is then complete
            return text in self.log() or dead

        wait_until(logged_or_dead, timeout, lambda: self._complaint(f"never logged {text!r}"))
        if text not in self.log():
            raise AssertionError(self._complaint(f"died before it logged {text!r}"))

    def signal(self, number: int) -> None:
        """Send a signal to the parent process only."""
        self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the worker and its children, as a machine that loses power."""
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._process.wait(STOP_TIMEOUT)

    def stop(self, timeout: float = STOP_TIMEOUT) -> int:
        """Ask for a warm shutdown and return the exit code; fail if it takes longer."""
        self.signal(signal.SIGTERM)
        return self.wait(timeout)

    def wait(self, timeout: float = STOP_TIMEOUT) -> int:
        """Wait until the worker has ended and return the exit code; fail if it takes longer."""
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout)
        raise AssertionError(self._complaint(f"is still running after {timeout} s"))

    def _complaint(self, what: str) -> str:
        state = "" if self.returncode is None else f" (exit code {self.returncode})"
        return f"worker {self.name}{state} {what}. The end of its log:\n{self.log()[-LOG_TAIL:]}"


@pytest.fixture
def celery_worker(
    request: pytest.FixtureRequest, tmp_path: Path
) -> Iterator[Callable[..., CeleryWorker]]:
    """A function that starts a worker and returns once it is ready, see `start` below."""
    workers: list[CeleryWorker] = []

    def start(
        app: str = "tests.celery.app",
        *,
        pool: str = "prefork",
        concurrency: int = 2,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        broker_url: str | None = None,
        wait: bool = True,
    ) -> CeleryWorker:
        """Start a worker. The broker is this test's database unless another URL is given.

        The app need not configure it: Celery itself reads CELERY_BROKER_URL.
        """
        name = f"worker{len(workers) + 1}@{tmp_path.name}"
        command = [sys.executable, "-m", "celery", "-A", app, "worker", "-n", name]
        command += ["-P", pool, "-c", str(concurrency), "-l", "INFO", *args]
        url = broker_url or request.getfixturevalue("broker_url")
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", "CELERY_BROKER_URL": url}
        # A killed worker leaves temporary folders behind: let them be the test's.
        environment["TMPDIR"] = str(tmp_path)
        log = tmp_path / f"worker{len(workers) + 1}.log"
        worker = CeleryWorker(name, command, {**environment, **(env or {})}, log)
        workers.append(worker)
        if wait:
            worker.wait_log(READY)
        return worker

    yield start
    for worker in workers:
        worker.kill()
        # pytest shows it if the test failed
        sys.stdout.write(f"--- log of {worker.name}\n{worker.log()}\n")

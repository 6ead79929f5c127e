"""A Celery worker of the demo: the real command, in a process group of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

#: Processes that run tasks.
CONCURRENCY = 4

#: What a user would type.
COMMAND = ["celery", "-A", "kombu_pgnotify.demo.app", "worker", "-P", "prefork"]
COMMAND += ["-c", str(CONCURRENCY)]

#: What Celery logs when it consumes.
READY = " ready."

#: Seconds for a warm shutdown before the worker is killed.
_STOP_TIMEOUT = 5.0

#: Lines of the log in an error message.
_TAIL = 20


class Worker:
    """One ``celery worker`` command, started at once; its output goes to a file in `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._log = folder / f"{name}.log"
        command = [sys.executable, "-m", *COMMAND, "-n", f"{name}@%h", "-l", "INFO"]
        # Celery keeps a folder of temporary files, which it cannot remove if it is killed.
        env = {**os.environ, "TMPDIR": str(folder)}
        if os.geteuid() == 0:
            env["C_FORCE_ROOT"] = "1"  # or Celery refuses to run as root
        with open(self._log, "wb") as log:
            self._process = subprocess.Popen(
                command,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # ^C is for the demo, and kill() must find them all
            )

    @property
    def returncode(self) -> int | None:
        """The exit code, None while it runs."""
        return self._process.poll()

    @property
    def ready(self) -> bool:
        """True once the worker consumes."""
        return READY in self._text()

    def log_tail(self) -> str:
        """The end of what the worker has logged."""
        return "\n".join(self._text().rstrip().splitlines()[-_TAIL:])

    def kill(self) -> None:
        """Kill the worker and its processes as ``kill -9`` does."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def stop(self) -> None:
        """End the worker, in good order if it can; does nothing if it has ended."""
        if self.returncode is not None:
            return
        try:
            self._process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_TIMEOUT)
        finally:
            self.kill()

    def _text(self) -> str:
        return self._log.read_text("utf-8", errors="replace")

"""Run Celery's own integration tests on our broker: ``python celery_suite.py FOLDER [ARGUMENT…]``.

The tests come from Celery's sdist and are kept in FOLDER. The ARGUMENTs are pytest's, and replace
the list of files below: all of them take 25 minutes, most of which is waiting. The tests need a
Redis (``REDIS_HOST``, ``REDIS_PORT``), for results and for the marks that their tasks leave.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from fix_postgres import URL_VARIABLE, Server
from sdist import fetch

from kombu_pgnotify.embedded import EmbeddedPostgres

REDIS_HOST = os.environ.get("REDIS_HOST", "127.0.0.1")
REDIS_PORT = os.environ.get("REDIS_PORT", "6379")
CONNECT_TIMEOUT = 5.0  # seconds
# The suite's own limits are off: one of them is shorter than the time that its test sleeps.
TEST_LIMIT = 300  # seconds; then pytest shows where a test hangs
RUN_LIMIT = 3600  # seconds, for all

# All that use the broker. test_worker.py makes workers inside pytest's process, which forbids
# waiting for results there until the session's worker starts: it has to come first.
FILES = [
    f"t/integration/test_{name}.py"
    for name in "worker redis_backend tasks inspect beat group_chains loader canvas".split()
]

# A worker of ours does not hold tasks that are not due, they stay in the table: the one test that
# looks for such a task in a worker is run without `eta_in_broker`.
HELD_BY_WORKER = "t/integration/test_inspect.py::test_Inspect::test_scheduled"


@contextmanager
def broker() -> Iterator[str]:
    """Give the URL of a database that lives as long as the run."""
    with ExitStack() as stack:
        url = os.environ.get(URL_VARIABLE)
        server = Server(url or stack.enter_context(EmbeddedPostgres(fast=True)).url())
        name = server.create_database()
        stack.callback(server.drop_database, name)
        yield server.url(name, scheme="pgnotify")


def redis_answers() -> bool:
    """Tell whether somebody listens where Redis should."""
    with suppress(OSError):
        socket.create_connection((REDIS_HOST, int(REDIS_PORT)), CONNECT_TIMEOUT).close()
        return True
    return False


def run(suite: Path, broker_url: str, arguments: list[str]) -> int:
    """Run pytest on the suite and return its exit code."""
    command = [sys.executable, "-m", "pytest", "-p", "celery.contrib.pytest", "-q", "-ra"]
    command += ["--tb=short", "--show-capture=no", "--disable-warnings"]
    command += ["-p", "no:timeout", "-o", f"faulthandler_timeout={TEST_LIMIT}", *arguments]
    env = {
        **os.environ,
        "TEST_BROKER": broker_url,
        "TEST_BACKEND": f"redis://{REDIS_HOST}:{REDIS_PORT}/0",
        "REDIS_HOST": REDIS_HOST,
        "REDIS_PORT": REDIS_PORT,
        "WORKER_LOGLEVEL": "INFO",  # some tests read the log
    }
    pytest = subprocess.Popen(command, cwd=suite, env=env, start_new_session=True)
    try:
        return pytest.wait(RUN_LIMIT)
    finally:
        # Pool processes can outlive a run that is stopped, and hold the database.
        with suppress(ProcessLookupError):
            os.killpg(pytest.pid, signal.SIGKILL)


def main() -> int:
    """Run the suite, or say why not: without a Redis that is a failure only in CI."""
    if not redis_answers():
        complaint = f"needs a Redis, and none is at {REDIS_HOST}:{REDIS_PORT}"
        sys.stderr.write(f"skipped: {complaint} (REDIS_HOST, REDIS_PORT)\n")
        return 1 if os.environ.get("CI") else 0
    suite = fetch("celery", Path(sys.argv[1]).absolute())
    chosen = sys.argv[2:]
    with broker() as url:
        codes = [run(suite, url, [*(chosen or FILES), f"--deselect={HELD_BY_WORKER}"])]
        if not chosen:
            without_eta = f"{url}{'&' if '?' in url else '?'}eta_in_broker=false"
            codes.append(run(suite, without_eta, [HELD_BY_WORKER]))
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())

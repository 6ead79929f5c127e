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
TEST_TIMEOUT = 300  # seconds, for the tests to which Celery gives no limit

# All that use the broker. test_worker.py makes workers inside pytest's process, which forbids
# waiting for results there until the session's worker starts: it has to come first.
FILES = [
    f"t/integration/test_{name}.py"
    for name in "worker redis_backend tasks inspect beat group_chains loader canvas".split()
]


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
    command += ["--tb=short", "--show-capture=no", f"--timeout={TEST_TIMEOUT}", *arguments]
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
        return pytest.wait()
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
    with broker() as url:
        return run(suite, url, sys.argv[2:] or FILES)


if __name__ == "__main__":
    sys.exit(main())

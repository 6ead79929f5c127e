"""The demo, as a user runs it: it shows what it promises and leaves nothing behind."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from helpers import wait_until

from kombu_pgnotify.embedded import EmbeddedPostgresError, find_binaries

pytest.importorskip("rich")  # of the extra `demo`

TIMEOUT = 110  # seconds for a demo that takes about twenty
SECRET = "s3cr3t"


def _heed_signals() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)


class Demo:
    """A running demo whose temporary files all go to a folder of its own."""

    def __init__(self, folder: Path, arguments: list[str]) -> None:
        self.folder = folder
        self.output = ""
        self.descendants: set[psutil.Process] = set()
        env = {**os.environ, "TMPDIR": str(folder), "CELERY_BROKER_URL": "memory://"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "kombu_pgnotify", "demo", *arguments],
            env={**env, "PGHOSTADDR": "127.0.0.1"} if not arguments else env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            # The run itself may be in the background, where a shell has them ignored.
            preexec_fn=_heed_signals,
        )
        self._alarm = threading.Timer(TIMEOUT, self.process.kill)
        self._alarm.start()

    def read(self, until: str = "") -> str:
        """Read up to a line that holds the text, or everything, noting all processes seen."""
        for line in self.process.stdout:
            self.output += line
            self._note_descendants()
            if until and until in line:
                return self.output
        if until:
            raise AssertionError(f"{until!r} was not shown:\n{self.output}")
        return self.output

    def end(self) -> int:
        """Read the rest, check that nothing is left, and return the exit code."""
        self.read()
        code = self.process.wait(TIMEOUT)
        wait_until(lambda: not self._alive(), message=lambda: f"left: {self._alive()}")
        assert list(self.folder.iterdir()) == [], self.output
        return code

    def close(self) -> None:
        """End what a failed test has left, as far as we know of it."""
        self._alarm.cancel()
        self._note_descendants()
        self.process.kill()
        self.process.wait()
        self.process.stdout.close()
        for process in self._alive():
            process.kill()

    def _note_descendants(self) -> None:
        with suppress(psutil.NoSuchProcess):
            self.descendants.update(psutil.Process(self.process.pid).children(recursive=True))

    def _alive(self) -> list[psutil.Process]:
        # A container's first process may not collect those that have ended.
        return [process for process in self.descendants if not _ended(process)]


def _ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a name short enough for a socket, and open to the server's account."""
    path = Path(tempfile.mkdtemp(prefix="d", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.fixture
def start_demo(folder):
    demos = []

    def start(*arguments: str) -> Demo:
        if not arguments:
            try:
                find_binaries()
            except EmbeddedPostgresError as error:
                pytest.skip(str(error))
        demos.append(Demo(folder, list(arguments)))
        return demos[-1]

    yield start
    for demo in demos:
        demo.close()


@pytest.fixture
def role(server) -> Iterator[str]:
    """A role with a password and no rights; it goes after its database, which drops what it has."""
    name = f"demo_{uuid.uuid4().hex[:8]}"
    server.run_sql(f"CREATE ROLE {name} LOGIN PASSWORD '{SECRET}'")
    yield name
    server.run_sql(f"DROP ROLE {name}")


def check_story(output: str) -> None:
    """The demo has shown each of its steps, and the numbers fit together."""
    assert re.search(r"worker1: Celery \d", output)
    assert re.search(r"worker1@\S+, process \d+: 5\n", output)
    assert re.search(r"median \d+\.\d ms, slowest \d+\.\d ms", output)
    rows = re.findall(r"ready +(\d+)  leased (\d+)  finished +(\d+)", output)
    counts = [tuple(map(int, row)) for row in rows]
    assert any(ready and leased for ready, leased, _ in counts)
    assert counts[-1] == (0, 0, 200)
    assert re.search(r"still in the table, leased for [0-5]\.\d s more", output)
    assert re.search(r"worker2@\S+ has started the task \d+\.\d s after the kill", output)
    assert re.search(r"worker2@\S+ has finished it", output)
    assert 'broker_url = "pgnotify://' in output
    assert "celery -A proj worker" in output
    assert "Everything is stopped and removed" in output
    assert output.isascii()
    assert "\x1b" not in output


def test_whole_story_on_a_server_of_its_own(start_demo):
    demo = start_demo()
    demo.read("ready after")
    (postgres,) = demo.folder.glob("pgnotify-*/postgresql.log")
    assert demo.end() == 0
    check_story(demo.output)
    assert f"temporary, in {postgres.parent}" in demo.output


def test_on_a_server_of_the_users(start_demo, server, role, database_name):
    server.run_sql(f"GRANT CREATE ON DATABASE {database_name} TO {role}")
    demo = start_demo("--url", server.url(database_name, user=role, password=SECRET))
    demo.read("ready after")
    question = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'pgnotify%'"
    ((schema,),) = server.run_sql(question, database_name)
    assert demo.end() == 0
    check_story(demo.output)
    assert f"in the schema {schema}" in demo.output
    assert SECRET not in demo.output
    assert server.run_sql(question, database_name) == []


@pytest.mark.parametrize(
    ("moment", "number", "code"),
    [
        ("1. PostgreSQL", signal.SIGINT, 130),
        ("$ celery", signal.SIGTERM, 128 + signal.SIGTERM),
        ("ready ", signal.SIGINT, 130),
        ("kill -9: worker1", signal.SIGHUP, 128 + signal.SIGHUP),
    ],
)
def test_a_signal_leaves_nothing(start_demo, moment, number, code):
    demo = start_demo()
    demo.read(moment)
    demo.process.send_signal(number)
    # Had the signal come while Python executed a text (dataclasses do that), it ends by that very
    # signal after all is done, although the exception was caught: run_eval_code_obj (pythonrun.c).
    assert demo.end() in ({code, -number} if number == signal.SIGINT else {code}), demo.output
    assert "Traceback" not in demo.output
    assert ("Interrupted. Everything is stopped" in demo.output) == (code == 130)


def test_a_signal_leaves_no_schema(start_demo, server, database_name):
    demo = start_demo("--url", server.url(database_name))
    demo.read("finished")
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 130, demo.output
    question = "SELECT nspname FROM pg_namespace WHERE nspname LIKE 'pgnotify%'"
    assert server.run_sql(question, database_name) == []


def test_a_worker_that_dies(start_demo):
    demo = start_demo()
    demo.read("ready after")
    children = psutil.Process(demo.process.pid).children()
    (worker,) = [child for child in children if "celery" in child.cmdline()]
    os.killpg(worker.pid, signal.SIGKILL)
    assert demo.end() == 1, demo.output
    assert re.search(r"The demo failed: worker1 ended \(exit code -9\), waiting for", demo.output)
    assert "The worker's log ends with:" in demo.output
    assert "worker1@" in demo.output.partition("log ends with:")[2]
    assert "Traceback" not in demo.output


def test_a_server_that_does_not_answer(start_demo):
    demo = start_demo("--url", f"pgnotify://me:{SECRET}@127.0.0.1:1/db")
    assert demo.end() == 1, demo.output
    assert "Connection refused" in demo.output
    assert SECRET not in demo.output
    assert "Traceback" not in demo.output

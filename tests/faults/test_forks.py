"""Forks of every kind: a child uses, closes, waits for and gives back nothing of its parent's."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import textwrap
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from fix_cluster import Cluster
from helpers import wait_until

from kombu_pgnotify.embedded import HOST, free_port

SCRIPT_TIMEOUT = 60  # seconds; a child that hangs says where after a third of it

#: A module of an application that publishes when it is imported, as for gunicorn's --preload.
PRELOADED = """
import faulthandler, gc, os
import psycopg
from celery import Celery
from kombu import Connection, Consumer, Queue
from kombu_pgnotify import database
from kombu_pgnotify.session import Session

URL = os.environ["CELERY_BROKER_URL"]
PARENT = os.getpid()
# Of several connections none is closed only because two were in use at the same moment.
OPTIONS = {"pool_size": 4, "visibility_timeout": 600}

app = Celery("preloaded")
app.conf.update(task_ignore_result=True, broker_transport_options=OPTIONS)

def publish(label):
    app.send_task("task", (label,))

def sessions(pid):
    with psycopg.connect(URL.replace("pgnotify", "postgresql", 1)) as other:
        return {row[0] for row in other.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name LIKE %s", (f"kombu_pgnotify@%:{pid}",))}

opened = []
connect = database.Database._connect
def counted(self, target):
    opened.append(os.getpid())
    return connect(self, target)
database.Database._connect = counted

def in_child():
    '''Die if a connection of the parent's is used or closed, or if anything hangs.'''
    faulthandler.dump_traceback_later(20, exit=True)
    opened.clear()
    inherited = {id(thing) for thing in gc.get_objects() if isinstance(thing, Session)}
    assert inherited
    def checked(method):
        def call(self, *args, **kwargs):
            if id(self) in inherited:
                os.write(2, b"a connection of the parent's was touched")
                os._exit(9)
            return method(self, *args, **kwargs)
        return call
    for name in ("run", "send", "receive", "script", "abort", "notifications", "looks_stale"):
        setattr(Session, name, checked(getattr(Session, name)))

publish(f"import-{PARENT}")
"""

Run = Callable[..., str]


@pytest.fixture
def environment(tmp_path: Path, broker_url: str) -> dict[str, str]:
    """The environment of a process that can import `preloaded`."""
    (tmp_path / "preloaded.py").write_text(PRELOADED)
    return {**os.environ, "CELERY_BROKER_URL": broker_url, "PYTHONPATH": str(tmp_path)}


@pytest.fixture
def run(tmp_path: Path, environment: dict[str, str]) -> Run:
    """A function that runs a script to its end and returns its output."""

    def run(script: str, *arguments: str) -> str:
        path = tmp_path / "script.py"
        path.write_text(textwrap.dedent(script))
        done = subprocess.run(
            # Python 3.12 and later warn of a fork beside threads, which is what is tried here.
            [sys.executable, "-W", "ignore:This process:DeprecationWarning", str(path), *arguments],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SCRIPT_TIMEOUT,
            check=False,
        )
        assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
        assert done.stderr == ""
        return done.stdout

    return run


def _waiting(database: str) -> Counter[str]:
    """Count the messages in the table by the label in their arguments."""
    with psycopg.connect(database) as connection:
        rows = connection.execute("SELECT envelope FROM pgnotify.tasks").fetchall()
    return Counter(re.findall(r"\('([\w-]+)',\)", "".join(envelope for (envelope,) in rows)))


# -- prefork


def test_100_tasks_each_in_a_process_of_its_own_leave_the_parents_connections_alone(
    cluster: Cluster,
) -> None:
    cluster.use(pool_size=4)
    config = {"worker_max_tasks_per_child": 1, "worker_prefetch_multiplier": 4}
    worker = cluster.worker(concurrency=4, config=config)
    cluster.tasks.record.delay("first")
    cluster.wait_happened("done", {"first"})
    wait_until(lambda: len(_sessions(cluster, worker.pid)) >= 2)
    before = _sessions(cluster, worker.pid)
    labels = {f"task-{n}" for n in range(50)}
    for label in sorted(labels):
        cluster.tasks.publish_more.delay(label, 1)
    labels |= {f"{label}-0" for label in labels}
    cluster.wait_happened("done", labels, timeout=90)
    cluster.wait_queued(0, 0)
    assert before <= _sessions(cluster, worker.pid)
    assert cluster.happened() == dict.fromkeys(labels | {"first"}, 1)
    assert len(cluster.sql("SELECT DISTINCT pid FROM executions")) == len(labels) + 1
    assert worker.stop() == 0
    # All else is closed by those that opened it.
    wait_until(lambda: _sessions(cluster, None) == _sessions(cluster, os.getpid()))
    assert not re.search("Traceback|ERROR|CRITICAL|lease\\.|settle\\.|listener", worker.log())


def _sessions(cluster: Cluster, pid: int | None) -> set[int]:
    """Return the server's processes for the connections of one client process, or of all."""
    rows = cluster.sql(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
        " AND application_name LIKE %s",
        f"kombu_pgnotify@%:{'%' if pid is None else pid}",
    )
    return {pid for (pid,) in rows}


# -- os.fork, as of servers that load the application first

CHILDREN = """
    import sys, threading
    from preloaded import *

    # The parent consumes too: a connection that listens, and leases.
    connection = Connection(URL, transport_options=OPTIONS)
    publish("held")
    got = []
    Consumer(connection, [Queue("celery")], on_message=got.append, prefetch_count=2).consume()
    while len(got) < 2:
        connection.drain_events(timeout=20)
    while len(sessions(PARENT)) < 2:
        pass
    before = sessions(PARENT)

    def publish_many(name):
        for n in range(20):
            publish(f"{name}-{n}")

    children = []
    for number in range(6):
        pid = os.fork()
        if not pid:
            in_child()
            threads = [
                threading.Thread(target=publish_many, args=(f"child-{number}-{letter}",))
                for letter in "ab"
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if number % 2:
                os._exit(0)
            sys.exit(0)
        children.append(pid)
    publish_many("parent")
    codes = [os.waitpid(pid, 0)[1] for pid in children]
    assert codes == [0] * 6, codes
    publish("afterwards")
    assert before <= sessions(PARENT), (before, sessions(PARENT))
    for message in got:
        message.ack()
    connection.close()
"""


def test_children_and_parent_publish_at_the_same_time_each_over_its_own_connections(
    run: Run, database: str
) -> None:
    run(CHILDREN)
    names = [f"child-{number}-{letter}" for number in range(6) for letter in "ab"]
    labels = [f"{name}-{n}" for name in [*names, "parent"] for n in range(20)]
    assert _waiting(database) == dict.fromkeys([*labels, "afterwards"], 1)


KEPT_OPEN = """
    from preloaded import *

    pid = os.fork()
    if not pid:
        in_child()
        for n in range(20):
            publish(f"child-{n}")
        print(len(opened), flush=True)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
"""


def test_a_child_of_a_parent_that_has_published_does_not_connect_for_each_message(
    run: Run,
) -> None:
    assert int(run(KEPT_OPEN)) == 1


WSGI = """
from urllib.parse import parse_qs
from preloaded import *

def application(environ, start_response):
    assert os.getpid() != PARENT
    label = parse_qs(environ["QUERY_STRING"])["label"][0]
    publish(label)
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]
"""

GUNICORN = """
import os

preload_app, workers, threads, max_requests, loglevel = True, 3, 2, 12, "warning"

def child_exit(server, worker):
    # In the master.
    from preloaded import publish
    publish(f"exit-of-{worker.pid}")

def on_exit(server):
    from preloaded import PARENT, sessions
    assert len(sessions(PARENT)) == 1
"""


@pytest.mark.skipif(not importlib.util.find_spec("gunicorn"), reason="gunicorn is not installed")
def test_gunicorn_with_a_preloaded_application(
    environment: dict[str, str], tmp_path: Path, database: str
) -> None:
    (tmp_path / "wsgi.py").write_text(WSGI)
    (tmp_path / "gunicorn.conf.py").write_text(GUNICORN)
    address = f"{HOST}:{free_port()}"
    log = tmp_path / "gunicorn.log"
    with open(log, "wb") as output:
        server = subprocess.Popen(
            [sys.executable, "-m", "gunicorn", "-b", address, "wsgi:application"],
            env=environment,
            cwd=tmp_path,
            stdout=output,
            stderr=output,
        )

    def get(label: str) -> str:
        def answer() -> str | None:
            # Refused or reset: none is there yet, or that process has just ended.
            try:
                with urllib.request.urlopen(f"http://{address}/?label={label}") as response:
                    return response.read().decode()  # type: ignore[no-any-return]
            except (ConnectionError, urllib.error.URLError):
                return None

        return wait_until(answer, 30, log.read_text)

    try:
        labels = [f"request-{n}" for n in range(60)]
        with ThreadPoolExecutor(8) as threads:
            processes = set(threads.map(get, labels))
        server.terminate()
        assert server.wait(SCRIPT_TIMEOUT) == 0, log.read_text()
    finally:
        server.kill()
        server.wait()
    assert "Traceback" not in log.read_text()
    waiting = _waiting(database)
    assert waiting.pop(f"import-{server.pid}") == 1
    exits = {label for label in waiting if label.startswith("exit-of-")}
    assert len(processes) >= 3
    assert {f"exit-of-{pid}" for pid in processes} <= exits
    assert waiting == dict.fromkeys([*labels, *exits], 1)


# -- multiprocessing

CONTEXTS = """
    import multiprocessing, sys
    from preloaded import *

    def work(number, app, connection):
        app.send_task("task", (f"app-{number}",))
        connection.Producer().publish(
            [(f"connection-{number}",), {}, {}], routing_key="celery", serializer="json",
            headers={"argsrepr": f"('connection-{number}',)"},
        )
        connection.close()

    if __name__ == "__main__":
        context = multiprocessing.get_context(sys.argv[1])
        if sys.argv[1] == "forkserver":
            # The server of forks has published before it forks.
            context.set_forkserver_preload(["preloaded"])
        connection = Connection(URL, transport_options=OPTIONS)
        connection.connect()
        before = sessions(PARENT)
        assert before
        children = [
            context.Process(target=work, args=(number, app, connection)) for number in range(4)
        ]
        for child in children:
            child.start()
        for child in children:
            child.join()
        assert [child.exitcode for child in children] == [0] * 4
        publish("parent")
        assert before <= sessions(PARENT)
        connection.close()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_multiprocessing_with_an_application_and_a_connection_as_arguments(
    run: Run, database: str, method: str
) -> None:
    run(CONTEXTS, method)
    waiting = _waiting(database)
    imports = {label for label in waiting if label.startswith("import-")}
    labels = [f"{what}-{n}" for what in ("app", "connection") for n in range(4)]
    assert waiting == dict.fromkeys([*labels, *imports, "parent"], 1)
    # Its own interpreter imports the module anew.
    assert len(imports) == {"fork": 1, "spawn": 5, "forkserver": 2}[method]


# -- while others hold our locks

LOCKS = """
    import logging, sys, threading, time
    from preloaded import *

    how = sys.argv[1]
    connection = Connection(URL, transport_options=OPTIONS)
    connection.connect()

    def full_circle(connection, queue):
        connection.Producer().publish("x", routing_key=queue, serializer="json")
        channel = connection.channel()
        got = []
        consumer = Consumer(channel, [Queue(queue)], on_message=got.append)
        with consumer:
            while not got:
                connection.drain_events(timeout=20)
            got[0].ack()
        channel.close()

    def child(number):
        in_child()
        logging.getLogger("kombu_pgnotify").warning("nobody holds the lock of this either")
        connection.Producer().publish("y", routing_key="inherited", serializer="json")
        with Connection(URL, transport_options=OPTIONS) as mine:
            full_circle(mine, f"child-{number}")
        os._exit(0)

    def fork(number):
        pid = os.fork()
        if not pid:
            try:
                child(number)
            finally:
                os._exit(1)
        return pid

    full_circle(connection, "parent")
    logging.disable()
    holding, done = threading.Event(), threading.Event()
    if how == "held":
        # Every lock in our objects and modules, and the pool's.
        def is_lock(thing):
            return type(thing) in (type(threading.Lock()), type(threading.RLock()))
        owners = [
            thing for thing in gc.get_objects()
            if str(type(thing).__module__).startswith(
                ("kombu_pgnotify.", "sqlalchemy.pool", "sqlalchemy.util.queue")
            )
        ]
        owners += [m for name, m in list(sys.modules.items()) if name.startswith("kombu_pgnotify")]
        locks = [thing for owner in owners for thing in getattr(owner, "__dict__", {}).values()
                 if is_lock(thing)]
        assert len(set(map(id, locks))) >= 5, locks

        def hold():
            for lock in locks:
                lock.acquire()
            holding.set()
            done.wait()
            for lock in reversed(locks):
                lock.release()
        threads = [threading.Thread(target=hold)]
    else:
        def busy(number):
            with Connection(URL, transport_options=OPTIONS) as mine:
                while not done.is_set():
                    full_circle(mine, f"busy-{number}")
                    holding.set()
        threads = [threading.Thread(target=busy, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    holding.wait()
    forks = 1 if how == "held" else 20
    codes = []
    for number in range(forks):
        time.sleep(0.001 * number)
        codes.append(os.waitpid(fork(number), 0)[1])
    done.set()
    for thread in threads:
        thread.join()
    assert codes == [0] * forks, codes
    full_circle(connection, "parent")
    assert connection.default_channel.queue_declare("inherited").message_count == forks
    connection.close()
"""


@pytest.mark.parametrize("how", ["held", "busy"])
def test_a_fork_while_other_threads_hold_our_locks_does_not_hang_the_child(
    run: Run, how: str
) -> None:
    run(LOCKS, how)

"""PgBouncer in transaction mode between us and the server."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from fix_loops import LISTENER, PATIENCE, Consume, Publish, Sql, terminate, wait_counts
from fix_postgres import Server
from helpers import wait_until
from kombu import Connection

from kombu_pgnotify.embedded import ACCOUNT, HOST, free_port
from kombu_pgnotify.errors import ConfigurationError, DatabaseUnavailable

PGBOUNCER = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
PREPARED_SINCE = (1, 21)  # max_prepared_statements
STOP_TIMEOUT = 10.0  # seconds

#: What a pooler in transaction mode asks for: it refuses start-up options, forgets what was
#: prepared, and hands a session that LISTENs to somebody else.
PLAIN = {"statement_timeout": 0, "prepared_statements": False}
POLLING = {**PLAIN, "notify": False, "polling_interval": 0.1}


class PgBouncer:
    """A pooler in transaction mode with few connections to the server."""

    def __init__(self, server: Server, name: str, folder: Path) -> None:
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self.port = free_port()
        host, port = server.address
        settings = {
            "listen_addr": HOST,
            "listen_port": self.port,
            "unix_socket_dir": "",
            "auth_type": "any",
            "pool_mode": "transaction",
            "default_pool_size": 2,
        }
        lines = [f"{key} = {value}" for key, value in settings.items()]
        target = f"{name} = host={host} port={port} dbname={name} user=postgres"
        text = "\n".join(["[databases]", target, "[pgbouncer]", *lines, ""])
        (folder / "pgbouncer.ini").write_text(text)
        self.url = f"pgnotify://postgres@{HOST}:{self.port}/{name}"

    def start(self) -> None:
        command = [str(PGBOUNCER), str(self._folder / "pgbouncer.ini")]
        if os.geteuid() == 0:
            command[1:1] = ["-u", ACCOUNT]
        with open(self._folder / "log", "ab") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        process = self._process
        wait_until(lambda: self._answers() or process.poll() is not None, PATIENCE, self.log)
        assert process.poll() is None, self.log()

    def stop(self) -> None:
        """End it at once: its clients lose their connections."""
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
            self._process.wait(STOP_TIMEOUT)
            self._process = None

    def log(self) -> str:
        with suppress(OSError):
            return (self._folder / "log").read_text()
        return "pgbouncer has not started"

    def _answers(self) -> bool:
        with suppress(OSError), socket.create_connection((HOST, self.port), 1):
            return True
        return False


def version() -> tuple[int, ...]:
    """The program's version."""
    command = [str(PGBOUNCER), "--version"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    return tuple(int(part) for part in answer.split()[1].split("."))


@pytest.fixture
def pgbouncer(
    server: Server, database_name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[PgBouncer]:
    if PGBOUNCER is None:
        pytest.skip("pgbouncer is not installed")
    folder = tmp_path_factory.mktemp("pgbouncer")
    for path in (folder, *folder.parents):
        # Under root it runs under another account, which must be able to enter.
        if path.stat().st_uid == os.geteuid() and os.geteuid() == 0 and path.name:
            path.chmod(path.stat().st_mode | 0o011)
    folder.chmod(0o777)
    made = PgBouncer(server, database_name, folder)
    made.start()
    yield made
    made.stop()


def test_two_consumers_behind_a_pooler_share_the_work(
    pgbouncer: PgBouncer, consume: Consume, publisher: Publish, sql: Sql
) -> None:
    first = consume(pgbouncer.url, prefetch=4, **POLLING)
    second = consume(pgbouncer.url, prefetch=4, application_name="kombu_pgnotify 2", **POLLING)
    publish = publisher(pgbouncer.url, **POLLING).publish
    publish(*range(100))
    both = lambda: [*first.bodies, *second.bodies]  # noqa: E731
    first.wait(lambda: set(both()) >= set(range(100)))
    wait_counts(sql, 0, 0)
    assert sorted(both()) == list(range(100))
    assert first.losses == second.losses == []


def test_announcements_go_past_the_pooler_by_listen_url(
    pgbouncer: PgBouncer, consume: Consume, publisher: Publish, broker_url: str, sql: Sql
) -> None:
    """The poll is an hour away: nothing but an announcement brings them."""
    loop = consume(pgbouncer.url, listen_url=broker_url, **PLAIN)
    publish = publisher(pgbouncer.url, listen_url=broker_url, **PLAIN).publish
    for n in range(20):
        publish(n)
        loop.wait(lambda: n in loop.bodies)  # noqa: B023
    loop.wait_bodies(*range(20))
    wait_counts(sql, 0, 0)
    killed = terminate(sql, LISTENER)
    listeners = f"SELECT 1 FROM pg_stat_activity WHERE {LISTENER} AND pid <> ALL (%s)"
    wait_until(lambda: sql(listeners.replace("y%'", "y%%'"), killed), PATIENCE, "no LISTEN again")
    publish("afterwards")
    loop.wait(lambda: "afterwards" in loop.bodies)


def test_leases_are_renewed_and_settled_behind_a_pooler(
    pgbouncer: PgBouncer, consume: Consume, publisher: Publish, sql: Sql
) -> None:
    loop = consume(pgbouncer.url, ack=False, visibility_timeout=1.5, **POLLING)
    publisher(pgbouncer.url, **POLLING).publish("done", "again", "dead")
    loop.wait_bodies("done", "again", "dead")
    renewed = "SELECT min(lease_expiration) FROM pgnotify.tasks"
    for _ in range(2):
        before = sql(renewed)
        wait_until(lambda: sql(renewed) > before, PATIENCE, "not renewed")  # noqa: B023
    done, again, dead = sorted(loop.messages, key=lambda m: loop.bodies.index(m.payload))
    done.ack()
    dead.reject()
    again.requeue()
    loop.wait(lambda: len(loop.bodies) == 4)
    loop.messages[-1].ack()
    wait_counts(sql, 0, 0)
    assert loop.bodies == ["done", "again", "dead", "again"]
    assert sql("SELECT count(*) FROM pgnotify.dead_letters") == [(1,)]


@pytest.mark.parametrize("listens", [False, True], ids=["polling", "listen_url"])
def test_a_pooler_restarted_loses_and_repeats_nothing(
    pgbouncer: PgBouncer,
    consume: Consume,
    publisher: Publish,
    broker_url: str,
    sql: Sql,
    listens: bool,
) -> None:
    options = {**PLAIN, "listen_url": broker_url} if listens else POLLING
    running = consume(pgbouncer.url, "running", ack=False, visibility_timeout=20, **options)
    publisher(pgbouncer.url, "running", **options).publish("a long task")
    running.wait_bodies("a long task")
    # The poll is for what was written while its announcement got lost with the pooler.
    loop = consume(pgbouncer.url, **{**options, "polling_interval": 1})
    publisher_ = publisher(pgbouncer.url, **options)
    for n in range(3):
        publisher_.publish(*range(10 * n, 10 * n + 10))
        pgbouncer.stop()
        time.sleep(0.2)
        pgbouncer.start()
    publisher_.publish(*range(30, 40))
    loop.wait(lambda: set(range(40)) <= set(loop.bodies))
    again = {body for body, count in Counter(loop.bodies).items() if count > 1}
    assert again <= publisher_.doubtful
    running.messages[0].ack()
    wait_counts(sql, 0, 0)
    assert running.bodies == ["a long task"]


def test_prepared_statements_work_where_the_pooler_keeps_them_and_else_the_way_out_is_told(
    pgbouncer: PgBouncer, consume: Consume, publisher: Publish, sql: Sql
) -> None:
    options = {**POLLING, "prepared_statements": True}
    publisher_ = publisher(pgbouncer.url, **options)
    if version() < PREPARED_SINCE:
        names = [f"kombu_pgnotify {n}" for n in range(3)]
        others = [publisher(pgbouncer.url, application_name=name, **options) for name in names]
        with pytest.raises(DatabaseUnavailable, match="set the option prepared_statements"):
            for one in others:
                one.connection.connect()
        return
    loop = consume(pgbouncer.url, **options)
    publisher_.publish(*range(50))
    loop.wait_bodies(*range(50))
    wait_counts(sql, 0, 0)


def test_a_pooler_that_refuses_start_up_options_is_a_clear_error(
    pgbouncer: PgBouncer, brokers_closed: None
) -> None:
    options = {**POLLING, "statement_timeout": 10}
    with (
        Connection(pgbouncer.url, transport_options=options) as connection,
        pytest.raises(
            ConfigurationError, match=r"unsupported startup parameter.*statement_timeout"
        ),
    ):
        connection.connect()


def test_listening_through_the_pooler_is_noticed(
    pgbouncer: PgBouncer, consume: Consume, publisher: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    """Without notify=False and listen_url a LISTEN ends up with whoever comes next."""
    options = {**PLAIN, "polling_interval": 0.2, "health_check_interval": 0.2}
    loop = consume(pgbouncer.url, **options)
    publisher_ = publisher(pgbouncer.url, **options)
    wait_until(lambda: "notify to False" in caplog.text, PATIENCE, "nobody was told")
    # Polls find everything all the same.
    publisher_.publish(*range(10))
    loop.wait_bodies(*range(10))

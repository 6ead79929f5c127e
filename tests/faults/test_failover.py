"""A server that turns read-only, and the one that takes its place."""

from __future__ import annotations

import contextlib
import logging
import subprocess
import threading
from collections.abc import Callable, Iterator

import pytest
from fix_loops import LISTENER, PATIENCE, Consume, Publish
from fix_postgres import Server
from fix_proxy import Proxy
from helpers import wait_until

from kombu_pgnotify.embedded import HOST, EmbeddedPostgres
from kombu_pgnotify.errors import DatabaseUnavailable

LOOK = {"polling_interval": 0.1, "health_check_interval": 0.3}


class Standby(EmbeddedPostgres):
    """A streaming replica of another server; `promote` ends that."""

    def __init__(self, primary: EmbeddedPostgres) -> None:
        super().__init__(fast=True)
        self._primary = primary

    def promote(self) -> None:
        command = [str(self.bindir / "pg_ctl"), "promote", "-w", "-D", str(self.folder / "data")]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, **self._options)

    def _init_data(self) -> None:
        data, primary = str(self.folder / "data"), self._primary
        command = [str(self.bindir / "pg_basebackup"), "-D", data, "-R", "-X", "stream"]
        command += ["-c", "fast", "--no-sync", "-h", HOST, "-p", str(primary.port)]
        subprocess.run([*command, "-U", "postgres"], check=True, **self._options)


@pytest.fixture
def servers(request: pytest.FixtureRequest) -> Iterator[list[Server]]:
    """Two servers: unrelated, or where the test asks for it the second a replica of the first."""
    with contextlib.ExitStack() as stack:
        first = EmbeddedPostgres(fast=True, hba=[f"host replication all {HOST}/32 trust"])
        stack.enter_context(first)
        second = EmbeddedPostgres(fast=True)
        if getattr(request, "param", "") == "replica":
            second = Standby(first)
        stack.enter_context(second)
        yield [Server(first.url(), first), Server(second.url(), second)]


def url_of(*servers: Server) -> str:
    """Return the URL that names them all."""
    hosts = ",".join(f"{host}:{port}" for host, port in (server.address for server in servers))
    return f"pgnotify://postgres@{hosts}/postgres"


def turn(server: Server, mode: str) -> None:
    """Make all of a server's transactions read-only (on) from now on, or not (off)."""
    server.run_sql(f"ALTER SYSTEM SET default_transaction_read_only = {mode}")
    server.run_sql("SELECT pg_reload_conf()")
    wait_until(lambda: server.run_sql("SHOW transaction_read_only") == [(mode,)])


def messages(server: Server) -> int:
    """How many messages a server holds."""
    return server.run_sql("SELECT count(*) FROM pgnotify.tasks")[0][0]  # type: ignore[no-any-return]


@pytest.mark.parametrize("servers", ["replica"], indirect=True)
def test_a_promoted_replica_takes_over_with_all_messages(
    servers: list[Server], consume: Consume, publisher: Publish
) -> None:
    primary, replica = servers
    url = url_of(primary, replica)
    running, publisher_ = consume(url, "running", ack=False), publisher(url)
    loop = consume(url)
    publisher(url, "running").publish("a long task")
    publisher_.publish(*range(20))
    running.wait_bodies("a long task")
    loop.wait_bodies(*range(20))
    publisher(url, "later").publish("kept")
    made = lambda: replica.run_sql("SELECT to_regclass('pgnotify.tasks')") != [(None,)]  # noqa: E731
    wait_until(made, PATIENCE, "the table was not replicated")
    there = lambda: replica.run_sql("SELECT 1 FROM pgnotify.tasks WHERE task_name = 'later'")  # noqa: E731
    wait_until(there, PATIENCE, "it was not replicated")
    primary.embedded._end_process("fast")
    with pytest.raises(DatabaseUnavailable, match="read-only"):
        # Only the replica answers, and it does not write.
        publisher(url, application_name="kombu_pgnotify early").connection.connect()
    promoting = threading.Thread(target=replica.embedded.promote)  # type: ignore[attr-defined]
    promoting.start()
    publisher_.publish(*range(20, 40))
    promoting.join()
    loop.wait(lambda: set(range(40)) <= set(loop.bodies))
    assert len(loop.bodies) == 40 + len(publisher_.doubtful & set(loop.bodies[40:]))
    running.messages[0].ack()
    wait_until(lambda: messages(replica) == 1, PATIENCE)
    # And announcements are heard from there: the poll is an hour away.
    publisher_.publish("afterwards")
    loop.wait(lambda: "afterwards" in loop.bodies)
    assert running.bodies == ["a long task"]


@pytest.mark.parametrize("servers", ["replica"], indirect=True)
def test_what_a_replica_that_lagged_behind_numbers_again_is_not_taken_for_done(
    servers: list[Server],
    make_proxy: Callable[[Server], Proxy],
    consume: Consume,
    publisher: Publish,
) -> None:
    """Its sequence goes on some way behind what the primary has handed out at last."""
    primary, replica = servers
    proxy = make_proxy(replica)
    hosts = "{}:{}".format(*primary.address) + f",{HOST}:{proxy.port}"
    loop, publish = consume(f"pgnotify://postgres@{hosts}/postgres"), publisher(url_of(primary))
    publish.publish("before")
    loop.wait_bodies("before")
    cut_off(replica)
    old = [f"old-{n}" for n in range(100)]
    publish.publish(*old)
    loop.wait_bodies("before", *old)
    wait_until(lambda: messages(primary) == 0, PATIENCE)
    proxy.refuse()
    primary.embedded._end_process("immediate")
    replica.embedded.promote()  # type: ignore[attr-defined]
    new = [f"new-{n}" for n in range(100)]
    publisher(url_of(replica)).publish(*new)
    proxy.accept()
    loop.wait(lambda: set(new) <= set(loop.bodies), "new messages were taken for old ones")
    wait_until(lambda: messages(replica) == 0, PATIENCE)


def cut_off(replica: Server) -> None:
    """Let a replica hear no more of its primary, once it has the tables."""
    there = "SELECT to_regclass('pgnotify.tasks') IS NOT NULL"
    wait_until(lambda: replica.run_sql(there) == [(True,)])
    replica.run_sql("ALTER SYSTEM SET primary_conninfo = ''")
    replica.run_sql("SELECT pg_reload_conf()")
    wait_until(lambda: not replica.run_sql("SELECT 1 FROM pg_stat_wal_receiver"))


def test_a_server_that_turns_read_only_is_left_for_the_other(
    servers: list[Server], consume: Consume, publisher: Publish, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "kombu_pgnotify")
    first, second = servers
    url = url_of(first, second)
    loop, publisher_ = consume(url, **LOOK), publisher(url)
    publisher_.publish("before")
    loop.wait_bodies("before")
    turn(first, "on")
    publisher_.publish("on the other")
    loop.wait_bodies("before", "on the other")
    wait_until(lambda: messages(second) == 0, PATIENCE)
    assert "read-only" in " ".join(map(str, [*loop.losses, *publisher_.errors, caplog.text]))


def test_announcements_are_heard_from_the_server_that_took_over(
    servers: list[Server], consume: Consume, publisher: Publish
) -> None:
    """The listener's own connection is to a server that has turned read-only, and lives on."""
    first, second = servers
    url = url_of(first, second)
    loop, publisher_ = consume(url, **{**LOOK, "polling_interval": 0.5}), publisher(url)
    turn(first, "on")
    publisher_.publish("on the other")
    loop.wait_bodies("on the other")
    listens = f"SELECT 1 FROM pg_stat_activity WHERE {LISTENER}"
    wait_until(lambda: second.run_sql(listens), 10, "nobody listens on the second server")


def test_a_server_that_is_read_only_for_a_while_is_waited_for(
    own_server: Server, consume: Consume, publisher: Publish
) -> None:
    url = own_server.url(scheme="pgnotify")
    running = consume(url, "running", ack=False, visibility_timeout=20, **LOOK)
    publisher(url, "running").publish("a long task")
    running.wait_bodies("a long task")
    loop, publisher_ = consume(url, **LOOK), publisher(url)
    publisher_.publish("before")
    loop.wait_bodies("before")
    turn(own_server, "on")
    with pytest.raises(DatabaseUnavailable, match="read-only") as refused:
        publisher_.publish("refused", retry=False)
    assert "postgres" in str(refused.value)
    running.messages[0].ack()
    timer = threading.Timer(1, turn, args=(own_server, "off"))
    timer.start()
    publisher_.publish("held up")
    timer.join()
    loop.wait_bodies("before", "held up")
    wait_until(lambda: messages(own_server) == 0, PATIENCE)
    assert running.bodies == ["a long task"]

"""The database: errors by who has to act, limits of time, pool and fork."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from fix_postgres import Server
from fix_proxy import Proxy
from helpers import wait_until

from kombu_pgnotify import database as database_module
from kombu_pgnotify.broker import Broker
from kombu_pgnotify.errors import (
    ConfigurationError,
    DatabaseUnavailable,
    PgnotifyError,
    StatementFailed,
)
from kombu_pgnotify.messages import Fence, Outgoing

MakeBroker = Callable[..., Broker]
Sql = Callable[..., list[tuple[Any, ...]]]

OURS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'kombu_pgnotify%%'"
)


@pytest.mark.parametrize(
    ("state", "expected"),
    [
        ("08006", DatabaseUnavailable),  # connection failure
        ("40001", DatabaseUnavailable),  # serialization failure
        ("40P01", DatabaseUnavailable),  # deadlock
        ("53100", DatabaseUnavailable),  # disk full
        ("53300", DatabaseUnavailable),  # too many connections
        ("57014", DatabaseUnavailable),  # canceled, as by statement_timeout
        ("57P01", DatabaseUnavailable),  # admin shutdown
        ("57P03", DatabaseUnavailable),  # cannot connect now
        ("58030", DatabaseUnavailable),  # I/O error
        ("XX000", DatabaseUnavailable),  # internal error
        ("25006", DatabaseUnavailable),  # read only, as after a failover
        ("25P03", DatabaseUnavailable),  # idle in transaction
        ("55P03", DatabaseUnavailable),  # lock not available
        ("55006", DatabaseUnavailable),  # object in use
        ("42P01", DatabaseUnavailable),  # our table is gone
        ("3F000", DatabaseUnavailable),  # our schema is gone
        ("42883", DatabaseUnavailable),  # our function is gone
        ("42501", ConfigurationError),  # a right is missing
        ("22021", StatementFailed),  # character not in repertoire
        ("23514", StatementFailed),  # check violation
        ("22003", StatementFailed),  # number out of range
        ("42601", StatementFailed),  # syntax error
    ],
)
def test_an_sqlstate_says_who_has_to_act(
    state: str, expected: type[PgnotifyError], broker: Broker
) -> None:
    with pytest.raises(PgnotifyError) as error, broker.database.session() as session:
        session.script(f"DO $$ BEGIN RAISE EXCEPTION 'because' USING ERRCODE = '{state}'; END $$")
    assert type(error.value) is expected
    assert "because" in str(error.value)
    assert "\n" not in str(error.value)
    assert isinstance(error.value.__cause__, psycopg.Error)
    assert broker.store.size("queue") == 0, "and the next statement works"


def test_a_statement_that_takes_too_long_is_ended_by_the_server(make_broker: MakeBroker) -> None:
    broker = make_broker(statement_timeout=0.2)
    started = time.monotonic()
    with (
        pytest.raises(DatabaseUnavailable, match="statement_timeout"),
        broker.database.session() as session,
    ):
        session.script("SELECT pg_sleep(10)")
    assert time.monotonic() - started < 3


def test_a_row_locked_by_somebody_does_not_hold_an_acknowledgement_for_ever(
    make_broker: MakeBroker, database: str
) -> None:
    broker = make_broker(statement_timeout=0.2)
    broker.store.publish("queue", Outgoing("{}", b""))
    (row,) = broker.store.claim("queue", ([-1], [0], [32767]), 1, "me")
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM pgnotify.tasks FOR UPDATE")
        with pytest.raises(DatabaseUnavailable, match="statement_timeout"):
            broker.store.acknowledge([Fence(row.task_id, row.delivery)])
    assert broker.store.acknowledge([Fence(row.task_id, row.delivery)]) == {row.task_id}


def test_a_connection_that_took_too_long_is_closed_at_once(
    make_broker: MakeBroker, proxy: Proxy, database_name: str
) -> None:
    """Else the server would serve it once the network recovers."""
    broker = make_broker(proxy.url(database_name), connect_timeout=2)
    before = proxy.connections
    # In a process with nothing to do it does not come by.
    gc.disable()
    try:
        proxy.freeze()
        with pytest.raises(DatabaseUnavailable, match="timeout"):
            broker.database.open()
        proxy.thaw()
        wait_until(lambda: proxy.connections == before)
    finally:
        gc.enable()


def test_a_frozen_server_is_unavailable_within_our_patience(
    make_broker: MakeBroker, proxy: Proxy, database_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "GRACE", 0.3)
    broker = make_broker(proxy.url(database_name), statement_timeout=0.2, connect_timeout=2)
    assert broker.store.size("queue") == 0
    proxy.freeze()
    started = time.monotonic()
    with pytest.raises(DatabaseUnavailable, match="no answer"):
        broker.store.size("queue")
    assert time.monotonic() - started < 2
    proxy.thaw()
    assert broker.store.size("queue") == 0


def test_without_a_statement_timeout_there_still_is_patience(
    make_broker: MakeBroker, proxy: Proxy, database_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(database_module, "PATIENCE_WITHOUT_TIMEOUT", 0.3)
    broker = make_broker(proxy.url(database_name), statement_timeout=0)
    with broker.database.session() as session:
        assert session.script("SHOW statement_timeout") == [(b"0",)]
    proxy.freeze()
    with pytest.raises(DatabaseUnavailable, match="no answer"):
        broker.store.size("queue")
    proxy.thaw()


def test_a_session_interrupted_in_its_wait_is_not_used_again(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a signal handler that raises: nobody knows what the connection would answer."""
    from kombu_pgnotify import session as session_module

    class Interrupted(BaseException):
        pass

    def interrupt(*args: Any, **kwargs: Any) -> bool:
        raise Interrupted

    with (
        monkeypatch.context() as patch,
        pytest.raises(Interrupted),
        broker.database.session() as session,
    ):
        patch.setattr(session_module, "wait_ready", interrupt)
        session.run((broker.database.statements["ping"], ()))
    assert session.closed
    assert broker.store.publish("queue", Outgoing("{}", b"")) >= 1


def test_calls_are_one_transaction_and_hints_follow_in_their_own(
    broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    store = broker.store
    bad = store._inserting([("queue", Outgoing("{}", b"", priority=-1))])
    good = store._inserting([("queue", Outgoing("{}", b""))])
    with pytest.raises(StatementFailed):
        broker.database.run(good, bad, good)
    assert store.size("queue") == 0
    assert len(broker.database.run(good, good, hints=[bad, good])) == 2
    assert store.size("queue") == 3
    assert "announce.failed" in caplog.text
    # A statement whose first use failed is prepared all the same.
    assert broker.database.run(good) == [[]]
    assert store.size("queue") == 4


def test_connections_that_the_server_has_closed_are_replaced_silently(
    broker: Broker, sql: Sql
) -> None:
    assert broker.store.size("queue") == 0
    sql(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    )
    assert broker.store.size("queue") == 0


def test_a_restart_of_the_server_is_survived_silently(
    own_server: Server, make_broker: MakeBroker
) -> None:
    broker = make_broker(own_server.url())
    broker.store.publish("queue", Outgoing("{}", b""))
    own_server.restart("fast")
    assert broker.store.size("queue") == 1
    broker.close()


def test_a_server_that_starts_up_is_unavailable_and_then_serves(
    own_server: Server, make_broker: MakeBroker
) -> None:
    broker = make_broker(own_server.url())
    failures: list[Exception] = []
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            try:
                broker.store.size("queue")
            except Exception as exc:
                failures.append(exc)

    thread = threading.Thread(target=ask)
    thread.start()
    own_server.restart("immediate")
    done.set()
    thread.join(30)
    assert {type(failure) for failure in failures} <= {DatabaseUnavailable}
    assert broker.store.size("queue") == 0
    broker.close()


def test_one_connection_is_enough_for_one_thread(broker: Broker, sql: Sql) -> None:
    for _ in range(3):
        broker.store.size("queue")
    assert sql(OURS) == [(1,)]


def test_acquiring_opens_a_single_connection(
    make_broker: MakeBroker, proxy: Proxy, database_name: str
) -> None:
    broker = make_broker(proxy.url(database_name))
    broker.store.size("queue")
    assert proxy.accepted == 1


def test_many_threads_get_connections_and_give_them_back(broker: Broker, sql: Sql) -> None:
    with ThreadPoolExecutor(30) as pool:
        assert list(pool.map(broker.store.size, ["queue"] * 300)) == [0] * 300
    wait_until(lambda: sql(OURS) == [(broker.options.pool_size,)])


def test_a_pool_that_is_used_up_is_unavailable(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    from contextlib import ExitStack

    monkeypatch.setattr(broker.database._pool._pool, "_timeout", 0.1)
    with ExitStack() as stack:
        for _ in range(broker.options.pool_size + database_module.OVERFLOW):
            stack.enter_context(broker.database.session())
        with pytest.raises(DatabaseUnavailable, match="none came free"):
            broker.store.size("queue")
    assert broker.store.size("queue") == 0


def test_nothing_stays_open_after_the_last_release(make_broker: MakeBroker, sql: Sql) -> None:
    broker = make_broker()
    broker.database.acquire()
    broker.store.size("queue")
    broker.database.release()
    assert sql(OURS) == [(1,)]
    broker.database.release()
    wait_until(lambda: sql(OURS) == [(0,)])
    # A late acknowledgement still works and leaves nothing open.
    assert broker.store.size("queue") == 0
    wait_until(lambda: sql(OURS) == [(0,)])


def test_a_failed_acquire_counts_nobody(
    make_broker: MakeBroker, proxy: Proxy, database_name: str, sql: Sql
) -> None:
    proxy.refuse()
    broker = make_broker(proxy.url(database_name), acquire=False)
    with pytest.raises(DatabaseUnavailable):
        broker.database.acquire()
    proxy.accept()
    assert broker.database._users == 0
    broker.database.acquire()
    broker.database.release()
    wait_until(lambda: sql(OURS) == [(0,)])


def test_the_connections_are_named(broker: Broker, sql: Sql) -> None:
    broker.store.size("queue")
    import os

    ((name,),) = sql(
        "SELECT application_name FROM pg_stat_activity"
        " WHERE datname = current_database() AND pid <> pg_backend_pid()"
        " AND backend_type = 'client backend'"
    )
    assert name.startswith("kombu_pgnotify@")
    assert name.endswith(f":{os.getpid()}")


FORKING_PROGRAM = """
import os, sys, time, warnings
from kombu_pgnotify import broker as brokers, options, urls
from kombu_pgnotify.messages import Outgoing
from kombu_pgnotify.leases import Outcome

warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads: on purpose
given = options.build(urls.parse(sys.argv[1], options.NAMES), {"visibility_timeout": 1.5})
everything = ([-1], [0], [32767])

class Hearer:
    heard = resynced = 0
    def notified(self, channel, payload): Hearer.heard += 1
    def resync(self, channels): Hearer.resynced += 1

parent = brokers.for_options(given)
assert brokers.for_options(given) is parent
parent.database.acquire()
parent.store.publish("queue", Outgoing("{}", b""))
rows = parent.store.claim("queue", everything, 1, parent.worker)
(lease,) = parent.keeper.hold("queue", rows, time.monotonic())
parent.listener.subscribe(Hearer(), ["pgnotify_x"])
while not Hearer.resynced:
    time.sleep(0.01)
with parent.database.session() as session:
    backend = session.script("SELECT pg_backend_pid()")

child = os.fork()
if child == 0:
    status = 1
    try:
        mine = brokers.for_options(given)
        assert mine is not parent
        assert mine.worker != parent.worker
        assert mine.keeper.held == 0
        mine.database.acquire()
        with mine.database.session() as session:
            assert session.script("SELECT pg_backend_pid()") != backend
        assert mine.store.claim("queue", everything, 1, mine.worker) == []
        parent.keeper.forsaken(lease)
        mine.database.release()
        brokers._close_all()
        del rows, lease
        status = 0
    finally:
        # With everything that an orderly end does, finalisers included.
        sys.stdout.flush()
        if status:
            os._exit(status)
    sys.exit(0)

_, status = os.waitpid(child, 0)
assert status == 0, status
with parent.database.session() as session:
    assert session.script("SELECT pg_backend_pid()") == backend, "the parent lost its connection"
assert Hearer.resynced == 1
time.sleep(2)  # longer than the lease, were it not renewed
assert parent.store.claim("queue", everything, 1, "other") == []
parent.keeper.settle(lease, Outcome.ACKNOWLEDGED)
parent.keeper.flush()
assert parent.store.size("queue") == 0
assert Hearer.resynced == 1, "the parent's LISTEN connection was lost"
print("good")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no fork")
def test_a_forked_child_leaves_the_parents_connections_and_leases_alone(database: str) -> None:
    process = subprocess.run(
        [sys.executable, "-c", FORKING_PROGRAM, database],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert process.stdout == "good\n", process.stderr
    assert process.returncode == 0
    assert process.stderr == ""


ENDING_PROGRAM = """
import sys, time
from kombu_pgnotify import broker as brokers, options, urls
from kombu_pgnotify.messages import Outgoing

broker = brokers.for_options(options.build(urls.parse(sys.argv[1], options.NAMES), {}))
broker.database.acquire()
broker.store.publish("queue", Outgoing("{}", b""))
rows = broker.store.claim("queue", ([-1], [0], [32767]), 1, broker.worker)
broker.keeper.hold("queue", rows, time.monotonic())
"""


def test_a_process_that_just_ends_gives_its_leases_back(database: str, sql: Sql) -> None:
    process = subprocess.run(
        [sys.executable, "-c", ENDING_PROGRAM, database],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (process.returncode, process.stderr) == (0, "")
    assert sql("SELECT lease_worker_id, attempts FROM pgnotify.tasks") == [(None, 0)]

"""What a lost connection leaves in doubt is cleared up: unanswered claims, forgotten acks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from time import monotonic
from typing import Any

import psycopg
import pytest
from fix_postgres import Server
from fix_proxy import Proxy
from helpers import wait_until

from kombu_pgnotify import keeper as keeper_module
from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claims import ClaimCursor
from kombu_pgnotify.errors import DatabaseUnavailable
from kombu_pgnotify.leases import Lease, Outcome
from kombu_pgnotify.messages import Claimed, Outgoing

MakeBroker = Callable[..., Broker]

QUEUE = "queue"
EVERYTHING = ClaimCursor().next_ranges(0)

#: Until the server is told to, or says that it has ended, it writes nothing of its own accord.
NEVER_BY_ITSELF = "ALTER SYSTEM SET wal_writer_delay = '10s'"

LEASED = "SELECT count(*) FROM pgnotify.tasks WHERE lease_worker_id IS NOT NULL"
LEFT = "SELECT count(*) FROM pgnotify.tasks"
WAITING = (
    "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
    " AND datname = current_database() AND application_name LIKE 'kombu_pgnotify%'"
)


def publish(broker: Broker, count: int) -> None:
    for n in range(count):
        broker.store.publish(QUEUE, Outgoing("{}", b"%d" % n))


def claim(broker: Broker, limit: int = 10) -> tuple[list[Claimed], list[Lease]]:
    claiming = broker.store.claiming(QUEUE, EVERYTHING, limit, broker.worker)
    return broker.keeper.claim(QUEUE, claiming, monotonic())


def again(action: Callable[[], Any]) -> Any:
    """Do it, as often as the server is still away."""

    def once() -> Any:
        try:
            return (action(),)
        except DatabaseUnavailable:
            return None

    return wait_until(once)[0]


def lose_the_answer(broker: Broker, proxy: Proxy, server: Server, name: str) -> None:
    """Have a claim of three carried out whose answer never comes: the network stands still."""
    ((leased,),) = server.run_sql(LEASED, name)
    failures: list[Exception] = []

    def attempt() -> None:
        try:
            claim(broker, 3)
        except DatabaseUnavailable as exc:
            failures.append(exc)

    claimer = threading.Thread(target=attempt)
    with psycopg.connect(server.url(name)) as holder:
        holder.execute("LOCK TABLE pgnotify.tasks IN EXCLUSIVE MODE")
        claimer.start()
        wait_until(lambda: server.run_sql(WAITING, name) == [(1,)])
        proxy.freeze()
    # Before the connection goes: who learns of that looks at once what there is to release.
    wait_until(lambda: server.run_sql(LEASED, name) == [(leased + 3,)])
    proxy.cut()
    proxy.thaw()
    claimer.join(20)
    assert len(failures) == 1


def test_an_unanswered_claim_is_released_before_the_next_one(
    make_broker: MakeBroker, proxy: Proxy, server: Server, database_name: str
) -> None:
    broker = make_broker(proxy.url(database_name), visibility_timeout=3600)
    publish(broker, 5)
    lose_the_answer(broker, proxy, server, database_name)
    rows, _ = again(lambda: claim(broker))
    assert [row.payload for row in rows] == [b"0", b"1", b"2", b"3", b"4"]
    # Nobody has seen the first delivery: it is no attempt.
    assert {row.attempts for row in rows} == {1}


@pytest.mark.parametrize("count", [0, 1], ids=["holds nothing", "holds one"])
def test_the_keeper_releases_it_for_others(
    make_broker: MakeBroker,
    proxy: Proxy,
    server: Server,
    database_name: str,
    caplog: pytest.LogCaptureFixture,
    count: int,
) -> None:
    """The next claim may never come: the consumer has been cancelled."""
    broker = make_broker(proxy.url(database_name), visibility_timeout=3600)
    publish(broker, 3 + count)
    held = claim(broker, count)[1] if count else []
    lose_the_answer(broker, proxy, server, database_name)
    assert broker.keeper.held == count
    wait_until(lambda: "claim.unanswered queue='queue' released=3" in caplog.text)
    assert server.run_sql(LEASED, database_name) == [(count,)], "what it knows to hold it keeps"
    assert all(broker.keeper.holds(lease) for lease in held)
    other = make_broker(visibility_timeout=3600)
    assert len(claim(other)[0]) == 3


def test_the_end_of_a_process_that_holds_nothing_releases_it_too(
    make_broker: MakeBroker,
    proxy: Proxy,
    server: Server,
    database_name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The keeper's thread does not come to it.
    monkeypatch.setattr(keeper_module, "ROUND", 3600)
    broker = make_broker(proxy.url(database_name), visibility_timeout=6 * 3600)
    publish(broker, 3)
    lose_the_answer(broker, proxy, server, database_name)
    assert broker.keeper.held == 0
    broker.close()
    assert server.run_sql(LEASED, database_name) == [(0,)]


def test_leases_are_renewed_although_it_cannot_be_released(
    make_broker: MakeBroker,
    proxy: Proxy,
    server: Server,
    database_name: str,
    sql: Callable[..., list[tuple[Any, ...]]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A keeper that was told to hurry fails in every round, and renews in between."""
    broker = make_broker(proxy.url(database_name), visibility_timeout=2)
    publish(broker, 4)
    _, (held,) = claim(broker, 1)
    sql(
        "CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql"
        " AS $$ BEGIN RAISE 'not released' USING ERRCODE = '23514'; END $$"
    )
    sql(
        "CREATE TRIGGER refuse BEFORE UPDATE ON pgnotify.tasks FOR EACH ROW"
        " WHEN (NEW.lease_worker_id IS NULL) EXECUTE FUNCTION refuse()"
    )
    lose_the_answer(broker, proxy, server, database_name)
    broker.keeper.hurry()
    asked_at = held.renewed_at
    # Longer than the lease would have lasted.
    wait_until(lambda: held.renewed_at > asked_at + 2)
    assert broker.keeper.holds(held)
    assert "not released" in caplog.text
    assert sql(LEASED) == [(4,)]
    sql("DROP TRIGGER refuse ON pgnotify.tasks")
    wait_until(lambda: sql(LEASED) == [(1,)])


@pytest.fixture
def crashing(own_server: Server) -> Server:
    own_server.run_sql(NEVER_BY_ITSELF)
    own_server.run_sql("SELECT pg_reload_conf()")
    return own_server


@pytest.mark.parametrize("flush_claim", [True, False], ids=["ack lost", "claim and ack lost"])
def test_what_a_crash_has_undone_is_acknowledged_again(
    crashing: Server, make_broker: MakeBroker, flush_claim: bool
) -> None:
    broker = make_broker(crashing.url(), visibility_timeout=3600)
    publish(broker, 3)
    _, leases = claim(broker, 2)
    if flush_claim:
        # A durable publish takes along what was written before it.
        publish(broker, 1)
    for lease in leases:
        broker.keeper.settle(lease, Outcome.ACKNOWLEDGED)
    broker.keeper.flush()
    assert crashing.run_sql(LEFT) == [(1 + flush_claim,)]
    crashing.restart("immediate")
    assert crashing.run_sql(LEFT) == [(3 + flush_claim,)], "the crash has undone nothing"
    rows, _ = again(lambda: claim(broker))
    assert [row.task_id for row in rows][:1] == [3]
    assert crashing.run_sql(LEFT) == [(1 + flush_claim,)]


def test_what_somebody_else_has_got_meanwhile_is_not_acknowledged_again(
    crashing: Server, make_broker: MakeBroker
) -> None:
    broker = make_broker(crashing.url(), visibility_timeout=3600)
    publish(broker, 1)
    _, (lease,) = claim(broker)
    broker.keeper.settle(lease, Outcome.ACKNOWLEDGED)
    broker.keeper.flush()
    crashing.restart("immediate")
    other = make_broker(crashing.url(), visibility_timeout=3601)
    (row,), _ = claim(other)
    assert row.delivery == 1, "the same fence, but for the holder"
    assert again(lambda: claim(broker)) == ([], [])
    assert crashing.run_sql(LEFT) == [(1,)]


def test_what_is_held_and_comes_again_after_a_crash_is_not_delivered_twice(
    crashing: Server, make_broker: MakeBroker
) -> None:
    broker = make_broker(crashing.url(), visibility_timeout=3600)
    publish(broker, 3)
    _, (held, done) = claim(broker, 2)
    crashing.restart("immediate")
    assert crashing.run_sql(LEASED) == [(0,)], "the crash has undone nothing"
    again(lambda: broker.store.size(QUEUE))
    # Its ack travels with the claim that gets it again.
    broker.keeper.settle(done, Outcome.ACKNOWLEDGED)
    rows, leases = again(lambda: claim(broker))
    fresh = [lease for lease in leases if broker.keeper.holds(lease)]
    assert [lease.fence.task_id for lease in fresh] == [rows[-1].task_id]
    for lease in (held, *fresh):
        assert broker.keeper.holds(lease)
        broker.keeper.settle(lease, Outcome.ACKNOWLEDGED)
    broker.keeper.flush()
    assert crashing.run_sql(LEFT) == [(0,)]


def test_another_message_under_the_number_of_a_lost_one_is_delivered_and_kept(
    broker: Broker, sql: Callable[..., list[tuple[Any, ...]]]
) -> None:
    """As after a crash or failover that has lost the last messages, and their numbers with them."""
    restart = "TRUNCATE pgnotify.tasks RESTART IDENTITY"
    publish(broker, 2)
    _, (held, done) = claim(broker)
    sql(restart)
    broker.keeper.settle(done, Outcome.ACKNOWLEDGED)
    broker.database._pool.losses += 1
    broker.database._answered_at = 0.0
    publish(broker, 3)
    rows, leases = claim(broker)
    assert len(rows) == 3
    assert all(broker.keeper.holds(lease) for lease in leases)
    assert not broker.keeper.holds(held)
    # The old one's end must not be the new one's.
    broker.keeper.settle(held, Outcome.ACKNOWLEDGED)
    broker.keeper.flush()
    assert sql(LEFT) == [(3,)]
    for lease in leases:
        broker.keeper.settle(lease, Outcome.ACKNOWLEDGED)
    broker.keeper.flush()
    assert sql(LEFT) == [(0,)]


def test_an_ack_whose_answer_was_lost_is_no_lost_lease(
    broker: Broker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As after a signal, or a cut, in the middle of the round trip."""
    caplog.set_level("INFO")
    publish(broker, 2)
    _, (acked, flushed) = claim(broker)
    store = broker.store

    def deafly(action: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            action(*arguments)
            raise DatabaseUnavailable("the answer was lost")

        return run

    for lease, name, settle in (
        (acked, "start_with_acks", lambda: claim(broker)),
        (flushed, "acknowledge", broker.keeper.flush),
    ):
        broker.keeper.settle(lease, Outcome.ACKNOWLEDGED)
        with monkeypatch.context() as patch:
            patch.setattr(store, name, deafly(getattr(store, name)))
            with pytest.raises(DatabaseUnavailable):
                settle()
        broker.keeper.flush()
        assert f"settle.unconfirmed task_id={lease.fence.task_id} " in caplog.text
    assert "lease.lost" not in caplog.text

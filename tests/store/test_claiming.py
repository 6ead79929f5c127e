"""Claims under way: whoever needs the connection reads the answer, and nothing waits for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from time import monotonic
from typing import Any

import psycopg
import pytest
from helpers import wait_until

from kombu_pgnotify import keeper as keeper_module
from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claiming import Claim
from kombu_pgnotify.claims import ClaimCursor
from kombu_pgnotify.errors import DatabaseUnavailable, StatementFailed
from kombu_pgnotify.leases import Lease, Outcome
from kombu_pgnotify.messages import Outgoing
from kombu_pgnotify.waker import wait_ready

MakeBroker = Callable[..., Broker]
Sql = Callable[..., list[tuple[Any, ...]]]

EVERYTHING = ClaimCursor().next_ranges(0)
LEASED = "SELECT count(*) FROM pgnotify.tasks WHERE lease_worker_id IS NOT NULL"
LEFT = "SELECT count(*) FROM pgnotify.tasks"
OURS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'kombu_pgnotify%%'"
)


def publish(broker: Broker, count: int) -> None:
    for n in range(count):
        broker.store.publish("queue", Outgoing("{}", b"%d" % n))


def start(broker: Broker, limit: int = 10, **options: Any) -> Claim:
    call = broker.store.claiming("queue", EVERYTHING, limit, broker.worker)
    return broker.keeper.start_claim("queue", call, monotonic(), **options)


@pytest.fixture
def locked(database: str) -> Iterator[psycopg.Connection[Any]]:
    """A connection that has locked the first message."""
    with psycopg.connect(database) as connection:
        yield connection


def test_what_a_claim_brings_is_held_once_it_is_collected(broker: Broker, sql: Sql) -> None:
    publish(broker, 3)
    claim = start(broker)
    rows, leases = broker.keeper.collect(claim)
    assert [row.payload for row in rows] == [b"0", b"1", b"2"]
    assert all(broker.keeper.holds(lease) for lease in leases)
    assert not broker.keeper._claims
    assert sql(LEASED) == [(3,)]


def test_acknowledgements_travel_along(broker: Broker, sql: Sql) -> None:
    publish(broker, 3)
    _, (first,) = broker.keeper.collect(start(broker, 1))
    broker.keeper.settle(first, Outcome.ACKNOWLEDGED)
    rows, _ = broker.keeper.collect(start(broker))
    assert [row.payload for row in rows] == [b"1", b"2"]
    assert sql(LEFT) == [(2,)]


def test_who_needs_the_connection_meanwhile_reads_the_answer(broker: Broker, sql: Sql) -> None:
    publish(broker, 3)
    told: list[bool] = []
    claim = start(broker, landed=lambda: told.append(True))
    assert broker.store.size("queue") == 0
    assert claim.has_landed
    assert told == [True]
    assert sql(OURS) == [(1,)]
    assert len(broker.keeper.collect(claim)[0]) == 3


def test_the_thread_gives_back_what_nobody_wants(broker: Broker, sql: Sql) -> None:
    publish(broker, 3)
    wanted = [True]
    claim = start(broker, wanted=lambda: wanted[0])
    wait_until(lambda: sql(LEASED) == [(3,)])
    wanted[0] = False
    broker.keeper.hurry()
    wait_until(lambda: sql(LEASED) == [(0,)])
    assert broker.keeper.collect(claim) == ([], [])
    assert sql("SELECT DISTINCT attempts FROM pgnotify.tasks") == [(0,)]


def test_the_thread_renews_what_nobody_has_collected_yet(make_broker: MakeBroker, sql: Sql) -> None:
    broker = make_broker(visibility_timeout=1)
    publish(broker, 1)
    claim = start(broker)
    wait_until(lambda: broker.keeper.held == 1)
    first = sql("SELECT lease_expiration FROM pgnotify.tasks")[0]
    later = "SELECT lease_expiration > %s + interval '1.5 s' FROM pgnotify.tasks"
    wait_until(lambda: sql(later, *first) == [(True,)])
    _, (lease,) = broker.keeper.collect(claim)
    assert broker.keeper.holds(lease)


def hang(broker: Broker, locked: psycopg.Connection[Any], **options: Any) -> tuple[Claim, Lease]:
    """Begin a claim that waits for somebody's lock; return it, and a lease held meanwhile."""
    publish(broker, 3)
    _, (acked, held) = broker.keeper.collect(start(broker, 2))
    locked.execute(
        "SELECT FROM pgnotify.tasks WHERE task_id = %s FOR UPDATE", [acked.fence.task_id]
    )
    broker.keeper.settle(acked, Outcome.ACKNOWLEDGED)
    return start(broker, **options), held


def test_a_claim_that_waits_for_a_lock_holds_up_neither_renewals_nor_publishers(
    make_broker: MakeBroker, locked: psycopg.Connection[Any], sql: Sql
) -> None:
    broker = make_broker(visibility_timeout=2)
    claim, held = hang(broker, locked)
    asked_at = held.renewed_at
    publish(broker, 1)
    wait_until(lambda: held.renewed_at > asked_at + 2)
    assert not claim.has_landed
    assert broker.keeper.holds(held)
    locked.rollback()
    rows, _ = broker.keeper.collect(claim)
    assert b"2" in [row.payload for row in rows]
    wait_until(lambda: sql(OURS) == [(1,)])


def test_the_thread_gives_back_what_nobody_wants_as_soon_as_the_answer_comes(
    make_broker: MakeBroker,
    locked: psycopg.Connection[Any],
    sql: Sql,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody tells the thread that it has come, and a round is too long to wait for it."""
    monkeypatch.setattr(keeper_module, "ROUND", 3600)
    broker = make_broker(visibility_timeout=6 * 3600)
    wanted = [True]
    claim, _ = hang(broker, locked, wanted=lambda: wanted[0])
    looks: list[bool] = []

    def answered() -> bool:
        looks.append(Claim.answered(claim))
        return looks[-1]

    monkeypatch.setattr(claim, "answered", answered)
    wanted[0] = False
    broker.keeper.hurry()
    # It has been told, and could do nothing yet.
    wait_until(lambda: looks)
    assert not any(looks)
    locked.rollback()
    # All but what is held meanwhile.
    wait_until(lambda: sql(LEASED) == [(1,)])
    assert sql(LEFT) == [(2,)]


def test_a_claim_that_is_refused_gives_its_acknowledgements_back(
    make_broker: MakeBroker, locked: psycopg.Connection[Any], sql: Sql
) -> None:
    broker = make_broker(statement_timeout=0.3)
    claim, _ = hang(broker, locked)
    with pytest.raises((DatabaseUnavailable, StatementFailed)):
        broker.keeper.collect(claim)
    assert not broker.keeper._claims
    locked.rollback()
    broker.keeper.flush()
    wait_until(lambda: sql(LEFT) == [(2,)])


def test_an_answer_that_came_in_time_counts_however_late_it_is_read(broker: Broker) -> None:
    """The process was stopped meanwhile."""
    session = broker.database.open()
    try:
        session._patience = 0.05
        session.send((broker.database.statements["ping"], ()))
        assert wait_ready(session.fileno(), 20)
        wait_until(lambda: not session.patience_left)
        assert session.has_answer()
        assert session.receive() == [[(1,)]]
    finally:
        session.close()

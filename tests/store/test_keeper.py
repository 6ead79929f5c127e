"""The keeper: leases are renewed while they last and settled whatever happens between."""

from __future__ import annotations

import contextlib
import gc
import logging
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from time import monotonic
from typing import Any

import pytest
from fix_proxy import Proxy
from helpers import wait_until

from kombu_pgnotify import keeper as keeper_module
from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claims import Ranges
from kombu_pgnotify.errors import DatabaseUnavailable
from kombu_pgnotify.keeper import LeaseKeeper
from kombu_pgnotify.leases import Lease, Outcome
from kombu_pgnotify.messages import Claimed, Fence, Outgoing

MakeBroker = Callable[..., Broker]
Sql = Callable[..., list[tuple[Any, ...]]]


def hold(broker: Broker, count: int = 1, queue: str = "queue") -> list[Lease]:
    """Publish, claim and hold some messages."""
    for _ in range(count):
        broker.store.publish(queue, Outgoing("{}", b""))
    started = monotonic()
    rows = broker.store.claim(queue, ([-1], [0], [32767]), count, broker.worker)
    assert len(rows) == count
    return broker.keeper.hold(queue, rows, started)


def test_a_lease_is_renewed_for_as_long_as_it_is_held(make_broker: MakeBroker, sql: Sql) -> None:
    broker = make_broker(visibility_timeout=0.6)
    (lease,) = hold(broker)
    first = sql("SELECT lease_expiration FROM pgnotify.tasks")
    # Longer than the lease would have lasted.
    wait_until(
        lambda: (
            sql("SELECT lease_expiration > %s + interval '1.2 s' FROM pgnotify.tasks", *first[0])
            == [(True,)]
        )
    )
    assert sql("SELECT deliveries FROM pgnotify.tasks") == [(1,)]
    broker.keeper.settle(lease, Outcome.ACKNOWLEDGED)
    broker.keeper.flush()
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)]


def test_a_short_task_is_never_renewed(broker: Broker, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[Any] = []
    monkeypatch.setattr(broker.store, "renew", lambda fences, _: renewed.append(fences) or set())
    (lease,) = hold(broker)
    broker.keeper._renew_due(monotonic() + 60 * keeper_module.RENEW_AFTER - 1)
    assert renewed == []
    broker.keeper._renew_due(monotonic() + 60 * keeper_module.RENEW_AFTER + 1)
    assert renewed == [[lease.fence]]


def test_a_lease_that_somebody_else_got_is_reported_and_forgotten(
    make_broker: MakeBroker, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    broker = make_broker(visibility_timeout=0.6)
    (lease,) = hold(broker)
    sql("UPDATE pgnotify.tasks SET deliveries = deliveries + 1")
    wait_until(lambda: broker.keeper.held == 0)
    wait_until(lambda: "lease.lost" in caplog.text)
    # Its acknowledgement comes too late and touches nothing.
    broker.keeper.settle(lease, Outcome.ACKNOWLEDGED)
    wait_until(lambda: not broker.keeper.pending)
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(1,)]


@pytest.mark.parametrize(
    ("outcome", "left", "attempts", "dead"),
    [
        (Outcome.ACKNOWLEDGED, 0, None, []),
        (Outcome.RELEASED, 1, 0, []),
        (Outcome.REQUEUED, 1, 1, []),
        (Outcome.DEAD_LETTERED, 0, None, [("why",)]),
    ],
)
def test_each_outcome_is_carried_out(
    outcome: Outcome, left: int, attempts: int | None, dead: list[Any], broker: Broker, sql: Sql
) -> None:
    (lease,) = hold(broker)
    broker.keeper.settle(lease, outcome, "why")
    assert broker.keeper.pending
    broker.keeper.flush()
    wait_until(lambda: not broker.keeper.pending)
    rows = sql("SELECT attempts, lease_worker_id FROM pgnotify.tasks")
    assert rows == ([(attempts, None)] if left else [])
    assert sql("SELECT reason FROM pgnotify.dead_letters") == dead


def test_a_delivery_is_settled_once(broker: Broker, sql: Sql) -> None:
    (lease,) = hold(broker)
    broker.keeper.settle(lease, Outcome.RELEASED)
    broker.keeper.settle(lease, Outcome.ACKNOWLEDGED)
    broker.keeper.flush()
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(1,)]


def test_what_nobody_flushes_is_settled_by_the_thread(broker: Broker, sql: Sql) -> None:
    (lease,) = hold(broker)
    broker.keeper.settle(lease, Outcome.ACKNOWLEDGED)
    wait_until(lambda: sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)])


def test_a_forsaken_lease_is_released_at_once(broker: Broker, sql: Sql) -> None:
    class Message:
        pass

    message = Message()
    (lease,) = hold(broker)
    lease.watch = weakref.ref(message, lambda _: broker.keeper.forsaken(lease))
    assert sql("SELECT lease_worker_id IS NULL FROM pgnotify.tasks") == [(False,)]
    del message
    gc.collect()
    wait_until(
        lambda: sql("SELECT lease_worker_id IS NULL, attempts FROM pgnotify.tasks") == [(True, 0)]
    )
    assert broker.keeper.held == 0


def test_a_forsaken_lease_that_was_settled_before_stays_settled(broker: Broker, sql: Sql) -> None:
    (lease,) = hold(broker)
    broker.keeper.settle(lease, Outcome.REQUEUED)
    broker.keeper.forsaken(lease)
    broker.keeper.flush()
    wait_until(lambda: broker.keeper._inbox.empty())
    assert sql("SELECT attempts FROM pgnotify.tasks") == [(1,)]


def test_an_acknowledgement_outlives_an_absence_of_the_database(
    make_broker: MakeBroker, proxy: Proxy, database_name: str, sql: Sql,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    broker = make_broker(proxy.url(database_name), visibility_timeout=6)
    lease, other, third = hold(broker, 3)
    proxy.refuse()
    proxy.cut()
    broker.keeper.settle(lease, Outcome.ACKNOWLEDGED)
    broker.keeper.settle(other, Outcome.RELEASED)
    with pytest.raises(DatabaseUnavailable):
        broker.keeper.flush()
    assert broker.keeper.pending
    wait_until(lambda: "keeper.unavailable" in caplog.text)
    proxy.accept()
    left = [(other.fence.task_id, True), (third.fence.task_id, False)]
    query = "SELECT task_id, lease_worker_id IS NULL FROM pgnotify.tasks ORDER BY 1"
    wait_until(lambda: sql(query) == left, message=lambda: f"{sql(query)} and not {left}")
    wait_until(lambda: not broker.keeper.pending)
    assert broker.keeper.held == 1


def test_a_lost_lease_is_not_claimed_to_be_settled(
    broker: Broker, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    (lease,) = hold(broker)
    sql("UPDATE pgnotify.tasks SET deliveries = deliveries + 1")
    broker.keeper.settle(lease, Outcome.ACKNOWLEDGED)
    broker.keeper.flush()
    assert "lease.lost" in caplog.text
    wait_until(lambda: not broker.keeper.pending)
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(1,)]


class SlowStore:
    """A store whose acknowledgement takes until it is told to end, and how."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.started = threading.Event()
        self.go_on = threading.Event()
        self.failures = 0

    def losses(self) -> int:
        return 0

    def acknowledge_again(
        self, fences: Sequence[Fence], published: Sequence[float], worker: str
    ) -> set[int]:
        return set()

    def acknowledge(self, fences: Sequence[Fence], holder: str) -> set[int]:
        self.started.set()
        assert self.go_on.wait(20)
        if self.failures:
            self.failures -= 1
            raise DatabaseUnavailable("frozen")
        self.batches.append([fence.task_id for fence in fences])
        return {fence.task_id for fence in fences}

    def renew(self, fences: Sequence[Fence], holder: str) -> set[int]:
        return {fence.task_id for fence in fences}

    def still_held(self, fences: Sequence[Fence], holder: str) -> set[int]:
        return set()


@pytest.fixture
def slow() -> SlowStore:
    return SlowStore()


@pytest.fixture
def keeper(slow: SlowStore, monkeypatch: pytest.MonkeyPatch) -> Any:
    keeper = LeaseKeeper(slow, "me", 0.12)  # type: ignore[arg-type]
    yield keeper
    monkeypatch.setattr(keeper_module, "IDLE_ROUNDS", 0)
    slow.go_on.set()
    slow.failures = 0
    for lease in list(keeper._leases.values()):
        keeper.settle(lease, Outcome.ACKNOWLEDGED)
    thread = keeper._thread
    if thread is not None:
        keeper.hurry()
        thread.join(10)
        assert not thread.is_alive()


def leases_of(keeper: LeaseKeeper, count: int) -> list[Lease]:
    rows = [Claimed(n, 1, 1, 255, "", b"") for n in range(1, count + 1)]
    return keeper.hold("queue", rows, monotonic() + 1000)


def test_threads_that_settle_together_share_a_round_trip(
    keeper: LeaseKeeper, slow: SlowStore
) -> None:
    leases = leases_of(keeper, 21)

    def settle(lease: Lease) -> None:
        keeper.settle(lease, Outcome.ACKNOWLEDGED)
        keeper.flush()

    with ThreadPoolExecutor(21) as pool:
        futures = [pool.submit(settle, leases[0])]
        assert slow.started.wait(10)
        futures += [pool.submit(settle, lease) for lease in leases[1:]]
        wait_until(lambda: len(keeper._outbox) == 20)
        slow.go_on.set()
        for future in futures:
            future.result(10)
    assert sorted(len(batch) for batch in slow.batches) == [1, 20]
    wait_until(lambda: not keeper.pending)


def test_a_flush_inside_a_flush_leaves_the_work_to_the_outer_one(
    keeper: LeaseKeeper, slow: SlowStore
) -> None:
    first, second = leases_of(keeper, 2)
    acknowledge = slow.acknowledge

    def interrupted(fences: Sequence[Fence], holder: str) -> set[int]:
        # As a signal handler does, in the thread that is flushing.
        if not slow.batches:
            keeper.settle(second, Outcome.ACKNOWLEDGED)
            keeper.flush()
        return acknowledge(fences, holder)

    slow.acknowledge = interrupted  # type: ignore[method-assign]
    slow.go_on.set()
    keeper.settle(first, Outcome.ACKNOWLEDGED)
    keeper.flush()
    assert slow.batches == [[1], [2]]


def test_the_thread_ends_by_itself_when_nothing_is_held(
    keeper: LeaseKeeper, slow: SlowStore
) -> None:
    slow.go_on.set()
    (lease,) = leases_of(keeper, 1)
    thread = keeper._thread
    assert thread is not None
    assert thread.daemon
    keeper.settle(lease, Outcome.ACKNOWLEDGED)
    thread.join(10)
    assert not thread.is_alive()
    # And the next lease starts another.
    (lease,) = leases_of(keeper, 1)
    assert keeper._thread is not None
    keeper.settle(lease, Outcome.ACKNOWLEDGED)


def test_what_a_flush_could_not_settle_is_tried_again_however_long_it_took(
    keeper: LeaseKeeper, slow: SlowStore
) -> None:
    """A flush that hangs in another thread must not look like an empty outbox."""
    slow.failures = 1
    (lease,) = leases_of(keeper, 1)
    thread = keeper._thread
    assert thread is not None

    def flush() -> None:
        # It fails here, unless the keeper's own thread was first to flush: then it fails there.
        with contextlib.suppress(DatabaseUnavailable):
            keeper.flush()

    keeper._flush_lock.acquire()
    keeper.settle(lease, Outcome.ACKNOWLEDGED)
    flushing = threading.Thread(target=flush)
    flushing.start()
    keeper._flush_lock.release()
    assert slow.started.wait(10)
    # Many rounds of the keeper go by.
    thread.join(1)
    slow.go_on.set()
    flushing.join(10)
    wait_until(lambda: slow.batches == [[1]], 5, "it was never tried again")


def test_the_thread_outlives_an_error_that_is_not_ours(
    keeper: LeaseKeeper, slow: SlowStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renewals must go on: every lease of the process depends on this thread."""
    slow.go_on.set()
    calls: list[int] = []

    def renew(fences: Sequence[Fence], holder: str) -> set[int]:
        calls.append(1)
        if len(calls) == 1:
            raise OSError("something unforeseen")
        return {fence.task_id for fence in fences}

    slow.renew = renew  # type: ignore[method-assign]
    (lease,) = leases_of(keeper, 1)
    lease.renewed_at = float("-inf")
    wait_until(lambda: len(calls) > 1, 5, "the keeper's thread has died")


def test_the_end_of_the_process_releases_everything(broker: Broker, sql: Sql) -> None:
    hold(broker, 3)
    broker.close()
    assert sql("SELECT lease_worker_id, attempts FROM pgnotify.tasks") == [(None, 0)] * 3


def test_closing_while_the_database_is_away_raises_nothing(
    make_broker: MakeBroker, proxy: Proxy, database_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    broker = make_broker(proxy.url(database_name))
    hold(broker)
    proxy.refuse()
    proxy.cut()
    broker.close()
    assert "leases expire by themselves" in caplog.text
    proxy.accept()


def test_a_thousand_leases_are_settled_and_renewed(
    make_broker: MakeBroker, everything: Ranges, sql: Sql
) -> None:
    broker = make_broker()
    sql(
        "INSERT INTO pgnotify.tasks (task_name, envelope, payload)"
        " SELECT 'queue', '{}', '' FROM generate_series(1, 2300)"
    )
    rows = broker.store.claim("queue", everything, 2300, broker.worker)
    leases = broker.keeper.hold("queue", rows, monotonic())
    broker.keeper._renew_due(monotonic() + 1000)
    assert broker.keeper.held == 2300
    for lease in leases:
        broker.keeper.settle(lease, Outcome.ACKNOWLEDGED)
    broker.keeper.flush()
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)]


@pytest.fixture(autouse=True)
def quiet_logs(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "kombu_pgnotify")


def test_a_message_that_the_server_will_not_bury_holds_up_no_other(
    broker: Broker, sql: Any, refuse_deletion: Any, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_deletion("OLD.payload = 'bad'")
    for payload in (b"1", b"bad", b"2"):
        broker.store.publish("queue", Outgoing("{}", payload))
    rows = broker.store.claim("queue", ([-1], [0], [32767]), 3, broker.worker)
    leases = broker.keeper.hold("queue", rows, monotonic())
    for lease in leases:
        broker.keeper.settle(lease, Outcome.DEAD_LETTERED, "rejected")
    broker.keeper.flush()
    assert not broker.keeper.pending
    assert f"settle.refused task_id={leases[1].fence.task_id}" in caplog.text
    assert sql("SELECT payload FROM pgnotify.tasks") == [(b"bad",)]
    assert sql("SELECT payload FROM pgnotify.dead_letters ORDER BY 1") == [(b"1",), (b"2",)]

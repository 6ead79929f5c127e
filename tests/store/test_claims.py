"""A message's life in the table: claimed once, fenced, and never lost."""

from __future__ import annotations

import random
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from helpers import wait_until
from hypothesis import HealthCheck, settings, strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claims import ClaimCursor, Outlook, Ranges
from kombu_pgnotify.messages import Claimed, Fence, Outgoing
from kombu_pgnotify.store import MessageStore

Sql = Callable[..., list[tuple[Any, ...]]]
Claim = Callable[..., list[Claimed]]
Fences = Callable[[Claimed], Fence]

EXPIRE = "UPDATE pgnotify.tasks SET lease_expiration = now() - interval '1 s' WHERE task_id = %s"
MAKE_DUE = "UPDATE pgnotify.tasks SET available_at = now() - interval '1 s' WHERE task_id = %s"


def in_time(seconds: float) -> str:
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()


def publish(store: MessageStore, queue: str, count: int, **options: Any) -> list[int]:
    return [store.publish(queue, Outgoing("{}", b"%d" % n, **options)) for n in range(count)]


# -- claiming


def test_two_stores_that_race_claim_each_message_exactly_once(
    make_broker: Callable[..., Broker], queue: str, everything: Ranges
) -> None:
    stores = [make_broker().store for _ in range(2)]
    ids = publish(stores[0], queue, 300)
    start = threading.Barrier(8)

    def consume(number: int) -> list[int]:
        start.wait()
        found: list[int] = []
        while rows := stores[number % 2].claim(queue, everything, 7, f"worker {number}"):
            found += [row.task_id for row in rows]
        return found

    with ThreadPoolExecutor(8) as pool:
        found = [task_id for part in pool.map(consume, range(8)) for task_id in part]
    # A claim passes over rows that another one has locked, so a racer may end early; nobody
    # may get a row twice, and nothing is left when all have looked.
    assert sorted(found) == ids


def test_takers_that_race_get_each_message_exactly_once(
    make_broker: Callable[..., Broker], queue: str, everything: Ranges
) -> None:
    stores = [make_broker().store for _ in range(2)]
    ids = publish(stores[0], queue, 200)
    start = threading.Barrier(6)

    def take(number: int) -> list[int]:
        start.wait()
        found: list[int] = []
        while rows := stores[number % 2].take(queue, everything, 5):
            found += [row.task_id for row in rows]
        return found

    with ThreadPoolExecutor(6) as pool:
        found = [task_id for part in pool.map(take, range(6)) for task_id in part]
    assert sorted(found) == ids
    assert stores[0].size(queue) == 0


def test_claims_come_by_priority_and_then_in_order_of_publication(
    store: MessageStore, queue: str, claim: Claim
) -> None:
    priorities = [0, 9, 3, 9, 0, 255, 3]
    ids = [store.publish(queue, Outgoing("{}", b"", priority=priority)) for priority in priorities]
    expected = [5, 1, 3, 2, 6, 0, 4]
    assert [row.task_id for row in claim(3)] == [ids[n] for n in expected[:3]]
    assert [row.task_id for row in claim(10)] == [ids[n] for n in expected[3:]]


def test_a_claim_walks_its_ranges_and_nothing_else(store: MessageStore, queue: str) -> None:
    low = publish(store, queue, 4)
    high = publish(store, queue, 4, priority=9)
    # After the second of rank 246, after the first of rank 255.
    ranges = ([246, 255], [high[1], low[0]], [254, 32767])
    rows = store.claim(queue, ranges, 100, "me")
    assert [row.task_id for row in rows] == [*high[2:], *low[1:]]


def test_a_claim_of_several_ranges_stops_at_its_limit(
    store: MessageStore, queue: str, claim: Claim
) -> None:
    low = publish(store, queue, 3)
    high = publish(store, queue, 3, priority=9)
    ranges = ([-1, 246, 255], [0, 0, 0], [245, 254, 32767])
    assert [row.task_id for row in store.claim(queue, ranges, 4, "me")] == [*high, low[0]]
    assert [row.task_id for row in claim()] == low[1:], "what was not asked for stays free"


def test_a_claim_sees_no_other_queue(store: MessageStore, queue: str, claim: Claim) -> None:
    publish(store, queue + "x", 1)
    assert claim() == []


def test_a_claim_passes_over_rows_that_somebody_has_locked(
    database: str, store: MessageStore, queue: str, claim: Claim
) -> None:
    first, second = publish(store, queue, 2)
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM pgnotify.tasks WHERE task_id = %s FOR UPDATE", (first,))
        assert [row.task_id for row in claim()] == [second]
    assert [row.task_id for row in claim()] == [first]


def test_a_claim_tells_what_the_row_says(
    store: MessageStore, queue: str, claim: Claim, sql: Sql
) -> None:
    task_id = store.publish(queue, Outgoing('{"a": 1}', b"body", priority=5))
    ((published,),) = sql("SELECT extract(epoch FROM published_at)::float8 FROM pgnotify.tasks")
    assert claim() == [Claimed(task_id, 1, 1, 250, '{"a": 1}', b"body", False, None, published)]


def test_a_lease_names_its_holder_and_lasts_the_visibility_timeout(
    make_broker: Callable[..., Broker], queue: str, everything: Ranges, sql: Sql
) -> None:
    store = make_broker(visibility_timeout=1000).store
    publish(store, queue, 1)
    store.claim(queue, everything, 1, "me")
    ((holder, left),) = sql(
        "SELECT lease_worker_id, extract(epoch FROM lease_expiration - clock_timestamp())::float8"
        " FROM pgnotify.tasks"
    )
    assert holder == "me"
    assert 970 < left <= 1000


def test_an_expired_lease_is_taken_over_by_the_clock_of_the_database(
    make_broker: Callable[..., Broker], queue: str, everything: Ranges
) -> None:
    store = make_broker(visibility_timeout=0.4).store
    (task_id,) = publish(store, queue, 1)
    (first,) = store.claim(queue, everything, 1, "one")
    assert store.claim(queue, everything, 1, "two") == []
    (second,) = wait_until(lambda: store.claim(queue, everything, 1, "two"), 5)
    assert (second.task_id, second.delivery, second.attempts) == (task_id, 2, 2)
    assert first.delivery == 1


def test_a_clock_of_the_client_changes_nothing(
    store: MessageStore, queue: str, claim: Claim, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(store, queue, 1)
    monkeypatch.setattr("time.time", lambda: 0.0)
    claim()
    ((future,),) = sql("SELECT lease_expiration > clock_timestamp() FROM pgnotify.tasks")
    assert future


def test_take_removes_and_counts_as_a_claim_would(
    store: MessageStore, queue: str, claim: Claim, fence_of: Fences, everything: Ranges, sql: Sql
) -> None:
    publish(store, queue, 2)
    leased = claim(1)
    (taken,) = store.take(queue, everything, 10)
    assert (taken.delivery, taken.attempts, taken.payload) == (1, 1, b"1")
    store.release([fence_of(leased[0])], {queue}, started=True)
    (again,) = store.take(queue, everything, 10)
    assert (again.delivery, again.attempts, again.payload) == (2, 2, b"0")
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)]


# -- fences


@pytest.mark.parametrize("same_worker", [True, False])
@pytest.mark.parametrize("way", ["expired", "released"])
@pytest.mark.parametrize("verb", ["acknowledge", "renew", "release", "dead_letter"])
def test_an_old_delivery_touches_nothing(
    verb: str, way: str, same_worker: bool, store: MessageStore, queue: str, claim: Claim,
    fence_of: Fences, sql: Sql,
) -> None:  # fmt: skip
    (task_id,) = publish(store, queue, 1)
    (old,) = claim(1, "me")
    if way == "expired":
        sql(EXPIRE, task_id)
    else:
        store.release([fence_of(old)], {queue}, started=False)
    (new,) = claim(1, "me" if same_worker else "other")
    row = "SELECT t.*, t.ctid, t.xmin FROM pgnotify.tasks t"
    before = sql(row)

    extra: dict[str, tuple[Any, ...]] = {"release": ({queue},), "dead_letter": ("why",)}
    keywords = {"started": True} if verb == "release" else {}
    call = getattr(store, verb)
    assert call([fence_of(old)], *extra.get(verb, ()), **keywords) == set()
    assert sql(row) == before
    assert sql("SELECT count(*) FROM pgnotify.dead_letters") == [(0,)]
    assert call([fence_of(new)], *extra.get(verb, ()), **keywords) == {task_id}


def test_an_acknowledgement_of_an_expired_lease_counts_if_nobody_took_it(
    store: MessageStore, queue: str, claim: Claim, fence_of: Fences, sql: Sql
) -> None:
    (task_id,) = publish(store, queue, 1)
    (row,) = claim()
    sql(EXPIRE, task_id)
    assert store.acknowledge([fence_of(row)]) == {task_id}
    assert claim() == []


def test_settling_many_tells_which_were_still_held(
    store: MessageStore, queue: str, claim: Claim, fence_of: Fences
) -> None:
    publish(store, queue, 50)
    rows = claim()
    fences = [fence_of(row) for row in rows]
    store.acknowledge(fences[:10])
    mixed = [Fence(f.task_id, f.delivery + (n % 2)) for n, f in enumerate(fences)]
    random.Random(1).shuffle(mixed)
    expected = {f.task_id for n, f in enumerate(fences) if n >= 10 and n % 2 == 0}
    assert store.renew(mixed) == expected
    assert store.acknowledge(mixed) == expected


def test_a_renewal_lasts_the_visibility_timeout_from_now(
    store: MessageStore, queue: str, claim: Claim, fence_of: Fences, sql: Sql
) -> None:
    publish(store, queue, 1)
    (row,) = claim()
    sql("UPDATE pgnotify.tasks SET lease_expiration = now() + interval '1 s'")
    assert store.renew([fence_of(row)]) == {row.task_id}
    ((left,),) = sql(
        "SELECT extract(epoch FROM lease_expiration - now())::float8 FROM pgnotify.tasks"
    )
    assert 50 < left <= 60


def test_what_was_released_cannot_be_renewed_or_released_again(
    store: MessageStore, queue: str, claim: Claim, fence_of: Fences
) -> None:
    publish(store, queue, 1)
    (row,) = claim()
    fences = [fence_of(row)]
    assert store.release(fences, {queue}, started=False) == {row.task_id}
    assert store.renew(fences) == set()
    assert store.release(fences, {queue}, started=False) == set()


def test_workers_that_settle_the_same_rows_in_opposite_order_do_not_deadlock(
    make_broker: Callable[..., Broker], queue: str, everything: Ranges, fence_of: Fences
) -> None:
    stores = [make_broker().store for _ in range(2)]
    publish(stores[0], queue, 200)
    rows = stores[0].claim(queue, everything, 1000, "me")
    fences = [fence_of(row) for row in rows]
    orders = [fences, fences[::-1], random.Random(2).sample(fences, len(fences)), fences]

    def release(number: int) -> None:
        for _ in range(15):
            stores[number % 2].release(orders[number], set(), started=True)
            stores[number % 2].claim(queue, everything, 1000, "me")

    def renew(number: int) -> set[int]:
        store, mine = stores[number % 2], orders[number]
        # What another one is just renewing is passed over, and not taken for lost.
        return set.intersection(*(store.renew(mine) | store.still_held(mine) for _ in range(15)))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(renew, range(4))) == [{row.task_id for row in rows}] * 4
        list(pool.map(release, range(4)))


# -- attempts


def test_a_release_takes_the_attempt_back_and_a_requeue_does_not(
    store: MessageStore, queue: str, claim: Claim, fence_of: Fences, sql: Sql
) -> None:
    (task_id,) = publish(store, queue, 1)
    attempts = []
    for ending in ("released", "requeued", "expired", "released", "last"):
        (row,) = claim()
        attempts.append(row.attempts)
        if ending == "expired":
            sql(EXPIRE, task_id)
        elif ending != "last":
            store.release([fence_of(row)], {queue}, started=ending == "requeued")
    assert attempts == [1, 1, 2, 3, 3]
    assert row.delivery == 5, "deliveries never shrink: they are the fence"


def test_attempts_never_fall_below_zero(
    store: MessageStore, queue: str, claim: Claim, fence_of: Fences, sql: Sql
) -> None:
    publish(store, queue, 1)
    (row,) = claim()
    sql("UPDATE pgnotify.tasks SET attempts = 0")
    assert store.release([fence_of(row)], {queue}, started=False)
    assert sql("SELECT attempts FROM pgnotify.tasks") == [(0,)]


def test_a_dead_letter_is_kept_with_its_reason(
    store: MessageStore, queue: str, claim: Claim, fence_of: Fences, sql: Sql
) -> None:
    task_id = store.publish(queue, Outgoing('{"a": 1}', b"\x00\xff", priority=7))
    (row,) = claim(1, "me")
    assert store.dead_letter([fence_of(row)], "it's broken") == {task_id}
    assert claim() == []
    assert sql(
        "SELECT task_id, task_name, priority, attempts, worker_id, reason, envelope, payload"
        " FROM pgnotify.dead_letters"
    ) == [(task_id, queue, 7, 1, "me", "it's broken", '{"a": 1}', b"\x00\xff")]


# -- counting


def test_size_and_purge_count_only_what_nobody_holds(
    store: MessageStore, queue: str, claim: Claim, fence_of: Fences, sql: Sql
) -> None:
    ids = publish(store, queue, 5)
    publish(store, queue, 2, available_at=in_time(3600))
    publish(store, queue + "x", 3)
    leased = claim(3)
    sql(EXPIRE, ids[0])
    assert store.size(queue) == 2 + 2 + 1
    assert store.size(queue, 2) == 2
    assert store.purge(queue) == 5
    assert store.size(queue) == 0
    assert store.size(queue + "x") == 3
    assert store.acknowledge([fence_of(row) for row in leased]) == set(ids[1:3])


def test_purge_deletes_more_than_fits_one_statement(
    store: MessageStore, queue: str, sql: Sql
) -> None:
    sql(
        "INSERT INTO pgnotify.tasks (task_name, envelope, payload)"
        " SELECT %s, '{}', '' FROM generate_series(1, 2500)",
        queue,
    )
    assert store.purge(queue) == 2500
    assert store.size(queue) == 0


# -- held messages


def test_a_held_message_is_delivered_once_it_is_due(
    store: MessageStore, queue: str, claim: Claim
) -> None:
    task_id = store.publish(queue, Outgoing("{}", b"", available_at=in_time(0.5)))
    assert claim() == []
    assert store.promote(queue) == 0
    wait_until(lambda: store.promote(queue), 5)
    assert [row.task_id for row in claim()] == [task_id]
    assert store.promote(queue) == 0


def test_a_message_whose_time_has_passed_is_not_held(
    store: MessageStore, queue: str, claim: Claim
) -> None:
    store.publish(queue, Outgoing("{}", b"", available_at=in_time(-1)))
    assert len(claim()) == 1


def test_promote_serves_the_queue_that_was_asked_for(
    store: MessageStore, queue: str, sql: Sql
) -> None:
    (mine,) = publish(store, queue, 1, available_at=in_time(3600))
    (other,) = publish(store, queue + "x", 1, available_at=in_time(3600))
    sql(MAKE_DUE, mine)
    sql(MAKE_DUE, other)
    assert store.promote(queue) == 1
    assert sql("SELECT task_id FROM pgnotify.tasks WHERE available_at IS NULL") == [(mine,)]


def test_next_look_is_the_soonest_due_time_or_expiration(
    store: MessageStore, queue: str, claim: Claim, sql: Sql
) -> None:
    assert store.next_look(queue) is None
    publish(store, queue, 1)
    assert store.next_look(queue) is None
    publish(store, queue, 1, available_at=in_time(500))
    look = store.next_look(queue)
    assert look is not None
    assert 480 < look <= 500
    (row,) = claim()
    look = store.next_look(queue)
    assert look is not None
    assert 40 < look <= 60
    sql(EXPIRE, row.task_id)
    look = store.next_look(queue)
    assert look is not None
    assert -60 < look < 0


@pytest.mark.parametrize(
    "change",
    [
        "lease_worker_id = 'x'",
        "lease_expiration = now()",
        "priority = 256",
        "priority = -1",
    ],
)
def test_the_table_refuses_half_a_lease_and_a_wrong_priority(
    change: str, store: MessageStore, queue: str, sql: Sql
) -> None:
    publish(store, queue, 1)
    with pytest.raises(psycopg.errors.CheckViolation):
        sql(f"UPDATE pgnotify.tasks SET {change}")


# -- nothing is lost, nothing is held twice


class Ledger:
    """Who holds what, as the consumers see it."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.deliveries: Counter[tuple[int, int]] = Counter()
        self.acknowledged: Counter[int] = Counter()
        self.holder: dict[int, tuple[int, str]] = {}
        self.twice: list[str] = []

    def claimed(self, row: Claimed, worker: str) -> None:
        with self.lock:
            self.deliveries[row.task_id, row.delivery] += 1
            if row.task_id in self.acknowledged or row.task_id in self.holder:
                self.twice.append(f"{row.task_id} to {worker}, {self.holder.get(row.task_id)}")
            self.holder[row.task_id] = (row.delivery, worker)

    def gone(self, task_id: int, *, acknowledged: bool) -> None:
        with self.lock:
            del self.holder[task_id]
            if acknowledged:
                self.acknowledged[task_id] += 1


def late_writer(url: str, queue: str, seed: int, count: int, committed: set[int]) -> None:
    """Commit rows later than others commit rows with higher ids; roll some back."""
    rng = random.Random(seed)
    insert = (
        "INSERT INTO pgnotify.tasks (task_name, priority, envelope, payload)"
        " VALUES (%s, %s, '{}', '') RETURNING task_id"
    )
    with psycopg.connect(url) as connection:
        for _ in range(count):
            ids = [
                connection.execute(insert, (queue, rng.choice([0, 0, 0, 5, 9]))).fetchone()[0]  # type: ignore[index]
                for _ in range(rng.randint(1, 4))
            ]
            if rng.random() < 0.3:
                connection.execute("SELECT pg_sleep(%s)", (rng.random() * 0.05,))
            if rng.random() < 0.25:
                connection.rollback()
            else:
                connection.commit()
                committed.update(ids)


def consume_until(
    store: MessageStore, queue: str, worker: str, seed: int, ledger: Ledger,
    done: threading.Event, clock: Callable[[], float],
) -> None:  # fmt: skip
    """Consume through a cursor as a consumer does, with every kind of ending."""
    rng = random.Random(seed)
    cursor = ClaimCursor()
    while not done.is_set():
        started = clock()
        asked = rng.randint(1, 12)
        rows = store.claim(queue, cursor.next_ranges(started), asked, worker)
        for row in rows:
            ledger.claimed(row, worker)
        pairs = [(row.rank, row.task_id) for row in rows]
        cursor.claimed(pairs, asked, started, clock())
        endings = defaultdict(list)
        for row in rows:
            endings[rng.choices(["ack", "release", "requeue"], [8, 1, 1])[0]].append(row)
        for ending, ended in endings.items():
            fences = [Fence(row.task_id, row.delivery) for row in ended]
            for row in ended:
                ledger.gone(row.task_id, acknowledged=ending == "ack")
            if ending == "ack":
                settled = store.acknowledge(fences)
            else:
                settled = store.release(fences, {queue}, started=ending == "requeue")
                cursor.look_from_start()
            assert settled == {row.task_id for row in ended}, "the lease was lost while it lasted"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("costly", [False, True], ids=["cheap looks", "costly looks"])
def test_no_row_is_lost_or_held_twice_whatever_commits_late(
    seed: int, costly: bool, make_broker: Callable[..., Broker], database: str, queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Late commits, rollbacks, releases and requeues against several consumers with cursors.

    Bounds stay close and are always kept, so that rows do commit below them; looks from the
    start are the only way to find those, and no announcement tells of a late commit.
    """
    monkeypatch.setattr("kombu_pgnotify.claims.SLACK", 2)
    monkeypatch.setattr("kombu_pgnotify.claims.CHEAP", 0.0 if costly else 0.002)
    monkeypatch.setattr("kombu_pgnotify.claims.COST_SHARE", 10)
    # The time of the cursors runs fast: what takes a second under load takes 1/20.
    from time import monotonic

    broker = make_broker()
    ledger, done = Ledger(), threading.Event()
    # A head start for the writers, so that the cursors have something to walk along.
    committed = set(publish(broker.store, queue, 500))
    with ThreadPoolExecutor(8) as pool:
        writers = [
            pool.submit(late_writer, database, queue, 100 * seed + n, 40, committed)
            for n in range(4)
        ]
        consumers = [
            pool.submit(
                consume_until, broker.store, queue, f"worker {n}", 100 * seed + 50 + n, ledger,
                done, lambda: monotonic() * 20,
            )
            for n in range(3)
        ]  # fmt: skip
        try:
            for writer in writers:
                writer.result(60)
            wait_until(
                lambda: (
                    ledger.acknowledged.keys() >= committed
                    or any(consumer.done() for consumer in consumers)
                ),
                20,
                lambda: f"lost: {sorted(committed - ledger.acknowledged.keys())}",
            )
        finally:
            done.set()
        for consumer in consumers:
            consumer.result(20)
    assert ledger.twice == []
    assert set(ledger.acknowledged) == committed
    assert set(ledger.acknowledged.values()) == {1}
    assert max(ledger.deliveries.values()) == 1, "one delivery went to two consumers"


def test_crashed_consumers_lose_nothing(
    make_broker: Callable[..., Broker], database: str, queue: str, sql: Sql,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Consumers that forget what they claimed, and short leases: another delivery follows."""
    from time import monotonic

    monkeypatch.setattr("kombu_pgnotify.claims.SLACK", 0)
    monkeypatch.setattr("kombu_pgnotify.claims.CHEAP", 0.0)
    store = make_broker(visibility_timeout=0.3).store
    ids = set(publish(store, queue, 150))
    acknowledged: Counter[int] = Counter()
    fences: Counter[tuple[int, int]] = Counter()
    lock = threading.Lock()
    deadline = monotonic() + 20

    def consume(number: int) -> None:
        rng, cursor = random.Random(number), ClaimCursor()
        while len(acknowledged) < len(ids) and monotonic() < deadline:
            started = monotonic()
            rows = store.claim(queue, cursor.next_ranges(started), 10, f"worker {number}")
            pairs = [(row.rank, row.task_id) for row in rows]
            outlook = cursor.claimed(pairs, 10, started, monotonic())
            if outlook is Outlook.EMPTY:
                cursor.look_from_start()
            kept = [row for row in rows if rng.random() < 0.6]
            settled = store.acknowledge([Fence(row.task_id, row.delivery) for row in kept])
            with lock:
                fences.update((row.task_id, row.delivery) for row in rows)
                acknowledged.update(settled)

    with ThreadPoolExecutor(3) as pool:
        for future in [pool.submit(consume, number) for number in range(3)]:
            future.result(30)
    assert set(acknowledged) == ids
    assert set(acknowledged.values()) == {1}
    assert set(fences.values()) == {1}
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)]


def test_a_lone_late_commit_below_the_bounds_is_found_within_a_second_under_load(
    make_broker: Callable[..., Broker], database: str, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kombu_pgnotify.claims.SLACK", 0)
    monkeypatch.setattr("kombu_pgnotify.claims.CHEAP", 0.0)
    store = make_broker().store
    cursor, now = ClaimCursor(), 1000.0
    with psycopg.connect(database) as late:
        late_id = late.execute(
            "INSERT INTO pgnotify.tasks (task_name, envelope, payload) VALUES (%s, '{}', '')"
            " RETURNING task_id",
            (queue,),
        ).fetchone()[0]  # type: ignore[index]
        publish(store, queue, 200)
        for _ in range(3):
            rows = store.claim(queue, cursor.next_ranges(now), 5, "me")
            cursor.claimed([(row.rank, row.task_id) for row in rows], 5, now, now + 0.001)
            now += 0.01
    found = []
    while late_id not in found:
        rows = store.claim(queue, cursor.next_ranges(now), 5, "me")
        assert cursor.claimed([(r.rank, r.task_id) for r in rows], 5, now, now) is Outlook.MORE
        found = [row.task_id for row in rows]
        now += 0.05
        assert now < 1002


# -- the whole life, against a model


class Row:
    """What the model knows of one message."""

    def __init__(self, priority: int, held: bool) -> None:
        self.priority = priority
        self.held = held
        self.leased = False
        self.expired = False
        self.deliveries = 0
        self.attempts = 0

    @property
    def free(self) -> bool:
        return not self.leased or self.expired


class Life(RuleBasedStateMachine):
    """published, held, leased, acknowledged, released, requeued, expired, dead-lettered."""

    store: MessageStore
    connection: psycopg.Connection[Any]
    queue = "life"

    def __init__(self) -> None:
        super().__init__()
        self.rows: dict[int, Row] = {}
        self.fences: list[Fence] = []
        self.dead: dict[int, str] = {}
        self.connection.execute("TRUNCATE pgnotify.tasks, pgnotify.dead_letters")

    def claimable(self) -> list[int]:
        ready = [i for i, row in self.rows.items() if row.free and not row.held]
        return sorted(ready, key=lambda i: (-self.rows[i].priority, i))

    def valid(self, fence: Fence) -> bool:
        row = self.rows.get(fence.task_id)
        return row is not None and row.deliveries == fence.delivery

    @rule(priority=st.sampled_from([0, 3, 9, 255]), held=st.booleans())
    def publish(self, priority: int, held: bool) -> None:
        when = in_time(3600) if held else None
        task_id = self.store.publish(
            self.queue, Outgoing("{}", b"x", priority=priority, available_at=when)
        )
        assert task_id not in self.rows
        self.rows[task_id] = Row(priority, held)

    @rule(limit=st.integers(1, 4))
    def claim(self, limit: int) -> None:
        expected = self.claimable()[:limit]
        ranges = ClaimCursor().next_ranges(0)
        claimed = self.store.claim(self.queue, ranges, limit, "me")
        assert [row.task_id for row in claimed] == expected
        for got in claimed:
            row = self.rows[got.task_id]
            row.leased, row.expired = True, False
            row.deliveries += 1
            row.attempts += 1
            assert (got.delivery, got.attempts) == (row.deliveries, row.attempts)
            self.fences.append(Fence(got.task_id, got.delivery))

    @rule(limit=st.integers(1, 2))
    def take(self, limit: int) -> None:
        expected = self.claimable()[:limit]
        taken = self.store.take(self.queue, ClaimCursor().next_ranges(0), limit)
        assert [row.task_id for row in taken] == expected
        for task_id in expected:
            del self.rows[task_id]

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def acknowledge(self, data: st.DataObject) -> None:
        fences = data.draw(st.lists(st.sampled_from(self.fences), max_size=3, unique=True))
        valid = {fence.task_id for fence in fences if self.valid(fence)}
        assert self.store.acknowledge(fences) == valid
        for task_id in valid:
            del self.rows[task_id]

    @precondition(lambda self: self.fences)
    @rule(data=st.data(), started=st.booleans())
    def release(self, data: st.DataObject, started: bool) -> None:
        fences = data.draw(st.lists(st.sampled_from(self.fences), max_size=3, unique=True))
        leased = [f for f in fences if self.valid(f) and self.rows[f.task_id].leased]
        valid = {fence.task_id for fence in leased}
        assert self.store.release(fences, {self.queue}, started=started) == valid
        for task_id in valid:
            row = self.rows[task_id]
            row.leased = row.expired = False
            row.attempts -= not started

    @precondition(lambda self: self.fences)
    @rule(data=st.data())
    def renew(self, data: st.DataObject) -> None:
        fences = data.draw(st.lists(st.sampled_from(self.fences), max_size=3, unique=True))
        leased = [f for f in fences if self.valid(f) and self.rows[f.task_id].leased]
        valid = {fence.task_id for fence in leased}
        assert self.store.renew(fences) == valid
        for task_id in valid:
            self.rows[task_id].expired = False

    @precondition(lambda self: self.fences)
    @rule(data=st.data(), reason=st.sampled_from(["rejected", "unreadable"]))
    def dead_letter(self, data: st.DataObject, reason: str) -> None:
        fences = data.draw(st.lists(st.sampled_from(self.fences), max_size=3, unique=True))
        valid = {fence.task_id for fence in fences if self.valid(fence)}
        assert self.store.dead_letter(fences, reason) == valid
        for task_id in valid:
            del self.rows[task_id]
            self.dead[task_id] = reason

    @precondition(lambda self: any(row.leased for row in self.rows.values()))
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        leased = sorted(i for i, row in self.rows.items() if row.leased)
        task_id = data.draw(st.sampled_from(leased))
        self.connection.execute(EXPIRE, (task_id,))
        self.rows[task_id].expired = True

    @precondition(lambda self: any(row.held for row in self.rows.values()))
    @rule(data=st.data())
    def become_due(self, data: st.DataObject) -> None:
        held = sorted(i for i, row in self.rows.items() if row.held)
        task_id = data.draw(st.sampled_from(held))
        self.connection.execute(MAKE_DUE, (task_id,))
        assert self.store.promote(self.queue) == 1
        self.rows[task_id].held = False

    @rule()
    def purge(self) -> None:
        free = [task_id for task_id, row in self.rows.items() if row.free]
        assert self.store.purge(self.queue) == len(free)
        for task_id in free:
            del self.rows[task_id]

    @invariant()
    def the_table_is_what_the_model_says(self) -> None:
        found = self.connection.execute(
            "SELECT task_id, priority, available_at IS NOT NULL, lease_worker_id IS NOT NULL,"
            " coalesce(lease_expiration < now(), false), deliveries, attempts FROM pgnotify.tasks"
        ).fetchall()
        assert {row[0]: row[1:] for row in found} == {
            task_id: (r.priority, r.held, r.leased, r.expired, r.deliveries, r.attempts)
            for task_id, r in self.rows.items()
        }
        dead = self.connection.execute("SELECT task_id, reason FROM pgnotify.dead_letters")
        assert dict(dead.fetchall()) == self.dead
        assert self.store.size(self.queue) == sum(row.free for row in self.rows.values())


def test_every_life_of_a_message_is_the_one_of_the_model(
    database: str, store: MessageStore
) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    with psycopg.connect(database, autocommit=True) as connection:
        machine = type("LifeHere", (Life,), {"store": store, "connection": connection})
        run_state_machine_as_test(
            machine,
            settings=settings(
                max_examples=40,
                stateful_step_count=40,
                deadline=None,
                suppress_health_check=list(HealthCheck),
            ),
        )

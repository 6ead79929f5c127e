"""What a queue's arguments mean for its messages: time to live, priority, length, dead letters."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from typing import Any

import psycopg
import pytest
from helpers import wait_until
from hypothesis import given, settings, strategies as st

from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claims import Ranges
from kombu_pgnotify.errors import StatementFailed
from kombu_pgnotify.messages import Claimed, Fence, Outgoing, channel_of, lock_of
from kombu_pgnotify.store import MessageStore
from kombu_pgnotify.topology import Queue

MakeBroker = Callable[..., Broker]
Sql = Callable[..., list[tuple[Any, ...]]]
Declare = Callable[..., None]

#: Moves all times of expiry into the past.
EXPIRE = "UPDATE pgnotify.tasks SET expires_at = expires_at - interval '100 years'"


@pytest.fixture
def declare(broker: Broker) -> Declare:
    """A function that declares a queue: its arguments by AMQP's names with underscores."""

    def run(name: str, **arguments: Any) -> None:
        given = {f"x-{key.replace('_', '-')}": value for key, value in arguments.items()}
        broker.topology.declare_queue(Queue.declared(name, given), "me")

    return run


@pytest.fixture
def get(store: MessageStore, everything: Ranges) -> Callable[[str], list[Claimed]]:
    """A function that claims all of a queue."""
    return lambda queue: store.claim(queue, everything, 1000, "me")


@pytest.fixture
def seconds_left(sql: Sql) -> Callable[[], list[float | None]]:
    """A function that says how long each message lasts from when it may be had, rounded."""

    def run() -> list[float | None]:
        rows = sql(
            "SELECT round(extract(epoch FROM expires_at"
            " - greatest(available_at, published_at)))::float8"
            " FROM pgnotify.tasks ORDER BY task_id"
        )
        return [row[0] for row in rows]

    return run


def fences(rows: list[Claimed]) -> list[Fence]:
    return [Fence(row.task_id, row.delivery) for row in rows]


def deaths(row: Claimed) -> list[tuple[str, str, int]]:
    """Queue, reason and count of each death, newest first."""
    found = json.loads(row.died or '{"deaths": []}')["deaths"]
    return [(death["queue"], death["reason"], death["count"]) for death in found]


def in_an_hour() -> str:
    return (datetime.now(timezone.utc) + timedelta(hours=1)).isoformat()


def publish_by(verb: str, store: MessageStore, queue: str, *messages: Outgoing) -> None:
    """Publish to a queue by one of the four ways there are; exchange `all` is bound to it."""
    if verb == "publish":
        for message in messages:
            store.publish(queue, message)
    elif verb == "routed":
        for message in messages:
            store.publish_routed("all", "", message)
    elif verb == "batch":
        store.publish_batch([("", queue, message) for message in messages])
    else:
        store.publish_batch([("all", "", message) for message in messages])


VERBS = ["publish", "routed", "batch", "routed batch"]


@pytest.fixture
def bound(broker: Broker, declare: Declare) -> Declare:
    """As `declare`, and exchange `all` is bound to the queue."""

    def run(name: str, **arguments: Any) -> None:
        declare(name, **arguments)
        broker.topology.declare_exchange("all", "fanout", durable=True)
        broker.topology.bind(name, "all", "")

    return run


# -- time to live


@pytest.mark.parametrize("verb", VERBS)
def test_a_message_lasts_the_lesser_of_its_own_time_and_its_queues(
    verb: str, bound: Declare, store: MessageStore, seconds_left: Callable[[], list[float | None]]
) -> None:
    own = [Outgoing("{}", b"", ttl=ttl) for ttl in (None, 30, 90)]
    bound("queue")
    publish_by(verb, store, "queue", *own)
    assert seconds_left() == [None, 30, 90]
    store.purge("queue")
    bound("queue", message_ttl=60_000)
    publish_by(verb, store, "queue", *own)
    assert seconds_left() == [60, 30, 60]


@pytest.mark.parametrize("verb", VERBS)
def test_the_queues_time_counts_from_when_a_held_message_may_be_had(
    verb: str, bound: Declare, store: MessageStore, sql: Sql,
    seconds_left: Callable[[], list[float | None]],
) -> None:  # fmt: skip
    bound("queue", message_ttl=60_000)
    publish_by(verb, store, "queue", Outgoing("{}", b"", available_at=in_an_hour()))
    assert seconds_left() == [60]
    # Its own time counts from now.
    sql("DELETE FROM pgnotify.tasks")
    held = Outgoing("{}", b"", available_at=in_an_hour(), ttl=1800)
    publish_by(verb, store, "queue", held)
    query = "SELECT expires_at < available_at FROM pgnotify.tasks"
    assert sql(query) == [(True,)]


@pytest.mark.parametrize("verb", VERBS)
def test_a_time_that_has_passed_holds_nothing(
    verb: str, bound: Declare, store: MessageStore, get: Callable[[str], list[Claimed]],
    seconds_left: Callable[[], list[float | None]],
) -> None:  # fmt: skip
    bound("queue", message_ttl=60_000)
    past = Outgoing("{}", b"", available_at="2001-01-01T00:00:00+00:00")
    publish_by(verb, store, "queue", past)
    assert seconds_left() == [60]
    assert len(get("queue")) == 1


def test_what_has_expired_is_neither_counted_nor_taken_and_a_claim_says_so(
    store: MessageStore, everything: Ranges, sql: Sql
) -> None:
    store.publish("queue", Outgoing("{}", b"old", ttl=60))
    store.publish("queue", Outgoing("{}", b"new"))
    store.publish("queue", Outgoing("{}", b"held", ttl=60, available_at=in_an_hour()))
    assert store.size("queue") == 3
    sql(EXPIRE)
    assert store.size("queue") == 1
    assert [row.payload for row in store.take("queue", everything, 10)] == [b"new"]
    assert store.take("queue", everything, 10) == []
    assert [(row.payload, row.expired) for row in store.claim("queue", everything, 10, "me")] == [
        (b"old", True)
    ]


def test_a_ttl_of_nothing_expires_at_once(store: MessageStore, everything: Ranges) -> None:
    store.publish("queue", Outgoing("{}", b"", ttl=0))
    assert store.take("queue", everything, 1) == []
    assert store.sweep_messages() == 1


def test_a_lease_outlives_the_messages_time(
    store: MessageStore, everything: Ranges, sql: Sql
) -> None:
    """Who has got it in time may finish it."""
    store.publish("queue", Outgoing("{}", b"", ttl=60))
    (row,) = store.claim("queue", everything, 1, "me")
    sql(EXPIRE)
    assert store.sweep_messages() == 0
    assert store.renew(fences([row])) == {row.task_id}
    assert store.acknowledge(fences([row])) == {row.task_id}


def test_a_message_given_back_keeps_its_time(
    declare: Declare, store: MessageStore, get: Callable[[str], list[Claimed]],
    seconds_left: Callable[[], list[float | None]],
) -> None:  # fmt: skip
    declare("queue", message_ttl=60_000)
    store.publish("queue", Outgoing("{}", b""))
    store.release(fences(get("queue")), {"queue"}, started=True)
    assert seconds_left() == [60]


def test_the_sweep_takes_out_what_has_expired_and_nothing_else(
    store: MessageStore, sql: Sql
) -> None:
    for queue in ("one", "two"):
        store.publish(queue, Outgoing("{}", b"old", ttl=60))
        store.publish(queue, Outgoing("{}", b"held", ttl=60, available_at=in_an_hour()))
        store.publish(queue, Outgoing("{}", b"new"))
    sql(EXPIRE)
    store.publish("one", Outgoing("{}", b"later", ttl=60))
    assert store.sweep_messages() == 4
    assert store.sweep_messages() == 0
    left = [(b"new",), (b"new",), (b"later",)]
    assert sql("SELECT payload FROM pgnotify.tasks ORDER BY task_id") == left
    assert sql("SELECT count(*) FROM pgnotify.dead_letters") == [(0,)]


def test_a_row_somebody_has_locked_does_not_hold_up_the_sweep(
    store: MessageStore, database: str, sql: Sql
) -> None:
    first = store.publish("queue", Outgoing("{}", b"", ttl=60))
    store.publish("queue", Outgoing("{}", b"", ttl=60))
    sql(EXPIRE)
    with psycopg.connect(database) as other:
        other.execute("SELECT FROM pgnotify.tasks WHERE task_id = %s FOR UPDATE", (first,))
        assert store.sweep_messages() == 1
    assert store.sweep_messages() == 1


# -- priority


@pytest.mark.parametrize("verb", VERBS)
def test_a_priority_above_the_queues_highest_is_cut_off(
    verb: str, bound: Declare, store: MessageStore, sql: Sql
) -> None:
    bound("queue", max_priority=5)
    messages = [Outgoing("{}", b"", priority=priority) for priority in (0, 5, 6, 255)]
    publish_by(verb, store, "queue", *messages)
    rows = sql("SELECT priority FROM pgnotify.tasks ORDER BY task_id")
    assert [row[0] for row in rows] == [0, 5, 5, 5]


@pytest.mark.parametrize("verb", VERBS)
def test_in_the_order_of_redis_the_lowest_comes_first(
    verb: str, make_broker: MakeBroker, bound: Declare, everything: Ranges
) -> None:
    bound("queue")
    store = make_broker(priority_order="redis").store
    messages = [Outgoing("{}", b"%d" % p, priority=p) for p in (3, 0, 9, 255, 3)]
    publish_by(verb, store, "queue", *messages)
    rows = store.claim("queue", everything, 10, "me")
    assert [int(row.payload) for row in rows] == [0, 3, 3, 9, 255]


# -- length


@pytest.mark.parametrize("verb", VERBS)
def test_the_oldest_go_where_a_queue_is_too_long(
    verb: str, bound: Declare, store: MessageStore, get: Callable[[str], list[Claimed]], sql: Sql
) -> None:
    bound("queue", max_length=3)
    publish_by(verb, store, "queue", *(Outgoing("{}", b"%d" % n) for n in range(8)))
    assert [row.payload for row in get("queue")] == [b"5", b"6", b"7"]
    assert sql("SELECT count(*) FROM pgnotify.dead_letters") == [(0,)], "nobody wants them"


@pytest.mark.parametrize("verb", VERBS)
def test_what_is_too_much_is_dead_lettered_where_there_is_an_exchange_for_it(
    verb: str, bound: Declare, store: MessageStore, get: Callable[[str], list[Claimed]]
) -> None:
    bound("queue", max_length=2, dead_letter_exchange="", dead_letter_routing_key="grave")
    publish_by(verb, store, "queue", *(Outgoing("{}", b"%d" % n) for n in range(5)))
    buried = get("grave")
    assert [row.payload for row in buried] == [b"0", b"1", b"2"]
    assert deaths(buried[0]) == [("queue", "maxlen", 1)]


def test_what_somebody_holds_counts_neither_for_nor_against_the_length(
    declare: Declare, store: MessageStore, everything: Ranges
) -> None:
    declare("queue", max_length=2)
    for n in range(2):
        store.publish("queue", Outgoing("{}", b"%d" % n))
    held = store.claim("queue", everything, 2, "me")
    store.publish("queue", Outgoing("{}", b"", available_at=in_an_hour()))
    for n in range(2, 4):
        store.publish("queue", Outgoing("{}", b"%d" % n))
    assert store.acknowledge(fences(held)) == {row.task_id for row in held}
    rows = store.claim("queue", everything, 10, "me")
    assert [row.payload for row in rows] == [b"2", b"3"]


def test_a_queue_of_no_length_keeps_nothing(declare: Declare, store: MessageStore) -> None:
    declare("queue", max_length=0)
    store.publish("queue", Outgoing("{}", b""))
    assert store.size("queue") == 0


def test_a_limit_that_is_taken_away_drops_nothing_more(
    declare: Declare, store: MessageStore
) -> None:
    declare("queue", max_length=1)
    store.publish("queue", Outgoing("{}", b""))
    declare("queue")
    store.publish("queue", Outgoing("{}", b""))
    store._trim(["queue"])
    store._trim(["nobody has declared"])
    assert store.size("queue") == 2


def test_publishers_at_once_never_drop_more_than_is_too_much(
    make_broker: MakeBroker, declare: Declare, store: MessageStore
) -> None:
    declare("queue", max_length=10)
    for _ in range(10):
        store.publish("queue", Outgoing("{}", b""))
    stores = [make_broker().store for _ in range(4)]
    start = threading.Barrier(4)

    def run(mine: MessageStore) -> int:
        start.wait()
        least = 10
        for _ in range(40):
            mine.publish("queue", Outgoing("{}", b""))
            least = min(least, mine.size("queue"))
        return least

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, stores)) == [10] * 4
    assert store.size("queue") == 10


# -- dead letters


def test_a_rejected_message_goes_to_the_dead_letter_exchange(
    broker: Broker, declare: Declare, get: Callable[[str], list[Claimed]], sql: Sql
) -> None:
    broker.topology.declare_exchange("dlx", "topic", durable=True)
    declare("queue", dead_letter_exchange="dlx")
    for grave, key in (("one", "queue"), ("two", "#"), ("three", "other")):
        declare(grave)
        broker.topology.bind(grave, "dlx", key)
    task_id = broker.store.publish("queue", Outgoing('{"a": 1}', b"body", priority=7))
    assert broker.store.dead_letter(fences(get("queue")), "rejected") == {task_id}
    for grave in ("one", "two"):
        (row,) = get(grave)
        assert (row.envelope, row.payload, row.rank) == ('{"a": 1}', b"body", 248)
        assert row.attempts == 1, "they are counted anew"
        assert deaths(row) == [("queue", "rejected", 1)]
        story = json.loads(row.died or "")
        assert (story["exchange"], story["routing_key"]) == ("dlx", "queue")
        assert story["deaths"][0]["exchange"] == ""
        assert story["deaths"][0]["routing-keys"] == ["queue"]
    assert get("three") == []
    assert sql("SELECT count(*) FROM pgnotify.dead_letters") == [(0,)]
    assert sql("SELECT count(*) FROM pgnotify.tasks WHERE task_name = 'queue'") == [(0,)]


def test_a_dead_letter_keeps_its_routing_key_unless_the_queue_says_another(
    broker: Broker, declare: Declare, get: Callable[[str], list[Claimed]]
) -> None:
    for name in ("x", "dlx"):
        broker.topology.declare_exchange(name, "direct", durable=True)
    for grave in ("own", "other"):
        declare(grave)
        broker.topology.bind(grave, "dlx", grave)
    declare("keeps", dead_letter_exchange="dlx")
    declare("changes", dead_letter_exchange="dlx", dead_letter_routing_key="other")
    for queue in ("keeps", "changes"):
        broker.topology.bind(queue, "x", "own")
    broker.store.publish_routed("x", "own", Outgoing("{}", b""))
    for queue, grave in (("keeps", "own"), ("changes", "other")):
        broker.store.dead_letter(fences(get(queue)), "rejected")
        (row,) = get(grave)
        story = json.loads(row.died or "")
        assert story["routing_key"] == grave
        assert story["deaths"][0]["exchange"] == "x"
        assert story["deaths"][0]["routing-keys"] == ["own"]


@pytest.mark.parametrize("how", ["dead_letter", "expire", "sweep_messages", "trim"])
def test_every_way_to_die_leads_to_the_default_exchange_too(
    how: str, declare: Declare, store: MessageStore, get: Callable[[str], list[Claimed]], sql: Sql
) -> None:
    limit = {"max_length": 0} if how == "trim" else {}
    declare("queue", dead_letter_exchange="", dead_letter_routing_key="grave", **limit)
    store.publish("queue", Outgoing("{}", b"", ttl=60))
    reason = "maxlen"
    if how == "sweep_messages":
        reason = "expired"
        sql(EXPIRE)
        assert store.sweep_messages() == 1
    elif how == "expire":
        reason = "expired"
        assert len(store.expire(fences(get("queue")))) == 1
    elif how == "dead_letter":
        reason = "attempts used up"
        assert len(store.dead_letter(fences(get("queue")), reason)) == 1
    (row,) = get("grave")
    assert deaths(row) == [("queue", reason, 1)]
    assert not row.expired, "its own time to live is not taken along"


def test_where_there_is_no_dead_letter_exchange_only_what_is_to_be_kept_is_kept(
    declare: Declare, store: MessageStore, get: Callable[[str], list[Claimed]], sql: Sql
) -> None:
    declare("queue", max_length=1)
    store.publish("queue", Outgoing("{}", b"too much"))
    store.publish("queue", Outgoing("{}", b"expired", ttl=60))
    sql(EXPIRE)
    assert store.sweep_messages() == 1
    store.publish("queue", Outgoing("{}", b"expired in hand"))
    store.expire(fences(get("queue")))
    store.publish("queue", Outgoing("{}", b"rejected"))
    store.dead_letter(fences(get("queue")), "rejected")
    kept = sql("SELECT payload, reason, worker_id, attempts FROM pgnotify.dead_letters")
    assert kept == [(b"rejected", "rejected", "me", 1)]
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)]


def test_a_dead_letter_exchange_that_sends_nowhere_drops(
    declare: Declare, store: MessageStore, get: Callable[[str], list[Claimed]], sql: Sql
) -> None:
    declare("queue", dead_letter_exchange="nothing")
    store.publish("queue", Outgoing("{}", b""))
    store.dead_letter(fences(get("queue")), "rejected")
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)]


def test_a_dead_letter_obeys_the_queue_it_comes_to(
    declare: Declare, store: MessageStore, get: Callable[[str], list[Claimed]], sql: Sql,
    seconds_left: Callable[[], list[float | None]],
) -> None:  # fmt: skip
    declare("queue", dead_letter_exchange="", dead_letter_routing_key="grave")
    declare("grave", message_ttl=60_000, max_priority=2, max_length=2)
    for n in range(5):
        store.publish("queue", Outgoing("{}", b"%d" % n, priority=9))
    store.dead_letter(fences(get("queue")), "rejected")
    assert seconds_left() == [60, 60]
    assert sql("SELECT payload, priority FROM pgnotify.tasks ORDER BY task_id") == [
        (b"3", 2), (b"4", 2)
    ]  # fmt: skip


def test_a_dead_letter_is_announced_once_and_after_the_commit(
    declare: Declare, store: MessageStore, get: Callable[[str], list[Claimed]], database: str
) -> None:
    declare("queue", dead_letter_exchange="", dead_letter_routing_key="grave")
    with psycopg.connect(database, autocommit=True) as connection:
        channel = channel_of("pgnotify", "grave")
        connection.execute(f'LISTEN "{channel}"'.encode())
        connection.execute("SELECT pg_advisory_lock_shared(%s)", (lock_of(channel),))
        for _ in range(7):
            store.publish("queue", Outgoing("{}", b""))
            store.dead_letter(fences(get("queue")), "rejected")
        # So that the last has been announced.
        store.size("queue")
        connection.execute(f"NOTIFY \"{channel_of('pgnotify', 'grave')}\", 'end'".encode())
        heard = []
        for notify in connection.notifies(timeout=10):
            # Behind it stands to whom it is said.
            heard.append(notify.payload.partition(" ")[0])
            if notify.payload == "end":
                break
    assert heard == ["published"] * 7 + ["end"]


def test_each_death_is_told_newest_first_and_counted_for_each_queue_and_reason(
    declare: Declare, store: MessageStore, get: Callable[[str], list[Claimed]], sql: Sql
) -> None:
    declare("work", dead_letter_exchange="", dead_letter_routing_key="retry")
    declare("retry", message_ttl=60_000, dead_letter_exchange="", dead_letter_routing_key="work")
    store.publish("work", Outgoing("{}", b""))
    for times in range(1, 4):
        store.dead_letter(fences(get("work")), "rejected")
        sql(EXPIRE)
        assert store.sweep_messages() == 1
        (row,) = get("work")
        assert deaths(row) == [("retry", "expired", times), ("work", "rejected", times)]
        store.release(fences([row]), {"work"}, started=True)
    # Another reason is another entry.
    declare("work", dead_letter_exchange="", dead_letter_routing_key="grave")
    store.dead_letter(fences(get("work")), "attempts used up")
    (row,) = get("grave")
    assert deaths(row) == [
        ("work", "attempts used up", 1), ("retry", "expired", 3), ("work", "rejected", 3)
    ]  # fmt: skip


def test_a_message_that_goes_round_by_itself_is_dropped(
    declare: Declare, store: MessageStore, sql: Sql
) -> None:
    for one, two in ("ab", "bc", "ca"):
        declare(one, message_ttl=0, dead_letter_exchange="", dead_letter_routing_key=two)
    store.publish("a", Outgoing("{}", b""))
    assert [store.sweep_messages() for _ in range(4)] == [1, 1, 1, 0]
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)]
    declare("self", message_ttl=0, dead_letter_exchange="", dead_letter_routing_key="self")
    store.publish("self", Outgoing("{}", b""))
    assert [store.sweep_messages() for _ in range(2)] == [1, 0]


def test_a_rejection_long_ago_does_not_let_it_go_round_for_ever(
    declare: Declare, store: MessageStore, get: Callable[[str], list[Claimed]], sql: Sql
) -> None:
    for one, two in ("ab", "ba"):
        declare(one, message_ttl=0, dead_letter_exchange="", dead_letter_routing_key=two)
    store.publish("a", Outgoing("{}", b""))
    store.dead_letter(fences(get("a")), "rejected")
    swept = 0
    while store.sweep_messages():
        swept += 1
        assert swept < 10, sql("SELECT deaths FROM pgnotify.tasks")
    # Once round after the rejection: b to a, since it was rejected there; then a to b no more.
    assert swept == 2
    assert sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)]


def test_many_that_die_together_each_find_their_way(
    broker: Broker, declare: Declare, get: Callable[[str], list[Claimed]], sql: Sql
) -> None:
    store = broker.store
    broker.topology.declare_exchange("dlx", "direct", durable=True)
    for n in range(3):
        declare(f"q{n}", dead_letter_exchange="dlx")
        declare(f"grave{n}")
        broker.topology.bind(f"grave{n}", "dlx", f"q{n}")
    declare("without")
    rows = []
    for queue in ("q0", "q1", "without", "q2"):
        for n in range(5):
            store.publish(queue, Outgoing("{}", b"%s %d" % (queue.encode(), n)))
        rows += get(queue)
    assert len(store.dead_letter(fences(rows), "rejected")) == 20
    for n in range(3):
        assert [row.payload for row in get(f"grave{n}")] == [b"q%d %d" % (n, m) for m in range(5)]
    assert sql("SELECT count(*) FROM pgnotify.dead_letters") == [(5,)]


def test_only_who_holds_a_message_can_bury_it(
    declare: Declare, store: MessageStore, get: Callable[[str], list[Claimed]]
) -> None:
    declare("queue", dead_letter_exchange="", dead_letter_routing_key="grave")
    store.publish("queue", Outgoing("{}", b""))
    old = fences(get("queue"))
    store.release(old, {"queue"}, started=True)
    (row,) = get("queue")
    assert store.dead_letter(old, "rejected") == set()
    assert store.expire(old) == set()
    assert get("grave") == []
    assert store.acknowledge(fences([row])) == {row.task_id}


def test_a_burial_waits_for_who_is_just_changing_the_row_and_then_looks_again(
    declare: Declare, store: MessageStore, get: Callable[[str], list[Claimed]], database: str,
    sql: Sql,
) -> None:  # fmt: skip
    declare("queue", dead_letter_exchange="", dead_letter_routing_key="grave")
    store.publish("queue", Outgoing("{}", b""))
    rows = get("queue")
    with psycopg.connect(database) as other, ThreadPoolExecutor(1) as pool:
        other.execute("UPDATE pgnotify.tasks SET deliveries = deliveries + 1")
        buried = pool.submit(store.dead_letter, fences(rows), "rejected")
        waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
        wait_until(lambda: sql(waiting) == [(1,)])
        other.commit()
        assert buried.result(10) == set(), "somebody else has got it"
    assert sql("SELECT task_name FROM pgnotify.tasks") == [("queue",)]


# -- several at once


messages = st.builds(
    Outgoing,
    envelope=st.sampled_from(["{}", '{"a": "\\u0000"}', "größe"]),
    payload=st.binary(max_size=20),
    priority=st.integers(0, 255),
    available_at=st.sampled_from([None, "2999-01-01T00:00:00+00:00", "2001-01-01T00:00:00+02:00"]),
    ttl=st.sampled_from([None, 0.0, 0.001, 60.0, 3e9]),
    persistent=st.booleans(),
)

#: What was written, times of expiry as how long that is after the message may be had, or was sent.
WRITTEN = """
SELECT task_name, priority, available_at, envelope, payload, exchange_name, routing_key,
       CASE WHEN expires_at >= available_at THEN expires_at - available_at
            ELSE expires_at - published_at END
FROM pgnotify.tasks
ORDER BY task_id
"""


def test_a_batch_writes_what_publishing_one_by_one_writes_in_the_same_order(
    bound: Declare, declare: Declare, store: MessageStore, sql: Sql
) -> None:
    bound("queue", message_ttl=5_000, max_priority=9)
    declare("plain")
    targets = [("", "queue"), ("", "plain"), ("", "undeclared"), ("all", "key"), ("nothing", "k")]

    @settings(max_examples=40, deadline=None)
    @given(st.lists(st.tuples(st.sampled_from(targets), messages), max_size=8))
    def check(items: list[tuple[tuple[str, str], Outgoing]]) -> None:
        sql("TRUNCATE pgnotify.tasks")
        found = store.publish_batch([(name, key, message) for (name, key), message in items])
        together = sql(WRITTEN)
        sql("TRUNCATE pgnotify.tasks")
        for n, ((name, key), message) in enumerate(items):
            if name:
                assert store.publish_routed(name, key, message) == found[n]
            else:
                store.publish(key, message)
                assert found[n] is None
        assert together == sql(WRITTEN)

    check()


def test_a_batch_with_a_row_that_fails_writes_nothing(bound: Declare, store: MessageStore) -> None:
    bound("queue")
    good, bad = Outgoing("{}", b""), Outgoing("{}", b"", priority=-1)
    for items in (
        [("", "queue", good), ("", "queue", bad)],
        [("", "queue", good), ("all", "", good), ("", "queue", bad)],
        [("", "queue", good), ("all", "", bad)],
        [("all", "", bad), ("", "queue", good)],
        [("all", "", good), ("", "queue", Outgoing("{}", b"", available_at="no time"))],
    ):
        with pytest.raises(StatementFailed):
            store.publish_batch(items)
        assert store.size("queue") == 0
    store.publish_batch([("", "queue", good), ("all", "", good)])
    assert store.size("queue") == 2, "the connection still works"


def test_a_large_batch_is_one_transaction(bound: Declare, store: MessageStore, sql: Sql) -> None:
    bound("queue")
    body = b"x" * 2000
    items = [("" if n % 3 else "all", "queue", Outgoing("{}", body)) for n in range(1500)]
    assert len(store.publish_batch(items)) == 1500
    assert store.size("queue") == 1500
    assert sql("SELECT count(DISTINCT xmin::text) FROM pgnotify.tasks") == [(1,)]


def test_an_empty_batch_is_nothing(store: MessageStore) -> None:
    assert store.publish_batch([]) == []


def test_each_queue_of_a_batch_is_announced_once(
    bound: Declare, store: MessageStore, database: str
) -> None:
    bound("queue")
    with psycopg.connect(database, autocommit=True) as connection:
        channels = {channel_of("pgnotify", name): name for name in ("queue", "other", "end")}
        for channel in channels:
            connection.execute(f'LISTEN "{channel}"'.encode())
            connection.execute("SELECT pg_advisory_lock_shared(%s)", (lock_of(channel),))
        message = Outgoing("{}", b"")
        store.publish_batch([("", "queue", message), ("all", "", message), ("", "other", message)])
        store.publish("end", message)
        heard = [
            channels[notify.channel] for notify in connection.notifies(timeout=10, stop_after=3)
        ]
    assert sorted(heard[:2]) == ["other", "queue"]
    assert heard[2:] == ["end"]


def test_what_is_not_persistent_goes_nowhere_if_nobody_has_declared_the_queue(
    declare: Declare, store: MessageStore
) -> None:
    gone = Outgoing("{}", b"", persistent=False)
    assert store.publish("nobody", gone) == 0
    store.publish_batch([("", "nobody", gone), ("", "queue", Outgoing("{}", b""))])
    assert (store.size("nobody"), store.size("queue")) == (0, 1)
    declare("somebody")
    assert store.publish("somebody", gone) > 0
    store.publish_batch([("", "somebody", gone)])
    assert store.size("somebody") == 2


@pytest.mark.parametrize(
    "deaths", ["{}", "5", '"x"', "null", "[1]", '[{"count": "x"}]', '[{"count": 1e30}]', "[null]"]
)
def test_a_row_by_hand_cannot_hold_up_the_burial_of_others(
    declare: Declare, sql: Sql, deaths: str
) -> None:
    declare("queue")
    with pytest.raises(psycopg.errors.CheckViolation):
        sql(
            "INSERT INTO pgnotify.tasks (task_name, envelope, payload, deaths)"
            " VALUES ('queue', '{}', '', %s)",
            deaths,
        )

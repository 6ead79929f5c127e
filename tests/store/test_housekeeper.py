"""The housekeeper: queues in use stay, and what nobody uses any more goes, for all processes."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest
from fix_proxy import Proxy
from helpers import wait_until

from kombu_pgnotify import housekeeper as housekeeper_module
from kombu_pgnotify.broker import Broker
from kombu_pgnotify.claims import ClaimCursor
from kombu_pgnotify.errors import PgnotifyError
from kombu_pgnotify.messages import Fence, Outgoing
from kombu_pgnotify.topology import AUTO_DELETE_AFTER, Queue

MakeBroker = Callable[..., Broker]
Sql = Callable[..., list[tuple[Any, ...]]]

MESSAGE = Outgoing("{}", b"")
EVERYTHING = ClaimCursor().next_ranges(0)

EXPIRE = "UPDATE pgnotify.queues SET expires_at = now() - interval '1 s'"
LEFT = (
    "SELECT coalesce(round(extract(epoch FROM expires_at - now()))::int, -1) FROM pgnotify.queues"
    " ORDER BY queue_name"
)
TABLES = ("tasks", "queues", "bindings", "broadcasts", "dead_letters")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that nobody has to wait for."""
    monkeypatch.setattr(housekeeper_module, "ROUND", 0.05)


def declare(
    broker: Broker, name: str, *bindings: tuple[str, str], expires: int | None = None, **flags: bool
) -> None:
    """Declare a queue that lasts `expires` milliseconds, and its bindings."""
    arguments = {"x-expires": expires}
    broker.housekeeper.declare(Queue.declared(name, arguments, **flags))
    for exchange, key in bindings:
        broker.topology.declare_exchange(exchange, "topic", durable=True)
        broker.topology.bind(name, exchange, key)
        broker.housekeeper.bound(name, exchange, key)


OWN = {"durable": False, "exclusive": True, "auto_delete": True}


def queues(sql: Sql) -> list[str]:
    return [row[0] for row in sql("SELECT queue_name FROM pgnotify.queues ORDER BY 1")]


def empty(sql: Sql) -> bool:
    return all(sql(f"SELECT count(*) FROM pgnotify.{table}") == [(0,)] for table in TABLES)


# -- how long a queue lasts


def test_a_touch_puts_off_the_expiry_of_those_that_can_expire(broker: Broker, sql: Sql) -> None:
    declare(broker, "a lasting one")
    declare(broker, "b one that expires", expires=600_000)
    declare(broker, "c one that goes with its consumer", auto_delete=True)
    declare(broker, "d both", expires=600_000, auto_delete=True)
    declare(broker, "e both, shorter", expires=5_000, auto_delete=True)
    assert sql(LEFT) == [(-1,), (600,), (-1,), (600,), (5,)]
    sql("UPDATE pgnotify.queues SET expires_at = now() WHERE expires_at IS NOT NULL")
    names = queues(sql)
    lasting = broker.topology.touch([*names, "unknown"])
    after = int(AUTO_DELETE_AFTER)
    assert {name: touched.lasts for name, touched in lasting.items()} == dict(
        zip(names[1:], [600, after, after, 5], strict=True)
    )
    assert sql(LEFT) == [(-1,), (600,), (after,), (after,), (5,)]


def test_a_declaration_puts_off_the_expiry(broker: Broker, sql: Sql) -> None:
    declare(broker, "queue", expires=600_000)
    sql(EXPIRE)
    declare(broker, "queue", expires=600_000)
    assert sql(LEFT) == [(600,)]


def test_an_unused_queue_goes_with_its_bindings_and_messages(broker: Broker, sql: Sql) -> None:
    declare(broker, "queue", ("x", "#"), expires=1)
    declare(broker, "other", ("x", "#"), expires=600_000)
    declare(broker, "lasting", ("x", "#"))
    later = Outgoing("{}", b"", available_at="2999-01-01T00:00:00+00:00")
    broker.store.publish("queue", later)
    assert len(broker.store.publish_routed("x", "k", MESSAGE).queues) == 3
    wait_until(lambda: broker.topology.expired_queues(10) == ["queue"])
    broker.housekeeper.sweep()
    assert queues(sql) == ["lasting", "other"]
    assert len(broker.topology.bindings()) == 2
    assert [broker.store.size(name) for name in ("queue", "other", "lasting")] == [0, 1, 1]
    assert sql("SELECT count(*) FROM pgnotify.dead_letters") == [(0,)]


def test_a_queue_with_more_messages_than_one_statement_deletes_goes_whole(
    broker: Broker, sql: Sql
) -> None:
    declare(broker, "queue", expires=600_000)
    broker.store.publish_batch([("", "queue", MESSAGE)] * 2500)
    sql(EXPIRE)
    broker.housekeeper.sweep()
    assert empty(sql)


def test_a_queue_stays_while_somebody_holds_one_of_its_messages(broker: Broker, sql: Sql) -> None:
    declare(broker, "queue", expires=600_000)
    for _ in range(3):
        broker.store.publish("queue", MESSAGE)
    (row,) = broker.store.claim("queue", EVERYTHING, 1, "me")
    sql(EXPIRE)
    broker.housekeeper.sweep()
    assert queues(sql) == ["queue"]
    assert sql("SELECT task_id FROM pgnotify.tasks") == [(row.task_id,)]
    sql("UPDATE pgnotify.tasks SET lease_expiration = now() - interval '1 s'")
    broker.housekeeper.sweep()
    assert empty(sql)


def test_a_queue_that_is_used_again_meanwhile_keeps_its_messages(
    broker: Broker, make_broker: MakeBroker, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = make_broker().topology
    declare(broker, "queue", ("x", "#"), expires=600_000)
    broker.store.publish("queue", MESSAGE)
    sql(EXPIRE)
    find = broker.topology.expired_queues

    def found_too_late(limit: int) -> list[str]:
        names = find(limit)
        other.touch(names)
        return names

    monkeypatch.setattr(broker.topology, "expired_queues", found_too_late)
    broker.housekeeper.sweep()
    assert broker.store.size("queue") == 1
    assert broker.topology.bindings() == [("queue", "x", "#")]


def test_only_one_at_a_time_sweeps(make_broker: MakeBroker, sql: Sql) -> None:
    brokers = [make_broker() for _ in range(6)]
    start = threading.Barrier(6)

    def claim(broker: Broker) -> bool:
        start.wait()
        return broker.topology.claim_chore(60)

    for _ in range(5):
        sql("UPDATE pgnotify.chores SET done_at = '-infinity'")
        with ThreadPoolExecutor(6) as pool:
            assert sorted(pool.map(claim, brokers)) == [False] * 5 + [True]
        assert not brokers[0].topology.claim_chore(60)
    assert brokers[1].topology.claim_chore(0), "the time has passed"


def test_old_messages_of_live_queues_are_swept(broker: Broker, sql: Sql) -> None:
    insert = (
        "INSERT INTO pgnotify.broadcasts (published_at, envelope, payload)"
        " VALUES (now() - %s * interval '1 s', '{}', 'x')"
    )
    for age in (0, housekeeper_module.BROADCAST_LASTS - 30, housekeeper_module.BROADCAST_LASTS + 1):
        sql(insert, age)
    broker.housekeeper.sweep()
    assert sql("SELECT broadcast_id FROM pgnotify.broadcasts") == [(1,), (2,)]


# -- in use


def test_a_queue_in_use_outlives_its_expiry(
    broker: Broker, make_broker: MakeBroker, sql: Sql
) -> None:
    sweeper = make_broker().housekeeper
    declare(broker, "queue", ("x", "#"), expires=400)
    first = sql("SELECT expires_at FROM pgnotify.queues")
    declaration = broker.housekeeper.use("queue")

    def outlived() -> bool:
        sweeper.sweep()
        later = "SELECT expires_at > %s + interval '1 s' FROM pgnotify.queues"
        return sql(later, *first[0]) == [(True,)]

    wait_until(outlived)
    assert broker.topology.bindings() == [("queue", "x", "#")]
    broker.housekeeper.left("queue", declaration)

    def gone() -> bool:
        sweeper.sweep()
        return queues(sql) == []

    wait_until(gone)


def test_the_thread_sweeps_what_has_expired(
    broker: Broker, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeper_module, "SWEEP_EVERY", 0.02)
    declare(broker, "unused", expires=1)
    declare(broker, "queue", expires=600_000)
    broker.store.publish("queue", Outgoing("{}", b"", ttl=0.01))
    broker.housekeeper._sweep_at = 0
    broker.housekeeper.use("queue")
    wait_until(lambda: queues(sql) == ["queue"])
    wait_until(lambda: sql("SELECT count(*) FROM pgnotify.tasks") == [(0,)])


def test_a_queue_lost_while_in_use_is_declared_again_with_its_bindings(
    broker: Broker, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    for name, flags in (("one", OWN), ("two", {"auto_delete": True})):
        declare(broker, name, ("x", "a.*"), ("x", "b"), ("y", "#"), **flags)
        broker.topology.unbind(name, "x", "b")
        broker.housekeeper.unbound(name, "x", "b")
        broker.housekeeper.use(name)
    before = sql("SELECT * FROM pgnotify.bindings ORDER BY 1, 2, 3")
    assert len(before) == 4
    sql("DELETE FROM pgnotify.queues")
    wait_until(lambda: sql("SELECT * FROM pgnotify.bindings ORDER BY 1, 2, 3") == before)
    assert queues(sql) == ["one", "two"]
    assert "queue.lost" in caplog.text


@pytest.mark.parametrize("table", ["bindings", "exchanges"])
def test_bindings_deleted_by_hand_come_back(broker: Broker, sql: Sql, table: str) -> None:
    bound = [("a", "x"), ("a", "y"), ("b", "z")]
    for exchange in ("a", "b"):
        broker.housekeeper.exchange_declared(exchange, "topic", durable=True)
    declare(broker, "control", *bound, **OWN)
    listing = "SELECT exchange_name, routing_key FROM pgnotify.bindings ORDER BY 1, 2"
    declaration = broker.housekeeper.use("control")
    wait_until(lambda: declaration is not None and declaration.binding_version is not None)
    for _ in range(2):
        sql(f"DELETE FROM pgnotify.{table} WHERE exchange_name = 'a'")
        wait_until(lambda: sql(listing) == bound)
    assert sql("SELECT exchange_type FROM pgnotify.exchanges WHERE exchange_name = 'a'") == [
        ("topic",)
    ]
    broker.housekeeper.left("control", declaration)


def test_bindings_that_somebody_has_undone_by_the_rules_stay_away(
    make_broker: MakeBroker, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, other = make_broker(), make_broker()
    declare(broker, "control", ("a", "x"), ("b", "y"), **OWN)
    touched: list[Any] = []
    touch = broker.topology.touch
    monkeypatch.setattr(
        broker.topology, "touch", lambda names: touched.append(touch(names)) or touched[-1]
    )
    declaration = broker.housekeeper.use("control")
    wait_until(lambda: touched)
    other.topology.unbind("control", "b", "y")
    other.topology.delete_exchange("a")
    touched.clear()
    wait_until(lambda: len(touched) > 3)
    assert sql("SELECT * FROM pgnotify.bindings") == []
    broker.housekeeper.left("control", declaration)


def test_what_the_server_will_not_let_go_does_not_keep_the_rest(
    broker: Broker, sql: Sql, refuse_deletion: Any, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_deletion()
    broker.store.publish("queue", Outgoing("{}", b"", ttl=0))
    sql(
        "INSERT INTO pgnotify.broadcasts (published_at, envelope, payload)"
        " VALUES (now() - interval '1 h', '', '')"
    )
    broker.housekeeper.sweep()
    assert sql("SELECT * FROM pgnotify.broadcasts") == []
    assert "sweep.failed" in caplog.text


def test_a_queue_deleted_on_purpose_stays_deleted(
    broker: Broker, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    declare(broker, "queue", auto_delete=True)
    declare(broker, "other", auto_delete=True)
    broker.housekeeper.use("queue")
    broker.housekeeper.use("other")
    broker.housekeeper.deleted("queue")
    broker.topology.delete_queue("queue")
    for _ in range(3):
        # A round that has seen the other one's declaration has come and gone.
        sql("DELETE FROM pgnotify.queues WHERE queue_name = 'other'")
        wait_until(lambda: queues(sql) == ["other"])
    assert "'queue'" not in caplog.text


def test_a_consumers_own_queue_goes_with_its_last_consumer_and_what_is_in_it(
    broker: Broker, sql: Sql
) -> None:
    declare(broker, "queue", ("x", "#"), **OWN)
    broker.store.publish_routed("x", "k", MESSAGE)
    declarations = [broker.housekeeper.use("queue") for _ in range(2)]
    broker.housekeeper.left("queue", declarations[0])
    wait_until(lambda: broker.housekeeper._in_use["queue"] == 1)
    assert queues(sql) == ["queue"]
    broker.housekeeper.left("queue", declarations[1])
    wait_until(lambda: empty(sql))


def test_a_shared_queue_stays_a_while_after_its_last_consumer(broker: Broker, sql: Sql) -> None:
    declare(broker, "queue", auto_delete=True)
    broker.store.publish("queue", MESSAGE)
    declaration = broker.housekeeper.use("queue")
    wait_until(lambda: sql(LEFT) == [(int(AUTO_DELETE_AFTER),)])
    broker.housekeeper.left("queue", declaration)
    wait_until(lambda: broker.housekeeper._thread is None)
    assert queues(sql) == ["queue"]
    assert broker.store.size("queue") == 1


def test_an_old_consumers_farewell_spares_a_newer_declaration(broker: Broker, sql: Sql) -> None:
    declare(broker, "queue", ("x", "#"), **OWN)
    old = broker.housekeeper.use("queue")
    declare(broker, "queue", **OWN)
    declare(broker, "mark", **OWN)
    mark = broker.housekeeper.use("mark")
    broker.housekeeper.left("queue", old)
    broker.housekeeper.left("mark", mark)
    wait_until(lambda: "mark" not in queues(sql))
    assert queues(sql) == ["queue"]
    assert broker.topology.bindings() == [("queue", "x", "#")]


def test_an_old_processs_farewell_spares_a_newer_declaration(
    make_broker: MakeBroker, sql: Sql
) -> None:
    old, new = make_broker(), make_broker()
    declare(old, "queue", ("x", "#"), **OWN)
    declaration = old.housekeeper.use("queue")
    assert declaration is not None
    declare(new, "queue", ("x", "#"), **OWN)
    new.store.publish("queue", MESSAGE)
    old.topology.abandon("queue", declaration.name)
    assert queues(sql) == ["queue"]
    assert new.store.size("queue") == 1
    assert new.topology.bindings() == [("queue", "x", "#")]


@pytest.mark.parametrize("flags", [{}, {"auto_delete": True}, {"exclusive": True}])
def test_only_a_queue_of_ones_own_can_be_abandoned(
    flags: dict[str, bool], broker: Broker, sql: Sql
) -> None:
    declare(broker, "queue", **flags)
    ((name,),) = sql("SELECT declared_by FROM pgnotify.queues")
    broker.store.publish("queue", MESSAGE)
    broker.topology.abandon("queue", name)
    assert queues(sql) == ["queue"]
    assert broker.store.size("queue") == 1


def test_a_look_without_a_consumer_puts_off_the_expiry_once(broker: Broker, sql: Sql) -> None:
    declare(broker, "queue", expires=600_000)
    sql("UPDATE pgnotify.queues SET expires_at = now() + interval '10 s'")
    broker.housekeeper.used("queue")
    wait_until(lambda: sql(LEFT)[0][0] > 500)
    wait_until(lambda: broker.housekeeper._thread is None, message="the thread does not end")
    broker.housekeeper.used("somebody else's")
    assert broker.housekeeper._inbox.empty(), "nobody would ever take that out"


# -- the thread


def test_the_thread_starts_with_the_first_consumer_and_ends_after_the_last(broker: Broker) -> None:
    keeper = broker.housekeeper
    declare(broker, "queue", expires=600_000)
    assert keeper._thread is None
    for _ in range(2):
        declarations = [keeper.use("queue") for _ in range(3)]
        assert keeper._thread is not None
        for declaration in declarations:
            keeper.left("queue", declaration)
        wait_until(lambda: keeper._thread is None)
    assert not [t for t in threading.enumerate() if t.name == "pgnotify-housekeeper"]


def test_close_ends_the_thread_and_carries_out_what_was_asked_for(
    broker: Broker, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(housekeeper_module, "ROUND", 60)
    declare(broker, "queue", **OWN)
    declaration = broker.housekeeper.use("queue")
    thread = broker.housekeeper._thread
    assert thread is not None
    broker.housekeeper.left("queue", declaration)
    broker.housekeeper.close(10)
    assert not thread.is_alive()
    assert queues(sql) == []
    broker.housekeeper.close(10)


def test_an_absence_of_the_database_is_outlived(
    make_broker: MakeBroker, proxy: Proxy, database_name: str, sql: Sql,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    broker = make_broker(proxy.url(database_name))
    declare(broker, "queue", ("x", "#"), auto_delete=True)
    broker.housekeeper.use("queue")
    proxy.refuse()
    proxy.cut()
    wait_until(lambda: "housekeeper.unavailable" in caplog.text)
    sql("DELETE FROM pgnotify.queues")
    proxy.accept()
    wait_until(lambda: broker.topology.bindings() == [("queue", "x", "#")])
    assert broker.housekeeper._thread is not None


def test_what_fails_in_a_round_does_not_end_the_thread(
    broker: Broker, sql: Sql, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    declare(broker, "queue", expires=600_000)
    with monkeypatch.context() as patch:
        patch.setattr(broker.topology, "touch", lambda names: 1 / 0)
        broker.housekeeper.use("queue")
        wait_until(lambda: "housekeeper.failed" in caplog.text)
    sql("UPDATE pgnotify.queues SET expires_at = now()")
    wait_until(lambda: sql(LEFT) == [(600,)])


# -- nothing stays


def test_a_thousand_queues_that_come_and_go_leave_nothing(
    broker: Broker, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    for n in range(1000):
        name = f"queue{n % 7}"
        declare(broker, name, **OWN)
        broker.topology.bind(name, "amq.topic", "#")
        if n % 3 == 0:
            broker.store.publish_routed("amq.topic", "k", MESSAGE)
        declaration = broker.housekeeper._declarations[name]
        if n % 2:
            broker.topology.abandon(name, declaration.name)
        else:
            broker.topology.delete_queue(name)
            broker.store.purge(name)
        broker.housekeeper.deleted(name)
    assert empty(sql)
    assert broker.housekeeper._declarations == {}
    assert caplog.text == ""


# -- who locks what first

WAITING = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'"
LOCK = "SELECT FROM pgnotify.queues WHERE queue_name = 'queue' FOR UPDATE"


def test_unbinding_waits_for_who_deletes_the_queue_and_holds_nothing_meanwhile(
    broker: Broker, sql: Sql, database: str
) -> None:
    declare(broker, "queue", ("x", "a"))
    with psycopg.connect(database) as other, ThreadPoolExecutor(1) as pool:
        other.execute(LOCK)
        unbound = pool.submit(broker.topology.unbind, "queue", "x", "a")
        wait_until(lambda: sql(WAITING) == [(1,)])
        # What the deletion of a queue does next: a deadlock, if unbinding began there.
        other.execute("DELETE FROM pgnotify.bindings")
        other.commit()
        unbound.result(10)


def test_an_exchange_declared_after_one_has_looked_for_it_is_not_deleted(
    broker: Broker, sql: Sql, database: str
) -> None:
    """Somebody may have bound to it since: the queues to be told are not known."""
    sql("DELETE FROM pgnotify.exchanges")
    broker.topology.declare_exchange("x", "topic", durable=True)
    listing = "SELECT exchange_name, exchange_type FROM pgnotify.exchanges"
    with psycopg.connect(database) as connection, ThreadPoolExecutor(1) as pool:
        connection.execute("DELETE FROM pgnotify.exchanges")
        deleted = pool.submit(broker.topology.delete_exchange, "x")
        # It waits for the first `x`, and then does not see the second one.
        wait_until(lambda: sql(WAITING) == [(1,)])
        connection.execute("INSERT INTO pgnotify.exchanges VALUES ('x', 'direct', true)")
        connection.commit()
        deleted.result(10)
    assert sql(listing) == [("x", "direct")]
    broker.topology.delete_exchange("x")
    assert sql(listing) == []


def test_all_at_once_on_the_same_queues_and_exchanges_nobody_blocks_anybody(
    make_broker: MakeBroker, sql: Sql
) -> None:
    """Deadlocks would be errors."""
    names = [f"queue{n}" for n in range(4)]
    arguments = {"x-expires": 600_000, "x-dead-letter-exchange": "y", "x-max-length": 5}

    def declare_all(broker: Broker) -> None:
        for name in names:
            broker.topology.declare_queue(Queue.declared(name, arguments, auto_delete=True), "me")
            for exchange in "xy":
                broker.topology.declare_exchange(exchange, "topic", durable=True)
                for key in ("a", "#", "*"):
                    broker.topology.bind(name, exchange, key)

    def work(seed: int) -> list[str]:
        broker, rnd = brokers[seed], random.Random(seed)
        store, topology = broker.store, broker.topology

        def settle() -> None:
            rows = [r for n in names for r in store.claim(n, EVERYTHING, 5, broker.worker)]
            rnd.shuffle(rows)
            held = [Fence(row.task_id, row.delivery) for row in rows]
            store.dead_letter(held[::2], "rejected")
            store.expire(held[1::2])

        acts: list[Callable[[], object]] = [
            lambda: declare_all(broker),
            lambda: topology.touch(rnd.sample(names, len(names))),
            lambda: topology.delete_queue(rnd.choice(names)),
            lambda: topology.delete_exchange(rnd.choice("xy")),
            lambda: topology.unbind(rnd.choice(names), "x", "a"),
            settle,
            broker.housekeeper.sweep,
            lambda: store.sweep_messages(),
        ]
        acts += [lambda: store.publish_routed("x", "a", Outgoing("{}", b"", ttl=0.01))] * 6
        acts += [lambda: store.publish_batch([(e, "a", MESSAGE) for e in "xyx"])] * 3
        errors = []
        for _ in range(60):
            try:
                rnd.choice(acts)()
            except PgnotifyError as exc:
                errors.append(str(exc))
        return errors

    brokers = [make_broker() for _ in range(6)]
    declare_all(brokers[0])
    with ThreadPoolExecutor(6) as pool:
        errors = [error for found in pool.map(work, range(6)) for error in found]
    # A queue or exchange may go while it is being bound.
    assert [error for error in errors if "foreign key" not in error] == []

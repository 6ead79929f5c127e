"""The listener: one connection that hears for everybody and comes back from everything."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fix_proxy import Proxy
from helpers import wait_until

from kombu_pgnotify import database as database_module, listener as listener_module
from kombu_pgnotify.broker import Broker
from kombu_pgnotify.embedded import HOST, free_port
from kombu_pgnotify.messages import PUBLISHED, SEATS, any_channel_of, lock_of

MakeBroker = Callable[..., Broker]
Sql = Callable[..., list[tuple[Any, ...]]]

LISTENING = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'kombu_pgnotify%%' AND query ~ 'LISTEN|listening'"
)


class Hearer:
    """A subscriber that writes down what it is told, and by which thread."""

    def __init__(self, on_resync: Callable[[], None] = lambda: None) -> None:
        self.events: list[tuple[str, ...]] = []
        self.threads: set[str] = set()
        self._on_resync = on_resync

    def notified(self, channel: str, payload: str) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.append(("notified", channel, payload))

    def named(self, channel: str, *, reserve: bool) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.append(("named", channel))

    def unseen(self, channel: str) -> bool:
        return False

    def resync(self, channels: frozenset[str]) -> None:
        self.threads.add(threading.current_thread().name)
        self._on_resync()
        self.events.append(("resync", *sorted(channels)))

    def awaited(self, channels: frozenset[str]) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.append(("awaited", *sorted(channels)))

    def deafened(self) -> None:
        self.threads.add(threading.current_thread().name)
        self.events.append(("deafened",))

    def resyncs(self) -> int:
        return sum(event[0] == "resync" for event in self.events)

    def heard(self, channel: str, payload: str) -> bool:
        return ("notified", channel, payload) in self.events


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(listener_module, "LINGER", 0.1)
    monkeypatch.setattr(listener_module, "LAST_BACKOFF", 0.2)
    caplog.set_level(logging.INFO, "kombu_pgnotify")


@pytest.fixture
def hearer() -> Hearer:
    return Hearer()


@pytest.fixture
def subscribed(broker: Broker, hearer: Hearer) -> Iterator[Hearer]:
    broker.listener.subscribe(hearer, ["a"])
    wait_until(hearer.resyncs)
    return hearer


def test_nothing_listens_before_somebody_subscribes(broker: Broker, sql: Sql) -> None:
    assert broker.listener._thread is None
    assert sql(LISTENING) == []


def test_resync_is_told_only_when_listen_is_in_force(broker: Broker, sql: Sql) -> None:
    """What is announced as soon as resync is told must be heard."""
    hearer = Hearer(lambda: sql("SELECT pg_notify('a', 'after resync')") and None)
    broker.listener.subscribe(hearer, ["a"])
    wait_until(lambda: hearer.heard("a", "after resync"))
    assert hearer.events[0] == ("resync", "a")
    assert hearer.threads == {"pgnotify-listener"}


def test_announcements_reach_those_who_asked_for_the_channel(broker: Broker, sql: Sql) -> None:
    one, two = Hearer(), Hearer()
    broker.listener.subscribe(one, ["a", "b"])
    broker.listener.subscribe(two, ["b"])
    wait_until(lambda: one.resyncs() and two.resyncs())
    for channel in ("a", "c", "b"):
        sql("SELECT pg_notify(%s, 'x')", channel)
    wait_until(lambda: two.heard("b", "x"))
    wait_until(lambda: one.heard("b", "x"))
    assert one.heard("a", "x")
    assert not two.heard("a", "x")
    assert not one.heard("c", "x")


def test_a_new_channel_is_listened_to_on_demand_and_resynced_alone(
    broker: Broker, subscribed: Hearer, sql: Sql
) -> None:
    broker.listener.subscribe(subscribed, ["a", "b"])
    wait_until(lambda: ("resync", "b") in subscribed.events)
    sql("SELECT pg_notify('b', 'x')")
    wait_until(lambda: subscribed.heard("b", "x"))
    assert subscribed.events.count(("resync", "a")) == 1


def test_a_second_subscriber_of_a_channel_is_resynced_too(
    broker: Broker, subscribed: Hearer
) -> None:
    other = Hearer()
    broker.listener.subscribe(other, ["a"])
    wait_until(other.resyncs)
    assert subscribed.resyncs() == 1


def test_a_channel_that_nobody_wants_is_unlistened(
    broker: Broker, subscribed: Hearer, sql: Sql
) -> None:
    broker.listener.subscribe(subscribed, ["a", "b"])
    wait_until(lambda: ("resync", "b") in subscribed.events)
    broker.listener.subscribe(subscribed, ["b"])
    wait_until(lambda: sql("SELECT 1 FROM pg_stat_activity WHERE query = 'UNLISTEN \"a\"'"))
    sql("SELECT pg_notify('a', 'x'), pg_notify('b', 'x')")
    wait_until(lambda: subscribed.heard("b", "x"))
    assert not subscribed.heard("a", "x")


def test_a_channel_of_another_subscriber_stays(
    broker: Broker, subscribed: Hearer, sql: Sql
) -> None:
    other = Hearer()
    broker.listener.subscribe(other, ["a", "b"])
    wait_until(other.resyncs)
    broker.listener.unsubscribe(other)
    wait_until(lambda: sql("SELECT 1 FROM pg_stat_activity WHERE query = 'UNLISTEN \"b\"'"))
    sql("SELECT pg_notify('a', 'x')")
    wait_until(lambda: subscribed.heard("a", "x"))


def test_names_of_channels_are_taken_as_they_are(broker: Broker, sql: Sql) -> None:
    hearer, names = Hearer(), ['we"ird', "With Space", "größe", "a;b"]
    broker.listener.subscribe(hearer, names)
    wait_until(hearer.resyncs)
    for name in names:
        sql("SELECT pg_notify(%s, 'x')", name)
    wait_until(lambda: all(hearer.heard(name, "x") for name in names))


def test_a_killed_backend_means_a_resync_and_nothing_is_missed_after_it(
    broker: Broker, subscribed: Hearer, sql: Sql, caplog: pytest.LogCaptureFixture
) -> None:
    for round_ in range(2, 4):
        ((pid,),) = wait_until(lambda: sql(LISTENING))
        sql("SELECT pg_terminate_backend(%s)", pid)
        wait_until(lambda: subscribed.resyncs() == round_)  # noqa: B023
        sql("SELECT pg_notify('a', %s)", str(round_))
        wait_until(lambda: subscribed.heard("a", str(round_)))  # noqa: B023
    assert "listener.lost" in caplog.text


def test_it_outlives_a_server_that_is_away(
    make_broker: MakeBroker, proxy: Proxy, database_name: str, sql: Sql, hearer: Hearer,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    broker = make_broker(proxy.url(database_name))
    broker.listener.subscribe(hearer, ["a"])
    wait_until(hearer.resyncs)
    proxy.refuse()
    proxy.cut()
    wait_until(lambda: caplog.text.count("listener.lost") >= 3)
    proxy.accept()
    wait_until(lambda: hearer.resyncs() == 2)
    sql("SELECT pg_notify('a', 'x')")
    wait_until(lambda: hearer.heard("a", "x"))


def test_the_backoff_doubles_up_to_a_limit(
    make_broker: MakeBroker, proxy: Proxy, database_name: str, hearer: Hearer,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    broker = make_broker(proxy.url(database_name))
    proxy.refuse()
    proxy.cut()
    broker.listener.subscribe(hearer, ["a"])
    wait_until(lambda: caplog.text.count("listener.lost") >= 5)
    waits = [record.args[0] for record in caplog.records if "listener.lost" in record.msg]
    assert waits[:5] == [0.05, 0.1, 0.2, 0.2, 0.2]
    proxy.accept()


def test_a_frozen_network_is_noticed_by_the_health_check(
    make_broker: MakeBroker, proxy: Proxy, database_name: str, hearer: Hearer,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(database_module, "GRACE", 0.3)
    broker = make_broker(
        proxy.url(database_name),
        health_check_interval=0.2,
        statement_timeout=0.2,
        connect_timeout=2,
    )
    broker.listener.subscribe(hearer, ["a"])
    wait_until(hearer.resyncs)
    before = proxy.accepted
    proxy.freeze()
    wait_until(lambda: proxy.accepted > before, 10, "it never tried another connection")
    proxy.thaw()
    wait_until(lambda: hearer.resyncs() >= 2)


def test_the_health_check_notices_that_listens_are_gone(
    make_broker: MakeBroker, hearer: Hearer, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """As behind a pooler that hands the server's session to somebody else."""
    check = listener_module._Ear._check_health
    spoilt: list[int] = []

    def spoil(ear: Any) -> None:
        if not spoilt:
            spoilt.append(1)
            ear._session.script("UNLISTEN *")
        check(ear)

    monkeypatch.setattr(listener_module._Ear, "_check_health", spoil)
    broker = make_broker(health_check_interval=0.2)
    broker.listener.subscribe(hearer, ["a"])
    wait_until(lambda: hearer.resyncs() >= 2)
    assert "not in force" in caplog.text
    assert [event[0] for event in hearer.events] == ["resync", "deafened", "resync"]
    assert "notify to False" in caplog.text


def test_what_is_announced_during_a_health_check_is_not_kept_back(
    make_broker: MakeBroker, hearer: Hearer, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The query reads the announcement off the socket, which is then silent."""
    check = listener_module._Ear._check_health

    def meanwhile(ear: Any) -> None:
        ear._check_every = 600.0
        sql("SELECT pg_notify('a', 'during')")
        check(ear)

    monkeypatch.setattr(listener_module._Ear, "_check_health", meanwhile)
    broker = make_broker(health_check_interval=0.2)
    broker.listener.subscribe(hearer, ["a"])
    wait_until(lambda: hearer.heard("a", "during"), 5, "it was kept back")


def test_it_ends_by_itself_after_the_last_subscriber(
    broker: Broker, subscribed: Hearer, sql: Sql
) -> None:
    thread = broker.listener._thread
    assert thread is not None
    assert thread.daemon
    broker.listener.unsubscribe(subscribed)
    thread.join(10)
    assert not thread.is_alive()
    wait_until(lambda: sql(LISTENING) == [])
    # And comes back for the next.
    broker.listener.subscribe(subscribed, ["a"])
    wait_until(lambda: subscribed.resyncs() == 2)


def test_a_subscriber_that_comes_while_it_lingers_keeps_it(
    broker: Broker, subscribed: Hearer, sql: Sql, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "LINGER", 3)
    thread = broker.listener._thread
    broker.listener.unsubscribe(subscribed)
    other = Hearer()
    broker.listener.subscribe(other, ["b"])
    wait_until(other.resyncs)
    assert broker.listener._thread is thread
    sql("SELECT pg_notify('b', 'x')")
    wait_until(lambda: other.heard("b", "x"))


def test_many_that_come_and_go_lose_nobody(broker: Broker, sql: Sql) -> None:
    """Subscribing at the moment when the thread ends starts another one."""
    for _ in range(30):
        hearer = Hearer()
        broker.listener.subscribe(hearer, ["a"])
        wait_until(hearer.resyncs)
        broker.listener.unsubscribe(hearer)
        broker.listener.close(0.01)


def test_closing_raises_nothing_and_ends_the_thread(
    broker: Broker, subscribed: Hearer, caplog: pytest.LogCaptureFixture
) -> None:
    thread = broker.listener._thread
    assert thread is not None
    broker.listener.close(10)
    assert not thread.is_alive()
    broker.listener.close(10)
    assert "Traceback" not in caplog.text


def test_closing_does_not_linger(
    broker: Broker, subscribed: Hearer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The end of a process waits for it, and then the connection should be closed."""
    monkeypatch.setattr(listener_module, "LINGER", 3)
    thread = broker.listener._thread
    assert thread is not None
    broker.listener.close(2)
    assert not thread.is_alive()


def test_closing_does_not_wait_for_a_server_that_is_away(
    make_broker: MakeBroker, proxy: Proxy, database_name: str, hearer: Hearer,
) -> None:  # fmt: skip
    broker = make_broker(proxy.url(database_name))
    broker.listener.subscribe(hearer, ["a"])
    wait_until(hearer.resyncs)
    proxy.refuse()
    proxy.cut()
    thread = broker.listener._thread
    assert thread is not None
    broker.listener.close(10)
    assert not thread.is_alive()
    proxy.accept()


def test_it_outlives_an_error_that_is_not_ours(
    make_broker: MakeBroker, hearer: Hearer, sql: Sql
) -> None:
    """Every error counts as a lost connection, that of a source of passwords too."""
    working, failed = True, threading.Event()

    def source() -> str:
        if not working:
            failed.set()
            raise OSError("the vault does not answer")
        return "x"

    broker = make_broker(password_source=source)
    broker.listener.subscribe(hearer, ["a"])
    wait_until(hearer.resyncs)
    working = False
    ((pid,),) = wait_until(lambda: sql(LISTENING))
    sql("SELECT pg_terminate_backend(%s)", pid)
    assert failed.wait(10)
    working = True
    wait_until(lambda: hearer.resyncs() == 2, 5, "it never came back")


def test_a_lost_listener_names_the_server_that_it_listens_to(
    make_broker: MakeBroker, hearer: Hearer, caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    broker = make_broker(listen_url=f"pgnotify://{HOST}:{port}")
    broker.listener.subscribe(hearer, ["a"])
    wait_until(lambda: "listener.lost" in caplog.text)
    assert f": {HOST}:{port}, database" in caplog.text


# -- saying that one waits


LOCKS = (
    "SELECT mode, (classid::bigint << 32) | objid::bigint FROM pg_locks"
    " WHERE locktype = 'advisory'"
    " AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


@pytest.fixture
def waited_for(sql: Sql, broker: Broker) -> Callable[[], set[int]]:
    """A function that returns the numbers of the locks of those who wait."""
    any_channel = lock_of(any_channel_of(broker.options.schema))

    def run() -> set[int]:
        locks = sql(LOCKS)
        shared = {number for mode, number in locks if mode == "ShareLock"}
        seats = {number for mode, number in locks if mode == "ExclusiveLock"}
        assert all(1 <= number & 0xFF <= SEATS for number in seats)
        if {number & ~0xFF for number in seats} != shared - {any_channel}:
            return {0}  # it is just sitting down
        return shared

    return run


WaitedFor = Callable[[], set[int]]


def test_who_waits_for_a_channel_says_so(
    broker: Broker, hearer: Hearer, waited_for: WaitedFor
) -> None:
    broker.listener.subscribe(hearer, ["a", "b"], ["a"])
    wait_until(hearer.resyncs)
    # In force before anybody is told to look.
    assert waited_for() == {lock_of("a")}
    broker.listener.subscribe(hearer, ["a", "b"], ["a", "b"])
    wait_until(lambda: ("awaited", "b") in hearer.events)
    assert waited_for() == {lock_of("a"), lock_of("b")}
    broker.listener.subscribe(hearer, ["a", "b"], [])
    wait_until(lambda: waited_for() == set())
    broker.listener.subscribe(hearer, ["a", "b"], ["b"])
    wait_until(lambda: hearer.events.count(("awaited", "b")) == 2)
    assert waited_for() == {lock_of("b")}
    # A new channel is resynced: there is no second look for it.
    broker.listener.subscribe(hearer, ["a", "b", "c"], ["b", "c"])
    wait_until(lambda: ("resync", "c") in hearer.events)
    assert ("awaited", "c") not in hearer.events
    assert ("awaited", "a") not in hearer.events


def test_a_channel_is_waited_for_until_the_last_one_is_busy(
    broker: Broker, waited_for: WaitedFor
) -> None:
    one, two = Hearer(), Hearer()
    broker.listener.subscribe(one, ["a"], ["a"])
    broker.listener.subscribe(two, ["a"])
    wait_until(lambda: one.resyncs() and two.resyncs())
    broker.listener.subscribe(two, ["a"], ["a"])
    # The lock is there already, and yet there may be something it was not told of.
    wait_until(lambda: ("awaited", "a") in two.events)
    broker.listener.subscribe(one, ["a"])
    broker.listener.subscribe(two, ["a", "b"], ["a"])
    wait_until(lambda: ("resync", "b") in two.events)
    assert waited_for() == {lock_of("a")}
    broker.listener.unsubscribe(two)
    wait_until(lambda: waited_for() == set())


def test_many_channels_need_one_lock(
    broker: Broker, hearer: Hearer, waited_for: WaitedFor, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"n{number}" for number in range(listener_module.MOST_LOCKS + 1)]
    broker.listener.subscribe(hearer, names, names[:-1])
    wait_until(hearer.resyncs)
    assert waited_for() == {lock_of(name) for name in names[:-1]}
    broker.listener.subscribe(hearer, names, names)
    wait_until(lambda: ("awaited", names[-1]) in hearer.events)
    assert waited_for() == {lock_of(any_channel_of(broker.options.schema))}
    broker.listener.subscribe(hearer, names, names[:2])
    wait_until(lambda: waited_for() == {lock_of(name) for name in names[:2]})


def test_after_a_loss_it_is_said_again(
    broker: Broker, hearer: Hearer, sql: Sql, waited_for: WaitedFor
) -> None:
    broker.listener.subscribe(hearer, ["a"], ["a"])
    wait_until(hearer.resyncs)
    sql(f"SELECT pg_terminate_backend(pid) FROM ({LISTENING}) AS ours")
    wait_until(lambda: hearer.resyncs() == 2)
    assert waited_for() == {lock_of("a")}


def test_lost_locks_are_noticed_by_the_health_check(
    make_broker: Callable[..., Broker],
    hearer: Hearer,
    waited_for: WaitedFor,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = make_broker(health_check_interval=1)
    sessions = []
    opening = broker.database.open

    def remembering(*args: Any) -> Any:
        sessions.append(opening(*args))
        return sessions[-1]

    monkeypatch.setattr(broker.database, "open", remembering)
    broker.listener.subscribe(hearer, ["a"], ["a"])
    wait_until(hearer.resyncs)
    check = listener_module._Ear._check_health

    def losing(ear: Any) -> None:
        if len(sessions) == 1:
            sessions[0].script("SELECT pg_advisory_unlock_all()")
        check(ear)

    monkeypatch.setattr(listener_module._Ear, "_check_health", losing)
    wait_until(lambda: hearer.resyncs() == 2)
    assert waited_for() == {lock_of("a")}


SEATS_TAKEN = (
    f"SELECT number & 255 FROM ({LOCKS}) AS locks (mode, number) WHERE mode = 'ExclusiveLock'"
)


def test_everybody_has_a_seat_and_the_rest_stand(
    make_broker: Callable[..., Broker], sql: Sql
) -> None:
    brokers = [make_broker() for _ in range(SEATS + 1)]
    for broker in brokers:
        hearer = Hearer()
        broker.listener.subscribe(hearer, ["a"], ["a"])
        wait_until(hearer.resyncs)
    assert sorted(sql(SEATS_TAKEN)) == [(seat + 1,) for seat in range(SEATS)]


def test_who_is_named_by_the_seat_it_has_just_given_up_is_told(
    broker: Broker, hearer: Hearer, sql: Sql
) -> None:
    broker.listener.subscribe(hearer, ["a"], ["a"])
    wait_until(hearer.resyncs)
    ((seat,),) = sql(SEATS_TAKEN)
    broker.listener.subscribe(hearer, ["a"])
    wait_until(lambda: not sql(SEATS_TAKEN))
    sql("SELECT pg_notify('a', %s)", f"{PUBLISHED} {seat % SEATS}")
    sql("SELECT pg_notify('a', %s)", f"{PUBLISHED} {seat - 1}")
    wait_until(lambda: ("named", "a") in hearer.events)
    assert hearer.events.count(("named", "a")) == 1, "of a seat that it never had"

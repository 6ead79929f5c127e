"""Consuming in kombu's event loop: what wakes it, when acks go out, and what is left behind."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta, timezone
from typing import Any

import pytest
from ear import Ear
from helpers import wait_until
from kombu import Connection, Message
from kombu.asynchronous import Hub

from kombu_pgnotify import (
    broker as brokers,
    claiming,
    claims,
    consumers,
    eventloop,
    listener,
    qos,
)
from kombu_pgnotify.messages import channel_of, lock_of

Connect = Callable[..., Connection]
Send = Callable[..., None]
Sql = Callable[..., list[tuple[Any, ...]]]
Rows = Callable[[], tuple[int, int, int]]
Drive = Callable[[Callable[[], Any]], None]

#: Seconds that a condition may take to come about in the loop.
PATIENCE = 20.0

#: Seconds that a loss is borne before the loop is told: what it does then is the same after ten.
TOLERANCE = 0.5


@pytest.fixture
def hub() -> Iterator[Hub]:
    made = Hub()
    yield made
    made.close()


@pytest.fixture
def drive(hub: Hub) -> Drive:
    """A function that runs the hub until a condition holds."""

    def run(until: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE
        while not until():
            assert time.monotonic() < deadline, "it did not come about in the loop"
            hub.run_once()

    return run


@pytest.fixture
def looped(connect: Connect, hub: Hub) -> Callable[..., Connection]:
    """A function that makes a connection in the hub, whose poll is an hour away."""

    def make(*args: Any, **options: Any) -> Connection:
        connection = connect(*args, **{"polling_interval": 3600, **options})
        connection.register_with_event_loop(hub)
        return connection

    return make


def settled_down(connection: Connection, queue: str) -> bool:
    """True once the queue has been seen empty, the next look being far away."""
    watch = connection.transport.consumption._watches[queue]
    return bool(watch.look_at > time.monotonic() + 60)


def in_time(seconds: float) -> str:
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()


# -- saying that one waits


@pytest.fixture
def waited_for(sql: Sql, queue: str) -> Callable[[], bool]:
    """A function that says whether somebody wants to be told of this test's queue."""
    lock = lock_of(channel_of("pgnotify", queue))

    def run() -> bool:
        return sql("SELECT pg_try_advisory_xact_lock(%s)", lock) == [(False,)]

    return run


@pytest.fixture
def ear(database: str, queue: str) -> Iterator[Ear]:
    """Hears what is announced of this test's queue, and does not say that it waits."""

    def told() -> None:
        for broker in list(brokers._brokers.values()):
            broker.database.check()

    made = Ear(database, queue, waits=False, everybody=True, told=told)
    yield made
    made.close()


@pytest.mark.parametrize("prefetch", [1, 4])
def test_who_has_all_that_it_takes_is_told_of_nothing_more(
    looped: Any,
    inbox: Any,
    send: Send,
    queue: str,
    drive: Drive,
    ear: Ear,
    waited_for: Any,
    prefetch: int,
) -> None:
    connection = looped()
    got = inbox(connection, queue, prefetch=prefetch)
    drive(lambda: settled_down(connection, queue))
    drive(waited_for)
    send(*range(prefetch))
    drive(lambda: len(got.messages) == prefetch)
    assert ear.heard()
    drive(lambda: not waited_for())
    # All were told, since it may have left something.
    ear.heard()
    send(*range(20))
    assert ear.heard() == []
    # It has room again: first for what is there, then for what comes; the poll is an hour away.
    while len(got.messages) < prefetch + 20:
        seen = len(got.messages)
        got.messages[seen - 1].ack()
        drive(lambda: len(got.messages) > seen)  # noqa: B023
    for message in got.messages[:-1]:
        if not message.acknowledged:
            message.ack()
    got.messages[-1].ack()
    drive(waited_for)
    send("told")
    # Somebody is named; and then all, if there may be more than it takes.
    assert set(ear.heard()) == {(queue, "published")}
    drive(lambda: got.bodies[-1] == "told")


def test_after_a_backlog_the_next_message_is_told_although_looks_are_dear(
    looped: Any,
    inbox: Any,
    send: Send,
    queue: str,
    drive: Drive,
    hub: Hub,
    waited_for: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(consumers, "BUSY_AFTER", 0.0)
    # A short claim is then not believed, and the next look from the start far away.
    monkeypatch.setattr(claims, "SLACK", 0)
    monkeypatch.setattr(claims, "CHEAP", 0.0)
    monkeypatch.setattr(claims, "COST_SHARE", 1_000_000)
    connection = looped()
    send(*range(40))
    got = inbox(connection, queue, prefetch=10, on_message=lambda m: hub.call_soon(m.ack))
    drive(lambda: len(got.messages) == 40)
    drive(waited_for)
    send("told")
    drive(lambda: got.bodies[-1] == "told")


def test_wake_ups_survive_any_change_between_busy_and_idle(
    looped: Any,
    inbox: Any,
    connect: Connect,
    queue: str,
    drive: Drive,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Publishers pause about as long as it takes to be taken for busy, or for idle."""
    monkeypatch.setattr(consumers, "BUSY_AFTER", 0.002)
    count = 150
    connection = looped()
    got = inbox(connection, queue, prefetch=2, on_message=lambda m: hub.call_soon(m.ack))
    links = [connect() for _ in range(3)]

    def publish(link: Connection, seed: int) -> None:
        pauses = random.Random(seed)
        producer = link.Producer(auto_declare=False)
        for number in range(count):
            producer.publish(number, routing_key=queue, serializer="json")
            time.sleep(pauses.choice([0, 0, 0.001, 0.004, 0.012]))

    threads = [
        threading.Thread(target=publish, args=(link, seed)) for seed, link in enumerate(links)
    ]
    for thread in threads:
        thread.start()
    drive(lambda: len(got.messages) == count * len(links))
    for thread in threads:
        thread.join()


# -- what wakes the loop


def test_a_backlog_is_consumed(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive, wait_rows: Any, hub: Hub
) -> None:
    send(*range(250))
    connection = looped()
    got = inbox(connection, queue, on_message=lambda m: hub.call_soon(m.ack))
    drive(lambda: len(got.messages) == 250)
    assert got.bodies == list(range(250))
    for _ in range(2):
        hub.run_once()
    wait_rows(0, 0)


def test_an_announcement_wakes_the_loop(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive
) -> None:
    connection = looped()
    got = inbox(connection, queue)
    drive(lambda: settled_down(connection, queue))
    send("now")
    drive(lambda: got.messages)
    assert got.bodies == ["now"]


def test_a_consumer_added_while_the_loop_runs_gets_its_messages(
    looped: Any, inbox: Any, send: Send, drive: Drive
) -> None:
    connection = looped()
    inbox(connection, "first")
    drive(lambda: settled_down(connection, "first"))
    send("there before", to="second")
    got = inbox(connection, "second")
    drive(lambda: got.messages)
    assert got.bodies == ["there before"]


@pytest.mark.parametrize("how", ["call_soon", "directly"])
@pytest.mark.parametrize("elsewhere", [False, True], ids=["own thread", "other thread"])
def test_credit_regained_by_an_ack_wakes_the_loop(
    looped: Any,
    inbox: Any,
    send: Send,
    queue: str,
    drive: Drive,
    hub: Hub,
    wait_rows: Any,
    how: str,
    elsewhere: bool,
) -> None:
    send(*range(5))
    threads: list[threading.Thread] = []

    def settle(message: Message) -> None:
        run: Callable[[], object] = message.ack
        if how == "call_soon":
            run = lambda: hub.call_soon(message.ack)  # noqa: E731
        if not elsewhere:
            run()
            return
        consumption = message.channel.connection.consumption

        def run_when_it_waits() -> None:
            wait_until(lambda: consumption._blocked)
            run()

        threads.append(threading.Thread(target=run_when_it_waits))
        threads[-1].start()

    got = inbox(looped(), queue, prefetch=1, on_message=settle)
    drive(lambda: len(got.messages) == 5)
    for thread in threads:
        thread.join()
    for _ in range(2):
        hub.run_once()
    wait_rows(0, 0)


def test_a_held_message_comes_when_it_is_due_without_any_traffic(
    looped: Any, inbox: Any, send: Send, sql: Sql, queue: str, drive: Drive
) -> None:
    eta = in_time(1)
    send("due", headers={"task": "t", "eta": eta})
    got = inbox(looped(), queue)
    drive(lambda: got.messages)
    assert sql("SELECT now() >= %s::timestamptz", eta) == [(True,)]


def test_a_held_message_published_to_a_waiting_loop_comes_when_it_is_due(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive
) -> None:
    connection = looped()
    got = inbox(connection, queue)
    drive(lambda: settled_down(connection, queue))
    send("due", headers={"task": "t", "eta": in_time(1)})
    drive(lambda: got.messages)


def test_the_messages_of_a_dead_consumer_come_when_its_lease_ends(
    looped: Any, inbox: Any, send: Send, sql: Sql, queue: str, drive: Drive
) -> None:
    send("left behind")
    sql(
        "UPDATE pgnotify.tasks SET lease_worker_id = 'dead', attempts = 1, deliveries = 1,"
        " lease_expiration = now() + interval '1 s'"
    )
    got = inbox(looped(), queue)
    drive(lambda: got.messages)
    assert got.bodies == ["left behind"]
    assert got.messages[0].delivery_info["redelivered"] is True


def test_timers_cleared_by_somebody_else_do_not_stop_the_looks(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive, hub: Hub
) -> None:
    connection = looped()
    got = inbox(connection, queue)
    send("due", headers={"task": "t", "eta": in_time(1)})
    drive(lambda: connection.transport._link._timer is not None)
    # As Celery does when it restarts its consumer.
    hub.timer.clear()
    drive(lambda: got.messages)


def test_idle_turns_of_the_loop_ask_the_server_nothing(
    looped: Any, inbox: Any, queue: str, drive: Drive, hub: Hub, statements: list[Any]
) -> None:
    connection = looped()
    inbox(connection, queue)
    drive(lambda: settled_down(connection, queue))
    # LISTEN has come into force, and what that asks for has been looked at.
    wait_until(lambda: connection.transport.broker.listener._wanted)
    watches = connection.transport.consumption._watches
    drive(lambda: settled_down(connection, queue) and not watches._news)
    statements.clear()
    planned = set()
    for _ in range(200):
        for tick in list(hub.on_tick):
            tick()
        planned.add(connection.transport._link._timer_due)
    assert len([calls for calls in statements if "listening" not in calls]) <= 4
    assert len(planned) <= 2, "each wakes the loop once more"


# -- acks


def test_acks_travel_with_the_claim_they_make_room_for(
    looped: Any,
    inbox: Any,
    send: Send,
    queue: str,
    drive: Drive,
    hub: Hub,
    statements: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # One turn delivers all that a claim brought, however slow the machine is.
    monkeypatch.setattr(eventloop, "TURN", 600)
    send(*range(30))
    connection = looped()
    got = inbox(connection, queue, prefetch=10, on_message=lambda m: hub.call_soon(m.ack))
    statements.clear()
    drive(lambda: len(got.messages) == 30)
    claims = [calls for calls in statements if "claim" in calls]
    acks = [calls for calls in statements if "acknowledge" in calls]
    # The first for ten, the others for five at least.
    assert len(claims) <= 5
    assert acks == claims[1:]


def test_claims_wait_for_more_credit_while_half_of_the_messages_are_in_hand(
    looped: Any,
    inbox: Any,
    send: Send,
    queue: str,
    drive: Drive,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send(*range(40))
    connection = looped()
    store = connection.transport.broker.store
    sizes: list[int] = []
    made = store.claiming

    def noting(name: str, ranges: Any, limit: int, *args: Any) -> Any:
        sizes.append(limit)
        return made(name, ranges, limit, *args)

    monkeypatch.setattr(store, "claiming", noting)
    monkeypatch.setattr(qos, "GATHER", 60.0)
    # Else an iteration in which nothing happens takes a second.
    hub.call_repeatedly(0.02, lambda: None)
    got = inbox(connection, queue, prefetch=8)
    drive(lambda: len(got.messages) == 8)
    for message in list(got.messages):
        message.ack()
        for _ in range(3):
            hub.run_once()
    drive(lambda: len(got.messages) == 16)
    assert sizes[:3] == [8, 4, 4]


@pytest.mark.parametrize("held", [1, 7])
def test_a_single_free_place_is_filled_although_no_other_ack_follows(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive, held: int, wait_rows: Any
) -> None:
    send(*range(8))
    connection = looped()
    got = inbox(connection, queue, prefetch=8)
    drive(lambda: len(got.messages) == 8)
    for message in got.messages[held:]:
        message.ack()
    send("more")
    drive(lambda: len(got.messages) == 9)
    wait_rows(held + 1, held + 1)


def test_the_last_acks_go_out_with_the_next_iterations(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive, hub: Hub, rows: Rows
) -> None:
    send(*range(5))
    got = inbox(looped(), queue)
    drive(lambda: len(got.messages) == 5)
    for message in got.messages:
        hub.call_soon(message.ack)
    # Or with a claim, should one be under way.
    drive(lambda: rows() == (0, 0, 0))


def ack_row(message: Message, sql: Sql) -> bool:
    """True once the message's row is gone."""
    task_id = int(message.delivery_tag.split(".")[0])
    return sql("SELECT 1 FROM pgnotify.tasks WHERE task_id = %s", task_id) == []


@pytest.mark.parametrize("how", ["call_soon", "directly"])
def test_an_ack_does_not_wait_for_the_next_callback_however_long_that_takes(
    looped: Any,
    inbox: Any,
    send: Send,
    sql: Sql,
    queue: str,
    drive: Drive,
    hub: Hub,
    how: str,
) -> None:
    # A solo worker's callbacks run tasks; the first ones' acks are not to wait for the last.
    count = 10

    def settled() -> bool:
        return all(ack_row(message, sql) for message in got.messages[:-1])

    def work(message: Message) -> None:
        if message.payload == "slow":
            wait_until(settled, 10, "the acks wait for the callback")
        elif how == "call_soon":
            hub.call_soon(message.ack)
        else:
            message.ack()

    got = inbox(looped(), queue, on_message=work)
    # The first claim of a connection takes its time; here one is to bring all.
    send("first")
    drive(lambda: got.messages)
    send(*["quick"] * count, "slow")
    drive(lambda: len(got.messages) == count + 2)


def test_a_message_is_leased_as_long_as_its_callback_blocks_the_loop(
    looped: Any, inbox: Any, send: Send, sql: Sql, queue: str, drive: Drive
) -> None:
    send("long")
    lease = "SELECT lease_expiration FROM pgnotify.tasks"
    seen: list[Any] = []

    def work(message: Message) -> None:
        for _ in range(3):
            seen.append(sql(lease)[0][0])
            wait_until(lambda: sql(lease)[0][0] > seen[-1], 10, "the lease is not renewed")

    got = inbox(looped(visibility_timeout=0.6), queue, on_message=work)
    drive(lambda: got.messages)
    assert len(seen) == 3


def test_acks_after_the_hub_was_closed_go_at_once(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive, hub: Hub, rows: Rows
) -> None:
    send(*range(4))
    got = inbox(looped(), queue)
    drive(lambda: len(got.messages) == 4)
    # A warm shutdown: the last acks are queued while the loop runs no more.
    got.cancel()
    hub.call_soon(got.messages[0].ack)
    hub.close()
    assert rows()[0] == 3
    got.messages[1].ack()
    assert rows()[0] == 2
    thread = threading.Thread(target=got.messages[2].ack)
    thread.start()
    thread.join()
    assert rows()[0] == 1


# -- reset, close, and others in the same hub


def test_a_reset_in_the_middle_does_not_stop_anything(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive, hub: Hub, wait_rows: Any
) -> None:
    connection = looped()
    got = inbox(connection, queue, prefetch=4, on_message=lambda m: hub.call_soon(m.ack))
    for n in range(5):
        send(n)
        drive(lambda n=n: len(got.messages) == n + 1)  # type: ignore[misc]
        hub.reset()
    drive(lambda: settled_down(connection, queue))
    hub.reset()
    send("after")
    drive(lambda: len(got.messages) == 6)
    hub.run_once()
    wait_rows(0, 0)


def test_a_connection_can_be_drained_while_it_is_in_the_loop(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive, wait_rows: Any
) -> None:
    connection = looped()
    got = inbox(connection, queue, on_message=lambda m: m.ack())
    send(1)
    connection.drain_events(timeout=10)
    send(2)
    drive(lambda: got.bodies == [1, 2])
    send(3)
    # Celery's mingle does this between two iterations.
    connection.drain_events(timeout=10)
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.05)
    assert got.bodies == [1, 2, 3]
    wait_rows(0, 0)
    send(4)
    drive(lambda: got.bodies == [1, 2, 3, 4])


def test_what_is_announced_while_a_claim_is_under_way_is_not_forgotten(
    looped: Any,
    inbox: Any,
    send: Send,
    queue: str,
    drive: Drive,
    hub: Hub,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The claim may have looked before, and says that the queue is empty."""
    connection = looped()
    got = inbox(connection, queue, prefetch=4)
    send(1)
    drive(lambda: len(got.messages) == 1)
    consumption = connection.transport.consumption
    # Until the lease of the first, at the most.
    drive(lambda: consumption._watches[queue].look_at > time.monotonic() + 5)
    consumption.resync(frozenset(consumption._watches.channels()))
    drive(lambda: consumption.claim)
    wait_until(consumption.claim.answered)
    send(2)
    wait_until(lambda: consumption._watches._news)
    with monkeypatch.context() as patch:
        # The answer takes its time.
        patch.setattr(claiming.Claim, "answered", lambda _: False)
        hub.run_once()
    drive(lambda: got.bodies == [1, 2])


def test_a_look_that_began_before_one_was_named_does_not_count_as_having_seen_it(
    looped: Any,
    inbox: Any,
    send: Send,
    queue: str,
    drive: Drive,
    waited_for: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Else nobody else is told of a message that was published behind it."""
    # Nobody tells us of it a second time.
    monkeypatch.setattr(listener, "SEEN_WITHIN", 3600)
    connection = looped()
    got = inbox(connection, queue, prefetch=4)
    drive(waited_for)
    send(1)
    drive(lambda: len(got.messages) == 1)
    consumption, channel = connection.transport.consumption, channel_of("pgnotify", queue)
    # Until the lease of the first, at the most.
    drive(lambda: consumption._watches[queue].look_at > time.monotonic() + 5)
    consumption.resync(frozenset([channel]))
    drive(lambda: consumption.claim)
    before = consumption.claim
    wait_until(before.answered)
    send(2)
    wait_until(lambda: consumption._watches._news)
    assert consumption.unseen(channel)
    drive(lambda: consumption.claim is not before)
    assert got.bodies == [1]
    assert consumption.unseen(channel)
    # The next look does.
    drive(lambda: not consumption.unseen(channel))
    assert got.bodies == [1, 2]


def test_two_connections_share_a_hub(
    looped: Any, inbox: Any, send: Send, drive: Drive, hub: Hub
) -> None:
    connections = [looped(), looped()]
    boxes = [
        inbox(connection, f"queue-{n}", on_message=lambda m: hub.call_soon(m.ack))
        for n, connection in enumerate(connections)
    ]
    for n in range(2):
        send(*range(5), to=f"queue-{n}")
    drive(lambda: all(len(box.messages) == 5 for box in boxes))
    connections[0].close()
    send("still here", to="queue-1")
    drive(lambda: len(boxes[1].messages) == 6)


def contents(hub: Hub) -> tuple[Any, ...]:
    """What others have put into the hub."""
    timers = [entry for _, _, entry in (tuple(e)[:3] for e in hub.timer.queue) if entry]
    return (
        dict(hub.readers),
        dict(hub.writers),
        set(hub.on_tick),
        set(hub.on_close),
        [entry for entry in timers if not getattr(entry, "canceled", False)],
    )


@pytest.mark.parametrize("end", ["close", "collect"])
def test_a_closed_connection_leaves_nothing_in_the_hub(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive, hub: Hub, end: str
) -> None:
    hub.run_once()
    before = contents(hub)
    for _ in range(3):
        connection = looped()
        got = inbox(connection, queue)
        drive(lambda: connection.transport._link._timer is not None)  # noqa: B023
        send("x")
        drive(lambda: got.messages)  # noqa: B023
        assert contents(hub) != before
        getattr(connection, end)()
        got.messages.clear()
        assert contents(hub) == before
    hub.run_once()


def test_closing_after_the_hub_was_closed_does_not_bring_it_back(
    looped: Any, inbox: Any, queue: str, drive: Drive, hub: Hub
) -> None:
    connection = looped()
    inbox(connection, queue)
    drive(lambda: settled_down(connection, queue))
    hub.close()
    connection.close()
    assert hub._poller is None


def test_a_file_descriptor_that_became_somebody_elses_stays(
    looped: Any, inbox: Any, queue: str, drive: Drive, hub: Hub
) -> None:
    connection = looped()
    inbox(connection, queue)
    drive(lambda: settled_down(connection, queue))
    fd = connection.transport._waker.fileno()
    assert fd in hub.readers
    somebody = (print, ())
    hub.readers[fd] = somebody
    connection.close()
    assert hub.readers.pop(fd) is somebody


def test_closing_inside_a_callback(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive, hub: Hub, wait_rows: Any
) -> None:
    send(*range(3))
    connection = looped()
    got = inbox(connection, queue, on_message=lambda _: connection.close())
    drive(lambda: got.messages)
    hub.run_once()
    assert len(got.messages) == 1
    wait_rows(3, 0)
    assert not hub.on_tick


@pytest.mark.parametrize("error", [ValueError, SystemExit])
def test_what_a_callback_raises_passes_through_and_the_rest_is_delivered(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive, error: type[BaseException]
) -> None:
    send(*range(4))

    def work(message: Message) -> None:
        if message.payload == 1:
            raise error("on purpose")

    got = inbox(looped(), queue, on_message=work)
    with pytest.raises(error):
        drive(lambda: len(got.messages) == 4)
    hub = got.channel.connection._link._loop
    hub._loop = None  # the generator has ended with the exception
    drive(lambda: len(got.messages) == 4)
    assert got.bodies == [0, 1, 2, 3]


def test_a_callback_may_use_its_own_connection_for_anything(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive, wait_rows: Any
) -> None:
    send("start")
    send("other", to="other")
    found: list[Any] = []

    def work(message: Message) -> None:
        channel = message.channel
        looped_connection.Producer(channel).publish("published", routing_key="third")
        found.append(channel.basic_get("other", no_ack=True).payload)
        found.append(channel.queue_declare("third", passive=True).message_count)
        message.ack()
        channel.close()

    looped_connection = looped()
    got = inbox(looped_connection.channel(), queue, on_message=work)
    drive(lambda: got.messages)
    assert found == ["other", 1]
    wait_rows(1, 0)


# -- losing the connection


@pytest.fixture
def lost(
    looped: Any, inbox: Any, send: Send, queue: str, proxy: Any, database_name: str, drive: Drive
) -> Iterator[tuple[Connection, Any]]:
    """A connection with three messages in hand whose server has just gone away."""
    send(*range(3))
    url = proxy.url(database_name, scheme="pgnotify")
    connection = looped(url, polling_interval=0.05, outage_tolerance=TOLERANCE)
    got = inbox(connection, queue)
    drive(lambda: len(got.messages) == 3)
    keeper = connection.transport.broker.keeper
    proxy.refuse()
    proxy.cut()
    yield connection, got
    # Everything can be settled in the end.
    proxy.accept()
    connection.close()
    wait_until(lambda: not keeper.held and not keeper.pending)


def test_the_loop_hears_of_a_lost_server_by_a_connection_error(
    lost: tuple[Connection, Any], drive: Drive
) -> None:
    connection, _ = lost
    with pytest.raises(connection.connection_errors):
        drive(lambda: False)


@pytest.mark.parametrize("verb", ["ack", "reject", "requeue"])
def test_a_channel_whose_connection_was_lost_still_settles(
    lost: tuple[Connection, Any], proxy: Any, drive: Drive, hub: Hub, wait_rows: Any, verb: str
) -> None:
    connection, got = lost
    with pytest.raises(connection.connection_errors):
        drive(lambda: False)
    # What Celery does: reset, collect, close; a running task's message stays alive.
    hub.reset()
    running = got.messages[0]
    connection.collect(5)
    connection.close()
    got.messages.clear()
    # During the outage: no error, and not in vain.
    getattr(running, verb)()
    assert running.acknowledged
    proxy.accept()
    wait_rows(3 if verb == "requeue" else 2, 0, 1 if verb == "reject" else 0)


def test_after_a_loss_what_runs_keeps_its_lease_and_what_was_dropped_is_released(
    lost: tuple[Connection, Any],
    looped: Any,
    inbox: Any,
    queue: str,
    proxy: Any,
    drive: Drive,
    hub: Hub,
    sql: Sql,
    wait_rows: Any,
) -> None:
    connection, got = lost
    with pytest.raises(connection.connection_errors):
        drive(lambda: False)
    hub.reset()
    running = got.messages[1]
    connection.collect(5)
    connection.close()
    got.messages.clear()
    proxy.accept()
    wait_rows(3, 1)
    again = inbox(looped(), queue)
    drive(lambda: len(again.messages) == 2)
    # Neither twice nor, since they were never started, as redelivered.
    assert again.bodies == [0, 2]
    assert not any("redelivered" in message.delivery_info for message in again.messages)
    running.ack()
    wait_rows(2, 2)
    assert sql("SELECT min(attempts), max(attempts) FROM pgnotify.tasks") == [(1, 1)]


def test_reconnecting_again_and_again_leaves_one_tick_in_the_hub(
    connect: Connect,
    inbox: Any,
    send: Send,
    queue: str,
    proxy: Any,
    database_name: str,
    drive: Drive,
    hub: Hub,
) -> None:
    url = proxy.url(database_name, scheme="pgnotify")
    for n in range(4):
        connection = connect(url, polling_interval=0.05, outage_tolerance=TOLERANCE)
        connection.register_with_event_loop(hub)
        got = inbox(connection, queue, on_message=lambda m: m.ack())
        send(n)
        drive(lambda: got.messages)  # noqa: B023
        assert len(hub.on_tick) == 1
        keeper = connection.transport.broker.keeper
        proxy.refuse()
        proxy.cut()
        with pytest.raises(connection.connection_errors):
            drive(lambda: False)
        hub.reset()
        connection.collect(5)
        connection.close()
        proxy.accept()
        # While the proxy is still there.
        wait_until(lambda: not keeper.held and not keeper.pending)  # noqa: B023
    assert not hub.on_tick
    assert not hub.on_close


# -- a worker that shuts down


def test_a_cancel_releases_what_nobody_keeps_and_leaves_the_rest_to_be_acknowledged(
    looped: Any, inbox: Any, send: Send, queue: str, drive: Drive, wait_rows: Any
) -> None:
    send(*range(5))
    got = inbox(looped(), queue)
    drive(lambda: len(got.messages) == 5)
    del got.messages[1:3]
    got.cancel()
    wait_rows(5, 3)
    for message in got.messages:
        message.ack()
    wait_rows(2, 0)


def test_ack_multiple_after_a_cancel_settles_no_later_message(
    looped: Any, inbox: Any, send: Send, sql: Sql, queue: str, drive: Drive
) -> None:
    send(*range(4))
    got = inbox(looped(), queue)
    drive(lambda: len(got.messages) == 4)
    got.cancel()
    got.messages[1].ack(multiple=True)
    left = sql("SELECT convert_from(payload, 'UTF8') FROM pgnotify.tasks ORDER BY task_id")
    assert left == [("2",), ("3",)]

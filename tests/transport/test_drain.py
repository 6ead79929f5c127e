"""Synchronous consuming: drain_events and what is built on it, acks, and the queues' verbs."""

from __future__ import annotations

import os
import pickle
import socket
import sys
import threading
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from types import FrameType
from typing import Any

import pytest
from helpers import wait_until
from kombu import Connection, Message, Queue
from kombu.exceptions import ChannelError
from kombu.mixins import ConsumerMixin
from kombu.simple import SimpleBuffer, SimpleQueue

from kombu_pgnotify import consumption as consumption_module
from kombu_pgnotify.consumption import Consumption
from kombu_pgnotify.errors import StatementFailed

Connect = Callable[..., Connection]
Send = Callable[..., None]
Sql = Callable[..., list[tuple[Any, ...]]]
Rows = Callable[[], tuple[int, int, int]]


def in_time(seconds: float) -> str:
    return (datetime.now(timezone.utc) + timedelta(seconds=seconds)).isoformat()


def ack(message: Message) -> None:
    message.ack()


# -- one call, one message


def test_one_call_delivers_one_message(
    connection: Connection, inbox: Any, send: Send, queue: str
) -> None:
    send(*range(5))
    got = inbox(connection, queue)
    for count in range(1, 6):
        connection.drain_events(timeout=5)
        assert got.bodies == list(range(count))
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0)


def test_one_call_delivers_one_message_of_those_that_are_gone_once_taken(
    connection: Connection, inbox: Any, send: Send, queue: str, rows: Rows
) -> None:
    send(*range(5))
    got = inbox(connection, queue, no_ack=True)
    connection.drain_events(timeout=5)
    assert got.bodies == [0]
    # Whoever stops after one message must not have taken the others from the table.
    assert rows() == (4, 0, 0)


def test_one_call_counts_even_when_one_claim_brought_messages_of_several_channels(
    connection: Connection, inbox: Any, send: Send, queue: str
) -> None:
    send(1, 2, to="one")
    send(1, 2, to="two")
    boxes = [inbox(connection.channel(), name) for name in ("one", "two")]
    for count in range(1, 5):
        connection.drain_events(timeout=5)
        assert sum(len(box.messages) for box in boxes) == count


# -- time


@pytest.mark.parametrize("timeout", [0, 0.05])
def test_nothing_in_time_is_a_socket_timeout(
    connection: Connection, inbox: Any, queue: str, timeout: float
) -> None:
    inbox(connection, queue)
    with pytest.raises(socket.timeout):
        connection.drain_events(timeout=timeout)


def test_a_timeout_of_zero_is_one_look(
    connection: Connection, inbox: Any, send: Send, queue: str
) -> None:
    send("there")
    got = inbox(connection, queue)
    connection.drain_events(timeout=0)
    assert got.bodies == ["there"]


def test_the_time_is_waited_out_without_a_consumer(connection: Connection) -> None:
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.3)
    assert time.monotonic() - started >= 0.3


def count_looks(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Record each time the consuming loop turns."""
    looks: list[float] = []
    deliver_one = Consumption.deliver_one

    def counted(self: Consumption, **options: bool) -> bool:
        looks.append(time.monotonic())
        return deliver_one(self, **options)

    monkeypatch.setattr(Consumption, "deliver_one", counted)
    return looks


@pytest.mark.parametrize("why", ["no consumer", "no credit", "nothing there", "all leased", "held"])
def test_waiting_does_not_spin(
    connection: Connection,
    inbox: Any,
    send: Send,
    sql: Sql,
    queue: str,
    why: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if why != "no consumer":
        got = inbox(connection, queue, prefetch=1)
    if why == "no credit":
        send(1, 2)
        connection.drain_events(timeout=5)
        assert got.bodies == [1]
    if why == "held":
        send(1, headers={"task": "t", "eta": in_time(3600)})
    if why == "all leased":
        send(1)
        sql(
            "UPDATE pgnotify.tasks SET lease_worker_id = 'somebody',"
            " lease_expiration = now() + interval '1 hour'"
        )
    looks = count_looks(monkeypatch)
    used = time.process_time()
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=1.0)
    assert len(looks) < 20
    assert time.process_time() - used < 0.5


def test_no_timeout_waits_for_a_message(
    connection: Connection, inbox: Any, send: Send, queue: str
) -> None:
    got = inbox(connection, queue)
    ended = threading.Event()

    def consume() -> None:
        connection.drain_events()
        ended.set()

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    wait_until(lambda: connection.transport.consumption._watches[queue].look_at > 0)
    assert not ended.is_set()
    send("late")
    thread.join(20)
    assert got.bodies == ["late"]


def test_a_look_that_finds_nothing_raises_empty_only_from_the_channel(
    connection: Connection, inbox: Any, queue: str
) -> None:
    got = inbox(connection, queue)
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0)
    from queue import Empty

    with pytest.raises(Empty):
        got.channel.drain_events(timeout=0)


# -- waking


def test_messages_that_were_there_before_the_consumer_come_without_an_announcement(
    connect: Connect, inbox: Any, sql: Sql, queue: str, drain: Any
) -> None:
    # The poll is an hour away and nothing is announced any more.
    publisher, consumer = connect(), connect(polling_interval=3600)
    for n in range(250):
        publisher.Producer().publish(n, routing_key=queue, serializer="json")
    got = inbox(consumer, queue, on_message=ack)
    drain(consumer, lambda: len(got.messages) == 250)
    assert got.bodies == list(range(250))


def test_an_announcement_wakes_a_waiting_consumer(
    connect: Connect, inbox: Any, queue: str, send: Send
) -> None:
    consumer = connect(polling_interval=3600)
    got = inbox(consumer, queue)
    watch = consumer.transport.consumption._watches[queue]

    def publish_when_it_waits() -> None:
        wait_until(lambda: watch.look_at > time.monotonic() + 60)
        send("now")

    thread = threading.Thread(target=publish_when_it_waits)
    thread.start()
    consumer.drain_events(timeout=20)
    thread.join()
    assert got.bodies == ["now"]


def test_without_notify_polling_finds_messages_and_nobody_listens(
    connect: Connect, inbox: Any, sql: Sql, queue: str
) -> None:
    consumer = connect(notify=False, polling_interval=0.05)
    publisher = connect(notify=False, polling_interval=0.05)
    got = inbox(consumer, queue)
    with pytest.raises(TimeoutError):
        consumer.drain_events(timeout=0.1)
    publisher.Producer().publish("polled", routing_key=queue, serializer="json")
    consumer.drain_events(timeout=20)
    assert got.bodies == ["polled"]
    assert not [t for t in threading.enumerate() if t.name == "pgnotify-listener"]


# -- prefetch


@pytest.mark.parametrize("prefetch", [1, 3, 10])
def test_no_more_than_the_prefetch_limit_is_in_the_consumers_hands(
    connection: Connection,
    inbox: Any,
    send: Send,
    queue: str,
    prefetch: int,
    drain_all: Any,
    rows: Rows,
) -> None:
    send(*range(12))
    got = inbox(connection, queue, prefetch=prefetch)
    drain_all(connection)
    assert got.bodies == list(range(prefetch))
    # What nobody may have yet is not leased ahead either.
    assert rows() == (12, prefetch, 0)
    got.messages[0].ack()
    drain_all(connection)
    assert got.bodies == list(range(prefetch + 1))


def test_the_limit_counts_for_the_channel_with_all_its_consumers(
    connection: Connection, inbox: Any, send: Send, drain_all: Any
) -> None:
    send(*range(5), to="one")
    send(*range(5), to="two")
    got = inbox(connection, "one", "two", prefetch=4)
    drain_all(connection)
    assert len(got.messages) == 4


def test_channels_have_limits_of_their_own(
    connection: Connection, inbox: Any, send: Send, drain_all: Any
) -> None:
    send(*range(5), to="one")
    send(*range(5), to="two")
    narrow = inbox(connection.channel(), "one", prefetch=1)
    wide = inbox(connection.channel(), "two", prefetch=0)
    drain_all(connection)
    assert (narrow.bodies, wide.bodies) == ([0], [0, 1, 2, 3, 4])


def test_a_limit_of_zero_is_none(
    connection: Connection, inbox: Any, send: Send, queue: str, drain: Any
) -> None:
    count = 230  # more than two claims bring
    send(*range(count))
    got = inbox(connection, queue, prefetch=0)
    drain(connection, lambda: len(got.messages) == count)
    assert got.bodies == list(range(count))


def test_without_acknowledgement_the_limit_does_not_count(
    connection: Connection, inbox: Any, send: Send, queue: str, drain: Any, wait_rows: Any
) -> None:
    send(*range(5))
    got = inbox(connection, queue, no_ack=True, prefetch=1)
    drain(connection, lambda: len(got.messages) == 5)
    wait_rows(0, 0)


def test_a_raised_limit_counts_at_once(
    connection: Connection, inbox: Any, send: Send, queue: str, drain_all: Any
) -> None:
    send(*range(6))
    got = inbox(connection, queue, prefetch=1)
    drain_all(connection)
    got.consumer.qos(prefetch_count=4)
    drain_all(connection)
    assert got.bodies == [0, 1, 2, 3]


def test_a_limit_lowered_below_what_is_outstanding_only_stops_fetching(
    connection: Connection, inbox: Any, send: Send, queue: str, drain_all: Any
) -> None:
    send(*range(8))
    got = inbox(connection, queue, prefetch=4)
    drain_all(connection)
    got.consumer.qos(prefetch_count=2)
    for message in got.messages[:2]:
        message.ack()
    drain_all(connection)
    assert got.bodies == [0, 1, 2, 3]
    got.messages[2].ack()
    drain_all(connection)
    assert got.bodies == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("settle", ["ack", "reject", "requeue"])
def test_credit_given_back_by_another_thread_wakes_a_waiting_drain(
    connect: Connect, inbox: Any, send: Send, queue: str, settle: str
) -> None:
    send("first", "second")
    consumer = connect(polling_interval=3600)
    got = inbox(consumer, queue, prefetch=1)
    consumer.drain_events(timeout=20)
    consumption = consumer.transport.consumption

    def settle_when_it_waits() -> None:
        wait_until(lambda: consumption._blocked)
        getattr(got.messages[0], settle)()

    thread = threading.Thread(target=settle_when_it_waits)
    thread.start()
    consumer.drain_events(timeout=20)
    thread.join()
    assert got.bodies == ["first", "first" if settle == "requeue" else "second"]


def test_acks_of_many_threads_never_leave_the_drain_asleep(
    connect: Connect, inbox: Any, send: Send, queue: str, drain: Any, wait_rows: Any
) -> None:
    count = 300
    send(*range(count))
    consumer = connect(polling_interval=3600)
    threads: list[threading.Thread] = []

    def ack_elsewhere(message: Message) -> None:
        thread = threading.Thread(target=message.ack)
        threads.append(thread)
        thread.start()

    got = inbox(consumer, queue, prefetch=2, on_message=ack_elsewhere)
    drain(consumer, lambda: len(got.messages) == count)
    for thread in threads:
        thread.join()
    wait_rows(0, 0)
    assert sorted(got.bodies) == list(range(count))


# -- several consumers


def test_two_consumers_of_one_queue_on_two_channels_share_its_messages(
    connection: Connection, inbox: Any, send: Send, queue: str, drain: Any
) -> None:
    boxes = [inbox(connection.channel(), queue, prefetch=1, on_message=ack) for _ in range(2)]
    send(*range(20))
    drain(connection, lambda: sum(len(box.messages) for box in boxes) == 20)
    assert sorted(boxes[0].bodies + boxes[1].bodies) == list(range(20))
    assert all(len(box.messages) >= 5 for box in boxes)


@pytest.mark.parametrize("cancelled", [0, 1])
def test_cancelling_one_of_two_consumers_leaves_the_other(
    connection: Connection, inbox: Any, send: Send, queue: str, drain: Any, cancelled: int
) -> None:
    boxes = [inbox(connection.channel(), queue, on_message=ack) for _ in range(2)]
    boxes[cancelled].cancel()
    send(*range(10))
    drain(connection, lambda: len(boxes[1 - cancelled].messages) == 10)
    assert boxes[cancelled].messages == []


def test_a_consumer_that_takes_no_more_leaves_everything_to_the_other(
    connection: Connection, inbox: Any, send: Send, queue: str, drain: Any
) -> None:
    full = inbox(connection.channel(), queue, prefetch=1)
    other = inbox(connection.channel(), queue, prefetch=1, on_message=ack)
    send(*range(10))
    drain(connection, lambda: len(other.messages) == 9)
    assert len(full.messages) == 1


def test_queues_take_turns(connect: Connect, inbox: Any, send: Send, drain: Any) -> None:
    connection = connect(max_batch=5)
    names = ["long", "short", "other"]
    send(*range(200), to="long")
    send(*range(5), to="short")
    send(*range(5), to="other")
    order: list[str] = []
    inbox(
        connection,
        *names,
        on_message=lambda message: (
            order.append(message.delivery_info["routing_key"]),
            ack(message),
        ),
    )
    drain(connection, lambda: len(order) == 210)
    # Each gets a batch before any gets its third.
    assert set(order[:15]) == set(names)


def test_orphan_consumers_are_tolerated(
    connection: Connection, inbox: Any, send: Send, queue: str, drain: Any
) -> None:
    # A timeout that leaves a `with consumer:` does not cancel it (kombu takes it for a lost
    # connection), so consumers of one queue pile up on a channel.
    channel = connection.default_channel
    for _ in range(3):
        with pytest.raises(TimeoutError), connection.Consumer(Queue(queue), channel=channel):
            connection.drain_events(timeout=0.01)
    got = [inbox(channel, queue, on_message=ack)]
    send(*range(10))
    for _ in range(10):
        connection.drain_events(timeout=10)
    assert got[0].messages


# -- inside callbacks


def test_a_callback_may_cancel_its_consumer_and_the_rest_is_given_back(
    connection: Connection, inbox: Any, send: Send, queue: str, drain_all: Any, wait_rows: Any
) -> None:
    send(*range(5))

    def cancel(message: Message) -> None:
        message.ack()
        got.cancel()

    got = inbox(connection, queue, on_message=cancel)
    connection.drain_events(timeout=5)
    drain_all(connection)
    assert got.bodies == [0]
    wait_rows(4, 0)
    again = inbox(connection, queue)
    drain_all(connection)
    assert again.bodies == [1, 2, 3, 4]
    # They were never started.
    assert not any(m.delivery_info.get("redelivered") for m in again.messages)


def test_a_callback_may_start_another_consumer(
    connection: Connection, inbox: Any, send: Send, queue: str, drain: Any
) -> None:
    send("first")
    send("second", to="other")
    more: list[Any] = []
    inbox(connection, queue, on_message=lambda _: more.append(inbox(connection, "other")))
    drain(connection, lambda: more and more[0].messages)
    assert more[0].bodies == ["second"]


@pytest.mark.parametrize("no_ack", [False, True])
def test_a_callback_may_close_its_channel(
    connection: Connection,
    inbox: Any,
    send: Send,
    queue: str,
    drain_all: Any,
    wait_rows: Any,
    no_ack: bool,
) -> None:
    send(*range(5))
    got = inbox(connection.channel(), queue, no_ack=no_ack, on_message=lambda m: m.channel.close())
    connection.drain_events(timeout=5)
    assert got.bodies == [0]
    wait_rows(4 if no_ack else 5, 0)
    # What remote control does: a new channel and consumer, from within the callback's turn.
    again = inbox(connection.channel(), queue, no_ack=no_ack)
    drain_all(connection)
    assert again.bodies == list(range(1 if no_ack else 0, 5))


def test_a_callback_may_close_the_connection(
    connection: Connection, inbox: Any, send: Send, queue: str, wait_rows: Any
) -> None:
    send(*range(3))
    got = inbox(connection, queue, on_message=lambda _: connection.close())
    connection.drain_events(timeout=5)
    assert got.bodies == [0]
    wait_rows(3, 0)


class Oops(Exception):
    """A callback's own error."""


@pytest.mark.parametrize("error", [Oops, SystemExit, KeyboardInterrupt])
def test_a_callback_that_raises_leaves_the_rest_deliverable(
    connection: Connection,
    inbox: Any,
    send: Send,
    queue: str,
    drain_all: Any,
    error: type[BaseException],
) -> None:
    send(*range(4))

    def fail(message: Message) -> None:
        if message.payload == 1:
            raise error("on purpose")

    got = inbox(connection, queue, on_message=fail)
    connection.drain_events(timeout=5)
    with pytest.raises(error):
        connection.drain_events(timeout=5)
    drain_all(connection)
    assert got.bodies == [0, 1, 2, 3]


# -- a signal handler cancels, anywhere

OUR_MODULE = consumption_module.__file__


def cancel_at_line(number: int, cancel: Callable[[], None]) -> Callable[..., Any]:
    """Return a trace function that calls `cancel` before the line run as `number`-th.

    Python runs signal handlers between two instructions of the main thread, so this is what
    a signal does, at a chosen moment.
    """
    left = [number]

    def on_line(frame: FrameType, event: str, arg: object) -> Any:
        if event == "line" and frame.f_code.co_filename == OUR_MODULE:
            left[0] -= 1
            if left[0] == 0:
                cancel()
        return on_line

    def on_call(frame: FrameType, event: str, arg: object) -> Any:
        return on_line if frame.f_code.co_filename == OUR_MODULE else None

    on_call.left = left  # type: ignore[attr-defined]
    return on_call


@pytest.mark.parametrize("consumers", [1, 2])
def test_a_cancel_from_a_signal_handler_is_harmless_wherever_it_strikes(
    connection: Connection,
    inbox: Any,
    send: Send,
    sql: Sql,
    queue: str,
    wait_rows: Any,
    consumers: int,
) -> None:
    send(*range(3))
    number, reached = 0, True
    while reached:
        number += 1
        boxes = [inbox(connection.channel(), queue, prefetch=1) for _ in range(consumers)]
        extra = inbox(connection.channel(), "other")
        consumption = connection.transport.consumption
        # Something to absorb for each queue, one of which goes away meanwhile.
        for watch in list(consumption._watches.values()):
            consumption.notified(watch.channel, "published")
        tracer = cancel_at_line(number, boxes[0].cancel)
        before = sys.gettrace()
        sys.settrace(tracer)
        try:
            connection.drain_events(timeout=0)
            connection.drain_events(timeout=0)
        except TimeoutError:
            pass
        finally:
            sys.settrace(before)
        reached = tracer.left[0] <= 0  # type: ignore[attr-defined]
        if reached and boxes[0].messages:
            # Delivered before the signal, or by the line it interrupted; never after.
            assert len(boxes[0].messages) == 1
        held = consumption._consumers._of.get(queue, [])
        assert all(consumer.active for consumer in held), f"cancelled at line {number}, and back"
        for box in [*boxes, extra]:
            box.channel.close()
    wait_rows(3, 0)
    assert number > 30


# -- settling


def test_ack_deletes_the_message(
    connection: Connection, inbox: Any, send: Send, queue: str, rows: Rows
) -> None:
    send("once")
    got = inbox(connection, queue)
    connection.drain_events(timeout=5)
    assert rows() == (1, 1, 0)
    got.messages[0].ack()
    assert rows() == (0, 0, 0)


def test_ack_multiple_settles_everything_up_to_the_message(
    connection: Connection, inbox: Any, send: Send, queue: str, drain_all: Any, sql: Sql
) -> None:
    send(*range(5))
    got = inbox(connection, queue)
    drain_all(connection)
    got.messages[2].ack(multiple=True)
    left = sql("SELECT convert_from(payload, 'UTF8') FROM pgnotify.tasks ORDER BY task_id")
    assert left == [("3",), ("4",)]


def test_ack_multiple_of_one_channel_does_not_touch_the_others(
    connection: Connection, inbox: Any, send: Send, drain_all: Any, rows: Rows
) -> None:
    send(1, 2, to="one")
    send(1, 2, to="two")
    boxes = [inbox(connection.channel(), name) for name in ("one", "two")]
    drain_all(connection)
    boxes[0].messages[-1].ack(multiple=True)
    assert rows() == (2, 2, 0)


def test_a_tag_that_is_settled_or_unknown_is_no_error(
    connection: Connection, inbox: Any, send: Send, queue: str, rows: Rows
) -> None:
    send(1, 2)
    got = inbox(connection, queue, prefetch=1)
    connection.drain_events(timeout=5)
    channel, tag = got.channel, got.messages[0].delivery_tag
    for _ in range(2):
        channel.basic_ack(tag)
        channel.basic_reject(tag, requeue=True)
    channel.basic_ack("no such tag")
    channel.basic_ack("999999.1", multiple=True)
    channel.basic_reject("nonsense")
    assert rows() == (1, 0, 0)


def test_reject_with_requeue_keeps_the_place_and_says_redelivered(
    connection: Connection, inbox: Any, send: Send, queue: str, drain_all: Any
) -> None:
    send(*range(3))
    got = inbox(connection, queue, prefetch=1)
    connection.drain_events(timeout=5)
    got.messages[0].reject(requeue=True)
    drain_all(connection)
    assert got.bodies == [0, 0]
    flags = [message.delivery_info.get("redelivered") for message in got.messages]
    assert flags == [None, True]
    # Two deliveries, two tags: a late ack of the first cannot settle the second.
    assert got.messages[0].delivery_tag != got.messages[1].delivery_tag


def test_the_tag_of_an_earlier_delivery_settles_nothing(
    connection: Connection, inbox: Any, send: Send, queue: str, drain_all: Any, rows: Rows
) -> None:
    send("twice")
    got = inbox(connection, queue, prefetch=1)
    connection.drain_events(timeout=5)
    got.messages[0].requeue()
    drain_all(connection)
    assert len(got.messages) == 2
    got.channel.basic_ack(got.messages[0].delivery_tag)
    assert rows() == (1, 1, 0)
    got.channel.basic_ack(got.messages[1].delivery_tag)
    assert rows() == (0, 0, 0)


def test_reject_without_requeue_makes_a_dead_letter(
    connection: Connection, inbox: Any, send: Send, queue: str, sql: Sql, rows: Rows
) -> None:
    send({"body": "kept"}, headers={"my": "header"}, priority=7)
    got = inbox(connection, queue)
    connection.drain_events(timeout=5)
    got.messages[0].reject()
    assert rows() == (0, 0, 1)
    dead = sql("SELECT task_name, priority, attempts, reason, payload FROM pgnotify.dead_letters")
    assert dead == [(queue, 7, 1, "rejected", b'{"body": "kept"}')]
    assert '"my"' in sql("SELECT envelope FROM pgnotify.dead_letters")[0][0]


def test_recover_gives_back_what_the_channel_has_not_acknowledged(
    connection: Connection, inbox: Any, send: Send, queue: str, drain_all: Any
) -> None:
    send(*range(4))
    got = inbox(connection, queue, prefetch=4)
    drain_all(connection)
    got.messages[1].ack()
    got.consumer.recover(requeue=True)
    drain_all(connection)
    assert got.bodies == [0, 1, 2, 3, 0, 2, 3]
    assert all(message.delivery_info["redelivered"] for message in got.messages[4:])


def test_no_ack_deletes_at_delivery(
    connection: Connection, inbox: Any, send: Send, queue: str, rows: Rows
) -> None:
    send("gone")
    got = inbox(connection, queue, no_ack=True)
    connection.drain_events(timeout=5)
    assert got.bodies == ["gone"]
    assert rows() == (0, 0, 0)


def test_closing_releases_what_is_unacknowledged_without_counting_an_attempt(
    connect: Connect, inbox: Any, send: Send, queue: str, drain_all: Any, wait_rows: Any
) -> None:
    send(*range(3))
    first = connect()
    got = inbox(first, queue, prefetch=2)
    drain_all(first)
    first.close()
    wait_rows(3, 0)
    second = connect()
    again = inbox(second, queue)
    drain_all(second)
    assert again.bodies == [0, 1, 2]
    assert not any("redelivered" in message.delivery_info for message in again.messages)
    assert got.bodies == [0, 1]


def test_a_message_whose_lease_expired_comes_again_as_redelivered(
    connect: Connect, inbox: Any, send: Send, sql: Sql, queue: str
) -> None:
    send("taken over")
    dead, alive = connect(), connect(polling_interval=3600, application_name="kombu_pgnotify two")
    first = inbox(dead, queue)
    dead.drain_events(timeout=5)
    # The other one waits when the lease ends, and nobody announces that.
    sql("UPDATE pgnotify.tasks SET lease_expiration = now() + interval '1 s'")
    second = inbox(alive, queue)
    alive.drain_events(timeout=20)
    assert second.bodies == ["taken over"]
    assert second.messages[0].delivery_info["redelivered"] is True
    # The former holder's ack settles nothing any more.
    first.messages[0].ack()
    assert sql("SELECT deliveries FROM pgnotify.tasks") == [(2,)]


@pytest.mark.parametrize("verb", ["ack", "reject", "requeue"])
def test_settling_after_the_channel_is_closed_never_raises(
    connection: Connection, inbox: Any, send: Send, queue: str, verb: str, rows: Rows
) -> None:
    send("late")
    got = inbox(connection.channel(), queue)
    connection.drain_events(timeout=5)
    got.channel.close()
    assert rows() == (1, 0, 0)
    getattr(got.messages[0], verb)()
    # It was released by the orderly end: too late, and harmless.
    assert rows() == (1, 0, 0)


# -- higher verbs


def test_basic_get(connection: Connection, send: Send, queue: str, rows: Rows) -> None:
    channel = connection.default_channel
    assert channel.basic_get(queue) is None
    send("one", "two")
    message = channel.basic_get(queue)
    assert message.payload == "one"
    assert rows() == (2, 1, 0)
    message.ack()
    assert channel.basic_get(queue, no_ack=True).payload == "two"
    assert rows() == (0, 0, 0)
    assert channel.basic_get(queue) is None


def test_basic_get_does_not_ask_for_credit(
    connection: Connection, inbox: Any, send: Send, queue: str
) -> None:
    send(*range(3))
    inbox(connection, queue, prefetch=1)
    connection.drain_events(timeout=5)
    assert connection.default_channel.basic_get(queue).payload == 1


@pytest.mark.parametrize("kind", [SimpleQueue, SimpleBuffer])
def test_simple_queues(connection: Connection, kind: type[SimpleQueue], queue: str) -> None:
    with kind(connection, queue) as simple:
        simple.put({"n": 1})
        simple.put({"n": 2})
        assert simple.qsize() == 2
        message = simple.get(timeout=10)
        assert message.payload == {"n": 1}
        if not simple.no_ack:
            message.ack()
        assert simple.get(timeout=10).payload == {"n": 2}
        with pytest.raises(simple.Empty):
            simple.get(timeout=0.05)
        with pytest.raises(simple.Empty):
            simple.get_nowait()
        simple.put(3)
        assert simple.clear() == 1


class Mixed(ConsumerMixin):
    """A consumer as applications write it."""

    def __init__(self, connection: Connection, queue: str, count: int) -> None:
        self.connection = connection
        self.queue, self.count = queue, count
        self.bodies: list[Any] = []
        self.lost = 0

    def get_consumers(self, consumer: Any, channel: Any) -> list[Any]:
        return [consumer([Queue(self.queue)], callbacks=[self.on_task], accept=["json"])]

    def on_task(self, body: Any, message: Message) -> None:
        self.bodies.append(body)
        message.ack()
        self.should_stop = len(self.bodies) == self.count

    def on_connection_error(self, exc: Exception, interval: float) -> None:
        self.lost += 1


def test_consumer_mixin(connection: Connection, send: Send, queue: str, wait_rows: Any) -> None:
    send(*range(20))
    mixed = Mixed(connection, queue, 20)
    mixed.run()
    assert mixed.bodies == list(range(20))
    wait_rows(0, 0)


def test_consumer_mixin_consumes_again_after_the_connection_was_cut(
    connect: Connect, proxy: Any, database_name: str, send: Send, queue: str, wait_rows: Any
) -> None:
    send(0)
    url = proxy.url(database_name, scheme="pgnotify")
    # Short: the server may carry out a claim whose answer the cut takes away.
    mixed = Mixed(connect(url, visibility_timeout=2), queue, 2)
    thread = threading.Thread(target=mixed.run)
    thread.start()
    wait_until(lambda: mixed.bodies == [0])
    proxy.cut()
    send(1)
    thread.join(60)
    assert not thread.is_alive()
    assert mixed.bodies == [0, 1]
    wait_rows(0, 0)


# -- the queues' verbs


def test_declaring_counts_what_a_consumer_could_have(
    connection: Connection, send: Send, queue: str
) -> None:
    channel = connection.default_channel
    assert channel.queue_declare(queue) == (queue, 0, 0)
    send(1, 2, 3)
    send(4, headers={"task": "t", "eta": in_time(3600)})
    assert channel.queue_declare(queue, passive=True).message_count == 4
    channel.basic_get(queue)
    assert channel.queue_declare(queue, passive=True).message_count == 3


def test_a_plain_declaration_stops_counting_and_a_passive_one_does_not(
    connection: Connection, send: Send, sql: Sql, queue: str
) -> None:
    send("template")
    sql(
        "INSERT INTO pgnotify.tasks (task_name, envelope, payload)"
        " SELECT task_name, envelope, payload FROM pgnotify.tasks, generate_series(2, 1500)"
    )
    channel = connection.default_channel
    assert channel.queue_declare(queue).message_count == 1000
    assert channel.queue_declare(queue, passive=True).message_count == 1500


def test_a_queue_without_a_name_gets_one(connection: Connection) -> None:
    names = {connection.default_channel.queue_declare("").queue for _ in range(2)}
    assert len(names) == 2
    assert all(name.startswith("amq.gen-") for name in names)


def test_purge_and_delete_spare_what_somebody_holds_and_other_queues(
    connection: Connection, inbox: Any, send: Send, queue: str, rows: Rows
) -> None:
    send(*range(4))
    send("other", to="other")
    channel = connection.default_channel
    held = channel.basic_get(queue)
    assert channel.queue_purge(queue) == 3
    assert rows() == (2, 1, 0)
    send(5, 6)
    assert channel.queue_delete(queue, if_empty=True) == 0
    assert channel.queue_delete(queue) == 2
    held.ack()
    assert rows() == (1, 0, 0)
    assert channel.queue_purge(queue) == 0


def test_binding_to_an_exchange_that_is_not_declared_is_a_channel_error(
    connection: Connection, queue: str
) -> None:
    with pytest.raises(ChannelError):
        connection.default_channel.queue_bind(queue, "no such exchange", "key")


@pytest.mark.parametrize("name", ["Ünï", "with space", 'quo"te', "q" * 300, "a/b.c#*", "😀"])
def test_a_queue_may_have_any_name(connect: Connect, inbox: Any, send: Send, name: str) -> None:
    consumer = connect(polling_interval=3600)
    got = inbox(consumer, name)
    with pytest.raises(TimeoutError):
        consumer.drain_events(timeout=0.05)
    send("there", to=name)
    consumer.drain_events(timeout=20)
    assert got.bodies == ["there"]


def test_a_queue_name_that_cannot_be_stored_is_a_channel_error(send: Send) -> None:
    with pytest.raises(StatementFailed) as caught:
        send("x", to="nul\0")
    from kombu_pgnotify.transport import Transport

    assert isinstance(caught.value, Transport.channel_errors)
    with pytest.raises(StatementFailed):
        send("x", to="\ud800")


# -- order, time and attempts


def test_all_priorities_from_255_down_to_0(
    connection: Connection, inbox: Any, send: Send, queue: str, drain: Any
) -> None:
    priorities = [*range(0, 256, 5), 255, 1, 254]
    for priority in priorities:
        send(priority, priority=priority)
    got = inbox(connection, queue)
    drain(connection, lambda: len(got.messages) == len(priorities))
    assert got.bodies == sorted(priorities, reverse=True)


@pytest.mark.parametrize(("given", "kept"), [(-5, 0), (999, 255), (None, 0), ("high", 0)])
def test_a_priority_out_of_range_is_moved_into_it(
    send: Send, sql: Sql, given: Any, kept: int
) -> None:
    send("x", priority=given)
    assert sql("SELECT priority FROM pgnotify.tasks") == [(kept,)]


def test_a_task_with_an_eta_is_held_and_comes_when_it_is_due(
    connect: Connect, inbox: Any, send: Send, sql: Sql, queue: str, drain_all: Any
) -> None:
    consumer = connect(polling_interval=3600)
    got = inbox(consumer, queue, prefetch=1)
    eta = in_time(1)
    send("later", headers={"task": "t", "eta": eta})
    send("now")
    consumer.drain_events(timeout=20)
    got.messages[0].ack()
    consumer.drain_events(timeout=20)
    assert got.bodies == ["now", "later"]
    assert sql("SELECT now() >= %s::timestamptz", eta) == [(True,)]


@pytest.mark.parametrize("offset", ["+00:00", "Z", "+05:30", "-12:00"])
def test_an_eta_may_carry_any_offset(send: Send, sql: Sql, offset: str) -> None:
    send("x", headers={"task": "t", "eta": f"2101-01-01T12:00:00{offset}"})
    expected = offset.replace("Z", "+00:00")
    query = "SELECT available_at = %s::timestamptz FROM pgnotify.tasks"
    assert sql(query, f"2101-01-01 12:00:00{expected}") == [(True,)]


@pytest.mark.parametrize("eta", ["9999-12-31T23:59:59.999999+00:00", "9999-12-31T23:59:59-12:00"])
def test_an_eta_at_the_end_of_time_is_held_and_disturbs_nobody(
    connection: Connection, inbox: Any, send: Send, queue: str, rows: Rows, eta: str
) -> None:
    send("never", headers={"task": "t", "eta": eta})
    got = inbox(connection, queue)
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.1)
    send("now")
    connection.drain_events(timeout=20)
    assert got.bodies == ["now"]
    assert rows() == (2, 1, 0)


@pytest.mark.parametrize(
    "eta",
    [
        "tomorrow", "2026-13-99T00:00:00+00:00", "", 5, 1e400, [1], {"a": 1}, True,
        # No offset: whose time is it?
        "2101-01-01T12:00:00",
        "0001-01-01T00:00:00+14:00",
        # Python reads this offset, PostgreSQL does not.
        "2001-01-01T12:00:00+00:00:00.500000",
    ],
    ids=repr,
)  # fmt: skip
def test_an_eta_that_is_none_or_past_is_for_the_worker_to_judge(
    connection: Connection, inbox: Any, send: Send, queue: str, eta: Any
) -> None:
    send("at once", headers={"task": "t", "eta": eta})
    got = inbox(connection, queue)
    connection.drain_events(timeout=5)
    assert got.bodies == ["at once"]


@pytest.mark.parametrize(
    ("options", "headers"),
    [({"eta_in_broker": False}, {"task": "t"}), ({}, {}), ({}, {"kind": "no task"})],
)
def test_an_eta_is_not_held_when_switched_off_or_not_of_a_task(
    connect: Connect, inbox: Any, queue: str, options: dict[str, Any], headers: dict[str, Any]
) -> None:
    connection = connect(**options)
    producer = connection.Producer()
    producer.publish("x", routing_key=queue, headers={**headers, "eta": in_time(3600)})
    got = inbox(connection, queue)
    connection.drain_events(timeout=5)
    assert got.bodies == ["x"]


def test_a_message_delivered_too_often_becomes_a_dead_letter(
    connect: Connect, inbox: Any, send: Send, sql: Sql, queue: str, wait_rows: Any, drain: Any
) -> None:
    connection = connect(max_attempts=2)
    poison = inbox(connection, queue, prefetch=1, on_message=lambda m: m.requeue())
    send("poison")
    send("behind it", priority=0)
    drain(connection, lambda: poison.bodies.count("poison") == 2)
    drain(connection, lambda: poison.bodies.count("behind it") == 2)
    with pytest.raises(TimeoutError):
        connection.drain_events(timeout=0.2)
    wait_rows(0, 0, 2)
    assert {reason for (reason,) in sql("SELECT reason FROM pgnotify.dead_letters")} == {
        "attempts used up"
    }
    assert len(poison.messages) == 4


def test_a_release_is_no_attempt(connect: Connect, inbox: Any, send: Send, queue: str) -> None:
    send("patient")
    for _ in range(4):
        connection = connect(max_attempts=2)
        got = inbox(connection, queue)
        connection.drain_events(timeout=5)
        assert got.bodies == ["patient"]
        connection.close()


# -- rows that are no messages

GOOD = '{"headers": {}, "properties": {}, "content-type": "application/json"}'

UNREADABLE = {
    "no JSON": "not json",
    "empty": "",
    "null": "null",
    "a list": "[]",
    "a number": "5",
    "no properties": "{}",
    "properties are a list": '{"properties": [1]}',
    "properties are null": '{"properties": null}',
    "headers are a list": '{"properties": {}, "headers": [1]}',
    "headers are a text": '{"properties": {}, "headers": "x"}',
    "delivery_info is null": '{"properties": {"delivery_info": null}}',
    "delivery_info is a list": '{"properties": {"delivery_info": [1]}}',
    "unknown body_encoding": '{"properties": {"body_encoding": "rot13"}}',
    "no base64": '{"properties": {"body_encoding": "base64"}}',
    "body_encoding is a number": '{"properties": {"body_encoding": 5}}',
    "nested too deep": '{"properties": {}, "x": ' + "[" * 100_000 + "]" * 100_000 + "}",
    "no date": '{"properties": {"x": {"__type__": "datetime", "__value__": "x"}}}',
    "no decimal": '{"properties": {"x": {"__type__": "decimal", "__value__": "x"}}}',
    "no such type": '{"properties": {"x": {"__type__": "wat", "__value__": "x"}}}',
}


@pytest.mark.parametrize("envelope", UNREADABLE.values(), ids=UNREADABLE.keys())
def test_a_row_that_is_no_message_becomes_a_dead_letter_and_the_consumer_lives(
    connection: Connection,
    inbox: Any,
    sql: Sql,
    queue: str,
    wait_rows: Any,
    drain: Any,
    envelope: str,
) -> None:
    insert = "INSERT INTO pgnotify.tasks (task_name, envelope, payload) VALUES (%s, %s, %s)"
    sql(insert, queue, envelope, b"A")
    sql(insert, queue, GOOD, b'"good"')
    got = inbox(connection, queue)
    drain(connection, lambda: got.messages)
    assert got.bodies == ["good"]
    wait_rows(1, 1, 1)
    assert sql("SELECT reason, payload FROM pgnotify.dead_letters") == [("unreadable", b"A")]


def test_a_text_body_that_is_no_utf8_becomes_a_dead_letter(
    connection: Connection, inbox: Any, sql: Sql, queue: str, wait_rows: Any
) -> None:
    envelope = '{"properties": {"body_encoding": "utf-8"}}'
    insert = "INSERT INTO pgnotify.tasks (task_name, envelope, payload) VALUES (%s, %s, %s)"
    sql(insert, queue, envelope, b"\xff\xfe")
    inbox(connection, queue)
    connection.drain_events(timeout=5)
    wait_rows(0, 0, 1)


@pytest.mark.parametrize("no_ack", [False, True])
def test_getting_a_row_that_is_no_message_gives_nothing(
    connection: Connection, sql: Sql, queue: str, wait_rows: Any, no_ack: bool
) -> None:
    insert = "INSERT INTO pgnotify.tasks (task_name, envelope, payload) VALUES (%s, %s, %s)"
    sql(insert, queue, "not json", b"A")
    assert connection.default_channel.basic_get(queue, no_ack=no_ack) is None
    wait_rows(0, 0, 0 if no_ack else 1)


# -- bodies

BODIES = {
    "text": "hello",
    "empty text": "",
    "none": None,
    "number": 1.5,
    "nested": {"a": [1, {"b": None}], "ü": "ß"},
    "nul": "a\0b",
    "lone surrogate": "\ud800 and \udfff",
    "emoji": "😀👩‍👩‍👧",
    "backslashes": "\\ \\u0000 \"'",
    "large": "x" * 5_000_000,
}


@pytest.mark.parametrize("compression", [None, "zlib"])
@pytest.mark.parametrize("serializer", ["json", "pickle", "msgpack"])
def test_every_kind_of_body_arrives_as_it_was_sent(
    connection: Connection,
    inbox: Any,
    send: Send,
    queue: str,
    drain: Any,
    serializer: str,
    compression: str | None,
) -> None:
    bodies = dict(BODIES)
    if serializer == "msgpack":
        # It writes UTF-8, which cannot hold one.
        del bodies["lone surrogate"]
    send(*bodies.values(), serializer=serializer, compression=compression)
    got = inbox(connection, queue)
    drain(connection, lambda: len(got.messages) == len(bodies))
    assert dict(zip(bodies, got.bodies, strict=True)) == bodies


@pytest.mark.parametrize("encoding", [None, "base64"])
@pytest.mark.parametrize(
    "body", [b"", b"\0\xff\xfe", os.urandom(1000), pickle.dumps({1: 2}), b"\0" * 100_000]
)
def test_bytes_arrive_byte_for_byte(
    connect: Connect, inbox: Any, queue: str, body: bytes, encoding: str | None
) -> None:
    connection = connect(**({"body_encoding": encoding} if encoding else {}))
    connection.Producer().publish(
        body, routing_key=queue, content_type="application/data", content_encoding="binary"
    )
    got = inbox(connection, queue)
    connection.drain_events(timeout=5)
    assert bytes(got.messages[0].payload or b"") == body


def test_without_an_encoding_the_table_holds_the_body_itself(send: Send, sql: Sql) -> None:
    send({"readable": "ü"})
    assert sql("SELECT payload FROM pgnotify.tasks") == [(b'{"readable": "\\u00fc"}',)]


@pytest.mark.parametrize(("writer", "reader"), [("base64", None), (None, "base64")])
def test_body_encoding_is_the_writers_choice_and_any_reader_understands_it(
    connect: Connect, inbox: Any, sql: Sql, queue: str, writer: str | None, reader: str | None
) -> None:
    publisher, consumer = (
        connect(**({"body_encoding": encoding} if encoding else {}))
        for encoding in (writer, reader)
    )
    publisher.Producer().publish({"n": "\0ü"}, routing_key=queue, serializer="json")
    stored = sql("SELECT payload FROM pgnotify.tasks")[0][0]
    assert stored.startswith(b"{") is (writer is None)
    got = inbox(consumer, queue)
    consumer.drain_events(timeout=5)
    assert got.bodies == [{"n": "\0ü"}]


def test_headers_and_properties_arrive_as_they_were_sent(
    connection: Connection, inbox: Any, send: Send, queue: str
) -> None:
    headers = {"nul": "a\0b", "lone": "\ud800", "😀": [1, None, {"x": 1.5}], "bytes": b"\0\xff"}
    headers["when"] = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone.utc)
    # What is not persistent goes nowhere if nobody has declared the queue.
    connection.default_channel.queue_declare(queue)
    send(
        "x",
        headers=headers,
        correlation_id="cid",
        reply_to="answers",
        expiration=60,
        priority=3,
        delivery_mode=1,
    )
    got = inbox(connection, queue)
    connection.drain_events(timeout=5)
    message = got.messages[0]
    assert message.headers == headers
    properties = message.properties
    assert properties["correlation_id"] == "cid"
    assert properties["reply_to"] == "answers"
    assert properties["expiration"] == "60000"
    assert properties["priority"] == 3
    assert properties["delivery_mode"] == 1
    assert message.delivery_info == {"exchange": "", "routing_key": queue}
    # Celery pickles the properties to its pool with every task.
    assert pickle.loads(pickle.dumps(properties)) == properties

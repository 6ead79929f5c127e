"""Acks in a loop of drain_events: together where more is waiting, and never for long."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from helpers import wait_until
from kombu import Connection, Message

from kombu_pgnotify import consumption as consumption_module

Connect = Callable[..., Connection]
Send = Callable[..., None]
Rows = Callable[[], tuple[int, int, int]]
Drain = Callable[[Connection, Callable[[], Any]], None]


@pytest.fixture
def ran(statements: list[tuple[str, ...]]) -> Callable[[str], int]:
    """A function that says how often this process has run a statement."""
    return lambda name: sum(calls.count(name) for calls in statements)


@pytest.fixture
def no_backstop(connection: Connection, monkeypatch: pytest.MonkeyPatch) -> None:
    """The keeper's thread does not settle what the loop leaves."""
    keeper = connection.transport.broker.keeper
    monkeypatch.setattr(keeper, "settle_soon", lambda: None)
    monkeypatch.setattr(keeper, "_settle_overdue", lambda: None)


def test_acks_travel_together_with_claims(
    connection: Connection,
    inbox: Any,
    send: Send,
    drain: Drain,
    ran: Callable[[str], int],
    queue: str,
    wait_rows: Any,
) -> None:
    send(*range(30))
    got = inbox(connection, queue, prefetch=10, on_message=Message.ack)
    drain(connection, lambda: len(got.messages) == 30)
    assert got.bodies == list(range(30))
    wait_rows(0, 0)
    # Each claim is for five at least, and takes along what was acknowledged before; and the last.
    assert ran("claim") <= 7
    assert ran("acknowledge") <= 8


def test_an_ack_does_not_wait_for_the_loop_to_come_back(
    connection: Connection, inbox: Any, send: Send, queue: str, wait_rows: Any
) -> None:
    send(*range(3))
    inbox(connection, queue, prefetch=10, on_message=Message.ack)
    connection.drain_events(timeout=20)
    wait_rows(2, 2)


def test_an_ack_does_not_wait_for_the_next_message(
    connection: Connection, inbox: Any, send: Send, drain: Drain, queue: str, wait_rows: Any
) -> None:
    send(*range(3))

    def work(message: Message) -> None:
        if message.payload == 1:
            wait_rows(2, 2)
        message.ack()

    got = inbox(connection, queue, prefetch=10, on_message=work)
    drain(connection, lambda: len(got.messages) == 3)
    wait_rows(0, 0)


def test_an_ack_by_another_thread_goes_at_once(
    connection: Connection, inbox: Any, send: Send, queue: str, rows: Rows, no_backstop: None
) -> None:
    send(*range(3))

    def work(message: Message) -> None:
        thread = threading.Thread(target=message.ack)
        thread.start()
        thread.join()

    inbox(connection, queue, prefetch=10, on_message=work)
    connection.drain_events(timeout=20)
    assert rows()[0] == 2


def test_an_ack_between_two_drains_goes_at_once_and_takes_others_along(
    connection: Connection, inbox: Any, send: Send, queue: str, rows: Rows, no_backstop: None
) -> None:
    send(*range(4))
    got = inbox(connection, queue, prefetch=10, on_message=lambda m: m.ack() if m.payload else None)
    connection.drain_events(timeout=20)
    connection.drain_events(timeout=20)
    assert rows()[0] == 4
    got.messages[0].ack()
    assert rows()[0] == 2


@pytest.mark.parametrize("verb", ["reject", "requeue"])
def test_rejects_and_requeues_keep_their_order_with_acks(
    connection: Connection, inbox: Any, send: Send, drain: Drain, queue: str, rows: Rows, verb: str
) -> None:
    send(*range(6))

    def work(message: Message) -> None:
        odd = message.payload % 2 and not message.delivery_info.get("redelivered")
        getattr(message, verb if odd else "ack")()

    got = inbox(connection, queue, prefetch=10, on_message=work)
    drain(connection, lambda: len(got.messages) == (6 if verb == "reject" else 9))
    wait_until(lambda: rows() == (0, 0, 3 if verb == "reject" else 0))


def test_closing_tells_what_was_left_before_it_returns(
    connect: Connect,
    inbox: Any,
    send: Send,
    queue: str,
    rows: Rows,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send(*range(4))
    connection = connect()
    keeper = connection.transport.broker.keeper
    for name in ("settle_soon", "hurry", "_settle_overdue"):
        monkeypatch.setattr(keeper, name, lambda: None)
    inbox(connection, queue, prefetch=10, on_message=Message.ack)
    connection.drain_events(timeout=20)
    assert rows() == (4, 4, 0)
    connection.close()
    # One acknowledged; three that were claimed and never delivered are given back.
    assert rows() == (3, 0, 0)


def test_a_callback_may_close_its_connection_and_then_acknowledge(
    connect: Connect, inbox: Any, send: Send, queue: str, wait_rows: Any
) -> None:
    send(*range(3))
    connection = connect()

    def work(message: Message) -> None:
        connection.close()
        message.ack()

    inbox(connection, queue, prefetch=10, on_message=work)
    connection.drain_events(timeout=20)
    # Closing has given all three back.
    wait_rows(3, 0)


def test_an_outage_is_met_at_the_usual_pace(
    proxied: Connect,
    proxy: Any,
    inbox: Any,
    send: Send,
    queue: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    send(*range(3))
    connection = proxied()
    inbox(connection, queue, prefetch=10, on_message=Message.ack)
    keeper = connection.transport.broker.keeper
    tried: list[bool] = []
    flush = keeper.flush

    def trying() -> None:
        tried.append(keeper._impatient)
        flush()

    monkeypatch.setattr(keeper, "flush", trying)
    proxy.refuse()
    connection.drain_events(timeout=20)
    proxy.cut()
    wait_until(lambda: len(tried) >= 3)
    assert not any(tried[2:])


def test_a_full_consumer_that_is_told_to_stop_does_not_spin(
    connection: Connection, inbox: Any, send: Send, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(*range(3))
    inbox(connection, queue, prefetch=1)
    connection.drain_events(timeout=20)
    consumption = connection.transport.consumption
    assert not consumption.deliver_one(one_by_one=True)
    monkeypatch.setattr(consumption_module, "is_stopping", lambda: True)
    assert not consumption.deliver_one(one_by_one=True)
    assert consumption.next_look() >= 0.01


def test_an_interrupted_claim_is_neither_lost_nor_kept(
    connection: Connection,
    inbox: Any,
    send: Send,
    drain: Drain,
    queue: str,
    wait_rows: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By gevent.Timeout, say, or the handler of an alarm."""
    send(*range(20))
    got = inbox(connection, queue, prefetch=4, on_message=Message.ack)
    drain(connection, lambda: len(got.messages) == 3)
    keeper = connection.transport.broker.keeper

    def interrupted(_claim: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(keeper._claims, "discard", interrupted)
        with pytest.raises(KeyboardInterrupt):
            drain(connection, lambda: len(got.messages) == 20)
    drain(connection, lambda: len(got.messages) == 20)
    assert sorted(got.bodies) == list(range(20))
    wait_rows(0, 0)
    wait_until(lambda: not keeper._claims)

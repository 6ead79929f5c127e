"""A server that is away for a moment: consumers bear it, and keep what they have."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from fix_proxy import Proxy
from helpers import wait_until
from kombu import Connection

from kombu_pgnotify.errors import DatabaseUnavailable

Connect = Callable[..., Connection]

TERMINATE = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
    " AND application_name LIKE 'kombu_pgnotify%'"
)


def drain_some(connection: Connection, count: int) -> None:
    """Give the consumer that many turns."""
    for _ in range(count):
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.05)


def test_what_was_prefetched_is_delivered_once_and_its_lease_kept(
    proxied: Connect, proxy: Proxy, inbox: Any, send: Any, drain: Any, queue: str, wait_rows: Any
) -> None:
    send(*range(6))
    connection = proxied()
    box = inbox(connection, queue, prefetch=4)
    drain(connection, lambda: len(box.messages) == 4)
    proxy.refuse()
    proxy.cut()
    drain_some(connection, 10)
    assert box.bodies == [0, 1, 2, 3]
    proxy.accept()
    for message in list(box.messages):
        message.ack()
    drain(connection, lambda: len(box.messages) == 6)
    for message in box.messages[4:]:
        message.ack()
    wait_rows(0, 0)
    assert box.bodies == list(range(6))


def test_what_was_claimed_before_is_delivered_during_the_outage(
    proxied: Connect, proxy: Proxy, inbox: Any, send: Any, queue: str, wait_rows: Any
) -> None:
    send(*range(3))
    connection = proxied()
    box = inbox(connection, queue, prefetch=10)
    connection.drain_events(timeout=10)
    proxy.refuse()
    proxy.cut()
    connection.drain_events(timeout=10)
    connection.drain_events(timeout=10)
    assert box.bodies == [0, 1, 2]
    proxy.accept()
    for message in box.messages:
        message.ack()
    wait_rows(0, 0)


def test_after_the_tolerance_the_connection_counts_as_lost(
    proxied: Connect, proxy: Proxy, inbox: Any, send: Any, drain: Any, queue: str
) -> None:
    connection = proxied(outage_tolerance=0.5, polling_interval=0.05)
    inbox(connection, queue)
    drain_some(connection, 1)
    proxy.refuse()
    proxy.cut()
    with pytest.raises(DatabaseUnavailable):
        drain(connection, lambda: False)
    proxy.accept()
    # As kombu does it.
    connection.collect(1)
    box = inbox(connection, queue)
    send("later")
    drain(connection, lambda: box.bodies == ["later"])


def test_without_tolerance_a_loss_is_told_at_once(
    connect: Connect, inbox: Any, drain: Any, queue: str, sql: Any
) -> None:
    connection = connect(outage_tolerance=0)
    inbox(connection, queue)
    drain_some(connection, 1)
    sql("DROP SCHEMA pgnotify CASCADE")
    with pytest.raises(DatabaseUnavailable, match="incomplete or gone"):
        drain(connection, lambda: False)


def test_a_schema_that_was_dropped_is_made_again(
    connect: Connect, inbox: Any, drain: Any, queue: str, sql: Any, send: Any
) -> None:
    connection = connect(polling_interval=0.05)
    box = inbox(connection, queue)
    drain_some(connection, 1)
    sql("DROP SCHEMA pgnotify CASCADE")
    drain_some(connection, 10)
    wait_until(lambda: sql("SELECT to_regclass('pgnotify.tasks') IS NOT NULL") == [(True,)])
    send("again")
    drain(connection, lambda: box.bodies == ["again"])


def test_an_error_of_the_consumer_itself_is_its_own(
    connect: Connect, inbox: Any, send: Any, drain: Any, queue: str
) -> None:
    def fail(_: Any) -> None:
        raise DatabaseUnavailable("of another database")

    send("x")
    connection = connect()
    inbox(connection, queue, on_message=fail)
    with pytest.raises(DatabaseUnavailable, match="of another database"):
        drain(connection, lambda: False)


@pytest.mark.parametrize("notify", [True, False])
def test_it_consumes_again_after_each_loss(
    connect: Connect, inbox: Any, send: Any, drain: Any, queue: str, sql: Any, notify: bool
) -> None:
    connection = connect(notify=notify, polling_interval=0.1)
    box = inbox(connection, queue, no_ack=True)
    for n in range(3):
        sql(TERMINATE)
        # Its connection is lost too.
        send(n, retry=True)
        drain(connection, lambda: len(box.messages) == n + 1)  # noqa: B023
    assert box.bodies == [0, 1, 2]


def test_a_server_that_answers_but_refuses_to_serve_is_not_asked_without_end(
    connect: Connect,
    inbox: Any,
    drain: Any,
    queue: str,
    statements: list[tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = connect(outage_tolerance=1)
    store = connection.transport.broker.store

    def refuse(*_: Any, **__: Any) -> Any:
        raise DatabaseUnavailable("a right is missing")

    monkeypatch.setattr(store, "start_with_acks", refuse)
    inbox(connection, queue)
    with pytest.raises(DatabaseUnavailable):
        drain(connection, lambda: False)
    # Ever more rarely: 0.05, 0.1, 0.2 ... seconds apart.
    assert statements.count(("ping",)) <= 6


@pytest.mark.parametrize("end", ["back", "closed", "given up"])
def test_nobody_is_taken_for_interrupted_for_ever(
    proxied: Connect, proxy: Proxy, inbox: Any, drain: Any, queue: str, end: str
) -> None:
    """A worker sends no events meanwhile."""
    connection = proxied(outage_tolerance=0.3 if end == "given up" else 60, polling_interval=0.05)
    broker = connection.transport.broker
    inbox(connection, queue)
    drain_some(connection, 1)
    proxy.refuse()
    proxy.cut()
    if end == "given up":
        with pytest.raises(DatabaseUnavailable):
            drain(connection, lambda: False)
    else:
        drain_some(connection, 5)
        assert broker.interrupted
        if end == "closed":
            connection.collect(1)
    proxy.accept()
    if end == "back":
        wait_until(lambda: drain_some(connection, 1) or not broker.interrupted)
    assert not broker.interrupted

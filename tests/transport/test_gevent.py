"""Under gevent: waiting blocks one greenlet, never the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("gevent")

RunScript = Callable[..., str]

PROLOGUE = """
    from gevent import monkey
    monkey.patch_all()
    import sys
    import gevent
    import psycopg, kombu_pgnotify
    from kombu import Connection, Consumer, Queue

    url = sys.argv[1]
    options = {"polling_interval": 3600, "visibility_timeout": 0.6}
    connection = Connection(url, transport_options=options)
    connection.connect()
    publisher = Connection(url, transport_options=options)
    publisher.connect()

    def publish(*bodies):
        for body in bodies:
            publisher.Producer().publish(body, routing_key="q", serializer="json")

    def sql(text):
        with psycopg.connect(url.replace("pgnotify", "postgresql", 1)) as other:
            return other.execute(text).fetchall()

    def wait(condition):
        with gevent.Timeout(20):
            while not condition():
                gevent.sleep(0.01)

    got = []

    def consume(count, prefetch=0, work=lambda message: None):
        def receive(message):
            got.append(message)
            work(message)

        channel = connection.channel()
        Consumer(
            channel, [Queue("q")], accept=["json"], prefetch_count=prefetch, on_message=receive
        ).consume()
        while len(got) < count:
            connection.drain_events(timeout=30)
"""


def test_a_drain_lets_other_greenlets_run(database: str, run_script: RunScript) -> None:
    run_script(
        PROLOGUE
        + """
    turns = 0

    def others():
        global turns
        while True:
            turns += 1
            gevent.sleep(0.001)

    gevent.spawn(others)
    draining = gevent.spawn(consume, 1)
    # It waits for a message, and nobody has published one yet.
    wait(lambda: turns > 100)
    assert not draining.ready()
    publish("x")
    draining.get(timeout=20)
    assert [message.payload for message in got] == ["x"]
    """
    )


def test_acks_of_greenlets_give_credit_to_a_waiting_drain(
    database: str, run_script: RunScript, rows: Any
) -> None:
    run_script(
        PROLOGUE
        + """
    publish(*range(50))

    def ack(message):
        gevent.sleep(0.001)
        message.ack()

    pending = []
    consume(50, prefetch=3, work=lambda message: pending.append(gevent.spawn(ack, message)))
    gevent.joinall(pending, timeout=20, raise_error=True)
    assert all(greenlet.ready() for greenlet in pending)
    assert sorted(message.payload for message in got) == list(range(50))
    """
    )
    assert rows() == (0, 0, 0)


def test_leases_are_renewed_while_greenlets_work_and_while_all_wait(
    database: str, run_script: RunScript
) -> None:
    run_script(
        PROLOGUE
        + """
    publish("long")
    consume(1)
    draining = gevent.spawn(consume, 2)
    LEASE = "SELECT lease_expiration FROM pgnotify.tasks"
    for _ in range(3):
        before = sql(LEASE)
        wait(lambda: sql(LEASE) > before)
    assert sql("SELECT deliveries FROM pgnotify.tasks") == [(1,)]
    got[0].ack()
    publish("next")
    draining.get(timeout=20)
    """
    )


def test_many_greenlets_publish_at_once(database: str, run_script: RunScript, rows: Any) -> None:
    run_script(
        PROLOGUE
        + """
    def send(n):
        with Connection(url, transport_options=options) as mine:
            mine.Producer().publish(n, routing_key="q", serializer="json")

    greenlets = [gevent.spawn(send, n) for n in range(40)]
    gevent.joinall(greenlets, timeout=30, raise_error=True)
    """
    )
    assert rows() == (40, 0, 0)

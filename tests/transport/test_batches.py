"""Publishing in batches: what is flushed together is written together, or not at all."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Exchange, Producer, Queue
from kombu.exceptions import ChannelError
from kombu.transport.virtual.base import UndeliverableWarning

if not hasattr(Producer, "batch"):
    pytest.skip("this kombu has no batches", allow_module_level=True)

from kombu.exceptions import BatchPublishError

Connect = Callable[..., Connection]
Rows = Callable[[], tuple[int, int, int]]
Sql = Callable[..., list[tuple[Any, ...]]]


@pytest.fixture
def producer(connection: Connection) -> Producer:
    return connection.Producer(serializer="json", auto_declare=False)


def contents(producer: Producer, name: str) -> list[Any]:
    """Take all that a queue has."""
    found = []
    while (message := producer.channel.basic_get(name, no_ack=True)) is not None:
        found.append(message.payload)
    return found


def test_the_transport_says_that_it_can(producer: Producer) -> None:
    assert producer.supports_batch_publish


def test_a_batch_is_written_when_it_ends_in_order_and_in_one_go(
    producer: Producer, rows: Rows, queue: str, statements: list[tuple[str, ...]]
) -> None:
    with producer.batch():
        for n in range(500):
            producer.publish(n, routing_key=queue)
        assert rows() == (0, 0, 0)
        statements.clear()
    assert [calls for calls in statements if calls] == [("publish_many",)]
    assert contents(producer, queue) == list(range(500))


def test_a_full_batch_is_written_and_so_is_what_is_flushed(
    producer: Producer, rows: Rows, queue: str
) -> None:
    with producer.batch(max_size=10) as batch:
        for n in range(25):
            producer.publish(n, routing_key=queue)
        assert rows() == (20, 0, 0)
        batch.flush()
        assert rows() == (25, 0, 0)
        batch.flush()
        producer.publish(25, routing_key=queue)
    assert contents(producer, queue) == list(range(26))


def test_an_exception_discards_what_was_not_flushed(producer: Producer, queue: str) -> None:
    with pytest.raises(ZeroDivisionError), producer.batch() as batch:
        producer.publish("flushed", routing_key=queue)
        batch.flush()
        producer.publish("discarded", routing_key=queue)
        raise ZeroDivisionError
    producer.publish("afterwards", routing_key=queue)
    assert contents(producer, queue) == ["flushed", "afterwards"]


def test_a_batch_in_a_batch_is_part_of_it(producer: Producer, rows: Rows, queue: str) -> None:
    with producer.batch():
        producer.publish(1, routing_key=queue)
        with producer.batch():
            producer.publish(2, routing_key=queue)
        assert rows() == (0, 0, 0)
        producer.publish(3, routing_key=queue)
    assert contents(producer, queue) == [1, 2, 3]


def test_an_exception_in_the_inner_batch_ends_the_outer_one(
    producer: Producer, rows: Rows, queue: str
) -> None:
    with pytest.raises(RuntimeError, match="aborted"), producer.batch():
        producer.publish(1, routing_key=queue)
        with pytest.raises(ZeroDivisionError), producer.batch():
            raise ZeroDivisionError
        producer.publish(2, routing_key=queue)
    assert rows() == (0, 0, 0)


def test_messages_for_exchanges_and_queues_mix_and_keep_their_order(producer: Producer) -> None:
    channel = producer.channel
    for kind, key in (("direct", "key"), ("topic", "#"), ("fanout", "")):
        exchange = Exchange(kind, type=kind)
        Queue("box", exchange, key)(channel).declare()
    Queue("other", Exchange("fanout", type="fanout"))(channel).declare()
    with producer.batch():
        for n in range(30):
            exchange = ("", "direct", "topic", "fanout", "")[n % 5]
            key = {"": "box", "direct": "key"}.get(exchange, "a.b")
            producer.publish(n, exchange=exchange, routing_key=key)
        producer.publish("dropped", exchange="direct", routing_key="no such key")
    assert contents(producer, "box") == list(range(30))
    assert contents(producer, "other") == list(range(3, 30, 5))


def test_queue_arguments_count_in_batches_too(producer: Producer, sql: Sql) -> None:
    Queue("box", max_length=3, max_priority=5, message_ttl=60)(producer.channel).declare()
    with producer.batch():
        for n in range(10):
            producer.publish(n, routing_key="box", priority=9)
    assert contents(producer, "box") == [7, 8, 9]
    with producer.batch():
        producer.publish("x", routing_key="box", priority=9)
        producer.publish("y", routing_key="box", expiration=1)
    found = sql(
        "SELECT priority, extract(epoch FROM expires_at - published_at)::int FROM pgnotify.tasks"
        " ORDER BY task_id"
    )
    assert found == [(5, 60), (0, 1)]


def test_a_batch_wakes_consumers_of_queues_and_exchanges(
    connect: Connect, producer: Producer, drain: Any
) -> None:
    consumer, got = connect(polling_interval=3600), []
    for name in ("direct", "routed"):
        queue = Queue(name, Exchange("news", type="fanout") if name == "routed" else "", name)
        consumer.Consumer(queue, callbacks=[lambda body, m: got.append(body)]).consume()
    with pytest.raises(TimeoutError):
        consumer.drain_events(timeout=0.1)
    with producer.batch():
        producer.publish(1, routing_key="direct")
        producer.publish(2, exchange="news")
    drain(consumer, lambda: len(got) == 2)
    assert sorted(got) == [1, 2]


def test_a_flush_that_fails_writes_nothing_and_spoils_the_batch(
    producer: Producer, rows: Rows, queue: str
) -> None:
    with pytest.raises(BatchPublishError), producer.batch() as batch:
        producer.publish("good", routing_key=queue)
        # No such name can be stored.
        producer.publish("bad", routing_key="nul\0")
        with pytest.raises(BatchPublishError):
            batch.flush()
        producer.publish("too late", routing_key=queue)
    assert rows() == (0, 0, 0)
    producer.publish("afterwards", routing_key=queue)
    assert contents(producer, queue) == ["afterwards"]


def test_a_flush_without_a_server_is_an_error_that_nobody_retries_silently(
    connect: Connect, proxy: Any, database_name: str, rows: Rows, connection: Connection, queue: str
) -> None:
    away = connect(proxy.url(database_name, scheme="pgnotify"), statement_timeout=1)
    producer = away.Producer(serializer="json")
    with pytest.raises(BatchPublishError), producer.batch():
        producer.publish("x", routing_key=queue)
        proxy.refuse()
        proxy.cut()
    proxy.accept()
    assert rows() == (0, 0, 0)


def test_a_message_that_nobody_gets_is_reported_as_without_a_batch(
    connect: Connect, producer: Producer, rows: Rows
) -> None:
    Exchange("news")(producer.channel).declare()
    with pytest.raises(ChannelError, match="NO_ROUTE"), producer.batch():
        producer.publish("x", exchange="news", routing_key="key")
    catching = connect(deadletter_queue="lost").Producer(serializer="json")
    with pytest.warns(UndeliverableWarning), catching.batch():
        catching.publish("x", exchange="news", routing_key="key")
    assert contents(producer, "lost") == ["x"]


def test_an_empty_batch_asks_the_server_nothing(producer: Producer, statements: list[Any]) -> None:
    assert producer.channel
    statements.clear()
    with producer.batch() as batch:
        batch.flush()
    assert statements == []


def test_threads_have_batches_of_their_own(connection: Connection, rows: Rows, queue: str) -> None:
    producer = connection.Producer(serializer="json")

    def publish() -> None:
        producer.publish("at once", routing_key=queue)

    with producer.batch():
        producer.publish("later", routing_key=queue)
        thread = threading.Thread(target=publish)
        thread.start()
        thread.join()
        assert rows() == (1, 0, 0)
    assert contents(producer, queue) == ["at once", "later"]


def test_what_cannot_be_serialized_is_refused_at_once(
    producer: Producer, rows: Rows, queue: str
) -> None:
    with producer.batch():
        producer.publish("good", routing_key=queue)
        with pytest.raises(TypeError):
            producer.publish("bad", routing_key=queue, correlation_id=object())
    assert contents(producer, queue) == ["good"]

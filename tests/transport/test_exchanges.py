"""Exchanges, bindings and the queues behind them, shared by all processes."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from kombu import Connection, Consumer, Exchange, Message, Queue
from kombu.common import Broadcast
from kombu.exceptions import ChannelError
from kombu.simple import SimpleBuffer, SimpleQueue
from kombu.transport.virtual.base import UndeliverableWarning

Connect = Callable[..., Connection]
Rows = Callable[[], tuple[int, int, int]]
Drain = Callable[[Connection, Callable[[], Any]], None]
RunScript = Callable[..., str]

TYPES = ["direct", "topic", "fanout"]

#: AMQP's delivery modes.
TRANSIENT, PERSISTENT = 1, 2


def contents(connection: Connection, name: str) -> list[Any]:
    """Take all that a queue has."""
    found = []
    while (message := connection.default_channel.basic_get(name, no_ack=True)) is not None:
        found.append(message.payload)
    return found


@pytest.fixture
def declare(connection: Connection) -> Callable[..., Exchange]:
    """A function that declares an exchange and queues bound to it by `(queue, routing key)`."""

    def run(kind: str, *bindings: tuple[str, str], name: str = "news", **given: Any) -> Exchange:
        exchange = Exchange(name, type=kind, **given)
        exchange(connection.default_channel).declare()
        for queue, key in bindings:
            Queue(queue, exchange, key)(connection.default_channel).declare()
        return exchange

    return run


@pytest.fixture
def publish(connect: Connect) -> Callable[..., None]:
    """A function that publishes on a connection of its own, which declares nothing."""
    connections: list[Connection] = []

    def run(*bodies: Any, to: str = "news", key: str = "", **options: Any) -> None:
        if not connections:
            connections.append(connect())
        producer = connections[0].Producer(serializer="json", auto_declare=False)
        for body in bodies:
            producer.publish(body, exchange=to, routing_key=key, **options)

    return run


# -- who gets what


def test_a_fanout_keeps_each_message_for_each_queue_until_somebody_consumes_it(
    connect: Connect, declare: Any, publish: Any, drain: Drain, rows: Rows
) -> None:
    exchange = declare("fanout", ("one", ""), ("two", "ignored"), ("three", ""))
    publish(*range(5), key="whatever")
    assert rows() == (15, 0, 0)
    consumer, got = connect(), []
    for name in ("one", "two", "three"):

        def receive(body: Any, message: Message, name: str = name) -> None:
            got.append((name, body, message.delivery_info["exchange"]))
            message.ack()

        queue = Queue(name, exchange)
        Consumer(consumer.channel(), [queue], callbacks=[receive]).consume()
    drain(consumer, lambda: len(got) == 15)
    assert sorted(got) == sorted(
        (name, n, "news") for name in ("one", "two", "three") for n in range(5)
    )
    assert rows() == (0, 0, 0)


def test_a_direct_exchange_goes_by_equal_routing_keys(
    connection: Connection, declare: Any, publish: Any
) -> None:
    declare("direct", ("one", "key"), ("two", "key"), ("other", "Key"), ("wild", "#"))
    publish("x", key="key")
    names = ("one", "two", "other", "wild")
    assert [contents(connection, name) for name in names] == [["x"], ["x"], [], []]


@pytest.mark.parametrize(
    ("binding", "matching", "others"),
    [
        ("#", ["", "a", "a.b.c", ".", "ü.😀"], []),
        ("*", ["a", "a+b"], ["", "a.b", "."]),
        ("a.*", ["a.b", "a."], ["a", "a.b.c", "b.a", "xa.b"]),
        ("a.#", ["a", "a.b", "a.b.c"], ["b", "ab", "b.a"]),
        ("#.z", ["z", "y.z", "x.y.z"], ["z.y", "yz"]),
        ("a.#.z", ["a.z", "a.b.z", "a.b.c.z"], ["a", "a.b", "az"]),
        ("*.#", ["a", "a.b"], [""]),
        ("worker.*", ["worker.heartbeat"], ["worker", "task.sent", "worker.a.b"]),
        ("a[b].(c)?+", ["a[b].(c)?+"], ["ab.c", "a[b].(c)"]),
        (r"a\d.{2}$^|", [r"a\d.{2}$^|"], ["a1.aa"]),
        ("A", ["A"], ["a"]),
        ("", [""], ["a"]),
    ],
)
def test_a_topic_exchange_goes_by_words(
    connection: Connection,
    declare: Any,
    publish: Any,
    binding: str,
    matching: list[str],
    others: list[str],
) -> None:
    declare("topic", ("box", binding))
    for key in [*others, *matching]:
        publish(key, key=key)
    assert contents(connection, "box") == matching


def test_a_queue_that_is_bound_twice_gets_a_message_once(
    connection: Connection, declare: Any, publish: Any
) -> None:
    declare("topic", ("box", "#"), ("box", "a.*"), ("box", "a.b"))
    declare("fanout", ("box", "x"), ("box", "y"), name="calls")
    publish("by topic", key="a.b")
    publish("by fanout", to="calls")
    assert contents(connection, "box") == ["by topic", "by fanout"]


def test_a_process_that_only_publishes_reaches_exchanges_declared_elsewhere(
    connection: Connection, declare: Any, run_script: RunScript
) -> None:
    for kind in TYPES:
        declare(kind, (f"by {kind}", "a.b"), name=kind)
    run_script(
        """
        import sys
        import kombu_pgnotify
        from kombu import Connection

        with Connection(sys.argv[1]) as connection:
            producer = connection.Producer(serializer="json")
            for name in ("direct", "topic", "fanout"):
                producer.publish(name, exchange=name, routing_key="a.b")
        """
    )
    assert [contents(connection, f"by {kind}") for kind in TYPES] == [[kind] for kind in TYPES]


def test_each_broadcast_queue_gets_each_message(
    connect: Connect, publish: Any, drain: Drain
) -> None:
    consumers, got = [connect() for _ in range(3)], [[], [], []]  # type: ignore[var-annotated]
    for consumer, box in zip(consumers, got, strict=True):
        Consumer(
            consumer, [Broadcast("news")], callbacks=[lambda body, m, box=box: box.append(body)]
        ).consume()
    publish("x", "y")
    for consumer, box in zip(consumers, got, strict=True):
        drain(consumer, lambda box=box: len(box) == 2)  # type: ignore[misc]
    assert got == [["x", "y"]] * 3


# -- nobody gets it


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("durable", [True, False])
@pytest.mark.parametrize("mode", [TRANSIENT, PERSISTENT])
def test_only_a_persistent_message_to_an_unbound_durable_direct_exchange_is_refused(
    declare: Any, publish: Any, rows: Rows, kind: str, durable: bool, mode: int
) -> None:
    declare(kind, durable=durable)
    if (kind, durable, mode) == ("direct", True, PERSISTENT):
        with pytest.raises(ChannelError, match="NO_ROUTE") as caught:
            publish("x", key="key", delivery_mode=mode)
        assert caught.value.reply_code == "312"
    else:
        publish("x", key="key", delivery_mode=mode)
    assert rows() == (0, 0, 0)


def test_a_direct_exchange_with_bindings_drops_what_no_queue_wants(
    declare: Any, publish: Any, rows: Rows
) -> None:
    declare("direct", ("box", "key"))
    publish("x", key="other key")
    assert rows() == (0, 0, 0)


def test_an_exchange_that_nobody_has_declared_drops_everything(publish: Any, rows: Rows) -> None:
    publish("x", to="no such exchange", key="key")
    assert rows() == (0, 0, 0)


@pytest.mark.parametrize("kind", TYPES)
def test_the_deadletter_queue_catches_what_no_queue_wants(
    connect: Connect, kind: str, declare: Any
) -> None:
    declare(kind)
    connection = connect(deadletter_queue="lost")
    with pytest.warns(UndeliverableWarning, match="'news'.*'key'"):
        connection.Producer().publish("x", exchange="news", routing_key="key")
    assert contents(connection, "lost") == ["x"]


# -- declarations


def test_declaring_passively_what_is_not_there_is_an_error(connection: Connection) -> None:
    channel = connection.default_channel
    with pytest.raises(ChannelError, match="NOT_FOUND") as caught:
        channel.queue_declare("missing", passive=True)
    assert caught.value.reply_code == "404"
    with pytest.raises(ChannelError, match="NOT_FOUND") as caught:
        channel.exchange_declare("missing", passive=True)
    assert caught.value.reply_code == "404"


def test_declaring_passively_sees_what_another_connection_has_declared(
    connect: Connect, declare: Any
) -> None:
    declare("topic", ("box", "#"))
    channel = connect().default_channel
    channel.exchange_declare("news", "topic", passive=True)
    assert channel.queue_declare("box", passive=True) == ("box", 0, 0)


@pytest.mark.parametrize(("queue", "exchange"), [("box", "missing"), ("missing", "news")])
def test_binding_what_is_not_there_is_an_error(
    connection: Connection, declare: Any, queue: str, exchange: str
) -> None:
    declare("topic", ("box", "key"))
    with pytest.raises(ChannelError, match=r"NOT_FOUND.*'missing'") as caught:
        connection.default_channel.queue_bind(queue, exchange, "key")
    assert caught.value.reply_code == "404"


def test_a_headers_exchange_is_refused_by_name(connection: Connection) -> None:
    exchange = Exchange("news", type="headers")
    with pytest.raises(ChannelError, match="'headers'"):
        exchange(connection.default_channel).declare()


def test_the_last_declaration_of_an_exchange_counts_and_is_reported(
    connection: Connection, declare: Any, publish: Any, caplog: pytest.LogCaptureFixture
) -> None:
    declare("direct", ("box", "key"))
    with caplog.at_level(logging.WARNING):
        declare("fanout")
    assert "exchange.redeclared exchange='news' type=fanout was direct" in caplog.text
    publish("x", key="another")
    assert contents(connection, "box") == ["x"]


@pytest.mark.parametrize("kind", TYPES)
def test_predeclared_exchanges_need_no_declaration(
    connection: Connection, publish: Any, kind: str
) -> None:
    channel = connection.default_channel
    channel.queue_declare("box")
    channel.queue_bind("box", f"amq.{kind}", "key")
    publish("x", to=f"amq.{kind}", key="key")
    assert contents(connection, "box") == ["x"]


def test_bindings_of_all_processes_are_listed(connect: Connect, declare: Any) -> None:
    declare("topic", ("one", "a.*"), ("two", "#"))
    declare("fanout", ("one", ""), name="calls")
    connection = connect()
    expected = [("one", "calls", ""), ("two", "news", "#"), ("one", "news", "a.*")]
    assert connection.default_channel.list_bindings() == expected
    listed = [tuple(binding.values()) for binding in connection.manager.get_bindings()]
    assert listed == [(queue, exchange, key) for queue, exchange, key in expected]
    assert connection.default_channel.get_table("calls") == [("", None, "one")]
    assert {"news", "calls", "amq.direct"} <= set(connection.default_channel.get_exchanges())


def test_an_unbound_queue_gets_nothing_more(
    connection: Connection, declare: Any, publish: Any
) -> None:
    declare("topic", ("box", "a"), ("box", "b"))
    connection.default_channel.queue_unbind("box", "news", "a")
    connection.default_channel.queue_unbind("box", "news", "never bound")
    publish("x", key="a")
    publish("y", key="b")
    assert contents(connection, "box") == ["y"]


def test_deleting_an_exchange_spares_its_queues(
    connection: Connection, declare: Any, publish: Any
) -> None:
    declare("fanout", ("box", ""))
    publish("before")
    channel = connection.default_channel
    channel.exchange_delete("news", if_unused=True)
    publish("still there")
    channel.exchange_delete("news")
    publish("gone")
    assert channel.list_bindings() == []
    assert contents(connection, "box") == ["before", "still there"]


def test_deleting_a_queue_takes_its_bindings_along_and_counts(
    connection: Connection, declare: Any, publish: Any, rows: Rows
) -> None:
    declare("fanout", ("box", ""), ("other", ""))
    publish(*range(3))
    channel = connection.default_channel
    assert channel.queue_delete("box", if_empty=True) == 0
    assert channel.queue_delete("box") == 3
    assert channel.list_bindings() == [("other", "news", "")]
    publish("x")
    assert rows() == (4, 0, 0)
    with pytest.raises(ChannelError):
        channel.queue_declare("box", passive=True)


def test_purging_spares_what_somebody_holds(
    connection: Connection, declare: Any, publish: Any, rows: Rows
) -> None:
    declare("fanout", ("box", ""))
    publish(*range(4))
    held = connection.default_channel.basic_get("box")
    assert connection.default_channel.queue_purge("box") == 3
    assert rows() == (1, 1, 0)
    held.ack()
    assert rows() == (0, 0, 0)


# -- kombu's own queues


def test_a_simple_queue_is_shared_between_connections(connect: Connect) -> None:
    with SimpleQueue(connect(), "box") as writer, SimpleQueue(connect(), "box") as reader:
        assert reader.qsize() == 0
        writer.put({"a": 1})
        writer.put({"a": 2})
        assert (len(reader), writer.qsize()) == (2, 2)
        message = reader.get(timeout=20)
        assert message.payload == {"a": 1}
        # Somebody holds it: it is not to be had.
        assert writer.qsize() <= 1
        message.ack()
        reader.get(timeout=20).ack()
        with pytest.raises(reader.Empty):
            reader.get(timeout=0.05)
        writer.put("x")
        assert reader.clear() == 1


def test_a_simple_buffer_is_gone_once_it_is_closed(connection: Connection, rows: Rows) -> None:
    with SimpleBuffer(connection, "box") as box:
        box.put("x")
        box.put("y")
        assert box.qsize() == 2
        assert box.get(timeout=20).payload == "x"
        assert box.get_nowait().payload == "y"
        with pytest.raises(box.Empty):
            box.get_nowait()


# -- properties


def test_a_property_that_nobody_can_write_down_is_dropped_and_the_others_stay(
    connection: Connection, declare: Any, publish: Any
) -> None:
    declare("fanout", ("box", ""))
    publish("x", stranger=object(), friend=[1], correlation_id="id", headers={"a": 1})
    message = connection.default_channel.basic_get("box", no_ack=True)
    assert "stranger" not in message.properties
    assert message.properties["friend"] == [1]
    assert message.properties["correlation_id"] == "id"
    assert message.headers == {"a": 1}
    # AMQP's own are not dropped silently.
    with pytest.raises(TypeError):
        publish("x", correlation_id=object())

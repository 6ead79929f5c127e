"""Applications that share a schema, each with a prefix of its own, do not see each other."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from helpers import wait_until
from kombu import Connection, Exchange, Message, Queue
from kombu.exceptions import ChannelError
from kombu.simple import SimpleQueue

Connect = Callable[..., Connection]
Sql = Callable[..., list[tuple[Any, ...]]]
Drain = Callable[[Connection, Callable[[], Any]], None]


@pytest.fixture(params=[("one.", "two."), ("", "two."), ("a", "ab")], ids=repr)
def pair(request: pytest.FixtureRequest, connect: Connect) -> list[Connection]:
    """Connections of two applications."""
    return [connect(queue_name_prefix=prefix) for prefix in request.param]


def contents(connection: Connection, name: str) -> list[Any]:
    """Take all that a queue has."""
    found = []
    while (message := connection.default_channel.basic_get(name, no_ack=True)) is not None:
        found.append(message.payload)
    return found


def test_queues_of_the_same_name_are_two(pair: list[Connection], inbox: Any, drain: Drain) -> None:
    for n, connection in enumerate(pair):
        connection.default_channel.queue_declare("box")
        connection.Producer().publish(n, routing_key="box")
    for n, connection in enumerate(pair):
        declared = connection.default_channel.queue_declare("box", passive=True)
        assert declared == ("box", 1, 0)
        got = inbox(connection, "box", on_message=lambda m: m.ack())
        drain(connection, lambda: got.messages)  # noqa: B023
        assert got.bodies == [n]
        assert got.messages[0].delivery_info["routing_key"] == "box"
    for connection in pair:
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.05)


def test_purging_and_deleting_concern_only_the_own(pair: list[Connection]) -> None:
    for connection in pair:
        connection.default_channel.queue_declare("box")
        connection.Producer().publish("x", routing_key="box")
    assert pair[0].default_channel.queue_purge("box") == 1
    assert pair[0].default_channel.queue_delete("box") == 0
    assert contents(pair[1], "box") == ["x"]
    assert pair[1].default_channel.queue_declare("box", passive=True).queue == "box"


def test_a_queue_of_the_other_is_not_there(connect: Connect) -> None:
    one, two = connect(queue_name_prefix="one."), connect(queue_name_prefix="two.")
    Queue("box", Exchange("news", type="fanout"))(one.default_channel).declare()
    channel = two.default_channel
    with pytest.raises(ChannelError):
        channel.queue_declare("box", passive=True)
    with pytest.raises(ChannelError):
        channel.exchange_declare("news", passive=True)
    with pytest.raises(ChannelError):
        channel.queue_bind("box", "news")
    assert channel.list_bindings() == []
    assert "news" not in channel.get_exchanges()


@pytest.mark.parametrize("kind", ["direct", "topic", "fanout"])
@pytest.mark.parametrize("name", ["news", "amq."])
def test_exchanges_of_the_same_name_are_two(pair: list[Connection], kind: str, name: str) -> None:
    name = name if name == "news" else f"amq.{kind}"
    for n, connection in enumerate(pair):
        channel = connection.default_channel
        if name == "news":
            channel.exchange_declare(name, kind, durable=True)
        channel.queue_declare(f"box-{n}")
        channel.queue_bind(f"box-{n}", name, "key")
    for n, connection in enumerate(pair):
        connection.Producer().publish(n, exchange=name, routing_key="key")
    for n, connection in enumerate(pair):
        assert contents(connection, f"box-{n}") == [n]
    assert pair[1].default_channel.list_bindings() == [("box-1", name, "key")]


def test_live_queues_hear_their_own_application(
    pair: list[Connection], drain: Drain, sql: Sql
) -> None:
    got: list[list[Any]] = [[], []]
    for connection, box in zip(pair, got, strict=True):
        queue = Queue(
            "ears", Exchange("calls", "fanout", durable=False), exclusive=True, auto_delete=True,
            durable=False,
        )  # fmt: skip

        def receive(message: Message, box: list[Any] = box) -> None:
            box.append(message.payload)

        connection.Consumer(queue, no_ack=True, on_message=receive).consume()

    def live() -> bool:
        for connection in pair:
            try:
                connection.drain_events(timeout=0.05)
            except TimeoutError:
                continue
        return sql("SELECT count(*) FROM pgnotify.queues WHERE live") == [(2,)]

    wait_until(live)
    for n, connection in enumerate(pair):
        connection.Producer().publish(n, exchange="calls", delivery_mode=1)
    for n, connection in enumerate(pair):
        drain(connection, lambda n=n: got[n])  # type: ignore[misc]
        with pytest.raises(TimeoutError):
            connection.drain_events(timeout=0.05)
    assert got == [[0], [1]]


def test_kombus_own_queues_work_with_a_prefix(connect: Connect, sql: Sql) -> None:
    with SimpleQueue(connect(queue_name_prefix="one."), "box") as box:
        box.put("x")
        assert box.qsize() == 1
        assert box.get(timeout=20).payload == "x"
    assert sql("SELECT queue_name FROM pgnotify.queues") == [("one.box",)]


@pytest.mark.parametrize("exchange", ["dlx", ""])
def test_dead_letters_stay_in_their_application(connect: Connect, exchange: str) -> None:
    connection = connect(queue_name_prefix="one.")
    channel = connection.default_channel
    Queue("grave", Exchange("dlx"), "grave")(channel).declare()
    arguments = {"x-dead-letter-exchange": exchange, "x-dead-letter-routing-key": "grave"}
    channel.queue_declare("box", arguments=arguments)
    connection.Producer().publish("x", routing_key="box")
    channel.basic_get("box").reject()
    found = channel.basic_get("grave")
    assert found is not None
    assert found.headers["x-first-death-queue"] == "box"
    assert found.delivery_info["exchange"] == exchange
    assert found.delivery_info["routing_key"] == "grave"


@pytest.mark.parametrize(
    ("exchange", "routed"),
    [
        ("dlx", True),
        ("", False),
        ("dlx", False),
        ("", True),
    ],
)
def test_dead_letters_without_a_key_of_their_own_stay_there_too(
    connect: Connect, exchange: str, routed: bool
) -> None:
    connection = connect(queue_name_prefix="one.")
    channel = connection.default_channel
    # Where they go by the routing key they came with; queues are named alike.
    Queue("key", Exchange("dlx"), "key")(channel).declare()
    name = "box" if routed else "key"
    if not routed:
        Queue("grave", Exchange("dlx"), "key")(channel).declare()
    channel.queue_declare(name, arguments={"x-dead-letter-exchange": exchange})
    if routed:
        Exchange("news")(channel).declare()
        channel.queue_bind(name, "news", "key")
    connection.Producer().publish("x", exchange="news" if routed else "", routing_key="key")
    channel.basic_get(name).reject()
    expected = {("dlx", False): "grave"}.get((exchange, routed), "key")
    found = channel.basic_get(expected)
    assert found is not None
    assert found.headers["x-first-death-queue"] == name
    assert found.delivery_info["routing_key"] == "key"


def test_a_name_made_by_the_server_can_be_used(connect: Connect, sql: Sql) -> None:
    connection = connect(queue_name_prefix="one.")
    name = connection.default_channel.queue_declare("").queue
    assert name.startswith("amq.gen-")
    connection.Producer().publish("x", routing_key=name)
    assert contents(connection, name) == ["x"]
    assert sql("SELECT queue_name FROM pgnotify.queues") == [(f"one.{name}",)]
